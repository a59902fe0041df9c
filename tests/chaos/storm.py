"""Quickstarts in a row under the adversary, until the minutes are over; what was done to them, what they made of it."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from adversary import Adversary, Strike, plan
from chaos_config import LEASE_S, STORM
from chaos_run import ChaosRun, recovery_times, scratch
from lineage_audit import audit

Say = Callable[[str], None]


@dataclass
class Storm:
    """What came of one seed, over all its runs."""

    seed: int
    minutes: float
    seconds: float = 0.0
    strikes: list[Strike] = field(default_factory=list)
    recoveries_s: list[float] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)  # the audits' numbers
    findings: list[str] = field(default_factory=list)

    @property
    def injected(self) -> Counter[str]:
        """Faults by kind; stops beyond the lease are a kind of their own."""
        return Counter(kind_of(strike) for strike in self.strikes)

    @property
    def victims(self) -> Counter[str]:
        return Counter(strike.role.split("-")[0] for strike in self.strikes)

    def total(self, name: str) -> int:
        return sum(run[name] for run in self.runs)

    @property
    def accuracies(self) -> list[float]:
        return [run["accuracy"] for run in self.runs]

    def recovery_s(self) -> tuple[float, float]:
        """p50 and max."""
        return median(self.recoveries_s), max(self.recoveries_s)


def kind_of(strike: Strike) -> str:
    is_long = strike.fault.kind == "stop" and strike.fault.duration_s > LEASE_S
    return "stop beyond lease" if is_long else strike.fault.kind


def storm(seed: int, minutes: float, *, say: Say = lambda _: None, keep: Path | None = None) -> Storm:
    """Train quickstarts, one after the other, for `minutes`; the last one ends undisturbed.

    Run r has seed 1000 seed + r and 1 + r % 2 generators. Folders of runs with findings are moved to `keep`.
    """
    begun_s = time.monotonic()
    ending_at_s = begun_s + 60.0 * minutes
    result = Storm(seed, minutes)
    while time.monotonic() < ending_at_s:
        number = len(result.runs)
        replicas = 1 + number % 2
        flags = (*STORM, "--seed", str(1000 * seed + number), "--generator.replicas", str(replicas))
        with scratch() as folder:
            run = ChaosRun(folder, (*flags, "--generator.num-slots", str(64 // replicas)))
            faults, ending = plan(seed, number)
            adversary = Adversary(run.run_dir, faults, ending, lambda run=run: run.controller, run.has_trained_all)
            try:
                run.until_done(adversary, ending_at_s=ending_at_s)
                _judge(run, adversary, result)
            except BaseException as error:
                say(f"run {number}: {error}\n")
                say("".join(f"  {strike}\n" for strike in adversary.strikes))
                _keep(run, keep, f"{seed}_{number}")
                raise
            last = result.runs[-1]
            found = result.findings[-last["findings"] :] if last["findings"] else []
            say(f"run {number}: {last}\n" + "".join(f"  {finding}\n" for finding in found))
            if found:
                say("".join(f"  {strike}\n" for strike in adversary.strikes))
                _keep(run, keep, f"{seed}_{number}")
    result.seconds = time.monotonic() - begun_s
    return result


def _judge(run: ChaosRun, adversary: Adversary, result: Storm) -> None:
    """Audit the finished run and look for what it left."""
    left = run.leftovers()
    checked = audit(run.run_dir)
    number = len(result.runs)
    found = [f"run {number}: {finding}" for finding in [*checked.findings, *left]]
    faults_s = [strike.time_s for strike in adversary.strikes]
    result.recoveries_s += recovery_times(run.run_dir, faults_s, run.attempts[-1].ended_s)
    result.strikes += adversary.strikes
    result.findings += found
    result.runs.append(
        checked.numbers
        | {
            "findings": len(found),
            "faults": len(adversary.strikes),
            "missed": len(adversary.missed),
            "commands": len(run.attempts),
        }
    )


def _keep(run: ChaosRun, keep: Path | None, name: str) -> None:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        shutil.copytree(run.folder, keep / name, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.sock", "tmp"))
