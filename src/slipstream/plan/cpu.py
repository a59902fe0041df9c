"""The best way to run a recipe on the cores of one machine without GPUs.

`controller/placement.py` divides the cores by the number of replicas, which is chosen here with decode slots and
microbatch. Seconds come from measured curves of trainer and engine (`measured.Curves`), or from the files of finished
runs (`CalibratedTimes`), which include the work between the two.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from slipstream.controller.placement import place
from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.recipes import merge, resolve
from slipstream.generator.arrangement import LENGTH_MULTIPLE, round_up
from slipstream.models.config import MAX_LOGITS, TransformerConfig
from slipstream.plan.calibrate import MEASURES, Calibration, generator_dials, row_multiple
from slipstream.plan.counts import EXPANDED, Counts, counts_of
from slipstream.plan.layouts import (
    AsynchronousPlan,
    GeneratorLayout,
    Parts,
    StepTime,
    TrainerLayout,
    Workload,
    layout_tables,
)
from slipstream.plan.measured import Curves, PlannedWork
from slipstream.plan.planner import (
    SEED,
    Plan,
    Rehearsed,
    best_rows,
    bounds_up_to,
    rehearsed,
    run_schedule,
    steps_of,
)
from slipstream.plan.reasons import limits, staleness
from slipstream.plan.search import ROW_MULTIPLE, Found, most_slots
from slipstream.plan.simulated_run import SimulatedSetup

PROCESS_BYTES = 110e6  # of a tokenizer and what the first products load, above Python and torch (docs/lora.md, Memory)
USABLE_MEMORY = 0.8  # of a machine: the rest is the system's, and what processes hold besides their tensors


class CalibratedTimes:
    """Seconds of both sides from the files of runs: also of the work that curves of each side alone leave out."""

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration
        outcomes = [line.outcome for run in calibration.runs for line in run.rollouts]
        self._drawn_per_trained = len(outcomes) / max(1, outcomes.count("trained"))

    def train(self, layout: TrainerLayout, workload: Workload) -> Parts:
        """Seconds of a step: its passes, updates, and what the trainer's process does besides for each rollout."""
        seconds, updates = self.calibration.seconds, workload.epochs * workload.minibatches
        read, train = workload.trained_rollouts * (workload.trained_tokens - 1), self.calibration.train
        rows, capacity = read * workload.epochs, max(1.0, layout.microbatch * workload.trained_tokens)
        microbatches = max(updates, math.ceil(rows / capacity))
        passes = train.seconds(layout.devices, microbatches=microbatches, tokens=rows)
        received = workload.rollouts * self._drawn_per_trained
        parts = {"forward_backward": passes, "optimizer": updates * seconds["optimizer"], "stage": seconds["publish"]}
        parts["measures"] = read * sum(seconds[state] for state in MEASURES) / train.speed(layout.devices)
        parts["collate"] = workload.rollouts * seconds["collate"]
        return Parts(parts | {"receive": received * (seconds["receive"] + seconds["record"])})

    def generate(self, layout: GeneratorLayout, workload: Workload) -> Parts:
        """Seconds of the replicas for a step's completions and those of groups that are dropped."""
        decode, seconds, cores = self.calibration.decode, self.calibration.seconds, layout.tensor_parallel
        lengths, slots = workload.lengths, layout.slots
        mine = workload.rollouts * self._drawn_per_trained / layout.replicas
        context = slots * (lengths.prompt_mean + lengths.mean_square / lengths.mean / 2)
        step_s = decode.seconds(cores, steps=1, rows=slots, context=context) + seconds["turn"]
        prompts = mine / workload.group_size * lengths.prompt_mean
        parts = {
            "decode": mine * lengths.mean / slots * step_s,
            "prefill": prompts * decode.seconds(cores, prefilled=1),
        }
        return Parts(parts | {"send": mine * seconds["send"], "pause": seconds["swap"]})

    def together(self, trainer_cores: int, generator_cores: int) -> tuple[float, float]:
        """Return by what factor trainer and generators take longer beside each other: less with fewer busy cores."""
        cores = self.calibration.cores
        busy = 1.0 if cores == 1 else min(1.0, (trainer_cores + generator_cores - 1) / (cores - 1))
        sides = self.calibration.train.beside, self.calibration.decode.beside
        trainer, generator = (1 / (1 - busy * (1 - beside)) for beside in sides)
        return trainer, generator

    def guessed(self, plan: AsynchronousPlan) -> str | None:
        """Name the numbers of threads of `plan` that no run had; None where all were seen."""
        seen = {"trainer": self.calibration.train.speeds, "generators": self.calibration.decode.speeds}
        wanted = {"trainer": plan.trainer.devices, "generators": plan.generator.tensor_parallel}
        unseen = [f"the {name} on {wanted[name]}" for name, speeds in seen.items() if wanted[name] not in speeds]
        if not unseen:
            return None
        return f"No run had {' or '.join(unseen)} threads a process: how fast that is was extrapolated."

    def simulated(self, config: RunConfig, plan: AsynchronousPlan, workload: Workload) -> PlannedWork:  # noqa: ARG002
        """Return the run's own groups, those without signal included, with the seconds of every piece of work."""
        beside = {"train": self.calibration.train.beside, "decode": self.calibration.decode.beside}
        setup = {"beside": beside, "row_multiple": row_multiple(config.generator)}
        return self.calibration.costs(config), setup, self.calibration.workload(config, SEED)


