"""Log-probabilities and entropies straight from final states: the head's logits exist for some rows at a time.

They are computed once more in the backward pass, from which the normalisers of the forward pass spare it a softmax.
On CUDA kernels of `head_kernels.py` read them once each way, but for the gradient of kept sets.
Products are in the precision of their operands and come out in float32: in bfloat16 nothing is cast to float32 first.

Of tensor-parallel ranks each computes the logits of its own rows of the head. Forward, a maximum, then sums of a few
numbers per row are made over ranks; backward, the gradient of the states is: no rank ever has another's logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from slipstream.models.device import takes_kernels
from slipstream.models.linear import linear
from slipstream.models.transformer import OneRank, Ranks


def wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [N, K] times weight [M, K] transposed, in float32 [N, M] from operands of one type; no gradient passes."""
    if not x.numel():  # a microbatch without targets: oneDNN has no sum over no rows
        return x.new_zeros(len(x), len(weight), dtype=torch.float32)
    if x.dtype == torch.float32 or x.is_cpu:
        return linear(x.float(), weight.float())
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


class _HeadLogprobs(torch.autograd.Function):
    """z = h W^T / T,   logp_t = z_{y_t} - log sum_{j in S_t} exp z_j,   H_t = l_t - sum_j p_j z_j,   l = logsumexp z

        dz_j = g_t ([j = y_t] - [j in S_t] exp(z_j - l(S_t))) - e_t p_j (z_j - l_t + H_t)

    S_t is the whole vocabulary without `kept`; g and e are the gradients of logp and H. dh = dz W / T, dW = dz^T h / T,
    in products of W's type. Over ranks: the maximum of z, the sums over j, and dh; z_j and dW belong to one rank.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        kept: Tensor | None,
        temperature: float,
        at_once: int,
        ranks: Ranks,
    ) -> tuple[Tensor, Tensor]:
        ctx.temperature, ctx.at_once, ctx.ranks = temperature, at_once, ranks
        found: list[tuple[Tensor, ...]] = []
        for rows, chosen, sets in _chunks(at_once, hidden, targets, kept):
            scaled = _scaled(rows, weight, temperature)
            top, of_target, *sums = _statistics(scaled, *_own(chosen, len(weight), ranks.first_row)).unbind()
            of_sets = [] if sets is None else [_of_kept(scaled, sets, ranks.first_row)]
            largest = ranks.max(torch.stack([top, *(values.amax(-1) for values in of_sets)])).unbind()
            shrink = (top - largest[0]).exp_()
            masses = [(values - largest[1].unsqueeze(-1)).exp_().sum(-1) for values in of_sets]
            parts = torch.stack([of_target, *(one * shrink for one in sums), *masses])
            of_target, weighed, *totals = ranks.sum(parts).unbind()
            normalisers = [most + total.log() for most, total in zip(largest, totals, strict=True)]
            entropy = normalisers[0] - weighed / totals[0]
            found.append((of_target - normalisers[-1], entropy, torch.stack(normalisers, 1)))
        logprobs, entropies, of_all = map(torch.cat, zip(*found, strict=True))
        ctx.save_for_backward(hidden, weight, targets, kept, of_all, entropies)
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, *others = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        of_hidden: list[Tensor] = []
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        grads = tuple(None if grad is None else grad / ctx.temperature for grad in grads)
        for rows, *own in _chunks(ctx.at_once, hidden, *others, *grads):
            scaled = _scaled(rows, weight, ctx.temperature)
            grad = _gradient(scaled, *own, first_row=ctx.ranks.first_row, dtype=weight.dtype)
            if needs_hidden:
                of_hidden.append(ctx.ranks.sum(wide_product(grad, weight.t())).to(hidden.dtype))
            if of_weight is not None:
                of_weight += wide_product(grad.t(), rows.t())
        given = torch.cat(of_hidden) if needs_hidden else None
        return given, None if of_weight is None else of_weight.to(weight.dtype), *[None] * 5


def _chunks(at_once: int, first: Tensor, *others: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Yield so many rows of each tensor, None for None."""
    parts = torch.split(first, at_once)
    none = [None] * len(parts)
    return zip(parts, *(none if other is None else torch.split(other, at_once) for other in others), strict=True)


