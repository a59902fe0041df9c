"""Importance ratios between the policy being trained and the one that sampled, and how much they cost."""

from __future__ import annotations

import torch
from torch import Tensor


def token_ratios(policy_logprobs: Tensor, anchor_logprobs: Tensor, mask: Tensor) -> Tensor:
    """exp(policy_t - anchor_t), [T], differentiable in `policy_logprobs`; 1 and without gradient where `mask` is False.

    Masked before the exponential, because an infinite ratio times a zero mask would be NaN in the gradient.
    Identity: 1 where both logprobs are equal.
    """
    return torch.exp(torch.where(mask, policy_logprobs - anchor_logprobs, 0.0))


def truncate(ratios: Tensor, max_ratio: float) -> Tensor:
    """min(ratio, max_ratio): one-sided truncation (LlamaRL, L8). Identity: max_ratio = inf changes nothing."""
    return ratios.clamp(max=max_ratio)


def effective_sample_size(ratios: Tensor) -> Tensor:
    """(sum w)^2 / (n sum w^2), a share in (0, 1]: how many of the n samples `ratios` [n] are worth.

    Kish (1965). Identity: equal weights give 1; one weight among zeros gives 1/n.
    """
    return ratios.sum().square() / (ratios.numel() * ratios.square().sum())
