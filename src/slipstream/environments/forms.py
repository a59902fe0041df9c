"""Messages as the texts of a template with places between them, and their ids.

A form is rendered once for each sequence of roles, with marks in place of what the messages say, and is then filled
without the template. Its ids keep one rule: control tokens (end of turn, header, tool call ...) come from the template
only. A message that spells one out becomes ordinary pieces of text; of an assistant's earlier thoughts the template
sees the tags (`taken_apart`), and writes them where it does.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from slipstream.core.errors import ConfigError, clip
from slipstream.environments.protocol import MAX_MESSAGES, MAX_PLAIN_NAME, ROLES, ChatMessage
from slipstream.models.tokenizer import SPECIAL_TOKENS

if TYPE_CHECKING:
    from slipstream.models.tokenizer import Tokenizer

MAX_CHAT_MESSAGES = 4096  # of a chat that an agent has made up
MAX_CHARACTERS = 1_000_000  # of one observation or chat, far above what a model reads
FIELDS = {"content": "c", "name": "n", "tool_call_id": "i"}

Pattern = tuple[tuple[str, tuple[str, ...]], ...]
"""Of each message its role and the fields that are not empty: messages of one pattern have one form."""


def checked(messages: Sequence[Mapping[str, Any]]) -> list[ChatMessage]:
    """Return the messages of an environment, fields that are None left out. ConfigError for any other message."""
    return _all_checked(messages, MAX_MESSAGES)


def checked_chat(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the messages of a whole chat, an assistant's with its calls among them, as `checked` does."""
    calls = [message.get("tool_calls") if message["role"] == "assistant" else None for message in messages]
    texts = [
        {**message, "tool_calls": None} if called else message for message, called in zip(messages, calls, strict=True)
    ]
    found = _all_checked(texts, MAX_CHAT_MESSAGES, (*ROLES, "assistant"))
    return [{**one, "tool_calls": called} if called else one for one, called in zip(found, calls, strict=True)]


def _all_checked(messages: Sequence[Mapping[str, Any]], most: int, roles: Sequence[str] = ROLES) -> list[ChatMessage]:
    if not 1 <= len(messages) <= most:
        raise ConfigError("there are too few or too many messages at once", got=len(messages), allowed=f"1..{most}")
    found = [_checked(message, roles) for message in messages]
    if (size := sum(len(message["content"]) for message in found)) > MAX_CHARACTERS:
        raise ConfigError("messages are too long", got=f"{size:,} characters", allowed=f"{MAX_CHARACTERS:,}")
    return found


def _checked(message: Mapping[str, Any], roles: Sequence[str] = ROLES) -> ChatMessage:
    if not isinstance(message, Mapping):
        raise ConfigError("a message is a mapping", got=type(message).__name__, allowed="{'role': ..., 'content': ...}")
    found = {key: value for key, value in message.items() if value is not None}
    if not isinstance(found.get("content"), str) or found.get("role") not in roles:
        allowed = f"role: {', '.join(roles)}; content: a string"
        raise ConfigError("a message needs a role and a text", got=clip(message), allowed=allowed)
    if unknown := found.keys() - {"role", *FIELDS}:
        raise ConfigError("a message has an unknown field", got=clip(unknown), allowed="role, content, "
                          "name, tool_call_id")  # fmt: skip
    for key in ("name", "tool_call_id"):
        text = found.get(key, "-")
        if not isinstance(text, str) or not re.fullmatch(r"[A-Za-z0-9_.:/-]+", text) or len(text) > MAX_PLAIN_NAME:
            allowed = f"1..{MAX_PLAIN_NAME} letters, digits, '_', '.', ':', '/' and '-'"
            raise ConfigError(f"a message's {key} is no plain name", got=clip(repr(text)), allowed=allowed)
    return found | {"content": found["content"].encode("utf-8", "replace").decode()}  # lone surrogates have no bytes


def pattern_of(messages: Sequence[ChatMessage]) -> Pattern:
    """Return the pattern of messages that `checked` returned."""
    return tuple((message["role"], tuple(key for key in FIELDS if message.get(key))) for message in messages)


def marked(pattern: Pattern, salt: int) -> list[ChatMessage]:
    """Return messages of `pattern` that say marks, to be found again in a rendering by `places`."""
    return [
        {"role": role, "content": ""} | {field: _said(salt, index, field) for field in fields}
        for index, (role, fields) in enumerate(pattern)
    ]


