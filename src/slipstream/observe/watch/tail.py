"""Reading a file of lines while it grows: each whole line once, in bounded pieces, and whether it is another file now.

A last line without its newline is a writer's that has not finished, or was killed: it is left for the next time. A
resume replaces files, and so does whoever keeps one small. A file with another number than the one that was read, or
one that is shorter or differs where the reader stopped (numbers come again), is not the one that was read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

PIECE_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 26
_ANCHOR_BYTES = 64


@dataclass
class Tail:
    """Where a reader is in `path`, which need not exist yet."""

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


def _number(file: BinaryIO) -> tuple[int, int]:
    stat = os.fstat(file.fileno())
    return stat.st_dev, stat.st_ino


def lines_from(path: Path, offset: int, *, max_bytes: int) -> Iterator[bytes]:
    """The whole lines of `path` from `offset` on, where a line begins, until `max_bytes` of them are read."""
    with path.open("rb") as file:
        file.seek(offset)
        while max_bytes > 0 and (line := file.readline(MAX_LINE_BYTES)).endswith(b"\n"):
            max_bytes -= len(line)
            yield line
