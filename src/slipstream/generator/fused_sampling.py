"""Sampling from the whole vocabulary in two kernels (`sampler_kernels.py`), where they are and agree with torch.

They draw what `sampler.sample_tokens` does, by the same noise: tokens are equal but where a boundary between two of
them lies nearer to u than the rounding of float32 sums. Rows that are cut are left to torch's operations.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.generator.noise import uniform_tensor
from slipstream.generator.sampler import SampledTokens, SamplingPlan, SamplingRows, sample_tokens
from slipstream.models.device import has_triton
from slipstream.models.transformer import OneRank, Transformer

logger = logging.getLogger(__name__)

MAX_ERROR = 1e-4  # nats, on the example
SPIKES = 64  # tokens of each of its rows, with nearly all of the probability, so that boundaries lie far apart


def sample(
    logits: Tensor, rows: SamplingRows, keys: Tensor, positions: Tensor, plan: SamplingPlan, *, fused: bool
) -> SampledTokens:
    """`sample_tokens` with the noise of `keys` and `positions` int64 [B]; by kernels, if `fused` and no row is cut."""
    if fused and not plan.truncates:
        from slipstream.generator import sampler_kernels as kernels

        drawn = kernels.draw(logits, rows.temperatures, keys, positions, scales=plan.has_temperature)
        return SampledTokens(*drawn, None)
    return sample_tokens(logits, rows, uniform_tensor(keys, positions), plan)


def default_fused_sampling(model: Transformer, device: torch.device) -> bool:
    """On CUDA with Triton, where one rank samples, and its kernels agree with torch on an example."""
    is_there = device.type == "cuda" and has_triton() and isinstance(model.ranks, OneRank)
    return is_there and agrees(device, model.config.vocab_size)


@functools.cache
def agrees(device: torch.device, width: int) -> bool:
    """Tell whether the kernels draw what torch does on `device`, from `width` logits, with temperatures and without."""
    why = "they draw other tokens, or other logprobs"
    try:
        if all(_agrees(device, width, numbers) for numbers in ([1.0], [1.0, 0.7, 0.0, 1.3])):
            return True
    except Exception as error:  # noqa: BLE001 - compilers and drivers raise what they like, and torch's way is there
        why = repr(error)
    logger.warning("sampling is left to torch, not to kernels: %s", why)
    return False


def _agrees(device: torch.device, width: int, temperatures: Sequence[float]) -> bool:
    logits, keys, positions = (x.to(device) for x in example(width))
    each = torch.tensor(temperatures, device=device, dtype=torch.float32).repeat(len(logits) // len(temperatures))
    rows = SamplingRows(each, torch.zeros_like(keys), torch.ones_like(each), torch.zeros_like(each))
    plan = SamplingPlan(has_greedy=0.0 in temperatures, has_temperature=len(temperatures) > 1)
    found, right = (sample(logits, rows, keys, positions, plan, fused=fused) for fused in (True, False))
    return torch.equal(found.tokens, right.tokens) and bool((found.logprobs - right.logprobs).abs().max() < MAX_ERROR)


def example(width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits float32 [8, width], keys and positions int64 [8]."""
    generator = torch.Generator().manual_seed(width)
    logits = torch.randn(8, width, generator=generator, dtype=torch.float32)
    logits.scatter_add_(1, torch.randint(width, (8, SPIKES), generator=generator), logits.new_full((8, SPIKES), 20.0))
    return logits, torch.randint(2**62, (8,), generator=generator), torch.arange(8)
