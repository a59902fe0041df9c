"""Decoding at every precision of the weights: tokens per second, bytes of a version, time to publish, stage and commit.

    python benchmarks/precision.py [--model models/smollm2-135m-instruct] [--rows 8 16 64] [--threads 2]

Whole engine steps: completions of equal length in all slots, sampled at temperature 1. The variants take turns step by
step, and the median step counts, so that a busy machine slows all of them alike. `plain float32` is the model as
the trainer has it, without products packed per version. Without the checkpoint a random model of SmolLM2-135M's shape
is measured; the gap (|logprob difference| on text against float32) then says little.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import time
from pathlib import Path

import numpy as np
import torch

from slipstream.algorithms.logprobs import probe_logprobs
from slipstream.core.fields import Precision
from slipstream.core.sections import ModelConfig
from slipstream.generator.engine import Engine
from slipstream.generator.native import native_engine
from slipstream.generator.requests import Request
from slipstream.models.hf import load_model
from slipstream.models.initialise import new_model
from slipstream.models.quantized import FORMATS, Packer, WeightLayout
from slipstream.models.served import ServedWeights
from slipstream.models.tokenizer import load_tokenizer
from slipstream.models.transformer import Transformer
from slipstream.observe.hardware import describe
from slipstream.weight_sync.copying import HOST, num_blocks

SMOLLM2 = ModelConfig(
    hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3, max_positions=2048
)
TEXT = (
    "The quick brown fox jumps over the lazy dog. Paris is the capital of France, and the answer to 12 + 30 is 42. "
    "She went to the market to buy apples, bread and a little cheese for the evening."
)


def policy(path: Path) -> Transformer:
    return load_model(path) if path.is_dir() else new_model(SMOLLM2, vocab_size=49152, seed=0)


def probe_text(path: Path) -> np.ndarray:
    if path.is_dir():
        return np.array(load_tokenizer(path)(TEXT)["input_ids"], np.int32)
    return np.random.default_rng(0).integers(0, 49152, 64).astype(np.int32)


def started_engine(model: Transformer, rows: int, num_steps: int) -> Engine:
    """All rows live, their prompt behind them, for `num_steps` steps that decode only."""
    engine = native_engine(model, num_slots=rows, max_len=num_steps + 32, seed=0, stop_token_ids=[])
    prompt = np.arange(16, dtype=np.int32)
    engine.submit([Request(0, i, prompt, num_steps + 8, 1.0, 0) for i in range(rows)])
    for _ in range(4):
        engine.step()
    return engine


def step_times(models: dict[str, Transformer], rows: int, num_steps: int) -> dict[str, float]:
    """Median seconds of a decode step with `rows` rows; the models take turns, step by step."""
    engines = {name: started_engine(model, rows, num_steps) for name, model in models.items()}
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(num_steps):
        for name, engine in engines.items():
            started_s = time.perf_counter()
            engine.step()
            times[name].append(time.perf_counter() - started_s)
    return {name: statistics.median(values) for name, values in times.items()}


def version_times(path: Path, precision: Precision) -> dict[str, float]:
    """Milliseconds: packing at the trainer, copying to the shadow, preparing it, exchanging it."""
    live = policy(path)
    layout = WeightLayout(live, precision)
    slot, shadow = torch.zeros(layout.num_bytes, dtype=torch.uint8), torch.zeros(layout.num_bytes, dtype=torch.uint8)
    checksums = np.zeros(num_blocks(layout.num_bytes), np.uint64)
    packer = Packer(layout, dict(live.named_parameters()))
    served = ServedWeights(policy(path), precision)
    times: dict[str, list[float]] = {"pack": [], "copy": [], "prepare": [], "commit": []}
    for _ in range(4):
        for name, work in (
            ("pack", lambda: HOST.pack(HOST.bytes_of(slot), packer, checksums)),
            ("copy", lambda shadow=shadow: HOST.copy(HOST.bytes_of(shadow), HOST.bytes_of(slot), checksums)),
            ("prepare", lambda shadow=shadow: served.prepare(shadow)),
            ("commit", lambda shadow=shadow: served.rebind(shadow)),
        ):
            started_s = time.perf_counter()
            work()
            times[name].append((time.perf_counter() - started_s) * 1e3)
        shadow = torch.empty_like(shadow)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m-instruct"))
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16, 64])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    model = options.model if options.model.is_dir() else "a random model"
    print(
        f"{describe()}, {options.threads} threads, torch {torch.__version__}, commit {commit.stdout.strip()}, {model}"
    )

    plain, text = policy(options.model), probe_text(options.model)
    reference = probe_logprobs(plain, text)
    models: dict[str, Transformer] = {"plain float32": plain}
    print(f"{'precision':15} {'MB':>6} {'gap mean':>9} {'max':>6}   ms: pack   copy prepare commit")
    for precision in FORMATS:
        models[precision] = model = policy(options.model)
        num_bytes = ServedWeights(model, precision).num_bytes
        gap = np.abs(probe_logprobs(model, text) - reference)
        ms = version_times(options.model, precision)
        print(
            f"{precision:15} {num_bytes / 1e6:6.0f} {gap.mean():9.2g} {gap.max():6.2g}       "
            f"{ms['pack']:6.0f} {ms['copy']:6.0f} {ms['prepare']:7.0f} {ms['commit']:6.2f}",
            flush=True,
        )
    print(f"\n{'tokens/s':15}" + "".join(f"{f'{rows} rows':>16}" for rows in options.rows))
    by_rows = {rows: step_times(models, rows, options.steps) for rows in options.rows}
    for name in models:
        cells = [
            f"{rows / by_rows[rows][name]:9.0f} ({by_rows[rows]['plain float32'] / by_rows[rows][name]:.2f})"
            for rows in options.rows
        ]
        print(f"{name:15}" + "".join(cells))


if __name__ == "__main__":
    main()
