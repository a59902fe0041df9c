"""What was run: the configuration, what differs from the defaults first; the files and their questions; the machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
from pydantic import BaseModel

from slipstream.core.config import RunConfig
from slipstream.core.recipes import defaults
from slipstream.core.run_log import num_missing
from slipstream.observe.hardware import Hardware
from slipstream.observe.report.html import card, facts, field, folded, part, table, text
from slipstream.observe.report.run import Run

FILES = {
    "summary.json": "what it came to; a stable interface for scripts",
    "metrics.jsonl": "one line per step: every curve of this page",
    "rollouts.jsonl": "what the model said, for which reward, sampled by which versions",
    "timeline.json": "who waited for whom; opens in ui.perfetto.dev and chrome://tracing",
    "alarms.jsonl": "what looked wrong, step by step",
    "events.jsonl": "every scheduling decision; slipstream replay goes through them again",
    "config.toml": "the whole configuration",
    "model": "the policy in Hugging Face format",
}


def setup(run: Run, hardware: Hardware | None) -> str:
    changed = differing(run.config)
    rows = (
        [f"<code>{field(name)}</code>", text(shown(value)), text(shown(default)), text(meaning(name))]
        for name, (value, default) in changed.items()
    )
    head = ["field", "this run", "default", "what it is"]
    note = f"{len(changed)} fields differ from the defaults; the others are below."
    whole = folded("The whole configuration", facts({name: shown(value) for name, value in flat(run.config).items()}))
    summary = run.summary
    outcome = {name: shown(value) for name, value in flat(msgspec.to_builtins(summary)).items()} if summary else {}
    files = {name: what + lost(run, name) for name, what in FILES.items() if (run.path / name).exists()}
    pictures = [
        card("Configuration", note, table(head, rows, kind="config", stacks=True) + whole, size="wide", folds=True)
        if run.config
        else "",
        card("Files of this run", "Everything on this page comes from these.", facts(files), size="wide", folds=True),
        folded("Everything in summary.json", facts(outcome)) if outcome else "",
        folded("The machine", facts(hardware.lines())) if hardware else "",
    ]
    return part(
        "setup",
        "What was run?",
        "What the run was started with. Functions given from Python are not in its files.",
        pictures,
    )


def lost(run: Run, name: str) -> str:
    """That lines of a file are gone, which were cut off or deleted before the run went on; nothing, where none are."""
    num_lost, what = 0, "steps"
    if name == "metrics.jsonl" and run.history.steps:
        steps = {int(line["step"]) for line in run.history.steps}
        num_lost = max(steps) + 1 - len(steps)
    elif name == "events.jsonl":
        num_lost, what = num_missing(run.path / name), "events"
    return f". Incomplete: {num_lost:,} {what} are missing" if num_lost else ""


def differing(config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Field -> (value, default) where these differ. A field that the saved file leaves out has its default, None."""
    standard = flat(defaults())
    return {
        name: (value, standard.get(name))
        for name, value in flat(config).items()
        if as_saved(value) != as_saved(standard.get(name))
    }


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Nested tables as `section.field`."""
    if not isinstance(values, Mapping) or (prefix and not values):
        return {prefix.removesuffix("."): values}
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.")
    return found


def shown(value: Any) -> str:
    """A value as a recipe would have it."""
    if value is None or value == {}:
        return "-"
    return value if isinstance(value, str) else json.dumps(as_saved(value), ensure_ascii=False)


def as_saved(value: Any) -> Any:
    """`value` as it is after it was written to a file and read again: tuples are lists there, None is left out."""
    if isinstance(value, Mapping):
        return {key: as_saved(inner) for key, inner in value.items() if inner is not None}
    return [as_saved(inner) for inner in value] if isinstance(value, list | tuple) else value


def meaning(path: str) -> str:
    """The description of a field in the schema; empty for one that it does not have."""
    model: type[BaseModel] | None = RunConfig
    description = ""
    for part_of_path in path.split("."):
        info = model.model_fields.get(part_of_path) if model is not None else None
        if info is None:
            break
        description = info.description or ""
        kind = info.annotation
        model = kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None
    return description
