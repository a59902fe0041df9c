"""What the tests of endings ask of the operating system. A process that has ended meanwhile is no error.

The nursery forks twice, so that there are processes for milliseconds only. One that ends between two looks has no file
(FileNotFoundError); one that ends between opening and reading its file is ProcessLookupError.
"""

from __future__ import annotations

from pathlib import Path


def read(pid: int, name: str) -> bytes:
    """The content of a file of `/proc/pid`; none of a process that is no more."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def children(pid: int) -> list[int]:
    """The processes that `pid` started and that have not been waited for."""
    return [int(child) for child in read(pid, f"task/{pid}/children").split()]


def descendants(pid: int) -> list[int]:
    """Its children, theirs, and so on."""
    return [one for child in children(pid) for one in (child, *descendants(child))]


def command_line(pid: int) -> list[str]:
    """Its arguments, where none has a space in it: a forked process has its title there, as one text."""
    return read(pid, "cmdline").decode().replace("\0", " ").split()


def is_alive(pid: int) -> bool:
    """False of a zombie, too."""
    state = read(pid, "stat").rpartition(b")")[2].split()
    return bool(state) and state[0] != b"Z"
