"""The Python API: `slipstream.run` does what `slipstream run` does.

    import slipstream
    result = slipstream.run("quickstart", overrides={"steps": 50})
    result.summary["eval"]["after"]["accuracy"]

It works from scripts without a main guard and from notebook cells: executors are started as processes of their own, and
a reward given as a Python function (a lambda, too) is called in the caller's process.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

from rich.console import Console

from slipstream.controller.nursery import nursery_for
from slipstream.controller.pipeline import Pipeline
from slipstream.core.config import RunConfig
from slipstream.core.disk import replace_file
from slipstream.core.errors import ConfigError, did_you_mean
from slipstream.core.hooks import given_callbacks
from slipstream.core.interrupts import Interrupted, Interrupts
from slipstream.core.other_names import KEYWORDS, sentence
from slipstream.core.plain import shown
from slipstream.core.recipes import (
    PROMPTS_FILE,
    check_path,
    merge,
    names_terms,
    nested,
    resolve,
    resumed_config,
    same_name,
    table_of,
)
from slipstream.core.run_lock import check_free, holding
from slipstream.core.scratch import temporary_directory
from slipstream.core.sections import PromptsConfig
from slipstream.core.user_code import SCRIPTS_BEING_IMPORTED, ReachedRun, check_default_dtype
from slipstream.environments.checks import check_environments
from slipstream.generator.vllm.settings import interpreter
from slipstream.models.hub import Tell, pinned, with_folders
from slipstream.observe.outlet import CONSOLE_LOG, lasting_output
from slipstream.prompts.rows import to_json_types
from slipstream.rewards.given import Functions, Reward, with_given
from slipstream.stages.named import check_named
from slipstream.stages.progress import told_of
from slipstream.stages.run_folder import check_goes_on, folder_of, new_run_dir

if TYPE_CHECKING:  # torch and transformers are imported when the input has been looked at
    from slipstream.controller.meeting import Cluster
    from slipstream.environments.checks import Given
    from slipstream.environments.given import AgentFunction, EnvironmentMaker
    from slipstream.stages.rl import FromPython

ScoredBy = tuple[Reward | Sequence[Reward] | None, Sequence[float] | None]
"""`reward` and `reward_weights`."""
GivenPrompt = str | Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""A text, a row of columns, or the messages of a chat."""


@dataclass(frozen=True)
class Result:
    """A run that has ended: its directory, and `summary.json` as a dict; without RL the record of its last stage."""

    out: Path
    summary: dict[str, Any]

    @property
    def status(self) -> str:
        """Return 'done' or 'interrupted'; a run that failed raises instead."""
        return str(self.summary["status"])


