"""Safetensors files: what a header says, without the tensors, and writing one tensor by tensor.

The library's own writer wants all tensors in memory, twice; its reader maps the file before it looks at the header.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from slipstream.core.errors import ConfigError, ShapeError, clip
from slipstream.core.files import open_regular

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
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
BITS = {
    **{"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
    **{"I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32},
    **{"I64": 64, "U64": 64, "F64": 64, "C64": 64},
}
"""Bits of one element, for every precision that the format names."""
LFS_POINTER = b"version https://git-lfs"
Size = Annotated[int, msgspec.Meta(ge=0, lt=2**48)]


class Header(msgspec.Struct, frozen=True):
    """One tensor in a foreign file's header: its shape, its precision, and where its bytes lie."""

    dtype: str
    shape: Annotated[list[Size], msgspec.Meta(max_length=16)]
    data_offsets: tuple[Size, Size]


class _Metadata(msgspec.Struct, frozen=True):
    metadata: dict[str, str] | None = msgspec.field(default=None, name="__metadata__")


@dataclass(frozen=True)
class Entry:
    """One tensor in the header of a file that is written here."""

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


def open_tensors(file: Path) -> Any:
    """Open a safetensors file, whose tensors are read when they are asked for. ConfigError where it is none."""
    try:
        open_regular(file).close()
        return safe_open(file, framework="pt")
    except OSError as error:
        raise ConfigError(f"'{file}' cannot be read", got=error.strerror or error) from error
    except SafetensorError as error:
        raise ConfigError(f"'{file}' is not a whole safetensors file", got=clip(error)) from error


def tensor_headers(file: Path) -> dict[str, Header]:
    """Read the header of a safetensors file: its tensors by name.

    ConfigError unless the file is as the format wants it (github.com/huggingface/safetensors, "Format"): the header's
    length in 8 bytes, the header in JSON, then the tensors' bytes in some order, without gaps or overlaps, each as
    many as its shape and precision need.
    """
    try:
        with open_regular(file) as stream:
            start = stream.read(8)
            if LFS_POINTER.startswith(start) and start:
                raise _torn(file, "a Git LFS pointer", hint="`git lfs pull` in the folder fetches the weights")
            length = int.from_bytes(start, "little")
            size = os.fstat(stream.fileno()).st_size
            if len(start) < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise _torn(file, f"{size} bytes without a whole header")
            told = stream.read(length)
    except OSError as error:
        raise ConfigError(f"'{file}' cannot be read", got=error.strerror) from error
    try:
        if not told.startswith(b"{"):
            raise ValueError("it does not begin with '{'")
        msgspec.json.decode(told, type=_Metadata)
        raw = msgspec.json.decode(told, type=dict[str, msgspec.Raw])
        headers = {
            name: msgspec.json.decode(entry, type=Header) for name, entry in raw.items() if name != "__metadata__"
        }
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors, and so is bad UTF-8
        raise _torn(file, f"a header that is not the format's: {clip(error)}") from error
    if size != 8 + length + _end_of(file, headers):
        raise _torn(file, f"{size} bytes", allowed=f"{8 + length + _end_of(file, headers)} bytes, as its header says")
    return headers


def _end_of(file: Path, headers: Mapping[str, Header]) -> int:
    """Where the last tensor ends, counted from the first. ConfigError for gaps, overlaps and sizes of another shape."""
    end = 0
    for name, header in sorted(headers.items(), key=lambda item: item[1].data_offsets):
        bits = math.prod(header.shape) * BITS.get(header.dtype, 0)
        start, stop = header.data_offsets
        if header.dtype not in BITS:
            raise _torn(file, f"{clip(name)} of precision {clip(header.dtype)}", allowed=", ".join(BITS))
        if start != end or 8 * (stop - start) != bits:
            shape = clip(header.shape)
            raise _torn(
                file,
                f"{clip(name)} in bytes {start} to {stop}, with shape {shape} of {header.dtype}",
                allowed=f"its {bits // 8} bytes, from byte {end}: tensors lie end to end",
            )
        end = stop
    return end


def _torn(file: Path, got: str, *, allowed: str | None = None, hint: str | None = None) -> ConfigError:
    return ConfigError(
        f"'{file}' is not a whole safetensors file",
        got=got,
        allowed=allowed,
        hint=hint or "was its download or copy interrupted? fetch it again",
    )


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
