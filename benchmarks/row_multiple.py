"""Microbatches whose number of rows never repeats: MKL, oneDNN, and oneDNN with rows filled up to a multiple.

    python benchmarks/row_multiple.py [--microbatches 150]

The quickstart's model, forward and backward, one thread, in turns; medians in milliseconds of processor time. oneDNN
compiles a kernel for every number of rows it meets, which is what `models/packed.py` fills them up for.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import numpy as np
import torch

from slipstream.batching import collate as batching
from slipstream.core.packed import TrainSequence
from slipstream.core.sections import ModelConfig
from slipstream.models import linear, packed
from slipstream.models.initialise import new_model
from slipstream.observe.hardware import describe
from slipstream.trainer.measure import microbatch_logprobs

QUICKSTART = ModelConfig(hidden_size=128, intermediate_size=384, num_layers=3, num_heads=4, num_kv_heads=4)
VOCAB_SIZE = 100
WAYS = {"MKL": 1, "oneDNN": 1, "oneDNN, multiples of 16": 16, "oneDNN, multiples of 64": 64}


def sequences(rng: np.random.Generator, *, num_groups: int = 16, num_samples: int = 8) -> list[TrainSequence]:
    """Groups like the quickstart's: prompts of 4 to 6 tokens, completions of 3 to 11."""
    found = []
    for ordinal in range(num_groups):
        prompt = rng.integers(0, VOCAB_SIZE, rng.integers(4, 7))
        for sample in range(num_samples):
            tokens = np.concatenate([prompt, rng.integers(0, VOCAB_SIZE, rng.integers(3, 12))]).astype(np.int32)
            zeros = np.zeros(len(tokens), dtype=np.float32)
            mask = np.arange(len(tokens)) >= len(prompt)
            found.append(TrainSequence((ordinal, sample), tokens, mask, zeros, zeros, zeros.astype(np.int32)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, default=150)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name, value in describe().lines().items():
        print(f"{name}: {value}")
    model = new_model(QUICKSTART, VOCAB_SIZE, 0)
    rng = np.random.default_rng(0)
    onednn = linear._onednn
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    rows = []
    for _ in range(arguments.microbatches):
        (microbatch,) = batching.collate(sequences(rng), 1 << 20)
        rows.append(microbatch.num_tokens)
        for way, multiple in WAYS.items():
            linear._onednn = None if way == "MKL" else onednn
            packed.ROW_MULTIPLE = multiple
            started_s = time.process_time()
            logprobs, _ = microbatch_logprobs(model, microbatch, temperature=1.0)
            (-logprobs.mean()).backward()
            times[way].append(1e3 * (time.process_time() - started_s))
    warm = arguments.microbatches // 5
    print(f"\n{int(median(rows))} rows, median of {arguments.microbatches - warm} microbatches\n")
    print("| products | ms |\n|---|---|")
    for way in WAYS:
        print(f"| {way} | {median(times[way][warm:]):.1f} |")


if __name__ == "__main__":
    main()
