"""The open episodes, as a pure state machine: turns and answers in, calls of environments and observations out.

    opening            turn 1            turn 2
    generator -> Open  Said -> Observation -> turn -> Take  Said -> Observation -> ...  -> Finish  Ended -> record

An episode is one sample of a group. Whatever its environment does, raise, hang, die or talk nonsense, costs that
episode: it begins again from its reset, at most `max_restarts` times, and is a failed completion then. A replica that
is lost costs the turn that it was sampling: whoever is admitted the group next asks for the episode and goes on from
the tokens that are known here.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError, did_you_mean
from slipstream.core.types import EpisodeRecord, Observation, Prompt, Segment, TurnSampled
from slipstream.environments.chat import Chat
from slipstream.environments.pool import LastWord, Lost, Said
from slipstream.environments.protocol import ChatMessage, episode_reward

Key = tuple[int, int, int]
"""(evaluation or -1, ordinal, sample)"""
Phase = Literal["resetting", "sampling", "stepping", "ending"]
"""Whom an episode waits for: its environment's reset, the policy, the environment's answer, its last word."""
MAX_FAILURE_CHARS = 500
CHARGES = {True: 4, None: 1, False: 0}
"""For an environment that is lost, by whether it was its own doing; `max_restarts` are counted in whole ones."""


COUNTS = (
    *("episodes", "turns", "restarts"),
    *("ended", "turns_of_ended", "failed", "cut", "tool_calls", "tool_errors"),
)
"""The counters of a table: of all that began, then of episodes that ended."""


# Calls of environments, which the executor makes


@dataclass(frozen=True)
class Open:
    """Make environment `source` for this episode, and reset it with the row's columns."""

    key: Key
    source: int
    columns: dict[str, Any]


@dataclass(frozen=True)
class Take:
    """Let the environment answer the policy's turn."""

    key: Key
    turn: int
    message: ChatMessage


@dataclass(frozen=True)
class Finish:
    """Ask the environment for its final reward, and close it."""

    key: Key


@dataclass(frozen=True)
class Shut:
    """Close the environment, whatever it is doing."""

    key: Key


Act = Open | Take | Finish | Shut | Observation


@dataclass(frozen=True)
class EpisodeLimits:
    """The hard ends of an episode. Tokens are those behind the prompt; `max_len` counts the prompt, too."""

    max_turns: int
    max_turn_tokens: int
    max_episode_tokens: int
    max_len: int
    episode_limit_s: float
    max_restarts: int

    @classmethod
    def of(cls, config: RunConfig, max_len: int) -> EpisodeLimits:
        environment = config.environment
        return cls(
            max_turns=environment.max_turns,
            max_turn_tokens=config.generator.max_new_tokens,
            max_episode_tokens=config.longest_completion,
            max_len=max_len,
            episode_limit_s=environment.episode_limit_s,
            max_restarts=environment.max_restarts,
        )

    def room(self, num_prompt: int, num_behind: int) -> int:
        """Return how many tokens the next turn may have; less than 1: none."""
        return min(self.max_turn_tokens, self.max_episode_tokens - num_behind, self.max_len - num_prompt - num_behind)


@dataclass
class KnownEpisode:
    """An episode as far as it is known here. `given` are tokens behind the last sampled turn.

    `prompt` ends with what the environment said first; `row` is the prompt as it was admitted.
    """

    key: Key
    row: Prompt
    replica: int
    started_s: float
    life: int
    prompt: Prompt = field(init=False)
    phase: Phase = "resetting"
    segments: list[Segment] = field(default_factory=list)
    given: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    messages: list[ChatMessage] = field(default_factory=list)
    turn_rewards: list[float | None] = field(default_factory=list)
    is_cut: bool = False
    is_moved: bool = False  # the replica knows nothing of it: the next observation brings all
    num_restarts: int = 0
    charges: int = 0
    num_tool_calls: int = 0
    num_tool_errors: int = 0
    environment_s: float = 0.0

    def __post_init__(self) -> None:
        self.prompt = self.row

    @property
    def turn(self) -> int:
        """Turns that were sampled."""
        return sum(segment.is_sampled for segment in self.segments)

    @property
    def num_behind(self) -> int:
        """Tokens behind the prompt."""
        return sum(len(segment.tokens) for segment in self.segments) + len(self.given)

    def restart(self, life: int, now_s: float) -> None:
        """Forget all but whose it is, and how often that happened."""
        self.life, self.started_s = life, now_s
        self.phase, self.is_moved, self.is_cut = "resetting", True, False
        self.prompt, self.segments, self.messages, self.turn_rewards = self.row, [], [], []
        self.given = np.zeros(0, dtype=np.int32)
        self.num_tool_calls = self.num_tool_errors = 0

    def observation(self, *, max_new_tokens: int = 0, record: EpisodeRecord | None = None) -> Observation:
        """Return what the replica is to hear: the tokens since the last turn, or the whole episode."""
        is_moved, self.is_moved = self.is_moved, False
        eval_id, ordinal, sample = self.key
        return Observation(
            ordinal=ordinal,
            sample=sample,
            replica=self.replica,
            turn=self.turn,
            eval_id=eval_id,
            life=self.life,
            tokens=self.given,
            max_new_tokens=max_new_tokens,
            replaces=is_moved,
            prompt=self.prompt if is_moved and self.prompt is not self.row else None,
            segments=tuple(self.segments) if is_moved else (),
            record=record,
        )

    def record(self, final_reward: float | None = None, failure: str | None = None) -> EpisodeRecord:
        """Return the episode as it ends."""
        return EpisodeRecord(
            messages=self.messages,
            reward=None if failure is not None else episode_reward(self.turn_rewards, final_reward),
            turn_rewards=self.turn_rewards,
            is_cut=self.is_cut,
            num_tool_calls=self.num_tool_calls,
            num_tool_errors=self.num_tool_errors,
            num_restarts=self.num_restarts,
            environment_s=self.environment_s,
            failure=None if failure is None else failure[:MAX_FAILURE_CHARS],
        )


