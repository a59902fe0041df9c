"""The policy in training, as one rank of the trainer has it: model, optimizer, publishing, export, checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from slipstream.core.config import RunConfig
from slipstream.core.disk import sync_files
from slipstream.core.errors import CheckpointError
from slipstream.core.lora_section import BASE_FOLDER, LoraConfig
from slipstream.core.rank_group import RankGroup
from slipstream.core.training_sections import OptimizerConfig
from slipstream.core.weights import WeightsPublisher
from slipstream.models.build import build_policy, build_tokenizer
from slipstream.models.device import DTYPES, take_share
from slipstream.models.expert_parallel import ExpertRanks
from slipstream.models.export import export_sharded
from slipstream.models.flat import FlatParameters
from slipstream.models.hf import save_model
from slipstream.models.hub import is_adapter
from slipstream.models.lora import linear_layers, resized, shapes_of
from slipstream.models.peft import recorded_digest, save_adapter
from slipstream.models.quantized import Packer, WeightLayout
from slipstream.models.sharded import (
    Division,
    ShardedParameters,
    beside_base,
    build_sharded_policy,
    stored_parameters,
)
from slipstream.models.shards import base_digest, local_shards, whole_shapes
from slipstream.models.stored_base import store_base
from slipstream.models.tensor_parallel import whole_config
from slipstream.models.transformer import Transformer
from slipstream.trainer.checkpoint import POLICY, AwaitedPart, Checkpoints, LoadedCheckpoint, Saved, Trained
from slipstream.trainer.critic import Critic
from slipstream.trainer.optim import AdamW


def current_device() -> torch.device:
    """Return the GPU that this process computes on."""
    return torch.device("cuda", torch.cuda.current_device())


def trained_division(
    config: RunConfig, data_ranks: RankGroup, tensor_ranks: RankGroup, device: torch.device
) -> Division:
    """Return the division of a model that is trained as [trainer] says over these ranks, on `device`."""
    trainer = config.trainer
    return Division(
        data_ranks,
        tensor_ranks,
        device=device,
        precision=trainer.precision,
        recomputes=trainer.recompute,
        keeps_products=not trainer.recompute_products,
        compiles="inductor" if trainer.compile else None,
        reduce_once=trainer.reduce_once,
        varlen=trainer.varlen,
        copies=trainer.compute_copy,
    )


class Policy:
    """The policy on one of `ranks`, which the other groups divide: whole and flat on one CPU rank.

    `context_ranks`, among `data_ranks`, read each microbatch together; `expert_ranks` are these divided a second time
    (`Division`).
    All ranks call every method together.
    """

    def __init__(
        self,
        config: RunConfig,
        ranks: RankGroup = RankGroup.alone(),
        data_ranks: RankGroup = RankGroup.alone(),
        tensor_ranks: RankGroup = RankGroup.alone(),
        context_ranks: RankGroup = RankGroup.alone(),
        stage_ranks: RankGroup = RankGroup.alone(),
        expert_ranks: ExpertRanks = ExpertRanks(),
    ) -> None:
        self._config, self._ranks = config, ranks
        is_cuda = config.trainer.device == "cuda"
        if is_cuda:
            take_share(config.trainer.gpu_share, current_device())
        self.division = replace(
            trained_division(config, data_ranks, tensor_ranks, current_device() if is_cuda else torch.device("cpu")),
            context_parallel=context_ranks,
            pipeline_parallel=stage_ranks,
            chunks=config.trainer.pipeline_chunks,
            experts=expert_ranks,
        )
        self.tokenizer = build_tokenizer(config.model)
        self.model = self._build()
        self.base_digest = base_digest(self.model) if shapes_of(self.model) else ""  # of what adapters are beside
        self.parameters = stored_parameters(self.model, self.division)
        shapes = whole_shapes(whole_config(self.model))
        self.num_params = sum(torch.Size(shape).numel() for shape in shapes.values())  # of the whole model
        adapters = resized(shapes_of(self.model), linear_layers(whole_config(self.model))).values()
        self.num_adapter_params = sum(one.num_params for one in adapters)
        self.optimizer = self.new_optimizer(
            config.trainer.optimizer,
            total_updates=config.steps * config.updates_per_step,
            updates_per_step=config.updates_per_step,
        )
        self.is_saving = False  # until `saved` has told of the checkpoint

    def _build(self) -> Transformer:
        """Return this rank's part; a base in fewer bytes lies whole on every data-parallel rank."""
        lora, division = self._config.model.lora, self.division
        if lora.is_rounded:
            division = replace(division, data_parallel=RankGroup.alone(), precision="float32")  # without FSDP2
        model = build_sharded_policy(self._config.model, division, seed=self._config.seed, tokenizer=self.tokenizer)
        if lora.is_rounded:
            activations = DTYPES[self.division.precision]
            store_base(model, lora.base_precision, ranks=division.tensor_parallel, activations=activations)
        return model

    @cached_property
    def _checkpoints(self) -> Checkpoints:
        """On several ranks it needs a process group of its own, made when there is something to save or load."""
        return Checkpoints(self._ranks)

    def new_optimizer(self, config: OptimizerConfig, *, total_updates: int, updates_per_step: int = 1) -> AdamW:
        """Return another AdamW over the same weights."""
        return AdamW(
            self.parameters,
            config,
            total_updates=total_updates,
            updates_per_step=updates_per_step,
            offloads=self._config.trainer.offload_moments,
        )

    def new_critic(self) -> Critic:
        """Return the config's critic, which may start from the policy as it is now."""
        return Critic(self._config, self.model, self.division)

    def reference(self, path: str | None) -> Transformer:
        """Return the frozen model in folder `path`; None: the one that the policy started from.

        Of a policy with adapters that is its own base: without adapters, which add nothing at first, or with those that
        `model.lora.path` or the warm start gave. Nothing but these is held twice.
        """
        config = self._config.model
        if self.base_digest:
            adapter = config.lora.path if path is None else path
            folder = None if adapter is None else Path(adapter)
            if folder is None or (is_adapter(folder) and (path is None or recorded_digest(folder) == self.base_digest)):
                self.parameters.reshard()
                return beside_base(self.model, self.division, folder)
        config = config.model_copy(update={"path": config.path if path is None else path, "lora": LoraConfig()})
        model = build_sharded_policy(config, self.division, seed=self._config.seed, tokenizer=self.tokenizer)
        return model.requires_grad_(False)

    def offer_to(self, publisher: WeightsPublisher) -> None:
        """Let `publisher` publish these weights from now on."""
        layout = WeightLayout(self.model, self._config.generator.precision, base=self.base_digest)
        if layout.precision == "float32" and isinstance(self.parameters, FlatParameters):
            publisher.open(self.parameters.flat, None, layout.holding)  # generators take them as they are
        else:
            over_ranks, views = self.division.tensor_parallel.max, self.parameters.named_views()
            if isinstance(self.parameters, ShardedParameters):  # what is in the version's type already is not cast
                types = {stored.name: stored.dtype for stored in layout.stored}
                copies = self.parameters.computed_views().items()
                views |= {name: view for name, view in copies if types[name] == view.dtype}
            publisher.open(None, Packer(layout, views, over_ranks=over_ranks, copy=self.model.compute_copy))

    def export(self, path: Path) -> None:
        """Write a Hugging Face checkpoint with its tokenizer, or the adapters alone; on return it is there."""
        if self.base_digest:
            base, is_writer = self._base_folder(path.parent), self._ranks.is_leader
            save_adapter(self.model, path, self.tokenizer, base=base, digest=self.base_digest, is_writer=is_writer)
            self._ranks.gather(b"")  # from here on all ranks may read it
        elif self.division.is_whole:
            save_model(self.model, path, self.tokenizer)
        else:
            self._export_sharded(path)

    def _export_sharded(self, path: Path) -> None:
        """Write the model, or what its adapters are beside, from the parts on all ranks."""
        self.parameters.reshard()
        shards = local_shards(self.model, of_base=True)
        export_sharded(shards, path, self._ranks, whole_config(self.model), self.tokenizer)

    def _base_folder(self, beside: Path) -> Path:
        """Return the folder of the adapters' base. A base that this run has made is written there, once."""
        if self._config.model.path is not None:
            return Path(self._config.model.path)
        folder, partial = beside / BASE_FOLDER, beside / f".{BASE_FOLDER}.partial"
        if self._ranks.broadcast(b"is there" if folder.exists() else b""):  # as rank 0 sees it
            return folder
        if not self.division.is_whole and self.model.stored_base is None:
            self._export_sharded(partial)
        elif self._ranks.is_leader:
            save_model(build_policy(self._config.model, seed=self._config.seed)[0], partial, self.tokenizer)
        if self._ranks.is_leader:
            sync_files(partial)
            partial.rename(folder)
        return folder

    @property
    def saves_at_once(self) -> bool:
        """Whether `save` returns when the checkpoint is whole: weights that are whole on this rank are not copied."""
        return self.division.is_whole

    def save(
        self,
        path: Path,
        *,
        step: int,
        extra: Mapping[str, Any],
        others: Mapping[str, Trained],
        part: AwaitedPart | None = None,
    ) -> None:
        """Write a checkpoint of these weights and `others`, and of the `part` that other processes write; in the
        background, unless it `saves_at_once`."""
        keep = self._config.trainer.keep_checkpoints
        extra = {**extra, "base": self.base_digest} if self.base_digest else extra
        self._checkpoints.save(path, {**self._trained, **others}, step=step, keep=keep, extra=extra, part=part)
        self.is_saving = True

    def wait_fds(self) -> list[int]:
        """Return descriptors that are readable when `saved` has something to tell."""
        return [self._checkpoints.fileno()] if self.is_saving else []

    def saved(self, *, wait: bool = False) -> Saved | None:
        """Return the checkpoint that has become whole since the last call, if there is one."""
        if not self.is_saving:
            return None
        saved = self._checkpoints.wait() if wait else self._checkpoints.poll()
        self.is_saving &= saved is None
        return saved

    def load(self, path: Path, others: Mapping[str, Trained]) -> LoadedCheckpoint:
        """Go on, with `others`, from the checkpoint `path`, whatever ranks wrote it.

        CheckpointError as `Checkpoints.load`'s; also for adapters that were trained beside another base.
        """
        loaded = self._checkpoints.load(path, {**self._trained, **others})
        if (base := loaded.extra.get("base", "")) != self.base_digest:
            raise CheckpointError(
                f"checkpoint {path} has adapters of another base",
                got=f"SHA-256 {self.base_digest[:16]}..., of model.path",
                allowed=f"{base[:16]}...",
                hint="were the files of model.path changed since?",
            )
        return loaded

    def close(self) -> None:
        if "_checkpoints" in vars(self):
            self._checkpoints.close()

    @property
    def _trained(self) -> dict[str, Trained]:
        return {POLICY: (self.model, self.optimizer)}
