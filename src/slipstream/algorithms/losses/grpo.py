"""GRPO: PPO's two-sided clip on group advantages, without a critic."""

from __future__ import annotations

import math

from torch import Tensor

from slipstream.algorithms.losses.ppo import ppo_loss
from slipstream.algorithms.losses.spec import LossInputs
from slipstream.algorithms.reduce import Metrics


def grpo_loss(inputs: LossInputs, *, eps_low: float, eps_high: float) -> tuple[Tensor, Metrics]:
    """Clipped surrogate, anchored at the behaviour policy.

        L = -(1/num_tokens) * sum_t mask_t * min(r_t A_t, clip(r_t, 1 - eps_low, 1 + eps_high) A_t)
        r_t = exp(policy_t - behaviour_t)

    PPO (arXiv:1707.06347), equation 7; DeepSeekMath (arXiv:2402.03300), equation 3 without its KL term, whose
    normaliser is reduction "sequence"; token normalisation and the two epsilons as in DAPO (arXiv:2503.14476);
    reduction "constant" is Dr. GRPO's (arXiv:2503.20783).
    Identity: eps = inf gives the unclipped surrogate r_t A_t.
    """
    return ppo_loss(inputs, eps_low=eps_low, eps_high=eps_high, dual_clip=math.inf)
