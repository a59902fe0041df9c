"""The data model of a run for the pages: its files, read once. Of a long run only metrics and alarms are read whole."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, get_args

import msgspec
from pydantic import BaseModel

from slipstream.core.config import JUST_RL, RunConfig, stage_of
from slipstream.core.errors import ConfigError, SlipstreamError
from slipstream.core.files import load_json, no_run
from slipstream.core.held_out import Measured
from slipstream.core.jsonl import read_jsonl, sample_jsonl
from slipstream.core.recipes import read_toml
from slipstream.core.run_lock import is_held
from slipstream.core.run_log import Metrics, MetricsHead, Outcome, RolloutLine, read_metrics
from slipstream.core.sections import HARD_BOUND
from slipstream.observe.accounting import RunAccounting, accounting_bytes, read_accounting
from slipstream.observe.attempts import Attempt, read_attempts
from slipstream.observe.balance import Balance
from slipstream.observe.evaluation import EVALUATION_FILE
from slipstream.observe.health import ALARMS_FILE, AlarmSpan, read_alarms, spans
from slipstream.observe.noise import Estimate, mean_of, share
from slipstream.observe.samples import Sample, read_samples
from slipstream.observe.states import model_share, side_of, totals_of
from slipstream.observe.summary import Evaluations, Summary, read_summary
from slipstream.observe.svg import Point
from slipstream.observe.timeline import (
    TIME_PREFIX,
    TRAINED,
    Instant,
    process_files,
    process_order,
    read_timeline,
    times_ns,
)
from slipstream.observe.transcript import TranscriptPart, transcript_of
from slipstream.observe.waste import CHOSEN, WASTE

Clock = Literal["step", "tokens", "time"]
CLOCKS: tuple[Clock, ...] = get_args(Clock)
MAX_SAMPLES = 12
STALENESS = "staleness_tokens/lag_"
READ_AHEAD = 1 << 18  # bytes that records of a timeline may lie apart from their order in time
EXACT_BYTES = 1 << 27  # of decisions and timelines: of longer runs the times are those that the processes reported
CALLS = {"num_workers", "num_threads", "max_awaited", "dry_call"}  # fields of `rewards` that change no reward
EPISODES = {"num_workers", "verifiers_python", "dry_run"}  # and of `environment`
MODELS = {"model_batch_size", "model_ranks", "model_tensor_parallel", "models_sharded", "device"}  # nor do these
OF_ANY_MODEL = ("model.path", "model.revision", "model.chat_template", "model.lora")
"""Fields of [model] that are not those of a fresh model alone."""
MAX_PROCESSES = 12  # of more, the mean of a side's

Seconds = Mapping[str, float]  # by state


class Length(msgspec.Struct, frozen=True):
    """The part of a line of `rollouts.jsonl` that lengths are counted from."""

    step: int | None
    outcome: Outcome
    num_tokens: int


class MetricsHistory:
    """The lines of `metrics.jsonl`: of steps, and of evaluations. x is what a `Clock` shows when a step is done.

    `tokens` counts those trained on; `time` is seconds since RL began (its first admission), the warm start excluded.
    """

    def __init__(self, lines: Sequence[Metrics]) -> None:
        self.steps = [line for line in lines if is_number(line.get("step_s"))]
        self.evaluations = [line for line in lines if line.get("step_s") is None]
        for line in self.steps:
            if is_number(line.get("no_signal_frac")):
                line["signal_frac"] = 1.0 - line["no_signal_frac"]
        self._made = {int(line["version"]): index for index, line in enumerate(self.steps)}  # version -> its step
        self.began_s = self.steps[0]["wall_s"] - self.steps[0]["step_s"] if self.steps else 0.0
        self.clocks: dict[Clock, list[float]] = {
            "step": [float(line["step"]) for line in self.steps],
            "tokens": list(accumulate(line.get("tokens_trained") or 0.0 for line in self.steps)),
            "time": [line["wall_s"] - self.began_s for line in self.steps],
        }
        self.window = max(3, len(self.steps) // 15 | 1) if len(self.steps) >= 20 else 1
        """How many neighbours a noisy curve of this many steps is smoothed over."""

    def points(self, name: str, clock: Clock = "step") -> list[Point]:
        """A metric of the steps, or of the evaluations (`eval_`, `eval/`); what was no number is left out.

        An evaluation lies at what the clock showed when the version it is of was made.
        """
        if not name.startswith(("eval_", "eval/")):
            xs = self.clocks[clock]
            return [(x, float(line[name])) for x, line in zip(xs, self.steps, strict=True) if is_number(line.get(name))]
        found: dict[float, float] = {}
        for line in self.evaluations:
            version = int(line["version"])
            index = self._made.get(version)
            if is_number(line.get(name)) and (clock == "step" or index is not None or version <= 0):
                x = float(version) if clock == "step" else 0.0 if index is None else self.clocks[clock][index]
                found[x] = float(line[name])
        return sorted(found.items())

    def values(self, name: str) -> list[float]:
        return [value for _, value in self.points(name)]

    def names(self, prefix: str) -> list[str]:
        """Metrics of steps that begin so, in their order."""
        return list(dict.fromkeys(name for line in self.steps for name in line if name.startswith(prefix)))


@dataclass(frozen=True)
class StepTimes:
    """A step, or what was reported in it, from `start_s` to `end_s` since RL began: process or side -> seconds."""

    start_s: float
    end_s: float
    seconds: Mapping[str, Seconds]


@dataclass(frozen=True)
class RunTimes:
    """The seconds of a run by process and state. `whole`: from start to end. `balance`: None where it is not known yet.

    `model_share` is the model's part of the work of all processes, `model_cpu_share` that of their CPU time. Exact
    times are read from every decision and every slice (`observe/accounting.py`), tens of megabytes a second.
    """

    whole: Mapping[str, Seconds]
    spans: Sequence[StepTimes]
    balance: Balance | None
    wall_s: float
    is_exact: bool
    model_share: float = 0.0
    model_cpu_share: float | None = None

    @cached_property
    def loop(self) -> dict[str, dict[str, float]]:
        """Process or side -> seconds by state, from the first admission to the end of the last step."""
        names = dict.fromkeys(name for span in self.spans for name in span.seconds)
        return {name: totals_of(span.seconds.get(name, {}) for span in self.spans) for name in names}

    @property
    def verdict(self) -> str:
        return "" if self.balance is None else self.balance.verdict

    @property
    def step_s(self) -> Estimate | None:
        """Mean seconds of a step."""
        return mean_of([span.end_s - span.start_s for span in self.spans])


@dataclass(frozen=True)
class RunData:
    """A run as the pages see it; `summary` is None as long as it goes on, and where it was killed."""

    path: Path
    config: dict[str, Any]
    history: MetricsHistory
    summary: Summary | None
    times: RunTimes
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
    def has_rl(self) -> bool:
        """Whether RL is among the stages."""
        stages = self.config.get("stages", JUST_RL)
        return "rl" in (stages if isinstance(stages, list | tuple) else JUST_RL)

    @property
    def recipe(self) -> str:
        return str(self.config.get("recipe", self.name))

    @property
    def first_checkpoint(self) -> str | None:
        """Return `RunConfig.first_checkpoint`; what was saved need not fit the present schema."""
        path: str | None = self.config.get("model", {}).get("path")
        for stage in ("dpo", "sft"):
            if stage_of(path) == stage:
                path = self.config.get(stage, {}).get("path")
        return path

    @cached_property
    def fields(self) -> dict[str, Any]:
        """The configuration as `section.field`, without what it does not use: a checkpoint excludes a fresh model."""
        found = flat(self.config)
        fresh = [name for name in found if name.startswith("model.") and not name.startswith(OF_ANY_MODEL)]
        unused = [] if self.first_checkpoint is None else fresh
        return {name: value for name, value in found.items() if name not in unused}

    @property
    def wall_s(self) -> float | None:
        """Seconds of all attempts, what was abandoned included; None where they are not known."""
        return None if self.earlier_s is None else (self.earlier_s + self.times.wall_s) or None

    @cached_property
    def rewarded(self) -> object:
        """Return a value that is equal for runs whose rewards mean the same: the prompts' source, and what scores them.

        What was given from Python is known by its name alone.
        """
        prompts, given = self.config.get("prompts"), self.path / "prompts.jsonl"
        if prompts is not None and given.is_file():  # its path is the run's own
            prompts = prompts | {"dataset": hashlib.sha256(given.read_bytes()).hexdigest()}
        return prompts, self._without("rewards", CALLS | MODELS), self._without("environment", EPISODES)

    @property
    def measured(self) -> object:
        """Return a value that is equal for runs whose held-out scores are of one set and by one measure."""
        evaluation = self.config.get("eval") or {}
        return (evaluation.get("sets") or [])[:1], evaluation.get("measure")

    def _without(self, section: str, names: Collection[str]) -> dict[str, Any]:
        return {name: value for name, value in (self.config.get(section) or {}).items() if name not in names}

    @cached_property
    def terms(self) -> frozenset[str]:
        """The names of the reward's terms, of a run that has trained a step."""
        return frozenset(self.history.names("reward_parts/"))

    @property
    def tokens_trained(self) -> float:
        return sum(self.history.clocks["tokens"][-1:])

    @property
    def wasted(self) -> dict[str, int]:
        """Tokens by cause, those that there were; empty where it is not known."""
        balance = self.times.balance
        return {} if balance is None else {cause: tokens for cause, tokens in balance.wasted_tokens.items() if tokens}

    @property
    def wasted_share(self) -> float | None:
        """Wasted tokens over those trained on, by causes that are no choice."""
        wasted = sum(tokens for cause, tokens in self.wasted.items() if cause not in CHOSEN)
        return wasted / self.tokens_trained if self.tokens_trained and self.times.balance is not None else None

    @property
    def bound(self) -> int | None:
        """Return the bound of staleness that the schedule promises, in steps; None where there is none."""
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
    def evaluations(self) -> Evaluations:
        return Evaluations() if self.summary is None else self.summary.eval

    @property
    def held_out(self) -> tuple[Measured, Measured]:
        """Return the scores of greedy answers to held-out prompts, of version 0 and of the last one."""
        found = self.evaluations
        before, after = (Measured() if one is None else one.greedy for one in (found.before, found.after))
        return before, after

    @property
    def num_held_out(self) -> int:
        """Held-out prompts that the last version was asked; 0 where there is no such evaluation."""
        return 0 if self.evaluations.after is None else self.evaluations.after.num_prompts

    @property
    def held_out_score(self) -> Estimate | None:
        """The held-out accuracy of the last version, with its error."""
        return self.accuracy_of(self.held_out[1])

    def accuracy_of(self, found: Measured) -> Estimate | None:
        """Return an accuracy with the error of as many prompts as were judged; of all, in runs that did not count."""
        return None if found.accuracy is None else share(found.accuracy, found.num_judged or self.num_held_out)

    def wasted_by(self, cause: str) -> str:
        """Return a cause of wasted tokens in words. A resume samples again without that any process was lost."""
        if cause == "regenerated" and self.num_attempts > 1:
            lost = " or a process was lost" if self.summary is not None and self.summary.restarts else ""
            return f"sampled again after the run was resumed{lost}"
        return WASTE.get(cause, cause.replace("_", " "))

    def idle(self, side: str) -> float | None:
        """Share of their time in the loop that the processes of a side waited, the mean over them."""
        found = {} if self.times.balance is None else self.times.balance.idle
        shares = [idle for name, idle in found.items() if side_of(name) == side]
        return fmean(shares) if shares else None


