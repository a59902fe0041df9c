"""AIPO: policy gradient with one-sided truncated importance weights (LlamaRL), and PRIME-RL's printed objective."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.algorithms.losses.spec import LossInputs, clip_metrics, off_policy_metrics, sequence_ratio_metrics
from slipstream.algorithms.ratios import (
    clipped_surrogate,
    drop_above,
    geometric_ratios,
    sequence_ratios,
    token_ratios,
    truncate,
)
from slipstream.algorithms.reduce import Metrics, masked_share


def aipo_loss(
    inputs: LossInputs, *, max_ratio: float, level: str, mode: str, eps_low: float, eps_high: float
) -> tuple[Tensor, Metrics]:
    """Policy gradient with one-sided truncated importance weights.

        L = -(1/num_tokens) * sum_t mask_t * sg[w_t] * A_t * policy_t
        w_t = min(r_t, max_ratio), or with mode = "mask" r_t where it is at most max_ratio, else 0
        w_t = 0 where PPO's clip binds: r_t < 1 - eps_low with A_t < 0, or r_t > 1 + eps_high with A_t > 0

    LlamaRL (arXiv:2505.24034), section 6; the normaliser, all sampled tokens of the update, is PRIME-RL's. A token
    above `max_ratio` keeps the gradient max_ratio * A_t * grad policy_t. `level` says whose ratio r_t is: that of the
    "token", exp(policy_t - behaviour_t), of its "sequence", the product over tokens, or their "geometric" mean. PPO's
    clip, off at eps = inf, is the combination that LlamaRL's appendix 10 leaves open; written as a weight, it takes
    the gradient away exactly where PPO's minimum does.
    Identity: max_ratio = inf and behaviour = policy give REINFORCE; max_ratio = inf and PPO's epsilons, PPO's gradient.
    """
    policy, advantages = inputs.need("policy_logprobs"), inputs.need("advantages")
    ratios, of_sequences = _ratios_at(level, inputs)
    is_above = ratios > max_ratio
    surrogate = clipped_surrogate(ratios, advantages, eps_low=eps_low, eps_high=eps_high)
    is_clipped = surrogate.is_low | surrogate.is_high
    limited = drop_above(ratios, max_ratio) if mode == "mask" else truncate(ratios, max_ratio)
    weights = torch.where(is_clipped, 0.0, limited)
    metrics = off_policy_metrics(inputs) | of_sequences | clip_metrics(surrogate, inputs.mask)
    metrics["clipped_frac"] = masked_share(is_above | is_clipped, inputs.mask)
    return -inputs.average(weights * advantages * policy), metrics


def aipo_masked_loss(inputs: LossInputs, *, max_ratio: float) -> tuple[Tensor, Metrics]:
    """PRIME-RL's objective differentiated as printed: a token above `max_ratio` has no gradient.

        L = -(1/num_tokens) * sum_t mask_t * min(exp(policy_t - behaviour_t), max_ratio) * A_t

    Identity: equals `aipo_loss`'s gradient while no ratio exceeds `max_ratio`, and always with mode = "mask".
    """
    ratios = token_ratios(inputs.need("policy_logprobs"), inputs.need("behaviour_logprobs"), inputs.mask)
    loss = -inputs.average(truncate(ratios, max_ratio) * inputs.need("advantages"))
    return loss, off_policy_metrics(inputs) | {"clipped_frac": masked_share(ratios > max_ratio, inputs.mask)}


@torch.no_grad()
def _ratios_at(level: str, inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """Return the ratio that weighs each token, [T]: its own, or its sequence's, with metrics of those."""
    policy, behaviour = inputs.need("policy_logprobs"), inputs.need("behaviour_logprobs")
    if level == "token":
        return token_ratios(policy, behaviour, inputs.mask), {}
    ratios = (sequence_ratios if level == "sequence" else geometric_ratios)(policy, behaviour, *inputs.segments)
    return ratios[inputs.segment_ids], sequence_ratio_metrics(ratios)
