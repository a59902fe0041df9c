"""Online DPO and IPO: a loss on pairs of completions that were ranked as they were sampled."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from slipstream.algorithms.losses.spec import LossInputs, off_policy_metrics, pair_up, preference_metrics
from slipstream.algorithms.reduce import Metrics
from slipstream.algorithms.segments import segment_sum


def online_dpo_loss(inputs: LossInputs, *, beta: float) -> tuple[Tensor, Metrics]:
    """Logistic loss of the margin between the two implicit rewards of a pair.

        L = -(1/num_pairs) * sum_p log sigmoid(beta * m_p)
        m_p = log pi(y+)/ref(y+) - log pi(y-)/ref(y-)

    DPO (arXiv:2305.18290), equation 7, on pairs sampled by the policy: Guo et al. (arXiv:2402.04792); Asynchronous
    RLHF (arXiv:2410.18252), section 3.3.
    Identity: policy = reference gives log 2 and the gradient -(beta/2) (grad log pi(y+) - grad log pi(y-)).
    """
    preferred, rejected = log_ratios(inputs)
    loss = -F.logsigmoid(beta * (preferred - rejected)).sum() / inputs.num_units
    return loss, preference_metrics(beta * preferred, beta * rejected) | off_policy_metrics(inputs)


def online_ipo_loss(inputs: LossInputs, *, beta: float) -> tuple[Tensor, Metrics]:
    """Squared distance of the margin from a fixed one.

        L = (1/num_pairs) * sum_p (m_p - 1/(2 beta))^2,   m_p as in `online_dpo_loss`

    IPO (arXiv:2310.12036), equation 17, with log-ratios summed over tokens as printed and as in Asynchronous RLHF's
    code; TRL's offline DPO trainer divides each by its length first.
    Identity: 0 where every margin is 1/(2 beta).
    """
    preferred, rejected = log_ratios(inputs)
    loss = (preferred - rejected - 1.0 / (2.0 * beta)).square().sum() / inputs.num_units
    return loss, preference_metrics(beta * preferred, beta * rejected) | off_policy_metrics(inputs)


def log_ratios(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Return log pi/ref of the preferred and the rejected completion of each pair, [P] each."""
    differences = inputs.need("policy_logprobs") - inputs.need("reference_logprobs")
    return pair_up(segment_sum(differences, *inputs.segments))
