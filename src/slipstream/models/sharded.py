"""A model in training: whole on one CPU rank, else divided; tensor parallel inside a layer, FSDP2 over data parallel,
and layers over pipeline stages (`stages.py`; passes run as `stage_passes.py` says).

On one CPU rank (`Division.is_whole`) a model is what `build.py` and `scalar.py` make, stored flat. Elsewhere a rank's
`Transformer` is its tensor-parallel share (`tensor_parallel.py`), whose parameters torch's `fully_shard` cuts by rows
over the data-parallel ranks: each layer is a group that is gathered when it runs and given up again; embedding, final
norm and head are the root's, gathered from a forward pass to the end of its backward pass. So `model(...)` comes first,
then `model.logits(states)`, as everywhere; both work on whole (tensor-parallel shares of) parameters. Measure under
`torch.no_grad()`: in `torch.inference_mode()` torch would gather into tensors that can never be trained on.

Gradients of the data-parallel ranks are summed, never averaged: losses are divided by counts over all ranks. Sums over
tensor-parallel ranks that remain (`tensor_parallel.SharedRows`), and over the two stages of a tied embedding, are made
once per update, by `ShardedParameters.grad_norm`.

Data-parallel ranks may divide experts among them (`expert_parallel.py`): those of a layer are then a group of their
own, which FSDP2 cuts over the ranks that hold the same ones.

Ranks that read a microbatch together (`context_parallel.py`) are data-parallel ranks to all of this: each computes the
gradients of its own rows, and they are summed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from slipstream.core.errors import ConfigError
from slipstream.core.lora_section import LoraConfig
from slipstream.core.rank_group import RankGroup
from slipstream.core.sections import ModelConfig
from slipstream.models.build import build_policy
from slipstream.models.compute_copy import ComputeCopy
from slipstream.models.config import TransformerConfig, config_from_hf, local_config, new_config
from slipstream.models.context_parallel import ContextParallel
from slipstream.models.device import DTYPES
from slipstream.models.expert_parallel import ExpertRanks
from slipstream.models.experts import Router
from slipstream.models.flat import FlatParameters
from slipstream.models.hf import (
    canonical_name,
    check_tied_head,
    logical_tensors,
    read_hf_config,
    weight_files,
    write_tensor,
)
from slipstream.models.hub import is_adapter
from slipstream.models.initialise import initialise
from slipstream.models.lora import Adapter, base_of, install, precision_of, shapes_of
from slipstream.models.peft import (
    base_folder,
    fill_adapters,
    planned_shapes,
    read_adapter,
    stored_shapes,
    with_adapters,
)
from slipstream.models.safetensors_file import open_tensors
from slipstream.models.scalar import (
    HEAD_NAME,
    HeadInit,
    ScalarModel,
    head_tensor,
    initialise_head,
    load_scalar_model,
    new_scalar_model,
    restore_biases,
    start_head,
)
from slipstream.models.shards import Box, Part, is_dtensor, load_shard, local_parts, local_tensor, whole_shapes
from slipstream.models.stages import Stage, add_of_peer
from slipstream.models.tensor_parallel import SharedRows, TensorParallel, shared_rows, whole_config
from slipstream.models.tokenizer import Tokenizer
from slipstream.models.transformer import OneRank, Ranks, Transformer

if TYPE_CHECKING:  # torch's distributed parts take a second to import, and one rank needs none of them
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Division:
    """The division of a model over this rank and its peers, groups of `RankGroup.split`, and how it computes.

    `data_parallel` are the ranks that have one division of the parameters among them, and whose gradients are summed.
    Those of `context_parallel`, which read each microbatch together, are among them: with some, fewer ranks than
    `data_parallel` count a microbatch. The ranks of `pipeline_parallel` are stages, each with `chunks` ranges of layers
    (`stages.Stage`). `experts` are the data-parallel ranks once more, as they divide a mixture's experts among them.
    `precision` is that of products; parameters, gradients and their sums are float32, but that a frozen model may keep
    its parameters `stored` in another precision, which is then that of products, too. With `recomputes` every layer
    keeps only its input for the backward pass and runs again there, with `keeps_products` without its products. torch
    compiles layers with the backend `compiles`. With `reduce_once` gradients are summed over
    data-parallel ranks in the last backward pass before an update only; until then each rank has one of all rows.
    `fixed_order`: see `TensorParallel`; `varlen`: see `PackedAttention`. With `copies` one rank that computes in
    another precision than float32 has a `ComputeCopy`, without FSDP2. Without `trains` a stage has no `StagePasses`.
    """

    data_parallel: RankGroup = field(default_factory=RankGroup.alone)
    tensor_parallel: RankGroup = field(default_factory=RankGroup.alone)
    context_parallel: RankGroup = field(default_factory=RankGroup.alone)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    precision: Literal["float32", "bfloat16"] = "float32"
    stored: Literal["float32", "bfloat16"] = "float32"
    recomputes: bool = False
    keeps_products: bool = False
    compiles: str | None = None
    reduce_once: bool = False
    fixed_order: bool = False
    varlen: bool = True
    copies: bool = False
    pipeline_parallel: RankGroup = field(default_factory=RankGroup.alone)
    chunks: int = 1
    experts: ExpertRanks = field(default_factory=ExpertRanks)
    trains: bool = True

    @property
    def stage(self) -> Stage:
        """The pipeline stage of this rank."""
        return Stage(self.pipeline_parallel.rank, self.pipeline_parallel.world, self.chunks)

    @property
    def ranks(self) -> tuple[RankGroup, RankGroup, RankGroup]:
        """This rank's groups along all axes."""
        return self.data_parallel, self.pipeline_parallel, self.tensor_parallel

    @property
    def is_alone(self) -> bool:
        """True on a single rank."""
        return all(group.world == 1 for group in self.ranks)

    @property
    def is_whole(self) -> bool:
        """True on a single CPU rank, which divides nothing and computes in float32."""
        return self.is_alone and self.device.type == "cpu"

    def ranks_of(self, config: TransformerConfig) -> Ranks:
        """Return the tensor-parallel ranks of a model of the whole `config`. ConfigError if it cannot be divided so."""
        pg, exchange = self.tensor_parallel.pg, self.experts.exchange
        if pg is None:
            return OneRank(exchange)
        return TensorParallel.over(pg, config, fixed_order=self.fixed_order, exchange=exchange)

    @property
    def uses_fsdp(self) -> bool:
        """True where parameters are gathered, or cast to the precision of products."""
        return (self.data_parallel.world > 1 or self.precision != "float32") and not self.has_copy

    @property
    def has_copy(self) -> bool:
        """True where one rank has the weights in the precision of products, too."""
        return self.copies and self.precision != "float32" and self.is_alone

    def mesh(self, ranks: RankGroup | None = None) -> DeviceMesh:
        """Return `ranks`, or the data-parallel ones, for torch. Process groups must be initialised, also for one rank
        alone.
        """
        from torch.distributed.device_mesh import DeviceMesh

        pg = self.data_parallel.pg if ranks is None else ranks.pg
        if pg is None:
            pg = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        return DeviceMesh.from_group(pg, self.device.type, mesh_dim_names=("data_parallel",))