def run(
    config: RunConfig | str | Path | Mapping[str, Any] | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    preset: str | None = None,
    reward: Reward | Sequence[Reward] | None = None,
    reward_weights: Sequence[float] | None = None,
    prompts: Sequence[str | Mapping[str, Any] | Sequence[Mapping[str, Any]]] | None = None,
    environment: EnvironmentMaker | None = None,
    tools: Sequence[Callable[..., Any] | str] | None = None,
    environment_factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None = None,
    agent: AgentFunction | None = None,
    callbacks: object = None,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    display: bool = True,
    pipeline: Callable[[RunConfig], Pipeline] | None = None,
    cluster: Cluster | None = None,
    **others: Never,
) -> Result:
    """Train; returns when the run is done or was interrupted.

    `config` is a RunConfig, a recipe's name or path, or its tables. `reward(prompts, completions, completion_ids,
    **columns)` returns one number (or None) per completion; it replaces the config's terms and runs in this process,
    `rewards.num_threads` calls at once, with `rewards.timeout_s` as deadline. A list may mix functions, names as in
    `rewards.terms` ("length", "file.py:function"), and tables of these with `weight`, `per` and `params`;
    `reward_weights` are their factors in the sum. `environment` (a class with `reset` and `step`, or several by name),
    `tools` (functions), `environment_factory` (TRL's) and `agent(row, base_url, api_key)`, or several by name, answer
    the policy's turns; they run in this process, and the first and the last replace the terms, too. `callbacks`
    (methods or keys `on_step`, `on_eval`, `on_checkpoint`) hear of the run in a thread, and end it by returning "stop".
    `prompts` (strings, chats, rows with `prompt` and `answer`) replace the config's; a tenth is held out, at most
    `prompts.num_eval`. Columns, ways to read and held-out data that tables or `overrides` name stay. `out` is the new
    folder; `resume` goes on with the run there, from its last checkpoint or stage; `overrides` may change
    `RESUMED_WITH` of `core.recipes`. `pipeline` replaces the default. Groups of `cluster` (`launch.cluster_of`) join.

    Raises ConfigError before anything starts; ExecutorDied or another SlipstreamError when the run fails (its files
    stay, and `summary.json` says `failed`). In the main thread SIGINT, SIGTERM and SIGHUP end the run
    (`core/interrupts.py`); the last two then go to the program's own handler, or end it by SystemExit.
    """
    _check_call(others)
    handed, hooks = (environment, tools, environment_factory, agent), given_callbacks(callbacks)
    scored_by, tell = (reward, reward_weights), _tell(display=display)
    with _interruptible() as interrupts:
        if resume is not None:
            _check_resumed({"preset": preset, "prompts": prompts, "out": out, "tables": _has_tables(config)})
            resolved, functions, environments = _saved(Path(resume), overrides, scored_by, handed, tell=tell)
        elif config is None:
            raise ConfigError("a configuration is needed", allowed="a recipe's name or path, tables, or resume=DIR")
        else:
            layers = (config, nested(overrides or {}))
            resolved = _resolved(*layers, preset, prompts)
            resolved, functions, environments = _with_python(resolved, layers, scored_by, handed)
            _check_new(resolved, functions, environments, cluster, has_own_prompts=prompts is not None)
            resolved = pinned(resolved, tell=tell)
        run_dir = new_run_dir(resolved.recipe, out) if resume is None else Path(resume)
        with nursery_for(resolved, tell=tell):
            given = _given(functions, environments, display, pipeline, cluster, interrupts, hooks)
            if resume is not None:
                return _resume(resolved, run_dir, given)
            return _run(resolved, prompts, run_dir, given, _kept(layers), is_named=out is not None)


def _given(functions: Functions, environments: Given | None, display: bool, *others: Any) -> FromPython:
    """Return what was handed over; the first import of torch."""
    with told_of("importing torch", display=display):
        from slipstream.stages.rl import FromPython

    return FromPython(functions, environments, display, *others)


@contextmanager
def _threads_kept() -> Iterator[None]:
    """Restore torch's number of threads, which executors and stages set: with `host = "inline"` here."""
    import torch

    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _check_call(others: Mapping[str, object]) -> None:
    """Raise ConfigError for unknown arguments and a place where no run can be, ReachedRun amid a script's import."""
    if SCRIPTS_BEING_IMPORTED:
        raise ReachedRun
    if others:
        raise _unknown_arguments(list(others))
    try:
        check_path(os.getcwd(), "the working folder")
    except FileNotFoundError as error:
        raise ConfigError("the working folder is gone", hint="start in a folder that is there") from error
    temporary_directory()


def _has_tables(config: object) -> bool:
    return isinstance(config, Mapping | RunConfig)


def _check_resumed(others: Mapping[str, object]) -> None:
    if given_too := [name for name, value in others.items() if not (value is None or value is False)]:
        raise ConfigError("a resumed run keeps its configuration", got=f"resume with {', '.join(given_too)}")


def _with_environments(config: RunConfig, *named: Any, keeps_terms: bool = True) -> tuple[RunConfig, Given | None]:
    """Return `config` with the environments that were handed over, and these; as it is without any."""
    if all(one is None for one in named):
        if config.environment.is_set:
            check_environments(config, None)  # a run that goes on may need them
        return config, None
    from slipstream.environments.given import with_given_environment

    return with_given_environment(config, *named, keeps_terms=keeps_terms)


def _with_python(
    config: RunConfig, layers: Sequence[object], scored_by: ScoredBy, answered_by: Sequence[Any]
) -> tuple[RunConfig, Functions, Given | None]:
    """Return `config` with the rewards and environments that were handed over, and these objects.

    `layers` are what it was made of: the terms and the measure that they name stay.
    """
    keeps_terms = scored_by[0] is not None or any(map(names_terms, layers))
    config, functions = with_given(config, *scored_by, keeps_measure="measure" in table_of(layers[-1], "eval"))
    config, environments = _with_environments(config, *answered_by, keeps_terms=keeps_terms)
    return config, functions, environments