@dataclass(frozen=True)
class Compared:
    """A run among others: what it is called here, what stands beside its name, and its colour."""

    run: RunData
    name: str
    beside: str
    hue: int


def check_run(run_dir: Path) -> None:
    """Raise ConfigError where `run_dir` is no folder of a run that has come to RL, or to its end without RL."""
    if any((run_dir / name).is_file() for name in ("metrics.jsonl", "summary.json")):
        return
    if (run_dir / "config.toml").is_file():
        hint = "RL has not begun, or is not among the stages of this run, which are not done"
        raise ConfigError(f"'{run_dir}' has nothing to report yet: it has no metrics.jsonl", hint=hint)
    raise no_run(run_dir, "metrics.jsonl")


def read_run(run_dir: Path) -> RunData:
    """Everything the pages need. What is missing is empty; SlipstreamError for a damaged file, torn ends excepted."""
    config_path, summary_path = run_dir / "config.toml", run_dir / "summary.json"
    metrics_path, evaluation_path = run_dir / "metrics.jsonl", run_dir / EVALUATION_FILE
    summary = read_summary(summary_path) if summary_path.exists() else None
    written_s = metrics_path.stat().st_mtime if metrics_path.exists() else 0.0
    evaluation: Mapping[str, Any] | None = summary.evaluation if summary else None
    if evaluation is None and evaluation_path.exists():
        evaluation = load_json(evaluation_path, dict[str, Any])
    for _ in read_jsonl(metrics_path, MetricsHead):  # SlipstreamError for a line that lacks what all have
        pass
    history, attempts = MetricsHistory(read_metrics(metrics_path)), read_attempts(run_dir)
    return RunData(
        path=run_dir,
        config=read_toml(config_path) if config_path.exists() else {},
        history=history,
        summary=summary,
        times=_read_times(run_dir, history, summary),
        samples=(read_samples(run_dir / "samples.json") or _trained_samples(run_dir))[:MAX_SAMPLES],
        alarms=spans(read_alarms(run_dir / ALARMS_FILE)),
        lengths=list(sample_jsonl(run_dir / "rollouts.jsonl", Length)),
        evaluation=evaluation,
        written_s=max(0.0, time.time() - written_s),
        is_held=is_held(run_dir),
        num_attempts=len(attempts),
        earlier_s=_lasted_s(attempts[:-1]),
    )


