"""The answer to a question: its plan as an object, as JSON types, as a recipe and as tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import tomli_w
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slipstream.core.disk import replace_file
from slipstream.core.errors import ConfigError, reason
from slipstream.core.machine import memory_bytes, num_cores
from slipstream.core.plain import plural
from slipstream.core.recipes import merge, read_toml, resolve
from slipstream.plan.calibrate import calibrate
from slipstream.plan.cost_model import CostModel
from slipstream.plan.counts import counts_of
from slipstream.plan.cpu import CalibratedTimes, CpuMachine, Times, plan_for_cpu
from slipstream.plan.hardware import GpuCluster
from slipstream.plan.layouts import GeneratorLayout, Layout, Parts, TrainerLayout, Workload, is_flat, layout_tables
from slipstream.plan.measured import CalibratedCostModel, Curves, MeasuredCurves, measured_model, read_measured
from slipstream.plan.pipeline import MOST_STAGES
from slipstream.plan.planner import SAME, Plan, PlanRow, Rehearsed, plan_for_cluster
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
from slipstream.plan.reasons import NAMES, WORDS, gigabytes, misfit_line
from slipstream.plan.recorded import read_run
from slipstream.plan.search import Found, executors
from slipstream.plan.simulated_run import FOR_ENVIRONMENTS

MODELS = "models"  # the folder of checkpoints in a recipe that was made for a model by name
KL_COEF = 0.05  # weight of the reference in a recipe for a model by name
STEPS_OF_COST = 1000
MOST_MISFITS = 4


def base_tables(
    subject: Subject, workload: Workload, max_new_tokens: int, *, reward_model: str | None
) -> dict[str, Any]:
    """Return the recipe that was planned for, or one for the model with only the fields that it needs."""
    batch = {
        "groups_per_step": workload.groups,
        "completions_per_group": workload.group_size,
        "generator": {"max_new_tokens": max_new_tokens},
    }
    if subject.recipe is not None and (config := subject.config) is not None:
        greedy = config.samples_per_group - config.completions_per_group  # ReMax samples one besides
        return merge(subject.recipe, batch | {"completions_per_group": workload.group_size - greedy})
    longest_prompt = math.ceil(2 * workload.lengths.prompt_mean)
    prompts = {"max_prompt_tokens": min(longest_prompt, subject.shape.max_positions - max_new_tokens)}
    named = {"recipe": subject.name, "model": {"path": subject.path or f"{MODELS}/{subject.name}"}, "prompts": prompts}
    tables = merge(read_toml(Path(__file__).with_name("planned.toml")), named)
    if workload.reference:
        tables["kl"] = {"coef": KL_COEF}
    if workload.critic:
        tables["loss"] = {"name": "ppo", "advantages": "gae"}
    if reward_model is not None:
        path = reward_model if Path(reward_model).is_dir() else f"{MODELS}/{Path(reward_model).name}"
        tables["rewards"] = {"terms": [], "models": [{"path": path}]}
    return merge(tables, batch)


def check_writable(path: Path) -> None:
    """Raise ConfigError where no recipe can be written."""
    if path.is_dir() or not path.parent.is_dir() or path.suffix != ".toml":
        raise ConfigError(
            "the recipe cannot be written there", got=path, allowed="a file NAME.toml in an existing folder"
        )


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The plan of a question. `cluster`: of GPUs; None where the plan is for the cores of this machine.

    `assumed`: defaults in place of what was not given. `base`: the recipe that was planned for.
    """

    subject: Subject
    plan: Plan
    cluster: GpuCluster | None
    assumed: tuple[str, ...]
    base: Mapping[str, Any]

    @property
    def unit(self) -> str:
        return "core" if self.cluster is None else "GPU"

    @property
    def recipe(self) -> dict[str, Any]:
        """The best configuration as a recipe's tables: `slipstream.run` takes them. ConfigError if it cannot."""
        if self.refusal is not None:
            raise self.refusal
        return self._tables

    @property
    def _tables(self) -> dict[str, Any]:
        device = "cpu" if self.cluster is None else "cuda"
        layout = layout_tables(self.plan.best.plan, self.plan.workload, self.plan.max_staleness, device=device)
        return merge(self.base, layout)

    @cached_property
    def refusal(self) -> ConfigError | None:
        """The error of a run of this plan, which then only says what it would take there; None if it can run.

        That is so of adapters, and of stages and parts of sequences beside something else that excludes them.
        ConfigError of any other one: a plan that cannot be run is no plan.
        """
        try:
            resolve(self._tables)
        except ConfigError as error:
            if not self.plan.workload.adapters.params and all(map(is_flat, executors(self.plan.best.plan).values())):
                raise
            return error
        return None

    def usd(self, step_s: float) -> float | None:
        """Return the dollars of STEPS_OF_COST steps on the whole cluster; None where no price was given."""
        if self.cluster is None or self.cluster.usd_per_device_hour is None:
            return None
        hours = STEPS_OF_COST * step_s / 3600
        return hours * self.cluster.num_devices * self.cluster.usd_per_device_hour

    def write_recipe(self, path: Path) -> None:
        """Write the best configuration as a recipe that `slipstream run` takes."""
        check_writable(path)
        best = self.plan.best
        head = (
            f"# Planned for {self.where()}: {best.rehearsed.step_s:.3g} s a step predicted, "
            f"{best.rehearsed.tokens_per_s:,.0f} trained tokens/s.\n"
        )
        replace_file(path, (head + tomli_w.dumps(self.recipe)).encode())

    def where(self) -> str:
        """Name the devices of the plan."""
        if self.cluster is None:
            return f"{plural(self.plan.num_devices, 'core')} of this machine"
        return f"{self.cluster.num_devices} {self.cluster.device.name}, {self.cluster.device.devices_per_node} a node"

    def to_dict(self) -> dict[str, Any]:
        """Return everything in JSON types; seconds, bytes and tokens unless a name says otherwise."""
        plan, workload = self.plan, self.plan.workload
        lengths, adapters = workload.lengths, workload.adapters
        return {
            "model": {"name": self.subject.name, "num_params": counts_of(self.subject.shape).params}
            | ({"adapter_params": adapters.params, "version_bytes": adapters.version_bytes} if adapters.params else {}),
            "devices": {"unit": self.unit, "count": plan.num_devices, "usable_bytes": plan.usable_bytes}
            | ({} if self.cluster is None else {"name": self.cluster.device.name}),
            "batch": {"groups_per_step": workload.groups, "completions_per_group": workload.group_size},
            "lengths": {
                "prompt_mean": lengths.prompt_mean,
                "completion_mean": lengths.mean,
                "completion_p99": lengths.p99,
                "completion_longest": lengths.longest,
                "source": lengths.source,
            },
            **({"turns": asdict(workload.turns), "sessions": workload.sessions} if workload.turns.is_set else {}),
            "assumed": list(self.assumed),
            "max_staleness": plan.max_staleness,
            "rows": [self._told_row(row) for row in plan.rows],
            "by_staleness": [self._told_row(row) for row in plan.by_staleness],
            "synchronous": None if plan.synchronous is None else self._told_synchronous(plan.synchronous),
            "why": list(plan.why),
            "does_not_fit": [misfit_line(misfit, plan.usable_bytes, self.unit) for misfit in plan.misfits],
            "recipe": None if self.refusal is not None else self.recipe,
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


def make_plan(model: str | Path, **given: Any) -> Answer:
    """Plan from Python as `slipstream plan` does: `make_plan("llama-3.1-8b", gpus=16).plan.best.rehearsed.step_s`.

    Arguments are the command's flags, with underscores. ConfigError for bad input.
    """
    return answer(question_of(model=str(model), **given))


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
            hint="for this machine: train for a few steps, and plan for the run's folder",
        )
    bound = MOST_STALENESS if question.max_staleness is None else question.max_staleness
    stages = MOST_STAGES if question.max_stages is None else question.max_stages
    if bound < 1 or question.rows < 1 or stages < 1:
        got = f"--max-staleness {bound}, --rows {question.rows}, --max-stages {stages}"
        allowed = "1 or more; staleness 0 is the synchronous configuration beside them"
        raise ConfigError("a plan has rows, some staleness, and a stage", got=got, allowed=allowed)
    workload, assumed = workload_of(question, subject)
    longest = max_new_tokens(question, subject, workload.lengths)
    base = base_tables(subject, workload, longest, reward_model=question.reward_model)
    if question.lora_rank is not None:
        base = merge(base, {"model": {"lora": {"rank": question.lora_rank}}})
    if workload.adapters.params and (measured is not None or (cluster is None and question.lora_rank is not None)):
        raise ConfigError(
            "seconds that were measured are those of the weights that were trained",
            got="adapters with --measured" if measured is not None else f"--lora-rank with the run {subject.run}",
            allowed="--gpus N, or the folder of a run with these adapters as the model",
        )
    alone = replace(question, reference=False, critic=False)
    if cluster is None and measured is None and question != alone and workload != workload_of(alone, subject)[0]:
        raise ConfigError(
            "the files of a run have no seconds of a model that it did not have",
            got=f"--reference or --critic with the run {subject.run}",
            allowed="--gpus N, --measured FILE, or the folder of a run with that model",
        )
    if cluster is None:
        machine = _cpu_machine(subject, measured, base, workload)
        plan = plan_for_cpu(machine, max_staleness=bound, num_rows=question.rows)
    else:
        model, has_experts = _cost_model(subject, cluster, workload, measured), subject.shape.num_experts > 0
        precisions = precisions_of(question, cluster, has_experts=has_experts)
        tried: dict[str, Any] = {"precisions": precisions, "max_staleness": bound, "max_stages": stages}
        plan = plan_for_cluster(model, **tried, num_rows=question.rows)
    found = Answer(subject=subject, plan=plan, cluster=cluster, assumed=assumed, base=base)
    _ = found.refusal
    return found


