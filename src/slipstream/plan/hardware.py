"""Peak rates of GPUs, their links and networks (`hardware.toml`), and seconds of collectives over these.

`Efficiency` has the shares of peak rates that are reached. Collectives are by the model by which NCCL chooses its
algorithms, with NCCL's own constants:

    time(algorithm, protocol) = latency + bytes / bandwidth,   of the fastest pair

NCCL (github.com/NVIDIA/nccl, src/graph/tuning.cc) counts microseconds to start, for a hop inside a node and for one
between nodes, by algorithm (ring, tree, NVLink SHARP) and protocol (LL: half of all bytes are flags; LL128: one in 16;
Simple: none, but fences). Shares of a link's bandwidth are those that NCCL's maintainers quote of H100
(NVIDIA/nccl-tests issues 212 and 290). docs/planning.md has the rest, and compares with measurements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.core.errors import ConfigError, did_you_mean
from slipstream.core.fields import MAX_COUNT, Precision
from slipstream.core.recipes import read_toml

GB, _US = 1e9, 1e-6


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU. `flops` are floating-point (or integer) operations per second by precision of the operands.

    `memory_bandwidth`, `node_bandwidth` (to the GPUs of its node) and `network_bandwidth` (its share of the node's
    adapters) in bytes per second, one way; `host_bandwidth` to the memory of the host.
    """

    name: str
    memory_bytes: float
    memory_bandwidth: float
    flops: Mapping[Precision, float]
    node_bandwidth: float
    network_bandwidth: float
    host_bandwidth: float
    devices_per_node: int = 8
    has_sharp: bool = False

    def flops_of(self, precision: Precision) -> float:
        """Peak of `precision`. ConfigError where the hardware has no products of it."""
        if precision not in self.flops:
            raise ConfigError(f"{self.name} has no {precision} products", got=precision, allowed=", ".join(self.flops))
        return self.flops[precision]


IN_GB = {
    "memory_gb": "memory_bytes",
    "memory_bandwidth_gb_s": "memory_bandwidth",
    "node_bandwidth_gb_s": "node_bandwidth",
    "network_bandwidth_gb_s": "network_bandwidth",
    "host_bandwidth_gb_s": "host_bandwidth",
}
"""Fields of a table -> those of `Device`."""


