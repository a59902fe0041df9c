"""OAPL: the log-ratio of each completion regressed onto its optimal advantage, without importance weights."""

from __future__ import annotations

from torch import Tensor

from slipstream.algorithms.losses.spec import LossInputs, off_policy_metrics
from slipstream.algorithms.reduce import Metrics, masked_mean
from slipstream.algorithms.segments import segment_counts, segment_mean, segment_sum


def oapl_loss(inputs: LossInputs, *, beta: float) -> tuple[Tensor, Metrics]:
    """Squared distance of the scaled log-ratio of each completion from its advantage.

        L = (1/num_sequences) * sum_i (beta * log(pi(y_i|x) / mu(y_i|x)) - A_i)^2

    OAPL (arXiv:2602.19362), equation 3, with A_i = r_i - V(x) of loss.advantages = "optimal". mu is the policy that
    sampled, however old: it is what the policy is not to leave (KL(pi, mu), weight beta), and no ratio corrects for it.
    The paper's V has a temperature of its own, beta_1 = loss.optimal_beta = 1; this `beta` is its beta_2 = 1e-3, as
    two public re-implementations have both. Metric `regression_error` is the mean square.
    Identity: 0 where pi = mu exp(A / beta); on-policy, 2 beta times the gradient of `rloo_loss`.
    """
    log_ratios = inputs.need("policy_logprobs") - inputs.need("behaviour_logprobs")
    advantages = segment_mean(inputs.need("advantages"), *inputs.segments)
    errors = (beta * segment_sum(log_ratios, *inputs.segments) - advantages).square()
    is_counted = segment_counts(*inputs.segments) > 0
    metrics = off_policy_metrics(inputs) | {"regression_error": masked_mean(errors.detach(), is_counted)}
    return errors.sum() / inputs.num_units, metrics
