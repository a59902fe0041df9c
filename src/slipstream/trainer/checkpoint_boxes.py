"""The tensors of a checkpoint as boxes in files: rank_<r>.safetensors, and index.json, which says what lies where."""

from __future__ import annotations

import json
import logging
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from slipstream.core.errors import CheckpointError, clip
from slipstream.core.files import read_whole
from slipstream.models.inventory import Held
from slipstream.models.safetensors_file import DTYPE_NAMES, DTYPES, Entry, write_safetensors
from slipstream.models.shards import Box, Shard
from slipstream.trainer.checkpoint_folder import read_manifest

INDEX = "index.json"
RANDOM = "random/"
"""Before the names of tensors that belong to a rank, not to a model."""
Generators = tuple[Mapping[str, Tensor], Mapping[str, Any]]
"""The state of a process's random generators: tensors, and the rest as JSON."""
LARGEST_PIECE, SMALLEST_PIECE = 2**30, 2**12
"""Bytes of what is pinned at once: powers of two, which torch rounds up to (96 GB in one piece are 128 GiB)."""
_warn_once = cache(logging.getLogger(__name__).warning)


class _Tensor(msgspec.Struct, frozen=True):
    """A tensor in index.json; `boxes` are (rank, start, extent)."""

    dtype: str
    shape: tuple[int, ...]
    boxes: list[tuple[int, tuple[int, ...], tuple[int, ...]]]


@dataclass(frozen=True)
class StoredBox:
    """A box in a checkpoint; `read` returns the part of it that slices within it name."""

    box: Box
    read: Callable[[tuple[slice, ...]], Tensor]


