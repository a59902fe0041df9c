"""A process of its own for `test_checksum_kernel.py`: Triton reads TRITON_INTERPRET=1 where a kernel is defined.

With "few" as the last word it checks some cases: those that `generator/triton_on_cpu.py` runs beside others.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from slipstream.weight_sync import device_memory
from slipstream.weight_sync.checksum_kernel import GROUP, sum_blocks
from slipstream.weight_sync.copying import BLOCK_BYTES

WORDS = BLOCK_BYTES // 4
COUNTS = ((1, False), (GROUP, True), (GROUP + 1, False), (GROUP + 1, True))  # of blocks; whether they are copied
SIZES = (BLOCK_BYTES + 4099, 3, 2 * BLOCK_BYTES - 1, 2 * BLOCK_BYTES + 4099)


def words_of(count: int) -> Tensor:
    """int32 [count, WORDS], any of them; in every third block only the two whose products overflow most."""
    words = torch.randint(-(2**31), 2**31, (count, WORDS), generator=torch.Generator().manual_seed(count)).int()
    words[::3] = torch.where(words[::3] < 0, -(2**31), 2**31 - 1)
    return words


def oracle(words: Tensor) -> list[int]:
    """In numpy's unsigned integers, which wrap around; the weights are splitmix64's, made odd."""
    z = np.cumsum(np.full(WORDS, 0x9E3779B97F4A7C15, np.uint64), dtype=np.uint64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    weights = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    extended = words.numpy().astype(np.int64).view(np.uint64)
    return [int(np.add.reduce(block * weights, dtype=np.uint64)) for block in extended]


def check_kernel(counts: Iterable[tuple[int, bool]]) -> None:
    halves = device_memory._weight_halves(torch.device("cpu"))
    for count, copies in counts:
        words = words_of(count)
        around = torch.full((count + 2, WORDS), 7, dtype=torch.int32)
        target, sums = around[1:-1], torch.full((count + 1,), 7)
        sums[:count] = 0
        sum_blocks(words, target if copies else None, halves, sums[:count])
        assert [int(each) % 2**64 for each in sums[:count]] == oracle(words)
        assert all((beyond == 7).all() for beyond in (sums[count], around[0], around[-1])), "written beyond the end"
        assert torch.equal(target, words if copies else torch.full_like(words, 7))


def check_whole_versions(sizes: Iterable[int]) -> None:
    """`block_checksums` as on a GPU, with what lies behind the last whole block."""
    for num_bytes in sizes:
        data = words_of(3).view(-1).view(torch.uint8)[:num_bytes]
        expected = device_memory.block_checksums(data)
        on_gpu = OnGpu(data)
        for shift in (0, 3):  # no multiple of a word: by way of torch
            target = torch.zeros(num_bytes + shift, dtype=torch.uint8)[shift:]
            assert torch.equal(device_memory.block_checksums(on_gpu, target), expected)
            assert torch.equal(target, data)
        assert torch.equal(device_memory.block_checksums(on_gpu), expected)


class OnGpu(Tensor):
    """A CPU tensor that says it lies on a GPU."""

    is_cuda = True  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, data: Tensor) -> OnGpu:
        return data.as_subclass(cls)


if __name__ == "__main__":
    is_few = sys.argv[-1:] == ["few"]
    check_kernel(COUNTS[::3] if is_few else COUNTS)
    check_whole_versions(SIZES[:1] if is_few else SIZES)
