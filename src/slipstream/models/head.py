"""Log-probabilities and entropies straight from final states: the head's logits exist for some rows at a time.

They are computed once more in the backward pass, from which the normalisers of the forward pass spare it a softmax.
Products are in the precision of their operands and come out in float32: in bfloat16 nothing is cast to float32 first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from slipstream.models.linear import linear


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
    in products of W's type.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, kept: Tensor | None, temperature: float, at_once: int
    ) -> tuple[Tensor, Tensor]:
        ctx.temperature, ctx.at_once = temperature, at_once
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for rows, chosen, sets in _chunks(at_once, hidden, targets, kept):
            scaled = _scaled(rows, weight, temperature)
            largest = scaled.amax(-1, keepdim=True)
            masses = (scaled - largest).exp_()
            total = masses.sum(-1)
            normaliser = largest.squeeze(-1) + total.log()
            entropy = normaliser - torch.linalg.vecdot(masses, scaled) / total
            whole = normaliser if sets is None else _of_kept(scaled, sets).logsumexp(1)
            found.append((scaled.gather(1, chosen.unsqueeze(1)).squeeze(1) - whole, entropy, normaliser))
        logprobs, entropies, normalisers = map(torch.cat, zip(*found, strict=True))
        ctx.save_for_backward(hidden, weight, targets, kept, normalisers, entropies)
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
            grad = _gradient(_scaled(rows, weight, ctx.temperature), *own).to(weight.dtype)
            if needs_hidden:
                of_hidden.append(wide_product(grad, weight.t()).to(hidden.dtype))
            if of_weight is not None:
                of_weight += wide_product(grad.t(), rows.t())
        given = torch.cat(of_hidden) if needs_hidden else None
        return given, None if of_weight is None else of_weight.to(weight.dtype), None, None, None, None


def _chunks(at_once: int, first: Tensor, *others: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Yield so many rows of each tensor, None for None."""
    parts = torch.split(first, at_once)
    none = [None] * len(parts)
    return zip(parts, *(none if other is None else torch.split(other, at_once) for other in others), strict=True)


def _scaled(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits = wide_product(hidden, weight)
    return logits if temperature == 1.0 else logits.div_(temperature)


def _of_kept(scaled: Tensor, kept: Tensor) -> Tensor:
    """Return the columns `kept` [N, K] of each row, -inf where that is -1."""
    return scaled.gather(1, kept.clamp(min=0)).masked_fill_(kept < 0, -torch.inf)


def _gradient(
    scaled: Tensor,
    targets: Tensor,
    kept: Tensor | None,
    normaliser: Tensor,
    entropy: Tensor,
    g: Tensor | None,
    e: Tensor | None,
) -> Tensor:
    """Return dz of `_HeadLogprobs`, in the memory of `scaled` where that is enough."""
    in_kept = None if kept is None else _of_kept(scaled, kept).softmax(1)
    logprobs = scaled.sub_(normaliser.unsqueeze(1))
    from_entropy = None
    if e is not None:
        from_entropy = (logprobs + entropy.unsqueeze(1)).mul_(logprobs.exp()).mul_(-e.unsqueeze(1))
    if g is None:
        return logprobs.zero_() if from_entropy is None else from_entropy
    each = g.unsqueeze(1)
    if kept is None or in_kept is None:
        grad = logprobs.exp_().mul_(-each)
    else:
        grad = logprobs.zero_().scatter_add_(1, kept.clamp(min=0), -each * in_kept)
    grad.scatter_add_(1, targets.unsqueeze(1), each)
    return grad if from_entropy is None else grad.add_(from_entropy)


def head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    kept: Tensor | None = None,
    *,
    temperature: float = 1.0,
    at_once: int,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each target and the entropy of its distribution, float32 [N], differentiable.

    `hidden` [N, K] and `weight` [V, K] of one type, `targets` int64 [N], `kept` int64 [N, S] as of
    `algorithms.logprobs.kept_token_logprobs`; logits of `at_once` rows are held at a time. Nats. The gradient of logits
    is rounded to the type of `weight` before its two products.
    Identity: equals `token_logprobs_and_entropy` (with `kept`: `kept_token_logprobs`) of `hidden weight^T`.
    """
    result: tuple[Tensor, Tensor] = _HeadLogprobs.apply(hidden, weight, targets, kept, temperature, at_once)  # type: ignore[no-untyped-call]
    return result