def _check_new(
    config: RunConfig,
    functions: Functions,
    environments: Given | None,
    cluster: Cluster | None,
    *,
    has_own_prompts: bool,
) -> None:
    """Raise ConfigError for names that nobody knows, and where vLLM is to generate here, and there is none."""
    check_named(config, given=functions, environments=environments, has_own_prompts=has_own_prompts)
    remote = set() if cluster is None else set(cluster.remote)
    for section in ("generator", "teacher"):
        part = vars(config)[section]
        if section not in remote and "rl" in config.stages and part.engine == "vllm":
            interpreter(part.vllm, section)


def _unknown_arguments(names: Sequence[str]) -> ConfigError:
    """Return the error for arguments that `run` does not have: other trainers' names, and fields beside `overrides`."""
    known = [name for name in inspect.signature(run).parameters if name != "others"]
    hints = []
    for name in names:
        if name in KEYWORDS:
            hints.append(f"{name} is {KEYWORDS[name]} here")
        elif (field := same_name(name)) is not None:
            hints.append(f'{name} is overrides={{"{field}": ...}} here')
        elif (said := sentence(name) or did_you_mean(name, known)) is not None:
            hints.append(said)
    return ConfigError(
        "slipstream.run has no such argument",
        got=", ".join(names),
        allowed=", ".join(known),
        hint="; ".join(hints) or None,
    )


@contextmanager
def _interruptible() -> Iterator[Interrupts]:
    """End the run within on signals; afterwards they have the effect that they had before."""
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
    prompts: Sequence[GivenPrompt] | None,
) -> RunConfig:
    if prompts is not None:
        _check_prompts(prompts)
    if isinstance(config, RunConfig):
        if overrides or preset:
            raise ConfigError("a RunConfig is already resolved", hint="pass a recipe name or tables with overrides")
        return config
    if prompts is not None:  # tables need not name a source that would be replaced
        overrides = merge(overrides or {}, {"prompts": {"tasks": [], "dataset": PROMPTS_FILE}})
    return resolve(config, overrides, preset)


def _saved(
    run_dir: Path,
    overrides: Mapping[str, Any] | None,
    scored_by: ScoredBy,
    answered_by: Sequence[Any],
    *,
    tell: Tell | None,
) -> tuple[RunConfig, Functions, Given | None]:
    """Return the configuration that the run in `run_dir` goes on with, and what it is given anew, as it was given."""
    check_path(run_dir, "the run's directory")
    config = resumed_config(run_dir, overrides)
    check_free(run_dir)
    if config.stages == ["rl"]:
        check_goes_on(config, run_dir)
    config = pinned(config, tell=tell, is_resumed=True)
    with_rewards, functions = with_given(config, *scored_by)
    _check_resumed({"another reward": with_rewards.rewards.terms != config.rewards.terms})
    whole, environments = _with_environments(with_rewards, *answered_by)
    _check_resumed({"another environment": whole.environment != config.environment})
    return whole, functions, environments


@_threads_kept()
def _run(
    config: RunConfig,
    prompts: Sequence[GivenPrompt] | None,
    run_dir: Path,
    given: FromPython,
    kept: Mapping[str, Any],
    *,
    is_named: bool,
) -> Result:
    """Make a new run in `run_dir`, or beside it where nobody named that and another run took it."""
    from slipstream.stages.chain import check_data, run_stages
    from slipstream.stages.rl import run_rl

    _check(config, given)
    with folder_of(run_dir, is_named=is_named) as run_dir:
        if prompts is not None:
            config = _with_prompts(config, prompts, run_dir, kept)
        place = run_dir.absolute()  # whatever a reward does to the working folder
        check_data(config, place, given)
        with lasting_output(place / "logs" / CONSOLE_LOG):
            work = run_rl if config.stages == ["rl"] else run_stages
            return Result(out=place, summary=work(config, place, given))


@_threads_kept()
def _resume(config: RunConfig, run_dir: Path, given: FromPython) -> Result:
    """Go on where the run stopped: from the newest checkpoint of RL, or with the first stage that is not done."""
    from slipstream.stages.chain import run_stages
    from slipstream.stages.rl import resume_rl

    _check(config, given)
    place = run_dir.absolute()
    with holding(run_dir), lasting_output(place / "logs" / CONSOLE_LOG):
        work = resume_rl if config.stages == ["rl"] else run_stages
        return Result(out=place, summary=work(config, place, given))


