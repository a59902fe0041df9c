"""One engine on several ranks: each rank runs its own, over its part of the model, and all of them do the same.

Every rank computes the same logits (`models/tensor_parallel.py`) and the same noise, so no token needs to be sent. What
could set engines apart comes from outside, at a different moment on each rank: requests, a staged version, a pause, the
time. So before a step the ranks agree on these, with one small all-reduce, and act on what is true everywhere:

    admit the requests that all have received; commit the version that all have staged; pause, and stop, when one asks
    to; go by the time that the slowest clock shows.

A minimum of numbers says all of it (the maximum of x is minus the minimum of -x), needs no leader, and never commits a
version that is missing somewhere. It also compares checksums: of what has been done so far, and, in a second one where
there are any, of the requests to be admitted.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from slipstream.core.clock import Clock, WallClock
from slipstream.core.errors import RankError
from slipstream.core.ranks import lost_rank
from slipstream.generator.requests import Finished, GenerationEngine, Request

NS_PER_S = 1_000_000_000


class AgreedClock:
    """The time of the present step, the same on every rank: what an engine in lock step takes as its clock."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now_s(self) -> float:
        return self.time_s


@dataclass(frozen=True)
class Agreement:
    """What all ranks do at this step's beginning. `version` is None when there is nothing to commit."""

    num_requests: int  # received by every rank since the start
    version: int | None
    is_paused: bool
    is_stopped: bool
    time_s: float


class LockStep:
    """Steps `engine` together with those of the other ranks of `group`, a gloo group on every kind of device.

    Consumes: `submit`, `stage`, `pause_admission` and `stop`, at any time between two steps, on each rank on its own;
    requests in the same order everywhere. Waits for: the other ranks, in `step`, at most the group's timeout. Unblocked
    by: the slowest one. Ends: when `is_stopped`, on all ranks after the same step; a rank that stays away, or dies,
    gives the others a RankError.

    `commit` replaces the weights by the staged ones and calls `engine.set_version`; it runs at the same step on every
    rank, so it may run the model. The engine must have been built with `clock` as its clock, and alike on every rank:
    seed, rows, lengths, budgets and, where it has pages, their number.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        group: dist.ProcessGroup,
        *,
        commit: Callable[[int], None],
        clock: AgreedClock,
        source: Clock | None = None,
    ) -> None:
        self.engine = engine
        self.is_stopped = False
        self.num_steps = 0
        self._group, self._commit = group, commit
        self._clock, self._source = clock, source if source is not None else WallClock()
        self._received: deque[Request] = deque()
        self._num_admitted = 0
        self._staged = engine.version
        self._wants_pause = self._wants_stop = False
        self._done = 0  # checksum of everything that has finished

    @property
    def is_idle(self) -> bool:
        """Whether this rank has nothing to do; another one may, and then waits in `step` for this one."""
        return self.engine.is_idle and not self._received and self._staged == self.engine.version

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue `requests`; they reach the engine when every rank has them."""
        self._received.extend(requests)

    def stage(self, version: int) -> None:
        """This rank holds the weights of `version`, verified; the newest staged one is committed once all have it."""
        self._staged = version

    def pause_admission(self, is_paused: bool) -> None:
        """Admission pauses while any rank asks for it."""
        self._wants_pause = is_paused

    def stop(self) -> None:
        """Ask that all ranks stop before the next step."""
        self._wants_stop = True

    def step(self) -> list[Finished]:
        """Agree with the other ranks, do what was agreed upon, and step the engine; the same result on every rank."""
        agreed = self._agree()
        self.is_stopped = agreed.is_stopped
        if agreed.is_stopped:
            return []
        self._clock.time_s = agreed.time_s
        self.engine.pause_admission(agreed.is_paused)
        if agreed.version is not None:
            self._commit(agreed.version)
        admitted = [self._received.popleft() for _ in range(agreed.num_requests - self._num_admitted)]
        if admitted:
            self._num_admitted = agreed.num_requests
            self._least(alike=_checksum(admitted))  # other requests would be sums of other shapes, that never end
            self.engine.submit(admitted)
        finished = self.engine.step()
        for item in finished:
            self._done = zlib.crc32(item.tokens.tobytes() + item.logprobs.tobytes(), self._done)
        self.num_steps += 1
        return finished

    def _agree(self) -> Agreement:
        engine = self.engine
        state = (self.num_steps, engine.version, engine.num_live, engine.num_waiting, self._done)
        received, oldest, newest, pause, stop, time_ns = self._least(
            self._num_admitted + len(self._received),
            self._staged,
            -self._staged,
            -int(self._wants_pause),
            -int(self._wants_stop),
            int(self._source.now_s() * NS_PER_S),
            alike=zlib.crc32(repr(state).encode()),
        )
        is_staged = oldest == -newest and oldest != engine.version
        return Agreement(
            num_requests=received,
            version=oldest if is_staged else None,
            is_paused=bool(pause),
            is_stopped=bool(stop),
            time_s=time_ns / NS_PER_S,
        )

    def _least(self, *numbers: int, alike: int) -> list[int]:
        """The least of each number over all ranks; raises RankError unless `alike` is the same on all."""
        control = torch.tensor([*numbers, alike, -alike], dtype=torch.int64)
        try:
            dist.all_reduce(control, dist.ReduceOp.MIN, group=self._group)
        except RuntimeError as error:
            raise lost_rank(self._group, error) from error
        *least, smallest, largest = control.tolist()
        if smallest != -largest:
            engine = self.engine
            state = f"version {engine.version}, {engine.num_live} live, {engine.num_waiting} waiting, {self._done:08x}"
            raise RankError(
                "the ranks that run one model no longer do the same",
                got=f"rank {dist.get_rank(self._group)} at step {self.num_steps}: {state}",
                hint="requests, their order, engines and seeds must be the same; compare with the other ranks' logs",
            )
        return least


def _checksum(requests: Sequence[Request]) -> int:
    """A checksum of all that the requests ask for."""
    checksum = 0
    for request in requests:
        resumed = request.resume.tokens if request.resume is not None else request.prompt_tokens[:0]
        scalars = repr(replace(request, prompt_tokens=request.prompt_tokens[:0], resume=None))
        for part in (request.prompt_tokens.tobytes(), resumed.tobytes(), scalars.encode()):
            checksum = zlib.crc32(part, checksum)
    return checksum
