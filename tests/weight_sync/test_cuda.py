"""Versions from GPU to GPU: `pytest -m gpu tests/weight_sync/test_cuda.py`. NCCL needs two of them."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from in_process import InProcess

from slipstream.core.errors import WeightSyncError
from slipstream.core.peer_messages import Holding, WeightsLinked, WeightsOffered
from slipstream.core.scratch import cleanup
from slipstream.weight_sync.copies import Copies
from slipstream.weight_sync.copying import BLOCK_BYTES, HOST, checksum_of
from slipstream.weight_sync.cuda_ipc import CudaIpc
from slipstream.weight_sync.device_memory import DeviceMemory, block_checksums
from slipstream.weight_sync.reader import SegmentReader
from slipstream.weight_sync.relay import Shelf, SlotSource
from slipstream.weight_sync.slots import Commit
from slipstream.weight_sync.weight_links import Links

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
NUM_BYTES = 40 * BLOCK_BYTES + 64
VERSIONS = 3

OWNER = """
import sys, torch
from slipstream.weight_sync.cuda_ipc import CudaIpc
from slipstream.weight_sync.device_memory import DeviceMemory
from slipstream.weight_sync.relay import Shelf, SlotSource
from slipstream.weight_sync.slots import Commit
transport = CudaIpc(sys.argv[1], DeviceMemory(torch.device("cuda", 0)))
slots = transport.create(int(sys.argv[2]), 2)
print(slots.name, flush=True)
for line in sys.stdin:
    version, slot = map(int, line.split())
    seed = torch.Generator().manual_seed(version)
    live = torch.randint(0, 256, (slots.num_bytes,), dtype=torch.uint8, generator=seed)
    slots.invalidate(slot)
    checksum = transport.memory.copy(slots.data(slot), live.to("cuda"), slots.checksums(slot))
    slots.commit(slot, Commit(version, checksum))
    print(checksum, flush=True)
