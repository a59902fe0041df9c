"""From completions to calls, and from their answers to whole rewards, in whatever order either come. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from slipstream.core.types import Completion
from slipstream.rewards.logged import NOTHING, Cell, Logged
from slipstream.rewards.protocol import Per

Where = tuple[str, Per]
"""The kind of a call: the place where it is answered (`Scorers`), and of a completion or of a group at once."""


@dataclass
class ScoreEntry:
    """A completion, its parts so far, one per term, and how many calls are still to answer for it."""

    completion: Completion
    parts: list[float | None]
    num_open: int
    failure: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    extra: dict[str, Cell] = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    """One question for a scorer: these completions of one prompt, by all terms of its kind."""

    job_id: int
    where: Where
    entries: tuple[ScoreEntry, ...]


@dataclass
class Assembly:
    """The calls that completions need, and the parts that these have returned.

    `terms` says who scores each. Terms of groups are called when all `group_size` completions of a group are here, an
    evaluation's when its one is. Of copies of a sample the first counts until its group is complete, as in the group
    buffer: a replica that is lost is followed by another, which sends the whole group. A copy of a group that is scored
    already is refused by the buffer, or waits here for the others, which costs its memory. Where no term is of groups,
    every copy is scored.
    """

    terms: Sequence[Where]
    group_size: int = 1
    num_called: int = 0
    """Completions that wait for an answer; not those that wait for their group."""
    _calls: dict[int, Call] = field(default_factory=dict)
    _groups: dict[tuple[int, int], dict[int, ScoreEntry | None]] = field(default_factory=dict)
    _next_job: int = 0

    def add(self, completion: Completion) -> list[Call]:
        """The calls that can be made now that `completion` is here."""
        kinds = dict.fromkeys(self.terms)
        entry = ScoreEntry(completion, [None] * len(self.terms), num_open=len(kinds))
        of_groups = [where for where in kinds if where[1] == "group"]
        if not of_groups:
            return [self._call(where, (entry,)) for where in kinds]
        group = self._place(completion, entry)
        if group is None:
            return []
        alone = [self._call(where, (entry,)) for where in kinds if where[1] == "completion"]
        return alone + [self._call(where, group) for where in of_groups if group]

    def leave_out(self, completion: Completion) -> list[Call]:
        """The same for one that cannot be scored: the others of its group do not wait for it."""
        kinds = [where for where in dict.fromkeys(self.terms) if where[1] == "group"]
        group = self._place(completion, None) if kinds else None
        return [self._call(where, group) for where in kinds if group]

    def answer(
        self, job_id: int, parts: Sequence[float | None], failure: str | None, logged: Logged = NOTHING
    ) -> list[ScoreEntry]:
        """Take what a scorer said and `logged`; the completions that have all their parts with it, or have failed."""
        call = self._calls.pop(job_id)
        self.num_called -= len(call.entries)
        indices = [index for index, where in enumerate(self.terms) if where == call.where]
        count = len(call.entries)
        if failure is None and len(parts) != len(indices) * count:
            failure = f"worker sent bad output: {len(parts)} parts for {len(indices) * count}"
        if failure is None and (fault := logged.fault(count)) is not None:
            failure = f"worker sent bad output: {fault}"
        for place, entry in enumerate(call.entries):
            entry.num_open -= 1
            if failure is not None:
                entry.failure = entry.failure or failure
                continue
            for n, index in enumerate(indices):
                entry.parts[index] = parts[n * count + place]
            entry.metrics |= logged.metrics
            entry.extra |= {name: values[place] for name, values in logged.columns.items()}
        return [entry for entry in call.entries if not entry.num_open]

    def _place(self, completion: Completion, entry: ScoreEntry | None) -> tuple[ScoreEntry, ...] | None:
        """Put it into its group: those to score once that is complete, by sample; () before, None for a copy."""
        key = (completion.eval_id, completion.ordinal)
        group = self._groups.setdefault(key, {})
        if completion.sample in group:
            return None
        group[completion.sample] = entry
        if len(group) < (self.group_size if completion.purpose == "train" else 1):
            return ()
        del self._groups[key]
        return tuple(one for _, one in sorted(group.items()) if one is not None)

    def _call(self, where: Where, entries: tuple[ScoreEntry, ...]) -> Call:
        call = Call(self._next_job, where, entries)
        self._next_job += 1
        self._calls[call.job_id] = call
        self.num_called += len(entries)
        return call
