"""Monte-Carlo estimators of KL(p || q) from samples of p (Schulman, "Approximating KL divergence").

All take logprobs [T] of the same sampled tokens and return one estimate per token [T]. With r = q/p:

    k1 = -log r              unbiased, high variance, may be negative
    k2 = (log r)^2 / 2       biased, low variance
    k3 = (r - 1) - log r     unbiased, low variance, never negative

Identity: all are 0 where p = q.

In N's penalty p is the policy, q the reference and the estimator k1; `AdaptiveKL` steers its coefficient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

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


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


@dataclass(frozen=True)
class AdaptiveKL:
    """A penalty coefficient that keeps the KL divergence near a target.

        e = clip(kl / target - 1, -0.2, 0.2),   coef <- coef * (1 + e * num_episodes / horizon)

    Ziegler et al. (arXiv:1909.08593), section 2.2; N, item 36, with these defaults. `target` in nats per completion,
    `horizon` in episodes (completions). Identity: kl = target changes nothing.
    """

    coef: float = 0.15
    target: float = 6.0
    horizon: float = 10_000.0

    def updated(self, kl: float, num_episodes: int) -> AdaptiveKL:
        """Return the controller after a step on `num_episodes` whose KL, summed per completion, had mean `kl`."""
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        return replace(self, coef=self.coef * (1.0 + error * num_episodes / self.horizon))
