"""The display of a run that goes on: a live picture on a terminal, a line now and then elsewhere.

Every method takes constant time and draws at most `REFRESHES_PER_S` times a second, in the caller's thread, so the
display never holds up the loop that feeds it.
"""

from __future__ import annotations

import sys
import unicodedata
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any, Self

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from slipstream.core.clock import Clock, WallClock
from slipstream.core.config import RunConfig
from slipstream.core.held_out import Measured
from slipstream.core.plain import plural
from slipstream.core.ranks import split_rank_name
from slipstream.observe.evaluation import MOMENTS, evaluation_rows
from slipstream.observe.outlet import Outlet, is_terminal
from slipstream.observe.samples import Sample
from slipstream.observe.states import UNLABELLED, colour, in_words, is_missed, shares
from slipstream.observe.summary import Summary
from slipstream.observe.timeline import TIME_PREFIX
from slipstream.observe.transcript import TranscriptPart, beginning

REFRESHES_PER_S = 4.0
LINE_EVERY_S = 2.0
MAX_PARTS = 12  # of an episode's transcript
MAX_NAMED = 8  # processes that are ready; of more, the others are not named
WINDOW_S = 10.0  # who waits for whom: over this many recent seconds
_BARS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 40
_BAR_WIDTH = 40


def config_summary(config: RunConfig) -> dict[str, str]:
    """The few lines of a configuration that a user wants to see again."""
    model = config.model.path or f"{config.model.family}, {config.model.num_layers} x {config.model.hidden_size}"
    tasks = ", ".join(task.name for task in config.prompts.tasks) or str(config.prompts.dataset)
    bound = config.staleness_bound
    promise = f"{config.schedule.policy}, no bound" if bound is None else f"staleness <= {bound}"
    if bound == 0:
        promise = "synchronous: staleness 0"
    adapters = {"adapters": config.model.lora.in_words} if config.model.lora.is_set else {}
    return {
        "recipe": config.recipe,
        "seed": str(config.seed),
        "model": model,
        **adapters,
        "task": tasks,
        "batch": f"{config.groups_per_step} prompts x {config.completions_per_group} completions",
        "mode": f"{config.weight_update}, {promise}",
    }


