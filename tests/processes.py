"""Processes as the operating system shows them. One that has ended meanwhile is no error.

The nursery forks twice, so that there are processes for milliseconds only. One that ends between two looks has no file
(FileNotFoundError); one that ends between opening and reading its file is ProcessLookupError.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def children(pid: int) -> list[int]:
    """Return the processes that any thread of `pid` has started and that have not been waited for."""
    found: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                found += map(int, (thread / "children").read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """Return its children, theirs, and so on, parents first."""
    return [one for child in children(pid) for one in (child, *descendants(child))]


def below(pid: int) -> set[int]:
    """Return its descendants that live."""
    return {one for one in descendants(pid) if is_alive(one)}


def state(pid: int) -> str:
    """Return 'R', 'S', 'T', 'Z' ... of /proc, '' for a process that is no more."""
    return _read(pid, "stat").rpartition(")")[2].strip()[:1]


def is_alive(pid: int) -> bool:
    """Return False for a zombie, too."""
    return state(pid) not in ("", "Z")


def not_gone(pids: Iterable[int]) -> set[int]:
    """Return those that live, and those that have ended but that no process has waited for."""
    return {pid for pid in pids if state(pid)}


def command_line(pid: int) -> list[str]:
    """Return its arguments, where none has a space in it: a forked process has its title there, as one text."""
    return _read(pid, "cmdline").replace("\0", " ").split()


def _read(pid: int, name: str) -> str:
    """Return the content of a file of `/proc/pid`; none of a process that is no more."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
