"""What ranks do in the tests of checkpoints and exports: functions of (Rank, arguments) for a `RankPool`."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rank_models import whole_model
from rank_pool import Rank
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from slipstream.core.errors import CheckpointError, DiskError
from slipstream.core.rank_group import RankGroup
from slipstream.models.config import TransformerConfig, local_config
from slipstream.models.export import export_sharded
from slipstream.models.hf import logical_tensors
from slipstream.models.scalar import ScalarModel
from slipstream.models.sharded import Division, ShardedParameters, divide
from slipstream.models.shards import Shard, load_shard, local_shards, whole_shapes
from slipstream.models.transformer import Transformer
from slipstream.trainer import shard_storage
from slipstream.trainer.checkpoint import newest_whole
from slipstream.trainer.sharded_checkpoint import MOMENTS, Saved, ShardedCheckpoints, module_shards, trained_parts

Layout = tuple[int, int]
"""(data-parallel, tensor-parallel) ranks."""
UPDATES = {"policy": 12, "critic": 5}


MEMBERS = [(0, 1), (2, 3), (0, 2), (1, 3), (0, 1, 2, 3)]
"""Of all groups that the layouts need."""
_groups: dict[tuple[int, ...], RankGroup] = {}


def make_groups(rank: Rank) -> None:
    """Every rank of a pool makes all groups, once and in one order."""
    for members in MEMBERS:
        if members not in _groups and max(members) < rank.world:
            pg = dist.new_group(list(members), timeout=timedelta(seconds=20))
            if rank.rank in members:
                _groups[members] = RankGroup.over(pg)


def group_of(members: tuple[int, ...]) -> RankGroup:
    return RankGroup.alone() if len(members) == 1 else _groups[members]


def everyone(rank: Rank) -> RankGroup:
    return group_of(tuple(range(rank.world)))


def division_of(rank: Rank, layout: Layout) -> Division:
    data, tensor = layout
    assert rank.world == data * tensor
    row, column = divmod(rank.rank, tensor)
    return Division(
        group_of(tuple(r * tensor + column for r in range(data))),
        group_of(tuple(row * tensor + c for c in range(tensor))),
    )


def expected(name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """The content of tensor `name` of a checkpoint: no two alike."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(tuple(shape), generator=generator).to(dtype)


def part_of(rank: Rank, config: TransformerConfig, layout: Layout) -> tuple[Transformer, Division]:
    """This rank's part of a model, uninitialised."""
    division = division_of(rank, layout)
    with torch.no_grad():
        model = Transformer(local_config(config, layout[1]), division.ranks_of(config))
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
        divide(model, division)
    return model, division


def parts_of(rank: Rank, config: TransformerConfig, layout: Layout, *, critic: bool = False) -> dict[str, Any]:
    """Weights and moments of a policy, and of a critic beside it, all NaN."""
    model, division = part_of(rank, config, layout)
    parts = _trained("policy", model, division)
    if critic:
        scalar = ScalarModel(config)
        scalar.backbone = part_of(rank, scalar.config, layout)[0]
        parts |= _trained("critic", scalar, division)
    return parts


def _trained(name: str, module: nn.Module, division: Division) -> dict[str, Sequence[Shard]]:
    weights = ShardedParameters(module, division).named_views()
    moments = {moment: {n: torch.full_like(view, float("nan")) for n, view in weights.items()} for moment in MOMENTS}
    return trained_parts(name, module, weights, moments)


def fill(parts: dict[str, Sequence[Shard]]) -> None:
    for part, shards in parts.items():
        for shard in shards:
            shard.view.copy_(expected(f"{part}/{shard.box.name}", shard.box.shape)[shard.box.slices])


def wrong(parts: dict[str, Sequence[Shard]]) -> list[str]:
    """The shards that are not what `fill` makes them."""
    return [
        f"{part}/{shard.box}"
        for part, shards in parts.items()
        for shard in shards
        if not torch.equal(shard.view, expected(f"{part}/{shard.box.name}", shard.box.shape)[shard.box.slices])
    ]


