"""What way each group took through the loop, and how many were where: read from `events.jsonl` and `rollouts.jsonl`.

Both are of bounded size in memory however long the run was: of too many groups every 2nd, 4th, 8th ... ordinal is kept,
and of too many points of a curve likewise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from slipstream.observe.attempts import Attempt
from slipstream.observe.jsonl import intact_lines

T = TypeVar("T")

MAX_GROUPS = 20_000
MAX_POINTS = 20_000


@dataclass
class GroupPath:
    """Where group `ordinal` was when, in nanoseconds on the newest attempt's clock.

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
    """The ways of groups through all attempts, each line of the files taken once."""
    paths, stride = _read_paths(attempts, max_groups)
    curves: dict[str, _Thinned[dict[str, float]]] = {}
    admissions: dict[tuple[int, int], list[int]] = {}  # (ordinal, replica) -> times
    drops: dict[int, list[int]] = {}
    loop = _Loop()
    for attempt, line in _events(attempts):
        time_ns = _ns(line.time_s) + attempt.shift_ns
        for command in line.commands:
            if command.type == "StartGroup" and command.ordinal % stride == 0:
                admissions.setdefault((command.ordinal, command.replica), []).append(time_ns)
            elif command.type == "Skip":
                for ordinal in command.ordinals:
                    if ordinal % stride == 0:
                        drops.setdefault(ordinal, []).append(time_ns)
        for name, values in loop.take(line):
            curves.setdefault(name, _Thinned(max_points)).add(time_ns, values)
    for path in paths:
        at_ns = admissions.get((path.ordinal, path.replica), [])
        before_ns = [time for time in at_ns if time <= path.started_ns] or at_ns[
            :1
        ]  # the replica's clock may be behind
        path.admitted_ns = max(before_ns, default=None)
        if path.step is None:
            path.dropped_ns = next((time for time in drops.get(path.ordinal, []) if time >= path.scored_ns), None)
    return GroupFlow(paths, stride, {name: curve.points for name, curve in curves.items()})


# rollouts.jsonl


class _Rollout(msgspec.Struct, frozen=True, gc=False):
    ordinal: int
    sample: int
    step: int | None
    replica: int
    started_s: float
    finished_s: float
    scored_s: float


def _read_paths(attempts: Sequence[Attempt], max_groups: int) -> tuple[list[GroupPath], int]:
    """The paths of groups with lines, without admission and drop, by the time they began; and the stride of ordinals.

    What a resume has kept is in the file of the attempt before it, too, and is of that one.
    """
    paths: dict[tuple[int, int | None, int], GroupPath] = {}  # (ordinal, step, attempt)
    seen: dict[tuple[int, int], set[float]] = {}  # what earlier attempts have: (ordinal, sample) -> scored at
    stride = 1
    for attempt in attempts:
        own: list[_Rollout] = []
        for _, line in intact_lines(attempt.folder / "rollouts.jsonl", _Rollout):
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


def _add(paths: dict[tuple[int, int | None, int], GroupPath], line: _Rollout, attempt: Attempt) -> None:
    started_ns, finished_ns, scored_ns = (
        _ns(seconds) + attempt.shift_ns for seconds in (line.started_s, line.finished_s, line.scored_s)
    )
    key = (line.ordinal, line.step, attempt.number)
    path = paths.get(key)
    if path is None:
        paths[key] = GroupPath(
            ordinal=line.ordinal,
            replica=line.replica,
            attempt=attempt.number,
            step=line.step,
            started_ns=started_ns,
            finished_ns=finished_ns,
            scored_ns=scored_ns,
            last_sample=line.sample,
        )
        return
    path.started_ns = min(path.started_ns, started_ns)
    path.finished_ns = max(path.finished_ns, finished_ns)
    if scored_ns >= path.scored_ns:
        path.scored_ns, path.last_sample = scored_ns, line.sample


# events.jsonl


class _Dials(msgspec.Struct, frozen=True):
    completions_per_group: int


