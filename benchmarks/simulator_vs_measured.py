"""The simulator held against real runs that it was not calibrated with.

    python benchmarks/simulator_vs_measured.py --out /tmp/simulator [--steps 100] [--repeats 3] [--cases ...]

Quickstart-size runs, from one warm-started model: those of `CALIBRATION` say what everything takes on this machine
(`plan/calibrate.py`), those of `TARGETS` are predicted from that alone: lengths, times, interference and latencies come
from the calibration's files, only the configuration is the target's. Each is run `--repeats` times, in rounds, so that
what changes on the machine meanwhile changes for all. What was run stays in `--out`, by commit and configuration: the
same command goes on where it was stopped, and prints the table of what there is.

Within tolerance is a step time within max(10 %, twice the spread) of the mean measured one, and so is a mean staleness;
and an idle share within 5 points. The spread is half the range over the repeats. Valid on an idle machine only: the
load average before each run is printed beside the table.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.core.config import RunConfig
from slipstream.core.recipes import merge, resolve, save_config
from slipstream.observe.hardware import describe
from slipstream.observe.summary import versions
from slipstream.plan.calibrate import Calibration, calibrate
from slipstream.plan.recorded import measured, read_run
from slipstream.plan.simulated_run import RunOutcome
from slipstream.plan.what_if import as_simulated, predict

HERE = Path(__file__).resolve().parent
TOLERANCE, IDLE_POINTS = 0.10, 5.0
SEEDS = 5
REWARD_S = 0.02
SLOW_REWARD = {
    "num_workers": 4,
    "terms": [{"function": "task"}, {"function": f"{HERE / 'reward.py'}:slow", "weight": 0.0}],
}


@dataclass(frozen=True)
class Case:
    """Quickstart with these overrides. `reward_s`: what its reward takes longer than the calibration's."""

    name: str
    preset: str | None = None
    overrides: dict[str, Any] = field(default_factory=dict)
    reward_s: float = 0.0


CALIBRATION = (
    Case("one_step", "one_step"),
    Case("sync", "sync"),
    Case("continuous, P = 16", "continuous", {"groups_per_step": 16}),
)
TARGETS = (
    Case("continuous, k = 2", "continuous"),
    Case("continuous, k = 4", "continuous", {"max_staleness": 4}),
    Case("bounded, k = 2", "bounded"),
    Case("continuous, 2 replicas", "continuous", {"generator": {"replicas": 2}}),
    Case("continuous, P = 64", "continuous", {"groups_per_step": 64}),
    Case("sync, P = 16", "sync", {"groups_per_step": 16}),
    Case("one_step, G = 4", "one_step", {"completions_per_group": 4}),
    Case(f"continuous, reward + {1000 * REWARD_S:.0f} ms", "continuous", {"rewards": SLOW_REWARD}, REWARD_S),
)


class Workshop:
    """The folder of runs of one commit and length."""

    def __init__(self, out: Path, steps: int) -> None:
        commit = versions().commit or "unknown"
        self.folder, self.steps = out / f"{commit[:12]}-{steps}", steps
        self.folder.mkdir(parents=True, exist_ok=True)
        self.loads: dict[str, float] = {}

    def base(self) -> Path:
        """The warm-started model that all runs begin with: quickstart's after its first step."""
        config = resolve("quickstart", {"steps": 1, "eval": {"num_prompts": 50}})
        return self._run("base", config) / "model"

    def run(self, case: Case, repeat: int) -> Path:
        """The folder of a whole run of `case`, made unless it is there."""
        overrides = merge(
            {
                "model": {"path": str(self.base())},
                "warm_start": {"steps": 0},
                "steps": self.steps,
            },
            case.overrides,
        )
        return self._run(f"{_slug(case.name)}-{repeat}", resolve("quickstart", overrides, case.preset))

    def _run(self, name: str, config: RunConfig) -> Path:
        key = hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:8]
        folder = self.folder / f"{name}-{key}"
        if _is_done(folder):
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        recipe = self.folder / f"{name}-{key}.toml"
        save_config(config, recipe)
        self.loads[name] = os.getloadavg()[0]
        log = self.folder / f"{name}-{key}.log"
        with log.open("wb") as out:
            done = subprocess.run(
                [sys.executable, "-m", "slipstream.cli", "run", str(recipe), "--out", str(folder)],
                stdout=out,
                stderr=out,
                check=False,
            )
        if done.returncode or not _is_done(folder):
            raise SystemExit(f"the run {name} failed: see {log}")
        print(f"  ran {name} (load {self.loads[name]:.1f})", file=sys.stderr, flush=True)
        return folder


def _slug(name: str) -> str:
    return "".join(character if character.isalnum() else "_" for character in name)


def _is_done(folder: Path) -> bool:
    path = folder / "summary.json"
    return path.is_file() and json.loads(path.read_text())["status"] == "done"


