"""Slots in GPU memory that other processes of the machine map: versions go from GPU to GPU, never by way of the host.

A publishing rank has all its slots in one allocation, of which one handle is exported; every reader opens that once:
opening and closing handles takes longer than copying. What must be read and written by the host, markers, versions,
checksums and the `Holding`, lies in a small segment (`segment.py`), which holds the handle, too. So all that is said
there about order and ownership holds here: marker cleared, bytes, checksums, marker. `DeviceMemory` has waited for the
bytes before their checksums are on the host.

What CUDA's handles ask for:

- The allocation stays where it is until the process ends, also after `close`: a reader may be in the middle of a copy.
- Ordinals of GPUs are a process's own (CUDA_VISIBLE_DEVICES): GPUs go by their UUIDs.
- torch counts one reader per handle and has a thread's present stream wait for an event: both are of no use here, and
  harmless, as no memory is ever handed back and markers say what is complete.

Where memory cannot be exported (pages of `expandable_segments`, containers), or a reader cannot map or read it (another
namespace of IPC, another user, a GPU that it does not see), versions go by way of host memory: the publisher copies
each to a segment beside its own as well, with the same checksums. A reader asks for that, and keeps to it until it
ends.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from slipstream.core.errors import WeightSyncError, reason
from slipstream.core.peer_messages import Holding
from slipstream.weight_sync.copying import Memory
from slipstream.weight_sync.device_memory import DeviceMemory
from slipstream.weight_sync.segment import SegmentSlots, SharedMemory, device_bytes

MIRROR_WAIT_S = 5.0
"""How long a reader waits for versions in host memory before it asks for them again."""

_LOG = logging.getLogger(__name__)
_NOT_EXPORTED = b"-"
_EXPANDABLE = "expandable_segments:true"
_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class HostWantedError(WeightSyncError):
    """A reader cannot get at the bytes on the GPU: it is to ask the publisher for them in host memory."""


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
            got = str(error).splitlines()[0]
            raise WeightSyncError("the trainer's GPU memory cannot be mapped", got=got) from error
        return torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", here[0])).set_(storage)


class CudaIpc:
    """Transport between processes of one machine that compute on GPUs; `memory` is this rank's."""

    def __init__(
        self,
        run_id: str,
        memory: DeviceMemory,
        *,
        handles: CudaHandles | None = None,
        directories: tuple[Path, ...] | None = None,
    ) -> None:
        self.memory: Memory = memory
        self._handles = CudaHandles(memory.device) if handles is None else handles
        self._segments = SharedMemory(run_id, directories)
        self._exported: list[Tensor] = []  # until the process ends
        self._reads_host = False

    def create(self, num_bytes: int, num_slots: int, holding: Holding | None = None) -> SegmentSlots:
        memory = self._handles.allocate(device_bytes(num_bytes, num_slots))
        self._exported.append(memory)
        try:
            _check_allocator()
            handle = self._handles.export(memory)
        except WeightSyncError as error:
            _LOG.warning("versions go to all generators by way of host memory: %s", reason(error))
            handle = _NOT_EXPORTED
        slots = self._segments.create(num_bytes, num_slots, holding, handle).lie_in(memory)
        if handle == _NOT_EXPORTED:
            self.mirror(slots)
        return slots

    def mirror(self, slots: SegmentSlots) -> None:
        """Have the versions in `slots` in host memory, too, those to come as well. Idempotent."""
        if slots.mirror_name is None:
            slots.mirror_in(self._segments.create(slots.num_bytes, slots.num_slots, slots.holding))

    def attach(self, name: str) -> SegmentSlots:
        """Map slots on a GPU, or in host memory where that was found impossible.

        HostWantedError when it is found, and for as long as the publisher has not put them there.
        """
        segment = self._segments.attach(name)
        if not segment.handle:
            raise WeightSyncError("this segment's bytes are not on a GPU", got=name)
        if not self._reads_host and segment.handle != _NOT_EXPORTED:
            try:
                return segment.lie_in(self._handles.open(segment.handle))
            except WeightSyncError as error:
                raise self.give_up(error) from error
        until_s = time.monotonic() + MIRROR_WAIT_S
        while (mirror := segment.mirror_name) is None:
            if time.monotonic() > until_s:
                raise HostWantedError("the trainer has not put its versions in host memory yet", got=name)
            time.sleep(0.01)  # of each of the trainer's ranks: they send a reader nothing but what lies in its segment
        return self._segments.attach(mirror)

    def give_up(self, error: Exception) -> HostWantedError:
        """Read host memory from now on, as the GPU's gave `error`, which is raised where that was read already."""
        if self._reads_host:
            raise error
        self._reads_host = True
        _LOG.warning("versions come by way of host memory from now on: %s", reason(error))
        return HostWantedError("the trainer's GPU memory cannot be read: " + reason(error))


def _check_allocator() -> None:
    """Raise WeightSyncError where the environment asks torch for memory that CUDA cannot export."""
    for name in _ALLOCATOR_SETTINGS:
        settings = os.environ.get(name, "")
        if _EXPANDABLE in settings.lower().replace(" ", ""):
            raise WeightSyncError("memory in expandable segments cannot be shared", got=f"{name}={settings}")


def _uuid(index: int | None) -> str:
    return str(torch.cuda.get_device_properties(0 if index is None else index).uuid)
