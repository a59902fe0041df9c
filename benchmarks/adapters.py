"""Decoding with adapters of several versions at once: the cost of a token beside that of the base alone.

    python benchmarks/adapters.py [--rows 64] [--rank 16] [--steps 30] [--threads 1] [--precision float32]

Whole engine steps of a random model of SmolLM2-135M's shape with an adapter on every linear layer but the head: all
rows live, an equal part of them on each resident version, sampled at temperature 1. The engines take turns step by
step, and times are CPU time of the process, so that a busy machine disturbs all of them alike, and little. `ratio` is
the median over steps of a step's time by that of the base in the same turn, with its quartiles.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import time

import numpy as np
import torch
from precision import SMOLLM2

from slipstream.core.fields import Precision
from slipstream.core.lora_section import LoraConfig
from slipstream.generator.engine import Engine
from slipstream.generator.native import native_engine
from slipstream.generator.requests import Request
from slipstream.models.initialise import new_model
from slipstream.models.peft import with_adapters
from slipstream.models.served import FrozenBase, ServedWeights
from slipstream.models.transformer import Transformer
from slipstream.observe.hardware import describe

VERSIONS = (1, 2, 4)
VOCAB = 49152


def adapted(rank: int) -> Transformer:
    return with_adapters(new_model(SMOLLM2, vocab_size=VOCAB, seed=0), LoraConfig(rank=rank), seed=0)


def random_version(weights: ServedWeights, seed: int) -> torch.Tensor:
    values = np.random.default_rng(seed).normal(0, 0.02, weights.num_bytes // 4).astype(np.float32)
    return torch.from_numpy(values).view(torch.uint8)


def engine_of(model: Transformer, rows: int, num_steps: int, weights: ServedWeights | None, count: int) -> Engine:
    """All rows live, `rows` / `count` on each version, their prompts behind them."""
    engine = native_engine(model, num_slots=rows, max_len=num_steps + 64, seed=0, stop_token_ids=[], residents=weights)
    for version in range(count):
        if weights is not None:
            flat = random_version(weights, version)
            weights.prepare(flat)
            weights.rebind(flat)
            engine.set_version(version)
        ordinals = range(version * rows // count, (version + 1) * rows // count)
        prompt = np.arange(16, dtype=np.int32)
        engine.submit([Request(o, 0, prompt, num_steps + 32, 1.0, 0) for o in ordinals])
        engine.step()
        engine.step()
    assert engine.num_live == rows
    return engine


def engines_of(rows: int, num_steps: int, rank: int, precision: Precision) -> dict[str, Engine]:
    plain = new_model(SMOLLM2, vocab_size=VOCAB, seed=0)
    ServedWeights(plain, precision)
    engines = {"base alone": engine_of(plain, rows, num_steps, None, 1)}
    base: FrozenBase | None = None
    for count in VERSIONS:
        model = adapted(rank)
        weights = ServedWeights(model, precision, base=base, keeps_versions=True)
        base = weights.base
        engines[f"{count} version{'s' * (count > 1)}"] = engine_of(model, rows, num_steps, weights, count)
        assert len(weights.versions) == count
    return engines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--precision", default="float32")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    print(f"{describe()}, {options.threads} threads, torch {torch.__version__}, commit {commit.stdout.strip()}")
    print(f"SmolLM2-135M's shape, random, {options.precision}; {options.rows} rows, rank {options.rank}")
    engines = engines_of(options.rows, options.steps, options.rank, options.precision)
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(options.steps):
        for name, engine in engines.items():
            started_s = time.process_time()
            engine.step()
            times[name].append(time.process_time() - started_s)
    print(f"\n{'':12} {'ms/step':>8} {'us/token':>9} {'ratio':>6}  quartiles")
    for name, values in times.items():
        ratios = [value / base for value, base in zip(values, times["base alone"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        step_s = statistics.median(values)
        print(f"{name:12} {step_s * 1e3:8.1f} {step_s / options.rows * 1e6:9.0f} {middle:6.3f}  {low:.3f} {high:.3f}")


if __name__ == "__main__":
    main()
