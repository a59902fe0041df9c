"""Supervised fine-tuning on demonstrations."""

from __future__ import annotations

from torch import Tensor

from slipstream.algorithms.losses.spec import LossInputs
from slipstream.algorithms.reduce import Metrics, masked_mean


def sft_loss(inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """Negative log-likelihood of the demonstrated tokens, in nats per token.

        L = -(1/num_tokens) * sum_t mask_t * policy_t

    The exponential of the metric `nll` is the perplexity.
    Identity: `reinforce_loss` where every advantage is 1.
    """
    logprobs = inputs.need("policy_logprobs")
    return -inputs.average(logprobs), {"nll": masked_mean(-logprobs.detach(), inputs.mask)}
