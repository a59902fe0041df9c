"""The ends of WEIGHTS channels, and where versions lie: in host memory, or on the GPUs of trainer and generators."""

from __future__ import annotations

import torch

from slipstream.controller.pipeline import Node, replica_of, weight_readers
from slipstream.core.channel import Ports
from slipstream.core.channel_spec import ChannelSpec, Kind
from slipstream.core.config import RunConfig
from slipstream.core.holders import ranks_per_copy
from slipstream.core.rank_group import RankGroup
from slipstream.generator.device import replica_device
from slipstream.models.device import scoring_device
from slipstream.weight_sync.copying import HOST, Memory
from slipstream.weight_sync.cuda_ipc import CudaIpc
from slipstream.weight_sync.device_memory import DeviceMemory
from slipstream.weight_sync.publisher import Publisher
from slipstream.weight_sync.segment import SharedMemory
from slipstream.weight_sync.slots import Transport
from slipstream.weight_sync.subscriber import Subscriber
from slipstream.weight_sync.weight_links import Links


def weights_ends(
    node: Node,
    ports: Ports,
    channels: tuple[ChannelSpec, ...],
    run_id: str,
    group: RankGroup,
    links: Links | None,
) -> tuple[Publisher | None, Subscriber | None]:
    """This rank's ends of the WEIGHTS channels: those that give versions have no other part in them, and vice versa.

    All ranks of a publishing group have one, of which rank 0's has the ports.
    """
    readers = weight_readers(channels)
    if f"{node.name}.weights" in {channel.source for channel in channels if channel.kind is Kind.WEIGHTS}:
        memory = memory_of(node, group)
        away = weight_readers([channel for channel in channels if not channel.is_awaited])
        publisher = Publisher(
            ports.outputs.get("weights"),
            ports.inputs.get("weights-released"),
            transport_over(memory, run_id),
            num_readers=len(readers),
            away=[list(readers).index(name) for name in away],
            reader_ranks=max(readers.values()),
            num_slots=2 if memory is HOST else 1,  # where memory is dear, and versions are on their way for less long
            in_place=memory is not HOST and node.kwargs["config"].publishes_in_place,
            group=group,
            links=links,
            relay=ports.outputs.get("relay"),
        )
        return publisher, None
    if node.name in readers:
        subscriber = Subscriber(
            ports.inputs["weights"],
            ports.outputs["weights-released"],
            transport_over(memory_of(node, group), run_id),
            replica=list(readers).index(node.name),
            rank=group.rank,
            world=group.world,
            links=links,
        )
        return None, subscriber
    return None, None


def memory_of(node: Node, group: RankGroup) -> Memory:
    """Return this rank's memory: its GPU's in a run whose weights stay on GPUs (`RunConfig.weights_stay_on_gpu`)."""
    config = node.kwargs.get("config")
    has_versions = node.name == "trainer" or replica_of(node.name) is not None
    if not has_versions or not isinstance(config, RunConfig) or not config.weights_stay_on_gpu:
        return HOST
    return DeviceMemory(gpu_of(node, group.rank, group.local_rank))


def gpu_of(node: Node, rank: int, local_rank: int) -> torch.device:
    """Return the GPU of rank `rank`, this machine's `local_rank`, as its executor chooses it: trainers' and users'
    count from the first."""
    config, replica = node.kwargs.get("config"), replica_of(node.name)
    if isinstance(config, RunConfig) and replica is not None:
        return replica_device(config, replica, torch.cuda.device_count(), rank, is_remote=node.host == "torchrun")
    if isinstance(config, RunConfig) and node.name in ranks_per_copy(config):
        return scoring_device("cuda", local_rank)
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def transport_over(memory: Memory, run_id: str) -> Transport:
    """Return the transport between processes of one machine. ConfigError where GPU memory cannot be shared."""
    return CudaIpc(run_id, memory) if isinstance(memory, DeviceMemory) else SharedMemory(run_id)
