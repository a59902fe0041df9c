"""The policy in training, as one rank of the trainer has it: its weights, and what is done with all of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from slipstream.core.config import RunConfig
from slipstream.core.training_sections import OptimizerConfig
from slipstream.core.weights import WeightsPublisher
from slipstream.models.build import build_policy
from slipstream.models.flat import FlatParameters
from slipstream.models.hf import save_model
from slipstream.models.quantized import Packer, WeightLayout
from slipstream.models.transformer import Transformer
from slipstream.trainer.checkpoint import Restored, Saved, Trained, save_checkpoint
from slipstream.trainer.critic import Critic, ValueFunction
from slipstream.trainer.optim import FlatAdamW, Optimizer


class Policy(Protocol):
    """What a trainer needs of its policy, be it whole on one rank or divided over several, which then call alike."""

    model: Transformer
    tokenizer: PreTrainedTokenizerBase
    optimizer: Optimizer
    num_params: int
    """Of the whole model."""

    def new_optimizer(self, config: OptimizerConfig, *, total_updates: int, updates_per_step: int = 1) -> Optimizer:
        """Another AdamW over the same weights."""
        ...

    def new_critic(self) -> ValueFunction:
        """The config's critic, which may start from the policy as it is now."""
        ...

    def reference(self, path: str | None) -> Transformer:
        """The frozen model in folder `path`; None: the one that the policy started from."""
        ...

    def offer_to(self, publisher: WeightsPublisher) -> None:
        """From now on `publisher` publishes these weights."""
        ...

    def export(self, path: Path) -> None:
        """Write a Hugging Face checkpoint with its tokenizer; on return it is there."""
        ...

    def save(self, path: Path, *, step: int, extra: Mapping[str, Any], critic: ValueFunction | None) -> None:
        """Write a checkpoint of the weights as they are now, perhaps in the background."""
        ...

    @property
    def is_saving(self) -> bool:
        """A checkpoint is being written, or `saved` has not told of it."""
        ...

    def wait_fds(self) -> list[int]:
        """Readable when `saved` has something to tell of a checkpoint that is written in the background."""
        ...

    def saved(self, *, wait: bool = False) -> Saved | None:
        """The checkpoint that is whole since the last call, if there is one."""
        ...

    def load(self, path: Path, critic: ValueFunction | None) -> Restored: ...

    def close(self) -> None: ...


class WholePolicy:
    """The policy on the only rank, on the CPU: weights, gradients and moments in one flat tensor each."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.model, self.tokenizer = build_policy(config.model, seed=config.seed)
        for layer in self.model.layers:
            layer.recomputes = config.trainer.recompute
        self.parameters = FlatParameters(self.model)
        self.num_params = self.parameters.num_params
        self._adamw = self.new_optimizer(
            config.trainer.optimizer,
            total_updates=config.steps * config.updates_per_step,
            updates_per_step=config.updates_per_step,
        )
        self.optimizer: Optimizer = self._adamw
        self._saved: Saved | None = None

    def new_optimizer(self, config: OptimizerConfig, *, total_updates: int, updates_per_step: int = 1) -> FlatAdamW:
        return FlatAdamW(
            self.model, self.parameters, config, total_updates=total_updates, updates_per_step=updates_per_step
        )

    def new_critic(self) -> Critic:
        return Critic(self._config, self.model)

    def reference(self, path: str | None) -> Transformer:
        model = self._config.model if path is None else self._config.model.model_copy(update={"path": path})
        reference, _ = build_policy(model, seed=self._config.seed, tokenizer=self.tokenizer)
        return reference.requires_grad_(False)

    def offer_to(self, publisher: WeightsPublisher) -> None:
        layout = WeightLayout(self.model, self._config.generator.precision)
        packer = None  # where generators take float32 as it is
        if layout.precision != "float32":
            packer = Packer(layout, self.parameters.named_views())
        publisher.open(self.parameters.flat, packer, layout.holding)

    def export(self, path: Path) -> None:
        save_model(self.model, path, self.tokenizer)

    def save(self, path: Path, *, step: int, extra: Mapping[str, Any], critic: ValueFunction | None) -> None:
        keep = self._config.trainer.keep_checkpoints
        trained = _trained(critic)
        save_checkpoint(path, self.parameters, self._adamw, step=step, keep=keep, extra=extra, critic=trained)
        self._saved = Saved(path, step)

    @property
    def is_saving(self) -> bool:
        return self._saved is not None

    def wait_fds(self) -> list[int]:
        return []

    def saved(self, *, wait: bool = False) -> Saved | None:  # noqa: ARG002 - it has been written when `save` returns
        saved, self._saved = self._saved, None
        return saved

    def load(self, path: Path, critic: ValueFunction | None) -> Restored:
        from slipstream.trainer.sharded_checkpoint import load_on_one_rank  # takes a second, which others need not wait

        assert critic is None or isinstance(critic, Critic), "a whole policy has made it"
        trained = None if critic is None else (critic.module, critic.flat, critic.optimizer)
        return load_on_one_rank(path, (self.model, self.parameters, self._adamw), trained)

    def close(self) -> None:
        """Nothing is open."""


def _trained(critic: ValueFunction | None) -> Trained | None:
    if critic is None:
        return None
    assert isinstance(critic, Critic), "a whole policy has made it"
    return critic.flat, critic.optimizer
