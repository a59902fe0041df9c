"""Seconds per training step of TRL's `GRPOTrainer` on this machine's CPU, for one case of `end_to_end.py`.

Runs in an environment of its own (`make .venv-trl/installed`), where Slipstream is not installed:

    .venv-trl/bin/python benchmarks/trl_baseline.py --model DIR --prompts FILE --max-new-tokens 16 --out FILE

A step's time runs from the end of the previous step to its own end; generation is timed around the trainer's own
generation method. The first steps are dropped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from reward import vowel_share
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

PACKAGES = ("trl", "transformers", "torch", "accelerate")


class StepClock(TrainerCallback):
    """Notes when each step ended."""

    def __init__(self) -> None:
        self.ended_s: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ended_s.append(time.perf_counter())


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer that notes seconds and completion tokens of each generation."""

    def __init__(self, **arguments: Any) -> None:
        self.generation_s: list[float] = []
        self.num_tokens: list[int] = []
        super().__init__(**arguments)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        started_s = time.perf_counter()
        output = super()._generate_single_turn(*args, **kwargs)
        self.generation_s.append(time.perf_counter() - started_s)
        self.num_tokens.append(sum(map(len, output[0])))
        return output


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train a few steps; medians in seconds and tokens, and the single steps behind them."""
    rows = [json.loads(line) for line in arguments.prompts.read_text(encoding="utf-8").splitlines()]
    clock = StepClock()
    with tempfile.TemporaryDirectory() as scratch:
        config = GRPOConfig(
            output_dir=scratch,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
            max_steps=arguments.warm_up + arguments.steps,
            per_device_train_batch_size=arguments.completions,
            num_generations=arguments.completions_per_prompt,
            max_completion_length=arguments.max_new_tokens,
            generation_kwargs={"min_new_tokens": arguments.min_new_tokens} if arguments.min_new_tokens else None,
            temperature=1.0,
            beta=0.0,
            loss_type="dapo",
            learning_rate=arguments.lr,
            lr_scheduler_type="constant",
            seed=arguments.seed,
        )
        trainer = TimedTrainer(
            model=str(arguments.model),
            reward_funcs=vowel_share,
            args=config,
            train_dataset=Dataset.from_list(rows),
            callbacks=[clock],
        )
        trainer.train()
    step_s = [after - before for before, after in zip(clock.ended_s, clock.ended_s[1:], strict=False)]
    measured = slice(-arguments.steps, None)
    return {
        "step_s": statistics.median(step_s[measured]),
        "generation_s": statistics.median(trainer.generation_s[measured]),
        "tokens": statistics.median(trainer.num_tokens[measured]),
        "num_threads": torch.get_num_threads(),
        "steps": [
            {"step_s": step, "generation_s": generation, "tokens": tokens}
            for step, generation, tokens in zip(
                step_s[measured], trainer.generation_s[measured], trainer.num_tokens[measured], strict=True
            )
        ],
        "versions": {package: version(package) for package in PACKAGES},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face checkpoint with tokenizer")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with a column `prompt`")
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--max-new-tokens", type=int, required=True)
    parser.add_argument("--min-new-tokens", type=int, default=0, help="forbid EOS before so many tokens")
    parser.add_argument("--completions", type=int, default=64, help="per step")
    parser.add_argument("--completions-per-prompt", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--steps", type=int, default=10, help="measured steps")
    parser.add_argument("--warm-up", type=int, default=2, help="steps dropped before; at least 1")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.out.write_text(json.dumps(measure(arguments), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
