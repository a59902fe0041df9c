"""Tokens that were sampled, or read, and nobody was trained on them: counted from a run's decisions and timelines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from slipstream.core.ranks import split_rank_name
from slipstream.core.run_log import Decision, LoopState
from slipstream.core.types import CompletionFinished, ReplicaLost, StartGroup, StepDone
from slipstream.observe.states import DECODES
from slipstream.observe.timeline import Counter, ProcessEnd, ProcessStart, Record, Slice

WASTE = {
    "no_signal": "of groups whose rewards were all equal",
    "failed": "of groups whose completions all failed in scoring",
    "stale": "of groups discarded for their staleness, by policies that discard",
    "regenerated": "sampled again, because the first copy was lost with a process",
    "re_prefilled": "prompts and completions prefilled again, after a swap or to continue after an interruption",
    "not_selected": "of trained groups, in completions that were not selected, were masked, or were only a baseline",
    "left": "sampled, and not trained when the run ended",
}
"""Causes of wasted tokens, and what each counts."""
CHOSEN = ("not_selected", "left")
"""Causes that are no waste: the recipe selects, and what was left when a run ended early goes on with it."""
RE_PREFILLED = "re_prefilled_tokens"
"""The name of their count, in the `Counters` and timelines of generators."""


def not_selected(metrics: Mapping[str, float]) -> int:
    """Return the sampled tokens of a step's groups that it did not train on, by its `metrics`."""
    sampled = sum(tokens for name, tokens in metrics.items() if name.startswith("staleness_tokens/"))
    untrained = sampled - metrics.get("tokens_trained", sampled)
    return round(untrained) if untrained > 0 else 0


class Wasted(NamedTuple):
    """Tokens that were wasted, at a time of the run's clock."""

    time_ns: int
    cause: str
    tokens: int


@dataclass
class ReplicaTokens:
    """The timeline of a replica in tokens: those read again, and those sampled by its last process since it began.

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
    return int(number), found


class UntrainedTokens:
    """The finished completions' tokens, from their end until their group is trained or dropped; `loop` says when."""

    hears = (Decision,)

    def __init__(self) -> None:
        self.loop = LoopState()
        self._pending: dict[int, dict[int, int]] = {}  # ordinal -> sample -> tokens; neither trained nor dropped yet
        self._again: set[int] = set()  # ordinals that were admitted once more

    @property
    def num_pending(self) -> int:
        """Return the tokens of completions that are finished, and neither trained nor dropped."""
        return sum(sum(samples.values()) for samples in self._pending.values())

    def take(self, decision: Decision) -> Iterator[Wasted]:
        """Yield the waste that a decision makes. Decisions are taken in order.

        A second copy of a group may still be sampled when the group is settled: the first one was not lost with its
        replica. What a replica handed over when it left is continued, so nothing of it is sampled again.
        """
        event, time_ns = decision.event, round(decision.time_s * 1e9)
        if isinstance(event, CompletionFinished):
            is_again = event.ordinal in self._again
            if is_again and event.handed_over_by < 0:
                yield Wasted(time_ns, "regenerated", event.num_tokens - event.num_restored)
            if event.ordinal in self.loop.groups or not is_again:
                self._pending.setdefault(event.ordinal, {})[event.sample] = event.num_tokens
        if isinstance(event, StepDone) and (tokens := not_selected(event.metrics)):
            yield Wasted(time_ns, "not_selected", tokens)
        num_admitted = self.loop.next_ordinal
        for command in decision.commands:
            if isinstance(command, StartGroup) and command.ordinal < num_admitted:
                self._again.add(command.ordinal)
        for move in self.loop.take(decision):
            if move.fate is not None and move.fate != "cut":
                tokens = sum(self._pending.pop(move.group.ordinal, {}).values())
                if tokens and move.fate in WASTE:
                    yield Wasted(time_ns, move.fate, tokens)


def wasted(decisions: Iterable[Decision], replicas: Mapping[int, ReplicaTokens]) -> Iterator[Wasted]:
    """Yield the waste of a run: of all that led to its final weights; re-prefill and `left` of this attempt alone.

    Identity, where no process was lost and no trained group has a poisoned completion: tokens sampled = trained + all
    causes but `re_prefilled`.
    """
    sampled, time_ns = UntrainedTokens(), 0
    begun = {number: replica.sampled for number, replica in replicas.items() if replica.sampled is not None}
    since_ns = {number: replicas[number].since_ns for number in begun}
    lost_ns: dict[int, int] = {}
    for line in decisions:
        event, time_ns = line.event, round(line.time_s * 1e9)
        if isinstance(event, ReplicaLost):
            lost_ns[event.replica] = time_ns
        elif isinstance(event, CompletionFinished):
            if time_ns >= since_ns.get(event.replica, math.inf):
                begun[event.replica] -= event.num_tokens - event.num_restored
            by = event.handed_over_by
            if lost_ns.get(by, -1) >= since_ns.get(by, math.inf):  # by its last process
                begun[by] -= event.num_restored
        yield from sampled.take(line)
    for replica in replicas.values():
        yield from replica.re_prefilled
    if left := sampled.num_pending + sum(max(0, tokens) for tokens in begun.values()):
        yield Wasted(time_ns, "left", left)
