from contextlib import suppress
from pathlib import Path

import pytest
from drawn import drawn
from hypothesis import strategies as st

from slipstream.core.clock import VirtualClock, WallClock
from slipstream.core.errors import SlipstreamError
from slipstream.core.spans import Spans
from slipstream.observe.timeline import Timeline, account_file, presence, read_timeline, timeline_path

DURATIONS = st.floats(0, 0.3) | st.floats(0, 1e-3) | st.just(0.0)
TREE = st.recursive(
    st.lists(st.just([]), max_size=1),
    lambda children: st.lists(
        st.tuples(st.sampled_from(["decode", "prefill", "swap"]), DURATIONS, children), max_size=4
    ),
    max_leaves=12,
)


def play(timeline: Timeline, clock: VirtualClock, tree: list, pause_s: float, expected: dict, outer: str) -> None:
    """Open spans as the tree says and count independently: time belongs to the innermost open one."""
    for state, own_s, children in filter(None, tree):
        with timeline.span(state):
            clock.advance(own_s)
            expected[state] = expected.get(state, 0.0) + own_s
            play(timeline, clock, children, pause_s, expected, state)
        clock.advance(pause_s)
        expected[outer] += pause_s


@drawn(30, 100, tree=TREE, pause_s=DURATIONS, on_disk=st.booleans())
def test_random_nested_spans_sum_to_the_wall_time(tmp_path_factory, tree, pause_s, on_disk):
    path = tmp_path_factory.mktemp("t") / "p.jsonl" if on_disk else None
    clock = VirtualClock(5.0)
    timeline = Timeline("p", path, clock)
    expected = {"unlabelled": 0.0}
    play(timeline, clock, tree, pause_s, expected, "unlabelled")
    accounting = timeline.accounting(5.0, clock.now_s())
    assert sum(accounting.values()) == pytest.approx(clock.now_s() - 5.0, abs=1e-9)
    for state, seconds in expected.items():
        assert accounting.get(state, 0.0) == pytest.approx(seconds, abs=1e-7)
    totals = timeline.totals()
    assert totals == pytest.approx({k: v for k, v in expected.items() if k in totals}, abs=1e-7)
    middle_s = (5.0 + clock.now_s()) / 2  # any two halves add up to the whole window
    halves = [timeline.accounting(5.0, middle_s), timeline.accounting(middle_s, clock.now_s())]
    assert sum(sum(half.values()) for half in halves) == pytest.approx(clock.now_s() - 5.0, abs=1e-9)
    timeline.close()


def test_one_that_was_killed_before_it_wrote_was_absent_all_along():
    assert [(s.state, s.start_ns, s.end_ns) for s in presence([], 10, 50, is_over=True)] == [("absent", 10, 50)]
    assert presence([], 10, 50) == []


def test_before_its_life_a_process_is_absent_and_what_comes_after_what_it_said_is_unlabelled():
    clock = VirtualClock(10.0)
    timeline = Timeline("p", None, clock)
    with timeline.span("decode"):
        clock.advance(2.0)
    assert timeline.accounting(7.0, 13.0) == {"decode": 2.0, "absent": 3.0, "unlabelled": 1.0}
    with pytest.raises(ValueError, match="ends before"):
        timeline.accounting(3.0, 2.0)


def test_open_spans_count_up_to_now_and_survive_an_exception():
    clock = VirtualClock()
    timeline = Timeline("p", None, clock)
    with suppress(RuntimeError), timeline.span("train"):
        clock.advance(1.0)
        assert timeline.accounting(0.0, 1.0) == {"train": 1.0, "unlabelled": 0.0}
        with timeline.span("publish"):
            clock.advance(0.5)
            raise RuntimeError
    clock.advance(0.25)
    assert timeline.accounting(0.0, 1.75) == {"train": 1.0, "publish": 0.5, "unlabelled": 0.25}


def test_a_wait_is_split_when_its_label_changes():
    clock = VirtualClock()
    timeline = Timeline("trainer", None, clock)
    timeline.set_idle_state("wait_generation")
    with timeline.idle():
        clock.advance(2.0)
        timeline.set_idle_state("wait_straggler")
        clock.advance(3.0)
        with timeline.span("publish"):
            timeline.set_idle_state("wait_rewards")
            clock.advance(1.0)
        clock.advance(4.0)
    accounting = timeline.accounting(0.0, 10.0)
    del accounting["unlabelled"]
    assert accounting == {"wait_generation": 2.0, "wait_straggler": 3.0, "publish": 1.0, "wait_rewards": 4.0}


