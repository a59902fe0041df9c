"""KTO: single completions that were labelled as desirable or not."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.algorithms.losses.spec import LossInputs
from slipstream.algorithms.reduce import Metrics, masked_mean
from slipstream.algorithms.segments import segment_sum
from slipstream.core.errors import ShapeError


def kto_loss(
    inputs: LossInputs, *, beta: float, desirable_weight: float, undesirable_weight: float
) -> tuple[Tensor, Metrics]:
    """Loss of the completions' value for a person who weighs gains and losses against what is usual.

        L = (1/num_sequences) * sum_i w_i * (1 - sigmoid(s_i * beta * (log pi/ref(y_i) - z0)))
        desirable:  s_i = 1,   w_i = desirable_weight
        otherwise:  s_i = -1,  w_i = undesirable_weight

    KTO (arXiv:2402.01306), section 4.1. `inputs.reference_kl` is z0 >= 0, the estimate of
    KL(pi, ref) of the whole update, a constant (`mismatched_kl`); `inputs.is_desirable` bool [S] are the labels.
    Identity: policy = reference and z0 = 0 give half the mean weight.
    """
    is_desirable = inputs.need("is_desirable")
    log_ratios = inputs.need("policy_logprobs") - inputs.need("reference_logprobs")
    gains = segment_sum(log_ratios, *inputs.segments)
    if is_desirable.shape != gains.shape:
        raise ShapeError("one label is needed per completion", got=f"{len(is_desirable)} for {len(gains)}")
    margins = gains - inputs.need("reference_kl").to(gains.dtype)
    losses = torch.where(
        is_desirable,
        desirable_weight * torch.sigmoid(-beta * margins),
        undesirable_weight * torch.sigmoid(beta * margins),
    )
    rewards = beta * gains.detach()
    return losses.sum() / inputs.num_units, {
        "score_desirable": masked_mean(rewards, is_desirable),
        "score_undesirable": masked_mean(rewards, ~is_desirable),
    }


def mismatched_kl(log_ratios: Tensor) -> Tensor:
    """Estimate KL(pi, ref) for `kto_loss` from completions of other prompts: a scalar, without gradient.

        z0 = max(0, (1/m) sum_j log pi/ref(y_j | x_j)),   `log_ratios` [m], y_j a completion of another prompt than x_j

    KTO (arXiv:2402.01306), section 4.1. Identity: 0 where policy and reference are the same.
    """
    return log_ratios.detach().double().mean().clamp(min=0.0)
