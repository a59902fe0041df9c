"""Texts of a served model's clients to ids, and sampled ids to the reply: all of it in one thread.

Tokenizers are not safe to use from two threads, and a chat template may take its time.
"""

from __future__ import annotations

import secrets
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.core.errors import ConfigError
from slipstream.core.types import Prompt
from slipstream.environments.asks import Ask, Refused, TurnReply, plain
from slipstream.environments.build import call_parser
from slipstream.environments.chat import Chat, PlainChat, TemplateChat
from slipstream.environments.transcript import Chats
from slipstream.generator.requests import Finished
from slipstream.models.foreign_text import ChatRenderer, check_variables
from slipstream.models.tokenizer import Tokenizer

_NO_PROMPT = Prompt(prompt_id="", text="", tokens=np.zeros(0, dtype=np.int32), task="")
_CALL_ID_CHARS = 9
"""Letters and digits of a call's id: some chat templates take no other."""


@dataclass(frozen=True, eq=False)
class ReadAsk:
    """An ask with the ids of its context, int32 [n], and the chat that reads the answer."""

    ask: Ask
    chat: Chat
    tokens: np.ndarray

    @property
    def is_chat(self) -> bool:
        return self.ask.messages is not None


class ChatText:
    """Reads asks and writes replies of a model with this tokenizer.

    Chats go by the tokenizer's chat template, with its further `variables`, or by `template` (see `PlainChat`) where
    there is none or one is given. The texts of clients never become control tokens; ids are taken as they are.
    `num_ids` is the model's vocabulary. `stop_ids` are those that end a turn: those given, and the template's own.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        template: str | None,
        tool_format: str,
        stop_ids: Sequence[int],
        num_ids: int,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer, self._template, self._tool_format = tokenizer, template, tool_format
        self._num_ids = num_ids
        self.stop_ids = list(stop_ids)
        self._renderer: ChatRenderer | None = None
        if template is None and tokenizer.chat_template:
            specials, origin = tokenizer.special_tokens_map, str(tokenizer.name_or_path)
            self._renderer = ChatRenderer(tokenizer.chat_template, specials, origin=origin, variables=variables)
        elif variables:
            check_variables(None, variables)
        self._chats = Chats(self._make)
        _, chat = self._chats.of([])
        if isinstance(chat, TemplateChat) and chat.end is not None and chat.end not in self.stop_ids:
            self.stop_ids.append(chat.end)
            self._chats = Chats(self._make)

    def read(self, ask: Ask) -> ReadAsk:
        """Return `ask` with its ids. Raises Refused."""
        ask = plain(ask)
        try:
            _, chat = self._chats.of(ask.tools)
            found = ReadAsk(ask, chat, self._ids(ask, chat))
        except ConfigError as error:
            raise Refused(str(error), code="invalid_messages") from error
        if not len(found.tokens):
            raise Refused("a prompt has at least one token", code="invalid_prompt")
        return found

    def reply(self, asked: ReadAsk, finished: Finished) -> TurnReply:
        """Return the turn that was sampled, up to the first of the client's stop texts, as a reply."""
        stops, tokens = asked.ask.wishes.stop, finished.tokens
        length = self._length(asked, tokens, stops)
        turn = tokens if length is None else tokens[:length]
        said = asked.chat.message(turn) if asked.is_chat else asked.chat.plain_message(turn)
        if length is not None:
            content = said["content"]
            said = {
                **said,
                "content": content[: min((content.find(one) for one in stops if one in content), default=None)],
            }
        for call in said.get("tool_calls", ()):
            call["id"] = secrets.token_hex(_CALL_ID_CHARS)[:_CALL_ID_CHARS]
        return TurnReply(
            message=said,
            finish_reason=finished.finish_reason if length is None else "stop",
            num_prompt_tokens=len(asked.tokens),
            tokens=turn.tolist(),
            logprobs=finished.logprobs[: len(turn)].tolist(),
            versions=[(span.start, span.version) for span in finished.version_spans if span.start < len(turn)],
            pieces=asked.chat.pieces(turn),
            prompt_tokens=asked.tokens.tolist(),
        )

    def has_stop(self, asked: ReadAsk, tokens: np.ndarray, num_seen: int) -> bool:
        """Whether a stop text ends in `tokens` behind the first `num_seen`, as far as the text of the last ones tells.

        Reads no more tokens before `num_seen` than the longest stop text has bytes.
        """
        stops = asked.ask.wishes.stop
        start = max(0, num_seen - max(len(one.encode(errors="replace")) for one in stops))
        text = self._text(asked, tokens[start:])
        return any(one in text for one in stops)

    def lasting(self, asked: ReadAsk, tokens: np.ndarray) -> str:
        """Return the beginning of the reply's text that `tokens` make certain, whatever is sampled behind them.

        Parts of a character are left out, and all from a stop text, or what may become one, on.
        """
        text, stops = self._text(asked, tokens).rstrip("\ufffd"), asked.ask.wishes.stop
        ends = [text.find(one) for one in stops if one in text]
        ends += [
            len(text) - n for one in stops for n in range(1, min(len(one), len(text) + 1)) if text.endswith(one[:n])
        ]
        return text[: min(ends, default=None)]

    def _make(self, tools: list[dict[str, Any]] | None) -> Chat:
        parse = call_parser(self._tool_format, self._tokenizer, tools, self._renderer)
        if self._renderer is None:
            return PlainChat(self._tokenizer, self._template or "{content}", stop_ids=self.stop_ids, parse=parse)
        return TemplateChat(self._tokenizer, self._renderer, tools, stop_ids=self.stop_ids, parse=parse)

    def _ids(self, ask: Ask, chat: Chat) -> np.ndarray:
        if ask.tokens is not None:
            return self._checked(ask.tokens)
        if ask.messages is not None:
            return chat.context(_NO_PROMPT, ask.messages).tokens
        return chat.ids_of(ask.text or "")

    def _checked(self, ids: list[int]) -> np.ndarray:
        wrong = next((one for one in ids if not 0 <= one < self._num_ids), None)
        if wrong is not None:
            raise Refused(
                f"the vocabulary has ids from 0 to {self._num_ids - 1:,}, and no {wrong}", code="invalid_prompt"
            )
        return np.asarray(ids, dtype=np.int32)

    def _text(self, asked: ReadAsk, tokens: np.ndarray) -> str:
        """Return the text in which stop texts are looked for: what the client reads, calls of tools among it."""
        if not asked.is_chat:
            return "".join(asked.chat.pieces(tokens))
        if asked.ask.tools:
            return asked.chat.text_of(tokens)
        return str(self._tokenizer.decode(tokens.tolist(), True, clean_up_tokenization_spaces=False))

    def _length(self, asked: ReadAsk, tokens: np.ndarray, stops: Sequence[str]) -> int | None:
        """Return the fewest of `tokens` whose text has one of `stops`; None where all of them have none."""

        def stopped(length: int) -> bool:
            text = self._text(asked, tokens[:length])
            return any(one in text for one in stops)

        if not stops or not stopped(len(tokens)):
            return None
        return bisect_left(range(len(tokens)), True, key=stopped)
