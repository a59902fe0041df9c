"""Checkpoints of a trainer on any number of ranks, read by any other number. Nothing in them is a pickle.

The tensors of a checkpoint are weights under Hugging Face's names, and AdamW's moments of each. A tensor is a set of
boxes that fill it, cut as they lie on the ranks (`models/shards.py`): so a checkpoint fits every layout.

    step_<n>/  rank_<r>.safetensors   boxes that rank r wrote, "<part>/<tensor>@<start>"; its random generators
               index.json             for every tensor its precision, shape, and boxes: [rank, start, extent]
               state.json             step, updates, the caller's extra
               manifest.json          size and CRC-32 of each of them; written last (`checkpoint_folder.py`)

Several ranks, and GPUs, save in two phases. On the critical path each rank copies the boxes that it is to write (equal
boxes on several ranks are written once, spread over them), pinned where there is a GPU. Then a thread writes, and
agrees with those of the other ranks over a gloo group of its own, since collectives of two threads must not meet in one
group. A single CPU rank writes its live weights before `save` returns. torch's distributed checkpoint is not used: its
ranks send each other pickles, over connections that nobody authenticates.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from slipstream.core.background import start_thread
from slipstream.core.disk import HINTS, sync
from slipstream.core.errors import CheckpointError, DiskError, RankError
from slipstream.core.files import MAX_STATE_BYTES, read_json
from slipstream.core.links import WakeUp
from slipstream.core.lora_section import LoraConfig
from slipstream.core.rank_group import RankGroup
from slipstream.models.config import TransformerConfig
from slipstream.models.inventory import Held, gather_holdings, givers, holdings
from slipstream.models.lora import install
from slipstream.models.peft import planned_shapes
from slipstream.models.sharded import Parameters, module_parts
from slipstream.models.shards import Box, Part, Shard
from slipstream.models.transformer import Transformer
from slipstream.trainer import first_format
from slipstream.trainer.checkpoint_boxes import (
    INDEX,
    Generators,
    StoredBox,
    copied,
    fill,
    index_of,
    load_random_state,
    random_state,
    rank_file,
    read_index,
    set_random_state,
    stored_boxes,
    write_boxes,
)
from slipstream.trainer.checkpoint_folder import (
    FIRST_FORMAT,
    FORMAT,
    FORMATS,
    Manifest,
    crc32,
    new_partial,
    partial_path,
    publish,
    read_manifest,
    verify_file,
)


class StoredModel(Protocol):
    """The weights of a model as this rank stores them, and what is kept beside each: `AdamW` and its moments."""

    @property
    def parameters(self) -> Parameters: ...
    @property
    def num_updates(self) -> int: ...
    def named_moments(self) -> Mapping[str, Mapping[str, Tensor]]: ...
    def resumed(self, num_updates: int) -> None: ...


AwaitedPart = Callable[[Path, float], Path]
"""A checkpoint's path, seconds -> the folder where the part of it that other processes write is whole by then."""
Trained = tuple[nn.Module, StoredModel]
"""A trained model, or this rank's part of it, and the optimizer over its parameters."""
POLICY, CRITIC, REFERENCE = "policy", "critic", "reference"
_PARTS: WeakKeyDictionary[nn.Module, list[Part]] = WeakKeyDictionary()
"""`module_parts` of the modules that were saved or loaded: they stay as they are, and finding them takes long."""
log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is whole and on disk."""

    path: Path
    step: int


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The state of a loaded checkpoint: `step` steps are in its weights, which are policy version `step`.

    `updates` have been made of each trained model, by name ("policy", "critic").
    """

    step: int
    updates: dict[str, int]
    extra: dict[str, Any]


def trained_shards(trained: Mapping[str, Trained]) -> list[Shard]:
    """Return what this rank stores of the tensors of a checkpoint: "policy/<tensor>", "policy.exp_avg/<tensor>", ..."""
    shards = []
    for name, (module, optimizer) in trained.items():
        stored: dict[str, Mapping[str, Tensor]]  # first: parts are those of what is not gathered
        stored = {name: optimizer.parameters.named_views()}
        stored |= {f"{name}.{moment}": views for moment, views in optimizer.named_moments().items()}
        parts = _PARTS[module] if module in _PARTS else _PARTS.setdefault(module, module_parts(module))
        for kind, views in stored.items():
            for part in parts:
                shards.append(Shard(replace(part.box, name=f"{kind}/{part.box.name}"), part.of(views[part.parameter])))
    return shards