def divide(model: Transformer, division: Division) -> None:
    """Bring this rank's tensor-parallel share `model` to the division's device, and cut it over data-parallel ranks.

    Layer by layer, so that no more than one is on the device as a whole.
    """
    _prepare(model, division)
    if division.uses_fsdp:
        _shard(model, division)
        return
    _bring(model, division)
    _move_tables(model, division)
    if division.has_copy:
        model.compute_copy = ComputeCopy(model, DTYPES[division.precision])


def _prepare(model: Transformer, division: Division) -> None:
    """Let the model run as `division` says."""
    model.varlen = division.varlen
    if division.context_parallel.pg is not None:
        model.reader = ContextParallel(division.context_parallel)
    for layer in model.layers:
        layer.recomputes, layer.keeps_products = division.recomputes, division.keeps_products
        if division.compiles is not None:
            layer.compile_parts(division.compiles)
    if division.pipeline_parallel.world > 1 and division.trains:
        from slipstream.models.stage_passes import StagePasses  # torch's takes time to import

        model.passes = StagePasses(model, division.pipeline_parallel, division.device, DTYPES[division.precision])


def _bring(module: nn.Module, division: Division) -> nn.Module:
    """Return `module` on the division's device as it is `stored`; on "meta", without values, where it lies there
    (`beside_base`)."""
    if any(parameter.is_meta for parameter in module.parameters()):
        return module
    return module.to(division.device, None if division.stored == "float32" else DTYPES[division.stored])


