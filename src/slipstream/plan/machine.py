"""The best way to run a recipe on the cores of one machine.

`controller/placement.py` divides the cores: by the number of replicas, which is what there is to choose, with decode
slots and microbatch. How long everything takes there says what was measured: curves of trainer and engine
(`curves.py`), or a finished run (`run_times.py`), which knows what happens between them, too. Both sides slow each
other while they work at the same time, as the simulator's cores do.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from slipstream.controller.placement import place
from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.recipes import merge, resolve
from slipstream.models.config import TransformerConfig
from slipstream.plan.counts import counts_of
from slipstream.plan.layouts import AsynchronousPlan, GeneratorLayout, Parts, StepTime, TrainerLayout, Workload
from slipstream.plan.planner import Plan, Row, bounds_up_to, ranked, recommended
from slipstream.plan.reasons import limits, staleness
from slipstream.plan.recipe import layout_tables
from slipstream.plan.rehearsal import SEED, Rehearsed, rehearsed, run_schedule
from slipstream.plan.search import Found
from slipstream.plan.simulated_run import Costs, Setup
from slipstream.plan.simulated_run import Workload as SimulatedWorkload

USABLE_MEMORY = 0.8
"""Of a machine: the rest is the system's, and what processes hold besides their tensors."""
ROW_MULTIPLE = 8


class Times(Protocol):
    """How long both sides take on a machine's cores, each alone there."""

    def train(self, layout: TrainerLayout, workload: Workload) -> Parts:
        """Seconds of a training step."""
        ...

    def generate(self, layout: GeneratorLayout, workload: Workload) -> Parts:
        """Seconds in which the replicas generate a step's completions with all slots taken."""
        ...

    def together(self, trainer_cores: int, generator_cores: int) -> tuple[float, float]:
        """By what factor trainer and generators take longer beside each other."""
        ...

    def beside(self, plan: AsynchronousPlan) -> dict[str, float]:
        """The speed of each kind of work with all cores busy, of its speed alone: what `event_loop.Cores` takes."""
        ...

    def row_multiple(self, config: RunConfig) -> int:
        """Rows that a decode step is filled up to."""
        ...

    def guessed(self, plan: AsynchronousPlan) -> str | None:
        """What was never seen of the cores that `plan` takes, in words."""
        ...

    def costs(self, config: RunConfig, plan: AsynchronousPlan, workload: Workload) -> Costs:
        """What the simulator is to take for every piece of work."""
        ...

    def work(self, workload: Workload, seed: int) -> SimulatedWorkload | None:
        """What is sampled; None: completions drawn from the lengths of `workload`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A recipe's work on the cores of one machine. Trainer and generators compute in float32, one rank each."""

    config: RunConfig
    shape: TransformerConfig
    workload: Workload
    times: Times
    cores: int
    memory_bytes: float

    @property
    def usable_bytes(self) -> float:
        return USABLE_MEMORY * self.memory_bytes

    def candidates(self, max_staleness: int) -> Iterator[Found]:
        """Every number of replicas that the cores are divided by, with every number of slots and size of microbatch."""
        for replicas in range(1, self.cores + 1):
            threads = place(self._placed(replicas, max_staleness), self.cores)
            trainer, generator = threads["trainer"].together, threads["generator"].together
            if replicas > 1 and self._busy(trainer, replicas * generator, max_staleness) > self.cores:
                continue
            for slots, rollouts in itertools.product(self._slots(replicas, max_staleness), self._microbatches()):
                plan = AsynchronousPlan(
                    trainer=TrainerLayout(
                        devices=trainer,
                        tensor_parallel=trainer,
                        microbatch=rollouts,
                        precision="float32",
                        recompute=self.config.trainer.recompute,
                    ),
                    generator=GeneratorLayout(
                        devices=replicas * generator, tensor_parallel=generator, slots=slots, precision="float32"
                    ),
                )
                memory = self.memory(plan)
                if sum(parts.total for parts in memory.values()) <= self.usable_bytes:
                    yield self._found(plan, memory, max_staleness)

    def memory(self, plan: AsynchronousPlan) -> dict[str, Parts]:
        """Bytes of all processes of each side: they share the machine's memory."""
        counts, lengths = counts_of(self.shape), self.workload.lengths
        weights = 4.0 * counts.params
        rows = plan.trainer.microbatch * self.workload.trained_tokens
        kept = self.shape.num_layers * counts.kept_elements
        longest = lengths.prompt_mean + self.config.generator.max_new_tokens
        slots = plan.generator.replicas * plan.generator.slots
        return {
            "trainer": Parts(
                {
                    "weights": weights,
                    "moments": 2 * weights,
                    "gradients": weights,
                    "activations": 4 * rows * kept,
                    "logits": 3 * 4 * rows * self.shape.vocab_size,
                    "staging": 2 * weights,
                }
            ),
            "generator": Parts(
                {
                    "weights": plan.generator.replicas * weights,
                    "shadow": plan.generator.replicas * weights,
                    "keys_and_values": 8.0 * self.shape.num_layers * self.shape.kv_size * slots * longest,
                }
            ),
        }

    def rehearse(self, found: Found) -> Rehearsed:
        """The real schedule, on cores that both sides share."""
        plan, bound = found.plan, found.max_staleness
        assert isinstance(plan, AsynchronousPlan)
        trainer, generator = plan.trainer, plan.generator
        config = self.planned(plan, bound)
        setup = Setup(
            replicas=generator.replicas,
            slots=generator.slots,
            row_multiple=self.times.row_multiple(config),
            weight_update=config.weight_update,
            segment_tokens=config.generator.segment_tokens,
            prefill_tokens=config.generator.prefill_tokens,
            prefill_chunk=config.generator.prefill_chunk,
            cores=self.cores,
            trainer_threads=trainer.devices,
            generator_threads=generator.tensor_parallel,
            beside=self.times.beside(plan),
        )
        costs = self.times.costs(config, plan, self.workload)
        simulated = run_schedule(setup, costs, self.workload, bound, self.times.work(self.workload, SEED))
        return rehearsed(simulated, bound)

    def planned(self, plan: AsynchronousPlan, max_staleness: int) -> RunConfig:
        """The recipe with the plan's layout."""
        layout = layout_tables(plan, self.workload, max_staleness, device="cpu")
        return resolve(merge(self.config.model_dump(), layout))

    def _placed(self, replicas: int, max_staleness: int) -> RunConfig:
        generator = self.config.generator.model_copy(update={"replicas": replicas})
        changes = {"generator": generator, "max_staleness": max_staleness, "sync_placement": "colocated"}
        return self.config.model_copy(update=changes)

    def _slots(self, replicas: int, max_staleness: int) -> list[int]:
        in_flight = math.ceil((max_staleness + 1) * self.workload.rollouts / replicas / ROW_MULTIPLE) * ROW_MULTIPLE
        counts = [ROW_MULTIPLE * 2**power for power in range(in_flight.bit_length())]
        return [slots for slots in counts if slots < in_flight] + [in_flight]

    def _microbatches(self) -> list[int]:
        all_of_it = math.ceil(self.workload.rollouts / self.workload.minibatches)
        return [2**power for power in range(all_of_it.bit_length()) if 2**power < all_of_it] + [all_of_it]

    @staticmethod
    def _busy(trainer: int, generators: int, max_staleness: int) -> int:
        """Threads that want a core at the same time."""
        return trainer + generators if max_staleness else max(trainer, generators)

    def _found(self, plan: AsynchronousPlan, memory: dict[str, Parts], max_staleness: int) -> Found:
        workload, trainer, generator = self.workload, plan.trainer, plan.generator
        slower = self.times.together(trainer.devices, generator.devices) if max_staleness else (1.0, 1.0)
        turns = max(1.0, self._busy(trainer.devices, generator.devices, max_staleness) / self.cores)
        sides = {
            "trainer": self.times.train(trainer, workload).times(slower[0] * turns),
            "generator": self.times.generate(generator, workload).times(slower[1] * turns),
        }
        tokens = workload.rollouts * workload.lengths.mean
        token_s = sides["generator"].total * generator.replicas * generator.slots / tokens
        together = [side.total for side in sides.values()]
        seconds = max(together) if max_staleness else sum(together)
        return Found(
            plan=plan,
            step=StepTime(
                seconds=seconds, sides=sides, idle={name: 1 - side.total / seconds for name, side in sides.items()}
            ),
            memory=memory,
            longest_s=workload.lengths.longest_of(workload.rollouts) * token_s if max_staleness else 0.0,
            max_staleness=max_staleness,
        )


