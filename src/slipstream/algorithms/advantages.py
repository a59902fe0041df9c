"""Advantages of whole completions from the rewards of their group.

`rewards` [R] and `group_ids` int64 [R] (any numbering) describe the R rollouts of a batch; the result is [R].
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.core.errors import ShapeError


def group_mean(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """A_i = r_i - mean of its group. LlamaRL (L8). Identity: the advantages of a group sum to 0."""
    return rewards - _group_average(rewards, group_ids)


def group_normalised(rewards: Tensor, group_ids: Tensor, *, std_eps: float) -> Tensor:
    """A_i = (r_i - mean) / (std + std_eps), with the population standard deviation of its group.

    GRPO (DeepSeekMath, section 4.1). Identity: a group of equal rewards gets 0, however small `std_eps` is.
    """
    centred = group_mean(rewards, group_ids)
    return centred / (_group_average(centred.square(), group_ids).sqrt() + std_eps)


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
