"""Seconds of collectives, by the model by which NCCL chooses its algorithms, with NCCL's own constants.

    time(algorithm, protocol) = latency + bytes / bandwidth,   of the fastest pair

NCCL (github.com/NVIDIA/nccl, src/graph/tuning.cc) counts microseconds to start, for a hop inside a node and for one
between nodes, by algorithm (ring, tree, NVLink SHARP) and protocol (LL: half of all bytes are flags; LL128: one in 16;
Simple: none, but fences). Shares of a link's bandwidth are those that NCCL's maintainers quote of H100
(NVIDIA/nccl-tests issues 212 and 290). docs/planning.md has the rest, and compares with measurements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from slipstream.plan.hardware import GB, GpuCluster

_US = 1e-6


@dataclass(frozen=True)
class _Protocol:
    """Microseconds to start, for a hop over NVLink and for one over the network; the share of bytes that are data."""

    start: float
    node_hop: float
    network_hop: float
    data: float
    is_ll: bool = False

    def latency_s(self, hops: float, network_hops: float, nodes: int) -> float:
        """Return the latency of `hops`, of which `network_hops` lead to another node."""
        node_hop = self.node_hop * (_LL_BETWEEN_NODES if self.is_ll and nodes > 1 else 1.0)
        return (self.start + (hops - network_hops) * node_hop + network_hops * self.network_hop) * _US

    def bandwidth(self, links: float, nodes: int) -> float:
        """Bytes of data per second over `links` of so many."""
        return min(links * self.data, _LL_LIMIT[min(nodes, 3)]) if self.is_ll else links * self.data


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
    times = [
        protocol.latency_s(ring, 2 * (nodes - 1), nodes) + nbytes * ring / ranks / protocol.bandwidth(links, nodes)
        for protocol in _RING
    ] + [
        protocol.latency_s(tree, 2 * levels, nodes) + nbytes * 2 / protocol.bandwidth(links, nodes)
        for protocol in _TREE
    ]
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
    return min(
        protocol.latency_s(hops, min(hops, network_hops), nodes)
        + nbytes * hops / ranks / protocol.bandwidth(links, nodes)
        for protocol in _RING
    )


def last_host_task_s(mean_s: float, ranks: int, cluster: GpuCluster) -> float:
    """Seconds until the last rank's host task is done that a collective in a CUDA graph has between nodes.

    The longest of n exponential times is in the mean 1 + 1/2 + ... + 1/n of them.
    """
    return mean_s * sum(1 / rank for rank in range(1, ranks + 1)) if cluster.nodes_of(ranks) > 1 else 0.0
