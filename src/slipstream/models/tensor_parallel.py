"""Tensor parallelism: one `Transformer` per rank, holding its share of every layer (`shards.py` maps who holds what).

Megatron-LM's division (Shoeybi et al., arXiv:1909.08053, section 3): a rank has some of the heads and some of the MLP's
inner width, so `qkv` and `up` are cut by rows, `output` and `down` by columns, and what these two give is a share of a
sum over ranks: two collectives per layer, one where attention and MLP are parallel (GPT-NeoX). More specifically:

- With more ranks than key-value heads, neighbouring ranks hold the same head, and each its own query heads.
- Biases of `output` and `down` lie on rank 0 alone, which adds them to its share; norms lie on every rank.
- The head is cut by vocabulary rows, as evenly as they go. To sample, all ranks gather all logits. Each logit is
  computed on one rank and copied, so logits are bitwise the same everywhere; with equal noise, so are the sampled
  tokens. The trainer gathers none: `head.py` sums over ranks what logprobs and entropies are made of.
- Experts are whole, some of them on each rank, behind a router on all (`expert_parallel.py`).
- The embedding is whole on every rank. Looking up is then exact and needs no collective, and a tied head is a range of
  its rows, without a copy. It costs memory and, per version, wire: for 128k tokens times 8192 bf16 2 GB of 18 GB that
  one of eight ranks holds of a 70B model. A decode step reads only its tokens' rows, so it costs no time.

Gradients. Every rank computes the same loss from the same logprobs, so the gradient of what is alike on all ranks
(logprobs, residual stream) is too. `join` hands it to every branch; `fork`, before the products that divide the work,
sums what comes back: a second collective per branch. So gradients of norms, of an untied embedding and of positions are
whole on every rank, and those of divided parameters belong to their rank. What remains are parts of a sum: key-value
heads that several ranks hold, norms of queries and keys, routers, and a tied embedding, of whose head each rank knows
its own rows. They are added up once per update, not once per product; `SharedRows.is_partial` says which they are. Of
adapters it is what every rank holds: A where rows are cut, whose gradient is of this rank's rows of B, and B where
columns are.

Bits. All ranks add the same numbers in the same order, so the residual stream is the same on every rank, too. But the
order of an all-reduce over three and more ranks depends on where a number lies in the buffer, so that the bits of a
row depend on the number of rows (seen with gloo; rings do that). `fixed_order` gathers the shares and adds them in
rank order, for world / 2 times the traffic of a ring: the rows are independent again. It is for CPUs, whose products
have that property; on CUDA, where they have not, it would buy nothing.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from slipstream.core.errors import ShapeError
from slipstream.core.rank_group import RankGroup, lost_rank
from slipstream.models.config import TransformerConfig, local_config
from slipstream.models.expert_parallel import ExpertShare
from slipstream.models.lora import Adapter
from slipstream.models.transformer import Transformer

# The public name changed in torch 2.13.
_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor


class _Fork(torch.autograd.Function):
    """y = x;  dx = sum over ranks of dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorParallel) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.sum(grad.clone(memory_format=torch.contiguous_format)), None


class _Join(torch.autograd.Function):
    """y = x + sum over ranks of all branches;  dx = dy, and so is the gradient of every branch."""

    @staticmethod
    def forward(ctx: Any, ranks: TensorParallel, x: Tensor, *branches: Tensor) -> Tensor:
        ctx.num_branches = len(branches)
        return x + ranks.sum(*branches)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, grad, *[grad] * ctx.num_branches


