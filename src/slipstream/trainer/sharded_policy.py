"""The policy in training on several ranks, or on a GPU: divided by tensor parallelism and FSDP2."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slipstream.core.config import RunConfig
from slipstream.core.rank_group import RankGroup
from slipstream.core.training_sections import OptimizerConfig
from slipstream.core.weights import WeightsPublisher
from slipstream.models.build import build_tokenizer
from slipstream.models.export import export_sharded
from slipstream.models.quantized import Packer, WeightLayout
from slipstream.models.scalar import ScalarModel
from slipstream.models.sharded import Division, ShardedParameters, build_sharded_policy
from slipstream.models.shards import whole_shapes
from slipstream.models.tensor_parallel import whole_config
from slipstream.models.transformer import Transformer
from slipstream.trainer.checkpoint import Restored, Saved
from slipstream.trainer.critic import ValueFunction
from slipstream.trainer.optim import Optimizer
from slipstream.trainer.sharded_checkpoint import CRITIC, POLICY, ShardedCheckpoints, module_shards, trained_parts
from slipstream.trainer.sharded_critic import ShardedCritic
from slipstream.trainer.sharded_optim import ShardedAdamW

_Trained = dict[str, tuple[nn.Module, ShardedParameters, ShardedAdamW]]


class ShardedPolicy:
    """Implements `policy.Policy` on each of `ranks`, which `data_ranks` and `tensor_ranks` divide."""

    def __init__(self, config: RunConfig, ranks: RankGroup, data_ranks: RankGroup, tensor_ranks: RankGroup) -> None:
        self._config, self._ranks = config, ranks
        is_cuda = config.trainer.device == "cuda"
        self.division = Division(
            data_ranks,
            tensor_ranks,
            device=torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu"),
            precision=config.trainer.precision,
            recomputes=config.trainer.recompute,
        )
        self.tokenizer = build_tokenizer(config.model)
        self.model = build_sharded_policy(config.model, self.division, seed=config.seed, tokenizer=self.tokenizer)
        self.parameters = ShardedParameters(self.model, self.division)
        self.whole_config = whole_config(self.model)
        self.num_params = sum(torch.Size(shape).numel() for shape in whole_shapes(self.whole_config).values())
        self._adamw = self.new_optimizer(
            config.trainer.optimizer,
            total_updates=config.steps * config.updates_per_step,
            updates_per_step=config.updates_per_step,
        )
        self.optimizer: Optimizer = self._adamw
        self.is_saving = False

    @cached_property
    def _checkpoints(self) -> ShardedCheckpoints:
        """They need a process group more, which is made when there is something to save or load."""
        return ShardedCheckpoints(self._ranks)

    def new_optimizer(self, config: OptimizerConfig, *, total_updates: int, updates_per_step: int = 1) -> ShardedAdamW:
        return ShardedAdamW(
            self.parameters,
            config,
            total_updates=total_updates,
            updates_per_step=updates_per_step,
            reduce_once=self._config.trainer.reduce_once,
        )

    def new_critic(self) -> ValueFunction:
        return ShardedCritic(self._config, self.model, self.division)

    def reference(self, path: str | None) -> Transformer:
        config = self._config.model if path is None else self._config.model.model_copy(update={"path": path})
        model = build_sharded_policy(config, self.division, seed=self._config.seed, tokenizer=self.tokenizer)
        return model.requires_grad_(False)

    def offer_to(self, publisher: WeightsPublisher) -> None:
        layout = WeightLayout(self.model, self._config.generator.precision)
        publisher.open(
            None, Packer(layout, self.parameters.named_views(), over_ranks=self.division.tensor_parallel.max)
        )

    def export(self, path: Path) -> None:
        shards = module_shards(self.model, self.parameters.named_views())
        export_sharded(shards, path, self._ranks, self.whole_config, self.tokenizer)

    def save(self, path: Path, *, step: int, extra: Mapping[str, Any], critic: ValueFunction | None) -> None:
        trained = self._trained(critic)
        self._checkpoints.save(
            path,
            _parts(trained),
            step=step,
            updates={name: adamw.num_updates for name, (_, _, adamw) in trained.items()},
            keep=self._config.trainer.keep_checkpoints,
            extra=extra,
        )
        self.is_saving = True

    def wait_fds(self) -> list[int]:
        return self._checkpoints.wait_fds() if self.is_saving else []

    def saved(self, *, wait: bool = False) -> Saved | None:
        if not self.is_saving:
            return None
        saved = self._checkpoints.wait() if wait else self._checkpoints.poll()
        self.is_saving &= saved is None
        return saved

    def load(self, path: Path, critic: ValueFunction | None) -> Restored:
        trained = self._trained(critic)
        with torch.device("meta"):
            wholes = {name: self._whole(module) for name, (module, _, _) in trained.items()}
        restored = self._checkpoints.load(path, _parts(trained), wholes=wholes)
        for name, (_, parameters, adamw) in trained.items():
            parameters.reshard()
            adamw.resume(adamw.named_moments(), restored.updates[name])
        return restored

    def close(self) -> None:
        if "_checkpoints" in vars(self):
            self._checkpoints.close()

    def _trained(self, critic: ValueFunction | None) -> _Trained:
        trained: _Trained = {POLICY: (self.model, self.parameters, self._adamw)}
        if critic is not None:
            assert isinstance(critic, ShardedCritic), "a divided policy has made it"
            trained[CRITIC] = critic.module, critic.parameters, critic.optimizer
        return trained

    def _whole(self, module: nn.Module) -> nn.Module:
        """What one rank would train: a checkpoint of one says how its weights lie by such a module's."""
        if isinstance(module, Transformer):
            return Transformer(self.whole_config)
        if isinstance(module, ScalarModel):
            return ScalarModel(whole_config(module.backbone))
        return nn.Linear(self.whole_config.hidden_size, 1)


def _parts(trained: _Trained) -> dict[str, Any]:
    parts: dict[str, Any] = {}
    for name, (module, parameters, adamw) in trained.items():
        parts |= trained_parts(name, module, parameters.named_views(), adamw.named_moments())
    return parts
