"""CoPG as Asynchronous RLHF compares it: the log-ratio times the advantage."""

from __future__ import annotations

from torch import Tensor

from slipstream.algorithms.losses.spec import LossInputs, off_policy_metrics
from slipstream.algorithms.reduce import Metrics, sum_over_units


def copg_loss(inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """Policy gradient of completions, with a loss that is 0 on-policy.

        L = -(1/num_sequences) * sum_i A_i log(pi(y_i|x) / mu(y_i|x))

    Flet-Berliac et al. (arXiv:2406.19185) as restated in Asynchronous RLHF (arXiv:2410.18252), appendix B, whose
    point is that the anchor drops out of the gradient: nothing is corrected.
    Identity: the gradient of `rloo_loss`.
    """
    log_ratios = inputs.need("policy_logprobs") - inputs.need("behaviour_logprobs")
    objective = inputs.need("advantages") * log_ratios
    return -sum_over_units(objective, inputs.mask, num_units=inputs.num_units), off_policy_metrics(inputs)
