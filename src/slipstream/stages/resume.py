"""The cut of a run's files before it is resumed: consistent, at whatever instant the run ended.

The cut is the newest whole checkpoint: weights, optimizers, random generators, the schedule's snapshot, and how many
events led to it. Before a checkpoint gets its name, the lines that belong to it are on the disk (`controller.py`,
`trainer/executor.py`), so cutting the files back to it always succeeds:

    ledger.jsonl     what the snapshot calls settled, and what it owes as admitted
    events.jsonl     the first `num_events` lines
    metrics.jsonl    up to the checkpoint's version
    rollouts.jsonl   those trained before it, and those dropped before it
    tokens.jsonl     of the steps before it
    alarms.jsonl     of the steps before it

Lines that a checkpoint counts and that are gone all the same (a file was cut, deleted, zeroed) are told of in `notes`.
A run needs none of them to go on, only its ledger. Numbers of events are skipped where events are missing, so that
`slipstream replay` tells of them, too.

Each step is atomic and may be done twice, so a resume that is killed is followed by another one. First all files are
copied to `attempt_<n>/`, which appears there whole; then each is replaced as a whole. The choice of the checkpoint does
not change meanwhile.
"""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from slipstream.controller.ledger import Cut, cut_back, read_cut
from slipstream.core.disk import disk_errors, sync, sync_files
from slipstream.core.jsonl import cut_jsonl
from slipstream.core.run_log import DecisionHead, MetricsHead, RolloutFate
from slipstream.core.saved import saved_partials
from slipstream.core.unfinished_messages import Unfinished
from slipstream.observe.attempts import attempt_folders
from slipstream.trainer.checkpoint_folder import Found, settle

FILES = ("metrics.jsonl", "events.jsonl", "rollouts.jsonl", "tokens.jsonl", "alarms.jsonl", "ledger.jsonl")
"""The files of RL. The ledger comes last: without one a run begins anew, whatever else is there."""


class _OfStep(msgspec.Struct, frozen=True):
    step: int


@dataclass(frozen=True)
class Resumed:
    """The start of a resumed run: `checkpoint`, or None for the beginning. `notes` are for the user."""

    checkpoint: Path | None
    cut: Cut | None
    attempt: Path
    notes: list[str] = field(default_factory=list)
    partials: dict[int, tuple[Unfinished, ...]] = field(default_factory=dict)
    """Partial completions and episodes of the groups that the cut owes, by ordinal."""


def prepare_resume(run_dir: Path, found: Found | None = None) -> Resumed:
    """Keep what was written under `attempt_<n>/`, and cut the run's files back to its newest whole checkpoint.

    `found` is that checkpoint, where the caller has looked for it.
    """
    with disk_errors(run_dir):
        checkpoint, damages = settle(run_dir / "checkpoints", found)
        attempt = set_aside(run_dir)
        cut = None if checkpoint is None else read_cut(checkpoint)
        notes = [f"passed over: {damage.what}" for damage in damages]
        notes += _cut_back(run_dir, cut)
    if checkpoint is None or cut is None:
        notes.append(f"there is no checkpoint: RL begins anew, {attempt.name} keeps what was recorded")
        return Resumed(None, None, attempt, notes)
    notes.append(f"going on from {checkpoint.name}; {attempt.name} keeps what came after it")
    owed, step = cut.schedule.readmit, cut.schedule.steps_done
    return Resumed(
        checkpoint, cut, attempt, notes, saved_partials(checkpoint, cut=cut.cut, owed=owed, step=step, notes=notes)
    )


def set_aside(run_dir: Path) -> Path:
    """Copy the run's lines to the next `attempt_<n>/`, which is there whole or not at all; move timelines, summary and
    the model of an end that is one no more.

    The run has not come to the end that the summary tells of.
    """
    earlier = attempt_folders(run_dir)
    last = int(earlier[-1].name.removeprefix("attempt_")) if earlier else 0
    attempt = run_dir / f"attempt_{last + 1}"
    for stale in run_dir.glob(".attempt_*.partial"):
        shutil.rmtree(stale)
    partial = run_dir / f".{attempt.name}.partial"
    try:
        partial.mkdir()
        for name in FILES:
            if (run_dir / name).exists():
                shutil.copy2(run_dir / name, partial / name)
        sync_files(partial)
        partial.rename(attempt)
    except BaseException:  # a full disk has its room back
        shutil.rmtree(partial, ignore_errors=True)
        raise
    for name in ("timeline", "summary.json", "model"):
        if (run_dir / name).exists():
            (run_dir / name).rename(attempt / name)
    sync(attempt)
    sync(run_dir)
    for folder in earlier if (attempt / "model").exists() else ():  # the newest is enough, as each may be large
        shutil.rmtree(folder / "model", ignore_errors=True)
    return attempt


def _cut_back(run_dir: Path, cut: Cut | None) -> list[str]:
    """Cut all files back; sentences about lines that should be there and are not."""
    if cut is None:
        for name in FILES:
            if (run_dir / name).exists():
                cut_jsonl(run_dir / name, msgspec.Raw, lambda _: False)
        return []
    steps_done, num_events = cut.schedule.steps_done, cut.num_events
    dropped = set(cut.schedule.dropped)
    versions: set[int] = set()
    lines: Counter[int] = Counter()  # of trained groups, by ordinal

    def is_trained(line: RolloutFate) -> bool:
        if line.step is None:
            return line.ordinal in dropped
        lines[line.ordinal] += line.step < steps_done
        return line.step < steps_done

    def is_measured(line: MetricsHead) -> bool:
        versions.add(line.version)
        return line.version <= steps_done

    cut_jsonl(run_dir / "metrics.jsonl", MetricsHead, is_measured)
    for name in ("alarms.jsonl", "tokens.jsonl"):
        cut_jsonl(run_dir / name, _OfStep, lambda line: line.step < steps_done)
    recorded = cut_jsonl(run_dir / "events.jsonl", DecisionHead, lambda line: line.seq < num_events)
    cut_jsonl(run_dir / "rollouts.jsonl", RolloutFate, is_trained)
    states = cut_back(run_dir / "ledger.jsonl", cut.schedule)
    size = max(lines.values(), default=0)  # all groups have one
    trained = [ordinal for ordinal, state in states.items() if state == "trained"]
    whole = sum(lines[ordinal] == size > 0 for ordinal in trained)
    measured = len(versions & set(range(1, steps_done + 1)))
    return [
        f"{name} is not whole: {num_known} of {num_all} {what} are left, and the rest is lost to {reader}"
        for name, num_known, num_all, what, reader in (
            ("events.jsonl", recorded, num_events, "events", "`slipstream replay`, report and accounting"),
            ("metrics.jsonl", measured, steps_done, "steps", "summary and report"),
            ("rollouts.jsonl", whole, len(trained), "trained groups", "report and `slipstream watch`"),
        )
        if num_known < num_all
    ]
