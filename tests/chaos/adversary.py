"""A seeded adversary: kills, stops and slows processes of a run.

What it is going to do is a pure function of (seed, run): `plan`. When it does it is told by the run's own progress, in
lines of `events.jsonl` and in processes that appear, so that a slow machine sees the same faults at the same places;
the file is looked at every `TICK_S`.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from process_tree import roles

Kind = Literal["kill", "stop", "slow"]
KINDS: dict[Kind, float] = {"kill": 0.5, "stop": 0.35, "slow": 0.15}
VICTIMS = {"generator": 0.3, "rewards": 0.15, "keeper": 0.05, "scorer": 0.15, "trainer": 0.2, "controller": 0.15}

TICK_S = 0.02
PATIENCE_S = 120.0  # a trigger that does not come for so long is given up, and the fault strikes at once
VICTIM_S = 20.0  # so long a fault waits for its victim to be there
LINES = (300, 5_000)  # between two faults; the quickstart writes some 500 lines a step
START_UP_SHARE, START_UP_S = 0.2, 6.0
ENDING_SHARE, ENDING_S = 0.6, 3.0
STOPS_S = (0.1, 0.5, 1.0, 2.0, 8.0)  # the last is longer than the lease (`chaos_config.LEASE_S`)
SLOW_S, SLOW_ON_S, SLOW_OFF_S = 5.0, 0.02, 0.08  # a fifth of its speed


@dataclass(frozen=True)
class Lines:
    """When the run has written `count` more lines of `events.jsonl`, cut ones counted too."""

    count: int


@dataclass(frozen=True)
class StartUp:
    """`delay_s` after the next start of a process of the victim's role: while it imports, loads or has just begun."""

    delay_s: float


@dataclass(frozen=True)
class Ending:
    """`delay_s` after the last step: during the last evaluation, checkpoint, export or summary."""

    delay_s: float


@dataclass(frozen=True)
class Fault:
    """What is done to whom, and when. `pick` in [0, 1) says which one, where there are several of its role."""

    kind: Kind
    victim: str
    trigger: Lines | StartUp | Ending
    duration_s: float = 0.0
    pick: float = 0.0


@dataclass(frozen=True)
class Strike:
    """A fault that was carried out; times on the machine's monotonic clock, as in `events.jsonl`."""

    fault: Fault
    role: str
    pid: int
    time_s: float


def plan(seed: int, run: int) -> tuple[Iterator[Fault], Fault | None]:
    """The faults of run `run`, without end, one after the other; and one for its ending, or None."""
    ending = random.Random(f"{seed} {run} ending")
    last = _fault(ending, Ending(ending.uniform(0.0, ENDING_S))) if ending.random() < ENDING_SHARE else None

    def faults() -> Iterator[Fault]:
        rng = random.Random(f"{seed} {run}")
        while True:
            is_early = rng.random() < START_UP_SHARE
            trigger = StartUp(rng.uniform(0.0, START_UP_S)) if is_early else Lines(rng.randint(*LINES))
            yield _fault(rng, trigger)

    return faults(), last


