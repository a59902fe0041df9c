"""A trainer of several ranks, as jobs of a `RankPool`: it publishes what it is told to, until it is told to stop."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from file_handles import ipc
from rank_models import whole_model
from rank_pool import Rank
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from slipstream.core.channel import Ports, connect, wait
from slipstream.core.channel_spec import ChannelSpec, Kind
from slipstream.core.fields import Precision
from slipstream.core.peer_messages import WeightsLinked
from slipstream.core.rank_group import RankGroup
from slipstream.core.service_messages import Export
from slipstream.core.types import Stop
from slipstream.models.config import TransformerConfig
from slipstream.models.expert_parallel import ExpertRanks
from slipstream.models.hf import logical_tensors
from slipstream.models.quantized import Packer, WeightLayout
from slipstream.models.sharded import Division, divide
from slipstream.models.shards import load_shard, local_shards, local_tensor
from slipstream.models.stages import Stage
from slipstream.models.tensor_parallel import TensorParallel
from slipstream.models.transformer import Transformer
from slipstream.weight_sync.publisher import Publisher
from slipstream.weight_sync.resharding import Place
from slipstream.weight_sync.segment import SharedMemory
from slipstream.weight_sync.slots import Transport
from slipstream.weight_sync.weight_links import Links

TOKENS = np.arange(4, dtype=np.int32)
DEADLINE_S = 30.0


@dataclass(frozen=True)
class Trainer:
    """Its ranks are data_parallel x stages x tensor_parallel, stages alone or beside one of the others; with
    `replicate` FSDP shards over half of the data-parallel ones only; with `experts` these divide a mixture's, in
    pairs."""

    config: TransformerConfig
    precision: Precision
    folder: str
    run_id: str
    data_parallel: int = 1
    tensor_parallel: int = 1
    replicate: bool = False
    is_linked: bool = False
    delta: bool = False
    is_far: bool = False  # the generators are on another machine
    timeout_s: float = 20.0
    bucket_bytes: int = 3000
    on_device: bool = False
    stages: int = 1
    chunks: int = 1
    experts: bool = False

    @property
    def world(self) -> int:
        return self.data_parallel * self.stages * self.tensor_parallel


def specs(trainer: Trainer, generators: list[tuple[int, int]]) -> list[ChannelSpec]:
    """The channels to every rank (replica, rank) of the generators, and among the trainer's."""
    found = []
    for replica, rank in generators:
        name = f"generator-{replica}@{rank}"
        found.append(ChannelSpec(f"offers/{name}", Kind.WEIGHTS, "trainer.offers", f"{name}.offers"))
        found.append(ChannelSpec(f"releases/{name}", Kind.GATHER, f"{name}.releases", "trainer.releases"))
    found.append(ChannelSpec("commands", Kind.GATHER, "test.commands", "trainer.commands"))
    for rank in range(1, trainer.world):
        found.append(ChannelSpec(f"relay/{rank}", Kind.BROADCAST, "trainer.relay", f"trainer@{rank}.commands"))
    return found


def links_of(trainer: Trainer, host: str = "near") -> Links | None:
    if not trainer.is_linked:
        return None
    store = dist.FileStore(f"{trainer.folder}/links", -1)
    return Links(
        store,
        place=Place(host),
        timeout_s=trainer.timeout_s,
        bucket_bytes=trainer.bucket_bytes,
        delta=trainer.delta,
        memory=transport_of(trainer).memory,
    )


def transport_of(trainer: Trainer) -> Transport:
    """`on_device`: as between GPUs, whose memory is a file here."""
    if trainer.on_device:
        return ipc(trainer.run_id, Path(trainer.folder))
    return SharedMemory(trainer.run_id)


_GROUPS: dict[tuple[int, ...], dist.ProcessGroup] = {}


def group_of(rank: Rank, members: list[int]) -> dist.ProcessGroup:
    """Pairs are made once, by all four ranks of the pool in one order, as torch wants it."""
    if len(members) == rank.world:
        return rank.group
    assert rank.world == 4
    for pair in ((0, 1), (2, 3), (0, 2), (1, 3)):
        if pair not in _GROUPS:
            _GROUPS[pair] = dist.new_group(list(pair))
    return _GROUPS[tuple(members)]


