"""What a run leaves outside its folder while it lasts, in /dev/shm and the temporary folder, and who removes it.

A run removes what is its own when it ends. One that is killed together with its children cannot; the next run that
starts on the machine does (`sweep`). Whether the owner lives is told by a lock that it holds: the system drops it with
the process, however that ends, and it is not misled by a process number that was given to somebody else.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from pathlib import Path

from slipstream.core.errors import WeightSyncError

FOLDER_PREFIX = "slipstream-"  # of folders in the temporary folder; with sockets in it, one is named by the run's id
_FILES, _FOLDERS = "slipstream.*", f"{FOLDER_PREFIX}*"
_OWNER = "owner"
_JUST_MADE_S = 60.0  # a file is locked right after it is made, not at the same time


def file_prefix(run_id: str) -> str:
    """What the names of a run's files outside its folder begin with; what begins so is removed when the run ends."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,100}", run_id):
        raise WeightSyncError("a run id names files", got=repr(run_id), allowed="1..100 letters, digits, '_' and '-'")
    return f"slipstream.{run_id}."


def scratch_directories() -> tuple[Path, ...]:
    """Where such files may lie: memory first, then the temporary directory."""
    shared = Path("/dev/shm")
    return tuple(dict.fromkeys([*([shared] if shared.is_dir() else []), Path(tempfile.gettempdir())]))


def cleanup(run_id: str) -> list[Path]:
    """Remove the segments and other scratch that killed processes of this run left behind; returns them."""
    found = [path for directory in scratch_directories() for path in directory.glob(f"{file_prefix(run_id)}*")]
    for path in found:
        _remove(path)
    return found


def claim(folder: Path) -> int:
    """Mark `folder` as one whose owner lives; until the descriptor returned is closed, by hand or with the process."""
    path = folder / f"{_OWNER}.new"
    descriptor = hold(path, create=True)
    path.rename(folder / _OWNER)  # so that it is never to be seen without its lock
    return descriptor


def make_claimed(kind: str) -> tuple[Path, int]:
    """A folder of this process's own in the temporary folder, and the descriptor that claims it."""
    folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{kind}-"))
    return folder, claim(folder)


def hold(path: Path, *, create: bool = False) -> int:
    """Lock a file for as long as the descriptor returned is open: `sweep` leaves it alone."""
    descriptor = os.open(path, os.O_RDONLY | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
    with contextlib.suppress(OSError):  # a file system without locks: then nobody else gets one, either
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return descriptor


def sweep() -> list[Path]:
    """Remove what runs of this user have left whose processes were all killed; returns it. Never a living run's.

    Those are folders that were claimed, of sockets and of reward workers, with all scratch of their run; and segments
    and folders of weights that nobody holds.
    """
    swept: list[Path] = []
    for folder in Path(tempfile.gettempdir()).glob(_FOLDERS):
        if not folder.is_symlink() and _is_ours(folder) and _is_abandoned(folder / _OWNER):
            _remove(folder)
            swept += [folder, *cleanup(folder.name)]
    for directory in scratch_directories():
        for path in directory.glob(_FILES):
            lock = path / _OWNER if path.is_dir() else path
            if not path.is_symlink() and _is_ours(path) and _is_old(lock) and _is_abandoned(lock):
                _remove(path)
                swept.append(path)
    return swept


def _is_abandoned(path: Path) -> bool:
    """Whether there is such a file, and nobody holds it. Hostile code may have put something else in its place."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _is_ours(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return path.lstat().st_uid == os.getuid()
    return False


def _is_old(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return time.time() - path.stat().st_mtime > _JUST_MADE_S
    return False


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
