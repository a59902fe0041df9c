"""The best way to run a recipe on the cores of one machine without GPUs.

`controller/placement.py` divides the cores by the number of replicas, which is chosen here with decode slots and
microbatch. Seconds come from measured curves of trainer and engine (`measured.Curves`), or from the files of finished
runs (`RunTimes`), which include the work between the two. Both sides slow each other while they work at the same time,
as the simulator's cores do.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slipstream.controller.placement import place
from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.recipes import merge, resolve
from slipstream.models.config import TransformerConfig
from slipstream.plan.calibrate import Calibration, calibrate, row_multiple
from slipstream.plan.counts import counts_of
from slipstream.plan.layouts import AsynchronousPlan, GeneratorLayout, Parts, StepTime, TrainerLayout, Workload
from slipstream.plan.measured import Curves, PlannedWork
from slipstream.plan.planner import Plan, PlanRow, bounds_up_to, ranked, recommended
from slipstream.plan.reasons import limits, staleness
from slipstream.plan.recipe import layout_tables
from slipstream.plan.recorded import RecordedWorkload, read_run
from slipstream.plan.rehearsal import SEED, Rehearsed, rehearsed, run_schedule
from slipstream.plan.search import Found
from slipstream.plan.simulated_run import SimulatedSetup

USABLE_MEMORY = 0.8  # of a machine: the rest is the system's, and what processes hold besides their tensors
ROW_MULTIPLE = 8


class RunTimes:
    """Seconds of both sides from the files of runs: also of the work that curves of each side alone leave out."""

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration
        outcomes = [line.outcome for run in calibration.runs for line in run.rollouts]
        self._drawn_per_trained = len(outcomes) / max(1, outcomes.count("trained"))

    def train(self, layout: TrainerLayout, workload: Workload) -> Parts:
        """Seconds of a step: its passes, updates, and what the trainer's process does besides for each rollout."""
        seconds, updates = self.calibration.seconds, workload.epochs * workload.minibatches
        rows = workload.rollouts * (workload.trained_tokens - 1) * workload.epochs
        capacity = max(1.0, layout.microbatch * workload.trained_tokens)
        passes = self.calibration.train.seconds(
            layout.devices, microbatches=max(updates, math.ceil(rows / capacity)), tokens=rows
        )
        received = workload.rollouts * self._drawn_per_trained
        parts = {"forward_backward": passes, "optimizer": updates * seconds["optimizer"], "stage": seconds["publish"]}
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
        parts = {"decode": mine * lengths.mean / slots * step_s, "prefill": prompts * decode.seconds(cores, rows=1)}
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
        groups = RecordedWorkload(
            self.calibration.runs,
            groups_per_step=workload.groups,
            samples=workload.group_size,
            num_held_out=1,
            seed=SEED,
        )
        beside = {"train": self.calibration.train.beside, "decode": self.calibration.decode.beside}
        return PlannedWork(self.calibration.costs(config), beside, row_multiple(config.generator), groups)


def times_of_runs(paths: Sequence[Path]) -> RunTimes:
    """Calibrate with finished runs of one model on one machine. ConfigError for a folder that is none."""
    return RunTimes(calibrate([read_run(path) for path in paths]))


Times = Curves | RunTimes
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
        for replicas in range(1, self.cores + 1):
            threads = place(self._placed(replicas, max_staleness), self.cores)
            trainer, generator = threads["trainer"].together, threads["generator"].together
            if replicas > 1 and self._busy(trainer, replicas * generator, max_staleness) > self.cores:
                continue
            for slots, rollouts in itertools.product(self._slots(replicas, max_staleness), self._microbatches()):
                plan = _in_float32(
                    trainer, rollouts, replicas * generator, generator, slots, recompute=self.config.trainer.recompute
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
        replicas, slots = plan.generator.replicas, plan.generator.replicas * plan.generator.slots
        kv = 8.0 * self.shape.num_layers * self.shape.kv_size
        trainer = {"weights": weights, "moments": 2 * weights, "gradients": weights, "activations": 4 * rows * kept}
        trainer |= {"logits": 3 * 4 * rows * self.shape.vocab_size, "staging": 2 * weights}
        return {
            "trainer": Parts(trainer),
            "generator": Parts(
                {"weights": replicas * weights, "shadow": replicas * weights, "keys_and_values": kv * slots * longest}
            ),
        }

    def rehearse(self, found: Found) -> Rehearsed:
        """Run the real schedule in virtual time, on cores that both sides share."""
        plan, bound = found.side_by_side, found.max_staleness
        trainer, generator = plan.trainer, plan.generator
        config = self.planned(plan, bound)
        work = self.times.simulated(config, plan, self.workload)
        setup = SimulatedSetup(
            replicas=generator.replicas,
            slots=generator.slots,
            row_multiple=work.row_multiple,
            weight_update=config.weight_update,
            segment_tokens=config.generator.segment_tokens,
            prefill_tokens=config.generator.prefill_tokens,
            prefill_chunk=config.generator.prefill_chunk,
            cores=self.cores,
            trainer_threads=trainer.devices,
            generator_threads=generator.tensor_parallel,
            beside=work.beside,
        )
        return rehearsed(run_schedule(setup, work.costs, self.workload, bound, work.groups), bound)

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
        """Return how many threads want a core at the same time."""
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
            step=StepTime.of(seconds, sides),
            memory=memory,
            longest_s=workload.lengths.longest_of(workload.rollouts) * token_s if max_staleness else 0.0,
            max_staleness=max_staleness,
        )


def _in_float32(
    trainer_cores: int, microbatch: int, cores: int, replica_cores: int, slots: int, *, recompute: bool = True
) -> AsynchronousPlan:
    """Return the layout with one trainer rank on its cores, and replicas that divide theirs."""
    return AsynchronousPlan(
        trainer=TrainerLayout(
            devices=trainer_cores,
            tensor_parallel=trainer_cores,
            microbatch=microbatch,
            precision="float32",
            recompute=recompute,
        ),
        generator=GeneratorLayout(devices=cores, tensor_parallel=replica_cores, slots=slots, precision="float32"),
    )


def plan_for_cpu(machine: CpuMachine, *, max_staleness: int = 8, num_rows: int = 3) -> Plan:
    """Return the best plan for `machine` under bounds of 0 (taking turns) to `max_staleness` steps."""
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


def _table(machine: CpuMachine, bound: int) -> list[Found]:
    """Return the best of each number of replicas and slots, fastest first."""
    best: dict[tuple[int, int], Found] = {}
    for found in machine.candidates(bound):
        generator = found.side_by_side.generator
        key = generator.replicas, generator.slots
        if key not in best or found.seconds < best[key].seconds:
            best[key] = found
    return sorted(best.values(), key=lambda found: found.seconds)


def _row(machine: CpuMachine, found: Found) -> PlanRow:
    return PlanRow(found=found, rehearsed=machine.rehearse(found))


def _too_large(machine: CpuMachine) -> ConfigError:
    smallest = _in_float32(1, 1, 1, 1, ROW_MULTIPLE)
    needed = sum(parts.total for parts in machine.memory(smallest).values())
    return ConfigError(
        "the model does not fit into this machine's memory",
        got=f"{needed / 1e9:.3g} GB with the smallest microbatch and {ROW_MULTIPLE} slots",
        allowed=f"{machine.usable_bytes / 1e9:.3g} GB, of {machine.memory_bytes / 1e9:.3g}",
        hint="lower generator.max_new_tokens or prompts.max_prompt_tokens, or take a smaller model",
    )
