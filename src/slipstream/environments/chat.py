"""Conversations by exact ids: what stands between a sampled turn and the next one, and a sampled turn as a message.

Sampled ids are never decoded and encoded again; ids are only appended to them. With P the prompt's ids (they end where
the policy begins), s_i sampled and o_i given, the policy reads

    P s_1 o_1 s_2 o_2 ... s_n        o_i = chat.observation(s_i, messages of the environment)

    PlainChat      messages by a template of one's own, for models without a chat template
    TemplateChat   messages by the model's chat template; `chat_proof.prove` shows beforehand that this gives its text
"""

from __future__ import annotations

import json
import string
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from slipstream.core.errors import ConfigError, did_you_mean
from slipstream.core.types import Prompt
from slipstream.environments.forms import (
    FIELDS,
    Form,
    Piece,
    Slot,
    Speller,
    checked,
    checked_chat,
    mark,
    marked,
    pattern_of,
    places,
    taken_apart,
    unused_salt,
)
from slipstream.environments.protocol import ChatMessage, with_opening
from slipstream.environments.tool_calls import TAGS
from slipstream.models.tokenizer import TokenTexts

if TYPE_CHECKING:
    from slipstream.models.foreign_text import ChatRenderer
    from slipstream.models.tokenizer import Tokenizer

MAX_FORMS = 256  # that are kept, of observations and of openings

Parse = Callable[[str], ChatMessage]
"""A sampled text, control tokens spelled out, to the assistant's message: reads tool calls."""


