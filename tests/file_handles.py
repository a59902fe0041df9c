"""Stands for CUDA's handles on a CPU: memory that another process maps is a file."""

from __future__ import annotations

import uuid
from pathlib import Path

import torch

from slipstream.core.errors import WeightSyncError
from slipstream.weight_sync.cuda_ipc import CudaIpc
from slipstream.weight_sync.device_memory import DeviceMemory

CPU = torch.device("cpu")


class FileHandles:
    """Implements `cuda_ipc.Handles`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.paths: dict[int, Path] = {}

    def allocate(self, num_bytes: int) -> torch.Tensor:
        path = self.folder / f"gpu-{uuid.uuid4().hex}"
        memory = torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)
        self.paths[memory.data_ptr()] = path
        return memory

    def export(self, memory: torch.Tensor) -> bytes:
        return str(self.paths[memory.data_ptr()]).encode()

    def open(self, handle: bytes) -> torch.Tensor:
        path = Path(handle.decode())
        if not path.exists():
            raise WeightSyncError("the trainer's GPU memory cannot be mapped")
        return torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)


def ipc(run_id: str, folder: Path) -> CudaIpc:
    """A transport as between GPUs, but for the GPUs."""
    return CudaIpc(run_id, DeviceMemory(CPU), handles=FileHandles(folder), directories=(folder,))
