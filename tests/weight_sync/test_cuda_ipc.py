"""Slots that lie in memory of another process than the markers: on a CPU that memory is a file (`file_handles.py`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from file_handles import ipc

from slipstream.controller.pipeline import Node
from slipstream.controller.weights import memory_of, transport_over
from slipstream.core.config import RunConfig
from slipstream.core.errors import WeightSyncError
from slipstream.core.peer_messages import WeightsOffered
from slipstream.core.rank_group import RankGroup
from slipstream.core.recipes import resolve
from slipstream.weight_sync.copying import BLOCK_BYTES, HOST
from slipstream.weight_sync.cuda_ipc import CudaIpc
from slipstream.weight_sync.reader import SegmentReader
from slipstream.weight_sync.segment import SharedMemory
from slipstream.weight_sync.slots import Commit
from slipstream.weight_sync.weight_links import Links

NUM_BYTES = BLOCK_BYTES + 1000

OWNER = """
import sys, numpy as np, torch
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from file_handles import ipc
from slipstream.weight_sync.slots import Commit
transport = ipc("test", Path(sys.argv[2]))
slots = transport.create(int(sys.argv[3]), 2)
live = (torch.arange(slots.num_bytes) % 251).to(torch.uint8)
slots.invalidate(0)
checksum = transport.memory.copy(slots.data(0), live, slots.checksums(0))
slots.commit(0, Commit(7, checksum))
slots.invalidate(1)
slots.data(1)[:1000] = 1
print(slots.name, checksum, flush=True)
sys.stdin.read()
"""


def offer(name: str, checksum: int, version: int = 7, slot: int = 0) -> WeightsOffered:
    probe = np.zeros(1, np.float32)
    return WeightsOffered(
        version=version,
        slot=slot,
        segments=(name,),
        checksums=(checksum,),
        probe_tokens=probe.astype(np.int32),
        probe_logprobs=probe,
    )


def test_another_process_reads_what_a_killed_publisher_left_whole(tmp_path: Path) -> None:
    tests = str(Path(__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, tests, str(tmp_path), str(NUM_BYTES)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        name, checksum = owner.stdout.readline().split()
        reader = SegmentReader(ipc("test", tmp_path), None)
        shadow = torch.zeros(NUM_BYTES, dtype=torch.uint8)
        reader.fetch(offer(name, int(checksum)), shadow)
        assert torch.equal(shadow, (torch.arange(NUM_BYTES) % 251).to(torch.uint8))
        owner.kill()
    shadow.zero_()
    reader.fetch(offer(name, int(checksum)), shadow)
    assert torch.equal(shadow, (torch.arange(NUM_BYTES) % 251).to(torch.uint8))
    with pytest.raises(WeightSyncError, match="slot 1 does not hold version 8"):  # it died while it wrote that
        reader.fetch(offer(name, int(checksum), version=8, slot=1), shadow)
    reader.close()
    for path in tmp_path.glob("gpu-*"):
        path.unlink()
    with pytest.raises(WeightSyncError, match="cannot be mapped"):
        reader.fetch(offer(name, int(checksum)), shadow)


def test_slots_share_one_allocation_and_nothing_else(tmp_path: Path) -> None:
    transport = ipc("test", tmp_path)
    slots = transport.create(NUM_BYTES, 3)
    other = transport.attach(slots.name)
    assert len(list(tmp_path.glob("gpu-*"))) == 1
    for slot in range(3):
        slots.data(slot).fill_(slot + 1)
        slots.checksums(slot)[:] = slot
    for slot in range(3):
        assert (other.data(slot) == slot + 1).all()
        assert (other.checksums(slot) == slot).all()
        assert other.data(slot).data_ptr() % 8 == 0
    slots.commit(2, Commit(5, 6))
    assert (other.committed(2), other.committed(0)) == (Commit(5, 6), None)
    segment = Path(slots.name)
    assert segment.stat().st_size < NUM_BYTES, "the bytes are not there a second time"
    slots.close()
    other.close()
    assert not segment.exists()
    assert (other.data(0) == 1).all(), "what is mapped stays"


def test_ends_of_different_kinds_refuse_each_other(tmp_path: Path) -> None:
    device, host = ipc("test", tmp_path), SharedMemory("test", (tmp_path,))
    slots, segment = device.create(100, 2), host.create(100, 2)
    with pytest.raises(WeightSyncError, match="lie on a GPU"):
        host.attach(slots.name).data(0)
    with pytest.raises(WeightSyncError, match="not on a GPU"):
        device.attach(segment.name)
    with pytest.raises(WeightSyncError, match="on the host only"):
        Links(None, delta=True, memory=device.memory)
    segment.close()
    slots.close()


def config_of(trainer: str = "cuda", generator: str = "cuda", **changes) -> RunConfig:
    return resolve("quickstart", {"trainer": {"device": trainer}, "generator": {"device": generator, **changes}})


@pytest.mark.parametrize(
    ("config", "stays"),
    [
        (config_of(), True),
        (config_of(generator="cuda:0"), True),
        (config_of(trainer="cpu"), False),
        (config_of(generator="cpu"), False),
        (config_of(generator="cpu", engine="vllm"), False),
        (config_of(delta=True, precision="bfloat16"), False),
    ],
)
def test_weights_stay_on_gpus_where_both_ends_compute_there(
    config: RunConfig, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert config.weights_stay_on_gpu == stays

    def memory(name: str, **kwargs):
        return memory_of(Node(name, lambda: None, kwargs), RankGroup.alone())

    trainer, generator = memory("trainer", config=config), memory("generator-1", config=config)
    assert memory("rewards", config=config) is HOST
    assert memory("trainer") is HOST
    assert isinstance(transport_over(generator, "test"), CudaIpc if stays else SharedMemory)
    if not stays:
        assert trainer is generator is HOST
        return
    assert trainer.device == torch.device("cuda", 0)
    assert generator.device == torch.device(config.generator.device if ":" in config.generator.device else "cuda:2")
