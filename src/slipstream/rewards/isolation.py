"""Barriers around a worker process, each applied where the platform permits it and reported by name.

    network     a network namespace without interfaces
    processes   a process namespace: every descendant dies with its first process, whatever session it is in
    files       a mount namespace: everything read-only but a scratch tmpfs, /proc shows only the worker
    user        another user id (as root), or a user namespace without capabilities
    privileges  no_new_privs: set-uid programs give nothing
    limits      address space, CPU time, file size, open files, processes, core dumps

Linux only; elsewhere `limits` is all there is. Nothing here imports more than the standard library.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import resource
import signal
import stat
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

BARRIERS = ("network", "processes", "files", "user", "privileges", "limits")
REQUIRED_FOR_UNSAFE = frozenset({"network", "processes", "user", "privileges", "limits"})

_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
_CLONE_NEWPID, _CLONE_NEWNET = 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 36, 38
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
_MNT_DETACH = 2
_CAPABILITY_VERSION_3 = 0x20080522

_FIRST_WORKER_UID = 2_000_000_000  # far from accounts; one per worker, so that process limits count its processes only
_NOBODY = 65534
_MAX_PROCESSES = 64
_MAX_OPEN_FILES = 256
_MAX_FILE_BYTES = 16 << 20
_SCRATCH_BYTES = 64 << 20


@dataclass(frozen=True)
class Namespaces:
    """What `enter_namespaces` achieved."""

    is_separate: bool = False
    is_user_namespace: bool = False
    worker_uid: int | None = None  # to switch to, as root


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _succeeds(result: int) -> bool:
    return result == 0


def enter_namespaces() -> Namespaces:
    """Put the next forked child into namespaces of its own (network, processes, IPC)."""
    if not sys.platform.startswith("linux"):
        return Namespaces()
    libc = _libc()
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    flags = _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWIPC
    if os.geteuid() == 0:
        return Namespaces(is_separate=_succeeds(libc.unshare(flags)), worker_uid=_FIRST_WORKER_UID + os.getpid())
    uid, gid = os.geteuid(), os.getegid()
    if not _succeeds(libc.unshare(flags | _CLONE_NEWUSER)):
        return Namespaces()
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    return Namespaces(is_separate=True, is_user_namespace=True)


def confine_files(scratch: str, needed: Iterable[str], *, home: str, is_other_user: bool) -> bool:
    """Enter a mount namespace with all read-only but a tmpfs at `scratch`. False where that is not permitted.

    `home`, the account's home, and folders that another user cannot enter, become empty except for what lies in
    `needed` folders (the interpreter's, and those modules are imported from). A needed folder that is itself closed to
    others is of no use to another user, so it does not count.
    """
    libc = _libc()
    if not _succeeds(libc.unshare(_CLONE_NEWNS)) or not _succeeds(
        libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None)
    ):
        return False
    guarded = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    if not _succeeds(libc.mount(b"proc", b"/proc", b"proc", guarded, None)):
        libc.mount(b"tmpfs", b"/proc", b"tmpfs", guarded, None)
    folders = [path for path in needed if os.path.isdir(path)]
    kept = {os.path.realpath(path) for path in folders if _is_open(Path(path)) or not is_other_user}
    _hide(libc, scratch, kept, home=home)
    os.makedirs(scratch, exist_ok=True)
    attributes = struct.pack("<QQQQ", _MOUNT_ATTR_RDONLY, 0, 0, 0)
    size = ctypes.c_size_t(len(attributes))
    if not _succeeds(libc.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, attributes, size)):
        return False
    options = f"size={_SCRATCH_BYTES},nr_inodes=4096,mode=1777".encode()
    return _succeeds(libc.mount(b"tmpfs", os.fsencode(scratch), b"tmpfs", _MS_NOSUID | _MS_NODEV, options))


def _hide(libc: ctypes.CDLL, stash: str, needed: set[str], *, home: str) -> None:
    """Cover private folders with empty ones and put the `needed` folders below them back in their places."""
    closed = {folder for path in needed if (folder := _private_ancestor(path)) is not None}
    named = {os.path.realpath(path) for path in (home, os.path.expanduser(f"~{_account()}"))}
    homes = {path for path in named if path != "/" and os.path.isdir(path)}
    private = _outermost((closed | homes) - needed)  # what is needed as a whole cannot be hidden
    libc.mount(b"tmpfs", os.fsencode(stash), b"tmpfs", 0, b"mode=755")
    kept = _outermost(path for path in needed if any(_is_below(path, folder) for folder in private))
    for i, path in enumerate(kept):
        target = os.path.join(stash, str(i))
        os.mkdir(target)
        libc.mount(os.fsencode(path), os.fsencode(target), None, _MS_BIND | _MS_REC, None)
    os.chdir(stash)  # its path may be hidden now
    for folder in private:
        libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", _MS_NOSUID | _MS_NODEV, b"mode=755")
    for i, path in enumerate(kept):
        os.makedirs(path, exist_ok=True)
        libc.mount(str(i).encode(), os.fsencode(path), None, _MS_BIND | _MS_REC, None)
    libc.umount2(b".", _MNT_DETACH)
    os.chdir("/")


def _account() -> str:
    """Name of the current user; empty for a user id without an account, whose home is then $HOME."""
    return next((entry.pw_name for entry in pwd.getpwall() if entry.pw_uid == os.getuid()), "")


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _outermost(paths: Iterable[str]) -> list[str]:
    """The paths without those that lie below another of them."""
    kept: list[str] = []
    for path in sorted(set(paths), key=len):
        if not any(_is_below(path, other) for other in kept):
            kept.append(path)
    return kept


def _private_ancestor(path: str) -> str | None:
    """The outermost folder on the way to `path` that other users cannot enter."""
    for folder in [*reversed(Path(path).parents), Path(path)]:
        if not _is_open(folder):
            return str(folder)
    return None


def _is_open(folder: Path) -> bool:
    return bool(folder.stat().st_mode & stat.S_IXOTH)


def is_reachable_by_others(paths: Iterable[str]) -> bool:
    """Whether another user can enter every one of `paths` that exists."""
    return all(_private_ancestor(os.path.realpath(path)) is None for path in paths if os.path.isdir(path))


def die_with_parent() -> None:
    """SIGKILL for this process as soon as its parent ends."""
    if sys.platform.startswith("linux"):
        _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def drop_privileges(worker_uid: int | None, *, is_user_namespace: bool) -> list[str]:
    """Become an unprivileged user in a session of its own that cannot gain privileges and dies with its parent."""
    held = []
    os.setsid()
    if worker_uid is not None:
        for uid in (worker_uid, _NOBODY):  # a container may map few ids
            try:
                os.setgroups([])
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)
            except OSError:
                continue
            held.append("user")
            break
    if sys.platform.startswith("linux"):
        libc = _libc()
        header = struct.pack("<Ii", _CAPABILITY_VERSION_3, 0)
        if _succeeds(libc.capset(header, bytes(24))) and is_user_namespace:
            held.append("user")
        if _succeeds(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)):
            held.append("privileges")
        die_with_parent()
    return held


def limit_resources(memory_bytes: int, *, is_own_user: bool) -> None:
    """Bound this process and its children; the address space to what it uses now and `memory_bytes` more.

    The number of processes is counted per user, so it is bounded only for a user of the worker's own.
    """
    _set_limit(resource.RLIMIT_CORE, 0)
    _set_limit(resource.RLIMIT_FSIZE, _MAX_FILE_BYTES)
    _set_limit(resource.RLIMIT_NOFILE, _MAX_OPEN_FILES)
    if is_own_user:
        _set_limit(resource.RLIMIT_NPROC, _MAX_PROCESSES)
    statm = Path("/proc/self/statm")
    used_bytes = int(statm.read_text().split()[0]) * resource.getpagesize() if statm.exists() else 1 << 30
    _set_limit(resource.RLIMIT_AS, used_bytes + memory_bytes)


def limit_cpu(seconds: float) -> None:
    """Let this process and each child it starts use `seconds` more CPU time."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    resource.setrlimit(
        resource.RLIMIT_CPU, (int(usage.ru_utime + usage.ru_stime + seconds) + 2, resource.RLIM_INFINITY)
    )


def _set_limit(which: int, value: int) -> None:
    _, hard = resource.getrlimit(which)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


def kill_descendants() -> None:
    """SIGKILL every process below this one, again and again until none is left (as their subreaper)."""
    while True:
        for pid in _descendants(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            os.wait()
        except ChildProcessError:
            return


def _descendants(root: int) -> Iterable[int]:
    try:
        children = Path(f"/proc/{root}/task/{root}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return
    for child in map(int, children):
        yield child
        yield from _descendants(child)
