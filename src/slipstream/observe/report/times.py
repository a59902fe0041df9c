"""Where a run's seconds went, in the shape in which the report draws it: exact where that is quick, else as reported.

`observe/accounting.py` reads every decision and every slice, tens of megabytes a second. Of a run longer than
EXACT_BYTES the page takes what `summary.json` kept of that, and the seconds that processes reported as they went.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from slipstream.core.errors import SlipstreamError
from slipstream.observe.accounting import RunAccounting, read_accounting
from slipstream.observe.attempts import read_attempts
from slipstream.observe.balance import Balance
from slipstream.observe.noise import Estimate, mean_of
from slipstream.observe.report.window import read_from
from slipstream.observe.states import side_of
from slipstream.observe.summary import Summary
from slipstream.observe.timeline import TIME_PREFIX, process_files, process_order, read_timeline, times_ns

EXACT_BYTES = 1 << 27
MAX_PROCESSES = 12  # of more, those of a side are added up

Seconds = Mapping[str, float]  # by state


@dataclass(frozen=True)
class Span:
    """A step, or what was reported in it, from `start_s` to `end_s` since RL began: process or side -> seconds."""

    start_s: float
    end_s: float
    seconds: Mapping[str, Seconds]


@dataclass(frozen=True)
class Times:
    """`whole`: each process from start to end. `balance` is None as long as there is nothing to say it from."""

    whole: Mapping[str, Seconds]
    spans: Sequence[Span]
    balance: Balance | None
    wall_s: float
    is_exact: bool

    @cached_property
    def loop(self) -> dict[str, dict[str, float]]:
        """Process or side -> seconds by state, from the first admission to the end of the last step."""
        return added(span.seconds for span in self.spans)

    @property
    def verdict(self) -> str:
        return "" if self.balance is None else self.balance.verdict

    @property
    def step_s(self) -> Estimate | None:
        """Mean seconds of a step."""
        return mean_of([span.end_s - span.start_s for span in self.spans])


def earlier_s(run_dir: Path) -> float | None:
    """Seconds of the attempts that resumes have set aside, abandoned steps included; None for damaged files.

    By their timelines: each attempt lasted from the first line of its processes to the last one.
    """
    total_ns = 0
    for attempt in read_attempts(run_dir)[:-1]:
        files = process_files(attempt.folder)
        try:
            starts = [times_ns(record)[0] for path in files for record in islice(read_timeline(path), 1)]
            ends = [times_ns(record)[1] for path in files for record in read_from(path, -1)]
        except SlipstreamError:  # a power failure: what was never synced may be anything
            return None
        total_ns += max(ends) - min(starts) if starts and ends else 0
    return total_ns * 1e-9


def read_times(run_dir: Path, steps: Sequence[Mapping[str, Any]], summary: Summary | None) -> Times:
    """`steps` are the lines of `metrics.jsonl` that are of steps. SlipstreamError for damaged files."""
    files = [run_dir / "events.jsonl", *process_files(run_dir)]
    if sum(path.stat().st_size for path in files if path.exists()) <= EXACT_BYTES:
        return _exact(read_accounting(run_dir))
    spans = _reported(steps)
    if summary is None:
        return Times({}, spans, None, 0.0, is_exact=False)
    return Times(by_side(summary.accounting), spans, summary.balance, summary.wall_s, is_exact=False)


def _exact(accounting: RunAccounting) -> Times:
    steps = accounting.steps
    began_s = steps[0].start_s if steps else 0.0
    spans = [Span(s.start_s - began_s, s.end_s - began_s, by_side(s.states)) for s in steps]
    return Times(by_side(accounting.accounting), spans, accounting.balance, accounting.wall_s, is_exact=True)


def _reported(steps: Sequence[Mapping[str, Any]]) -> list[Span]:
    """From the second step on: the first report tells of everything since the start of the process."""
    began_s = steps[0]["wall_s"] - steps[0]["step_s"] if steps else 0.0
    spans = []
    for before, line in pairwise(steps):
        seconds: dict[str, dict[str, float]] = {}
        for name, value in line.items():
            if name.startswith(TIME_PREFIX) and value is not None:
                side, _, state = name.removeprefix(TIME_PREFIX).rpartition("/")
                seconds.setdefault(side, {})[state] = value
        in_order = {side: seconds[side] for side in sorted(seconds, key=process_order)}
        spans.append(Span(before["wall_s"] - began_s, line["wall_s"] - began_s, in_order))
    return spans


def by_side(processes: Mapping[str, Seconds]) -> dict[str, Seconds]:
    """As they are where they are few, else those of a side added up, with how many these were."""
    if len(processes) <= MAX_PROCESSES:
        return dict(processes)
    count = Counter(map(side_of, processes))
    name = {side: f"{side} ({number})" if number > 1 else side for side, number in count.items()}
    return dict(added({name[side_of(process)]: seconds} for process, seconds in processes.items()))


def added(parts: Iterable[Mapping[str, Seconds]]) -> dict[str, dict[str, float]]:
    """The sums of several name -> state -> seconds."""
    total: dict[str, dict[str, float]] = {}
    for part in parts:
        for name, seconds in part.items():
            own = total.setdefault(name, {})
            for state, value in seconds.items():
                own[state] = own.get(state, 0.0) + value
    return total
