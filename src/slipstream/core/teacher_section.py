"""The section of the teacher that the policy learns from, and what it asks of the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from slipstream.core.errors import ConfigError
from slipstream.core.fields import Count, Device, FilePath, Fraction, NonNegativeFloat, Positive, PositiveFloat, Section

if TYPE_CHECKING:
    from slipstream.core.config import RunConfig

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
        1, description="Processes of an own executor: each has the whole teacher; completions are dealt one by one."
    )
    device: Device = Field("cpu", description="What an own executor computes on: 'cpu', or 'cuda', a GPU per process.")
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="What an own executor keeps and computes the teacher in on a GPU."
    )


def check_teacher(config: RunConfig) -> None:
    """Raise ConfigError for a teacher without a loss that learns from it, or the reverse, and for settings that it
    cannot have where it is read."""
    teacher, loss = config.teacher, config.loss
    is_alone = loss.name == DISTILL
    default = TeacherConfig()
    asked = [f"teacher.{name} = {value!r}" for name, value in vars(teacher).items() if value != vars(default)[name]]
    if teacher.path is None and (is_alone or asked):
        raise ConfigError(
            "there is no teacher to learn from",
            got="loss.name = 'distill' without teacher.path" if is_alone else f"{', '.join(asked)} alone",
            allowed="teacher.path = a folder, the id of a model on the hub, or 'stage:sft'",
        )
    if teacher.path is None:
        return
    if is_alone == bool(teacher.coef):
        raise ConfigError(
            "the divergence would be counted twice" if is_alone else "nothing is learned from the teacher",
            got=f"teacher.coef = {teacher.coef:g} with loss.name = '{loss.name}'",
            allowed="loss.name = 'distill' with teacher.coef = 0, or another loss with teacher.coef > 0",
        )
    if is_alone and loss.advantages in ("gae", "greedy_baseline"):
        raise ConfigError(
            "loss 'distill' takes no advantages: a critic, or a greedy completion, would be computed for nothing",
            got=f"loss.advantages = '{loss.advantages}'",
            allowed="any other",
        )
    _check_place(config)


def _check_place(config: RunConfig) -> None:
    teacher = config.teacher
    own = {"ranks": teacher.ranks, "device": teacher.device, "precision": teacher.precision}
    changed = [name for name, value in own.items() if value != TeacherConfig.model_fields[name].default]
    if teacher.executor == "trainer" and changed:
        raise ConfigError(
            "the trainer reads the teacher as it trains: on its ranks, its device, in its precision",
            got=", ".join(f"teacher.{name} = {own[name]!r}" for name in changed) + " with executor = 'trainer'",
            allowed="teacher.executor = 'own'",
        )
    if teacher.executor == "own" and teacher.top_k is None:
        raise ConfigError(
            "an executor of the teacher's own sends what it reads to the trainer, and a whole vocabulary is too much",
            got="teacher.executor = 'own' without teacher.top_k",
            allowed="teacher.top_k = the number of tokens to compare one by one, or teacher.executor = 'trainer'",
            hint="teacher.top_k = 64; the metric teacher_top_k_mass tells how much of the teacher that is",
        )
