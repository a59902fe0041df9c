"""Copies of bytes between two buffers, each a run or a grid of runs: what a reshard plan tells ranks to do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]
Extent = tuple[int, int]
"""(first byte, one past the last)"""


class StridedCopy(NamedTuple):
    """A grid of `counts` runs of `run` bytes, from byte `source` and to byte `target` on; one run where it is empty."""

    source: int
    target: int
    counts: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]
    run: int

    @property
    def stop(self) -> int:
        """One past the last byte that is read."""
        spans = ((count - 1) * stride for count, stride in zip(self.counts, self.source_strides, strict=True))
        return self.source + sum(spans) + self.run

    def along_first_axis(self, most_bytes: int) -> Iterator[StridedCopy]:
        """Yield the parts of a grid that span about `most_bytes` of the source each, one step at the least."""
        step = max(1, most_bytes // max(1, self.source_strides[0]))
        for first in range(0, self.counts[0], step):
            yield self._replace(
                source=self.source + first * self.source_strides[0],
                target=self.target + first * self.target_strides[0],
                counts=(min(step, self.counts[0] - first), *self.counts[1:]),
            )


@dataclass(frozen=True)
class Copies:
    """N copies of bytes between two buffers, in the order of the target's bytes.

    Copy n: counts[n] [D] runs of run_bytes[n] bytes, the first at `source[n]` and `target[n]`, each side with strides.
    """

    source: Array  # int64 [N]
    target: Array  # int64 [N]
    counts: Array  # int64 [N, D]
    source_strides: Array  # int64 [N, D]
    target_strides: Array  # int64 [N, D]
    run_bytes: Array  # int64 [N]

    def __len__(self) -> int:
        return len(self.source)

    @cached_property
    def sizes(self) -> Array:
        """int64 [N]: bytes of each."""
        sizes: Array = self.counts.prod(1) * self.run_bytes
        return sizes

    @property
    def num_bytes(self) -> int:
        return int(self.sizes.sum())

    @cached_property
    def rows(self) -> list[StridedCopy]:
        """The copies one by one, without the axes that count 1."""
        rows = []
        for source, target, counts, source_strides, target_strides, run in zip(
            *(column.tolist() for column in self._columns), strict=True
        ):
            axes = [axis for axis, count in enumerate(counts) if count != 1]
            grid, reads, writes = (
                tuple(values[axis] for axis in axes) for values in (counts, source_strides, target_strides)
            )
            rows.append(StridedCopy(source, target, grid, reads, writes, run))
        return rows

    def by_source(self) -> Copies:
        """The same copies in the order of the source's bytes."""
        return self.take(np.argsort(self.source, kind="stable"))

    def take(self, index: Array | slice) -> Copies:
        return Copies(*(column[index] for column in self._columns))

    @property
    def _columns(self) -> tuple[Array, ...]:
        return (self.source, self.target, self.counts, self.source_strides, self.target_strides, self.run_bytes)

    def cut(self, most_bytes: int) -> Copies:
        """The same bytes in copies of at most `most_bytes`, or of one run: by bytes where there is one run, else by the
        first axis that counts."""
        pieces: list[tuple[Any, ...]] = []
        too_large = self.sizes > most_bytes
        if not too_large.any():
            return self
        for n in np.flatnonzero(too_large):
            pieces.extend(self._pieces(int(n), most_bytes))
        kept = self.take(~too_large)
        columns = [
            np.concatenate([column, np.array([piece[i] for piece in pieces], np.int64).reshape(-1, *column.shape[1:])])
            for i, column in enumerate(kept._columns)
        ]
        order = np.argsort(columns[1], kind="stable")
        return Copies(*(column[order] for column in columns))

    def _pieces(self, n: int, most_bytes: int) -> Iterator[tuple[Any, ...]]:
        source, target, counts, source_strides, target_strides, run = (column[n] for column in self._columns)
        axes = np.flatnonzero(counts > 1)
        if not len(axes):
            for start in range(0, int(run), most_bytes):
                size = np.int64(min(most_bytes, int(run) - start))
                yield source + start, target + start, counts, source_strides, target_strides, size
            return
        axis = axes[0]
        step = max(1, most_bytes // max(1, int(self.sizes[n] // counts[axis])))
        for start in range(0, int(counts[axis]), step):
            part = counts.copy()
            part[axis] = min(step, int(counts[axis]) - start)
            yield (
                source + start * source_strides[axis],
                target + start * target_strides[axis],
                part,
                source_strides,
                target_strides,
                run,
            )

    def buckets(self, most_bytes: int) -> list[Copies]:
        """Successive copies of at most `most_bytes` together, where a single one is no larger."""
        cut = self.cut(most_bytes)
        buckets, first, filled = [], 0, 0
        for n, size in enumerate(cut.sizes.tolist()):
            if filled and filled + size > most_bytes:
                buckets.append(cut.take(slice(first, n)))
                first, filled = n, 0
            filled += size
        if first < len(cut):
            buckets.append(cut.take(slice(first, len(cut))))
        return buckets

    def packed(self) -> Copies:
        """From the same sources into consecutive bytes from 0 on."""
        strides = np.ones_like(self.target_strides)
        strides[:, -1] = self.run_bytes
        for axis in range(strides.shape[1] - 2, -1, -1):
            strides[:, axis] = strides[:, axis + 1] * self.counts[:, axis + 1]
        starts = np.cumsum(self.sizes) - self.sizes
        return Copies(self.source, starts, self.counts, self.source_strides, strides, self.run_bytes)

    def unpacked(self) -> Copies:
        """From consecutive bytes to the same targets."""
        packed = self.packed()
        return Copies(
            packed.target, self.target, self.counts, packed.target_strides, self.target_strides, self.run_bytes
        )

    @property
    def reads(self) -> Extent:
        return self._extent(self.source, self.source_strides)

    @property
    def writes(self) -> Extent:
        return self._extent(self.target, self.target_strides)

    def _extent(self, starts: Array, strides: Array) -> Extent:
        ends = starts + ((self.counts - 1) * strides).sum(1) + self.run_bytes
        return int(starts.min()), int(ends.max())

    def lie_within(self, num_bytes: int, extent: Extent) -> bool:
        """Whether the side with this `extent` stays in a buffer of `num_bytes`. Of a plan that strangers may have had a
        say in: nothing else about the copies is sure."""
        is_sane = bool(((self.run_bytes > 0) & (self.run_bytes <= num_bytes)).all() and (self.counts > 0).all())
        return is_sane and 0 <= extent[0] <= extent[1] <= num_bytes

    @property
    def is_one_run(self) -> bool:
        return len(self) == 1 and bool((self.counts == 1).all())