def _cpu_machine(
    subject: Subject, measured: MeasuredCurves | None, base: Mapping[str, Any], workload: Workload
) -> CpuMachine:
    """Return the machine of the run that was named, or this one with measured curves."""
    config = resolve(base)
    on_gpu = [f"{name}.device" for name in ("trainer", "generator") if vars(config)[name].device != "cpu"]
    if on_gpu:
        what = "a recipe for GPUs cannot be planned on a CPU"
        raise ConfigError(what, got=", ".join(on_gpu), allowed="--gpus N, or a recipe for the CPU")
    if config.generator.engine != "native" or config.generator.precision != "float32":
        got = f"generator.engine = '{config.generator.engine}', precision = '{config.generator.precision}'"
        raise ConfigError("the curves are those of the native engine in float32", got=got)
    times: Times
    if measured is not None:
        times, cores = Curves(measured_model(measured, subject.shape)), num_cores()
    else:
        assert subject.run is not None, "`answer` has seen to that"
        times = CalibratedTimes(calibrate([read_run(subject.run)]))
        cores = times.calibration.cores
    return CpuMachine(
        config=config, shape=subject.shape, workload=workload, times=times, cores=cores, memory_bytes=memory_bytes()
    )


def _cost_model(
    subject: Subject, cluster: GpuCluster, workload: Workload, measured: MeasuredCurves | None
) -> CostModel:
    if measured is None:
        return CostModel(subject.shape, cluster, workload)
    if measured.device != "cuda":
        got = f"a file measured on {measured.device} with a cluster of {cluster.device.name}"
        allowed = "--measured without --gpus, or curves measured on GPUs (docs/planning.md)"
        raise ConfigError("curves of a CPU say nothing of GPUs", got=got, allowed=allowed)
    return CalibratedCostModel(subject.shape, cluster, workload, measured_model(measured, subject.shape))


