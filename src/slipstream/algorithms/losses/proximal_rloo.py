"""Proximal RLOO: PPO's clip on the ratio of whole completions."""

from __future__ import annotations

from torch import Tensor

from slipstream.algorithms.losses.spec import LossInputs, clip_metrics, off_policy_metrics, sequence_ratio_metrics
from slipstream.algorithms.ratios import clipped_surrogate, sequence_ratios
from slipstream.algorithms.reduce import Metrics
from slipstream.algorithms.segments import segment_counts, segment_mean


def proximal_rloo_loss(inputs: LossInputs, *, eps: float) -> tuple[Tensor, Metrics]:
    """Clipped surrogate of sequence ratios.

        L = -(1/num_sequences) * sum_i min(r_i A_i, clip(r_i, 1 - eps, 1 + eps) A_i)
        r_i = pi(y_i|x) / mu(y_i|x) = exp(sum_t policy_it - behaviour_it)

    Asynchronous RLHF (arXiv:2410.18252), appendix B. A_i is the mean of the sequence's advantages: their value, where
    all are equal.
    Identity: on-policy, the gradient of `rloo_loss`; on sequences of one token, `grpo_loss`.
    """
    ratios = sequence_ratios(inputs.need("policy_logprobs"), inputs.need("behaviour_logprobs"), *inputs.segments)
    return clipped_sequence_loss(inputs, ratios, eps_low=eps, eps_high=eps)


def clipped_sequence_loss(
    inputs: LossInputs, ratios: Tensor, *, eps_low: float, eps_high: float
) -> tuple[Tensor, Metrics]:
    """PPO's surrogate of one ratio [S] and one advantage per sequence, over the sequences of the update."""
    advantages = segment_mean(inputs.need("advantages"), *inputs.segments)
    surrogate = clipped_surrogate(ratios, advantages, eps_low=eps_low, eps_high=eps_high)
    is_counted = segment_counts(*inputs.segments) > 0
    metrics = off_policy_metrics(inputs) | sequence_ratio_metrics(ratios) | clip_metrics(surrogate, is_counted)
    return -surrogate.objective.sum() / inputs.num_units, metrics
