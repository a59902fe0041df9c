"""The value function of actor-critic PPO beside a policy that is divided over ranks."""

from __future__ import annotations

from torch import Tensor, nn

from slipstream.core.config import RunConfig
from slipstream.core.packed import PackedMicrobatch
from slipstream.models.scalar import ScalarModel
from slipstream.models.sharded import Division, ShardedParameters, load_sharded_scalar, new_sharded_scalar
from slipstream.models.transformer import Transformer
from slipstream.trainer.critic import read_values, value_head
from slipstream.trainer.sharded_optim import ShardedAdamW


class ShardedCritic:
    """Implements `critic.ValueFunction`: a model of its own is divided like the policy, a head is whole on every rank.

    Identity: the values, and after updates the weights, of `Critic` on one rank, up to rounding.
    """

    def __init__(self, config: RunConfig, policy: Transformer, division: Division) -> None:
        critic = config.critic
        self.is_head = critic.model == "head"
        self.module: ScalarModel | nn.Linear
        if self.is_head:
            self.module = value_head(policy, critic.head_init, config.seed)
        elif critic.path is not None:
            self.module = load_sharded_scalar(
                critic.path,
                division,
                head_init=critic.head_init,
                seed=config.seed,
                max_positions=policy.config.max_positions,
            )
        else:
            self.module = new_sharded_scalar(policy, division, head_init=critic.head_init, seed=config.seed)
        self.parameters = ShardedParameters(self.module, division)
        self.optimizer = ShardedAdamW(
            self.parameters,
            critic.optimizer,
            total_updates=config.steps * config.updates_per_step,
            updates_per_step=config.updates_per_step,
            reduce_once=config.trainer.reduce_once,
        )

    def values(self, microbatch: PackedMicrobatch, states: Tensor) -> Tensor:
        """float32 [M], differentiable; `states` [M, hidden] are the policy's at the rows that predict the targets."""
        return read_values(self.module, microbatch, states)
