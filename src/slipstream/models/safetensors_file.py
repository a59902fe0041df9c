"""Writing a safetensors file tensor by tensor: the library's own writer wants all of them in memory, twice."""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from slipstream.core.errors import ShapeError

DTYPES = {
    "F64": torch.float64,
    "I64": torch.int64,
    "F32": torch.float32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U8": torch.uint8,
}
"""The format's names of precisions."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
BLOCK_BYTES = 16 * 1024**2


@dataclass(frozen=True)
class Entry:
    """What the header says of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Written:
    """Size and CRC-32 of a file, counted while it was written."""

    nbytes: int
    crc32: int


def write_safetensors(
    file: Path, entries: Mapping[str, Entry], tensors: Iterable[Tensor], *, metadata: Mapping[str, str] | None = None
) -> Written:
    """Write `tensors`, which come one by one in the order of `entries`, and sync the file.

    The format (github.com/huggingface/safetensors, "Format"): the header's length in 8 bytes, the header in JSON, then
    the tensors' bytes without gaps. Longer elements must come first, so that each lies where its precision wants it.
    """
    sizes = [entry.dtype.itemsize for entry in entries.values()]
    if sizes != sorted(sizes, reverse=True):
        raise ShapeError("tensors of a file are not in the order of their precisions", got=sizes)
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for name, entry in entries.items():
        start, end = end, end + entry.nbytes
        header[name] = {"dtype": DTYPE_NAMES[entry.dtype], "shape": entry.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    coming = iter(tensors)
    with file.open("wb") as stream:
        out = _Counted(stream)
        out.write(len(text).to_bytes(8, "little"))
        out.write(text)
        for name, entry in entries.items():
            out.write_tensor(name, entry, next(coming))
        stream.flush()
        os.fsync(stream.fileno())
    return Written(out.nbytes, out.crc32)


class _Counted:
    """A stream with the size and CRC-32 of what has been written. It keeps no tensor while the next one is made."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.nbytes = self.crc32 = 0

    def write(self, block: bytes | memoryview) -> None:
        self.nbytes += self._stream.write(block)
        self.crc32 = zlib.crc32(block, self.crc32)

    def write_tensor(self, name: str, entry: Entry, tensor: Tensor) -> None:
        if tensor.dtype != entry.dtype or tuple(tensor.shape) != entry.shape:
            raise ShapeError(f"{name} is not what the header says", got=f"{tensor.dtype} {list(tensor.shape)}")
        content = memoryview(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)
        for start in range(0, len(content), BLOCK_BYTES):
            self.write(content[start : start + BLOCK_BYTES])
