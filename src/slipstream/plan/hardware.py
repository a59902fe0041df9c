"""Peak rates of hardware: the published constants of GPUs, their links and their networks (`hardware.toml`).

`Efficiency` has the shares of them that are reached.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.core.errors import ConfigError, did_you_mean
from slipstream.core.fields import MAX_COUNT, Precision
from slipstream.core.recipes import read_toml

GB = 1e9


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
