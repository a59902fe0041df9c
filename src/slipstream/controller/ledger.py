"""The durable ledger: what became of every ordinal. It alone decides what a resumed run still owes.

`ledger.jsonl` holds one line per fact, appended as it happens and fsynced at each step's commit. Payloads are not in
it: a lost completion is regenerated from its ordinal with the same noise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from slipstream.controller.machine import Snapshot
from slipstream.observe.jsonl import JsonlWriter, read_jsonl

State = Literal["admitted", "trained", "skipped", "failed"]


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """Ordinal `ordinal` came into `state`; `step` is set for trained ones."""

    ordinal: int
    state: State
    step: int = -1


class Ledger:
    """Current state of every ordinal; each change is a line of the file."""

    def __init__(self, path: Path) -> None:
        self.states: dict[int, State] = {entry.ordinal: entry.state for entry in read_jsonl(path, Entry)}
        self.repeated = 0
        self._writer = JsonlWriter(path)

    def admit(self, ordinal: int) -> None:
        if ordinal not in self.states:  # a regenerated group is admitted already
            self._record(Entry(ordinal, "admitted"))

    def trained(self, ordinals: tuple[int, ...], *, step: int) -> None:
        """Commit a step: its ordinals are trained, on disk when this returns."""
        self.repeated += sum(self.states.get(ordinal) == "trained" for ordinal in ordinals)
        for ordinal in ordinals:
            self._record(Entry(ordinal, "trained", step))
        self._writer.sync()

    def dropped(self, ordinal: int, *, has_failed: bool) -> None:
        self._record(Entry(ordinal, "failed" if has_failed else "skipped"))

    def _record(self, entry: Entry) -> None:
        self.states[entry.ordinal] = entry.state
        self._writer.write(entry)

    def count(self, state: State) -> int:
        return sum(s == state for s in self.states.values())

    def counts(self) -> dict[str, int]:
        """`admitted = trained + failed + skipped + pending`; `lost`: ordinals below the highest that nobody knows."""
        highest = max(self.states, default=-1) + 1
        return {
            "admitted": len(self.states),
            "trained": self.count("trained"),
            "failed": self.count("failed"),
            "skipped": self.count("skipped"),
            "pending": self.count("admitted"),
            "lost": highest - len(self.states),
            "repeated": self.repeated,
        }

    def close(self) -> None:
        self._writer.sync()
        self._writer.close()


def cut_back(path: Path, snapshot: Snapshot) -> None:
    """Rewrite the ledger to what a checkpoint contains: the rest is admitted again, or was never admitted.

    *Trained* means contained in the weights of the surviving checkpoint, so later steps are forgotten here; the caller
    keeps the abandoned file.
    """
    dropped = set(snapshot.dropped)
    keep = []
    for entry in read_jsonl(path, Entry):
        is_trained = entry.state == "trained" and entry.step < snapshot.steps_done
        is_dropped = entry.state in ("skipped", "failed") and entry.ordinal in dropped
        if is_trained or is_dropped or (entry.state == "admitted" and entry.ordinal < snapshot.next_ordinal):
            keep.append(entry)
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    writer = JsonlWriter(temporary)
    writer.write(*keep)
    writer.sync()
    writer.close()
    temporary.replace(path)
