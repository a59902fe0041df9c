"""The value function of actor-critic PPO: a model of its own, or a head on the policy's states."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from slipstream.core.config import RunConfig
from slipstream.core.packed import PackedMicrobatch
from slipstream.models.flat import FlatParameters
from slipstream.models.packed import at_targets
from slipstream.models.scalar import (
    HeadInit,
    ScalarModel,
    initialise_linear,
    load_scalar_model,
    new_scalar_model,
)
from slipstream.models.transformer import Transformer
from slipstream.trainer.optim import FlatAdamW, Optimizer


class ValueFunction(Protocol):
    """V(state before each target), with an optimizer of its own: `Critic`, or on several ranks `ShardedCritic`.

    A head reads the policy's states, and its loss trains the policy's trunk too, as in OpenAI's code (N, item 22). A
    model of its own may start from a reward model, head included, as in the TL;DR reproduction.
    """

    is_head: bool

    @property
    def optimizer(self) -> Optimizer: ...

    def values(self, microbatch: PackedMicrobatch, states: Tensor) -> Tensor:
        """float32 [M], differentiable; `states` [M, hidden] are the policy's at the rows that predict the targets."""
        ...


class Critic:
    """The value function beside a policy that is whole on one rank; implements `ValueFunction`."""

    def __init__(self, config: RunConfig, policy: Transformer) -> None:
        critic = config.critic
        self.is_head = critic.model == "head"
        self.module: ScalarModel | nn.Linear
        if self.is_head:
            self.module = value_head(policy, critic.head_init, config.seed)
        elif critic.path is not None:
            self.module = load_scalar_model(
                Path(critic.path),
                head_init=critic.head_init,
                seed=config.seed,
                max_positions=policy.config.max_positions,
            )
        else:
            self.module = new_scalar_model(policy, head_init=critic.head_init, seed=config.seed)
        self.flat = FlatParameters(self.module)
        self.optimizer = FlatAdamW(
            self.module,
            self.flat,
            critic.optimizer,
            total_updates=config.steps * config.updates_per_step,
            updates_per_step=config.updates_per_step,
        )

    def values(self, microbatch: PackedMicrobatch, states: Tensor) -> Tensor:
        return read_values(self.module, microbatch, states)


def read_values(module: ScalarModel | nn.Linear, microbatch: PackedMicrobatch, states: Tensor) -> Tensor:
    """`ValueFunction.values` by a model of its own, or by a head."""
    if isinstance(module, ScalarModel):
        return at_targets(module, microbatch)
    values: Tensor = module(states.float())
    return values.squeeze(-1)


def value_head(policy: Transformer, init: HeadInit, seed: int) -> nn.Linear:
    """A linear head on `policy`'s states, where they are."""
    head: nn.Linear = nn.utils.skip_init(nn.Linear, policy.config.hidden_size, 1)  # type: ignore[no-untyped-call]
    initialise_linear(head, init, seed)
    return head.to(policy.embedding.weight.device)