@contextmanager
def checkpoints(rank: Rank) -> Iterator[ShardedCheckpoints]:
    group = RankGroup.alone() if rank.world == 1 else RankGroup.over(rank.group)
    together = ShardedCheckpoints(group, timeout_s=20.0, is_private=True)
    try:
        yield together
    finally:
        together.close()


def draws() -> tuple[float, float, float]:
    return float(torch.rand(())), float(np.random.rand()), random.random()


# Jobs


def save(rank: Rank, config: TransformerConfig, layout: Layout, path: str, critic: bool = False) -> tuple[float, ...]:
    """Save step 3; what this rank's random generators give next."""
    parts = parts_of(rank, config, layout, critic=critic)
    fill(parts)
    torch.manual_seed(rank.rank)
    np.random.seed(rank.rank)
    random.seed(rank.rank)
    with checkpoints(rank) as together:
        together.save(Path(path), parts, step=3, updates=UPDATES, extra={"rank": rank.rank, "cursor": 7})
        expected_draws = draws()
        saved = together.wait()
        assert saved == Saved(Path(path), 3)
        assert together.poll() is None, "told once"
    return expected_draws


def load(rank: Rank, config: TransformerConfig, layout: Layout, path: str, critic: bool = False) -> Any:
    """(shards that are wrong, draws, step, updates, extra) after loading into NaN."""
    parts = parts_of(rank, config, layout, critic=critic)
    assert wrong(parts), "nothing to load"
    wholes: dict[str, nn.Module] = {}
    with torch.device("meta"):
        wholes = {"policy": Transformer(config), "critic": ScalarModel(config)}
    with checkpoints(rank) as together:
        restored = together.load(Path(path), parts, wholes=wholes)
    return wrong(parts), draws(), restored.step, restored.updates, restored.extra


def load_newest(rank: Rank, config: TransformerConfig, layout: Layout, root: str) -> tuple[list[str], int]:
    """Of the newest whole checkpoint under `root`: shards that are wrong after loading it, and its step."""
    parts = parts_of(rank, config, layout)
    newest, _ = newest_whole(Path(root))
    assert newest is not None
    with checkpoints(rank) as together:
        restored = together.load(newest, parts)
    return wrong(parts), restored.step


def change_while_saving(rank: Rank, config: TransformerConfig, layout: Layout, path: str) -> None:
    """Weights and moments change between `save` and the first byte that is written."""
    parts = parts_of(rank, config, layout)
    fill(parts)
    may_write = threading.Event()

    def held_up(*args: Any, **kwargs: Any) -> Any:
        assert may_write.wait(20.0)
        return write(*args, **kwargs)

    write, shard_storage.write_safetensors = shard_storage.write_safetensors, held_up
    try:
        with checkpoints(rank) as together:
            together.save(Path(path), parts, step=3, updates=UPDATES)
            for shards in parts.values():
                for shard in shards:
                    shard.view.fill_(float("nan"))
            assert together.poll() is None
            assert not Path(path).exists()
            with pytest.raises(CheckpointError, match="still being written"):
                together.wait(0.001)
            may_write.set()
            assert together.wait() is not None
    finally:
        shard_storage.write_safetensors = write


def collectives_while_saving(rank: Rank, config: TransformerConfig, layout: Layout, path: str) -> list[float]:
    """Sums in the trainer's group while the ranks save, over a group that the checkpoints make for themselves."""
    parts = parts_of(rank, config, layout)
    fill(parts)
    group = RankGroup.over(rank.group)
    together = ShardedCheckpoints(group, timeout_s=20.0)
    sums = []
    for number in range(3):
        together.save(Path(path), parts, step=3, updates=UPDATES)
        for _ in range(20):
            sums.append(float(group.sum(torch.tensor([float(number + rank.rank)]))))
    assert together.wait() == Saved(Path(path), 3)
    together.close()
    return sums


