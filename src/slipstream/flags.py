"""Flags of the command line: a dataclass for each command's own, and one for every field of the configuration.

A flag that is not there is refused before tyro sees it, with what is near it or what it is called here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import os
import re
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypedDict, TypeGuard, TypeVar, get_args, get_origin, get_type_hints

import tyro
from pydantic import BaseModel
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError, clip, did_you_mean
from slipstream.core.other_names import counterparts, sentence, sentence_of_value, sentences
from slipstream.core.plain import parse_float, parse_int
from slipstream.core.recipes import check_path, field_paths, same_name

_WIDEST = 20_000  # characters that tyro may write in a line
_NOT_PARSED = re.compile(r": '(.*)' (is no \w+): (.*)")  # of `parse_int` and `parse_float`

REQUIRED: Any = dataclasses.MISSING


def flag(help: str, *, default: Any = None, is_positional: bool = False, metavar: str | None = None) -> Any:
    """Return the dataclass field of a flag; `metavar` is the name of its value in the help, by default its type's."""
    metadata = {"help": help, "is_positional": is_positional, "metavar": metavar}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithFields:
    """Options of a command that takes flags for the configuration's fields: `overrides` are those given, as tables."""

    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)


Options = TypeVar("Options")


def parse(
    options: type[Options],
    argv: Sequence[str],
    command: Callable[..., int],
    *,
    shown: Callable[[Sequence[str]], Mapping[str, Any]] | None = None,
    only: Collection[str] | None = None,
) -> Options:
    """Return the `options` in `argv`; `command` has their description, and is named after the subcommand.

    Of a class `WithFields`, --help prints the values of `shown(argv)`, and `only` these fields have flags; of all
    it lists those of no section, or those of the sections that are named behind it. Raises ConfigError for flags that
    are not there and values that cannot be read, SystemExit (0) for --help.
    """
    of_class: Any = options
    own = {field.name: field for field in dataclasses.fields(of_class) if field.name != "overrides"}
    is_help = bool({"-h", "--help"} & set(argv))
    known: set[str] = set()
    if issubclass(options, WithFields):
        known = set(_fields_of_runs()) if only is None else set(only)
    if not is_help:
        _check_flags(argv, [name for name, field in own.items() if not field.metadata["is_positional"]], known)
        argv = _with_switches(argv, known)
    elif known and only is None:
        argv, known = _of_sections(argv, known)
    is_short = is_help and only is None and bool(known) and not any("." in field for field in known)
    kinds = get_type_hints(options)
    fields: list[Any] = [(name, _annotated(kinds[name], field), field) for name, field in own.items()]
    if known:
        flags = override_flags(RunConfig, shown(argv) if is_help and shown else {}, known if is_help else _given(argv))
        annotated: Any = Annotated  # the types are built at run time
        nameless = tyro.conf.arg(name="", help="")  # without a help tyro looks for one in this file's source
        fields.append(("overrides", annotated[flags, nameless], dataclasses.field(default_factory=dict)))
    wanted = dataclasses.make_dataclass(options.__name__, fields, kw_only=True)
    prog = f"slipstream {command.__name__.removesuffix('_command').replace('_', '-')}"
    described = f"{command.__doc__}\n\n{_list_of_sections()}" if is_short else command.__doc__
    with contextlib.nullcontext() if is_help else _in_our_words(prog):
        found: Any = tyro.cli(wanted, args=list(argv), prog=prog, description=described, registry=_strict())
    values = vars(found)
    for name, value in values.items():
        for path in value if isinstance(value, tuple) else (value,):
            if isinstance(path, Path):
                check_path(path, f"'{name}'")
    if known:
        values["overrides"] = as_overrides(values["overrides"])
    return options(**values)


def _of_sections(argv: Sequence[str], known: set[str]) -> tuple[list[str], set[str]]:
    """Return `argv` without the sections that are named behind --help, and the fields in `known` that it lists."""
    begin = min(index for index, word in enumerate(argv) if word in ("-h", "--help")) + 1
    sections = {field.partition(".")[0] for field in known if "." in field} | {"all"}
    asked = {word for word in argv[begin:] if word in sections}
    rest = [*argv[:begin], *(word for word in argv[begin:] if word not in asked)]
    if "all" in asked:
        return rest, known
    return rest, {field for field in known if (field.partition(".")[0] in asked if asked else "." not in field)}


