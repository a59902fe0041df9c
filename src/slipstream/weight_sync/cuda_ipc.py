"""Slots in GPU memory that other processes of the machine map: versions go from GPU to GPU, never by way of the host.

A publishing rank has all its slots in one allocation, of which one handle is exported; every reader opens that once:
opening and closing handles takes longer than copying. What must be read and written by the host, markers, versions,
checksums and the `Holding`, lies in a small segment (`segment.py`), which holds the handle, too. So all that is said
there about order and ownership holds here: marker cleared, bytes, checksums, marker. `DeviceMemory` has waited for the
bytes before their checksums are on the host.

What CUDA's handles ask for:

- The allocation stays where it is until the process ends, also after `close`: a reader may be in the middle of a copy.
- A handle of memory that the allocator has put together from pages (`expandable_segments`) leads nowhere. Such runs are
  refused before they start.
- Ordinals of GPUs are a process's own (CUDA_VISIBLE_DEVICES): GPUs go by their UUIDs, and must be visible to readers.
- torch counts one reader per handle and has a thread's present stream wait for an event: both are of no use here, and
  harmless, as no memory is ever handed back and markers say what is complete.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from slipstream.core.errors import ConfigError, WeightSyncError
from slipstream.core.peer_messages import Holding
from slipstream.weight_sync.copying import Memory
from slipstream.weight_sync.device_memory import DeviceMemory
from slipstream.weight_sync.segment import SegmentSlots, SharedMemory, device_bytes

_EXPANDABLE = "expandable_segments:true"
_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class _Exported(msgspec.Struct, frozen=True, array_like=True):
    """The values that `torch.UntypedStorage._share_cuda_` gives, with the GPU's UUID in the place of its ordinal."""

    gpu: str
    handle: bytes
    num_bytes: int
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    event_waits: bool


class CudaHandles:
    """How a GPU's memory becomes visible to other processes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocate(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], zeros, that can be exported."""
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)

    def export(self, memory: Tensor) -> bytes:
        """Return what `open` needs in other processes, which must let go of it before this one's `memory` ends."""
        storage: Any = memory.untyped_storage()
        try:
            with torch.cuda.device(self._device):
                _, *shared = storage._share_cuda_()
        except RuntimeError as error:
            raise WeightSyncError("this GPU's memory cannot be shared", got=str(error).splitlines()[0]) from error
        return msgspec.msgpack.encode(_Exported(_uuid(self._device.index), *shared))

    def open(self, handle: bytes) -> Tensor:
        """Map the same memory. Raises WeightSyncError."""
        exported = msgspec.msgpack.decode(handle, type=_Exported)
        torch.cuda.init()  # type: ignore[no-untyped-call]
        here = [index for index in range(torch.cuda.device_count()) if _uuid(index) == exported.gpu]
        if not here:
            raise WeightSyncError(
                "the GPU that the trainer's weights lie on is not visible here",
                got=exported.gpu,
                allowed=", ".join(_uuid(index) for index in range(torch.cuda.device_count())),
                hint="trainer and generators of one machine need the same CUDA_VISIBLE_DEVICES",
            )
        storages: Any = torch.UntypedStorage
        try:
            with torch.cuda.device(here[0]):
                storage = storages._new_shared_cuda(
                    here[0],
                    exported.handle,
                    exported.num_bytes,
                    exported.offset,
                    exported.counter,
                    exported.counter_offset,
                    exported.event,
                    exported.event_waits,
                )
        except RuntimeError as error:
            raise WeightSyncError(
                "the trainer's GPU memory cannot be mapped",
                got=str(error).splitlines()[0],
                hint="has the trainer ended? Containers must share the namespace of processes and of IPC",
            ) from error
        return torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", here[0])).set_(storage)


class CudaIpc:
    """Transport between processes of one machine that compute on GPUs; `memory` is this rank's.

    Raises ConfigError where torch's allocator is set to memory that cannot be exported.
    """

    def __init__(
        self,
        run_id: str,
        memory: DeviceMemory,
        *,
        handles: CudaHandles | None = None,
        directories: tuple[Path, ...] | None = None,
    ) -> None:
        check_allocator()
        self.memory: Memory = memory
        self._handles = CudaHandles(memory.device) if handles is None else handles
        self._segments = SharedMemory(run_id, directories)
        self._exported: list[Tensor] = []  # until the process ends

    def create(self, num_bytes: int, num_slots: int, holding: Holding | None = None) -> SegmentSlots:
        memory = self._handles.allocate(device_bytes(num_bytes, num_slots))
        self._exported.append(memory)
        return self._segments.create(num_bytes, num_slots, holding, self._handles.export(memory)).lie_in(memory)

    def attach(self, name: str) -> SegmentSlots:
        segment = self._segments.attach(name)
        if not segment.handle:
            raise WeightSyncError("this segment's bytes are not on a GPU", got=name)
        return segment.lie_in(self._handles.open(segment.handle))


def check_allocator() -> None:
    """Raise ConfigError where the environment asks torch for memory that CUDA cannot export."""
    for name in _ALLOCATOR_SETTINGS:
        settings = os.environ.get(name, "")
        if _EXPANDABLE in settings.lower().replace(" ", ""):
            raise ConfigError(
                "versions go from GPU to GPU, and memory in expandable segments cannot be shared",
                got=f"{name}={settings}",
                allowed="without expandable_segments",
            )


def _uuid(index: int | None) -> str:
    return str(torch.cuda.get_device_properties(0 if index is None else index).uuid)
