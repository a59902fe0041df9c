"""Advantages from rewards: of whole completions by their group, and of tokens by a critic's values.

Legend: `rewards` [R] and `group_ids` int64 [R] (any numbering) describe the R rollouts of a batch; their advantages
are [R]. Packed sequences have T tokens, those of one sequence side by side: `segment_ids` int64 [T] numbers their S
sequences from 0 up. Sums are taken in float64 and returned in the type of what was given. Nothing here is
differentiated: advantages and returns are targets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from slipstream.core.errors import ShapeError

# Of completions, by their group


def group_mean(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """A_i = r_i - mean of its group. LlamaRL. Identity: the advantages of a group sum to 0."""
    return rewards - _group_average(rewards, group_ids)


def group_normalised(rewards: Tensor, group_ids: Tensor, *, std_eps: float, unbiased: bool = False) -> Tensor:
    """A_i = (r_i - mean) / (std + std_eps), with the standard deviation of its group.

    GRPO (DeepSeekMath, section 4.1). `unbiased` divides the squares by G - 1 (TRL, with std_eps = 1e-4) and not by G.
    Identity: a group of equal rewards gets 0, however small `std_eps` is; so does a group of one.
    """
    centred = group_mean(rewards, group_ids)
    variance = _group_average(centred.square(), group_ids)
    if unbiased:
        counts = _group_counts(group_ids)
        variance = variance * (counts / (counts - 1).clamp(min=1.0)).to(variance.dtype)
    return centred / (variance.sqrt() + std_eps)


def leave_one_out(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """A_i = r_i - mean of the others of its group. RLOO (Ahmadian et al., arXiv:2402.14740).

    ShapeError for a group of one. Identity: G / (G - 1) times `group_mean`.
    """
    counts = _group_counts(group_ids)
    if (counts < 2).any():
        raise ShapeError("leave-one-out needs at least two rollouts per group", got="a group of one")
    return group_mean(rewards, group_ids) * (counts / (counts - 1)).to(rewards.dtype)


def optimal(rewards: Tensor, group_ids: Tensor, *, beta: float) -> Tensor:
    """A_i = r_i - V,   V = beta * log(mean of exp(r / beta) over its group).

    The advantage of the best policy that may leave the sampling one at the price of beta times their KL: OAPL
    (arXiv:2602.19362), equation 2 and the text below it; A*-PO (arXiv:2505.20686) has V from a reference policy.
    Identities: exp(A / beta) has mean 1 in each group; equal rewards get 0; beta = inf would be `group_mean`, and
    beta near 0 is r_i less the best of its group.
    """
    _, dense = torch.unique(group_ids, return_inverse=True)
    scaled = rewards.double() / beta
    best = scaled.new_full((len(rewards),), -math.inf).scatter_reduce_(0, dense, scaled, "amax")[dense]
    shifted = scaled - best  # at most 0, so that no exponential overflows
    return (beta * (shifted - _group_average(shifted.exp(), group_ids).log())).to(rewards.dtype)


def greedy_baseline(rewards: Tensor, baselines: Tensor) -> Tensor:
    """A_i = r_i - b_i, with `baselines` [R] the reward of the greedy completion of the same prompt.

    ReMax (Li et al., arXiv:2310.10505). Identity: the greedy completion itself has advantage 0.
    """
    _check_shapes(rewards, baselines)
    return rewards - baselines


# Several rewards at once


def normalise_then_sum(
    parts: Tensor, weights: Tensor, group_ids: Tensor, *, std_eps: float, unbiased: bool = False
) -> Tensor:
    """A_i = sum_k w_k (r_ik - mean_k) / (std_k + std_eps), [R], with mean and deviation of each reward in its group.

    `parts` [R, K] are K rewards of each rollout, `weights` [K]; NaN says that a reward does not apply to a rollout: it
    counts in no mean and adds nothing. No reward drowns the others by its scale. GDPO (arXiv:2601.05242), which also
    whitens the sums over the batch (`whiten_parts`); "normalize_then_sum" in TRL.
    Identity: with one part of weight 1 it is `group_normalised`.
    """
    num_parts = parts.shape[-1] if parts.ndim else 0
    if parts.ndim != 2 or weights.shape != (num_parts,) or group_ids.shape != parts.shape[:1]:
        got = f"parts {tuple(parts.shape)}, weights {tuple(weights.shape)}, group ids {tuple(group_ids.shape)}"
        raise ShapeError("rewards are combined from one column per weight and one row per group id", got=got)
    total = parts.new_zeros(len(parts))
    for column, weight in zip(parts.unbind(dim=1), weights, strict=True):
        applies = ~column.isnan()
        normalised = group_normalised(column[applies], group_ids[applies], std_eps=std_eps, unbiased=unbiased)
        total[applies] += weight * normalised
    return total


# Of tokens, by a critic


def place_scores(
    scores: Tensor,
    kl: Tensor | None,
    segment_ids: Tensor,
    *,
    kl_coef: float = 0.0,
    place: Literal["last", "after_last"] = "last",
    discount: float = 1.0,
    has_slot: Tensor | None = None,
) -> Tensor:
    """Rewards of tokens [T]: the penalty -kl_coef * kl_t on each, and the score of its sequence on the last one.

    `scores` [S], `kl` [T] of any estimator (N uses k1 of policy and reference) or None. The minus is N's code; the
    post prints none. A sequence without tokens here has nowhere to put its score.

    `place` says where the score belongs:
    - "last": on the last token, as the original RLHF code and its reproduction do (N).
    - "after_last": on the step after it. The TL;DR reproduction (Huang et al., arXiv:2403.17031), and TRL's later PPO
      after it, put the score on the first padding token after EOS. Packed sequences end at EOS and have no such slot.
      With a value of 0 there, what GAE carries back from it to the last token is discount * score for
      discount = gamma * lam, so that is placed; a critic's own value of the slot, which both let in, is left out.
      Sequences cut at the length limit had no slot there, either, and keep the whole score: `has_slot` bool [S] is
      False for them (None: all have one).
    Identity: with gamma = lam = 1 both places are the same.
    """
    if kl is not None:
        _check_shapes(kl, segment_ids)
    if len(segment_ids) and int(segment_ids[-1]) >= len(scores):
        raise ShapeError("one score is needed per sequence", got=f"{len(scores)} for segment {int(segment_ids[-1])}")
    if place == "after_last":
        discounted = scores * discount
        scores = discounted if has_slot is None else torch.where(has_slot, discounted, scores)
    at_end = scores[segment_ids]
    rewards = torch.where(_is_last(segment_ids), at_end, 0.0)
    return rewards if kl is None else rewards - kl_coef * kl


def gae(
    rewards: Tensor, values: Tensor, segment_ids: Tensor, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over packed sequences: (advantages, returns), both [T].

        delta_t = r_t + gamma * V_{t+1} - V_t,   A_t = delta_t + gamma * lam * A_{t+1},   returns = A + V

    with V = A = 0 after the last token of each sequence. Schulman et al. (arXiv:1506.02438, equation 16); N, item 30.
    `values` V_t is the critic's at the state before token t. Returns are of these advantages, before any whitening.
    Identity: lam = 0 gives delta; gamma = lam = 1 gives the sum of the rewards to come, minus V_t.
    """
    _check_shapes(rewards, values, segment_ids)
    exact = values.double()
    deltas = rewards.double() + gamma * _next_in_segment(exact, segment_ids) - exact
    advantages = _discounted_sums(deltas, torch.full_like(exact, gamma * lam), segment_ids)
    return advantages.to(values.dtype), (advantages + exact).to(values.dtype)


