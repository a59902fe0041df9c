"""Which runs there are, in what order they are made, and what is measured of each."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.trl_call import TRL_PYTHON, TrlFailed, trl_version
from experiments.lab import Lab, RunFailed, Spec, Unavailable, metrics, summary
from experiments.peers.reading import pace
from experiments.peers.runs import completions_of, train_trl
from experiments.real_model import workload
from experiments.real_model.memory import peak_pss
from experiments.section import ROOT
from slipstream.core.recipes import merge
from slipstream.observe.accounting import read_accounting

RECIPE = Path(__file__).with_name("recipe.toml")
MODEL = ROOT / "models" / "smollm2-135m-instruct"
TRL = "TRL, GRPO"
CONTENDERS: dict[str, Mapping[str, Any]] = {
    "synchronous": {"max_staleness": 0, "weight_update": "between_batches"},
    "one step ahead": {
        "max_staleness": 1,
        "weight_update": "between_batches",
        "schedule": {"policy": "one_step"},
    },
    "continuous, k = 2": {},
}
"""Ours, by title: what each changes in the recipe."""
SYNC, ONE_STEP, CONTINUOUS = CONTENDERS
MEMORY_STEPS = 3
"""A run's memory is that of a step: it does not grow."""
HELD_OUT = 200


@dataclass(frozen=True)
class Scale:
    """How much is run; the defaults are what the README promises. `overrides` are every run's, the checkpoint's too."""

    seeds: Sequence[int] = (0, 1, 2)
    steps: int = 30
    overrides: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Seen:
    """One run. `ended_s` of each step, since training began, beside the mean reward of its batch.

    `accuracy` is that of sampled answers to HELD_OUT prompts in the end, `greedy` of the likeliest ones; `peak_bytes`
    the most memory that all processes held together.
    """

    ended_s: tuple[float, ...]
    rewards: tuple[float, ...]
    completions_per_s: float
    mean_tokens: float  # of a completion
    accuracy: float
    greedy: float
    peak_bytes: int
    staleness_mean: float = 0.0
    staleness_max: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Of completions: those of prompts do not count."""
        return self.completions_per_s * self.mean_tokens


@dataclass(frozen=True)
class Found:
    """What was seen of each contender, by seed; `before` is the checkpoint's greedy and sampled accuracy.

    `trl` is its version, None where it is not installed.
    """

    before: tuple[float, float]
    seen: Mapping[str, Sequence[Seen]]
    trl: str | None


def contest(title: str, seed: int, scale: Scale, train: Path, held_out: Path) -> Spec:
    """The run of one contender."""
    common = {
        "model": {"path": str(MODEL)},
        "prompts": {"dataset": str(train), "eval_dataset": str(held_out)},
        "seed": seed,
        "steps": scale.steps,
    }
    overrides = merge(merge(common, scale.overrides), CONTENDERS.get(title, CONTENDERS[SYNC]))
    return Spec(f"real model {title} {seed}", RECIPE, overrides)


def find(lab: Lab, scale: Scale, *, trl_python: Path = TRL_PYTHON) -> Found:
    """Make what is missing, one by one, and read all of it. Seeds outside, contenders inside, in turn: a machine that
    drifts hits all alike. TRL's are left out, and said to be, where it is not installed. Unavailable without the model.
    """
    if not MODEL.is_dir() and "model" not in scale.overrides:
        raise Unavailable(f"there is no {MODEL}; `python scripts/import_smollm2.py {MODEL}` makes it")
    train, held_out = workload.write(lab.folder)
    version = trl_version(trl_python)
    titles = [*([TRL] if version else []), *CONTENDERS]
    if version is None:
        lab.say("TRL is left out: it is not installed")
    seen: dict[str, list[Seen]] = {title: [] for title in titles}
    for turn, seed in enumerate(scale.seeds):
        shift = turn % len(titles)
        for title in (*titles[shift:], *titles[:shift]):
            spec = contest(title, seed, scale, train, held_out)
            seen[title].append(see_trl(lab, spec, version, trl_python) if title == TRL else see_ours(lab, spec))
    config = as_json(contest(SYNC, 0, scale, train, held_out))
    begun = lab.measure("real model before", accuracies_of, model=config["model"]["path"], config=config)
    return Found((begun["greedy"], begun["sampled"]), seen, version)


def as_json(spec: Spec) -> dict[str, Any]:
    return spec.config().model_dump(mode="json", exclude_none=True)


def see_trl(lab: Lab, spec: Spec, version: str | None, python: Path) -> Seen:
    measure = partial(measure_trl, python=python)
    try:
        measured = lab.measure(spec.name, measure, config=as_json(spec), version=version)
    except TrlFailed as failure:
        raise RunFailed(f"{spec.name}: {failure}") from failure
    ended_s = tuple(measured["ended_s"])
    return Seen(
        ended_s=ended_s,
        rewards=tuple(measured["rewards"]),
        completions_per_s=pace(ended_s, measured["completions_per_step"]),
        mean_tokens=fmean(measured["tokens"]) / measured["completions_per_step"],
        accuracy=measured["sampled"],
        greedy=measured["greedy"],
        peak_bytes=measured["peak_bytes"],
    )


def see_ours(lab: Lab, spec: Spec) -> Seen:
    run = lab.run(spec)
    told, accounting = summary(run), read_accounting(run)
    if accounting.loop is None:
        raise RunFailed(f"{run} has trained no step")
    began_s, _ = accounting.loop
    ended_s = tuple(step.end_s - began_s for step in accounting.steps)
    lines = [line for line in metrics(run) if "reward" in line]
    config = as_json(spec)
    judged = lab.measure(f"{spec.name} accuracy", accuracies_of, model=str(run / "model"), config=config)
    short = as_json(spec.with_overrides(steps=MEMORY_STEPS, seed=0))  # once for all seeds
    memory = lab.measure(f"{spec.name.rpartition(' ')[0]} memory", memory_of_run, config=short)
    return Seen(
        ended_s=ended_s,
        rewards=tuple(line["reward"] for line in lines),
        completions_per_s=pace(ended_s, completions_of(config)),
        mean_tokens=fmean(line["tokens_trained"] for line in lines) / completions_of(config),
        accuracy=judged["sampled"],
        greedy=judged["greedy"],
        peak_bytes=memory["peak_bytes"],
        staleness_mean=told["staleness"]["mean"],
        staleness_max=told["staleness"]["max"],
    )


# Measurements


def accuracies_of(*, model: str, config: Mapping[str, Any]) -> dict[str, float]:
    """Greedy and sampled accuracy of a checkpoint on HELD_OUT prompts of `config`, by our engine for all."""
    from slipstream.evals.evaluate import evaluate_model

    found = evaluate_model(model, recipe=config, num_prompts=HELD_OUT)
    if found.accuracy is None or found.sampled_accuracy is None:
        raise RunFailed(f"{model} was evaluated without a measure")
    return {"greedy": found.accuracy, "sampled": found.sampled_accuracy}


def memory_of_run(*, config: Mapping[str, Any]) -> dict[str, int]:
    """The most bytes that a run of `config` holds."""
    from slipstream.core.config import RunConfig
    from slipstream.core.recipes import save_config

    with tempfile.TemporaryDirectory() as scratch:
        recipe = Path(scratch) / "recipe.toml"
        save_config(RunConfig(**config), recipe)
        run = ["-m", "slipstream.cli", "run", str(recipe), "--out", str(Path(scratch) / "run")]
        return {"peak_bytes": peak_pss(run)}


def measure_trl(*, config: Mapping[str, Any], version: str, python: Path = TRL_PYTHON) -> dict[str, Any]:
    """TRL's `GRPOTrainer` on what `config` says of model, prompts, batch and optimizer; our evaluation of its policy.

    `version` is TRL's, and here only to be part of what the measurement is kept by.
    """
    with tempfile.TemporaryDirectory() as scratch:
        trained, asked = Path(scratch) / "model", Path(scratch) / "prompts.jsonl"
        workload.write_chats(Path(config["prompts"]["dataset"]), config["prompts"]["system"], asked)
        told = {"trainer": "grpo", "reward": "last_number"}
        measured = train_trl(config, **told, prompts=asked, save=trained, python=python)
        accuracy = accuracies_of(model=str(trained), config=config)
    own = {"peak_bytes": measured["peak_bytes"], "completions_per_step": completions_of(config), "trl": version}
    return {**measured["curve"], **accuracy, **own}
