"""The answers to the page's requests: each of a bounded size, whatever the run's is, and of JSON types.

Rows are lists where there may be thousands of them; the page's `js/api.js` says the same of their columns.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from slipstream.core.run_log import EpisodeLine, LoopState, Move, RolloutLine
from slipstream.observe.catalogue import described
from slipstream.observe.states import AWAITED, WAITING, colour, in_words, is_missed, kind, side_of
from slipstream.observe.svg import axis_ends
from slipstream.observe.tokens import TokenLine
from slipstream.observe.transcript import beginning, transcript_of
from slipstream.observe.watch.events import Passage
from slipstream.observe.watch.index import RunIndex
from slipstream.observe.watch.rollouts import GroupRow
from slipstream.observe.watch.timelines import Bar, bars

MAX_GROUPS = 600  # drawn at once: of more, every second, fourth ...
MAX_MOVES = 6000
MAX_BARS = 700
MAX_POINTS = 500
MAX_NAMES = 24
MAX_ROWS = 60
MAX_STEPS = 400
MAX_TEXT = 20_000
MAX_ENDING = 2_000
MAX_PARTS = 400
MAX_HEAD = 80
ROLLOUT_FIELDS = ("sample", "reward", "parts", "failure", "finish_reason", "num_tokens", "versions", "replica")
"""Fields of a line of `rollouts.jsonl` that the page is told as they are."""


class BadRequest(ValueError):
    """The query makes no sense."""


def number(query: Mapping[str, str], name: str, default: float | None = None) -> float:
    """A finite number of the query. BadRequest without one."""
    text = query.get(name)
    if text is None and default is not None:
        return default
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise BadRequest(f"'{name}' is a number")
    return value


def count_of(query: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    """A whole number of the query, not beyond its bounds."""
    return int(min(most, max(least, number(query, name, default))))


def run_answer(index: RunIndex, _query: Mapping[str, str]) -> dict[str, Any]:
    """Answer with what seldom changes: names, dials, states and their colours, alarms."""
    loop = index.events.loop
    states = {name for timeline in index.timelines.values() for name in timeline.totals.names}
    return pulse(index) | {
        "name": index.run_dir.resolve().name,
        "folder": str(index.run_dir.resolve()),
        "facts": {
            name: text.replace(" x ", " × ").replace("<=", "≤").replace("_", " ") for name, text in index.facts.items()
        },
        "dials": loop.config,
        "begin_s": round(_begin_s(index), 3),
        "attempts": index.num_attempts,
        "processes": [{"name": name, "side": side_of(name)} for name in index.processes],
        "states": {
            name: {
                "words": in_words(name),
                "colour": colour(name),
                "kind": kind(name),
                "is_missed": is_missed(name),
                "awaited": AWAITED.get(name),
            }
            for name in sorted(states | {"absent", "lost", "unlabelled"})
        },
        "waiting": f"Every second of every process is in one state. Thin{WAITING}",
        "curves": list(index.curves.curves),
        "alarms": index.alarms.spans()[-MAX_STEPS:],
        "error": loop.error,
    }


def _begin_s(index: RunIndex) -> float:
    """A little before the first group is admitted: start-up and warm start may take most of a short run."""
    first_s = index.events.first_s
    return 0.0 if first_s is None else max(0.0, first_s - max(1.0, 0.01 * (index.end_s - first_s)))


def pulse(index: RunIndex) -> dict[str, Any]:
    """Answer with what every change may change."""
    life, silent_s = index.life()
    loop = index.events.loop
    return {
        "revision": index.revision,
        "life": life,
        "silent_s": round(silent_s, 1),
        "progress": round(index.progress, 3),
        "end_s": round(index.end_s, 3),
        "version": loop.version,
        "num_groups": index.rollouts.num_groups,
        "num_alarms": len(index.alarms.alarms),
        "damaged": index.num_damaged,
    }


def loop_answer(index: RunIndex, query: Mapping[str, str]) -> dict[str, Any]:
    """The loop at `from`, and what moves until `to` (run time, seconds): see `events.Passage`.

    Of many groups every `every`-th by ordinal is told, with `counts` of all: [time, a count for each phase].
    """
    start_s = max(0.0, number(query, "from"))
    passage = index.events.passage(start_s, max(start_s, min(number(query, "to"), index.end_s)))
    moves, every = _thinned(passage)
    answer: dict[str, Any] = {
        "revision": index.revision,
        "from": start_s,
        "to": passage.end_s,
        "every": every,
        "loop": _loop(passage.loop, every),
        "moves": moves,
        "swaps": passage.swaps,
        "steps": passage.steps,
    }
    return answer | {"counts": passage.counts} if every > 1 else answer


def _thinned(passage: Passage) -> tuple[list[Move], int]:
    """Return the moves to draw, of every how manyth group: completions that finish are left out first, then groups."""
    moves, every = passage.moves, 1
    if len(moves) > MAX_MOVES:
        moves = [move for move in moves if not (move.group.phase == "sampling" and move.group.finished)]
    while len(passage.loop.groups) > every * MAX_GROUPS or len(moves) > MAX_MOVES:
        every *= 2
        moves = [move for move in moves if move.group.ordinal % every == 0]
    return moves, every


def _loop(loop: LoopState, every: int) -> dict[str, Any]:
    return {
        "groups": [one for one in loop.groups.values() if one.ordinal % every == 0],
        "versions": loop.versions,
        "version": loop.version,
        "next_ordinal": loop.next_ordinal,
        "fates": loop.fates,
    }


def lanes_answer(index: RunIndex, query: Mapping[str, str]) -> dict[str, Any]:
    """Answer with the slices of processes from `from` to `to`: [start, end, state, its share, args, other states]."""
    start_s = number(query, "from")
    end_s = max(start_s, min(number(query, "to"), index.end_s + 60.0))
    parts = count_of(query, "parts", MAX_BARS, 50, MAX_BARS)
    lanes: dict[str, list[list[Any]]] = {name: [] for name in index.processes}
    for timeline, stretch, start_ns, end_ns in index.lanes(start_s, end_s):
        slices = timeline.slices(start_ns, end_ns)
        drawn = timeline.outline(start_ns, end_ns, parts) if slices is None else bars(slices, start_ns, end_ns, parts)
        gone: Iterator[Bar] = (
            (begin, end, state, 1.0, {}, {}) for state, begin, end in timeline.gone(start_ns, end_ns)
        )
        lanes[timeline.process] += [
            [*(round(stretch.run_s(ns * 1e-9), 4) for ns in (begin, end)), state, round(share, 3), args, also]
            for begin, end, state, share, args, also in (*drawn, *gone)
        ]
    return {"from": start_s, "to": end_s, "lanes": lanes}


def overview_answer(index: RunIndex, query: Mapping[str, str]) -> dict[str, Any]:
    """The run from `from` on in outline: how many groups were in each phase, when steps ended, where alarms began."""
    points = count_of(query, "points", 300, 10, MAX_POINTS)
    phases = index.events.phases
    first = max(0, int(number(query, "from", 0.0) / phases.width))
    columns = {name: phases.of(name)[first:] / phases.width for name in phases.names}
    length = max((len(column) for column in columns.values()), default=0)
    stride = max(1, -(-length // points))
    return {
        "end_s": index.end_s,
        "start_s": phases.width * first,
        "width_s": phases.width * stride,
        "phases": {
            name: [round(float(column[at : at + stride].mean()), 2) for at in range(0, length, stride)]
            for name, column in columns.items()
        },
        "alarms": [
            [round(_when(index, one.began), 3), one.name, one.severity] for one in index.alarms.spans()[-MAX_STEPS:]
        ],
        "stretches": [round(one.start_s, 3) for one in index.events.stretches],
    }


def step_answer(index: RunIndex, query: Mapping[str, str]) -> dict[str, Any]:
    """When `step` was trained, or how many steps there are where it was not; with `at`, the step of that time."""
    ends, starts = index.events.step_ends, index.events.step_starts
    step = index.events.step_at(number(query, "at")) if "at" in query else int(number(query, "step"))
    is_known = 0 <= step < len(starts)
    return {
        "step": step,
        "steps": len(ends),
        "start_s": round(starts[step], 4) if is_known else None,
        "end_s": round(ends[step], 4) if 0 <= step < len(ends) else None,
    }


def _when(index: RunIndex, step: int) -> float:
    ends = index.events.step_ends
    return ends[step] if 0 <= step < len(ends) else index.end_s


def curves_answer(index: RunIndex, query: Mapping[str, str]) -> dict[str, Any]:
    """Answer with the points [step, mean, least, greatest] of each of `names`, and its axis."""
    curves: dict[str, Any] = {}
    for name in [name for name in query.get("names", "").split(",") if name][:MAX_NAMES]:
        if (curve := index.curves.curves.get(name)) is not None:
            points = [[_short(value) for value in point] for point in curve.points()]
            curves[name] = {"points": points, "axis": _axis(name, points)}
    return {"curves": curves}


def _axis(name: str, points: list[list[float]]) -> list[float]:
    """Return the ends of the axis of metric `name`, at one place for zeros alone."""
    known, values = described(name), [value for _, _, *ends in points for value in ends]
    ends = axis_ends(min(values), max(values), is_amount=known is not None and known[1].is_amount)
    return [_short(end) for end in ends]


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def groups_answer(index: RunIndex, query: Mapping[str, str]) -> dict[str, Any]:
    """`count` groups whose fate is known, in that order: from `row` on, or those of `step`.

    `tokens=1`: only such whose tokens were written: the newest ones before `row` where there are none from there on,
    and any group where the run has none.
    """
    rollouts = index.rollouts
    count = count_of(query, "count", 30, 1, MAX_ROWS)
    row = rollouts.row_of_step(int(number(query, "step"))) if "step" in query else int(number(query, "row", 0))
    row = max(0, min(row, max(0, rollouts.num_groups - 1)))
    asked = index.tokens.places if query.get("tokens") == "1" else ()
    written = sorted(at for ordinal in asked if (at := rollouts.row_of(ordinal)) is not None)
    rows: Sequence[int] = written or range(rollouts.num_groups)
    place = bisect.bisect_left(rows, row)
    found = rows[place : place + count] or rows[max(0, place - count) : place]
    groups = [_row(index, rollouts.group(at)) for at in found]
    return {"row": row, "num_groups": rollouts.num_groups, "has_tokens": bool(index.tokens.places), "groups": groups}


def _row(index: RunIndex, group: GroupRow) -> dict[str, Any]:
    lines = index.rollouts.lines(group.row, limit=1)
    return {
        **msgspec.to_builtins(group),
        "has_tokens": group.ordinal in index.tokens,
        "prompt": lines[0].prompt[:MAX_HEAD] if lines else "",
    }


def group_answer(index: RunIndex, query: Mapping[str, str]) -> dict[str, Any]:
    """Group `ordinal`: its rollouts, long texts cut, with tokens where they were written; null where it has no fate."""
    ordinal = int(number(query, "ordinal"))
    row = index.rollouts.row_of(ordinal)
    if row is None:
        return {"ordinal": ordinal, "group": None}
    lines = index.rollouts.lines(row)
    tokens = {line.sample: line for line in index.tokens.lines(ordinal)}
    return {
        "ordinal": ordinal,
        "group": _row(index, index.rollouts.group(row)),
        "prompt": lines[0].prompt[:MAX_TEXT] if lines else "",
        "answer": lines[0].answer if lines else None,
        "task": lines[0].task if lines else "",
        "rollouts": [_rollout(index, line, tokens.get(line.sample)) for line in lines],
    }


def _rollout(index: RunIndex, line: RolloutLine, tokens: TokenLine | None) -> dict[str, Any]:
    return {name: getattr(line, name) for name in ROLLOUT_FIELDS} | {
        "completion": line.completion[:MAX_TEXT],
        "ending": line.completion[MAX_TEXT:][-MAX_ENDING:],
        "times": [_run_s(index, at_s) for at_s in (line.started_s, line.finished_s)],
        "tokens": tokens,
        "episode": None if line.episode is None else _episode(line.episode),
    }


def _episode(line: EpisodeLine) -> dict[str, Any]:
    """The numbers of an episode, and its transcript, as far as there is room for its text."""
    told = ("messages", "turn_rewards", "branches", "contexts")
    numbers = {name: getattr(line, name) for name in line.__struct_fields__ if name not in told}
    parts = beginning(transcript_of(line), max_parts=MAX_PARTS, max_chars=MAX_TEXT)
    return numbers | {"forks": len(line.branches), "parts": parts}


def _run_s(index: RunIndex, raw_s: float) -> float | None:
    """Return `raw_s` on the run's time; None where no attempt was under way."""
    for stretch in reversed(index.events.stretches):
        if stretch.start_s <= stretch.run_s(raw_s) <= stretch.end_s:
            return round(stretch.run_s(raw_s), 3)
    return None


Answer = Callable[[RunIndex, Mapping[str, str]], dict[str, Any]]
ANSWERS: dict[str, Answer] = {
    "/api/run": run_answer,
    "/api/loop": loop_answer,
    "/api/lanes": lanes_answer,
    "/api/overview": overview_answer,
    "/api/step": step_answer,
    "/api/curves": curves_answer,
    "/api/groups": groups_answer,
    "/api/group": group_answer,
}
