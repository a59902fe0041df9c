"""Barriers around a worker process, each applied where the platform permits it and reported by name.

    network     a network namespace without interfaces, or no system calls for sockets
    processes   a process namespace: every descendant dies with its first process, whatever session it is in
    files       a mount namespace: everything read-only but a scratch tmpfs, /proc shows only the worker
    user        another user id (as root), or a user namespace without capabilities
    privileges  no_new_privs: set-uid programs give nothing
    limits      address space, CPU time, file size, open files, processes, core dumps
    syscalls    a filter of system calls (`seccomp.py`)

Linux only; elsewhere `limits` is all there is, without the address space. Nothing here imports more than the standard
library.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import pwd
import resource
import signal
import socket
import stat
import struct
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slipstream.core.lifeline import die_with_parent
from slipstream.jail import seccomp

Network = Literal["none", "gateway", "host"]
"""The network of a worker: none, one of its own that reaches nothing but itself, or this machine's."""
WITHOUT = {
    "network": "workers reach every network that you reach",
    "processes": "workers see other processes; what they start is found and killed one by one",
    "files": "workers read and write files with your rights",
    "user": "workers can signal and debug your processes, and raise their limits up to yours",
    "privileges": "set-uid programs give workers their rights",
    "limits": "memory, processor time, files and processes of a worker are bounded by its deadline alone",
    "syscalls": "all of the kernel is open to workers: sockets, memory files, new namespaces",
}
"""What it means for programs and functions in workers that a barrier is missing."""
BARRIERS = tuple(WITHOUT)
REQUIRED_FOR_UNSAFE = frozenset({"network", "processes", "user", "privileges", "limits"})

_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
_CLONE_NEWPID, _CLONE_NEWNET = 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 4, 36, 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 47, 2
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000  # the call's number is the same everywhere
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID = 1, 2
_MNT_DETACH = 2
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_M_ARENA_MAX, _MAX_ARENAS = -8, 2
_CAPABILITY_VERSION_3 = 0x20080522

# Far from accounts; of its own per worker, so that process limits count its processes only, and for its programs.
_FIRST_WORKER_UID, _FIRST_PROGRAM_UID = 2_000_000_000, 2_100_000_000
_NOBODY = 65534
MAX_PROCESSES = 64
MAX_OPEN_FILES = 256
_MAX_FILE_BYTES = 16 << 20
_SCRATCH_BYTES = 64 << 20

# Where users and daemons leave what is for themselves: files, sockets of agents, terminals, weights on their way.
_SHARED_FOLDERS = ("/tmp", "/var/tmp", "/run", "/dev/shm", "/dev/pts", "/dev/mqueue")
_LIBRARIES = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64")
_DEVICES = ("null", "zero", "urandom", "random")


@dataclass(frozen=True)
class Namespaces:
    """The namespaces that `enter_namespaces` has entered."""

    is_separate: bool = False
    is_user_namespace: bool = False
    has_loopback: bool = False  # of its own
    worker_uid: int | None = None  # to switch to, as root
    program_uid: int | None = None  # the same for programs that the worker lets run


def _call(name: str, *arguments: Any) -> bool:
    """Call a function of the C library; whether it succeeded."""
    return bool(getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) == 0)


