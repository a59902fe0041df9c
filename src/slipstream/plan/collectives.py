"""How long collectives take: the model by which NCCL chooses its algorithms, and its own constants.

    time(algorithm, protocol) = latency + bytes / bandwidth,   the fastest of all pairs that there are

NCCL (github.com/NVIDIA/nccl, src/graph/tuning.cc of 2.2x) has a latency to start with, one of each hop inside a node
and one of each hop between nodes, by algorithm (ring, tree, NVLink SHARP) and protocol (LL: 4 bytes of flag for 4 of
data; LL128: 8 for 120; Simple: none, but a fence). A ring of n ranks on s nodes has 2 (n - 1) hops for an all-reduce, of
which 2 (s - 1) are between nodes; a tree climbs and descends a chain of n/s ranks in each node and log2(s) levels of nodes.

These are what an idle machine does when all ranks come at the same time. `Efficiency.collective` says by what factor real
ones are slower.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from slipstream.plan.hardware import GB, Cluster

_US = 1e-6


@dataclass(frozen=True)
class _Protocol:
    """Microseconds: to start, for a hop over NVLink, for a hop over the network; and what is left of the bandwidth."""

    start: float
    node_hop: float
    network_hop: float
    bandwidth: float
    is_ll: bool = False

    def latency_s(self, hops: float, network_hops: float, nodes: int) -> float:
        """Of `hops`, of which `network_hops` lead to another node."""
        node_hop = self.node_hop * (_LL_BETWEEN_NODES if self.is_ll and nodes > 1 else 1.0)
        return (self.start + (hops - network_hops) * node_hop + network_hops * self.network_hop) * _US

    def bandwidth_of(self, links: float, nodes: int) -> float:
        """Bytes per second over `links` of so many."""
        reached = links * self.bandwidth
        return min(reached, _LL_LIMIT[min(nodes, 3)]) if self.is_ll else reached


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
_NVLS_S = 25.0 * _US  # NVLink SHARP adds in the switch: one hop there and back, whatever the number of ranks
_NVLS_NETWORK_S = 20.9 * _US


def all_reduce_s(nbytes: float, ranks: int, cluster: Cluster) -> float:
    """Seconds of a sum over `ranks` neighbouring devices of `nbytes` on each, which all of them get."""
    if ranks == 1:
        return 0.0
    device, nodes = cluster.device, cluster.nodes_of(ranks)
    links = device.node_bandwidth
    if nodes > 1:  # rings and trees cross the border of a node by all of its adapters in parallel
        links = min(links, device.network_bandwidth * device.devices_per_node)
    levels = math.ceil(math.log2(nodes))
    ring, tree = 2 * (ranks - 1), 2 * (ranks / nodes - 1 + levels)
    times = [
        protocol.latency_s(ring, 2 * (nodes - 1), nodes) + nbytes * ring / ranks / protocol.bandwidth_of(links, nodes)
        for protocol in _RING
    ] + [
        protocol.latency_s(tree, 2 * levels, nodes) + nbytes * 2 / protocol.bandwidth_of(links, nodes)
        for protocol in _TREE
    ]
    if device.has_nvls and ranks > 2:
        times.append(_NVLS_S + levels * _NVLS_NETWORK_S + nbytes * (1 if nodes == 1 else 2) / links)
    return min(times)


def all_gather_s(nbytes: float, ranks: int, cluster: Cluster, *, stride: int = 1) -> float:
    """Seconds until `ranks` devices, each `stride` from the next, have all `nbytes`, of which each had 1/ranks.

    A reduce-scatter takes as long. Of the groups that lie across the same nodes, each has its share of their adapters.
    """
    if ranks == 1:
        return 0.0
    device, nodes = cluster.device, cluster.nodes_of(ranks * stride)
    links = device.node_bandwidth
    if nodes > 1:
        links = min(links, device.network_bandwidth * max(device.devices_per_node / stride, 1))
    return min(
        protocol.latency_s(ranks - 1, nodes - 1, nodes)
        + nbytes * (ranks - 1) / ranks / protocol.bandwidth_of(links, nodes)
        for protocol in _RING
    )
