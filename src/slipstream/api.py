"""The Python API: `slipstream.run` does what `slipstream run` does.

    import slipstream
    result = slipstream.run("quickstart", overrides={"steps": 50})
    result.summary["eval"]["after"]["accuracy"]

It works from scripts without a main guard and from notebook cells: executors are started as processes of their own, and
a reward given as a Python function (a lambda, too) is called in the caller's process.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from slipstream.controller.pipeline import SCRIPTS_BEING_IMPORTED, Pipeline, ReachedRun
from slipstream.core.config import RunConfig
from slipstream.core.disk import replace_file
from slipstream.core.errors import ConfigError, DiskError
from slipstream.core.hub import Tell, pinned, with_folders
from slipstream.core.interrupts import Interrupted, Interrupts
from slipstream.core.plain import wrong_text
from slipstream.core.recipes import check_path, merge, nested, resolve, resumed_config
from slipstream.core.run_lock import LOCK_FILE, check_free, holding
from slipstream.observe.outlet import CONSOLE_LOG, lasting_output
from slipstream.rewards.given import Functions, Reward, with_given
from slipstream.stages.named import check_named, check_names

if TYPE_CHECKING:  # torch and transformers are imported when the input has been looked at
    from slipstream.controller.cluster import Cluster
    from slipstream.stages.rl import FromPython

PROMPTS_FILE = "prompts.jsonl"  # in the run's directory: the prompts given from Python
ScoredBy = tuple[Reward | Sequence[Reward] | None, Sequence[float] | None]
"""`reward` and `reward_weights`."""


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
    config: RunConfig | str | Path | Mapping[str, Any] | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    preset: str | None = None,
    reward: Reward | Sequence[Reward] | None = None,
    reward_weights: Sequence[float] | None = None,
    prompts: Sequence[str | Mapping[str, Any]] | None = None,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    display: bool = True,
    pipeline: Callable[[RunConfig], Pipeline] | None = None,
    cluster: Cluster | None = None,
) -> Result:
    """Train; returns when the run is done or was interrupted.

    `config` is a RunConfig, a recipe's name or path, or its tables. `reward(prompts, completions, completion_ids,
    **columns)` returns one number (or None) per completion; it replaces the config's terms and runs in this process
    with `rewards.timeout_s` as its deadline. A list may mix functions, names as in `rewards.terms` ("length",
    "file.py:function"), and tables of these with their `weight`, `per` and `params`; `reward_weights` are their factors
    in the sum. `prompts` (strings, or rows with `prompt` and `answer`) replace the
    config's; a tenth of them is held out, at most `prompts.num_eval`. `out` is the run's directory, new or empty;
    `resume` continues the run in that directory, from its last checkpoint or with the first of its `stages` that is
    not done, under the configuration that it saved: `config` is not looked at, and `overrides` may change what
    `core.recipes.RESUMED_WITH` lists (`{"steps": 400}` extends a run, also one that is done). `pipeline` replaces the
    default pipeline. With `cluster` (`slipstream.launch.cluster_of`) trainer and generators are not started here:
    they join, from wherever they are.

    Raises ConfigError before anything starts; ExecutorDied or another SlipstreamError when the run fails (the files
    written so far stay, and `summary.json` says `failed`). In the main thread SIGINT, SIGTERM and SIGHUP end the run
    (`core/interrupts.py`); SIGTERM and SIGHUP then go to the program's own handler, and without one end the program
    by SystemExit.
    """
    if SCRIPTS_BEING_IMPORTED:
        raise ReachedRun
    with _interruptible() as interrupts:
        if resume is not None:
            if given_too := [name for name, value in (("preset", preset), ("prompts", prompts), ("out", out)) if value]:
                raise ConfigError("a resumed run keeps its configuration", got=f"resume with {', '.join(given_too)}")
        elif config is None:
            raise ConfigError("a configuration is needed", allowed="a recipe's name or path, tables, or resume=DIR")
        resolved: RunConfig | None = None
        functions: Functions = {}
        if config is not None and resume is None:
            over = nested(overrides or {})
            resolved = _resolved(config, over, preset, has_prompts=prompts is not None)
            is_measure_given = isinstance(own := over.get("eval"), Mapping) and "measure" in own
            resolved, functions = with_given(resolved, reward, reward_weights, keeps_measure=is_measure_given)
            check_named(resolved, given=functions, has_own_prompts=prompts is not None)
            resolved = pinned(resolved, tell=_tell(display=display))
            check_names(resolved)
        from slipstream.stages.rl import FromPython

        given = FromPython(
            functions=functions, display=display, pipeline=pipeline, cluster=cluster, interrupts=interrupts
        )
        if resolved is not None:
            return _run(resolved, prompts, out, given)
        assert resume is not None, "there is a configuration, or a run to go on with"
        return _resume(Path(resume), overrides, (reward, reward_weights), given)


@contextmanager
def _interruptible() -> Iterator[Interrupts]:
    """Signals end the run within; afterwards they have the effect that they had before."""
    interrupts = Interrupts()
    try:
        with interrupts:
            yield interrupts
    except Interrupted:
        interrupts.hand_on()
        raise
    interrupts.hand_on()


def _resolved(
    config: RunConfig | str | Path | Mapping[str, Any],
    overrides: Mapping[str, Any] | None,
    preset: str | None,
    *,
    has_prompts: bool,
) -> RunConfig:
    if isinstance(config, RunConfig):
        if overrides or preset:
            raise ConfigError("a RunConfig is already resolved", hint="pass a recipe name or tables with overrides")
        return config
    if has_prompts:  # tables need not name a source that would be replaced
        overrides = merge(overrides or {}, {"prompts": {"tasks": [], "dataset": PROMPTS_FILE}})
    return resolve(config, overrides, preset)


def _run(
    config: RunConfig, prompts: Sequence[str | Mapping[str, Any]] | None, out: str | Path | None, given: FromPython
) -> Result:
    """A new run, with the arguments of `run`."""
    from slipstream.controller.meeting import check_listening
    from slipstream.stages.chain import check_data, check_stages, run_stages
    from slipstream.stages.rl import run_rl

    run_dir = _new_run_dir(config, out)
    with_folders(config, tell=_tell(display=given.display))  # what is large comes before anything starts
    check_stages(config, given=given.functions, remote=given.remote)
    if given.cluster is not None:
        check_listening(given.cluster.listen)
    with _made(run_dir, is_named=out is not None) as run_dir:
        if prompts is not None:
            config = _with_prompts(config, prompts, run_dir)
        check_data(config, run_dir, given)
        with lasting_output(run_dir / "logs" / CONSOLE_LOG):
            if config.stages == ["rl"]:
                return Result(out=run_dir, summary=run_rl(config, run_dir, given))
            return Result(out=run_dir, summary=run_stages(config, run_dir, given))


@contextmanager
def _made(run_dir: Path, *, is_named: bool) -> Iterator[Path]:
    """The folder of a new run: `run_dir`, or one beside it where another run has taken a name that nobody asked for.

    It exists within, and no other run writes to it; it goes again where that ends before it has become that of a run.
    """
    new = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
    try:
        try:
            run_dir.mkdir(parents=True, exist_ok=is_named)
        except FileExistsError:
            if is_named:
                raise
            run_dir = run_dir.with_name(f"{run_dir.name}-{os.getpid()}")
            new = [run_dir]
            run_dir.mkdir()
        if not os.access(run_dir, os.W_OK):
            raise OSError(errno.EROFS, "it cannot be written to")
    except OSError as error:
        _remove(new)
        raise ConfigError(
            f"the run's directory '{run_dir}' cannot be made",
            got=error.strerror,
            allowed="a folder that this user can make and write to",
            hint="choose another one with --out",
        ) from error
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
    """Those of `folders`, inner ones first, that are there and empty."""
    for folder in folders:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _new_run_dir(config: RunConfig, out: str | Path | None) -> Path:
    if out is not None:
        check_path(out, "the run's directory")
    run_dir = Path("runs") / f"{config.recipe}-{time.strftime('%Y%m%d-%H%M%S')}" if out is None else Path(out)
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
        raise ConfigError(
            "the run's directory is not empty",
            got=str(run_dir),
            allowed="a new or empty directory",
            hint=f"choose another --out, or continue that run with --resume {run_dir}",
        )


def _with_prompts(config: RunConfig, prompts: Sequence[str | Mapping[str, Any]], run_dir: Path) -> RunConfig:
    """The config with `prompts` as its dataset, written into the run's directory so that a resume finds them."""
    if len(prompts) < 2:
        raise ConfigError("too few prompts", got=len(prompts), allowed="at least 2: one is held out")
    path = (run_dir / PROMPTS_FILE).resolve()
    rows = [{"prompt": row} if isinstance(row, str) else dict(row) for row in prompts]
    try:
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError("prompts are kept as JSON", got=error, allowed="strings, or dicts of JSON's types") from error
    for index, line in enumerate(lines):
        if (wrong := wrong_text(line)) is not None:
            raise ConfigError(f"prompts[{index}] cannot be written", got=wrong, allowed="Unicode text")
    replace_file(path, "".join(lines).encode())
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


def _tell(*, display: bool) -> Tell | None:
    """What tells of a download, which comes before there is anything else to watch."""
    return partial(Console(stderr=True).print, highlight=False, markup=False, soft_wrap=True) if display else None


def _resume(run_dir: Path, overrides: Mapping[str, Any] | None, scored_by: ScoredBy, given: FromPython) -> Result:
    """Go on where the run stopped: from the newest checkpoint of RL, or with the first stage that is not done."""
    from slipstream.controller.meeting import check_listening
    from slipstream.stages.chain import check_stages, run_stages
    from slipstream.stages.rl import resume_rl

    check_path(run_dir, "the run's directory")
    tell = _tell(display=given.display)
    config = pinned(resumed_config(run_dir, overrides), tell=tell, is_resumed=True)
    config, functions = with_given(config, *scored_by)
    given = dataclasses.replace(given, functions=functions)
    with_folders(config, tell=tell)
    check_stages(config, given=functions, remote=given.remote)
    if given.cluster is not None:
        check_listening(given.cluster.listen)
    with holding(run_dir), lasting_output(run_dir / "logs" / CONSOLE_LOG):
        if config.stages == ["rl"]:
            return Result(out=run_dir, summary=resume_rl(config, run_dir, given))
        return Result(out=run_dir, summary=run_stages(config, run_dir, given))
