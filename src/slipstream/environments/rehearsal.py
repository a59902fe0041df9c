"""A rehearsal of a run's environments, before it starts: which tools they have, and that they answer.

An environment that cannot be made, reset or rendered would fail on every episode, hours later on a large model. It is
tried where those of the run are, with the same columns, limits and chat.
"""

from __future__ import annotations

import select
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from slipstream.core.clock import WallClock
from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.plain import shortened
from slipstream.core.types import Prompt
from slipstream.environments.build import build_chat, make_pool, tools_of
from slipstream.environments.chat import Chat, TemplateChat
from slipstream.environments.checks import Given, Schemas
from slipstream.environments.episodes import Sources, columns_of
from slipstream.environments.pool import EpisodePool, LastWord, Lost, Said

if TYPE_CHECKING:
    from slipstream.models.tokenizer import Tokenizer

_WAKE_EVERY_S = 1.0
_PROMPT_CHARS = 60
_GUESS = "I think the answer is 42."
_KEY = "rehearsal"


class Rehearsal:
    """A context: hosts of the run's environments, for as long as its prompts are made. Without any it does nothing.

    ConfigError where a host cannot import or make them. `tools` are the schemas that prompts are rendered with.
    """

    def __init__(self, config: RunConfig, given: Given | None, *, private: Sequence[str] = ()) -> None:
        self._config, self._given, self._private = config, given, private
        self._pool: EpisodePool | None = None
        self.tools: Schemas | None = None

    def __enter__(self) -> Self:
        if self._config.environment.is_set:
            alone = self._config.environment.model_copy(update={"num_workers": 1})
            config = self._config.model_copy(update={"environment": alone})
            self._pool = make_pool(config, self._given, private=self._private, num_spares=0)
            try:
                self._pool.wait_ready()
                self.tools = tools_of(self._pool) or None
            except BaseException:
                self._pool.close()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.close()

    def play(self, prompts: Sequence[Prompt], tokenizer: Tokenizer) -> None:
        """Let each environment that prompts name answer on its first prompt, and the last one's on that.

        ConfigError for one that raises, is late, or says what cannot be rendered, and for a chat template that does not
        extend its own text. With `environment.dry_run = false` only the template is looked at.
        """
        if self._pool is None:
            return
        chat = build_chat(self._config, tokenizer, self.tools)
        _check_kind(chat, prompts)
        sources = Sources.of(self._config)
        sources.check(prompts)
        if not self._config.environment.dry_run:
            return
        chosen: dict[tuple[int, bool], Prompt] = {}
        for ordinal, prompt in enumerate(prompts):
            chosen.setdefault((sources.index_of(ordinal, prompt), False), prompt)
        chosen[sources.index_of(len(prompts) - 1, prompts[-1]), True] = prompts[-1]
        for (source, _), prompt in chosen.items():
            self._pool.open(_KEY, source, columns_of(prompt))
            opening = self._answer(prompt)
            self._pool.take(_KEY, 1, {"role": "assistant", "content": _GUESS})
            answer = self._answer(prompt)
            self._pool.finish(_KEY)
            self._answer(prompt)
            try:
                if isinstance(opening, Said):
                    chat.opening(prompt, opening.messages, extends_prompt=opening.extends_prompt)
                if isinstance(answer, Said) and answer.messages:
                    chat.observation(prompt.tokens[:1], answer.messages)
            except ConfigError as error:
                raise self._refused(str(error), prompt) from error

    def _answer(self, prompt: Prompt) -> Said | LastWord:
        """Return the answer to the one call. Ends when: it is there, or its deadline is over."""
        assert self._pool is not None
        clock = WallClock()
        while not (answers := self._pool.poll()):
            deadline_s = self._pool.next_deadline_s()
            wait_s = _WAKE_EVERY_S if deadline_s is None else min(_WAKE_EVERY_S, max(0.0, deadline_s - clock.now_s()))
            select.select(self._pool.fds(), [], [], wait_s)
        [answer] = answers
        if isinstance(answer, Lost):
            raise self._refused(answer.reason, prompt)
        return answer

    @staticmethod
    def _refused(reason: str, prompt: Prompt) -> ConfigError:
        return ConfigError(
            "an environment fails when it is tried, before the run",
            got=f"{reason}; the prompt was {shortened(repr(prompt.text), _PROMPT_CHARS)}, the turn {_GUESS!r}",
            allowed="reset and step that answer whatever the policy says",
            hint=f"reset is given the columns {', '.join(columns_of(prompt))}; environment.dry_run = false for an "
            "environment that is not to be tried in vain",
        )


def _check_kind(chat: Chat, prompts: Sequence[Prompt]) -> None:
    """Raise ConfigError where the words of an environment would be written otherwise than the prompt before them."""
    has_template = isinstance(chat, TemplateChat)
    odd = next((prompt for prompt in prompts if (prompt.messages is not None) != has_template), None)
    if odd is not None:
        raise ConfigError(
            "tools are told to the policy by its chat template, in prompts that are chats"
            if has_template
            else "an environment's messages are written as plain text, and a prompt is a chat",
            got=f"the {'plain text' if has_template else 'chat'} {shortened(repr(odd.text), _PROMPT_CHARS)}",
            allowed="prompts.chat = true",
        )