"""


def bytes_of(version: int) -> torch.Tensor:
    return torch.randint(0, 256, (NUM_BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(version))


def offer(name: str, checksum: int, version: int, slot: int) -> WeightsOffered:
    return WeightsOffered(
        version=version,
        slot=slot,
        segments=(name,),
        checksums=(checksum,),
        probe_tokens=np.zeros(1, np.int32),
        probe_logprobs=np.zeros(0, np.float32),
    )


def test_checksums_are_those_of_a_cpu() -> None:
    data = bytes_of(0)
    for count in (NUM_BYTES, NUM_BYTES - 3, 7):
        assert torch.equal(block_checksums(data[:count].cuda()).cpu(), block_checksums(data[:count]))


RUNS = {  # (source, target, bytes of a run, steps of 512 bytes)
    "whole": (0, 0, NUM_BYTES, 1),
    "from a block on, to another address": (3 * BLOCK_BYTES, 4, NUM_BYTES - 3 * BLOCK_BYTES, 1),
    "of no whole blocks": (8, 0, 9 * BLOCK_BYTES, 1),
    "to no word": (0, 3, 5 * BLOCK_BYTES, 1),
    "strided": (512, 16, 256, 20_000),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_bytes_that_are_copied_and_gathered_are_those_of_a_cpu(run: tuple[int, int, int, int]) -> None:
    memory, version = DeviceMemory(torch.device("cuda", 0)), bytes_of(0)
    expected_sums = block_checksums(version).numpy().view(np.uint64)
    sums, slot = np.zeros_like(expected_sums), torch.zeros(NUM_BYTES, dtype=torch.uint8, device="cuda")
    assert memory.copy(slot, version.cuda(), sums) == checksum_of(expected_sums)
    assert torch.equal(slot.cpu(), version)
    assert np.array_equal(sums, expected_sums)

    start, place, count, steps = run
    columns = ([start], [place], [[steps]], [[512 * (steps > 1)]], [[count * (steps > 1)]], [count])
    copies = Copies(*(np.array(column, np.int64) for column in columns))
    expected = torch.zeros(place + count * steps + 5, dtype=torch.uint8)
    HOST.run_copies(copies, version, expected)
    target = torch.zeros(len(expected), dtype=torch.uint8, device="cuda")
    memory.gather(copies, slot, target, sums)
    assert torch.equal(target.cpu(), expected)
    slot[start + 17] ^= 64
    with pytest.raises(WeightSyncError, match=f"block {start // BLOCK_BYTES} of a version is damaged"):
        memory.gather(copies, slot, target, sums)


@pytest.mark.parametrize("reader_gpu", [0, 1])
def test_another_process_maps_the_slots_of_a_gpu(reader_gpu: int) -> None:
    """On the same GPU, and on its neighbour."""
    if reader_gpu >= torch.cuda.device_count():
        pytest.skip("this needs two GPUs")
    run_id, device = f"test-{os.getpid()}", torch.device("cuda", reader_gpu)
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, run_id, str(NUM_BYTES)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        try:
            name = owner.stdout.readline().strip()
            reader = SegmentReader(CudaIpc(run_id, DeviceMemory(device)), None)
            shadow = torch.zeros(NUM_BYTES, dtype=torch.uint8, device=device)
            for version in range(VERSIONS):
                owner.stdin.write(f"{version} {version % 2}\n")
                owner.stdin.flush()
                checksum = int(owner.stdout.readline())
                reader.fetch(offer(name, checksum, version, version % 2), shadow)
                assert torch.equal(shadow.cpu(), bytes_of(version))
            reader.close()
        finally:
            owner.kill()
            cleanup(run_id)


def holding(columns: tuple[int, int]) -> Holding:
    """A matrix of uint8 [rows, 128], cut by columns: packed on the one side and unpacked on the other."""
    width = columns[1] - columns[0]
    rows = NUM_BYTES // 128
    return Holding(
        num_bytes=rows * width,
        names=("w",),
        shapes=((rows, 128),),
        types=("uint8",),
        item_bytes=(1,),
        tensor=np.zeros(1, np.int32),
        start=np.array([[0, columns[0]]]),
        stop=np.array([[rows, columns[1]]]),
        offset=np.zeros(1, np.int64),
        strides=np.array([[width, 1]]),
    )


def source(pipe: Connection, folder: str) -> None:
    memory = DeviceMemory(torch.device("cuda", 0))
    torch.cuda.set_device(0)
    slots = InProcess(memory).create(NUM_BYTES, 2, holding((0, 128)))
    links = Links(dist.FileStore(f"{folder}/links", -1), memory=memory, bucket_bytes=1 << 20, timeout_s=60)
    links.serve(WeightsLinked(replica=0, world=1, sources=1, epoch=1), SlotSource(slots), 0)
    for version in iter(pipe.recv, None):
        slots.invalidate(version % 2)
        checksum = memory.copy(slots.data(version % 2), bytes_of(version).cuda(), slots.checksums(version % 2))
        slots.commit(version % 2, Commit(version, checksum))
        pipe.send(checksum)
    links.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL links two GPUs")
@pytest.mark.parametrize("columns", [(0, 128), (32, 96)])
def test_a_link_over_nccl(columns: tuple[int, int], tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=source, args=(theirs, str(tmp_path)), daemon=True)
    process.start()
    device = torch.device("cuda", 1)
    torch.cuda.set_device(device)
    links = Links(
        dist.FileStore(f"{tmp_path}/links", -1), memory=DeviceMemory(device), bucket_bytes=1 << 20, timeout_s=60
    )
    reader = links.receive(WeightsLinked(replica=0, world=1, sources=1, epoch=1), 0, Shelf(holding(columns)))
    rows = NUM_BYTES // 128
    shadow = torch.zeros(rows * (columns[1] - columns[0]), dtype=torch.uint8, device=device)
    try:
        for version in range(VERSIONS):
            mine.send(version)
            assert mine.poll(120)
            checksum = mine.recv()
            reader.fetch(offer("", checksum, version, version % 2), shadow)
            expected = bytes_of(version)[: rows * 128].view(rows, 128)[:, columns[0] : columns[1]]
            assert torch.equal(shadow.cpu(), expected.reshape(-1))
        process.kill()
        process.join()
        started_s = time.monotonic()
        with pytest.raises(Exception, match="broke"):
            reader.fetch(offer("", 0, VERSIONS, 0), shadow)
        assert time.monotonic() - started_s < timedelta(seconds=70).total_seconds()
    finally:
        reader.close()
        process.kill()
