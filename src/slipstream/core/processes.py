"""Processes of this package's: how they find its modules, and how another process sees their end."""

from __future__ import annotations

import ctypes
import os
import site
from pathlib import Path

_SYS_PIDFD_OPEN = 434  # the same everywhere


def open_pidfd(pid: int) -> int:
    """Return a descriptor that is readable once process `pid` has ended; no program started from here inherits it.

    OSError where there is no such process, or where the system does not permit this. Python lacks `os.pidfd_open` where
    it was built for older kernels, conda's and uv's for example.
    """
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    descriptor: int = ctypes.CDLL(None, use_errno=True).syscall(_SYS_PIDFD_OPEN, pid, 0)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return descriptor


def module_folders() -> dict[str, str]:
    """Return the variables by which a process with another home folder finds the modules that this one finds."""
    package_root = str(Path(__file__).resolve().parents[2])
    searched = map(os.path.abspath, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    found = {"PYTHONPATH": os.pathsep.join([package_root, *searched])}
    return found | ({"PYTHONUSERBASE": site.getuserbase()} if site.ENABLE_USER_SITE else {"PYTHONNOUSERSITE": "1"})
