"""SAPO: a smooth gate on the ratio in place of PPO's clip."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.algorithms.losses.spec import LossInputs, off_policy_metrics
from slipstream.algorithms.ratios import token_ratios
from slipstream.algorithms.reduce import Metrics, masked_mean


def sapo_loss(inputs: LossInputs, *, tau_pos: float, tau_neg: float) -> tuple[Tensor, Metrics]:
    """Surrogate whose gradient a sigmoid takes away smoothly as the ratio leaves 1, on both sides.

        L = -(1/num_tokens) * sum_t mask_t * (4 / tau_t) * sigmoid(tau_t * (r_t - 1)) * A_t
        r_t = exp(policy_t - behaviour_t),   tau_t = tau_pos where A_t > 0, else tau_neg

    Soft Adaptive Policy Optimization (Qwen, arXiv:2511.20347); the temperatures 1.0 and 1.05 are the paper's, whose
    normaliser is reduction "sequence". The gradient is that of r_t A_t times the gate 4 s_t (1 - s_t), where s_t is
    the sigmoid: 1 at r_t = 1, near 0 far from it. Metric `gate` is its mean.
    Identity: on-policy, the gradient of `reinforce_loss`; for temperatures near 0, that of PPO without a clip.
    """
    advantages = inputs.need("advantages")
    ratios = token_ratios(inputs.need("policy_logprobs"), inputs.need("behaviour_logprobs"), inputs.mask)
    tau = torch.full_like(ratios, tau_neg).masked_fill(advantages > 0, tau_pos)
    sigmoid = torch.sigmoid(tau * (ratios - 1.0))
    gate = 4.0 * sigmoid * (1.0 - sigmoid)
    metrics = off_policy_metrics(inputs) | {"gate": masked_mean(gate.detach(), inputs.mask)}
    return -inputs.average(4.0 / tau * sigmoid * advantages), metrics
