"""The ranks that hold one copy of a frozen model together, and the way of a batch from the first of them to the others.

An executor that scores has several ranks. Either each holds a copy of its models; or `tensor_parallel` of them share
each layer, and with `is_sharded` FSDP2 cuts what one of these has over all data-parallel ranks. Ranks that hold a copy
compute together: all read the same batch, and rank i of the data-parallel ones every i-th microbatch of it.

Asleep. The first of them takes what arrives and hands each batch on over a channel, so the others sleep on a port until
there is work: no collective waits for work, as each ends by a deadline. They end when the first one says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slipstream.core.config import RunConfig
from slipstream.core.executor import Context
from slipstream.core.peer_messages import ReadTogether
from slipstream.core.rank_group import RankGroup
from slipstream.core.types import Rollout, Stop

HANDED = "handed"
"""The port on which the first rank of a copy hands batches to the others."""


def ranks_per_copy(config: RunConfig) -> dict[str, int]:
    """Return how many ranks hold one copy of a model together, by the name of the executor that scores, or values."""
    rewards, kl, teacher = config.rewards, config.kl, config.teacher
    return {
        "reward_models": rewards.model_ranks if rewards.models_sharded else rewards.model_tensor_parallel,
        "reference": kl.ranks if kl.sharded else kl.tensor_parallel,
        "teacher": teacher.ranks if teacher.sharded else teacher.tensor_parallel,
        "critic": config.critic.ranks,
    }


class Holders:
    """This rank among those that hold a copy with it: the groups that divide it, and the batches that they read.

    Consumes, but on the first rank: `handed`. Emits, on the first rank: `handed`. A rank that dies or stays away ends
    the others with a RankError in the next collective.
    """

    def __init__(
        self, context: Context, *, tensor_parallel: int = 1, is_sharded: bool = False, timeout_s: float = 120.0
    ) -> None:
        """Make the process groups of a divided model; all ranks of `context.group` call it together."""
        self._context = context
        self.data_parallel = self.tensor_parallel = RankGroup.alone()
        if tensor_parallel > 1 or is_sharded:
            data_parallel, self.tensor_parallel = context.group.split(tensor_parallel, timeout_s=timeout_s)
            self.data_parallel = data_parallel if is_sharded else self.data_parallel
        self._handed: list[Rollout] = []
        self._is_over = False

    @property
    def world(self) -> int:
        return self.data_parallel.world * self.tensor_parallel.world

    @property
    def is_leader(self) -> bool:
        """Whether this rank takes what arrives for its copy, and emits what all have read."""
        return self.data_parallel.is_leader and self.tensor_parallel.is_leader

    def batch(self, take: Callable[[], Sequence[Rollout]]) -> list[Rollout]:
        """Return the batch that all holders read next, empty where there is none yet: what `take` gives the first."""
        if not self.is_leader:
            return self._next_handed()
        batch = list(take())
        if batch and self.world > 1:
            for rollout in batch:  # one by one: each fits a message, together they need not
                self._context.outputs[HANDED].put(rollout)
            self._context.outputs[HANDED].put(ReadTogether(num_rollouts=len(batch)))
        return batch

    def ends(self, *, is_stopping: bool) -> bool:
        """Return whether there will be no other batch: where none is left, and the first rank `is_stopping`."""
        if not self.is_leader:
            return self._is_over
        if is_stopping and self.world > 1:
            self._context.outputs[HANDED].put(Stop())
        return is_stopping

    def _next_handed(self) -> list[Rollout]:
        while (message := self._context.inputs[HANDED].get_nowait()) is not None:
            if isinstance(message, Rollout):
                self._handed.append(message)
                continue
            if isinstance(message, Stop):
                self._is_over = True
                break
            assert isinstance(message, ReadTogether), "the port is the first rank's"
            batch, self._handed = self._handed, []
            assert len(batch) == message.num_rollouts, "a channel loses nothing and keeps the order"
            return batch
        return []
