"""The logits that a trainer on a GPU holds at once: by the memory that weights, gradients and moments leave free."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from slipstream.core.rank_group import RankGroup
from slipstream.models.config import MAX_LOGITS
from slipstream.trainer.optim import AdamW

FEWEST = 1 << 24
LOGIT_BYTES = 16  # at most: four numbers in float32, where torch makes the gradient of an entropy (`models/head.py`)
SHARE = 1 / 4  # of the free memory; activations of a microbatch and the head's gradient have the rest


def free_bytes(device: torch.device, gpu_share: float | None) -> int:
    """Return the bytes of a GPU, or of this process's `gpu_share` of it, that torch can still take or keeps unused."""
    free, total = torch.cuda.mem_get_info(device)
    used, held = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    return min(free + held, int(total if gpu_share is None else gpu_share * total)) - used


def logits_that_fit(free: int) -> int:
    """Return the largest power of two of logits that take at most `SHARE` of `free` bytes, from 2^24 to 2^28."""
    fits = max(int(SHARE * free) // LOGIT_BYTES, 1)
    return min(max(1 << (fits.bit_length() - 1), FEWEST), MAX_LOGITS["cuda"])


def choose_logits(
    optimizers: Sequence[AdamW], ranks: RankGroup, read: Callable[[], int], before: int | None = None
) -> tuple[int, int]:
    """Return the logits that all `ranks`, which call it together, hold at once, and the bytes that are free on each.

    `read` tells a rank's, while `optimizers` have their gradients. What a run took `before` it was resumed is kept, as
    sums depend on it, unless it takes more than twice its share of what is free now.
    """
    for optimizer in optimizers:
        optimizer.parameters.reshard()
        optimizer.parameters.stored_grads()
    free = -int(ranks.max(torch.tensor(-read())))
    for optimizer in optimizers:
        optimizer.zero_grad()
    chosen = logits_that_fit(free)
    return (chosen if before is None or before > 2 * chosen else before), free
