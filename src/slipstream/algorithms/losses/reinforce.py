"""REINFORCE: the policy gradient without any correction for who sampled."""

from __future__ import annotations

from torch import Tensor

from slipstream.algorithms.losses.spec import LossInputs, off_policy_metrics
from slipstream.algorithms.reduce import Metrics


def reinforce_loss(inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """Policy gradient of the sampled tokens as if the policy had sampled them.

        L = -(1/num_tokens) * sum_t mask_t * A_t * policy_t

    Williams (1992); token normalisation by default, others by `reduction`. Unbiased only on-policy.
    Identity: A = 1 gives maximum likelihood, as in supervised fine-tuning.
    """
    loss = -inputs.average(inputs.need("advantages") * inputs.need("policy_logprobs"))
    return loss, off_policy_metrics(inputs)