def _list_of_sections() -> str:
    """Return what follows a help that lists the fields of no section."""
    sections = {name: info for name, info in RunConfig.model_fields.items() if _is_section(info.annotation)}
    width = max(map(len, sections))
    lines = [f"  {name:{width}}  {(info.description or '').partition('. ')[0]}" for name, info in sections.items()]
    return "\n".join(
        ["Fields of sections are flags, too. `--help SECTION` lists them, `--help all` lists all:", *lines]
    )


_METAVARS = {int: "INT", float: "FLOAT", Path: "PATH", str: "NAME"}


def _annotated(kind: Any, field: dataclasses.Field[Any]) -> Any:
    """Return the type of a flag with what tyro is to print for it."""
    annotated: Any = Annotated
    if kind is bool:
        return annotated[kind, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help=field.metadata["help"])]
    inner = [item for item in get_args(kind) if item is not type(None)] if field.default is None else [kind]
    one = get_args(inner[0])[0] if get_origin(inner[0]) is tuple else inner[0]
    is_positional, several = field.metadata["is_positional"], " ..." if one is not inner[0] else ""
    metavar = field.metadata["metavar"] or (field.name.upper() if is_positional else _METAVARS[one]) + several
    hint = "" if field.default is None else None
    found = annotated[kind, tyro.conf.arg(help=field.metadata["help"], help_behavior_hint=hint, metavar=metavar)]
    positional: Any = tyro.conf.Positional
    return positional[found] if is_positional else found


def override_flags(model: type[BaseModel], shown: Mapping[str, Any], only: Collection[str]) -> Any:
    """Return a TypedDict type with an optional key for each field of `model` in `only`, from which tyro makes flags.

    Only flags that were given are in the result, so an override can be told from a default. `shown` are the values that
    the help prints. Fields of sections have dots in `only`.
    """
    keys: dict[str, Any] = {}
    annotated: Any = Annotated
    make_typed_dict: Any = TypedDict
    for name, info in model.model_fields.items():
        kind: Any = info.annotation
        value = shown.get(name)
        hint = "" if value is None else f"(default: {value})"
        if _is_section(kind):
            inside = {field.removeprefix(f"{name}.") for field in only if field.startswith(f"{name}.")}
            if inside:
                section = override_flags(kind, value if isinstance(value, Mapping) else {}, inside)
                keys[name] = annotated[section, tyro.conf.arg(help=info.description)]
        elif name in only and _has_flag(name, kind):
            if get_origin(kind) is dict:  # as pairs: tyro cannot leave a dict out
                kind = types.GenericAlias(list, types.GenericAlias(tuple, get_args(kind)))
            keys[name] = annotated[kind, tyro.conf.arg(help=info.description, help_behavior_hint=hint)]
    return make_typed_dict(model.__name__, keys, total=False)


def as_overrides(parsed: Mapping[str, Any], model: type[BaseModel] = RunConfig) -> dict[str, Any]:
    """Return what tyro parsed as tables, pairs as such again; ConfigError for a list that is written as in TOML."""
    tables: dict[str, Any] = {}
    for name, value in parsed.items():
        kind: Any = model.model_fields[name].annotation
        if _is_section(kind):
            if section := as_overrides(value, kind):
                tables[name] = section
        else:
            if get_origin(kind) is list and (words := str(next(iter(value), ""))).startswith("["):
                allowed = " ".join(re.findall(r"[^][\s,'\"]+", words))
                raise ConfigError(f"the values of '{name}' are words of their own", got=words, allowed=allowed)
            tables[name] = {key: _as_toml(item, kind) for key, item in value} if get_origin(kind) is dict else value
    return tables


def _as_toml(value: Any, kind: Any) -> Any:
    """Return a value of a table as TOML writes it: true and false, which tyro knows as True and False alone."""
    may_be_bool = bool in get_args(get_args(kind)[1])
    return {"true": True, "false": False}.get(value, value) if may_be_bool and isinstance(value, str) else value


