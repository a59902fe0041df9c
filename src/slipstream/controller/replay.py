"""Replay: the recorded events of a run, once more through the schedule; a bug report is one `events.jsonl`.

    consumes      the lines of `events.jsonl`, one at a time
    produces      the first line whose commands the schedule would not give now, and what the log itself breaks
    ends when     the log does, also in a torn last line: that is a writer that was killed

Two questions are asked at once. *Does the schedule decide as it did then?* It is built from the `ScheduleBegan` at the
head of the log and fed the recorded events. *Is what was decided then sound?* `Audit` recounts the promises from the
log alone, without the schedule's code. A resumed run has one more `ScheduleBegan` where it went on; the snapshot in it
must be the state the replay has come to.

Where lines are missing the state is not known: nothing is said of what follows, up to the next `ScheduleBegan`, whose
snapshot is taken at its word. `missing` says where that is; numbers of events go on over what a resume found missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from slipstream.controller.audit import Audit, Divergence, Replay
from slipstream.controller.policies import POLICIES, make_policy
from slipstream.controller.schedule import SchedulingPolicy
from slipstream.core.errors import ConfigError, SlipstreamError, clip
from slipstream.core.files import open_regular, read_lines
from slipstream.core.jsonl import intact_lines
from slipstream.core.run_log import Command, Decision, Event, LedgerLine, ScheduleBegan, Snapshot, decode_decision


def events_file(path: Path) -> Path:
    """`events.jsonl` of a run's folder or of an `attempt_<n>/` in it; a file is itself. ConfigError without one."""
    found = path / "events.jsonl" if path.is_dir() else path
    if not found.exists():
        allowed = "the folder of a run, of an attempt_<n> in it, or an events.jsonl"
        raise ConfigError("there are no events to replay", got=path, allowed=allowed)
    return found


def replay(path: str | Path) -> Replay:
    """Run the recorded events of `path` through the schedule.

    Stops at the first divergence: all that comes after follows from it. ConfigError for a file that is no log of events
    or has a damaged line. Memory does not grow with the log, but for the ordinals that were dropped.
    """
    result = Replay(events_file(Path(path)))
    steps_done = _steps_of_ledger(result.path.with_name("ledger.jsonl"))
    schedule: SchedulingPolicy | None = None
    audit: Audit | None = None
    next_seq = number = 0
    for number, line in _read(result.path):
        event = line.event
        is_gap, next_seq = line.seq != next_seq, line.seq + 1
        if isinstance(event, ScheduleBegan):
            if is_gap or (number == 1 and event.snapshot is not None and event.snapshot.next_ordinal):
                result.missing.append(_before(number, line.seq))
                schedule = None
            result.policies.append(event.policy)
            result.divergence = _compare_states(number, event, schedule)
            if result.divergence is not None:
                break
            is_known, schedule = schedule is not None, _build(number, event, result.path)
            if audit is None or not is_known:
                audit = Audit(schedule, result)
            audit.begin(number, line, event)
            continue
        if audit is None:
            got = f"a first line with {type(event).__name__} in {result.path}"
            hint = "it was cut at its head, or comes from an older version"
            raise ConfigError("the log does not say what it began with", got=got, allowed="ScheduleBegan", hint=hint)
        if is_gap and schedule is not None:
            audit.check(number, line)  # which says that the numbers are wrong
            schedule = None
            result.missing.append(f"line {number}: lines before it are missing or repeated, so the state is unknown")
        if schedule is None:
            result.num_unchecked += 1
            continue
        result.num_decisions += 1
        audit.check(number, line)
        result.divergence = _decide(number, event, line, schedule)
        if result.divergence is not None:
            break
        result.ended_with = line.error
    if not result.policies:
        hint = "the run ended before its first decision, or the file was cut"
        raise ConfigError("the log is empty", got=result.path, hint=hint)
    if audit is not None and result.divergence is None and audit.steps_done < steps_done:
        result.missing.append(f"line {number} is the last, {steps_done - audit.steps_done} steps before the ledger's")
    return result


def _steps_of_ledger(path: Path) -> int:
    """Return how many steps the ledger beside the log calls trained; 0 without one."""
    return max((entry.step + 1 for _, entry in intact_lines(path, LedgerLine) if entry.state == "trained"), default=0)


def _before(number: int, seq: int) -> str:
    """Return the sentence that events before a resume are missing."""
    count = f"the {seq} events" if number == 1 and seq else "events"
    return f"line {number}: {count} before it, of the run until it was resumed, are missing"


def _read(path: Path) -> Iterator[tuple[int, Decision]]:
    number = 0
    try:
        with open_regular(path) as file:
            for number, line in enumerate(read_lines(file), start=1):
                if line.endswith(b"\n"):
                    yield number, decode_decision(line)
    except OSError as error:
        raise ConfigError(f"'{path}' cannot be read", got=error.strerror) from error
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors, and so is bad UTF-8
        raise ConfigError(
            f"line {number or 1} is no event of a schedule", got=clip(error), hint=f"sed -n {number or 1}p {path}"
        ) from error


def _build(number: int, began: ScheduleBegan, path: Path) -> SchedulingPolicy:
    if began.policy not in POLICIES:
        what = f"line {number} names an unknown scheduling policy in {path}"
        raise ConfigError(what, got=began.policy, allowed=", ".join(POLICIES))
    return make_policy(began.policy, began.config, began.snapshot)


def _compare_states(number: int, began: ScheduleBegan, schedule: SchedulingPolicy | None) -> Divergence | None:
    """A resume goes on from where the log before it ends; at the head of a log any snapshot is taken as it is."""
    if schedule is None:
        return None
    recorded, replayed = (
        _lasting(began.snapshot or type(schedule)(began.config).snapshot()),
        _lasting(schedule.snapshot()),
    )
    if recorded == replayed:
        return None
    return Divergence(number, f"ScheduleBegan({began.policy}): the run was resumed", str(recorded), str(replayed))


def _lasting(snapshot: Snapshot) -> Snapshot:
    """Drop what a restored schedule cannot know: which of the groups it owes lie scored beside the trainer."""
    return msgspec.structs.replace(snapshot, scored=[])


def _decide(number: int, event: Event, line: Decision, schedule: SchedulingPolicy) -> Divergence | None:
    error: str | None = None
    commands: list[Command] = []
    try:
        commands = schedule.apply(event)
    except SlipstreamError as raised:
        error = raised.what
    if (commands, error) == (line.commands, line.error):
        return None
    return Divergence(number, _in_words([event]), _answer(line.commands, line.error), _answer(commands, error))


def _answer(commands: list[Command], error: str | None) -> str:
    return f"the run ended: {error}" if error is not None else _in_words(commands)


def _in_words(messages: Sequence[msgspec.Struct]) -> str:
    """`StartGroup(ordinal=3, replica=0), ...`, without fields that are as ever."""
    texts = []
    for message in messages:
        fields = {f.name: (getattr(message, f.name), f.default) for f in msgspec.structs.fields(message)}
        shown = ", ".join(f"{name}={value!r}" for name, (value, default) in fields.items() if value != default)
        texts.append(f"{type(message).__name__}({shown})")
    return ", ".join(texts) or "nothing"