class Display:
    """Shows a run. `steps` is how many there will be, `max_staleness` the bound if any, `summary` the headline."""

    def __init__(
        self,
        summary: Mapping[str, str],
        *,
        steps: int,
        max_staleness: int | None,
        console: Console | None = None,
        clock: Clock | None = None,
    ) -> None:
        # A notebook's kernel asks for colours (FORCE_COLOR), but what it shows is not a terminal.
        self._console = console or Console(force_jupyter=False, force_terminal=is_terminal())
        self._outlet = sys.stdout if isinstance(sys.stdout, Outlet) and console is None else None
        self._clock = clock or WallClock()
        self.is_live = (
            self._console.is_terminal
            and not self._console.is_dumb_terminal
            and self._console.encoding.startswith("utf")
        )
        self._headline = summary
        self._steps = steps
        self._bound = "none" if max_staleness is None else str(max_staleness)
        self._live: Live | None = None
        self._start_s = self._drawn_s = self._clock.now_s()
        self._first_step_s: float | None = None
        self._first_step = 0
        self._phase: tuple[str, int, int, list[str]] | None = None
        self._phase_began = (0.0, 0)  # seconds, and how much was done
        self._metrics: dict[str, Any] = {}
        self._reward: float | None = None
        self._knows_scored = False
        self._trained: deque[tuple[float, float]] = deque(maxlen=10)  # (tokens, seconds) of the last steps
        self._num_done = self._num_ready = 0
        self._spark: list[tuple[float, int]] = [(0.0, 0)] * min(_SPARK_WIDTH, steps)
        self._evaluations: deque[tuple[str, Measured]] = deque(maxlen=8)
        self._first_evaluation: tuple[str, Measured] | None = None
        self._totals: dict[str, deque[tuple[float, dict[str, float]]]] = {}
        self._replicas: dict[int, int] = {}
        self._say("   ".join(f"{name} {value}" for name, value in summary.items()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ready(self, executor: str) -> None:
        """`executor` has loaded what it needs."""
        self._num_ready += 1
        if self._num_ready <= MAX_NAMED:
            self.note(f"{executor}: ready after {self._clock.now_s() - self._start_s:.1f} s")

    def phase(self, name: str, done: int, total: int, metrics: Mapping[str, float] | None = None) -> None:
        """Progress of something outside the RL loop: the warm start, an evaluation, the export."""
        is_new = self._phase is None or self._phase[0] != name
        values = [f"{key} {value:.3g}" for key, value in (metrics or {}).items()]
        now_s = self._clock.now_s()
        if is_new:
            self._phase_began = (now_s, done)
        began_s, first = self._phase_began
        if first < done < total:
            values.append(f"{duration((now_s - began_s) / (done - first) * (total - done))} left")
        self._phase = (name, done, total, values)
        if self._is_due(force=is_new or done == total):
            self._update("  ".join([f"{name} {done}/{total}", *values]))

    def step(self, metrics: Mapping[str, Any]) -> None:
        """A step is done; `metrics` is its line of `metrics.jsonl` (names in `observe/metrics.toml`)."""
        now_s = self._clock.now_s()
        self._phase = None
        self._metrics = dict(metrics)
        if metrics.get("step_s") and "tokens_trained" in metrics:  # one step may train what was sampled long before
            self._trained.append((metrics["tokens_trained"], metrics["step_s"]))
            tokens, seconds = map(sum, zip(*self._trained, strict=True))
            self._metrics["trained_tokens_per_s"] = tokens / seconds
        step = int(metrics["step"])
        self._num_done = step + 1
        if self._first_step_s is None:
            self._first_step_s, self._first_step = now_s, step
        if "scored_reward_mean" in metrics or not self._knows_scored:  # of all completions, else of trained groups
            self._knows_scored = "scored_reward_mean" in metrics
            self._reward = metrics.get("scored_reward_mean", metrics.get("reward"))
        if (reward := self._reward) is not None and 0 <= step < self._steps:
            bucket = step * len(self._spark) // self._steps
            total, count = self._spark[bucket]
            self._spark[bucket] = (total + float(reward), count + 1)
        if self._is_due(force=self._num_done in (1, self._steps)):
            self._update(self._step_line())

    def evaluation(self, label: str, found: Measured) -> None:
        """A held-out evaluation finished; `label` says of which weights ("before", "step 40", "after")."""
        self._first_evaluation = self._first_evaluation or (label, found)
        self._evaluations.append((label, found))
        self._say(f"held-out {found.headline[0]} {label}: {in_numbers(found)}")

    def counters(self, executor: str, values: Mapping[str, float]) -> None:
        """`Counters` of an executor; `time/<state>` are its seconds so far in each state (`Timeline.totals`)."""
        now_s = self._clock.now_s()
        totals = {k.removeprefix(TIME_PREFIX): v for k, v in values.items() if k.startswith(TIME_PREFIX)}
        if totals:
            history = self._totals.setdefault(executor, deque(maxlen=64))
            if history and any(totals.get(state, 0.0) < seconds for state, seconds in history[-1][1].items()):
                history.clear()  # a new process, which counts from 0
            history.append((now_s, totals))
            while len(history) > 2 and now_s - history[1][0] >= WINDOW_S:
                history.popleft()
        if self._live is not None and self._is_due():
            self._update("")

    def swapped(self, replica: int, version: int) -> None:
        """Generator `replica` samples from `version` now."""
        self._replicas[replica] = version

    def lost(self, replica: int) -> None:
        """Generator `replica` is gone."""
        self._replicas.pop(replica, None)
        for name in [name for name in self._totals if split_rank_name(name)[0] == f"generator-{replica}"]:
            del self._totals[name]

    def note(self, text: str) -> None:
        """Something the user should read: a warning, a checkpoint."""
        self._say(printable(in_one_line(text), limit=2000))

    def samples(self, samples: Iterable[Sample]) -> None:
        """Print the answers to the same prompts before and after training."""
        table = Table(title="samples", title_justify="left", show_edge=False, pad_edge=False)
        samples = list(samples)
        has_after = any(one.after is not None or one.after_turns is not None for one in samples)
        columns = ("prompt", "answer", "before", "after")[: None if has_after else -1]
        for name in columns:
            table.add_column(name, overflow="fold")
        for one in samples:
            ends = (_said(one.before, one.before_turns), _said(one.after, one.after_turns))
            cells = (printable(one.prompt), printable(one.answer or ""), *ends)
            table.add_row(*(Text(self._encodable(cell)) for cell in cells[: len(columns)]))
        if table.row_count:
            self._print(table)

    def evaluation_table(self, evaluation: Mapping[str, Any]) -> None:
        """Print the findings of the stage `evaluate`, before and after (`observe/evaluation.py`)."""
        self.close()
        title = f"{evaluation['num_prompts']} held-out prompts, temperature {evaluation['temperature']:g}"
        self._print(_of_moments(title, ([*map(self._encodable, row)] for row in evaluation_rows(evaluation))))

    def finish(self, summary: Summary, files: Mapping[str, Path]) -> None:
        """End the live picture; print the table before/after, the cost, and where the files are."""
        self.close()
        if (table := _before_after(summary)).row_count:
            self._print(table)
        if (sentence := summary.eval.never_right) is not None:
            self._say(sentence)
        staleness, rates = summary.staleness, _rates(msgspec.to_builtins(summary.throughput))
        told = "".join(f"  {word} {rate} tokens/s" for word, rate in rates.items())
        ended = "" if summary.stopped_because is None else f", ended by {summary.stopped_because},"
        took = duration(summary.total_s)
        if summary.earlier_s:
            took += f", {duration(summary.earlier_s)} of it before the resume"
        self._say(f"{summary.status}: {plural(summary.steps, 'step')}{ended} in {took}{told}")
        if summary.adapter_params:
            self._say(f"{self._headline.get('adapters', 'LoRA')}, {summary.trainable}")
        if (best := summary.best) is not None:
            self._say(f"best: held-out {best.metric} {best.value:.3f} at step {best.version}")
        if staleness.histogram:
            self._say(f"staleness mean {staleness.mean:.2f}  max {staleness.max}  bound {self._bound} (steps)")
        if summary.rows is not None:
            self._say(f"the trainer computed {summary.rows.in_words}")
        if summary.accounting:
            self._say("the time of each process, from its start to its end:")
        for process, seconds in summary.accounting.items():
            self._say(f"{process}: " + ", ".join(f"{in_words(s)} {p:.0%}" for s, p in shares(seconds)[:4]))
        if summary.model_share is not None:
            told = f"model: {summary.model_share:.0%} of the working time of all processes"
            if summary.model_cpu_share is not None:
                told += f", {summary.model_cpu_share:.0%} of their CPU time"
            self._say(told)
        if summary.prompts.failed_completions:
            failed = plural(summary.prompts.failed_completions, "completion")
            told = "could not be scored, and counted with rewards.failure_reward: see `failure` in rollouts.jsonl"
            self._say(f"{failed} {told}")
        if summary.balance is not None and summary.balance.verdict:
            self._say("while steps were trained, without start and end:")
            self._say(summary.balance.verdict)
        for name, path in files.items():
            look = f"   look: tensorboard --logdir {quote(str(path))}" if name == "tensorboard" else ""
            self._say(f"{name:<10} {path}{look}")
        if "model" in files:
            out = quote(str(files["model"].parent))
            self._say(f"next: slipstream eval {out}   slipstream serve {out}   slipstream export {out} FOLDER")

    def close(self) -> None:
        """Stop drawing and give the terminal back. May be called twice."""
        if self._live is not None:
            self._live.update(self._picture(), refresh=True)
            self._live.stop()
            self._live = None

    def waits(self) -> dict[str, list[tuple[str, float]]]:
        """For each process, (state, share) over the recent window, largest first."""
        recent = {}
        for process, history in self._totals.items():
            (then_s, then), (now_s, now) = history[0], history[-1]
            if now_s > then_s:
                seconds = {state: value - then.get(state, 0.0) for state, value in now.items()}
                seconds[UNLABELLED] = max(0.0, now_s - then_s - sum(seconds.values()))
                recent[process] = shares(seconds)
        return recent

    def _is_due(self, *, force: bool = False) -> bool:
        interval_s = 1.0 / REFRESHES_PER_S if self.is_live else LINE_EVERY_S
        now_s = self._clock.now_s()
        if now_s - self._drawn_s < interval_s and not (force and not self.is_live):
            return False
        self._drawn_s = now_s
        return True

    def _update(self, line: str) -> None:
        if self.is_live and self._outlet is not None:
            if self._outlet.why_lost:  # a log has no pictures
                self.close()
                self.is_live = False
            elif self._outlet.is_behind:
                return
        if not self.is_live:
            self._say(line)
            return
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=False)
            self._live.start()
        self._live.update(self._picture(), refresh=True)

    def _say(self, line: str) -> None:
        self._print(Text(self._encodable(line)))

    def _print(self, renderable: RenderableType) -> None:
        self._console.print(renderable, soft_wrap=isinstance(renderable, Text), highlight=False)

    def _encodable(self, text: str) -> str:
        encoding = self._console.encoding
        return text.encode(encoding, "backslashreplace").decode(encoding)

    def _eta_s(self) -> float | None:
        """Seconds left at the mean pace since the first step; None before the second."""
        done: int = self._num_done - 1 - self._first_step
        if self._first_step_s is None or done < 1:
            return None
        pace_s = (self._clock.now_s() - self._first_step_s) / done
        return pace_s * (self._steps - self._num_done)

    def _step_line(self) -> str:
        m = self._metrics
        parts = [f"step {self._num_done}/{self._steps}"]
        if self._reward is not None:
            parts.append(f"reward {self._reward:.3f}")
        if self._evaluations:
            label, found = self._evaluations[-1]
            name, value = found.headline
            parts.append(f"held-out {name} {_cell(value)} {'at step 0' if label == 'before' else label}")
        if m.get("staleness_mean") is not None:
            parts.append(f"staleness {m['staleness_mean']:.2f} (max {m['staleness_max']:.0f}, bound {self._bound})")
        parts += [f"{word} {rate} tokens/s" for word, rate in _rates(m).items()]
        for process, states in self.waits().items():
            state, share = next(((s, p) for s, p in states if is_missed(s)), ("", 0.0))
            if share >= 0.05:
                parts.append(f"{process} {in_words(state)} {share:.0%}")
        if (eta_s := self._eta_s()) is not None and self._num_done < self._steps:
            parts.append(f"{duration(eta_s)} left")
        return "  ".join(parts)

    def _picture(self) -> RenderableType:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(no_wrap=True, overflow="ellipsis")
        elapsed = duration(self._clock.now_s() - self._start_s)
        if self._phase is not None:
            name, done, total, values = self._phase
            grid.add_row(name, _progress(done, total, "  ".join([f"{done}/{total}", elapsed, *values])))
        if self._num_done:
            left = "" if (eta_s := self._eta_s()) is None else f"  {duration(eta_s)} left"
            label = f"{self._num_done}/{self._steps}  {elapsed}{left}"
            grid.add_row("steps", _progress(self._num_done, self._steps, label))
            grid.add_row("reward", self._reward_text())
        if self._evaluations and self._first_evaluation:
            (label, found), (first_label, first) = self._evaluations[-1], self._first_evaluation
            name, value = found.headline
            text = Text().append(_cell(value), style="bold").append(f"  {name}, {label}", style="dim")
            if first_label != label:
                text.append(f"   was {_cell(first.headline[1])} {first_label}", style="dim")
            grid.add_row("held-out", text)
        m = self._metrics
        if len(rates := _rates(m)) == 2:
            grid.add_row("tokens/s", Text("   ".join(f"{word} {rate}" for word, rate in rates.items())))
        if m.get("staleness_mean") is not None:
            ages = f"mean {m['staleness_mean']:.2f}   max {m['staleness_max']:.0f}   bound {self._bound}"
            grid.add_row("staleness", Text(ages))
        if self._replicas:
            held = "   ".join(f"generator {replica}: {version}" for replica, version in sorted(self._replicas.items()))
            grid.add_row("weights", Text(f"trainer: {m.get('version', 0)}   {held}"))
        for process, states in self.waits().items():
            grid.add_row(process, _state_bar(states))
        title = "  ".join(self._headline.values())
        return Group(Text(f"slipstream  {title}", style="bold", no_wrap=True, overflow="ellipsis"), grid)

    def _reward_text(self) -> Text:
        means = [total / count for total, count in self._spark if count]
        text = Text().append("" if self._reward is None else f"{self._reward:.3f}  ", style="bold")
        return text.append(sparkline(means), style="green")


def sparkline(values: list[float]) -> str:
    """`values` as bars between their minimum and maximum."""
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)


