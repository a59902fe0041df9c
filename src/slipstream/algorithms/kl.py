"""Monte-Carlo estimators of KL(p || q) from samples of p (Schulman, "Approximating KL divergence").

All take logprobs [T] of the same sampled tokens and return one estimate per token [T]. With r = q/p:

    k1 = -log r              unbiased, high variance, may be negative
    k2 = (log r)^2 / 2       biased, low variance
    k3 = (r - 1) - log r     unbiased, low variance, never negative

Identity: all are 0 where p = q.
"""

from __future__ import annotations

import torch
from torch import Tensor


def k1(p_logprobs: Tensor, q_logprobs: Tensor) -> Tensor:
    """log p - log q, [T]."""
    return p_logprobs - q_logprobs


def k2(p_logprobs: Tensor, q_logprobs: Tensor) -> Tensor:
    """(log p - log q)^2 / 2, [T]."""
    return 0.5 * (p_logprobs - q_logprobs).square()


def k3(p_logprobs: Tensor, q_logprobs: Tensor) -> Tensor:
    """q/p - 1 - log(q/p), [T]."""
    log_ratio = q_logprobs - p_logprobs
    return torch.expm1(log_ratio) - log_ratio
