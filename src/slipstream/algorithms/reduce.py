"""The one place where losses are normalised: sums divided by one global count of the loss's unit.

A sum over this microbatch divided by the count over all microbatches and ranks: gradients of microbatches then add up
to the gradient of the whole, whatever the packing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


def sum_over_units(values: Tensor, mask: Tensor, *, num_units: int) -> Tensor:
    """(1 / num_units) * sum of `values` [T] where `mask` [T] is True; a scalar.

    `num_units` counts tokens or sequences over the whole optimizer update, not over this microbatch.
    """
    return torch.where(mask, values, 0.0).sum() / num_units


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
    """The parts of the mean of `values` [T] where `mask` [T]; summed in float64."""
    return Mean(torch.where(mask, values, 0.0).sum(dtype=torch.float64), mask.sum())


def masked_max(values: Tensor, mask: Tensor) -> Max:
    """The largest of `values` [T] >= 0 where `mask` [T]; 0 of nothing."""
    return Max(torch.where(mask, values, 0.0).amax() if values.numel() else values.new_zeros(()))


def merge_metrics(left: Mapping[str, Mean | Max], right: Mapping[str, Mean | Max]) -> Metrics:
    """Add up two microbatches' metrics, key by key."""
    shared = {name: left[name].merge(right[name]) for name in left if name in right}
    return {**left, **right, **shared}


def metric_values(metrics: Mapping[str, Mean | Max]) -> dict[str, float]:
    """Numbers for a log. Adds `ess` = mean(ratio)^2 / mean(ratio^2) where both means are there."""
    values = {name: part.value() for name, part in metrics.items()}
    if values.get("ratio_squared"):
        values["ess"] = values["ratio"] ** 2 / values["ratio_squared"]
    return values