class _Event(msgspec.Struct, frozen=True):
    type: str
    ordinal: int = -1
    replica: int = -1
    version: int = -1
    config: _Dials | None = None
    metrics: dict[str, Any] = {}


class _Command(msgspec.Struct, frozen=True):
    type: str
    ordinal: int = -1
    replica: int = -1
    ordinals: tuple[int, ...] = ()


class _EventLine(msgspec.Struct, frozen=True):
    seq: int
    time_s: float
    event: _Event
    commands: tuple[_Command, ...]


def _events(attempts: Sequence[Attempt]) -> Iterator[tuple[Attempt, _EventLine]]:
    """The decisions of all attempts, each once: an attempt's own are those from its `ScheduleBegan` on.

    A resume cuts the file, so what came before that is in the files of earlier attempts, whole.
    """
    begun: set[tuple[int, float]] = set()
    for attempt in attempts:
        is_own = False
        for _, line in intact_lines(attempt.folder / "events.jsonl", _EventLine):
            if line.event.type == "ScheduleBegan":
                is_own = (line.seq, line.time_s) not in begun
                begun.add((line.seq, line.time_s))
            if is_own:
                yield attempt, line


@dataclass
class _Loop:
    """How many groups are where, and what versions are held, event by event."""

    group_size: int = 1
    unfinished: dict[int, int] = field(default_factory=dict)  # completions that are being sampled, by ordinal
    unscored: set[int] = field(default_factory=set)
    ready: set[int] = field(default_factory=set)
    training: set[int] = field(default_factory=set)
    versions: dict[str, float] = field(default_factory=dict)

    def take(self, line: _EventLine) -> Iterator[tuple[str, dict[str, float]]]:
        """The curves that have another value after this event, as (name, values)."""
        before, event = self._groups(), line.event
        match event.type:
            case "ScheduleBegan":
                for groups in (self.unfinished, self.unscored, self.ready, self.training, self.versions):
                    groups.clear()
                self.group_size = event.config.completions_per_group if event.config is not None else self.group_size
            case "CompletionFinished" if event.ordinal in self.unfinished:
                self.unfinished[event.ordinal] -= 1
                if self.unfinished[event.ordinal] <= 0:
                    del self.unfinished[event.ordinal]
                    self.unscored.add(event.ordinal)
            case "GroupScored":
                self._forget([event.ordinal])
                self.ready.add(event.ordinal)
            case "Swapped":
                self.versions[f"generator-{event.replica}"] = event.version
                yield "version", dict(self.versions)
            case "StepDone":
                self.training.clear()
                self.versions["trainer"] = event.version
                yield "version", dict(self.versions)
                yield from _of_step(event.metrics)
        for command in line.commands:
            match command.type:
                case "StartGroup":
                    self._forget([command.ordinal])
                    self.unfinished[command.ordinal] = self.group_size
                case "TrainStep":
                    self._forget(command.ordinals)
                    self.training.update(command.ordinals)
                case "Skip":
                    self._forget(command.ordinals)
        if (after := self._groups()) != before:
            yield "groups", after

    def _groups(self) -> dict[str, float]:
        return {
            "being sampled": len(self.unfinished),
            "being scored": len(self.unscored),
            "waiting for their step": len(self.ready),
            "in training": len(self.training),
        }

    def _forget(self, ordinals: Sequence[int]) -> None:
        for ordinal in ordinals:
            self.unfinished.pop(ordinal, None)
            for groups in (self.unscored, self.ready, self.training):
                groups.discard(ordinal)


def _of_step(metrics: dict[str, Any]) -> Iterator[tuple[str, dict[str, float]]]:
    for curve, names in {
        "staleness (steps)": {"staleness_mean": "mean", "staleness_max": "max"},
        "reward": {"reward": "mean", "reward_mean": "mean"},
    }.items():
        values = {word: metrics[name] for name, word in names.items() if isinstance(metrics.get(name), int | float)}
        if values:
            yield curve, values


@dataclass
class _Thinned(Generic[T]):
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


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
