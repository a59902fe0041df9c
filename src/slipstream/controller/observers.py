"""The observers of a run: one list, each of which takes every piece of news and may make more of it, steering nothing.

    Message           an executor sent it to the controller; `Noted` is for people, whoever sent it
    Decision          the schedule was told of an event, and gave commands
    EvaluationDone    all answers to an evaluation are scored
    Wasted            tokens were sampled, or read, for nothing       made of a Decision
    StepWritten       `metrics.jsonl` has the line of a step          made of StepDone
    Alarm             began or ended with a step or a failure         made of StepWritten, GroupScored

What observers make of news is taken by all of them once they have taken the news itself.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from slipstream.controller.evaluations import GREEDY, EvaluationDone
from slipstream.controller.pipeline import CONTROLLER, replica_of
from slipstream.controller.tally import Tally
from slipstream.core.config import RunConfig
from slipstream.core.held_out import GREEDY_PREFIX, SAMPLED_PREFIX, set_prefix
from slipstream.core.peer_messages import Leaving
from slipstream.core.run_log import Metrics
from slipstream.core.service_messages import Counters, Noted, Progress, Ready
from slipstream.core.types import GroupScored, ReplicaLost, StepDone, Swapped
from slipstream.observe.display import Display, config_summary, in_numbers
from slipstream.observe.health import Alarm, Watchman, in_a_line, unfit
from slipstream.observe.metrics import MetricsWriter
from slipstream.observe.samples import Sample
from slipstream.observe.summary import BEST, Summary
from slipstream.observe.trackers import Trackers
from slipstream.observe.vitals import Vitals
from slipstream.observe.waste import UntrainedTokens
from slipstream.prompts import PromptReport

FILES = (
    "summary.json",
    "report.html",
    "metrics.jsonl",
    "rollouts.jsonl",
    "timeline.json",
    "tensorboard",
    "model",
    BEST,
)


class StepWritten(NamedTuple):
    """`metrics.jsonl` has this line of a step."""

    line: Metrics


class Observer(Protocol):
    """Takes news of the kinds that it `hears`, at once; returns what all observers are to take next."""

    @property
    def hears(self) -> tuple[type, ...]: ...

    def take(self, news: Any) -> Iterable[object] | None: ...


class Observers:
    """The list. `screen`, for people, and `callbacks` are more of them; `trackers` get lines and alarms that are
    written."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        tally: Tally,
        *,
        screen: Observer | None = None,
        callbacks: Observer | None = None,
        trackers: Trackers | None = None,
    ) -> None:
        told = [] if trackers is None else [trackers]
        vitals = Vitals(config.samples_per_group, config.max_staleness)
        self.tally = tally
        self._metrics = MetricsWriter(run_dir / "metrics.jsonl", sinks=[one.metrics for one in told])
        self._watchman = Watchman(config.health, run_dir, sinks=[one.alarm for one in told], silent=unfit(config))
        self._hearers: dict[type, list[Observer]] = {}
        self._all: list[Observer] = [
            UntrainedTokens(),
            tally,
            vitals,
            MetricLines(config, run_dir, self._metrics, tally, vitals),
            Alarms(self._watchman, tally, vitals),
            *(one for one in (screen, callbacks) if one is not None),
        ]

    def take(self, news: object) -> None:
        """Hand `news` to the observers that hear it, and then what they make of it."""
        if isinstance(news, Leaving):
            self._leaving(news.executor)
        waiting = deque([news])
        while waiting:
            one = waiting.popleft()
            for observer in self._hearers_of(type(one)):
                waiting.extend(observer.take(one) or ())

    def _hearers_of(self, kind: type) -> list[Observer]:
        if kind not in self._hearers:
            self._hearers[kind] = [observer for observer in self._all if issubclass(kind, observer.hears)]
        return self._hearers[kind]

    def note(self, text: str) -> None:
        """Tell people, on the controller's behalf."""
        self.take(Noted(executor=CONTROLLER, text=text))

    def _leaving(self, executor: str) -> None:
        """Tell what follows as `executor` was told to end."""
        is_replica = replica_of(executor) is not None
        then = (
            "it hands over what it has begun, and leaves"
            if is_replica
            else "a checkpoint is made when no step is in training"
        )
        self.note(f"{executor} was told to end: {then}")

    def sync(self) -> None:
        """Return once every line of metrics is on the disk."""
        self._metrics.sync()

    def close(self) -> None:
        with contextlib.ExitStack() as ends:
            ends.callback(self._watchman.close)
            ends.callback(self._metrics.close)


