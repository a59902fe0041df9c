"""AdamW over one rank's part of a model that is divided over ranks."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from slipstream.core.config import OptimizerConfig
from slipstream.models.sharded import ShardedParameters


class ShardedAdamW:
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) of what lies on this rank, clipped by the whole model's norm.

    Implements `optim.Optimizer`. Identity: the same weights as `FlatAdamW` of the whole model, up to rounding.
    """

    num_updates: int
    planned: int

    def __init__(
        self, parameters: ShardedParameters, config: OptimizerConfig, *, total_updates: int, updates_per_step: int = 1
    ) -> None:
        raise NotImplementedError

    @property
    def lr(self) -> float:
        raise NotImplementedError

    def zero_grad(self) -> None:
        raise NotImplementedError

    def finite_grad_norm(self) -> float:
        raise NotImplementedError

    def step(self) -> float:
        raise NotImplementedError

    def named_moments(self) -> dict[str, dict[str, Tensor]]:
        raise NotImplementedError

    def resume(self, moments: Mapping[str, Mapping[str, Tensor]], num_updates: int) -> None:
        raise NotImplementedError
