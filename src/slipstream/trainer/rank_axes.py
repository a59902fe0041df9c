"""The groups of the trainer's ranks: rank = ((data * P + stage) * C + context) * T + tensor."""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.core.rank_group import RankGroup
from slipstream.core.training_sections import TrainerConfig
from slipstream.models.expert_parallel import ExpertRanks


@dataclass(frozen=True)
class RankAxes:
    """The groups that one rank of the trainer is in; all ranks of one axis differ in that alone.

    `data` ranks have different rollouts, and everything is counted over them. `stage` ranks have a part of the layers
    each, `context` ranks read each microbatch together, `tensor` ranks share each layer. `peers`, stage x context x
    tensor, train on the same rollouts, which the first of them gets. `sharing` ranks, data x context, divide the
    parameters among them and sum their gradients. `experts` are the data ranks as they divide a mixture's experts:
    data = sharing * E + exchange.
    """

    data: RankGroup
    stage: RankGroup
    context: RankGroup
    tensor: RankGroup
    peers: RankGroup
    sharing: RankGroup
    experts: ExpertRanks = field(default_factory=ExpertRanks)

    @classmethod
    def of(cls, ranks: RankGroup, trainer: TrainerConfig, *, timeout_s: float) -> RankAxes:
        """Divide `ranks` as the config says, either into stages or by context. All of them call it together."""
        stages, contexts, tensors = trainer.pipeline_parallel, trainer.context_parallel, trainer.tensor_parallel
        between = max(stages, contexts)
        if between == 1:
            data, tensor = ranks.split(tensors, timeout_s=timeout_s)
            alone, experts = RankGroup.alone(), ExpertRanks()
            if trainer.expert_parallel > 1:
                same, exchange, _ = ranks.split(trainer.expert_parallel, tensors, timeout_s=timeout_s)
                experts = ExpertRanks(exchange, same)
            return cls(data, alone, alone, tensor, peers=tensor, sharing=data, experts=experts)
        data, middle, tensor = ranks.split(between, tensors, timeout_s=timeout_s)
        peers = middle if tensors == 1 else ranks.split(between * tensors, timeout_s=timeout_s)[1]
        if stages > 1:
            return cls(data, middle, RankGroup.alone(), tensor, peers, sharing=data)
        sharing = ranks.split(tensors, timeout_s=timeout_s)[0]
        return cls(data, RankGroup.alone(), middle, tensor, peers, sharing)
