"""The runs: what is varied (conditions), what is compared (modes), and in which order they are made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.async_vs_sync.reward import JUDGE_S
from experiments.async_vs_sync.task import LENGTHS, write
from experiments.lab import Lab, Spec
from slipstream.core.recipes import merge

RECIPE = Path("experiments") / "async_vs_sync" / "recipe.toml"
JUDGED = "experiments/async_vs_sync/reward.py:judged"
SEEDS = (0, 1, 2)
SIZES = {"small": 64, "base": 128, "large": 256}
"""Width of the model, by name: three layers, 0.16, 0.64 and 2.6 M parameters."""
MAX_STALENESS = 4
SEGMENT_TOKENS = 64
COLD_STEPS, LAST_STEPS = 5, MAX_STALENESS
"""Left out of step times at both ends: there the loop fills, and there it runs dry."""
STILL_LR = 1e-6
JUDGE_WORKERS = 96
"""More than a step's 64 completions, which fit together in turns; overlapped, steps shorter than 0.33 s would wait."""


@dataclass(frozen=True)
class Mode:
    """How generation and training go together: a preset and what is set besides."""

    preset: str
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_synchronous(self) -> bool:
        return self.preset == "sync"


SPLIT, COLOCATED, CONTINUOUS = "sync, split", "sync, co-located", "continuous"
MODES: dict[str, Mode] = {
    SPLIT: Mode("sync", {"sync_placement": "split"}),
    COLOCATED: Mode("sync"),
    "one_step": Mode("one_step"),
    "bounded": Mode("bounded", {"max_staleness": MAX_STALENESS, "generator": {"segment_tokens": SEGMENT_TOKENS}}),
    CONTINUOUS: Mode("continuous", {"max_staleness": MAX_STALENESS}),
}
ALL_MODES = tuple(MODES)
FEW_MODES = (SPLIT, COLOCATED, CONTINUOUS)


@dataclass(frozen=True)
class Condition:
    """What all modes are compared under. `steps` is a run's length, `epochs` the updates that a step makes.

    Where it does not learn the learning rate is next to nothing: what matters is time, and lengths stay the task's.
    """

    steps: int
    size: str = "base"
    lengths: str = "tailed"
    has_judge: bool = False
    epochs: int = 1
    modes: tuple[str, ...] = FEW_MODES
    learns: bool = False
    eval_prompts: int = 8

    def overrides(self, *, dataset: Path, start: Path) -> dict[str, Any]:
        tables: dict[str, Any] = {
            "steps": self.steps,
            "model": {"path": str(start)},
            "prompts": {"dataset": str(dataset)},
            "trainer": {"epochs": self.epochs},
            "eval": {"num_prompts": self.eval_prompts},
        }
        if not self.learns:
            tables["trainer"] |= {"optimizer": {"lr": STILL_LR}}
        if self.lengths == "equal":
            tables["prompts"] |= {"num_train": 700, "num_eval": 100}
        if self.has_judge:
            terms = [
                {"function": JUDGED},
                {"function": "exact_match", "weight": 0},
            ]
            tables["rewards"] = {"terms": terms, "num_workers": JUDGE_WORKERS}
        return tables


TAIL, JUDGE, SMALL, LARGE, EQUAL, TRAINING = "tail", "judge", "small", "large", "equal", "training"
CONDITIONS: dict[str, Condition] = {
    TAIL: Condition(80, modes=ALL_MODES, learns=True, eval_prompts=200),
    JUDGE: Condition(32, modes=ALL_MODES, has_judge=True),
    SMALL: Condition(40, size="small"),
    LARGE: Condition(20, size="large"),
    EQUAL: Condition(30, lengths="equal"),
    TRAINING: Condition(25, epochs=4),
}
WORDS = {
    TAIL: "long tail, 0.64 M",
    JUDGE: f"long tail, 0.64 M, judge of {JUDGE_S} s",
    SMALL: "long tail, 0.16 M",
    LARGE: "long tail, 2.6 M",
    EQUAL: "equal lengths, 0.64 M",
    TRAINING: "long tail, 0.64 M, 4 epochs a step",
}
BY_SIZE = (SMALL, TAIL, LARGE)

Key = tuple[str, str, int]
"""Condition, mode, seed."""


def start(size: str, dataset: Path) -> Spec:
    """The policy that every run of this size starts from: fine-tuned once, so that lengths are the same for all."""
    width = SIZES[size]
    model = {"hidden_size": width, "intermediate_size": 3 * width}
    return Spec(
        f"spelling start {size}", RECIPE, {"stages": ["sft"], "model": model, "prompts": {"dataset": str(dataset)}}
    )


def run(key: Key, *, dataset: Path, start: Path, condition: Condition) -> Spec:
    """One run of `condition`, on the whole machine."""
    name, mode, seed = key
    tables = merge(condition.overrides(dataset=dataset, start=start), MODES[mode].overrides)
    return Spec(f"async_vs_sync {name} {mode} {seed}", RECIPE, tables | {"seed": seed}, MODES[mode].preset)


def keys(conditions: Mapping[str, Condition]) -> Iterator[Key]:
    """Every run, seeds outermost: a machine that is slower for a while is so for all modes and conditions."""
    for seed in SEEDS:
        for name, condition in conditions.items():
            for mode in condition.modes:
                yield name, mode, seed


def make(lab: Lab, conditions: Mapping[str, Condition]) -> tuple[dict[Key, Path], dict[str, Path]]:
    """All runs, made unless they are there; and the policies they start from, by size."""
    datasets = {lengths: write(lengths, lab.folder) for lengths in LENGTHS}
    sizes = list(dict.fromkeys(condition.size for condition in conditions.values()))
    folders = lab.run_all([start(size, datasets["tailed"]) for size in sizes])
    starts = {size: folder / "sft" / "model" for size, folder in zip(sizes, folders, strict=True)}
    specs = {
        key: run(key, dataset=datasets[condition.lengths], start=starts[condition.size], condition=condition)
        for key in keys(conditions)
        for condition in [conditions[key[0]]]
    }
    return dict(zip(specs, lab.run_all(list(specs.values())), strict=True)), starts
