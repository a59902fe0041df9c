import itertools
import json
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from trace_format import check_trace, load_trace
from written import EVENTS, began

from slipstream.core.clock import VirtualClock
from slipstream.observe import chrome_trace
from slipstream.observe.attempts import read_attempts
from slipstream.observe.chrome_trace import SNAP_NS, merge_timelines
from slipstream.observe.group_flow import MAX_POINTS, read_group_flow
from slipstream.observe.timeline import Timeline, timeline_path

MS = 1_000_000


def write_lines(path: Path, lines: list[dict], *, torn: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + torn)


def a_slice(state: str, start_ms: float, end_ms: float, **args: object) -> dict:
    line = {"kind": "slice", "state": state, "start_ns": round(start_ms * MS), "end_ns": round(end_ms * MS)}
    return line | {"args": args} if args else line


def a_start(process: str, at_ms: float, *, zero_s: float = 0.0) -> dict:
    return {
        "kind": "process",
        "process": process,
        "pid": 7,
        "time_ns": round(at_ms * MS),
        "zero_ns": round(zero_s * 1e9),
    }


def a_rollout(
    ordinal: int, sample: int, step: int | None, times_ms: tuple[float, float, float], replica: int = 0
) -> dict:
    started, finished, scored = (ms / 1e3 for ms in times_ms)
    return {
        "ordinal": ordinal,
        "sample": sample,
        "step": step,
        "outcome": "skipped" if step is None else "trained",
        "replica": replica,
        "started_s": started,
        "finished_s": finished,
        "scored_s": scored,
        "completion": "not read",
    }


def an_event(seq: int, at_ms: float, event: dict, *commands: dict) -> dict:
    return {
        "seq": seq,
        "time_s": at_ms / 1e3,
        "event": EVENTS.get(event["type"], {}) | event,
        "commands": list(commands),
    }


BEGAN = began()


def start(ordinal: int, replica: int = 0) -> dict:
    return {"type": "StartGroup", "ordinal": ordinal, "replica": replica}


def write_loop(run_dir: Path, *, offset_ms: float = 0.0, zero_s: float = 0.0, step: int = 3) -> None:
    """One attempt: group 5 is admitted, sampled, scored and trained; version `step + 1` is published and taken."""
    o = offset_ms
    folder = run_dir / "timeline"
    write_lines(
        folder / "controller.jsonl",
        [a_start("controller", o, zero_s=zero_s), a_slice("idle", o, o + 10), a_slice("schedule", o + 10, o + 12)],
    )
    write_lines(
        folder / "generator-0.jsonl",
        [a_slice("decode", o + 15, o + 40), a_slice("swap", o + 90, o + 91, version=step + 1)],
    )
    write_lines(folder / "rewards.jsonl", [a_slice("score", o + 41, o + 45)])
    write_lines(
        folder / "trainer.jsonl",
        [
            a_slice("collate", o + 50, o + 52, step=step),
            a_slice("forward_backward", o + 52, o + 70, step=step),
            a_slice("stage", o + 70, o + 75, version=step + 1),
            a_slice("publish", o + 75, o + 76, version=step + 1),
        ],
    )
    write_lines(
        run_dir / "rollouts.jsonl",
        [a_rollout(5, 0, step, (o + 16, o + 30, o + 44)), a_rollout(5, 1, step, (o + 17, o + 35, o + 42))],
    )
    write_lines(
        run_dir / "events.jsonl", [an_event(0, o + 1, BEGAN), an_event(1, o + 11, {"type": "Swapped"}, start(5))]
    )


def arrows(trace: dict) -> dict[str, list[tuple[str, float]]]:
    """Name of an arrow -> (thread, ms) of its ends; several of one name are told apart by their id."""
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    found: dict[tuple[str, int], list] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] in "stf":
            found[event["name"], event["id"]].append((names[event["tid"]], event["ts"] / 1e3))
    return {name if sum(n == name for n, _ in found) == 1 else f"{name} {i}": ends for (name, i), ends in found.items()}


