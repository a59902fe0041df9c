"""RLOO: REINFORCE of whole completions, on leave-one-out advantages."""

from __future__ import annotations

from torch import Tensor

from slipstream.algorithms.losses.spec import LossInputs, off_policy_metrics
from slipstream.algorithms.reduce import Metrics, sum_over_units


def rloo_loss(inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """Policy gradient of completions as single actions.

        L = -(1/num_sequences) * sum_i A_i sum_t policy_it

    Ahmadian et al. (arXiv:2402.14740); the baseline, the mean reward of the group's other completions, is
    the advantages' business. Unbiased only on-policy.
    Identity: the gradient of `copg_loss`.
    """
    objective = inputs.need("advantages") * inputs.need("policy_logprobs")
    return -sum_over_units(objective, inputs.mask, num_units=inputs.num_units), off_policy_metrics(inputs)