class Chat(ABC):
    """Messages to ids and back. Messages of an environment are checked: ConfigError for one that is none."""

    def __init__(self, tokenizer: Tokenizer, speller: Speller, *, stop_ids: Sequence[int], parse: Parse | None) -> None:
        self._tokenizer, self.speller, self.stop_ids, self._parse = tokenizer, speller, tuple(stop_ids), parse
        self._texts = TokenTexts(tokenizer)
        self.prefix = _prefix_of(tokenizer)  # BOS, as a rule

    @abstractmethod
    def opening(self, prompt: Prompt, messages: Sequence[Mapping[str, Any]], *, extends_prompt: bool = False) -> Prompt:
        """Return the prompt of an episode whose environment says `messages` before the first turn.

        With `extends_prompt` their texts are appended to the prompt's last message, as in TRL.
        Nothing is sampled yet, so nothing can drift: the ids are those of the whole conversation. A plain prompt is
        extended; a chat's prompt ends with the header of the assistant's turn, and its messages go in front of that.
        Identity: without messages it is `prompt` itself.
        """

    @abstractmethod
    def context(self, row: Prompt, messages: Sequence[ChatMessage]) -> Prompt:
        """Return the prompt of a chat that an agent has made up: `messages` as a whole, an assistant's among them.

        Nothing of it is trained on, so its ids may be any that the policy reads. `row` gives its other fields. Without
        a chat template it is behind `prefix`, as a row's prompt is. ConfigError for messages that cannot be rendered.
        """

    @abstractmethod
    def observation(self, turn: np.ndarray, messages: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """Return int32 ids that come behind the sampled ids `turn` when the environment says `messages`.

        They end where the policy begins to sample. Where `turn` does not end with a stop token (it was cut by length)
        they begin with the end of the turn.
        """

    def message(self, turn: np.ndarray) -> ChatMessage:
        """Return the sampled ids `turn` as the assistant's message: its text without the stop token.

        `parse` gets the text with control tokens spelled out; without it they are left out.
        """
        ids = turn.tolist()
        ids = ids[:-1] if self._ends(turn) else ids
        text = self._tokenizer.decode(ids, self._parse is None, clean_up_tokenization_spaces=False)
        return {"role": "assistant", "content": text} if self._parse is None else self._parse(text)

    def plain_message(self, turn: np.ndarray) -> ChatMessage:
        """Return the sampled ids `turn` as the assistant's message with all of its text, calls of tools among it.

        It goes on behind a text: of a space at its beginning nothing is stripped.
        """
        return {"role": "assistant", "content": "".join(self.pieces(turn[:-1] if self._ends(turn) else turn))}

    def text_of(self, ids: np.ndarray) -> str:
        """Return the text of `ids`, control tokens spelled out."""
        return str(self._tokenizer.decode(ids.tolist(), False, clean_up_tokenization_spaces=False))

    def pieces(self, ids: np.ndarray) -> list[str]:
        """Return the text that each of `ids` adds, control tokens spelled out (`TokenTexts`)."""
        return self._texts(ids.tolist())

    def ids_of(self, text: str) -> np.ndarray:
        """Return `prefix` and the int32 ids of a text of others: no control token, whatever it spells out."""
        ids = self.speller.plain(text.encode("utf-8", "replace").decode())
        return np.asarray([*self.prefix, *ids], dtype=np.int32)

    def _ends(self, turn: np.ndarray) -> bool:
        """Whether `turn` ends with a stop token."""
        return len(turn) > 0 and int(turn[-1]) in self.stop_ids


class PlainChat(Chat):
    """Each message by `template` with the places {content}, {role}, {name} and {tool_call_id}.

    The first of `stop_ids`, if there is one, closes a turn that was cut by length.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str = "{content}",
        *,
        stop_ids: Sequence[int] = (),
        parse: Parse | None = None,
    ) -> None:
        super().__init__(tokenizer, Speller(tokenizer, template), stop_ids=stop_ids, parse=parse)
        self._template = parsed_template(template)

    def opening(self, prompt: Prompt, messages: Sequence[Mapping[str, Any]], *, extends_prompt: bool = False) -> Prompt:
        if not messages:
            return prompt
        said = checked(messages)
        if extends_prompt:
            form = self.speller.form([Slot(index, "content") for index in range(len(said))])
        else:
            form = self._form(said)
        before = prompt.messages
        return msgspec.structs.replace(
            prompt,
            text=prompt.text + form.text(said),
            tokens=np.concatenate([prompt.tokens, np.asarray(self.speller.ids(form, said), dtype=np.int32)]),
            messages=None if before is None else with_opening(before, said, extends_prompt=extends_prompt),
        )

    def context(self, row: Prompt, messages: Sequence[ChatMessage]) -> Prompt:
        said, ids = checked_chat(messages), list(self.prefix)
        for message in said:
            if message["role"] == "assistant":
                ids += [*self.speller.plain(_with_calls(message)), *self.stop_ids[:1]]
            else:
                ids += self.speller.ids(self._form([message]), [message])
        tokens = np.asarray(ids, dtype=np.int32)
        text = self.text_of(tokens[len(self.prefix) :])
        return msgspec.structs.replace(row, text=text, tokens=tokens, messages=list(messages))

    def observation(self, turn: np.ndarray, messages: Sequence[Mapping[str, Any]]) -> np.ndarray:
        said = checked(messages)
        closing = () if self._ends(turn) else self.stop_ids[:1]
        return np.asarray([*closing, *self.speller.ids(self._form(said), said)], dtype=np.int32)

    def _form(self, messages: Sequence[ChatMessage]) -> Form:
        pieces: list[Piece] = []
        for index, message in enumerate(messages):
            for literal, field in self._template:
                pieces.append(literal)
                if field == "role":
                    pieces.append(message["role"])
                elif field is not None and message.get(field):
                    pieces.append(Slot(index, field))
        return self.speller.form([piece for piece in pieces if piece])


def parsed_template(template: str) -> list[tuple[str, str | None]]:
    """Return the texts of `template`, each with the field that comes behind it."""
    allowed = ("role", *FIELDS)
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ConfigError("not a template of messages", got=repr(template), allowed="'{content}' and '{{'") from error
    for _, name, spec, conversion in pieces:
        if name is not None and (name not in allowed or spec or conversion):
            raise ConfigError(
                "a template of messages uses an unknown place",
                got=f"{{{name}}}",
                allowed=", ".join(f"{{{field}}}" for field in allowed),
                hint=did_you_mean(name, allowed),
            )
    if "content" not in {name for _, name, _, _ in pieces}:
        raise ConfigError("a template of messages needs the place of their text", got=template, allowed="{content}")
    return [(literal, name) for literal, name, _, _ in pieces]


class TemplateChat(Chat):
    """Messages by the chat template of `tokenizer`, which `renderer` runs; `tools` are the schemas of functions.

    A turn ends with the template's own end of turn (`end`, a token) or with any of `stop_ids`; either way the
    observation goes on behind the template's end of turn. The template runs once for each pattern of messages.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        renderer: ChatRenderer,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        stop_ids: Sequence[int] = (),
        parse: Parse | None = None,
    ) -> None:
        templates = tokenizer.chat_template
        if not templates:
            what = "a chat needs a tokenizer with a chat template"
            hint = "use an instruction-tuned checkpoint, or PlainChat"
            raise ConfigError(what, got=str(tokenizer.name_or_path) or "a tokenizer without one", hint=hint)
        written = templates if isinstance(templates, str) else "\n".join(templates.values())
        super().__init__(tokenizer, Speller(tokenizer, written), stop_ids=stop_ids, parse=parse)
        self._knows_thoughts = "</think>" in written
        self.tools = tools
        self.calls_first = False
        """Whether the template takes a tool's message only behind an assistant's message with `tool_calls`."""
        self._renderer = renderer
        self._forms: OrderedDict[Hashable, Form] = OrderedDict()

    def render(self, chats: Sequence[list[ChatMessage]], *, add_generation_prompt: bool = True) -> list[str]:
        """Return the template's texts of `chats`. ConfigError where it does not take them."""
        return self._renderer.render(chats, tools=self.tools, add_generation_prompt=add_generation_prompt)

    @cached_property
    def closing(self) -> str:
        """The text that the template writes behind an assistant's text at the end of a conversation."""
        [text] = self.render([_history(_ASSISTANT)], add_generation_prompt=False)
        return _behind(_ASSISTANT, text)

    @cached_property
    def end(self) -> int | None:
        """The token with which the template ends an assistant's turn; None where that is plain text or nothing."""
        return next((token for token in self.speller.encode(self.closing) if token in self.speller.controls), None)

    def opening(self, prompt: Prompt, messages: Sequence[Mapping[str, Any]], *, extends_prompt: bool = False) -> Prompt:
        if not messages:
            return prompt
        if prompt.messages is None:
            what = "an environment that speaks first needs prompts that are chats"
            raise ConfigError(what, got="a prompt of plain text", hint="set prompts.chat = true")
        said = checked(messages)
        pattern = pattern_of(said)
        before = prompt.messages
        salt = unused_salt(str(before))

        def make() -> list[Piece]:
            chat = with_opening(before, marked(pattern, salt), extends_prompt=extends_prompt)
            [text] = self.render([chat])
            return places(text, pattern, salt)

        form = self._kept((prompt.prompt_id, str(before), pattern, extends_prompt), make)
        return msgspec.structs.replace(
            prompt,
            text=form.text(said),
            tokens=np.asarray(self.speller.ids(form, said), dtype=np.int32),
            messages=with_opening(before, said, extends_prompt=extends_prompt),
        )

    def context(self, row: Prompt, messages: Sequence[ChatMessage]) -> Prompt:
        said = checked_chat(messages)
        calls = [message.get("tool_calls") for message in said]
        spelled, told = str([one for one in calls if one]), str(self.tools)
        self._refuse_controls(told, "a tool", "word its name, description and parameters in another way")
        self._refuse_controls(
            spelled,
            "a call of an assistant's message",
            "what the policy has said is known by its ids, and is sent back as it was",
        )
        texts, parts = taken_apart(said) if self._knows_thoughts else (said, {})
        pattern, salt = pattern_of(texts), unused_salt(spelled + told)
        left_out = {index for index, called in enumerate(calls) if called}  # some templates leave out texts beside them
        left_out |= set(range(len(said), len(texts)))

        def make() -> list[Piece]:
            says = marked(pattern, salt)
            for index, pieces in parts.items():
                says[index]["content"] = "".join(
                    one if isinstance(one, str) else says[one]["content"] for one in pieces
                )
            chat = [
                one if not called else {**one, "tool_calls": called}
                for one, called in zip(says[: len(said)], calls, strict=True)
            ]
            return places(self.render([chat])[0], pattern, salt, may_be_left_out=left_out)

        form = self._kept((pattern, spelled, str(parts)), make)
        tokens = np.asarray(self.speller.ids(form, texts), dtype=np.int32)
        return msgspec.structs.replace(row, text=form.text(texts), tokens=tokens, messages=list(messages))

    def _refuse_controls(self, text: str, what: str, hint: str) -> None:
        """Raise ConfigError where `text`, which the template writes as its own, spells out a control token."""
        if control := next((one for one in self.speller.controls.values() if one in text), None):
            raise ConfigError(f"{what} spells out a control token", got=control, hint=hint)

    def observation(self, turn: np.ndarray, messages: Sequence[Mapping[str, Any]]) -> np.ndarray:
        said = checked(messages)
        form = self.form(said)
        ids = self.speller.ids(form, said)
        if self._ends(turn) and (ended := self._end_of_turn(form)) is not None:
            ids = ids[ids.index(ended) + 1 :]
        return np.asarray(ids, dtype=np.int32)

    def observation_text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the text of an observation behind an assistant's text without its end."""
        said = checked(messages)
        return self.form(said).text(said)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, control tokens spelled out."""
        return self.text_of(np.asarray(ids, dtype=np.int32))

    def form(self, messages: Sequence[ChatMessage]) -> Form:
        """Return the form of `messages` behind an assistant's text: end of turn, messages, header of the next turn."""
        pattern = pattern_of(messages)
        return self._kept(pattern, lambda: places(self._behind_turn(marked(pattern, 0)), pattern, 0))

    def _ends(self, turn: np.ndarray) -> bool:
        return super()._ends(turn) or (len(turn) > 0 and int(turn[-1]) == self.end)

    def _end_of_turn(self, form: Form) -> int | None:
        """Return the token that ends the assistant's turn in `form`; None where it does not begin with one.

        Some templates end the turns before a message only, not the last one: there it is a stop token.
        """
        first = form.pieces[0] if form.pieces and isinstance(form.pieces[0], str) else ""
        found = next((token for token in self.speller.encode(first) if token in self.speller.controls), None)
        return found if found is not None and (found == self.end or found in self.stop_ids) else None

    def _behind_turn(self, messages: list[ChatMessage]) -> str:
        """Return the text from the end of a made-up assistant's text on, which `messages` follow."""
        history = _history(_ASSISTANT)
        if all(message["role"] != "tool" for message in messages):
            return _behind(_ASSISTANT, self.render([[*history, *messages]])[0])
        if not self.calls_first:
            try:
                return _behind(_ASSISTANT, self.render([[*history, *messages]])[0])
            except ConfigError:  # perhaps it wants to see the calls that the tools answer
                text = self._behind_calls(messages)
                self.calls_first = True
                return text
        return self._behind_calls(messages)

    def _behind_calls(self, messages: list[ChatMessage]) -> str:
        history = [*_history(_ASSISTANT)[:-1], calling(_ASSISTANT, messages)]
        [before] = self.render([history], add_generation_prompt=False)
        [text] = self.render([[*history, *messages]])
        if not text.startswith(before) or not before.endswith(self.closing) or _CALLED in text[len(before) :]:
            what = "the chat template changes an assistant's message when a tool's message follows it"
            raise ConfigError(what, got=text[-200:], allowed=before[-200:])
        return self.closing + text[len(before) :]

    def _kept(self, key: Hashable, make: Callable[[], list[Piece]]) -> Form:
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = self.speller.form([piece for piece in make() if piece])
            if len(self._forms) > MAX_FORMS:
                self._forms.popitem(last=False)
        else:
            self._forms.move_to_end(key)
        return form


