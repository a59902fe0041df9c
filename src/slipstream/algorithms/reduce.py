"""The one place where losses are normalised: sums divided by one global count of the loss's unit.

A sum over this microbatch divided by the count over all microbatches and ranks: gradients of microbatches then add up
to the gradient of the whole, whatever the packing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import msgspec
import torch
from torch import Tensor

from slipstream.algorithms.ratios import effective_share
from slipstream.algorithms.segments import segment_mean
from slipstream.core.errors import ConfigError

Reduction = Literal["token", "sequence", "constant"]


def sum_over_units(values: Tensor, mask: Tensor, *, num_units: int) -> Tensor:
    """(1 / num_units) * sum of `values` [T] where `mask` [T] is True; a scalar.

    `num_units` counts tokens or sequences over the whole optimizer update, not over this microbatch.
    """
    return torch.where(mask, values, 0.0).sum() / num_units


def average(
    values: Tensor,
    mask: Tensor,
    segment_ids: Tensor,
    *,
    reduction: Reduction,
    num_units: int,
    max_tokens: int = 0,
    lengths: Tensor | None = None,
) -> Tensor:
    """Token values [T] of one microbatch as its part of the update's average, a scalar; S sequences, n_i tokens each.

        token:     sum_t v_t / num_units                         num_units = tokens     (DAPO, arXiv:2503.14476)
        sequence:  sum_i (1/n_i) sum_t v_it / num_units          num_units = sequences  (GRPO, arXiv:2402.03300)
        constant:  sum_t v_t / (num_units * max_tokens)          num_units = sequences  (Dr. GRPO, arXiv:2503.20783)

    Only tokens where `mask` [T] count. `num_units` is of the whole optimizer update, so parts add up; every sequence
    lies in one microbatch. ConfigError when "constant" has no `max_tokens`.
    Identity: all three agree, the last with `max_tokens` = n, where every sequence has n tokens.
    """
    if reduction == "sequence":
        return segment_mean(values, mask, segment_ids, lengths).sum() / num_units
    if reduction == "token":
        return sum_over_units(values, mask, num_units=num_units)
    if max_tokens < 1:
        raise ConfigError(
            "reduction 'constant' divides by a number of tokens", got=f"max_tokens = {max_tokens}", allowed="1 or more"
        )
    return sum_over_units(values, mask, num_units=num_units * max_tokens)


@dataclass(frozen=True)
class Mean:
    """A mean in parts: `total` over `count` things, scalars; parts add up over microbatches and ranks."""

    total: Tensor
    count: Tensor

    def merge(self, other: Mean | Max) -> Mean:
        if not isinstance(other, Mean):
            raise TypeError("a metric is a mean in one microbatch and a maximum in another")
        return Mean(self.total + other.total, self.count + other.count)

    def value(self) -> float:
        """The mean, or 0 of nothing."""
        count = float(self.count)
        return float(self.total) / count if count else 0.0


@dataclass(frozen=True)
class Max:
    """A maximum in parts, of values >= 0."""

    largest: Tensor

    def merge(self, other: Mean | Max) -> Max:
        if not isinstance(other, Max):
            raise TypeError("a metric is a maximum in one microbatch and a mean in another")
        return Max(torch.maximum(self.largest, other.largest))

    def value(self) -> float:
        return float(self.largest)


Metrics = dict[str, Mean | Max]


def masked_mean(values: Tensor, mask: Tensor) -> Mean:
    """Return the parts of the mean of `values` [T] where `mask` [T]; summed in float64."""
    return Mean(torch.where(mask, values, 0.0).sum(dtype=torch.float64), mask.sum())


def masked_share(flags: Tensor, mask: Tensor) -> Mean:
    """Return the parts of the share of True in bool `flags` [N] where `mask` [N]."""
    return Mean((flags & mask).sum(), mask.sum())


def masked_max(values: Tensor, mask: Tensor) -> Max:
    """Return the largest of `values` [T] >= 0 where `mask` [T]; 0 of nothing."""
    return Max(torch.where(mask, values, 0.0).amax() if values.numel() else values.new_zeros(()))


def merge_metrics(left: Mapping[str, Mean | Max], right: Mapping[str, Mean | Max]) -> Metrics:
    """Add up two microbatches' metrics, key by key."""
    shared = {name: left[name].merge(right[name]) for name in left if name in right}
    return {**left, **right, **shared}


def encode_metrics(metrics: Mapping[str, Mean | Max]) -> bytes:
    """Parts for another rank, in float64, which has them exactly; one read from each device for all that lie there."""
    parts = {n: (p.total, p.count) if isinstance(p, Mean) else (p.largest,) for n, p in metrics.items()}
    of_devices: dict[torch.device, list[Tensor]] = {}  # an own critic's have come in a message
    for tensor in chain.from_iterable(parts.values()):
        of_devices.setdefault(tensor.device, []).append(tensor.double())
    numbers = {device: iter(torch.stack(tensors).tolist()) for device, tensors in of_devices.items()}
    return msgspec.msgpack.encode({n: [next(numbers[one.device]) for one in tensors] for n, tensors in parts.items()})


def decode_metrics(data: bytes) -> Metrics:
    """Inverse of `encode_metrics`, on the CPU."""
    parts = {
        name: [torch.tensor(number, dtype=torch.float64) for number in numbers]
        for name, numbers in msgspec.msgpack.decode(data, type=dict[str, list[float]]).items()
    }
    return {name: Mean(*numbers) if len(numbers) == 2 else Max(*numbers) for name, numbers in parts.items()}


def metric_values(metrics: Mapping[str, Mean | Max]) -> dict[str, float]:
    """Numbers for a log, and those that follow from several means where these are there.

    ess = mean(ratio)^2 / mean(ratio^2), and sequence_ess of completions
    explained_variance = 1 - value_error / variance(return)
    """
    values = {name: part.value() for name, part in metrics.items()}
    for ess, weight in (("ess", "ratio"), ("sequence_ess", "sequence_weight")):
        if values.get(f"{weight}_squared"):
            values[ess] = effective_share(values[weight], values[f"{weight}_squared"], 1)
    if "return_squared" in values:
        variance = values["return_squared"] - values["return"] ** 2
        values["explained_variance"] = 1.0 - values["value_error"] / variance if variance > 0.0 else 0.0
    return values
