"""Checkpoints of a trainer on several ranks: written by all of them in the background, read by any other number.

What is saved are tensors under Hugging Face's names, weights as well as AdamW's moments, cut into boxes as they lie on
the ranks (`models/shards.py`). So a checkpoint fits every layout: data-parallel, tensor-parallel, both, one CPU rank.
The files are described in `shard_storage.py`; what holds for one rank's checkpoint (`checkpoint.py`) holds here: whole
or not there, nothing pickled.

A save has two phases. On the critical path each rank copies the boxes it is to write (equal boxes on several ranks are
written once, spread over them), pinned where there is a GPU. Then a thread writes, and agrees with those of the other
ranks over a gloo group of its own, since collectives of two threads must not meet in one group. Why not torch's
distributed checkpoint: its ranks send each other pickles, over connections that nobody authenticates.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from slipstream.core.background import start_thread
from slipstream.core.disk import HINTS
from slipstream.core.errors import CheckpointError, DiskError, RankError
from slipstream.core.files import read_json
from slipstream.core.links import WakeUp
from slipstream.core.rank_group import RankGroup
from slipstream.models.flat import FlatParameters
from slipstream.models.inventory import Held, gather_holdings, givers, holdings
from slipstream.models.scalar import ScalarModel
from slipstream.models.shards import Box, Shard, dtensor_boxes, local_parts
from slipstream.models.transformer import Transformer
from slipstream.trainer import checkpoint as one_rank
from slipstream.trainer.checkpoint import Restored, Saved, read_manifest, set_random_state, verify_file
from slipstream.trainer.optim import FlatAdamW
from slipstream.trainer.shard_storage import (
    FORMAT,
    SaveOrder,
    StoredBox,
    fill,
    load_random_state,
    prefixed,
    publish_boxes,
    stored_boxes,
    write_boxes,
)

Parts = Mapping[str, Sequence[Shard]]
"""What is saved, by name: "policy", "policy.exp_avg", "policy.exp_avg_sq", and the same of "critic"."""
POLICY, CRITIC = "policy", "critic"
MOMENTS = ("exp_avg", "exp_avg_sq")
ONE_RANK_FILES = {
    POLICY: ("policy.safetensors", "optimizer.safetensors"),
    CRITIC: ("critic.safetensors", "critic_optimizer.safetensors"),
}
log = logging.getLogger(__name__)
T = TypeVar("T")


def trained_parts(
    name: str, module: nn.Module, weights: Mapping[str, Tensor], moments: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, Sequence[Shard]]:
    """The parts of one trained model, "policy" or "critic": what this rank holds of weights and AdamW's moments.

    `weights` and each of `moments` (`Optimizer.named_moments`) are views by parameter name. Several models go into one
    mapping: trained_parts("policy", ...) | trained_parts("critic", ...).
    """
    parts: dict[str, Sequence[Shard]] = {name: module_shards(module, weights)}
    return parts | {f"{name}.{moment}": module_shards(module, moments[moment]) for moment in MOMENTS}


def module_shards(module: nn.Module, views: Mapping[str, Tensor]) -> list[Shard]:
    """What this rank holds of a model, stored in `views`, by parameter name: its weights, moments, or copies of them.

    `module` is a `Transformer`, `ScalarModel` or linear layer, whole or divided, and says only how parameters lie in
    the checkpoint: it may be on "meta". Tensors without a name of Hugging Face's (a critic's head, gain and bias) go by
    the parameter's.
    """
    prefix = "backbone." if isinstance(module, ScalarModel) else ""
    backbone = module.backbone if isinstance(module, ScalarModel) else module
    shards, done = [], set()
    if isinstance(backbone, Transformer):
        for part in local_parts(backbone):
            shards.append(Shard(part.box, part.of(views[prefix + part.parameter])))
        done = {prefix + name for name, _ in backbone.named_parameters()}
    for name, parameter in module.named_parameters():
        if name not in done:
            shards += [Shard(box, views[name]) for box in _own_box(name, parameter)]
    return shards


def _own_box(name: str, parameter: Tensor) -> list[Box]:
    if isinstance(parameter, DTensor):
        return [shard.box for shard in dtensor_boxes(name, parameter)]
    shape = tuple(parameter.shape)
    return [Box(name, shape, (0,) * len(shape), shape)]


class ShardedCheckpoints:
    """Saves in the background, and loads on any number of ranks. Every rank has one, and all call alike.

    consumes      `save`: one at a time
    waits for     the disk and the slowest rank, in a thread of its own; `timeout_s` bounds every such wait
    unblocked by  the manifest, which rank 0 writes when all ranks' files are on disk
    ends when     `close` is called; a process that ends without leaves the checkpoint before, and a stale directory
    """

    def __init__(self, group: RankGroup, *, timeout_s: float = 1800.0, is_private: bool = False) -> None:
        """`is_private` says that nobody else runs collectives of `group`; otherwise a gloo group of its ranks is made.

        For that they must be all that `torch.distributed` was initialised with.
        """
        self._timeout_s = timeout_s
        self._group = group if is_private else _gloo_twin(group, timeout_s)
        self._is_twin = self._group is not group
        self._held: list[Held] = []
        self._givers: dict[Held, int] = {}
        self._running: Future[Saved] | None = None
        self._wake = WakeUp()
        self._saved: deque[Saved] = deque()

    def save(
        self,
        path: Path,
        parts: Parts,
        *,
        step: int,
        updates: Mapping[str, int],
        keep: int | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Copy what this rank writes of `parts`, return, and write it in the background; `poll` says when it is there.

        `updates`: made so far, by trained model ({"policy": 12, "critic": 16}). `extra` (JSON) counts from rank 0.
        A checkpoint at `path` is replaced only by a whole one; then all but the `keep` newest beside it are deleted.
        Waits for a save that still runs, and raises what `poll` would of it.
        """
        self._finish(self._timeout_s)
        staged = self._stage([prefixed(part, shard) for part, shards in parts.items() for shard in shards])
        state = {"step": step, "num_updates": updates[POLICY], "updates": dict(updates), "extra": dict(extra or {})}
        order, random = SaveOrder(path, step, state, keep), one_rank.random_state()  # this thread's generators
        running: Future[Saved] = Future()
        self._running = running

        def write() -> None:
            failure: Exception | None = None
            try:
                self._write(order, staged, random)
            except Exception as error:  # noqa: BLE001 - it is raised by the next call
                failure = error
                if self._group.is_leader:  # nobody writes any more: all ranks were told
                    shutil.rmtree(one_rank.partial_path(path), ignore_errors=True)
            self._wake.set()  # before the result, after which it may be cleared
            if failure is None:
                running.set_result(Saved(path, step))
            else:
                running.set_exception(failure)

        start_thread(write, name=f"checkpoint-{step}")

    def _write(self, order: SaveOrder, staged: Mapping[Box, Tensor], random: tuple[dict[str, Tensor], Any]) -> None:
        """Write the checkpoint with all other ranks: a folder, then everybody's file, then what makes it whole."""
        group, what = self._group, f"checkpoint {order.path} could not be saved"

        def begin() -> None:
            if group.is_leader:
                one_rank.new_partial(order.path)

        self._together(what, begin)
        files = self._together(what, lambda: write_boxes(order, group.rank, staged, random))
        self._together(what, lambda: publish_boxes(order, files, self._givers) if group.is_leader else None)

    def _together(self, what: str, attempt: Callable[[], T]) -> list[T]:
        """What `attempt()` gives, which must be JSON, by rank. What fails on one rank is an error on all of them: a
        DiskError where it is the disk's, else a CheckpointError."""
        failure: Exception | None = None
        told: dict[str, Any] = {}
        try:
            told["result"] = attempt()
        except Exception as error:  # noqa: BLE001 - whatever it is, the others must not wait for this rank
            failure = error
            if isinstance(error, OSError):
                told |= {"error": str(error), "errno": error.errno or 0}
            else:
                told |= {"error": f"{type(error).__name__}: {error}", "errno": None}
        try:
            by_rank = [json.loads(payload) for payload in self._group.gather(json.dumps(told).encode())]
        except RankError as error:
            raise CheckpointError(what, got=error, hint="another rank may have died: see its log") from error
        for rank, one in enumerate(by_rank):
            if "error" in one:
                kind = CheckpointError if one["errno"] is None else DiskError
                raise kind(what, got=f"rank {rank}: {one['error']}", hint=HINTS.get(one["errno"])) from failure
        return [one["result"] for one in by_rank]

    def _stage(self, shards: Sequence[Shard]) -> dict[Box, Tensor]:
        """Copies, in one piece of memory, of the boxes that this rank writes."""
        held = holdings(shards)
        if held != self._held:  # layouts change on all ranks or on none
            self._held, self._givers = held, givers(gather_holdings(held, self._group))
        views = {shard.box: shard.view for shard in shards}
        mine = sorted(
            {one for one in held if self._givers[one] == self._group.rank},
            key=lambda one: (-one.dtype.itemsize, one.box.name, one.box.start),
        )
        is_cuda = any(views[one.box].is_cuda for one in mine)
        memory = torch.empty(sum(one.nbytes for one in mine), dtype=torch.uint8, pin_memory=is_cuda)
        staged: dict[Box, Tensor] = {}
        pieces = torch.split(memory, [one.nbytes for one in mine])
        for one, piece in zip(mine, pieces, strict=True):
            staged[one.box] = piece.view(one.dtype).view(one.box.extent)
            staged[one.box].copy_(views[one.box].detach(), non_blocking=True)
        if is_cuda:
            torch.cuda.current_stream().synchronize()
        return staged

    def poll(self) -> Saved | None:
        """What has been finished since the last call, or None; does not wait.

        Raises CheckpointError, once, for a save that failed: the checkpoint before it is untouched.
        """
        if self._running is not None and self._running.done():
            self._finish(0.0)
        return self._saved.popleft() if self._saved else None

    def wait_fds(self) -> list[int]:
        """Readable once a save is over and `poll` has something to tell."""
        return [self._wake.fileno()]

    def wait(self, timeout_s: float | None = None) -> Saved | None:
        """`poll`, once nothing runs any more. CheckpointError when that takes longer than `timeout_s`."""
        self._finish(self._timeout_s if timeout_s is None else timeout_s)
        return self.poll()

    def _finish(self, timeout_s: float) -> None:
        running = self._running
        if running is None:
            return
        try:
            saved = running.result(timeout_s)
        except FutureTimeout as error:
            if not running.done():
                raise CheckpointError("a checkpoint is still being written", got=f"after {timeout_s:g} s") from error
            raise
        finally:
            if running.done():
                self._running = None
                self._wake.clear()
        self._saved.append(saved)

    def load(self, path: Path, parts: Parts, *, wholes: Mapping[str, nn.Module] | None = None) -> Restored:
        """Fill the shards of `parts` and the random generators from `path`, whatever ranks wrote it.

        A checkpoint of one CPU rank is read with `wholes`: by "policy" and "critic" a module of the whole model, best
        on "meta", which says how flat weights lie. Random generators go to the ranks of the same number; ranks that
        there were not keep theirs. Under FSDP2 the caller reshards (`ShardedParameters.reshard`), or the model computes
        with what it gathered before. CheckpointError, with nothing changed, when it is torn or of another model.
        """
        manifest, stored = self._agreed(lambda: self._open(path, parts, wholes or {}))
        shards = [prefixed(part, shard) for part, shards in parts.items() for shard in shards]
        self._check_model(path, stored, shards, parts)
        with torch.no_grad():
            self._together(f"checkpoint {path} could not be read", lambda: fill(shards, stored))
        state = read_json(path / "state.json")
        if manifest["format"] == FORMAT:
            found = load_random_state(path, self._group.rank)
            updates = state["updates"]
        else:
            random = load_file(path / "random.safetensors"), state["random"]
            found = random if self._group.rank == 0 else None
            updates = _one_rank_updates(path)
        if found is None:
            log.info("checkpoint %s has no random state of rank %d: it goes on with its own", path, self._group.rank)
        else:
            set_random_state(*found)
        return Restored(path, state["step"], state["num_updates"], state["extra"], updates)

    def _open(
        self, path: Path, parts: Parts, wholes: Mapping[str, nn.Module]
    ) -> tuple[dict[str, Any], list[StoredBox]]:
        """Manifest and boxes of `path`. Each rank verifies its share of the files."""
        manifest = read_manifest(path)
        if manifest["format"] not in (FORMAT, one_rank.FORMAT):
            raise CheckpointError(f"checkpoint {path} has an unknown format", got=manifest["format"])
        for name in sorted(manifest["files"])[self._group.rank :: self._group.world]:
            verify_file(path, name, manifest["files"][name])
        if manifest["format"] == FORMAT:
            return manifest, stored_boxes(path)
        return manifest, [
            box for name in ONE_RANK_FILES if name in parts for box in _one_rank_boxes(path, name, wholes)
        ]

    def _check_model(self, path: Path, stored: Sequence[StoredBox], shards: Sequence[Shard], parts: Parts) -> None:
        """Raise on all ranks, if on any, unless `shards` of all ranks are the tensors that are stored of `parts`."""
        shapes = {one.box.name: one.box.shape for one in stored}
        problems = [f"{s.box.name} {s.box.shape}" for s in shards if shapes.get(s.box.name) != s.box.shape]
        told = json.dumps([problems[:4], sorted({shard.box.name for shard in shards})]).encode()
        by_rank = [json.loads(payload) for payload in self._group.gather(told)]
        wanted = {name for _, names in by_rank for name in names}
        left = sorted(name for name in shapes if name.split("/")[0] in parts and name not in wanted)
        problems = [problem for found, _ in by_rank for problem in found]
        if problems or left:
            raise CheckpointError(
                f"checkpoint {path} belongs to another model",
                got=", ".join(f"{name} {shapes[name]}" for name in left[:4]) or "other tensors",
                allowed=", ".join(problems[:4]) or None,
            )

    def _agreed(self, attempt: Callable[[], T]) -> T:
        """What `attempt()` gives on each rank, or the first rank's CheckpointError on all."""
        result: list[T] = []
        told = ""
        try:
            result.append(attempt())
        except CheckpointError as error:
            told = error.what
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            told = f"{type(error).__name__}: {error}"
        for problem in filter(None, self._group.gather(told.encode())):
            raise CheckpointError(problem.decode())
        return result[0]

    def close(self) -> None:
        """Wait for what is being written, and drop the process group; raises as `wait` does."""
        try:
            self._finish(self._timeout_s)
        finally:
            self._wake.close()
            if self._is_twin and self._group.pg is not None:
                dist.destroy_process_group(self._group.pg)


