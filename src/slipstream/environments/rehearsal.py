"""A rehearsal of a run's environments, before it starts: which tools they have, and that they answer.

An environment that cannot be made, reset or rendered would fail on every episode, hours later on a large model. It is
tried where those of the run are, with the same columns, limits and chat.
"""

from __future__ import annotations

import select
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

from slipstream.core.clock import WallClock
from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.plain import shortened
from slipstream.core.types import Prompt
from slipstream.environments.answers import Answer, Asked, LastWord, Lost, Said
from slipstream.environments.asks import Ask, Refused, TurnReply, plain
from slipstream.environments.build import build_chat, build_chats, keeps_states, make_pool, tools_of
from slipstream.environments.chat import Chat, TemplateChat
from slipstream.environments.checks import Given, Schemas
from slipstream.environments.episodes import Sources, columns_of
from slipstream.environments.pool import EpisodePool
from slipstream.environments.transcript import Chats
from slipstream.models.build import max_positions

if TYPE_CHECKING:
    from slipstream.models.tokenizer import Tokenizer

_WAKE_EVERY_S = 1.0
_PROMPT_CHARS = 60
_GUESS = "I think the answer is 42."
_NUM_GUESSES = 3  # for an agent
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
        environment, chats = self._config.environment, build_chats(self._config, tokenizer)
        if environment.has_agents:
            chats.of([])
        chat = build_chat(self._config, tokenizer, self.tools)
        if not environment.has_only_agents:
            _check_kind(chat, prompts)
        sources = Sources.of(self._config)
        sources.check(prompts)
        if not environment.dry_run:
            return
        chosen: dict[tuple[int, bool], Prompt] = {}
        for ordinal, prompt in enumerate(prompts):
            chosen.setdefault((sources.index_of(ordinal, prompt), False), prompt)
        chosen[sources.index_of(len(prompts) - 1, prompts[-1]), True] = prompts[-1]
        for (source, _), prompt in chosen.items():
            self._pool.open(_KEY, source, columns_of(prompt), keeps_state=keeps_states(self._config))
            if source in self._pool.agents:
                self._let_play(prompt, chats)
            else:
                self._let_go_on(prompt, source, self._let_answer(prompt, chat))

    def _let_go_on(self, prompt: Prompt, source: int, last: Said) -> None:
        """Let an environment that has a state be restored as it was after its answer `last`."""
        assert self._pool is not None
        if last.state is not None:
            self._pool.open(_KEY, source, columns_of(prompt), state=last.state, turn=last.turn)
            self._one(prompt)
            self._pool.finish(_KEY)
            self._one(prompt)

    def _let_answer(self, prompt: Prompt, chat: Chat) -> Said:
        """Let an environment that is open answer one turn; return its last answer that is not the end."""
        assert self._pool is not None
        opening = self._one(prompt)
        self._pool.take(_KEY, 1, {"role": "assistant", "content": _GUESS})
        answer = self._one(prompt)
        self._pool.finish(_KEY)
        self._one(prompt)
        assert isinstance(opening, Said), "an environment answers its reset"
        assert isinstance(answer, Said), "and a turn"
        with self._telling(prompt):
            opened = chat.opening(prompt, opening.messages, extends_prompt=opening.extends_prompt)
            if answer.messages:
                chat.observation(prompt.tokens[:1], answer.messages)
        longest = self._config.longest_sequence(max_positions(self._config))
        if len(opened.tokens) >= longest:
            what = f"what reset said leaves no room for a turn: {len(opened.tokens):,} tokens, of at most {longest:,}"
            raise self._refused(what, prompt)
        return opening if answer.is_done else answer

    def _let_play(self, prompt: Prompt, chats: Chats) -> None:
        """Let an agent that is open play its episode with a few guesses; from then on its requests are refused."""
        assert self._pool is not None
        num_asked = 0
        while True:
            for answer in self._answers():
                if isinstance(answer, Asked):
                    num_asked += 1
                    with self._telling(prompt):
                        reply = _guessed(answer.ask, prompt, chats, num_asked)
                    self._pool.give(_KEY, answer.request, reply)
                elif isinstance(answer, Lost) and num_asked <= _NUM_GUESSES:
                    raise self._refused(answer.reason, prompt)
                elif not num_asked:
                    raise self._refused("the agent ended without a request", prompt)
                else:
                    return

    def _one(self, prompt: Prompt) -> Said | LastWord:
        """Return the answer to the one call, or the loss that came with it."""
        answer = self._answers()[-1]
        if isinstance(answer, Lost):
            raise self._refused(answer.reason, prompt)
        assert not isinstance(answer, Asked), "an environment does not ask"
        return answer

    def _answers(self) -> list[Answer]:
        """Return what has come. Ends when: there is something, or a deadline is over."""
        assert self._pool is not None
        clock = WallClock()
        while not (answers := self._pool.poll()):
            deadline_s = self._pool.next_deadline_s()
            wait_s = _WAKE_EVERY_S if deadline_s is None else min(_WAKE_EVERY_S, max(0.0, deadline_s - clock.now_s()))
            select.select(self._pool.fds(), [], [], wait_s)
        return answers

    @contextmanager
    def _telling(self, prompt: Prompt) -> Iterator[None]:
        """Tell with which prompt something could not be rendered."""
        try:
            yield
        except ConfigError as error:
            raise self._refused(str(error), prompt) from error

    @staticmethod
    def _refused(reason: str, prompt: Prompt) -> ConfigError:
        return ConfigError(
            "an environment fails when it is tried, before the run",
            got=f"{reason}; the prompt was {shortened(repr(prompt.text), _PROMPT_CHARS)}, the turn {_GUESS!r}",
            allowed="an agent, or reset and step (state and restore, where it has them), that bear whatever the policy "
            "says",
            hint=f"it is given the columns {', '.join(columns_of(prompt))}; environment.dry_run = false for an "
            "environment that is not to be tried in vain",
        )


def _guessed(ask: Ask, prompt: Prompt, chats: Chats, num_asked: int) -> TurnReply | Refused:
    """Return a made-up turn. ConfigError where the request cannot be rendered."""
    checked = plain(ask)
    if checked.messages is not None:
        chats.of(checked.tools)[1].context(prompt, checked.messages)
    if num_asked > _NUM_GUESSES:
        return Refused("this was only a rehearsal", code="max_turns")
    message = {"role": "assistant", "content": _GUESS}
    return TurnReply(
        message, "stop", num_prompt_tokens=1, tokens=[0], logprobs=[0.0], versions=[(0, 0)], pieces=[_GUESS]
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
