"""The stage `rl`: one run of the pipeline under its controller, from the start or from a checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import Any

import msgspec

from slipstream.controller.build import build_schedule, build_work, default_pipeline
from slipstream.controller.cluster import Cluster
from slipstream.controller.controller import Controller
from slipstream.controller.pipeline import Pipeline
from slipstream.controller.restarts import Restarts
from slipstream.controller.tally import Tally
from slipstream.controller.watch import ConsoleObserver, Observer, SilentObserver, write_samples
from slipstream.core.clock import WallClock
from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError, DiskError, ExecutorLost
from slipstream.core.recipes import save_config, with_stage_paths
from slipstream.observe.hardware import describe
from slipstream.observe.metrics import read_metrics
from slipstream.observe.report import write_report
from slipstream.observe.summary import Summary, read_summary, write_summary
from slipstream.observe.timeline import merge_timelines
from slipstream.stages.progress import watch
from slipstream.stages.resume import Resumed, prepare_resume


@dataclass(frozen=True)
class FromPython:
    """What a caller may hand in besides a configuration."""

    reward: Callable[..., Any] | None = None
    display: bool = True
    pipeline: Callable[[RunConfig], Pipeline] | None = None
    cluster: Cluster | None = None

    @property
    def remote(self) -> frozenset[str]:
        """The groups that run on other machines."""
        return frozenset() if self.cluster is None else self.cluster.remote


def run_rl(config: RunConfig, run_dir: Path, given: FromPython, *, resumed: Resumed | None = None) -> dict[str, Any]:
    """Train in `run_dir`, from where it was `resumed`; returns what `summary.json` says.

    `config` is saved as it is; 'stage:...' in it stands for folders under `run_dir`. An attempt that loses an executor
    without which it cannot go on (ExecutorLost: trainer, reference, reward models) is followed by another one, from the
    last checkpoint: `max_restarts` times for each executor, after a pause that doubles. Errors that an executor reports
    end the run. Ctrl-C ends it also in a pause.
    """
    restarts = Restarts(config.max_restarts, WallClock())
    while True:
        try:
            return _attempt(config, run_dir, given, resumed)
        except ExecutorLost as error:
            lost = error
        pause_s = restarts.plan(lost.executor)
        if pause_s is None:
            raise lost
        sleep(pause_s)
        resumed = prepare_resume(run_dir)
        count = f"{restarts.counts[lost.executor]} of {config.max_restarts}"
        _tell(config, given, [f"{lost.what}: the run is started again ({count}), after {pause_s:g} s", *resumed.notes])


def _attempt(config: RunConfig, run_dir: Path, given: FromPython, resumed: Resumed | None) -> dict[str, Any]:
    """One run of the pipeline, to its end or to its first error."""
    tally = Tally(config, started_s=WallClock().now_s())
    checkpoint = None if resumed is None else resumed.checkpoint
    cut = None if resumed is None else resumed.cut
    if cut is not None:
        tally.restore(cut.run)
        for line in read_metrics(run_dir / "metrics.jsonl"):
            tally.recall(line)
    observer: Observer = ConsoleObserver(config, run_dir) if given.display else SilentObserver()
    with_paths = with_stage_paths(config, run_dir)
    work, prompt_set = build_work(with_paths, is_resumed=checkpoint is not None)
    save_config(config, run_dir / "config.toml")  # from here on the directory is that of a run
    observer.started(prompt_set.report)
    pipeline = (
        default_pipeline(with_paths, reward=given.reward, resume=checkpoint, remote=given.remote)
        if given.pipeline is None
        else given.pipeline(with_paths)
    )
    schedule = build_schedule(with_paths, None if cut is None else cut.schedule)
    controller = Controller(
        with_paths,
        pipeline,
        schedule,
        work,
        run_dir=run_dir,
        tally=tally,
        observer=observer,
        cluster=given.cluster,
        partials=None if resumed is None else resumed.partials,
    )
    tally.status = "failed"  # until the controller says otherwise
    try:
        controller.run()
    except BaseException:
        with contextlib.suppress(DiskError):  # a full disk has already been told of, by whoever met it first
            _conclude(tally, run_dir, observer)
        raise
    told: dict[str, Any] = msgspec.to_builtins(_conclude(tally, run_dir, observer), str_keys=True)
    return told


def _conclude(tally: Tally, run_dir: Path, observer: Observer) -> Summary:
    """Summary, samples, timeline and report of what there was. The summary comes last: it says that a run is done."""
    summary = tally.summary(run_dir)
    samples = write_samples(tally, run_dir)
    merge_timelines(run_dir)
    write_summary(summary, run_dir / "summary.json")
    write_report(run_dir, describe())
    observer.finished(samples, summary)
    return summary


def resume_rl(config: RunConfig, run_dir: Path, given: FromPython) -> dict[str, Any]:
    """Continue from the newest whole checkpoint, or begin anew where the attempts so far have left none.

    What was written so far is kept under `attempt_<n>/` (`stages/resume.py`). ConfigError where RL is done.
    """
    if is_rl_done(run_dir):
        raise ConfigError("the run is already complete", got=f"{config.steps} of {config.steps} steps")
    resumed = prepare_resume(run_dir)
    _tell(config, given, resumed.notes)
    return run_rl(config, run_dir, given, resumed=resumed)


def _tell(config: RunConfig, given: FromPython, notes: Sequence[str]) -> None:
    with watch(config, "rl", display=given.display) as watcher:
        for note in notes:
            watcher.note(note)


def is_rl_done(run_dir: Path) -> bool:
    """Whether RL has gone through all its steps and left a policy: its summary is written last."""
    summary = run_dir / "summary.json"
    has_model = (run_dir / "model" / "config.json").is_file()
    return has_model and summary.is_file() and read_summary(summary).status == "done"
