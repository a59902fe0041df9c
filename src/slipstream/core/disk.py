"""What is on the disk when a call returns, and what it looks like when the disk refuses.

A run has two kinds of files: lines that are appended (`core/jsonl.py`), and files that are replaced as a whole,
here. A rename is atomic, but neither it nor the bytes behind it are on the disk before file and folder are synced.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from safetensors import SafetensorError

from slipstream.core.errors import DiskError

HINTS = {
    errno.ENOSPC: "free some space; the run goes on with `--resume` from its last checkpoint",
    errno.EDQUOT: "free some of your quota; the run goes on with `--resume` from its last checkpoint",
    errno.EROFS: "the file system is mounted read-only; the run goes on with `--resume` once it can be written to",
    errno.EIO: "the disk reports errors (see `dmesg`); the run goes on with `--resume` once it works",
    errno.EFBIG: "a limit on the size of files (`ulimit -f`); the run goes on with `--resume` without it",
    errno.EACCES: "the folder must be one that you may write to",
}

_OF_WRITING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})
"""Nothing but writing to a disk fails so."""


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """What the system refuses while `path` is written, as a DiskError that names the file and says what to do."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise _as_disk_error(path, error) from error


def _as_disk_error(path: Path, error: Exception) -> DiskError:
    return disk_error(path, (error.strerror if isinstance(error, OSError) else "") or str(error), _number(error))


def _number(error: BaseException | None) -> int | None:
    """The system's number of an error; safetensors hides it in its text."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"os error (\d+)", str(error)) if isinstance(error, SafetensorError) else None
    return None if found is None else int(found[1])


def disk_error(path: Path, why: str, number: int | None) -> DiskError:
    """That `path` could not be written, for the reason `why` with error number `number`, if that is known."""
    return DiskError(f"{path.name} could not be written", got=f"{why}: {path}", hint=HINTS.get(number or 0))


def check_in_place(path: Path, descriptor: int) -> None:
    """DiskError where `path` is not, or no longer, what `descriptor` holds open: it was removed, moved or replaced.

    What was written through the descriptor since then is lost, or lies somewhere else.
    """
    with contextlib.suppress(OSError):
        if os.path.samestat(path.stat(), os.fstat(descriptor)):
            return
    raise DiskError(
        f"{path.name} was removed, moved or replaced while the run wrote to it",
        got=f"{path} is {_whereabouts(descriptor)}",
        hint="a run's folder stays where it is and as it is until the run has ended",
    )


def _whereabouts(descriptor: int) -> str:
    """Where an open file or folder is now, as far as the system says so."""
    try:
        place = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return "gone"
    return "deleted" if place.endswith(" (deleted)") else f"now {place}"


class HeldFolder:
    """A folder that is to stay in its place. A context manager, which at its end looks for the last time."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        with disk_errors(self.path):
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)

    def check(self) -> None:
        """DiskError where it was removed, moved or replaced."""
        check_in_place(self.path, self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A folder that is gone explains whatever was raised inside, and so does a disk without space."""
        try:
            self.check()
        except DiskError as gone:
            raise gone from error
        finally:
            os.close(self._descriptor)
        if isinstance(error, OSError | SafetensorError) and _number(error) in _OF_WRITING:
            named = error.filename if isinstance(error, OSError) else None
            raise _as_disk_error(self.path if named is None else Path(os.fsdecode(named)), error) from error


def sync(path: Path) -> None:
    """Force a file's bytes, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_files(folder: Path) -> None:
    """Force the files of `folder`, and that they are there, to disk."""
    for path in sorted(folder.iterdir()):
        if path.is_file():
            sync(path)
    sync(folder)
    sync(folder.parent)


def replace_file(path: Path, data: bytes) -> None:
    """`path` holds `data`, on the disk, when this returns. Readers, also after a crash, find the old file or the new.

    DiskError where it cannot be written: the old one is untouched then.
    """
    with disk_errors(path), replacing(path) as temporary:
        temporary.write_bytes(data)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to be filled inside the context; synced, it takes the place of `path`, unless there was an error."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def remove_tree(path: Path) -> None:
    """Delete the folder `path`, which is gone at once: a crash in between leaves a hidden rest, never half of it."""
    gone = path.with_name(f".{path.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)
