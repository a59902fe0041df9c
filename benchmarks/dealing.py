"""Rollouts dealt to a trainer's ranks by length and by number: how long ranks wait for one another, and what it costs.

    python benchmarks/dealing.py [--ranks 2 8 64] [--per-rank 64] [--capacity 1024] [--seeds 5]

Lengths are those of `experiments/collation`: a long tail, and two kinds. Waiting is the share of all ranks' time, a
token always taking as long, that goes by until the rank with most tokens is done (`rank`), or until the longest n-th
microbatch is, where ranks meet in each (`microbatch`, as under FSDP2). Seconds are those of finding the ranks of all
rollouts, on every rank once per step; bytes are what a rank sends of a step's tokens and logprobs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from runpy import run_path

import numpy as np

from slipstream.batching import collate
from slipstream.batching.collate import Atom, first_fit
from slipstream.core.config import RunConfig
from slipstream.core.ranks import data_parallel_rank
from slipstream.core.recipes import resolve
from slipstream.core.types import RolloutHead
from slipstream.observe.hardware import describe
from slipstream.trainer.dealing import balanced_ranks

GROUP = 8
PACKING = run_path(str(Path(__file__).resolve().parents[1] / "experiments" / "collation" / "packing.py"))
KINDS = ("long tail: lognormal, median 64, sigma 1.2", "two kinds: 3/4 near 64, 1/4 at 512")
Ranks = Mapping[tuple[int, int], int]


def heads_of(lengths: list[int]) -> list[RolloutHead]:
    return [
        RolloutHead(ordinal=i // GROUP, sample=i % GROUP, reward=float(i % 2), num_tokens=n, num_sampled=n)
        for i, n in enumerate(lengths)
    ]


def waits(heads: list[RolloutHead], rank_of: Ranks, ranks: int, capacity: int) -> tuple[float, float]:
    """The share lost by ranks, and by microbatches."""
    of_rank: dict[int, list[int]] = defaultdict(list)
    for head in heads:
        of_rank[rank_of[head.ordinal, head.sample]].append(head.num_tokens)
    packed = []
    for lengths in of_rank.values():
        atoms = [Atom((index, 0), ((index, length),)) for index, length in enumerate(lengths)]
        packed.append([sum(lengths[index] for index in part) for part in first_fit(atoms, capacity)])
    total = sum(map(sum, packed))
    lockstep = sum(max(meeting) for meeting in zip_longest(*packed, fillvalue=0))
    return 1 - total / (ranks * max(map(sum, packed))), 1 - total / (ranks * lockstep)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 64])
    parser.add_argument("--per-rank", type=int, default=64)
    parser.add_argument("--capacity", type=int, default=1024, help="tokens of a microbatch")
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    print(f"{describe()}\n")
    print("| lengths | ranks | by number: rank | microbatch | by length: rank | microbatch | seconds | a rank sends |")
    print("|---|---|---|---|---|---|---|---|")
    for kind in KINDS:
        for ranks in options.ranks:
            rows = [measured(kind, ranks, seed, options) for seed in range(options.seeds)]
            *shares, seconds, sent = (statistics.mean(column) for column in zip(*rows, strict=True))
            told = " | ".join(f"{share:.1%}" for share in shares)
            print(f"| {kind.partition(':')[0]} | {ranks} | {told} | {seconds:.4f} | {sent / 1e6:.2f} MB |", flush=True)


def measured(kind: str, ranks: int, seed: int, options: argparse.Namespace) -> list[float]:
    num_groups = ranks * options.per_rank // GROUP
    config: RunConfig = resolve(
        "quickstart",
        {"groups_per_step": num_groups, "completions_per_group": GROUP, "trainer": {"minibatches": 1}},
    )
    heads = heads_of(PACKING["draw"](kind, ranks * options.per_rank, np.random.default_rng(seed)))
    preset = {(h.ordinal, h.sample): data_parallel_rank(h.ordinal, h.sample, ranks, by="samples") for h in heads}
    began_s = time.perf_counter()
    balanced = balanced_ranks(heads, config=config, step=0, batching=collate, num_ranks=ranks)
    seconds = time.perf_counter() - began_s
    moved = sum(h.num_tokens for h in heads if preset[h.ordinal, h.sample] != balanced[h.ordinal, h.sample])
    by_number = waits(heads, preset, ranks, options.capacity)
    return [*by_number, *waits(heads, balanced, ranks, options.capacity), seconds, 8.0 * moved / ranks]


if __name__ == "__main__":
    main()
