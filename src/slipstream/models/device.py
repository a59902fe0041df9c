"""Devices of the ranks of a group: the CPU, or a GPU each."""

from __future__ import annotations

import functools
import importlib.util
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from slipstream.core.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
KERNELS = True
"""Whether layers and head compute by kernels of Triton where they can; False, to compare, by torch's operations."""
HINT = "`slipstream doctor` shows GPUs; `slipstream launch` spreads groups over machines"


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def power_of_two(number: int) -> int:
    """The smallest power of 2 that is at least `number`."""
    return 1 << (number - 1).bit_length()


def takes_kernels(x: Tensor) -> bool:
    """Tell whether kernels of Triton compute with `x`, on CUDA; torch.compile fuses what it sees by itself."""
    return KERNELS and not torch.compiler.is_compiling() and x.is_cuda and x.numel() > 0 and has_triton()


def launching_on(x: Tensor) -> AbstractContextManager[object]:
    """Launch kernels of Triton where `x` lies: left to themselves, they go to the current device."""
    is_there = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.device_of(x) if is_there else nullcontext()  # type: ignore[no-untyped-call]


def take_share(share: float | None, device: torch.device) -> None:
    """Let torch's allocator of this process have at most `share` of a GPU's memory; None: all."""
    if share is not None and device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(share, device)


def take_gpu(device: torch.device, share: float | None) -> None:
    """Have this thread compile, launch and capture on a GPU, and torch's allocator take at most `share` of it."""
    torch.cuda.set_device(device)
    torch.cuda.set_per_process_memory_fraction(1.0 if share is None else share, device)


def check_gpus(section: str, device: str, ranks_field: str, ranks: int) -> None:
    """Raise ConfigError unless this machine has a GPU for each of the `ranks` that `section.device` puts on CUDA."""
    num_gpus = torch.cuda.device_count()
    if device == "cuda" and ranks > num_gpus:
        raise ConfigError(
            "every rank needs a GPU of its own",
            got=f"{section}.device = 'cuda' with {section}.{ranks_field} = {ranks} and {num_gpus} GPUs",
            allowed=f"{section}.{ranks_field} <= {num_gpus}" if num_gpus else f"{section}.device = 'cpu'",
            hint=HINT,
        )


def single_device(device: str) -> torch.device:
    """Where one process alone computes what groups do on `device`: on the GPU of that number, 'cuda' on the first.

    Where this machine has no such GPU it is its first one, and without any the CPU.
    """
    num_gpus = torch.cuda.device_count()
    if device == "cpu" or not num_gpus:
        return torch.device("cpu")
    index = torch.device(device).index or 0
    return torch.device("cuda", index if index < num_gpus else 0)


def scoring_device(device: str, local_rank: int = 0) -> torch.device:
    """Where a group's rank `local_rank` of this machine scores completions with models that it has to itself.

    'cuda' counts this machine's GPUs from the last, as trainer and generators count them from the first.
    """
    if device == "cpu":
        return torch.device("cpu")
    num_gpus = torch.cuda.device_count()
    if not num_gpus:
        raise ConfigError("there is no GPU here to score on", got=f"device = '{device}'", allowed="'cpu'", hint=HINT)
    return torch.device("cuda", num_gpus - 1 - local_rank % num_gpus)
