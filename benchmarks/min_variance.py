"""Cost of `loss.baseline = "min_variance"`: the trainer's step with it over the step without, by size of completions.

    python benchmarks/min_variance.py [--path FOLDER] [--groups 8] [--samples 8] [--prompt 16] [--repeats 5]

Both have the same model (the quickstart's, or a checkpoint's), rollouts and loss (AIPO of whole completions), on one
thread; they take turns, and the medians of each are printed with their quotient. Without it a microbatch has up to
`trainer.microbatch_tokens` rows, prompts once; with it a completion has one of its own. Seconds are of CPU time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from train_step import groups_of

from slipstream.batching import collate
from slipstream.core.recipes import resolve
from slipstream.models.build import build_policy
from slipstream.models.flat import FlatParameters
from slipstream.observe.hardware import describe
from slipstream.trainer.optim import AdamW
from slipstream.trainer.step import train_on_batch

BASELINES = ("mean", "min_variance")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", help="folder of a checkpoint")
    for name, value in {"groups": 8, "samples": 8, "prompt": 16, "repeats": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--completions", type=int, nargs="+", default=[8, 16, 48])
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(describe())
    for completion in given.completions:
        given.completion = completion
        tables: dict[str, Any] = {
            "prompts": {"max_prompt_tokens": given.prompt},
            "generator": {"max_new_tokens": completion},
            "trainer": {"minibatches": 1},
        }
        if given.path is not None:
            tables |= {"model": {"path": given.path}, "warm_start": {"steps": 0}}
        loss = {"name": "aipo", "params": {"level": "sequence", "max_ratio": 8.0}}
        seconds: dict[str, list[float]] = {name: [] for name in BASELINES}
        configs = {name: resolve("quickstart", {**tables, "loss": {**loss, "baseline": name}}) for name in BASELINES}
        model, _ = build_policy(configs["mean"].model, seed=0)
        flat = FlatParameters(model)
        optimizer = AdamW(flat, configs["mean"].trainer.optimizer, total_updates=10_000)
        groups = groups_of(given, model.config.vocab_size)
        for name in BASELINES * (given.repeats + 1):
            started_s = time.process_time()
            train_on_batch(model, optimizer, groups, config=configs[name], step=0, batching=collate)
            seconds[name].append(time.process_time() - started_s)
        mean, least = (statistics.median(seconds[name][1:]) for name in BASELINES)
        print(
            f"{flat.num_params / 1e6:.2f} M parameters, {given.groups} x {given.samples} completions of "
            f"{completion} tokens: {mean:.3f} s, with min_variance {least:.3f} s, x {least / mean:.2f}"
        )


if __name__ == "__main__":
    main()
