"""The Python API: `slipstream.run` does what `slipstream run` does.

    import slipstream
    result = slipstream.run("quickstart", overrides={"steps": 50})
    result.summary["eval"]["after"]["accuracy"]

It works from scripts without a main guard and from notebook cells: executors are started as processes of their own, and
a reward given as a Python function (a lambda, too) is called in the caller's process.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from slipstream.controller.build import build_schedule, build_work, check, default_pipeline
from slipstream.controller.controller import Controller, read_snapshot
from slipstream.controller.ledger import cut_back
from slipstream.controller.pipeline import SCRIPTS_BEING_IMPORTED, Pipeline, ReachedRun
from slipstream.controller.tally import Tally
from slipstream.controller.watch import ConsoleObserver, Observer, SilentObserver, write_samples
from slipstream.core.clock import WallClock
from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.recipes import merge, resolve, save_config
from slipstream.observe.hardware import describe
from slipstream.observe.metrics import read_metrics
from slipstream.observe.report import write_report
from slipstream.observe.summary import write_summary
from slipstream.observe.timeline import merge_timelines

PROMPTS_FILE = "prompts.jsonl"  # in the run's directory: the prompts given from Python
TRUNCATED_ON_RESUME = ("metrics.jsonl", "events.jsonl", "rollouts.jsonl", "ledger.jsonl")


@dataclass(frozen=True)
class Result:
    """A finished run: its directory, and `summary.json` as a dict."""

    out: Path
    summary: dict[str, Any]

    @property
    def status(self) -> str:
        """'done' or 'interrupted'; a run that failed raises instead."""
        return str(self.summary["status"])


def run(
    config: RunConfig | str | Path | Mapping[str, Any],
    *,
    overrides: Mapping[str, Any] | None = None,
    preset: str | None = None,
    reward: Callable[..., Any] | None = None,
    prompts: Sequence[str | Mapping[str, Any]] | None = None,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    display: bool = True,
    pipeline: Callable[[RunConfig], Pipeline] | None = None,
) -> Result:
    """Train; returns when the run is done or was interrupted.

    `config` is a RunConfig, a recipe's name or path, or its tables. `reward(prompts, completions, completion_ids,
    **columns)` returns one number (or None) per completion; it replaces the config's terms and runs in this process
    with `rewards.timeout_s` as its deadline. `prompts` (strings, or rows with `prompt` and `answer`) replace the
    config's; a tenth of them is held out, at most `prompts.num_eval`. `out` is the run's directory, new or empty;
    `resume` continues the run in that directory from its last checkpoint. `pipeline` replaces the default pipeline.

    Raises ConfigError before anything starts; ExecutorDied or another SlipstreamError when the run fails (the files
    written so far stay, and `summary.json` says `failed`).
    """
    if SCRIPTS_BEING_IMPORTED:
        raise ReachedRun
    if resume is not None:
        return _resume(Path(resume), reward=reward, display=display, pipeline=pipeline)
    if not isinstance(config, RunConfig):
        if prompts is not None:  # tables need not name a source that would be replaced
            overrides = merge(overrides or {}, {"prompts": {"tasks": [], "dataset": PROMPTS_FILE}})
        config = resolve(config, overrides, preset)
    elif overrides or preset:
        raise ConfigError("a RunConfig is already resolved", hint="pass a recipe name or tables with overrides")
    check(config, has_own_reward=reward is not None)
    run_dir = _new_run_dir(config, out)
    if prompts is not None:
        config = _with_prompts(config, prompts, run_dir)
    return _run(config, run_dir, reward=reward, display=display, pipeline=pipeline, checkpoint=None)


def _run(
    config: RunConfig,
    run_dir: Path,
    *,
    reward: Callable[..., Any] | None,
    display: bool,
    pipeline: Callable[[RunConfig], Pipeline] | None,
    checkpoint: Path | None,
) -> Result:
    tally = Tally(config, started_s=WallClock().now_s())
    if checkpoint is not None:
        for line in read_metrics(run_dir / "metrics.jsonl"):
            tally.recall(line)
    observer: Observer = ConsoleObserver(config, run_dir) if display else SilentObserver()
    work, prompt_set = build_work(config, is_resumed=checkpoint is not None)
    save_config(config, run_dir / "config.toml")  # from here on the directory is that of a run
    observer.started(prompt_set.report)
    chosen = default_pipeline(config, reward=reward, resume=checkpoint) if pipeline is None else pipeline(config)
    snapshot = None if checkpoint is None else read_snapshot(checkpoint)
    controller = Controller(
        config, chosen, build_schedule(config, snapshot), work, run_dir=run_dir, tally=tally, observer=observer
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
    return Result(out=run_dir, summary=msgspec.to_builtins(summary, str_keys=True))


def _new_run_dir(config: RunConfig, out: str | Path | None) -> Path:
    run_dir = Path("runs") / f"{config.recipe}-{time.strftime('%Y%m%d-%H%M%S')}" if out is None else Path(out)
    if out is None and run_dir.exists():
        run_dir = run_dir.with_name(f"{run_dir.name}-{time.monotonic_ns() % 1000:03d}")
    if run_dir.exists() and any(run_dir.iterdir()):
        raise ConfigError(
            "the run's directory is not empty",
            got=str(run_dir),
            allowed="a new or empty directory",
            hint=f"choose another --out, or continue that run with --resume {run_dir}",
        )
    run_dir.mkdir(parents=True, exist_ok=True)
    return run_dir


def _with_prompts(config: RunConfig, prompts: Sequence[str | Mapping[str, Any]], run_dir: Path) -> RunConfig:
    """The config with `prompts` as its dataset, written into the run's directory so that a resume finds them."""
    if len(prompts) < 2:
        raise ConfigError("too few prompts", got=len(prompts), allowed="at least 2: one is held out")
    path = (run_dir / PROMPTS_FILE).resolve()
    rows = [{"prompt": row} if isinstance(row, str) else dict(row) for row in prompts]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    num_eval = min(config.prompts.num_eval, max(1, len(rows) // 10))
    tables = config.model_dump()
    tables["prompts"] |= {
        "tasks": [],
        "dataset": str(path),
        "eval_dataset": None,
        "prompt_column": "prompt",
        "answer_column": "answer",
        "num_eval": num_eval,
    }
    tables["eval"]["num_prompts"] = min(config.eval.num_prompts, num_eval)
    return resolve(tables)


def _resume(
    run_dir: Path,
    *,
    reward: Callable[..., Any] | None,
    display: bool,
    pipeline: Callable[[RunConfig], Pipeline] | None,
) -> Result:
    """Continue from the newest whole checkpoint; the files written so far are also kept under `attempt_<n>/`."""
    config_path = run_dir / "config.toml"
    if not config_path.exists():
        raise ConfigError("not a run's directory", got=str(run_dir), allowed="a directory with config.toml in it")
    config = resolve(config_path)
    checkpoint = _newest_checkpoint(run_dir)
    if checkpoint is None:
        raise ConfigError("the run has no checkpoint to resume from", got=str(run_dir), hint="start it anew")
    snapshot = read_snapshot(checkpoint)
    if snapshot.steps_done >= config.steps:
        raise ConfigError("the run is already complete", got=f"{snapshot.steps_done} of {config.steps} steps")
    attempt = run_dir / f"attempt_{1 + len(list(run_dir.glob('attempt_*')))}"
    attempt.mkdir()
    for name in TRUNCATED_ON_RESUME:
        if (run_dir / name).exists():
            shutil.copy2(run_dir / name, attempt / name)
    (run_dir / "timeline").rename(attempt / "timeline")
    cut_back(run_dir / "ledger.jsonl", snapshot)
    _cut_lines(run_dir / "metrics.jsonl", lambda line: line["version"] <= snapshot.steps_done)
    _cut_lines(run_dir / "rollouts.jsonl", lambda line: line["step"] is not None and line["step"] < snapshot.steps_done)
    _cut_events(run_dir / "events.jsonl", snapshot.steps_done)
    return _run(config, run_dir, reward=reward, display=display, pipeline=pipeline, checkpoint=checkpoint)


def _newest_checkpoint(run_dir: Path) -> Path | None:
    whole = [path.parent for path in (run_dir / "checkpoints").glob("step_*/manifest.json")]
    return max(whole, key=lambda path: int(path.name.removeprefix("step_")), default=None)


def _cut_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    lines = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    path.write_text("".join(line for line in lines if keep(json.loads(line))), encoding="utf-8")


def _cut_events(path: Path, steps_done: int) -> None:
    """Keep events up to the one that completed the checkpoint's last step."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        kept.append(line)
        event = json.loads(line)["event"]
        if event["type"] == "StepDone" and event["version"] == steps_done:
            break
    path.write_text("".join(kept), encoding="utf-8")
