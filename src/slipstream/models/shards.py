"""The parts of a checkpoint's tensors that a rank stores, as boxes in them and views of its storage.

Weight sync, checkpoints and exports speak of boxes only, whatever divided the model.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from slipstream.core.errors import ConfigError, ShapeError
from slipstream.core.rank_group import RankGroup
from slipstream.models.config import TransformerConfig
from slipstream.models.layout import LogicalTensor, layout
from slipstream.models.lora import (
    AdapterShape,
    adapter_tensors,
    install,
    linear_layers,
    meta_parameters,
    resized,
    shapes_of,
)
from slipstream.models.tensor_parallel import TensorParallel, whole_config
from slipstream.models.transformer import Ranks, Transformer

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Box:
    """A rectangular part of one tensor of the Hugging Face checkpoint, of `shape`: start[d] <= index[d] < stop[d]."""

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """Slices that cut the box out of the whole tensor."""
        return tuple(slice(start, stop) for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def extent(self) -> tuple[int, ...]:
        """The shape of what is inside."""
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))


@dataclass(frozen=True)
class Part:
    """A box, and which part of which parameter of this rank holds it: from element `start` on, its axes in `order`.

    It says where, not in what storage: the same part of a copy of the parameters, at any precision, is `of` that copy.
    """

    box: Box
    parameter: str
    start: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """Slices that cut the part out of the parameter, or of what this rank holds of it."""
        extent = self.box.extent
        sizes = [extent[self.order.index(dim)] for dim in range(len(self.start))]
        return tuple(slice(start, start + size) for start, size in zip(self.start, sizes, strict=True))

    def of(self, parameter: Tensor) -> Tensor:
        """The view of the box's shape into `parameter`, which is of the shape that this rank holds."""
        return parameter[self.slices].permute(self.order)


@dataclass(frozen=True)
class Shard:
    """A box, and where this rank stores what is in it: a view of the box's shape into a parameter."""

    box: Box
    view: Tensor

    def write(self, value: Tensor) -> None:
        """Copy `value` (of the box's shape, any precision) into the parameter."""
        self.view.copy_(value)


def local_shards(model: Transformer, *, of_base: bool = False) -> list[Shard]:
    """Return what this rank holds of the checkpoint: of a whole model, one rank's of several, and either under FSDP2.

    In the order of `layout`. Views stay valid as long as the parameters' storage: take them again after
    `FlatParameters.rebind`. Every stored number is in exactly one shard; several ranks may hold the same box.
    Of a model with adapters these are theirs, or with `of_base` those of the rest.
    """
    parameters = {name: local_tensor(parameter.detach()) for name, parameter in model.named_parameters()}
    parts = base_parts(model) if of_base else local_parts(model)
    return [Shard(part.box, part.of(parameters[part.parameter])) for part in parts]


def local_parts(model: Transformer) -> list[Part]:
    """Return where `local_shards` lie in this rank's parameters; boxes without elements are left out.

    Of a model with adapters these are the adapters' (`lora.adapter_tensors`), which only tensor parallelism divides.
    """
    shapes = shapes_of(model)
    return adapter_parts(shapes, model.ranks) if shapes else base_parts(model)


def base_parts(model: Transformer) -> list[Part]:
    """`local_parts` of a model, or of what its adapters are beside."""
    ranks = model.ranks
    if isinstance(ranks, TensorParallel):
        whole, rank, world = whole_shapes(ranks.config), ranks.rank, ranks.world
    else:
        whole, rank, world = whole_shapes(model.config), 0, 1
    held = {name: placed(name, parameter) for name, parameter in model.named_parameters()}
    with torch.device("meta"):
        undivided = Transformer(
            model.config, ranks, model.stage
        )  # as FSDP2 and adapters found it: parameters are plain tensors
    parameters = dict(undivided.named_parameters())
    owners = {parameter.untyped_storage()._cdata: name for name, parameter in parameters.items()}
    parts = []
    for tensor in layout(undivided):
        name = owners[tensor.view.untyped_storage()._cdata]
        for box, view in _cut(tensor, whole[tensor.name], rank, world):
            for start, plain in _plain(view, box.extent):
                part = _within(held[name], box, start, plain, parameters[name], name)
                if part is not None:
                    parts.append(part)
    return parts


def adapter_parts(shapes: Mapping[str, AdapterShape], ranks: Ranks) -> list[Part]:
    """Return where A and B of every piece lie in the parameters of a rank's adapters, which have `shapes` there."""
    parts, parameters, whole, rank, world = [], meta_parameters(shapes), shapes, 0, 1
    if isinstance(ranks, TensorParallel):
        whole, rank, world = resized(shapes, linear_layers(ranks.config)), ranks.rank, ranks.world
    sizes = {tensor.name: tensor.shape for _, tensor in adapter_tensors(whole, meta_parameters(whole))}
    for name, tensor in adapter_tensors(shapes, parameters):
        held = (0, 0), tuple(parameters[name].shape)
        for box, view in _cut(tensor, sizes[tensor.name], rank, world):
            for start, plain in _plain(view, box.extent):
                if (part := _within(held, box, start, plain, parameters[name], name)) is not None:
                    parts.append(part)
    return parts