class MetricLines:
    """Write the metrics of steps and evaluations, put together from those who measure, and samples of the answers."""

    hears = (StepDone, EvaluationDone)

    def __init__(self, config: RunConfig, run_dir: Path, writer: MetricsWriter, tally: Tally, vitals: Vitals) -> None:
        self._config, self._run_dir, self._writer, self._tally, self._vitals = config, run_dir, writer, tally, vitals

    def take(self, news: object) -> Iterator[StepWritten]:
        match news:
            case StepDone(step=step, version=version):
                metrics = self._tally.stepped(news) | self._vitals.of_step(version)
                line = self._writer.write(step=step, version=version, wall_s=self._tally.wall_s, metrics=metrics)
                yield StepWritten(line)
            case EvaluationDone(version=version, found=found, name=name):
                is_greedy, named = news.temperature == GREEDY, name or self._config.eval.primary
                measures = found.metrics(set_prefix(named)) if named and is_greedy else {}
                if not name:
                    measures |= found.metrics(GREEDY_PREFIX if is_greedy else SAMPLED_PREFIX)
                is_greedy &= not name
                if is_greedy and self._config.has_critic:  # the TL;DR reproduction's name of it
                    measures["objective/validation_score"] = found.reward
                self._writer.write(step=version, version=version, wall_s=self._tally.wall_s, metrics=measures)
                if is_greedy and version in (0, self._config.steps):
                    self._tally.write_samples(self._run_dir)  # a resume knows them from there


class Alarms:
    """Ask the watchman about each step; about failures and equal rewards also before any step is done."""

    hears = (StepWritten, GroupScored)

    def __init__(self, watchman: Watchman, tally: Tally, vitals: Vitals) -> None:
        self._watchman, self._tally, self._vitals = watchman, tally, vitals

    def take(self, news: object) -> list[Alarm]:
        health, found, step = self._watchman.health, list[Alarm](), self._tally.steps_done
        match news:
            case StepWritten(line=line):
                found = health.update(line)
            case GroupScored(failure=str() as failure):
                found = health.failed(step, self._tally.failed_completions, self._tally.scored_completions, failure)
            case GroupScored(has_signal=False) if count := self._vitals.num_equal:
                found = health.without_signal(step, count, self._vitals.equal_rewards)
        return self._watchman.tell(found) if found else []


class Screen:
    """The live display on a terminal, plain lines elsewhere."""

    hears = (Noted, Alarm, Ready, Progress, Counters, Swapped, ReplicaLost, StepWritten, EvaluationDone)

    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        self._run_dir, self._told_dir, self._steps = run_dir, run_dir, config.steps
        with contextlib.suppress(ValueError, OSError):  # it lies elsewhere, or the working folder is gone
            self._told_dir = run_dir.relative_to(Path.cwd())
        self._display = Display(config_summary(config), steps=config.steps, max_staleness=config.staleness_bound)

    def take(self, news: object) -> None:
        match news:
            case Noted(executor=executor, text=text):
                self.note(text if executor == CONTROLLER else f"{executor}: {text}")
            case Alarm():
                self.note(in_a_line(news))
            case Ready(executor=executor):
                self._display.ready(executor)
            case Progress():
                self._display.phase(news.phase, news.done, news.total, news.metrics)
            case Counters(executor=executor, values=values) if executor != CONTROLLER:
                self._display.counters(executor, values)
            case Swapped(replica=replica, version=version):
                self._display.swapped(replica, version)
            case ReplicaLost(replica=replica):
                self._display.lost(replica)
            case StepWritten(line=line):
                self._display.step(line)
            case EvaluationDone(version=version, found=found) if news.temperature == GREEDY:
                label = {0: "before", self._steps: "after"}.get(version, f"at step {version}")
                if news.name:
                    self.note(f"  {news.name} {label}: {in_numbers(found)}")
                else:
                    self._display.evaluation(label, found)
            case EvaluationDone(found=found):
                self.note(f"  sampled at temperature 1: {in_numbers(found)}")

    def note(self, text: str) -> None:
        self._display.note(text)

    def started(self, report: PromptReport) -> None:
        """Tell what the run's prompts are."""
        dropped = f", {report.num_too_long} dropped as too long" if report.num_too_long else ""
        counts = f"{report.num_train} to train on, {report.num_eval} held out, overlap {report.overlap}"
        if report.num_held_out:
            counts += f" ({report.num_held_out} rows to train on left out: they are held out)"
        self.note(f"prompts: {counts}{dropped}")
        if report.left_out:
            self.note(f"left out: {report.left_out}")
        if report.warning is not None:
            self.note(report.warning)

    def finished(self, samples: list[Sample], summary: Summary) -> None:
        """Show what the run came to, and its files."""
        self._display.samples(samples)
        files = {name: self._told_dir / name for name in FILES if (self._run_dir / name).exists()}
        self._display.finish(summary, files)

    def close(self) -> None:
        """Give the terminal back: nothing more comes, also where the run failed. May be called twice."""
        self._display.close()
