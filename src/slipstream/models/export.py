"""A Hugging Face checkpoint from the shards of several ranks, of which none ever holds the whole model.

Every rank writes a file (or several) of its own with whole tensors. In a round each rank puts together the next tensor
of its file, from the boxes of those that hold them: in turn t it sends to the rank t after it and receives from the
rank t before it, so that all links are busy and what is under way is one message per rank. Beside its shards a rank
needs one whole tensor, one message that it sends and one that it receives: at most three times the largest tensor, and
about 1 + 2/n of it where n ranks have equal parts.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.core.disk import HINTS
from slipstream.core.errors import DiskError, ShapeError
from slipstream.core.rank_group import RankGroup, lost_rank
from slipstream.models.config import TransformerConfig
from slipstream.models.hf import split_names, weight_file, write_configs, write_index
from slipstream.models.inventory import Held, gather_holdings, givers, holdings
from slipstream.models.safetensors_file import Entry, write_safetensors
from slipstream.models.shards import Box, Shard, whole_shapes
from slipstream.models.tokenizer import Tokenizer


@torch.no_grad()
def export_sharded(
    shards: Sequence[Shard],
    path: str | Path,
    group: RankGroup,
    config: TransformerConfig,
    tokenizer: Tokenizer | None = None,
    *,
    max_file_bytes: int = 5 * 1024**3,
) -> None:
    """Write the model of the whole `config`, of which this rank holds `shards`, to folder `path`, seen by all ranks.

    All ranks call it, and return when everything is written; what `save_model` would write of the whole model, tensor
    by tensor the same bits. Messages are CPU tensors: `group` needs gloo for them. Raises ShapeError when the ranks do
    not hold the whole model, DiskError on all ranks when one could not write.
    """
    path = Path(path)
    held = gather_holdings(holdings(shards), group)
    plan = plan_export(held, config, max_file_bytes=max_file_bytes)

    def write_about() -> None:
        write_configs(path, config, next(iter(plan.entries.values())).dtype)
        if tokenizer is not None:
            tokenizer.save_pretrained(path)

    def write_tensors() -> None:
        tensors = _Exchange(plan, shards, group).tensors()
        try:
            for file in (file for file in plan.files if file.rank == group.rank):
                entries = {name: plan.entries[name] for name in file.names}
                write_safetensors(path / file.name, entries, (next(tensors) for _ in file.names))
        finally:
            for _ in tensors:  # others wait for what this rank gives
                pass

    def write_map() -> None:
        weight_map = {name: file.name for file in plan.files for name in file.names}
        write_index(path, dict(sorted(weight_map.items())), sum(entry.nbytes for entry in plan.entries.values()))

    _together(group, path, write_about if group.is_leader else None)
    _together(group, path, write_tensors)
    _together(group, path, write_map if group.is_leader and len(plan.files) > 1 else None)


def _together(group: RankGroup, path: Path, write: Callable[[], None] | None) -> None:
    """Call `write` where this rank has something to write. What the disk refuses one rank is a DiskError on all."""
    told = b""
    try:
        if write is not None:
            write()
    except OSError as error:
        told = json.dumps([error.errno, f"rank {group.rank}: {error}"]).encode()
    for number, text in map(json.loads, filter(None, group.gather(told))):
        raise DiskError(f"the model could not be written to {path}", got=text, hint=HINTS.get(number))


@dataclass(frozen=True)
class ExportFile:
    """A file, the rank that writes it, and the tensors in it, in their order."""

    name: str
    rank: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class ExportPlan:
    """The tensors that each rank writes, and the ranks that give boxes of them; the same on every rank."""

    entries: dict[str, Entry]
    files: list[ExportFile]
    boxes: dict[str, list[tuple[Box, int]]]
    """By tensor, its boxes and the ranks that give them."""

    def order(self, rank: int) -> list[str]:
        """The tensors that `rank` puts together, one per round."""
        return [name for file in self.files if file.rank == rank for name in file.names]


def plan_export(held: Sequence[Sequence[Held]], config: TransformerConfig, *, max_file_bytes: int) -> ExportPlan:
    """Divide whole tensors over ranks, about as many bytes each, and those of a rank into files. A pure function."""
    boxes: dict[str, list[tuple[Box, int]]] = defaultdict(list)
    entries: dict[str, Entry] = {}
    for one, rank in givers(held).items():
        boxes[one.box.name].append((one.box, rank))
        entries[one.box.name] = Entry(one.dtype, one.box.shape)
    shapes = whole_shapes(config)
    found = {name: entry.shape for name, entry in entries.items()}
    if found != shapes:
        differing = sorted(name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name))
        raise ShapeError(
            "the ranks do not hold the model that is to be exported",
            got=", ".join(f"{name} {found.get(name)}" for name in differing[:4]),
            allowed=", ".join(f"{name} {shapes.get(name)}" for name in differing[:4]),
        )
    filled = [0] * len(held)
    by_rank: list[list[str]] = [[] for _ in held]
    for name in sorted(entries, key=lambda name: (-entries[name].nbytes, name)):
        rank = min(range(len(held)), key=lambda rank: (filled[rank], rank))
        filled[rank] += entries[name].nbytes
        by_rank[rank].append(name)
    runs: list[tuple[int, list[str]]] = []
    for rank, names in enumerate(by_rank):
        names.sort(key=lambda name: -entries[name].dtype.itemsize)  # longer elements first, as a file wants them
        runs += [(rank, run) for run in split_names({name: entries[name].nbytes for name in names}, max_file_bytes)]
    files = [ExportFile(weight_file(number, len(runs)), rank, tuple(run)) for number, (rank, run) in enumerate(runs, 1)]
    return ExportPlan(entries, files, dict(boxes))


class _Exchange:
    """The rounds of one rank."""

    def __init__(self, plan: ExportPlan, shards: Sequence[Shard], group: RankGroup) -> None:
        self._plan, self._group = plan, group
        self._views = {shard.box: shard.view for shard in shards}
        self._orders = [plan.order(rank) for rank in range(group.world)]

    def tensors(self) -> Iterator[Tensor]:
        """This rank's tensors in the order of its files; taken to the end, since others wait for what is sent here."""
        rank, world = self._group.rank, self._group.world
        for number in range(max(map(len, self._orders))):
            names = [order[number] if number < len(order) else None for order in self._orders]
            name = names[rank]
            whole = None
            if name is not None:
                entry = self._plan.entries[name]
                whole = torch.empty(entry.shape, dtype=entry.dtype)
                for box in self._boxes(name, rank):
                    whole[box.slices].copy_(self._views[box])
            for turn in range(1, world):
                sink, source = (rank + turn) % world, (rank - turn) % world
                self._turn(names[sink], sink, whole, name, source)
            if whole is not None:
                yield whole

    def _boxes(self, name: str, rank: int) -> list[Box]:
        return [box for box, giver in self._plan.boxes[name] if giver == rank]

    def _turn(self, given: str | None, sink: int, whole: Tensor | None, wanted: str | None, source: int) -> None:
        """Send the boxes of tensor `given` to rank `sink`; receive those of `wanted` from `source` into `whole`."""
        pg = self._group.pg
        mine = self._boxes(given, self._group.rank) if given is not None else []
        theirs = self._boxes(wanted, source) if wanted is not None else []
        works = []
        try:
            if theirs:
                assert whole is not None
                size = sum(math.prod(box.extent) for box in theirs)
                received = torch.empty(size, dtype=whole.dtype)
                works.append(dist.irecv(received.view(torch.uint8), group=pg, group_src=source))
            if mine:
                sent = _message([self._views[box] for box in mine])
                works.append(dist.isend(sent.view(torch.uint8), group=pg, group_dst=sink))
            for work in works:
                assert work is not None
                work.wait()
        except RuntimeError as error:
            assert pg is not None
            raise lost_rank(pg, error) from error
        if theirs:
            assert whole is not None
            for box, piece in zip(
                theirs, torch.split(received, [math.prod(box.extent) for box in theirs]), strict=True
            ):
                whole[box.slices].copy_(piece.view(box.extent))


def _message(views: Sequence[Tensor]) -> Tensor:
    """Views end to end, on the CPU; without a copy where there is one of consecutive numbers."""
    if len(views) == 1:
        return views[0].detach().cpu().contiguous().flatten()
    return torch.cat([view.detach().cpu().flatten() for view in views])