def _fault(rng: random.Random, trigger: Lines | StartUp | Ending) -> Fault:
    (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
    (victim,) = rng.choices(list(VICTIMS), list(VICTIMS.values()))
    duration_s = {"kill": 0.0, "stop": rng.choice(STOPS_S), "slow": SLOW_S}[kind]
    return Fault(kind, victim, trigger, duration_s, rng.random())


class Growth:
    """Lines that were appended to a file since this was made. A file that was cut goes on from where it is."""

    def __init__(self, path: Path) -> None:
        self.lines = 0
        self._path = path
        self._offset = self._size()

    def look(self) -> int:
        size = self._size()
        if size > self._offset:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                self.lines += file.read(size - self._offset).count(b"\n")
        self._offset = size
        return self.lines

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0


@dataclass
class Stopped:
    """A process that has been stopped, now and then or until `until_s`."""

    pid: int
    until_s: float
    is_slowed: bool
    is_off: bool = True
    turn_s: float = 0.0


@dataclass
class Adversary:
    """Strikes the run that `controller()` is the process of, in a thread of its own, until told to end.

    Consumes: faults. Waits for: each one's trigger, `PATIENCE_S` at most, then its victim, `VICTIM_S` at most.
    Unblocked by: progress. Ends when: the faults are used up, or by `end`, after which every process runs again.
    """

    run_dir: Path
    faults: Iterator[Fault]
    ending: Fault | None
    controller: Callable[[], int | None]
    has_trained_all: Callable[[], bool]
    strikes: list[Strike] = field(default_factory=list)
    missed: list[Fault] = field(default_factory=list)
    _stopped: list[Stopped] = field(default_factory=list)
    _end: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _error: BaseException | None = None

    @property
    def stopped_s(self) -> float:
        """Seconds for which it stopped processes or slowed them, at most."""
        return sum(strike.fault.duration_s for strike in self.strikes)

    def begin(self) -> None:
        self._thread = threading.Thread(target=self._run, name="adversary", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """No further fault; who is stopped goes on. Raises what went wrong in its thread."""
        self._end.set()
        assert self._thread is not None
        self._thread.join(timeout=10.0)
        assert not self._thread.is_alive(), "the adversary does not end"
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            for fault in self.faults:
                self._await(fault.trigger, fault.victim)
                if self.ending is not None and self.has_trained_all():
                    fault, self.ending = self.ending, None
                    self._await(fault.trigger, fault.victim)
                if self._end.is_set():
                    return
                self._strike(fault)
            self._until(lambda: not self._stopped, PATIENCE_S)  # the last one stands still as long as the others
        except BaseException as error:  # noqa: BLE001 - raised again by `end`, in the caller's thread
            self._error = error
        finally:
            self._release(everybody=True)

    def _await(self, trigger: Lines | StartUp | Ending, victim: str) -> None:
        if isinstance(trigger, Lines):
            growth = Growth(self.run_dir / "events.jsonl")
            self._until(lambda: growth.look() >= trigger.count or self._is_ending(), PATIENCE_S)
        elif isinstance(trigger, StartUp):
            known = set(self._victims(victim))
            self._until(lambda: bool(set(self._victims(victim)) - known) or self._is_ending(), PATIENCE_S / 8)
            self._until(self._is_ending, trigger.delay_s)
        else:
            self._until(lambda: False, trigger.delay_s)

    def _is_ending(self) -> bool:
        """Whether it is time for the fault that is kept for the ending."""
        return self.ending is not None and self.has_trained_all()

    def _until(self, is_so: Callable[[], bool], patience_s: float) -> None:
        deadline_s = time.monotonic() + patience_s
        while not is_so() and time.monotonic() < deadline_s and not self._end.wait(TICK_S):
            self._release()

    def _victims(self, victim: str) -> list[int]:
        return [pid for _, pid in self._named(victim)]

    def _named(self, victim: str) -> list[tuple[str, int]]:
        controller = self.controller()
        found = {} if controller is None else roles(controller)
        return [(role, pid) for role, pids in found.items() if role.split("-")[0] == victim for pid in pids]

    def _strike(self, fault: Fault) -> None:
        self._until(lambda: bool(self._named(fault.victim)), VICTIM_S)
        candidates = self._named(fault.victim)
        if not candidates or self._end.is_set():
            self.missed.append(fault)
            return
        role, pid = candidates[int(fault.pick * len(candidates))]
        now_s = time.monotonic()
        try:
            os.kill(pid, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
        except ProcessLookupError:
            self.missed.append(fault)
            return
        self.strikes.append(Strike(fault, role, pid, now_s))
        if fault.kind != "kill":
            off_s = SLOW_OFF_S if fault.kind == "slow" else fault.duration_s
            self._stopped.append(Stopped(pid, now_s + fault.duration_s, fault.kind == "slow", turn_s=now_s + off_s))

    def _release(self, *, everybody: bool = False) -> None:
        """Let those go on whose time is over, and give the slowed ones their turns."""
        now_s = time.monotonic()
        for one in list(self._stopped):
            is_over = everybody or now_s >= one.until_s
            if not is_over and (not one.is_slowed or now_s < one.turn_s):
                continue
            one.is_off = not (is_over or one.is_off)
            one.turn_s = now_s + (SLOW_OFF_S if one.is_off else SLOW_ON_S)
            with suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGSTOP if one.is_off else signal.SIGCONT)
            if is_over:
                self._stopped.remove(one)
