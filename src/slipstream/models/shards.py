"""Who holds what: the parts of a checkpoint's tensors that a rank stores, as boxes in them and views of its storage.

Weight sync, checkpoints and exports speak of boxes only, whatever divided the model.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.core.errors import ConfigError, ShapeError
from slipstream.models.config import TransformerConfig, config_from_hf
from slipstream.models.hf import canonical_name, open_tensors, read_hf_config, weight_files
from slipstream.models.layout import LogicalTensor, layout
from slipstream.models.tensor_parallel import TensorParallel
from slipstream.models.transformer import Transformer


@dataclass(frozen=True)
class Box:
    """A rectangular part of one tensor of the Hugging Face checkpoint, of `shape`: start[d] <= index[d] < stop[d]."""

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """What cuts the box out of the whole tensor."""
        return tuple(slice(start, stop) for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def extent(self) -> tuple[int, ...]:
        """The shape of what is inside."""
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))


@dataclass(frozen=True)
class Shard:
    """A box, and where this rank stores what is in it: a view into a parameter, of as many elements as the box."""

    box: Box
    view: Tensor

    def read(self) -> Tensor:
        """The content in the box's shape: a view where strides allow, else a copy."""
        return self.view.reshape(self.box.extent)

    def write(self, value: Tensor) -> None:
        """Copy `value` (of the box's shape, any precision) into the parameter."""
        self.view.copy_(value.reshape(self.view.shape))


def shards(model: Transformer) -> list[Shard]:
    """Where a rank's model stores which part of the checkpoint, in the order of `layout`.

    Views stay valid as long as the parameters' storage: take them again after `FlatParameters.rebind`.
    """
    ranks = model.ranks
    if not isinstance(ranks, TensorParallel):
        raise ShapeError("only a rank of a tensor-parallel group has shards", hint="for a whole model, see `layout`")
    whole = whole_shapes(ranks.config)
    return [shard for part in layout(model) for shard in _cut(part, whole[part.name], ranks)]


def _cut(part: LogicalTensor, whole: tuple[int, ...], ranks: TensorParallel) -> Iterator[Shard]:
    """The boxes of a rank's logical tensor `part`: it is cut along the dimension that is shorter than in the whole.

    A dimension of n units starts at unit rank * n // world, which is also what repeats key-value heads on neighbours.
    """
    cut = next((axis for axis, size in enumerate(part.shape) if size != whole[axis]), None)
    if cut is None:
        yield Shard(Box(part.name, whole, (0,) * len(whole), whole), part.view)
        return
    period = whole[cut] // part.stacked
    first = ranks.rank * (period // part.unit) // ranks.world * part.unit
    size = part.shape[cut] // part.stacked
    pieces = part.view.chunk(part.stacked, cut) if part.stacked > 1 else (part.view,)
    for number, piece in enumerate(pieces):
        start, stop = [0] * len(whole), list(whole)
        start[cut] = number * period + first
        stop[cut] = start[cut] + size
        yield Shard(Box(part.name, whole, tuple(start), tuple(stop)), piece)


@functools.cache
def whole_shapes(config: TransformerConfig) -> Mapping[str, tuple[int, ...]]:
    """The shape of every tensor of the whole model's checkpoint."""
    with torch.device("meta"):
        return {tensor.name: tensor.shape for tensor in layout(Transformer(config))}


def shard_boxes(config: TransformerConfig, rank: int, world: int) -> list[Box]:
    """What rank `rank` of `world` holds of a model of the whole `config`: any process may ask, for any rank."""
    with torch.device("meta"):
        model = TensorParallel(config, rank, world).new_model()
    return [shard.box for shard in shards(model)]


@torch.no_grad()
def load_shard(model: Transformer, whole: Mapping[str, Any]) -> None:
    """Fill a rank's model from all tensors of the checkpoint, of which it reads its boxes only.

    `whole` maps Hugging Face's names to tensors (`hf.logical_tensors` of a whole model, `whole_tensors` of flat
    weights) or to slices of safetensors files. Raises ConfigError for missing, unexpected or misshapen ones.
    """
    mine = shards(model)
    assert isinstance(model.ranks, TensorParallel)
    shapes = whole_shapes(model.ranks.config)
    problems = [f"missing {name}" for name in shapes if name not in whole]
    for name, tensor in whole.items():
        shape = tuple(tensor.shape if isinstance(tensor, Tensor) else tensor.get_shape())
        if name not in shapes:
            problems.append(f"unexpected {name}")
        elif shape != shapes[name]:
            problems.append(f"{name} has shape {list(shape)}, not {list(shapes[name])}")
    if problems:
        raise ConfigError("these are not the tensors of the model that was divided", got="; ".join(problems[:20]))
    for shard in mine:
        shard.write(whole[shard.box.name][shard.box.slices])


def whole_tensors(config: TransformerConfig, flat: Tensor) -> dict[str, Tensor]:
    """Hugging Face's tensors of a whole model, from its flat weights (`flat.FlatParameters`) [num_params]."""
    with torch.device("meta"):
        model = Transformer(config)
    parameters = dict(model.named_parameters())
    pieces = torch.split(flat, [p.numel() for p in parameters.values()])
    views = {name: piece.view(p.shape) for (name, p), piece in zip(parameters.items(), pieces, strict=True)}
    model.load_state_dict(views, assign=True)
    return {tensor.name: tensor.read() for tensor in layout(model)}


def load_parallel_model(
    path: str | Path,
    group: dist.ProcessGroup,
    *,
    dtype: torch.dtype = torch.float32,
    max_positions: int | None = None,
    fixed_order: bool = False,
) -> Transformer:
    """This rank's part of the model in folder `path`, of which only that part is read. Errors: as `hf.load_model`'s."""
    path = Path(path)
    config = config_from_hf(read_hf_config(path), max_positions=max_positions)
    model = TensorParallel.over(group, config, fixed_order=fixed_order).new_model().to(dtype)
    wanted = whole_shapes(config)
    with ExitStack() as stack:
        found: dict[str, Any] = {}
        for file in weight_files(path):
            tensors = stack.enter_context(open_tensors(file))
            for stored_name in tensors.keys():  # noqa: SIM118 - not a dict
                name = canonical_name(stored_name, wanted, config.tie_embeddings)
                if name is not None:
                    found[name] = tensors.get_slice(stored_name)
        load_shard(model, found)
    return model
