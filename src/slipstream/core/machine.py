"""The cores and the memory that this process may use, by its container's limits where these are lower."""

from __future__ import annotations

import math
import os
from pathlib import Path

CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def num_cores() -> int:
    """Return how many cores this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = CGROUP_QUOTA.read_text(encoding="ascii").split()
        return min(cores, max(1, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # none, or "max"
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
