"""Rows that sharing saves: all of a step's contexts, the rows that are read of them, and how long collation takes.

    python benchmarks/prefix_trees.py [--seeds 3]

Tokens are random, so that nothing begins alike but what is made to. Saved rows are those of all contexts, each read
alone, less those of the microbatches; `by prompts` is what sharing whole prompts alone would save in one microbatch
each group. Seconds are those of `collate`, on one core; medians over the seeds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import numpy as np

from slipstream.batching.collate import collate
from slipstream.core.packed import TrainSequence
from slipstream.observe.hardware import describe

VOCAB_SIZE = 150_000
CAPACITY = 32_768
Turns = Sequence[tuple[bool, np.ndarray]]  # (is sampled, tokens)


def sequence(key: tuple[int, int], *branches: Turns) -> TrainSequence:
    parts = [part for branch in branches for part in branch]
    tokens = np.concatenate([tokens for _, tokens in parts]).astype(np.int32)
    mask = np.concatenate([np.full(len(tokens), is_sampled) for is_sampled, tokens in parts])
    ends = np.cumsum([sum(len(tokens) for _, tokens in branch) for branch in branches]).tolist()
    return TrainSequence.read_only(key, tokens, mask, starts=(0, *ends[:-1]))


def drawn(rng: np.random.Generator, mean: int) -> np.ndarray:
    """Return tokens, their number between half and one and a half times `mean`."""
    return rng.integers(0, VOCAB_SIZE, max(1, int(mean * rng.uniform(0.5, 1.5))))


def plain(rng: np.random.Generator, groups: int, samples: int, prompt: int, own: int) -> list[TrainSequence]:
    """Completions of one turn."""
    found = []
    for ordinal in range(groups):
        given = (False, drawn(rng, prompt))
        found += [sequence((ordinal, sample), [given, (True, drawn(rng, own))]) for sample in range(samples)]
    return found


def of_turns(
    rng: np.random.Generator, groups: int, samples: int, *, shared: int = 2, turn: int = 400
) -> list[TrainSequence]:
    """Episodes of four turns; all samples of a group have the prompt and their first `shared` turns in common."""
    found = []
    for ordinal in range(groups):
        common = [(False, drawn(rng, 500))]
        for _ in range(shared):
            common += [(True, drawn(rng, turn)), (False, drawn(rng, turn // 2))]
        for sample in range(samples):
            own = [
                part for _ in range(4 - shared) for part in ((True, drawn(rng, turn)), (False, drawn(rng, turn // 2)))
            ]
            found.append(sequence((ordinal, sample), [*common, *own]))
    return found


def forked(rng: np.random.Generator, groups: int, samples: int, *, turn: int = 400) -> list[TrainSequence]:
    """Episodes of three branches: the second goes on behind the first turn, the third behind a summary.

    Half of the samples have their first turn in common, as a tree of searches does.
    """
    found = []
    for ordinal in range(groups):
        given, same = (False, drawn(rng, 500)), (True, drawn(rng, turn))
        summary = (False, drawn(rng, 300))
        for sample in range(samples):
            first = same if sample % 2 == 0 else (True, drawn(rng, turn))
            trunk = [given, first, (False, drawn(rng, turn // 2)), (True, drawn(rng, turn))]
            again = [(False, np.concatenate([given[1], first[1], drawn(rng, turn // 2)])), (True, drawn(rng, turn))]
            found.append(sequence((ordinal, sample), trunk, again, [summary, (True, drawn(rng, turn))]))
    return found


CASES: Mapping[str, Callable[[np.random.Generator], list[TrainSequence]]] = {
    "64 groups of 8, prompts of 500, completions of 800": lambda rng: plain(rng, 64, 8, 500, 800),
    "1,024 groups of 8, prompts of 100, completions of 200": lambda rng: plain(rng, 1024, 8, 100, 200),
    "1 group of 64, prompt of 2,000, completions of 65,000": lambda rng: plain(rng, 1, 64, 2000, 65_000),
    "32 groups of 8 episodes, 4 turns, the first 2 shared": lambda rng: of_turns(rng, 32, 8),
    "32 groups of 8 episodes, 4 turns, the first 3 shared": lambda rng: of_turns(rng, 32, 8, shared=3),
    "4 groups of 64 episodes, 4 turns of 8,000, 2 shared": lambda rng: of_turns(rng, 4, 64, turn=8000),
    "32 groups of 8 episodes, 3 branches": lambda rng: forked(rng, 32, 8),
}


def by_prompts(sequences: Sequence[TrainSequence]) -> int:
    """Return the rows that whole prompts save where a group's contexts are read together."""
    saved, known = 0, set()
    for one in sequences:
        prompt = (one.key[0], one.prompt.tobytes())
        saved += len(one.prompt) if prompt in known else 0
        known.add(prompt)
    return saved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    for name, value in describe().lines().items():
        print(f"{name}: {value}")
    print(f"\nmicrobatches of {CAPACITY:,} rows, or of four times the longest sequence; {options.seeds} seeds\n")
    print("| a step | rows, each context alone | read | saved | by prompts | microbatches | seconds |")
    print("|---|---|---|---|---|---|---|")
    for name, make in CASES.items():
        alone, read, prompts, count, seconds = [], [], [], [], []
        for seed in range(options.seeds):
            sequences = make(np.random.default_rng(seed))
            capacity = max(CAPACITY, 4 * max(one.num_inputs for one in sequences))
            began_s = time.perf_counter()
            packed = collate(sequences, capacity)
            seconds.append(time.perf_counter() - began_s)
            alone.append(sum(sum(one.lengths) for one in packed))
            read.append(sum(one.num_tokens for one in packed))
            prompts.append(by_prompts(sequences))
            count.append(len(packed))
        total = sum(alone)
        print(
            f"| {name} | {median(alone):,} | {median(read):,} | {1 - sum(read) / total:.1%} | "
            f"{sum(prompts) / total:.1%} | {median(count)} | {median(seconds):.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
