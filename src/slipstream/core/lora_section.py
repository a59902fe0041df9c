"""The section for adapters of low rank, and what a run with them asks of the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from slipstream.core.errors import ConfigError
from slipstream.core.fields import Count, FilePath, Number, PositiveFloat, Section

if TYPE_CHECKING:
    from slipstream.core.config import RunConfig


AdapterPrecision = Literal["float32", "bfloat16"]
BASE_FOLDER = "base"
"""Folder beside those of the adapters, in which a run leaves a base that it made itself."""


class LoraConfig(Section):
    """Adapters of low rank, which RL trains instead of the model's own weights (docs/lora.md): `rank`, or a `path`."""

    rank: Count | None = Field(None, description="Rank r of every adapter; null, and no path: all weights are trained.")
    alpha: PositiveFloat | None = Field(
        None, description="What adapters add is multiplied by alpha / r; null: 2 r, a factor of 2 at every rank."
    )
    targets: list[str] = Field(
        default_factory=list,
        description="Layers that get an adapter, by the checkpoint's names as PEFT takes them: 'q_proj', 'c_attn', "
        "'lm_head', 'layers.0.mlp.up_proj', of experts 'gate_up_proj', 'down_proj', and of the embedding of tokens: "
        "'embed_tokens', 'wte', 'embed_in'. Empty: every linear layer but experts and the head.",
    )
    use_rslora: bool = Field(False, description="Multiply by alpha / sqrt(r) instead (arXiv:2312.03732).")
    dropout: Annotated[Number, Field(ge=0, lt=1)] = Field(
        0.0, description="Must be 0: trainer and generators would compute different logprobs."
    )
    base_precision: Literal["float32", "bfloat16", "int8"] = Field(
        "float32",
        description="Precision in which the trainer holds the frozen model: 4, 2 or 1 bytes per parameter, and the "
        "numbers of a generator with this `generator.precision`; of another one the logprobs differ.",
    )
    adapter_precision: AdapterPrecision = Field(
        "float32",
        description="Precision of A and B as trainer and generators compute with them, and of versions and files: 4 or "
        "2 bytes a number. The trainer updates float32 ones, which its checkpoints have.",
    )
    path: FilePath | None = Field(
        None, description="Folder of an adapter in PEFT's format to go on from; excludes the rest, which it brings."
    )

    @property
    def is_set(self) -> bool:
        """Whether adapters are trained."""
        return self.rank is not None or self.path is not None

    @property
    def in_words(self) -> str:
        """Return which adapters these are, on one line."""
        if self.path is not None:
            return f"LoRA of {self.path}"
        return f"LoRA rank {self.rank} on {', '.join(self.targets) or 'every linear layer but experts and the head'}"

    @property
    def is_rounded(self) -> bool:
        """Whether the trainer holds the base in fewer bytes."""
        return self.base_precision != "float32"

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        if self.dropout:
            got = f"model.lora.dropout = {self.dropout:g}"
            hint = "the trainer's logprobs would not be those that the generator sampled with"
            raise ConfigError("adapters are trained without dropout", got=got, allowed="0", hint=hint)
        shape = {"alpha": self.alpha, "targets": self.targets, "use_rslora": self.use_rslora}
        given = [f"model.lora.{name} = {value}" for name, value in shape.items() if value]
        if self.path is not None and (given or self.rank is not None):
            raise ConfigError(
                "the adapter in model.lora.path brings its own rank, alpha and targets",
                got=", ".join([*([] if self.rank is None else [f"model.lora.rank = {self.rank}"]), *given]),
                allowed="model.lora.path alone",
            )
        precisions = {"base_precision": self.base_precision, "adapter_precision": self.adapter_precision}
        given += [f"model.lora.{name} = '{value}'" for name, value in precisions.items() if value != "float32"]
        if given and not self.is_set:
            raise ConfigError("adapters need a rank", got=", ".join(given), allowed="model.lora.rank, e.g. 16")
        return self


def check_lora(config: RunConfig) -> None:
    """Raise ConfigError for what a run with adapters cannot do yet."""
    if not config.model.lora.is_set:
        return
    trainer = config.trainer
    refused = {
        "a reference that follows the policy, since it is their base": [
            (f"kl.sync_every = {config.kl.sync_every}", config.kl.sync_every is not None)
        ],
        "torch.compile": [("trainer.compile = true", trainer.compile)],
        "a critic": [(f"loss.advantages = '{config.loss.advantages}'", config.has_critic)],
        "pipeline stages": [
            (
                f"generator.pipeline_parallel = {config.generator.pipeline_parallel}",
                config.generator.pipeline_parallel > 1,
            )
        ],
    }
    for what, fields in refused.items():
        if given := [field for field, is_refused in fields if is_refused]:
            raise ConfigError(
                f"adapters (model.lora) do not go together with {what} yet",
                got=", ".join(given),
                allowed="a loss without a critic, a reference that stays, trainer.compile = false, no stages",
                hint="without model.lora all weights are trained",
            )
