"""Gradients of stored parameters, by name."""

from __future__ import annotations

from torch import Tensor

from slipstream.models.flat import FlatParameters
from slipstream.models.sharded import ShardedParameters


def named_grads(parameters: FlatParameters | ShardedParameters) -> dict[str, Tensor]:
    """Those that lie here: views, zeros where no backward pass has made any."""
    return parameters.by_name(parameters.stored_grads())
