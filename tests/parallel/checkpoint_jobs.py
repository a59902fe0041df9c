"""What ranks do in the tests of checkpoints and exports: functions of (Rank, arguments) for a `RankPool`."""

from __future__ import annotations

import os
import random
import resource
import signal
import threading
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
from slipstream.core.training_sections import OptimizerConfig
from slipstream.models.config import TransformerConfig, local_config
from slipstream.models.export import export_sharded
from slipstream.models.flat import FlatParameters
from slipstream.models.hf import logical_tensors
from slipstream.models.scalar import ScalarModel
from slipstream.models.sharded import Division, ShardedParameters, divide
from slipstream.models.shards import load_shard, local_shards, whole_shapes
from slipstream.models.transformer import Transformer
from slipstream.trainer import checkpoint_boxes
from slipstream.trainer.checkpoint import Checkpoints, Saved, Trained, trained_shards
from slipstream.trainer.checkpoint_folder import newest_whole
from slipstream.trainer.optim import AdamW

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


def trained_on(
    rank: Rank, config: TransformerConfig, layout: Layout, *, critic: bool = False, filled: bool = True
) -> dict[str, Trained]:
    """A policy, and a critic beside it: weights and moments as `fill` makes them, or all NaN."""
    model, division = part_of(rank, config, layout)
    trained = {"policy": trained_of(model, division)}
    if critic:
        scalar = ScalarModel(config)
        scalar.backbone = part_of(rank, scalar.config, layout)[0]
        trained["critic"] = trained_of(scalar, division)
    for shard in trained_shards(trained):
        shard.view.fill_(float("nan"))
    if filled:
        fill(trained)
    return trained


def trained_of(module: nn.Module, division: Division | None = None) -> Trained:
    """`module` and an optimizer: of a rank's part in `division`, or of a whole model, stored flat."""
    parameters = FlatParameters(module) if division is None else ShardedParameters(module, division)
    return module, AdamW(parameters, OptimizerConfig(), total_updates=20)


def fill(trained: dict[str, Trained]) -> None:
    """Give every tensor the content `expected` of its name, and count the updates as UPDATES says."""
    for shard in trained_shards(trained):
        shard.view.copy_(expected(shard.box.name, shard.box.shape)[shard.box.slices])
    for name, (_, optimizer) in trained.items():
        optimizer.resumed(UPDATES[name])


def wrong(trained: dict[str, Trained]) -> list[str]:
    """The shards, and the counts of updates, that are not what `fill` makes them."""
    shards = [
        str(shard.box)
        for shard in trained_shards(trained)
        if not torch.equal(shard.view, expected(shard.box.name, shard.box.shape)[shard.box.slices])
    ]
    return shards + [name for name, (_, optimizer) in trained.items() if optimizer.num_updates != UPDATES[name]]


@contextmanager
def checkpoints(rank: Rank) -> Iterator[Checkpoints]:
    group = RankGroup.alone() if rank.world == 1 else RankGroup.over(rank.group)
    together = Checkpoints(group, timeout_s=20.0, is_private=True)
    try:
        yield together
    finally:
        together.close()


def draws() -> tuple[float, float, float]:
    return float(torch.rand(())), float(np.random.rand()), random.random()


# Jobs


def save(rank: Rank, config: TransformerConfig, layout: Layout, path: str, critic: bool = False) -> tuple[float, ...]:
    """Save step 3; what this rank's random generators give next."""
    trained = trained_on(rank, config, layout, critic=critic)
    torch.manual_seed(rank.rank)
    np.random.seed(rank.rank)
    random.seed(rank.rank)
    with checkpoints(rank) as together:
        together.save(Path(path), trained, step=3, extra={"rank": rank.rank, "cursor": 7})
        expected_draws = draws()
        saved = together.wait()
        assert saved == Saved(Path(path), 3)
        assert together.poll() is None, "told once"
    return expected_draws


def load(rank: Rank, config: TransformerConfig, layout: Layout, path: str, critic: bool = False) -> Any:
    """(shards that are wrong, draws, step, updates, extra) after loading into NaN."""
    trained = trained_on(rank, config, layout, critic=critic, filled=False)
    assert wrong(trained), "nothing to load"
    with checkpoints(rank) as together:
        restored = together.load(Path(path), trained)
    return wrong(trained), draws(), restored.step, restored.updates, restored.extra


