"""Expert parallelism: the experts of each layer lie whole on several ranks, some of them on each.

Two divisions, which go together. Of E experts rank t of T tensor-parallel ones has the t-th E / T, its column, and of a
column rank r of the R that exchange tokens has the r-th part.

- Tensor-parallel ranks have the same tokens. Each computes what its own experts give to all of them, and the sum over
  ranks at the end of the layer, which attention has too, adds that up: no token is sent. Every rank routes alike; what
  a rank knows of the router's gradient is what its own experts say, a part of a sum (`tensor_parallel.shared_rows`).
- Ranks that exchange tokens, in training, are data-parallel ones: each has tokens of its own. A token's row goes to the
  rank of each of its experts by an all-to-all and the expert's answer comes back by another one; gates stay at home. In
  the backward pass gradients go the same two ways back. So an expert has the gradient of all ranks' tokens, and what
  remains is the sum over the ranks that hold the same experts (`ExpertRanks.sharing`), which FSDP2 makes.

A rank without tokens, whose microbatch is empty, has experts that others send to: all ranks make the same calls, with
as many rows as there are. A row's product has the same bits wherever it is made (`experts.py`), and at its home a
token's experts are added in the order of their weights.
Identity: on a CPU without tensor parallelism, a forward pass has the bits of one rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.core.errors import ConfigError
from slipstream.core.rank_group import RankGroup
from slipstream.models.experts import Groups, counts_of, group, multiplies_groups


@dataclass(frozen=True)
class ExpertRanks:
    """The data-parallel ranks, for experts: those of `exchange` have all of a column's, those of `sharing` the same."""

    exchange: RankGroup = field(default_factory=RankGroup.alone)
    sharing: RankGroup = field(default_factory=RankGroup.alone)


class _ExchangedRows(torch.autograd.Function):
    """Rows [sum of sent] to the ranks of a group, by rank -> [sum of received], by rank; gradients go back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: Sequence[int], received: Sequence[int], ranks: RankGroup) -> Tensor:
        ctx.sizes = sent, received, ranks
        return exchanged(rows, sent, received, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received, ranks = ctx.sizes
        return exchanged(grad, received, sent, ranks), None, None, None


def exchanged(rows: Tensor, sent: Sequence[int], received: Sequence[int], ranks: RankGroup) -> Tensor:
    """Send `rows` [sum of sent, ...], those of rank 0 first; return what came, [sum of received, ...], by rank."""
    came = rows.new_empty((sum(received), *rows.shape[1:]))
    ranks.run(dist.all_to_all_single, came, rows.contiguous(), list(received), list(sent))
    return came


@dataclass(frozen=True, eq=False)
class ExpertShare:
    """The experts of one rank: a part of `column`, which the ranks of `exchange` have among them."""

    column: range
    exchange: RankGroup

    @classmethod
    def of(
        cls, num_experts: int, *, rank: int = 0, world: int = 1, exchange: RankGroup = RankGroup.alone()
    ) -> ExpertShare | None:
        """Return the share of rank `rank` of `world` tensor-parallel ones; None where it has all experts.

        ConfigError where ranks would not have equally many.
        """
        if world * exchange.world == 1:
            return None
        check_experts(num_experts, world * exchange.world)
        size = num_experts // world
        return cls(range(rank * size, (rank + 1) * size), exchange)

    @property
    def own(self) -> range:
        """The experts of this rank."""
        size = len(self.column) // self.exchange.world
        first = self.column.start + self.exchange.rank * size
        return range(first, first + size)

    def answers(self, x: Tensor, chosen: Tensor, products: Callable[[Tensor, Groups], Tensor]) -> Tensor:
        """Return what the experts `chosen` for each of the tokens x [N, hidden], int64 [N, k], give: [N, k, hidden].

        0 for experts of other columns. `products` are those of this rank's own, for rows sorted by expert.
        """
        size = len(self.column)
        place = chosen - self.column.start
        is_here = (place >= 0) & (place < size)
        place = torch.where(is_here, place, size)
        if self.exchange.world == 1 and multiplies_groups(x.device, x.dtype) and not torch.is_grad_enabled():
            return _on_device(x, place, size, products)
        return self._at_their_ranks(x, place, products)

    def _at_their_ranks(self, x: Tensor, place: Tensor, products: Callable[[Tensor, Groups], Tensor]) -> Tensor:
        """Return `answers` for places in the column, or behind it for experts of others. The host waits for counts."""
        ranks, (num_tokens, k) = self.exchange, place.shape
        counts = counts_of(place, len(self.column) + 1)[:-1].view(ranks.world, -1)
        theirs = counts
        if ranks.world > 1:
            theirs = exchanged(counts, [1] * ranks.world, [1] * ranks.world, ranks)
        sent, received = torch.stack((counts.sum(1), theirs.sum(1))).tolist()
        flat, num_sent, num_own = place.flatten(), sum(sent), counts.shape[1]
        order = flat.argsort(stable=True)
        rows = x.index_select(0, order[:num_sent] // k)
        if ranks.world > 1:
            rows = _ExchangedRows.apply(rows, sent, received, ranks)  # type: ignore[no-untyped-call]
        expert = torch.arange(num_own, device=x.device).repeat(ranks.world)
        expert = expert.repeat_interleave(theirs.flatten(), output_size=sum(received))
        groups = group(expert[:, None], num_own, on_device=multiplies_groups(x.device, x.dtype))
        out = products(rows.index_select(0, groups.source), groups).index_select(0, groups.places.flatten())
        if ranks.world > 1:
            out = _ExchangedRows.apply(out, received, sent, ranks)  # type: ignore[no-untyped-call]
        nothing = out.new_zeros((1, out.shape[1]))  # what experts of other columns give here
        ranks_of_rows = torch.arange(len(flat), device=x.device).clamp_(max=num_sent)
        places = torch.empty_like(flat).scatter_(0, order, ranks_of_rows)
        return torch.cat((out, nothing)).index_select(0, places).view(num_tokens, k, out.shape[1])


def _on_device(x: Tensor, place: Tensor, size: int, products: Callable[[Tensor, Groups], Tensor]) -> Tensor:
    """Return `ExpertShare.answers` with as many rows as could be, none counted on the host: it may be captured.

    The rows of experts elsewhere lie behind the last end: no product is made for them, and what is there is not read.
    """
    groups = group(place, size + 1, on_device=True)
    assert groups.ends is not None, "on the device"
    out = products(x.index_select(0, groups.source), Groups(groups.source, groups.places, (), groups.ends[:-1]))
    answers = out.index_select(0, groups.places.flatten()).view(*place.shape, out.shape[1])
    return torch.where((place < size)[:, :, None], answers, 0)


def check_experts(num_experts: int, ranks: int, *, of: str = "") -> None:
    """Raise ConfigError where `ranks` would not have equally many of a layer's experts; `of` are the fields' values."""
    if not num_experts or num_experts % ranks:
        allowed = [str(n) for n in range(1, num_experts + 1) if num_experts % n == 0]
        raise ConfigError(
            "a mixture's experts are divided over ranks that have equally many, whole ones",
            got=f"{ranks} ranks{of} for {num_experts or 'no'} experts",
            allowed=f"{', '.join(allowed)} ranks" if allowed else "a mixture of experts, or 1 rank",
        )
