"""Weights as a generator's precision stores them: which bytes lie where, and how fp32 weights become them.

Quantisation happens once, at the source: the trainer packs its fp32 weights into the slot that is offered, so the bytes
on the way shrink with the precision and every generator computes with the same numbers.

A quantised matrix W [M, K] has one scale per row, an output channel of y = x W^T:

    int8   scale_m = max_k |W_mk| / 127,  Q = round(W / scale):   |W - scale Q| <= scale / 2
    fp8    scale_m = max_k |W_mk| / 448,  Q = e4m3(W / scale):    |W - scale Q| <= max(|W| / 16, scale / 1024)

mxfp4 has a scale X for each block of 32 numbers of a row (`mxfp4.py`): |W - Q| <= max(|W|, X) / 4.

Norms, biases, position embeddings and routers of experts stay fp32 in every precision: a thousandth of the bytes.

A rank's part of a divided model has a layout of its own, that of its local shapes. Its scales are those of whole rows,
also where it holds some of a row's columns: so its weights are the numbers that one process would compute with. With
mxfp4 it holds whole blocks of a row, or is refused.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from slipstream.core.errors import ConfigError, ShapeError
from slipstream.core.fields import Precision
from slipstream.core.peer_messages import Holding
from slipstream.models.compute_copy import ComputeCopy
from slipstream.models.linear import Linear
from slipstream.models.lora import precision_of, shapes_of
from slipstream.models.mxfp4 import BLOCK, MXFP4, block_scales, expanded, num_blocks, num_bytes, rounded
from slipstream.models.packed import rounded_up
from slipstream.models.shards import Part, local_parts, local_tensor
from slipstream.models.tensor_parallel import TensorParallel
from slipstream.models.transformer import Transformer

FP8 = torch.float8_e4m3fn
LARGEST = {torch.int8: 127.0, FP8: 448.0}
"""The number that the largest weight of a row becomes, by the types that have a scale for each."""

CUT_BY_COLUMNS = ("output.weight", "down.weight")
"""How the names of the matrices end that tensor parallelism divides by columns (`tensor_parallel.py`)."""

_ALIGNMENT = 64  # bytes; a cache line, and enough for every type
_DIMENSIONS = 2  # of the tensors of all families, at most
_BLOCK = 1 << 20  # weights packed at once: small enough for what lies between to stay in the cache
_CUDA_BLOCK = 1 << 26  # enough for a kernel to be worth its launch


@dataclass(frozen=True)
class Format:
    """How a precision stores the matrices of linear layers, and `table`: the head, or the embedding that is tied to it.

    fp8 and mxfp4 keep the head in bfloat16: their few bits of mantissa would fall on the logits directly.
    An embedding that is looked up only is bfloat16 in all of them but float32.
    """

    matrix: torch.dtype
    table: torch.dtype


FORMATS: dict[Precision, Format] = {
    "float32": Format(torch.float32, torch.float32),
    "bfloat16": Format(torch.bfloat16, torch.bfloat16),
    "int8": Format(torch.int8, torch.int8),
    "fp8": Format(FP8, torch.bfloat16),
    "mxfp4": Format(MXFP4, torch.bfloat16),
}


@dataclass(frozen=True)
class Stored:
    """Where a parameter of `shape` lies: in `dtype` from byte `start`, and its scales if it has any.

    These are fp32 [shape[0]], or of mxfp4 uint8 [shape[0], blocks].
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    scales_start: int | None

    @property
    def is_mxfp4(self) -> bool:
        return self.dtype == MXFP4

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the values as they are stored: of mxfp4 with two in a byte."""
        return (*self.shape[:-1], num_bytes(self.shape[-1])) if self.is_mxfp4 else self.shape

    @property
    def scales_shape(self) -> tuple[int, ...]:
        return (self.shape[0], num_blocks(self.shape[-1])) if self.is_mxfp4 else self.shape[:1]

    @property
    def scales_bytes(self) -> int:
        return math.prod(self.scales_shape) * (1 if self.is_mxfp4 else 4)

    @property
    def end(self) -> int:
        return self.start + math.prod(self.stored_shape) * self.dtype.itemsize

    def view(self, flat: Tensor) -> StoredWeight:
        """The weight in the bytes of a whole version."""
        values, scales = flat[self.start : self.end], None
        if self.scales_start is not None:
            scales = flat[self.scales_start : self.scales_start + self.scales_bytes]
            scales = (scales if self.is_mxfp4 else scales.view(torch.float32)).view(self.scales_shape)
        values = values if self.is_mxfp4 else values.view(self.dtype)
        return StoredWeight(values.view(self.stored_shape), scales, self.shape[-1] if self.is_mxfp4 else None)

    def empty(self, device: torch.device) -> StoredWeight:
        """One in memory of its own."""
        scales = None
        if self.scales_start is not None:
            kind = torch.uint8 if self.is_mxfp4 else torch.float32
            scales = torch.empty(self.scales_shape, dtype=kind, device=device)
        dtype = torch.uint8 if self.is_mxfp4 else self.dtype
        values = torch.empty(self.stored_shape, dtype=dtype, device=device)
        return StoredWeight(values, scales, self.shape[-1] if self.is_mxfp4 else None)


@dataclass(frozen=True)
class StoredWeight:
    """Views of a parameter's bytes: the weight is values, or values times scales[:, None].

    `columns`: of an mxfp4 matrix, whose values are uint8 and have scales of blocks.
    """

    values: Tensor
    scales: Tensor | None
    columns: int | None = None

    def in_type(self, dtype: torch.dtype) -> StoredWeight:
        """The same with values in `dtype`. Blocks are multiplied by their scales: of mxfp4 nothing is left to scale."""
        if self.columns is None:
            return StoredWeight(self.values.to(dtype), self.scales)
        assert self.scales is not None, "mxfp4 weights have scales"
        return StoredWeight(expanded(self.values, self.scales, self.columns, dtype), None)


class WeightLayout:
    """The bytes of a model's weights at a precision: a function of the model's shapes, so both ends agree on it.

    In the order of `named_parameters`, a tied weight once. float32 has no gaps: its bytes are `FlatParameters.flat`'s.
    Of a rank's part of a model they are the bytes of what that rank stores (`shards.local_parts`). Beside adapters
    there are two layouts: theirs, at a precision of their own, beside a base with the digest `base`; and that of the
    weights that stay (`is_base`), which nobody sends.
    """

    def __init__(self, model: Transformer, precision: Precision, *, is_base: bool = False, base: str = "") -> None:
        shapes = shapes_of(model)
        adapted = {f"{layer}.adapter.{which}" for layer in shapes for which in "ab"}
        if adapted and not is_base:
            precision = precision_of(shapes)
        types = _types(model, FORMATS[precision]) | dict.fromkeys(adapted, FORMATS[precision].matrix)
        self._base = base
        alignment = 1 if precision == "float32" else _ALIGNMENT
        self.precision = precision
        self.stored: list[Stored] = []
        end = 0
        for name, parameter in model.named_parameters():
            if adapted and (name in adapted) == is_base:
                continue
            dtype, shape = types[name], tuple(local_tensor(parameter).shape)
            has_scales = dtype in LARGEST or dtype == MXFP4
            stored = Stored(name, dtype, shape, end, end if has_scales else None)
            if has_scales:
                stored = replace(stored, start=rounded_up(end + stored.scales_bytes, alignment))
            if stored.is_mxfp4 and isinstance(model.ranks, TensorParallel):
                _check_blocks(stored)
            end = rounded_up(stored.end, alignment)
            self.stored.append(stored)
        self.num_bytes = end
        self._parts = [] if is_base else local_parts(model)

    @functools.cached_property
    def holding(self) -> Holding:
        """Which boxes of the checkpoint's tensors lie where in the bytes."""
        return _holding(self._parts, {stored.name: stored for stored in self.stored}, self.num_bytes, self._base)

    def views(self, flat: Tensor) -> dict[str, StoredWeight]:
        """The weights in `flat` uint8 [num_bytes] by name, without copying."""
        if flat.shape != (self.num_bytes,) or flat.dtype != torch.uint8 or not flat.is_contiguous():
            raise ShapeError(
                f"these are not the bytes of {self.precision} weights",
                got=f"{list(flat.shape)} {flat.dtype}, contiguous = {flat.is_contiguous()}",
                allowed=f"[{self.num_bytes}] torch.uint8, contiguous",
            )
        return {s.name: s.view(flat) for s in self.stored}

    def pack(
        self, weights: Mapping[str, Tensor], out: Tensor, *, over_ranks: Callable[[Tensor], Tensor] | None = None
    ) -> Iterator[slice]:
        """Write fp32 `weights` by name to `out` uint8 [num_bytes], block by block of rows.

        Yields the ranges of bytes that are final, ascending and without gaps, so that a checksum is computed while
        they lie in the cache. Equal weights give equal bytes. `over_ranks` makes the largest |weight| of whole rows
        from those of this rank's columns [rows], all ranks calling it together, once.
        """
        largest = {} if over_ranks is None else self._largest(weights, over_ranks)
        done = 0
        for stored, view in zip(self.stored, self.views(out).values(), strict=True):
            end = stored.start
            for nbytes in _fill(view, weights[stored.name].detach(), largest.get(stored.name)):
                end += nbytes
                yield slice(done, end)
                done = end
        if done < self.num_bytes:
            yield slice(done, self.num_bytes)

    def stored_weights(
        self, weights: Mapping[str, Tensor], *, over_ranks: Callable[[Tensor], Tensor] | None = None
    ) -> Iterator[tuple[str, StoredWeight]]:
        """Yield what `pack` writes, each in memory of its own: fp32 `weights` that stay fp32 are not copied."""
        largest = {} if over_ranks is None else self._largest(weights, over_ranks)
        for stored in self.stored:
            weight = weights[stored.name].detach()
            found = StoredWeight(weight, None)
            if stored.dtype != weight.dtype:
                found = stored.empty(weight.device)
                for _ in _fill(found, weight, largest.get(stored.name)):
                    pass
            yield stored.name, found

    def _largest(self, weights: Mapping[str, Tensor], over_ranks: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """The largest |weight| of the rows that ranks hold columns of, by name."""
        cut = [s.name for s in self.stored if s.dtype in LARGEST and _is_cut_by_columns(s.name)]
        own = [weights[name].detach().abs().amax(1) for name in cut]
        if not own:
            return {}
        return dict(zip(cut, torch.split(over_ranks(torch.cat(own)), [len(rows) for rows in own]), strict=True))


def _fill(view: StoredWeight, weight: Tensor, largest: Tensor | None) -> Iterator[int]:
    """Write a fp32 `weight` as it is stored, block by block of rows, and yield the bytes of each of them.

    `largest` [rows] is that of whole rows, if this rank does not have them.
    """
    if weight.data_ptr() == view.values.data_ptr():  # it lies there (`Packer.settle`)
        yield view.values.nbytes
        return
    block = _CUDA_BLOCK if weight.is_cuda else _BLOCK
    sources = torch.split(weight, max(1, block // max(1, math.prod(weight.shape[1:]))))
    rows = max(1, len(sources[0]))
    scales: Sequence[Tensor | None] = [None] * len(sources)
    if view.columns is not None and view.scales is not None:
        own_scales = block_scales(weight)  # where the weight is, as its blocks are rounded there
        view.scales.copy_(own_scales)
        scales = torch.split(own_scales, rows)
    elif view.scales is not None:
        row_scales = _scales(weight.abs().amax(1) if largest is None else largest, view.values.dtype)
        view.scales.copy_(row_scales)
        scales = torch.split(row_scales, rows)
    for source, target, scale in zip(sources, torch.split(view.values, rows), scales, strict=True):
        if scale is None:
            is_sent = source.is_cuda and not target.is_cuda
            target.copy_(source.to(target.dtype) if is_sent else source)  # half the bytes on the way to the host
        elif view.columns is not None:
            target.copy_(rounded(source, scale))
        else:
            target.copy_(_rounded(source / scale[:, None], target.dtype))
        yield target.nbytes


class Packer:
    """Implements `core.weights.WeightsPacker`: the trainer's live `weights` (fp32 views by name) in a layout.

    `over_ranks` [N] -> [N] takes the maximum over the ranks that share every layer, which all pack at the same time.
    `copy`: that which passes compute with, of which `settle` can make the version itself.
    """

    def __init__(
        self,
        layout: WeightLayout,
        weights: Mapping[str, Tensor],
        *,
        over_ranks: Callable[[Tensor], Tensor] | None = None,
        copy: ComputeCopy | None = None,
    ) -> None:
        self.num_bytes = layout.num_bytes
        self.holding: Holding | None = layout.holding
        self._layout, self._weights, self._over_ranks, self._copy = layout, weights, over_ranks, copy

    def settle(self, out: Tensor) -> None:
        """Have the weights that passes compute with lie in `out` uint8 [num_bytes], those in the version's type:
        packing into `out` then writes the others alone."""
        assert self._copy is not None, "there is a copy, where it is to be published in place"
        views = self._layout.views(out).items()
        places = {name: view.values for name, view in views if view.scales is None}
        self._weights = {**self._weights, **self._copy.lie_in(places)}

    @torch.no_grad()
    def pack(self, out: Tensor) -> Iterator[slice]:
        """Write the weights as they are now to `out` uint8 [num_bytes]; see `WeightLayout.pack`."""
        yield from self._layout.pack(self._weights, out, over_ranks=self._over_ranks)


def _scales(largest: Tensor, dtype: torch.dtype) -> Tensor:
    scales = largest / LARGEST[dtype]
    return scales.masked_fill(scales == 0, 1.0)


def _rounded(scaled: Tensor, dtype: torch.dtype) -> Tensor:
    return scaled.round() if dtype == torch.int8 else scaled.to(dtype)


def _types(model: Transformer, form: Format) -> dict[str, torch.dtype]:
    types = dict.fromkeys((name for name, _ in model.named_parameters()), torch.float32)
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            types[f"{name}.weight"] = form.matrix
    is_looked_up_only = not model.config.tie_embeddings and form.table != torch.float32
    types["embedding.weight"] = torch.bfloat16 if is_looked_up_only else form.table
    if not model.config.tie_embeddings:
        types["head.weight"] = form.table
    return types


def _holding(parts: Sequence[Part], stored: Mapping[str, Stored], num_bytes: int, base: str) -> Holding:
    """Values and, as tensors of their own, scales: of a row that ranks hold columns of, all have the scale.

    Of mxfp4 these are tensors of bytes: their columns are those of the weight over 2, and over 32.
    """
    numbers: dict[tuple[str, tuple[int, ...], torch.dtype], int] = {}
    rows: dict[tuple[int, ...], None] = {}
    for part in parts:
        place, box = stored[part.parameter], part.box
        if place.is_mxfp4:
            for name, per, shape, first in (
                (box.name, 2, place.stored_shape, place.start),
                (f"{box.name}/scales", BLOCK, place.scales_shape, place.scales_start),
            ):
                assert first is not None, "mxfp4 weights have scales"
                of_bytes = _in_bytes(part, per)
                number = numbers.setdefault((name, of_bytes.box.shape, MXFP4), len(numbers))
                offset = first + shape[1] * of_bytes.start[0] + of_bytes.start[1]
                pitches = [(shape[1], 1)[dim] for dim in part.order]
                rows[_row(number, offset, of_bytes.box.start, of_bytes.box.stop, pitches)] = None
            continue
        item = place.dtype.itemsize
        pitches = [item * math.prod(place.shape[dim + 1 :]) for dim in range(len(place.shape))]
        offset = place.start + sum(pitch * first for pitch, first in zip(pitches, part.start, strict=True))
        number = numbers.setdefault((box.name, box.shape, place.dtype), len(numbers))
        rows[_row(number, offset, box.start, box.stop, [pitches[dim] for dim in part.order])] = None
        if place.scales_start is not None:
            axis = part.order.index(0)
            number = numbers.setdefault((f"{box.name}/scales", (box.shape[axis],), torch.float32), len(numbers))
            offset = place.scales_start + 4 * part.start[0]
            rows[_row(number, offset, box.start[axis : axis + 1], box.stop[axis : axis + 1], [4])] = None
    table = np.array(list(rows), np.int64).reshape(len(rows), 2 + 3 * _DIMENSIONS)
    start, stop, strides = (table[:, 2 + n * _DIMENSIONS :][:, :_DIMENSIONS].copy() for n in range(3))
    return Holding(
        num_bytes=num_bytes,
        names=tuple(name for name, _, _ in numbers),
        shapes=tuple(shape for _, shape, _ in numbers),
        types=tuple(str(dtype).removeprefix("torch.") for _, _, dtype in numbers),
        item_bytes=tuple(dtype.itemsize for _, _, dtype in numbers),
        tensor=table[:, 0].astype(np.int32),
        start=start,
        stop=stop,
        offset=table[:, 1].copy(),
        strides=strides,
        base=base,
    )


def _in_bytes(part: Part, per: int) -> Part:
    """Return `part` where `per` columns of the parameter are one element. It begins with a whole one."""
    axis, box = part.order.index(1), part.box
    assert part.start[1] % per == box.start[axis] % per == 0, "whole blocks"

    def narrow(sizes: tuple[int, ...], at: int) -> tuple[int, ...]:
        return (*sizes[:at], -(-sizes[at] // per), *sizes[at + 1 :])

    narrowed = replace(box, shape=narrow(box.shape, axis), start=narrow(box.start, axis), stop=narrow(box.stop, axis))
    return replace(part, box=narrowed, start=narrow(part.start, 1))


def _is_cut_by_columns(name: str) -> bool:
    """Tell whether tensor parallelism divides the columns of a matrix; those of experts are whole on a rank."""
    return name.endswith(CUT_BY_COLUMNS) and ".experts." not in name


def _check_blocks(stored: Stored) -> None:
    """Raise ConfigError where a rank holds parts of blocks: their scales are those of whole ones."""
    if _is_cut_by_columns(stored.name) and stored.shape[1] % BLOCK:
        raise ConfigError(
            "tensor parallelism cuts this matrix within blocks of mxfp4",
            got=f"{stored.shape[1]} columns of {stored.name} on a rank",
            allowed=f"a multiple of {BLOCK}",
            hint="fewer ranks, or another generator.precision",
        )


def _row(
    number: int, offset: int, start: Sequence[int], stop: Sequence[int], strides: Sequence[int]
) -> tuple[int, ...]:
    fill = _DIMENSIONS - len(start)
    return (number, offset, *start, *[0] * fill, *stop, *[1] * fill, *strides, *[0] * fill)