def load_newest(rank: Rank, config: TransformerConfig, layout: Layout, root: str) -> tuple[list[str], int]:
    """Of the newest whole checkpoint under `root`: shards that are wrong after loading it, and its step."""
    trained = trained_on(rank, config, layout, filled=False)
    newest, _ = newest_whole(Path(root))
    assert newest is not None
    with checkpoints(rank) as together:
        restored = together.load(newest, trained)
    return wrong(trained), restored.step


def change_while_saving(rank: Rank, config: TransformerConfig, layout: Layout, path: str) -> None:
    """Weights and moments change between `save` and the first byte that is written."""
    trained = trained_on(rank, config, layout)
    may_write = threading.Event()

    def held_up(*args: Any, **kwargs: Any) -> Any:
        assert may_write.wait(20.0)
        return write(*args, **kwargs)

    write, checkpoint_boxes.write_safetensors = checkpoint_boxes.write_safetensors, held_up
    try:
        with checkpoints(rank) as together:
            together.save(Path(path), trained, step=3)
            for shard in trained_shards(trained):
                shard.view.fill_(float("nan"))
            assert together.poll() is None
            assert not Path(path).exists()
            with pytest.raises(CheckpointError, match="still being written"):
                together.wait(0.001)
            may_write.set()
            assert together.wait() is not None
    finally:
        checkpoint_boxes.write_safetensors = write


def collectives_while_saving(rank: Rank, config: TransformerConfig, layout: Layout, path: str) -> list[float]:
    """Sums in the trainer's group while the ranks save, over a group that the checkpoints make for themselves."""
    trained = trained_on(rank, config, layout)
    group = RankGroup.over(rank.group)
    together = Checkpoints(group, timeout_s=20.0)
    sums = []
    for number in range(3):
        together.save(Path(path), trained, step=3)
        for _ in range(20):
            sums.append(float(group.sum(torch.tensor([float(number + rank.rank)]))))
    assert together.wait() == Saved(Path(path), 3)
    together.close()
    return sums


def fail_once(rank: Rank, config: TransformerConfig, layout: Layout, root: str) -> tuple[str, list[str]]:
    """A save that fails on the last rank: what the next call raises, and what lies there after a third."""
    trained = trained_on(rank, config, layout)

    def no_space(*args: Any, **kwargs: Any) -> Any:
        raise OSError(28, "No space left on device")

    write = checkpoint_boxes.write_safetensors
    with checkpoints(rank) as together:
        together.save(Path(root) / "step_3", trained, step=3)
        assert together.wait() is not None
        if rank.rank == rank.world - 1:
            checkpoint_boxes.write_safetensors = no_space
        together.save(Path(root) / "step_4", trained, step=4)
        with pytest.raises(DiskError) as failure:
            together.save(Path(root) / "step_5", trained, step=5)
        checkpoint_boxes.write_safetensors = write
        together.save(Path(root) / "step_6", trained, step=6, keep=2)
        assert together.wait() is not None
        return str(failure.value), sorted(path.name for path in Path(root).iterdir())


def die_while_saving(rank: Rank, config: TransformerConfig, layout: Layout, root: str) -> None:
    """Rank 1 is killed with its file half written; rank 0 sees that it is gone."""
    trained = trained_on(rank, config, layout)

    def half(file: Path, *args: Any, **kwargs: Any) -> Any:
        written = write(file, *args, **kwargs)
        if rank.rank == 1:
            with file.open("r+b") as stream:
                stream.truncate(written.nbytes // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        return written

    with checkpoints(rank) as together:
        together.save(Path(root) / "step_3", trained, step=3)
        together.wait()
        write, checkpoint_boxes.write_safetensors = checkpoint_boxes.write_safetensors, half
        together.save(Path(root) / "step_4", trained, step=4)
        together.wait()


def export(rank: Rank, config: TransformerConfig, layout: Layout, path: str, max_file_bytes: int) -> None:
    export_sharded(
        local_shards(model_of(rank, config, layout)), path, everyone(rank), config, max_file_bytes=max_file_bytes
    )


def export_within_a_limit(rank: Rank, config: TransformerConfig, layout: Layout, path: str) -> None:
    """On rank 1 files have a kilobyte at most."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        export(rank, config, layout, path, 5 * 1024**3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


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
