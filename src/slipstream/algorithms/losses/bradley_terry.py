"""Reward models from pairs: which of two completions is preferred."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from slipstream.algorithms.losses.spec import LossInputs, pair_up, preference_metrics
from slipstream.algorithms.reduce import Metrics


def bradley_terry_loss(inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """Negative log-likelihood of the preferences under Bradley and Terry's model.

        L = -(1/num_pairs) * sum_p log sigmoid(score(y+) - score(y-))

    Stiennon et al. (arXiv:2009.01325), section 3.4.
    Identity: equal scores give log 2; `choice_loss` with two candidates and label 0.
    """
    preferred, rejected = pair_up(inputs.need("scores"))
    loss = -F.logsigmoid(preferred - rejected).sum() / inputs.num_units
    return loss, preference_metrics(preferred.detach(), rejected.detach())
