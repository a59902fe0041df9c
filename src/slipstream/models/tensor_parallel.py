"""Tensor parallelism: one `Transformer` per rank, holding its share of every layer, and the map of who holds what.

Megatron-LM's division (Shoeybi et al., arXiv:1909.08053, section 3): a rank has some of the heads and some of the MLP's
inner width, so `qkv` and `up` are cut by rows, `output` and `down` by columns, and what these two give is a share of a
sum over ranks: two collectives per layer, one where attention and MLP are parallel (GPT-NeoX). More specifically:

- With more ranks than key-value heads, neighbouring ranks hold the same head, and each its own query heads.
- Biases of `output` and `down` lie on rank 0 alone, which adds them to its share; norms lie on every rank.
- The head is cut by vocabulary rows, as evenly as they go, and all ranks gather all logits. Each logit is computed on
  one rank and copied, so logits are bitwise the same everywhere; with equal noise, so are the sampled tokens.
- The embedding is whole on every rank. Looking up is then exact and needs no collective, and a tied head is a range of
  its rows, without a copy. It costs memory and, per version, wire: for 128k tokens times 8192 bf16 2 GB of 18 GB that
  one of eight ranks holds of a 70B model. A decode step reads only its tokens' rows, so it costs no time.

For decoding and other inference: gradients of sums over ranks are refused (`join`), not wrong.

Bits. All ranks add the same numbers in the same order, so the residual stream is the same on every rank, too. But the
order of an all-reduce over three and more ranks depends on where a number lies in the buffer, so that the bits of a
row depend on the number of rows (seen with gloo; rings do that). `fixed_order` gathers the shares and adds them in
rank order, for world / 2 times the traffic of a ring: the rows are independent again. It is for CPUs, whose products
have that property; on CUDA, where they have not, it would buy nothing.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from slipstream.core.errors import ConfigError, RankError, ShapeError
from slipstream.core.ranks import lost_rank
from slipstream.models.config import TransformerConfig, config_from_hf
from slipstream.models.hf import canonical_name, open_tensors, read_hf_config, weight_files
from slipstream.models.layout import LogicalTensor, layout
from slipstream.models.transformer import Transformer

# The public name changed in torch 2.13.
_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor


def local_config(config: TransformerConfig, world: int) -> TransformerConfig:
    """`config` with the heads and the inner width of one of `world` ranks; the vocabulary stays whole.

    Raises ConfigError, listing the numbers of ranks that are possible.
    """
    if not _divides(config, world):
        raise ConfigError(
            "the model cannot be divided over this number of ranks",
            got=f"{world} ranks for {config.num_heads} heads, {config.num_kv_heads} key-value heads and an "
            f"intermediate_size of {config.intermediate_size}",
            allowed=", ".join(str(n) for n in range(1, config.num_heads + 1) if _divides(config, n)) + " ranks",
            hint="every rank gets whole heads, all as many; key-value heads may be shared by ranks, all by as many",
        )
    return replace(
        config,
        num_heads=config.num_heads // world,
        num_kv_heads=max(config.num_kv_heads // world, 1),
        intermediate_size=config.intermediate_size // world,
    )


def _divides(config: TransformerConfig, world: int) -> bool:
    shares_evenly = world >= 1 and (config.num_kv_heads % world == 0 or world % config.num_kv_heads == 0)
    return (
        shares_evenly
        and config.num_heads % world == 0
        and config.intermediate_size % world == 0
        and config.vocab_size >= world
    )


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
    ) -> None:
        self.config, self.rank, self.world, self.group = config, rank, world, group
        self.local_config = local_config(config, world)
        self.fixed_order = fixed_order
        self.has_sum_biases = rank == 0
        starts = [n * config.vocab_size // world for n in range(world + 1)]
        self._rows = range(starts[rank], starts[rank + 1])
        self._vocab_sizes = [stop - start for start, stop in itertools.pairwise(starts)]

    @classmethod
    def over(cls, group: dist.ProcessGroup, config: TransformerConfig, *, fixed_order: bool = False) -> TensorParallel:
        """This process's rank of `group`."""
        return cls(config, dist.get_rank(group), dist.get_world_size(group), group, fixed_order=fixed_order)

    def new_model(self) -> Transformer:
        """This rank's part of the model, uninitialised; `model.config` is the local one. `load_shard` fills it."""
        return Transformer(self.local_config, self)

    def vocab_rows(self, vocab_size: int) -> range:
        if vocab_size != self.config.vocab_size:
            raise ShapeError("another vocabulary than was divided", got=vocab_size, allowed=self.config.vocab_size)
        return self._rows

    def join(self, x: Tensor, *branches: Tensor) -> Tensor:
        """x plus the sum over ranks of all branches, in one collective. x and branches [N, hidden]."""
        share = branches[0]
        for branch in branches[1:]:
            share = share + branch
        if share.requires_grad:
            raise RankError("tensor parallelism has no gradients yet", hint="run under torch.inference_mode()")
        if not self.fixed_order:
            self._run(dist.all_reduce, share)
            return x + share
        shares = share.new_empty((self.world, *share.shape))
        self._run(_all_gather, shares.flatten(0, 1), share)
        total = shares[0]
        for share in shares[1:]:
            total = total + share
        return x + total

    def local_vocab(self, weight: Tensor) -> Tensor:
        return weight[self._rows.start : self._rows.stop]

    def gather_vocab(self, logits: Tensor) -> Tensor:
        """This rank's logits [..., Vr] -> everyone's [..., V], in order. Shares are sent filled up to the longest."""
        if logits.requires_grad:
            raise RankError("tensor parallelism has no gradients yet", hint="run under torch.inference_mode()")
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


