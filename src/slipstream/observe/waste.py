"""Tokens that were sampled, or read, and trained nobody: counted from a run's decisions and timelines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from slipstream.core.ranks import split_rank_name
from slipstream.observe.recorder import EventLine
from slipstream.observe.states import DECODES, side_of
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


class Wasted(NamedTuple):
    """So many tokens, at a time of the run's clock."""

    time_ns: int
    cause: str
    tokens: int


def wasted(events: Iterable[EventLine], timelines: Mapping[str, Sequence[Record]]) -> Iterator[Wasted]:
    """Every waste of a run: of all that led to its final weights; re-prefill, and what was left begun, of this attempt.

    Identity, where no process was lost: tokens sampled = trained + all causes but `re_prefilled`.
    """
    pending: dict[int, dict[int, int]] = {}  # ordinal -> sample -> tokens; neither trained nor dropped yet
    again: set[int] = set()  # ordinals that were admitted once more
    admitted: set[int] = set()
    training: Sequence[int] = ()
    in_slots = {
        replica: life for process, records in timelines.items() for replica, life in _last_life(process, records)
    }
    time_ns = 0
    for line in events:
        event, time_ns = line.event, round(line.time_s * 1e9)
        match event["type"]:
            case "ScheduleBegan":
                if event["snapshot"] is not None:
                    admitted.update(range(event["snapshot"]["next_ordinal"]))
            case "CompletionFinished":
                ordinal, new = event["ordinal"], event["num_tokens"] - event["num_restored"]
                if (life := in_slots.get(event["replica"])) is not None and time_ns >= life.since_ns:
                    life.tokens -= new
                if ordinal in again and new:
                    yield Wasted(time_ns, "regenerated", new)
                pending.setdefault(ordinal, {})[event["sample"]] = event["num_tokens"]
            case "StepDone":
                for ordinal in training:
                    pending.pop(ordinal, None)
                    again.discard(ordinal)
        for command in line.commands:
            match command["type"]:
                case "StartGroup":
                    (again if command["ordinal"] in admitted else admitted).add(command["ordinal"])
                case "TrainStep":
                    training = command["ordinals"]
                case "Skip":
                    dropped = (pending.pop(ordinal, {}) for ordinal in command["ordinals"])
                    if tokens := sum(sum(samples.values()) for samples in dropped):
                        yield Wasted(time_ns, command["cause"], tokens)
    for process, records in timelines.items():
        if side_of(process) == "generator" and split_rank_name(process)[1] == 0:
            yield from _re_prefilled(records)
    left = sum(sum(samples.values()) for samples in pending.values())
    if left := left + sum(max(0, life.tokens) for life in in_slots.values()):
        yield Wasted(time_ns, "left", left)


def _re_prefilled(records: Iterable[Record]) -> Iterator[Wasted]:
    """A replica's counts go up, and begin at 0 with each of its processes."""
    so_far = 0
    for record in records:
        if isinstance(record, ProcessStart):
            so_far = 0
        elif isinstance(record, Counter) and "re_prefilled_tokens" in record.values:
            count = int(record.values["re_prefilled_tokens"])
            if count > so_far:
                yield Wasted(record.time_ns, "re_prefilled", count - so_far)
            so_far = count


@dataclass
class _Slots:
    """What a replica has sampled since its process began, less what it has finished."""

    since_ns: int
    tokens: int = 0


def _last_life(process: str, records: Iterable[Record]) -> Iterator[tuple[int, _Slots]]:
    """The replica and its last process, where that came to its end: of one that was killed nobody knows."""
    name, rank = split_rank_name(process)
    word, _, number = name.partition("-")
    if word != "generator" or not number.isdigit() or rank:
        return
    life, has_ended = _Slots(0), False
    for record in records:
        if isinstance(record, ProcessStart):
            life, has_ended = _Slots(record.time_ns), False
        elif isinstance(record, Slice) and record.state in DECODES:
            life.tokens += record.units
        has_ended |= isinstance(record, ProcessEnd)
    if has_ended:
        yield int(number), life
