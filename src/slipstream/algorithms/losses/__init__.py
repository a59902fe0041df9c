"""Policy losses by name: one file each, one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from slipstream.algorithms.losses.aipo import aipo_loss, aipo_masked_loss
from slipstream.algorithms.losses.grpo import grpo_loss
from slipstream.algorithms.losses.spec import Loss, LossInputs, Unit
from slipstream.core.errors import ConfigError, did_you_mean

__all__ = ["LOSSES", "Loss", "LossInputs", "Unit", "loss_named"]

LOSSES: dict[str, Loss] = {
    "aipo": Loss(aipo_loss, "token", ("behaviour_logprobs",), {"max_ratio": 4.0}),
    "aipo_masked": Loss(aipo_masked_loss, "token", ("behaviour_logprobs",), {"max_ratio": 4.0}),
    "grpo": Loss(grpo_loss, "token", ("behaviour_logprobs",), {"eps_low": 0.2, "eps_high": 0.28}),
}


def loss_named(name: str, params: Mapping[str, float]) -> Loss:
    """The loss `name` with its constants set to `params`, defaults elsewhere.

    ConfigError on an unknown name or parameter, with the nearest known one.
    """
    if name not in LOSSES:
        raise ConfigError(
            f"unknown loss '{name}'", got=name, allowed=", ".join(sorted(LOSSES)), hint=did_you_mean(name, LOSSES)
        )
    loss = LOSSES[name]
    for param in params:
        if param not in loss.params:
            raise ConfigError(
                f"loss '{name}' has no parameter '{param}'",
                got=param,
                allowed=", ".join(sorted(loss.params)) or "none",
                hint=did_you_mean(param, loss.params),
            )
    return replace(loss, params={**loss.params, **params})
