"""The runs of the GPU edition: one task, one GPU that generator and trainer share, three questions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.async_vs_sync.runs import JUDGED, MAX_STALENESS, MODES, RECIPE
from experiments.async_vs_sync.task import write
from experiments.lab import Lab, Spec, Unavailable
from experiments.peers.contenders import CONTENDERS
from slipstream.core.recipes import merge

SEEDS = (0, 1, 2)
STEPS = 40
GROUPS, SLOTS = 32, 256
JUDGE_WORKERS = 256
KV_CACHE_GB = 8.0
WARM_STEPS = 300
ON_GPU: Mapping[str, Any] = {
    "trainer": {"device": "cuda", "precision": "bfloat16", "microbatch_tokens": 32768},
    "generator": {"device": "cuda:0", "precision": "bfloat16", "num_slots": SLOTS, "kv_cache_gb": KV_CACHE_GB},
}
"""Both on the first GPU, however many there are: versions go from one to the other by CUDA IPC."""


@dataclass(frozen=True)
class Size:
    width: int
    layers: int
    words: str

    @property
    def model(self) -> dict[str, int]:
        heads = self.width // 64
        return {
            "hidden_size": self.width,
            "intermediate_size": 3 * self.width,
            "num_layers": self.layers,
            "num_heads": heads,
            "num_kv_heads": heads,
        }


SIZES = {"small": Size(256, 3, "2.6 M"), "medium": Size(512, 8, "27 M"), "large": Size(1024, 16, "218 M")}
MEDIUM = "medium"


@dataclass(frozen=True)
class Case:
    """One setting, run once with each seed: `mode` of async_vs_sync, and what is set besides."""

    size: str
    mode: str
    overrides: Mapping[str, Any] | None = None


SYNC, CONTINUOUS = "sync, co-located", "continuous"
BY_SIZE = {f"{mode}, {size}": Case(size, mode) for size in SIZES for mode in (SYNC, CONTINUOUS)}
OTHER_MODES = {f"{mode}, {MEDIUM}": Case(MEDIUM, mode) for mode in ("one_step", "bounded")}
JUDGE: Mapping[str, Any] = {
    "rewards": {
        "terms": [{"function": JUDGED}, {"function": "exact_match", "weight": 0}],
        "num_workers": JUDGE_WORKERS,
    }
}
WITH_JUDGE = {f"{mode}, judge": Case(MEDIUM, mode, JUDGE) for mode in (SYNC, CONTINUOUS)}
KEPT = f"{CONTINUOUS}, {MEDIUM}"
RECOMPUTED = "continuous, recompute"
CACHE = {
    KEPT: Case(MEDIUM, CONTINUOUS),
    RECOMPUTED: Case(MEDIUM, CONTINUOUS, {"generator": {"kv_on_update": "recompute"}}),
}
POLICIES: Mapping[str, Mapping[str, Any]] = {
    **{name: CONTENDERS[name].overrides for name in ("drop_stale", "areal", "sample_budget")},
    "one_step policy": {"schedule": {"policy": "one_step"}},
    "finish_order": {"schedule": {"policy": "finish_order", "queue_groups": MAX_STALENESS * GROUPS}},
}
"""The peers' rules in our scheduler, `continuous` but for `one_step`, which drains before each update."""
PEERS = {
    name: Case(MEDIUM, "one_step" if name == "one_step policy" else CONTINUOUS, tables)
    for name, tables in POLICIES.items()
}
CASES: Mapping[str, Case] = BY_SIZE | OTHER_MODES | WITH_JUDGE | CACHE | PEERS

Key = tuple[str, int]
"""Case, seed."""


def start(size: str, dataset: Path) -> Spec:
    """A policy warm-started on the GPU, and one step of RL, which is what writes it down."""
    tables: dict[str, Any] = {
        "steps": 1,
        "groups_per_step": GROUPS,
        "max_staleness": 0,
        "weight_update": "between_batches",
        "model": SIZES[size].model,
        "prompts": {"dataset": str(dataset)},
        "warm_start": {
            "steps": WARM_STEPS,
            "num_demonstrations": 3600,
            "demonstrations": [{"template": "{careless}", "weight": 1}],
            "optimizer": {"lr": 1e-3},
        },
    }
    return Spec(f"gpu start {size}", RECIPE, merge(tables, ON_GPU))


def run(key: Key, *, dataset: Path, start: Path) -> Spec:
    """One run, on the GPU and all cores."""
    name, seed = key
    case = CASES[name]
    mode = MODES[case.mode]
    tables: dict[str, Any] = {
        "steps": STEPS,
        "seed": seed,
        "groups_per_step": GROUPS,
        "model": {"path": str(start)},
        "prompts": {"dataset": str(dataset)},
    }
    for more in (ON_GPU, mode.overrides, case.overrides or {}):
        tables = merge(tables, more)
    return Spec(f"gpu {name} {seed}", RECIPE, tables, mode.preset)


def all_keys() -> Iterator[Key]:
    """Every run, seeds outermost."""
    return ((name, seed) for seed in SEEDS for name in CASES)


def check_gpu() -> None:
    """Raise Unavailable where no GPU can be computed on."""
    import torch

    if not torch.cuda.is_available():
        raise Unavailable("torch sees no CUDA GPU; `slipstream doctor` says what there is")


def make(lab: Lab) -> dict[Key, Path]:
    """All runs, made unless they are there. Unavailable where something is missing and there is no GPU to make it."""
    dataset = write("tailed", lab.folder)
    starts = {size: start(size, dataset) for size in SIZES}
    models = {size: lab.place(spec) / "model" for size, spec in starts.items()}
    specs = {key: run(key, dataset=dataset, start=models[CASES[key[0]].size]) for key in all_keys()}
    wanted = [*starts.values(), *specs.values()]
    if not all(lab.is_done(spec) for spec in wanted):
        check_gpu()
    lab.run_all(list(starts.values()))
    return dict(zip(specs, lab.run_all(list(specs.values())), strict=True))
