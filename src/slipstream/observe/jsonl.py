"""Append-only JSON lines that survive `kill -9`: a line counts once its newline is on disk.

Only the last line of such a file can be torn. Readers stop before it; a writer that reopens the file cuts it off.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from slipstream.core.errors import SlipstreamError

T = TypeVar("T")


class JsonlWriter:
    """Appends msgspec-encodable objects, one a line; `write` hands each batch to the system in a single call."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        cut_torn_tail(path)
        self._file = path.open("ab", buffering=0)
        self._encoder = msgspec.json.Encoder()

    def write(self, *records: Any) -> None:
        if records:
            self._file.write(b"\n".join(map(self._encoder.encode, records)) + b"\n")

    def sync(self) -> None:
        """Return once everything written is on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def cut_torn_tail(path: Path) -> int:
    """Truncate `path` after its last newline; returns the number of bytes cut. A missing file is fine."""
    if not path.exists():
        return 0
    size = path.stat().st_size
    with path.open("r+b") as file:
        keep, chunk = size, 1 << 16
        while keep:
            start = max(0, keep - chunk)
            file.seek(start)
            newline = file.read(keep - start).rfind(b"\n")
            if newline >= 0:
                keep = start + newline + 1
                break
            keep = start
        if keep < size:
            file.truncate(keep)
    return size - keep


def read_jsonl(path: Path, type: type[T]) -> Iterator[T]:
    """The whole lines of `path` decoded as `type`, in order; nothing for a missing file.

    A torn last line (no newline) is left out. An undecodable line before it raises SlipstreamError: that is not a
    killed writer but a damaged file.
    """
    if not path.exists():
        return
    decoder = msgspec.json.Decoder(type)
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError as error:
                raise SlipstreamError(
                    f"{path.name} is damaged", got=f"line {number}: {error}", hint=f"inspect {path}"
                ) from error


def finite(value: Any) -> Any:
    """`value` with every nan and inf inside replaced by None, which is what JSON can say."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