def unused_salt(text: str) -> int:
    """Return a salt whose marks do not occur in `text`."""
    found = next((salt for salt in range(100) if f"qz{salt:02d}" not in text), None)
    if found is None:
        raise ConfigError("a chat holds every mark that could stand for a message", got=clip(text, 60))
    return found


def mark(salt: int, index: int, field: str) -> str:
    """Return nine letters and digits, as some templates ask of a tool call's id; none begins another."""
    return f"qz{salt:02d}{FIELDS.get(field, 'x')}{index:04d}"


def _said(salt: int, index: int, field: str) -> str:
    """Return the mark as a field says it: contents with what a template may strip or escape around it.

    Around that are more ends of lines than a template writes beside a content, which are told from its own so.
    """
    here, around = mark(salt, index, field), "\n" * 4
    return f'{around} \n"\u00e9 {here} \u00e9"\n {around}' if field == "content" else here


Shape = Callable[[str], str]


def _then(strip: Shape, escape: Shape) -> Shape:
    return lambda text: escape(strip(text))


def _stripped(left: str | None, right: str | None) -> Shape:
    return lambda text: text.lstrip(left).rstrip(right)


_NOTHING, _ENDS, _BLANKS = "", "\n", None
_STRIPS = tuple(
    _stripped(left, right) for right, left in itertools.product((_NOTHING, _ENDS, _BLANKS), (_NOTHING, _ENDS, _BLANKS))
)
_ESCAPES: tuple[Shape, ...] = (
    str,
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    lambda text: json.dumps(text)[1:-1],
)
SHAPES = tuple(_then(strip, escape) for escape, strip in itertools.product(_ESCAPES, _STRIPS))
"""What templates do to a content: strip it or not, write it as JSON or not. What strips less comes first."""


_TAGS = re.compile("(</?think>)")
_MOST_TAGS = 16
"""Of the thoughts in one message; a template sees no more of them, and the message stays as it is."""


def taken_apart(messages: Sequence[ChatMessage]) -> tuple[list[ChatMessage], dict[int, list[str | int]]]:
    """Return `messages`, behind them the texts around the tags of an assistant's thoughts, and what these are part of.

    That is by the number of the message, whose own content is empty now, the tags, blanks, and numbers of texts of
    which it is made: a template may leave thoughts out, and has to see their tags for that.
    """
    found, parts = list(messages), dict[int, list[str | int]]()
    for index, message in enumerate(messages):
        pieces = _TAGS.split(message["content"]) if message["role"] == "assistant" else []
        num_texts = len(found) - len(messages) + len(pieces) // 2 + 1
        if 1 < len(pieces) <= 2 * _MOST_TAGS + 1 and num_texts <= MAX_CHAT_MESSAGES:
            parts[index] = [
                piece if place % 2 or not piece.strip() else _put(found, piece) for place, piece in enumerate(pieces)
            ]
            found[index] = {**message, "content": ""}
    return found, parts


def _put(found: list[ChatMessage], text: str) -> int:
    found.append({"role": "assistant", "content": text})
    return len(found) - 1


@dataclass(frozen=True)
class Slot:
    """The place of a field of message `index`, whose text the template writes in `shape`."""

    index: int
    field: str
    shape: Shape = str

    def text(self, messages: Sequence[ChatMessage]) -> str:
        return self.shape(messages[self.index][self.field])


Piece = str | Slot


def places(text: str, pattern: Pattern, salt: int, *, may_be_left_out: Container[int] = ()) -> list[Piece]:
    """Return a rendering of `marked(pattern, salt)` as the template's texts and the places between them.

    ConfigError where the template leaves out a content, but of messages `may_be_left_out`, or changes it in another
    way than `SHAPES`.
    """
    pieces: list[Piece] = [text]
    for index, (role, fields) in enumerate(pattern):
        for field in fields:
            said, count = _said(salt, index, field), text.count(mark(salt, index, field))
            if not count and (field != "content" or index in may_be_left_out):
                continue
            shape = next((one for one in SHAPES if count and text.count(one(said)) == count), None)
            if shape is None:
                raise ConfigError(
                    f"the chat template {'changes' if count else 'leaves out'} the content of a message of role {role}",
                    got=clip(text),
                    allowed="a template that writes contents as they are, stripped of whitespace, or as JSON",
                    hint="use another checkpoint, or give the tokenizer a chat template that knows this role",
                )
            pieces = [part for piece in pieces for part in _split(piece, shape(said), Slot(index, field, shape))]
    return pieces


