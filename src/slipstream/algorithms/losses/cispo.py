"""CISPO: clipped importance weights that never take a token's gradient away."""

from __future__ import annotations

from torch import Tensor

from slipstream.algorithms.losses.spec import LossInputs, off_policy_metrics
from slipstream.algorithms.ratios import token_ratios
from slipstream.algorithms.reduce import Metrics, masked_share


def cispo_loss(inputs: LossInputs, *, eps_low: float, eps_high: float) -> tuple[Tensor, Metrics]:
    """Policy gradient with two-sided clipped importance weights.

        L = -(1/num_tokens) * sum_t mask_t * sg[clip(r_t, 1 - eps_low, 1 + eps_high)] * A_t * policy_t
        r_t = exp(policy_t - behaviour_t)

    MiniMax-M1 (arXiv:2506.13585), "CISPO". Like them, no lower bound by default (eps_low = inf). They do not print
    their eps_high; the default allows a weight of 5, as TRL recommends after ScaleRL (arXiv:2510.13786). What TRL calls
    `epsilon_high` is 1 + eps_high.
    Identity: eps_low = inf is `aipo_loss` at max_ratio = 1 + eps_high.
    """
    policy = inputs.need("policy_logprobs")
    ratios = token_ratios(policy.detach(), inputs.need("behaviour_logprobs"), inputs.mask)
    weights = ratios.clamp(1.0 - eps_low, 1.0 + eps_high)
    loss = -inputs.average(weights * inputs.need("advantages") * policy)
    return loss, off_policy_metrics(inputs) | {"clipped_frac": masked_share(weights != ratios, inputs.mask)}
