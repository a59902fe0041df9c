"""The files of a checkpoint that several ranks write: boxes as safetensors, and JSON. Nothing in them is a pickle.

A tensor of the checkpoint is any set of boxes; a rank's boxes are one file.

    rank_<r>.safetensors   boxes that rank r wrote, "<part>/<tensor>@<start>"; its random generators
    index.json             for every tensor its precision, shape, and boxes: [rank, start, extent]
    state.json             step, updates, the caller's extra
    manifest.json          size and CRC-32 of each of them; written last
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from slipstream.core.disk import sync
from slipstream.core.errors import CheckpointError, clip
from slipstream.core.files import read_json
from slipstream.models.inventory import Held
from slipstream.models.safetensors_file import DTYPE_NAMES, DTYPES, Entry, write_safetensors
from slipstream.models.shards import Box, Shard
from slipstream.trainer.checkpoint import crc32, partial_path, publish

FORMAT = 2
"""In manifest.json; 1 is one CPU rank's (`checkpoint.py`)."""
INDEX = "index.json"
RANDOM = "random/"
"""Before the names of tensors that belong to a rank, not to a model."""


def rank_file(rank: int) -> str:
    return f"rank_{rank:05}.safetensors"


def _key(name: str, start: Sequence[int]) -> str:
    return f"{name}@{','.join(map(str, start))}"


# Saving


@dataclass(frozen=True)
class SaveOrder:
    """One save, as every rank is told; `state` is what state.json will say."""

    path: Path
    step: int
    state: Mapping[str, Any]
    keep: int | None = None


def write_boxes(
    order: SaveOrder, rank: int, staged: Mapping[Box, Tensor], random: tuple[Mapping[str, Tensor], Mapping[str, Any]]
) -> dict[str, int]:
    """Write rank `rank`'s file beside the final name: boxes and random generators. Return its entry in the manifest."""
    generators, random_state = random
    tensors = {RANDOM + name: tensor for name, tensor in generators.items()}
    tensors |= {_key(box.name, box.start): tensor for box, tensor in staged.items()}
    tensors = dict(sorted(tensors.items(), key=lambda named: -named[1].dtype.itemsize))
    entries = {name: Entry(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    file = partial_path(order.path) / rank_file(rank)
    written = write_safetensors(file, entries, tensors.values(), metadata={"random": json.dumps(random_state)})
    return {"bytes": written.nbytes, "crc32": written.crc32}


def publish_boxes(order: SaveOrder, by_rank: Sequence[Mapping[str, int]], writers: Mapping[Held, int]) -> None:
    """Add what is JSON to the ranks' files, of which `by_rank` are the entries, and give the checkpoint its name.

    `writers`: the rank that wrote each box. CheckpointError for a file of a rank that is not here.
    """
    partial = partial_path(order.path)
    files = {rank_file(rank): dict(entry) for rank, entry in enumerate(by_rank)}
    for name, entry in files.items():
        file = partial / name
        if not file.is_file() or file.stat().st_size != entry["bytes"]:
            raise CheckpointError(
                f"another rank wrote {name}, and it is not here",
                got=partial,
                hint="the run's directory must be on a file system that all of the trainer's machines share",
            )
    for name, content in ((INDEX, _index(writers)), ("state.json", order.state)):
        file = partial / name
        file.write_text(json.dumps(content))
        sync(file)
        files[name] = {"bytes": file.stat().st_size, "crc32": crc32(file)}
    manifest = {"format": FORMAT, "step": order.step, "ranks": len(by_rank), "files": files}
    publish(partial, order.path, manifest, keep=order.keep)


def _index(writers: Mapping[Held, int]) -> dict[str, Any]:
    """index.json: {tensor: {"dtype", "shape", "boxes": [[rank, start, extent], ...]}}."""
    index: dict[str, Any] = {}
    for (box, dtype), rank in (((held.box, held.dtype), rank) for held, rank in writers.items()):
        tensor = {"dtype": DTYPE_NAMES[dtype], "shape": list(box.shape), "boxes": []}
        index.setdefault(box.name, tensor)["boxes"].append([rank, list(box.start), list(box.extent)])
    return index


# Loading


@dataclass(frozen=True)
class StoredBox:
    """A box in a checkpoint; `read` gives the part of it that slices within it name."""

    box: Box
    dtype: torch.dtype
    read: Callable[[tuple[slice, ...]], Tensor]


def stored_boxes(path: Path) -> list[StoredBox]:
    """What lies in the checkpoint `path` of this module; a file is opened when something of it is read first."""
    opened: dict[int, Any] = {}

    def reader(rank: int, key: str) -> Callable[[tuple[slice, ...]], Tensor]:
        def read(slices: tuple[slice, ...]) -> Tensor:
            if rank not in opened:
                opened[rank] = safe_open(path / rank_file(rank), framework="pt")
            tensor: Tensor = opened[rank].get_slice(key)[slices] if slices else opened[rank].get_tensor(key)
            return tensor

        return read

    boxes = []
    try:
        for name, tensor in read_json(path / INDEX).items():
            for rank, start, extent in tensor["boxes"]:
                stop = tuple(a + n for a, n in zip(start, extent, strict=True))
                box = Box(name, tuple(tensor["shape"]), tuple(start), stop)
                boxes.append(StoredBox(box, DTYPES[tensor["dtype"]], reader(rank, _key(name, start))))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"checkpoint {path} is torn: {INDEX} is no index", got=clip(error)) from error
    return boxes


def load_random_state(path: Path, rank: int) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The random generators of rank `rank` in checkpoint `path`; None where there was no such rank."""
    if not (path / rank_file(rank)).is_file():
        return None
    with safe_open(path / rank_file(rank), framework="pt") as file:
        names = [name for name in file.keys() if name.startswith(RANDOM)]  # noqa: SIM118 - not a dict
        tensors = {name.removeprefix(RANDOM): file.get_tensor(name) for name in names}
        return tensors, json.loads(file.metadata()["random"])


def fill(shards: Iterable[Shard], stored: Iterable[StoredBox]) -> None:
    """Copy into each shard what of it is stored. CheckpointError for one that is not stored exactly once."""
    by_name: dict[str, list[StoredBox]] = defaultdict(list)
    for one in stored:
        by_name[one.box.name].append(one)
    for shard in shards:
        missing = math.prod(shard.box.extent)
        for one in by_name[shard.box.name] if missing else ():
            common = [
                (max(a, c), min(b, d))
                for a, b, c, d in zip(shard.box.start, shard.box.stop, one.box.start, one.box.stop, strict=True)
            ]
            if all(low < high for low, high in common):
                there = tuple(slice(low - a, high - a) for (low, high), a in zip(common, one.box.start, strict=True))
                here = tuple(slice(low - a, high - a) for (low, high), a in zip(common, shard.box.start, strict=True))
                shard.view[here].copy_(one.read(there))
                missing -= math.prod(high - low for low, high in common)
        if missing:
            raise CheckpointError(f"the stored boxes of {shard.box.name} do not make it up exactly once", got=shard.box)


def prefixed(part: str, shard: Shard) -> Shard:
    """The shard under the name that its tensor has in a checkpoint: of a part ("policy", "policy.exp_avg")."""
    return Shard(replace(shard.box, name=f"{part}/{shard.box.name}"), shard.view)
