"""The groups of the trainer's ranks: rank = ((data * C) + context) * T + tensor."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.core.rank_group import RankGroup
from slipstream.core.training_sections import TrainerConfig


@dataclass(frozen=True)
class RankAxes:
    """The groups that one rank of the trainer is in; all ranks of one axis differ in that alone.

    `data` ranks have different rollouts, and everything is counted over them. `context` ranks read each microbatch
    together, `tensor` ranks share each layer. `peers`, context x tensor, train on the same rollouts, which the first of
    them gets. `sharing` ranks, data x context, divide the parameters among them and sum their gradients.
    """

    data: RankGroup
    context: RankGroup
    tensor: RankGroup
    peers: RankGroup
    sharing: RankGroup

    @classmethod
    def of(cls, ranks: RankGroup, trainer: TrainerConfig, *, timeout_s: float) -> RankAxes:
        """Divide `ranks` as the config says. All of them call it together."""
        contexts, tensors = trainer.context_parallel, trainer.tensor_parallel
        if contexts == 1:
            data, tensor = ranks.split(tensors, timeout_s=timeout_s)
            return cls(data, RankGroup.alone(), tensor, peers=tensor, sharing=data)
        data, context, tensor = ranks.split(contexts, tensors, timeout_s=timeout_s)
        peers = context if tensors == 1 else ranks.split(contexts * tensors, timeout_s=timeout_s)[1]
        return cls(data, context, tensor, peers, sharing=ranks.split(tensors, timeout_s=timeout_s)[0])