class _GatherVocab(torch.autograd.Function):
    """All ranks' logits in order; the gradient, which every rank has whole, is cut to this rank's."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ranks: TensorParallel) -> Tensor:
        ctx.rows = ranks._rows
        return ranks._gather_vocab(logits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[..., ctx.rows.start : ctx.rows.stop], None


class TensorParallel:
    """Rank `rank` of the `world` that run a model of the whole `config` together. Implements `transformer.Ranks`.

    `group` carries the sums and gathers: gloo for a CPU, NCCL for CUDA, where they may be captured in a graph once one
    step has run outside of it (NCCL connects on first use). Without one it describes a rank, and runs nothing. With
    `fixed_order` a row's bits do not depend on the number of rows (see the module's docstring).
    """

    def __init__(
        self,
        config: TransformerConfig,
        rank: int,
        world: int,
        group: dist.ProcessGroup | None = None,
        *,
        fixed_order: bool = False,
        exchange: RankGroup = RankGroup.alone(),
    ) -> None:
        self.config, self.rank, self.world, self.group = config, rank, world, group
        self._exchange = exchange
        self.local_config = local_config(config, world)
        self.fixed_order = fixed_order
        self.counts_once = rank == 0
        starts = [n * config.vocab_size // world for n in range(world + 1)]
        self._rows, self.first_row = range(starts[rank], starts[rank + 1]), starts[rank]
        self._vocab_sizes = [stop - start for start, stop in itertools.pairwise(starts)]

    @classmethod
    def over(
        cls,
        group: dist.ProcessGroup,
        config: TransformerConfig,
        *,
        fixed_order: bool = False,
        exchange: RankGroup = RankGroup.alone(),
    ) -> TensorParallel:
        """This process's rank of `group`."""
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        return cls(config, rank, world, group, fixed_order=fixed_order, exchange=exchange)

    def new_model(self) -> Transformer:
        """This rank's part of the model, uninitialised; `model.config` is the local one. `load_shard` fills it."""
        return Transformer(self.local_config, self)

    def vocab_rows(self, vocab_size: int) -> range:
        if vocab_size != self.config.vocab_size:
            raise ShapeError("another vocabulary than was divided", got=vocab_size, allowed=self.config.vocab_size)
        return self._rows

    def experts(self, num_experts: int) -> ExpertShare | None:
        return ExpertShare.of(num_experts, rank=self.rank, world=self.world, exchange=self._exchange)

    def fork(self, x: Tensor) -> Tensor:
        """x itself; its gradient is summed over ranks."""
        if not torch.is_grad_enabled():
            return x
        forked: Tensor = _Fork.apply(x, self)  # type: ignore[no-untyped-call]
        return forked

    def join(self, x: Tensor, *branches: Tensor) -> Tensor:
        """x plus the sum over ranks of all branches, in one collective. x and branches [N, hidden].

        Consumes a single branch: its storage may be that of the sum.
        """
        if not torch.is_grad_enabled():
            return x + self.sum(*branches)
        joined: Tensor = _Join.apply(self, x, *branches)  # type: ignore[no-untyped-call]
        return joined

    def sum(self, *shares: Tensor) -> Tensor:
        """The sum of all shares of all ranks, in place of a single one."""
        share = shares[0]
        for other in shares[1:]:
            share = share + other
        if not self.fixed_order:
            self._run(dist.all_reduce, share)
            return share
        gathered = share.new_empty((self.world, *share.shape))
        self._run(_all_gather, gathered.flatten(0, 1), share)
        total = gathered[0]
        for share in gathered[1:]:
            total = total + share
        return total

    def max(self, share: Tensor) -> Tensor:
        self._run(partial(dist.all_reduce, op=dist.ReduceOp.MAX), share)
        return share

    def local_vocab(self, weight: Tensor) -> Tensor:
        return weight[self._rows.start : self._rows.stop]

    def gather_vocab(self, logits: Tensor) -> Tensor:
        """This rank's logits [..., Vr] -> everyone's [..., V], in order."""
        if not torch.is_grad_enabled():
            return self._gather_vocab(logits)
        gathered: Tensor = _GatherVocab.apply(logits, self)  # type: ignore[no-untyped-call]
        return gathered

    def _gather_vocab(self, logits: Tensor) -> Tensor:
        """Shares are sent filled up to the longest."""
        longest = max(self._vocab_sizes)
        sent = F.pad(logits, (0, longest - logits.shape[-1])).contiguous()
        parts = sent.new_empty((self.world, *sent.shape))
        self._run(_all_gather, parts.flatten(0, 1), sent)
        return torch.cat([part[..., :size] for part, size in zip(parts, self._vocab_sizes, strict=True)], -1)

    def _run(self, collective: Any, *tensors: Tensor) -> None:
        assert self.group is not None, "this rank was described without a process group"
        try:
            collective(*tensors, group=self.group)
        except RuntimeError as error:
            raise lost_rank(self.group, error) from error


def whole_config(model: Transformer) -> TransformerConfig:
    """The config of the model that was divided, or of one that is whole."""
    return model.ranks.config if isinstance(model.ranks, TensorParallel) else model.config


@dataclass(frozen=True)
class SharedRows:
    """Rows of a parameter that the ranks `sharers`, this one among them, hold alike.

    With `is_partial` their gradients are parts of a sum over the sharers, else they are all the whole gradient.
    """

    rows: range
    sharers: range
    is_partial: bool


def shared_rows(model: Transformer) -> dict[str, SharedRows]:
    """Return, by name, the parameters of a rank's model that other ranks hold, too; all others are its own."""
    ranks = model.ranks
    if not isinstance(ranks, TensorParallel) or ranks.world == 1:
        return {}
    everyone = range(ranks.world)
    kv_sharers = max(ranks.world // ranks.config.num_kv_heads, 1)
    first = ranks.rank - ranks.rank % kv_sharers
    found: dict[str, SharedRows] = {}
    for name, parameter in model.named_parameters():
        rows, module = range(len(parameter)), name.split(".")[-2]
        if module in ("attention_norm", "mlp_norm", "final_norm", "position_embedding"):
            found[name] = SharedRows(rows, everyone, is_partial=False)
        elif module in ("q_norm", "k_norm", "router"):
            found[name] = SharedRows(rows, everyone, is_partial=True)
        elif module == "embedding":
            found[name] = SharedRows(rows, everyone, is_partial=model.config.tie_embeddings)
        elif module == "qkv" and kv_sharers > 1:  # rows of queries, then of keys and values
            found[name] = SharedRows(rows[model.config.query_size :], range(first, first + kv_sharers), is_partial=True)
        elif module == "adapter":
            layer, is_a = name.split(".")[-3], name.endswith(".a")
            if layer == "embedding":
                found[name] = SharedRows(rows, everyone, is_partial=False)
            elif is_a != (layer in ("output", "down")):  # A before rows that are divided, B behind columns that are
                found[name] = SharedRows(rows, everyone, is_partial=True)
            elif layer == "qkv" and kv_sharers > 1:
                pieces = cast(Adapter, model.get_submodule(name.removesuffix(".b"))).shape.pieces
                queries = sum(piece.num_rows for piece in pieces if piece.start < model.config.query_size)
                found[name] = SharedRows(rows[queries:], range(first, first + kv_sharers), is_partial=True)
    return found
