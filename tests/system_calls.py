"""System calls that jails deny: name -> their numbers on x86-64 and aarch64, as the kernel's headers have them.

From asm/unistd_64.h and asm-generic/unistd.h of Linux; -1 where there is no such call.
"""

from __future__ import annotations

MACHINES = ("x86_64", "aarch64")


def _table(text: str) -> dict[str, tuple[int, int]]:
    entries = (entry.split() for entry in text.split(","))
    return {name: (int(x86), int(arm)) for name, x86, arm in entries}


DENIED = _table(
    """
    accept 43 202, accept4 288 242, acct 163 89, add_key 248 217, adjtimex 159 171, bind 49 200, bpf 321 280,
    chroot 161 51, clock_adjtime 305 266, clock_settime 227 112, connect 42 203, delete_module 176 106,
    fanotify_init 300 262, finit_module 313 273, fsconfig 431 431, fsmount 432 432, fsopen 430 430, fspick 433 433,
    init_module 175 105, io_uring_enter 426 426, io_uring_register 427 427, io_uring_setup 425 425, ioperm 173 -1,
    iopl 172 -1, kcmp 312 272, kexec_file_load 320 294, kexec_load 246 104, keyctl 250 219, listen 50 201,
    lookup_dcookie 212 18, memfd_create 319 279, memfd_secret 447 447, migrate_pages 256 238, modify_ldt 154 -1,
    mount 165 40, mount_setattr 442 442, move_mount 429 429, move_pages 279 239, mq_open 240 180, msgget 68 186,
    name_to_handle_at 303 264, open_by_handle_at 304 265, open_tree 428 428, perf_event_open 298 241,
    personality 135 92, pidfd_getfd 438 438, pivot_root 155 41, process_madvise 440 440, process_vm_readv 310 270,
    process_vm_writev 311 271, ptrace 101 117, quotactl 179 60, quotactl_fd 443 443, reboot 169 142,
    request_key 249 218, semget 64 190, setdomainname 171 162, sethostname 170 161, setns 308 268,
    settimeofday 164 170, shmat 30 196, shmctl 31 195, shmget 29 194, socket 41 198, swapoff 168 225, swapon 167 224,
    syslog 103 116, umount2 166 39, unshare 272 97, uselib 134 -1, userfaultfd 323 282, vhangup 153 58
    """
)

DENIED_ALONE = DENIED | _table(
    """
    execve 59 221, execveat 322 281, fork 57 -1, pidfd_open 434 434, pidfd_send_signal 424 424,
    rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, tkill 200 130, vfork 58 -1
    """
)
"""Those denied to a program that has to stay the only process."""


def numbers_of(calls: dict[str, tuple[int, int]], machine: str) -> list[int]:
    """Return the numbers of those of `calls` that `machine` has; none for a machine without a column."""
    if machine not in MACHINES:
        return []
    column = MACHINES.index(machine)
    return [numbers[column] for numbers in calls.values() if numbers[column] >= 0]
