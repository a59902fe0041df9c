"""What a step costs: seconds and bytes of every executor, for a model on a cluster (docs/planning.md, "The cost model").

A roofline with named losses. Every time is a sum of parts that have a cause (`Parts`), so that a prediction can be taken
apart. `CostModel` answers, for a layout of each executor:

    train_memory, generator_memory, colocated_memory, scorer_memory     bytes per device, by what they hold
    train_step, decode_step, prefill, generation, scoring, weight_sync  seconds, by what they are spent on
    eta_t(b, m), eta_g(b, m)                                            seconds per rollout: LlamaRL's curves (7.3)
    asynchronous, synchronous                                           the step time of a whole plan, and who idles

Left out: pipeline parallelism, networks that others use too, and what only happens now and then (checkpoints,
evaluations, restarts).
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from slipstream.core.errors import ConfigError
from slipstream.core.sections import Precision
from slipstream.models.config import TransformerConfig, local_config
from slipstream.plan.collectives import all_gather_s, all_reduce_s
from slipstream.plan.hardware import Cluster
from slipstream.plan.lengths import Lengths


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
    """What is reached of the published constants, and what they do not say.

    `matmul`, `memory`, `network`: shares of peak operations, of memory bandwidth and of links that large products, reads
    and messages reach. `kernel_s`: seconds of a kernel besides its work (launch from a graph, first and last wave).
    `collective`: by how much collectives take longer than NCCL's model says, since ranks do not come at the same time.
    `step_s`: host and sampler seconds of a decode step that nothing hides.
    """

    matmul: float = 0.65
    memory: float = 0.85
    network: float = 0.85
    kernel_s: float = 2.5e-6
    collective: float = 1.5
    step_s: float = 0.5e-3


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One training step: `groups` prompts with `group_size` completions each.

    `shares_prompts`: whether the trainer computes a prompt once for all of its group (`batching/collate.py` does).
    `reference`, `critic`: whether there are such models of the policy's size; `reward_model`: the one that scores.
    """

    groups: int
    group_size: int
    lengths: Lengths
    epochs: int = 1
    minibatches: int = 1
    shares_prompts: bool = True
    reference: bool = False
    critic: bool = False
    reward_model: TransformerConfig | None = None

    @property
    def rollouts(self) -> int:
        return self.groups * self.group_size

    @property
    def prompt_share(self) -> float:
        """Of a prompt's tokens, those that each of its rollouts costs the trainer."""
        return 1 / self.group_size if self.shares_prompts else 1.0

    @property
    def trained_tokens(self) -> float:
        """Mean tokens of a rollout in the trainer."""
        return self.prompt_share * self.lengths.prompt_mean + self.lengths.mean


@dataclass(frozen=True, kw_only=True)
class TrainerLayout:
    """FSDP2 over `devices / tensor_parallel` data-parallel ranks. `microbatch`: rollouts of one forward-backward."""

    devices: int
    tensor_parallel: int
    microbatch: float
    precision: Precision = "bfloat16"
    recompute: bool = True
    reduce_once: bool = False
    head_precision: Precision = "float32"
    """Of the head's product; Slipstream's trainer computes logits in float32."""

    @property
    def data_parallel(self) -> int:
        return self.devices // self.tensor_parallel


@dataclass(frozen=True, kw_only=True)
class GeneratorLayout:
    """`devices / tensor_parallel` replicas, each of which decodes at most `slots` completions at once."""

    devices: int
    tensor_parallel: int
    slots: int
    precision: Precision = "bfloat16"

    @property
    def replicas(self) -> int:
        return self.devices // self.tensor_parallel


@dataclass(frozen=True, kw_only=True)
class ScorerLayout:
    """An executor that only reads rollouts (reference, reward model): a whole copy on each device."""

    devices: int
    precision: Precision = "bfloat16"


@dataclass(frozen=True, kw_only=True)
class AsynchronousPlan:
    """Executors that work at the same time. Without a layout of its own the reference lies beside the trainer."""

    trainer: TrainerLayout
    generator: GeneratorLayout
    reference: ScorerLayout | None = None
    reward_model: ScorerLayout | None = None


Frees = Literal["nothing", "gradients_and_activations", "optimizer_too"]
"""What a co-located trainer gives up while it generates: nothing; gradients, activations, and keys and values while it
trains; or the optimizer and fp32 weights as well, by way of host memory."""


@dataclass(frozen=True, kw_only=True)
class SynchronousPlan:
    """Trainer and generator on the same devices, one after the other."""

    trainer: TrainerLayout
    generator: GeneratorLayout
    frees: Frees = "nothing"


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """What a plan's step takes: `sides` by executor and cause, `idle` the share of the step that each waits."""

    seconds: float
    sides: Mapping[str, Parts]
    idle: Mapping[str, float]


class CostModel:
    """Times and memory of `model` on `cluster` for `workload`; seconds and bytes per device."""

    def __init__(
        self, model: TransformerConfig, cluster: Cluster, workload: Workload, efficiency: Efficiency = Efficiency()
    ) -> None:
        self.model, self.cluster, self.workload, self.efficiency = model, cluster, workload, efficiency

    def train_memory(self, layout: TrainerLayout) -> Parts: ...
    def generator_memory(self, layout: GeneratorLayout) -> Parts: ...
    def scorer_memory(self, model: TransformerConfig, layout: ScorerLayout) -> Parts: ...
    def colocated_memory(self, plan: SynchronousPlan) -> Parts: ...
    def train_step(self, layout: TrainerLayout) -> Parts: ...
    def decode_step(self, layout: GeneratorLayout, *, live: float, context: float) -> Parts: ...
    def prefill(self, layout: GeneratorLayout, *, prompts: float) -> Parts: ...
    def generation(self, layout: GeneratorLayout, *, waits_for_longest: bool) -> Parts: ...
    def scoring(self, model: TransformerConfig, layout: ScorerLayout) -> Parts: ...
    def weight_sync(self, trainer: TrainerLayout, generator: GeneratorLayout) -> Parts: ...
    def eta_t(self, b: float, m: int) -> float: ...
    def eta_g(self, b: float, m: int) -> float: ...
    def asynchronous(self, plan: AsynchronousPlan) -> StepTime: ...
    def synchronous(self, plan: SynchronousPlan) -> StepTime: ...
