"""From a recipe and the user's wishes to a `RunConfig`, and back to TOML.

Layers, later over earlier: schema defaults < recipe < preset < explicit overrides. Sections merge field by field; lists
and free-form tables (`params`) are replaced as a whole. A section that is given another `name` starts from that one's
defaults: the `params` below were the other one's. Where the terms of the reward are replaced, an `eval.measure` below
that named one of them goes with it. Every mistake is a ConfigError that names the field's path.
"""

from __future__ import annotations

import functools
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, get_args

import tomli_w
from pydantic import BaseModel, ValidationError

from slipstream.core.config import PRESETS, STAGES, RunConfig, stage_of
from slipstream.core.disk import replace_file
from slipstream.core.errors import ConfigError, did_you_mean
from slipstream.core.fields import ABSOLUTE
from slipstream.core.files import no_run, read_whole
from slipstream.core.lora_section import BASE_FOLDER
from slipstream.core.other_names import leaves, sentence_of_value, sentences
from slipstream.core.plain import shortened, shown, wrong_path
from slipstream.core.sections import RewardsConfig

# What a pydantic error type allows, in words; `{...}` are its context. Types not listed keep pydantic's own message.
_ALLOWED = {
    "greater_than": "> {gt}",
    "greater_than_equal": ">= {ge}",
    "less_than": "< {lt}",
    "less_than_equal": "<= {le}",
    "literal_error": "{expected}",
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a string",
    "string_pattern_mismatch": "a name as the hint says",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "too_long": "at most {max_length} values",
    "too_short": "at least {min_length} values",
    "missing": "a value: the field has no default",
    "finite_number": "a finite number",
}

MAX_TOML_BYTES = 4 * 2**20
PROMPTS_FILE = "prompts.jsonl"
"""The prompts given from Python, in a run's directory."""
RETIRED: dict[str, object] = {"generator.vllm.dtype": "float32", "generator.vllm.transfer": "reload"}
"""Fields that are gone, with their defaults, which the config.toml of earlier runs has: with these they say nothing."""


@dataclass(frozen=True)
class RecipeInfo:
    """A shipped recipe; `description` is the first comment line of its file."""

    name: str
    description: str
    path: Path

    @property
    def needs(self) -> list[str]:
        """Return the checkpoints and data sets that it reads, as hub ids or relative paths: no wheel has them."""
        tables = read_toml(self.path)
        named = [tables.get(section, {}).get(field) for section, field in (*CHECKPOINTS, *DATA)]
        named += [one.get("dataset") for one in tables.get("eval", {}).get("sets", ())]
        named += [term["path"] for section in ("rewards", "gold") for term in tables.get(section, {}).get("models", ())]
        return list(dict.fromkeys(name for name in named if name is not None and stage_of(name) is None))


def recipes_dir() -> Path:
    """Return the folder of the shipped recipes: inside the package in a wheel, at the top of a checkout otherwise."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parents[1] / "recipes"


def list_recipes() -> list[RecipeInfo]:
    """Return the shipped recipes, by name."""
    return [RecipeInfo(p.stem, _first_comment(p), p) for p in sorted(recipes_dir().glob("*.toml"))]


def load_recipe(name_or_path: str | Path) -> dict[str, Any]:
    """Return the tables of a shipped recipe (by name) or of a TOML file (with a separator or ending in `.toml`).

    `recipe` is filled with the file's stem where the file does not set it. Raises ConfigError for an unknown name, an
    unreadable file or invalid TOML; field names and values are checked by `resolve`.
    """
    path = _find(name_or_path)
    return {"recipe": path.stem} | read_toml(path)


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file. ConfigError when it cannot be read, or is none."""
    try:
        text = read_whole(path, MAX_TOML_BYTES).decode("utf-8")
    except OSError as error:
        raise ConfigError(f"'{path}' cannot be read", got=error.strerror, allowed="a TOML file") from error
    except UnicodeDecodeError as error:
        got = f"bytes that are not UTF-8, from byte {error.start}"
        hint = "save it as UTF-8, without a byte order mark"
        raise ConfigError(f"'{path}' cannot be read", got=got, allowed="a TOML file in UTF-8", hint=hint) from error
    if text.startswith("\ufeff"):
        allowed = "a TOML file in UTF-8 without one"
        hint = "save it as 'UTF-8', not as 'UTF-8 with BOM'"
        raise ConfigError(f"'{path}' cannot be read", got="a byte order mark at its start", allowed=allowed, hint=hint)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, and integers of thousands of digits
        raise ConfigError(
            f"'{path}' is not valid TOML",
            got="lists or tables in each other, too deep" if isinstance(error, RecursionError) else error,
            hint="text goes in quotes, a field is `name = value`, a section [name]; each of them once",
        ) from error