@dataclass(frozen=True)
class Cell:
    """One number of one case: measured over the repeats, and simulated."""

    seen: tuple[float, ...]
    simulated: float
    tolerance: float

    @property
    def mean(self) -> float:
        return statistics.fmean(self.seen)

    @property
    def spread(self) -> float:
        return (max(self.seen) - min(self.seen)) / 2

    @property
    def is_within(self) -> bool:
        return abs(self.simulated - self.mean) <= self.tolerance + 1e-9

    def text(self, show: Callable[[float], str]) -> str:
        mark = "yes" if self.is_within else "**no**"
        return f"{show(self.mean)} ({show(self.spread)}) | {show(self.simulated)} | {mark}"


def relative(seen: Sequence[float], simulated: float) -> Cell:
    mean, spread = statistics.fmean(seen), (max(seen) - min(seen)) / 2
    return Cell(tuple(seen), simulated, max(TOLERANCE * mean, 2 * spread))


def points(seen: Sequence[float], simulated: float) -> Cell:
    return Cell(tuple(100 * share for share in seen), 100 * simulated, IDLE_POINTS)


def cells(seen: Sequence[RunOutcome], simulated: RunOutcome) -> dict[str, Cell]:
    return {
        "step": relative([one.step_s for one in seen], simulated.step_s),
        "trainer idle": points([one.idle["trainer"] for one in seen], simulated.idle["trainer"]),
        "generator idle": points([one.idle["generator"] for one in seen], simulated.idle["generator"]),
        "staleness": relative([one.staleness_mean for one in seen], simulated.staleness_mean),
    }


def simulated(case: Case, path: Path, calibration: Calibration) -> RunOutcome:
    """Predicted from the calibration and the configuration of the run in `path`."""
    score_s = calibration.seconds["score"] + case.reward_s if case.reward_s else None
    return predict(calibration, as_simulated(read_run(path)), reward_s=score_s, seeds=SEEDS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where runs are kept")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    names = [case.name for case in TARGETS]
    parser.add_argument("--cases", nargs="*", default=names, choices=names, metavar="CASE", help="; ".join(names))
    options = parser.parse_args()
    workshop = Workshop(options.out.resolve(), options.steps)
    chosen = [case for case in TARGETS if case.name in options.cases]
    runs: dict[str, list[Path]] = {case.name: [] for case in (*CALIBRATION, *chosen)}
    for repeat in range(options.repeats):
        for case in (*CALIBRATION, *chosen):
            runs[case.name].append(workshop.run(case, repeat))
    calibration = calibrate([read_run(path) for case in CALIBRATION for path in runs[case.name]])
    print(" ".join(sys.argv), versions(), platform.machine(), sep="\n")
    print("\n".join(f"{name}: {value}" for name, value in describe().lines().items()))
    print_calibration(calibration)
    found = {
        case.name: cells(
            [measured(read_run(path)) for path in runs[case.name]], simulated(case, runs[case.name][0], calibration)
        )
        for case in chosen
    }
    print(f"\n{options.steps} steps, {options.repeats} repeats; measured mean (half the range), simulated, within?\n")
    print(
        "| run | step, ms | sim | | trainer idle % | sim | | generator idle % | sim | | staleness | sim | |\n"
        "|---|---:|---:|---|---:|---:|---|---:|---:|---|---:|---:|---|"
    )
    shows = {
        "step": lambda value: f"{1000 * value:.0f}",
        "trainer idle": lambda value: f"{value:.1f}",
        "generator idle": lambda value: f"{value:.1f}",
        "staleness": lambda value: f"{value:.2f}",
    }
    for name, row in found.items():
        texts = [row[column].text(show) for column, show in shows.items()]
        print(f"| {name} | " + " | ".join(texts) + " |")
    every = [cell for row in found.values() for cell in row.values()]
    print(f"\n{sum(cell.is_within for cell in every)} of {len(every)} within tolerance")
    if workshop.loads:
        print(f"load average before each run: {min(workshop.loads.values()):.1f} to {max(workshop.loads.values()):.1f}")


def print_calibration(calibration: Calibration) -> None:
    """What the runs have told, in ms."""
    for name, fit in (("decoding", calibration.decode), ("forward-backward", calibration.train)):
        terms = " + ".join(f"{1000 * value:.4f} x {term}" for term, value in fit.terms.items())
        speeds = ", ".join(f"{threads}: {speed:.2f}" for threads, speed in sorted(fit.speeds.items()))
        print(f"{name}: {terms} ms alone; speed by threads {speeds}; beside others {fit.beside:.2f} as fast")
    print(", ".join(f"{name} {1000 * value:.2f}" for name, value in calibration.seconds.items() if value), "ms")


if __name__ == "__main__":
    main()
