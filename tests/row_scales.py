"""The scales of rows in a narrow type."""

from __future__ import annotations

import torch
from torch import Tensor


def scales_of(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 [M]: a row's largest |weight| becomes the type's largest number; 1 for a row of zeros."""
    largest = weight.abs().amax(1)
    most = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    return torch.where(largest == 0, 1.0, largest / most)
