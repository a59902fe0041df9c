"""The lock that allows one run at a time in a folder: on the file `.lock` in it, which names the holder.

It is a lock of the open file description (F_OFD_SETLK). The system drops it when the last process that has the
description open ends, in any way, on network file systems too. So no check depends on a process number, which the
system may have given to another process. The processes of a run that write to its folder inherit the description from
the controller: when that is killed, the lock lasts until the last of them has ended, and the next run waits for it.

Reading (`slipstream watch`, `report`, `replay`) takes no lock. On a file system without locks, as many clusters have,
a run goes on unprotected, with a warning.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shlex
import socket
import stat
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from slipstream.core.disk import disk_errors, is_in_place
from slipstream.core.errors import ConfigError, SlipstreamError

LOCK_FILE = ".lock"
WAIT_S = 60.0  # for the processes that a killed run has left: they see within a second that their controller is gone
UNKNOWN_S = 2.0  # for a holder that has not written its name yet
TRY_EVERY_S = 0.1
MAX_COMMAND_CHARS = 200
_MAX_BYTES = 4096
_IS_DARWIN = sys.platform == "darwin"
_FLOCK = struct.Struct("qqihh" if _IS_DARWIN else "hhqqi0q")
"""struct flock: type, whence, start, length, process (0: the description's); on macOS type and whence are last."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

log = logging.getLogger(__name__)
_held: dict[Path, int] = {}  # folder -> descriptor, of this process


class Holder(msgspec.Struct, frozen=True):
    """The process that took the lock. `place` names its kernel and process namespace, `started` is in clock ticks."""

    pid: int
    host: str
    since: str
    command: str
    place: str
    started: str

    @classmethod
    def this(cls) -> Holder:
        pid = os.getpid()
        command = shlex.join(sys.orig_argv).encode(errors="backslashreplace").decode()
        return cls(
            pid=pid,
            host=socket.gethostname(),
            since=time.strftime("%Y-%m-%d %H:%M:%S"),
            command=command if len(command) <= MAX_COMMAND_CHARS else command[:MAX_COMMAND_CHARS] + "...",
            place=_place(),
            started=_started(pid),
        )

    @property
    def has_died(self) -> bool:
        """Whether the process is known to have ended: it ran on this machine, and runs no more."""
        return self.place == _place() and _started(self.pid) != self.started


@contextlib.contextmanager
def holding(run_dir: Path) -> Iterator[None]:
    """Keep other runs from writing to `run_dir` inside this context. Leaves no trace where no run has begun.

    Waits for the processes of a run that was killed, at most `WAIT_S`. ConfigError, at once, where a run goes on there;
    SlipstreamError for one on another machine: that may have died, and the file system finds out later. DiskError.
    """
    path, key = run_dir / LOCK_FILE, run_dir.resolve()
    as_found = [(one, one.stat()) for one in (path, run_dir) if one.exists()]
    with disk_errors(path):
        descriptor = _take(run_dir)
    _held[key] = descriptor
    has_begun = True
    try:
        with contextlib.suppress(OSError):  # a full disk: a refusal cannot name the holder then
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, msgspec.json.encode(Holder.this()), 0)
        yield
    except BaseException as error:
        has_begun = (run_dir / "config.toml").exists() and not isinstance(error, ConfigError)
        raise
    finally:
        del _held[key]
        with contextlib.suppress(OSError):  # the folder may be gone
            os.ftruncate(descriptor, 0)
            if not has_begun:
                if path not in dict(as_found):
                    path.unlink()
                for one, about in as_found:
                    os.utime(one, ns=(about.st_atime_ns, about.st_mtime_ns))
        with contextlib.suppress(OSError):  # a file system without locks
            _set(descriptor, fcntl.F_UNLCK)
        os.close(descriptor)


