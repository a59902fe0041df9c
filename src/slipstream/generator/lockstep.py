"""One replica on several ranks: each runs an engine of its own, over its part of the model, and all do the same.

Every rank computes the same logits (`models/tensor_parallel.py`) and the same noise, so no token needs to be sent. What
could set the ranks apart comes from outside, at a different moment on each: commands, staged versions, the time. So
before every step they meet in a *round*: each tells rank 0 what it has, and rank 0 tells all what that comes to:

    obey the commands that all have received; this version is staged everywhere; it is so late.

Whatever else an executor does follows from these and from what it did before, so it needs no agreement: admission,
draining, commits, evaluations, preemption, endings.

A round is two small messages per rank, point to point. An all-reduce of the same numbers needs no leader, but nobody
would know then who has not come, or differs; here rank 0 does, and tells the others. `benchmarks/rounds.py` times both.

Asleep. Without work there are no rounds: ranks sleep on their ports, as executors do. A rank meets the others when it
has received a command that is not obeyed yet, or when the last round or step left work. All commands come by rank 0,
which passes each on before it meets anybody, so the others are there as soon as that has arrived; nobody waits in a
round for what happens elsewhere. A version staged by a rank asleep is told to rank 0 (`Staged`), which calls all
together (`Wake`) once each of them has it.
"""

from __future__ import annotations

import contextlib
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from slipstream.core import wire
from slipstream.core.clock import Clock
from slipstream.core.errors import RankError
from slipstream.core.executor import Context
from slipstream.core.peer_messages import Staged, Wake
from slipstream.core.ranks import rank_name, split_rank_name
from slipstream.core.types import Message
from slipstream.generator.requests import Finished, GenerationEngine

NS_PER_S = 1_000_000_000
COMMANDS_AT_ONCE = 256
"""Passed on between two rounds, well below a channel's capacity: those in a round do not take what is sent to them."""

_NOTHING = -1  # no version, nobody
_TAG = 5  # of the rounds' messages, apart from whatever else ranks send each other