class EpisodeTable:
    """Every method takes one message and returns what follows from it. `now_s` is the time, in seconds.

    Lives are numbered from `first_life` on: another number for each process, as what its predecessor was told may come.
    """

    def __init__(self, limits: EpisodeLimits, chat: Chat, sources: Sources, *, first_life: int = 1) -> None:
        self._limits, self._chat, self._sources = limits, chat, sources
        self._open: dict[Key, KnownEpisode] = {}
        self._lives = itertools.count(first_life)
        self.counts = dict.fromkeys(COUNTS, 0)
        self.environment_s = 0.0  # of all answers

    def __len__(self) -> int:
        return len(self._open)

    def sampled(self, message: TurnSampled, now_s: float) -> list[Act]:
        """A turn, or an opening, came from a generator. What is void by now is passed over."""
        key = (message.eval_id, message.ordinal, message.sample)
        if message.turn == 0:
            return self._opened(message, key, now_s)
        episode = self._open.get(key)
        if (
            episode is None
            or episode.life != message.life
            or episode.phase != "sampling"
            or message.turn != episode.turn + 1
            or message.segment is None
        ):
            return []
        self.counts["turns"] += 1
        if len(episode.given):
            episode.segments.append(Segment(tokens=episode.given))
            episode.given = np.zeros(0, dtype=np.int32)
        episode.segments.append(message.segment)
        said = self._chat.message(message.segment.tokens)
        episode.messages.append(said)
        episode.phase = "stepping"
        return [Take(key, message.turn, said)]

    def answered(self, answer: Said, now_s: float) -> list[Act]:
        """An environment answered a turn, or its reset."""
        episode = self._open.get(_key_of(answer))
        if episode is None or answer.turn != episode.turn or episode.phase not in ("resetting", "stepping"):
            return []
        episode.environment_s += answer.seconds
        self.environment_s += answer.seconds
        episode.num_tool_calls += answer.num_tool_calls
        episode.num_tool_errors += answer.num_tool_errors
        if answer.turn > 0:
            episode.turn_rewards.append(answer.reward)
        if answer.is_done:
            episode.messages += answer.messages  # to be read; no token follows them, so none is sampled behind them
            return self._end(episode)
        try:
            self._hear(episode, answer)
        except ConfigError as error:  # messages that no template takes are the environment's fault
            return [Shut(episode.key), *self.failed(Lost(episode.key, str(error)), now_s)]
        room = self._limits.room(len(episode.prompt.tokens), episode.num_behind)
        is_late = now_s - episode.started_s > self._limits.episode_limit_s
        if room < 1 or is_late or episode.turn >= self._limits.max_turns:
            episode.given = np.zeros(0, dtype=np.int32)
            episode.is_cut = True
            return self._end(episode)
        episode.phase = "sampling"
        return [episode.observation(max_new_tokens=room)]

    def ended(self, word: LastWord) -> list[Act]:
        """An environment gave its final reward."""
        episode = self._open.get(_key_of(word))
        if episode is None or episode.phase != "ending":
            return []
        return [self._close(episode, episode.record(word.reward))]

    def failed(self, lost: Lost, now_s: float) -> list[Act]:
        """An environment is gone: its episode begins again, or has failed for good."""
        episode = self._open.get(_key_of(lost))
        if episode is None:
            return []
        episode.charges += CHARGES[lost.is_guilty]
        if episode.charges > CHARGES[True] * self._limits.max_restarts:
            self.counts["failed"] += 1
            return [self._close(episode, episode.record(failure=f"environment: {lost.reason}"))]
        episode.num_restarts += 1
        self.counts["restarts"] += 1
        episode.restart(next(self._lives), now_s)
        return [self._open_call(episode)]

    def _hear(self, episode: KnownEpisode, answer: Said) -> None:
        """Take the tokens of what was said. ConfigError for messages that cannot be rendered."""
        if answer.turn == 0:
            extends = answer.extends_prompt
            episode.prompt = self._chat.opening(episode.row, answer.messages, extends_prompt=extends)
        else:  # who says nothing, and is not done, lets the policy go on
            said = answer.messages or [{"role": "user", "content": ""}]
            episode.given = self._chat.observation(episode.segments[-1].tokens, said)
            episode.messages += answer.messages

    def _opened(self, message: TurnSampled, key: Key, now_s: float) -> list[Act]:
        assert message.prompt is not None, "an opening brings the prompt"
        known = self._open.get(key)
        if known is not None and message.may_continue:
            known.replica, known.life, known.is_moved = message.replica, next(self._lives), True
            room = self._limits.room(len(known.prompt.tokens), known.num_behind)
            return [known.observation(max_new_tokens=room)] if known.phase == "sampling" else []
        self.counts["episodes"] += known is None
        episode = KnownEpisode(key, message.prompt, message.replica, now_s, next(self._lives), is_moved=True)
        self._open[key] = episode
        return [*([] if known is None else [Shut(key)]), self._open_call(episode)]

    def _open_call(self, episode: KnownEpisode) -> Open:
        return Open(episode.key, self._sources.index_of(episode.key[1], episode.row), columns_of(episode.row))

    def _end(self, episode: KnownEpisode) -> list[Act]:
        episode.phase = "ending"
        return [Finish(episode.key)]

    def _close(self, episode: KnownEpisode, record: EpisodeRecord) -> Observation:
        del self._open[episode.key]
        self.counts["ended"] += 1
        self.counts["turns_of_ended"] += episode.turn
        self.counts["cut"] += record.is_cut
        self.counts["tool_calls"] += record.num_tool_calls
        self.counts["tool_errors"] += record.num_tool_errors
        return episode.observation(record=record)


