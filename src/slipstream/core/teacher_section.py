"""The section of the teacher that the policy learns from."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from slipstream.core.errors import ConfigError
from slipstream.core.fields import (
    Count,
    Device,
    FilePath,
    Fraction,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
    check_shared_layers,
)
from slipstream.core.sections import VLLMConfig

DISTILL = "distill"
"""The loss that is the divergence from the teacher alone."""


class TeacherConfig(Section):
    """A frozen model that the policy learns from, token by token, on what the policy itself has sampled."""

    path: FilePath | None = Field(
        None,
        description="Checkpoint of the teacher, of any size and with the policy's tokens under the same ids; null:"
        " there is none.",
    )
    coef: NonNegativeFloat = Field(
        0.0,
        description="Weight of the divergence from the teacher beside the loss of [loss], per nat and token. 0 with "
        "loss.name = 'distill', which is the divergence alone.",
    )
    alpha: Fraction = Field(
        1.0,
        description="Divergence: 1 is the reverse KL(policy, teacher), 0 the forward KL(teacher, policy), and between "
        "the generalised Jensen-Shannon divergence (GKD's beta).",
    )
    top_k: Positive | None = Field(
        None,
        description="Tokens that are compared one by one: the teacher's likeliest at each state; all others count as "
        "one. null compares the whole vocabulary, which executor = 'own' cannot send: 64 is usual there.",
    )
    temperature: PositiveFloat | None = Field(
        None, description="The teacher's logits are divided by it; null: by the policy's, trainer.logprob_temperature."
    )
    executor: Literal["trainer", "own"] = Field(
        "trainer",
        description="Where the teacher is read: by the trainer in each pass over a microbatch, or once, one completion "
        "after the other as it is scored, in processes of its own.",
    )
    ranks: Count = Field(
        1,
        description="Processes of an own executor. They hold copies of the teacher, each as many ranks as "
        "tensor_parallel and sharded say; completions are dealt to the copies one by one.",
    )
    tensor_parallel: Count = Field(1, description="Ranks of an own executor that share each layer; divides `ranks`.")
    sharded: bool = Field(
        False,
        description="Cut one copy over all ranks of an own executor (FSDP2 over the data-parallel ones), for a teacher "
        "too large for tensor_parallel ranks: each layer is gathered when it runs. false: tensor_parallel ranks hold a "
        "copy.",
    )
    device: Device = Field("cpu", description="What an own executor computes on: 'cpu', or 'cuda', a GPU per process.")
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="What an own executor keeps and computes the teacher in: on a GPU, or in vLLM."
    )
    engine: Literal["native", "vllm"] = Field(
        "native", description="What an own executor reads the teacher with: itself, or vLLM beside it (docs/vllm.md)."
    )
    vllm: VLLMConfig = Field(default_factory=VLLMConfig, description="vLLM, with engine = 'vllm'.")

    @model_validator(mode="after")
    def _check_executor(self) -> Self:
        own = {name: vars(self)[name] for name in ("ranks", "tensor_parallel", "sharded", "device", "precision")}
        changed = [name for name, value in own.items() if value != type(self).model_fields[name].default]
        check_shared_layers("teacher", "ranks", self.ranks, "tensor_parallel", self.tensor_parallel)
        if self.engine == "vllm":
            self._check_vllm([f"teacher.{name} = {own[name]!r}" for name in changed if name != "precision"])
        if self.executor == "trainer" and changed:
            raise ConfigError(
                "the trainer reads the teacher as it trains: on its ranks, its device, in its precision",
                got=", ".join(f"teacher.{name} = {own[name]!r}" for name in changed) + " with executor = 'trainer'",
                allowed="teacher.executor = 'own'",
            )
        if self.executor == "own" and self.top_k is None:
            raise ConfigError(
                "a teacher in an executor of its own sends what it says to the trainer: a whole vocabulary is too much",
                got="teacher.executor = 'own' without teacher.top_k",
                allowed="teacher.top_k = the number of tokens to compare one by one, or teacher.executor = 'trainer'",
                hint="teacher.top_k = 64; the metric teacher_top_k_mass tells how much of the teacher that is",
            )
        return self

    def _check_vllm(self, changed: list[str]) -> None:
        if self.executor != "own":
            raise ConfigError(
                "vLLM holds the teacher beside an executor of its own, not in the trainer",
                got=f"teacher.executor = '{self.executor}' with teacher.engine = 'vllm'",
                allowed="teacher.executor = 'own', with teacher.top_k, or teacher.engine = 'native'",
            )
        if changed:
            raise ConfigError(
                "ranks, their division and device are the native teacher's: vLLM computes on what it was built for",
                got=", ".join(changed) + " with teacher.engine = 'vllm'",
                allowed="their defaults",
                hint="teacher.vllm.engine_args = { tensor_parallel_size = 2 }",
            )

    @property
    def given(self) -> list[str]:
        """The fields that are not as by default, in words."""
        default = vars(type(self)())
        return [f"teacher.{name} = {value!r}" for name, value in vars(self).items() if value != default[name]]
