"""mu-GRPO: GRPO with a wide clip, without the suffixes of bad completions behind a token whose ratio left a band."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.algorithms.losses.spec import LossInputs, clip_metrics, off_policy_metrics
from slipstream.algorithms.ratios import clipped_surrogate, token_ratios
from slipstream.algorithms.reduce import Metrics, masked_share
from slipstream.algorithms.segments import sum_before


def mu_grpo_loss(
    inputs: LossInputs, *, eps_low: float, eps_high: float, veto_low: float, veto_high: float
) -> tuple[Tensor, Metrics]:
    """Clipped surrogate without the tokens of negative advantage that follow a token outside of a band of ratios.

        L = -(1/num_tokens) * sum_t mask_t * V_t * min(r_t A_t, clip(r_t, 1 - eps_low, 1 + eps_high) A_t)
        V_t = 0 where A_t < 0 and some s < t of the same completion has r_s < veto_low or r_s > veto_high, else 1
        r_t = exp(policy_t - behaviour_t)

    mu-GRPO (arXiv:2605.17570), by secondhand descriptions: a relaxed clip, and no updates of the suffix behind a
    trigger in responses of negative advantage, whose stale prefix the policy hardly writes any more. The paper's
    equations could not be read, and the descriptions disagree on the side of the trigger. Both bounds, that either of
    them triggers, and the width of the clip are therefore our choice. The trigger itself is trained on; tokens that
    are left out count in `num_tokens`. Metric `vetoed_frac` is their share.
    Identity: veto_low = 0 and veto_high = inf give `grpo_loss`; so does policy = behaviour.
    """
    advantages, mask = inputs.need("advantages"), inputs.mask
    ratios = token_ratios(inputs.need("policy_logprobs"), inputs.need("behaviour_logprobs"), mask)
    surrogate = clipped_surrogate(ratios, advantages, eps_low=eps_low, eps_high=eps_high)
    is_trigger = (ratios < veto_low) | (ratios > veto_high)
    is_vetoed = (advantages < 0) & (sum_before(is_trigger.double(), mask, inputs.segment_ids) > 0)
    metrics = off_policy_metrics(inputs) | clip_metrics(surrogate, mask)
    metrics["vetoed_frac"] = masked_share(is_vetoed, mask)
    return -inputs.average(torch.where(is_vetoed, 0.0, surrogate.objective)), metrics
