"""AIPO: policy gradient with one-sided truncated importance weights (LlamaRL), and PRIME-RL's printed objective."""

from __future__ import annotations

from torch import Tensor

from slipstream.algorithms.losses.spec import LossInputs, off_policy_metrics
from slipstream.algorithms.ratios import token_ratios, truncate
from slipstream.algorithms.reduce import Metrics, sum_over_units


def aipo_loss(inputs: LossInputs, *, max_ratio: float) -> tuple[Tensor, Metrics]:
    """Policy gradient with one-sided truncated importance weights.

        L = -(1/num_tokens) * sum_t mask_t * sg[min(exp(policy_t - behaviour_t), max_ratio)] * A_t * policy_t

    LlamaRL (arXiv:2505.24034), section 6; the normaliser, all sampled tokens of the update, is PRIME-RL's. A token
    above `max_ratio` keeps the gradient max_ratio * A_t * grad policy_t.
    Identity: max_ratio = inf and behaviour = policy give REINFORCE.
    """
    ratios = token_ratios(inputs.policy_logprobs.detach(), inputs.anchor("behaviour_logprobs"), inputs.mask)
    weights = truncate(ratios, max_ratio)
    objective = weights * inputs.advantages * inputs.policy_logprobs
    loss = -sum_over_units(objective, inputs.mask, num_units=inputs.num_units)
    return loss, off_policy_metrics(inputs, ratios, clipped=ratios > max_ratio)


def aipo_masked_loss(inputs: LossInputs, *, max_ratio: float) -> tuple[Tensor, Metrics]:
    """PRIME-RL's objective differentiated as printed: a token above `max_ratio` has no gradient.

        L = -(1/num_tokens) * sum_t mask_t * min(exp(policy_t - behaviour_t), max_ratio) * A_t

    Identity: equals `aipo_loss`'s gradient while no ratio exceeds `max_ratio`.
    """
    ratios = token_ratios(inputs.policy_logprobs, inputs.anchor("behaviour_logprobs"), inputs.mask)
    objective = truncate(ratios, max_ratio) * inputs.advantages
    loss = -sum_over_units(objective, inputs.mask, num_units=inputs.num_units)
    return loss, off_policy_metrics(inputs, ratios, clipped=ratios > max_ratio)
