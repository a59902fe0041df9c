"""A filter of system calls (seccomp, `SECCOMP_MODE_FILTER`), in classic BPF and with nothing but ctypes.

What a verifier or a program has no use for is answered with EPERM, as where it lacks the right: sockets, namespaces,
mounts, other processes' memory, memory that no address space counts (memfd, System V), the kernel's seldom-used ends.
A foreign calling convention (32-bit, x32) has no calls at all. Needs no privileges once `no_new_privs` is set.

Linux on x86-64 and aarch64; elsewhere `install` returns False.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
import sys
from collections.abc import Collection

_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16  # in struct seccomp_data
_X32_BIT = 0x40000000

_NEW_NAMESPACES = 0x7E020000  # every CLONE_NEW* that `clone` takes
_CLONE_THREAD = 0x00010000
_AF_UNIX, _AF_INET, _AF_INET6, _SOCK_STREAM, _SOCK_TYPE_MASK = 1, 2, 10, 1, 0xF
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C  # put characters into a terminal's input

_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # AUDIT_ARCH_*, column of the tables


def _table(text: str) -> dict[str, tuple[int, int]]:
    """Read 'call number number, ...': on x86-64 and aarch64, -1 where an architecture has no such call."""
    entries = (entry.split() for entry in text.split(",") if entry.strip())
    return {call: (int(x86), int(arm)) for call, x86, arm in entries}


# Sockets; other processes; namespaces and mounts; handles, swap and quotas; memory that no address space counts; seldom
# used ends of the kernel; processor modes; the machine; clocks and names. Numbers from 424 on are the same everywhere.
_DENIED = _table(
    """
    socket 41 198, connect 42 203, accept 43 202, accept4 288 242, bind 49 200, listen 50 201,
    ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, process_madvise 440 440, kcmp 312 272,
    pidfd_getfd 438 438, move_pages 279 239, migrate_pages 256 238,
    unshare 272 97, setns 308 268, mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51, fsopen 430 430,
    fsconfig 431 431, fsmount 432 432, fspick 433 433, open_tree 428 428, move_mount 429 429, mount_setattr 442 442,
    open_by_handle_at 304 265, name_to_handle_at 303 264, swapon 167 224, swapoff 168 225, quotactl 179 60,
    quotactl_fd 443 443,
    memfd_create 319 279, memfd_secret 447 447, shmget 29 194, shmat 30 196, shmctl 31 195, semget 64 190,
    msgget 68 186, mq_open 240 180,
    bpf 321 280, perf_event_open 298 241, userfaultfd 323 282, io_uring_setup 425 425, io_uring_enter 426 426,
    io_uring_register 427 427, fanotify_init 300 262, keyctl 250 219, add_key 248 217, request_key 249 218,
    personality 135 92, modify_ldt 154 -1, iopl 172 -1, ioperm 173 -1, uselib 134 -1, lookup_dcookie 212 18,
    kexec_load 246 104, kexec_file_load 320 294, init_module 175 105, finit_module 313 273, delete_module 176 106,
    reboot 169 142, acct 163 89, syslog 103 116, vhangup 153 58,
    settimeofday 164 170, clock_settime 227 112, adjtimex 159 171, clock_adjtime 305 266, sethostname 170 161,
    setdomainname 171 162,
    """
)

_CONNECTING = frozenset({"socket", "connect", "bind"})  # the resolver of the C library binds, too
_LISTENING = _CONNECTING | {"listen", "accept", "accept4"}

# What a single program may not do either, which has no children and signals nobody but itself.
_DENIED_ALONE = _table(
    """
    fork 57 -1, vfork 58 -1, execve 59 221, execveat 322 281, tkill 200 130, rt_sigqueueinfo 129 138,
    rt_tgsigqueueinfo 297 240, pidfd_open 434 434, pidfd_send_signal 424 424,
    """
)
_CLONE, _CLONE3 = (56, 220), (435, 435)
_SOCKETPAIR, _PRLIMIT64, _IOCTL = (53, 199), (302, 261), (16, 29)
_KILL, _TGKILL = (62, 129), (234, 131)


def install(
    *,
    alone_as: int | None = None,
    allow_network: bool = False,
    allow_listening: bool = False,
    only_internet: bool = False,
) -> bool:
    """Filter this process and all it will start, for good. False where the kernel or the architecture has no filters.

    `alone_as`, the process' own id, makes it stay the only one: threads, but no processes, programs, or signals to
    others. With `allow_network` it may open sockets and connect them; with `allow_listening` also take connections;
    with `only_internet` sockets of TCP and UDP alone: a network namespace does not hold those of files and of VMs.
    """
    architecture = _ARCHITECTURES.get(platform.machine())
    if not sys.platform.startswith("linux") or architecture is None or sys.byteorder != "little":
        return False
    exempt = _LISTENING if allow_listening else _CONNECTING if allow_network else frozenset()
    program = _program(*architecture, alone_as, exempt=exempt, only_internet=only_internet)
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))  # struct sock_fprog
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0) == 0)


def number(call: str) -> int:
    """The number of a system call of the tables on this machine; -1, which no call has, on one without tables."""
    architecture = _ARCHITECTURES.get(platform.machine())
    return -1 if architecture is None else _DENIED[call][architecture[1]]


def _program(
    audit: int, column: int, alone_as: int | None, *, exempt: Collection[str], only_internet: bool = False
) -> bytes:
    """Instructions of struct sock_filter: a call goes from rule to rule until one returns; `exempt` are allowed."""
    refused = _step(_RETURN, _ERRNO | errno.EPERM)
    rules = [
        _step(_LOAD, _ARCH_AT),
        _step(_EQUAL, audit, 1, 0),
        refused,
        _step(_LOAD, _NUMBER_AT),
    ]
    if column == 0:
        rules += [_step(_AT_LEAST, _X32_BIT, 0, 1), refused]
    denied = _DENIED | ({} if alone_as is None else _DENIED_ALONE)
    for call, numbers in denied.items():
        if numbers[column] >= 0 and call not in exempt:
            rules += [_step(_EQUAL, numbers[column], 0, 1), refused]
    allowed = _step(_RETURN, _ALLOW)
    # The flags of clone3 lie in memory, which a filter cannot see: without it the C library uses clone.
    rules += _rule(_CLONE3[column], [_step(_RETURN, _ERRNO | errno.ENOSYS)])
    clone = [_argument(0), _step(_ANY_BIT, _NEW_NAMESPACES, 0, 1), refused]
    if alone_as is not None:
        clone += [_step(_ANY_BIT, _CLONE_THREAD, 1, 0), refused]
        for number in (_KILL[column], _TGKILL[column]):
            rules += _rule(number, [_argument(0), _step(_EQUAL, alone_as, 1, 0), refused, allowed])
    rules += _rule(_CLONE[column], [*clone, allowed])
    if only_internet:
        family = [_argument(0), _step(_EQUAL, _AF_INET, 2, 0), _step(_EQUAL, _AF_INET6, 1, 0), refused, allowed]
        rules += _rule(_DENIED["socket"][column], family)
    pair = [_argument(0), _step(_EQUAL, _AF_UNIX, 1, 0), refused]
    pair += [_argument(1), _step(_AND, _SOCK_TYPE_MASK), _step(_EQUAL, _SOCK_STREAM, 1, 0), refused, allowed]
    rules += _rule(_SOCKETPAIR[column], pair)
    rules += _rule(_PRLIMIT64[column], [_argument(0), _step(_EQUAL, 0, 1, 0), refused, allowed])
    terminal = [_argument(1), _step(_EQUAL, _TIOCSTI, 1, 0), _step(_EQUAL, _TIOCLINUX, 0, 1), refused, allowed]
    rules += _rule(_IOCTL[column], terminal)
    return b"".join([*rules, allowed])


def _rule(number: int, body: list[bytes]) -> list[bytes]:
    """`body`, which returns in any case, for system call `number`."""
    return [_step(_EQUAL, number, 0, len(body)), *body]


def _argument(index: int) -> bytes:
    return _step(_LOAD, _ARGUMENTS_AT + 8 * index)  # the lower half: all arguments looked at are 32 bits wide


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)
