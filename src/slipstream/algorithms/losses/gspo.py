"""GSPO: PPO's clip on one ratio per sequence, the geometric mean of its tokens'."""

from __future__ import annotations

from torch import Tensor

from slipstream.algorithms.losses.proximal_rloo import clipped_sequence_loss
from slipstream.algorithms.losses.spec import LossInputs
from slipstream.algorithms.ratios import geometric_ratios
from slipstream.algorithms.reduce import Metrics


def gspo_loss(inputs: LossInputs, *, eps_low: float, eps_high: float) -> tuple[Tensor, Metrics]:
    """Clipped surrogate of length-normalised sequence ratios.

        L = -(1/num_sequences) * sum_i min(s_i A_i, clip(s_i, 1 - eps_low, 1 + eps_high) A_i)
        s_i = (pi(y_i|x) / mu(y_i|x))^(1/|y_i|) = exp(mean_t policy_it - behaviour_it)

    GSPO (arXiv:2507.18071), equations 5 and 7; its epsilons, 3e-4 and 4e-4 (section 5.1), are so small because a mean
    over tokens hardly moves. A_i is the mean of the sequence's advantages: their value, where all are equal.
    Identity: on sequences of one token, `grpo_loss`; its gradient is that of `aipo_loss` with level = "geometric",
    the same epsilons, max_ratio = inf and reduction "sequence".
    """
    ratios = geometric_ratios(inputs.need("policy_logprobs"), inputs.need("behaviour_logprobs"), *inputs.segments)
    return clipped_sequence_loss(inputs, ratios, eps_low=eps_low, eps_high=eps_high)
