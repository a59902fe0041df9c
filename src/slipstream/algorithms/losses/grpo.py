"""GRPO: PPO's two-sided clip on group advantages, without a critic."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.algorithms.losses.spec import LossInputs, off_policy_metrics
from slipstream.algorithms.ratios import token_ratios
from slipstream.algorithms.reduce import Mean, Metrics, sum_over_units


def grpo_loss(inputs: LossInputs, *, eps_low: float, eps_high: float) -> tuple[Tensor, Metrics]:
    """Clipped surrogate, anchored at the behaviour policy and normalised by tokens.

        L = -(1/num_tokens) * sum_t mask_t * min(r_t A_t, clip(r_t, 1 - eps_low, 1 + eps_high) A_t)
        r_t = exp(policy_t - behaviour_t)

    PPO (arXiv:1707.06347), equation 7; DeepSeekMath (arXiv:2402.03300), equation 3 without its KL term; token
    normalisation and the two epsilons as in DAPO (arXiv:2503.14476).
    Identity: eps = inf gives the unclipped surrogate r_t A_t.
    """
    ratios = token_ratios(inputs.policy_logprobs, inputs.anchor("behaviour_logprobs"), inputs.mask)
    unclipped = ratios * inputs.advantages
    clipped = ratios.clamp(1.0 - eps_low, 1.0 + eps_high) * inputs.advantages
    objective = torch.minimum(unclipped, clipped)
    loss = -sum_over_units(objective, inputs.mask, num_units=inputs.num_units)
    # Only tokens that the minimum pushes off their gradient count: the clip does not bind on the other side.
    low = (ratios < 1.0 - eps_low) & (inputs.advantages < 0)
    high = (ratios > 1.0 + eps_high) & (inputs.advantages > 0)
    num_tokens = inputs.mask.sum()
    return loss, off_policy_metrics(inputs, ratios, clipped=low | high) | {
        "clipped_low_frac": Mean((low & inputs.mask).sum(), num_tokens),
        "clipped_high_frac": Mean((high & inputs.mask).sum(), num_tokens),
    }