class Checkpoints:
    """Save and load checkpoints together with all ranks of `group`; one save at a time."""

    def __init__(
        self,
        group: RankGroup = RankGroup.alone(),
        *,
        timeout_s: float = 1800.0,
        is_private: bool = False,
        first_rank: int = 0,
    ) -> None:
        """`is_private` says that nobody else runs collectives of `group`; otherwise a gloo group of its ranks is made.

        For that they must be all that `torch.distributed` was initialised with. A part of a checkpoint has the files of
        the ranks from `first_rank` on: those of the ranks before are in the checkpoint that it becomes a part of.
        """
        self._timeout_s, self._first_rank = timeout_s, first_rank
        self._group = group if is_private else _gloo_twin(group, timeout_s)
        self._is_twin = self._group is not group
        self._held: list[Held] = []
        self._givers: dict[Held, int] = {}
        self._running: Future[Saved] | None = None
        self._wake = WakeUp()

    # Saving

    def save(
        self,
        path: Path,
        trained: Mapping[str, Trained],
        *,
        step: int,
        keep: int | None = None,
        extra: Mapping[str, Any] | None = None,
        part: AwaitedPart | None = None,
    ) -> None:
        """Copy what this rank writes of `trained`, return, and write it in the background; `poll` says when it is done.

        A single CPU rank writes it at once. `extra` (JSON) counts from rank 0. A checkpoint at `path` is replaced only
        by a whole one; then all but the `keep` newest beside it are deleted. A `part` that other processes write is
        waited for on rank 0, and moved into it. Waits for a save that still runs, and raises what `poll` would of it.
        """
        self._finish(self._timeout_s)
        updates = {name: optimizer.num_updates for name, (_, optimizer) in trained.items()}
        state = {"step": step, "updates": updates, "extra": dict(extra or {})}
        mine, generators = self._own_boxes(trained_shards(trained)), random_state()  # this thread's generators
        is_cuda = any(view.is_cuda for view in mine.values())
        is_at_once = self._group.world == 1 and not is_cuda
        content = {box: [view] for box, view in mine.items()} if is_at_once else copied(mine, is_pinned=is_cuda)
        if is_cuda:
            torch.cuda.current_stream().synchronize()
        running: Future[Saved] = Future()
        self._running = running

        def write() -> None:
            failure: Exception | None = None
            try:
                self._write(path, state, keep, content, generators, part)
            except Exception as error:  # noqa: BLE001 - it is raised by the next call
                failure = error
                if self._group.is_leader:  # nobody writes any more: all ranks were told
                    shutil.rmtree(partial_path(path), ignore_errors=True)
            self._wake.set()  # before the result, after which it may be cleared
            if failure is None:
                running.set_result(Saved(path, step))
            else:
                running.set_exception(failure)

        if is_at_once:
            write()
        else:
            start_thread(write, name=f"checkpoint-{step}")

    def _own_boxes(self, shards: Sequence[Shard]) -> dict[Box, Tensor]:
        """Return the boxes that this rank writes, in the order of its file, and the live views of them."""
        held = holdings(shards)
        if held != self._held:  # layouts change on all ranks or on none
            self._held, self._givers = held, givers(gather_holdings(held, self._group))
        views = {shard.box: shard.view.detach() for shard in shards}
        mine = {one for one in held if self._givers[one] == self._group.rank}
        ordered = sorted(mine, key=lambda one: (-one.dtype.itemsize, one.box.name, one.box.start))
        return {one.box: views[one.box] for one in ordered}

    def _write(
        self,
        path: Path,
        state: Mapping[str, Any],
        keep: int | None,
        content: Mapping[Box, list[Tensor]],
        random: Generators,
        part: AwaitedPart | None,
    ) -> None:
        """Write the checkpoint with all other ranks: a folder, then every rank's file, then what makes it whole."""
        group, what = self._group, f"checkpoint {path} could not be written"
        self._agreed(what, lambda: new_partial(path) if group.is_leader else None)
        file = partial_path(path) / rank_file(self._first_rank + group.rank)
        written = self._gather(what, self._agreed(what, lambda: write_boxes(file, content, random)))
        files = {rank_file(self._first_rank + rank): entry for rank, entry in enumerate(written)}
        self._agreed(what, lambda: self._publish(path, state, keep, files, part))

    def _publish(
        self,
        path: Path,
        state: Mapping[str, Any],
        keep: int | None,
        files: dict[str, dict[str, int]],
        part: AwaitedPart | None,
    ) -> None:
        """Add the `part` of others, and what is JSON, to the ranks' `files`, and name the checkpoint, on rank 0.

        CheckpointError for a file of a rank that is not here.
        """
        if not self._group.is_leader:
            return
        partial = partial_path(path)
        for name, entry in files.items():
            file = partial / name
            if not file.is_file() or file.stat().st_size != entry["bytes"]:
                hint = "the run's directory must be on a file system that all of the trainer's machines share"
                raise CheckpointError(f"another rank wrote {name}, and it is not here", got=partial, hint=hint)
        index = index_of({held: self._first_rank + rank for held, rank in self._givers.items()})
        if part is not None:
            index, state = _with_part(part(path, self._timeout_s), partial, files, index, state)
        for name, content in ((INDEX, index), ("state.json", state)):
            file = partial / name
            file.write_text(json.dumps(content))
            sync(file)
            files[name] = {"bytes": file.stat().st_size, "crc32": crc32(file)}
        manifest = {"format": FORMAT, "step": state["step"], "files": files}
        publish(partial, path, manifest, keep=keep)

    def _agreed(self, what: str, attempt: Callable[[], T]) -> T:
        """Return `attempt()`. A failure on one rank is an error on all of them: its own CheckpointError, a DiskError
        where it is the disk's, else the CheckpointError `what`."""
        failure: Exception | None = None
        told: dict[str, Any] = {}
        result: list[T] = []
        try:
            result.append(attempt())
        except Exception as error:  # noqa: BLE001 - whatever it is, the others must not wait for this rank
            failure, number = error, (error.errno or 0) if isinstance(error, OSError) else None
            if isinstance(error, CheckpointError):
                told = {"what": error.what, "got": error.got, "allowed": error.allowed, "hint": error.hint}
            else:
                text = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
                told = {"what": what, "got": f"rank {self._group.rank}: {text}", "hint": HINTS.get(number or 0)}
            told = {name: value and str(value) for name, value in told.items()} | {"is_disk": number is not None}
        for one in filter(None, self._gather(what, told)):
            kind = DiskError if one.pop("is_disk") else CheckpointError
            raise kind(one.pop("what"), **one) from failure
        return result[0]

    def _gather(self, what: str, told: Any) -> list[Any]:
        """Return `told`, which must be JSON, of every rank."""
        try:
            return [json.loads(payload) for payload in self._group.gather(json.dumps(told).encode())]
        except RankError as error:
            raise CheckpointError(what, got=error, hint="another rank may have died: see its log") from error

    def poll(self) -> Saved | None:
        """Return what has been finished since the last call, or None; does not wait.

        Raises CheckpointError or DiskError, once, for a save that failed: the checkpoint before it is untouched.
        """
        return self._finish(0.0) if self._running is not None and self._running.done() else None

    def fileno(self) -> int:
        """Return a descriptor that is readable once a save is over and `poll` has something to tell."""
        return self._wake.fileno()

    def wait(self, timeout_s: float | None = None) -> Saved | None:
        """`poll`, once nothing runs any more. CheckpointError when that takes longer than `timeout_s`."""
        return self._finish(self._timeout_s if timeout_s is None else timeout_s)

    def _finish(self, timeout_s: float) -> Saved | None:
        running = self._running
        if running is None:
            return None
        try:
            return running.result(timeout_s)
        except FutureTimeout as error:
            if not running.done():
                raise CheckpointError("a checkpoint is still being written", got=f"after {timeout_s:g} s") from error
            raise
        finally:
            if running.done():
                self._running = None
                self._wake.clear()

    def close(self) -> None:
        """Wait for what is being written, and drop the process group; raises as `wait` does."""
        try:
            self._finish(self._timeout_s)
        finally:
            self._wake.close()
            if self._is_twin and self._group.pg is not None:
                dist.destroy_process_group(self._group.pg)

    # Loading

    def load(self, path: Path, trained: Mapping[str, Trained]) -> LoadedCheckpoint:
        """Go on from checkpoint `path`, whatever ranks wrote it: weights, moments, updates, random generators.

        Random generators go to the ranks of the same number; ranks that there were not keep theirs. CheckpointError,
        with nothing changed, when the checkpoint is torn or belongs to another model.
        """
        what = f"checkpoint {path} could not be read"
        manifest, stored = self._agreed(what, lambda: self._open(path, trained))
        shards = trained_shards(trained)
        self._check_model(path, stored, shards)
        with torch.no_grad():
            self._agreed(what, lambda: fill(shards, stored))
        state = read_json(path / "state.json", MAX_STATE_BYTES)
        if manifest.format == FORMAT:
            found, updates = load_random_state(path, self._group.rank), state["updates"]
        else:
            found = first_format.random_state(path, state) if self._group.is_leader else None
            updates = first_format.updates(path)
        if found is None:
            log.info("checkpoint %s has no random state of rank %d: it goes on with its own", path, self._group.rank)
        else:
            set_random_state(*found)
        for name, (_, optimizer) in trained.items():
            optimizer.resumed(updates[name])
        return LoadedCheckpoint(state["step"], updates, state["extra"])

    def _open(self, path: Path, trained: Mapping[str, Trained]) -> tuple[Manifest, list[StoredBox]]:
        """Return manifest and boxes of `path`. Each rank verifies its share of the files."""
        manifest = read_manifest(path)
        if (found := manifest.format) not in FORMATS:
            raise CheckpointError(f"checkpoint {path} has an unknown format", got=found, allowed=FORMATS)
        for name in sorted(manifest.files)[self._group.rank :: self._group.world]:
            verify_file(path, name, manifest.files[name])
        if manifest.format == FORMAT:
            return manifest, stored_boxes(path)
        modules = {name: module for name, (module, _) in trained.items()}
        return manifest, [StoredBox(one.box, one.view.__getitem__) for one in first_format.shards(path, modules)]

    def _check_model(self, path: Path, stored: Sequence[StoredBox], shards: Sequence[Shard]) -> None:
        """Raise, on all ranks alike, unless `shards` of all ranks are the tensors that are stored of their parts."""
        shapes = {one.box.name: one.box.shape for one in stored}
        problems = [f"{s.box.name} {s.box.shape}" for s in shards if shapes.get(s.box.name) != s.box.shape]
        by_rank = self._gather("another model", [problems[:4], sorted({shard.box.name for shard in shards})])
        wanted = {name for _, names in by_rank for name in names}
        parts = {name.split("/")[0] for name in wanted}
        left = sorted(name for name in shapes if name.split("/")[0] in parts and name not in wanted)
        problems = [problem for found, _ in by_rank for problem in found]
        if problems or left:
            raise CheckpointError(
                f"checkpoint {path} belongs to another model",
                got=", ".join(f"{name} {shapes[name]}" for name in left[:4]) or "other tensors",
                allowed=", ".join(problems[:4]) or None,
            )