def enter_namespaces(*, network: Network = "none") -> Namespaces:
    """Put the next forked child into namespaces of its own: processes, IPC, and network unless that is the host's."""
    if not sys.platform.startswith("linux"):
        return Namespaces()
    _call("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    flags = _CLONE_NEWPID | _CLONE_NEWIPC | (0 if network == "host" else _CLONE_NEWNET)
    if os.geteuid() == 0:
        is_separate = _call("unshare", flags)
        return Namespaces(
            is_separate=is_separate,
            has_loopback=is_separate and network == "gateway" and _raise_loopback(),
            worker_uid=_FIRST_WORKER_UID + os.getpid(),
            program_uid=_FIRST_PROGRAM_UID + os.getpid(),
        )
    uid, gid = os.geteuid(), os.getegid()
    if not _call("unshare", flags | _CLONE_NEWUSER):
        return Namespaces()
    with contextlib.suppress(OSError):  # AppArmor may grant the namespaces and deny all capabilities in them
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    has_loopback = network == "gateway" and _raise_loopback()
    return Namespaces(is_separate=True, is_user_namespace=True, has_loopback=has_loopback)


def _raise_loopback() -> bool:
    """Let this network namespace, which is new, reach itself at 127.0.0.1. Whether that was permitted."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH14x", b"lo", _IFF_UP)
        try:
            fcntl.ioctl(any_socket, _SIOCSIFFLAGS, request)
        except OSError:
            return False
    return True


def _enter_mount_namespace() -> bool:
    return _call("unshare", _CLONE_NEWNS) and _call("mount", None, b"/", None, _MS_REC | _MS_PRIVATE, None)


def confine_files(scratch: str, needed: Iterable[str], *, private: Iterable[str], is_other_user: bool) -> bool:
    """Enter a mount namespace with all read-only but a tmpfs at `scratch`. False where that is not permitted.

    `private` folders, the account's home, folders shared by all, and those that another user cannot enter, become empty
    except for `needed` folders below them (the interpreter's, and those modules are imported from). A needed folder
    that is itself closed to others is of no use to another user, so it does not count.
    """
    if not _enter_mount_namespace():
        return False
    guarded = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    if not _call("mount", b"proc", b"/proc", b"proc", guarded, None):
        _call("mount", b"tmpfs", b"/proc", b"tmpfs", guarded, None)
    folders = [path for path in needed if os.path.isdir(path)]
    kept = {os.path.realpath(path) for path in folders if _is_open(Path(path)) or not is_other_user}
    _hide(scratch, kept, private=private)
    os.makedirs(scratch, exist_ok=True)
    return _make_read_only("/") and _mount_scratch(scratch)


def _make_read_only(root: str) -> bool:
    """Let nothing below `root` be written, and no set-uid program there give anything."""
    attributes = struct.pack("<QQQQ", _MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID, 0, 0, 0)
    size = ctypes.c_size_t(len(attributes))
    return _call("syscall", _SYS_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(root), _AT_RECURSIVE, attributes, size)


def _mount_scratch(folder: str) -> bool:
    options = f"size={_SCRATCH_BYTES},nr_inodes=4096,mode=1777".encode()
    return _call("mount", b"tmpfs", os.fsencode(folder), b"tmpfs", _MS_NOSUID | _MS_NODEV, options)


def _hide(stash: str, needed: set[str], *, private: Iterable[str]) -> None:
    """Cover private folders with empty ones and put the `needed` folders below them back in their places."""
    closed = {folder for path in needed if (folder := _private_ancestor(path)) is not None}
    named = {os.path.realpath(path) for path in (*private, *_SHARED_FOLDERS, os.path.expanduser(f"~{_account()}"))}
    hidden = {path for path in named if path != "/" and os.path.isdir(path)}
    needed = needed - hidden  # a run that starts in a home folder shows workers none of it
    hidden |= closed - needed
    _call("mount", b"tmpfs", os.fsencode(stash), b"tmpfs", 0, b"mode=755")
    kept = {path: str(i) for i, path in enumerate(needed) if any(_is_below(path, folder) for folder in hidden)}
    for path, name in kept.items():
        target = os.path.join(stash, name)
        os.mkdir(target)
        _call("mount", os.fsencode(path), os.fsencode(target), None, _MS_BIND | _MS_REC, None)
    os.chdir(stash)  # its path may be hidden now
    for path in sorted(hidden | kept.keys(), key=len):  # one may lie in another: a run in a project at home
        if path in hidden:
            _call("mount", b"tmpfs", os.fsencode(path), b"tmpfs", _MS_NOSUID | _MS_NODEV, b"mode=755")
        else:
            os.makedirs(path, exist_ok=True)
            _call("mount", kept[path].encode(), os.fsencode(path), None, _MS_BIND | _MS_REC, None)
    _call("umount2", b".", _MNT_DETACH)
    os.chdir("/")


def enter_bare_root(stash: str, needed: Iterable[str]) -> bool:
    """Enter a mount namespace with the `needed` folders, the C library's, four devices and an empty /tmp: nothing else.

    All of it read-only. `stash` is an empty folder that is used on the way. False where that is not permitted.
    """
    if not _enter_mount_namespace():
        return False
    _call("mount", b"tmpfs", os.fsencode(stash), b"tmpfs", 0, b"mode=755")
    libraries = list(filter(os.path.exists, _LIBRARIES))
    for link in filter(os.path.islink, libraries):
        os.symlink(os.readlink(link), stash + link)
    folders = {os.path.realpath(path) for path in needed} | {path for path in libraries if not os.path.islink(path)}
    for path in _outermost(folders):
        os.makedirs(stash + path, exist_ok=True)
        _call("mount", os.fsencode(path), os.fsencode(stash + path), None, _MS_BIND | _MS_REC, None)
    os.mkdir(stash + "/dev")
    for name in _DEVICES:
        Path(stash, "dev", name).touch()
        _call("mount", f"/dev/{name}".encode(), os.fsencode(f"{stash}/dev/{name}"), None, _MS_BIND, None)
    os.mkdir(stash + "/tmp")
    if not _make_read_only(stash):
        return False
    os.chdir(stash)
    is_entered = _call("syscall", seccomp.number("pivot_root"), b".", b".")
    _call("umount2", b".", _MNT_DETACH)  # the former root, which lies over the new one now
    os.chdir("/")
    return is_entered


def begin_process_namespace() -> bool:
    """Make the next child the first process of a namespace of its own; `end_process_namespace` takes it back."""
    return sys.platform.startswith("linux") and _call("unshare", _CLONE_NEWPID)


def end_process_namespace(own: int) -> None:
    """Children belong to this process' own namespace again: `own` is a descriptor of /proc/self/ns/pid."""
    _call("setns", own, _CLONE_NEWPID)


def leave_all_others(scratch: str | None) -> bool:
    """In a new process: a network, IPC and mount namespace of its own, with a tmpfs at `scratch` if given."""
    if not _call("unshare", _CLONE_NEWNS | _CLONE_NEWIPC | _CLONE_NEWNET):
        return False
    return scratch is None or _mount_scratch(scratch)


def keep_capabilities() -> None:
    """Let the program that this process becomes have its capabilities, also where its user is not root."""
    header = struct.pack("<Ii", _CAPABILITY_VERSION_3, 0)
    data = ctypes.create_string_buffer(24)
    if not _call("capget", header, data):
        return
    low, high = struct.unpack("<III", data.raw[:12])[1], struct.unpack("<III", data.raw[12:])[1]
    _call("capset", header, struct.pack("<6I", low, low, low, high, high, high))
    for capability in range(64):
        if (high << 32 | low) >> capability & 1:
            _call("prctl", _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, capability, 0, 0)


def wake_at_childrens_ends() -> int:
    """Return a descriptor that becomes readable whenever a child of this process ends."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    return reading


def be_killed_first() -> None:
    """Let the system end this process and its children first, not the trainer, when memory runs out."""
    with contextlib.suppress(OSError):  # no /proc, or one that is not to be written to
        Path("/proc/self/oom_score_adj").write_text("1000")


def become_unreadable() -> None:
    """No process of the same user may look at this one's memory, environment or descriptors."""
    if sys.platform.startswith("linux"):
        _call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)


def filter_syscalls(
    held: Collection[str], *, alone_as: int | None = None, network: Network = "none", listens: bool = False
) -> list[str]:
    """Install the filter; the barriers that hold by it. It is useless without `no_new_privs`, and not permitted."""
    has_sockets = network != "none"
    if "privileges" not in held or not seccomp.install(
        alone_as=alone_as,
        allow_network=has_sockets,
        allow_listening=has_sockets and listens,
        only_internet=network == "gateway",
    ):
        return []
    return ["syscalls"] if has_sockets else ["syscalls", "network"]


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
    """Return whether another user can enter every one of `paths` that exists."""
    return all(_private_ancestor(os.path.realpath(path)) is None for path in paths if os.path.isdir(path))


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
        header = struct.pack("<Ii", _CAPABILITY_VERSION_3, 0)
        if _call("capset", header, bytes(24)) and is_user_namespace:
            held.append("user")
        if _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
            held.append("privileges")
        die_with_parent()
    return held


def limit_resources(
    memory_bytes: int,
    *,
    is_own_user: bool,
    used_bytes: int | None = None,
    file_bytes: int = _MAX_FILE_BYTES,
    open_files: int = MAX_OPEN_FILES,
    num_processes: int = MAX_PROCESSES,
) -> None:
    """Bound this process and its children; the address space to what it uses now and `memory_bytes` more.

    The number of processes, threads included, is counted per user, so it is bounded only for a user of the worker's
    own. macOS has no limit of the address space.
    """
    _set_limit(resource.RLIMIT_CORE, 0)
    _set_limit(resource.RLIMIT_FSIZE, file_bytes)
    _set_limit(resource.RLIMIT_NOFILE, open_files)
    if is_own_user:
        _set_limit(resource.RLIMIT_NPROC, num_processes)
    if sys.platform.startswith("linux"):
        _set_limit(resource.RLIMIT_AS, (address_space_bytes() if used_bytes is None else used_bytes) + memory_bytes)


def address_space_bytes() -> int:
    """Return the bytes that this process has mapped; a GiB where the system does not say."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[0]) * resource.getpagesize() if statm.exists() else 1 << 30


def use_few_arenas() -> None:
    """Let all threads allocate from a few areas: one for each thread would take 64 MiB of the address space."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_ARENA_MAX, _MAX_ARENAS)


def limit_cpu(seconds: float) -> None:
    """Let this process and each child it starts use `seconds` more CPU time."""
    usage, (_, hard) = resource.getrusage(resource.RUSAGE_SELF), resource.getrlimit(resource.RLIMIT_CPU)
    soft = int(usage.ru_utime + usage.ru_stime + seconds) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


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


def kill_orphans() -> None:
    """SIGKILL what programs of this process have left behind: the other children of its parent, which inherits them.

    All are stopped before the first is killed, so that none starts another meanwhile.
    """
    stopped: set[int] = set()
    while found := _siblings() - stopped:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGSTOP)
        stopped |= found
    for pid in stopped:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    try:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except (FileNotFoundError, ProcessLookupError):
        return []


def _siblings() -> set[int]:
    """The other children of this process's parent, by their numbers here: /proc may be that of a namespace outside."""
    found = [child for parent in _numbers("self", "PPid") for child in _children(parent)]
    return {number for child in found for number in _numbers(child, "NSpid")[-1:]} - {os.getpid()}


def _numbers(pid: int | str, field: str) -> list[int]:
    """Return the numbers of a field of a process's status in /proc; none where there is no such process, or field."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [int(number) for line in lines if line.startswith(f"{field}:") for number in line.split()[1:]]


def _descendants(root: int) -> Iterable[int]:
    for child in _children(root):
        yield child
        yield from _descendants(child)
