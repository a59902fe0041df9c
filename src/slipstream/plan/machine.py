"""The best way to run a recipe on the cores of one machine, from what its trainer and engine were measured to take.

`controller/placement.py` divides the cores: by the number of replicas, which is what there is to choose, with decode
slots and microbatch. Curves that were measured on other numbers of cores, batches or lengths are interpolated: between
points as a power of the batch, between lengths by the token. Both sides slow each other while they work at the same
time (`Measured.together`), which the simulator's cores have, too.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from slipstream.controller.placement import place
from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.models.config import TransformerConfig
from slipstream.plan.counts import counts_of
from slipstream.plan.layouts import AsynchronousPlan, GeneratorLayout, Parts, StepTime, TrainerLayout, Workload
from slipstream.plan.measured import Curve, Measured, MeasuredModel, Point, Side, Together
from slipstream.plan.planner import Plan, Row, bounds_up_to, ranked, recommended
from slipstream.plan.reasons import limits, staleness
from slipstream.plan.rehearsal import Rehearsed, rehearsed, run_schedule
from slipstream.plan.search import Found
from slipstream.plan.simulated_run import Batch, Costs, Setup

USABLE_MEMORY = 0.8
"""Of a machine: the rest is the system's, and what processes hold besides their tensors."""
ROW_MULTIPLE = 8
_SHAPE = ("family", "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")


def interpolated(points: Sequence[tuple[float, float]], at: float) -> float:
    """The power law through the two neighbours of `at`, beyond the ends the value there; points ascend, positive."""
    places = [place for place, _ in points]
    after = bisect.bisect_left(places, at)
    if after == 0:
        return points[0][1]
    if after == len(points):
        return points[-1][1]
    (x0, y0), (x1, y1) = points[after - 1], points[after]
    share = math.log(at / x0) / math.log(x1 / x0)
    return float(y0 * (y1 / y0) ** share)


def measured_model(measured: Measured, shape: TransformerConfig) -> MeasuredModel:
    """The curves of the model with this shape. ConfigError where it was not measured."""
    wanted = {name: vars(shape)[name] for name in _SHAPE}
    for model in measured.models:
        if {name: model.shape.get(name) for name in _SHAPE} == wanted:
            return model
    raise ConfigError(
        "the file of measured curves does not have this model",
        got=", ".join(f"{name} {value}" for name, value in wanted.items()),
        allowed=", ".join(
            f"{model.name} ({', '.join(f'{name} {model.shape.get(name)}' for name in _SHAPE[:5])})"
            for model in measured.models
        ),
        hint="`python benchmarks/eta_curves.py --json FILE` measures the quickstart's, and --models others",
    )


class Curves:
    """Seconds per token of both sides of one measured model, on any number of cores and for any batch."""

    def __init__(self, model: MeasuredModel) -> None:
        self.model = model
        self._rows = model.prompt_tokens + model.completion_tokens - 1  # that the trainer reads of a sample

    @property
    def mean_context(self) -> float:
        """Tokens that a completion saw in the mean while it was measured."""
        return self.model.prompt_tokens + self.model.completion_tokens / 2

    def trained_row_s(self, cores: int, rows: float) -> float:
        """Forward and backward pass per row, in a microbatch of so many rows."""
        return self._seconds("trainer", cores, rows / self._rows) / self._rows

    def update_s(self, cores: int) -> float:
        """Of the optimizer; between numbers of cores a straight line."""
        curves = self._of("trainer")
        return float(np.interp(cores, [curve.devices for curve in curves], [curve.update_s for curve in curves]))

    def decoded_token_s(self, cores: int, rows: float) -> float:
        """Per token, with so many completions decoded at once; their prompts are in it."""
        return self._seconds("generator", cores, rows) / self.model.completion_tokens

    def together(self, trainer_cores: int, generator_cores: int) -> tuple[float, float]:
        """By what factor trainer and generators take longer beside each other; of the nearest division measured."""
        if not self.model.together:
            return 1.0, 1.0

        def distance(one: Together) -> float:
            trainer, generator = one.trainer_devices / trainer_cores, one.generator_devices / generator_cores
            return abs(math.log(trainer)) + abs(math.log(generator))

        nearest = min(self.model.together, key=distance)
        return max(1.0, nearest.trainer), max(1.0, nearest.generator)

    def _seconds(self, side: Side, cores: int, batch: float) -> float:
        at_batch = [(curve.devices, interpolated(_pairs(curve.points), batch)) for curve in self._of(side)]
        return interpolated(at_batch, cores)

    def _of(self, side: Side) -> list[Curve]:
        curves = sorted((curve for curve in self.model.curves if curve.side == side), key=lambda curve: curve.devices)
        if not curves:
            raise ConfigError(f"no curve of the {side} was measured for {self.model.name}")
        return curves


