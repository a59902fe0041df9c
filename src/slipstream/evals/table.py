"""An evaluation as a table on the screen."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from slipstream.evals.evaluate import EvalResult, HeldOutAnswer
from slipstream.observe.display import as_lines, printable

MAX_SHOWN = 2
"""Greedy episodes whose transcripts are shown."""
MAX_FAILURES = 4
"""Reasons of failures that are shown, the most frequent first."""
MAX_FAILURE_CHARS = 240


def show(result: EvalResult, model: Path, console: Console) -> None:
    """Print the greedy and the sampled value of each measure that was taken, and how many answers were not scored.

    With an environment also the beginnings of some greedy episodes.
    """
    run = model.parent if (model.parent / "config.toml").is_file() else model
    of_what = "held-out prompts" if result.data is None else f"prompts of {result.data}"
    of_what += f", the set {result.eval_set}" if result.eval_set else ""
    of_what += f", on {result.sampled_on}" if result.sampled_on != "cpu" else ""
    console.print(Text(f"{run}, {result.num_prompts} {of_what}", "italic"), soft_wrap=True)  # a table's title is cut
    table = Table("", "greedy", "sampled")
    for name, *values in _rows_of(result):
        if values != [None, None]:
            table.add_row(Text(name), *("" if value is None else f"{value:.3f}" for value in values))
    console.print(table)
    if result.num_failed:
        told = "they count as wrong, with the reward rewards.failure_reward"
        console.print(f"{result.num_failed} answers could not be scored: {told}", style="yellow")
        for reason, count in list(result.failures.items())[:MAX_FAILURES]:
            console.print(Text(f"  {count} x {printable(reason, MAX_FAILURE_CHARS)}", "yellow"), soft_wrap=True)
        if (num_left := len(result.failures) - MAX_FAILURES) > 0:
            console.print(f"  and {num_left} more reasons", style="yellow")
    for answer in result.greedy_answers[:MAX_SHOWN]:
        _show_episode(answer, console)


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
    return rows + _rows_of_episodes(result)


def _rows_of_episodes(result: EvalResult) -> list[tuple[str, float | None, float | None]]:
    """Return the lines about episodes, those of single environments last; none without an environment."""
    greedy, sampled = result.episodes, result.sampled_episodes
    if greedy is None or sampled is None:
        return []
    rows: list[tuple[str, float | None, float | None]] = [
        ("turns", greedy.num_turns, sampled.num_turns),
        ("cut by a limit", greedy.cut_frac, sampled.cut_frac),
    ]
    if greedy.num_tool_calls or sampled.num_tool_calls:
        rows.append(("calls of tools", greedy.num_tool_calls, sampled.num_tool_calls))
    if greedy.num_tool_errors or sampled.num_tool_errors:
        rows.append(("  with an error", greedy.num_tool_errors, sampled.num_tool_errors))
    rows += [(f"reward in {name}", value, sampled.rewards.get(name)) for name, value in greedy.rewards.items()]
    return rows


def _show_episode(answer: HeldOutAnswer, console: Console) -> None:
    """Print who said what in an episode, a line each; nothing of an answer of one turn."""
    if answer.episode is None:
        return
    console.print(Text(f"\n{printable(answer.prompt)} -> reward {answer.reward:.3f}", "bold"), soft_wrap=True)
    console.print(Text(as_lines(answer.episode.turns)), soft_wrap=True)
