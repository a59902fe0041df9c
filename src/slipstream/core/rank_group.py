"""The ranks of one node and the collectives between them.

A group's collectives stay inside it: different groups communicate through channels only. torch is imported where it is
first used, as a process without tensors, such as the rewards', starts a second sooner without it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor

from slipstream.core.errors import ConfigError, RankError


class RankGroup:
    """This process's `rank` of `world`, and the process group `pg` of all ranks; None where there is one process only.

    The collectives here are for small or rare data. They wait for all ranks, at most the group's timeout; when a rank
    stays away or dies, the others get a RankError. On this machine it is `local_rank` of `local_world`.
    """

    def __init__(
        self,
        rank: int = 0,
        world: int = 1,
        pg: dist.ProcessGroup | None = None,
        *,
        local_rank: int | None = None,
        local_world: int | None = None,
    ) -> None:
        """Take the place in a group whose ranks are all on this machine, unless `local_rank` and `local_world` say."""
        if not 0 <= rank < world or (pg is None and world > 1):
            raise ConfigError("no such rank", got=f"rank {rank} of {world}, group {pg}", allowed="0 <= rank < world")
        self.rank, self.world, self.pg = rank, world, pg
        self.local_rank = rank if local_rank is None else local_rank
        self.local_world = world if local_world is None else local_world

    @classmethod
    def alone(cls) -> RankGroup:
        """Return the group of a process without others: every collective is the identity."""
        return cls()

    @classmethod
    def over(cls, pg: dist.ProcessGroup, *, local_rank: int | None = None, local_world: int | None = None) -> RankGroup:
        """Return the group of `pg`."""
        import torch.distributed as dist

        rank, world = dist.get_rank(pg), dist.get_world_size(pg)
        return cls(rank, world, pg, local_rank=local_rank, local_world=local_world)

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over ranks of `values` (same shape and type on all), a new tensor, the same on every rank."""
        return self._reduced(values, "SUM")

    def max(self, values: Tensor) -> Tensor:
        """Return the maximum over ranks of each element, as a new tensor."""
        return self._reduced(values, "MAX")

    def gather(self, payload: bytes) -> list[bytes]:
        """Return every rank's `payload`, by rank, on every rank."""
        if self.pg is None:
            return [payload]
        import torch

        sizes = self._run_gather(torch.tensor([len(payload)], dtype=torch.int64))
        longest = int(max(size.item() for size in sizes))
        sent = torch.zeros(max(longest, 1), dtype=torch.uint8)
        sent[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else sent[:0]
        parts = self._run_gather(sent)
        return [part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]

    def exchange(self, payloads: Sequence[bytes]) -> list[bytes]:
        """Send each rank its one of `payloads`; return what each has sent to this rank, by rank."""
        if self.pg is None:
            return list(payloads)
        import torch
        import torch.distributed as dist

        sizes = torch.tensor([len(payload) for payload in payloads], dtype=torch.int64)
        expected = torch.empty_like(sizes)
        self.run(dist.all_to_all_single, expected, sizes)
        sent = torch.frombuffer(bytearray(b"".join(payloads)) or bytearray(1), dtype=torch.uint8)[: int(sizes.sum())]
        arrived = torch.empty(int(expected.sum()), dtype=torch.uint8)
        self.run(dist.all_to_all_single, arrived, sent, expected.tolist(), sizes.tolist())
        content, ends = arrived.numpy().tobytes(), expected.cumsum(0).tolist()
        return [content[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def broadcast(self, payload: bytes, *, source: int = 0) -> bytes:
        """Return the `payload` of rank `source` on every rank; those of the others are ignored."""
        if self.pg is None:
            return payload
        import torch
        import torch.distributed as dist

        size = torch.tensor([len(payload)], dtype=torch.int64)
        self.run(dist.broadcast, size, group_src=source)
        content = torch.zeros(int(size), dtype=torch.uint8)
        if self.rank == source and payload:
            content.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        if len(content):
            self.run(dist.broadcast, content, group_src=source)
        return content.numpy().tobytes()

    def run(self, collective: Any, *args: Any, **options: Any) -> None:
        """Call `collective` with this `group`. Raises RankError where it fails: another rank is lost."""
        assert self.pg is not None, "these ranks were described without a process group"
        try:
            collective(*args, group=self.pg, **options)
        except RuntimeError as error:
            raise lost_rank(self.pg, error) from error

    def split(self, *sizes: int, timeout_s: float = 120.0) -> tuple[RankGroup, ...]:
        """Return this rank's data-parallel group, and behind it its group along each of the axes of `sizes`.

        The last axis varies fastest: rank = (data_parallel_rank * sizes[0] + i_0) * sizes[1] + i_1 ..., so that the
        ranks of the last axis, which exchange the most data, are neighbours. All ranks call it together. ConfigError
        for sizes whose product does not divide the number of ranks.
        """
        together = math.prod(sizes)
        if together < 1 or self.world % together:
            raise ConfigError(
                "ranks do not divide into groups",
                got=f"{self.world} ranks, groups of {' x '.join(map(str, sizes))}",
                allowed=", ".join(str(n) for n in range(1, self.world + 1) if self.world % n == 0),
            )
        if self.pg is None:
            return (self,) * (len(sizes) + 1)
        import torch.distributed as dist

        everyone = np.array(dist.get_process_group_ranks(self.pg)).reshape(-1, *sizes)
        backend, timeout = dist.get_backend(self.pg), timedelta(seconds=timeout_s)
        mine: list[RankGroup] = []
        for axis, size in enumerate(everyone.shape):
            if size == 1:
                mine.append(RankGroup.alone())
                continue
            for members in np.moveaxis(everyone, axis, -1).reshape(-1, size).tolist():  # all ranks, in one order
                pg = dist.new_group(members, timeout=timeout, backend=backend)
                if dist.get_rank() in members:
                    mine.append(RankGroup.over(pg))
        return tuple(mine)

    def _reduced(self, values: Tensor, operation: str) -> Tensor:
        if self.pg is None:
            return values.clone()
        import torch.distributed as dist

        reduced = values.detach().clone().contiguous()
        self.run(dist.all_reduce, reduced, getattr(dist.ReduceOp, operation))
        return reduced

    def _run_gather(self, values: Tensor) -> list[Tensor]:
        import torch
        import torch.distributed as dist

        parts = [torch.empty_like(values) for _ in range(self.world)]
        self.run(dist.all_gather, parts, values)
        return parts


def lost_rank(group: dist.ProcessGroup, error: RuntimeError) -> RankError:
    """Return the error for a failed collective of `group`."""
    import torch.distributed as dist

    return RankError(
        "a collective of the ranks that run one model failed",
        got=f"{str(error).splitlines()[0]} (seen by rank {dist.get_rank(group)} of {dist.get_world_size(group)})",
        hint="usually another rank has died or hangs: see its log; the group must be started again as a whole",
    )