def _pairs(points: Sequence[Point]) -> list[tuple[float, float]]:
    return [(point.batch, point.seconds) for point in points]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A recipe's work on the cores of one machine. Trainer and generators compute in float32, one rank each."""

    config: RunConfig
    shape: TransformerConfig
    workload: Workload
    curves: Curves
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
            busy = trainer + replicas * generator if max_staleness else max(trainer, replicas * generator)
            if busy > self.cores:
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
        slower = self.curves.together(trainer.devices, generator.devices)
        update_s = self._update_s(trainer)
        row_s = self._row_s(trainer)

        def train(batch: Batch) -> dict[str, float]:
            rows = batch.prompt_tokens + batch.completion_tokens
            return {"forward_backward": self.workload.epochs * rows * row_s, "optimizer": update_s}

        def decode(replica: int, rows: int, context: float) -> float:  # noqa: ARG001
            return rows * self.curves.decoded_token_s(generator.tensor_parallel, rows)

        setup = Setup(
            replicas=generator.replicas,
            slots=generator.slots,
            weight_update=self.config.weight_update if bound else "between_batches",
            cores=self.cores,
            trainer_threads=trainer.devices,
            generator_threads=generator.tensor_parallel,
            beside={"train": 1 / slower[0], "decode": 1 / slower[1]},
        )
        simulated = run_schedule(setup, Costs(decode=decode, train=train), self.workload, bound)
        return rehearsed(simulated, bound)

    def _placed(self, replicas: int, max_staleness: int) -> RunConfig:
        generator = self.config.generator.model_copy(update={"replicas": replicas})
        return self.config.model_copy(update={"generator": generator, "max_staleness": max_staleness})

    def _slots(self, replicas: int, max_staleness: int) -> list[int]:
        in_flight = math.ceil((max_staleness + 1) * self.workload.rollouts / replicas / ROW_MULTIPLE) * ROW_MULTIPLE
        counts = [ROW_MULTIPLE * 2**power for power in range(in_flight.bit_length())]
        return [slots for slots in counts if slots < in_flight] + [in_flight]

    def _microbatches(self) -> list[int]:
        all_of_it = math.ceil(self.workload.rollouts / self.workload.minibatches)
        return [2**power for power in range(all_of_it.bit_length()) if 2**power < all_of_it] + [all_of_it]

    def _row_s(self, layout: TrainerLayout) -> float:
        return self.curves.trained_row_s(layout.devices, layout.microbatch * self.workload.trained_tokens)

    def _update_s(self, layout: TrainerLayout) -> float:
        return self.workload.epochs * self.workload.minibatches * self.curves.update_s(layout.devices)

    def _found(self, plan: AsynchronousPlan, memory: dict[str, Parts], max_staleness: int) -> Found:
        workload, trainer, generator = self.workload, plan.trainer, plan.generator
        slower = (1.0, 1.0)
        if max_staleness:
            slower = self.curves.together(trainer.devices, generator.devices)
        rows = workload.rollouts * workload.trained_tokens * workload.epochs
        token_s = slower[1] * self.curves.decoded_token_s(generator.tensor_parallel, generator.slots)
        sides = {
            "trainer": Parts(
                {
                    "forward_backward": slower[0] * rows * self._row_s(trainer),
                    "optimizer": slower[0] * self._update_s(trainer),
                }
            ),
            "generator": Parts({"decode": workload.rollouts * workload.lengths.mean * token_s / generator.replicas}),
        }
        together = [side.total for side in sides.values()]
        seconds = max(together) if max_staleness else sum(together)
        return Found(
            plan=plan,
            step=StepTime(
                seconds=seconds, sides=sides, idle={name: 1 - side.total / seconds for name, side in sides.items()}
            ),
            memory=memory,
            longest_s=workload.lengths.longest_of(workload.rollouts) * token_s * generator.slots
            if max_staleness
            else 0.0,
            max_staleness=max_staleness,
        )


def plan_for_machine(machine: Machine, *, max_staleness: int = 8, num_rows: int = 4) -> Plan:
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
    ]
    return Plan(
        workload=machine.workload,
        rows=rows,
        by_staleness=tuple(best.values()),
        synchronous=synchronous,
        misfits=(),
        why=tuple(why),
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
