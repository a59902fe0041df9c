"""Ranks that are threads of this process: what is divided over ranks, tested without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.core.rank_group import RankGroup

TIMEOUT_S = 30.0


@dataclass
class Meeting:
    """Where the ranks of one group lay down what they bring and take what the others brought."""

    world: int
    brought: list[Any] = field(init=False)
    barrier: threading.Barrier = field(init=False)

    def __post_init__(self) -> None:
        self.brought = [None] * self.world
        self.barrier = threading.Barrier(self.world, timeout=TIMEOUT_S)


class Meetings(dict[tuple[int, ...], Meeting]):
    """Meetings by the ranks that meet, each made when the first of them comes."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def __missing__(self, members: tuple[int, ...]) -> Meeting:
        with self.lock:
            return self.setdefault(members, Meeting(len(members)))


class ThreadRanks(RankGroup):
    """One thread's end of a group."""

    def __init__(self, rank: int, members: tuple[int, ...], meetings: Meetings) -> None:
        self.members, self.meetings = members, meetings
        self.rank, self.world, self.pg = members.index(rank), len(members), None
        self.local_rank, self.local_world = self.rank, self.world
        self.num_meetings = 0

    def sum(self, values: Tensor) -> Tensor:
        return torch.stack(self._exchanged(values.detach().clone())).sum(0).to(values.dtype)

    def max(self, values: Tensor) -> Tensor:
        return torch.stack(self._exchanged(values.detach().clone())).amax(0)

    def gather(self, payload: bytes) -> list[bytes]:
        return self._exchanged(payload)

    def exchange(self, payloads: Sequence[bytes]) -> list[bytes]:
        return [part[self.rank] for part in self._exchanged(list(payloads))]

    def broadcast(self, payload: bytes, *, source: int = 0) -> bytes:
        return self._exchanged(payload)[source]

    def split(self, *sizes: int, timeout_s: float = 0.0) -> tuple[RankGroup, ...]:
        whole, everyone = self.members[self.rank], np.array(self.members).reshape(-1, *sizes)
        axes = (np.moveaxis(everyone, axis, -1).reshape(-1, size) for axis, size in enumerate(everyone.shape))
        mine = [next(members for members in axis.tolist() if whole in members) for axis in axes]
        return tuple(ThreadRanks(whole, tuple(members), self.meetings) for members in mine)

    def _exchanged(self, value: Any) -> list[Any]:
        self.num_meetings += 1
        meeting = self.meetings[self.members]
        meeting.brought[self.rank] = value
        meeting.barrier.wait()
        found = list(meeting.brought)
        meeting.barrier.wait()  # nobody brings the next before all have taken this
        return found


def on_ranks(world: int, job: Callable[[ThreadRanks], Any]) -> list[Any]:
    """`job(ranks)` on each of `world` ranks: what they return, or the exception that each of them raised, by rank."""
    meetings = Meetings()
    outcomes: list[Any] = [None] * world

    def run(rank: int) -> None:
        try:
            outcomes[rank] = job(ThreadRanks(rank, tuple(range(world)), meetings))
        except threading.BrokenBarrierError as error:  # another has failed, or stays away
            outcomes[rank] = error
        except Exception as error:  # noqa: BLE001 - the test is to see it
            outcomes[rank] = error
            for meeting in list(meetings.values()):
                meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT_S)
        assert not thread.is_alive(), "a rank hangs"
    return outcomes


def results(outcomes: list[Any]) -> list[Any]:
    """`outcomes`, of which none may be an exception."""
    failed = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    real = [error for error in failed if not isinstance(error, threading.BrokenBarrierError)]
    if failed:
        raise (real or failed)[0]
    return outcomes
