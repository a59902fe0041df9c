"""What runs: two pipelines up to the reward model, then RL from them, with one detail left out at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.lab import Lab, Spec
from slipstream.core.recipes import merge

RECIPE = "stylistic_mini"
SEEDS = tuple(range(10))
EVALUATED = 500
STEPS, LONGER = 60, 100
"""Steps of RL; the longer ones give a coefficient that is ten times off the time to come back."""
TARGET = 1.5
"""Nats per completion, where a run of LONGER steps with all details ends at the recipe's coefficient (seed 100)."""
HORIZON = 500
"""Completions: in LONGER steps a coefficient can change by a factor of 12.5."""
COEF = 0.15
"""The recipe's."""

USUAL, ENDLESS = "usual", "30 % without an end"
PIPELINES: dict[str, Spec] = {
    name: Spec(
        f"stylistic pipeline {name}",
        RECIPE,
        {"stages": ["sft", "preferences", "reward_model"], "host": "inline"} | changed,
        cores=1,
    )
    for name, changed in {
        USUAL: {},
        ENDLESS: {
            "sft": {"demonstrations": [{"template": "{answer}.", "weight": 13}, {"template": "{answer}", "weight": 7}]}
        },
    }.items()
}
"""One policy and one reward model for all runs that begin with it: what differs between them is RL."""


@dataclass(frozen=True)
class Arm:
    """Runs that differ by their seeds alone: the pipeline they begin with, their steps, and what they change."""

    pipeline: str = USUAL
    steps: int = STEPS
    overrides: Mapping[str, Any] = field(default_factory=dict)


def _coefficient(times: float, target: float | None) -> Arm:
    return Arm(USUAL, LONGER, {"kl": {"coef": COEF * times, "target": target, "horizon": HORIZON}})


ALL = "all details"
ENDS, NO_REJECTION = "30 % without an end", "30 % without an end, without rejection score"
SMALL, SMALL_FIXED = "coefficient / 10, adaptive", "coefficient / 10, fixed"
LARGE, LARGE_FIXED = "coefficient x 10, adaptive", "coefficient x 10, fixed"
WITHOUT: dict[str, str] = {
    "temperature scaling": "without temperature scaling",
    "whitening": "without whitening",
    "value head init": "without value head init",
}
"""Details that are compared with ALL, and the arm without each."""

ARMS: dict[str, Arm] = {
    ALL: Arm(),
    WITHOUT["temperature scaling"]: Arm(overrides={"trainer": {"logprob_temperature": 1.0}}),
    WITHOUT["whitening"]: Arm(overrides={"critic": {"whiten_rewards": False}, "loss": {"whiten_advantages": "no"}}),
    WITHOUT["value head init"]: Arm(overrides={"critic": {"head_init": "reward"}}),
    SMALL: _coefficient(0.1, TARGET),
    SMALL_FIXED: _coefficient(0.1, None),
    LARGE: _coefficient(10.0, TARGET),
    LARGE_FIXED: _coefficient(10.0, None),
    ENDS: Arm(ENDLESS),
    NO_REJECTION: Arm(ENDLESS, overrides={"loss": {"truncated": "keep"}}),
}


def from_pipeline(pipeline: Path) -> dict[str, Any]:
    """Overrides of a run that begins with the models in the folder `pipeline`."""
    policy = str(pipeline / "sft" / "model")
    return {
        "model": {"path": policy},
        "kl": {"reference": policy},
        "rewards": {"models": [{"path": str(pipeline / "reward_model" / "model")}]},
    }


def spec(arm: str, seed: int, pipeline: Path) -> Spec:
    """A run of one arm."""
    base = {
        "seed": seed,
        "host": "inline",
        "stages": ["rl", "evaluate"],
        "steps": ARMS[arm].steps,
        "evaluation": {"num_prompts": EVALUATED},
    }
    overrides = merge(merge(base, from_pipeline(pipeline)), ARMS[arm].overrides)
    return Spec(f"stylistic {arm} seed={seed}", RECIPE, overrides, cores=1)


def specs(lab: Lab) -> dict[tuple[str, int], Spec]:
    """Every run, by arm and seed; those of a seed next to each other."""
    places = {name: lab.place(pipeline) for name, pipeline in PIPELINES.items()}
    return {(arm, seed): spec(arm, seed, places[ARMS[arm].pipeline]) for seed in SEEDS for arm in ARMS}


def run(lab: Lab) -> dict[tuple[str, int], Path]:
    """The folders of all runs."""
    lab.run_all(list(PIPELINES.values()))
    chosen = specs(lab)
    return dict(zip(chosen, lab.run_all(list(chosen.values())), strict=True))