def fail_once(rank: Rank, config: TransformerConfig, layout: Layout, root: str) -> tuple[str, list[str]]:
    """A save that fails on the last rank: what the next call raises, and what lies there after a third."""
    parts = parts_of(rank, config, layout)
    fill(parts)

    def no_space(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    write = shard_storage.write_safetensors
    with checkpoints(rank) as together:
        together.save(Path(root) / "step_3", parts, step=3, updates=UPDATES)
        assert together.wait() is not None
        if rank.rank == rank.world - 1:
            shard_storage.write_safetensors = no_space
        together.save(Path(root) / "step_4", parts, step=4, updates=UPDATES)
        with pytest.raises(DiskError) as failure:
            together.save(Path(root) / "step_5", parts, step=5, updates=UPDATES)
        shard_storage.write_safetensors = write
        together.save(Path(root) / "step_6", parts, step=6, updates=UPDATES, keep=2)
        assert together.wait() is not None
        return str(failure.value), sorted(path.name for path in Path(root).iterdir())


def die_while_saving(rank: Rank, config: TransformerConfig, layout: Layout, root: str) -> None:
    """Rank 1 is killed with its file half written; rank 0 sees that it is gone."""
    parts = parts_of(rank, config, layout)
    fill(parts)

    def half(file: Path, *args: Any, **kwargs: Any) -> Any:
        written = write(file, *args, **kwargs)
        if rank.rank == 1:
            with file.open("r+b") as stream:
                stream.truncate(written.nbytes // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        return written

    with checkpoints(rank) as together:
        together.save(Path(root) / "step_3", parts, step=3, updates=UPDATES)
        together.wait()
        write, shard_storage.write_safetensors = shard_storage.write_safetensors, half
        together.save(Path(root) / "step_4", parts, step=4, updates=UPDATES)
        together.wait()


def export(rank: Rank, config: TransformerConfig, layout: Layout, path: str, max_file_bytes: int) -> None:
    export_sharded(
        local_shards(model_of(rank, config, layout)), path, everyone(rank), config, max_file_bytes=max_file_bytes
    )


def memory_of_export(rank: Rank, config: TransformerConfig, layout: Layout, path: str) -> int:
    """The most bytes that were allocated at once, beside what this rank holds."""
    shards = local_shards(model_of(rank, config, layout))
    whole_shapes(config)  # cached: it allocates nothing, but the profiler counts "meta" tensors, too
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        export_sharded(shards, path, everyone(rank), config)
    return _peak(recorded)


def model_of(rank: Rank, config: TransformerConfig, layout: Layout) -> Transformer:
    """This rank's part of `whole_model`."""
    division = division_of(rank, layout)
    with torch.no_grad():
        model = Transformer(local_config(config, layout[1]), division.ranks_of(config))
        whole = logical_tensors(whole_model(config))
        if layout[1] > 1:
            load_shard(model, whole)
        else:
            model.load_state_dict(whole_model(config).state_dict())
        divide(model, division)
    return model


def _peak(recorded: profile) -> int:
    """The most that was allocated at once, in bytes, of all that was allocated while it recorded."""
    assert recorded.profiler is not None
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def fail_to_export(rank: Rank, config: TransformerConfig, layout: Layout, path: str) -> None:
    """On rank 1 the folder cannot be written to."""
    model, _ = part_of(rank, config, layout)
    shards = local_shards(model)
    export_sharded(shards, path if rank.rank != 1 else path + "/absent", everyone(rank), config)


def time_of_save(rank: Rank, config: TransformerConfig, layout: Layout, path: str) -> tuple[float, float, int]:
    """(seconds on the critical path, seconds in all, bytes staged here)."""
    parts = parts_of(rank, config, layout)
    fill(parts)
    with checkpoints(rank) as together:
        for _ in range(2):
            start = time.perf_counter()
            together.save(Path(path), parts, step=3, updates=UPDATES)
            blocked = time.perf_counter() - start
            together.wait()
        return blocked, time.perf_counter() - start, sum(s.view.nbytes for shards in parts.values() for s in shards)


def filled(module: nn.Module, name: str, views: dict[str, Tensor]) -> None:
    fill({name: module_shards(module, views)})
