"""The texts of job files, in this folder: '@{name}' in them stands for a value.

In YAML the value is an object of any type, so nothing needs to be quoted, and None leaves its key out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

_PLACE = r"@\{(\w+)\}"


def filled(template: str, values: Mapping[str, Any]) -> str:
    """Return the text of the file `template` with `values` in their places."""
    return re.sub(_PLACE, lambda found: str(values[found[1]]), _read(template))


def manifest(*parts: tuple[str, Mapping[str, Any]]) -> str:
    """Return objects, each from its template and values, as one YAML file under the first template's comment."""
    comment = "".join(line for line in _read(parts[0][0]).splitlines(keepends=True) if line.startswith("#"))
    objects = [_filled_object(yaml.safe_load(_read(template)), values) for template, values in parts]
    text: str = yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=1000)
    return comment + text


def _read(template: str) -> str:
    return (Path(__file__).parent / template).read_text(encoding="utf-8")


def _filled_object(value: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(value, dict):
        found = {key: _filled_object(inner, values) for key, inner in value.items()}
        return {key: inner for key, inner in found.items() if inner is not None}
    if isinstance(value, list):
        return [_filled_object(inner, values) for inner in value]
    place = re.fullmatch(_PLACE, value) if isinstance(value, str) else None
    return value if place is None else values[place[1]]


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # yaml has no types
    """Write texts of several lines as such, and what occurs twice twice."""

    def ignore_aliases(self, _data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)