def new_part(rank: Rank, trainer: Trainer) -> tuple[Transformer, dist.ProcessGroup | None]:
    """This rank's part of the trainer's model, and its tensor-parallel group."""
    grid = np.arange(trainer.world).reshape(trainer.data_parallel, trainer.stages, trainer.tensor_parallel)
    if trainer.experts:
        pairs = np.arange(trainer.world).reshape(-1, 2)
        exchange = RankGroup.over(group_of(rank, pairs[rank.rank // 2].tolist()))
        same = pairs[:, rank.rank % 2].tolist()
        sharing = RankGroup.over(group_of(rank, same)) if len(same) > 1 else RankGroup.alone()
        division = Division(RankGroup.over(rank.group), experts=ExpertRanks(exchange, sharing))
        model = Transformer(trainer.config, division.ranks_of(trainer.config))
        divide(model, division)
        return model, None
    place, at, turn = (int(index) for index in np.unravel_index(rank.rank, grid.shape))
    grid, stage, group = grid[:, at], Stage(at, trainer.stages, trainer.chunks), None
    if trainer.tensor_parallel > 1:
        group = group_of(rank, grid[place].tolist())
        ranks = TensorParallel.over(group, trainer.config)
        model = Transformer(ranks.local_config, ranks, stage)
    else:
        model = Transformer(trainer.config, stage=stage)
    if trainer.data_parallel > 1:
        mesh = DeviceMesh.from_group(group_of(rank, grid[:, turn].tolist()), "cpu", mesh_dim_names=("shard",))
        if trainer.replicate:
            halves = grid[:, turn].reshape(2, -1)
            half, mine = divmod(place, halves.shape[1])
            groups = [group_of(rank, halves[:, mine].tolist()), group_of(rank, halves[half].tolist())]
            names = ("replicate", "shard")
            mesh = DeviceMesh.from_group(groups, "cpu", mesh=torch.from_numpy(halves), mesh_dim_names=names)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, group


def train(rank: Rank, trainer: Trainer, generators: list[tuple[int, int]]) -> dict[str, float]:
    """Publish the versions that commands name, until told to stop.

    Version v has the weights of `version_of(config, v)`.
    """
    model, tensor_group = new_part(rank, trainer)
    over_ranks = None if tensor_group is None else RankGroup.over(tensor_group).max
    name = "trainer" if rank.rank == 0 else f"trainer@{rank.rank}"
    ports = connect(specs(trainer, generators), name, Path(trainer.folder), 1)
    is_leader = rank.rank == 0
    publisher = Publisher(
        ports.outputs["offers"] if is_leader else None,
        ports.inputs["releases"] if is_leader else None,
        transport_of(trainer),
        num_readers=len({replica for replica, _ in generators}),
        reader_ranks=1 + max(r for _, r in generators),
        group=RankGroup.over(rank.group),
        links=links_of(trainer),
        relay=ports.outputs["relay"] if is_leader and trainer.world > 1 else None,
    )
    layout = WeightLayout(model, trainer.precision)
    weights = {name: local_tensor(parameter.detach()) for name, parameter in model.named_parameters()}
    publisher.open(None, Packer(layout, weights, over_ranks=over_ranks))
    check_shards(model, trainer.config)
    try:
        _serve(ports, publisher, model, trainer, is_leader)
    finally:
        publisher.close()
        ports.close()
    return {"published": publisher.stats.num_published, "skipped": publisher.stats.num_skipped}


@torch.no_grad()
def version_of(config: TransformerConfig, version: int) -> Transformer:
    """The weights of a version: all others than before, but for v and v + 1000 n, which differ in a few only."""
    model = whole_model(config, version % 1000)
    for parameter in model.parameters():
        parameter.view(-1)[:: max(1, parameter.numel() // 3)] += version // 1000
    return model


def some_news(everyone: list[Ports], fds: Sequence[int] = ()) -> bool:
    """Wait until something arrives or is done; now and then the links are looked after, as a host does."""
    inputs = [port for ports in everyone for port in ports.inputs.values()]
    outputs = [port for ports in everyone for port in ports.outputs.values()]
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if wait(inputs, outputs, fds, timeout_s=0.5):
            return True
        for port in outputs:
            port.pump()
    return False


def check_shards(model: Transformer, config: TransformerConfig) -> None:
    """The oracle of `local_shards`: the whole tensors, sliced."""
    whole = logical_tensors(whole_model(config, 7))
    load_shard(model, whole)
    for shard in local_shards(model):
        assert torch.equal(shard.view, whole[shard.box.name][shard.box.slices]), shard.box


def _serve(ports: Ports, publisher: Publisher, model: Transformer, trainer: Trainer, is_leader: bool) -> None:
    """Rank 0 passes every command on. An `Export` asks for what its path says."""
    while True:
        publisher.poll()
        message = ports.inputs["commands"].get_nowait()
        if message is None:
            assert some_news([ports]), "nobody says anything"
            continue
        if isinstance(message, WeightsLinked):
            publisher.take(message)
            continue
        if is_leader and trainer.world > 1:
            ports.outputs["relay"].put(message)
        if isinstance(message, Stop):
            if is_leader and trainer.world > 1:
                ports.outputs["relay"].flush(deadline_s=5.0)
            return
        assert isinstance(message, Export)
        word, *numbers = message.path.split()
        if word == "lost" and is_leader:
            ports.outputs["offers"].disconnect(f"generator-{numbers[0]}@0")
            publisher.drop_reader(int(numbers[0]))
        if word == "back" and is_leader:
            ports.outputs["offers"].reconnect(f"generator-{numbers[0]}@0", int(numbers[1]))
            publisher.add_reader(int(numbers[0]))
        if word != "publish":
            continue
        version = int(numbers[0])
        load_shard(model, logical_tensors(version_of(trainer.config, version)))
        publisher.publish(version, TOKENS, np.full(3, version, np.float32))
