"""What the files of a run say, in the shape in which the report draws it. Bounded work, however long the run."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import msgspec

from slipstream.core.errors import ConfigError
from slipstream.core.files import load_json
from slipstream.core.held_out import Measured
from slipstream.core.jsonl import sample_jsonl
from slipstream.core.recipes import read_toml
from slipstream.core.run_lock import is_held
from slipstream.core.run_log import Metrics, Outcome, RolloutLine, read_metrics
from slipstream.core.sections import HARD_BOUND
from slipstream.observe.attempts import read_attempts
from slipstream.observe.evaluation import EVALUATION_FILE
from slipstream.observe.health import ALARMS_FILE, AlarmSpan, read_alarms, spans
from slipstream.observe.noise import Estimate, share
from slipstream.observe.report.times import Times, earlier_s, read_times
from slipstream.observe.samples import Sample, read_samples
from slipstream.observe.states import side_of
from slipstream.observe.summary import Evaluations, Summary, read_summary
from slipstream.observe.svg import Axis, Point, Series

Clock = Literal["step", "tokens", "time"]
CLOCKS: tuple[Clock, ...] = ("step", "tokens", "time")
MAX_SAMPLES = 12
STALENESS = "staleness_tokens/lag_"
RATIOS = "ratio_share/"


class Length(msgspec.Struct, frozen=True):
    """What the lengths need of a line of `rollouts.jsonl`."""

    step: int | None
    outcome: Outcome
    num_tokens: int


@dataclass(frozen=True)
class History:
    """The lines of `metrics.jsonl`: of steps, and of evaluations. x is what a `Clock` shows when a step is done.

    `tokens` counts those trained on; `time` is seconds since RL began (its first admission), the warm start excluded.
    """

    steps: list[Metrics]
    evaluations: list[Metrics]

    @classmethod
    def of(cls, lines: Sequence[Metrics]) -> History:
        return cls([m for m in lines if is_number(m.get("step_s"))], [m for m in lines if m.get("step_s") is None])

    @cached_property
    def clocks(self) -> dict[Clock, list[float]]:
        """Of each step."""
        began_s = self.steps[0]["wall_s"] - self.steps[0]["step_s"] if self.steps else 0.0
        tokens, total = [], 0.0
        for line in self.steps:
            total += line.get("tokens_trained") or 0.0
            tokens.append(total)
        return {
            "step": [float(line["step"]) for line in self.steps],
            "tokens": tokens,
            "time": [line["wall_s"] - began_s for line in self.steps],
        }

    @cached_property
    def _made(self) -> dict[int, int]:
        """Version -> index of the step that made it."""
        return {int(line["version"]): index for index, line in enumerate(self.steps)}

    def points(self, name: str, clock: Clock = "step") -> list[Point]:
        """A metric of the steps; what is missing or was no number is left out."""
        xs = self.clocks[clock]
        return [(x, float(line[name])) for x, line in zip(xs, self.steps, strict=True) if is_number(line.get(name))]

    def evaluated(self, name: str, clock: Clock = "step") -> list[Point]:
        """A metric of the evaluations, at what the clock showed when the version it is of was made."""
        found: dict[float, float] = {}
        for line in self.evaluations:
            if is_number(line.get(name)):
                version = int(line["version"])
                index = self._made.get(version)
                if index is None and version > 0 and clock != "step":
                    continue
                x = float(version) if clock == "step" else 0.0 if index is None else self.clocks[clock][index]
                found[x] = float(line[name])
        return sorted(found.items())

    def names(self, prefix: str) -> list[str]:
        """Metrics that begin so, in their order."""
        return list(dict.fromkeys(name for line in self.steps for name in line if name.startswith(prefix)))

    def has(self, name: str) -> bool:
        return any(is_number(line.get(name)) for line in self.steps)

    def window(self) -> int:
        """How many neighbours a noisy curve of this many steps is smoothed over."""
        return max(3, len(self.steps) // 15 | 1) if len(self.steps) >= 20 else 1

    def last(self, name: str) -> float | None:
        return next((float(line[name]) for line in reversed(self.steps) if is_number(line.get(name))), None)


@dataclass(frozen=True)
class Run:
    """A run as the report sees it; `summary` is None as long as it goes on, and where it was killed."""

    path: Path
    config: dict[str, Any]
    history: History
    summary: Summary | None
    times: Times
    samples: list[Sample]
    alarms: list[AlarmSpan]
    lengths: list[Length]
    evaluation: Mapping[str, Any] | None
    written_s: float  # seconds since the newest line of metrics.jsonl
    is_held: bool = False  # whether a process holds the folder's lock
    num_attempts: int = 1
    earlier_s: float | None = 0.0  # what the attempts before the last one took; None where that is not known

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def recipe(self) -> str:
        return str(self.config.get("recipe", self.name))

    @property
    def wall_s(self) -> float | None:
        """Seconds of all attempts, what was abandoned included; None where they are not known."""
        return None if self.earlier_s is None else (self.earlier_s + self.times.wall_s) or None

    @cached_property
    def rewarded(self) -> object:
        """What decides whether two runs' rewards mean the same: where prompts come from, and what scores them.

        Of functions that were given from Python only the names of their terms are known.
        """
        prompts, given = self.config.get("prompts"), self.path / "prompts.jsonl"
        if prompts is not None and given.is_file():  # its path is the run's own
            prompts = prompts | {"dataset": hashlib.sha256(given.read_bytes()).hexdigest()}
        return prompts, self.config.get("rewards"), set(self.history.names("reward_parts/"))

    @property
    def wasted(self) -> dict[str, int]:
        """Tokens by cause, those that there were; empty where it is not known."""
        balance = self.times.balance
        return {} if balance is None else {cause: tokens for cause, tokens in balance.wasted_tokens.items() if tokens}

    @property
    def wasted_share(self) -> float | None:
        """Wasted tokens over those trained on. What was left when the run ended goes on with it, and is no waste."""
        trained = sum(self.history.clocks["tokens"][-1:])
        wasted = sum(tokens for cause, tokens in self.wasted.items() if cause != "left")
        return wasted / trained if trained and self.times.balance is not None else None

    @property
    def bound(self) -> int | None:
        """What the schedule promises of staleness, in steps; None where that is nothing."""
        if self.summary is not None:
            return self.summary.staleness.bound
        policy = self.config.get("schedule", {}).get("policy", HARD_BOUND[0])
        return self.config.get("max_staleness") if policy in HARD_BOUND else None

    @cached_property
    def staleness(self) -> dict[int, float]:
        """Tokens trained on, by staleness in steps."""
        counts: Counter[int] = Counter()
        for line in self.history.steps:
            for name, count in line.items():
                if name.startswith(STALENESS):
                    counts[int(name.removeprefix(STALENESS))] += count
        return dict(sorted(counts.items()))

    @property
    def mean_staleness(self) -> float | None:
        total = sum(self.staleness.values())
        return sum(lag * count for lag, count in self.staleness.items()) / total if total else None

    @property
    def max_staleness(self) -> int | None:
        return max(self.staleness, default=None)

    @property
    def held_out(self) -> tuple[Measured, Measured]:
        """What greedy answers to held-out prompts came to: of version 0 and of the last one."""
        found = Evaluations() if self.summary is None else self.summary.eval
        before, after = (Measured() if one is None else one.greedy for one in (found.before, found.after))
        return before, after

    @property
    def held_out_score(self) -> Estimate | None:
        """The held-out score of the last version, with the error of so many prompts."""
        after = None if self.summary is None else self.summary.eval.after
        return None if after is None or after.accuracy is None else share(after.accuracy, after.num_prompts)

    def idle(self, side: str) -> float | None:
        """Share of their time in the loop that the processes of a side waited, the mean over them."""
        found = {} if self.times.balance is None else self.times.balance.idle
        shares = [idle for name, idle in found.items() if side_of(name) == side]
        return fmean(shares) if shares else None


def check_run(run_dir: Path) -> None:
    """ConfigError where `run_dir` is no folder of a run, or of one that has not come to RL."""
    if (run_dir / "metrics.jsonl").is_file():
        return
    if (run_dir / "config.toml").is_file():
        raise ConfigError(
            f"'{run_dir}' has nothing to report yet: it has no metrics.jsonl",
            hint="RL has not begun, or is not among the stages of this run",
        )
    raise ConfigError(f"'{run_dir}' is no run: it has no metrics.jsonl", hint="give the folder of a run")


def read_run(run_dir: Path) -> Run:
    """Everything the report needs. What is missing is empty; SlipstreamError for a damaged file, torn ends excepted."""
    config_path, summary_path = run_dir / "config.toml", run_dir / "summary.json"
    metrics_path, evaluation_path = run_dir / "metrics.jsonl", run_dir / EVALUATION_FILE
    summary = read_summary(summary_path) if summary_path.exists() else None
    written_s = metrics_path.stat().st_mtime if metrics_path.exists() else 0.0
    evaluation: Mapping[str, Any] | None = summary.evaluation if summary else None
    if evaluation is None and evaluation_path.exists():
        evaluation = read_json(evaluation_path)
    history = History.of(read_metrics(metrics_path))
    return Run(
        path=run_dir,
        config=read_toml(config_path) if config_path.exists() else {},
        history=history,
        summary=summary,
        times=read_times(run_dir, history.steps, summary),
        samples=(read_samples(run_dir / "samples.json") or _trained_samples(run_dir))[:MAX_SAMPLES],
        alarms=spans(read_alarms(run_dir / ALARMS_FILE)),
        lengths=list(sample_jsonl(run_dir / "rollouts.jsonl", Length)),
        evaluation=evaluation,
        written_s=max(0.0, time.time() - written_s),
        is_held=is_held(run_dir),
        num_attempts=len(read_attempts(run_dir)),
        earlier_s=earlier_s(run_dir),
    )


def read_json(path: Path) -> Mapping[str, Any]:
    return load_json(path, dict[str, Any])


def _trained_samples(run_dir: Path) -> list[Sample]:
    """Where no held-out samples were saved: completions of the first and of the last training steps."""
    lines = [
        line
        for line in sample_jsonl(run_dir / "rollouts.jsonl", RolloutLine, most_bytes=1 << 22)
        if line.sample == 0 and line.step is not None
    ]
    half = min(MAX_SAMPLES // 2, len(lines) // 2)
    first = [Sample(a.prompt, a.answer, a.completion, None, before_reward=a.reward) for a in lines[:half]]
    last = lines[len(lines) - half :]
    return first + [Sample(b.prompt, b.answer, None, b.completion, after_reward=b.reward) for b in last]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def clock_axis(clock: Clock, longest: float) -> tuple[Axis, float]:
    """The axis of a clock that goes up to `longest`, and what its values are divided by for it."""
    if clock == "step":
        return Axis("step"), 1.0
    if clock == "tokens":
        return Axis("tokens trained on"), 1.0
    unit, divisor = time_unit(longest)
    return Axis(f"{unit} since RL began"), divisor


def time_unit(longest_s: float) -> tuple[str, float]:
    """The unit in which a stretch of time is told, and its seconds."""
    units = (("seconds", 1.0, 180.0), ("minutes", 60.0, 180 * 60.0), ("hours", 3600.0, 96 * 3600.0))
    return next(((name, length) for name, length, most in units if longest_s <= most), ("days", 86400.0))


def rescaled(series: Sequence[Series], divisor: float) -> list[Series]:
    """The same in other units of x."""
    return [replace(one, points=[(x / divisor, y) for x, y in one.points]) if divisor != 1.0 else one for one in series]