def _move_tables(model: Transformer, division: Division) -> None:
    model.cos, model.signed_sin = model.cos.to(division.device), model.signed_sin.to(division.device)


def _shard(model: Transformer, division: Division) -> None:
    """`divide`, by FSDP2. Adapters, and routers, whose products are in float32, stay whole on every rank:
    `ShardedParameters` sums their gradients, once.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    mesh, is_float32 = division.mesh(), division.precision == "float32"
    policy = MixedPrecisionPolicy() if is_float32 else MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for name, child in model.named_children():
        if name != "layers":
            _bring(child, division)
    whole = {p for one in model.modules() if isinstance(one, (Adapter, Router)) for p in one.parameters()}
    shard = partial(fully_shard, mp_policy=policy, ignored_params=whole)
    holders = division.mesh(division.experts.sharing) if division.experts.exchange.world > 1 else None
    for layer in model.layers:
        _bring(layer, division)
        if layer.is_sparse and holders is not None:
            shard(layer.experts, mesh=holders, reshard_after_forward=True)
        shard(layer, mesh=mesh, reshard_after_forward=True)
    _move_tables(model, division)
    shard(model, mesh=mesh, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # sums; the two together also spare gloo an operation that it lacks
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def load_sharded(
    path: str | Path, division: Division, *, lora: LoraConfig = LoraConfig(), seed: int = 0
) -> Transformer:
    """Return this rank's part of the model in folder `path`; only that is read. Errors: as `hf.load_model`'s.

    With the adapters that `lora` asks for, new ones drawn from `seed`; an adapter's folder brings its own.
    """
    path = Path(path)
    if is_adapter(path):
        path, lora = base_folder(path), LoraConfig(path=str(path))
    config = config_from_hf(read_hf_config(path))
    model = _unfilled(config, division, lora)
    read_shard(model, path)
    return fill_adapters(model, lora, seed=seed) if lora.is_set else model


@contextmanager
def checkpoint_slices(path: Path, config: TransformerConfig) -> Iterator[dict[str, Any]]:
    """The tensors of the checkpoint in folder `path`, by canonical name, as slices that are read when they are cut."""
    wanted = whole_shapes(config)
    with ExitStack() as stack:
        found: dict[str, Any] = {}
        for file in weight_files(path):
            tensors = stack.enter_context(open_tensors(file))
            for stored_name in tensors.keys():  # noqa: SIM118 - not a dict
                name = canonical_name(stored_name, wanted, config.tie_embeddings)
                if name is not None:
                    found[name] = tensors.get_slice(stored_name)
        yield found


def read_shard(model: Transformer, path: Path) -> None:
    """Give `model`, this rank's part of one, the weights of the checkpoint in folder `path`, which has its sizes."""
    config = whole_config(model)
    with checkpoint_slices(path, config) as whole:
        load_shard(model, whole)
    if config.tie_embeddings:
        check_tied_head(path, embedding=next(iter(whole_shapes(config))))


def new_sharded(
    config: TransformerConfig, seed: int, division: Division, lora: LoraConfig = LoraConfig()
) -> Transformer:
    """Return this rank's part of the model that `initialise` draws from `seed`: the same numbers in every division.

    Every rank draws the whole model and keeps its part. With the adapters that `lora` asks for.
    """
    whole = Transformer(config)
    initialise(whole, seed)
    model = _unfilled(config, division, lora)
    load_shard(model, logical_tensors(whole))
    del whole
    return fill_adapters(model, lora, seed=seed) if lora.is_set else model


def _unfilled(config: TransformerConfig, division: Division, lora: LoraConfig = LoraConfig()) -> Transformer:
    """Nothing is written before it is divided, so a CPU gives memory for the parts only."""
    division.stage.check(config.num_layers)
    local = local_config(config, division.tensor_parallel.world)
    model = Transformer(local, division.ranks_of(config), division.stage)
    if lora.is_set:
        install(model, planned_shapes(lora, config))
    divide(model, replace(division, copies=division.copies and not lora.is_set))
    return model


