"""Rows: what every source of prompts is turned into before templates, splits and tokens."""

from __future__ import annotations

import datetime
import hashlib
import json
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.core.errors import ConfigError
from slipstream.core.plain import MAX_DEPTH, wrong_with


@dataclass(frozen=True)
class PromptRow:
    """One question before tokenisation.

    `text` is the user's text (before any chat template), `messages` the chat it belongs to where the source gave one,
    `columns` everything else the source knew, as JSON types.
    """

    text: str
    task: str
    answer: str | None = None
    messages: list[dict[str, Any]] | None = None
    columns: dict[str, Any] = field(default_factory=dict)


def normalise_text(text: str) -> str:
    """Unicode NFKC, case folded, whitespace collapsed: two prompts with equal results count as the same prompt.

    Identity: normalise_text(normalise_text(t)) = normalise_text(t).
    """
    folded = text
    for _ in range(4):  # NFKC and casefold can each enable the other; a fixed point is reached in at most three rounds
        previous = folded
        folded = unicodedata.normalize("NFKC", folded).casefold()
        if folded == previous:
            break
    return " ".join(folded.split())


def message_text(messages: Iterable[Mapping[str, Any]]) -> str:
    """The words of a chat, role by role, without the markup of any chat template."""
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


def row_key(text: str, messages: Iterable[Mapping[str, Any]] | None) -> str:
    """The normalised text by which prompts are told apart, within a split and between splits.

    Identity: a chat of one user's message has the key of that text.
    """
    chat = None if messages is None else list(messages)
    if chat is None or [message["role"] for message in chat] != ["user"]:
        return normalise_text(text if chat is None else message_text(chat))
    return normalise_text(chat[0]["content"])


def columns_key(key: str, columns: Mapping[str, Any]) -> str:
    """Return the key of a row that is told apart from others of the text `key` by its columns."""
    said = json.dumps(columns, sort_keys=True, default=str).encode("utf-8", "surrogatepass")
    return f"{key}\n{hashlib.blake2b(said, digest_size=16).hexdigest()}"


def without_system(messages: Sequence[Mapping[str, Any]] | None) -> Sequence[Mapping[str, Any]] | None:
    """Return a chat without its system messages; one that has no others as it is."""
    return messages and ([one for one in messages if one["role"] not in ("system", "developer")] or messages)


def id_of(key: str) -> str:
    """Return the id of the prompt `key`, in whatever words a template or a chat renders it."""
    return split_hash(key, 0).hex()


def split_hash(key: str, seed: int) -> bytes:
    """Eight bytes that place the prompt `key` in the order by which held-out prompts are chosen under `seed`."""
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8, key=seed.to_bytes(8, "little")).digest()


def to_json_types(value: Any, *, where: str) -> Any:
    """`value` with tuples and sets as lists, dates as ISO strings and numbers unboxed; ConfigError for anything else.

    Keys of mappings become strings, as JSON has no others. ConfigError, too, for what could not be written again:
    halves of surrogate pairs, integers of more than 64 bits, and nesting without end.
    """
    try:
        plain = _to_json_types(value, where=where)
        wrong = wrong_with(plain)
    except RecursionError:
        wrong = "lists and objects nested without end"
    if wrong is not None:
        what = f"{where} holds a value that cannot be written again"
        allowed = f"Unicode text, integers of 64 bits, {MAX_DEPTH} levels of lists and objects"
        raise ConfigError(what, got=wrong, allowed=allowed, hint="repair or drop the record")
    return plain


def _to_json_types(value: Any, *, where: str) -> Any:
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {str(key): _to_json_types(item, where=where) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_json_types(item, where=where) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((_to_json_types(item, where=where) for item in value), key=repr)
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if hasattr(value, "tolist"):  # numpy scalars and arrays
        return _to_json_types(value.tolist(), where=where)
    allowed = "null, booleans, numbers, strings, lists and objects"
    hint = "drop or convert the column before training"
    raise ConfigError(f"{where} holds a value that is not JSON", got=type(value).__name__, allowed=allowed, hint=hint)
