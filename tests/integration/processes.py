"""What the tests of endings ask of the operating system."""

from __future__ import annotations

from pathlib import Path


def children(pid: int) -> list[int]:
    """The processes that `pid` started and that have not been waited for."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def descendants(pid: int) -> list[int]:
    """Its children, theirs, and so on."""
    return [one for child in children(pid) for one in (child, *descendants(child))]


def command_line(pid: int) -> list[str]:
    """Its arguments, where none has a space in it: a forked process has its title there, as one text."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ").split()


def is_alive(pid: int) -> bool:
    """False of a zombie, too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