def _with_part(
    part: Path, partial: Path, files: dict[str, dict[str, int]], index: Mapping[str, Any], state: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Move the files of the ranks that wrote `part` into `partial`, and add them to its `files`; return `index` and
    `state` with those of the part."""
    for name, entry in read_manifest(part).files.items():
        if name not in (INDEX, "state.json"):
            (part / name).rename(partial / name)
            files[name] = {"bytes": entry.bytes, "crc32": entry.crc32}
    of_part = read_json(part / "state.json")
    joined = {**index, **read_json(part / INDEX)}, {**state, "updates": {**state["updates"], **of_part["updates"]}}
    shutil.rmtree(part)
    with suppress(OSError):  # another one may lie there
        part.parent.rmdir()
    return joined


def _gloo_twin(group: RankGroup, timeout_s: float) -> RankGroup:
    """Return a gloo group of the same ranks."""
    if group.pg is None:
        return group
    members = dist.get_process_group_ranks(group.pg)
    return RankGroup.over(dist.new_group(members, timedelta(seconds=timeout_s), "gloo"))


def policy_shapes(
    path: Path, config: TransformerConfig, lora: LoraConfig
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return (found, expected) of the policy's tensors in checkpoint `path` that a model of `config` has otherwise.

    Where `lora` gives the model adapters, a checkpoint holds their tensors alone. () stands for a tensor that is not
    there. CheckpointError where the checkpoint's index cannot be read.
    """
    with torch.device("meta"):
        model = Transformer(config)
    if lora.is_set:
        install(model, planned_shapes(lora, config))
    if read_manifest(path).format == FIRST_FORMAT:
        found, expected = first_format.shapes(path), {n: tuple(p.shape) for n, p in model.named_parameters()}
    else:
        stored = {name.partition("/"): tensor.shape for name, tensor in read_index(path).items()}
        found = {name: shape for (part, _, name), shape in stored.items() if part == POLICY}
        expected = {part.box.name: part.box.shape for part in module_parts(model)}
    names = sorted(found | expected)
    return {n: (found.get(n, ()), expected.get(n, ())) for n in names if found.get(n) != expected.get(n)}
