"""The checkpoint to evaluate and the recipe to evaluate it under: a run has both. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from string import Formatter
from typing import Any, NamedTuple

from slipstream.core.config import RunConfig, stage_of
from slipstream.core.errors import ConfigError
from slipstream.core.lora_section import LoraConfig
from slipstream.core.recipes import (
    load_recipe,
    merge,
    nested,
    policy_left,
    resolve,
    saved_tables,
    table_of,
    with_checkpoints,
    with_stage_paths,
)
from slipstream.core.run_lock import LOCK_FILE
from slipstream.core.user_code import check_default_dtype
from slipstream.generator.vllm.settings import check_settings
from slipstream.models.hub import Tell, checkpoint_folder, has_checkpoint, hub_id, pinned, with_folders
from slipstream.observe.attempts import attempt_folders

_OWN_FILES = (LOCK_FILE, "ledger.jsonl", "summary.json")
"""Files of a run's folder: the first is there from its beginning, the last at its end."""


def eval_target(
    path: str | Path,
    *,
    recipe: str | Path | Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    data: str | Path | None = None,
    num_prompts: int | None = None,
    tell: Tell | None = None,
) -> tuple[Path, RunConfig]:
    """The checkpoint's folder, and the configuration to evaluate it under (`model.path` is that folder).

    `path` is a run's directory (its `model/` and `config.toml`), or a checkpoint's or its hub id, whose download is
    told of by `tell`; `recipe` replaces the run's own configuration. `data` takes the place of its prompts,
    `num_prompts` that of `eval.num_prompts`. 'stage:...' stands for the checkpoints of the run that `path` is or lies
    in. ConfigError when there is no checkpoint, no reward model, nothing says what to ask it, or a data set is given
    that would not be asked.
    """
    check_default_dtype()
    path, is_on_hub = Path(path), hub_id(str(path)) is not None
    checkpoint, is_run = (path, False) if is_on_hub else _checkpoint_in(path)
    if recipe is None and not is_run:
        raise ConfigError("a checkpoint alone does not say what to ask it", got=str(path), hint="add --recipe")
    if recipe is None:
        recipe = saved_tables(path)
    tables = recipe if isinstance(recipe, Mapping) else load_recipe(recipe)
    # The checkpoint has its adapters, and gets no new ones.
    over: dict[str, Any] = {"model": {"path": str(checkpoint), "revision": None, "lora": LoraConfig().model_dump()}}
    if data is not None:
        over["prompts"] = {"tasks": [], "dataset": str(data), "eval_dataset": str(data), "streaming": False}
    if num_prompts is not None or data is not None:
        over["eval"] = {"num_prompts": 1}  # the number is the caller's
    if data is not None:
        over["eval"] |= {"sets": [], "metric": None, "stop_at": None}  # the run's rules may go by a set's measure
    given = nested(overrides or {})
    config = resolve(tables, merge(given, over))
    _check_asked(config, table_of(given, "prompts"), data)
    check_settings(config)
    if is_on_hub:  # only now, as a download may take long
        path = checkpoint = checkpoint_folder(str(path), what="MODEL", tell=tell)
        config = with_checkpoints(config, lambda field, one: str(checkpoint) if field == "model.path" else one)
    run_dir = _run_of(path)
    if run_dir is not None:
        config = with_stage_paths(config, run_dir)
    only = {"rewards.models.path"}
    config = with_folders(pinned(config, tell=tell, only=only), tell=tell, is_first=True, only=only)
    _check_reward_models(config, run_dir)
    return checkpoint, config


def _check_asked(config: RunConfig, given: Mapping[str, Any], data: str | Path | None) -> None:
    """Raise ConfigError for a data set among the fields `given` of [prompts] that would not be evaluated on."""
    named = {name: given[name] for name in ("dataset", "eval_dataset", "tasks") if given.get(name)}
    asked = config.prompts.eval_dataset if data is None else str(data)
    if not named or (data is None and (asked is None or "eval_dataset" in named)):
        return
    what = "--data" if data is not None else "prompts.eval_dataset"
    raise ConfigError(
        f"a data set is given that would not be evaluated on: the prompts are those of {what}",
        got=f"{', '.join(f'prompts.{name} = {value!r}' for name, value in named.items())} beside {asked}",
        allowed="one data set",
        hint="`slipstream eval RUN --data FILE` answers the prompts of a file, and no others",
    )


