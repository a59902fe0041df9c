"""Best of n: supervised fine-tuning on the completion that scored best (RAFT)."""

from __future__ import annotations

from torch import Tensor

from slipstream.algorithms.losses.spec import LossInputs, off_policy_metrics
from slipstream.algorithms.reduce import Metrics, sum_over_units


def best_of_n_loss(inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """Negative log-likelihood of the selected completions; the batch holds no others.

        L = -(1/num_sequences) * sum_i sum_t policy_it

    RAFT (arXiv:2304.06767); Asynchronous RLHF (arXiv:2410.18252), "Best-of-2 SFT". Advantages are
    ignored: the selection is all that the rewards decide.
    Identity: `rloo_loss` where every advantage is 1.
    """
    loss = -sum_over_units(inputs.need("policy_logprobs"), inputs.mask, num_units=inputs.num_units)
    return loss, off_policy_metrics(inputs)
