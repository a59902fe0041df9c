"""How torch's distributed checkpoint (`torch.distributed.checkpoint`, DCP) sees boxes, and files without pickles.

DCP plans, gathers the ranks' plans, and sees to it that all of them succeed or all fail. Its own state dicts know plain
tensors and DTensors, its file formats are a pickle (`.metadata`), or safetensors with one box per tensor and file. So
planners and storage are ours: a tensor of the checkpoint is any set of boxes; a rank's boxes are one safetensors file,
and what lies where is JSON.

    rank_<r>.safetensors   boxes that rank r wrote, "<part>/<tensor>@<start>"; its random generators
    index.json             for every tensor its precision, shape, and boxes: [rank, start, extent]
    state.json             step, updates, the caller's extra
    manifest.json          size and CRC-32 of each of them; written last
"""

# ruff: noqa: ARG002, ARG003 - the signatures are DCP's

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from slipstream.core.disk import sync
from slipstream.core.errors import CheckpointError, clip
from slipstream.core.files import read_json
from slipstream.models.safetensors_file import DTYPE_NAMES, DTYPES, Entry, write_safetensors
from slipstream.models.shards import Box, Shard
from slipstream.trainer.checkpoint import crc32, new_partial, partial_path, publish, random_state

FORMAT = 2
"""In manifest.json; 1 is one CPU rank's (`checkpoint.py`)."""
INDEX = "index.json"
RANDOM = "random/"
"""Before the names of tensors that belong to a rank, not to a model."""


def rank_file(rank: int) -> str:
    return f"rank_{rank:05}.safetensors"


def _key(name: str, start: Sequence[int]) -> str:
    return f"{name}@{','.join(map(str, start))}"


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


# Saving


@dataclass(frozen=True)
class SaveOrder:
    """One save, as every rank is told; `state` is what state.json will say."""

    path: Path
    step: int
    state: Mapping[str, Any]
    keep: int | None = None


class BoxSavePlanner(SavePlanner):
    """Writes the boxes it is given: each lies on one rank only, in memory that nobody changes any more."""

    def __init__(self, staged: Mapping[Box, Tensor]) -> None:
        self._staged = {(box.name, box.start): (box, tensor) for box, tensor in staged.items()}

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Nothing: `state_dict` is empty, the boxes are what there is."""

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(box, tensor.dtype) for box, tensor in self._staged.values()])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._staged[_place(write_item.index)][1]


def _write_item(box: Box, dtype: torch.dtype) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.extent))
    data = TensorWriteData(chunk, TensorProperties(dtype), torch.Size(box.shape))
    return WriteItem(MetadataIndex(box.name, box.start), WriteItemType.SHARD, tensor_data=data)


def _place(index: MetadataIndex) -> tuple[str, tuple[int, ...]]:
    assert index.offset is not None
    return index.fqn, tuple(index.offset)


class BoxWriter(StorageWriter):
    """One safetensors file per rank beside the final name; the coordinator adds what is JSON and renames.

    Must be made in the thread whose random generators are saved.
    """

    def __init__(self, order: SaveOrder) -> None:
        self._order = order
        self._partial = partial_path(order.path)
        self._random, self._random_state = random_state()
        self._rank = 0
        self._plans: list[SavePlan] = []

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a writer writes one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._rank = kwargs["rank"]

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        new_partial(self._order.path)
        self._plans = plans
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        tensors = {RANDOM + name: tensor for name, tensor in self._random.items()}
        for item in plan.items:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor)
            tensors[_key(*_place(item.index))] = tensor
        tensors = dict(sorted(tensors.items(), key=lambda named: -named[1].dtype.itemsize))
        entries = {name: Entry(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        file = self._partial / rank_file(self._rank)
        written = write_safetensors(
            file, entries, tensors.values(), metadata={"random": json.dumps(self._random_state)}
        )
        entry = {"bytes": written.nbytes, "crc32": written.crc32}
        return _done([WriteResult(MetadataIndex(file.name), written.nbytes, entry)])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files = {result.index.fqn: result.storage_data for by_rank in results for result in by_rank}
        for name, entry in files.items():
            file = self._partial / name
            if not file.is_file() or file.stat().st_size != entry["bytes"]:
                raise CheckpointError(
                    f"another rank wrote {name}, and it is not here",
                    got=self._partial,
                    hint="the run's directory must be on a file system that all of the trainer's machines share",
                )
        for name, content in ((INDEX, _index(self._plans)), ("state.json", self._order.state)):
            file = self._partial / name
            file.write_text(json.dumps(content))
            sync(file)
            files[name] = {"bytes": file.stat().st_size, "crc32": crc32(file)}
        manifest = {"format": FORMAT, "step": self._order.step, "ranks": len(results), "files": files}
        publish(self._partial, self._order.path, manifest, keep=self._order.keep)


def _index(plans: Iterable[SavePlan]) -> dict[str, Any]:
    """index.json: {tensor: {"dtype", "shape", "boxes": [[rank, start, extent], ...]}}."""
    index: dict[str, Any] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            data = item.tensor_data
            assert data is not None
            tensor = {"dtype": DTYPE_NAMES[data.properties.dtype], "shape": list(data.size), "boxes": []}
            box = [rank, list(data.chunk.offsets), list(data.chunk.sizes)]
            index.setdefault(item.index.fqn, tensor)["boxes"].append(box)
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


class BoxReader(StorageReader):
    """Reads from `StoredBox`es, wherever they are."""

    def __init__(self, boxes: Iterable[StoredBox]) -> None:
        self._boxes = {(stored.box.name, stored.box.start): stored for stored in boxes}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a reader reads one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors: dict[str, Any] = {}
        for stored in self._boxes.values():
            box = stored.box
            whole = TensorStorageMetadata(TensorProperties(stored.dtype), torch.Size(box.shape), [])
            chunk = ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.extent))
            tensors.setdefault(box.name, whole).chunks.append(chunk)
        return Metadata(tensors)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing: all is known."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            slices = tuple(slice(a, a + n) for a, n in zip(item.storage_offsets, item.lengths, strict=True))
            target = planner.resolve_tensor(item)
            target.copy_(self._boxes[_place(item.storage_index)].read(slices))
            planner.commit_tensor(item, target)
        return _done(None)


class BoxLoadPlanner(LoadPlanner):
    """Fills shards with what intersects their boxes."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards: dict[str, list[Shard]] = defaultdict(list)
        for shard in shards:
            if math.prod(shard.box.extent):
                self._shards[shard.box.name].append(shard)
        self._metadata = Metadata({})

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, shards in self._shards.items():
            stored = self._metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            boxes = [shard.box for shard in shards]
            chunks = [ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.extent)) for box in boxes]
            items += create_read_items_for_chunk_list(name, stored, chunks)
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> NoReturn:
        raise AssertionError("there is nothing but tensors in these checkpoints")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        number = read_item.dest_index.index
        assert number is not None
        view = self._shards[read_item.dest_index.fqn][number].view
        return view[tuple(slice(a, a + n) for a, n in zip(read_item.dest_offsets, read_item.lengths, strict=True))]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing: it is a view of the shard's."""


def prefixed(part: str, shard: Shard) -> Shard:
    """The shard under the name that its tensor has in a checkpoint: of a part ("policy", "policy.exp_avg")."""
    return Shard(replace(shard.box, name=f"{part}/{shard.box.name}"), shard.view)