def _gloo_twin(group: RankGroup, timeout_s: float) -> RankGroup:
    """A gloo group of the same ranks."""
    if group.pg is None:
        return group
    members = dist.get_process_group_ranks(group.pg)
    timeout = timedelta(seconds=timeout_s)
    return RankGroup.over(dist.new_group(members, timeout, "gloo"))


# Checkpoints of one CPU rank, and one CPU rank


def load_on_one_rank(
    path: Path,
    policy: tuple[nn.Module, FlatParameters, FlatAdamW],
    critic: tuple[nn.Module, FlatParameters, FlatAdamW] | None = None,
) -> Restored:
    """Restore one rank's policy and critic from the checkpoint of any number of ranks; errors as `load_checkpoint`'s.

    Of one rank's own checkpoint (`trainer/checkpoint.py`) it is `load_checkpoint`.
    """
    if read_manifest(path)["format"] == one_rank.FORMAT:
        return one_rank.load_checkpoint(path, *policy[1:], critic=None if critic is None else critic[1:])
    trained = {POLICY: policy} if critic is None else {POLICY: policy, CRITIC: critic}
    parts: dict[str, Sequence[Shard]] = {}
    moments = {name: {m: torch.zeros_like(flat.flat) for m in MOMENTS} for name, (_, flat, _) in trained.items()}
    for name, (module, flat, _) in trained.items():
        views = {moment: flat.views_of(moments[name][moment]) for moment in MOMENTS}
        parts |= trained_parts(name, module, flat.named_views(), views)
    restored = ShardedCheckpoints(RankGroup.alone()).load(path, parts)
    for name, (_, _, optimizer) in trained.items():
        optimizer.load_state_dict(moments[name] | {"num_updates": torch.tensor(restored.updates[name])})
    return restored