def show(answer: Answer, console: Console) -> None:
    """Print the tables of `answer` and the reasons for it; `Answer.to_dict` has the rest."""
    for line in _heading(answer):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    per = "in all" if answer.cluster is None else f"per {answer.unit}"
    for title, table, legend in (
        (f"Best configurations under max_staleness k = {answer.plan.max_staleness}", _configurations(answer), True),
        (
            f"Memory of the best, GB {per}, of {gigabytes(answer.plan.usable_bytes)}, and its {answer.unit}s",
            _memory(answer),
            False,
        ),
        ("The best for each k, by the real schedule in virtual time", _bounds(answer), False),
    ):
        console.print(f"\n{title}", style="bold", highlight=False)
        console.print(table)
        if legend:
            words = WORDS["legend"] + WORDS["legend_of_costs"] * (answer.usd(1.0) is not None)
            facts = {"unit": answer.unit, "per": per, "same": f"{100 * (SAME - 1):.2g}", "steps": STEPS_OF_COST}
            console.print(Text(words.format(**facts), style="dim"))
    console.print()
    for line in answer.plan.why:
        console.print(Text(f"- {line}"), soft_wrap=True)
    # What never fits first, then what fits only on many devices.
    if misfits := sorted(
        answer.plan.misfits, key=lambda one: (one.fits_from is not None, -(one.fits_from or 0), one.tensor_parallel)
    ):
        console.print("\nDoes not fit:", highlight=False)
        for misfit in misfits[:MOST_MISFITS]:
            console.print(Text(f"- {misfit_line(misfit, answer.plan.usable_bytes, answer.unit)}"), soft_wrap=True)
        if len(misfits) > MOST_MISFITS:
            console.print(f"- and {len(misfits) - MOST_MISFITS} more (--json)", highlight=False)


