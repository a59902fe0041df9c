"""Batches that every loss can take, and ways to cut, pad and differentiate them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from slipstream.algorithms.losses import LOSSES, Loss, LossInputs, loss_named
from slipstream.algorithms.reduce import metric_values

NUM_CANDIDATES = 4
PER_TOKEN = (
    "policy_logprobs",
    "advantages",
    "behaviour_logprobs",
    "proximal_logprobs",
    "reference_logprobs",
    "teacher_divergences",
    "values",
    "anchor_values",
    "returns",
)
NAMES = sorted(LOSSES)
POLICY_NAMES = [name for name in NAMES if LOSSES[name].kind == "policy"]


def leaf_name(loss: Loss) -> str:
    """What the loss is differentiated with respect to."""
    if "teacher_divergences" in loss.requires:
        return "teacher_divergences"
    return {"value": "values", "reward_model": "scores"}.get(loss.kind, "policy_logprobs")


def sequences_per_atom(loss: Loss) -> int:
    return {"sequence": 1, "pair": 2, "choice": NUM_CANDIDATES}[loss.atom]


def units_of(loss: Loss, inputs: LossInputs) -> int:
    """The number of the loss's units in `inputs`, were they the whole update."""
    num_sequences = int(inputs.segment_ids.max()) + 1
    if loss.unit == "token" and inputs.reduction == "token":
        return int(inputs.mask.sum())
    return num_sequences // sequences_per_atom(loss)


def random_inputs(lengths: Sequence[int], *, seed: int = 0, spread: float = 0.5) -> LossInputs:
    """Sequences of `lengths` in float64 with everything any loss asks for; one advantage per sequence."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)

    def normal(count: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(count, generator=generator, dtype=torch.float64)

    policy = -2.0 * torch.rand(num_tokens, generator=generator, dtype=torch.float64) - 0.01
    values = normal(num_tokens)
    segment_ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return LossInputs(
        policy_logprobs=policy,
        behaviour_logprobs=policy + normal(num_tokens, spread),
        proximal_logprobs=policy + normal(num_tokens, spread / 2),
        reference_logprobs=policy + normal(num_tokens, spread),
        advantages=normal(len(lengths))[segment_ids],
        mask=torch.ones(num_tokens, dtype=torch.bool),
        segment_ids=segment_ids,
        num_units=0,
        values=values,
        anchor_values=values + normal(num_tokens, 0.3),
        returns=normal(num_tokens),
        scores=normal(len(lengths)),
        ratings=normal(len(lengths)),
        labels=torch.randint(0, NUM_CANDIDATES, (len(lengths) // NUM_CANDIDATES,), generator=generator),
        is_desirable=torch.rand(len(lengths), generator=generator) < 0.6,
        reference_kl=torch.tensor(0.3, dtype=torch.float64),
        teacher_divergences=torch.rand(num_tokens, generator=generator, dtype=torch.float64),
        max_tokens=16,
        cutoff=torch.tensor(0.05, dtype=torch.float64),
    )


def sequences(inputs: LossInputs, first: int, last: int) -> LossInputs:
    """Sequences first .. last - 1 alone; `num_units` stays that of the whole."""
    rows = (inputs.segment_ids >= first) & (inputs.segment_ids < last)
    cut = {name: getattr(inputs, name)[rows] for name in (*PER_TOKEN, "mask")}
    return replace(
        inputs,
        **cut,
        segment_ids=inputs.segment_ids[rows] - first,
        scores=inputs.scores[first:last],
        ratings=inputs.ratings[first:last],
        is_desirable=inputs.is_desirable[first:last],
        labels=inputs.labels[first // NUM_CANDIDATES : last // NUM_CANDIDATES],
    )


def padded(inputs: LossInputs, width: int, *, junk: float) -> tuple[LossInputs, Tensor]:
    """Every sequence filled up to `width` tokens by ones that do not count; and where the real ones are now."""
    lengths = torch.bincount(inputs.segment_ids)
    real = (torch.arange(width) < lengths.unsqueeze(1)).flatten()
    wide = {name: torch.full(real.shape, junk, dtype=torch.float64) for name in PER_TOKEN}
    wide["advantages"].fill_(3.0)
    for name, tensor in wide.items():
        tensor[real] = getattr(inputs, name)
    mask = real.clone()
    mask[real] = inputs.mask
    return replace(inputs, **wide, mask=mask, segment_ids=torch.arange(len(lengths)).repeat_interleave(width)), real


def evaluate(name: str, inputs: LossInputs, *, num_units: int | None = None, **params):
    """(loss, gradient with respect to the loss's leaf, metrics as numbers)."""
    loss = loss_named(name, params)
    leaf = getattr(inputs, leaf_name(loss)).clone().requires_grad_()
    units = units_of(loss, inputs) if num_units is None else num_units
    value, metrics = loss(replace(inputs, **{leaf_name(loss): leaf}, num_units=units))
    (grad,) = torch.autograd.grad(value, leaf)
    return value.item(), grad, metric_values(metrics)


def finite_differences(function, point: Tensor, *, step: float = 1e-6) -> Tensor:
    """Central differences of a scalar function of `point`, one coordinate at a time."""
    grad = torch.zeros_like(point)
    for index in range(len(point)):
        offset = torch.zeros_like(point)
        offset[index] = step
        grad[index] = (function(point + offset) - function(point - offset)) / (2 * step)
    return grad
