"""Models that one process trains or reads by itself, as stages besides RL do: on a GPU of this machine, or its CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypedDict, TypeVar

import torch

from slipstream.core.config import RunConfig
from slipstream.core.rank_group import RankGroup
from slipstream.models.device import DTYPES, single_device, take_gpu
from slipstream.models.experts import Router
from slipstream.models.scalar import ScalarModel
from slipstream.models.sharded import Division, Parameters, divide, divide_scalar, stored_parameters
from slipstream.models.transformer import Transformer
from slipstream.trainer.policy import trained_division

Model = TypeVar("Model", Transformer, ScalarModel)


class Weights(TypedDict):
    """Arguments of `optim.AdamW`, besides its config and the number of updates."""

    parameters: Parameters
    offloads: bool


@dataclass(frozen=True)
class Alone:
    """One process that computes as [trainer] says, whatever ranks that has.

    On a GPU with `trainer.device = "cuda"` (the first one; the CPU where there is none): products are in
    `trainer.precision` there, beside float32 weights, and moments may lie in host memory. On a CPU all is float32, and
    nothing is compiled or computed again.
    """

    config: RunConfig

    @cached_property
    def division(self) -> Division:
        device, ranks = single_device(self.config.trainer.device), RankGroup.alone()
        if device.type == "cpu":
            return Division()
        take_gpu(device, self.config.trainer.gpu_share)
        return replace(trained_division(self.config, ranks, ranks, device), copies=True)

    @property
    def device(self) -> torch.device:
        return self.division.device

    def trained(self, model: Model) -> tuple[Model, Weights]:
        """Bring `model`, whole and on the CPU, to where it is trained; return it and what its optimizer takes."""
        if isinstance(model, ScalarModel):
            divide_scalar(model, self.division)
        else:
            divide(model, self.division)
        offloads = self.config.trainer.offload_moments and self.device.type == "cuda"
        return model, {"parameters": stored_parameters(model, self.division), "offloads": offloads}

    def read(self, model: Transformer) -> Transformer:
        """Bring `model`, which nobody trains, to where it is read, and return it; its routers stay float32."""
        routers = [(one, one.weight.data) for one in model.modules() if isinstance(one, Router)]
        model.to(self.device, DTYPES[self.division.precision])
        for router, weight in routers:
            router.weight.data = weight.to(self.device)
        model.varlen = self.division.varlen
        return model.requires_grad_(False)
