"""Alarms: whether the numbers of a run look like those of a run that goes well, step by step, in plain words.

`Health` is pure and incremental: lines of `metrics.jsonl` in, alarms out; no clock, no I/O, bounded memory. Each alarm
watches one statistic of recent steps, robust against single outliers where it looks at a level. It begins when the
statistic is beyond its threshold for some steps in a row, and ends when it has been back, by a margin, for as many: one
line at the beginning and one at the end, however noisy the number between them.

An alarm is a suspicion, not a verdict. Nothing is changed by one, unless `health.stop_on` names it. Of what a
configuration has chosen none rings (`unfit`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from slipstream.core.config import RunConfig
from slipstream.core.errors import AlarmError
from slipstream.core.jsonl import JsonlWriter, read_jsonl
from slipstream.core.observe_sections import AlarmName, HealthConfig
from slipstream.core.plain import shortened
from slipstream.observe import trends
from slipstream.observe.trends import History

ALARMS_FILE = "alarms.jsonl"
_FAILURE_CHARS = 300  # of an exception's text, in an alarm

WATCHED_STEPS = 42
"""Steps after which every alarm could have rung: the longest window is one of 40, and it takes three in a row."""

Severity = Literal["notice", "warning"]


class Alarm(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `alarms.jsonl`: alarm `name` began or ended at `step`, its statistic being `value`."""

    step: int
    name: AlarmName
    event: Literal["began", "ended"]
    severity: Severity
    value: float
    threshold: float
    text: str


class AlarmSpan(msgspec.Struct, frozen=True, kw_only=True):
    """An alarm from the step it began at to the one it ended at; `ended` is None where it was on at the end."""

    name: AlarmName
    severity: Severity
    began: int
    ended: int | None
    value: float
    threshold: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Rule:
    """An alarm: on beyond `threshold` for `persist` steps in a row, off again behind `clears` of it for as many.

    `is_low`: what is below the threshold is bad. `watches`, `meaning` and `advice` are for people; `reason` is why the
    threshold is where it is.
    """

    function: Callable[..., float | None]
    arguments: Sequence[Any]
    threshold: float
    watches: str
    meaning: str
    advice: str
    reason: str
    severity: Severity = "warning"
    is_low: bool = False
    clears: float = 0.8
    persist: int = 3

    def statistic(self, history: History) -> float | None:
        """Return `function` of the steps and of its `arguments`; None while there are too few steps."""
        return self.function(history, *self.arguments)

    def is_beyond(self, value: float, threshold: float) -> bool:
        return value < threshold if self.is_low else value >= threshold

    def is_back(self, value: float, threshold: float) -> bool:
        return value > threshold / self.clears if self.is_low else value < threshold * self.clears


def _read_rules() -> dict[AlarmName, Rule]:
    tables = tomllib.loads(Path(__file__).with_name("alarms.toml").read_text(encoding="utf-8"))
    found: dict[AlarmName, Rule] = {}
    for name, table in tables.items():
        function, *given = table.pop("statistic")
        found[name] = Rule(function=getattr(trends, function), arguments=given, **table)  # type: ignore[index]
    return found


RULES = _read_rules()
"""The alarms, of `alarms.toml`."""


def unfit(config: RunConfig) -> frozenset[AlarmName]:
    """Alarms that would ring for what the configuration has chosen, whose advice it has declined.

    In one process executors wait for each other's turns, and at staleness 0 trainer and generators take turns. A
    schedule that promises no bound has none that a replica could be behind. Weights in 4 or 8 bits are another model.
    Samples from a part of the vocabulary are more likely than the whole policy says, by the part's probability.
    """
    found: set[AlarmName] = set()
    if config.generator.truncates and not config.generator.keep_sets:
        found |= {"logprob_mismatch", "logprob_mismatch_growing", "policy_drift", "ess_collapse"}
    if config.generator.precision in ("int8", "fp8", "mxfp4"):
        found.add("logprob_mismatch")
    if config.host == "inline":
        found |= {"starving_trainer", "starving_generator", "straggler"}
    if config.takes_turns:
        found |= {"starving_trainer", "starving_generator"}
    if config.staleness_bound is None:
        found.add("version_lag")
    return frozenset(found)


@dataclass
class _State:
    is_on: bool = False
    num_turning: int = 0  # steps in a row that ask for the other state