def _split(piece: Piece, said: str, slot: Slot) -> list[Piece]:
    if isinstance(piece, Slot):
        return [piece]
    first, *others = piece.split(said)
    return [first, *(part for other in others for part in (slot, other))]


@dataclass(frozen=True)
class Form:
    """Texts of a template and places between them; `controls` are the ids of control tokens in its texts, in order."""

    pieces: tuple[Piece, ...]
    controls: tuple[int, ...]

    def filled(self, messages: Sequence[ChatMessage]) -> list[tuple[str, bool]]:
        """Return the texts in order, each with whether it is the template's."""
        return [(one, True) if isinstance(one, str) else (one.text(messages), False) for one in self.pieces]

    def text(self, messages: Sequence[ChatMessage]) -> str:
        return "".join(text for text, _ in self.filled(messages))


@runtime_checkable
class _WithAddedTokens(Protocol):
    """The part of transformers' tokenizers that knows added tokens. `CharTokenizer` has three and cannot split them."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...
    def __call__(self, text: list[str], *, add_special_tokens: bool, split_special_tokens: bool) -> Any: ...


class Speller:
    """Filled forms to ids. Identity: ids of ordinary texts are the tokenizer's own ids of the whole text.

    `controls`: special tokens, and added tokens that `template_text` spells out (`<tool_call>`), whitespace not among
    them. The token of unknown characters is none.
    """

    def __init__(self, tokenizer: Tokenizer, template_text: str) -> None:
        self._tokenizer = tokenizer
        if isinstance(tokenizer, _WithAddedTokens):
            added = {
                token: one.content
                for token, one in tokenizer.added_tokens_decoder.items()
                if one.special or (one.content in template_text and not one.content.isspace())
            }
        else:
            added = dict(enumerate(SPECIAL_TOKENS))
        unknown = tokenizer.special_tokens_map.get("unk_token")
        self.controls = {token: text for token, text in added.items() if text != unknown}
        self._characters: dict[str, list[int]] = {}

    def form(self, pieces: Sequence[Piece]) -> Form:
        texts = [piece for piece in pieces if isinstance(piece, str)]
        return Form(tuple(pieces), tuple(t for text in texts for t in self.encode(text) if t in self.controls))

    def encode(self, text: str) -> list[int]:
        """Return the ids of a template's text: control tokens that it spells out are themselves."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def ids(self, form: Form, messages: Sequence[ChatMessage]) -> list[int]:
        """Return the ids of `form` filled with `messages`. Its control tokens are `form.controls`."""
        filled = form.filled(messages)
        whole = self.encode("".join(text for text, _ in filled))
        if tuple(token for token in whole if token in self.controls) == form.controls:
            return whole
        return [token for text, is_own in filled for token in (self.encode(text) if is_own else self.plain(text))]

    def plain(self, text: str) -> list[int]:
        """Return ids of `text` without any control token, whatever it spells out.

        Special tokens are split by the tokenizer; other control tokens into characters. What is one even then (a token
        of one character) is left out.
        """
        [ids] = self._split_specials([text])
        if self.controls.keys().isdisjoint(ids):
            return ids
        parts = re.split(f"({'|'.join(map(re.escape, sorted(self.controls.values(), key=len, reverse=True)))})", text)
        between = iter(self._split_specials(parts[::2]))
        pieces = [self._in_characters(part) if i % 2 else next(between) for i, part in enumerate(parts)]
        return [token for piece in pieces for token in piece if token not in self.controls]

    def _in_characters(self, control: str) -> list[int]:
        ids = self._characters.get(control)
        if ids is None:
            ids = self._characters[control] = [token for one in self._split_specials(list(control)) for token in one]
        return ids

    def _split_specials(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text; none of the special tokens that it spells out, where the tokenizer can do so."""
        if isinstance(self._tokenizer, _WithAddedTokens):
            return list(self._tokenizer(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"])
        return list(self._tokenizer(texts, add_special_tokens=False)["input_ids"])