def plan_for_machine(machine: Machine, *, max_staleness: int = 8, num_rows: int = 3) -> Plan:
    """The best plan for `machine` under bounds of at most `max_staleness` steps; 0, taking turns, is tried as well."""
    tables = {bound: _table(machine, bound) for bound in (0, *bounds_up_to(max_staleness))}
    if not all(tables.values()):
        raise _too_large(machine)
    best = {bound: _row(machine, table[0]) for bound, table in tables.items()}
    steps_s = {bound: row.rehearsed.step_s for bound, row in best.items()}
    bound = recommended(steps_s)
    rows = ranked((best[bound], *(_row(machine, found) for found in tables[bound][1:num_rows])))
    in_turns = best[0]
    synchronous = replace(
        in_turns.found, step=replace(in_turns.found.step, seconds=in_turns.rehearsed.step_s), longest_s=0.0
    )
    gain = in_turns.rehearsed.step_s / rows[0].rehearsed.step_s
    why = [
        *limits(rows[0].found),
        staleness(steps_s, bound),
        f"{gain:.2f} times as fast as taking turns on all {machine.cores} cores (k = 0).",
        machine.times.guessed(rows[0].plan),
    ]
    return Plan(
        workload=machine.workload,
        rows=rows,
        by_staleness=tuple(best.values()),
        synchronous=synchronous,
        misfits=(),
        why=tuple(line for line in why if line is not None),
    )


def _table(machine: Machine, bound: int) -> list[Found]:
    """The best of each number of replicas and slots, fastest first."""
    best: dict[tuple[int, int], Found] = {}
    for found in machine.candidates(bound):
        assert isinstance(found.plan, AsynchronousPlan)
        key = found.plan.generator.replicas, found.plan.generator.slots
        if key not in best or found.seconds < best[key].seconds:
            best[key] = found
    return sorted(best.values(), key=lambda found: found.seconds)


def _row(machine: Machine, found: Found) -> Row:
    return Row(found=found, rehearsed=machine.rehearse(found))


def _too_large(machine: Machine) -> ConfigError:
    smallest = AsynchronousPlan(
        trainer=TrainerLayout(devices=1, tensor_parallel=1, microbatch=1, precision="float32"),
        generator=GeneratorLayout(devices=1, tensor_parallel=1, slots=ROW_MULTIPLE, precision="float32"),
    )
    needed = sum(parts.total for parts in machine.memory(smallest).values())
    return ConfigError(
        "the model does not fit into this machine's memory",
        got=f"{needed / 1e9:.3g} GB with the smallest microbatch and {ROW_MULTIPLE} slots",
        allowed=f"{machine.usable_bytes / 1e9:.3g} GB, of {machine.memory_bytes / 1e9:.3g}",
        hint="lower generator.max_new_tokens or prompts.max_prompt_tokens, or take a smaller model",
    )