def beside_base(model: Transformer, division: Division, path: Path | None) -> Transformer:
    """Return a frozen `model` with the adapters in folder `path` instead of its own, or none, over the same base.

    Nothing that `model` has gathered may be held. On data-parallel ranks what is returned gathers the base by itself,
    and keeps its embedding and head gathered between its passes.
    """
    shapes = {} if path is None else stored_shapes(path, whole_config(model), precision_of(shapes_of(model)))
    division = replace(division, copies=False)
    is_cut = division.uses_fsdp and model.stored_base is None
    found = base_of(model, shapes, partial(divide, division=division) if is_cut else None)
    return (found if path is None else read_adapter(found, path)).requires_grad_(False)


def build_sharded_policy(config: ModelConfig, division: Division, *, seed: int, tokenizer: Tokenizer) -> Transformer:
    """Return this rank's part of the policy that `build.build_policy` gives, with the same numbers.

    Also with the adapters of `config.lora`, if it has any.
    """
    if division.is_whole:
        model, _ = build_policy(config, seed=seed, tokenizer=tokenizer)
        if config.lora.is_set:
            with_adapters(model, config.lora, seed=seed)
        _prepare(model, division)
        return model
    if config.path is not None:
        return load_sharded(config.path, division, lora=config.lora, seed=seed)
    whole = new_config(config, len(tokenizer), eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return new_sharded(whole, seed, division, config.lora)


def build_frozen(config: ModelConfig, division: Division, *, seed: int, tokenizer: Tokenizer) -> Transformer:
    """Return `build_sharded_policy` for a model that is only read, `stored` as `division` says.

    A rank that has all of it needs no process group: the model is made on the CPU and brought to the device.
    """
    loading = Division() if division.is_alone else division
    made = build_sharded_policy(config, loading, seed=seed, tokenizer=tokenizer)
    if division.is_alone:
        made = made.to(division.device, DTYPES[division.stored])
    return made.requires_grad_(False)


def load_frozen_scalar(path: str | Path, division: Division) -> ScalarModel:
    """Return this rank's part of the reward model in folder `path`, as `build_frozen` does; its head stays float32."""
    if division.is_alone:
        return load_scalar_model(path, dtype=DTYPES[division.stored]).to(division.device).requires_grad_(False)
    return load_sharded_scalar(path, division).requires_grad_(False)


@torch.no_grad()
def load_sharded_scalar(
    path: str | Path,
    division: Division,
    *,
    head_init: HeadInit | None = None,
    seed: int = 0,
    max_positions: int | None = None,
) -> ScalarModel:
    """Return this rank's part of the scalar model in folder `path`; see `scalar.load_scalar_model`."""
    if division.is_whole:
        return load_scalar_model(path, head_init=head_init, seed=seed, max_positions=max_positions)
    path = Path(path)
    model = _unfilled_scalar(config_from_hf(read_hf_config(path), max_positions=max_positions), division)
    with checkpoint_slices(path, whole_config(model.backbone)) as whole:
        head = whole.pop(HEAD_NAME, None)
        load_shard(model.backbone, whole)
        if head is None:
            start_head(model, path, head_init, seed)
        else:
            problems = write_tensor(head_tensor(model), head[:])
            if problems:
                raise ConfigError(f"the checkpoint in {path} does not fit its config.json", got=problems[0])
            restore_biases(model, path)
    return model


@torch.no_grad()
def new_sharded_scalar(policy: Transformer, division: Division, *, head_init: HeadInit, seed: int) -> ScalarModel:
    """Return a scalar model on a copy of `policy`, which lies in the same `division`, with a fresh head."""
    if division.is_whole:
        return new_scalar_model(policy, head_init=head_init, seed=seed)
    model = _unfilled_scalar(whole_config(policy), division)
    weights = ShardedParameters(policy, division).named_views()
    for name, view in ShardedParameters(model.backbone, division).named_views().items():
        view.copy_(weights[name])
    initialise_head(model, head_init, seed)
    return model


def _unfilled_scalar(config: TransformerConfig, division: Division) -> ScalarModel:
    config = replace(config, tie_embeddings=True)  # there is no head over the vocabulary
    return divide_scalar(
        ScalarModel(local_config(config, division.tensor_parallel.world), division.ranks_of(config)), division
    )


def divide_scalar(model: ScalarModel, division: Division) -> ScalarModel:
    """`divide` a scalar model, this rank's part of one, and return it; its head is whole on every rank."""
    divide(model.backbone, division)
    return model.to(division.device)


@dataclass(frozen=True)
class _Local:
    """The stored part of one parameter: `rows` of this rank's tensor-parallel share; other ranks hold `shared`, too."""

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
        """Return where in `view` those of the share's `rows` are that lie here."""
        start, stop = max(rows.start, self.rows.start), min(rows.stop, self.rows.stop)
        return slice(start - self.rows.start, max(start, stop) - self.rows.start)


class ShardedParameters:
    """The trained parameters that one of several ranks stores, with what `FlatParameters` has for training.

    A parameter that FSDP2 manages is stored as a range of rows, along its first dimension, of this rank's
    tensor-parallel share (where it lies in the checkpoint: `shards.local_parts`); any other is stored whole.
    `named_views` stay valid for the model's life.
    """

    def __init__(self, model: nn.Module, division: Division) -> None:
        from torch.distributed.fsdp import FSDPModule

        self._division = division
        self._are_sums = False  # whether the gradients are sums over ranks already
        self._fsdp_modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        divided = [module for module in model.modules() if isinstance(module, Transformer)]
        self._copies = [module.compute_copy for module in divided if module.compute_copy is not None]
        self.reshard()
        self._tied = {
            f"{prefix}.embedding.weight".lstrip(".")  # on the first stage and on the last one
            for prefix, module in model.named_modules()
            if isinstance(module, Transformer) and module.config.tie_embeddings and module.stage.world > 1
        }
        shared = _shared_rows(model, division.tensor_parallel)
        self._locals = {
            name: _Local(parameter, self._rows_of(parameter), shared.get(name))
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }

    def _rows_of(self, parameter: nn.Parameter) -> range:
        """FSDP2 cuts the first dimension as `torch.chunk` does: equal numbers of rows, the last ranks have fewer."""
        rows = _all_rows(parameter)
        if not is_dtensor(parameter):
            return rows
        mesh = cast("DTensor", parameter).device_mesh
        size = math.ceil(len(rows) / mesh.size())
        return rows[mesh.get_local_rank() * size : (mesh.get_local_rank() + 1) * size]

    def stored(self) -> list[Tensor]:
        self.reshard()
        return [local.view for local in self._locals.values()]

    def stored_grads(self) -> list[Tensor]:
        return [local.grad for local in self._locals.values()]

    def by_name(self, stored: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self._locals, stored, strict=True))

    def named_views(self) -> dict[str, Tensor]:
        """Return the weights that lie here, float32, by parameter name: live, never copies; some may have no rows.

        What is gathered is given up, so that the model's own parameters are those that lie here, and what is written
        into these is what it computes with.
        """
        return self.by_name(self.stored())

    def computed_views(self) -> dict[str, Tensor]:
        """Return the weights that passes compute with, where this rank keeps them, by parameter name: live."""
        return {name: view for copy in self._copies for name, view in copy.named_views().items()}

    def reshard(self) -> None:
        """Give up all gathered parameters. Call it after writing into views that were taken before a pass of the model:
        the next pass would compute with the old embedding and head."""
        for module in self._fsdp_modules:
            module.reshard()
        for copy in self._copies:
            copy.reshard()

    def zero_grad(self) -> None:
        for local in self._locals.values():
            local.parameter.grad = None
        self._are_sums = False

    def before_backward(self, *, is_last: bool) -> None:
        """Let the backward pass sum gradients over data-parallel ranks, with `reduce_once` only if it `is_last`."""
        if self._division.reduce_once:
            for module in self._fsdp_modules:
                module.set_requires_gradient_sync(is_last, recurse=False)

    def grad_norm(self) -> float:
        """Finish the sums over ranks; count every element of the gradient on one of the ranks that hold it."""
        total = self._counted_square().cpu()
        for group in self._division.ranks:
            total = group.sum(total)
        return math.sqrt(float(total))

    def norm_on_device(self) -> Tensor | None:
        """Return `grad_norm`, float64 [], where one rank has a device of its own; nobody waits for it. Else None."""
        if self._division.device.type == "cpu" or not self._division.is_alone:
            return None
        return self._counted_square().sqrt()

    @torch.no_grad()
    def _counted_square(self) -> Tensor:
        """Return the square of the norm of what this rank counts, float64 []."""
        if not self._are_sums:
            self._finish_gradients()
            self._are_sums = True
        counted = list(self._counted_grads())
        if not counted:
            return torch.zeros((), dtype=torch.float64)
        return torch.stack(torch._foreach_norm(counted)).double().square().sum()

    def _finish_gradients(self) -> None:
        """Sum the parts that backward passes left on several ranks.

        Over data-parallel ranks: parameters that FSDP does not manage. Over tensor-parallel ranks: partial rows. Over
        first and last stage: a tied embedding.
        """
        data_parallel, tensor_parallel = self._division.data_parallel, self._division.tensor_parallel
        if data_parallel.world > 1:
            whole = [local for local in self._locals.values() if not is_dtensor(local.parameter)]
            _sum_in_place([local.grad for local in whole], data_parallel)
        by_sharers: dict[range, list[Tensor]] = {}
        for local in self._locals.values():
            if local.shared is not None and local.shared.is_partial:
                rows = local.grad[local.among(local.shared.rows)]
                by_sharers.setdefault(local.shared.sharers, []).append(rows)
        for sharers in sorted(by_sharers, key=len):
            _sum_in_place(by_sharers[sharers], tensor_parallel, sharers=sharers)
        stages = self._division.pipeline_parallel
        for name in sorted(self._tied & self._locals.keys()):
            add_of_peer(self._locals[name].grad, stages, peer=stages.world - 1 - stages.rank)

    def non_finite_grads(self) -> list[str]:
        """Return the names from all ranks, on each of them; some biases lie on the first tensor-parallel rank alone."""
        names = [name for name, local in self._locals.items() if not local.grad.isfinite().all()]
        for group in self._division.ranks:
            parts = [msgspec.json.decode(part, type=list[str]) for part in group.gather(msgspec.json.encode(names))]
            names = list(dict.fromkeys(name for part in parts for name in part))
        return names

    def _counted_grads(self) -> Iterator[Tensor]:
        """Yield the gradients that this rank counts: rows that several ranks hold are counted on the first of them."""
        for name, local in self._locals.items():
            if self._division.data_parallel.rank > 0 and not is_dtensor(local.parameter):
                continue
            if name in self._tied and not self._division.stage.is_first:
                continue
            grad = local.grad
            if local.shared is not None and local.shared.sharers.start != self._division.tensor_parallel.rank:
                if local.shared.rows.start == 0:
                    continue
                grad = grad[local.among(range(local.shared.rows.start))]  # shared rows are the last ones
            if grad.numel():
                yield grad


