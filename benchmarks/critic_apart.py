"""Seconds of a training step with the critic inside the trainer and in an executor of its own: one command, same steps.

    python benchmarks/critic_apart.py [--steps 12] [--hidden 192] [--layers 4] [--rounds 3]

PPO without staleness on the quickstart's task, rounds of both in turn. Inside, the trainer has one thread and does both
models in turn; apart, trainer and critic have one each and work at the same time. A step's seconds are those of the
trainer's part alone (`train_s`: values, advantages, updates), the median of all steps but the first of each round. Idle
shares are those of trainer and critic over that part: what each waits for the other. Both runs train the same policy;
the last loss of each is printed with all its digits.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import slipstream
from slipstream.observe.hardware import describe
from slipstream.observe.summary import versions

KINDS = {"trainer": "inside the trainer", "own": "an executor of its own"}
PASSES = ("forward_backward", "optimizer", "values", "collate")


def overrides(options: argparse.Namespace, executor: str) -> dict[str, Any]:
    return {
        "steps": options.steps,
        "host": "process",
        "max_staleness": 0,
        "weight_update": "between_batches",
        "sync_placement": "split",
        "groups_per_step": 16,
        "model": {
            "hidden_size": options.hidden,
            "intermediate_size": 3 * options.hidden,
            "num_layers": options.layers,
            "num_heads": 4,
            "num_kv_heads": 2,
        },
        "prompts": {"num_train": 300, "num_eval": 8},
        "warm_start": {"steps": 0},
        "loss": {"name": "ppo", "advantages": "gae", "skip_no_signal": False},
        "trainer": {"minibatches": 2, "epochs": 2, "checkpoint_every": 0},
        "critic": {"executor": executor, "head_init": "reward"},
        "eval": {"every": 0, "num_prompts": 8, "num_slots": 8},
    }


def run(options: argparse.Namespace, executor: str, out: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the steps' metrics but for the first, and the seconds of each process by state."""
    done = slipstream.run("quickstart", overrides=overrides(options, executor), out=out, display=False)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "train_s" in line][1:], done.summary["accounting"]


def idle(of: dict[str, dict[str, float]], name: str, waits: str, trained_s: float) -> str:
    """The share of the steps' seconds that a process does no pass."""
    if name not in of:
        return "-"
    if waits:
        return f"{100 * of[name].get(waits, 0.0) / trained_s:.0f}%"
    return f"{100 * (1 - sum(of[name].get(state, 0.0) for state in PASSES) / trained_s):.0f}%"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.steps < 2:
        parser.error(f"--steps {options.steps}: the first step is left out, so at least 2")
    print(f"command: {shlex.join(['python', *sys.argv])}")
    print(f"{describe()}, torch {torch.__version__}, commit {versions().commit}\n")
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    last: dict[str, list[float]] = {kind: [] for kind in KINDS}
    waits: dict[str, tuple[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for kind in KINDS:
                steps, accounting = run(options, kind, Path(folder) / f"{kind}_{number}")
                seconds[kind] += [step["train_s"] for step in steps]
                last[kind].append(steps[-1]["value_loss"])
                all_s = sum(step["train_s"] for step in steps) * options.steps / max(len(steps), 1)
                waits[kind] = idle(accounting, "trainer", "wait_critic", all_s), idle(accounting, "critic", "", all_s)
    print("| critic | s a step | of inside | trainer waits for it | critic waits | last value loss |")
    print("|---|---|---|---|---|---|")
    inside_s = statistics.median(seconds["trainer"])
    for kind, name in KINDS.items():
        step_s = statistics.median(seconds[kind])
        ratio, losses = step_s / inside_s, sorted({f"{loss:.9g}" for loss in last[kind]})
        print(f"| {name} | {step_s:.3f} | {ratio:.2f} | {waits[kind][0]} | {waits[kind][1]} | {', '.join(losses)} |")


if __name__ == "__main__":
    main()