def as_flags(overrides: Mapping[str, Any], prefix: str = "--") -> list[str]:
    """Return the flags of overrides that are single values."""
    return [
        word
        for name, value in overrides.items()
        for word in (
            as_flags(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [f"{prefix}{name}", str(value)]
        )
    ]


@functools.cache
def _fields_of_runs() -> frozenset[str]:
    return frozenset(_flag_fields(RunConfig))


def _flag_fields(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted paths of all fields that have a flag."""
    for name, info in model.model_fields.items():
        if _is_section(info.annotation):
            yield from _flag_fields(info.annotation, f"{prefix}{name}.")
        elif _has_flag(name, info.annotation):
            yield prefix + name


def _is_section(kind: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _has_flag(name: str, kind: Any) -> bool:
    """Whether a field has a flag: the recipe's name is every command's argument, tables without a schema are TOML."""
    return name != "recipe" and not any(_is_section(item) or item is Any for item in get_args(kind))


def _field_of(flag: str) -> str:
    """Return the name that the flag '--generator.num-slots=8' stands for."""
    return flag.removeprefix("--").partition("=")[0].replace("-", "_")


def _positive(field: str) -> str:
    """Return 'prompts.chat' for 'prompts.no_chat', the flag that turns it off."""
    return re.sub(r"(^|\.)no_", r"\1", field)


def _given(argv: Sequence[str]) -> set[str]:
    """Return the fields that `argv` has flags for: a parser of all of them takes a quarter of a second to make."""
    return {_positive(_field_of(word)) for word in argv if word.startswith("--")}


def _with_switches(argv: Sequence[str], known: Collection[str]) -> list[str]:
    """Return `argv` with '--kl.corrected' for '--kl.corrected true', and '--kl.no-corrected' for '... false'.

    'null' of a field that may be None becomes 'None', which is what tyro reads.
    """
    words: list[str] = []
    for word in argv:
        flag, is_joined, value = word.partition("=")
        if not is_joined:
            flag, value = next(reversed(words), ""), word
        kind = _kind_of(field) if (field := _field_of(flag)) in known else None
        if value.lower() in ("true", "false") and kind is bool:
            section, dot, name = flag.removeprefix("--").rpartition(".")
            words[len(words) - (not is_joined) :] = [flag if value.lower() == "true" else f"--{section}{dot}no-{name}"]
        elif value == "null" and _may_be_none(kind):
            words[len(words) - (not is_joined) :] = [flag, "None"]
        else:
            words.append(word)
    return words


def _kind_of(field: str) -> Any:
    kind: Any = RunConfig
    for name in field.split("."):
        kind = kind.model_fields[name].annotation
    return kind


def _may_be_none(kind: Any) -> bool:
    return type(None) in get_args(kind)


def _check_flags(argv: Sequence[str], own: Collection[str], known: Collection[str]) -> None:
    """Raise ConfigError for flags that are not there, and for another trainer's values of ours.

    `own` are the flags of the command itself, `known` the fields of the configuration that it takes.
    """
    foreign: dict[str, str] = {}
    unknown: list[str] = []
    for word, following in pairwise([*argv, ""]):
        flag, is_joined, joined = word.partition("=")
        field = _field_of(word)
        if not word.startswith("--") or field in own:
            continue
        if field in known:
            if (said := sentence_of_value(field, joined if is_joined else following, as_flags=True)) is not None:
                raise ConfigError(f"unknown value of '{flag}'", got=joined if is_joined else following, hint=said)
        elif _positive(field) not in known:
            if known and field not in field_paths() and counterparts(field):
                foreign[flag] = field
            else:
                unknown.append(flag)
    if foreign:
        raise ConfigError(
            "unknown flag " + ", ".join(f"'{flag}'" for flag in foreign),
            allowed=_MORE.removeprefix(", "),
            hint=sentences(foreign.values(), as_flags=True),
        )
    if unknown:
        raise _unknown_flag(unknown[0], own, known)


_MORE = ", fields of the configuration; --help lists them"


def _unknown_flag(flag: str, own: Collection[str], known: Collection[str]) -> ConfigError:
    field = _field_of(flag)
    inside = [name for name in known if name.startswith(f"{field}.")]
    same = same_name(field)
    if inside:
        hint: str | None = f"'{field}' is a section: its fields have flags"
    elif known and field in field_paths():
        hint = f"'{field}' has no flag here: write a recipe, or `overrides` in Python"
    elif (parent := field.rpartition(".")[0]) in known:
        hint = f"'{parent}' is a table: `{_flag(parent)} {field.rpartition('.')[2]} VALUE`"
    elif same is not None and same in known:
        hint = f"did you mean '{_flag(same)}'?"
    else:
        near = did_you_mean(field, [*own, *known])
        hint = near and re.sub(r"'(.+)'", lambda name: f"'{_flag(name[1])}'", near)
    return ConfigError(
        f"unknown flag '{flag}'",
        allowed=", ".join(map(_flag, sorted(inside or own))) + ("" if inside or not known else _MORE),
        hint=hint,
    )


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"


@contextmanager
def _in_our_words(prog: str) -> Iterator[None]:
    """Raise ConfigError in place of the box, with lines of the terminal's width, in which tyro says what is wrong."""
    told, columns = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(_WIDEST)
    try:
        with redirect_stderr(told):
            yield
    except SystemExit:
        lines = [line.strip("│| ") for line in told.getvalue().splitlines()]
        raise _refused([line for line in lines[1:] if line.strip("─-")], prog) from None
    finally:
        os.environ.pop("COLUMNS")
        if columns is not None:
            os.environ["COLUMNS"] = columns


def _refused(lines: Sequence[str], prog: str) -> ConfigError:
    """Return the error for what tyro says in `lines`."""
    said, helped = next(iter(lines), ""), f"`{prog} --help` lists what there is"
    if (flag := re.match(r"Error parsing (\S+): ", said)) and (found := _NOT_PARSED.search("\n".join(lines))):
        is_optional = (field := _field_of(flag[1])) in _fields_of_runs() and _may_be_none(_kind_of(field))
        allowed = found[3] + "; or null" * is_optional
        return ConfigError(f"the value of '{flag[1]}' {found[2]}", got=clip(found[1]), allowed=allowed)
    if (flag := re.match(r"Error parsing (\S+): Could not find valid parse for \w+: \[(.*)\]$", said)) and (
        name := re.search(r"\w+", flag[2])
    ):
        table = f"'{_field_of(flag[1])}' is a table: `{flag[1]} {name[0]} VALUE`"
        return ConfigError(f"the value of '{flag[1]}' cannot be read", got=clip(flag[2]), hint=table)
    if said.startswith("Missing from ") and len(lines) > 1:
        return ConfigError(f"the argument {lines[1]} is missing", hint=helped)
    if found := re.fullmatch(r"invalid choice '(.*)' for argument '(\S+)'\. Expected one of \((.*)\)\.", said):
        choices = re.findall(r"'([^']*)'", found[3])
        hint = did_you_mean(found[1], choices)
        return ConfigError(f"unknown value of '{found[2]}'", got=clip(found[1]), allowed=", ".join(choices), hint=hint)
    if found := re.fullmatch(r"Missing value for argument '(\S+)'\. Expected (\d+) values\.", said):
        allowed = "a value behind it" if found[2] == "1" else f"{found[2]} values behind it"
        return ConfigError(f"the value of '{found[1]}' is missing", allowed=allowed, hint=helped)
    if found := re.fullmatch(r"Unrecognized options: (.*)", said):
        got = found[1].split(", ")
        hints = [hint for word in got if (hint := _as_flag(word)) is not None]
        return ConfigError("more arguments than the command takes", got=clip(found[1]), hint="; ".join(hints) or helped)
    return ConfigError(clip(said), hint=helped)


def _as_flag(word: str) -> str | None:
    """Return what verl's 'data.train_batch_size=64', or 'steps=5', is here."""
    field, joint, value = word.partition("=")
    if not joint:
        return None
    if field in field_paths():
        return f"a field is set by a flag: `{_flag(field)} {value}`"
    return sentence(field, as_flags=True) or "fields are set by flags: `--steps 5`"


def _strict() -> ConstructorRegistry:
    """Return what flags are read by: numbers in ASCII digits alone."""
    registry = ConstructorRegistry()

    def rule_of(kind: type, parse: Callable[[str], Any]) -> None:
        @registry.primitive_rule
        def rule(found: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
            if found.type is not kind:
                return None
            return PrimitiveConstructorSpec(
                nargs=1,
                metavar=kind.__name__.upper(),
                instance_from_str=lambda words: parse(words[0]),
                is_instance=lambda value: isinstance(value, kind),
                str_from_instance=lambda value: [str(value)],
            )

    rule_of(int, parse_int)
    rule_of(float, parse_float)
    return registry
