"""Keys and values in pages: two tensors, on any device and in any precision."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.core.packed import sent
from slipstream.generator.kv_cache import unknown_routes

PAGE_SIZE = 16
"""Tokens per page. Small: at most this much minus one is wasted per row; a page is still contiguous enough to read."""


class PagedKV:
    """Keys and values [L, 1 + pages, PAGE_SIZE, Hkv, D]; page 0 is the trash page (`pages.py`).

    With `recorded` (experts per token, their number) also `routes` [L, 1 + pages, PAGE_SIZE, k], each token's experts.
    They start as zeros: kernels may read what nobody wrote, multiplied by a weight of 0, and 0 times NaN is NaN.
    A *slot* is the place of one token: page * PAGE_SIZE + place in the page.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        recorded: tuple[int, int] | None = None,
    ) -> None:
        shape = (num_layers, 1 + num_pages, PAGE_SIZE, num_kv_heads, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.routes = None if recorded is None else unknown_routes(shape[:3], recorded, device)
        self._key_slots = self.keys.flatten(1, 2)
        self._value_slots = self.values.flatten(1, 2)

    @staticmethod
    def bytes_per_page(*, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes that one page takes, keys and values of all layers."""
        return 2 * num_layers * PAGE_SIZE * num_kv_heads * head_dim * dtype.itemsize

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store `keys` and `values` [N, Hkv, D], which may be strided, at `slots` int64 [N].

        Slots of the trash page may occur more than once; what they hold then is one of the given values.
        """
        self._key_slots[layer].index_copy_(0, slots, keys.to(self.keys.dtype))
        self._value_slots[layer].index_copy_(0, slots, values.to(self.values.dtype))

    def record(self, layer: int, slots: Tensor, chosen: Tensor) -> Tensor:
        """Store the experts `chosen` [N, k], and return them, at `slots`, if they are to be recorded."""
        if self.routes is not None:
            self.routes[layer].flatten(0, 1).index_copy_(0, slots, chosen.to(self.routes.dtype))
        return chosen

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [N, Hkv, D] at `slots` int64 [N]."""
        return self._key_slots[layer].index_select(0, slots), self._value_slots[layer].index_select(0, slots)

    def copy_pages(self, sources: Sequence[int] | Tensor, destinations: Sequence[int] | Tensor) -> None:
        """Copy page `sources[i]`, as it was before all copies, to `destinations[i]` in every layer (tensors: int64)."""
        if isinstance(sources, Tensor) and isinstance(destinations, Tensor):
            taken, given = sources, destinations
        else:
            taken, given = sent(torch.tensor([sources, destinations]), self.keys.device)
        for stored in (self.keys, self.values, *([] if self.routes is None else [self.routes])):
            stored.index_copy_(1, given, stored.index_select(1, taken))
