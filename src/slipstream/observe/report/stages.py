"""What came before RL: the stages `sft` and `reward_model` of a run that has them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.core.recipes import stage_dir
from slipstream.core.run_log import read_metrics
from slipstream.observe.report.html import card, cards, part
from slipstream.observe.report.learning import BLUE, GREEN, numbers
from slipstream.observe.report.run import is_number, read_json
from slipstream.observe.svg import Axis, Series, line_chart, number


def stages(run_dir: Path) -> str:
    pictures = [_sft(stage_dir(run_dir, "sft")), _reward_model(stage_dir(run_dir, "reward_model"))]
    lead = "RL starts from what these stages made, and is paid by it."
    return part("before", "What came before RL?", lead, [cards(*(one for pair in pictures for one in pair))])


def _sft(folder: Path) -> list[str]:
    record = _record(folder)
    chart = _curve(folder, "loss", "Supervised fine-tuning", Axis("nats per token", low=0.0), BLUE)
    if record is None or not chart:
        return []
    note = "The loss on demonstrations."
    if record["num_held_out"]:
        before, after = (record["held_out"][moment] for moment in ("before", "after"))
        note += (
            f" On {number(record['num_held_out'])} held-out ones it went from {before['loss']:.2f} to "
            f"{after['loss']:.2f}, and the share of tokens foretold from {before['accuracy']:.0%} to "
            f"{after['accuracy']:.0%}."
        )
    return [card("Supervised fine-tuning", note, chart)]


def _reward_model(folder: Path) -> list[str]:
    record = _record(folder)
    loss = _curve(folder, "loss", "Loss of the reward model", Axis("nats per preference", low=0.0), BLUE)
    accuracy = _curve(
        folder,
        "accuracy",
        "Accuracy of the reward model",
        Axis("share of preferences", low=0.0, high=1.0, is_share=True),
        GREEN,
    )
    if record is None or not loss:
        return []
    note = "How often it prefers what its labels prefer."
    if record["held_out_accuracy"] is not None:
        share = record["held_out_accuracy"]
        note += f" Of {number(record['num_held_out'])} held-out preferences it gets {share:.0%} right."
    return [
        card("Reward model: loss", "On the preferences it learns from.", loss, folds=True),
        card("Reward model: accuracy", note, accuracy),
    ]


def _record(folder: Path) -> Mapping[str, Any] | None:
    path = folder / "stage.json"
    return read_json(path) if path.exists() else None


def _curve(folder: Path, name: str, title: str, y: Axis, hue: int) -> str:
    lines = read_metrics(folder / "metrics.jsonl")
    points = [(float(i), float(line[name])) for i, line in enumerate(lines) if is_number(line.get(name))]
    series = [Series(name, points, hue, smooth=max(1, len(points) // 15 | 1))]
    return line_chart(series, title=title, x=Axis("update"), y=y) + numbers(series, "update") if points else ""
