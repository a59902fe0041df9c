"""Environments and tools as a user would write them in a file, without a word of Slipstream."""

from __future__ import annotations

from typing import Any


class Maze:
    def __init__(self, size: int, *, wall: str = "#") -> None:
        self.size, self.wall = size, wall

    def reset(self, **columns: Any) -> str:
        return self.wall * self.size

    async def step(self, message: dict[str, Any]) -> dict[str, Any]:
        return {"messages": message["content"], "done": True, "reward": self.size}


class Counter:
    """TRL's own example, with a target from the row."""

    def __init__(self) -> None:
        self.count = 0

    @property
    def trap(self) -> int:
        raise ZeroDivisionError

    def reset(self, target: int, **columns: Any) -> str | None:
        self.count, self.target, self.columns = 0, target, columns
        return f" Increment it by {target}."

    def increment(self, step: int) -> int:
        """Increase the counter.

        Args:
            step: What to add.
        """
        if self.count + step > 9:
            raise ValueError("Game over.")
        self.count += step
        return self.count

    async def look(self) -> dict[str, int]:
        """Look at the counter."""
        return {"count": self.count}

    def get_reward(self) -> float:
        return float(self.count == self.target)

    def _private(self) -> None: ...


class Plain:
    """Without a reward, and nothing to say."""

    def reset(self, **columns: Any) -> None: ...

    async def name(self) -> None:
        """Tell the name."""


def add(a: int, b: int) -> int:
    """Add two integers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def subtract(a: int, b: int) -> int:
    """Subtract two integers.

    Args:
        a: The first.
        b: The second.
    """
    return a - b


def no_tool(a, b):  # type: ignore[no-untyped-def]
    """Take two things."""


class NoReset:
    def step(self, message: dict[str, Any]) -> None: ...


class BadTool:
    def reset(self, **columns: Any) -> None: ...

    def move(self, where):  # type: ignore[no-untyped-def]
        """Move."""


number = 3
