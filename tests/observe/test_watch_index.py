"""What the watch page knows of growing, torn, cut, large and damaged files, against reading them whole."""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from drawn import drawn
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_loop import RAW_START_S, VERDICT, Loop
from written import CONFIG, SNAPSHOT, event, loop_at

from slipstream.core.run_log import PHASES, Decision, decode_decision, read_rollouts
from slipstream.core.types import StepDone
from slipstream.observe.accounting import read_accounting
from slipstream.observe.timeline import Slice, read_timeline
from slipstream.observe.tokens import TokenRecorder, read_tokens
from slipstream.observe.watch import events as events_module
from slipstream.observe.watch import timelines as timelines_module
from slipstream.observe.watch.answers import ANSWERS, BadRequest
from slipstream.observe.watch.buckets import BoundedCurve, Buckets
from slipstream.observe.watch.events import EventIndex
from slipstream.observe.watch.index import LiveVerdict, RunIndex
from slipstream.observe.watch.rollouts import RolloutIndex, TokenIndex
from slipstream.observe.watch.tail import Tail
from slipstream.observe.watch.timelines import TimelineIndex


@pytest.fixture(scope="module")
def made() -> Loop:
    return Loop(seed=1, steps=20, lost_at_s=6.0).run()


@pytest.fixture(scope="module")
def run_dir(made: Loop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.write(tmp_path_factory.mktemp("runs") / "made")


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For runs that never happened: nobody accounts for their seconds."""
    return tmp_path_factory.mktemp("made_up")


def caught_up(index: Any) -> Any:
    while index.advance():
        pass
    return index


def answer(index: RunIndex, name: str, **query: Any) -> dict[str, Any]:
    found = ANSWERS[f"/api/{name}"](index, {key: str(value) for key, value in query.items()})
    return json.loads(msgspec.json.encode(found))


def all_decisions(path: Path) -> list[tuple[Decision, float]]:
    """With the run's time of each, where there is one attempt."""
    found = [decode_decision(line) for line in path.read_bytes().splitlines()]
    return [(decision, decision.time_s - found[0].time_s) for decision in found]


# One file


def test_a_tail_gives_every_whole_line_once(tmp_path: Path) -> None:
    path = tmp_path / "f"
    tail = Tail(path)
    assert tail.read() == (0, b"")
    rng = random.Random(0)
    lines = [b"%d" % n + b"x" * rng.randrange(30) + b"\n" for n in range(300)]
    data, written, found = b"".join(lines), 0, b""
    with path.open("wb") as file:
        while written < len(data) or tail.offset < len(data):
            count = rng.randrange(50)
            file.write(data[written : written + count])
            file.flush()
            written += count
            offset, piece = tail.read(max_bytes=40)
            assert offset == len(found)
            assert piece.endswith(b"\n") or not piece
            assert not tail.is_replaced()
            found += piece
    assert found == data


def test_a_tail_reads_a_line_that_is_longer_than_a_piece(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"a" * 1000 + b"\nb\n" + b"c" * 5000)
    tail = Tail(tmp_path / "f")
    found = b""
    while (piece := tail.read(max_bytes=64)[1]) != b"":
        found += piece
    assert found == b"a" * 1000 + b"\nb\n", "and not the torn one"


def test_a_tail_reads_a_line_that_lists_millions_of_groups(tmp_path: Path) -> None:
    line = b"1234567," * 9_000_000 + b"\n"
    (tmp_path / "f").write_bytes(line)
    assert len(Tail(tmp_path / "f").read()[1]) == len(line)


def test_a_file_that_is_replaced_between_a_look_and_a_read_is_not_read_on(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old line\n" * 4)
    tail = Tail(path)
    tail.read()
    assert not tail.is_replaced()
    (tmp_path / "new").write_bytes(b"new line\n" * 8)
    os.replace(tmp_path / "new", path)
    assert tail.read() == (36, b"")
    assert tail.is_replaced()


REPLACED: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "shorter": lambda lines: lines[:4],
    "gone": lambda lines: [],
    "cut, and grown beyond": lambda lines: lines[:4] + [b"other %d\n" % n for n in range(50)],
    "other lines with the same ends": lambda lines: [b"xxxx" + line[4:] for line in lines],
}


@pytest.mark.parametrize("how", REPLACED)
@pytest.mark.parametrize("in_place", [False, True])
def test_a_tail_knows_another_file(tmp_path: Path, how: str, in_place: bool) -> None:
    path, lines = tmp_path / "f", [b"line %d %s\n" % (n, b"-" * 80) for n in range(20)]
    path.write_bytes(b"".join(lines))
    tail = Tail(path)
    tail.read()
    new = b"".join(REPLACED[how](lines))
    if in_place:
        path.write_bytes(new)
        assert tail.is_replaced() or how == "other lines with the same ends"
    else:
        (tmp_path / "new").write_bytes(new)
        os.replace(tmp_path / "new", path)
        assert tail.is_replaced()
    path.unlink()
    assert tail.is_replaced()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 500), st.floats(0, 60), st.floats(0, 10), st.sampled_from("ab")), max_size=60))
