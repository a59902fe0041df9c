"""A crash at any instant: whatever the disk then holds, a resume finds one consistent cut, even if cut off itself."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from covering import with_slow
from drawn import drawn
from fragile_disk import FragileDisk, watching
from hypothesis import strategies as st

from slipstream.controller.ledger import Cut, Ledger, cut_back
from slipstream.core.clock import VirtualClock
from slipstream.core.errors import CheckpointError, DiskError
from slipstream.core.run_log import RolloutLine, Snapshot
from slipstream.core.training_sections import OptimizerConfig
from slipstream.core.types import StepDone
from slipstream.models.flat import FlatParameters
from slipstream.observe.metrics import MetricsWriter
from slipstream.observe.recorder import EventRecorder, RolloutRecorder
from slipstream.stages.resume import prepare_resume, set_aside
from slipstream.trainer.checkpoint import Checkpoints, Trained
from slipstream.trainer.checkpoint_folder import checkpoint_path
from slipstream.trainer.optim import AdamW

FATES = {0: "trained", 1: "skipped", 2: "trained", 3: "trained", 4: "failed", 5: "trained", 6: "trained", 7: "trained"}
STEPS = {0: 0, 2: 0, 3: 1, 5: 1, 6: 2, 7: 2}
ADMITTED_BY = {0: 4, 1: 7, 2: 9}  # by the end of each step: two or three are always under way


def tiny() -> Trained:
    model = torch.nn.Linear(2, 2)
    return model, AdamW(FlatParameters(model), OptimizerConfig(), total_updates=9)


@dataclass
class Truth:
    """What a cut at each step must contain, as lists that were kept by hand."""

    ledger: dict[int, dict[int, str]] = field(default_factory=dict)
    versions: dict[int, list[int]] = field(default_factory=dict)
    rollouts: dict[int, list[tuple[int, int | None]]] = field(default_factory=dict)
    events: dict[int, int] = field(default_factory=dict)
    saved_by: list[tuple[int, int]] = field(default_factory=list)  # (operations so far, step)

    def durable(self, operation: int) -> int | None:
        """The newest checkpoint that was reported as saved before `operation`."""
        return max((step for count, step in self.saved_by if count < operation), default=None)


def line(ordinal: int) -> RolloutLine:
    empty: dict[str, Any] = {"prompt_id": "", "task": "", "prompt": "", "completion": "", "answer": None, "parts": {}}
    times = {"replica": 0, "started_s": 0.0, "finished_s": 0.0, "scored_s": 0.0}
    return RolloutLine(
        ordinal=ordinal, sample=0, step=None, outcome="skipped", reward=0.0, failure=None, finish_reason="stop",
        num_tokens=1, versions=[(0, 0)], mean_behaviour_logprob=0.0, **empty, **times,
    )  # fmt: skip


def run(folder: Path, disk: FragileDisk, truth: Truth | None = None) -> Truth:
    """Three steps with a checkpoint after each, the last one saved twice; `keep` lets the first go.

    The order is that of controller and trainer: lines, their sync, the checkpoint. What follows it has no part in it.
    """
    truth = Truth() if truth is None else truth
    with ExitStack() as ends:
        _run(folder, disk, truth, ends)
    return truth


def _run(folder: Path, disk: FragileDisk, truth: Truth, ends: ExitStack) -> None:
    model, optimizer = tiny()
    checkpoints = ends.enter_context(closing(Checkpoints()))
    ledger = ends.enter_context(closing(Ledger(folder / "ledger.jsonl")))
    events = ends.enter_context(closing(EventRecorder(folder / "events.jsonl", VirtualClock())))
    metrics = ends.enter_context(closing(MetricsWriter(folder / "metrics.jsonl")))
    rollouts = ends.enter_context(closing(RolloutRecorder(folder / "rollouts.jsonl")))
    recorded: list[tuple[int, int | None]] = []
    known: dict[int, str] = {}
    next_ordinal = 0
    for step in (0, 1, 2):
        for ordinal in range(next_ordinal, ADMITTED_BY[step]):
            ledger.admit(ordinal)
            known[ordinal] = "admitted"
        next_ordinal = ADMITTED_BY[step]
        for ordinal, fate in FATES.items():
            if ordinal < next_ordinal - 1 and fate in ("skipped", "failed") and known[ordinal] == "admitted":
                ledger.dropped(ordinal, has_failed=fate == "failed")
                rollouts.record([line(ordinal)], step=None)
                known[ordinal] = fate
                recorded.append((ordinal, None))
        trained = tuple(ordinal for ordinal, at in STEPS.items() if at == step)
        ledger.trained(trained, step=step)
        metrics.write(step=step, version=step + 1, wall_s=0.0, metrics={"loss": 1.0})
        events.record(StepDone(step=step, version=step + 1, metrics={}), [])
        for ordinal in trained:
            known[ordinal] = "trained"
            recorded.append((ordinal, step))
        rollouts.record([line(ordinal) for ordinal in trained], step=step)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(step + 1.0)
        snapshot = Snapshot(
            next_ordinal=next_ordinal,
            steps_done=step + 1,
            dropped=[ordinal for ordinal, state in known.items() if state in ("skipped", "failed")],
            dropped_in_a_row=0,
            num_failed=0,
            readmit=[ordinal for ordinal, state in known.items() if state == "admitted"],
        )
        truth.ledger[step + 1] = dict(known)
        truth.versions[step + 1] = list(range(1, step + 2))
        truth.rollouts[step + 1] = list(recorded)
        truth.events[step + 1] = events.num_events
        for writer in (ledger, events, metrics, rollouts):
            writer.sync()
        extra = msgspec.to_builtins(Cut(schedule=snapshot, num_events=events.num_events))
        for _ in range(2 if step == 2 else 1):
            path = checkpoint_path(folder / "checkpoints", step + 1)
            checkpoints.save(path, {"policy": (model, optimizer)}, step=step + 1, keep=2, extra=extra)
            checkpoints.poll()
            truth.saved_by.append((disk.count, step + 1))
    events.record(StepDone(step=99, version=99, metrics={}), [])  # abandoned, whatever happens
    ledger.admit(next_ordinal)
    ledger.dropped(next_ordinal, has_failed=False)
    rollouts.record([line(next_ordinal)], step=None)


def check(folder: Path, truth: Truth, operation: int, what: str) -> None:
    """A resume of `folder` finds a cut, and the newest that anybody was told of."""
    resumed = prepare_resume(folder)
    newest = truth.durable(operation)
    if resumed.checkpoint is None:
        assert newest is None, f"{what}: checkpoint {newest} was told of, and is not found"
        assert (folder / "ledger.jsonl").read_bytes() == b"" if (folder / "ledger.jsonl").exists() else True
        return
    step = int(resumed.checkpoint.name.removeprefix("step_"))
    assert newest is None or step >= newest, f"{what}: checkpoint {newest} was told of, {step} is the newest found"
    model, optimizer = tiny()
    with closing(Checkpoints()) as checkpoints:
        assert checkpoints.load(resumed.checkpoint, {"policy": (model, optimizer)}).step == step
    assert {value for parameter in model.parameters() for value in parameter.flatten().tolist()} == {float(step)}, what
    fates = {line["ordinal"]: line["state"] for line in lines(folder / "ledger.jsonl")}
    assert fates == truth.ledger[step], what
    assert [line["version"] for line in lines(folder / "metrics.jsonl")] == truth.versions[step], what
    assert [(line["ordinal"], line["step"]) for line in lines(folder / "rollouts.jsonl")] == truth.rollouts[step], what
    assert [line["seq"] for line in lines(folder / "events.jsonl")] == list(range(truth.events[step])), what


def contents(folder: Path) -> str:
    """Return a digest of all names and bytes in `folder`: of pictures that are the same, one is resumed."""
    digest = hashlib.sha256()
    for path, folders, files in os.walk(folder):
        folders.sort()
        digest.update(repr((path[len(str(folder)) :], folders)).encode())
        for name in sorted(files):
            with open(os.path.join(path, name), "rb") as file:
                data = file.read()
            digest.update(repr((name, len(data))).encode() + data)
    return digest.hexdigest()


def lines(path: Path) -> list[Any]:
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def _no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is looked at afterwards need not survive anything."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.mark.usefixtures("_no_sync")
def test_a_resume_finds_a_consistent_cut_after_a_crash_at_any_instant(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "album").mkdir()
    disk = FragileDisk(folder, tmp_path / "album")
    with watching(disk):
        truth = run(folder, disk)
    assert disk.count > 100
    seen: set[tuple[str, int | None]] = set()
    for number, (what, kind, picture) in enumerate(disk.pictures()):
        operation = number // 3 + 1
        if (same := (contents(picture), truth.durable(operation))) not in seen:
            seen.add(same)
            check(picture, truth, operation, f"{kind} at {what}")
    assert len(seen) > 50


@pytest.mark.usefixtures("_no_sync")
def test_a_resume_may_be_cut_off_at_any_instant_as_well(folder: Path, tmp_path: Path) -> None:
    """From where the newest checkpoint is damaged, so that there is most to be done; and timelines are to be moved."""
    truth = run(folder, FragileDisk(folder))
    (folder / "checkpoints" / "step_3" / "rank_00000.safetensors").write_bytes(b"damaged")
    (folder / "timeline").mkdir()
    (folder / "timeline" / "trainer.jsonl").write_text("{}")
    (tmp_path / "album").mkdir()
    disk = FragileDisk(folder, tmp_path / "album")
    truth.saved_by = [(0, 2)]
    written = (folder / "ledger.jsonl").read_bytes()
    with watching(disk):
        check(folder, truth, 1, "undisturbed")
    assert (folder / "attempt_1" / "timeline" / "trainer.jsonl").is_file()
    seen: set[str] = set()
    for what, kind, picture in disk.pictures():
        if (same := contents(picture)) in seen:
            continue
        seen.add(same)
        check(picture, truth, 1, f"{kind} at {what}")
        attempts = sorted(picture.glob("attempt_*"))
        assert any((attempt / "ledger.jsonl").read_bytes() == written for attempt in attempts), f"{kind} at {what}"
        assert sum((attempt / "timeline" / "trainer.jsonl").exists() for attempt in attempts) == 1, what
        assert not list(picture.glob(".attempt_*"))


@pytest.mark.usefixtures("_no_sync")
@pytest.mark.parametrize(
    ("number", "stride"), with_slow([(errno.ENOSPC, 3), (errno.EIO, 7), (errno.EROFS, 11)], [(errno.ENOSPC, 1)])
)
def test_whatever_the_disk_refuses_is_told_and_can_be_gone_on_from(number: int, stride: int, tmp_path: Path) -> None:
    """The n-th operation of a run fails, and all later ones: a DiskError that says what to do; then there is space."""
    (tmp_path / "whole").mkdir()
    whole = FragileDisk(tmp_path / "whole")
    with watching(whole):
        run(whole.root, whole)
    refused = OSError(number, os.strerror(number))
    for first in range(1, whole.count + 1, stride):
        folder = tmp_path / str(first)
        folder.mkdir()
        disk, truth = FragileDisk(folder, fails_from=first, refused=refused), Truth()
        with watching(disk):
            if whole.names[first - 1].split()[0] in ("unlink", "rmdir"):
                with suppress(DiskError):  # what deletes may fail unheard, and what comes after it may be nothing
                    run(folder, disk, truth)
            else:
                with pytest.raises(DiskError, match=os.strerror(number)) as told:
                    run(folder, disk, truth)
                assert told.value.hint is not None
        check(folder, truth, disk.count + 1, f"{os.strerror(number)} from {disk.names[first - 1]} on")


# The ledger alone


@drawn(40, 100, data=st.data())
def test_a_ledger_cut_back_is_what_the_snapshot_says(data: st.DataObject) -> None:
    """Whatever came after a checkpoint, over several attempts and in any order of dropping and training."""
    draw = data.draw
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "ledger.jsonl")
        fates: dict[int, str] = {}
        entries: list[dict[str, Any]] = []

        def grow(step: int) -> None:
            for _ in range(draw(st.integers(0, 3))):
                fates[len(fates)] = "admitted"
                entries.append({"ordinal": len(fates) - 1, "state": "admitted"})
            for ordinal in [o for o, state in fates.items() if state == "admitted"]:
                fate = draw(st.sampled_from(["admitted", "admitted", "trained", "skipped", "failed"]))
                if fate != "admitted":
                    fates[ordinal] = fate
                    entries.append({"ordinal": ordinal, "state": fate} | ({"step": step} if fate == "trained" else {}))

        steps = draw(st.integers(0, 4))
        for step in range(steps):
            grow(step)
        kept = dict(fates)
        snapshot = Snapshot(
            next_ordinal=len(fates),
            steps_done=steps,
            dropped=sorted(o for o, state in fates.items() if state in ("skipped", "failed")),
            dropped_in_a_row=0,
            num_failed=0,
            readmit=sorted(o for o, state in fates.items() if state == "admitted"),
        )
        for step in range(steps, steps + draw(st.integers(0, 3))):
            grow(step)
        torn = draw(st.sampled_from([b"", b'{"ordinal":', b"\x00\x00\n", b'{"ordinal":9']))
        path.write_bytes(b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries) + torn)
        for _ in range(2):
            cut_back(path, snapshot)
            found = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
            assert {entry["ordinal"]: entry["state"] for entry in found} == kept
            assert all(entry.get("step", -1) < steps for entry in found)
            trained = [entry["ordinal"] for entry in found if entry["state"] == "trained"]
            assert len(trained) == len(set(trained))


def test_a_ledger_of_another_run_is_refused_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    written = b'{"ordinal":0,"state":"admitted"}\n{"ordinal":0,"state":"trained","step":4}\n'
    snapshot = Snapshot(next_ordinal=1, steps_done=1, dropped=[], dropped_in_a_row=0, num_failed=0, readmit=[])
    path.write_bytes(written)
    with pytest.raises(CheckpointError, match="does not fit"):
        cut_back(path, snapshot)
    assert path.read_bytes() == written


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def zeroed(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.usefixtures("_no_sync")
@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl", "rollouts.jsonl"])
@pytest.mark.parametrize("lose", [cut, zeroed, Path.unlink], ids=["cut", "zeroed", "deleted"])
def test_lines_that_are_gone_are_told_of(name: str, lose: Callable[[Path], None], folder: Path) -> None:
    run(folder, FragileDisk(folder))
    for path in (folder / "events.jsonl", folder / "rollouts.jsonl"):  # what was abandoned may go unnoticed
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    lose(folder / name)
    resumed = prepare_resume(folder)
    assert [note.split(":")[0] for note in resumed.notes if "not whole" in note] == [f"{name} is not whole"]
    [note] = [note for note in resumed.notes if "not whole" in note]
    num_all = {"rollouts.jsonl": len(STEPS)}.get(name, 3)
    assert f"{num_all - 1 if lose is cut else 0} of {num_all}" in note
    assert resumed.cut is not None
    with closing(EventRecorder(folder / "events.jsonl", VirtualClock(), num_events=resumed.cut.num_events)) as events:
        assert events.num_events == resumed.cut.num_events, "numbers go on as if nothing was lost"


@pytest.mark.usefixtures("_no_sync")
def test_what_an_attempt_came_to_is_set_aside_with_it(folder: Path) -> None:
    """A report of the next one would show it as its own; alarms and tokens are those of the steps that are left."""
    run(folder, FragileDisk(folder))
    (folder / "summary.json").write_text('{"status": "interrupted"}')
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    for name in ("alarms.jsonl", "tokens.jsonl"):
        (folder / name).write_text("".join(f'{{"step":{step}}}\n' for step in (0, 2, 3)))
    written = {path.name: path.read_bytes() for path in folder.glob("*.jsonl")}
    assert len(written) == 6
    resumed = prepare_resume(folder)
    assert not (folder / "summary.json").exists()
    assert (resumed.attempt / "summary.json").read_text() == '{"status": "interrupted"}'
    assert not (folder / "model").exists(), "it would be evaluated, served and exported as what comes after it"
    assert (resumed.attempt / "model" / "config.json").is_file()
    again = set_aside(folder)
    assert (resumed.attempt / "model").is_dir(), "the newest that there is stays, whatever comes to no end"
    (folder / "model").mkdir()
    newest = set_aside(folder)
    models = [attempt for attempt in (resumed.attempt, again, newest) if (attempt / "model").exists()]
    assert models == [newest], "and no other, as each may be large"
    assert {path.name: path.read_bytes() for path in resumed.attempt.glob("*.jsonl")} == written
    for name in ("alarms.jsonl", "tokens.jsonl"):
        assert lines(folder / name) == [{"step": 0}, {"step": 2}]


@pytest.mark.usefixtures("_no_sync")
def test_a_resume_on_a_full_disk_leaves_no_copies_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(folder, FragileDisk(folder))
    copy, before = shutil.copy2, {path.name for path in folder.iterdir()}

    def filling(source: Path, target: Path) -> None:
        copy(source, target)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copy2", filling)
    with pytest.raises(DiskError, match="free some space"):
        prepare_resume(folder)
    assert {path.name for path in folder.iterdir()} == before


@pytest.mark.usefixtures("_no_sync")
def test_a_whole_run_is_told_nothing_of(folder: Path) -> None:
    run(folder, FragileDisk(folder))
    assert not [note for note in prepare_resume(folder).notes if "not whole" in note]
