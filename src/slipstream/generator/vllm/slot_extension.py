"""Versions of the policy read where they lie, within vLLM's own processes (`worker_extension_cls`).

A push is a JSON file that the generator writes (`weights.py`):

    parts     [path, mark_start, mark, start, num_bytes]: a slot in a file in shared memory, and the bytes that stand
              beside it, at mark_start, for as long as it holds the version
    tensors   [name, shape, dtype, boxes] of the checkpoint; a box [part, offset, start, stop, strides] is the range of
              indices start..stop of one, whose first number lies at byte `offset` of a part, neighbours `strides` apart

Needs torch alone. A tensor in one box is a view of the slot: what vLLM does not copy of it, another rank's part, is not
even read. One in several boxes is put together, and one of another type than vLLM's is converted: norms and biases, but
not matrices in e4m3 and their scales, which vLLM multiplies as they are.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


class TornVersionError(RuntimeError):
    """A slot was written while it was read."""


class MappedPart:
    """A rank's part of a version: uint8 `data` [num_bytes]. Privately mapped: nothing here can write to the slot."""

    def __init__(self, path: str, mark_start: int, mark: str, start: int, num_bytes: int) -> None:
        self._path, self._mark_start, self._mark = path, mark_start, bytes.fromhex(mark)
        self._file = os.open(path, os.O_RDONLY)
        skipped = start % mmap.ALLOCATIONGRANULARITY  # 64 KiB on some machines; parts begin at multiples of 4
        mapped = mmap.mmap(self._file, skipped + num_bytes, access=mmap.ACCESS_COPY, offset=start - skipped)
        self.data = torch.frombuffer(mapped, dtype=torch.uint8)[skipped:]

    def check(self) -> None:
        """Raise TornVersionError unless all that was read so far is of the version."""
        found = os.pread(self._file, len(self._mark), self._mark_start)
        if found != self._mark:
            raise TornVersionError(f"{self._path} was written while it was read: {found.hex()}, not {self._mark.hex()}")

    def close(self) -> None:
        os.close(self._file)

    def view(self, dtype: torch.dtype, offset: int, extent: list[int], strides: list[int]) -> torch.Tensor:
        span = sum((count - 1) * stride for count, stride in zip(extent, strides, strict=True)) + dtype.itemsize
        items = [stride // dtype.itemsize for stride in strides]
        return self.data[offset : offset + span].view(dtype).as_strided(extent, items)


def read_push(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the push in file `path` by name; the end is reached only if all of them were of its version.

    Use a tensor before the end. Raises TornVersionError for a slot that is written meanwhile.
    """
    push: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    parts = [MappedPart(*part) for part in push["parts"]]
    try:
        for name, shape, dtype_name, boxes in push["tensors"]:
            tensor = _tensor(parts, shape, getattr(torch, dtype_name), boxes)
            for one in parts:
                one.check()
            yield name, tensor
        for one in parts:
            one.check()
    finally:
        for one in parts:
            one.close()


def _tensor(
    parts: list[MappedPart], shape: list[int], dtype: torch.dtype, boxes: list[tuple[Any, ...]]
) -> torch.Tensor:
    views = []
    for part, offset, start, stop, strides in boxes:
        extent = [end - first for first, end in zip(start, stop, strict=True)]
        view: torch.Tensor = parts[part].view(dtype, offset, extent, strides)
        if extent == shape:
            return view
        views.append((tuple(map(slice, start, stop)), view))
    tensor = torch.empty(shape, dtype=dtype)
    for box, view in views:
        tensor[box] = view
    return tensor


class SlotExtension:
    """A method more for vLLM's workers."""

    def load_slipstream_push(self, path: str) -> None:
        """Load the push in file `path`, every rank its part, by vLLM's own reload: one of its layers at a time."""
        worker: Any = self
        dtype = worker.model_config.dtype
        worker.reload_weights(
            weights_iterator=(
                (name, tensor if is_quantized(name, tensor) else tensor.to(dtype)) for name, tensor in read_push(path)
            )
        )


def is_quantized(name: str, tensor: torch.Tensor) -> bool:
    """Tell whether this is a matrix in e4m3, or the scales of one."""
    return tensor.dtype == torch.float8_e4m3fn or name.endswith(".weight_scale")