def duration(seconds: float) -> str:
    """`75` as "1 min 15 s"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def printable(text: str, limit: int = 160) -> str:
    """`text` on one line without control characters (model text must not steer the terminal), cut to `limit`."""
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    return "".join(
        char.encode("unicode_escape").decode() if unicodedata.category(char) in ("Cc", "Cf", "Zl", "Zp", "Cs") else char
        for char in cut
    )


def in_one_line(text: str) -> str:
    """Return `text` as it is, or its lines as one: an error has a line for each of its parts."""
    lines = text.splitlines()
    return text if len(lines) < 2 else "; ".join(" ".join(line.split()) for line in lines if line.strip())


def _said(answer: str | None, turns: Sequence[TranscriptPart] | None) -> str:
    """Return an answer on one line, or the messages of an episode, a line each."""
    return printable(answer or "") if turns is None else as_lines(turns)


def as_lines(turns: Sequence[TranscriptPart]) -> str:
    """Return the beginning of an episode: who said what, a printable line each."""
    shown = beginning(turns, max_parts=MAX_PARTS, max_chars=MAX_PARTS * 160)
    lines = ((one.role if one.reward is None else f"{one.role} ({one.reward:g})", one.text) for one in shown)
    return "\n".join(f"{printable(who)}: {printable(what)}" for who, what in lines)


def _progress(done: int, total: int, label: str) -> Table:
    row = Table.grid(padding=(0, 2))
    row.add_row(ProgressBar(total=max(total, 1), completed=done, width=_BAR_WIDTH), Text(label))
    return row


def _state_bar(states: list[tuple[str, float]]) -> Text:
    text = Text()
    used = 0
    for state, share in states:
        width = min(round(share * _BAR_WIDTH), _BAR_WIDTH - used)
        used += width
        text.append("█" * width, style=colour(state))
    text.append(" " * (_BAR_WIDTH - used))
    for state, share in states[:3]:
        text.append("  ■ ", style=colour(state)).append(f"{in_words(state)} {share:.0%}")
    return text


def _rates(values: Mapping[str, Any]) -> dict[str, str]:
    """Sampled and trained tokens a second, those that are known."""
    found = {word: values.get(f"{word}_tokens_per_s") for word in ("generated", "trained")}
    return {word: f"{rate:,.0f}" for word, rate in found.items() if rate is not None}


def _of_moments(title: str, rows: Iterable[Sequence[str]]) -> Table:
    """A table of names and their numbers before and after."""
    table = Table(title=title, title_justify="left", show_edge=False)
    for column in ("", *MOMENTS):
        table.add_column(column, justify="right" if column else "left")
    for name, *cells in rows:
        table.add_row(Text(name), *cells)
    return table


def _before_after(summary: Summary) -> Table:
    evaluations = (summary.eval.before, summary.eval.after)
    num_prompts = next((one.num_prompts for one in reversed(evaluations) if one is not None), 0)
    rows = []
    for how in ("greedy", "sampled"):
        pair = [Measured() if one is None else one.greedy if how == "greedy" else one.sampled for one in evaluations]
        found = [("accuracy", [one.accuracy for one in pair]), ("reward", [one.reward for one in pair])]
        names = list(dict.fromkeys(name for one in pair for name in one.reward_parts))
        if len(names) > 1:
            found += [(f"  {printable(name)}", [one.reward_parts.get(name) for one in pair]) for name in names]
        rows += [[f"{name}, {how}", *map(_cell, values)] for name, values in found if values != [None, None]]
    return _of_moments(f"{summary.recipe}, {num_prompts} held-out prompts", rows)


def in_numbers(found: Measured) -> str:
    """Return the headline's value, then the mean reward where it is another one, and its parts where it has several."""
    name, value = found.headline
    told = _cell(value) + ("" if name == "reward" or found.reward is None else f"  reward {found.reward:.3f}")
    if len(found.reward_parts) > 1:
        told += f" ({', '.join(f'{part} {mean:.3f}' for part, mean in found.reward_parts.items())})"
    return printable(told, limit=2000)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
