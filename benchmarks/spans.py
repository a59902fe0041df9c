"""Decoding with lengths of a heavy tail: attention over spans of like lengths, and over one span for all.

    python benchmarks/spans.py [--slots 64] [--requests 1200] [--repeats 3] [--threads 1]

The engine on a CPU, all requests queued at once: prompts of 8 tokens, completions of exactly min(484, floor(33
u^(-1/1.2))) tokens for random u, 0.64 M and 5 M parameters. Both ways in turns; tokens per second of processor time,
medians over the turns. The last two columns are how many positions steps read, over those that are stored.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch

from slipstream.core.sections import ModelConfig
from slipstream.generator import slot_runner
from slipstream.generator.arrangement import LENGTH_MULTIPLE, SlotSpan, round_up, spans, swaps
from slipstream.generator.native import native_engine
from slipstream.generator.requests import Request
from slipstream.models.initialise import new_model
from slipstream.observe.hardware import describe

WIDTHS = {"0.6 M": (128, 3), "5 M": (256, 6)}
"""Parameters -> width, layers."""
VOCAB_SIZE = 100
PROMPT_TOKENS, LONGEST = 8, 484


def one_span(lengths: np.ndarray) -> list[SlotSpan]:
    return [SlotSpan(0, len(lengths), round_up(int(lengths.max()), LENGTH_MULTIPLE))]


def only_packed(lengths: np.ndarray, num_slots: int) -> list[tuple[int, int]]:
    return swaps(np.minimum(lengths, 1), num_slots)


WAYS: dict[str, tuple[Callable[..., list[SlotSpan]], Callable[..., list[tuple[int, int]]]]] = {
    "one span": (one_span, only_packed),
    "spans": (spans, swaps),
}


def requests(count: int) -> list[Request]:
    rng = np.random.default_rng(0)
    lengths = np.minimum(LONGEST, 33 * rng.random(count) ** (-1 / 1.2)).astype(int)
    prompts = rng.integers(2, VOCAB_SIZE, (count, PROMPT_TOKENS)).astype(np.int32)
    return [Request(i, 0, prompts[i], max_new_tokens=int(length)) for i, length in enumerate(lengths)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--requests", type=int, default=1200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for name, value in describe().lines().items():
        print(f"{name}: {value}")
    print("\n| model | one span, tokens/s | spans, tokens/s | times as fast | read, one span | read, spans |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, (width, layers) in WIDTHS.items():
        config = ModelConfig(
            hidden_size=width,
            intermediate_size=3 * width,
            num_layers=layers,
            num_heads=4,
            num_kv_heads=4,
            max_positions=512,
        )
        model = new_model(config, VOCAB_SIZE, 0)
        rates: dict[str, list[float]] = {way: [] for way in WAYS}
        read: dict[str, float] = {}
        for _ in range(arguments.repeats):
            for way, (cut, order) in WAYS.items():
                counts = np.zeros(2)

                def counted(lengths: np.ndarray, cut=cut, counts=counts) -> list[SlotSpan]:  # type: ignore[no-untyped-def]
                    found = cut(lengths)
                    counts += [sum((span.stop - span.start) * span.bucket for span in found), lengths.sum()]
                    return found

                slot_runner.spans, slot_runner.swaps = counted, order  # type: ignore[attr-defined]
                engine = native_engine(
                    model, num_slots=arguments.slots, max_len=PROMPT_TOKENS + LONGEST + 1, stop_token_ids=[], seed=0
                )
                engine.submit(requests(arguments.requests))
                started_s = time.process_time()
                while not engine.is_idle:
                    engine.step()
                rates[way].append(engine.stats.generated_tokens / (time.process_time() - started_s))
                read[way] = counts[0] / counts[1]
        one, several = (median(rates[way]) for way in WAYS)
        shares = " | ".join(f"{read[way]:.2f}" for way in WAYS)
        print(f"| {name} | {one:.0f} | {several:.0f} | {several / one:.2f} | {shares} |")


if __name__ == "__main__":
    main()
