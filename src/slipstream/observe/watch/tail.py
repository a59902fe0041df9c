"""Reading a file of lines while it grows: each whole line once, in bounded pieces, and whether it is another file now.

A last line without its newline is a writer's that has not finished, or was killed: it is left for the next time. A
resume replaces files, and so does whoever keeps one small. A file with another number than the one that was read, or
one that is shorter or differs where the reader stopped (numbers come again), is not the one that was read.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Generic, TypeVar

import msgspec

from slipstream.core.files import MAX_LINE_BYTES

T = TypeVar("T")

PIECE_BYTES = 1 << 16
_ANCHOR_BYTES = 64


@dataclass
class Tail:
    """The position of a reader in `path`, which need not exist yet."""

    path: Path
    offset: int = 0
    _file: tuple[int, int] = field(default=(0, 0), repr=False)
    _anchor: bytes = field(default=b"", repr=False)

    def is_replaced(self) -> bool:
        """Whether what was read so far is no longer what the file begins with: all that is known of it is void."""
        if not self.offset:
            return False
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset - len(self._anchor))
                return _number(file) != self._file or file.read(len(self._anchor)) != self._anchor
        except OSError:
            return True

    def read(self, max_bytes: int = PIECE_BYTES) -> tuple[int, bytes]:
        """(where they begin, the next whole lines): at most `max_bytes`, or one longer line; b"" without news."""
        start = self.offset
        try:
            with self.path.open("rb") as file:
                number = _number(file)
                if start and number != self._file:  # replaced since `is_replaced` looked
                    return start, b""
                file.seek(start)
                piece = file.read(max_bytes)
                while piece and b"\n" not in piece and max_bytes < MAX_LINE_BYTES:
                    more = file.read(max_bytes)
                    if not more:
                        break
                    piece, max_bytes = piece + more, max_bytes * 2
        except OSError:
            return start, b""
        piece = piece[: piece.rfind(b"\n") + 1]
        if piece:
            self.offset, self._file = start + len(piece), number
            self._anchor = (self._anchor + piece)[-_ANCHOR_BYTES:]
        return start, piece

    def size(self) -> int:
        """Bytes of the file now."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0


class LineIndex(ABC, Generic[T]):
    """An index over one growing file of lines of type `kind`: each, decoded, goes to `take` once, piece by piece.

    When the file is replaced it begins anew. `num_damaged` counts the lines that nobody could read. The line that is
    taken lies from byte `begin` up to `end`, which is behind its newline.
    """

    kind: ClassVar[Any]

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tail = Tail(path)
        self.num_damaged = self.begin = self.end = 0
        self._decoder = msgspec.json.Decoder(self.kind)
        self.reset()

    def advance(self) -> bool:
        """Read one piece; whether there was any news."""
        is_replaced = self.tail.is_replaced()
        if is_replaced:
            self.tail, self.num_damaged = Tail(self.path), 0
            self.reset()
        self.end, piece = self.tail.read()
        for line in piece.split(b"\n")[:-1]:
            self.begin, self.end = self.end, self.end + len(line) + 1
            try:
                self.take(self.decode(line))
            except (ValueError, RecursionError):
                self.num_damaged += 1
        return is_replaced or bool(piece)

    def decode(self, line: bytes) -> T:
        """Return the record of a line. ValueError or RecursionError for a damaged one."""
        found: T = self._decoder.decode(line)
        return found

    def lines_within(self, begin: int, end: int) -> Iterator[T]:
        """The records of the lines between two bytes, as `records_within`."""
        return records_within(self.path, begin, end, self.decode)

    @abstractmethod
    def take(self, record: T) -> None:
        """Learn from the next line. ValueError for one that cannot be."""

    @abstractmethod
    def reset(self) -> None:
        """Forget everything."""


def _number(file: BinaryIO) -> tuple[int, int]:
    stat = os.fstat(file.fileno())
    return stat.st_dev, stat.st_ino


def records_within(path: Path, begin: int, end: int, decode: Callable[[bytes], T]) -> Iterator[T]:
    """The records of the lines of `path` between two bytes, but for those that cannot be read: it may be replaced."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(begin)
        while begin < end and (line := file.readline(MAX_LINE_BYTES)).endswith(b"\n"):
            begin += len(line)
            with suppress(ValueError, RecursionError):
                yield decode(line)
