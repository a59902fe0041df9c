"""A model divided over the ranks of a trainer: tensor parallel inside a layer, FSDP2 over the data-parallel ranks.

A rank's `Transformer` is its tensor-parallel share (`tensor_parallel.py`), whose parameters torch's `fully_shard` cuts
by rows over the data-parallel ranks: each layer is a group that is gathered when it runs and given up again; embedding,
final norm and head are the root's, gathered from a forward pass to the end of its backward pass. So `model(...)` comes
first, then `model.logits(states)`, as everywhere; both work on whole (tensor-parallel shares of) parameters. Measure
under `torch.no_grad()`: in `torch.inference_mode()` torch would gather into tensors that can never be trained on.

Gradients of the data-parallel ranks are summed, never averaged: losses are divided by counts over all ranks. What is
left to sum over tensor-parallel ranks (`tensor_parallel.SharedRows`) is summed once per update, by
`ShardedParameters.finish_gradients`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase

from slipstream.core.errors import ConfigError
from slipstream.core.rank_group import RankGroup
from slipstream.core.sections import ModelConfig
from slipstream.models.config import TransformerConfig, config_from_hf, local_config
from slipstream.models.hf import logical_tensors, read_hf_config, write_tensor
from slipstream.models.initialise import initialise, new_config
from slipstream.models.scalar import (
    HEAD_NAME,
    HeadInit,
    ScalarModel,
    head_tensor,
    initialise_head,
    restore_biases,
)
from slipstream.models.shards import checkpoint_slices, load_shard, local_tensor
from slipstream.models.tensor_parallel import SharedRows, TensorParallel, shared_rows, whole_config
from slipstream.models.transformer import OneRank, Ranks, Transformer


@dataclass(frozen=True)
class Division:
    """How a model lies on this rank and its peers: the two groups of `RankGroup.split`, and what it computes on and in.

    `precision` is that of products; parameters, gradients and their sums are float32. `recomputes` keeps only every
    layer's input for the backward pass and runs the layer again there.
    """

    data_parallel: RankGroup
    tensor_parallel: RankGroup
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    precision: Literal["float32", "bfloat16"] = "float32"
    recomputes: bool = False

    def ranks_of(self, config: TransformerConfig) -> Ranks:
        """The tensor-parallel ranks of a model of the whole `config`. ConfigError when it cannot be divided so."""
        pg = self.tensor_parallel.pg
        return OneRank() if pg is None else TensorParallel.over(pg, config)

    @property
    def uses_fsdp(self) -> bool:
        """One data-parallel rank has nothing to gather, but FSDP also casts to the precision of products."""
        return self.data_parallel.world > 1 or self.precision != "float32"

    def mesh(self) -> DeviceMesh:
        """The data-parallel ranks, for torch. Process groups must have been initialised, also for one rank alone."""
        pg = self.data_parallel.pg
        if pg is None:
            pg = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        return DeviceMesh.from_group(pg, self.device.type, mesh_dim_names=("data_parallel",))


def divide(model: Transformer, division: Division) -> None:
    """Bring this rank's tensor-parallel share `model` to the division's device, and cut it over data-parallel ranks.

    Layer by layer, so that no more than one is on the device as a whole.
    """
    for layer in model.layers:
        layer.recomputes = division.recomputes
    mesh = division.mesh() if division.uses_fsdp else None
    is_float32 = division.precision == "float32"
    policy = MixedPrecisionPolicy() if is_float32 else MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.layers:
        layer.to(division.device)
        if mesh is not None:
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    for name, child in model.named_children():
        if name != "layers":
            child.to(division.device)
    model.cos, model.signed_sin = model.cos.to(division.device), model.signed_sin.to(division.device)
    if mesh is None:
        return
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # sums; the two together also spare gloo an operation that it lacks
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def load_sharded(path: str | Path, division: Division, *, max_positions: int | None = None) -> Transformer:
    """This rank's part of the model in folder `path`, of which only that part is read. Errors: as `hf.load_model`'s."""
    path = Path(path)
    config = config_from_hf(read_hf_config(path), max_positions=max_positions)
    model = _unfilled(config, division)
    with checkpoint_slices(path, config) as whole:
        load_shard(model, whole)
    return model


def new_sharded(config: TransformerConfig, seed: int, division: Division) -> Transformer:
    """This rank's part of the model that `initialise` draws from `seed`: the same numbers in every division.

    For that, every rank draws the whole model and keeps its part.
    """
    whole = Transformer(config)
    initialise(whole, seed)
    model = _unfilled(config, division)
    load_shard(model, logical_tensors(whole))
    return model


def _unfilled(config: TransformerConfig, division: Division) -> Transformer:
    """Nothing is written before it is divided, so a CPU gives memory for the parts only."""
    model = Transformer(_local(config, division), division.ranks_of(config))
    divide(model, division)
    return model


def _local(config: TransformerConfig, division: Division) -> TransformerConfig:
    return local_config(config, division.tensor_parallel.world)


def build_sharded_policy(
    config: ModelConfig, division: Division, *, seed: int, tokenizer: PreTrainedTokenizerBase
) -> Transformer:
    """This rank's part of the policy that `build.build_policy` gives, with the same numbers."""
    if config.path is not None:
        return load_sharded(config.path, division)
    whole = new_config(config, len(tokenizer), eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return new_sharded(whole, seed, division)


@torch.no_grad()
def load_sharded_scalar(
    path: str | Path, division: Division, *, head_init: HeadInit, seed: int, max_positions: int | None = None
) -> ScalarModel:
    """This rank's part of the scalar model in folder `path`; see `scalar.load_scalar_model`."""
    path = Path(path)
    model = _unfilled_scalar(config_from_hf(read_hf_config(path), max_positions=max_positions), division)
    with checkpoint_slices(path, whole_config(model.backbone)) as whole:
        head = whole.pop(HEAD_NAME, None)
        load_shard(model.backbone, whole)
        if head is None:
            initialise_head(model, head_init, seed)
        else:
            problems = write_tensor(head_tensor(model), head[:])
            if problems:
                raise ConfigError(f"the checkpoint in {path} does not fit its config.json", got=problems[0])
            restore_biases(model, path)
    return model


@torch.no_grad()
def new_sharded_scalar(policy: Transformer, division: Division, *, head_init: HeadInit, seed: int) -> ScalarModel:
    """A scalar model on a copy of `policy`, which lies in the same `division`, with a fresh head."""
    model = _unfilled_scalar(whole_config(policy), division)
    weights = ShardedParameters(policy, division).named_views()
    for name, view in ShardedParameters(model.backbone, division).named_views().items():
        view.copy_(weights[name])
    initialise_head(model, head_init, seed)
    return model


def _unfilled_scalar(config: TransformerConfig, division: Division) -> ScalarModel:
    config = replace(config, tie_embeddings=True)  # there is no head over the vocabulary
    model = ScalarModel(_local(config, division), division.ranks_of(config))
    divide(model.backbone, division)
    return model.to(division.device)


@dataclass(frozen=True)
class _Local:
    """What lies here of one parameter: `rows` of this rank's tensor-parallel share; `shared` are those others have."""

    parameter: nn.Parameter
    rows: range
    shared: SharedRows | None

    @property
    def view(self) -> Tensor:
        return local_tensor(self.parameter.detach())

    @property
    def grad(self) -> Tensor:
        """The gradient of `view`, zeros if no backward pass has made any."""
        if self.parameter.grad is None:
            self.parameter.grad = torch.zeros_like(self.parameter)
        return local_tensor(self.parameter.grad.detach())

    def among(self, rows: range) -> slice:
        """Where in `view` those of the share's `rows` are that lie here."""
        start, stop = max(rows.start, self.rows.start), min(rows.stop, self.rows.stop)
        return slice(start - self.rows.start, max(start, stop) - self.rows.start)


class ShardedParameters:
    """What this rank stores of a model's parameters: the counterpart of `FlatParameters` for several ranks.

    Of a parameter that is a range of rows, along its first dimension, of this rank's tensor-parallel share (where it
    lies in the checkpoint: `shards.local_parts`); what FSDP does not manage is whole. `named_views` stay valid for the
    model's life.
    """

    def __init__(self, model: nn.Module, division: Division) -> None:
        self._division = division
        self._fsdp_modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self.reshard()
        shared = _shared_rows(model, division.tensor_parallel)
        self._locals = {
            name: _Local(parameter, self._rows_of(parameter), shared.get(name))
            for name, parameter in model.named_parameters()
        }

    def _rows_of(self, parameter: nn.Parameter) -> range:
        """FSDP2 cuts the first dimension as `torch.chunk` does: equal numbers of rows, the last ranks have fewer."""
        rows, group = _all_rows(parameter), self._division.data_parallel
        if not isinstance(parameter, DTensor):
            return rows
        size = math.ceil(len(rows) / group.world)
        return rows[group.rank * size : (group.rank + 1) * size]

    def named_views(self) -> dict[str, Tensor]:
        """The weights that lie here, float32, by parameter name: live, never copies; some may have no rows.

        What is gathered is given up, so that the model's own parameters are those that lie here, and what is written
        into these is what it computes with.
        """
        self.reshard()
        return {name: local.view for name, local in self._locals.items()}

    def named_grads(self) -> dict[str, Tensor]:
        """The gradients of `named_views`; zeros where no backward pass has made any."""
        return {name: local.grad for name, local in self._locals.items()}

    def reshard(self) -> None:
        """Give up all gathered parameters. Whoever writes into views taken before a pass of the model calls it, or the
        next pass computes with the old embedding and head."""
        for module in self._fsdp_modules:
            module.reshard()

    def sum_gradients(self, enabled: bool) -> None:
        """Whether backward passes from now on sum gradients over the data-parallel ranks: yes, unless told otherwise.

        While they do not, each rank adds up a gradient of all rows of its tensor-parallel share.
        """
        for module in self._fsdp_modules:
            module.set_requires_gradient_sync(enabled, recurse=False)

    def zero_grad(self) -> None:
        for local in self._locals.values():
            local.parameter.grad = None

    @torch.no_grad()
    def finish_gradients(self) -> None:
        """Sum what backward passes left as parts on several ranks. Call it once, after the last of them.

        Over data-parallel ranks: parameters that FSDP does not manage. Over tensor-parallel ranks: partial rows.
        """
        data_parallel, tensor_parallel = self._division.data_parallel, self._division.tensor_parallel
        if data_parallel.world > 1:
            whole = [local for local in self._locals.values() if not isinstance(local.parameter, DTensor)]
            _sum_in_place([local.grad for local in whole], data_parallel)
        by_sharers: dict[range, list[Tensor]] = {}
        for local in self._locals.values():
            if local.shared is not None and local.shared.is_partial:
                rows = local.grad[local.among(local.shared.rows)]
                by_sharers.setdefault(local.shared.sharers, []).append(rows)
        for sharers in sorted(by_sharers, key=len):
            _sum_in_place(by_sharers[sharers], tensor_parallel, sharers=sharers)

    @torch.no_grad()
    def grad_norm(self) -> float:
        """Norm of the whole model's gradient, every element counted on one of the ranks that hold it.

        The same number on every rank. Call it after `finish_gradients`.
        """
        counted = list(self._counted_grads())
        total = torch.zeros(1, dtype=torch.float64)
        if counted:
            total += torch.stack(torch._foreach_norm(counted)).double().square().sum().cpu()
        for group in (self._division.data_parallel, self._division.tensor_parallel):
            total = group.sum(total)
        return math.sqrt(float(total))

    def non_finite_grads(self) -> list[str]:
        """Parameters whose gradient is NaN or inf somewhere, the same ones on every rank, which all call it."""
        flags = torch.tensor([not bool(torch.isfinite(grad).all()) for grad in self.named_grads().values()])
        flags = flags.to(torch.int64)
        for group in (self._division.data_parallel, self._division.tensor_parallel):
            flags = group.max(flags)
        return [name for name, flag in zip(self.named_grads(), flags.tolist(), strict=True) if flag]

    def _counted_grads(self) -> Iterator[Tensor]:
        """What this rank counts: of rows that several hold, the first of them does."""
        for local in self._locals.values():
            if self._division.data_parallel.rank > 0 and not isinstance(local.parameter, DTensor):
                continue
            grad = local.grad
            if local.shared is not None and local.shared.sharers.start != self._division.tensor_parallel.rank:
                if local.shared.rows.start == 0:
                    continue
                grad = grad[local.among(range(local.shared.rows.start))]  # shared rows are the last ones
            if grad.numel():
                yield grad


def _sum_in_place(parts: list[Tensor], group: RankGroup, sharers: range | None = None) -> None:
    """Replace `parts` by their sums over all ranks of `group`, or over its neighbours `sharers`, all calling alike."""
    num_sets = 1 if sharers is None else group.world // len(sharers)
    place = 0 if sharers is None else sharers.start // len(sharers)
    sizes = [part.numel() for part in parts]
    if not sum(sizes):
        return
    slots = parts[0].new_zeros((num_sets, sum(sizes)))
    slots[place] = torch.cat([part.flatten() for part in parts])
    for part, summed in zip(parts, torch.split(group.sum(slots)[place], sizes), strict=True):
        part.copy_(summed.view_as(part))


def _shared_rows(model: nn.Module, tensor_parallel: RankGroup) -> dict[str, SharedRows]:
    """`shared_rows` of the `Transformer` that `model` is or contains; what else it contains is alike on all ranks."""
    if tensor_parallel.world == 1:
        return {}
    everyone = range(tensor_parallel.world)
    divided = {f"{p}.".lstrip("."): m for p, m in model.named_modules() if isinstance(m, Transformer)}
    found = {
        name: SharedRows(_all_rows(parameter), everyone, is_partial=False)
        for name, parameter in model.named_parameters()
        if not name.startswith(tuple(divided))
    }
    return found | {prefix + name: rows for prefix, m in divided.items() for name, rows in shared_rows(m).items()}


def _all_rows(parameter: nn.Parameter) -> range:
    return range(parameter.shape[0] if parameter.ndim else 1)
