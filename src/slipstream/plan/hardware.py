"""Peak rates of hardware: published constants of GPUs, their links and their networks.

    A100    NVIDIA A100 datasheet, SXM 80 GB: 312 TFLOP/s bf16, 2.039 TB/s, NVLink 600 GB/s; HDR InfiniBand, 200 Gb/s
    H100    NVIDIA H100 datasheet, SXM5: 989 TFLOP/s bf16, 3.35 TB/s, NVLink 900 GB/s; NDR InfiniBand, 400 Gb/s
    H200    NVIDIA H200 datasheet, SXM: an H100 with 141 GB at 4.8 TB/s
    B200    NVIDIA HGX B200 datasheet: 2.25 PFLOP/s bf16, 180 GB, 8 TB/s, NVLink 1.8 TB/s; 400 Gb/s

All rates are dense (no 2:4 sparsity) and of one direction: NVIDIA quotes NVLink as the sum of both. `Efficiency` has
the shares of them that are reached.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from slipstream.core.errors import ConfigError
from slipstream.core.fields import MAX_COUNT, Precision

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
    has_sharp: bool = False  # whether the switches of a node add what passes through them (NVLink SHARP)

    def flops_of(self, precision: Precision) -> float:
        """Peak of `precision`. ConfigError where the hardware has no products of it."""
        if precision not in self.flops:
            raise ConfigError(f"{self.name} has no {precision} products", got=precision, allowed=", ".join(self.flops))
        return self.flops[precision]


_HOPPER: dict[Precision, float] = {"float32": 66.9e12, "bfloat16": 989.4e12, "fp8": 1978.9e12, "int8": 1978.9e12}
_H100 = Device(
    name="H100",
    memory_bytes=80 * GB,
    memory_bandwidth=3350 * GB,
    flops=_HOPPER,
    node_bandwidth=450 * GB,
    network_bandwidth=50 * GB,
    host_bandwidth=64 * GB,
    has_sharp=True,
)
DEVICES: dict[str, Device] = {
    "A100": Device(
        name="A100",
        memory_bytes=80 * GB,
        memory_bandwidth=2039 * GB,
        flops={"float32": 19.5e12, "bfloat16": 312e12, "int8": 624e12},
        node_bandwidth=300 * GB,
        network_bandwidth=25 * GB,
        host_bandwidth=32 * GB,
    ),
    "H100": _H100,
    "H200": replace(_H100, name="H200", memory_bytes=141 * GB, memory_bandwidth=4800 * GB),
    "B200": Device(
        name="B200",
        memory_bytes=180 * GB,
        memory_bandwidth=8000 * GB,
        flops={"float32": 80e12, "bfloat16": 2250e12, "fp8": 4500e12, "int8": 4500e12},
        node_bandwidth=900 * GB,
        network_bandwidth=50 * GB,
        host_bandwidth=64 * GB,
        has_sharp=True,
    ),
}


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


def cluster(name: str, num_devices: int, *, usd_per_device_hour: float | None = None) -> GpuCluster:
    """`num_devices` of the devices called `name`, whatever the case. ConfigError for a name that is not in DEVICES."""
    if name.upper() not in DEVICES:
        raise ConfigError("no constants are known of this device", got=name, allowed=", ".join(DEVICES))
    return GpuCluster(device=DEVICES[name.upper()], num_devices=num_devices, usd_per_device_hour=usd_per_device_hour)
