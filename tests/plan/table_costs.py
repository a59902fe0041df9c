"""A cluster whose every layout takes and holds what a table of random numbers says: nothing about it is monotone."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slipstream.core.fields import Precision
from slipstream.models.config import TransformerConfig
from slipstream.plan.hardware import DEVICES, GpuCluster
from slipstream.plan.layouts import (
    AsynchronousPlan,
    Frees,
    GeneratorLayout,
    Parts,
    ScorerLayout,
    StepTime,
    SynchronousPlan,
    TrainerLayout,
    Workload,
)
from slipstream.plan.lengths import LengthSample
from slipstream.plan.question import ARCHITECTURES
from slipstream.plan.search import executors

LENGTHS = LengthSample(prompt_mean=4.0, completions=(4, 8), source="test")


@dataclass
class TableCosts:
    """Stands in for a `CostModel`. Seconds are 1..20 by layout, bytes 1..20 of 12 usable ones."""

    seed: int
    num_devices: int
    reference: bool = False
    reward_model: bool = False
    model: TransformerConfig = ARCHITECTURES["smollm2-135m"]
    usable_bytes: float = 12.0
    asked: dict[Any, int] = field(default_factory=dict)
    memory_grows: bool = False

    def __post_init__(self) -> None:
        self.cluster = GpuCluster(device=DEVICES["H100"], num_devices=self.num_devices)
        self.workload = Workload(
            groups=4,
            group_size=2,
            lengths=LENGTHS,
            reference=self.reference,
            reward_model=self.model if self.reward_model else None,
        )

    def drawn(self, *key: Any) -> float:
        return float(random.Random(repr((self.seed, *key))).randint(1, 20))

    def fits(self, *memory: Parts) -> bool:
        return all(parts.total <= self.usable_bytes for parts in memory)

    def train_step(self, layout: TrainerLayout) -> Parts:
        return Parts({"train": self.drawn("train", layout)})

    def train_floor_s(self, layout: TrainerLayout) -> float:
        """A bound anywhere below the seconds of a step."""
        return self.train_step(layout).total * self.drawn("floor", layout) / 20

    def generating_floor_s(self, layout: GeneratorLayout) -> float:
        return self.generating_turn(layout).total * self.drawn("floor", layout) / 20

    def reference_pass(self, layout: TrainerLayout) -> Parts:
        return Parts({"reference": self.drawn("reference", layout)})

    def generation(self, layout: GeneratorLayout, *, waits_for_longest: bool) -> Parts:
        return Parts({"generate": self.drawn("generate", layout, waits_for_longest)})

    def scoring(self, model: TransformerConfig, layout: ScorerLayout, *, has_head: bool = True) -> Parts:
        return Parts({"score": self.drawn("score", layout)})

    def weight_sync(self, trainer: TrainerLayout, generator: GeneratorLayout) -> Parts:
        stage, pause = self.drawn("stage", trainer, generator.precision), self.drawn("pause", generator)
        return Parts({"stage": stage, "transfer": 1.0, "pause": pause})

    def train_memory(self, layout: TrainerLayout, *, served: Precision | None = "bfloat16") -> Parts:
        parts = {"weights": self.drawn("holds", layout), "staging": 0.0 if served is None else self.drawn(served) / 5}
        return Parts(parts | ({"reference": 3.0} if self.reference else {}))

    def generator_memory(self, layout: GeneratorLayout, *, shadow: bool = True) -> Parts:
        return Parts({"weights": self.drawn("holds", layout) / 2, "shadow": 2.0 if shadow else 0.0})

    def scorer_memory(self, model: TransformerConfig, layout: ScorerLayout, *, has_head: bool = True) -> Parts:
        return Parts({"weights": self.drawn("holds", layout)})

    def colocated_memory(self, plan: SynchronousPlan) -> Mapping[str, Parts]:
        trainer = self.colocated_trainer(plan.trainer, plan.frees)
        generator = self.colocated_generator(plan.generator, plan.frees)
        return {phase: trainer[phase] + generator[phase] for phase in trainer}

    def colocated_trainer(self, layout: TrainerLayout, frees: Frees) -> Mapping[str, Parts]:
        freed = {"nothing": 1.0, "gradients_and_activations": 0.6, "optimizer_too": 0.2}[frees]
        trains = self.train_memory(layout, served=None)
        return {"trains": trains, "generates": trains.times(freed)}

    def colocated_generator(self, layout: GeneratorLayout, frees: Frees) -> Mapping[str, Parts]:
        return {"trains": Parts({}), "generates": self.generator_memory(layout, shadow=False)}

    def training_turn(self, layout: TrainerLayout, frees: Frees) -> Parts:
        return self.train_step(layout) + Parts({"offload": self.drawn("frees", frees, layout)})

    def generating_turn(self, layout: GeneratorLayout) -> Parts:
        return self.generation(layout, waits_for_longest=True)

    def asynchronous(self, plan: AsynchronousPlan) -> StepTime:
        sync = self.weight_sync(plan.trainer, plan.generator)
        trainer = self.train_step(plan.trainer) + Parts({"stage": sync["stage"]})
        if self.reference and plan.reference is None:
            trainer += self.reference_pass(plan.trainer)
        generator = self.generation(plan.generator, waits_for_longest=False) + Parts({"pause": sync["pause"]})
        sides = {"trainer": trainer, "generator": generator}
        for name, layout in executors(plan).items():
            if isinstance(layout, ScorerLayout):
                sides[name] = self.scoring(self.model, layout)
        seconds = max(parts.total for parts in sides.values())
        return StepTime(seconds=seconds, sides=sides, idle=dict.fromkeys(sides, 0.0))

    def synchronous(self, plan: SynchronousPlan) -> StepTime:
        sides = {
            "trainer": self.training_turn(plan.trainer, plan.frees),
            "generator": self.generating_turn(plan.generator),
        }
        return StepTime(seconds=sum(parts.total for parts in sides.values()), sides=sides, idle={})