@dataclass(frozen=True)
class Box:
    """A rectangular part of one tensor of the Hugging Face checkpoint, of `shape`: start[d] <= index[d] < stop[d]."""

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """What cuts the box out of the whole tensor."""
        return tuple(slice(start, stop) for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def extent(self) -> tuple[int, ...]:
        """The shape of what is inside."""
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))


@dataclass(frozen=True)
class Shard:
    """A box, and where this rank stores what is in it: a view into a parameter, of as many elements as the box."""

    box: Box
    view: Tensor

    def read(self) -> Tensor:
        """The content in the box's shape: a view where strides allow, else a copy."""
        return self.view.reshape(self.box.extent)

    def write(self, value: Tensor) -> None:
        """Copy `value` (of the box's shape, any precision) into the parameter."""
        self.view.copy_(value.reshape(self.view.shape))


def shards(model: Transformer) -> list[Shard]:
    """Where a rank's model stores which part of the checkpoint, in the order of `layout`.

    Views stay valid as long as the parameters' storage: take them again after `FlatParameters.rebind`.
    """
    ranks = model.ranks
    if not isinstance(ranks, TensorParallel):
        raise ShapeError("only a rank of a tensor-parallel group has shards", hint="for a whole model, see `layout`")
    whole = whole_shapes(ranks.config)
    return [shard for part in layout(model) for shard in _cut(part, whole[part.name], ranks)]


def _cut(part: LogicalTensor, whole: tuple[int, ...], ranks: TensorParallel) -> Iterator[Shard]:
    """The boxes of a rank's logical tensor `part`: it is cut along the dimension that is shorter than in the whole.

    A dimension of n units starts at unit rank * n // world, which is also what repeats key-value heads on neighbours.
    """
    cut = next((axis for axis, size in enumerate(part.shape) if size != whole[axis]), None)
    if cut is None:
        yield Shard(Box(part.name, whole, (0,) * len(whole), whole), part.view)
        return
    period = whole[cut] // part.stacked
    first = ranks.rank * (period // part.unit) // ranks.world * part.unit
    size = part.shape[cut] // part.stacked
    pieces = part.view.chunk(part.stacked, cut) if part.stacked > 1 else (part.view,)
    for number, piece in enumerate(pieces):
        start, stop = [0] * len(whole), list(whole)
        start[cut] = number * period + first
        stop[cut] = start[cut] + size
        yield Shard(Box(part.name, whole, tuple(start), tuple(stop)), piece)


@functools.cache
def whole_shapes(config: TransformerConfig) -> Mapping[str, tuple[int, ...]]:
    """The shape of every tensor of the whole model's checkpoint."""
    with torch.device("meta"):
        return {tensor.name: tensor.shape for tensor in layout(Transformer(config))}


def shard_boxes(config: TransformerConfig, rank: int, world: int) -> list[Box]:
    """What rank `rank` of `world` holds of a model of the whole `config`: any process may ask, for any rank."""
    with torch.device("meta"):
        model = TensorParallel(config, rank, world).new_model()
    return [shard.box for shard in shards(model)]


@torch.no_grad()
def load_shard(model: Transformer, whole: Mapping[str, Any]) -> None:
    """Fill a rank's model from all tensors of the checkpoint, of which it reads its boxes only.

    `whole` maps Hugging Face's names to tensors (`hf.logical_tensors` of a whole model, `whole_tensors` of flat
    weights) or to slices of safetensors files. Raises ConfigError for missing, unexpected or misshapen ones.
    """
    mine = shards(model)
    assert isinstance(model.ranks, TensorParallel)
    shapes = whole_shapes(model.ranks.config)
    problems = [f"missing {name}" for name in shapes if name not in whole]
    for name, tensor in whole.items():
        shape = tuple(tensor.shape if isinstance(tensor, Tensor) else tensor.get_shape())
        if name not in shapes:
            problems.append(f"unexpected {name}")
        elif shape != shapes[name]:
            problems.append(f"{name} has shape {list(shape)}, not {list(shapes[name])}")
    if problems:
        raise ConfigError("these are not the tensors of the model that was divided", got="; ".join(problems[:20]))
    for shard in mine:
        shard.write(whole[shard.box.name][shard.box.slices])


def whole_tensors(config: TransformerConfig, flat: Tensor) -> dict[str, Tensor]:
    """Hugging Face's tensors of a whole model, from its flat weights (`flat.FlatParameters`) [num_params]."""
    with torch.device("meta"):
        model = Transformer(config)
    parameters = dict(model.named_parameters())
    pieces = torch.split(flat, [p.numel() for p in parameters.values()])
    views = {name: piece.view(p.shape) for (name, p), piece in zip(parameters.items(), pieces, strict=True)}
    model.load_state_dict(views, assign=True)
    return {tensor.name: tensor.read() for tensor in layout(model)}


def load_parallel_model(
    path: str | Path,
    group: dist.ProcessGroup,
    *,
    dtype: torch.dtype = torch.float32,
    max_positions: int | None = None,
    fixed_order: bool = False,
) -> Transformer:
    """This rank's part of the model in folder `path`, of which only that part is read. Errors: as `hf.load_model`'s."""
    path = Path(path)
    config = config_from_hf(read_hf_config(path), max_positions=max_positions)
    model = TensorParallel.over(group, config, fixed_order=fixed_order).new_model().to(dtype)
    wanted = whole_shapes(config)
    with ExitStack() as stack:
        found: dict[str, Any] = {}
        for file in weight_files(path):
            tensors = stack.enter_context(open_tensors(file))
            for stored_name in tensors.keys():  # noqa: SIM118 - not a dict
                name = canonical_name(stored_name, wanted, config.tie_embeddings)
                if name is not None:
                    found[name] = tensors.get_slice(stored_name)
        load_shard(model, found)
    return model