def _scaled(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits = wide_product(hidden, weight)
    return logits if temperature == 1.0 else logits.div_(temperature)


def _statistics(scaled: Tensor, place: Tensor, is_own: Tensor) -> Tensor:
    """Return float32 [4, N] of this rank's logits: max z, z of the target or 0, sum exp(z - max z) z, and of 1."""
    if takes_kernels(scaled):
        from slipstream.models.head_kernels import statistics

        return statistics(scaled, place.where(is_own, -1))
    top = scaled.amax(-1)
    mass = (scaled - top.unsqueeze(-1)).exp_()
    of_target = scaled.gather(1, place.unsqueeze(1)).squeeze(1).where(is_own, 0.0)
    return torch.stack([top, of_target, torch.linalg.vecdot(mass, scaled), mass.sum(-1)])


def _own(ids: Tensor, num_rows: int, first_row: int) -> tuple[Tensor, Tensor]:
    """Return the places of token `ids` among this rank's rows of the head, 0 for others, and whether they have one."""
    places = ids - first_row
    is_own = (ids >= 0) & (places >= 0) & (places < num_rows)
    return places.where(is_own, 0), is_own


def _of_kept(scaled: Tensor, kept: Tensor, first_row: int) -> Tensor:
    """Return the logits of the tokens `kept` [N, K] of each row, -inf for those of other ranks, or where that is -1."""
    places, is_own = _own(kept, scaled.shape[1], first_row)
    return scaled.gather(1, places).masked_fill_(~is_own, -torch.inf)


def _gradient(
    scaled: Tensor,
    targets: Tensor,
    kept: Tensor | None,
    normalisers: Tensor,
    entropy: Tensor,
    g: Tensor | None,
    e: Tensor | None,
    *,
    first_row: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return dz of `_HeadLogprobs` in `dtype`, in the memory of `scaled` where that is enough.

    `normalisers` [N, 1] are of the vocabulary, [N, 2] of the kept sets, too.
    """
    if kept is None and takes_kernels(scaled):
        from slipstream.models.head_kernels import gradient

        place, is_own = _own(targets, scaled.shape[1], first_row)
        return gradient(scaled, place.where(is_own, -1), normalisers[:, 0], entropy, g, e, dtype)
    normaliser, *of_sets = (column.unsqueeze(1) for column in normalisers.unbind(1))
    in_kept = None if kept is None else (_of_kept(scaled, kept, first_row) - of_sets[0]).exp_()
    logprobs = scaled.sub_(normaliser)
    from_entropy = None
    if e is not None:
        from_entropy = (logprobs + entropy.unsqueeze(1)).mul_(logprobs.exp()).mul_(-e.unsqueeze(1))
    if g is None:
        return (logprobs.zero_() if from_entropy is None else from_entropy).to(dtype)
    each, width = g.unsqueeze(1), scaled.shape[1]
    if kept is None or in_kept is None:
        grad = logprobs.exp_().mul_(-each)
    else:
        grad = logprobs.zero_().scatter_add_(1, _own(kept, width, first_row)[0], -each * in_kept)
    place, is_own = _own(targets.unsqueeze(1), width, first_row)
    grad.scatter_add_(1, place, each.where(is_own, 0.0))
    return (grad if from_entropy is None else grad.add_(from_entropy)).to(dtype)


def head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    kept: Tensor | None = None,
    *,
    temperature: float = 1.0,
    at_once: int,
    ranks: Ranks = OneRank(),
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each target and the entropy of its distribution, float32 [N], differentiable.

    `hidden` [N, K] and `weight` [V, K] of one type, `targets` int64 [N], `kept` int64 [N, S] as of
    `algorithms.logprobs.kept_token_logprobs`; logits of `at_once` rows are held at a time. Nats. The gradient of logits
    is rounded to the type of `weight` before its two products. With `ranks` all of them call it with the same tensors
    but `weight`, their own rows; they get the same results and gradients of `hidden`, to the bit.
    Identity: equals `token_logprobs_and_entropy` (with `kept`: `kept_token_logprobs`) of `hidden weight^T`.
    """
    result: tuple[Tensor, Tensor] = _HeadLogprobs.apply(hidden, weight, targets, kept, temperature, at_once, ranks)  # type: ignore[no-untyped-call]
    return result