def _one_rank_boxes(path: Path, name: str, wholes: Mapping[str, nn.Module]) -> Iterator[StoredBox]:
    """The tensors of "policy" or "critic" in one CPU rank's checkpoint, each as one box; files are mapped, not read."""
    weights_file, moments_file = (path / file for file in ONE_RANK_FILES[name])
    if name not in wholes or not weights_file.is_file():
        raise CheckpointError(f"checkpoint {path} belongs to another model", got=f"no {weights_file.name} of one rank")
    module = wholes[name]
    shapes = {parameter: tuple(tensor.shape) for parameter, tensor in module.named_parameters()}
    stored = {name: load_file(weights_file)}
    if {parameter: tuple(tensor.shape) for parameter, tensor in stored[name].items()} != shapes:
        raise CheckpointError(f"checkpoint {path} belongs to another model", got=f"other parameters of the {name}")
    moments = load_file(moments_file)
    for moment in MOMENTS:
        pieces = torch.split(moments[moment], [tensor.numel() for tensor in module.parameters()])
        stored[f"{name}.{moment}"] = {
            parameter: piece.view(shape) for (parameter, shape), piece in zip(shapes.items(), pieces, strict=True)
        }
    for part, views in stored.items():
        for shard in module_shards(module, views):
            whole = prefixed(part, shard)
            yield StoredBox(whole.box, whole.view.dtype, whole.view.__getitem__)


def _one_rank_updates(path: Path) -> dict[str, int]:
    updates = {}
    for name, (_, file) in ONE_RANK_FILES.items():
        if (path / file).is_file():
            updates[name] = int(load_file(path / file)["num_updates"])
    return updates
