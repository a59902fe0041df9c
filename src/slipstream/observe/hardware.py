"""The machine: what `slipstream doctor`, benchmarks and reports say about it."""

from __future__ import annotations

import logging
import os
import platform
import shutil
from pathlib import Path
from typing import Any

import msgspec

from slipstream.core.machine import memory_bytes, num_cores

log = logging.getLogger(__name__)


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """`num_cores` are those this process may use; `memory_bytes` honours a container's limit."""

    cpu: str
    num_cores: int
    num_cores_machine: int
    memory_bytes: int
    shm_free_bytes: int | None
    gpus: tuple[str, ...]
    torch_threads: int
    platform: str

    def lines(self) -> dict[str, str]:
        """Return the fields in words for people, in order."""
        shm = "none" if self.shm_free_bytes is None else f"{self.shm_free_bytes / 2**30:.1f} GiB free"
        return {
            "CPU": self.cpu,
            "cores": f"{self.num_cores} of {self.num_cores_machine}",
            "memory": f"{self.memory_bytes / 2**30:.1f} GiB",
            "shared memory": shm,
            "GPUs": ", ".join(self.gpus) or "none",
            "torch threads": str(self.torch_threads),
            "platform": self.platform,
        }

    def to_dict(self) -> dict[str, Any]:
        return dict(msgspec.to_builtins(self))


def describe() -> Hardware:
    """Look at this machine; never raises for what is missing, starts no device context beyond counting GPUs."""
    import torch  # imported here: most of this package, and its readers, need no torch

    try:
        gpus = tuple(
            f"{properties.name} ({properties.total_memory / 2**30:.0f} GiB)"
            for properties in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        )
    except (RuntimeError, AssertionError) as error:
        log.warning("the driver tells of %d GPUs, which CUDA cannot use: %s", torch.cuda.device_count(), error)
        gpus = ()
    return Hardware(
        cpu=cpu_model(),
        num_cores=num_cores(),
        num_cores_machine=os.cpu_count() or 1,
        memory_bytes=memory_bytes(),
        shm_free_bytes=shm_free_bytes(),
        gpus=gpus,
        torch_threads=torch.get_num_threads(),
        platform=platform.platform(),
    )


def cpu_model() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def shm_free_bytes(path: Path = Path("/dev/shm")) -> int | None:
    """Space for weight segments; None where there is no shared-memory file system."""
    return shutil.disk_usage(path).free if path.is_dir() else None
