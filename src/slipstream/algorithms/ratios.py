"""Importance ratios between the policy being trained and the one that sampled, and how much they cost."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from slipstream.algorithms.segments import segment_mean, segment_sum

MAX_LOG_RATIO = 60.0


def token_ratios(policy_logprobs: Tensor, anchor_logprobs: Tensor, mask: Tensor) -> Tensor:
    """exp(policy_t - anchor_t), [T], differentiable in `policy_logprobs`; 1 and without gradient where `mask` is False.

    Masked before the exponential, because an infinite ratio times a zero mask would be NaN in the gradient.
    Identity: 1 where both logprobs are equal.
    """
    return torch.exp(torch.where(mask, policy_logprobs - anchor_logprobs, 0.0))


def sequence_ratios(
    policy_logprobs: Tensor, anchor_logprobs: Tensor, mask: Tensor, segment_ids: Tensor, lengths: Tensor | None = None
) -> Tensor:
    """pi(y|x) / anchor(y|x) = exp(sum_t policy_t - anchor_t) per sequence, [S], differentiable; see `segment_sum`.

    At most e^60, and without gradient there: a long sequence can pass what a float holds, and the gradient of an
    infinite ratio is NaN even where a clip binds.
    Identity: the product of the sequence's token ratios.
    """
    return torch.exp(
        segment_sum(policy_logprobs - anchor_logprobs, mask, segment_ids, lengths).clamp(max=MAX_LOG_RATIO)
    )


def geometric_ratios(
    policy_logprobs: Tensor, anchor_logprobs: Tensor, mask: Tensor, segment_ids: Tensor, lengths: Tensor | None = None
) -> Tensor:
    """(pi(y|x) / anchor(y|x))^(1/|y|) = exp(mean_t policy_t - anchor_t) per sequence, [S], differentiable.

    GSPO (arXiv:2507.18071), equation 7. Identity: the geometric mean of the sequence's token ratios.
    """
    return torch.exp(segment_mean(policy_logprobs - anchor_logprobs, mask, segment_ids, lengths))


def truncate(ratios: Tensor, max_ratio: float) -> Tensor:
    """min(ratio, max_ratio): one-sided truncation (LlamaRL). Identity: max_ratio = inf changes nothing."""
    return ratios.clamp(max=max_ratio)


def drop_above(ratios: Tensor, max_ratio: float) -> Tensor:
    """ratio where it is at most max_ratio, else 0. Identity: max_ratio = inf changes nothing."""
    return torch.where(ratios <= max_ratio, ratios, 0.0)


class ClippedSurrogate(NamedTuple):
    """PPO's objective and where its clip binds, all of the ratios' shape; the flags are bool."""

    objective: Tensor
    is_low: Tensor
    is_high: Tensor


def clipped_surrogate(ratios: Tensor, advantages: Tensor, *, eps_low: float, eps_high: float) -> ClippedSurrogate:
    """min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), per token or per sequence.

    PPO (arXiv:1707.06347), equation 7. The flags mark only entries that the minimum pushes off their gradient: r below
    with A < 0 and r above with A > 0; on the other side the clip does not bind.
    Identity: eps = inf gives r A.
    """
    clipped = ratios.clamp(1.0 - eps_low, 1.0 + eps_high)
    return ClippedSurrogate(
        objective=torch.minimum(ratios * advantages, clipped * advantages),
        is_low=(ratios < 1.0 - eps_low) & (advantages < 0),
        is_high=(ratios > 1.0 + eps_high) & (advantages > 0),
    )


def effective_share(total: float, total_squares: float, count: float) -> float:
    """Return the effective sample size of `count` weights as a share of them: (sum w)^2 / (n sum w^2); 1 of none.

    VCPO (arXiv:2602.17616), rho_ess. Identity: 1 for equal weights, 1/n where one weight is all.
    """
    return total**2 / (count * total_squares) if total_squares else 1.0


def step_scale(share: float, *, base: float, rule: Literal["sqrt", "linear"]) -> float:
    """Return the factor on the learning rate of an update whose weights leave the effective `share`.

        sqrt:  min(1, share / base)^(1/2)       linear:  min(1, share / base)

    VCPO (arXiv:2602.17616): the root for AdamW, whose steps do not grow with the gradient. The minimum and `base`, the
    share that counts as whole, are of the authors' code. Identity: equal weights change nothing.
    """
    kept = min(1.0, share / base)
    return math.sqrt(kept) if rule == "sqrt" else kept
