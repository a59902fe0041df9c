"""Writing files so that they are on the disk when a call returns, and errors that say why the disk refused.

A run has two kinds of files: lines that are appended (`core/jsonl.py`), and files that are replaced as a whole,
here. A rename is atomic, but neither it nor the bytes of the file are on the disk before file and folder are synced.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
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
"""Errors that only writing to a disk can have."""


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn errors of the system while `path` is written into a DiskError that names the file and says what to do."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise _as_disk_error(path, error) from error


def _as_disk_error(path: Path, error: Exception) -> DiskError:
    why = (error.strerror if isinstance(error, OSError) else "") or str(error)
    hint = HINTS.get(_number(error) or 0)
    return DiskError(f"{path.name} could not be written", got=f"{why}: {path}", hint=hint)


def _number(error: BaseException | None) -> int | None:
    """Return the system's number of an error, which safetensors puts into its text."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"os error (\d+)", str(error)) if isinstance(error, SafetensorError) else None
    return None if found is None else int(found[1])


def is_in_place(path: Path, descriptor: int) -> bool:
    """Whether `path` is the file or folder that `descriptor` has open."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except OSError:
        return False


def check_in_place(path: Path, descriptor: int) -> None:
    """Raise DiskError where `path` is not in place: it was removed, moved or replaced.

    Bytes written through the descriptor since then are lost, or lie somewhere else.
    """
    if is_in_place(path, descriptor):
        return
    what = f"{path.name} was removed, moved or replaced while the run wrote to it"
    hint = "a run's folder stays where it is and as it is until the run has ended"
    raise DiskError(what, got=f"{path} is {_whereabouts(descriptor)}", hint=hint)


def _whereabouts(descriptor: int) -> str:
    """Return in words where an open file or folder is now, as far as the system says so."""
    try:
        place = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return "gone"
    return "deleted" if place.endswith(" (deleted)") else f"now {place}"


class HeldFolder:
    """A folder that has to stay in its place. A context manager; it checks once more at its end."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        with disk_errors(self.path):
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)

    def check(self) -> None:
        """Raise DiskError where the folder was removed, moved or replaced."""
        check_in_place(self.path, self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Raise DiskError in place of `error` where the folder is gone, or where the disk refused to be written."""
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
    """Force a file's bytes, or a folder's entries where the file system syncs folders, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP) or not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise
    finally:
        os.close(descriptor)


def sync_files(folder: Path) -> None:
    """Force the files of `folder`, its entries and its own entry to disk."""
    for path in sorted(folder.iterdir()):
        if path.is_file():
            sync(path)
    sync(folder)
    sync(folder.parent)


def replace_file(path: Path, data: bytes) -> None:
    """Write `data` to `path`, on the disk when this returns. Readers find the old file or the new, after a crash too.

    DiskError where it cannot be written; the old file is untouched then.
    """
    with disk_errors(path), replacing(path) as temporary:
        temporary.write_bytes(data)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a file to be filled. At the end sync it and put it in place of `path`, unless there was an error."""
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
    """Delete the folder `path` at once: a crash in between leaves a hidden rest, never a part under its own name."""
    gone = path.with_name(f".{path.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)
