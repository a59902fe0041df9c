"""The parts of a plan: the work of a step, how each executor's model lies on devices, and the step that results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from slipstream.core.fields import Precision
from slipstream.models.config import TransformerConfig
from slipstream.plan.counts import NO_ADAPTERS, Adapters
from slipstream.plan.lengths import AS_RECORDED, LengthSample, Turns


@dataclass(frozen=True)
class Parts:
    """A total by cause, in seconds or bytes."""

    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    def __getitem__(self, cause: str) -> float:
        return self.parts.get(cause, 0.0)

    def __add__(self, other: Parts) -> Parts:
        causes = dict.fromkeys([*self.parts, *other.parts])
        return Parts({cause: self[cause] + other[cause] for cause in causes})

    def times(self, factor: float) -> Parts:
        return Parts({cause: factor * amount for cause, amount in self.parts.items()})

    def without(self, *causes: str) -> Parts:
        return Parts({cause: amount for cause, amount in self.parts.items() if cause not in causes})


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of the published constants that are reached, and costs that they do not include (docs/planning.md).

    `matmul`, `memory`, `network`: shares of peak operations, of memory bandwidth and of links that large products,
    reads and messages (weights, FSDP) reach. `kernel_s`: seconds of a decode step's kernel besides its work.
    `collective`: factor on the sums within a layer, since ranks do not come at the same time; `host_task_s`: mean wait
    of each for a host where it leads to another node. `step_s`, `sequence_s`: seconds of sampler and host in a decode
    step, once and for each completion. `serial_s`: seconds of a training step in which devices wait for the host.
    """

    matmul: float = 0.65
    memory: float = 0.85
    network: float = 0.85
    kernel_s: float = 2.5e-6
    collective: float = 1.5
    host_task_s: float = 26e-6
    step_s: float = 0.5e-3
    sequence_s: float = 2e-6
    serial_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One training step: `groups` prompts with `group_size` completions each.

    `shares_prompts`: whether the trainer computes a prompt once for all of its group (`batching/collate.py` does).
    `deals_by_length`: whether ranks get rollouts by their lengths (`trainer/dealing.py` does), or the same number each.
    `trained_per_group`: the completions of a group that are trained on (None: all); `measures_all`: whether a reference
    beside the trainer reads the others, too.
    `reference`, `critic`: whether there are such models of the policy's size; `reward_model`: the one that scores.
    `adapters`: those that are trained in place of the policy's own weights, which a reference shares.
    `turns`: of episodes with an environment, `lengths` being sampled tokens; a replica has `sessions` of them open
    (None: twice as many as rows).
    """

    groups: int
    group_size: int
    lengths: LengthSample
    trained_per_group: int | None = None
    measures_all: bool = False
    epochs: int = 1
    minibatches: int = 1
    shares_prompts: bool = True
    deals_by_length: bool = True
    reference: bool = False
    critic: bool = False
    reward_model: TransformerConfig | None = None
    adapters: Adapters = NO_ADAPTERS
    turns: Turns = AS_RECORDED
    sessions: int | None = None

    @property
    def rollouts(self) -> int:
        return self.groups * self.group_size

    @property
    def trained_rollouts(self) -> int:
        return self.groups * (self.trained_per_group or self.group_size)

    @property
    def of_reference(self) -> Workload:
        """The work that has as its trained rollouts those that a reference beside the trainer reads."""
        return self.all_read if self.measures_all else self

    @property
    def all_read(self) -> Workload:
        """The work of an executor that reads all of the rollouts, whichever are trained on."""
        return replace(self, trained_per_group=None, measures_all=False)

    @property
    def trained_tokens(self) -> float:
        """Mean tokens of a trained rollout in the trainer, its share of a shared prompt included."""
        prompt_share = self.groups / self.trained_rollouts if self.shares_prompts else 1.0
        return prompt_share * self.lengths.prompt_mean + self.lengths.mean + self.turns.given_mean

    def open_on(self, rows: int) -> int:
        """Return the completions that a replica of so many rows has open."""
        return self.sessions or (2 * rows if self.turns.is_set else rows)


@dataclass(frozen=True, kw_only=True)
class TrainerLayout:
    """FSDP2 over data x context ranks; a data-parallel rank is `model_ranks` devices, neighbours on nodes.

    `microbatch`: rollouts of one forward-backward. `pipeline_parallel`: stages, `chunks` of the model in each;
    `context_parallel`: ranks that share each sequence. The last axis of stages x context x tensor is the nearest.
    `expert_parallel`: data-parallel ranks, neighbours, that exchange tokens for a mixture's experts.
    """

    devices: int
    tensor_parallel: int
    microbatch: float
    precision: Precision = "bfloat16"
    recompute: bool = True
    keeps_products: bool = False
    reduce_once: bool = False
    head_precision: Precision | None = None
    offloads_moments: bool = False
    pipeline_parallel: int = 1
    chunks: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1

    @property
    def model_ranks(self) -> int:
        return self.tensor_parallel * self.context_parallel * self.pipeline_parallel

    @property
    def data_parallel(self) -> int:
        return self.devices // self.model_ranks

    @property
    def sharing(self) -> int:
        """The ranks that divide the parameters of a stage's tensor-parallel share among them."""
        return self.data_parallel * self.context_parallel

    @property
    def is_flat(self) -> bool:
        """Whether a model has neither stages nor parts of sequences."""
        return self.pipeline_parallel == self.context_parallel == 1

    @property
    def head(self) -> Precision:
        """Precision of the head's product: what is given, or what the trainer does (`models/head.py`)."""
        return self.head_precision or self.precision


