"""An evaluation as a table on the screen."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from slipstream.evals.evaluate import EvalResult


def show(result: EvalResult, model: Path, console: Console) -> None:
    """Print the greedy and the sampled value of each measure that was taken, and how many answers were not scored."""
    title = f"{model}, {result.num_prompts} held-out prompts"
    table = Table("", "greedy", "sampled", title=title, title_justify="left")
    for name, *values in _rows_of(result):
        if values != [None, None]:
            table.add_row(Text(name), *("" if value is None else f"{value:.3f}" for value in values))
    console.print(table)
    if result.num_failed:
        told = "they count as wrong, with the reward rewards.failure_reward"
        console.print(f"{result.num_failed} answers could not be scored: {told}", style="yellow")


def _rows_of(result: EvalResult) -> list[tuple[str, float | None, float | None]]:
    """Return name, greedy value and sampled value of each line of the table."""
    rows: list[tuple[str, float | None, float | None]] = [
        ("accuracy", result.accuracy, result.sampled_accuracy),
        ("reward", result.reward, result.sampled_reward),
    ]
    greedy, sampled = result.reward_parts, result.sampled_reward_parts
    if len(parts := greedy | sampled) > 1:
        rows += [(f"  {name}", greedy.get(name), sampled.get(name)) for name in parts]
    rows += [(f"pass@{k}", None, value) for k, value in result.pass_at_k.items() if k > 1]
    if result.num_samples > 1:
        rows.append(("with signal", None, result.signal_frac))  # groups that RL could learn from
    return rows