def _heading(answer: Answer) -> list[str]:
    workload, lengths = answer.plan.workload, answer.plan.workload.lengths
    counts = counts_of(answer.subject.shape)
    params, active = counts.params, counts.active_params
    size = f"{params / 1e9:.3g} B" if params >= 1e9 else f"{params / 1e6:.3g} M"
    of_a_token = f" ({active / params:.0%} of them active)" if active < params else ""
    lines = [
        f"{answer.subject.name}, {size} parameters{of_a_token}, on {answer.where()}",
        f"a step: {workload.groups} prompts x {workload.group_size} completions; prompts of {lengths.prompt_mean:.4g} "
        f"tokens, completions of {lengths.mean:.4g} (p99 {lengths.p99:.4g}, at most {lengths.longest})",
    ]
    if (turns := workload.turns).is_set:
        lines.append(
            f"episodes of {turns.turns or 1:g} turns with {turns.given_tokens or 0} given tokens between them, "
            f"{turns.environment_s or 0:g} s an answer"
        )
    if (adapters := workload.adapters).params:
        whole = counts_of(answer.subject.shape).served_bytes(answer.plan.best.plan.generator.precision)
        lines.append(
            f"adapters of {adapters.params / 1e6:.3g} M numbers; a version has {gigabytes(adapters.version_bytes)} GB "
            f"instead of {gigabytes(whole)}"
        )
    if answer.refusal is not None:
        line = f"no run can do this yet: {reason(answer.refusal)}"
        is_staged = not all(map(is_flat, executors(answer.plan.best.plan).values()))
        lines.append(f"{line} (--max-stages 1 plans without stages)" if is_staged else line)
    if answer.assumed:
        lines.append(f"assumed, as not given: {', '.join(answer.assumed)}")
    return lines