def test_buckets_lose_nothing_and_stay_small(spans: list[tuple[float, float, float, str]]) -> None:
    buckets = Buckets(width=0.5, capacity=16)
    for start, length, amount, name in spans:
        buckets.add(name, start, start + length, amount)
    for name in buckets.names:
        sums = buckets.of(name)
        assert len(sums) <= 16
        assert sums.sum() == pytest.approx(sum(amount for _, _, amount, other in spans if other == name))
        edges = [(i * buckets.width, (i + 1) * buckets.width) for i in range(len(sums))]
        for (low, high), found in zip(edges, sums, strict=True):
            inside = [
                amount * (1.0 if length == 0 else max(0.0, min(high, start + length) - max(low, start)) / length)
                for start, length, amount, other in spans
                if other == name and (length > 1e-9 or low <= start < high)
            ]
            if all(length > 1e-6 or length == 0 for _, length, _, _ in spans):
                assert found == pytest.approx(sum(inside), abs=1e-6)


def test_a_curve_keeps_its_extremes_and_its_mean() -> None:
    curve, rng = BoundedCurve(capacity=16), random.Random(0)
    values = [rng.gauss(0, 1) for _ in range(1000)]
    for step, value in enumerate(values):
        curve.add(step, value)
        assert len(curve.points()) <= 17
    points = curve.points()
    assert min(point[2] for point in points) == min(values)
    assert max(point[3] for point in points) == max(values)
    assert [point[0] for point in points] == sorted(point[0] for point in points)
    first = values[: curve.stride]
    assert points[0] == pytest.approx((np.mean(range(curve.stride)), np.mean(first), min(first), max(first)))
    assert points[-1][0] > 999 - curve.stride, "the newest values are among them"


# Events


@pytest.mark.parametrize("max_marks", [512, 5])
def test_a_passage_is_the_fold_of_all_events(run_dir: Path, monkeypatch: pytest.MonkeyPatch, max_marks: int) -> None:
    monkeypatch.setattr(events_module, "MAX_MARKS", max_marks)
    monkeypatch.setattr(events_module, "FIRST_SPACING", 16)
    index = caught_up(EventIndex(run_dir / "events.jsonl"))
    assert 1 < len(index._marks) <= max_marks
    offsets = [*(mark.offset for mark in index._marks), index.tail.offset]
    assert max(b - a for a, b in itertools.pairwise(offsets)) < 0.5 * index.tail.offset, "they are spread evenly"
    read: list[int] = []
    monkeypatch.setattr(
        index, "lines_within", lambda begin, end: read.append(begin) or type(index).lines_within(index, begin, end)
    )
    index.passage(index.end_s, index.end_s)
    tail = (run_dir / "events.jsonl").read_bytes()[read[0] :]
    assert tail.count(b"\n") <= 16 + 1, "a live page asks for the end, again and again"
    lines = all_decisions(run_dir / "events.jsonl")
    rng = random.Random(0)
    for _ in range(20):
        start_s, end_s = sorted(rng.uniform(-1, index.end_s + 2) for _ in range(2))
        found = index.passage(start_s, end_s)
        assert found.loop == loop_at(lines, start_s)
        groups = dict(found.loop.groups)
        for move in found.moves:
            assert start_s < move.time_s <= end_s
            if move.fate is None:
                groups[move.group.ordinal] = move.group
            else:
                del groups[move.group.ordinal]
        assert groups == loop_at(lines, end_s).groups
        versions = dict(found.loop.versions)
        for swap in found.swaps:
            versions[swap.replica] = swap.version
        assert {r: v for r, v in versions.items() if v >= 0} == loop_at(lines, end_s).versions
        steps = [
            (at_s, d.event.version) for d, at_s in lines if isinstance(d.event, StepDone) and start_s < at_s <= end_s
        ]
        assert found.steps == steps
        assert found.end_s == end_s


@pytest.mark.parametrize("spacing", [8, 512])
def test_a_passage_that_is_too_long_is_told_in_parts(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, spacing: int
) -> None:
    index = caught_up(EventIndex(run_dir / "events.jsonl"))
    whole = index.passage(0.0, index.end_s)
    monkeypatch.setattr(events_module, "MAX_REPLAYED_LINES", 40)
    monkeypatch.setattr(events_module, "FIRST_SPACING", spacing)
    index = caught_up(EventIndex(run_dir / "events.jsonl"))
    lines = all_decisions(run_dir / "events.jsonl")
    moves, at_s, num_parts = [], -1.0, 0
    while at_s < index.end_s:
        part = index.passage(at_s, index.end_s)
        assert part.end_s > at_s
        assert part.loop == loop_at(lines, at_s)
        moves += part.moves
        at_s = part.end_s
        num_parts += 1
    assert moves == whole.moves
    assert num_parts > 5


