"""SimPO: a loss on pairs of completions that needs no reference policy."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from slipstream.algorithms.losses.spec import LossInputs, pair_up, preference_metrics
from slipstream.algorithms.reduce import Metrics
from slipstream.algorithms.segments import segment_mean


def simpo_loss(inputs: LossInputs, *, beta: float, gamma: float) -> tuple[Tensor, Metrics]:
    """Logistic loss of the margin between the mean logprobs of a pair, less the margin that it is to have.

        L = -(1/num_pairs) * sum_p log sigmoid(beta * (mean_t log pi(y+_t) - mean_t log pi(y-_t)) - gamma)

    SimPO (arXiv:2405.14734), equation 6.
    Identity: on pairs of equal lengths n, `dpo_loss` with beta / n, where ref favours tokens of y+ by gamma / beta.
    """
    means = segment_mean(inputs.need("policy_logprobs"), *inputs.segments)
    preferred, rejected = pair_up(beta * means)
    loss = -F.logsigmoid(preferred - rejected - gamma).sum() / inputs.num_units
    return loss, preference_metrics(preferred.detach(), rejected.detach())
