"""The answer to a question: its plan as an object, as JSON types and as a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slipstream.controller.placement import num_cores
from slipstream.core.errors import ConfigError
from slipstream.core.recipes import resolve
from slipstream.observe.hardware import memory_bytes
from slipstream.plan.cost_model import CostModel
from slipstream.plan.counts import counts_of
from slipstream.plan.cpu import CpuMachine, Times, plan_for_cpu, times_of_runs
from slipstream.plan.hardware import GpuCluster
from slipstream.plan.layouts import Parts, Workload
from slipstream.plan.measured import CalibratedCostModel, Curves, MeasuredCurves, measured_model, read_measured
from slipstream.plan.planner import Plan, PlanRow, plan_for_cluster
from slipstream.plan.question import (
    MOST_STALENESS,
    Question,
    Subject,
    cluster_of,
    max_new_tokens,
    precisions_of,
    question_of,
    subject_of,
    workload_of,
)
from slipstream.plan.reasons import misfit_line
from slipstream.plan.recipe import base_tables, layout_tables, recipe_of, write_recipe
from slipstream.plan.search import Found, executors

STEPS_OF_COST = 1000
HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The plan of a question. `cluster`: of GPUs; None where the plan is for the cores of this machine.

    `assumed`: defaults in place of what was not given. `usable_bytes`: of a device, or of the machine.
    """

    question: Question
    subject: Subject
    plan: Plan
    cluster: GpuCluster | None
    num_devices: int
    usable_bytes: float
    assumed: tuple[str, ...]
    base: Mapping[str, Any]

    @property
    def unit(self) -> str:
        return "core" if self.cluster is None else "GPU"

    @property
    def recipe(self) -> dict[str, Any]:
        """The best configuration as a recipe's tables: `slipstream.run` takes them."""
        device = "cpu" if self.cluster is None else "cuda"
        layout = layout_tables(self.plan.best.plan, self.plan.workload, self.plan.max_staleness, device=device)
        return recipe_of(self.base, layout)

    def usd(self, step_s: float) -> float | None:
        """Return the dollars of STEPS_OF_COST steps on the whole cluster; None where no price was given."""
        if self.cluster is None or self.cluster.usd_per_device_hour is None:
            return None
        hours = STEPS_OF_COST * step_s / HOUR_S
        return hours * self.cluster.num_devices * self.cluster.usd_per_device_hour

    def write_recipe(self, path: Path) -> None:
        """Write the best configuration as a recipe that `slipstream run` takes."""
        best = self.plan.best
        predicted = (
            f"Planned for {self.where()}: {best.rehearsed.step_s:.3g} s a step predicted, "
            f"{best.rehearsed.tokens_per_s:,.0f} trained tokens/s."
        )
        write_recipe(path, self.recipe, [predicted])

    def where(self) -> str:
        """Name the devices of the plan."""
        if self.cluster is None:
            return f"{self.num_devices} core{'s' * (self.num_devices > 1)} of this machine"
        return f"{self.cluster.num_devices} {self.cluster.device.name}, {self.cluster.device.devices_per_node} a node"

    def to_dict(self) -> dict[str, Any]:
        """Return everything in JSON types; seconds, bytes and tokens unless a name says otherwise."""
        plan, workload = self.plan, self.plan.workload
        lengths = workload.lengths
        return {
            "model": {"name": self.subject.name, "num_params": counts_of(self.subject.shape).params},
            "devices": {"unit": self.unit, "count": self.num_devices, "usable_bytes": self.usable_bytes}
            | ({} if self.cluster is None else {"name": self.cluster.device.name}),
            "batch": {"groups_per_step": workload.groups, "completions_per_group": workload.group_size},
            "lengths": {
                "prompt_mean": lengths.prompt_mean,
                "completion_mean": lengths.mean,
                "completion_p99": lengths.p99,
                "completion_longest": lengths.longest,
                "source": lengths.source,
            },
            "assumed": list(self.assumed),
            "max_staleness": plan.max_staleness,
            "rows": [self._told_row(row) for row in plan.rows],
            "by_staleness": [self._told_row(row) for row in plan.by_staleness],
            "synchronous": None if plan.synchronous is None else self._told_synchronous(plan.synchronous),
            "why": list(plan.why),
            "does_not_fit": [misfit_line(misfit, self.usable_bytes, self.unit) for misfit in plan.misfits],
            "recipe": self.recipe,
        }

    def _told_row(self, row: PlanRow) -> dict[str, Any]:
        rehearsed = row.rehearsed
        return {
            "max_staleness": rehearsed.max_staleness,
            "step_s": rehearsed.step_s,
            "step_s_if_nobody_waits": row.found.step.seconds,
            "tokens_per_s": rehearsed.tokens_per_s,
            "idle": rehearsed.idle,
            "staleness": {"mean": rehearsed.staleness_mean, "max": rehearsed.staleness_max},
            "usd_per_1000_steps": self.usd(rehearsed.step_s),
            "executors": self._executors(row.found),
        }

    def _told_synchronous(self, found: Found) -> dict[str, Any]:
        tokens = self.plan.workload.rollouts * self.plan.workload.lengths.mean
        return {
            "step_s": found.seconds,
            "tokens_per_s": tokens / found.seconds,
            "idle": dict(found.step.idle),
            "usd_per_1000_steps": self.usd(found.seconds),
            "executors": self._executors(found),
        }

    def _executors(self, found: Found) -> dict[str, Any]:
        told: dict[str, Any] = {}
        for name, layout in executors(found.plan).items():
            side = found.step.sides.get(name, Parts({}))
            told[name] = asdict(layout) | {"seconds": dict(side.parts)}
        for name, held in found.memory.items():
            told.setdefault(name, {})["memory_bytes"] = dict(held.parts)
        return told


