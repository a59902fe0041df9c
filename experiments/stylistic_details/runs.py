"""What runs: the pipeline up to the reward model once, then RL from it, with one detail left out at a time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.lab import Lab, Spec
from slipstream.core.recipes import merge

RECIPE = "stylistic_mini"
SEEDS = (0, 1, 2, 3, 4)
"""Two more than three: a detail may matter by less than seeds differ, and a run takes a minute of one core."""
ALL = "all details"
WITHOUT: Mapping[str, Mapping[str, Any]] = {
    "temperature scaling": {"trainer": {"logprob_temperature": 1.0}},
    "whitening": {"critic": {"whiten_rewards": False}, "loss": {"whiten_advantages": "no"}},
    "value head init": {"critic": {"head_init": "reward"}},
    "adaptive KL": {"kl": {"target": None}},
    "rejection score": {"loss": {"truncated": "keep"}},
}
"""Detail -> what is changed in the recipe to leave it out."""

EVALUATED = 500

PIPELINE = Spec(
    "stylistic pipeline", RECIPE, {"stages": ["sft", "preferences", "reward_model"], "host": "inline"}, cores=1
)
"""One policy and one reward model for all runs: what differs between them is RL."""


def from_pipeline(pipeline: Path) -> dict[str, Any]:
    """Overrides of a run that begins with the models in the folder `pipeline`."""
    policy = str(pipeline / "sft" / "model")
    return {
        "model": {"path": policy},
        "kl": {"reference": policy},
        "rewards": {"models": [{"path": str(pipeline / "reward_model" / "model")}]},
    }


def spec(pipeline: Path, without: str, seed: int) -> Spec:
    """A run without one detail, or without none (ALL)."""
    base = {
        "seed": seed,
        "host": "inline",
        "stages": ["rl", "evaluate"],
        "evaluation": {"num_prompts": EVALUATED},
    }
    changed = {} if without == ALL else WITHOUT[without]
    overrides = merge(merge(base, from_pipeline(pipeline)), changed)
    return Spec(f"stylistic without {'nothing' if without == ALL else without} seed={seed}", RECIPE, overrides, cores=1)


def specs(pipeline: Path) -> dict[tuple[str, int], Spec]:
    """Every run, by detail and seed; those of a seed next to each other."""
    return {(name, seed): spec(pipeline, name, seed) for seed in SEEDS for name in (ALL, *WITHOUT)}


def run(lab: Lab) -> dict[tuple[str, int], Path]:
    """The folders of all runs."""
    pipeline = lab.run(PIPELINE)
    chosen = specs(pipeline)
    return dict(zip(chosen, lab.run_all(list(chosen.values())), strict=True))
