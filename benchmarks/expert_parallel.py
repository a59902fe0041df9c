"""Experts divided over ranks: bytes of a rank, time of a pass, the exchange's share of it, and the balance of tokens.

    python benchmarks/expert_parallel.py [--ranks 2] [--tokens 1024] [--repeats 5]

Each rank takes a microbatch of its own forward and backward in float32, one thread per rank, over gloo: with all
weights (one rank alone), under FSDP2, and with experts divided. Stored are weights, as many bytes as the gradient and
twice as many for the moments; gathered is the largest layer as a rank computes with it. Received are the bytes of a
pass in all collectives of gathers, sums and exchanges, as counted at their call. Seconds are the medians of `repeats`;
the share of the exchange is time in its all-to-alls, waiting for others included, of the rank where it is most. The
balance is the tokens that the busiest rank's experts get, over the mean, in the layer where that is most. The model is
random: its router is nearly balanced.
"""

from __future__ import annotations

import argparse
import multiprocessing
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.batching.collate import collate
from slipstream.core.packed import PackedMicrobatch, TrainSequence
from slipstream.core.rank_group import RankGroup
from slipstream.core.sections import ModelConfig
from slipstream.models import expert_parallel
from slipstream.models.config import new_config
from slipstream.models.expert_parallel import ExpertRanks
from slipstream.models.experts import Experts, expert_loads
from slipstream.models.sharded import Division, new_sharded, stored_parameters
from slipstream.observe.hardware import describe
from slipstream.trainer.measure import microbatch_logprobs

VOCAB_SIZE = 1024
SHAPE: dict[str, Any] = {
    "family": "qwen3_moe",
    "hidden_size": 256,
    "num_layers": 4,
    "num_heads": 8,
    "num_kv_heads": 2,
    "num_experts": 32,
    "experts_per_token": 4,
    "expert_width": 192,
}
COLLECTIVES = ("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single")


@dataclass
class Found:
    """What one rank found in a pass."""

    stored: int = 0
    gathered: int = 0
    received: int = 0
    seconds: list[float] = field(default_factory=list)
    exchanging: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # by layer, those of this rank's experts


class Counted:
    """Counts the bytes that collectives bring this rank, and times the exchange."""

    def __init__(self) -> None:
        self.received, self.exchanging_s = 0, 0.0
        exchanged = expert_parallel.exchanged

        def timed(rows: Tensor, sent: Sequence[int], received: Sequence[int], ranks: RankGroup) -> Tensor:
            started_s = time.perf_counter()
            came = exchanged(rows, sent, received, ranks)
            self.exchanging_s += time.perf_counter() - started_s
            self.received += (sum(received) - received[ranks.rank]) * came[:1].nbytes
            return came

        expert_parallel.exchanged = timed
        for name in COLLECTIVES:
            if hasattr(dist, name):
                setattr(dist, name, self._counting(getattr(dist, name)))

    def _counting(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **options: Any) -> Any:
            first, second = (one.nbytes for one in (*args, *options.values()) if isinstance(one, Tensor))
            self.received += abs(first - second)
            return collective(*args, **options)

        return counting


def division_of(kind: str, ranks: RankGroup) -> Division:
    if kind == "one rank":
        return Division()
    experts = ExpertRanks(ranks, RankGroup.alone()) if kind == "experts divided" else ExpertRanks()
    return Division(data_parallel=ranks, experts=experts)


def own_microbatch(rank: int, num_tokens: int) -> PackedMicrobatch:
    rng = np.random.default_rng(rank)
    lengths = [num_tokens // 8] * 8
    sequences = []
    for sample, length in enumerate(lengths):
        tokens = rng.integers(0, VOCAB_SIZE, length + 1).astype(np.int32)
        sequences.append(TrainSequence.read_only((rank, sample), tokens, np.arange(length + 1) >= 16))
    [microbatch] = collate(sequences, 2 * num_tokens)
    return microbatch


def measure(pipe: Connection, store: str, kind: str, rank: int, world: int, num_tokens: int, repeats: int) -> None:
    """Send what this rank found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    counted, found = Counted(), Found()
    division = division_of(kind, RankGroup.over(dist.group.WORLD) if world > 1 else RankGroup.alone())
    shape = new_config(ModelConfig(**SHAPE, max_positions=num_tokens), VOCAB_SIZE, eos_token_id=0, pad_token_id=0)
    model = new_sharded(shape, 0, division) if world > 1 else new_sharded(shape, 0, Division())
    parameters = stored_parameters(model, division)
    found.stored = sum(4 * one.nbytes for one in parameters.stored())
    layer = model.layers[0]
    found.gathered = sum(4 * parameter.numel() for parameter in layer.parameters())  # a DTensor's number is the whole's
    microbatch = own_microbatch(rank, num_tokens)
    for _ in range(1 + repeats):
        division.data_parallel.gather(b"")
        parameters.zero_grad()
        counted.received, counted.exchanging_s, started_s = 0, 0.0, time.perf_counter()
        logprobs, _ = microbatch_logprobs(model, microbatch, temperature=1.0)
        torch.autograd.backward(-logprobs.mean())
        found.seconds.append(time.perf_counter() - started_s)
        found.exchanging.append(counted.exchanging_s)
    found.received = counted.received
    own = next(module.own for module in model.modules() if isinstance(module, Experts))
    loads = division.data_parallel.sum(expert_loads(model, microbatch.num_tokens))
    found.tokens += loads[:, own.start : own.stop].sum(1).tolist()
    pipe.send(found)
    dist.destroy_process_group()


def measured(kind: str, world: int, num_tokens: int, repeats: int) -> list[Found]:
    context = multiprocessing.get_context("spawn")
    found: list[Found] = []
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(world):
            mine, theirs = context.Pipe()
            args = (theirs, f"{folder}/store", kind, rank, world, num_tokens, repeats)
            process = context.Process(target=measure, args=args, daemon=True)
            process.start()
            theirs.close()
            started.append((process, mine))
        for process, pipe in started:
            found.append(pipe.recv())
            process.join()
    return found


def row(kind: str, world: int, by_rank: list[Found]) -> str:
    seconds = max(median(one.seconds[1:]) for one in by_rank)
    share = max(median(e / s for e, s in zip(one.exchanging[1:], one.seconds[1:], strict=True)) for one in by_rank)
    tokens = np.array([one.tokens for one in by_rank])
    balance = f"{(tokens.max(0) / tokens.mean(0)).max():.2f}" if kind == "experts divided" else ""
    sizes = [max(getattr(one, name) for one in by_rank) / 1e6 for name in ("stored", "gathered", "received")]
    columns = [kind, str(world), *(f"{size:.1f}" for size in sizes), f"{seconds:.2f}", f"{share:.0%}", balance]
    return f"| {' | '.join(columns)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    print(f"commit: {commit.stdout.strip()}")
    for name, value in describe().lines().items():
        print(f"{name}: {value}")
    print(f"\n{arguments.tokens} tokens a rank; {', '.join(f'{name} {size}' for name, size in SHAPE.items())}\n")
    print("| | ranks | stored, MB | layer gathered, MB | received in a pass, MB | s | exchange | busiest rank |")
    print("|---|---|---|---|---|---|---|---|")
    print(row("one rank", 1, measured("one rank", 1, arguments.tokens, arguments.repeats)))
    for world in arguments.ranks:
        for kind in ("FSDP2", "experts divided"):
            print(row(kind, world, measured(kind, world, arguments.tokens, arguments.repeats)))


if __name__ == "__main__":
    main()