def device_fields(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `Device` that a table in GB, GB/s and TFLOP/s has."""
    found = {field: table[key] * GB for key, field in IN_GB.items() if key in table}
    return found | {"flops": {name: 1000 * rate * GB for name, rate in table.get("tflops", {}).items()}}


DEVICES = {
    name: Device(name=name, has_sharp=table["has_sharp"], **device_fields(table))
    for name, table in read_toml(Path(__file__).with_name("hardware.toml")).items()
}


def device_named(name: str) -> Device:
    """Return the published constants of a GPU, whatever the case. ConfigError for a name that is not in DEVICES."""
    if name.upper() not in DEVICES:
        raise ConfigError(
            "no constants are known of this GPU",
            got=name,
            allowed=", ".join(DEVICES).lower(),
            hint=did_you_mean(name.upper(), DEVICES)
            or "--cluster FILE.toml takes any: give a `gpu` that is near, and the constants that differ",
        )
    return DEVICES[name.upper()]


@dataclass(frozen=True, kw_only=True)
class GpuCluster:
    """`num_devices` of one kind, `device.devices_per_node` in each node. `usd_per_device_hour`: what one costs."""

    device: Device
    num_devices: int
    usd_per_device_hour: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.num_devices <= MAX_COUNT:
            raise ConfigError("a cluster has devices", got=self.num_devices, allowed=f"1..{MAX_COUNT}")

    def nodes_of(self, ranks: int) -> int:
        """Nodes that so many neighbouring ranks lie on."""
        return -(-ranks // self.device.devices_per_node)


def cluster(name: str, num_devices: int) -> GpuCluster:
    """Return `num_devices` of the GPU called `name`."""
    return GpuCluster(device=device_named(name), num_devices=num_devices)


@dataclass(frozen=True)
class _Protocol:
    """Microseconds to start, for a hop over NVLink and for one over the network; the share of bytes that are data."""

    start: float
    node_hop: float
    network_hop: float
    data: float
    is_ll: bool = False

    def seconds(self, hops: float, network_hops: float, nodes: int, nbytes: float, links: float) -> float:
        """Return those of `nbytes` over `hops`, `network_hops` of them to another node, by `links` bytes a second."""
        node_hop = self.node_hop * (_LL_BETWEEN_NODES if self.is_ll and nodes > 1 else 1.0)
        latency_s = (self.start + (hops - network_hops) * node_hop + network_hops * self.network_hop) * _US
        bandwidth = links * self.data
        return latency_s + nbytes / (min(bandwidth, _LL_LIMIT[min(nodes, 3)]) if self.is_ll else bandwidth)


_LL_BETWEEN_NODES = 1.8  # NCCL's factor on LL's hops inside a node, where there are several
_LL_LIMIT = {1: 141 * GB, 2: 45 * GB, 3: 35 * GB}  # by nodes (3: more than two), of Hopper
_RING = (
    _Protocol(6.6, 0.6, 2.7, 1 / 2, is_ll=True),
    _Protocol(14.0, 1.9, 4.0, 0.92),  # LL128
    _Protocol(8.4, 3.4, 14.0, 1.0),  # Simple
)
_TREE = (
    _Protocol(6.8, 0.6, 5.0, 0.9 / 3.8, is_ll=True),
    _Protocol(14.0, 1.25, 8.5, 0.9 * 7 / 9),
    _Protocol(8.4, 4.0, 14.0, 0.9),
)
_SHARP_S, _SHARP_NETWORK_S = 25.0 * _US, 20.9 * _US  # one hop there and back, whatever the number of ranks
_NVLINK_REACHED, _SHARP_REACHED, _NETWORK_REACHED = 370 / 450, 275 / 450, 47 / 50


def all_reduce_s(nbytes: float, ranks: int, cluster: GpuCluster) -> float:
    """Seconds of a sum over `ranks` neighbouring devices of `nbytes` on each, which all of them get."""
    if ranks == 1:
        return 0.0
    device, nodes = cluster.device, cluster.nodes_of(ranks)
    links = device.node_bandwidth * _NVLINK_REACHED
    if nodes > 1:  # rings and trees leave a node by all of its adapters in parallel
        links = min(links, device.network_bandwidth * device.devices_per_node * _NETWORK_REACHED)
    levels = math.ceil(math.log2(nodes))
    ring, tree = 2 * (ranks - 1), 2 * (ranks / nodes - 1 + levels)
    times = [one.seconds(ring, 2 * (nodes - 1), nodes, nbytes * ring / ranks, links) for one in _RING]
    times += [one.seconds(tree, 2 * levels, nodes, nbytes * 2, links) for one in _TREE]
    if device.has_sharp and ranks > 2:
        # Two nodes send each other their sums; in a tree of more, a node passes sums up and totals down.
        sums = min(device.node_bandwidth * _SHARP_REACHED, links / (2 if nodes > 2 else 1))
        times.append(_SHARP_S + levels * _SHARP_NETWORK_S + nbytes / sums)
    return min(times)


def all_gather_s(nbytes: float, ranks: int, cluster: GpuCluster, *, stride: int = 1) -> float:
    """Seconds until `ranks` devices, each `stride` from the next, have all `nbytes`, of which each had 1/ranks.

    A reduce-scatter takes as long. Of the groups that lie across the same nodes, each has its share of their adapters.
    """
    if ranks == 1:
        return 0.0
    device, nodes = cluster.device, cluster.nodes_of(ranks * stride)
    links = device.node_bandwidth * _NVLINK_REACHED
    if nodes > 1:
        adapters = max(device.devices_per_node / stride, 1)
        links = min(links, device.network_bandwidth * adapters * _NETWORK_REACHED)
    hops, network_hops = ranks - 1, nodes - 1
    moved = nbytes * hops / ranks
    return min(one.seconds(hops, min(hops, network_hops), nodes, moved, links) for one in _RING)


def send_s(nbytes: float, cluster: GpuCluster, *, between_nodes: bool) -> float:
    """Seconds until another device has `nbytes`: one hop, by one device's link or by its adapter."""
    device = cluster.device
    links = device.node_bandwidth * _NVLINK_REACHED
    if between_nodes:
        links = min(links, device.network_bandwidth * _NETWORK_REACHED)
    return min(one.seconds(1, between_nodes, 1 + between_nodes, nbytes, links) for one in _RING)


def all_to_all_s(nbytes: float, ranks: int, cluster: GpuCluster, *, stride: int = 1) -> float:
    """Seconds until `ranks` devices, each `stride` from the next, have sent `nbytes` each, to all of them alike."""
    if ranks == 1:
        return 0.0
    nodes = cluster.nodes_of(ranks * stride)
    within_s = send_s(nbytes * (ranks - 1) / ranks, cluster, between_nodes=False)
    if nodes == 1:
        return within_s
    return max(within_s, send_s(nbytes * (nodes - 1) / nodes, cluster, between_nodes=True))


def last_host_task_s(mean_s: float, ranks: int, cluster: GpuCluster) -> float:
    """Seconds until the last rank's host task is done that a collective in a CUDA graph has between nodes.

    The longest of n exponential times is in the mean 1 + 1/2 + ... + 1/n of them.
    """
    return mean_s * sum(1 / rank for rank in range(1, ranks + 1)) if cluster.nodes_of(ranks) > 1 else 0.0