def _configurations(answer: Answer) -> Table:
    plan = answer.plan
    names = [name for name in NAMES if any(name in executors(row.plan) for row in plan.rows)]
    table = _table(["", *map(_title, names)], ["step s", "tok/s", "idle %", "stale", "GB"], no_wrap=True)
    if answer.usd(1.0) is not None:
        table.add_column(f"$/{STEPS_OF_COST}", justify="right", no_wrap=True)

    def add(label: str, found: Found, numbers: Sequence[str], step_s: float, style: str | None = None) -> None:
        layouts, usd = executors(found.plan), answer.usd(step_s)
        told = [_layout(layouts[name]) if name in layouts else "" for name in names]
        held = "/".join(gigabytes(parts.total, 2) for parts in found.memory.values())
        costs = [] if usd is None else [f"{usd / 1000:,.0f}k" if usd >= 100_000 else f"{usd:,.0f}"]
        table.add_row(label, *told, *numbers, held, *costs, style=style)

    for index, row in enumerate(plan.rows):
        add(str(index + 1), row.found, _told(row.rehearsed), row.rehearsed.step_s, None if index else "bold")
    if (found := plan.synchronous) is not None:
        tokens_per_s = plan.workload.rollouts * plan.workload.lengths.mean / found.seconds
        add("sync", found, [*_numbers(found.seconds, tokens_per_s, found.step.idle), "0"], found.seconds)
    return table


def _table(words: Sequence[str], numbers: Sequence[str], *, no_wrap: bool = False) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))
    for names, justify in ((words, "left"), (numbers, "right")):
        for name in names:
            table.add_column(name, justify=justify, no_wrap=no_wrap)  # type: ignore[arg-type]
    return table


def _numbers(step_s: float, tokens_per_s: float, idle: Mapping[str, float]) -> list[str]:
    shares = [share for name, share in idle.items() if name != FOR_ENVIRONMENTS]
    return [f"{step_s:.3g}", f"{tokens_per_s:,.0f}", "/".join(f"{100 * share:.0f}" for share in shares)]


def _told(rehearsed: Rehearsed) -> list[str]:
    stale = f"{rehearsed.staleness_mean:.1f}/{rehearsed.staleness_max}"
    return [*_numbers(rehearsed.step_s, rehearsed.tokens_per_s, rehearsed.idle), stale]


def _layout(layout: Layout) -> str:
    """Write a layout as its devices, tensor x pipeline x data parallel, and what else it has."""
    if isinstance(layout, TrainerLayout):
        axes = f"{layout.tensor_parallel}x{layout.pipeline_parallel}x{layout.data_parallel}"
        parts = {"v": layout.chunks, "c": layout.context_parallel, "e": layout.expert_parallel}
        further = "".join(f" {letter}{size}" for letter, size in parts.items() if size > 1)
        return f"{axes}{further} b{layout.microbatch:g}" + " r" * layout.recompute
    if isinstance(layout, GeneratorLayout):
        precision = {"bfloat16": "bf16", "float32": "fp32"}.get(layout.precision, layout.precision)
        axes = f"{layout.tensor_parallel}x{layout.pipeline_parallel}x{layout.replicas}"
        return f"{axes} b{layout.slots} {precision}"
    divided = f": m{layout.tensor_parallel}" + " sharded" * layout.sharded if layout.division else ""
    return f"{layout.devices}{divided}"


def _memory(answer: Answer) -> Table:
    best = answer.plan.best.found
    layouts = executors(best.plan)
    table = _table([""], [_title(name) + f": {layouts[name].devices}" * (name in layouts) for name in best.memory])
    causes = dict.fromkeys(cause for held in best.memory.values() for cause in held.parts)
    for cause in causes:
        held = (gigabytes(parts.parts[cause]) if cause in parts.parts else "" for parts in best.memory.values())
        table.add_row(cause.replace("_", " "), *held)
    table.add_section()
    table.add_row("in all", *(gigabytes(parts.total) for parts in best.memory.values()))
    return table


def _bounds(answer: Answer) -> Table:
    table = _table([], ["k", "step s", "tok/s", "idle %", "stale"])
    for row in answer.plan.by_staleness:
        bound = row.rehearsed.max_staleness
        table.add_row(str(bound), *_told(row.rehearsed), style="bold" if bound == answer.plan.max_staleness else None)
    return table


def _title(name: str) -> str:
    return NAMES[name].removeprefix("the ")
