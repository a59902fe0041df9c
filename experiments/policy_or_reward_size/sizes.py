"""Policies and reward models of three widths to be compared: each at rates of its own, policies at equal SFT loss.

At one rate and as many updates the smallest had hardly learned the task when RL began, and the largest had a reward
model worse than the middle one's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.lab import Lab
from experiments.rlhf import SIZES, USUAL, Pipeline, model_of, reward_accuracy
from experiments.staleness_by_loss.tuning import SEED, Trial, tune
from slipstream.core.recipes import stage_dir
from slipstream.models.config import config_from_hf
from slipstream.models.hf import read_hf_config
from slipstream.models.sizes import num_parameters

SFT_RATES: Mapping[str, Sequence[float]] = {"S": (1e-3, 2e-3, 4e-3), "M": (5e-4, 1e-3, 2e-3), "L": (2.5e-4, 5e-4, 1e-3)}
RATE_STEPS = 600
"""Updates by which rates of SFT are compared."""
SFT_STEPS: Mapping[str, Sequence[int]] = {
    "S": (2000, 3000, 4500, 6000),
    "M": (250, 275, 300, 325, 350, 375, 400, 450),
    "L": (140, 160, 180, 200, 220, 240, 300),
}
"""From which each size takes what comes nearest the loss that all can reach."""
JUDGE_RATES: Sequence[float] = (1e-4, 3e-4, 1e-3)
JUDGE_SEEDS = (SEED, SEED + 1)


def comparable(lab: Lab, pipeline: Pipeline) -> Pipeline:
    """The pipeline with rates of SFT, updates of SFT and rates of reward models for each size."""
    rates = _best_rates(lab, pipeline)
    steps = _equal_loss(lab, pipeline, rates)
    sft = {size: {"sft": _sft(rates[size], steps[size])} for size in SIZES}
    judges = _best_judges(lab, replace(pipeline, by_size=sft))
    return replace(pipeline, by_size={size: sft[size] | {"reward_model": judges[size]} for size in SIZES})


def tuned_by_size(lab: Lab, pipeline: Pipeline, loss: str, *, rounds: int, kept: Path | None) -> dict[str, Trial]:
    """Rate and penalty of RL for each size of the policy, as losses are tuned, and what they came to there.

    `kept`: the file of what runs have come to.
    """
    found = tune(lab, pipeline, [(loss, size) for size in SIZES], rounds=rounds, kept=kept)
    return {size: trial for (_, size), trial in found.items()}


def held_out_loss(run: Path) -> float:
    """Of the SFT policy, nats per token."""
    record = json.loads((stage_dir(run, "sft") / "stage.json").read_text())
    return float(record["held_out"]["after"]["loss"])


def sft_parameters(run: Path) -> int:
    """How many the SFT policy has."""
    return num_parameters(config_from_hf(read_hf_config(Path(model_of(run, "sft")))))


def nearest_steps(losses: Mapping[str, Mapping[int, float]]) -> dict[str, int]:
    """For each size the updates whose loss is nearest the largest of the sizes' lowest ones, which all can reach."""
    reachable = max(min(of_size.values()) for of_size in losses.values())
    return {
        size: min(of_size, key=lambda steps: (abs(of_size[steps] - reachable), steps))
        for size, of_size in losses.items()
    }


def _sft(rate: float, steps: int) -> dict[str, Any]:
    return {"steps": steps, "optimizer": {"lr": rate}}


def _losses(lab: Lab, pipeline: Pipeline, tried: Mapping[str, Sequence[tuple[float, int]]]) -> dict[str, list[float]]:
    """Held-out losses of SFT by size, for each (rate, steps) that is tried."""
    specs = {
        size: [replace(pipeline, by_size={size: {"sft": _sft(*one)}}).sft(lab, size) for one in some]
        for size, some in tried.items()
    }
    lab.run_all([spec for some in specs.values() for spec in some])
    return {size: [held_out_loss(lab.place(spec)) for spec in some] for size, some in specs.items()}


def _best_rates(lab: Lab, pipeline: Pipeline) -> dict[str, float]:
    losses = _losses(lab, pipeline, {size: [(rate, RATE_STEPS) for rate in rates] for size, rates in SFT_RATES.items()})
    return {size: min(zip(own, SFT_RATES[size], strict=True))[1] for size, own in losses.items()}


def _equal_loss(lab: Lab, pipeline: Pipeline, rates: Mapping[str, float]) -> dict[str, int]:
    tried = {size: [(rates[size], count) for count in steps] for size, steps in SFT_STEPS.items()}
    losses = _losses(lab, pipeline, tried)
    return nearest_steps({size: dict(zip(SFT_STEPS[size], own, strict=True)) for size, own in losses.items()})


def _best_judges(lab: Lab, pipeline: Pipeline) -> dict[str, dict[str, Any]]:
    """The rate of each size's reward model with the best held-out accuracy; pairs are those of the usual size."""
    found: dict[str, dict[str, Any]] = {}
    for size in (USUAL, *(one for one in SIZES if one != USUAL)):
        known = dict(pipeline.by_size)
        accuracy = {}
        for rate in JUDGE_RATES:
            table = {"optimizer": {"lr": rate}}
            own = replace(pipeline, by_size=known | {size: {**known[size], "reward_model": table}})
            own.make(lab, JUDGE_SEEDS, [], reward_models=[size])
            accuracy[rate] = fmean(reward_accuracy(lab.place(own.judge(lab, seed, size))) for seed in JUDGE_SEEDS)
        found[size] = {"optimizer": {"lr": max(accuracy, key=lambda rate: accuracy[rate])}}
        if size == USUAL:  # whose pairs the other sizes learn from
            pipeline = replace(pipeline, by_size=known | {size: {**known[size], "reward_model": found[size]}})
    return found
