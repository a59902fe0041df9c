"""The files of a run outside its folder, in /dev/shm and the temporary folder, and their removal.

A run removes its own files when it ends. When it is killed together with its children, the next run that starts on the
machine does (`sweep`). A lock tells whether the owner lives: the system drops it when the process ends, in any way. A
process number would not do, as the system may have given it to another process. Some file systems that machines share
keep the locks of each to itself, so a folder names the machine of its owner.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from slipstream.core.errors import ConfigError, WeightSyncError

FOLDER_PREFIX = "slipstream-"  # of folders in the temporary folder; the folder of a run's sockets is named by its id
_FILES, _FOLDERS = f"slipstream.{FOLDER_PREFIX}*.*", f"{FOLDER_PREFIX}*"  # a user's file may be slipstream.toml
_MOST_FOR_SOCKETS = 64  # bytes of a folder in which paths of sockets are short enough
_MEMORY = Path("/dev/shm")  # of this machine alone
_OWNER = "owner"
_JUST_MADE_S = 60.0  # a file is locked right after it is made, not at the same time


def file_prefix(run_id: str) -> str:
    """Return the beginning of the names of a run's files outside its folder, which are removed when it ends."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,100}", run_id):
        raise WeightSyncError("a run id names files", got=repr(run_id), allowed="1..100 letters, digits, '_' and '-'")
    return f"slipstream.{run_id}."


def scratch_directories() -> tuple[Path, ...]:
    """Return the directories for such files: memory first, then the temporary directory."""
    return tuple(dict.fromkeys([*([_MEMORY] if _MEMORY.is_dir() else []), temporary_directory()]))


def temporary_directory() -> Path:
    """Return the temporary directory. ConfigError where this process may write to none of the usual ones."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        what, hint = "there is no temporary folder", "set TMPDIR to a folder that you may write to"
        raise ConfigError(what, got=error.strerror, hint=hint) from error


def socket_directory() -> Path:
    """Return the temporary directory, or /tmp where paths of sockets in that would be too long for the system."""
    directory, usual = temporary_directory(), Path("/tmp")
    is_long = len(os.fsencode(directory)) > _MOST_FOR_SOCKETS
    return usual if is_long and usual.is_dir() and os.access(usual, os.W_OK) else directory


def cleanup(run_id: str) -> list[Path]:
    """Remove the segments and other scratch that killed processes of this run left behind; return their paths."""
    found = [path for directory in scratch_directories() for path in directory.glob(f"{file_prefix(run_id)}*")]
    for path in found:
        _remove(path)
    return found


def claim(folder: Path) -> int:
    """Mark `folder` as one whose owner lives, until the returned descriptor is closed, by hand or with the process."""
    path = folder / f"{_OWNER}.new"
    descriptor = hold(path, create=True)
    with contextlib.suppress(OSError):  # the disk is full
        path.write_text(" ".join(_this_machine()))
    path.rename(folder / _OWNER)  # so the file is locked whenever it has this name
    return descriptor


@contextlib.contextmanager
def run_scratch(note: Callable[[str], None]) -> Iterator[Path]:
    """Make the private folder of a run, whose name is the run's id; at its end remove that, and all that has the id.

    Files of runs that were killed are removed first; `note` is told their number.
    """
    if left := sweep():
        note(f"removed {len(left)} files and folders that runs left behind which were killed")
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=socket_directory()))
    owner = claim(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        cleanup(folder.name)
        os.close(owner)


def make_claimed(kind: str) -> tuple[Path, int]:
    """Make a folder for this process in the temporary folder; return it and the descriptor that claims it."""
    folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{kind}-", dir=temporary_directory()))
    return folder, claim(folder)


def hold(path: Path, *, create: bool = False) -> int:
    """Lock a file for as long as the returned descriptor is open: `sweep` leaves it alone."""
    descriptor = os.open(path, os.O_RDONLY | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
    with contextlib.suppress(OSError):  # a file system without locks: then `sweep` gets none, either
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return descriptor


def sweep() -> list[Path]:
    """Remove the files of this user's runs whose processes were all killed; return their paths. Spares living runs.

    Removed are claimed folders, of sockets and of reward workers, with all scratch of their run, and segments and
    folders of weights that no process holds. What processes of other machines have claimed is left to these.
    """
    swept: list[Path] = []
    temporary = {temporary_directory(), socket_directory()}
    for folder in [folder for directory in temporary for folder in directory.glob(_FOLDERS)]:
        if not folder.is_symlink() and _is_ours(folder) and _is_abandoned(folder / _OWNER):
            _remove(folder)
            swept += [folder, *cleanup(folder.name)]
    for directory in scratch_directories():
        for path in directory.glob(_FILES):
            lock = path / _OWNER if path.is_dir() else path
            run = directory / path.name.split(".")[1]  # if its folder is left, it lives or is another machine's
            if not (run.exists() or path.is_symlink()) and _is_ours(path) and _is_old(lock) and _is_abandoned(lock):
                _remove(path)
                swept.append(path)
    return swept


def _is_abandoned(path: Path) -> bool:
    """Whether there is such a file and no process holds it, nor one of another machine that is named in it.

    Hostile code may have put something else in its place.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return False
        machine = os.read(descriptor, 512).decode(errors="replace").split() if path.name == _OWNER else []
        if machine and _MEMORY not in path.parents and not set(machine) & set(_this_machine()):
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _this_machine() -> list[str]:
    """Return its name, and a number of this start of its system: containers have new names each time."""
    with contextlib.suppress(OSError):
        return [socket.gethostname(), Path("/proc/sys/kernel/random/boot_id").read_text().strip()]
    return [socket.gethostname()]


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
