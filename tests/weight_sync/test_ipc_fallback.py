"""Where a GPU's memory cannot be shared, versions go by way of host memory: faults at either end, on a CPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from file_handles import CPU, FileHandles
from test_weight_sync import NUM_PARAMS, TOKENS, Parameters

from slipstream.core.channel import connect_local, wait
from slipstream.core.channel_spec import ChannelSpec, Kind
from slipstream.core.errors import WeightSyncError
from slipstream.core.peer_messages import WeightsWanted
from slipstream.core.types import Message
from slipstream.weight_sync import cuda_ipc
from slipstream.weight_sync.cuda_ipc import CudaHandles, CudaIpc
from slipstream.weight_sync.device_memory import DeviceMemory
from slipstream.weight_sync.publisher import Publisher
from slipstream.weight_sync.subscriber import Subscriber


class Unshareable(FileHandles):
    """A GPU whose driver exports nothing."""

    def export(self, memory: torch.Tensor) -> bytes:
        raise WeightSyncError("this GPU's memory cannot be shared", got="CUDA error: operation not supported")


class Foreign(FileHandles):
    """A reader in another namespace of IPC, which counts its attempts."""

    attempts = 0

    def open(self, handle: bytes) -> torch.Tensor:
        self.attempts += 1
        raise WeightSyncError("the trainer's GPU memory cannot be mapped", got="CUDA error: invalid device context")


class Pair:
    """A publisher, and readers that each have handles and memory of their own."""

    def __init__(self, folder: Path, sender: FileHandles, *readers: FileHandles, is_threaded: bool = True) -> None:
        self.folder, self.is_threaded = folder, is_threaded
        specs = [
            spec
            for replica in range(len(readers))
            for spec in (
                ChannelSpec(f"offers_{replica}", Kind.WEIGHTS, "t.offers", f"g{replica}.offers"),
                ChannelSpec(f"releases_{replica}", Kind.GATHER, f"g{replica}.releases", "t.releases"),
            )
        ]
        self.ports = connect_local(specs)
        outputs, inputs = self.ports["t"].outputs, self.ports["t"].inputs
        self.transport = self.ipc(sender)
        self.publisher = Publisher(
            outputs["offers"], inputs["releases"], self.transport, num_readers=len(readers), num_slots=1
        )
        self.live = torch.zeros(NUM_PARAMS)
        self.publisher.open(self.live)
        self.readers = [self.reader(replica, handles) for replica, handles in enumerate(readers)]

    def ipc(self, handles: FileHandles, memory: DeviceMemory | None = None) -> CudaIpc:
        memory = DeviceMemory(CPU) if memory is None else memory
        return CudaIpc("test", memory, handles=handles, directories=(self.folder,))

    def reader(self, replica: int, handles: FileHandles, memory: DeviceMemory | None = None) -> Subscriber:
        ports, parameters = self.ports[f"g{replica}"], Parameters()
        subscriber = Subscriber(
            ports.inputs["offers"], ports.outputs["releases"], self.ipc(handles, memory), replica=replica
        )
        subscriber.open(
            parameters, lambda tokens: parameters.flat[: len(tokens) - 1].numpy(), 1e-6, is_threaded=self.is_threaded
        )
        return subscriber

    def send(self, version: int) -> torch.Tensor:
        """Publish random weights, whose bits every reader is to have."""
        self.live.normal_(generator=torch.Generator().manual_seed(version))
        assert self.publisher.publish(version, TOKENS, self.live[:3].numpy().copy())
        return self.live.clone()

    def commit(self, version: int, sent: torch.Tensor, *subscribers: Subscriber) -> None:
        for subscriber in subscribers or self.readers:
            for _ in range(200):
                self.publisher.poll()
                if not subscriber.poll() and subscriber.pending_version == version:
                    break
                wait([], extra_fds=subscriber.wait_fds(), timeout_s=0.05)
            swap = subscriber.commit()
            assert swap is not None
            assert swap.version == version
            assert torch.equal(subscriber._parameters.flat.view(torch.int32), sent.view(torch.int32))
        self.publisher.poll()

    def close(self) -> None:
        self.publisher.close()
        for subscriber in self.readers:
            subscriber.close()
        for ports in self.ports.values():
            ports.close()


@pytest.fixture
def made() -> Iterator[list[Pair]]:
    pairs: list[Pair] = []
    yield pairs
    for pair in pairs:
        pair.close()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_sender_that_cannot_export_says_so_once_and_every_version_arrives(
    tmp_path: Path, made: list[Pair], caplog: pytest.LogCaptureFixture
) -> None:
    foreign = Foreign(tmp_path)
    made.append(pair := Pair(tmp_path, Unshareable(tmp_path), foreign, FileHandles(tmp_path)))
    for version in range(4):
        pair.commit(version, pair.send(version))
    assert foreign.attempts == 0, "there is nothing to open"
    (warning,) = warnings_of(caplog)
    assert "by way of host memory" in warning
    assert "operation not supported" in warning
    assert [reader.stats.num_failed_transfers for reader in pair.readers] == [0, 0]
    pair.close()
    assert not list(tmp_path.glob("slipstream*")), "the segments are gone, both of them"


@pytest.mark.parametrize("is_threaded", [False, True])
def test_a_reader_that_cannot_open_asks_and_the_others_go_on_as_before(
    tmp_path: Path,
    made: list[Pair],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    is_threaded: bool,
) -> None:
    monkeypatch.setattr(cuda_ipc, "MIRROR_WAIT_S", 0.05)  # nobody answers while the one thread waits
    foreign, near = Foreign(tmp_path), FileHandles(tmp_path)
    made.append(pair := Pair(tmp_path, FileHandles(tmp_path), foreign, near, is_threaded=is_threaded))
    for version in range(4):
        pair.commit(version, pair.send(version))
    assert foreign.attempts == 1, "it stays with host memory"
    (warning,) = warnings_of(caplog)
    assert "invalid device context" in warning
    segments = [reader._fetch._segments._sources[0] for reader in pair.readers]
    assert [bool(segment.handle) for segment in segments] == [False, True]
    assert [reader.stats.num_failed_transfers for reader in pair.readers] == [0, 0]


def test_a_reader_that_fails_later_loses_no_version_and_its_successor_tries_anew(
    tmp_path: Path, made: list[Pair], caplog: pytest.LogCaptureFixture
) -> None:
    made.append(pair := Pair(tmp_path, FileHandles(tmp_path), FileHandles(tmp_path)))
    pair.readers[0].close()
    memory = DeviceMemory(CPU)
    pair.readers[0] = pair.reader(0, FileHandles(tmp_path), memory)
    for version in range(2):
        pair.commit(version, pair.send(version))
    mapped = pair.readers[0]._fetch._segments._sources[0]
    assert mapped.handle

    gather = DeviceMemory.gather

    def fails(copies, source, target, checksums) -> None:
        if source.data_ptr() in {mapped.data(slot).data_ptr() for slot in range(mapped.num_slots)}:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        gather(memory, copies, source, target, checksums)

    memory.gather = fails
    for version in range(2, 5):
        pair.commit(version, sent := pair.send(version))
    (warning,) = warnings_of(caplog)
    assert "illegal memory access" in warning
    assert pair.readers[0].stats.num_committed == 5

    pair.readers[0].close()
    pair.publisher.drop_reader(0)
    pair.readers[0] = successor = pair.reader(0, FileHandles(tmp_path))
    pair.publisher.add_reader(0)
    pair.commit(4, sent)
    pair.commit(5, pair.send(5))
    assert successor._fetch._segments._sources[0].handle, "a new process has the GPU's memory"
    assert len(warnings_of(caplog)) == 1


def test_a_reader_without_room_for_once_stays_with_the_trainers_memory(
    tmp_path: Path, made: list[Pair], caplog: pytest.LogCaptureFixture
) -> None:
    made.append(pair := Pair(tmp_path, FileHandles(tmp_path), FileHandles(tmp_path)))
    pair.commit(0, pair.send(0))
    memory = pair.readers[0]._transport.memory
    gather, failures = memory.gather, iter([torch.OutOfMemoryError("CUDA out of memory")])

    def fails_once(*arguments: Any) -> None:
        for error in failures:
            raise error
        gather(*arguments)

    memory.gather = fails_once
    pair.send(1)
    for _ in range(200):
        pair.readers[0].poll()
        if pair.readers[0].stats.num_failed_transfers:
            break
        wait([], extra_fds=pair.readers[0].wait_fds(), timeout_s=0.05)
    pair.publisher.poll()
    pair.commit(2, pair.send(2))
    assert pair.readers[0].stats.num_failed_transfers == 1
    assert pair.readers[0]._fetch._segments._sources[0].handle
    assert not [line for line in warnings_of(caplog) if "host memory" in line]


def test_a_reader_that_host_memory_fails_too_ends(tmp_path: Path, made: list[Pair]) -> None:
    made.append(pair := Pair(tmp_path, FileHandles(tmp_path), Foreign(tmp_path)))
    pair.commit(0, pair.send(0))
    memory = pair.readers[0]._transport.memory

    def fails(*_: object) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    memory.gather = fails
    pair.send(1)
    pair.readers[0].poll()
    while not pair.readers[0]._staging.is_done.is_set():
        wait([], extra_fds=pair.readers[0].wait_fds(), timeout_s=0.05)
    with pytest.raises(RuntimeError, match="device-side assert"):
        pair.readers[0].poll()


def test_of_several_ranks_each_puts_its_part_in_host_memory(tmp_path: Path) -> None:
    """Rank 0 relays what a reader asks; a rank that hears of it after its next version has both to show."""
    relayed: list[Message] = []
    publishers = [
        Publisher(
            None,
            None,
            CudaIpc("test", DeviceMemory(CPU), handles=FileHandles(tmp_path), directories=(tmp_path,)),
            num_readers=1,
            relay=SimpleNamespace(put=relayed.append) if rank == 0 else None,
        )
        for rank in range(2)
    ]
    for publisher in publishers:
        publisher.open(torch.arange(10.0))
        publisher._stage(publisher._slots, 0, 7)
    wanted = WeightsWanted(replica=0, rank=0, world=2, is_linked=False, in_host_memory=True)
    publishers[0]._want(wanted)
    publishers[0]._want(wanted)
    assert relayed == [wanted, wanted]
    assert publishers[0]._slots.mirror_name is not None
    publisher, slots = publishers[1], publishers[1]._slots
    publisher._stage(slots, 1, 8)
    assert slots.mirror_name is None
    for message in relayed:
        publisher.take(message)
    mirror = publisher._transport._segments.attach(slots.mirror_name)
    assert [mirror.committed(slot) for slot in range(2)] == [slots.committed(slot) for slot in range(2)]
    assert mirror.committed(1).version == 8
    assert torch.equal(mirror.data(0), torch.arange(10.0).view(torch.uint8))
    for each in publishers:
        each.close()


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_memory_in_expandable_segments_is_not_exported(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    transport = CudaIpc("test", DeviceMemory(CPU), handles=FileHandles(tmp_path), directories=(tmp_path,))
    monkeypatch.setenv(name, "expandable_segments:False")
    assert transport.create(100, 1).mirror_name is None
    monkeypatch.setenv(name, "max_split_size_mb:512, expandable_segments: True")
    slots = transport.create(100, 1)
    assert slots.mirror_name is not None
    (warning,) = warnings_of(caplog)
    assert "expandable segments" in warning
    assert name in warning


def test_errors_of_torch_at_either_end_name_their_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """`CudaHandles`, with torch's calls replaced by ones that fail."""
    monkeypatch.setattr(cuda_ipc, "_uuid", lambda index: "GPU-1")
    monkeypatch.setattr(torch.cuda, "device", lambda index: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    handles = CudaHandles(torch.device("cuda", 0))
    with pytest.raises(WeightSyncError, match="cannot be shared"):  # torch: of a tensor on the CPU
        handles.export(torch.zeros(1, dtype=torch.uint8))

    def refuses(*_: object) -> None:
        raise RuntimeError("CUDA error: invalid resource handle\nCUDA kernel errors might be reported later")

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", refuses)
    encoded = cuda_ipc.msgspec.msgpack.encode(cuda_ipc._Exported("GPU-1", b"h", 8, 0, b"c", 0, b"e", False))
    with pytest.raises(WeightSyncError, match="cannot be mapped") as caught:
        handles.open(encoded)
    assert caught.value.got == "CUDA error: invalid resource handle"
    other = cuda_ipc.msgspec.msgpack.encode(cuda_ipc._Exported("GPU-2", b"h", 8, 0, b"c", 0, b"e", False))
    with pytest.raises(WeightSyncError, match="is not visible here"):
        handles.open(other)
