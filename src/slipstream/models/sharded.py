"""A model divided over the ranks of a trainer: tensor parallel inside a layer, FSDP2 over the data-parallel ranks.

A rank's `Transformer` is its tensor-parallel share (`tensor_parallel.py`), whose parameters torch's `fully_shard` cuts by
rows over the data-parallel ranks: each layer is a group that is gathered when it runs and given up again, the embedding,
final norm and head are the root's, gathered from a forward pass to the end of its backward pass. So `model(...)` comes
first, then `model.logits(states)`, as everywhere; both work on whole (tensor-parallel shares of) parameters.

Gradients of the data-parallel ranks are summed, never averaged: losses are divided by counts over all ranks. What is
left to sum over tensor-parallel ranks (`tensor_parallel.SharedRows`) the optimizer sums once per update.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from slipstream.core.ranks import RankGroup
from slipstream.models.config import TransformerConfig
from slipstream.models.transformer import Transformer


@dataclass(frozen=True)
class Division:
    """How a model lies on this rank and its peers: the two groups of `RankGroup.split`, and what it computes on and in.

    `precision` is that of products; parameters, gradients and their sums are float32. `recomputes` keeps only every
    layer's input for the backward pass and runs the layer again there.
    """

    data_parallel: RankGroup
    tensor_parallel: RankGroup
    device: torch.device = torch.device("cpu")
    precision: Literal["float32", "bfloat16"] = "float32"
    recomputes: bool = False


def load_sharded(path: str | Path, division: Division, *, max_positions: int | None = None) -> Transformer:
    """This rank's part of the model in folder `path`, of which only that part is read. Errors: as `hf.load_model`'s."""
    raise NotImplementedError


def new_sharded(config: TransformerConfig, seed: int, division: Division) -> Transformer:
    """This rank's part of the model that `initialise` draws from `seed`: the same numbers in every division."""
    raise NotImplementedError


def no_data_loss(model: nn.Module) -> Tensor:
    """0, after a forward pass over one token: what a rank without data runs while its data-parallel peers have some.

    Its backward pass gives every parameter a gradient of 0, so the rank takes part in all collectives of a microbatch;
    under `torch.no_grad` it takes part in those of a measurement. `model` is a `Transformer` or a `ScalarModel`.
    """
    raise NotImplementedError


def sum_gradients(model: nn.Module, enabled: bool) -> None:
    """Whether backward passes from now on sum gradients over the data-parallel ranks: yes, unless told otherwise.

    Switched off for all microbatches of an update but the last, there is one reduce-scatter per update, for the memory
    of a whole (tensor-parallel share of a) gradient. All ranks must agree. Without FSDP it does nothing.
    """
    raise NotImplementedError


class ShardedParameters:
    """What this rank stores of a model's parameters: the counterpart of `FlatParameters` for several ranks.

    A parameter's local part are its rows `rows(name)`, in the order of the first dimension, of this rank's
    tensor-parallel share; parameters that FSDP does not manage are whole. `named_views` stay valid for the model's life.
    """

    def __init__(self, model: nn.Module, division: Division) -> None:
        raise NotImplementedError

    def named_views(self) -> dict[str, Tensor]:
        """The weights that lie here, float32, by parameter name: live, never copies; some may have no rows."""
        raise NotImplementedError

    def rows(self, name: str) -> range:
        """Which rows of this rank's tensor-parallel share of parameter `name` lie here."""
        raise NotImplementedError

    def reshard(self) -> None:
        """Give up all gathered parameters: call it after writing into `named_views`, or the model computes with old."""
        raise NotImplementedError