def test_slices_marks_and_counters(tmp_path: Path):
    clock = VirtualClock(100.0)
    trainer = Timeline("trainer", timeline_path(tmp_path, "trainer"), clock)
    clock.advance(1.0)
    generator = Timeline("generator-0", timeline_path(tmp_path, "generator-0"), clock)
    with trainer.span("collate", step=3):
        clock.advance(0.25)
    with trainer.span("wait_generation"):
        clock.advance(0.5)
    generator.instant("swapped", version=4)
    generator.counter("slots", live=0.5, free=2.0)
    trainer.close()
    generator.close()
    events = load_trace(merge_timelines(tmp_path))["traceEvents"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert threads == {1: "generator-0", 2: "trainer"}
    worked, waited = (e for e in events if e["ph"] == "X")
    assert worked == {
        "ph": "X",
        "pid": 1,
        "tid": 2,
        "name": "collate",
        "cat": "work",
        "ts": 1e6,
        "dur": 250000.0,
        "args": {"step": 3},
    }
    assert (waited["name"], waited["cat"], waited["dur"]) == ("wait_generation", "wait", 500000.0)
    (swapped,) = [e for e in events if e["name"] == "swapped"]
    assert (swapped["ph"], swapped["tid"], swapped["ts"], swapped["args"]) == ("i", 1, 1.75e6, {"version": 4})
    (counter,) = [e for e in events if e["ph"] == "C"]
    assert counter["args"] == {"live": 0.5, "free": 2.0}


def test_what_was_short_in_a_slice_is_told_with_it(tmp_path: Path):
    line = a_slice("decode", 0, 100, version=2) | {"also": {"receive": 3 * MS}, "gap_ns": MS, "count": 90, "units": 700}
    write_lines(tmp_path / "timeline" / "generator-0.jsonl", [line])
    (event,) = [e for e in load_trace(merge_timelines(tmp_path))["traceEvents"] if e["ph"] == "X"]
    assert event["args"] == {
        "version": 2,
        "count": 90,
        "tokens": 700,
        "also, ms": {"receive": 3.0},
        "unlabelled, ms": 1.0,
    }


def test_ranks_and_replicas_are_threads_in_the_order_of_the_loop(tmp_path: Path):
    names = ["controller", "generator-0", "generator-0@1", "generator-2", "generator-10", "rewards", "rewards@1"]
    names += ["reward_models", "reference", "trainer", "trainer@2", "trainer@10", "mine"]
    for name in sorted(names):
        write_lines(tmp_path / "timeline" / f"{name}.jsonl", [a_slice("idle", 0, 1)])
    events = load_trace(merge_timelines(tmp_path))["traceEvents"]
    threads = [(e["tid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"]
    assert threads == list(enumerate(names, start=1))
    assert [(e["tid"], e["args"]["sort_index"]) for e in events if e["name"] == "thread_sort_index"] == [
        (i, i) for i in range(1, len(names) + 1)
    ]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == [tmp_path.name]


def test_merging_nothing_gives_an_empty_trace(tmp_path: Path):
    assert [e["name"] for e in load_trace(merge_timelines(tmp_path))["traceEvents"]] == ["process_name"]


# Arrows


def test_a_group_is_followed_from_its_admission_to_its_step_and_a_version_to_its_swap(tmp_path: Path):
    write_loop(tmp_path)
    trace = load_trace(merge_timelines(tmp_path))
    assert arrows(trace) == {
        "group 5, step 3": [
            ("controller", 11.0),
            ("generator-0", 16.0),
            ("generator-0", 35.0),
            ("rewards", 44.0),
            ("trainer", 50.0),
        ],
        "version 4": [("trainer", pytest.approx(76.0, abs=1e-5)), ("generator-0", 90.0)],
    }
    assert {e["cat"] for e in trace["traceEvents"] if e["ph"] == "s"} == {"group", "weights"}


def test_a_dropped_group_ends_with_the_decision_to_drop_it(tmp_path: Path):
    write_loop(tmp_path)
    write_lines(tmp_path / "rollouts.jsonl", [a_rollout(5, 0, None, (16, 30, 44))])
    drop = an_event(2, 47.0, {"type": "GroupScored", "ordinal": 5}, {"type": "Skip", "ordinals": [5]})
    write_lines(
        tmp_path / "events.jsonl", [an_event(0, 1, BEGAN), an_event(1, 11, {"type": "Swapped"}, start(5)), drop]
    )
    with (tmp_path / "timeline" / "controller.jsonl").open("a") as file:
        file.write(json.dumps(a_slice("schedule", 46.5, 48)) + "\n")
    trace = load_trace(merge_timelines(tmp_path))
    assert arrows(trace)["group 5, dropped"][-2:] == [("rewards", 44.0), ("controller", 47.0)]
    assert {e["cat"] for e in trace["traceEvents"] if e["name"] == "group 5, dropped"} == {"dropped group"}


def test_a_group_sampled_again_comes_from_its_last_admission_on_the_replica_that_had_it(tmp_path: Path):
    write_loop(tmp_path)
    write_lines(tmp_path / "timeline" / "generator-1.jsonl", [a_slice("decode", 0, 40)])
    rollouts = [a_rollout(5, 0, 3, (16, 30, 44), replica=1)]
    write_lines(tmp_path / "rollouts.jsonl", rollouts)
    admissions = [
        an_event(1, 2, {"type": "Swapped"}, start(5, 1)),
        an_event(2, 4, {"type": "ReplicaLost", "replica": 1}, start(5, 1)),
        an_event(3, 6, {"type": "ReplicaLost", "replica": 1}, start(5, 0)),
        an_event(4, 17, {"type": "Swapped"}, start(5, 1)),  # after it was sampled: a later life of the ordinal
    ]
    write_lines(tmp_path / "events.jsonl", [an_event(0, 1, BEGAN), *admissions])
    found = arrows(load_trace(merge_timelines(tmp_path)))["group 5, step 3"]
    assert found[:3] == [("controller", 4.0), ("generator-1", 16.0), ("generator-1", 30.0)]


def test_the_rank_that_scored_is_the_one_that_the_completion_was_dealt_to(tmp_path: Path):
    """Rank (ordinal + sample) mod n of the last station: sample 0 of group 5 was scored last, by rank 1 of 2."""
    write_loop(tmp_path)
    for name in ("reward_models", "reward_models@1"):
        write_lines(tmp_path / "timeline" / f"{name}.jsonl", [a_slice("score", 41, 46)])
    found = arrows(load_trace(merge_timelines(tmp_path)))["group 5, step 3"]
    assert found[3] == ("reward_models@1", 44.0)


def test_every_rank_that_takes_a_version_gets_an_arrow_from_the_publish_before(tmp_path: Path):
    write_loop(tmp_path)
    swaps = [
        a_slice("swap", 90, 91, version=4),
        a_slice("swap", 190, 191, version=4),
        a_slice("swap", 195, 196, version=9),
    ]
    write_lines(tmp_path / "timeline" / "generator-0@1.jsonl", swaps)  # started again; 9 was published by nobody
    with (tmp_path / "timeline" / "trainer.jsonl").open("a") as file:
        file.write(json.dumps(a_slice("publish", 100, 101, version=4)) + "\n")
    trace = load_trace(merge_timelines(tmp_path))
    ends = sorted((ends[0][1], *ends[1]) for name, ends in arrows(trace).items() if name.startswith("version"))
    first, second = (pytest.approx(ms, abs=1e-5) for ms in (76.0, 101.0))
    assert ends == [(first, "generator-0", 90.0), (first, "generator-0@1", 90.0), (second, "generator-0@1", 190.0)]
    assert trace["otherData"]["arrows left out"] == 1


def test_clocks_that_disagree_move_an_end_a_little_or_leave_it_out(tmp_path: Path):
    """The generator's machine is behind: by 2 ms its ends are moved to where time goes on, by 100 ms left out."""
    for behind_ms, is_left_out in ((2.0, False), (100.0, True)):
        write_loop(tmp_path)
        write_lines(tmp_path / "timeline" / "generator-0.jsonl", [a_slice("decode", 0, 40)])
        times = (16.0 - behind_ms, 35.0 - behind_ms, 44.0)
        write_lines(tmp_path / "rollouts.jsonl", [a_rollout(5, 0, 3, times)])
        write_lines(tmp_path / "events.jsonl", [an_event(0, 1, BEGAN), an_event(1, 13, {"type": "Swapped"}, start(5))])
        with (tmp_path / "timeline" / "controller.jsonl").open("a") as file:
            file.write(json.dumps(a_slice("schedule", 12, 17)) + "\n")
        trace = load_trace(merge_timelines(tmp_path))
        (name,) = [name for name in arrows(trace) if name.startswith("group")]
        first = (
            [("controller", 13.0), ("rewards", 44.0)] if is_left_out else [("controller", 13.0), ("generator-0", 14.0)]
        )
        assert arrows(trace)[name][:2] == first
        assert trace["otherData"]["ends of arrows left out"] == (2 if is_left_out else 0)


# Attempts


def test_attempts_lie_behind_each_other_and_what_a_resume_kept_is_drawn_once(tmp_path: Path):
    write_loop(tmp_path / "attempt_1", step=3)
    write_loop(tmp_path, offset_ms=1000.0, step=4)
    kept = (tmp_path / "attempt_1" / "rollouts.jsonl").read_text()
    (tmp_path / "rollouts.jsonl").write_text(kept + (tmp_path / "rollouts.jsonl").read_text())
    kept = (tmp_path / "attempt_1" / "events.jsonl").read_text()
    (tmp_path / "events.jsonl").write_text(
        kept + (tmp_path / "events.jsonl").read_text().replace('"seq": 0', '"seq": 2')
    )
    trace = load_trace(merge_timelines(tmp_path))
    found = arrows(trace)
    assert [found[f"group 5, step {step}"][-1] for step in (3, 4)] == [("trainer", 50.0), ("trainer", 1050.0)]
    assert len([name for name in found if name.startswith("group")]) == 2
    begun = [(e["name"], e["s"], e["ts"]) for e in trace["traceEvents"] if e["name"].startswith("attempt")]
    assert begun == [("attempt 1", "g", 0.0), ("attempt 2", "g", 1e6)]
    assert len([e for e in trace["traceEvents"] if e["ph"] == "X"]) == 18


def test_a_machine_that_was_started_anew_in_between_is_put_in_its_place_by_the_time_of_day(tmp_path: Path):
    write_loop(tmp_path / "attempt_2", offset_ms=50_000.0, zero_s=5_000.0, step=3)
    write_loop(tmp_path / "attempt_10", offset_ms=1000.0, zero_s=5_100.0, step=4)  # its clock began at 0 again
    write_loop(tmp_path, offset_ms=9000.0, zero_s=5_109.0, step=5)  # the time of day was set a little
    trace = load_trace(merge_timelines(tmp_path))
    begun = {e["name"]: e["ts"] / 1e3 for e in trace["traceEvents"] if e["name"].startswith("attempt")}
    assert begun == {"attempt 1": 0.0, "attempt 2": 60_000.0, "attempt 3": 68_000.0}
    assert trace["otherData"]["time 0"] == "1970-01-01T01:24:10.000+00:00"
    found = arrows(trace)
    assert [found[f"group 5, step {step}"][0][1] for step in (3, 4, 5)] == [11.0, 60_011.0, 68_011.0]


# Files as they are left


def test_a_process_that_was_killed_and_one_that_wrote_nonsense_are_drawn_as_far_as_they_got(tmp_path: Path):
    torn, zeros = '{"kind":"slice","state":"deco', "\0\0\0\n" + json.dumps(a_slice("score", 50, 51)) + "\n"
    write_lines(tmp_path / "timeline" / "generator-0.jsonl", [a_slice("decode", 0, 5)], torn=torn)
    write_lines(tmp_path / "timeline" / "rewards.jsonl", [a_slice("score", 1, 2)], torn=zeros)
    events = load_trace(merge_timelines(tmp_path))["traceEvents"]
    assert [(e["name"], e["dur"]) for e in events if e["ph"] == "X"] == [("decode", 5000.0), ("score", 1000.0)]


def test_a_process_that_still_writes_is_drawn_as_far_as_it_was_read(tmp_path: Path):
    path = tmp_path / "timeline" / "trainer.jsonl"
    lines = [a_start("trainer", 0.0), a_slice("collate", 1, 2), a_slice("publish", 2, 3)]
    write_lines(path, lines)
    (track,) = chrome_trace._read_tracks(read_attempts(tmp_path)).values()
    assert track.keep(0) == 0
    write_lines(path, [*lines, a_slice("collate", 3, 4)])
    assert [event["name"] for _, event in chrome_trace._slices(track)] == ["collate", "publish"]


def test_two_processes_that_wrote_to_one_file_at_once_take_turns(tmp_path: Path):
    """One that was taken for lost, and is not, beside its successor."""
    lines = [a_slice("decode", 0, 10), a_slice("start_up", 5, 20), a_slice("decode", 10, 18), a_slice("decode", 20, 21)]
    write_lines(tmp_path / "timeline" / "generator-0.jsonl", lines)
    events = load_trace(merge_timelines(tmp_path))["traceEvents"]
    drawn = [(e["name"], e["ts"] / 1e3, e["dur"] / 1e3) for e in events if e["ph"] == "X"]
    assert drawn == [("decode", 0.0, 10.0), ("start_up", 10.0, 10.0), ("decode", 20.0, 1.0)]


# Bounds


def test_of_too_many_slices_the_shortest_are_left_out_but_for_swaps_and_publishes(tmp_path: Path):
    write_loop(tmp_path)
    write_lines(
        tmp_path / "timeline" / "reference.jsonl", [a_slice("reference", i * 10, i * 10 + 1 + i / 10) for i in range(9)]
    )
    trace = load_trace(merge_timelines(tmp_path, max_slices=8))
    drawn = {(e["name"], round(e["dur"] / 1e3, 3)) for e in trace["traceEvents"] if e["ph"] == "X"}
    long = {("idle", 10.0), ("schedule", 2.0), ("decode", 25.0), ("score", 4.0), ("collate", 2.0), ("stage", 5.0)}
    long |= {("forward_backward", 18.0), ("reference", 1.8)}
    assert drawn == long | {("swap", 1.0), ("publish", 1.0)}
    assert trace["otherData"]["slices left out"] == 8
    assert trace["otherData"]["these are at most, ms"] == 1.7


def test_of_too_many_groups_every_second_or_fourth_ordinal_has_arrows(tmp_path: Path):
    write_loop(tmp_path)
    write_lines(tmp_path / "rollouts.jsonl", [a_rollout(o, s, 3, (16, 30, 44)) for o in range(1, 12) for s in range(2)])
    write_lines(
        tmp_path / "events.jsonl", [an_event(0, 1, BEGAN), an_event(1, 11, {"type": "Swapped"}, *map(start, range(12)))]
    )
    trace = load_trace(merge_timelines(tmp_path, max_groups=4))
    assert {name for name in arrows(trace) if "group" in name} == {"group 4, step 3", "group 8, step 3"}
    assert trace["otherData"]["groups with arrows"] == "every 4th by ordinal"
    whole = load_trace(merge_timelines(tmp_path))
    assert len([name for name in arrows(whole) if "group" in name]) == 11
    assert whole["otherData"]["groups with arrows"] == "all"


def test_of_too_many_swaps_those_of_every_second_or_fourth_version_are_drawn(tmp_path: Path):
    write_loop(tmp_path)
    published = [a_slice("publish", 10 * i, 10 * i + 1, version=i) for i in range(12)]
    write_lines(tmp_path / "timeline" / "trainer.jsonl", [*published, a_slice("collate", 200, 290)])
    for replica in range(2):
        swaps = [a_slice("swap", 10 * i + 2, 10 * i + 3, version=i) for i in range(12)]
        write_lines(tmp_path / "timeline" / f"generator-{replica}.jsonl", [*swaps, a_slice("decode", 200, 290)])
    trace = load_trace(merge_timelines(tmp_path, max_slices=3, max_swaps=7))
    assert sorted(name.split()[1] for name in arrows(trace) if "version" in name) == ["0", "0", "4", "4", "8", "8"]
    assert trace["otherData"]["versions with arrows"] == "every 4th"
    drawn = [e["args"]["version"] for e in trace["traceEvents"] if e["ph"] == "X" and e["name"] in ("swap", "publish")]
    assert sorted(drawn) == [0, 0, 0, 4, 4, 4, 8, 8, 8]
    assert load_trace(merge_timelines(tmp_path))["otherData"]["versions with arrows"] == "all"


def test_of_too_many_values_of_a_counter_as_many_as_of_a_curve_are_drawn(tmp_path: Path):
    start_lines = [a_start("generator-0", 0), a_slice("decode", 0, 1)]
    values = [{"kind": "counter", "name": "tokens", "time_ns": i * MS, "values": {"n": i}} for i in range(30_000)]
    swapped = [{"kind": "instant", "name": "swapped", "time_ns": i * MS, "args": {"n": i}} for i in range(30_000)]
    write_lines(tmp_path / "timeline" / "generator-0.jsonl", [*start_lines, *values, *swapped])
    events = load_trace(merge_timelines(tmp_path))["traceEvents"]
    for name in ("tokens", "swapped"):
        drawn = [e for e in events if e["name"] == name]
        assert 10_000 <= len(drawn) <= MAX_POINTS
        assert drawn[-1]["args"] == {"n": 29_999}
        assert all(e["ts"] == 1e3 * e["args"]["n"] for e in drawn)


# Curves


def test_curves_count_groups_where_they_are(tmp_path: Path):
    write_loop(tmp_path)
    finished = {"type": "CompletionFinished", "ordinal": 5, "replica": 0}
    metrics = {"staleness_mean": 0.5, "staleness_max": 1.0, "reward_mean": 0.25, "loss": None}
    write_lines(
        tmp_path / "events.jsonl",
        [
            an_event(0, 1, BEGAN),
            an_event(1, 11, {"type": "Swapped", "replica": 0, "version": 3}, start(5), start(6)),
            an_event(2, 30, finished),
            an_event(3, 35, finished),
            an_event(4, 45, {"type": "GroupScored", "ordinal": 5}),
            an_event(
                5, 46, {"type": "GroupScored", "ordinal": 6}, {"type": "TrainStep", "step": 3, "ordinals": [5, 6]}
            ),
            an_event(6, 70, {"type": "StepDone", "step": 3, "version": 4, "metrics": metrics}),
        ],
    )
    curves = defaultdict(list)
    for event in load_trace(merge_timelines(tmp_path))["traceEvents"]:
        if event["ph"] == "C":
            curves[event["name"]].append((event["ts"] / 1e3, event["args"]))
    words = ("being sampled", "being scored", "waiting for their step", "in training")
    counts = [(ms, tuple(values[word] for word in words)) for ms, values in curves["groups"]]
    assert counts == [
        (11.0, (2, 0, 0, 0)),
        (35.0, (1, 1, 0, 0)),
        (45.0, (1, 0, 1, 0)),
        (46.0, (0, 0, 0, 2)),
        (70.0, (0, 0, 0, 0)),
    ]
    assert curves["version"] == [(11.0, {"generator-0": 3}), (70.0, {"generator-0": 3, "trainer": 4})]
    assert curves["staleness (steps)"] == [(70.0, {"mean": 0.5, "max": 1.0})]
    assert curves["reward"] == [(70.0, {"mean": 0.25})]


def test_a_curve_of_too_many_points_is_thinned_evenly_and_ends_where_it_ended(tmp_path: Path):
    events = [an_event(0, 0, BEGAN)]
    events += [an_event(i, 10 * i, {"type": "Swapped", "replica": 0, "version": i}) for i in range(1, 1001)]
    write_lines(tmp_path / "events.jsonl", events)
    points = read_group_flow(read_attempts(tmp_path), max_points=50).curves["version"]
    assert 25 <= len(points) <= 50
    assert points[-1][1] == {"generator-0": 1000}
    gaps = {b - a for (a, _), (b, _) in itertools.pairwise(points)}
    assert max(gaps) <= 2 * min(gaps) + 10 * MS
    for at_ns, values in points:  # a point may tell what came within its distance, never what came before it
        assert 0 <= values["generator-0"] - at_ns / (10 * MS) <= max(gaps) / (10 * MS)


# Any timelines at all

STATES = ["decode", "swap", "publish", "stage", "forward_backward", "wait_generation", "score"]
PROCESSES = ["controller", "generator-0", "generator-1", "rewards", "rewards@1", "trainer", "trainer@1"]
SLICES = st.lists(
    st.tuples(st.integers(0, 9 * MS), st.integers(1, 9 * MS), st.sampled_from(STATES), st.integers(0, 3)), max_size=6
)
TIMES = st.integers(0, 60).map(float)


@settings(max_examples=60)
@given(
    timelines=st.dictionaries(st.sampled_from(PROCESSES), SLICES),
    groups=st.lists(st.tuples(st.tuples(TIMES, TIMES, TIMES), TIMES, st.integers(0, 3), st.integers(0, 1)), max_size=6),
    max_slices=st.sampled_from([3, 1000]),
)
@example(timelines={"generator-0": [(1, 1, "decode", 0)]}, groups=[((0.0, 0.0, 0.0), 0.0, 0, 0)], max_slices=1000)
def test_any_timelines_merge_to_a_trace_whose_arrows_end_where_a_search_of_all_slices_says(
    tmp_path_factory, timelines, groups, max_slices
):
    run_dir = tmp_path_factory.mktemp("run")
    drawn: dict[str, list[tuple[int, int, str, int]]] = {}
    for process, pieces in timelines.items():
        now, lines = 0, []
        for gap, length, state, number in pieces:
            now += gap
            lines.append(a_slice(state, 0, 0, version=number, step=number) | {"start_ns": now, "end_ns": now + length})
            drawn.setdefault(process, []).append((now, now + length, state, number))
            now += length
        write_lines(run_dir / "timeline" / f"{process}.jsonl", lines)
    write_lines(
        run_dir / "rollouts.jsonl",
        [a_rollout(o, 0, step, times, replica) for o, (times, _, step, replica) in enumerate(groups)],
    )
    in_time = sorted((at, o, replica) for o, (_, at, _, replica) in enumerate(groups))
    admissions = [an_event(i, at, {"type": "Swapped"}, start(o, r)) for i, (at, o, r) in enumerate(in_time, start=1)]
    write_lines(run_dir / "events.jsonl", [an_event(0, 0, BEGAN), *admissions])
    trace = json.loads(merge_timelines(run_dir, max_slices=max_slices).read_text())
    check_trace(trace)

    every = [piece for pieces in drawn.values() for piece in pieces]
    if len(every) > max_slices:
        limit = sorted(end - begin for begin, end, _, _ in every)[-max_slices - 1]
        kept = {
            p: [x for x in pieces if x[1] - x[0] > limit or x[2] in ("swap", "publish", "stage")]
            for p, pieces in drawn.items()
        }
    else:
        kept = drawn
    assert sum(e["ph"] == "X" for e in trace["traceEvents"]) == sum(map(len, kept.values()))
    origin = min(
        [begin for begin, *_ in every]
        + ([round(min(a for _, a, _, _ in groups) * MS)] if groups and "controller" in timelines else []),
        default=0,
    )
    expected = defaultdict(int)
    for o, (times, admitted, step, replica) in enumerate(groups):
        begins = [begin for begin, _, _, number in drawn.get("trainer", []) if number == step]
        scorers = [name for name in ("rewards", "rewards@1") if name in timelines]
        wanted = [("controller", admitted * MS)]
        wanted += [(f"generator-{replica}", times[0] * MS), (f"generator-{replica}", times[1] * MS)]
        wanted += [(scorers[o % len(scorers)], times[2] * MS)] if "rewards" in scorers else []
        wanted += [("trainer", min(begins))] if begins else []
        ends, last = [], -(10**18)
        for process, time in wanted:
            near = [max(begin, min(end - 1, max(time, last))) for begin, end, _, _ in kept.get(process, [])]
            near = [at for at in near if at >= last and abs(at - time) <= SNAP_NS]
            if near:
                last = min(near, key=lambda at: abs(at - time))
                ends.append((process, last - origin))
        if len(ends) > 1:
            expected[f"group {o}, step {step}", tuple(ends)] += 1
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    found: dict[int, list] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] in "stf" and event["cat"] == "group":
            found[event["id"]].append((event["name"], (names[event["tid"]], round(event["ts"] * 1e3))))
    counted = defaultdict(int)
    for ends in found.values():
        counted[ends[0][0], tuple(end for _, end in ends)] += 1
    assert counted == expected