def test_phases_are_counted_over_the_whole_run(made: Loop, run_dir: Path) -> None:
    index = caught_up(EventIndex(run_dir / "events.jsonl"))
    lines = all_decisions(run_dir / "events.jsonl")
    seconds = dict.fromkeys(PHASES, 0.0)
    for (_, at_s), (_, next_s) in itertools.pairwise(lines):
        for phase, count in loop_at(lines, at_s).counts.items():
            seconds[phase] += count * (next_s - at_s)
    for phase in PHASES:
        total = index.phases.of(phase).sum() + index._group_seconds[phase]
        assert total == pytest.approx(seconds[phase], abs=1e-6)
    assert seconds["ready"] > 1


def test_an_index_that_follows_is_one_that_reads_the_whole(made: Loop, run_dir: Path, folder: Path) -> None:
    """The run grows between looks; lines are torn in between."""
    growing = folder / "run"
    following = RunIndex(growing)
    assert not following.advance()
    assert following.life()[0] == "waiting"
    for until_s in (0.0, 2.05, 3.0, 4.0, 4.5, 7.0, 9.0, 1000.0):
        made.write(growing, until_s=until_s)
        for name in ("events.jsonl", "rollouts.jsonl", "metrics.jsonl"):
            with (growing / name).open("ab") as file:
                file.write(b'{"torn')
        caught_up(following)
        assert following.num_damaged == 0
        assert following.revision == 0, "nothing that was known is void"
        fresh = caught_up(RunIndex(growing))
        for query in (("run", {}), ("overview", {}), ("groups", {}), ("loop", {"from": 3, "to": 8}),
                      ("curves", {"names": "reward,entropy"})):  # fmt: skip
            mine, theirs = (answer(index, query[0], **query[1]) for index in (following, fresh))
            mine.pop("silent_s", None), theirs.pop("silent_s", None)
            assert mine == theirs
    assert following.life()[0] == "running"
    made.write(growing)
    caught_up(following)
    assert following.life()[0] == "done"


def test_nothing_is_written(run_dir: Path) -> None:
    def state() -> dict[str, tuple[int, int]]:
        return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(run_dir.rglob("*"))}

    before = state()
    index = caught_up(RunIndex(run_dir))
    for name, query in QUERIES:
        answer(index, name, **query)
    assert state() == before


def resumed(made: Loop, run_dir: Path, *, reboot: bool) -> tuple[Path, float]:
    """The run as `--resume` leaves it: cut at a step in its middle, and begun again, perhaps after a reboot."""
    made.write(run_dir, until_s=9.0)
    kept = [line for line in made.lines if line["time_s"] <= RAW_START_S + 6.5]
    while kept[-1]["event"]["type"] != "StepDone":
        kept.pop()
    kept[-1] = kept[-1] | {"commands": []}
    attempt = run_dir / "attempt_1"
    attempt.mkdir()
    (run_dir / "timeline").rename(attempt / "timeline")
    (run_dir / "events.jsonl").rename(attempt / "events.jsonl")
    version = kept[-1]["event"]["version"]
    raw_s = 300.0 if reboot else RAW_START_S + 500.0
    again = Loop(seed=9, steps=made.steps).run()
    shift_s = raw_s - RAW_START_S
    snapshot = {**SNAPSHOT, "next_ordinal": 40, "steps_done": version, "readmit": [38, 39]}
    lines = [dict(line, time_s=line["time_s"] + shift_s) for line in again.lines if line["time_s"] < RAW_START_S + 5]
    lines[0] = lines[0] | {"event": lines[0]["event"] | {"snapshot": snapshot}}
    lines = [line for line in lines if line["event"]["type"] in ("ScheduleBegan", "Swapped")]
    (run_dir / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept + lines))
    for path in (attempt / "timeline").iterdir():
        (run_dir / "timeline").mkdir(exist_ok=True)
        text = path.read_text()
        found = [json.loads(line) for line in text.splitlines()]
        moved = [
            {key: value + round(shift_s * 1e9) if key.endswith("_ns") and value > 10**12 else value
             for key, value in record.items()}
            for record in found
        ]  # fmt: skip
        (run_dir / "timeline" / path.name).write_text("".join(json.dumps(record) + "\n" for record in moved))
    return run_dir, kept[-1]["time_s"] - RAW_START_S


