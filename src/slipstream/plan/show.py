"""The tables of a plan: configurations, the memory of the best one, the bounds that were tried, and the reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from slipstream.plan.answer import STEPS_OF_COST, Answer
from slipstream.plan.counts import counts_of
from slipstream.plan.layouts import AsynchronousPlan, GeneratorLayout, Layout, Parts, SynchronousPlan, TrainerLayout
from slipstream.plan.reasons import gigabytes, misfit_line
from slipstream.plan.search import executors

MOST_MISFITS = 4

Amount = TypeVar("Amount")


def show(answer: Answer, console: Console) -> None:
    """Print the tables of `answer` and the reasons for it; `Answer.to_dict` has the rest."""
    for line in _heading(answer):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    per = "in all" if answer.cluster is None else f"per {answer.unit}"
    for title, table, legend in (
        (f"Best configurations under max_staleness k = {answer.plan.max_staleness}", _configurations(answer), True),
        (f"Memory of the best, GB {per}, of {gigabytes(answer.usable_bytes)}", _memory(answer), False),
        ("The best for each k, by the real schedule in virtual time", _bounds(answer), False),
    ):
        console.print(f"\n{title}", style="bold", highlight=False)
        console.print(table)
        if legend:
            console.print(Text(_legend(answer), style="dim"))
    console.print()
    for line in answer.plan.why:
        console.print(Text(f"- {line}"), soft_wrap=True)
    # What never fits first, then what fits only on many devices.
    if misfits := sorted(
        answer.plan.misfits, key=lambda one: (one.fits_from is not None, -(one.fits_from or 0), one.tensor_parallel)
    ):
        console.print("\nDoes not fit:", highlight=False)
        for misfit in misfits[:MOST_MISFITS]:
            console.print(Text(f"- {misfit_line(misfit, answer.usable_bytes, answer.unit)}"), soft_wrap=True)
        if len(misfits) > MOST_MISFITS:
            console.print(f"- and {len(misfits) - MOST_MISFITS} more (--json)", highlight=False)


def _heading(answer: Answer) -> list[str]:
    workload, lengths = answer.plan.workload, answer.plan.workload.lengths
    params = counts_of(answer.subject.shape).params
    size = f"{params / 1e9:.3g} B" if params >= 1e9 else f"{params / 1e6:.3g} M"
    lines = [
        f"{answer.subject.name}, {size} parameters, on {answer.where()}",
        f"a step: {workload.groups} prompts x {workload.group_size} completions; prompts of {lengths.prompt_mean:.4g} "
        f"tokens, completions of {lengths.mean:.4g} (p99 {lengths.p99:.4g}, at most {lengths.longest})",
    ]
    if answer.assumed:
        lines.append(f"assumed, as not given: {', '.join(answer.assumed)}")
    return lines


def _configurations(answer: Answer) -> Table:
    plan = answer.plan
    names = list(dict.fromkeys(name for row in plan.rows for name in executors(row.plan)))
    numbers = ["step s", "tok/s", "idle %", "stale", "GB"]
    numbers += [] if answer.usd(1.0) is None else [f"$/{STEPS_OF_COST}"]
    table = _table(["", *map(_title, names)], numbers, no_wrap=True)
    for index, row in enumerate(plan.rows):
        rehearsed = row.rehearsed
        table.add_row(
            str(index + 1),
            *_layouts(row.plan, names),
            *_numbers(rehearsed.step_s, rehearsed.tokens_per_s, _in_order(rehearsed.idle, names)),
            f"{rehearsed.staleness_mean:.1f}/{rehearsed.staleness_max}",
            *_costs(answer, _in_order(row.found.memory, names), rehearsed.step_s),
            style="bold" if index == 0 else None,
        )
    if (found := plan.synchronous) is not None:
        tokens = plan.workload.rollouts * plan.workload.lengths.mean
        table.add_row(
            "sync",
            *_layouts(found.plan, names),
            *_numbers(found.seconds, tokens / found.seconds, found.step.idle),
            "0",
            *_costs(answer, found.memory, found.seconds),
        )
    return table


def _legend(answer: Answer) -> str:
    memory = "GB in all" if answer.cluster is None else f"GB per {answer.unit}"
    return (
        f"{answer.unit}s of each executor: m of them share a layer; b rollouts in a microbatch, completions decoded at "
        f"once; r: recomputes activations. tok/s: trained; idle and {memory}, by executor; stale: mean/largest, in "
        f"steps; sync: in turns on the same {answer.unit}s, GB while it trains/generates."
    )


def _table(words: Sequence[str], numbers: Sequence[str], *, no_wrap: bool = False) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))
    for names, justify in ((words, "left"), (numbers, "right")):
        for name in names:
            table.add_column(name, justify=justify, no_wrap=no_wrap)  # type: ignore[arg-type]
    return table


def _numbers(step_s: float, tokens_per_s: float, idle: Mapping[str, float]) -> list[str]:
    return [f"{step_s:.3g}", f"{tokens_per_s:,.0f}", "/".join(f"{100 * share:.0f}" for share in idle.values())]


def _in_order(by_executor: Mapping[str, Amount], names: Sequence[str]) -> dict[str, Amount]:
    return {name: by_executor[name] for name in names if name in by_executor}


def _costs(answer: Answer, memory: Mapping[str, Parts], step_s: float) -> list[str]:
    held, usd = "/".join(gigabytes(parts.total, 2) for parts in memory.values()), answer.usd(step_s)
    if usd is None:
        return [held]
    return [held, f"{usd / 1000:,.0f}k" if usd >= 100_000 else f"{usd:,.0f}"]


def _layouts(plan: AsynchronousPlan | SynchronousPlan, names: Sequence[str]) -> list[str]:
    found = executors(plan)
    return [_layout(found[name]) if name in found else "" for name in names]


def _layout(layout: Layout) -> str:
    if isinstance(layout, TrainerLayout):
        return f"{layout.devices}: m{layout.tensor_parallel} b{layout.microbatch:g}" + " r" * layout.recompute
    if isinstance(layout, GeneratorLayout):
        precision = {"bfloat16": "bf16", "float32": "fp32"}.get(layout.precision, layout.precision)
        return f"{layout.devices}: {layout.replicas}xm{layout.tensor_parallel} b{layout.slots} {precision}"
    return f"{layout.devices}"


def _memory(answer: Answer) -> Table:
    best = answer.plan.best.found
    table = _table([""], [_title(name) for name in best.memory])
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
        rehearsed = row.rehearsed
        table.add_row(
            f"{rehearsed.max_staleness}",
            *_numbers(rehearsed.step_s, rehearsed.tokens_per_s, rehearsed.idle),
            f"{rehearsed.staleness_mean:.1f}/{rehearsed.staleness_max}",
            style="bold" if rehearsed.max_staleness == answer.plan.max_staleness else None,
        )
    return table


def _title(name: str) -> str:
    return {"generator": "generators", "reward_model": "reward model"}.get(name, name)