class ServedTarget(NamedTuple):
    """The checkpoint to serve, its name for clients, and what its run adds to that.

    `template` is that of a message, where the one of its prompts has a single place.
    """

    folder: Path
    name: str
    stop_ids: tuple[int, ...] = ()
    variables: Mapping[str, Any] = {}
    template: str | None = None


def served_target(path: str | Path, *, tell: Tell | None = None) -> ServedTarget:
    """Return what to serve.

    `path` is as for `eval_target`, without a recipe. ConfigError where there is no checkpoint.
    """
    check_default_dtype()
    wanted = hub_id(str(path))
    folder = checkpoint_folder(str(path), what="MODEL", tell=tell)
    checkpoint, _ = _checkpoint_in(folder)
    run_dir = _run_of(folder)
    name = str(wanted or (run_dir or checkpoint).resolve().name)
    if run_dir is None:
        return ServedTarget(checkpoint, name)
    config = resolve(load_recipe(run_dir / "config.toml"))
    prompts, stop_ids = config.prompts, tuple(config.generator.stop_token_ids)
    return ServedTarget(checkpoint, name, stop_ids, prompts.chat_template_kwargs, _of_messages(prompts.template))


def _of_messages(template: str) -> str | None:
    """Return the template of prompts as one of messages, whose text is the question; None where it has other places."""
    try:
        pieces = [(text.replace("{", "{{").replace("}", "}}"), name) for text, name, *_ in Formatter().parse(template)]
    except ValueError:
        return None
    if sum(name is not None for _, name in pieces) != 1:
        return None
    return "".join(text + ("" if name is None else "{content}") for text, name in pieces)


def _checkpoint_in(path: Path) -> tuple[Path, bool]:
    """Return the checkpoint in folder `path`, which may be a run's, and whether it is. ConfigError for none."""
    is_run = (path / "config.toml").is_file()
    checkpoint = _left_by(path) if is_run else path
    if not has_checkpoint(checkpoint):
        raise ConfigError(
            f"there is no checkpoint in '{path}'",
            got=_seen(path, is_run=is_run),
            allowed="folder with config.json, or a run's",
            hint="a run writes model/ when it ends; `slipstream run --resume` finishes it" if is_run else None,
        )
    return checkpoint, is_run


def _left_by(run_dir: Path) -> Path:
    stages = load_recipe(run_dir / "config.toml").get("stages")
    return policy_left(run_dir, stages if isinstance(stages, list) else ())


def _run_of(path: Path) -> Path | None:
    """The run's directory that `path` is, or in which it is a checkpoint: of RL or of a stage.

    Other programs have a config.toml, too: a folder above `path` has further files of a run's.
    """
    path = path.resolve()
    above = [folder for folder in path.parents[:2] if any((folder / name).is_file() for name in _OWN_FILES)]
    return next((folder for folder in (path, *above) if (folder / "config.toml").is_file()), None)


def _check_reward_models(config: RunConfig, run_dir: Path | None) -> None:
    """ConfigError for a reward model that a stage would have to make, or that is not there."""
    for model in config.rewards.models:
        if (Path(model.path) / "config.json").is_file():
            continue
        if stage_of(model.path) is None:
            raise ConfigError(
                f"there is no reward model '{model.name}'",
                got=model.path,
                allowed="a folder with config.json, or a hub id",
                hint=None if run_dir is None else f"the run in '{run_dir}' has gone through no stage that makes it",
            )
        raise ConfigError(
            f"the recipe's reward model '{model.name}' is made by a stage, and this checkpoint is of no run",
            got=f"rewards.models[].path = '{model.path}'",
            allowed="the folder of a run that went through that stage, or of a checkpoint in it",
            hint="`slipstream eval RUN` takes the run's own; a recipe of yours may name RUN/reward_model/model",
        )


def _seen(path: Path, *, is_run: bool) -> str:
    if is_run:
        earlier = [f", but for {one.name}/model" for one in attempt_folders(path) if (one / "model").is_dir()]
        return "".join(["a run without an exported model", *earlier[-1:]])
    if path.is_dir():
        return "a folder without config.json"
    return "a file" if path.exists() else "nothing of that name"
