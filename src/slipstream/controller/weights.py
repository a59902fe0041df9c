"""Where the versions of a run lie: in host memory, or on the GPUs that trainer and generators compute on."""

from __future__ import annotations

import torch

from slipstream.controller.pipeline import Node, replica_of
from slipstream.core.config import RunConfig
from slipstream.core.rank_group import RankGroup
from slipstream.generator.device import replica_device
from slipstream.weight_sync.copying import HOST, Memory
from slipstream.weight_sync.cuda_ipc import CudaIpc
from slipstream.weight_sync.device_memory import DeviceMemory
from slipstream.weight_sync.segment import SharedMemory
from slipstream.weight_sync.slots import Transport


def memory_of(node: Node, group: RankGroup) -> Memory:
    """Of this rank: that of its GPU in a run whose weights stay on GPUs (`RunConfig.weights_stay_on_gpu`)."""
    config, replica = node.kwargs.get("config"), replica_of(node.name)
    if not isinstance(config, RunConfig) or not config.weights_stay_on_gpu:
        return HOST
    if replica is not None:
        return DeviceMemory(replica_device(config.generator, replica, torch.cuda.device_count(), group.rank))
    if node.name == "trainer":
        return DeviceMemory(torch.device("cuda", torch.cuda.current_device()))  # which its group has set
    return HOST


def transport_over(memory: Memory, run_id: str) -> Transport:
    """Between processes of one machine. ConfigError where GPU memory cannot be shared."""
    return CudaIpc(run_id, memory) if isinstance(memory, DeviceMemory) else SharedMemory(run_id)
