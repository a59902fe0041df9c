"""The names that other trainers have for our fields and values: `other_names.toml`, in sentences for error messages.

An entry is a field of ours and, behind a comma, what goes with it; "-" stands for no field, with what to do instead,
"!" for no field where that changes what is trained. Fields and settings stand in backticks, as in a recipe; with
`as_flags` sentences have them as flags.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from string import Template
from typing import Any

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))

NO_FIELD = ("-", "!")


def _filled(tables: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Return `tables` with the phrases that `$name` stands for."""
    return {
        name: {key: Template(entry).substitute(_TABLES["phrases"]) for key, entry in table.items()}
        for name, table in tables.items()
    }


FIELDS = _filled(_TABLES["fields"])
"""The names of our fields, by trainer; those of "the recipe" are ours, looked for in the wrong place of a section."""
VALUES = _filled(_TABLES["values"])
"""The words of others for our values, by field."""
SAME: dict[str, dict[str, str]] = _TABLES["same"]
"""Names of others that are ours, too, and the fields: by trainer."""
DEFAULTS: dict[str, dict[str, Any]] = _TABLES["defaults"]
"""The values of others for fields that are not given, as far as a recipe depends on them: by trainer."""
KEYWORDS: dict[str, str] = _TABLES["keywords"]
"""Arguments of other trainers in Python, as arguments of `slipstream.run`."""


def counterparts(path: str) -> list[tuple[str, str, str]]:
    """Return (whose, name, entry) of every trainer that calls one of its fields `path`, one for each entry.

    The longest end of `path` counts that is a name, or the end of one: rollout.n is verl's actor_rollout_ref.rollout.n.
    """
    from slipstream.core.config import RunConfig  # which reads this module

    words = path.replace("-", "_").lower().split(".")
    is_elsewhere = words[0] not in RunConfig.model_fields  # else a longer name's end says less than its own fields do
    for start in range(len(words)):
        end = ".".join(words[start:])
        is_own = "_" in end or "." in end  # a lone `name`, `n` or `path` could be anybody's
        found: dict[str, tuple[str, str, str]] = {}
        for whose, names in FIELDS.items():
            for name, entry in names.items():
                is_end = is_own and is_elsewhere and whose != "the recipe" and name.endswith(f".{end}")
                if name == end or is_end:
                    found.setdefault(entry, (whose, name, entry))
        if found:
            return list(found.values())
    return []


def sentence(path: str, *, as_flags: bool = False) -> str | None:
    """Return "TRL's num_generations is `completions_per_group` here" for the field `path` of another trainer."""
    said = []
    for whose, name, entry in counterparts(path):
        field, _, more = entry.partition(", ")
        is_none = field in NO_FIELD
        said.append(
            f"{whose}'{'' if whose.endswith('s') else 's'} {name} "
            + ("has no counterpart here" if is_none else f"is `{field}` here")
            + (f"{':' if is_none else ','} {more}" if more else "")
        )
    return (flags_in("; ".join(said)) if as_flags else "; ".join(said)) or None


def sentences(paths: Iterable[str], *, as_flags: bool = False) -> str | None:
    """Return the `sentence` of each field that is known, one a line."""
    said = [told for path in dict.fromkeys(paths) if (told := sentence(path, as_flags=as_flags)) is not None]
    if len(said) > MAX_TOLD:
        said[MAX_TOLD:] = [f"and {len(said) - MAX_TOLD} more"]
    return LINE.join(said) or None


MAX_TOLD = 10
"""Fields in one hint: an error has one screen."""
LINE = "\n" + " " * 11
"""Between two of them, as far in as an error's hint."""


def sentence_of_value(field: str, value: object, *, as_flags: bool = False) -> str | None:
    """Return what of ours stands for the `value` that other trainers have for `field`."""
    said = VALUES.get(field, {}).get(value.lower()) if isinstance(value, str) else None
    return flags_in(said) if said is not None and as_flags else said


def leaves(path: str, value: Any) -> Iterator[str]:
    """Yield the paths of the fields in `value`, which stands at `path`: of a table those of what is in it."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from leaves(f"{path}.{name}", inner)
    else:
        yield path


def flags_in(text: str) -> str:
    """Return `text` with the fields and settings in its backticks as flags of the command line."""
    return re.sub(r"`([a-z_]+(?:\.[a-z_]+)*)(?: = ([^`]+))?`", _flag, text)


def _flag(found: re.Match[str]) -> str:
    name, value = found[1].replace("_", "-"), found[2]
    if found[1] in ("rewards.terms", "rewards.models", "prompts.tasks"):  # lists of tables, which have no flags
        return found[0]
    if value is None:
        return f"`--{name}`" if "_" in found[1] or "." in found[1] or found[1] in ("steps", "seed") else found[0]
    if value == "true":
        return f"`--{name}`"
    words = " ".join(re.findall(r"[^\s{}\[\],=\"]+", value))
    return f"`--{name} {words}`"
