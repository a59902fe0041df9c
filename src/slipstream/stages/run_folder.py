"""The folder of a run: named, made and locked, removed where nothing comes of the run, and whether RL in it is done."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import Any

from slipstream.controller.best import EarlyStopping
from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError, DiskError, SlipstreamError
from slipstream.core.held_out import GREEDY_PREFIX, in_metrics
from slipstream.core.interrupts import Interrupted
from slipstream.core.jsonl import read_jsonl
from slipstream.core.recipes import PROMPTS_FILE, check_path, policy_flags, resolve
from slipstream.core.run_lock import LOCK_FILE, check_free, holding
from slipstream.models.hub import has_checkpoint
from slipstream.observe.summary import Summary, read_summary


@contextmanager
def folder_of(run_dir: Path, *, is_named: bool) -> Iterator[Path]:
    """Make the folder of a new run: `run_dir`, or one beside it where another run took a name that nobody asked for.

    No other run writes to it within. It is removed where the work ends before it has become the folder of a run.
    """
    new = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
    try:
        try:
            run_dir.mkdir(parents=True, exist_ok=is_named)
        except FileExistsError:
            if is_named:
                raise
            run_dir = run_dir.with_name(f"{run_dir.name}-{threading.get_native_id()}")
            new = [run_dir]
            run_dir.mkdir()
        if not os.access(run_dir, os.W_OK):
            raise OSError(errno.EROFS, "it cannot be written to")
    except OSError as error:
        _remove(new)
        what = f"the run's directory '{run_dir}' cannot be made"
        allowed = "a folder that this user can make and write to"
        raise ConfigError(what, got=error.strerror, allowed=allowed, hint="choose another one with --out") from error
    try:
        with holding(run_dir):
            _check_unused(run_dir)  # once more: another run may have come and gone
            try:
                yield run_dir
            except (ConfigError, DiskError, Interrupted):
                if not (run_dir / "config.toml").exists():
                    (run_dir / PROMPTS_FILE).unlink(missing_ok=True)
                raise
    except (ConfigError, DiskError, Interrupted):
        _remove(new)
        raise


def _remove(folders: Sequence[Path]) -> None:
    """Remove those of `folders`, inner ones first, that are there and empty."""
    for folder in folders:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def new_run_dir(recipe: str, out: str | Path | None) -> Path:
    """Return the folder of a new run: `out`, or a name of its own under runs/. ConfigError for one that is in use."""
    if out is not None:
        check_path(out, "the run's directory")
    run_dir = Path("runs") / f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}" if out is None else Path(out)
    if out is None and run_dir.exists():
        run_dir = run_dir.with_name(f"{run_dir.name}-{time.monotonic_ns() % 1000:03d}")
    check_free(run_dir)
    _check_unused(run_dir)
    return run_dir


def _check_unused(run_dir: Path) -> None:
    try:
        is_file = run_dir.exists() and not run_dir.is_dir()
        is_used = run_dir.is_dir() and any(path.name != LOCK_FILE for path in run_dir.iterdir())
    except OSError as error:
        raise ConfigError(
            f"the run's directory '{run_dir}' cannot be made", got=error.strerror, allowed="a new or empty directory"
        ) from error
    if is_file:
        raise ConfigError(
            "the run's directory is a file", got=str(run_dir), allowed="a new or empty directory", hint="see --out"
        )
    if is_used:
        what = "the run's directory is not empty"
        hint = f"choose another --out, or continue that run with --resume {quote(str(run_dir))}"
        raise ConfigError(what, got=str(run_dir), allowed="a new or empty directory", hint=hint)


def check_goes_on(config: RunConfig, run_dir: Path) -> None:
    """Raise ConfigError where RL in `run_dir` has done all the steps that `config` asks for."""
    if not is_rl_done(config, run_dir):
        return
    summary, more = read_summary(run_dir / "summary.json"), f"--steps {2 * config.steps}"
    if (cause := summary.stopped_because) in ("stop_at", "patience"):
        more = f"another --eval.{cause}, or none (null),"
    folder = quote(str(run_dir))
    page = "" if (run_dir / "report.html").exists() else f"; its page is missing: `slipstream report {folder}`"
    raise ConfigError(
        "the run is already complete",
        got=f"{summary.steps} of {config.steps} steps" + (f", ended by {cause}" if cause else ""),
        allowed="a run that was stopped before its last step, or more steps",
        hint=f"{more} goes on with it; a new run from its policy takes {policy_flags(run_dir, config)}{page}",
    )


def is_rl_done(config: RunConfig, run_dir: Path) -> bool:
    """Return whether RL has done all of its steps and left a policy: its summary is written last.

    ConfigError where it has gone through more.
    """
    summary = _summarised(run_dir)
    if summary is None or summary.status != "done" or not has_checkpoint(run_dir / "model"):
        return False
    if summary.steps > config.steps:
        got = f"steps = {config.steps}, after {summary.steps} steps"
        raise ConfigError("the run has gone further than that", got=got, allowed=f"at least {summary.steps}")
    if summary.stopped_because is None:
        return summary.steps == config.steps
    if summary.stopped_because == "callback":
        return config.steps == resolve(run_dir / "config.toml").steps
    return _stops_early(config, run_dir)


def _stops_early(config: RunConfig, run_dir: Path) -> bool:
    """Return whether `config` ends the run in `run_dir` by the evaluations so far."""
    rule, results = EarlyStopping(config.eval), {}
    for line in read_jsonl(run_dir / "metrics.jsonl", dict[str, Any]):
        if (greedy := in_metrics(line, GREEDY_PREFIX)) is not None:
            results[line["version"]] = greedy  # older runs may have two of their last version
    for greedy in results.values():
        rule.take(greedy)
    return rule.cause is not None


def _summarised(run_dir: Path) -> Summary | None:
    """The run's summary, where an attempt has come to its end."""
    if not (run_dir / "summary.json").is_file():
        return None
    try:
        return read_summary(run_dir / "summary.json")
    except SlipstreamError as error:
        hint = "without that file the run goes on from its last checkpoint"
        raise ConfigError(error.what, got=error.got, allowed="what the run has written", hint=hint) from error
