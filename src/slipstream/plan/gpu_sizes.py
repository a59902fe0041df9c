"""Rows of a decode step and tokens of a prefill, by the GPU that generates, where the run does not say."""

from __future__ import annotations

from collections.abc import Collection

import torch

from slipstream.core.config import RunConfig
from slipstream.generator.device import USABLE_MEMORY, first_gpu, most_on_one
from slipstream.models.hub import with_folders
from slipstream.models.preflight import check_policy
from slipstream.plan.counts import BYTES
from slipstream.plan.hardware import DEVICES, Device, GpuCluster
from slipstream.plan.layouts import Efficiency, GeneratorLayout
from slipstream.plan.one_gpu import costs_of, generator_bytes, is_planned
from slipstream.plan.search import most_slots

ROWS = (64, 128, 256, 512, 1024)
ENOUGH = 0.9  # of the most tokens per second that any of ROWS gives
READING = 0.1  # the most of a prefill's time that reading weights may take
MOST_PREFILLED = 8192


def with_sizes(config: RunConfig, *, remote: Collection[str] = ()) -> tuple[RunConfig, str | None]:
    """Return `config` with `generator.num_slots` and `prefill_tokens` for this machine's GPU, and in words what was
    chosen; as it is where both are given, and on a CPU or a GPU whose rates are not known."""
    generator = config.generator
    if (
        generator.device == "cpu"
        or "generator" in remote
        or None not in (generator.num_slots, generator.prefill_tokens)
    ):
        return config, None
    num_gpus = torch.cuda.device_count()
    found = torch.cuda.get_device_properties(torch.device(generator.device).index or 0)
    device = device_called(found.name)
    if device is None:
        return config, None
    chosen: dict[str, int] = {}
    if generator.prefill_tokens is None:
        chosen["prefill_tokens"] = prefill_tokens_on(device, config)
    if generator.num_slots is None:
        first = torch.device(generator.device).index or first_gpu(config, num_gpus)
        trains_there = first < config.trainer.ranks  # the trainer's GPUs are the first ones
        is_shared = config.trainer.device == "cuda" and config.host == "process" and trains_there
        beside = most_on_one(generator, num_gpus) + is_shared
        share = generator.gpu_share or 1 / beside
        chosen["num_slots"] = rows_on(device, config, USABLE_MEMORY * share * found.total_memory)
    told = ", ".join(f"generator.{name} = {value}" for name, value in chosen.items())
    return config.model_copy(update={"generator": generator.model_copy(update=chosen)}), f"on {device.name}: {told}"


def device_called(name: str) -> Device | None:
    """Return the constants of the GPU that CUDA calls `name`, such as 'NVIDIA H100 80GB HBM3'; None: not known."""
    words = name.upper().replace("-", " ").split()
    return next((device for known, device in DEVICES.items() if known in words), None)


def prefill_tokens_on(device: Device, config: RunConfig) -> int:
    """Return the power of two of tokens from which on reading the weights takes READING of a pass, or less.

    n >= bytes/weight * FLOP/s / (2 * READING * bytes/s),   at the shares of both that products and reads reach
    """
    precision, reached = config.generator.precision, Efficiency()
    flops = device.flops_of(precision) * reached.matmul
    least = BYTES[precision] * flops / (2 * READING * device.memory_bandwidth * reached.memory)
    return min(1 << max(int(least) - 1, 511).bit_length(), MOST_PREFILLED)


def rows_on(device: Device, config: RunConfig, usable_bytes: float) -> int:
    """Return the least of ROWS that decodes nearly as many tokens per second as any that has work and memory."""
    local, generator = with_folders(config), config.generator
    shape = check_policy(local)
    if not is_planned(shape):
        return generator.rows
    costs = costs_of(local, shape, GpuCluster(device=device, num_devices=1))
    workload = costs.workload
    most = most_slots(workload, generator.replicas, config.max_staleness)
    context = workload.lengths.prompt_mean + workload.lengths.mean / 2
    rates: dict[int, float] = {}
    for rows in ROWS:
        sized = local.model_copy(update={"generator": generator.model_copy(update={"num_slots": rows})})
        if rates and (rows > most or generator_bytes(sized, shape, all_slots=True).total > usable_bytes):
            break
        layout = GeneratorLayout(
            devices=generator.tensor_parallel,
            tensor_parallel=generator.tensor_parallel,
            slots=rows,
            precision=generator.precision,
        )
        rates[rows] = rows / costs.decode_step(layout, live=rows, context=context).total
    return next(rows for rows, rate in rates.items() if rate >= ENOUGH * max(rates.values()))
