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


class ThreadRanks(RankGroup):
    """One thread's end of a group. `meetings` by the ranks that meet: all of them, rows and columns of `split`."""

    def __init__(self, rank: int, members: tuple[int, ...], meetings: dict[tuple[int, ...], Meeting]) -> None:
        self.members, self.meetings = members, meetings
        self.rank, self.world, self.pg = members.index(rank), len(members), None
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
        whole, grid = self.members[self.rank], np.arange(self.world).reshape(-1, *sizes)
        place = np.unravel_index(whole, grid.shape)
        lines = [grid[(*place[:axis], slice(None), *place[axis + 1 :])].tolist() for axis in range(grid.ndim)]
        return tuple(
            ThreadRanks(whole, tuple(line), self.meetings) if len(line) > 1 else RankGroup.alone() for line in lines
        )

    def _exchanged(self, value: Any) -> list[Any]:
        self.num_meetings += 1
        meeting = self.meetings[self.members]
        meeting.brought[self.rank] = value
        meeting.barrier.wait()
        found = list(meeting.brought)
        meeting.barrier.wait()  # nobody brings the next before all have taken this
        return found


def on_ranks(world: int, job: Callable[[ThreadRanks], Any], *, tensor_parallel: int = 1) -> list[Any]:
    """`job(ranks)` on each of `world` ranks: what they return, or the exception that each of them raised, by rank."""
    columns = [tuple(range(place, world, tensor_parallel)) for place in range(tensor_parallel)]
    rows = [tuple(range(start, start + tensor_parallel)) for start in range(0, world, tensor_parallel)]
    meetings = {members: Meeting(len(members)) for members in [tuple(range(world)), *columns, *rows]}
    outcomes: list[Any] = [None] * world

    def run(rank: int) -> None:
        try:
            outcomes[rank] = job(ThreadRanks(rank, tuple(range(world)), meetings))
        except threading.BrokenBarrierError as error:  # another has failed, or stays away
            outcomes[rank] = error
        except Exception as error:  # noqa: BLE001 - the test is to see it
            outcomes[rank] = error
            for meeting in meetings.values():
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
