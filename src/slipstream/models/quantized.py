"""Weights as a generator's precision stores them: which bytes lie where, and how fp32 weights become them.

Quantisation happens once, at the source: the trainer packs its fp32 weights into the slot that is offered, so the bytes
on the way shrink with the precision and every generator computes with the same numbers.

A quantised matrix W [M, K] has one scale per row, an output channel of y = x W^T:

    int8   scale_m = max_k |W_mk| / 127,  Q = round(W / scale):   |W - scale Q| <= scale / 2
    fp8    scale_m = max_k |W_mk| / 448,  Q = e4m3(W / scale):    |W - scale Q| <= max(|W| / 16, scale / 1024)

Norms, biases, position embeddings and routers of experts stay fp32 in every precision: a thousandth of the bytes.

A rank's part of a divided model has a layout of its own, that of its local shapes. Its scales are those of whole rows,
also where it holds some of a row's columns: so its weights are the numbers that one process would compute with.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slipstream.core.errors import ShapeError
from slipstream.core.fields import Precision
from slipstream.core.peer_messages import Holding
from slipstream.models.linear import Linear
from slipstream.models.lora import precision_of, shapes_of
from slipstream.models.shards import Part, local_parts, local_tensor
from slipstream.models.transformer import Transformer

FP8 = torch.float8_e4m3fn
LARGEST = {torch.int8: 127.0, FP8: 448.0}
"""The number that the largest weight of a row becomes, by the types that have scales."""

CUT_BY_COLUMNS = ("output.weight", "down.weight")
"""How the names of the matrices end that tensor parallelism divides by columns (`tensor_parallel.py`)."""

_ALIGNMENT = 64  # bytes; a cache line, and enough for every type
_DIMENSIONS = 2  # of the tensors of all families, at most
_BLOCK = 1 << 20  # weights packed at once: small enough for what lies between to stay in the cache
_CUDA_BLOCK = 1 << 26  # enough for a kernel to be worth its launch


@dataclass(frozen=True)
class Format:
    """How a precision stores the matrices of linear layers, and `table`: the head, or the embedding that is tied to it.

    fp8 keeps the head in bfloat16: its 3 bits of mantissa would fall on the logits directly.
    An embedding that is looked up only is bfloat16 in all of them but float32.
    """

    matrix: torch.dtype
    table: torch.dtype


FORMATS: dict[Precision, Format] = {
    "float32": Format(torch.float32, torch.float32),
    "bfloat16": Format(torch.bfloat16, torch.bfloat16),
    "int8": Format(torch.int8, torch.int8),
    "fp8": Format(FP8, torch.bfloat16),
}


@dataclass(frozen=True)
class Stored:
    """Where a parameter lies: `dtype` in `shape` from byte `start`, and fp32 scales [shape[0]] if it has any."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    scales_start: int | None

    @property
    def end(self) -> int:
        return self.start + math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class StoredWeight:
    """Views of a parameter's bytes: the weight is values, or values times scales[:, None]."""

    values: Tensor
    scales: Tensor | None

    def dequantized(self) -> Tensor:
        """fp32, in the parameter's shape."""
        weight = self.values.float()
        return weight if self.scales is None else weight * self.scales[:, None]


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
            scales_start = None
            if dtype in LARGEST:
                scales_start = end
                end = _round_up(end + 4 * shape[0], alignment)
            stored = Stored(name, dtype, shape, end, scales_start)
            end = _round_up(stored.end, alignment)
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
        return {
            s.name: StoredWeight(
                flat[s.start : s.end].view(s.dtype).view(s.shape),
                None
                if s.scales_start is None
                else flat[s.scales_start : s.scales_start + 4 * s.shape[0]].view(torch.float32),
            )
            for s in self.stored
        }

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
            values, scales = weight, None
            if stored.dtype != weight.dtype:
                values = torch.empty(stored.shape, dtype=stored.dtype, device=weight.device)
                scales = None if stored.scales_start is None else weight.new_empty(stored.shape[0])
                for _ in _fill(StoredWeight(values, scales), weight, largest.get(stored.name)):
                    pass
            yield stored.name, StoredWeight(values, scales)

    def _largest(self, weights: Mapping[str, Tensor], over_ranks: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """The largest |weight| of the rows that ranks hold columns of, by name."""
        cut = [s.name for s in self.stored if s.scales_start is not None and s.name.endswith(CUT_BY_COLUMNS)]
        own = [weights[name].detach().abs().amax(1) for name in cut]
        if not own:
            return {}
        return dict(zip(cut, torch.split(over_ranks(torch.cat(own)), [len(rows) for rows in own]), strict=True))


def _fill(view: StoredWeight, weight: Tensor, largest: Tensor | None) -> Iterator[int]:
    """Write a fp32 `weight` as it is stored, block by block of rows, and yield the bytes of each of them.

    `largest` [rows] is that of whole rows, if this rank does not have them.
    """
    block = _CUDA_BLOCK if weight.is_cuda else _BLOCK
    sources = torch.split(weight, max(1, block // max(1, math.prod(weight.shape[1:]))))
    rows = max(1, len(sources[0]))
    scales: Sequence[Tensor | None] = [None] * len(sources)
    if view.scales is not None:
        row_scales = _scales(weight.abs().amax(1) if largest is None else largest, view.values.dtype)
        view.scales.copy_(row_scales)
        scales = torch.split(row_scales, rows)
    for source, target, scale in zip(sources, torch.split(view.values, rows), scales, strict=True):
        target.copy_(source if scale is None else _rounded(source / scale[:, None], target.dtype))
        yield target.nbytes


class Packer:
    """Implements `core.weights.WeightsPacker`: the trainer's live `weights` (fp32 views by name) in a layout.

    `over_ranks` [N] -> [N] takes the maximum over the ranks that share every layer, which all pack at the same time.
    """

    def __init__(
        self,
        layout: WeightLayout,
        weights: Mapping[str, Tensor],
        *,
        over_ranks: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.num_bytes = layout.num_bytes
        self.holding: Holding | None = layout.holding
        self._layout, self._weights, self._over_ranks = layout, weights, over_ranks

    @torch.no_grad()
    def pack(self, out: Tensor) -> Iterator[slice]:
        """Write the weights as they are now to `out` uint8 [num_bytes]; see `WeightLayout.pack`."""
        yield from self._layout.pack(self._weights, out, over_ranks=self._over_ranks)


def scales_of(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 [M]: a row's largest |weight| becomes the type's largest number; 1 for a row of zeros."""
    return _scales(weight.abs().amax(1), dtype)


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
    """Values and, as tensors of their own, scales: of a row that ranks hold columns of, all have the scale."""
    numbers: dict[tuple[str, tuple[int, ...], torch.dtype], int] = {}
    rows: dict[tuple[int, ...], None] = {}
    for part in parts:
        place, box = stored[part.parameter], part.box
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


def _row(
    number: int, offset: int, start: Sequence[int], stop: Sequence[int], strides: Sequence[int]
) -> tuple[int, ...]:
    fill = _DIMENSIONS - len(start)
    return (number, offset, *start, *[0] * fill, *stop, *[1] * fill, *strides, *[0] * fill)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