@pytest.mark.parametrize("reboot", [False, True])
def test_the_attempts_of_a_resumed_run_follow_one_another(made: Loop, folder: Path, reboot: bool) -> None:
    run_dir, cut_s = resumed(made, folder, reboot=reboot)
    index = caught_up(RunIndex(run_dir))
    first, second = index.events.stretches
    assert (first.start_s, first.end_s) == (0.0, pytest.approx(cut_s))
    assert second.start_s == pytest.approx(cut_s)
    before, after = (answer(index, "loop", **{"from": at_s, "to": at_s})["loop"] for at_s in (cut_s - 1e-3, cut_s + 1))
    assert before["version"] == after["version"] - 1
    assert {row[0]: row[1] for row in after["groups"]} == {38: "waiting", 39: "waiting"}, "owed"
    lanes = answer(index, "lanes", **{"from": cut_s - 2, "to": cut_s + 2})["lanes"]
    slices = [
        record for record in read_timeline(run_dir / "attempt_1/timeline/trainer.jsonl") if isinstance(record, Slice)
    ]
    for start_s, end_s, state, *_ in lanes["trainer"]:
        if end_s <= cut_s and state != "absent":
            raw_ns = round((start_s + RAW_START_S) * 1e9)
            assert any(abs(one.start_ns - raw_ns) < 1e6 and one.state == state for one in slices)
    assert any(end_s > cut_s + 0.5 for _, end_s, *_ in lanes["trainer"]), (
        "what the second attempt did has its place, too"
    )
    assert any(end_s < cut_s for _, end_s, *_ in lanes["trainer"])


def test_a_resume_while_somebody_watches(made: Loop, folder: Path) -> None:
    """Files are cut and timelines move: what was known is void, and the new state is that of a fresh look."""
    run_dir = made.write(folder / "run", until_s=9.0)
    index = caught_up(RunIndex(run_dir))
    for path in list(run_dir.rglob("*.jsonl")):
        path.unlink()
    (run_dir / "timeline").rmdir()
    caught_up(index)
    resumed(made, run_dir, reboot=False)
    while index.advance():
        assert index.end_s <= caught_up(RunIndex(run_dir)).end_s + 1e-6, "nothing is left of what was known"
    caught_up(index)
    assert index.revision > 0
    mine, fresh = answer(index, "run"), answer(caught_up(RunIndex(run_dir)), "run")
    for found in (mine, fresh):
        del found["revision"], found["silent_s"]
    assert mine == fresh
    assert mine["attempts"] == 2


