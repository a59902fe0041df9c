"""How waiting is drawn: each wait in a colour of its own, hatched, as the sentence beside it says; and who limits."""

from __future__ import annotations

import colorsys
import itertools
import json
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from synthetic_run import make_run_dir
from test_report_colours import EYES, lab

from slipstream.core.clock import VirtualClock
from slipstream.observe.chrome_trace import merge_timelines
from slipstream.observe.report import write_report
from slipstream.observe.states import (
    AWAITED,
    STATES,
    WAIT_COLOUR,
    WAITING,
    colour,
    in_words,
    is_missed,
    kind,
    waited_for,
)
from slipstream.observe.svg import Axis
from slipstream.observe.svg_blocks import Bar, Column, GanttRow, areas, gantt, state_bars, state_legend
from slipstream.observe.timeline import Timeline, timeline_path
from slipstream.observe.watch.answers import run_answer
from slipstream.observe.watch.index import RunIndex

WAITS = [state for state in STATES if kind(state) == "wait"]
WORK = [state for state in STATES if kind(state) == "work"]


@pytest.fixture(autouse=True)
def _runs_are_accounted_for() -> None:
    """The run here is made up."""


def is_warm(shade: str) -> bool:
    hue, _, saturation = colorsys.rgb_to_hls(*(int(shade[i : i + 2], 16) / 255 for i in (1, 3, 5)))
    return saturation > 0.3 and not 60 < hue * 360 < 345


def is_grey(shade: str) -> bool:
    parts = [int(shade[i : i + 2], 16) for i in (1, 3, 5)]
    return max(parts) - min(parts) < 32


@pytest.mark.parametrize("eye", EYES)
def test_waits_are_told_apart_by_everybody(eye: str) -> None:
    """By 10 at least, where 2.3 can just be seen; those of the table by 14."""
    seen = [lab(colour(state), eye) for state in WAITS]
    assert min(math.dist(a, b) for a, b in itertools.combinations(seen, 2)) >= 14.0
    assert min(math.dist(a, lab(WAIT_COLOUR, eye)) for a in seen) >= 10.0
    assert colour("wait_for_a_tool") == WAIT_COLOUR


def test_the_sentence_is_true_of_every_state() -> None:
    """Warm and hatched where work is missed, grey and hatched where not, and no work looks like either."""
    assert "in warm colours where work is missed" in WAITING
    assert "in grey where a process is ready before it is needed" in WAITING
    missed = [state for state in WAITS if is_missed(state)]
    assert {state for state in WAITS if is_warm(colour(state))} == set(missed)
    assert {state for state in WAITS if is_grey(colour(state))} == set(WAITS) - set(missed)
    assert set(AWAITED) <= set(missed)
    assert not is_missed("wait_completions"), "the rewards are there for others"
    assert is_missed("wait_for_a_tool")
    assert [state for state in WORK if is_warm(colour(state)) or is_missed(state)] == []


def hatched(markup: str) -> int:
    return len(re.findall(r'class="hatch"', markup))


def test_every_wait_is_hatched_and_no_work_is() -> None:
    for state in [*WAITS, *WORK, "absent", "unlabelled"]:
        seconds = {state: 1.0}
        expected = int(state in WAITS)
        assert hatched(state_bars({"p": seconds}, title="t")) == expected, state
        assert hatched(areas([Column(0, 1, seconds)], title="t", x=Axis("s"), order=[state])) == expected, state
        assert hatched(gantt([GanttRow("p", [Bar(state, 0, 1)], [])], title="t", start_s=0, end_s=1)) == expected, state
        assert ("hatched" in state_legend([state])) == bool(expected), state
    entries = re.findall(r"</i>([^<]*)</span>", state_legend(WAITS))
    assert entries == [in_words(state) for state in WAITS], "each has an entry of its own"


def test_report_watch_page_and_trace_say_the_same(tmp_path: Path) -> None:
    run_dir = make_run_dir(tmp_path)
    clock = VirtualClock(50.0)
    rewards = Timeline("rewards", timeline_path(run_dir, "rewards"), clock)
    rewards.set_idle_state("wait_completions")
    with rewards.idle():
        clock.advance(1.0)
    rewards.close()
    raw = write_report(run_dir).read_text(encoding="utf-8")
    root = ElementTree.fromstring(raw[raw.index("<body>") : raw.index("</html>")])
    (section,) = (one for one in root.iter("section") if one.get("id") == "time")
    assert section.findtext("p") == f"Hatched{WAITING}"
    index = RunIndex(run_dir)
    while index.advance():
        pass
    told = run_answer(index, {})
    assert told["waiting"].endswith(f"Thin{WAITING}")
    for name, state in told["states"].items():
        assert (state["colour"], state["is_missed"], state["awaited"]) == (
            colour(name),
            is_missed(name),
            AWAITED.get(name),
        )
    events = json.loads(merge_timelines(run_dir).read_text())["traceEvents"]
    names = {event["name"]: event.get("cname") for event in events if event["ph"] == "X"}
    assert names["wait_generation"] == "bad"
    assert names["decode"] is None
    assert names["wait_completions"] == "grey"


def test_who_limits_is_who_is_waited_for() -> None:
    """Rewards that wait most of their time limit nobody, and it is said how long others waited for them."""
    seconds = {
        "controller": {"idle": 10.0},
        "generator-0": {"decode": 8.0, "wait_trainer": 0.5, "absent": 1.5},
        "generator-1": {"decode": 8.5},
        "rewards": {"score": 1.0, "wait_completions": 9.0},
        "trainer": {"forward_backward": 6.0, "wait_generation": 2.5, "wait_straggler": 0.5, "wait_rewards": 1.0},
    }
    assert waited_for(seconds) == pytest.approx({"generator": 0.3, "rewards": 0.1, "trainer": 0.5 / 17})
    joined = {"generator (2)": {"decode": 1.0, "wait_trainer": 1.0}, "trainer": {"forward_backward": 1.0}}
    assert waited_for(joined) == {"generator": 0.0, "trainer": 0.5}
    assert waited_for({}) == {}


def test_the_report_says_beside_each_process_how_long_it_was_waited_for(tmp_path: Path) -> None:
    raw = write_report(make_run_dir(tmp_path)).read_text(encoding="utf-8")
    # The trainer waits 0.2 s of each step of 0.62 s, but for the first, which begins with its work.
    share = 3.8 / (20 * 0.62 - 0.22)
    assert f'generator-0<tspan class="soft">  waited for {share:.0%}</tspan>' in raw
    assert 'trainer<tspan class="soft">  waited for 0%</tspan>' in raw