Times = Curves | CalibratedTimes
"""Seconds of both sides on a machine's cores, each alone there."""


@dataclass(frozen=True, kw_only=True)
class CpuMachine:
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
        """Yield what fits of every number of replicas that divides the cores, of slots, and size of microbatch."""
        busy = sum if max_staleness else max  # of the threads that want a core at the same time
        microbatches = _doubled(1, math.ceil(self.workload.trained_rollouts / self.workload.minibatches))
        for replicas in range(1, self.cores + 1):
            generators = self.config.generator.model_copy(update={"replicas": replicas})
            changes = {"generator": generators, "max_staleness": max_staleness, "sync_placement": "colocated"}
            threads = place(self.config.model_copy(update=changes), self.cores)
            trainer, generator = threads["trainer"].together, threads["generator"].together
            if replicas > 1 and busy((trainer, replicas * generator)) > self.cores:
                continue
            slots_tried = _doubled(ROW_MULTIPLE, most_slots(self.workload, replicas, max_staleness))
            for slots, rollouts in itertools.product(slots_tried, microbatches):
                plan = _in_float32(
                    trainer, rollouts, replicas * generator, generator, slots, recompute=self.config.trainer.recompute
                )
                memory = self.memory(plan)
                if sum(parts.total for parts in memory.values()) <= self.usable_bytes:
                    yield self._found(plan, memory, max_staleness)

    def memory(self, plan: AsynchronousPlan) -> dict[str, Parts]:
        """Bytes of all processes of each side: they share the machine's memory. Slots of versions are the trainer's.

        Generators at the recipe's precision, the trainer's base at `model.lora.base_precision`.
        """
        return {"trainer": self._trainer_memory(plan.trainer), "generator": self._generator_memory(plan.generator)}

    def _trainer_memory(self, layout: TrainerLayout) -> Parts:
        counts, adapters, config = counts_of(self.shape), 4.0 * self.workload.adapters.params, self.config
        rows = layout.microbatch * self.workload.trained_tokens
        base, trained, passing = 4.0 * counts.params, adapters or 4.0 * counts.params, 0.0
        if not adapters:
            passing = 8.0 * counts.head_matrix  # the largest gradient, before it is added to the others: twice if tied
        elif (precision := config.model.lora.base_precision) != "float32":
            base, passing = counts.served_bytes(precision), 4.0 * min(EXPANDED, counts.head_matrix)
        logits = layout.microbatch * self.workload.lengths.mean * self.shape.vocab_size
        layers = 1 if config.trainer.recompute else self.shape.num_layers
        kept = 0 if config.trainer.recompute_products else counts.product_elements
        inputs = self.shape.num_layers * (self.shape.hidden_size + kept) if config.trainer.recompute else 0
        served = self.workload.adapters.version_bytes or counts.served_bytes(config.generator.precision)
        beside = {"reference": 4.0 * counts.params} if self.workload.reference and not adapters else {}
        if self.workload.critic:  # weights, moments and gradients, without a head
            beside["critic"] = 16.0 * counts_of(replace(self.shape, tie_embeddings=True)).params
        return Parts(
            {
                **beside,
                "weights": base + adapters * (2 if self.workload.adapters.item < 4 else 1),  # with those rounded
                "moments": 2 * trained,
                "gradients": trained + passing,
                "activations": 4 * rows * (layers * _kept_elements(counts) + inputs),
                "logits": 3 * 4 * min(logits, MAX_LOGITS["cpu"]),
                "staging": 2 * served,
                "process": PROCESS_BYTES,
            }
        )

    def _generator_memory(self, layout: GeneratorLayout) -> Parts:
        """A version is packed for products beside what it came in; evaluations share it, with slots of their own."""
        counts, lengths, config = counts_of(self.shape), self.workload.lengths, self.config
        precision, adapters = config.generator.precision, 4.0 * self.workload.adapters.params
        width = 4 if precision == "float32" else 2  # on a CPU with AVX512-BF16
        tables = counts.embedding * (2.0 if precision != "float32" else 4.0)
        if precision == "int8" and self.shape.tie_embeddings:
            tables /= 2
        packed = width * (self.shape.num_layers * counts.layer_matrix + counts.head_matrix) + tables
        versions = config.resident_versions if adapters else 1
        # A and B are kept unpacked, too, both in float32, and are packed together where versions are side by side.
        version = 2 * adapters * (1 + (versions > 1)) or packed
        sized = config.with_longest_prompt(math.ceil(lengths.prompt_mean))
        longest = round_up(sized.longest_sequence(self.shape.max_positions), LENGTH_MULTIPLE)
        token = 8.0 * self.shape.num_layers * self.shape.kv_size
        cached = config.generator.prefix_cache_tokens
        arriving = self.workload.adapters.version_bytes or counts.served_bytes(precision)
        replicas, evaluated = layout.replicas, config.eval.num_slots * longest
        return Parts(
            {
                "weights": replicas * ((packed if adapters else 0) + versions * version),
                "shadow": replicas * (version + arriving),
                "keys_and_values": replicas * token * (layout.slots * longest + cached),
                "evaluation": token * evaluated,
                "logits": 3 * 4 * replicas * layout.slots * self.shape.vocab_size,
                "process": replicas * PROCESS_BYTES,
                "prefill": 4 * replicas * config.generator.prefilled * _kept_elements(counts),
            }
        )

    def rehearse(self, found: Found) -> Rehearsed:
        """Run the real schedule in virtual time, on cores that both sides share."""
        plan, bound = found.side_by_side, found.max_staleness
        trainer, generator = plan.trainer, plan.generator
        config = self.planned(plan, bound)
        costs, work, groups = self.times.simulated(config, plan, self.workload)
        setup = SimulatedSetup(
            **generator_dials(config),
            cores=self.cores,
            trainer_threads=trainer.devices,
            generator_threads=generator.tensor_parallel,
            **work,
        )
        return rehearsed(run_schedule(setup, costs, self.workload, bound, groups), bound)

    def planned(self, plan: AsynchronousPlan, max_staleness: int) -> RunConfig:
        """Return the recipe with the plan's layout."""
        layout = layout_tables(plan, self.workload, max_staleness, device="cpu")
        return resolve(merge(self.config.model_dump(), layout))

    def _found(self, plan: AsynchronousPlan, memory: dict[str, Parts], max_staleness: int) -> Found:
        workload, trainer, generator = self.workload, plan.trainer, plan.generator
        slower = self.times.together(trainer.devices, generator.devices) if max_staleness else (1.0, 1.0)
        busy = (sum if max_staleness else max)((trainer.devices, generator.devices))
        turns = max(1.0, busy / self.cores)
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
            step=StepTime.of(seconds, sides),
            memory=memory,
            longest_s=workload.lengths.longest_of(workload.rollouts) * token_s if max_staleness else 0.0,
            max_staleness=max_staleness,
        )


