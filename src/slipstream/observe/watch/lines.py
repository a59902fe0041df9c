"""An index over one growing file of lines: what of it is kept in memory, and how it keeps up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

from slipstream.observe.watch.tail import Tail


class LineIndex(ABC):
    """Feeds each line of `path` to `take` once, piece by piece, and begins anew when the file is replaced."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tail = Tail(path)
        self.num_damaged = 0  # lines that nobody could read

    def advance(self) -> bool:
        """Read one piece; whether there was any news."""
        is_replaced = self.tail.is_replaced()
        if is_replaced:
            self.tail, self.num_damaged = Tail(self.path), 0
            self.reset()
        offset, piece = self.tail.read()
        for line in piece.split(b"\n")[:-1]:
            self.take(line, offset)
            offset += len(line) + 1
        return is_replaced or bool(piece)

    @abstractmethod
    def take(self, line: bytes, offset: int) -> None:
        """A line without its newline, which begins at `offset`."""

    @abstractmethod
    def reset(self) -> None:
        """Forget everything."""
