"""IcePop: decoupled PPO without the tokens that trainer and sampler disagree on, in either direction."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.algorithms.losses.decoupled_ppo import corrected_surrogate, correction_ratios
from slipstream.algorithms.losses.spec import LossInputs
from slipstream.algorithms.reduce import Metrics


def icepop_loss(
    inputs: LossInputs, *, eps_low: float, eps_high: float, min_ratio: float, max_ratio: float
) -> tuple[Tensor, Metrics]:
    """Clipped surrogate, anchored at the proximal policy, of the tokens whose correction lies in a band.

        L = -(1/num_tokens) * sum_t mask_t * w_t * min(u_t A_t, clip(u_t, 1 - eps_low, 1 + eps_high) A_t)
        u_t = exp(policy_t - proximal_t),   c_t = exp(proximal_t - behaviour_t)
        w_t = c_t where min_ratio <= c_t <= max_ratio, else 0

    Ring-1T (arXiv:2510.18855) calls the bounds alpha and beta and prints reduction "sequence"; 0.5 and 5 are verl's.
    There c_t is the difference of two engines with the same weights; here it contains staleness, too.
    Identity: min_ratio near 0 gives `decoupled_ppo_loss` with mode = "mask"; proximal = behaviour, `ppo_loss`.
    """
    correction = correction_ratios(inputs)
    is_inside = (correction >= min_ratio) & (correction <= max_ratio)
    weights = torch.where(is_inside, correction, 0.0)
    return corrected_surrogate(inputs, correction, weights, eps_low=eps_low, eps_high=eps_high)
