"""Which runs there are, and in what order they are made."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.trl_call import TRL_PYTHON, TrlFailed, call_trl, trl_version
from experiments.lab import Lab, RunFailed, Spec
from experiments.peers import workload
from experiments.peers.contenders import CONTENDERS, Contender
from experiments.peers.reading import Seen, read_run, read_trl
from slipstream.core.recipes import merge
from slipstream.prompts.stream import PromptStream

RECIPE = Path(__file__).with_name("recipe.toml")
WARM_UP = 1
"""Steps that TRL's script leaves out of its own means, which nobody reads here: the curve has all."""


@dataclass(frozen=True)
class Scale:
    """How much is run; the defaults are what the README promises. `overrides` are every run's, the checkpoint's too."""

    names: Sequence[str] = tuple(CONTENDERS)
    seeds: Sequence[int] = (0, 1, 2)
    steps: int = 80
    overrides: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Found:
    """What was seen of each contender, by seed; `trl` is its version, None where it is not installed."""

    seen: Mapping[str, Sequence[Seen]]
    trl: str | None


def checkpoint(train: Path, held_out: Path, overrides: Mapping[str, Any]) -> Spec:
    """The policy that all start from."""
    data = {"prompts": {"dataset": str(train), "eval_dataset": str(held_out)}}
    return Spec("peers checkpoint", RECIPE, merge(merge(data, {"stages": ["sft"]}), overrides))


def contest(name: str, contender: Contender, seed: int, start: Spec, model: Path, steps: int) -> Spec:
    """The run `name` of a contender from the checkpoint `model`, which `start` has made."""
    common = {"stages": ["rl"], "model": {"path": str(model)}, "seed": seed, "steps": steps}
    return Spec(f"{name} {seed}", RECIPE, merge(merge(start.overrides, common), contender.overrides))


def find(lab: Lab, scale: Scale, *, trl_python: Path = TRL_PYTHON) -> Found:
    """Make what is missing, one by one, and read all of it. Seeds outside, contenders inside, in turn: a machine that
    drifts hits all alike. TRL's are left out, and said to be, where it is not installed.
    """
    train, held_out = workload.write(lab.folder)
    start = checkpoint(train, held_out, scale.overrides)
    model = lab.run(start) / "sft" / "model"
    rows, version = workload.read(train), trl_version(trl_python)
    seen: dict[str, list[Seen]] = {}
    for turn, seed in enumerate(scale.seeds):
        shift = turn * len(scale.names) // len(scale.seeds)
        for name in (*scale.names[shift:], *scale.names[:shift]):
            contender = CONTENDERS[name]
            spec, trainer = contest(f"peers {name}", contender, seed, start, model, scale.steps), contender.trl
            if trainer is None:
                one = read_run(lab.run(spec), partial(answer_tokens, PromptStream(rows, seed)))
            elif version is None:
                lab.say(f"{spec.name}: left out, TRL is not installed")
                continue
            else:
                one = read_trl(_measured(lab, spec, trainer, version, trl_python))
            seen.setdefault(name, []).append(one)
    return Found({name: seen[name] for name in scale.names if name in seen}, version)


def _measured(lab: Lab, spec: Spec, trainer: str, version: str, python: Path) -> dict[str, Any]:
    measure, config = partial(measure_trl, python=python), spec.config().model_dump(mode="json", exclude_none=True)
    try:
        found: dict[str, Any] = lab.measure(spec.name, measure, trainer=trainer, config=config, version=version)
    except TrlFailed as failure:
        raise RunFailed(f"{spec.name}: {failure}") from failure
    return found


def answer_tokens(prompts: PromptStream, ordinal: int) -> int:
    """Tokens of the answer to the prompt of group `ordinal`; `prompts` are rows of the workload."""
    row: Any = prompts.prompt(ordinal)
    return workload.num_tokens(row["answer"])


def measure_trl(*, trainer: str, config: Mapping[str, Any], version: str, python: Path = TRL_PYTHON) -> dict[str, Any]:
    """TRL's `trainer` on what `config` says of model, prompts, batch and optimizer; our evaluation of its policy.

    `version` is TRL's, and here only to be part of what the measurement is kept by.
    """
    from slipstream.evals.evaluate import evaluate_model

    with tempfile.TemporaryDirectory() as scratch:
        trained = Path(scratch) / "model"
        asked = Path(config["prompts"]["dataset"])
        measured = train_trl(config, trainer=trainer, reward="exact", prompts=asked, save=trained, python=python)
        accuracy = evaluate_model(trained, recipe=config).sampled_accuracy
    return {**measured["curve"], "completions_per_step": completions_of(config), "accuracy": accuracy, "trl": version}


def completions_of(config: Mapping[str, Any]) -> int:
    """Of a step."""
    return int(config["groups_per_step"] * config["completions_per_group"])


def train_trl(
    config: Mapping[str, Any], *, trainer: str, reward: str, prompts: Path, save: Path, python: Path
) -> dict[str, Any]:
    """What `trl_baseline.py` measured of a trainer with the model, batch, optimizer and seed of `config`."""
    return call_trl(
        python,
        trainer=trainer,
        reward=reward,
        model=config["model"]["path"],
        prompts=prompts,
        max_new_tokens=config["generator"]["max_new_tokens"],
        completions=completions_of(config),
        completions_per_prompt=config["completions_per_group"],
        lr=config["trainer"]["optimizer"]["lr"],
        seed=config["seed"],
        steps=config["steps"] - WARM_UP,
        warm_up=WARM_UP,
        save=save,
    )