def test_timelines_that_a_resume_set_aside_are_read_once(
    made: Loop, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, _ = resumed(made, folder, reboot=False)
    index = caught_up(RunIndex(run_dir))
    index.advance()
    opened: list[str] = []
    built: list[str] = []
    open_path, begin = Path.open, TimelineIndex.__init__

    def noting_open(path: Path, *args: Any, **kwargs: Any) -> Any:
        opened.append(path.parts[len(run_dir.parts)])
        return open_path(path, *args, **kwargs)

    def noting_begin(self: TimelineIndex, path: Path) -> None:
        built.append(path.parts[len(run_dir.parts)])
        begin(self, path)

    monkeypatch.setattr(Path, "open", noting_open)
    monkeypatch.setattr(TimelineIndex, "__init__", noting_begin)
    assert not index.advance()
    assert "timeline" in opened
    assert "attempt_1" not in opened
    assert built == []
    (run_dir / "attempt_2").mkdir()
    index.advance()
    (run_dir / "timeline").rename(run_dir / "attempt_2" / "timeline")
    caught_up(index)
    assert set(built) == {"attempt_2"}
    whole = {path: caught_up(TimelineIndex(path)).latest_ns for path in run_dir.glob("attempt_*/timeline/*")}
    assert {path: index.timelines[path].latest_ns for path in whole} == whole
    assert {path.parent.parent.name for path in whole} == {"attempt_1", "attempt_2"}


def test_a_timeline_that_was_not_read_yet_has_no_lane(made: Loop, folder: Path) -> None:
    """The controller's file tells when an attempt began; another's may not be there yet, or be replaced just now."""
    run_dir = made.write(folder / "run")
    index = caught_up(RunIndex(run_dir))
    (run_dir / "timeline" / "trainer.jsonl").write_bytes(b"")
    index.advance()
    lanes = answer(index, "lanes", **{"from": 0, "to": 9})["lanes"]
    assert "trainer" not in lanes
    assert lanes["controller"]


@pytest.fixture(scope="module")
def other_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    loop = Loop(seed=4, steps=2, replicas=1, start_s=RAW_START_S + 60)
    return loop.run().write(tmp_path_factory.mktemp("runs") / "other")


@drawn(8, 120, data=st.data())
def test_whatever_becomes_of_the_files_there_is_an_answer(
    made: Loop, run_dir: Path, other_run: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Each is gone, cut anywhere or another run's, in place or anew, while one who watches has read a part of it."""
    names = sorted(str(path.relative_to(run_dir)) for path in run_dir.rglob("*.json*"))
    index = caught_up(RunIndex(made.write(tmp_path_factory.mktemp("runs") / "watched")))
    for _ in range(data.draw(st.integers(1, 6))):
        for name in data.draw(st.lists(st.sampled_from(names), unique=True)):
            target = index.run_dir / name
            target.parent.mkdir(parents=True, exist_ok=True)
            source = data.draw(st.sampled_from([run_dir, other_run])) / name
            if data.draw(st.booleans()):
                target.unlink(missing_ok=True)
            if source.exists():
                bytes_ = source.read_bytes()
                target.write_bytes(bytes_[: data.draw(st.sampled_from([0, len(bytes_) // 3, len(bytes_)]))])
        for _ in range(data.draw(st.integers(0, 4))):
            index.advance()
        for name, query in QUERIES:
            answer(index, name, **query)


def test_damaged_lines_are_counted_and_passed_over(run_dir: Path, folder: Path) -> None:
    for path in run_dir.rglob("*.jsonl"):
        target = folder / path.relative_to(run_dir)
        target.parent.mkdir(exist_ok=True)
        lines = path.read_bytes().splitlines(keepends=True)
        bad = [b"\x00\x00\n", b"null\n", b"[" * 60_000 + b"\n", b'{"ordinal": 99999999999, "outcome": "trained"}\n']
        bad.append(b'{"ordinal": 0, "step": 99999999999, "outcome": "trained"}\n')
        target.write_bytes(b"".join(lines[:2] + bad + lines[2:]))
    index, sound = caught_up(RunIndex(folder)), caught_up(RunIndex(run_dir))
    assert index.num_damaged >= 4 * 5
    for query in (("loop", {"from": 3, "to": 9}), ("lanes", {"from": 3, "to": 9})):
        assert answer(index, query[0], **query[1]) == answer(sound, query[0], **query[1])


# Timelines


def test_lanes_are_what_the_timelines_say(run_dir: Path) -> None:
    index = caught_up(RunIndex(run_dir))
    rng = random.Random(0)
    for _ in range(20):
        start_s, end_s = sorted(rng.uniform(0, index.end_s) for _ in range(2))
        lanes = answer(index, "lanes", **{"from": start_s, "to": end_s})["lanes"]
        assert list(lanes) == ["controller", "generator-0", "generator-1", "rewards", "trainer"]
        for name, bars in lanes.items():
            truth = [
                (round(one.start_ns * 1e-9 - RAW_START_S, 4), one.state)
                for one in read_timeline(run_dir / "timeline" / f"{name}.jsonl")
                if isinstance(one, Slice)
                and one.end_ns > (start_s + RAW_START_S) * 1e9
                and one.start_ns < (end_s + RAW_START_S) * 1e9
            ]
            assert [(bar[0], bar[2]) for bar in bars if bar[2] != "absent"] == truth


def test_a_window_with_much_in_it_is_shown_in_outline(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = caught_up(RunIndex(run_dir))
    span = {"from": 0, "to": index.end_s}
    full = answer(index, "lanes", **span)["lanes"]["trainer"]
    coarse = answer(index, "lanes", **span, parts=50)["lanes"]["trainer"]
    monkeypatch.setattr(timelines_module, "MAX_WINDOW_BYTES", 100)
    monkeypatch.setattr(timelines_module, "FIRST_SPACING", 4)
    outline = answer(caught_up(RunIndex(run_dir)), "lanes", **span, parts=50)["lanes"]["trainer"]

    def seconds(bars: list[Any], state: str) -> float:
        return sum((bar[1] - bar[0]) * bar[3] for bar in bars if bar[2] == state)

    assert len(full) > 55
    assert len(coarse) <= 52
    assert len(outline) <= 52
    for state in ("forward_backward", "wait_generation"):
        assert seconds(coarse, state) == pytest.approx(seconds(full, state), rel=0.35)
        assert seconds(outline, state) == pytest.approx(seconds(full, state), rel=0.35)


def test_processes_that_came_and_went(tmp_path: Path) -> None:
    path = tmp_path / "trainer.jsonl"
    records = [
        {"kind": "process", "process": "trainer", "pid": 1, "time_ns": 10},
        {"kind": "slice", "state": "decode", "start_ns": 10, "end_ns": 30},
        {"kind": "process", "process": "trainer", "pid": 2, "time_ns": 50},
        {"kind": "slice", "state": "decode", "start_ns": 50, "end_ns": 70},
        {"kind": "end", "time_ns": 70},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    index = caught_up(TimelineIndex(path))
    assert index.gone(0, 100) == [("absent", 0, 10), ("lost", 30, 50), ("absent", 70, 100)]
    assert index.gone(35, 60) == [("lost", 35, 50)]
    assert [(one.start_ns, one.end_ns) for one in index.slices(0, 100) or []] == [(10, 30), (50, 70)]


# Rollouts and tokens


def test_every_group_is_found_and_read(run_dir: Path) -> None:
    index = caught_up(RolloutIndex(run_dir / "rollouts.jsonl"))
    groups: dict[int, list[Any]] = {}
    for line in read_rollouts(run_dir / "rollouts.jsonl"):
        groups.setdefault(line.ordinal, []).append(line)
    assert index.num_groups == len(groups)
    for ordinal, lines in groups.items():
        row = index.row_of(ordinal)
        assert row is not None
        assert index.lines(row) == lines
        assert index.lines(row, limit=1) == lines[:1]
        group = index.group(row)
        assert (group.step, group.outcome, group.count) == (lines[0].step, lines[0].outcome, len(lines))
        assert group.mean_reward == pytest.approx(np.mean([line.reward for line in lines]))
    assert index.row_of(-1) is None
    assert index.row_of(10**9) is None
    steps = [index.group(row).step for row in range(index.num_groups)]
    for step in range(20):
        assert index.row_of_step(step) == steps.index(step)
    assert index.row_of_step(99) == index.num_groups


def test_tokens_are_found_also_after_they_were_thinned(run_dir: Path, tmp_path: Path) -> None:
    lines = list(read_tokens(run_dir / "tokens.jsonl"))
    path = tmp_path / "tokens.jsonl"
    recorder = TokenRecorder(path, every=2, max_bytes=3000)
    index = TokenIndex(path)
    ordinals = list(dict.fromkeys(line.ordinal for line in lines))
    for ordinal in ordinals:
        recorder.record([line for line in lines if line.ordinal == ordinal])
        caught_up(index)
        assert all(index.lines(o) == [line for line in lines if line.ordinal == o] for o in ordinals if o in index)
    recorder.close()
    assert recorder.every > 2, "the test needs a file that is thinned"
    assert {o for o in ordinals if o in index} == {line.ordinal for line in read_tokens(path)}
    assert index.lines(1) == []


# Answers


QUERIES: list[tuple[str, dict[str, Any]]] = [
    ("run", {}),
    ("loop", {"from": 2, "to": 8}),
    ("lanes", {"from": 2, "to": 8}),
    ("overview", {"points": 50}),
    ("step", {"step": 3}),
    ("step", {"at": 5.0}),
    ("curves", {"names": "reward,eval_accuracy,nothing"}),
    ("groups", {"step": 3, "tokens": 1}),
    ("group", {"ordinal": 4}),
]


def test_answers_of_a_folder_that_is_not_there(tmp_path: Path) -> None:
    index = caught_up(RunIndex(tmp_path / "nowhere"))
    for name, query in QUERIES:
        answer(index, name, **query)
    assert answer(index, "run")["life"] == "waiting"
    assert answer(index, "group", ordinal=4)["group"] is None


@pytest.mark.parametrize(
    ("name", "query"),
    [
        ("loop", {"from": "soon", "to": 3}),
        ("loop", {"to": 3}),
        ("loop", {"from": "nan", "to": 3}),
        ("lanes", {"from": 0, "to": "inf"}),
        ("group", {}),
        ("group", {"ordinal": "__proto__"}),
        ("step", {"step": "1e999"}),
    ],
)
def test_bad_queries(run_dir: Path, name: str, query: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="is a number"):
        answer(caught_up(RunIndex(run_dir)), name, **query)


def test_steps_and_times(made: Loop, run_dir: Path) -> None:
    index = caught_up(RunIndex(run_dir))
    begins = [start_s - RAW_START_S for start_s, _, state, _ in made.spans["trainer"] if state == "forward_backward"]
    for step in (0, 7, 19):
        assert answer(index, "step", step=step)["start_s"] == pytest.approx(begins[step], abs=1e-3)
        assert answer(index, "step", at=begins[step] + 0.01)["step"] == step
    assert answer(index, "step", at=0)["step"] == -1
    assert answer(index, "step", step=20) == {"step": 20, "steps": 20, "start_s": None, "end_s": None}


def test_groups_with_tokens_are_found_ahead_then_behind_and_else_all_are_told(made: Loop, folder: Path) -> None:
    index = caught_up(RunIndex(made.write(folder)))
    written = [row for row in range(index.rollouts.num_groups) if index.rollouts.group(row).ordinal in index.tokens]
    assert 6 < len(written) < index.rollouts.num_groups

    def rows(**query: int) -> list[int]:
        found = answer(index, "groups", count=3, **query)
        assert found["has_tokens"] == bool(index.tokens.places)
        return [group["row"] for group in found["groups"]]

    assert rows(row=written[2], tokens=1) == written[2:5]
    assert rows(row=written[2], tokens=0) == [written[2], written[2] + 1, written[2] + 2]
    for row in written[-3:]:
        del index.tokens.places[index.rollouts.group(row).ordinal]
    assert rows(row=index.rollouts.num_groups - 1, tokens=1) == written[-6:-3], "the newest ones before it"
    index.tokens.reset()
    assert rows(row=0, tokens=1) == [0, 1, 2]


def test_of_very_many_groups_a_part_is_drawn_and_all_are_counted(tmp_path: Path) -> None:
    """2000 groups in the air, whose 8000 completions finish."""
    began = event("ScheduleBegan", config={**CONFIG, "groups_per_step": 700, "completions_per_group": 4})
    starts = [{"type": "StartGroup", "ordinal": o, "replica": 0} for o in range(2000)]
    lines: list[dict[str, Any]] = [{"seq": 0, "time_s": 0.0, "event": began, "commands": starts}]
    for ordinal in range(2000):
        finished = event("CompletionFinished", ordinal=ordinal)
        lines += [{"seq": 0, "time_s": 1 + ordinal / 1000, "event": finished, "commands": []}] * 4
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    index = caught_up(RunIndex(tmp_path))
    found = answer(index, "loop", **{"from": 0.5, "to": 3.0})
    assert found["every"] == 4
    assert len(found["loop"]["groups"]) == 500
    assert len(found["moves"]) == 500, "the last completion of each group that is told of"
    assert {group[0] % 4 for _, group, _ in found["moves"]} == {0}
    assert found["counts"][0] == [0.5, 0, 2000, 0, 0, 0]
    for at_s, *counts in found["counts"][1:]:
        truth = sum(1 + o / 1000 <= at_s for o in range(2000))
        assert counts[2] == pytest.approx(truth, abs=12)
        assert counts[1] == 2000 - counts[2]
        assert sum(counts) == 2000
    assert len(found["counts"]) <= 301


def test_texts_and_lists_in_answers_are_bounded(folder: Path) -> None:
    made = Loop(steps=4, hostile="x" * 50_000).run()
    index = caught_up(RunIndex(made.write(folder)))
    group = answer(index, "group", ordinal=0)
    assert len(group["prompt"]) == len(group["rollouts"][0]["completion"]) == 20_000
    assert group["rollouts"][0]["ending"] == "x" * 2_000
    assert answer(index, "group", ordinal=1)["rollouts"][0]["ending"] == ""
    assert len(answer(index, "groups", count=10**6)["groups"]) <= 60
    assert all(len(row["prompt"]) <= 80 for row in answer(index, "groups")["groups"])
    names = ",".join(["reward"] * 500)
    assert len(answer(index, "curves", names=names)["curves"]) == 1


def test_axes_of_curves_follow_the_rule_of_the_report(tmp_path: Path) -> None:
    lines = [
        {"step": i, "completion_tokens_mean": 5.74 + i / 100, "loss": 5.0 + i / 9, "wait_of_mine": -0.5, "reward": 0.0}
        for i in range(10)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    names = "completion_tokens_mean,loss,wait_of_mine,reward"
    found = answer(caught_up(RunIndex(tmp_path)), "curves", names=names)["curves"]
    axes = {name: curve["axis"] for name, curve in found.items()}
    assert axes == {
        "completion_tokens_mean": [0.0, 5.83],
        "loss": [4.0, 7.0],
        "wait_of_mine": [-0.625, -0.375],
        "reward": [0.0, 0.0],  # the page widens it, where it is the only line of its chart
    }


def test_curves_lie_at_their_steps(made: Loop, run_dir: Path) -> None:
    found = answer(caught_up(RunIndex(run_dir)), "curves", names="reward,eval_accuracy")["curves"]
    assert [point[0] for point in found["reward"]["points"]] == list(range(20))
    rewards = [line["reward"] for _, line in made.metrics if "reward" in line]
    assert [point[1] for point in found["reward"]["points"]] == pytest.approx(rewards, rel=1e-4)
    assert [point[0] for point in found["eval_accuracy"]["points"]] == [0, 5, 10, 15]


def test_the_life_of_a_run(made: Loop, folder: Path) -> None:
    index = RunIndex(folder)
    assert caught_up(index).life()[0] == "waiting"
    made.write(folder, until_s=5.0)
    assert caught_up(index).life()[0] == "running"
    for path in folder.rglob("*"):
        os.utime(path, (1e9, 1e9))
    index = caught_up(RunIndex(folder))
    life, silent_s = index.life()
    assert life == "silent"
    assert silent_s > 1e6
    (folder / "summary.json").write_text(json.dumps({"status": "failed", "steps": index.events.loop.version}))
    assert caught_up(index).life()[0] == "failed"
    made.write(folder, until_s=8.0)  # it was resumed, and the summary is that of the attempt before
    os.utime(folder / "summary.json", (1e9, 1e9))
    assert caught_up(index).life()[0] == "running"
    steps = index.events.loop.version
    (folder / "summary.json").write_text(json.dumps({"status": "failed", "steps": steps}))  # from its last checkpoint
    os.utime(folder / "summary.json", (1.1e9, 1.1e9))
    assert caught_up(index).life()[0] == "running"
    (folder / "summary.json").write_text("{torn")
    assert caught_up(index).life()[0] == "running"


def test_time_goes_on_while_nothing_is_decided(made: Loop, folder: Path) -> None:
    """During start-up and long steps there are no events, but timelines."""
    made.write(folder, until_s=1.5)
    index = RunIndex(folder)
    for _ in range(3):
        caught_up(index)
    assert index.events.end_s == 0.0
    assert index.end_s == pytest.approx(1.0, abs=0.02)
    assert answer(index, "loop", **{"from": 0.2, "to": 5.0})["to"] == pytest.approx(1.0, abs=0.02)


def test_the_verdict_is_that_of_the_summary(run_dir: Path) -> None:
    verdict = LiveVerdict(run_dir)
    assert verdict.update(caught_up(RunIndex(run_dir)), now_s=0.0)
    assert verdict.sentence == VERDICT
    assert not verdict.update(caught_up(RunIndex(run_dir)), now_s=1.0)


def test_while_a_run_goes_on_the_verdict_is_accountings(
    made: Loop, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.write(folder, until_s=9.0)
    index, verdict = caught_up(RunIndex(folder)), LiveVerdict(folder)
    verdict.update(index, now_s=100.0)
    assert verdict.sentence is None, "these timelines tell of no step"
    found = read_accounting(folder)
    balance = msgspec.structs.replace(found.balance, verdict="The trainer starves.")
    calls: list[Path] = []
    monkeypatch.setattr(
        "slipstream.observe.watch.index.read_accounting",
        lambda path: calls.append(path) or msgspec.structs.replace(found, balance=balance),
    )
    assert not verdict.update(index, now_s=1000.0)
    assert not calls, "the files are as they were"
    made.write(folder, until_s=11.0)
    caught_up(index)
    assert not verdict.update(index, now_s=102.0), "not more than now and then"
    assert verdict.update(index, now_s=2000.0)
    assert (verdict.sentence, verdict.steps) == ("The trainer starves.", index.events.loop.version)
    steps = verdict.steps
    monkeypatch.setattr("slipstream.observe.watch.index.MAX_BYTES", 1)
    made.write(folder, until_s=12.0)
    assert not verdict.update(caught_up(index), now_s=3000.0)
    assert (len(calls), verdict.steps) == (1, steps), "files that are too large: it says of which steps it is"
    assert index.events.loop.version > steps
    made.write(folder)
    assert verdict.update(caught_up(index), now_s=4000.0)
    assert (verdict.sentence, verdict.steps) == (VERDICT, None)
    (folder / "summary.json").unlink()
    assert verdict.update(caught_up(index), now_s=4001.0)
    assert verdict.sentence is None, "a resume: that was the verdict on the attempt before"


def test_an_episode_is_told_as_its_transcript_of_bounded_size(folder: Path) -> None:
    made = Loop(steps=4, hostile="x" * 50_000, has_episodes=True).run()
    index = caught_up(RunIndex(made.write(folder)))
    found = answer(index, "group", ordinal=1)["rollouts"][0]["episode"]
    said = next(one["episode"]["messages"][0]["content"] for one in made.rollouts if one["ordinal"] == 1)
    assert {name: found[name] for name in found if name != "parts"} == {
        "turns": 2, "environment_s": 0.125, "tool_calls": 1, "tool_errors": 1, "restarts": 0, "is_cut": True,
        "forks": 0,
    }  # fmt: skip
    name = said[:40]
    assert found["parts"] == [
        {"role": "assistant", "text": said, "turn": 1, "reward": 0.25},
        {"role": "call", "text": f"{name}({name}={json.dumps(said)})"},
        {"role": f"tool {name}", "text": f"heard: {said}"},
        {"role": "assistant", "text": "done", "turn": 2},
    ]
    parts = answer(index, "group", ordinal=0)["rollouts"][0]["episode"]["parts"]
    assert [len(one["text"]) for one in parts] == [20_004, len("3 more")]
    assert [one["role"] for one in parts] == ["assistant", "..."]


def test_forks_of_an_episode_are_told_below_its_trunk(folder: Path) -> None:
    made = Loop(steps=4, hostile="x" * 50_000, has_episodes=True, has_forks=True).run()
    index = caught_up(RunIndex(made.write(folder)))
    found = answer(index, "group", ordinal=1)["rollouts"][0]["episode"]
    said = next(one["completion"] for one in made.rollouts if one["ordinal"] == 1)
    assert (found["forks"], found["turns"]) == (1, 3)
    assert not {"branches", "contexts", "messages"} & found.keys()
    assert found["parts"][-3:] == [
        {"role": "fork 1 of 1", "text": "a context of its own, of 1 message", "fork": 1},
        {"role": "user", "text": f"so far: {said}"},
        {"role": "assistant", "text": "aside", "turn": 3},
    ]
    parts = answer(index, "group", ordinal=0)["rollouts"][0]["episode"]["parts"]
    assert sum(len(one["text"]) for one in parts) < 20_100, "trunk and fork share the room"
    assert [one["role"] for one in parts] == ["assistant", "...", "fork 1 of 1", "user", "..."]
    assert next(answer(index, "group", ordinal=ordinal)["rollouts"][0]["tokens"] for ordinal in (2, 4))["branches"] == [
        2
    ]


def test_without_an_environment_there_is_no_episode(folder: Path) -> None:
    index = caught_up(RunIndex(Loop(steps=4).run().write(folder)))
    rollout = answer(index, "group", ordinal=0)["rollouts"][0]
    assert rollout["episode"] is None
    assert rollout["tokens"]["turns"] == []
