"""TRL's `GRPOTrainer` or `RLOOTrainer` on this machine's CPU: seconds per training step, rewards, and the policy.

Runs in an environment of its own (`make .venv-trl/installed`), where Slipstream is not installed:

    .venv-trl/bin/python benchmarks/trl_baseline.py --model DIR --prompts FILE --max-new-tokens 16 --out FILE

A step's time runs from the end of the previous step to its own end; generation is timed around the trainer's own
generation method, tools included. The first steps are dropped from `steps`; `curve` has all of them, seconds since
training began. `end_to_end.py`, `peers.py` and `turns.py` call it.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from late_environment import Caller
from reward import exact, last_number, nothing, vowel_share
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

PACKAGES = ("trl", "transformers", "torch", "accelerate")
REWARDS = {function.__name__: function for function in (vowel_share, exact, last_number, nothing)}
ENVIRONMENTS = {"caller": Caller}
TRAINERS = {"grpo": (GRPOTrainer, GRPOConfig, {"loss_type": "dapo"}), "rloo": (RLOOTrainer, RLOOConfig, {})}


class StepClock(TrainerCallback):
    """Notes when training began and when each step ended."""

    def __init__(self) -> None:
        self.began_s = 0.0
        self.ended_s: list[float] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.began_s = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ended_s.append(time.perf_counter())


class NotedReward:
    """A reward function that notes the mean reward and the completion tokens of each batch."""

    def __init__(self, function: Any) -> None:
        self.__name__ = function.__name__
        self.function = function
        self.means: list[float] = []
        self.num_tokens: list[int] = []

    def __call__(self, completion_ids: list[list[int]], **columns: Any) -> list[float]:
        rewards = self.function(completion_ids=completion_ids, **columns)
        self.means.append(statistics.fmean(rewards))
        self.num_tokens.append(sum(map(len, completion_ids)))
        return rewards


def timed(trainer_class: Any) -> Any:
    """The trainer, noting the seconds of each generation."""

    class Timed(trainer_class):
        def __init__(self, **arguments: Any) -> None:
            self.generation_s: list[float] = []
            super().__init__(**arguments)

        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            started_s = time.perf_counter()
            output = super()._generate(*args, **kwargs)
            self.generation_s.append(time.perf_counter() - started_s)
            return output

    return Timed


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train a few steps; medians in seconds and tokens, and the single steps behind them."""
    rows = [json.loads(line) for line in arguments.prompts.read_text(encoding="utf-8").splitlines()]
    clock, reward = StepClock(), NotedReward(REWARDS[arguments.reward])
    trainer_class, config_class, of_trainer = TRAINERS[arguments.trainer]
    with tempfile.TemporaryDirectory() as scratch:
        config = config_class(
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
            learning_rate=arguments.lr,
            lr_scheduler_type="constant",
            seed=arguments.seed,
            **of_trainer,
            **({"max_tool_calling_iterations": arguments.turns - 1} if arguments.environment else {}),
        )
        trainer = timed(trainer_class)(
            model=str(arguments.model),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list(rows),
            callbacks=[clock],
            **({"environment_factory": ENVIRONMENTS[arguments.environment]} if arguments.environment else {}),
        )
        trainer.train()
        if arguments.save is not None:
            trainer.save_model(str(arguments.save))
    step_s = [after - before for before, after in zip(clock.ended_s, clock.ended_s[1:], strict=False)]
    measured = slice(-arguments.steps, None)
    return {
        "step_s": statistics.median(step_s[measured]),
        "generation_s": statistics.median(trainer.generation_s[measured]),
        "tokens": statistics.median(reward.num_tokens[measured]),
        "num_threads": torch.get_num_threads(),
        "steps": [
            {"step_s": step, "generation_s": generation, "tokens": tokens}
            for step, generation, tokens in zip(
                step_s[measured], trainer.generation_s[measured], reward.num_tokens[measured], strict=True
            )
        ],
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "curve": {
            "ended_s": [ended_s - clock.began_s for ended_s in clock.ended_s],
            "rewards": reward.means,
            "tokens": reward.num_tokens,
        },
        "versions": {package: version(package) for package in PACKAGES},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face checkpoint with tokenizer")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with a column `prompt`")
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--save", type=Path, help="where the trained policy goes")
    parser.add_argument("--trainer", choices=TRAINERS, default="grpo")
    parser.add_argument("--reward", choices=REWARDS, default="vowel_share")
    parser.add_argument("--environment", choices=ENVIRONMENTS, help="of `late_environment.py`, for GRPO")
    parser.add_argument("--turns", type=int, default=1, help="with an environment: turns of an episode")
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
