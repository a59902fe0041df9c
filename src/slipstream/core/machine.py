"""The cores and the memory that this process may use, by its container's limits where these are lower."""

from __future__ import annotations

import math
import os
from pathlib import Path

CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")
FIRST_CGROUP_QUOTA = (Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us"))
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def num_cores() -> int:
    """Return how many cores this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for files in ((CGROUP_QUOTA,), FIRST_CGROUP_QUOTA):
        try:
            quota, period = (int(word) for file in files for word in file.read_text(encoding="ascii").split())
        except (OSError, ValueError):  # none, or "max"
            continue
        if quota > 0:  # -1: none
            cores = min(cores, max(1, math.ceil(quota / period)))
    return cores


def memory_bytes() -> int:
    """Return how much memory the processes of this container, or machine, may use."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in CGROUP_LIMITS:
        try:
            total = min(total, int(limit.read_text(encoding="ascii")))
        except (OSError, ValueError):
            continue
    return total