def vtrace(
    rewards: Tensor,
    values: Tensor,
    ratios: Tensor,
    segment_ids: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    max_rho: float = 1.0,
    max_c: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """V-trace, GAE corrected for staleness: (advantages, returns), both [T].

        rho_t = min(ratio_t, max_rho),   c_t = lam * min(ratio_t, max_c)
        delta_t = rho_t * (r_t + gamma * V_{t+1} - V_t)
        returns_t = v_t,   v_t - V_t = delta_t + gamma * c_t * (v_{t+1} - V_{t+1})
        A_t = r_t + gamma * (lam * v_{t+1} + (1 - lam) * V_{t+1}) - V_t

    with V = v = 0 after the last token of each sequence. IMPALA (Espeholt et al., arXiv:1802.01561, section 4); the
    mixture in A_t is rlax's, the paper has v_{t+1} alone, as here with lam = 1. `ratios` [T] = policy / behaviour of
    each token, without gradient. IMPALA multiplies A_t by rho_t: here the loss does, as `aipo` with
    max_ratio = max_rho, or the ratio would count twice.
    Identity: ratios of 1 and max_rho, max_c >= 1 give `gae`, whatever the lam.
    """
    _check_shapes(rewards, values, ratios, segment_ids)
    exact, weights = values.double(), ratios.double()
    next_values = _next_in_segment(exact, segment_ids)
    errors = rewards.double() + gamma * next_values - exact
    factors = gamma * lam * weights.clamp(max=max_c)
    corrections = _discounted_sums(weights.clamp(max=max_rho) * errors, factors, segment_ids)
    advantages = errors + gamma * lam * _next_in_segment(corrections, segment_ids)
    return advantages.to(values.dtype), (exact + corrections).to(values.dtype)


def whiten_parts(
    values: Tensor,
    part_ids: Tensor,
    *,
    num_parts: int = 1,
    shift_mean: bool = True,
    unbiased: bool = False,
    eps: float = 1e-8,
    over_ranks: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> Tensor:
    """(x - mean) / sqrt(var + eps) within each part of `values` [T], plus the mean again unless `shift_mean`.

    `part_ids` int64 [T] below `num_parts` names the part of each value. N, item 29: rewards keep their mean
    (shift_mean = False), advantages lose it. `unbiased` divides by n - 1 (TRL, and the reproductions that use
    torch.var); the original code has the population variance, and whitens what lies on each of its ranks alone. Here a
    part may lie on any ranks: `over_ranks` adds up a tensor over those that hold the values, and all of them call it
    twice.
    Identities: a part has variance var / (var + eps) and mean 0, or the mean it had; values on several ranks give what
    one rank with all of them gives.
    """
    _check_shapes(values, part_ids)
    members = [part_ids == part for part in range(num_parts)]
    parts = [values[chosen].double() for chosen in members]
    counts = torch.tensor([len(part) for part in parts], dtype=torch.float64, device=values.device)
    counts, sums = over_ranks(torch.stack([counts, torch.stack([part.sum() for part in parts])]))
    means = sums / counts.clamp(min=1.0)
    centred = [part - mean for part, mean in zip(parts, means, strict=True)]
    variances = over_ranks(torch.stack([part.square().sum() for part in centred]))
    scales = torch.rsqrt(variances / (counts - int(unbiased)).clamp(min=1.0) + eps)
    whitened = torch.empty_like(values)
    for chosen, part, mean, scale in zip(members, centred, means, scales, strict=True):
        whitened[chosen] = (part * scale if shift_mean else part * scale + mean).to(values.dtype)
    return whitened


def _check_shapes(*tensors: Tensor) -> None:
    if len({tensor.shape for tensor in tensors}) > 1:
        raise ShapeError("these belong together entry by entry", got=" and ".join(str(tuple(t.shape)) for t in tensors))


def _group_counts(group_ids: Tensor) -> Tensor:
    """float64 [R]: the size of the group of each entry."""
    _, dense = torch.unique(group_ids, return_inverse=True)
    return torch.bincount(dense).double()[dense]


def _group_average(values: Tensor, group_ids: Tensor) -> Tensor:
    """[R]: the mean of `values` over the group of each entry, exact for a group of equal values."""
    if values.shape != group_ids.shape or values.ndim != 1:
        raise ShapeError("one group id is needed per reward", got=f"{tuple(values.shape)} and {tuple(group_ids.shape)}")
    _, dense = torch.unique(group_ids, return_inverse=True)
    num_groups = int(dense.max()) + 1 if len(dense) else 0
    counts = torch.zeros(num_groups, dtype=torch.float64, device=values.device)
    counts.index_add_(0, dense, torch.ones_like(values, dtype=torch.float64))
    # Shifted by the first value of each group, so that equal rewards give their own value and not one rounded off it.
    first = torch.full((num_groups,), len(values), dtype=torch.int64, device=values.device)
    first.scatter_reduce_(0, dense, torch.arange(len(values), device=values.device), "amin")
    origin = values[first]
    sums = torch.zeros(num_groups, dtype=torch.float64, device=values.device)
    sums.index_add_(0, dense, (values - origin[dense]).double())
    return (origin.double() + sums / counts).to(values.dtype)[dense]


def _is_last(segment_ids: Tensor) -> Tensor:
    """bool [T]: True on the last token of each sequence."""
    is_last = torch.ones_like(segment_ids, dtype=torch.bool)
    is_last[:-1] = segment_ids[1:] != segment_ids[:-1]
    return is_last


def _next_in_segment(values: Tensor, segment_ids: Tensor) -> Tensor:
    """[T]: the value of the next token of the same sequence, 0 at its last one."""
    return torch.where(_is_last(segment_ids), 0.0, values.roll(-1))


def _discounted_sums(deltas: Tensor, factors: Tensor, segment_ids: Tensor) -> Tensor:
    """y_t = delta_t + factor_t * y_{t+1} within each sequence, y = 0 after its end; all [T], float64.

    Doubling: after round n, y_t holds the terms of 2^n tokens from t on, and `factors` what the next ones count. No
    loop over tokens; and what a sequence gets does not depend on what it is packed with, bit for bit.
    """
    sums = deltas
    factors = torch.where(_is_last(segment_ids), 0.0, factors)
    reach = 1
    while reach < len(sums) and factors.any():
        goes_on = factors[:-reach] != 0.0
        step = torch.where(goes_on, factors[:-reach] * sums[reach:], 0.0)
        sums = torch.cat([sums[:-reach] + step, sums[-reach:]])
        onward = torch.where(goes_on, factors[:-reach] * factors[reach:], 0.0)
        factors = torch.cat([onward, torch.zeros_like(factors[-reach:])])
        reach *= 2
    return sums