@dataclass(frozen=True, kw_only=True)
class GeneratorLayout:
    """Replicas of `model_ranks` devices, each of which decodes at most `slots` completions at once.

    Of `pipeline_parallel` stages each has a part of these at a time.
    """

    devices: int
    tensor_parallel: int
    slots: int
    precision: Precision = "bfloat16"
    pipeline_parallel: int = 1

    @property
    def model_ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def replicas(self) -> int:
        return self.devices // self.model_ranks

    @property
    def is_flat(self) -> bool:
        """Whether every rank has a part of all layers."""
        return self.pipeline_parallel == 1


@dataclass(frozen=True, kw_only=True)
class ScorerLayout:
    """An executor that only reads rollouts (reference, reward model), with copies of its model on `tensor_parallel`
    devices each; or `sharded`: one copy, which FSDP2 cuts over all of them."""

    devices: int
    tensor_parallel: int = 1
    sharded: bool = False
    precision: Precision = "bfloat16"

    @property
    def copies(self) -> int:
        return 1 if self.sharded else self.devices // self.tensor_parallel

    @property
    def shards(self) -> int:
        """The data-parallel ranks that hold a copy together."""
        return self.devices // self.tensor_parallel // self.copies

    @property
    def division(self) -> dict[str, Any]:
        """The fields besides the number of ranks, where they are not as by default."""
        divided: dict[str, Any] = {"tensor_parallel": self.tensor_parallel} if self.tensor_parallel > 1 else {}
        return divided | ({"sharded": True} if self.sharded else {})


@dataclass(frozen=True, kw_only=True)
class AsynchronousPlan:
    """Executors that work at the same time. Without a layout of its own the reference lies beside the trainer, and so
    does a critic, which is divided as the policy is and trained in turn with it."""

    trainer: TrainerLayout
    generator: GeneratorLayout
    reference: ScorerLayout | None = None
    reward_model: ScorerLayout | None = None
    critic: TrainerLayout | None = None


Layout = TrainerLayout | GeneratorLayout | ScorerLayout


def is_flat(layout: Layout) -> bool:
    """Return whether a layout has neither pipeline stages nor parts of sequences."""
    return isinstance(layout, ScorerLayout) or layout.is_flat


Frees = Literal["nothing", "gradients_and_activations", "optimizer_too"]
"""The memory that a co-located trainer gives up while it generates: none; gradients, activations, and keys and values
while it trains; or the optimizer and fp32 weights as well, by way of host memory."""


@dataclass(frozen=True, kw_only=True)
class SynchronousPlan:
    """Trainer and generator on the same devices, one after the other."""

    trainer: TrainerLayout
    generator: GeneratorLayout
    frees: Frees = "nothing"


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The seconds of a plan's step, `sides` those of each executor by cause, `idle` the share that each waits."""

    seconds: float
    sides: Mapping[str, Parts]
    idle: Mapping[str, float]

    @classmethod
    def of(cls, seconds: float, sides: Mapping[str, Parts]) -> StepTime:
        """Return a step of `seconds` in which each executor waits whenever it has no work."""
        idle = {side: 1 - parts.total / seconds for side, parts in sides.items()}
        return cls(seconds=seconds, sides=sides, idle=idle)


DIVISIONS = {
    "pipeline_parallel": "pipeline_parallel",
    "chunks": "pipeline_chunks",
    "context_parallel": "context_parallel",
    "expert_parallel": "expert_parallel",
}
"""Attributes of layouts -> fields of `trainer` and `generator`, written where they are more than 1. A plan with one
that a run refuses is an estimate without a recipe (`Answer.refusal`)."""


def layout_tables(plan: AsynchronousPlan, workload: Workload, max_staleness: int, *, device: str) -> dict[str, Any]:
    """Return the fields of a run that a plan determines."""
    trainer, generator = plan.trainer, plan.generator
    training: dict[str, Any] = {"device": device, "precision": trainer.precision, "recompute": trainer.recompute}
    if trainer.keeps_products:
        training["recompute_products"] = False
    training["microbatch_tokens"] = math.ceil(trainer.microbatch * workload.trained_tokens)
    generating: dict[str, Any] = {"device": device, "precision": generator.precision, "replicas": generator.replicas}
    generating["num_slots"] = generator.slots
    if device == "cuda":
        training |= {"ranks": trainer.devices, "tensor_parallel": trainer.tensor_parallel}
        training["reduce_once"] = trainer.reduce_once
        generating["tensor_parallel"] = generator.tensor_parallel
        for table, layout in ((training, trainer), (generating, generator)):
            table |= {field: vars(layout)[name] for name, field in DIVISIONS.items() if vars(layout).get(name, 1) > 1}
    tables: dict[str, Any] = {"max_staleness": max_staleness, "trainer": training, "generator": generating}
    if not max_staleness:
        tables |= {"weight_update": "between_batches", "sync_placement": "colocated"}
    if plan.reference is not None:
        own = {"executor": "own", "ranks": plan.reference.devices, "device": device}
        tables["kl"] = own | {"precision": plan.reference.precision} | plan.reference.division
    if plan.critic is not None:
        own = {"executor": "own", "ranks": plan.critic.devices, "tensor_parallel": plan.critic.tensor_parallel}
        tables["critic"] = own | {"device": device}
    if plan.reward_model is not None:
        scored = {"model_ranks": plan.reward_model.devices, "device": device}
        names = {"tensor_parallel": "model_tensor_parallel", "sharded": "models_sharded"}
        divided = {names[name]: value for name, value in plan.reward_model.division.items()}
        tables["rewards"] = scored | {"precision": plan.reward_model.precision} | divided
    return tables
