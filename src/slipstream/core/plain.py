"""Checks that a value from outside can be written again: Unicode text, 64-bit integers, bounded nesting, paths.

Python reads more than that from TOML, JSON and a command line; encoders to UTF-8 or msgpack would refuse it in the
middle of a run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 64
"""Most levels of tables and lists in each other. Encoders recurse, and fail at a few hundred."""
MAX_INT64 = 2**63 - 1
MAX_PATH_BYTES, MAX_NAME_BYTES = 4095, 255
"""Most bytes of a path and of each name in it, on Linux (`PATH_MAX`, `NAME_MAX`)."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_DIGITS = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?|[+-]?(inf|nan)")


_NESTED = (Mapping, list, tuple)


def wrong_with(value: Any, depth: int = 0) -> str | None:
    """Return in words why no encoder takes `value` of JSON's types, or None: a surrogate, a huge integer, nesting."""
    if isinstance(value, str):
        return wrong_text(value)
    if isinstance(value, int):
        return None if -MAX_INT64 - 1 <= value <= MAX_INT64 else "an integer of more than 64 bits"
    if value is None or isinstance(value, float) or not isinstance(value, _NESTED):
        return None
    if depth >= MAX_DEPTH:
        return f"lists or tables nested more than {MAX_DEPTH} deep"
    items = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
    return next((wrong for item in items if (wrong := wrong_with(item, depth + 1)) is not None), None)


def wrong_text(text: str) -> str | None:
    """Return in words why UTF-8 cannot write `text`, or None: half of a surrogate pair."""
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"half of a surrogate pair, {text[error.start]!r}, at character {error.start}"
    return None


def wrong_path(path: str) -> str | None:
    """Return in words why no file can have this `path`, or None."""
    if (wrong := wrong_text(path)) is not None:
        return wrong
    if not path:
        return "no characters"
    if (control := _CONTROL.search(path)) is not None:
        return f"the control character {control.group()!r} at character {control.start()}"
    longest = max(len(name.encode()) for name in path.split("/"))
    if longest > MAX_NAME_BYTES:
        return f"a name of {longest} bytes, which is too long: at most {MAX_NAME_BYTES}"
    if len(path.encode()) > MAX_PATH_BYTES:
        return f"{len(path.encode())} bytes, which is too long: at most {MAX_PATH_BYTES}"
    return None


def parse_int(text: str) -> int:
    """Parse a decimal integer of 64 bits in ASCII digits. ValueError for others that Python takes: '1_000', '١٢'."""
    if _DIGITS.fullmatch(text) is None or len(text) > 20 or abs(int(text)) > MAX_INT64:
        raise ValueError(f"{shortened(text, 40)!r} is no integer: digits 0-9, of at most 64 bits")
    return int(text)


def parse_float(text: str) -> float:
    """Parse a decimal number in ASCII digits, inf or nan. ValueError for others that Python takes: '1_0.5'."""
    if _NUMBER.fullmatch(text) is None:
        raise ValueError(f"{shortened(text, 40)!r} is no number: digits 0-9, a point, an exponent")
    return float(text)


def shown(value: object) -> str:
    """Return `repr(value)`, or words in its place where Python cannot write it: too many digits or levels."""
    try:
        return repr(value)
    except ValueError:  # sys.set_int_max_str_digits
        return "a value with an integer of more than 4,300 digits"
    except RecursionError:
        return "a value that is nested too deep to be shown"


def shortened(text: str, limit: int) -> str:
    """Return `text`, cut to `limit` characters and with their number in all where it is longer."""
    return text if len(text) <= limit else f"{text[:limit]} ... ({len(text):,} characters)"


def plural(count: int, word: str) -> str:
    """Return a count with its noun: 1 and "step" give "1 step", 2000 gives "2,000 steps"."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def flat(tables: Mapping[str, Any], separator: str = ".", prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one, names joined by `separator`; empty ones are left out."""
    found: dict[str, Any] = {}
    for name, value in tables.items():
        is_table = isinstance(value, Mapping)
        found |= flat(value, separator, f"{prefix}{name}{separator}") if is_table else {prefix + name: value}
    return found
