"""What is on the disk when a call returns, and what it looks like when the disk refuses.

A run has two kinds of files: lines that are appended (`observe/jsonl.py`), and files that are replaced as a whole,
here. A rename is atomic, but neither it nor the bytes behind it are on the disk before file and folder are synced.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from slipstream.core.errors import DiskError

HINTS = {
    errno.ENOSPC: "free some space; the run goes on with `--resume` from its last checkpoint",
    errno.EDQUOT: "free some of your quota; the run goes on with `--resume` from its last checkpoint",
    errno.EROFS: "the file system is mounted read-only; the run goes on with `--resume` once it can be written to",
    errno.EIO: "the disk reports errors (see `dmesg`); the run goes on with `--resume` once it works",
    errno.EFBIG: "a limit on the size of files (`ulimit -f`); the run goes on with `--resume` without it",
    errno.EACCES: "the folder must be one that you may write to",
}


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """What the system refuses while `path` is written, as a DiskError that names the file and says what to do."""
    try:
        yield
    except OSError as error:
        raise disk_error(path, error.strerror or str(error), error.errno) from error


def disk_error(path: Path, why: str, number: int | None) -> DiskError:
    """That `path` could not be written, for the reason `why` with error number `number`, if that is known."""
    return DiskError(f"{path.name} could not be written", got=f"{why}: {path}", hint=HINTS.get(number or 0))


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
