"""Decoupled PPO: clip around a recent policy, correct for the one that sampled."""

from __future__ import annotations

from torch import Tensor

from slipstream.algorithms.losses.spec import LossInputs, clip_metrics, off_policy_metrics
from slipstream.algorithms.ratios import clipped_surrogate, drop_above, token_ratios, truncate
from slipstream.algorithms.reduce import Metrics, masked_max, masked_mean, masked_share


def decoupled_ppo_loss(
    inputs: LossInputs, *, eps_low: float, eps_high: float, max_ratio: float, mode: str
) -> tuple[Tensor, Metrics]:
    """Clipped surrogate, anchored at the proximal policy and weighted from behaviour to proximal.

        L = -(1/num_tokens) * sum_t mask_t * w_t * min(u_t A_t, clip(u_t, 1 - eps_low, 1 + eps_high) A_t)
        u_t = exp(policy_t - proximal_t),   w_t = min(exp(proximal_t - behaviour_t), max_ratio)

    Hilton et al. (arXiv:2110.00641), the decoupled objective; AReaL (arXiv:2505.24298). Neither truncates in
    print; AReaL's code leaves tokens above its cap out, which is mode = "mask": w_t = 0 there.
    Identity: proximal = behaviour gives `ppo_loss`; proximal = policy, the gradient of `aipo_loss`.
    """
    correction = correction_ratios(inputs)
    weights = drop_above(correction, max_ratio) if mode == "mask" else truncate(correction, max_ratio)
    return corrected_surrogate(inputs, correction, weights, eps_low=eps_low, eps_high=eps_high)


def correction_ratios(inputs: LossInputs) -> Tensor:
    """exp(proximal_t - behaviour_t), [T]: what corrects for the policy that sampled."""
    return token_ratios(inputs.need("proximal_logprobs"), inputs.need("behaviour_logprobs"), inputs.mask)


def corrected_surrogate(
    inputs: LossInputs, correction: Tensor, weights: Tensor, *, eps_low: float, eps_high: float
) -> tuple[Tensor, Metrics]:
    """PPO's surrogate around the proximal policy, times `weights` [T]: the `correction` [T] as far as it is let in."""
    ratios = token_ratios(inputs.need("policy_logprobs"), inputs.need("proximal_logprobs"), inputs.mask)
    surrogate = clipped_surrogate(ratios, inputs.need("advantages"), eps_low=eps_low, eps_high=eps_high)
    metrics = off_policy_metrics(inputs) | clip_metrics(surrogate, inputs.mask)
    return -inputs.average(weights * surrogate.objective), metrics | {
        "proximal_ratio": masked_mean(ratios.detach(), inputs.mask),
        "correction_ratio": masked_mean(correction, inputs.mask),
        "correction_ratio_max": masked_max(correction, inputs.mask),
        "correction_truncated_frac": masked_share(weights != correction, inputs.mask),
    }
