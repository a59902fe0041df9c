"""The durable ledger: what became of every ordinal. It alone decides what a resumed run still owes.

`ledger.jsonl` holds one line per fact, appended as it happens and fsynced at each step's commit. Payloads are not in
it: a lost completion is regenerated from its ordinal with the same noise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from slipstream.core.config import RunConfig
from slipstream.core.errors import CheckpointError, clip
from slipstream.core.files import decode_json
from slipstream.core.jsonl import JsonlWriter, cut_jsonl, intact_lines, read_jsonl
from slipstream.core.run_log import LedgerLine, LedgerState, Snapshot
from slipstream.core.service_messages import Checkpoint


class Ledger:
    """Current state of every ordinal; each change is a line of the file, at a `flush`."""

    def __init__(self, path: Path) -> None:
        self.states: dict[int, LedgerState] = {entry.ordinal: entry.state for entry in read_jsonl(path, LedgerLine)}
        self.repeated = 0
        self._writer = JsonlWriter(path, in_blocks=True)

    def admit(self, ordinal: int) -> None:
        if ordinal not in self.states:  # a regenerated group is admitted already
            self._record(LedgerLine(ordinal, "admitted"))

    def trained(self, ordinals: tuple[int, ...], *, step: int) -> None:
        """Commit a step: its ordinals are trained, on disk when this returns."""
        self.repeated += sum(self.states.get(ordinal) == "trained" for ordinal in ordinals)
        for ordinal in ordinals:
            self._record(LedgerLine(ordinal, "trained", step))
        self._writer.sync()

    def dropped(self, ordinal: int, *, has_failed: bool) -> None:
        self._record(LedgerLine(ordinal, "failed" if has_failed else "skipped"))

    def _record(self, entry: LedgerLine) -> None:
        self.states[entry.ordinal] = entry.state
        self._writer.write(entry)

    def counts(self) -> dict[str, int]:
        """Return `counts` of the states, with how many were trained more than once."""
        return counts(self.states) | {"repeated": self.repeated}

    def flush(self) -> None:
        """Hand every line to the system."""
        self._writer.flush()

    def sync(self) -> None:
        """Return once every line is on the disk."""
        self._writer.sync()

    def close(self) -> None:
        try:
            self._writer.sync()
        finally:
            self._writer.close()


def counts(states: Mapping[int, LedgerState]) -> dict[str, int]:
    """`admitted = trained + failed + skipped + pending`; `lost`: ordinals below the highest that nobody knows."""
    found = Counter(states.values())
    return {
        "admitted": len(states),
        "trained": found["trained"],
        "failed": found["failed"],
        "skipped": found["skipped"],
        "pending": found["admitted"],
        "lost": max(states, default=-1) + 1 - len(states),
        "repeated": 0,
    }


class Cut(msgspec.Struct, frozen=True):
    """The state of the run that a checkpoint holds besides its weights: the `Checkpoint` command that saved it."""

    schedule: Snapshot
    num_events: int
    cut: str = ""
    run: dict[str, float] = {}


def of_groups(command: Checkpoint, owed: list[int]) -> Checkpoint:
    """Return the command for a process that saves what it has of the `owed` groups: the whole grows with the run."""
    return msgspec.structs.replace(command, schedule={"readmit": owed}, run={})


def parts(
    command: Checkpoint, config: RunConfig, holder_of: Mapping[int, int], replicas: Iterable[int]
) -> Iterator[tuple[str, Checkpoint]]:
    """Yield each executor that saves something of its own, with its command: replicas get the groups that they hold."""
    yield "trainer", command
    if config.environment.is_set:
        yield "environments", of_groups(command, command.schedule["readmit"])
    owed_by: dict[int, list[int]] = {replica: [] for replica in replicas}
    for ordinal in command.schedule["readmit"]:
        if (holder := holder_of.get(ordinal)) in owed_by:
            owed_by[holder].append(ordinal)
    for replica, held in owed_by.items():
        yield f"generator-{replica}", of_groups(command, held)


def read_cut(checkpoint: Path) -> Cut:
    """Return the cut that `checkpoint` belongs to. CheckpointError for one that no run has saved."""

    class State(msgspec.Struct):
        extra: Cut

    try:
        return decode_json(checkpoint / "state.json", State).extra
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{checkpoint} is no checkpoint of a run", got=clip(error)) from error


def cut_back(path: Path, snapshot: Snapshot) -> dict[int, LedgerState]:
    """Rewrite the ledger to what a checkpoint contains: the rest is admitted again, or was never admitted.

    Returns what it says now, but for admissions that it did not know of.

    *Trained* means contained in the weights of the surviving checkpoint, so later steps are forgotten here; the caller
    keeps the abandoned file. The file is replaced as a whole, so this may be interrupted and done again.

    Identity: afterwards the ordinals below `next_ordinal` are those trained, those in `dropped` (skipped or failed) and
    those in `readmit` (admitted), each in one of them. CheckpointError, with nothing changed: as `check_fits`.
    """
    states = check_fits(path, snapshot)
    cut_jsonl(path, LedgerLine, _keeper(snapshot, set(snapshot.dropped)))
    if missing := sorted(set(snapshot.readmit) - states.keys()):  # the checkpoint was on disk before their admission
        writer = JsonlWriter(path)
        writer.write(*(LedgerLine(ordinal, "admitted") for ordinal in missing))
        writer.sync()
        writer.close()
    return states


def check_fits(path: Path, snapshot: Snapshot) -> dict[int, LedgerState]:
    """Return the states in the ledger `path` of all ordinals that a checkpoint contains.

    CheckpointError for a file that does not hold what the checkpoint says was trained and dropped: it is of another
    run, or was damaged.
    """
    dropped, owed = set(snapshot.dropped), set(snapshot.readmit)
    settled = set(range(snapshot.next_ordinal)) - owed
    is_kept = _keeper(snapshot, dropped)
    states = {entry.ordinal: entry.state for _, entry in intact_lines(path, LedgerLine) if is_kept(entry)}
    unknown = sorted(ordinal for ordinal in settled if states.get(ordinal) in (None, "admitted"))
    if unknown or any(states[ordinal] == "trained" for ordinal in owed & states.keys()):
        raise CheckpointError(
            f"{path} does not fit the checkpoint of step {snapshot.steps_done}",
            got=f"no fate for ordinals {unknown[:8]}" if unknown else "ordinals that were not trained in it as trained",
            allowed="the ledger that was written beside it",
            hint="it is of another run, or damaged; every attempt_<n>/ holds an older copy",
        )
    return states


def _keeper(snapshot: Snapshot, dropped: set[int]) -> Callable[[LedgerLine], bool]:
    def is_kept(entry: LedgerLine) -> bool:
        match entry.state:
            case "trained":
                return entry.step < snapshot.steps_done
            case "skipped" | "failed":
                return entry.ordinal in dropped
            case "admitted":
                return entry.ordinal < snapshot.next_ordinal

    return is_kept