class AgreedClock:
    """The time of the present step, rank 0's, the same on every rank: what engines in lock step take as their clock."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now_s(self) -> float:
        return self.time_s


@dataclass(frozen=True)
class Agreement:
    """The work of all ranks in a step: obey `commands`; `version`, newer than the live one, lies staged everywhere."""

    commands: tuple[Message, ...]
    version: int | None


@dataclass
class _Other:
    """The state of another rank, as rank 0 knows it."""

    staged: int | None = None
    num_reports: int = 0  # that it had sent by the last round
    num_taken: int = 0


class _Numbers(NamedTuple):
    """The numbers that a rank sends to rank 0."""

    done: int  # a checksum of what it has done
    num_received: int
    received: int  # a checksum of these commands
    staged: int
    num_reports: int


class _Decision(NamedTuple):
    """The answer of rank 0 to the others."""

    num_commands: int = 0
    version: int = _NOTHING
    time_ns: int = 0
    leaves_work: int = 0
    apart: int = _NOTHING  # a rank that has done or received something else than rank 0
    lost: int = _NOTHING  # a rank that did not come


class LockStep:
    """This rank's side of the rounds; where there is one rank only, a queue of commands.

    Consumes: the port `commands`, and at rank 0 `staged`. Produces: `relay` (rank 0), `staged` (the others). Waits for:
    the other ranks, in `agree`, at most the group's timeout. Unblocked by: the slowest one. A rank that stays away,
    dies, or no longer does the same ends all others with a RankError; rank 0's names it.

    An executor's step is `receive`, `agree`, what was agreed upon, `rest`; its engines go by `clock`.
    """

    def __init__(self, context: Context) -> None:
        self.num_rounds = 0
        self._group, self._source = context.group, context.clock
        self._inputs, self._outputs = context.inputs, context.outputs
        self._name = split_rank_name(context.name)[0]
        self._agreed_clock = AgreedClock()
        self._commands: deque[tuple[Message, int]] = deque()  # not obeyed yet, each with a checksum of all up to it
        self._num_obeyed = 0
        self._checksum = self._obeyed_checksum = 0
        self._done = 0  # checksum of all that has finished
        self._is_awake = False
        self._leaves_work = False  # rank 0 had commands in the last round that were not obeyed
        self._told: int | None = None  # what rank 0 knows to be staged here
        self._num_reports = 0
        self._others = {rank: _Other() for rank in range(1, self._group.world)} if self._group.is_leader else {}

    @property
    def is_leader(self) -> bool:
        return self._group.is_leader

    @property
    def clock(self) -> Clock:
        """The clock of engines: with one rank its own, with several the time that rank 0 named in the round."""
        return self._source if self._group.world == 1 else self._agreed_clock

    @property
    def has_all_reports(self) -> bool:
        """Whether every report that was sent here has been taken, so that nobody waits for it."""
        return all(other.num_taken == other.num_reports for other in self._others.values())

    def receive(self) -> bool:
        """Take commands, and pass them on; take reports. True when anything arrived."""
        has_news = False
        for _ in range(COMMANDS_AT_ONCE):
            message = self._inputs["commands"].get_nowait()
            if message is None:
                break
            has_news = True
            self._take(message)
        while self._others and (message := self._inputs["staged"].get_nowait()) is not None:
            assert isinstance(message, Staged), "the port is typed"
            has_news = True
            other = self._others[message.rank]
            other.num_taken += 1
            if message.after_round == self.num_rounds:  # else there was another round, and it said it there
                other.staged = message.version
        return has_news

    def call(self, command: Message) -> None:
        """At rank 0: let all ranks obey `command`, which nobody else has sent."""
        if self.is_leader:
            self._take(command)

    def agree(self, staged: int | None, engine: GenerationEngine) -> Agreement | None:
        """Meet the other ranks; None while asleep. `staged` is a version that lies ready here to be committed."""
        if self._group.world == 1:
            return Agreement(self._obeyed(len(self._commands)), staged)
        if self._told == engine.version:
            self._told = None  # it was committed, as rank 0 knows
        if not self._is_awake and not self._commands and not self._wakes(staged):
            return None
        done = (self.num_rounds, engine.version, engine.num_live, engine.num_waiting, self._done)
        numbers = _Numbers(
            zlib.crc32(repr(done).encode()),
            self._num_obeyed + len(self._commands),
            self._checksum,
            _NOTHING if staged is None else staged,
            self._num_reports,
        )
        decision = self._lead(numbers) if self.is_leader else self._follow(numbers)
        self._check(decision, engine)
        self.num_rounds += 1
        self._told = staged
        self._agreed_clock.time_s = decision.time_ns / NS_PER_S
        self._leaves_work = bool(decision.leaves_work)
        commands = self._obeyed(decision.num_commands - self._num_obeyed)
        return Agreement(commands, None if decision.version == _NOTHING else decision.version)

    def note(self, finished: Sequence[Finished]) -> None:
        """Count what an engine has finished in this step, for the next round to compare."""
        if self._group.world > 1:
            for item in finished:
                self._done = zlib.crc32(item.tokens.tobytes() + item.logprobs.tobytes(), self._done)

    def rest(self, *, has_worked: bool) -> bool:
        """The step that `agree` began is over; whether there is to be another one at once.

        `has_worked`, the same on every rank: there may be more to do.
        """
        self._is_awake = has_worked or self._leaves_work
        return self._is_awake

    # Commands and reports

    def _take(self, message: Message) -> None:
        if self._group.world > 1:
            self._checksum = zlib.crc32(wire.encode(message), self._checksum)
            if self.is_leader:
                self._outputs["relay"].put(message)
        self._commands.append((message, self._checksum))

    def _obeyed(self, count: int) -> tuple[Message, ...]:
        taken = [self._commands.popleft() for _ in range(count)]
        self._num_obeyed += count
        if taken:
            self._obeyed_checksum = taken[-1][1]
        return tuple(message for message, _ in taken)

    def _checksum_of(self, num_commands: int) -> int:
        """Return the checksum of the first `num_commands` that were ever received."""
        count = num_commands - self._num_obeyed
        return self._commands[count - 1][1] if count else self._obeyed_checksum

    def _wakes(self, staged: int | None) -> bool:
        """Tell rank 0, while asleep, what is staged here; rank 0 calls all together for what all have staged."""
        if not self.is_leader:
            if staged != self._told:
                self._told = staged
                self._num_reports += 1
                self._outputs["staged"].put(Staged(rank=self._group.rank, version=staged, after_round=self.num_rounds))
            return False
        if staged is None or any(other.staged != staged for other in self._others.values()):
            return False
        self.call(Wake())
        return True

    # Rounds

    def _lead(self, mine: _Numbers) -> _Decision:
        """Receive the numbers of all ranks, decide, send the decision to all."""
        theirs = self._hear()
        for rank, numbers in theirs.items():
            self._others[rank].staged = None if numbers.staged == _NOTHING else numbers.staged
            self._others[rank].num_reports = numbers.num_reports
        everyone = [mine, *theirs.values()]
        num_commands = min(numbers.num_received for numbers in everyone)
        apart = [
            rank
            for rank, numbers in theirs.items()
            if numbers.done != mine.done or numbers.received != self._checksum_of(numbers.num_received)
        ]
        decision = _Decision(
            num_commands=num_commands,
            version=mine.staged if len({numbers.staged for numbers in everyone}) == 1 else _NOTHING,
            time_ns=int(self._source.now_s() * NS_PER_S),
            leaves_work=int(num_commands < mine.num_received),
            apart=apart[0] if apart else _NOTHING,
        )
        for rank in theirs:
            self._tell(rank, decision)
        return decision

    def _hear(self) -> dict[int, _Numbers]:
        heard = {rank: torch.zeros(len(_Numbers._fields), dtype=torch.int64) for rank in self._others}
        waits: dict[int, dist.Work | None] = {}
        for begins in (True, False):  # all are asked before any is waited for
            for rank, numbers in heard.items():
                try:
                    if begins:
                        waits[rank] = dist.irecv(numbers, group=self._group.pg, group_src=rank, tag=_TAG)
                    elif (wait := waits[rank]) is not None:
                        wait.wait()
                except RuntimeError as error:
                    for other in heard.keys() - {rank}:
                        with contextlib.suppress(RankError):
                            self._tell(other, _Decision(lost=rank))
                    raise self._lost(rank, error) from error
        return {rank: _Numbers(*numbers.tolist()) for rank, numbers in heard.items()}

    def _tell(self, rank: int, decision: _Decision) -> None:
        try:
            dist.send(torch.tensor(decision, dtype=torch.int64), group=self._group.pg, group_dst=rank, tag=_TAG)
        except RuntimeError as error:
            raise self._lost(rank, error) from error

    def _follow(self, mine: _Numbers) -> _Decision:
        decision = torch.zeros(len(_Decision._fields), dtype=torch.int64)
        try:
            dist.send(torch.tensor(mine, dtype=torch.int64), group=self._group.pg, group_dst=0, tag=_TAG)
            dist.recv(decision, group=self._group.pg, group_src=0, tag=_TAG)
        except RuntimeError as error:
            raise self._lost(0, error) from error
        return _Decision(*decision.tolist())

    def _check(self, decision: _Decision, engine: GenerationEngine) -> None:
        """Raise RankError unless all ranks came, and have done and received the same."""
        if decision.lost != _NOTHING:
            raise self._lost(decision.lost, "rank 0 said so")
        if decision.apart != _NOTHING:
            did = f"version {engine.version}, {engine.num_live} live, {engine.num_waiting} waiting, {self._done:08x}"
            raise RankError(
                "the ranks that run one model no longer do the same",
                got=f"'{rank_name(self._name, decision.apart)}' differs from '{self._name}' in round "
                f"{self.num_rounds}, where rank {self._group.rank} has {did}, commands {self._checksum:08x}",
                hint="weights, seeds and settings of all ranks must be the same; compare with the other ranks' logs",
            )

    def _lost(self, rank: int, why: object) -> RankError:
        return RankError(
            f"'{rank_name(self._name, rank)}' did not come to round {self.num_rounds}",
            got=f"{str(why).splitlines()[0]} (seen by rank {self._group.rank} of {self._group.world})",
            hint="it has died, hangs, or gave up because of another rank: see its log; the group must be started "
            "again as a whole",
        )