def _trained_samples(run_dir: Path) -> list[Sample]:
    """Return completions of the first and last training steps, for runs without held-out samples."""
    lines = [
        line
        for line in sample_jsonl(run_dir / "rollouts.jsonl", RolloutLine, most_bytes=1 << 22)
        if line.sample == 0 and line.step is not None
    ]
    half = min(MAX_SAMPLES // 2, len(lines) // 2)
    first = [
        Sample(a.prompt, a.answer, a.completion, None, before_reward=a.reward, before_turns=_turns(a))
        for a in lines[:half]
    ]
    last = lines[len(lines) - half :]
    return first + [
        Sample(b.prompt, b.answer, None, b.completion, after_reward=b.reward, after_turns=_turns(b)) for b in last
    ]


def _turns(line: RolloutLine) -> list[TranscriptPart] | None:
    return None if line.episode is None else transcript_of(line.episode)


def _lasted_s(attempts: Sequence[Attempt]) -> float | None:
    """Seconds of `attempts`, abandoned steps included; None for damaged files.

    By their timelines: each attempt lasted from the first line of its processes to the last one.
    """
    total_ns = 0
    for attempt in attempts:
        files = process_files(attempt.folder)
        try:
            starts = [times_ns(record)[0] for path in files for record in islice(read_timeline(path), 1)]
            ends = [times_ns(record)[1] for path in files for record in read_timeline(path, offset=-READ_AHEAD)]
        except SlipstreamError:  # a power failure: what was never synced may be anything
            return None
        total_ns += max(ends) - min(starts) if starts and ends else 0
    return total_ns * 1e-9


def _read_times(run_dir: Path, history: MetricsHistory, summary: Summary | None) -> RunTimes:
    """Return exact times where that is quick, else those that processes reported and `summary.json` kept."""
    told: RunAccounting | Summary
    if is_exact := accounting_bytes(run_dir) <= EXACT_BYTES:
        told = found = read_accounting(run_dir)
        began_s = found.steps[0].start_s if found.steps else 0.0
        spans = [StepTimes(step.start_s - began_s, step.end_s - began_s, by_side(step.states)) for step in found.steps]
    else:
        spans = list(_reported(run_dir, history))
        if summary is None:
            return RunTimes({}, spans, None, 0.0, is_exact=False)
        told = summary
    return RunTimes(
        by_side(told.accounting),
        spans,
        told.balance,
        told.wall_s,
        is_exact=is_exact,
        model_share=model_share(told.accounting),
        model_cpu_share=told.model_cpu_share,
    )


def _reported(run_dir: Path, history: MetricsHistory) -> Iterator[StepTimes]:
    """Yield the reported times of the last attempt, from its second step on: the first report has its start in it."""
    records = (one for path in process_files(run_dir) if path.stem == "trainer" for one in read_timeline(path))
    trained = (int(one.args["step"]) for one in records if isinstance(one, Instant) and one.name == TRAINED)
    first = next(trained, 0)
    for before, line in pairwise(line for line in history.steps if line["step"] >= first):
        seconds: dict[str, dict[str, float]] = {}
        for name, value in line.items():
            if name.startswith(TIME_PREFIX) and value is not None:
                side, _, state = name.removeprefix(TIME_PREFIX).rpartition("/")
                seconds.setdefault(side, {})[state] = value
        in_order = {side: seconds[side] for side in sorted(seconds, key=process_order)}
        yield StepTimes(before["wall_s"] - history.began_s, line["wall_s"] - history.began_s, in_order)


def by_side(processes: Mapping[str, Seconds]) -> dict[str, Seconds]:
    """`processes` where they are few, else the means of a side's, with how many these were."""
    if len(processes) <= MAX_PROCESSES:
        return dict(processes)
    sides: dict[str, list[Seconds]] = {}
    for process, seconds in processes.items():
        sides.setdefault(side_of(process), []).append(seconds)
    return {
        f"{side} ({len(own)})" if len(own) > 1 else side: {
            state: seconds / len(own) for state, seconds in totals_of(own).items()
        }
        for side, own in sides.items()
    }


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# Fields of a configuration


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Nested tables as `section.field`."""
    if not isinstance(values, Mapping) or (prefix and not values):
        return {prefix.removesuffix("."): values}
    return {name: leaf for key, value in values.items() for name, leaf in flat(value, f"{prefix}{key}.").items()}


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
