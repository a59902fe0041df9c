"""The stage `rl`: one run of the pipeline under its controller, from the start or from a checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from slipstream.controller.build import build_schedule, build_work, default_pipeline
from slipstream.controller.cluster import Cluster
from slipstream.controller.controller import Controller, read_snapshot
from slipstream.controller.ledger import cut_back
from slipstream.controller.pipeline import Pipeline
from slipstream.controller.tally import Tally
from slipstream.controller.watch import ConsoleObserver, Observer, SilentObserver, write_samples
from slipstream.core.clock import WallClock
from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.recipes import save_config, with_stage_paths
from slipstream.observe.hardware import describe
from slipstream.observe.metrics import read_metrics
from slipstream.observe.report import write_report
from slipstream.observe.summary import read_summary, write_summary
from slipstream.observe.timeline import merge_timelines
from slipstream.stages.progress import watch

TRUNCATED_ON_RESUME = ("metrics.jsonl", "events.jsonl", "rollouts.jsonl", "ledger.jsonl")


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


def run_rl(config: RunConfig, run_dir: Path, given: FromPython, *, checkpoint: Path | None = None) -> dict[str, Any]:
    """Train in `run_dir`, from `checkpoint` where there is one; returns what `summary.json` says.

    `config` is saved as it is; 'stage:...' in it stands for folders under `run_dir`.
    """
    tally = Tally(config, started_s=WallClock().now_s())
    if checkpoint is not None:
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
    snapshot = None if checkpoint is None else read_snapshot(checkpoint)[0]
    schedule = build_schedule(with_paths, snapshot)
    controller = Controller(
        with_paths,
        pipeline,
        schedule,
        work,
        run_dir=run_dir,
        tally=tally,
        observer=observer,
        cluster=given.cluster,
    )
    tally.status = "failed"  # until the controller says otherwise
    try:
        controller.run()
    finally:
        summary = tally.summary(run_dir)
        write_summary(summary, run_dir / "summary.json")
        samples = write_samples(tally, run_dir)
        merge_timelines(run_dir)
        write_report(run_dir, describe())
        observer.finished(samples, summary)
    told: dict[str, Any] = msgspec.to_builtins(summary, str_keys=True)
    return told


def resume_rl(config: RunConfig, run_dir: Path, given: FromPython) -> dict[str, Any]:
    """Continue from the newest whole checkpoint, or begin anew where the attempt so far has left none.

    The files written so far are also kept under `attempt_<n>/`. ConfigError where RL is done.
    """
    if is_rl_done(run_dir):
        raise ConfigError("the run is already complete", got=f"{config.steps} of {config.steps} steps")
    checkpoint = newest_checkpoint(run_dir)
    attempt = run_dir / f"attempt_{1 + len(list(run_dir.glob('attempt_*')))}"
    attempt.mkdir()
    for name in TRUNCATED_ON_RESUME:
        if (run_dir / name).exists():
            shutil.copy2(run_dir / name, attempt / name)
    if (run_dir / "timeline").exists():
        (run_dir / "timeline").rename(attempt / "timeline")
    if checkpoint is None:
        for name in TRUNCATED_ON_RESUME:
            (run_dir / name).unlink(missing_ok=True)
        with watch(config, "rl", display=given.display) as watcher:
            watcher.note(f"there is no checkpoint: RL begins anew, {attempt.name} keeps what was recorded")
        return run_rl(config, run_dir, given)
    snapshot, num_events = read_snapshot(checkpoint)
    cut_back(run_dir / "ledger.jsonl", snapshot)
    _cut_lines(run_dir / "metrics.jsonl", lambda line: line["version"] <= snapshot.steps_done)
    _cut_lines(run_dir / "rollouts.jsonl", lambda line: line["step"] is not None and line["step"] < snapshot.steps_done)
    _cut_lines(run_dir / "events.jsonl", lambda line: line["seq"] < num_events)
    return run_rl(config, run_dir, given, checkpoint=checkpoint)


def is_rl_done(run_dir: Path) -> bool:
    """Whether RL has gone through all its steps and left a policy: its summary is written last."""
    summary = run_dir / "summary.json"
    has_model = (run_dir / "model" / "config.json").is_file()
    return has_model and summary.is_file() and read_summary(summary).status == "done"


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The last whole checkpoint of a run, or None."""
    whole = [path.parent for path in (run_dir / "checkpoints").glob("step_*/manifest.json")]
    return max(whole, key=lambda path: int(path.name.removeprefix("step_")), default=None)


def _cut_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    lines = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    path.write_text("".join(line for line in lines if keep(json.loads(line))), encoding="utf-8")
