"""PPO: the two-sided clip, optionally with a bound on what a negative advantage may weigh."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slipstream.algorithms.losses.spec import LossInputs, clip_metrics, off_policy_metrics
from slipstream.algorithms.ratios import clipped_surrogate, token_ratios
from slipstream.algorithms.reduce import Metrics, masked_share


def ppo_loss(inputs: LossInputs, *, eps_low: float, eps_high: float, dual_clip: float) -> tuple[Tensor, Metrics]:
    """Clipped surrogate, anchored at the behaviour policy.

        s_t = min(r_t A_t, clip(r_t, 1 - eps_low, 1 + eps_high) A_t),   r_t = exp(policy_t - behaviour_t)
        L = -(1/num_tokens) * sum_t mask_t * (A_t < 0 ? max(s_t, dual_clip * A_t) : s_t)

    PPO (arXiv:1707.06347), equation 7; dual clip: Ye et al. (arXiv:1912.09729), `dual_clip` > 1 (theirs is 3). It
    bounds the one case that s_t leaves unbounded, a large ratio with a negative advantage.
    Identity: dual_clip = inf gives `grpo_loss`; without any clip, `aipo_masked_loss` at max_ratio = inf.
    """
    advantages = inputs.need("advantages")
    ratios = token_ratios(inputs.need("policy_logprobs"), inputs.need("behaviour_logprobs"), inputs.mask)
    surrogate = clipped_surrogate(ratios, advantages, eps_low=eps_low, eps_high=eps_high)
    objective = surrogate.objective
    metrics = off_policy_metrics(inputs) | clip_metrics(surrogate, inputs.mask)
    if dual_clip < math.inf:
        bound = dual_clip * advantages
        objective = torch.where(advantages < 0, torch.maximum(objective, bound), objective)
        metrics["dual_clipped_frac"] = masked_share((ratios > dual_clip) & (advantages < 0), inputs.mask)
    return -inputs.average(objective), metrics