def check_path(path: str | Path, what: str) -> None:
    """Raise ConfigError for a `path` that no file can have, such as one with a line break; `what` it was given as."""
    if (wrong := wrong_path(str(path))) is not None:
        raise ConfigError(f"{what} cannot be a path", got=wrong, allowed="printable text, each name up to 255 bytes")


def resolve(
    recipe: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None, preset: str | None = None
) -> RunConfig:
    """Return the run's configuration: `recipe` (name, path or tables), then `preset`, then `overrides`.

    Tables and overrides are nested, or have keys with dots (`{"loss.name": "ppo"}`), or both. A value of the preset
    and an explicit override that contradict each other are an error: neither silently wins.
    """
    tables = _spelled(nested(recipe) if isinstance(recipe, Mapping) else load_recipe(recipe))
    overrides = _spelled(nested(overrides or {}))
    merged = merge(merge(defaults(), tables), with_preset(preset, overrides))
    if not any("terms" in _inside(layer, "rewards") for layer in (tables, overrides)) and _rewards_itself(merged):
        merged["rewards"] = {**_inside(merged, "rewards"), "terms": []}
    return validate(merged)


def _spelled(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return `tables` with `environment.class`, and that of its choices, under the name that the schema has for it.

    Fields of `RETIRED` with their defaults are left out.
    """
    tables = _without_retired(tables)

    def renamed(table: Any) -> Any:
        if not isinstance(table, Mapping) or "class" not in table or "class_path" in table:
            return table
        return {"class_path" if name == "class" else name: value for name, value in table.items()}

    environment = renamed(tables.get("environment"))
    if not isinstance(environment, Mapping):
        return dict(tables)
    if isinstance(choices := environment.get("choices"), list):
        environment = {**environment, "choices": [renamed(choice) for choice in choices]}
    return {**tables, "environment": environment}


def _without_retired(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    return {
        name: _without_retired(value, f"{prefix}{name}.") if isinstance(value, Mapping) else value
        for name, value in tables.items()
        if f"{prefix}{name}" not in RETIRED or RETIRED[f"{prefix}{name}"] != value
    }


def _rewards_itself(tables: Mapping[str, Any]) -> bool:
    """Whether there is an environment that gives rewards, as classes do: others are for whoever asks for them."""
    environment = _inside(tables, "environment")
    return any(environment.get(name) for name in ("class_path", "choices", "agent", "program", "verifiers"))


def _inside(tables: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    found = tables.get(section)
    return found if isinstance(found, Mapping) else {}


RESUMED_WITH = (
    "steps",
    "trainer.checkpoint_every",
    "trainer.keep_checkpoints",
    "trainer.ranks",
    "trainer.tensor_parallel",
    "trainer.context_parallel",
    "trainer.expert_parallel",
    "trainer.pipeline_parallel",
    "trainer.pipeline_chunks",
    "trainer.microbatch_tokens",
    "trainer.recompute",
    "trainer.offload_moments",
    "trainer.gpu_share",
    "generator.replicas",
    "generator.tensor_parallel",
    "generator.pipeline_parallel",
    "generator.num_slots",
    "generator.prefill_tokens",
    "generator.gpu_share",
    "eval.stop_at",
    "eval.patience",
    "generator.max_replicas",
    "critic.executor",
    "critic.ranks",
    "critic.tensor_parallel",
    "critic.gpu_share",
    "kl.ranks",
    "kl.tensor_parallel",
    "teacher.ranks",
    "teacher.tensor_parallel",
    "rewards.model_ranks",
    "rewards.model_tensor_parallel",
    "deadline_s",
    "lease_s",
    "shutdown_grace_s",
    "max_restarts",
)
"""Fields that may change when a run goes on: when it ends, how often it is saved, its ranks and replicas, in what
pieces it is computed, who may join, where its critic is trained, how long it waits."""

CHOSEN = ("generator.num_slots", "generator.prefill_tokens")
"""Fields that a run fills in when it starts, where its recipe leaves them open (`plan.gpu_sizes`)."""

_PINNED = r"[\w.-]+/[\w.-]+@[0-9a-f]{40}"  # a hub id with a commit


def resumed_config(run_dir: Path, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Return the configuration that the run in `run_dir` saved, with `overrides` of RESUMED_WITH.

    An override that changes nothing may name any field. ConfigError for one that does, and for a folder of no run.
    """
    tables = saved_tables(run_dir)
    saved, config = (
        validate(one.model_dump(context=ABSOLUTE)) for one in (resolve(tables), resolve(tables, overrides))
    )
    changed = [field for field in field_paths() if value_at(saved, field) != value_at(config, field)]
    if refused := [field for field in changed if field not in RESUMED_WITH]:
        allowed = f"--resume alone, or with {', '.join(RESUMED_WITH)}"
        flags, got = policy_flags(run_dir, saved), _told(refused, saved, config)
        hint = None if flags is None else f"a new run from its policy takes {flags}"
        raise ConfigError("a resumed run keeps its configuration", got=got, allowed=allowed, hint=hint)
    return config


def changed_since(run_dir: Path, recipe: RunConfig) -> dict[str, Any]:
    """Return the fields of RESUMED_WITH, as tables, in which `recipe` differs from what the run in `run_dir` saved.

    ConfigError where it differs in others. What a run itself chooses is no difference: the commits of hub ids, also
    where the recipe has another branch or tag now, and those of CHOSEN that the recipe leaves open.
    """
    found = (resolve(saved_tables(run_dir)), recipe)
    saved, wanted = (validate(one.model_dump(context=ABSOLUTE)) for one in found)
    wanted = _with_commits_of(saved, wanted)
    changed = [field for field in field_paths() if value_at(saved, field) != value_at(wanted, field)]
    chosen = [field for field in changed if field in CHOSEN and value_at(wanted, field) is None]
    if refused := [field for field in changed if field not in RESUMED_WITH]:
        what = f"the recipe is not that of the run in '{run_dir}', which keeps its configuration"
        hint = "a run of that recipe needs a folder of its own"
        allowed = f"changes of {', '.join(RESUMED_WITH)}"
        raise ConfigError(what, got=_told(refused, saved, wanted), allowed=allowed, hint=hint)
    return nested({field: value_at(wanted, field) for field in changed if field not in chosen})


def _told(fields: Sequence[str], saved: RunConfig, wanted: RunConfig) -> str:
    """Return `fields` with their values in `wanted` and, in brackets, those that were saved."""
    wishes, before = ([shortened(shown(value_at(one, field)), 60) for field in fields] for one in (wanted, saved))
    return ", ".join(
        f"{field} = {wish} (saved: {old})" for field, wish, old in zip(fields, wishes, before, strict=True)
    )


def policy_left(run_dir: Path, stages: Sequence[str]) -> Path:
    """Return the folder of the policy that a run leaves: RL's, or without RL that of the last stage that trains one."""
    trained = [] if "rl" in stages else [stage for stage in ("dpo", "sft") if stage in stages]
    is_of_rl = not trained or (run_dir / "model").is_dir()
    return run_dir / "model" if is_of_rl else stage_dir(run_dir, trained[0]) / "model"


def policy_flags(run_dir: Path, config: RunConfig) -> str | None:
    """Return the flags of a new run from the policy that the run in `run_dir` has left; None where none is there."""
    folder, lora = policy_left(run_dir, config.stages), config.model.lora
    if not folder.is_dir():
        return None
    if not lora.is_set:
        return f"--model.path {quote(str(folder))}"
    base = with_stage_paths(config, run_dir).model.path or str(run_dir / BASE_FOLDER)
    return f"--model.path {quote(base)} --model.lora.path {quote(str(folder))}"


def saved_tables(run_dir: Path) -> dict[str, Any]:
    """Return the tables that the run in `run_dir` saved; its own prompts are those in the folder, which may have moved.

    ConfigError for a folder of no run.
    """
    path, own = run_dir / "config.toml", run_dir / PROMPTS_FILE
    if not path.is_file():
        raise no_run(run_dir, "config.toml")
    tables = read_toml(path)
    prompts = _inside(tables, "prompts")
    if Path(str(prompts.get("dataset"))).name == PROMPTS_FILE and own.is_file():
        tables["prompts"] = {**prompts, "dataset": str(own.resolve())}
    return tables


def _with_commits_of(saved: RunConfig, wanted: RunConfig) -> RunConfig:
    """Return `wanted` with the commits that `saved` has of the same repositories, where `wanted` names no commit.

    Each is looked for in the same field; in a list, the nth of a repository is compared with the nth.
    """
    if (revision := wanted.model.revision) is not None:
        tables = {"model": {"path": f"{wanted.model.path}@{revision}", "revision": None}}
        wanted = validate(merge(wanted.model_dump(), tables))
    commits: dict[tuple[str, str], list[str]] = {}

    def keep(field: str, path: str) -> str:
        commits.setdefault((field, path.partition("@")[0]), []).append(path)
        return path

    def pinned(field: str, path: str) -> str:
        same = commits.get((field, path.partition("@")[0]))
        found = same.pop(0) if same else path
        return found if re.fullmatch(_PINNED, found) and not re.fullmatch(_PINNED, path) else path

    with_checkpoints(saved, keep)
    return with_checkpoints(wanted, pinned)


def value_at(config: BaseModel, path: str) -> Any:
    """Return the value of the field at the dotted `path`."""
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def defaults() -> dict[str, Any]:
    """Return the schema's defaults as tables; merging onto them keeps a section's own (`warm_start.optimizer.lr`)."""
    return _of_the_schema().model_dump()


_of_the_schema = functools.cache(RunConfig.model_construct)


def validate(tables: Mapping[str, Any]) -> RunConfig:
    """Return `tables` as a RunConfig; pydantic's complaints become one ConfigError with path, got, allowed and hint."""
    try:
        return RunConfig.model_validate(dict(tables))
    except ValidationError as invalid:
        raise _as_config_error(invalid) from None


_BELONGS = {"params": "name", "revision": "path", "dataset_config": "dataset", "dataset_split": "dataset"}
"""Field -> the field of its section that names what it belongs to."""


def merge(base: Mapping[str, Any], over: Mapping[str, Any], model: type[BaseModel] = RunConfig) -> dict[str, Any]:
    """Return `base` with the fields of `over` on top: sections of `model` merge field by field, the rest is replaced.

    Where `over` names another loss, model or data set than `base` does, what `base` says of its own is dropped
    (_BELONGS). A layer without a name says nothing of whose that is, and keeps it.
    """
    merged = dict(base)
    for name, owner in _BELONGS.items():
        if name in model.model_fields and base.get(owner) is not None and over.get(owner, base[owner]) != base[owner]:
            merged.pop(name, None)
    for name, value in over.items():
        section = _section_of(model, name)
        below = merged.get(name)
        if section is not None and isinstance(value, Mapping) and isinstance(below, Mapping):
            merged[name] = merge(below, value, section)
        else:
            merged[name] = value
    if model is RunConfig and _loses_measure(base, over, merged):
        merged["eval"] = {name: value for name, value in merged["eval"].items() if name != "measure"}
    return merged


def _loses_measure(base: Mapping[str, Any], over: Mapping[str, Any], merged: Mapping[str, Any]) -> bool:
    """Whether `over` replaces the reward term that the measure of `base` names, and gives no measure itself."""

    def names(tables: Mapping[str, Any]) -> list[str]:
        try:
            return RewardsConfig.model_validate(_inside(tables, "rewards")).part_names
        except (ValidationError, ConfigError):  # told of by whoever reads the whole
            return []

    measure = _inside(merged, "eval").get("measure")
    if measure is None or "measure" in _inside(over, "eval") or "rewards" not in over:
        return False
    return measure in names(base) and measure not in names(merged)


def table_of(tables: object, section: str) -> Mapping[str, Any]:
    """Return a section of tables that were given as such; of a recipe's name nothing is known here."""
    found = nested(tables).get(section) if isinstance(tables, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def names_terms(given: object) -> bool:
    """Whether tables, a file of the caller's or a configuration say what gives rewards; a shipped recipe's do not."""
    if isinstance(given, RunConfig):
        return given.rewards.terms != RewardsConfig.model_validate(_inside(defaults(), "rewards")).terms
    if isinstance(given, str | Path):
        is_shipped = _find(given).resolve().parent == recipes_dir().resolve()
        return not is_shipped and "terms" in table_of(load_recipe(given), "rewards")
    return "terms" in table_of(given, "rewards")


def nested(tables: Mapping[str, Any], model: type[BaseModel] = RunConfig, at: str = "") -> dict[str, Any]:
    """Return `tables` with `{"trainer.optimizer.lr": 1e-4}` as `{"trainer": {"optimizer": {"lr": 1e-4}}}`.

    Keys inside of free-form tables stay as they are. ConfigError for a field that is given twice, and for no tables.
    """
    if not isinstance(tables, Mapping):
        allowed = '{"steps": 50, "trainer.optimizer.lr": 1e-4}'
        raise ConfigError("fields are given as a table, by their names", got=shown(tables), allowed=allowed)
    found: dict[str, Any] = {}
    for name, value in tables.items():
        first, dot, rest = name.partition(".") if isinstance(name, str) else (name, "", "")
        inner = {rest: value} if dot else value
        section = _section_of(model, first)
        if section is not None and isinstance(inner, Mapping):
            inner = nested(inner, section, f"{at}{first}.")
        _join(found, first, inner, at)
    return found


def _join(tables: dict[str, Any], name: str, value: Any, at: str) -> None:
    """Set `name` in `tables`, which have it already only where both values are tables."""
    if name not in tables:
        tables[name] = dict(value) if isinstance(value, Mapping) else value
    elif isinstance(tables[name], dict) and isinstance(value, Mapping):
        for inner, one in value.items():
            _join(tables[name], inner, one, f"{at}{name}.")
    else:
        raise ConfigError(f"'{at}{name}' is given twice", got=f"{shown(tables[name])} and {shown(value)}")


def config_toml(config: RunConfig, context: Mapping[str, Any] | None = None) -> str:
    """Return every field as TOML, so that `resolve` of it gives an equal config. Unset optional fields are left out.

    With the `context` ABSOLUTE paths of files that are here are absolute in it.
    """
    tables = config.model_dump(mode="python", exclude_none=True, context=context)
    nulls = list(_nulls_in(config.model_dump(mode="python"), RunConfig, ()))
    if nulls:
        raise ConfigError(
            f"'{nulls[0]}' cannot be saved", got="None", allowed="TOML values", hint="leave the parameter out instead"
        )
    return tomli_w.dumps(tables)


def save_config(config: RunConfig, path: Path) -> None:
    """Write `config_toml(config)` with absolute paths, as a whole or not at all: it is read in other folders, too."""
    replace_file(path, config_toml(config, ABSOLUTE).encode())


def stage_dir(run_dir: Path, stage: str) -> Path:
    """Return the folder of a stage's output; its checkpoint, where it makes one, is `model` in there."""
    return run_dir / stage


def with_stage_paths(config: RunConfig, run_dir: Path, *, before: str | None = None) -> RunConfig:
    """Return `config` with the folders under `run_dir` that 'stage:sft' and the like stand for.

    Those of stages that come `before` the one named: of others nothing is there to read yet.
    """
    made = STAGES if before is None else STAGES[: STAGES.index(before)]

    def folder(_field: str, path: str) -> str:
        stage = stage_of(path)
        return path if stage not in made else str((stage_dir(run_dir, stage) / "model").resolve())

    return with_checkpoints(config, folder)


CHECKPOINTS = (
    *(("model", "path"), ("sft", "path"), ("preferences", "path"), ("dpo", "path"), ("dpo", "reference")),
    ("reward_model", "path"),
    *(("kl", "reference"), ("critic", "path"), ("teacher", "path")),
)
"""Section and field of every checkpoint that a run may read, beside `rewards.models` and `gold.models`."""


DATA = (
    *(("prompts", "dataset"), ("prompts", "eval_dataset"), ("sft", "dataset"), ("dpo", "preferences")),
    ("reward_model", "preferences"),
)
"""Section and field of every data set that a run may read."""


def with_checkpoints(config: RunConfig, replaced: Callable[[str, str], str]) -> RunConfig:
    """Return `config` with `replaced(field, path)` in place of every path of a checkpoint in it."""
    tables = config.model_dump()
    named = [(tables[section], field, f"{section}.{field}") for section, field in CHECKPOINTS]
    named += [
        (term, "path", f"{section}.models.path")
        for section in ("rewards", "gold")
        for term in tables[section]["models"]
    ]
    paths = [(table, key, replaced(field, table[key])) for table, key, field in named if table[key] is not None]
    if all(table[key] == path for table, key, path in paths):
        return config
    for table, key, path in paths:
        table[key] = path
    return validate(tables)


def field_paths(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[str]:
    """Yield the dotted paths of all fields of the schema that are not sections themselves."""
    for name in model.model_fields:
        section = _section_of(model, name)
        if section is None:
            yield prefix + name
        else:
            yield from field_paths(section, f"{prefix}{name}.")


def _first_comment(path: Path) -> str:
    with path.open(encoding="utf-8") as lines:
        return next((line.lstrip("# ").rstrip() for line in lines if line.startswith("#")), "")


def _find(name_or_path: str | Path) -> Path:
    if not isinstance(name_or_path, str | Path):
        got, allowed = shortened(shown(name_or_path), 60), "a name, a path, or tables"
        raise ConfigError("this is no recipe", got=got, allowed=allowed)
    check_path(name_or_path, f"recipe {shortened(str(name_or_path), 60)!r}")
    path = Path(name_or_path)
    run = f"a run goes on with `slipstream run --resume {path}`" if os.path.isfile(path / "config.toml") else None
    if path.suffix == ".toml" or len(path.parts) > 1:
        if os.path.lexists(path) and not path.is_dir():
            return path
        raise ConfigError(
            f"there is no recipe file '{path}'",
            got="a folder" if path.is_dir() else "nothing of that name",
            allowed="a file, or the name of a shipped recipe",
            hint=run or "`slipstream recipes` lists the shipped ones",
        )
    shipped = {path.stem: path for path in sorted(recipes_dir().glob("*.toml"))}
    if path.name not in shipped:
        raise ConfigError(
            f"unknown recipe '{name_or_path}'",
            allowed=", ".join([*shipped, "the path of a .toml file"]),
            hint=run or did_you_mean(path.name, shipped) or "`slipstream recipes` says what they do",
        )
    return shipped[path.name]


def with_preset(preset: str | None, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested `overrides` with what `preset` means. ConfigError where the two contradict each other."""
    if preset is None:
        return dict(overrides)
    if preset not in PRESETS:
        hint = sentence_of_value("preset", preset) or did_you_mean(preset, PRESETS)
        raise ConfigError(f"unknown preset '{preset}'", allowed=", ".join(PRESETS), hint=hint)
    chosen = PRESETS[preset]
    for name, value in chosen.items():
        if name in overrides and overrides[name] != value:
            raise ConfigError(
                f"preset '{preset}' and the override of '{name}' contradict each other",
                got=f"{name} = {overrides[name]!r}",
                allowed=f"{name} = {value!r} (what '{preset}' means)",
                hint=f"drop the preset, or drop the override of {name}",
            )
    return merge(chosen, overrides)


def _section_of(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    """Return the section class of field `name`; None where it is a plain value, a list or unknown."""
    info = model.model_fields.get(name)
    if info is None or not isinstance(info.annotation, type) or not issubclass(info.annotation, BaseModel):
        return None
    return info.annotation


def _nulls_in(value: Any, model: type[BaseModel] | None, path: tuple[str, ...]) -> Iterator[str]:
    """Yield the paths of None inside free-form values, where leaving them out would not bring them back."""
    if value is None and model is None:
        yield ".".join(path)
    elif isinstance(value, dict):
        for name, inner in value.items():
            if model is None:
                yield from _nulls_in(inner, None, (*path, str(name)))
            elif inner is not None:
                yield from _nulls_in(inner, _model_inside(model, name), (*path, name))
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from _nulls_in(inner, model, (*path, str(index)))


def _model_inside(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    """Return the section class of field `name`, or that of the items where the field is a list of sections."""
    section = _section_of(model, name)
    if section is not None or name not in model.model_fields:
        return section
    for item in get_args(model.model_fields[name].annotation):
        if isinstance(item, type) and issubclass(item, BaseModel):
            return item
    return None


def _as_config_error(invalid: ValidationError) -> ConfigError:
    """Return the first problem in full, misspelt fields before wrong values; the paths of the others in the hint."""
    errors = sorted(invalid.errors(), key=lambda error: error["type"] != "extra_forbidden")
    first = errors[0]
    inner = first.get("ctx", {}).get("error")
    if isinstance(inner, ConfigError):
        return inner
    others = [_dotted(error["loc"]) for error in errors[1:]]
    also = f"also wrong: {', '.join(others)}" if others else None
    model, name = _owner(first["loc"])
    path = _dotted(first["loc"])
    if first["type"] == "extra_forbidden":
        unknown = [error for error in errors if error["type"] == "extra_forbidden"]
        elsewhere = sentences(leaf for error in unknown for leaf in leaves(_dotted(error["loc"]), error["input"]))
        if path in ("preset", "out", "resume"):
            elsewhere = f"it is given beside the fields: `--{path} VALUE`, or {path}=... of slipstream.run"
        guess = None if elsewhere else _guess_field(path, first["input"], model)
        return ConfigError(
            f"unknown field '{name}'" + (f"; {guess}" if guess else ""),
            got=path,
            allowed=f"fields of {_dotted(first['loc'][:-1]) or 'the top level'}: {', '.join(model.model_fields)}",
            hint="; ".join(filter(None, [elsewhere, also])) or None,
        )
    template = _ALLOWED.get(first["type"])
    info = model.model_fields.get(name)
    field = _dotted([part for part in first["loc"] if isinstance(part, str)])
    guess = sentence_of_value(field, first["input"]) or _guess_value(first) or _as_table(first)
    hints = [text.rstrip(".") for text in (guess, info.description if info else None, also) if text]
    return ConfigError(
        f"'{path}' has a value that is not allowed" if template else f"'{path}': {first['msg']}",
        got="nothing" if first["type"] == "missing" else shown(first["input"]),
        allowed=template.format(**first.get("ctx", {})) if template else None,
        hint="; ".join(hints) or None,
    )


def _owner(loc: Sequence[str | int]) -> tuple[type[BaseModel], str]:
    """Return the section class that holds the field at `loc`, and the field's name."""
    model: type[BaseModel] = RunConfig
    name = ""
    for part in loc:
        if isinstance(part, int):
            continue
        inside = _model_inside(model, name) if name else None
        if inside is None and name:  # within a free-form table or a union: the last field stands for all of it
            break
        model, name = inside or model, part
    return model, name


def _guess_field(path: str, value: Any, model: type[BaseModel]) -> str | None:
    """Return a field of that very name in another section, as a full path, else a near one of the same section."""
    name = path.rpartition(".")[2]
    near = did_you_mean(name, model.model_fields)
    elsewhere = same_name(name) or (None if near else next(filter(None, map(same_name, leaves(path, value))), None))
    return f"did you mean '{elsewhere}'?" if elsewhere else near


def same_name(path: str) -> str | None:
    """Return the first field of the schema whose name is the last one of `path`."""
    name = path.rpartition(".")[2]
    return next((known for known in field_paths() if known.rpartition(".")[2] == name), None)


def _guess_value(error: Any) -> str | None:
    """Return a near value of those that the field knows, for a misspelt one."""
    if error["type"] != "literal_error" or not isinstance(error["input"], str):
        return None
    return did_you_mean(error["input"], re.findall(r"'([^']*)'", error["ctx"]["expected"]))


def _as_table(error: Any) -> str | None:
    """Return how to write a table for a text that stands for what the table names: a model's path, a loss's name."""
    inside = _model_inside(*_owner(error["loc"]))
    if error["type"] != "model_type" or not isinstance(error["input"], str) or inside is None:
        return None
    field = next((name for name in ("path", "name", "function", "dataset") if name in inside.model_fields), None)
    if field is None:
        return None
    value = json.dumps(shortened(error["input"], 60), ensure_ascii=False)
    if isinstance(error["loc"][-1], int):
        return f"write {{ {field} = {value} }}"
    where = _dotted(error["loc"])
    return f'write {where}.{field} = {value}, or {{"{where}": {{"{field}": {value}}}}} in Python'


def _dotted(loc: Sequence[str | int]) -> str:
    return ".".join(str(part) for part in loc)
