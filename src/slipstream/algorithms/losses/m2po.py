"""M2PO: an unclipped surrogate without the few tokens that make the second moment of the log-ratios large."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from slipstream.algorithms.losses.spec import LossInputs, clip_metrics, off_policy_metrics
from slipstream.algorithms.ratios import ClippedSurrogate, token_ratios
from slipstream.algorithms.reduce import Metrics, masked_mean


def m2po_loss(inputs: LossInputs, *, threshold: float) -> tuple[Tensor, Metrics]:
    """Surrogate without a clip, and without tokens that lie beyond the update's cutoff.

        L = -(1/num_tokens) * sum_t mask_t * M_t * r_t * A_t,   r_t = exp(policy_t - behaviour_t)
        M_t = 0 where d_t A_t > 0 and d_t^2 > cutoff, else 1,   d_t = proximal_t - behaviour_t

    M2PO (arXiv:2510.01161), equation of its objective and Algorithm 1, threshold 0.04 as in all of its experiments.
    `cutoff` is the whole update's (`m2po_cutoff`); squares up to `threshold` are below every cutoff. The paper has the
    policy before the update in d_t, we the proximal one: the same in steps of one update, else the mask is that of the
    step's start. Only tokens that PPO's clip could hold back, those with d_t A_t > 0, are masked (Algorithm 1's
    "trust-region tokens", by the authors' code); AReaL masks all tokens alike.
    Identity: threshold = inf gives `ppo_loss` without a clip.
    """
    advantages, behaviour = inputs.need("advantages"), inputs.need("behaviour_logprobs")
    squares, is_bounded = _bounded_squares(advantages, behaviour, inputs.need("proximal_logprobs"))
    is_kept = squares <= inputs.need("cutoff").clamp(min=threshold)
    is_masked = is_bounded & ~is_kept
    ratios = token_ratios(inputs.need("policy_logprobs"), behaviour, inputs.mask)
    objective = torch.where(is_masked, 0.0, ratios * advantages)
    surrogate = ClippedSurrogate(objective, is_masked & (advantages < 0), is_masked & (advantages > 0))
    bounded = is_bounded & inputs.mask
    metrics = off_policy_metrics(inputs) | clip_metrics(surrogate, inputs.mask)
    return -inputs.average(objective), metrics | {
        "second_moment": masked_mean(squares, bounded),
        "second_moment_kept": masked_mean(squares, bounded & is_kept),
    }


def m2po_cutoff(
    advantages: Tensor,
    behaviour_logprobs: Tensor,
    proximal_logprobs: Tensor,
    *,
    of_all_ranks: Callable[[Tensor], Tensor],
    threshold: float,
) -> Tensor:
    """Return the largest square that `m2po_loss` keeps: a scalar, the same on every rank; inf where it keeps all.

        while mean(d_t^2 of the kept tokens with d_t A_t > 0) > threshold: drop the largest of them

    M2PO, Algorithm 1. The columns [T] are those of this rank's tokens of one update; `of_all_ranks` joins a tensor [N]
    with the other ranks', and all of them call it. Equal squares are kept or dropped together.
    Identity: the cutoff depends on the tokens of the update alone, not on how ranks or microbatches divide them.
    """
    squares, is_bounded = _bounded_squares(advantages, behaviour_logprobs, proximal_logprobs)
    ascending = of_all_ranks(squares[is_bounded]).sort().values
    means = ascending.double().cumsum(0) / torch.arange(1, len(ascending) + 1, device=ascending.device)
    num_kept = int((means <= threshold).sum())
    if num_kept == len(ascending):
        return squares.new_tensor(math.inf)
    below = ascending[ascending < ascending[num_kept]]
    return below[-1] if len(below) else squares.new_zeros(())


def _bounded_squares(advantages: Tensor, behaviour: Tensor, proximal: Tensor) -> tuple[Tensor, Tensor]:
    """Return d_t^2 and where d_t A_t > 0, [T] both: the tokens that have already moved where they are pushed."""
    moved = proximal - behaviour
    return moved.square(), moved * advantages > 0
