"""A call of the user's own loss on made-up inputs, before a run depends on it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from slipstream.algorithms.losses.spec import LossInputs
from slipstream.algorithms.losses.table import Loss
from slipstream.algorithms.reduce import Reduction, encode_metrics
from slipstream.core.errors import ConfigError
from slipstream.core.user_code import describe

_LENGTHS = (3, 2, 3, 2)  # two pairs


def try_loss(loss: Loss, name: str, carried: Collection[str], *, reduction: Reduction) -> None:
    """Raise ConfigError unless `loss`, called `name`, gives a differentiable scalar and metrics of a few tokens.

    `carried` are the inputs of a run beside those that all runs have.
    """
    segment_ids = torch.arange(len(_LENGTHS)).repeat_interleave(torch.tensor(_LENGTHS))
    numbers = torch.linspace(0.1, 1.0, len(segment_ids), dtype=torch.float32)
    leaf = (-numbers).requires_grad_()
    own = {"teacher_divergences": 0.1 * leaf.square()}
    inputs = LossInputs(
        policy_logprobs=1.0 * leaf,
        advantages=numbers - 0.5,
        behaviour_logprobs=-numbers.flip(0),
        mask=torch.ones_like(segment_ids, dtype=torch.bool),
        segment_ids=segment_ids,
        num_units=len(segment_ids) if loss.unit == "token" and reduction == "token" else len(_LENGTHS),
        reduction=reduction,
        max_tokens=max(_LENGTHS),
        **{name: own.get(name, -numbers) for name in carried},
    )
    try:
        found = loss(inputs)
    except Exception as error:
        raise _fails(name, describe(error)) from error
    value, metrics = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(value, torch.Tensor) or value.shape != () or not isinstance(metrics, Mapping):
        shape = f" of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
        beside = f" and {type(metrics).__name__}" if isinstance(found, tuple) else " alone"
        raise _fails(name, f"{type(value).__name__}{shape}{beside}", "(a scalar tensor, a mapping of metrics)")
    try:
        torch.autograd.backward(value)
        encode_metrics(metrics)
    except Exception as error:
        allowed = "a scalar that can be differentiated, and metrics of masked_mean, masked_share or masked_max"
        raise _fails(name, describe(error), allowed) from error


def _fails(name: str, got: str, allowed: str | None = None) -> ConfigError:
    what = "fails on made-up inputs" if allowed is None else "returns something else than a loss does"
    hint = "docs/algorithms.md has an example, 'Your own loss'"
    return ConfigError(f"the loss '{name}' {what}", got=got, allowed=allowed, hint=hint)