def check_free(run_dir: Path) -> None:
    """Raise, as `holding` does, where a run goes on in `run_dir`. Takes no lock, writes nothing, does not wait."""
    with contextlib.suppress(OSError), _opened(run_dir / LOCK_FILE, os.O_RDONLY) as descriptor:
        answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK))
        holder = _holder(descriptor)
        if (
            _FLOCK.unpack(answer)[3 if _IS_DARWIN else 0] != fcntl.F_UNLCK
            and holder is not None
            and not holder.has_died
        ):
            raise _refusal(run_dir, holder)


def is_held(run_dir: Path) -> bool:
    """Whether a run of another process is known to go on in `run_dir`; False where the file system has no locks."""
    if run_dir.resolve() in _held:
        return False
    try:
        check_free(run_dir)
    except SlipstreamError:
        return True
    return False


def inherited(run_dir: Path) -> tuple[int, ...]:
    """Return the descriptors that a process that writes to `run_dir` inherits (`subprocess.Popen(pass_fds=...)`)."""
    held = _held.get(run_dir.resolve())
    return () if held is None else (held,)


def _take(run_dir: Path) -> int:
    """Take the lock; return the descriptor that has it."""
    path, started_s, has_told = run_dir / LOCK_FILE, time.monotonic(), False
    while True:
        with _opened(path, os.O_RDWR | os.O_CREAT) as descriptor:
            if _try(descriptor, path):
                if is_in_place(path, descriptor):
                    return os.dup(descriptor)
                continue  # its former holder has removed the file
            holder, waited_s = _holder(descriptor), time.monotonic() - started_s
        if holder is not None and not holder.has_died:
            raise _refusal(run_dir, holder)
        if waited_s > (UNKNOWN_S if holder is None else WAIT_S):
            raise _refusal(run_dir, holder)
        if holder is not None and not has_told:
            has_told = True
            log.warning("%s: process %d was killed; waiting for its child processes to end", run_dir, holder.pid)
        time.sleep(TRY_EVERY_S)


def _refusal(run_dir: Path, holder: Holder | None) -> SlipstreamError:
    if holder is None:
        return ConfigError("another run is going on in this folder", got=run_dir, allowed="one run at a time")
    named = f"process {holder.pid} on {holder.host}, since {holder.since}: {holder.command}"
    if holder.has_died:
        return SlipstreamError(
            f"processes of a run that was killed still write to '{run_dir}'",
            got=f"left behind by {named}",
            allowed=f"{WAIT_S:g} s for them to end",
            hint=f"`fuser {run_dir / LOCK_FILE}` names them",
        )
    is_here = holder.place == _place()
    return (ConfigError if is_here else SlipstreamError)(
        f"another run is going on in '{run_dir}'",
        got=named,
        allowed="one run at a time in a folder",
        hint=f"`slipstream watch` shows it; `kill {holder.pid}` ends it with a checkpoint"
        if is_here
        else "if that machine is gone, the file system drops the lock within minutes: try again",
    )


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ConfigError(f"'{path}' is no lock of a run", got="not a file")
        yield descriptor
    finally:
        os.close(descriptor)


def _try(descriptor: int, path: Path) -> bool:
    """Try to take the lock. True also where the file system has no locks."""
    try:
        _set(descriptor, fcntl.F_WRLCK)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        if error.errno not in _NO_LOCKS:
            raise
        log.warning("%s: this file system has no locks (%s); a second run would not be noticed", path, error.strerror)
    return True


def _set(descriptor: int, kind: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _flock(kind))


def _flock(kind: int) -> bytes:
    return _FLOCK.pack(*((0, 1, 0, kind, os.SEEK_SET) if _IS_DARWIN else (kind, os.SEEK_SET, 0, 1, 0)))


def _holder(descriptor: int) -> Holder | None:
    """Return the holder that the lock names, or None where it names none."""
    try:
        return msgspec.json.decode(os.pread(descriptor, _MAX_BYTES, 0), type=Holder)
    except (OSError, msgspec.DecodeError):
        return None


def _place() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _started(pid: int) -> str:
    """Return when a process started, to tell it from later ones with its number; "" for one that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
