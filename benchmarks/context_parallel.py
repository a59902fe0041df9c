"""Ranks that read a microbatch together: peak memory and seconds of one long sequence, and the balance of attention.

    python benchmarks/context_parallel.py [--tokens 4096] [--ranks 1 2] [--repeats 3]

One sequence, its first eighth a prompt, goes forward and backward in float32, one thread per rank, over gloo. Peak
memory is the growth of a rank's resident set in one microbatch, over model and gradients, which a short one has
allocated before; seconds are the medians of `repeats`, on the clock and of the rank's processor. Balance is by
arithmetic: what the rank with most has, over the mean, of query-key pairs and of targets, where rows are dealt in
contiguous shares, and as the trainer deals them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import subprocess
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.distributed as dist

from slipstream.batching.collate import collate
from slipstream.core.packed import PackedMicrobatch, TrainSequence
from slipstream.core.rank_group import RankGroup
from slipstream.core.sections import ModelConfig
from slipstream.models.config import new_config
from slipstream.models.context_parallel import Structure, dealt_rows
from slipstream.models.packed import ROW_MULTIPLE, filled_rows, rounded_up
from slipstream.models.sharded import Division, new_sharded, stored_parameters
from slipstream.observe.hardware import describe
from slipstream.trainer.measure import microbatch_logprobs

VOCAB_SIZE = 1024
SHAPE = {"hidden_size": 256, "intermediate_size": 768, "num_layers": 4, "num_heads": 8, "num_kv_heads": 2}


def sequence(key: tuple[int, int], num_prompt: int, num_sampled: int) -> TrainSequence:
    rng = np.random.default_rng(key[0])
    tokens = np.concatenate([rng.integers(0, VOCAB_SIZE, num_prompt), np.arange(num_sampled) % VOCAB_SIZE])
    return TrainSequence.read_only(key, tokens, np.arange(len(tokens)) >= num_prompt)


def one_long(num_tokens: int) -> PackedMicrobatch:
    [microbatch] = collate([sequence((0, 0), num_tokens // 8, num_tokens - num_tokens // 8 + 1)], num_tokens)
    return microbatch


def of_status(name: str) -> int:
    """Bytes that the kernel counts under `name` of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def measure(
    pipe: Connection, store: str, rank: int, world: int, num_tokens: int, recompute: bool, repeats: int
) -> None:
    """Send peak bytes, and seconds on the clock and of the processor."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    ranks = RankGroup.over(dist.group.WORLD) if world > 1 else RankGroup.alone()
    division = Division(data_parallel=ranks, context_parallel=ranks, recomputes=recompute)
    shape = ModelConfig(**SHAPE, max_positions=num_tokens + 1)
    model = new_sharded(new_config(shape, VOCAB_SIZE, eos_token_id=0, pad_token_id=0), 0, division)
    parameters = stored_parameters(model, division)
    parameters.zero_grad()
    long, wall, processor, peaks = one_long(num_tokens), [], [], []
    for microbatch in [one_long(64), *[long] * repeats]:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak from here on
        ranks.gather(b"")
        before, started_s, busy_s = of_status("VmRSS:"), time.perf_counter(), time.process_time()
        logprobs, _ = microbatch_logprobs(model, microbatch, temperature=1.0)
        (-logprobs.mean()).backward()
        wall.append(time.perf_counter() - started_s)
        processor.append(time.process_time() - busy_s)
        peaks.append(of_status("VmHWM:") - before)
    pipe.send((peaks[1], median(wall[1:]), median(processor[1:])))  # what later ones reuse was allocated in the first
    dist.destroy_process_group()


def measured(world: int, num_tokens: int, recompute: bool, repeats: int) -> list[tuple[int, float, float]]:
    context, found = multiprocessing.get_context("spawn"), []
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(world):
            mine, theirs = context.Pipe()
            args = (theirs, f"{folder}/store", rank, world, num_tokens, recompute, repeats)
            process = context.Process(target=measure, args=args, daemon=True)
            process.start()
            theirs.close()
            started.append((process, mine))
        for process, pipe in started:
            found.append(pipe.recv())
            process.join()
    return found


def microbatches() -> dict[str, PackedMicrobatch]:
    rng = np.random.default_rng(0)
    long_tail = np.clip(rng.lognormal(np.log(600), 1.2, 24), 16, 16384).astype(int).tolist()
    drawn = {
        "one sequence of 32,768": [sequence((0, 0), 4096, 28673)],
        "3 sequences of 8,192": [sequence((i, 0), 1024, 7169) for i in range(3)],
        "8 completions of 2,048, one prompt of 1,024": [sequence((0, i), 1024, 2048) for i in range(8)],
        "24 completions, long tail": [sequence((i, 0), 256, n) for i, n in enumerate(long_tail)],
    }
    return {name: collate(sequences, 1 << 20)[0] for name, sequences in drawn.items()}


def imbalance(dealt: np.ndarray, amounts: np.ndarray) -> str:
    by_rank = amounts[dealt].sum(1)
    return f"{by_rank.max() / by_rank.mean():.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    print(f"commit: {commit.stdout.strip()}")
    for name, value in describe().lines().items():
        print(f"{name}: {value}")
    print(f"\n{arguments.tokens} tokens; {', '.join(f'{name} {size}' for name, size in SHAPE.items())}\n")
    print("| recompute | ranks | peak of a rank, MB | seconds | processor seconds of a rank |\n|---|---|---|---|---|")
    for recompute in (False, True):
        for world in arguments.ranks:
            peaks, wall, processor = zip(*measured(world, arguments.tokens, recompute, arguments.repeats), strict=True)
            print(f"| {recompute} | {world} | {max(peaks) / 1e6:.0f} | {max(wall):.2f} | {max(processor):.2f} |")
    print("\n| microbatch | ranks | pairs, contiguous | pairs, as dealt | targets, contiguous | targets, as dealt |")
    print("|---|---|---|---|---|---|")
    for name, microbatch in microbatches().items():
        for world in (2, 4, 8):
            tokens, _, lengths, rows = filled_rows(microbatch, rounded_up(microbatch.num_tokens, ROW_MULTIPLE * world))
            pairs, targets = Structure(lengths, rows).keys_seen, np.zeros(len(tokens))
            np.add.at(targets, microbatch.target_index, 1)
            ways = np.arange(len(tokens)).reshape(world, -1), dealt_rows(pairs, world)
            shares = [imbalance(dealt, amounts) for amounts in (pairs, targets) for dealt in ways]
            print(f"| {name} | {world} | {' | '.join(shares)} |")


if __name__ == "__main__":
    main()