Parameters = FlatParameters | ShardedParameters
"""The parameters that an optimizer updates, `stored` on this rank: all of them in one tensor, or a part of each."""


def stored_parameters(model: nn.Module, division: Division) -> Parameters:
    """Return the parameters of `model` that this rank stores."""
    return FlatParameters(model) if division.is_whole else ShardedParameters(model, division)


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
    """Return `shared_rows` of the `Transformer` that `model` is or contains; the rest of it is alike on all ranks."""
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


def module_parts(module: nn.Module) -> list[Part]:
    """Return which part of which parameter of `module`, or of what a rank stores of it, holds which box.

    `module` is a `Transformer`, `ScalarModel` or linear layer, whole or divided; it may be on "meta". Tensors without a
    name of Hugging Face's (a critic's head, gain and bias), which nothing cuts, go by the parameter's.
    """
    prefix, backbone = ("backbone.", module.backbone) if isinstance(module, ScalarModel) else ("", module)
    parts: list[Part] = []
    done: set[str] = set()
    if isinstance(backbone, Transformer):
        parts = [replace(part, parameter=prefix + part.parameter) for part in local_parts(backbone)]
        done = {prefix + name for name, _ in backbone.named_parameters()}
    for name, parameter in module.named_parameters():
        if name not in done:
            shape, start = tuple(parameter.shape), (0,) * parameter.ndim
            parts.append(Part(Box(name, shape, start, shape), name, start, tuple(range(parameter.ndim))))
    return parts
