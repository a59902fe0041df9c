"""DPO on a data set of preferences, whose labels may be wrong."""

from __future__ import annotations

from torch import Tensor

from slipstream.algorithms.losses.online_dpo import log_ratios, online_dpo_loss
from slipstream.algorithms.losses.spec import LossInputs
from slipstream.algorithms.reduce import Metrics


def dpo_loss(inputs: LossInputs, *, beta: float, label_smoothing: float) -> tuple[Tensor, Metrics]:
    """Logistic loss of the margin between the two implicit rewards of a pair, some of whose labels are swapped.

        L = -(1/num_pairs) * sum_p [(1 - e) log sigmoid(beta * m_p) + e log sigmoid(-beta * m_p)],   e = label_smoothing
        m_p = log pi/ref(y+) - log pi/ref(y-)

    DPO (arXiv:2305.18290), equation 7, for e = 0; Mitchell, "A note on DPO with noisy preferences" (2023), equation 3,
    for labels of which the share e is wrong. The bracket is log sigmoid(x) - e x, x = beta * m_p.
    Identity: label_smoothing = 0 gives `online_dpo_loss`; swapping all pairs swaps e and 1 - e.
    """
    loss, metrics = online_dpo_loss(inputs, beta=beta)
    preferred, rejected = log_ratios(inputs)
    return loss + label_smoothing * beta * (preferred - rejected).sum() / inputs.num_units, metrics
