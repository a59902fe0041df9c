"""The path of each group through the loop, and curves of the loop: read from `events.jsonl` and `rollouts.jsonl`.

Both are of bounded size in memory however long the run was: of too many groups every 2nd, 4th, 8th ... ordinal is kept,
and of too many points of a curve likewise.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from slipstream.core.jsonl import intact_lines
from slipstream.core.run_log import Decision, LoopState, Phase, RolloutTimes, ScheduleBegan, intact_decisions
from slipstream.core.types import Skip, StartGroup, StepDone, Swapped
from slipstream.observe.attempts import Attempt
from slipstream.observe.timeline import to_ns

T = TypeVar("T")

MAX_GROUPS = 20_000
MAX_POINTS = 20_000


@dataclass
class GroupPath:
    """The places of group `ordinal` over time, in nanoseconds on the newest attempt's clock.

    It was admitted to `replica`, whose first completion of it began at `started_ns`; `last_sample` was the last to be
    scored. It went into step `step` of attempt `attempt`, or was dropped, at `dropped_ns`. None: not known.
    """

    ordinal: int
    replica: int
    attempt: int
    step: int | None
    started_ns: int
    finished_ns: int
    scored_ns: int
    last_sample: int
    admitted_ns: int | None = None
    dropped_ns: int | None = None


@dataclass
class GroupFlow:
    """Paths of every `stride`-th group by ordinal, and curves: name -> [(ns, values)], ascending."""

    paths: list[GroupPath]
    stride: int
    curves: dict[str, list[tuple[int, dict[str, float]]]]


def read_group_flow(
    attempts: Sequence[Attempt], *, max_groups: int = MAX_GROUPS, max_points: int = MAX_POINTS
) -> GroupFlow:
    """Return the paths of groups through all attempts, each line of the files taken once."""
    paths, stride = _read_paths(attempts, max_groups)
    curves: dict[str, Thinned[dict[str, float]]] = {}
    admissions: dict[tuple[int, int], list[int]] = defaultdict(list)  # (ordinal, replica) -> times
    drops: dict[int, list[int]] = defaultdict(list)
    loop = _LoopCurves()
    for attempt, line in _decisions(attempts):
        time_ns = to_ns(line.time_s) + attempt.shift_ns
        for command in line.commands:
            if isinstance(command, StartGroup) and command.ordinal % stride == 0:
                admissions[command.ordinal, command.replica].append(time_ns)
            elif isinstance(command, Skip):
                for ordinal in command.ordinals:
                    if ordinal % stride == 0:
                        drops[ordinal].append(time_ns)
        for name, values in loop.take(line):
            curves.setdefault(name, Thinned(max_points)).add(time_ns, values)
    for path in paths:
        at_ns = admissions.get((path.ordinal, path.replica), [])
        # The replica's clock may be behind.
        before_ns = [time for time in at_ns if time <= path.started_ns] or at_ns[:1]
        path.admitted_ns = max(before_ns, default=None)
        if path.step is None:
            path.dropped_ns = next((time for time in drops.get(path.ordinal, []) if time >= path.scored_ns), None)
    return GroupFlow(paths, stride, {name: curve.points for name, curve in curves.items()})


# rollouts.jsonl


def _read_paths(attempts: Sequence[Attempt], max_groups: int) -> tuple[list[GroupPath], int]:
    """The paths of groups with lines, without admission and drop, by the time they began; and the stride of ordinals.

    What a resume has kept is in the file of the attempt before it, too, and is of that one.
    """
    paths: dict[tuple[int, int | None, int], GroupPath] = {}  # (ordinal, step, attempt)
    seen: dict[tuple[int, int], set[float]] = {}  # what earlier attempts have: (ordinal, sample) -> scored at
    stride = 1
    for attempt in attempts:
        own: list[RolloutTimes] = []
        for _, line in intact_lines(attempt.folder / "rollouts.jsonl", RolloutTimes):
            if line.ordinal % stride or line.scored_s in seen.get((line.ordinal, line.sample), ()):
                continue
            own.append(line)
            _add(paths, line, attempt)
            while len(paths) > max_groups:
                stride *= 2
                paths = {key: path for key, path in paths.items() if key[0] % stride == 0}
                own = [one for one in own if one.ordinal % stride == 0]
        if attempt is not attempts[-1]:
            for line in own:
                seen.setdefault((line.ordinal, line.sample), set()).add(line.scored_s)
    return sorted(paths.values(), key=lambda path: path.started_ns), stride


def _add(paths: dict[tuple[int, int | None, int], GroupPath], line: RolloutTimes, attempt: Attempt) -> None:
    started_ns, finished_ns, scored_ns = (
        to_ns(seconds) + attempt.shift_ns for seconds in (line.started_s, line.finished_s, line.scored_s)
    )
    group = line.ordinal, line.replica, attempt.number, line.step
    new = GroupPath(*group, started_ns, finished_ns, scored_ns, last_sample=line.sample)
    path = paths.setdefault((line.ordinal, line.step, attempt.number), new)
    path.started_ns = min(path.started_ns, started_ns)
    path.finished_ns = max(path.finished_ns, finished_ns)
    if scored_ns >= path.scored_ns:
        path.scored_ns, path.last_sample = scored_ns, line.sample


# events.jsonl


CURVE_OF: dict[Phase, str] = {
    "sampling": "being sampled",
    "scoring": "being scored",
    "ready": "waiting for their step",
    "training": "in training",
}
STEP_CURVES = {
    "staleness (steps)": {"staleness_mean": "mean", "staleness_max": "max"},
    "reward": {"reward": "mean", "reward_mean": "mean"},
}
"""Name of the curve -> metric of the step -> what the curve calls it."""


def _decisions(attempts: Sequence[Attempt]) -> Iterator[tuple[Attempt, Decision]]:
    """Yield the decisions of all attempts, each once: an attempt's own are those from its `ScheduleBegan` on.

    A resume cuts the file, so what came before that is in the files of earlier attempts, whole.
    """
    begun: set[tuple[int, float]] = set()
    for attempt in attempts:
        is_own = False
        for line in intact_decisions(attempt.folder / "events.jsonl"):
            if isinstance(line.event, ScheduleBegan):
                is_own = (line.seq, line.time_s) not in begun
                begun.add((line.seq, line.time_s))
            if is_own:
                yield attempt, line


class _LoopCurves:
    """The curves that have another value after a decision: groups by phase, versions held, and metrics of steps."""

    def __init__(self) -> None:
        self._loop = LoopState()
        self._versions: dict[str, float] = {}

    def take(self, line: Decision) -> Iterator[tuple[str, dict[str, float]]]:
        """Yield (name, values) of each curve that `line` changes."""
        before = dict(self._loop.counts)
        self._loop.take(line)
        match line.event:
            case ScheduleBegan():
                self._versions.clear()
            case Swapped(replica=replica, version=version):
                self._versions[f"generator-{replica}"] = version
                yield "version", dict(self._versions)
            case StepDone(version=version, metrics=metrics):
                self._versions["trainer"] = version
                yield "version", dict(self._versions)
                for curve, names in STEP_CURVES.items():
                    known = {word: metrics[name] for name, word in names.items() if name in metrics}
                    if values := {word: value for word, value in known.items() if math.isfinite(value)}:
                        yield curve, values
        if any(self._loop.counts[phase] != before[phase] for phase in CURVE_OF):
            yield "groups", {name: self._loop.counts[phase] for phase, name in CURVE_OF.items()}


@dataclass
class Thinned(Generic[T]):
    """A curve of at most `limit` points, at equal least distances that double when there are too many."""

    limit: int
    points: list[tuple[int, T]] = field(default_factory=list)
    spacing_ns: int = 0

    def add(self, time_ns: int, value: T) -> None:
        if self.points and time_ns < self.points[-1][0] + self.spacing_ns:
            self.points[-1] = (self.points[-1][0], value)  # what was last within the distance holds until the next one
            return
        self.points.append((time_ns, value))
        if len(self.points) > self.limit:
            self.spacing_ns = max(2 * self.spacing_ns, 2 * (self.points[-1][0] - self.points[0][0]) // self.limit, 1)
            every, self.points = self.points, []
            for point in every:
                self.add(*point)
