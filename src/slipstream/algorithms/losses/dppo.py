"""DPPO: importance weights, masked where the token's probability itself has moved too far, not its ratio."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.algorithms.losses.spec import LossInputs, clip_metrics, off_policy_metrics
from slipstream.algorithms.ratios import ClippedSurrogate, token_ratios, truncate
from slipstream.algorithms.reduce import Metrics, masked_share


def dppo_tv_loss(
    inputs: LossInputs, *, delta_low: float, delta_high: float, max_ratio: float
) -> tuple[Tensor, Metrics]:
    """Policy gradient with truncated importance weights, without the tokens outside a trust region of total variation.

        L = -(1/num_tokens) * sum_t mask_t * M_t * sg[min(r_t, max_ratio)] * A_t * policy_t,   r_t = pi_t / mu_t
        M_t = 0 where A_t > 0 and pi_t - mu_t > delta_high, or A_t < 0 and mu_t - pi_t > delta_low; else 1

    pi_t and mu_t are the probabilities of the sampled token, so that |pi_t - mu_t| is the total variation of the two
    policies seen as "this token or another". Divergence PPO (arXiv:2602.04879), binary TV, equation 13. Defaults: 0.15
    and a cap of 20 are those of the authors' port to verl; prime-rl and SkyRL have 0.2. A rare token may move by any
    ratio; a likely one is masked long before PPO's clip would bind.
    Identity: delta = 1 gives `aipo_loss` with the same `max_ratio`.
    """
    policy, behaviour = inputs.need("policy_logprobs").detach(), inputs.need("behaviour_logprobs")
    moved = policy.exp() - behaviour.exp()
    return _masked_loss(inputs, moved < -delta_low, moved > delta_high, max_ratio)


def dppo_kl_loss(
    inputs: LossInputs, *, delta_low: float, delta_high: float, max_ratio: float
) -> tuple[Tensor, Metrics]:
    """Policy gradient with truncated importance weights, without the tokens outside a trust region of KL divergence.

        L = -(1/num_tokens) * sum_t mask_t * M_t * sg[min(r_t, max_ratio)] * A_t * policy_t,   r_t = pi_t / mu_t
        M_t = 0 where A_t > 0, pi_t > mu_t and D_t > delta_high, or A_t < 0, pi_t < mu_t and D_t > delta_low; else 1
        D_t = mu_t log(mu_t / pi_t) + (1 - mu_t) log((1 - mu_t) / (1 - pi_t))

    Divergence PPO (arXiv:2602.04879), binary KL, equation 14; 0.05 is the authors' threshold in verl, and SkyRL's.
    Identity: delta = inf gives `aipo_loss` with the same `max_ratio`.
    """
    policy, behaviour = inputs.need("policy_logprobs").detach(), inputs.need("behaviour_logprobs")
    others_of_policy, others = (_others(logprobs) for logprobs in (policy, behaviour))
    divergence = behaviour.exp() * (behaviour - policy) + others * (others.log() - others_of_policy.log())
    is_low, is_high = policy < behaviour, policy > behaviour
    return _masked_loss(inputs, is_low & (divergence > delta_low), is_high & (divergence > delta_high), max_ratio)


def _others(logprobs: Tensor) -> Tensor:
    """Return 1 - p, the probability of all other tokens: above 0 even where rounding leaves them none."""
    return -torch.expm1(logprobs).clamp(max=-torch.finfo(logprobs.dtype).tiny)


def _masked_loss(inputs: LossInputs, is_low: Tensor, is_high: Tensor, max_ratio: float) -> tuple[Tensor, Metrics]:
    """Return the loss without tokens that fell too far (`is_low`) on A < 0 or rose too far (`is_high`) on A > 0."""
    policy, advantages = inputs.need("policy_logprobs"), inputs.need("advantages")
    ratios = token_ratios(policy.detach(), inputs.need("behaviour_logprobs"), inputs.mask)
    is_low, is_high = is_low & (advantages < 0), is_high & (advantages > 0)
    weights = torch.where(is_low | is_high, 0.0, truncate(ratios, max_ratio))
    surrogate = ClippedSurrogate(weights * advantages * policy, is_low, is_high)
    metrics = off_policy_metrics(inputs) | clip_metrics(surrogate, inputs.mask)
    metrics["clipped_frac"] = masked_share(weights != ratios, inputs.mask)
    return -inputs.average(surrogate.objective), metrics