def test_short_adjacent_slices_become_one_line_and_keep_their_gaps(tmp_path: Path):
    clock = VirtualClock()
    timeline = Timeline("g", tmp_path / "g.jsonl", clock)
    for _ in range(1000):
        with timeline.span("decode"):
            clock.advance(0.0008)
        clock.advance(0.0001)
    timeline.close()
    assert len(list(read_timeline(tmp_path / "g.jsonl"))) < 15
    assert account_file(tmp_path / "g.jsonl", 0.0, 0.9) == pytest.approx({"decode": 0.8, "unlabelled": 0.1})


def test_the_file_of_a_killed_process_accounts_for_it(tmp_path: Path):
    clock, path = VirtualClock(), timeline_path(tmp_path, "generator-0")
    timeline = Timeline("generator-0", path, clock)
    for step in range(10):
        with timeline.span("decode", step=step):
            clock.advance(0.5)
    timeline.flush()
    written = path.read_bytes()
    timeline.close()
    path.write_bytes(written + b'{"kind":"slice","state":"deco')  # killed in the middle of a write
    assert account_file(path, 0.0, 6.0) == pytest.approx({"decode": 5.0, "unlabelled": 1.0})
    assert account_file(path, 0.0, 6.0, is_over=True) == pytest.approx({"decode": 5.0, "lost": 1.0, "unlabelled": 0.0})
    clock.advance(1.5)
    again = Timeline("generator-0", path, clock)  # its successor cuts the torn line off and goes on
    again.backdate("start_up", clock.now_s() - 0.5)
    with again.span("decode"):
        clock.advance(1.0)
    again.close()
    told = {"decode": 6.0, "lost": 1.0, "start_up": 0.5, "absent": 0.5, "unlabelled": 0.0}
    assert account_file(path, 0.0, 8.0) == account_file(path, 0.0, 8.0, is_over=True) == pytest.approx(told)
    assert account_file(path, 5.25, 5.75) == pytest.approx({"lost": 0.5, "unlabelled": 0.0})


def test_a_damaged_middle_line_is_an_error_not_a_silent_loss(tmp_path: Path):
    (tmp_path / "p.jsonl").write_bytes(b"{]\n{}\n")
    with pytest.raises(SlipstreamError, match="line 1"):
        list(read_timeline(tmp_path / "p.jsonl"))


@pytest.mark.parametrize("line", ["start_ns", "end_ns", "gap_ns", "decode"])
def test_times_that_no_clock_shows_are_an_error(line: str, tmp_path: Path):
    times = {"start_ns": "1", "end_ns": "2", "gap_ns": "0", "decode": "0"} | {line: str(2**63)}
    also = f"""{{"decode":{times.pop("decode")}}}"""
    fields = ",".join(f'"{name}":{value}' for name, value in times.items())
    (tmp_path / "p.jsonl").write_text(f'{{"kind":"slice","state":"train",{fields},"also":{also}}}\n{{}}\n')
    with pytest.raises(SlipstreamError, match="line 1"):
        list(read_timeline(tmp_path / "p.jsonl"))


def test_slices_reach_the_disk_within_a_second(tmp_path: Path):
    clock = VirtualClock()
    timeline = Timeline("p", tmp_path / "p.jsonl", clock)
    for i in range(30):
        with timeline.span("a" if i % 2 else "b"):
            clock.advance(0.1)
    assert len(list(read_timeline(tmp_path / "p.jsonl"))) >= 18
    timeline.close()


def test_timeline_is_what_executors_are_promised():
    spans: Spans = Timeline("p", None, WallClock())
    with spans.span("decode", slots=3):
        spans.instant("swap")


class Ticking(VirtualClock):
    """A clock on which every look takes a millisecond, as where another program has the core."""

    def now_s(self) -> float:
        self.advance(1e-3)
        return super().now_s()


def test_an_open_span_lasts_until_the_end_of_a_timeline(tmp_path):
    path = timeline_path(tmp_path, "generator-0")
    timeline = Timeline("generator-0", path, Ticking())
    with timeline.span("shut_down"):
        timeline.close()
    *_, last, end = read_timeline(path)
    assert last.end_ns == end.time_ns, "what is written in between would be in no state"
