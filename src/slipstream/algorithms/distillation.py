"""Divergences of a policy's next-token distribution from a teacher's, over the vocabulary or over a part of it.

On-policy distillation compares both at every state that the policy itself has sampled: GKD (arXiv:2306.13649), MiniLLM
(arXiv:2306.08543). Everything here is of single rows, [N]; rows that are kept out of a loss cost nothing but time.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slipstream.core.errors import ShapeError

LEAST_LOGPROB = -100.0
"""Logprob of an outcome that is left no probability: it counts for nothing in any divergence, and is finite."""


def divergences(policy: Tensor, teacher: Tensor, alpha: float) -> Tensor:
    """Divergence of the policy Q from the teacher P in each row, [N], in nats; differentiable in `policy`.

        alpha = 1:  KL(Q || P) = sum_c Q_c (log Q_c - log P_c)     reverse: keeps to what the teacher would do
        alpha = 0:  KL(P || Q) = sum_c P_c (log P_c - log Q_c)     forward: covers all that the teacher would do
        else:       alpha KL(P || M) + (1 - alpha) KL(Q || M),     M = alpha P + (1 - alpha) Q

    GKD (arXiv:2306.13649), section 2, whose beta is `alpha`. `policy`, `teacher` [N, C] are logprobs of the same C
    outcomes. ShapeError for other shapes.
    Identities: never negative; 0 and without gradient where both are equal; as `alpha` goes to 0, the third divided by
    `alpha` goes to the second, and as it goes to 1, divided by 1 - `alpha`, to the first.
    """
    if policy.shape != teacher.shape or policy.ndim != 2:
        what = "policy and teacher need logprobs of the same outcomes"
        raise ShapeError(what, got=f"{tuple(policy.shape)} and {tuple(teacher.shape)}")
    if alpha == 1.0:
        return _kl(policy, teacher)
    if alpha == 0.0:
        return _kl(teacher, policy)
    mixture = torch.logaddexp(teacher + math.log(alpha), policy + math.log1p(-alpha))
    return alpha * _kl(teacher, mixture) + (1.0 - alpha) * _kl(policy, mixture)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(dim=-1)


def coarse_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Logprobs of `tokens` in each row and, behind them, of all other tokens together: [N, K + 1], differentiable.

        log p_c = z_c - logsumexp(z)  of each c in `tokens`,    log p_rest = log sum_{c not in tokens} p_c

    `logits` [N, V], `tokens` int64 [N, K], distinct within a row. The last is computed from the other logits, not as
    1 - sum, which would be lost in rounding where it is small; it is at least LEAST_LOGPROB.
    The divergence of two such distributions is that of the whole ones after all but K tokens are merged: never
    negative, never above it, 0 where policy and teacher agree on the K tokens and so on the rest's sum.
    Identity: K = V gives `log_softmax`, and a rest without any probability.
    """
    normaliser = logits.logsumexp(dim=-1, keepdim=True)
    lowest = torch.finfo(logits.dtype).min / 2  # not -inf: the gradient of a logsumexp of nothing is NaN
    others = logits.scatter(-1, tokens, lowest).logsumexp(dim=-1, keepdim=True)
    rest = (others - normaliser).clamp(min=LEAST_LOGPROB)
    return torch.cat([logits.gather(-1, tokens) - normaliser, rest], dim=-1)


@torch.no_grad()
def likeliest(logits: Tensor, count: int) -> Tensor:
    """Return the `count` likeliest tokens of each row, int64 [N, count], ascending by id."""
    return logits.topk(count, dim=-1).indices.sort(dim=-1).values
