"""Tokens that were sampled, or read, and nobody was trained on them: counted from a run's decisions and timelines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from slipstream.core.ranks import split_rank_name
from slipstream.core.types import (
    CompletionFinished,
    GroupScored,
    ReplicaLost,
    Skip,
    StartGroup,
    StepDone,
    Stop,
    Swapped,
    TrainStep,
)
from slipstream.observe.jsonl import read_jsonl
from slipstream.observe.states import DECODES
from slipstream.observe.timeline import Counter, ProcessEnd, ProcessStart, Record, Slice

WASTE = {
    "no_signal": "of groups whose rewards were all equal",
    "failed": "of groups whose completions all failed in scoring",
    "stale": "of groups discarded for their age, by policies that discard",
    "regenerated": "sampled again, since the first copy was lost with a process",
    "re_prefilled": "prompts and completions read again: after a swap, or to go on after a break",
    "left": "sampled, and not trained when the run ended",
}
"""Causes of wasted tokens, and what each counts."""
RE_PREFILLED = "re_prefilled_tokens"
"""What generators call their count of these, in `Counters` and in their timelines."""


class Wasted(NamedTuple):
    """So many tokens, at a time of the run's clock."""

    time_ns: int
    cause: str
    tokens: int


class ScheduleBegan(msgspec.Struct, tag=True):
    """The first line of `events.jsonl`, and of what a resume appends; nothing of it is needed here."""


Event = Swapped | CompletionFinished | GroupScored | StepDone | ReplicaLost | Stop | ScheduleBegan
Command = StartGroup | TrainStep | Skip


class Decision(msgspec.Struct):
    """A line of `events.jsonl`: an event, and what the schedule answered."""

    time_s: float
    event: Event
    commands: list[Command]

    @property
    def begins(self) -> bool:
        """Whether it starts a group, or trains what a resume has brought."""
        return any(isinstance(command, StartGroup | TrainStep) for command in self.commands)


def read_decisions(path: Path) -> Iterator[Decision]:
    """Those of `events.jsonl`, in order, a torn last line left out."""
    yield from read_jsonl(path, Decision)


@dataclass
class ReplicaTokens:
    """What the timeline of a replica says: tokens read again, and those sampled by its last process since it began.

    `sampled` is None where that process was killed: what was in its slots nobody knows.
    """

    re_prefilled: list[Wasted]
    since_ns: int = 0
    sampled: int | None = None


def replica_tokens(process: str, records: Iterable[Record]) -> tuple[int, ReplicaTokens] | None:
    """The number of the replica and what it says; None for what is no generator's first rank."""
    name, rank = split_rank_name(process)
    word, _, number = name.partition("-")
    if word != "generator" or not number.isdigit() or rank:
        return None
    found = ReplicaTokens([])
    so_far = sampled = 0
    for record in records:
        match record:
            case ProcessStart():
                so_far, sampled = 0, 0  # its counts begin anew
                found.since_ns, found.sampled = record.time_ns, None
            case Slice() if record.state in DECODES:
                sampled += record.units
            case Counter() if RE_PREFILLED in record.values:
                count = int(record.values[RE_PREFILLED])
                if count > so_far:
                    found.re_prefilled.append(Wasted(record.time_ns, "re_prefilled", count - so_far))
                so_far = count
            case ProcessEnd():
                found.sampled = sampled
            case _:
                pass
    return int(number), found


class Decided:
    """What the schedule's decisions make of sampled tokens. Feed them to `take` in order.

    Ordinals below `num_admitted` were admitted before.
    """

    def __init__(self, num_admitted: int = 0) -> None:
        self._num_admitted = num_admitted
        self._pending: dict[int, dict[int, int]] = {}  # ordinal -> sample -> tokens; neither trained nor dropped yet
        self._again: set[int] = set()  # ordinals that were admitted once more
        self._settled: set[int] = set()  # of these, trained or dropped: with the copy that was scored first
        self._training: Sequence[int] = ()

    @property
    def num_pending(self) -> int:
        """Tokens of completions that are finished, and neither trained nor dropped."""
        return sum(sum(samples.values()) for samples in self._pending.values())

    def take(self, event: object, commands: Iterable[Command]) -> Iterator[tuple[str, int]]:
        """(cause, tokens) of what is wasted by one decision."""
        match event:
            case CompletionFinished(ordinal=ordinal):
                new = event.num_tokens - event.num_restored
                if ordinal in self._again:
                    yield "regenerated", new
                if ordinal not in self._settled:
                    self._pending.setdefault(ordinal, {})[event.sample] = event.num_tokens
            case StepDone():
                self._settle(self._training)
                self._training = ()
            case _:
                pass
        for command in commands:
            match command:
                case StartGroup(ordinal=ordinal) if ordinal < self._num_admitted:
                    self._again.add(ordinal)
                case StartGroup(ordinal=ordinal):
                    self._num_admitted = ordinal + 1
                case TrainStep(ordinals=ordinals):
                    self._training = ordinals
                case Skip(ordinals=ordinals, cause=cause):
                    if tokens := self._settle(ordinals):
                        yield cause, tokens

    def _settle(self, ordinals: Sequence[int]) -> int:
        """Nothing is waited for any more; the tokens of their completions.

        A second copy may still be sampled, where the first was not lost with its replica.
        """
        self._settled.update(self._again.intersection(ordinals))
        return sum(sum(self._pending.pop(ordinal, {}).values()) for ordinal in ordinals)


def wasted(decisions: Iterable[Decision], replicas: Mapping[int, ReplicaTokens]) -> Iterator[Wasted]:
    """Every waste of a run: of all that led to its final weights; re-prefill, and what was left begun, of this attempt.

    Identity, where no process was lost: tokens sampled = trained + all causes but `re_prefilled`.
    """
    decided, time_ns = Decided(), 0
    begun = {number: replica.sampled for number, replica in replicas.items() if replica.sampled is not None}
    since_ns = {number: replicas[number].since_ns for number in begun}
    for line in decisions:
        event, time_ns = line.event, round(line.time_s * 1e9)
        if isinstance(event, CompletionFinished) and time_ns >= since_ns.get(event.replica, math.inf):
            begun[event.replica] -= event.num_tokens - event.num_restored
        for cause, tokens in decided.take(event, line.commands):
            yield Wasted(time_ns, cause, tokens)
    for replica in replicas.values():
        yield from replica.re_prefilled
    if left := decided.num_pending + sum(max(0, tokens) for tokens in begun.values()):
        yield Wasted(time_ns, "left", left)