def _check(config: RunConfig, given: FromPython) -> None:
    """Fetch the checkpoints, which takes longest, and raise ConfigError for what any stage would stumble over."""
    from slipstream.controller.meeting import check_listening
    from slipstream.stages.chain import check_stages

    if config.host == "inline":
        check_default_dtype()
    with_folders(config, tell=_tell(display=given.display), is_first=True)
    check_stages(config, given=given.functions, environments=given.environments, remote=given.remote)
    if given.cluster is not None:
        check_listening(given.cluster.listen)


def _check_prompts(prompts: Sequence[GivenPrompt]) -> None:
    """Raise ConfigError for what is no list of prompts: from a path, its letters would be taken for prompts."""
    allowed = "a list of strings, of chats as lists of messages, or of rows with `prompt` and `answer`"
    if isinstance(prompts, (str, bytes, Path)):
        hint = f'a file, or a data set of the hub, is overrides={{"prompts.dataset": {shown(str(prompts))}}}'
        raise ConfigError("'prompts' is no list", got=shown(prompts), allowed=allowed, hint=hint)
    try:
        num_prompts = len(prompts)
        _ = prompts[0] if num_prompts else None
    except (TypeError, LookupError):  # a generator, a dict of columns or of splits, a table of pandas
        hint = "of several splits give one; list(...) makes a list, and of a table of pandas .to_dict('records')"
        raise ConfigError("'prompts' is no list", got=type(prompts).__name__, allowed=allowed, hint=hint) from None
    if num_prompts < 2:
        raise ConfigError("too few prompts", got=num_prompts, allowed="at least 2: one is held out")
    for index, row in enumerate(prompts):
        is_chat = isinstance(row, list | tuple) and all(isinstance(message, Mapping) for message in row)
        if not is_chat and not isinstance(row, str | Mapping):
            raise ConfigError(f"prompts[{index}] is no prompt", got=type(row).__name__, allowed=allowed)


_READING = ("dataset_config", "dataset_split", "streaming", "messages_column", "between_periods")
_KEPT = ("prompt_column", "answer_column", "eval_dataset", "num_train", *_READING)


def _kept(layers: Sequence[object]) -> dict[str, Any]:
    """Return what tables and overrides, not a recipe, say of columns, numbers, held-out data and how rows are read:
    `prompts` replaces the rest."""
    found: dict[str, Any] = {}
    for one in layers:
        if isinstance(one, RunConfig) and one.prompts.num_train != PromptsConfig.model_fields["num_train"].default:
            found["num_train"] = one.prompts.num_train
        found |= {name: value for name, value in table_of(one, "prompts").items() if name in _KEPT}
        found |= {name: value for name, value in table_of(one, "eval").items() if name == "sets"}
    return found


def _with_prompts(
    config: RunConfig, prompts: Sequence[GivenPrompt], run_dir: Path, kept: Mapping[str, Any]
) -> RunConfig:
    """Return `config` with `prompts` as its dataset, written to the run's directory, where a resume finds it.

    Columns are `prompt` and `answer`, a tenth of the rows is held out, and all others are trained on, unless `kept`
    says otherwise.
    """
    path = (run_dir / PROMPTS_FILE).resolve()
    column = kept.get("prompt_column", "prompt")
    rows = [dict(row) if isinstance(row, Mapping) else {column: row} for row in prompts]
    plain = [to_json_types(row, where=f"prompts[{index}]") for index, row in enumerate(rows)]
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in plain]
    replace_file(path, "".join(lines).encode())
    tables = config.model_dump()
    tables["prompts"] |= {name: kept.get(name, PromptsConfig.model_fields[name].default) for name in _READING}
    tables["prompts"] |= {
        "tasks": [],
        "dataset": str(path),
        "eval_dataset": kept.get("eval_dataset"),
        "prompt_column": column,
        "answer_column": kept.get("answer_column", "answer"),
        "num_train": kept.get("num_train", len(rows)),
    }
    if not kept.get("sets"):
        tables["eval"]["sets"] = []
        if kept.get("eval_dataset") is None:
            num_eval = min(config.prompts.num_eval, max(1, len(rows) // 10))
            tables["prompts"]["num_eval"] = num_eval
            tables["eval"]["num_prompts"] = min(config.eval.num_prompts, num_eval)
    return resolve(tables)


def _tell(*, display: bool) -> Tell | None:
    """Return a function that prints news of a download, which comes before there is anything else to watch."""
    return partial(Console(stderr=True).print, highlight=False, markup=False, soft_wrap=True) if display else None
