"""The value function of actor-critic PPO: a model of its own, or a head on the policy's states."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor, nn

from slipstream.algorithms.losses import LossInputs, loss_named
from slipstream.algorithms.reduce import Mean, Metrics
from slipstream.core.config import RunConfig
from slipstream.core.packed import PackedMicrobatch
from slipstream.models.packed import at_targets
from slipstream.models.scalar import ScalarModel, initialise_linear
from slipstream.models.sharded import Division, load_sharded_scalar, new_sharded_scalar, stored_parameters
from slipstream.models.transformer import Transformer
from slipstream.trainer.optim import AdamW


class Critic:
    """V(state before each target), with an optimizer of its own.

    A head reads the policy's states, and its loss trains the policy's trunk too, as in OpenAI's code (N, item 22). A
    model of its own may start from a reward model, head included, as in the TL;DR reproduction. It is divided like the
    policy; a head is whole on every rank. Identity: several ranks give the values of one, up to rounding.
    """

    def __init__(self, config: RunConfig, policy: Transformer, division: Division = Division()) -> None:
        self._config, critic = config, config.critic
        self.is_head, self._reader = critic.model == "head", policy.reader
        self.module: ScalarModel | nn.Linear
        if self.is_head:
            head: nn.Linear = nn.utils.skip_init(nn.Linear, policy.config.hidden_size, 1, dtype=torch.float32)  # type: ignore[no-untyped-call]
            initialise_linear(head, critic.head_init, config.seed)
            self.module = head.to(policy.embedding.weight.device)
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
        self.parameters = stored_parameters(self.module, division)

    @cached_property
    def optimizer(self) -> AdamW:
        """Made with its moments when it is asked for, so that a policy may be gone before."""
        return AdamW(
            self.parameters,
            self._config.critic.optimizer,
            total_updates=self._config.steps * self._config.updates_per_step,
            updates_per_step=self._config.updates_per_step,
            offloads=self._config.trainer.offload_moments,
        )

    def values(self, microbatch: PackedMicrobatch, states: Tensor) -> Tensor:
        """Return float32 [M], differentiable; `states` are the policy's at the rows before this rank's targets."""
        if isinstance(self.module, ScalarModel):
            values = at_targets(self.module, microbatch)
        else:
            values = self.module(states.float()).squeeze(-1)
        return self._reader.joined(microbatch, values)[0]

    def loss(self, columns: Mapping[str, Tensor], values: Tensor, *, num_tokens: int) -> tuple[Tensor, Metrics]:
        """Return the loss of a microbatch's `values` times `critic.coef`, and the metric of the loss without it.

        `columns` are `PackedMicrobatch.tensors`; `num_tokens` are the targets of the whole update.
        """
        assert columns.keys() >= {"values", "returns"}, "a batch for a critic carries values and returns"
        mask = torch.ones(len(values), dtype=torch.bool, device=values.device)
        loss, metrics = loss_named("value", {"clip": self._config.critic.clip})(
            LossInputs(
                policy_logprobs=None,
                advantages=None,
                mask=mask,
                segment_ids=columns["segment_ids"],
                lengths=columns["lengths"],
                num_units=num_tokens,
                values=values,
                anchor_values=columns["values"],
                returns=columns["returns"],
            )
        )
        total = loss.detach().double() * num_tokens
        return self._config.critic.coef * loss, metrics | {"value_loss": Mean(total, mask.sum())}
