"""`kill -9` of one process at a random instant of a run, then `--resume`: what is trained, and how often.

    python tests/chaos/kill_instants.py --seed 0 --instants 20

Instants are told by what can be seen of a run, its *marks*: so many seconds after one, no more than lay between it and
the next in a run that nobody disturbed. They are spread over all of it, from the first command to the last word: half
the weight is the time between two marks, the other half the marks, since start-up takes longer than all steps.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from chaos_config import SHORT
from chaos_run import ChaosRun, check_runs, scratch
from lineage_audit import audit, lines

MARKS_DEADLINE_S = 120.0
LOOK_S = 0.01


@dataclass(frozen=True)
class Mark:
    """Something that has happened in a run, and when it did in the undisturbed one."""

    name: str
    time_s: float


@dataclass(frozen=True)
class Instant:
    """`delay_s` behind the mark `after`. `pick` in [0, 1) says who is killed."""

    after: str
    delay_s: float
    pick: float


@dataclass(frozen=True)
class Outcome:
    """One run that was struck once. `codes`: of each command the user gave."""

    instant: Instant
    victim: str
    codes: tuple[int, ...]
    trained: int
    findings: tuple[str, ...]
    prompts: Counter[str]  # prompt -> how many of its rollouts were trained

    def row(self) -> str:
        where = f"{self.instant.after} + {self.instant.delay_s:.2f} s"
        verdict = "; ".join(self.findings) or "each once"
        return f"| {where} | {self.victim} | {' '.join(map(str, self.codes))} | {self.trained} | {verdict} |"


HEAD = "| killed at | victim | exit codes | trained groups | verdict |\n|---|---|---|---|---|"


def marks_of(run: ChaosRun) -> list[str]:
    """The marks that a run has passed, in order."""
    found = ["command"]
    if not run.is_begun:
        return found
    found.append("folder")
    if (run.run_dir / "logs" / "trainer.log").exists():
        found.append("executors")
    if any(line["event"]["type"] == "Swapped" for line in lines(run.run_dir / "events.jsonl")[:2]):
        found.append("first version")
    found += [f"step {line['step'] + 1}" for line in lines(run.run_dir / "metrics.jsonl") if "reward_mean" in line]
    if (run.run_dir / "model" / "config.json").exists():
        found.append("model")
    if (run.run_dir / "summary.json").exists():
        found.append("summary")
    return found


def undisturbed(folder: Path) -> tuple[list[Mark], Outcome]:
    """A run with nobody in its way: when its marks came, and what it trained."""
    run = ChaosRun(folder, SHORT)
    marks: dict[str, float] = {}
    begun_s = time.monotonic()
    with run.started() as process:
        while process.poll() is None and time.monotonic() < begun_s + MARKS_DEADLINE_S:
            for name in marks_of(run):
                marks.setdefault(name, time.monotonic() - begun_s)
            time.sleep(LOOK_S)
    marks["end"] = time.monotonic() - begun_s
    assert run.is_done, f"the undisturbed run is not done{run.said()}"
    ordered = sorted(marks.items(), key=lambda item: item[1])
    return [Mark(*item) for item in ordered], _outcome(run, Instant("end", 0.0, 0.0), "nobody")


def instants(marks: list[Mark], seed: int, count: int) -> list[Instant]:
    """`count` instants, one in each equal part of the undisturbed run."""
    rng, chosen = random.Random(seed), []
    stages = list(itertools.pairwise(marks))
    weights = [0.5 / len(stages) + 0.5 * (b.time_s - a.time_s) / marks[-1].time_s for a, b in stages]
    ends = list(itertools.accumulate(weights))
    for number in range(count):
        place = ends[-1] * (number + rng.random()) / count
        n = min(bisect.bisect(ends, place), len(stages) - 1)
        begin, end = stages[n]
        fraction = 1 - (ends[n] - place) / weights[n]
        chosen.append(Instant(begin.name, fraction * (end.time_s - begin.time_s), rng.random()))
    return chosen


def strike(instant: Instant, folder: Path) -> Outcome:
    """A run that is struck at `instant`, and resumed until it is done."""
    run = ChaosRun(folder, SHORT)
    with run.started() as process:
        _wait(lambda: instant.after in marks_of(run) or process.poll() is not None, instant.after, run)
        time.sleep(instant.delay_s)
        there = run.roles()
        victim = list(there)[int(instant.pick * len(there))] if there else "nobody: it had ended"
        for pid in there.get(victim, [])[:1]:
            os.kill(pid, signal.SIGKILL)
        _wait(lambda: process.poll() is not None, "the struck run to end", run)
    if not run.is_done:
        run.until_done()
    return _outcome(run, instant, victim)


def _wait(is_so: Callable[[], bool], what: str, run: ChaosRun) -> None:
    deadline_s = time.monotonic() + MARKS_DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline_s, f"'{what}' did not come within {MARKS_DEADLINE_S:g} s{run.said()}"
        time.sleep(LOOK_S)


def _outcome(run: ChaosRun, instant: Instant, victim: str) -> Outcome:
    check_runs(run.folder)
    left, checked = run.leftovers(), audit(run.run_dir)
    trained = [line for line in checked.rollouts if line["step"] is not None]
    return Outcome(
        instant=instant,
        victim=victim,
        codes=tuple(attempt.code for attempt in run.attempts),
        trained=checked.numbers["trained"],
        findings=(*checked.findings, *left),
        prompts=Counter(line["prompt_id"] for line in trained),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--instants", type=int, default=20)
    options = parser.parse_args()
    return int(bool(survey(options.seed, options.instants)))


def survey(seed: int, count: int) -> list[str]:
    """Strike `count` runs, print the table; returns what did not hold."""
    with scratch() as folder:
        marks, whole = undisturbed(folder)
    found = [f"undisturbed: {finding}" for finding in whole.findings]
    sys.stdout.write("marks: " + ", ".join(f"{mark.name} {mark.time_s:.2f} s" for mark in marks) + f"\n{HEAD}\n")
    for instant in instants(marks, seed, count):
        with scratch() as folder:
            outcome = strike(instant, folder)
        sys.stdout.write(outcome.row() + "\n")
        sys.stdout.flush()
        found += [f"{instant}, {outcome.victim}: {finding}" for finding in outcome.findings]
        if outcome.prompts != whole.prompts:
            found.append(f"{instant}, {outcome.victim}: not the prompts that the undisturbed run trained")
    return found


if __name__ == "__main__":
    sys.exit(main())
