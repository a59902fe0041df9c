"""What to evaluate, and on what: a run says both, a Hugging Face checkpoint needs a recipe. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.recipes import load_recipe, merge, resolve, with_stage_paths


def eval_target(
    path: str | Path,
    *,
    recipe: str | Path | Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> tuple[Path, RunConfig]:
    """The checkpoint's folder, and the configuration to evaluate it under (`model.path` is that folder).

    `path` is a run's directory (its `model/` and `config.toml`) or a checkpoint's; `recipe` replaces the run's own
    configuration. ConfigError when there is no checkpoint, or nothing says what to ask it.
    """
    path = Path(path)
    is_run = (path / "config.toml").is_file()
    checkpoint = path / "model" if is_run else path
    if not (checkpoint / "config.json").is_file():
        raise ConfigError(
            f"there is no checkpoint in '{path}'",
            got=_seen(path, is_run=is_run),
            allowed="folder with config.json, or a run's",
            hint="a run writes model/ when it ends; `slipstream run --resume` finishes it" if is_run else None,
        )
    if recipe is None and not is_run:
        raise ConfigError("a checkpoint alone does not say what to ask it", hint="add --recipe")
    if recipe is None:
        recipe = path / "config.toml"
    tables = recipe if isinstance(recipe, Mapping) else load_recipe(recipe)
    config = resolve(tables, merge(overrides or {}, {"model": {"path": str(checkpoint)}}))
    return checkpoint, with_stage_paths(config, path) if is_run else config


def _seen(path: Path, *, is_run: bool) -> str:
    if is_run:
        return "a run without an exported model"
    if path.is_dir():
        return "a folder without config.json"
    return "a file" if path.exists() else "nothing of that name"