def make_plan(model: str, **given: Any) -> Answer:
    """Plan from Python as `slipstream plan` does: `make_plan("llama-3.1-8b", gpus=16).plan.best.rehearsed.step_s`.

    Arguments are the command's flags, with underscores. ConfigError for bad input.
    """
    return answer(question_of(model=model, **given))


def answer(question: Question) -> Answer:
    """Plan for `question`. ConfigError for bad input, before anything is searched."""
    subject = subject_of(question.model)
    cluster = cluster_of(question)
    measured = None if question.measured is None else read_measured(question.measured)
    is_of_cores = measured.device == "cpu" if measured is not None else subject.run is not None
    if cluster is None and not is_of_cores:
        raise ConfigError(
            "there is nothing to plan for",
            allowed="--gpus N (and --gpu NAME), --cluster FILE.toml; for a machine's cores --measured FILE, or a run's "
            "folder as the model",
            hint="in a checkout, `python benchmarks/eta_curves.py --json eta.json` measures this machine",
        )
    bound = MOST_STALENESS if question.max_staleness is None else question.max_staleness
    if bound < 1 or question.rows < 1:
        raise ConfigError(
            "a plan has rows, and some staleness",
            got=f"--max-staleness {bound}, --rows {question.rows}",
            allowed="1 or more; staleness 0 is the synchronous configuration beside them",
        )
    workload, assumed = workload_of(question, subject)
    longest = max_new_tokens(question, subject, workload.lengths)
    base = base_tables(subject, workload, longest, reward_model=question.reward_model)
    if cluster is None:
        machine = _cpu_machine(subject, measured, base, workload)
        plan = plan_for_cpu(machine, max_staleness=bound, num_rows=question.rows)
        usable, count = machine.usable_bytes, machine.cores
    else:
        model = _cost_model(subject, cluster, workload, measured)
        precisions = precisions_of(question, cluster)
        plan = plan_for_cluster(model, precisions=precisions, max_staleness=bound, num_rows=question.rows)
        usable, count = model.usable_bytes, cluster.num_devices
    found = Answer(
        question=question,
        subject=subject,
        plan=plan,
        cluster=cluster,
        num_devices=count,
        usable_bytes=usable,
        assumed=assumed,
        base=base,
    )
    _ = found.recipe  # a plan that cannot be run is no plan
    return found


def _cpu_machine(
    subject: Subject, measured: MeasuredCurves | None, base: Mapping[str, Any], workload: Workload
) -> CpuMachine:
    """Return the machine of the run that was named, or this one with measured curves."""
    config = resolve(base)
    on_gpu = [f"{name}.device" for name in ("trainer", "generator") if vars(config)[name].device != "cpu"]
    if on_gpu:
        raise ConfigError(
            "a recipe for GPUs cannot be planned on a CPU",
            got=", ".join(on_gpu),
            allowed="--gpus N, or a recipe for the CPU",
        )
    if config.generator.engine != "native" or config.generator.precision != "float32":
        raise ConfigError(
            "the curves are those of the native engine in float32",
            got=f"generator.engine = '{config.generator.engine}', precision = '{config.generator.precision}'",
        )
    times: Times
    if measured is not None:
        times, cores = Curves(measured_model(measured, subject.shape)), num_cores()
    else:
        assert subject.run is not None, "`answer` has seen to that"
        times = times_of_runs([subject.run])
        cores = times.calibration.cores
    return CpuMachine(
        config=config,
        shape=subject.shape,
        workload=workload,
        times=times,
        cores=cores,
        memory_bytes=memory_bytes(),
    )


def _cost_model(
    subject: Subject, cluster: GpuCluster, workload: Workload, measured: MeasuredCurves | None
) -> CostModel:
    if measured is None:
        return CostModel(subject.shape, cluster, workload)
    if measured.device != "cuda":
        raise ConfigError(
            "curves of a CPU say nothing of GPUs",
            got=f"a file measured on {measured.device} with a cluster of {cluster.device.name}",
            allowed="--measured without --gpus, or what a checkout's benchmarks/eta_curves.py --device cuda writes",
        )
    return CalibratedCostModel(subject.shape, cluster, workload, measured_model(measured, subject.shape))