def _kept_elements(counts: Counts) -> float:
    """Return the activations per token and layer that a backward pass needs, as they are kept on a CPU.

    Beside `Counts.kept_elements`: queries, keys, values and what attention gives once more, padded; and silu's output.
    """
    local = counts.local
    return counts.kept_elements + 2 * local.query_size + 2 * local.kv_size + local.gated_mlp * counts.inner


def _doubled(first: int, last: int) -> list[int]:
    """Return `first` and its doubles below `last`, and `last`."""
    counts = [first * 2**power for power in range(last.bit_length())]
    return [count for count in counts if count < last] + [last]


def _in_float32(
    trainer_cores: int, microbatch: int, cores: int, replica_cores: int, slots: int, *, recompute: bool = True
) -> AsynchronousPlan:
    """Return the layout with one trainer rank on its cores, and replicas that divide theirs."""
    alone: dict[str, Any] = {"devices": trainer_cores, "tensor_parallel": trainer_cores, "precision": "float32"}
    trainer = TrainerLayout(**alone, microbatch=microbatch, recompute=recompute)
    generator = GeneratorLayout(devices=cores, tensor_parallel=replica_cores, slots=slots, precision="float32")
    return AsynchronousPlan(trainer=trainer, generator=generator)


def plan_for_cpu(machine: CpuMachine, *, max_staleness: int = 8, num_rows: int = 3) -> Plan:
    """Return the best plan for `machine` under bounds of 0 (taking turns) to `max_staleness` steps."""
    tables = {bound: _table(machine, bound) for bound in (0, *bounds_up_to(max_staleness))}
    if not all(tables.values()):
        raise _too_large(machine)
    rows, by_staleness = best_rows(tables, machine.rehearse, num_rows)
    in_turns = by_staleness[0]
    step = replace(in_turns.found.step, seconds=in_turns.rehearsed.step_s)
    gain = in_turns.rehearsed.step_s / rows[0].rehearsed.step_s
    why = [
        *limits(rows[0].found),
        staleness(steps_of(by_staleness), rows[0].found.max_staleness),
        f"{gain:.2f} times as fast as taking turns on all {machine.cores} cores (k = 0).",
        machine.times.guessed(rows[0].plan),
    ]
    return Plan(
        workload=machine.workload,
        num_devices=machine.cores,
        usable_bytes=machine.usable_bytes,
        rows=rows,
        by_staleness=by_staleness,
        synchronous=replace(in_turns.found, step=step, longest_s=0.0),
        misfits=(),
        why=tuple(line for line in why if line is not None),
    )


def _table(machine: CpuMachine, bound: int) -> list[Found]:
    """Return the best of each number of replicas and slots, fastest first."""
    best: dict[tuple[int, int], Found] = {}
    for found in machine.candidates(bound):
        generator = found.side_by_side.generator
        key = generator.replicas, generator.slots
        if key not in best or found.seconds < best[key].seconds:
            best[key] = found
    return sorted(best.values(), key=lambda found: found.seconds)


def _too_large(machine: CpuMachine) -> ConfigError:
    smallest = _in_float32(1, 1, 1, 1, ROW_MULTIPLE)
    needed = sum(parts.total for parts in machine.memory(smallest).values())
    return ConfigError(
        "the model does not fit into this machine's memory",
        got=f"{needed / 1e9:.3g} GB with the smallest microbatch and {ROW_MULTIPLE} slots",
        allowed=f"{machine.usable_bytes / 1e9:.3g} GB, of {machine.memory_bytes / 1e9:.3g}",
        hint="lower generator.max_new_tokens or prompts.max_prompt_tokens, or take a smaller model",
    )