def piece_sizes(num_bytes: int) -> list[int]:
    """Return the sizes of pieces that hold `num_bytes`; together they are a 32nd more at most, or a smallest piece."""
    unit = max(SMALLEST_PIECE, min(LARGEST_PIECE, 1 << max(num_bytes - 1, 0).bit_length()) // 64)
    num_largest, rest = divmod(-(-num_bytes // unit), LARGEST_PIECE // unit)
    return [LARGEST_PIECE] * num_largest + [unit << bit for bit in range(rest.bit_length())[::-1] if rest >> bit & 1]


def _host_pieces(num_bytes: int, *, is_pinned: bool) -> list[Tensor]:
    """Return uint8 tensors of `piece_sizes`, from the first that cannot be pinned on pageable; without pinning, one."""
    sizes, pieces = piece_sizes(num_bytes) if is_pinned else [num_bytes], list[Tensor]()
    try:
        while is_pinned and len(pieces) < len(sizes):
            pieces.append(torch.empty(sizes[len(pieces)], dtype=torch.uint8, pin_memory=True))
    except RuntimeError as error:
        _warn_once("checkpoints are copied into memory that is not pinned, which takes longer: %s", clip(error))
    return pieces + [torch.empty(size, dtype=torch.uint8) for size in sizes[len(pieces) :]]


def copied(boxes: Mapping[Box, Tensor], *, is_pinned: bool) -> dict[Box, list[Tensor]]:
    """Return copies of `boxes`, which come with longer elements first, end to end in memory of the host.

    A box that goes over from one piece into the next is several flat tensors. Nobody waits for copies from a GPU.
    """
    pieces = iter(_host_pieces(sum(view.nbytes for view in boxes.values()), is_pinned=is_pinned))
    free, copies = torch.empty(0, dtype=torch.uint8), dict[Box, list[Tensor]]()
    for box, view in boxes.items():
        parts, missing = copies.setdefault(box, []), view.nbytes
        while missing:
            free = free if len(free) else next(pieces)
            parts.append(free[:missing].view(view.dtype))
            free, missing = free[missing:], missing - parts[-1].nbytes
        sources = [view] if len(parts) == 1 else torch.split(view.contiguous().flatten(), list(map(len, parts)))
        for part, source in zip(parts, sources, strict=True):
            part.view(source.shape).copy_(source, non_blocking=True)
    return copies


def rank_file(rank: int) -> str:
    return f"rank_{rank:05}.safetensors"


def _key(name: str, start: Sequence[int]) -> str:
    return f"{name}@{','.join(map(str, start))}"


def write_boxes(file: Path, staged: Mapping[Box, Sequence[Tensor]], generators: Generators) -> dict[str, int]:
    """Write a rank's boxes, from one tensor each or from flat parts, and random generators to `file`.

    Return its entry in the manifest.
    """
    tensors = {RANDOM + name: ([tensor], tuple(tensor.shape)) for name, tensor in generators[0].items()}
    tensors |= {_key(box.name, box.start): (list(parts), box.extent) for box, parts in staged.items()}
    tensors = dict(sorted(tensors.items(), key=lambda named: -named[1][0][0].dtype.itemsize))
    entries = {name: Entry(parts[0].dtype, shape) for name, (parts, shape) in tensors.items()}
    whole = ((parts[0] if len(parts) == 1 else torch.cat(parts)).view(shape) for parts, shape in tensors.values())
    written = write_safetensors(file, entries, whole, metadata={"random": json.dumps(generators[1])})
    return {"bytes": written.nbytes, "crc32": written.crc32}


def index_of(writers: Mapping[Held, int]) -> dict[str, Any]:
    """Return index.json, from the rank that wrote each box."""
    index: dict[str, Any] = {}
    for (box, dtype), rank in (((held.box, held.dtype), rank) for held, rank in writers.items()):
        tensor = {"dtype": DTYPE_NAMES[dtype], "shape": list(box.shape), "boxes": []}
        index.setdefault(box.name, tensor)["boxes"].append([rank, list(box.start), list(box.extent)])
    return index


def read_index(path: Path) -> dict[str, _Tensor]:
    """Return the index of the checkpoint `path`. CheckpointError where it is none, or names files that are not its."""
    try:
        index = msgspec.json.decode(read_whole(path / INDEX), type=dict[str, _Tensor])
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"checkpoint {path} is torn: {INDEX} is no index", got=clip(error)) from error
    files = read_manifest(path).files
    for name, tensor in index.items():
        strange = [rank for rank, start, extent in tensor.boxes if rank_file(rank) not in files]
        if strange or tensor.dtype not in DTYPES:
            got = f"{clip(name)} of precision {clip(tensor.dtype)} in files of ranks {strange[:4]}"
            raise CheckpointError(f"checkpoint {path} is torn: {INDEX} names what is not there", got=got)
    return index


def stored_boxes(path: Path) -> list[StoredBox]:
    """Return what lies in the checkpoint `path`; a file is opened when something of it is read first."""
    opened: dict[int, Any] = {}

    def reader(rank: int, key: str) -> Callable[[tuple[slice, ...]], Tensor]:
        def read(slices: tuple[slice, ...]) -> Tensor:
            if rank not in opened:
                opened[rank] = safe_open(path / rank_file(rank), framework="pt")
            tensor: Tensor = opened[rank].get_slice(key)[slices] if slices else opened[rank].get_tensor(key)
            return tensor

        return read

    boxes = []
    for name, tensor in read_index(path).items():
        for rank, start, extent in tensor.boxes:
            if not len(start) == len(extent) == len(tensor.shape):
                raise CheckpointError(f"checkpoint {path} is torn: {INDEX} is no index", got=f"a box of {clip(name)}")
            stop = tuple(a + n for a, n in zip(start, extent, strict=True))
            boxes.append(StoredBox(Box(name, tensor.shape, start, stop), reader(rank, _key(name, start))))
    return boxes


def fill(shards: Iterable[Shard], stored: Iterable[StoredBox]) -> None:
    """Copy into each shard what of it is stored. CheckpointError, with nothing copied, for one that is not stored
    exactly once."""
    by_name: dict[str, list[StoredBox]] = defaultdict(list)
    for one in stored:
        by_name[one.box.name].append(one)
    copies = []
    for shard in shards:
        common = [(one, *slices) for one in by_name[shard.box.name] if (slices := _common(shard.box, one.box))]
        num_found = sum(math.prod(there.stop - there.start for there in source) for _, _, source in common)
        if num_found != math.prod(shard.box.extent):
            raise CheckpointError(f"the stored boxes of {shard.box.name} do not make it up exactly once", got=shard.box)
        copies += [(shard.view[target], one, source) for one, target, source in common]
    for view, one, source in copies:
        view.copy_(one.read(source))


def _common(target: Box, source: Box) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return what two boxes of a tensor have in common, as slices of each; None if that is nothing."""
    low = [max(a, b) for a, b in zip(target.start, source.start, strict=True)]
    high = [min(a, b) for a, b in zip(target.stop, source.stop, strict=True)]
    if any(a >= b for a, b in zip(low, high, strict=True)):
        return None

    def within(box: Box) -> tuple[slice, ...]:
        return tuple(slice(a - c, b - c) for a, b, c in zip(low, high, box.start, strict=True))

    return within(target), within(source)


# Random generators


def random_state() -> Generators:
    """Return the state of torch's, numpy's and python's generators in this process."""
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors |= {f"cuda_{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    kind, key, position, has_gauss, gauss = np.random.get_state(legacy=True)
    tensors["numpy"] = torch.from_numpy(np.asarray(key).astype(np.int64))
    version, internal, next_gauss = random.getstate()
    return tensors, {
        "numpy": [str(kind), int(position), int(has_gauss), float(gauss)],
        "python": [version, list(internal), next_gauss],
    }


def set_random_state(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Inverse of `random_state`."""
    torch.set_rng_state(tensors["torch"])
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            if f"cuda_{index}" in tensors:
                torch.cuda.set_rng_state(tensors[f"cuda_{index}"], index)
    kind, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, gauss))
    version, internal, next_gauss = state["python"]
    random.setstate((version, tuple(internal), next_gauss))


def load_random_state(path: Path, rank: int) -> Generators | None:
    """Return the random generators of rank `rank` in checkpoint `path`; None where there was no such rank."""
    if not (path / rank_file(rank)).is_file():
        return None
    with safe_open(path / rank_file(rank), framework="pt") as file:
        names = [name for name in file.keys() if name.startswith(RANDOM)]  # noqa: SIM118 - not a dict
        tensors = {name.removeprefix(RANDOM): file.get_tensor(name) for name in names}
        return tensors, json.loads(file.metadata()["random"])
