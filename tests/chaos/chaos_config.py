"""What the chaos tier trains, in one place: flags of `slipstream run quickstart`."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, stdev

RECIPE = "quickstart"
LEASE_S = 5.0

STORM = (
    "--lease-s", str(LEASE_S),
    "--deadline-s", "60",
    "--trainer.checkpoint-every", "10",
)  # fmt: skip
"""The quickstart as it is. Losing a step's work costs what lies behind the last checkpoint, so these come often."""

SMALL_MODEL = (
    "--model.hidden-size", "32",
    "--model.intermediate-size", "64",
    "--model.num-layers", "2",
    "--model.num-heads", "2",
    "--model.num-kv-heads", "2",
)  # fmt: skip

SHORT = (
    *SMALL_MODEL,
    "--steps", "40",
    "--groups-per-step", "8",
    "--lease-s", str(LEASE_S),
    "--deadline-s", "60",
    "--prompts.num-train", "1000",
    "--prompts.num-eval", "64",
    "--eval.num-prompts", "64",
    "--eval.every", "10",
    "--trainer.checkpoint-every", "10",
    "--warm-start.steps", "60",
    "--warm-start.num-demonstrations", "1000",
    "--loss.no-skip-no-signal",
)  # fmt: skip
"""A tenth of it, of the same shape: warm start, evaluations, checkpoints. Every group is trained on, so that which
ordinals are to be trained does not depend on what was sampled."""

SYNC = (
    *SHORT,
    "--max-staleness", "0",
    "--weight-update", "between_batches",
    "--loss.skip-no-signal",
    "--rewards.num-workers", "2",
)  # fmt: skip

SLOW_REWARD = f"""
[[rewards.terms]]
function = "task"

[[rewards.terms]]
function = "{Path(__file__).with_name("slow_reward.py")}:score"
weight = 0.0
"""
"""Behind the recipe: the task's own reward, which takes a while."""

UNDISTURBED = (0.960, 0.972, 0.964, 0.942, 0.978)
"""Held-out accuracy of undisturbed quickstarts: `python tests/chaos/undisturbed.py --seeds 0 1 2 3 4` prints them."""


def lowest_accuracy() -> float:
    """Below this an accuracy is no noise: five standard deviations under the mean of the undisturbed."""
    return mean(UNDISTURBED) - 5 * stdev(UNDISTURBED)