def whole_parameters(model: Transformer, *, of_base: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of the whole model that `model` is a part of, one at a time: of its base, or its adapters.

    In host memory, wherever the model is.

    All ranks that share the model call this together, with what FSDP2 has gathered given up.
    """
    ranks, shapes, own = model.ranks, shapes_of(model), dict(model.named_parameters())
    peers: list[Ranks] = []
    if isinstance(ranks, TensorParallel):
        peers = [TensorParallel(ranks.config, rank, ranks.world) for rank in range(ranks.world)]
        group = RankGroup.over(ranks.group) if ranks.group is not None else RankGroup.alone()
    with torch.device("meta"):
        whole = install(Transformer(whole_config(model)), shapes)
        divided = [install(Transformer(model.config, peer), shapes) for peer in peers]
    find = base_parts if of_base else local_parts
    wanted, *by_rank = [_by_parameter(find(one)) for one in (whole, *divided)]
    held = [dict(one.named_parameters()) for one in divided]
    for name, parameter in whole.named_parameters():
        if name not in wanted:
            continue
        mine = own[name].detach() if name in own else torch.empty(0, dtype=torch.float32)
        mine = (cast("DTensor", mine).full_tensor() if is_dtensor(mine) else mine).cpu()
        if all(name in one and one[name].shape == parameter.shape for one in held):
            yield name, mine
            continue
        tensors: dict[str, Tensor] = {}
        for rank, payload in enumerate(group.gather(mine.contiguous().numpy().tobytes())):
            for part in by_rank[rank].get(name, []):
                share = torch.frombuffer(bytearray(payload), dtype=mine.dtype).view(held[rank][name].shape)
                tensor = tensors.setdefault(part.box.name, torch.empty(part.box.shape, dtype=mine.dtype))
                tensor[part.box.slices] = part.of(share)
        value = torch.empty(parameter.shape, dtype=mine.dtype)
        for part in wanted[name]:
            part.of(value).copy_(tensors[part.box.name][part.box.slices])
        yield name, value


def _by_parameter(parts: Sequence[Part]) -> dict[str, list[Part]]:
    found: dict[str, list[Part]] = {}
    for part in parts:
        found.setdefault(part.parameter, []).append(part)
    return found


def base_digest(model: Transformer) -> str:
    """Return the SHA-256 of the numbers that `model`'s adapters are beside, by their names; see `whole_parameters`.

    Those before a precision rounded them. Identity: it does not depend on the division.
    """
    if model.stored_base is not None:
        return model.stored_base.digest
    digest = hashlib.sha256()
    for name, parameter in whole_parameters(model, of_base=True):
        digest.update(f"{name} {list(parameter.shape)} {parameter.dtype}".encode())
        digest.update(parameter.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def local_tensor(tensor: Tensor) -> Tensor:
    """Return what this rank stores of `tensor`: itself, or of a DTensor the local part."""
    if not is_dtensor(tensor):
        return tensor
    local: Tensor = cast("DTensor", tensor).to_local()
    return local


def is_dtensor(tensor: Tensor) -> bool:
    """Without importing what takes most of a second and what no process on its own needs."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def placed(name: str, parameter: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (start, extent) of the part of a parameter that this rank stores: all of it, unless it is a DTensor.

    DTensors may have `Shard` and `Replicate`, even or not, and FSDP2's `_StridedShard` over tensor parallelism that
    divides rows evenly; of others torch does not know itself what lies where. Raises ShapeError for these, for parts
    that are no box, and for partial sums, which are no values yet.
    """
    if not is_dtensor(parameter):
        return (0,) * parameter.ndim, tuple(parameter.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # see `is_dtensor`

    tensor = cast("DTensor", parameter)
    if any(placement.is_partial() for placement in tensor.placements):
        raise ShapeError(f"{name} is a partial sum", got=tensor.placements, allowed="Shard and Replicate")
    extent, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tuple(tensor.to_local().shape)
    if 0 in extent and 0 in local:  # torch may call an empty part [0, 0] where its offset has [0, 4]
        return tuple(start), tuple(extent)
    if tuple(extent) != local or _is_scattered(tensor):
        raise ShapeError(
            f"what a rank stores of {name} is no box of it", got=f"{tensor.placements}, {list(local)} stored"
        )
    return tuple(start), local


def _is_scattered(tensor: DTensor) -> bool:
    """Tell whether `_StridedShard` deals out rows in turns instead of ranges, undone by no later `Shard`."""
    from torch.distributed.tensor.placement_types import _StridedShard  # see `is_dtensor`

    for dim in range(tensor.ndim):
        factor = 1
        for place, size in zip(reversed(tensor.placements), reversed(tensor.device_mesh.shape), strict=True):
            if not (place.is_shard(dim) or (isinstance(place, _StridedShard) and place.dim == dim)):
                continue
            if isinstance(place, _StridedShard) and place.split_factor != factor:
                return True
            factor *= size
    return False


def _cut(part: LogicalTensor, whole: tuple[int, ...], rank: int, world: int) -> Iterator[tuple[Box, Tensor]]:
    """The boxes of a rank's logical tensor `part`: it is cut along the dimension that is shorter than in the whole.

    A dimension of n units starts at unit rank * n // world, which is also what repeats key-value heads on neighbours.
    """
    cut = next((axis for axis, size in enumerate(part.shape) if size != whole[axis]), None)
    if cut is None:
        yield Box(part.name, whole, (0,) * len(whole), whole), part.view
        return
    period = whole[cut] // part.stacked
    first = rank * (period // part.unit) // world * part.unit
    size = part.shape[cut] // part.stacked
    pieces = part.view.chunk(part.stacked, cut) if part.stacked > 1 else (part.view,)
    for number, piece in enumerate(pieces):
        start, stop = [0] * len(whole), list(whole)
        start[cut] = number * period + first
        stop[cut] = start[cut] + size
        yield Box(part.name, whole, tuple(start), tuple(stop)), piece


def _plain(view: Tensor, shape: tuple[int, ...]) -> Iterator[tuple[int, Tensor]]:
    """Views with as many dimensions as `shape`, and the row of `shape` where each begins.

    A view that has its first dimension split (GPT-NeoX: heads, q k v, rows of a head) falls into as many as there are
    indices of all but the last of these.
    """
    split = view.ndim - len(shape)
    rows = view.shape[split]
    for number, index in enumerate(itertools.product(*map(range, view.shape[:split]))):
        yield number * rows, view[index]


def _within(
    held: tuple[tuple[int, ...], tuple[int, ...]], box: Box, first: int, view: Tensor, parameter: Tensor, name: str
) -> Part | None:
    """The part of `view` that lies in what is held of `parameter`; the view is of `box` from its row `first` on."""
    order = tuple(range(view.ndim))
    # Of a single column all strides are 1, transposed or not.
    if view.ndim == 2 and (view.stride() != parameter.stride() or view.shape[1] > parameter.shape[1]):
        order = (1, 0)
    offset = view.storage_offset()
    places = []
    for stride in parameter.stride():
        places.append(offset // stride)
        offset %= stride
    start, stop, inner = list(box.start), list(box.stop), [0] * view.ndim
    start[0] += first
    stop[0] = start[0] + view.shape[0]
    for axis, dim in enumerate(order):
        low, high = held[0][dim], held[0][dim] + held[1][dim]
        begin, end = max(places[dim], low), min(places[dim] + view.shape[axis], high)
        if begin >= end:
            return None
        start[axis] += begin - places[dim]
        stop[axis] = start[axis] + end - begin
        inner[dim] = begin - low
    return Part(Box(box.name, box.shape, tuple(start), tuple(stop)), name, tuple(inner), order)


@functools.cache
def whole_shapes(config: TransformerConfig) -> Mapping[str, tuple[int, ...]]:
    """The shape of every tensor of the whole model's checkpoint."""
    with torch.device("meta"):
        return {tensor.name: tensor.shape for tensor in layout(Transformer(config))}


@torch.no_grad()
def load_shard(model: Transformer, whole: Mapping[str, Any]) -> None:
    """Fill a rank's model, but for adapters, from all tensors of the checkpoint, of which it reads its boxes only.

    `whole` maps Hugging Face's names to tensors (`hf.logical_tensors` of a whole model) or to slices of safetensors
    files. Raises ConfigError for missing, unexpected or misshapen ones.
    """
    shapes = whole_shapes(whole_config(model))
    problems = [f"missing {name}" for name in shapes if name not in whole]
    for name, tensor in whole.items():
        shape = tuple(tensor.shape if isinstance(tensor, Tensor) else tensor.get_shape())
        if name not in shapes:
            problems.append(f"unexpected {name}")
        elif shape != shapes[name]:
            problems.append(f"{name} has shape {list(shape)}, not {list(shapes[name])}")
    if problems:
        raise ConfigError("these are not the tensors of the model that was divided", got="; ".join(problems[:20]))
    for shard in local_shards(model, of_base=True):
        shard.write(whole[shard.box.name][shard.box.slices])