class Health:
    """All alarms of a run. `update` takes one line of `metrics.jsonl` and says which began and which ended with it.

    Those of `silent` never do.
    """

    def __init__(self, config: HealthConfig, *, silent: Collection[AlarmName] = ()) -> None:
        self._config = config
        self._history = History()
        self._states = {name: _State() for name in RULES if name not in silent}

    def update(self, metrics: Mapping[str, Any]) -> list[Alarm]:
        """Take a step's metrics, in order of steps. Lines of evaluations are passed over."""
        if not self._config.alarms or "step_s" not in metrics:
            return []
        self._history.add(metrics)
        found = (self._turned(name, int(metrics["step"])) for name in self._states)
        return [alarm for alarm in found if alarm is not None]

    def failed(self, step: int, count: int, num_scored: int, failure: str) -> list[Alarm]:
        """Take that `count` of `num_scored` completions have failed by now, the last one with `failure`."""
        detail = f"{count:,} of {num_scored:,} completions so far, the last: {shortened(failure, _FAILURE_CHARS)}"
        return self._counted("failed_rewards", "failed_completions", step, count, detail)

    def without_signal(self, step: int, count: int, rewards: tuple[float, float]) -> list[Alarm]:
        """Take that the last `count` groups had no signal, their mean rewards lying between those two."""
        least, most = (f"{reward:.3g}" for reward in rewards)
        detail = f"the last {count:,} groups, rewards of {least}{'' if least == most else f' to {most}'}"
        return self._counted("equal_rewards", "no_signal_in_a_row", step, count, detail)

    def _counted(self, name: AlarmName, metric: str, step: int, count: int, detail: str) -> list[Alarm]:
        """Take the value of a metric that counts what may happen before any step is done."""
        if not self._config.alarms:
            return []
        self._history.add({metric: count})
        alarm = self._turned(name, step, detail)
        return [] if alarm is None else [alarm]

    def _turned(self, name: AlarmName, step: int, detail: str = "") -> Alarm | None:
        rule, state = RULES[name], self._states[name]
        value = rule.statistic(self._history)
        if value is None:
            return None
        threshold = self._config.thresholds.get(name, rule.threshold)
        turns = rule.is_back(value, threshold) if state.is_on else rule.is_beyond(value, threshold)
        state.num_turning = state.num_turning + 1 if turns else 0
        if state.num_turning < rule.persist:
            return None
        state.is_on, state.num_turning = not state.is_on, 0
        return Alarm(
            step=step,
            name=name,
            event="began" if state.is_on else "ended",
            severity=rule.severity,
            value=value,
            threshold=threshold,
            text=f"{rule.meaning} ({detail or f'{value:.3g}, threshold {threshold:g}'}). Try: {rule.advice}.",
        )


class Watchman:
    """The alarms of the run in `run_dir`: each goes to `alarms.jsonl` and to all `sinks`; those of `health.stop_on` end
    the run.

    After a resume it has seen the steps that `metrics.jsonl` still holds, and rings for none of them again.
    """

    def __init__(
        self,
        config: HealthConfig,
        run_dir: Path,
        *,
        sinks: Sequence[Callable[[Alarm], None]] = (),
        silent: Collection[AlarmName] = (),
    ) -> None:
        self._config = config
        self._sinks = sinks
        self.health = Health(config, silent=silent)
        self._run_dir = run_dir
        for line in read_jsonl(run_dir / "metrics.jsonl", dict[str, Any]):
            self.health.update(line)
        self._writer = JsonlWriter(run_dir / ALARMS_FILE)

    def tell(self, alarms: list[Alarm]) -> list[Alarm]:
        """Write alarms of `health`, give them to the sinks, and return them. AlarmError for one that ends the run."""
        self._writer.write(*alarms)
        for alarm in alarms:
            for sink in self._sinks:
                sink(alarm)
        for alarm in alarms:
            if alarm.event == "began" and alarm.name in self._config.stop_on:
                what = f"the alarm '{alarm.name}' began at step {alarm.step}, on which health.stop_on ends the run"
                got = f"{alarm.value:.3g}, threshold {alarm.threshold:g}"
                raise AlarmError(what, got=got, hint=f"{alarm.text} See {self._run_dir / ALARMS_FILE}")
        return alarms

    def close(self) -> None:
        self._writer.close()


def in_a_line(alarm: Alarm) -> str:
    """Return the line of an alarm for a log."""
    if alarm.event == "ended":
        return f"alarm ended at step {alarm.step}: {alarm.name} ({alarm.value:.3g}, threshold {alarm.threshold:g})"
    return f"{alarm.severity} at step {alarm.step}: {alarm.name}. {alarm.text}"


def read_alarms(path: Path) -> list[Alarm]:
    """All lines of `alarms.jsonl`; none for a missing file."""
    return list(read_jsonl(path, Alarm))


def spans(alarms: Iterable[Alarm]) -> list[AlarmSpan]:
    """Beginnings joined with their ends, by the step they began at."""
    found: list[AlarmSpan] = []
    open_at: dict[AlarmName, int] = {}
    for alarm in alarms:
        if alarm.event == "began":
            open_at[alarm.name] = len(found)
            begun = msgspec.to_builtins(alarm) | {"began": alarm.step, "ended": None}
            found.append(msgspec.convert(begun, AlarmSpan))
        elif (index := open_at.pop(alarm.name, None)) is not None:
            found[index] = msgspec.structs.replace(found[index], ended=alarm.step)
    return found
