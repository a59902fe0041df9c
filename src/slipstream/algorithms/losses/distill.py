"""Learning from a teacher on the policy's own samples: on-policy distillation."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.algorithms.losses.spec import LossInputs, off_policy_metrics
from slipstream.algorithms.ratios import MAX_LOG_RATIO, truncate
from slipstream.algorithms.reduce import Metrics, masked_mean, masked_share
from slipstream.algorithms.segments import sum_before


def distill_loss(inputs: LossInputs, *, weight: str, max_ratio: float) -> tuple[Tensor, Metrics]:
    """Divergence from the teacher at the states of the sampled tokens, in nats per token.

        L = (1/num_tokens) * sum_t mask_t * sg[w_t] * D_t
        w_t = 1, or with weight = "prefix" min(prod_{u < t} exp(policy_u - behaviour_u), max_ratio), u in t's completion

    GKD (arXiv:2306.13649), equation 3, with all data from the policy. D_t is `teacher_divergences`, which
    `algorithms/distillation.py` defines: a sum over the vocabulary, under the present weights. No action is sampled in
    it, so it needs no ratio of an action: E_behaviour[r_t D_t | state] = D_t. Only the states may be stale. "prefix"
    weighs each by the probability that the policy, not the behaviour policy, gets there; no gradient goes through it.
    Identity: on-policy both weights are 1; with max_ratio = inf, the expectation is that over the policy's own states.
    """
    values, metrics = weighed_divergences(inputs, weight=weight, max_ratio=max_ratio)
    return inputs.average(values), off_policy_metrics(inputs) | metrics


def weighed_divergences(inputs: LossInputs, *, weight: str, max_ratio: float) -> tuple[Tensor, Metrics]:
    """Return w_t D_t of `distill_loss`, [T], differentiable, for any reduction; and their metrics."""
    divergences = inputs.need("teacher_divergences")
    metrics: Metrics = {"teacher_divergence": masked_mean(divergences.detach(), inputs.mask)}
    if weight == "none":
        return divergences, metrics
    with torch.no_grad():
        log_ratios = inputs.need("policy_logprobs") - inputs.need("behaviour_logprobs")
        reached = sum_before(log_ratios, inputs.mask, inputs.segment_ids).clamp(max=MAX_LOG_RATIO).exp()
    metrics["clipped_frac"] = masked_share(reached > max_ratio, inputs.mask)
    metrics["teacher_weight"] = masked_mean(weights := truncate(reached, max_ratio).to(divergences.dtype), inputs.mask)
    return weights * divergences, metrics