_ASSISTANT = mark(0, 9999, "assistant")
_CALLED = mark(0, 9998, "called")


def _prefix_of(tokenizer: Tokenizer) -> list[int]:
    """Return the ids that the tokenizer puts in front of every text, such as BOS; not those behind it."""
    bare, whole = (tokenizer.encode("a", add_special_tokens=added) for added in (False, True))
    starts = range(len(whole) - len(bare) + 1)
    return whole[: next((start for start in starts if whole[start : start + len(bare)] == bare), 0)]


def _with_calls(message: ChatMessage) -> str:
    """Return an assistant's text with its calls, as a model without a chat template writes them."""
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
    return str(message["content"]) + "".join(f"{TAGS[0]}{call}{TAGS[1]}" for call in calls)


def _history(assistant: str) -> list[ChatMessage]:
    return [{"role": "user", "content": "A question."}, {"role": "assistant", "content": assistant}]


def calling(content: str, messages: Sequence[ChatMessage]) -> ChatMessage:
    """Return an assistant's message with one call for each tool's message among `messages`, of its name and id."""
    calls = [
        {
            "type": "function",
            "id": message.get("tool_call_id", _CALLED),
            "function": {"name": message.get("name", _CALLED), "arguments": {}},
        }
        for message in messages
        if message["role"] == "tool"
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def _behind(said: str, text: str) -> str:
    """Return the rest of `text` behind the last `said`. ConfigError where the template left that out."""
    before, found, rest = text.rpartition(said)
    if not found:
        raise ConfigError("the chat template leaves out the text of an assistant's message", got=before or rest[-200:])
    return rest