@dataclass(frozen=True)
class Sources:
    """Which environment a prompt has: the only one, the one that its `column` names, or one by `weights`."""

    names: tuple[str, ...]
    weights: tuple[float, ...]
    column: str | None = None
    seed: int = 0

    @classmethod
    def of(cls, config: RunConfig) -> Sources:
        choices = config.environment.choices
        if not choices:
            return cls(("",), (1.0,))
        names, weights = zip(*((choice.name, choice.weight) for choice in choices), strict=True)
        return cls(names, weights, config.environment.column, config.seed)

    def index_of(self, ordinal: int, prompt: Prompt) -> int:
        """Return the index of the environment of group `ordinal`: the same for all its samples, and in every run."""
        if self.column is not None:
            return self.names.index(str(prompt.columns[self.column]))
        place = zlib.crc32(f"{self.seed}/{ordinal}".encode()) / 2**32 * sum(self.weights)
        for index, weight in enumerate(self.weights):
            place -= weight
            if place < 0:
                return index
        return len(self.weights) - 1

    def check(self, prompts: Iterable[Prompt]) -> None:
        """Raise ConfigError for a prompt that names no environment."""
        if self.column is None:
            return
        for prompt in prompts:
            if (name := prompt.columns.get(self.column)) not in self.names:
                raise ConfigError(
                    f"a row's column '{self.column}' names no environment",
                    got=repr(name) if self.column in prompt.columns else f"columns {', '.join(sorted(prompt.columns))}",
                    allowed=", ".join(self.names),
                    hint=did_you_mean(str(name), self.names),
                )


def _key_of(answer: Said | LastWord | Lost) -> Key:
    assert isinstance(answer.key, tuple), "the pool has the keys that it was given"
    return answer.key


def columns_of(prompt: Prompt) -> dict[str, Any]:
    """Return the columns of the prompt's row, as environments are reset with: its fields, `prompt` and `answer`."""
    own = {"prompt": prompt.text if prompt.messages is None else prompt.messages, "answer": prompt.answer}
    return {**own, **prompt.columns}
