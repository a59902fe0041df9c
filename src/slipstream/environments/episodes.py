"""The open episodes, as a pure state machine: turns and answers in, calls of environments and observations out.

    opening            turn 1            turn 2
    generator -> Open  Said -> Observation -> turn -> Take  Said -> Observation -> ...  -> Finish  LastWord -> record

An episode is one sample of a group. Whatever its environment does, raise, hang, die or talk nonsense, costs that
episode: it begins again from its reset, at most `max_restarts` times, and is a failed completion then. A replica that
is lost costs the turn that it was sampling: whoever is admitted the group next asks for the episode and goes on from
the tokens that are known here. A checkpoint holds open episodes whose environments have a state: a resumed run opens
them with it (`restore` in place of `reset`), and they go on behind their last answer.

An agent asks for its turns by itself, several at once if it likes, and ends by itself (`transcript.py` says where a
request belongs):

    opening                            turn 1
    generator -> Open  Asked -> Observation -> turn -> Give(reply)  Asked -> Observation -> ...  LastWord -> record
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.turn_messages import Observation, TurnSampled
from slipstream.core.types import EpisodeRecord, Prompt
from slipstream.core.unfinished_messages import PartialEpisode
from slipstream.environments.answers import Answer, Asked, LastWord, Lost, Said
from slipstream.environments.asking import admitted, reply_to
from slipstream.environments.asks import Refused, TurnReply
from slipstream.environments.chat import Chat
from slipstream.environments.known_episode import EpisodeLimits, Key, KnownEpisode
from slipstream.environments.protocol import ChatMessage
from slipstream.environments.transcript import Chats

CHARGES = {True: 4, None: 1, False: 0}
"""For an environment that is lost, by whether it was its own doing; `max_restarts` are counted in whole ones."""


COUNTS = (
    *("episodes", "turns", "restarts", "restored", "begun_again"),
    *("ended", "turns_of_ended", "failed", "cut", "tool_calls", "tool_errors", "forks", "refused"),
)
"""The counters of a table: of all that began, then of episodes that ended. `restored` ones went on from a state.
`begun_again` ones were open before a process was lost or the run was resumed, and had nothing to go on from.
"""
_NO_TURN = "environment: what reset said left no room for a turn, or reset took longer than environment.episode_limit_s"


# Calls of environments, which the executor makes


@dataclass(frozen=True)
class Open:
    """Make environment `source` for this episode, and reset it with the row's columns, or restore it.

    With `keeps_state` its answers are to bring its state. It has `state` behind turn `turn`.
    """

    key: Key
    source: int
    columns: dict[str, Any]
    keeps_state: bool = False
    state: str | None = None
    turn: int = 0


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


@dataclass(frozen=True)
class Give:
    """Give the agent the turn that it asked for as `request`, or tell it why there is none."""

    key: Key
    request: int
    reply: TurnReply | Refused


Act = Open | Take | Finish | Shut | Give | Observation


class EpisodeTable:
    """Every method takes one message and returns what follows from it. `now_s` is the time, in seconds.

    `chats` are those of agents, by the tools that they bring. With `keeps_states` episodes of training are kept such
    that `partials` can tell them.
    """

    def __init__(
        self,
        limits: EpisodeLimits,
        chat: Chat,
        sources: Sources,
        *,
        chats: Chats | None = None,
        keeps_states: bool = False,
    ) -> None:
        self._limits, self._chat, self._sources, self._keeps_states = limits, chat, sources, keeps_states
        self._chats = chats or Chats(lambda _: chat)
        self._open: dict[Key, KnownEpisode] = {}
        self._lives = itertools.count(1)
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
        if episode is None or episode.life != message.life or message.branch >= len(episode.branches):
            return []
        branch = episode.branches[message.branch]
        if not branch.is_sampling or message.turn != branch.turn + 1 or message.segment is None:
            return []
        self.counts["turns"] += 1
        branch.sampled(message.segment)
        episode.finish_reason = message.finish_reason or "stop"
        if episode.phase == "talking":
            return [Give(key, branch.request, reply_to(episode, branch, message))]
        said = self._chat.message(message.segment.tokens)
        episode.messages.append(said)
        if episode.phase == "restoring":  # its environment hears of the turn when it is there again
            return []
        episode.phase = "stepping"
        return [Take(key, message.turn, said)]

    def asked(self, asked: Asked, now_s: float) -> list[Act]:
        """An agent asked for a turn."""
        episode = self._open.get(_key_of(asked))
        if episode is None or episode.phase not in ("resetting", "talking"):
            return []
        self._spent(episode, asked.seconds)
        episode.phase = "talking"
        try:
            branch = admitted(episode, asked, self._limits, self._chats, now_s)
        except Refused as refused:
            self.counts["refused"] += 1
            return [Give(episode.key, asked.request, refused)]
        return [episode.observation(branch, max_new_tokens=branch.num_asked)]

    def answered(self, answer: Said, now_s: float) -> list[Act]:
        """An environment answered a turn, or its reset."""
        episode = self._open.get(_key_of(answer))
        if episode is not None and episode.phase == "restoring":
            self._spent(episode, answer.seconds)
            return self._restored(episode, now_s)
        if episode is None or answer.turn != episode.turn or episode.phase not in ("resetting", "stepping"):
            return []
        self._spent(episode, answer.seconds)
        episode.state = None if answer.is_done else answer.state
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
        return self._go_on(episode, now_s)

    def partials(self, owed: Collection[int]) -> list[PartialEpisode]:
        """Return the open episodes of these groups that can be gone on with from what is known here."""
        found = [one.partial() for key, one in self._open.items() if key[0] < 0 and key[1] in owed]
        return [one for one in found if one is not None]

    def _restored(self, episode: KnownEpisode, now_s: float) -> list[Act]:
        """Go on behind the last answer; the environment is as it was then."""
        self.counts["restored"] += 1
        if episode.has_no_answer:
            episode.phase = "stepping"
            return [Take(episode.key, episode.turn, episode.messages[-1])]
        if episode.trunk.is_sampling:
            episode.phase = "sampling"
            return []
        return self._go_on(episode, now_s)

    def _go_on(self, episode: KnownEpisode, now_s: float) -> list[Act]:
        """Let the policy sample the next turn, within the limits."""
        trunk = episode.trunk
        room = self._limits.room(trunk.num_tokens, episode.num_behind)
        is_late = now_s - episode.started_s > self._limits.episode_limit_s
        if room < 1 or is_late or episode.turn >= self._limits.max_turns:
            episode.is_cut = True
            return self._end(episode)
        episode.phase, trunk.is_sampling, trunk.num_asked = "sampling", True, room
        return [episode.observation(trunk, max_new_tokens=room)]

    def ended(self, word: LastWord, now_s: float) -> list[Act]:
        """An environment gave its final reward; or an agent returned, by itself."""
        episode = self._open.get(_key_of(word))
        if episode is None:
            return []
        if episode.phase == "ending":
            failure = None if episode.turn else _NO_TURN
            return [self._close(episode, episode.record(word.reward, failure))]
        self._spent(episode, word.seconds)
        if not episode.turn:
            reason = "a limit left its first request no room" if episode.is_cut else "it ended without a turn"
            return self.failed(Lost(episode.key, reason), now_s)
        return [self._close(episode, episode.record(word.reward))]

    def failed(self, lost: Lost, now_s: float) -> list[Act]:
        """An environment is gone: its episode begins again, or has failed for good.

        One that shared a worker with the culprit goes on from its last answer where it has a state; meanwhile the
        policy samples what it was sampling.
        """
        episode = self._open.get(_key_of(lost))
        if episode is None:
            return []
        has_given_up = episode.phase == "talking" and lost.is_guilty and not lost.is_suspected
        if has_given_up and episode.is_cut and episode.turn:  # it did not bear to be refused a turn
            return [self._close(episode, episode.record())]
        if lost.is_guilty is False and episode.state is not None:
            episode.phase = "restoring"
            return [self._open_call(episode)]
        episode.charges += CHARGES[lost.is_guilty]
        if episode.charges > CHARGES[True] * self._limits.max_restarts:
            return [self._close(episode, episode.record(failure=f"environment: {lost.reason}"))]
        episode.num_restarts += 1
        self.counts["restarts"] += 1
        self.counts["begun_again"] += episode.phase == "restoring"
        episode.restart(next(self._lives), now_s)
        return [self._open_call(episode)]

    def _hear(self, episode: KnownEpisode, answer: Said) -> None:
        """Take the tokens of what was said. ConfigError for messages that cannot be rendered."""
        trunk = episode.trunk
        if answer.turn == 0:
            extends = answer.extends_prompt
            trunk.prompt = self._chat.opening(episode.row, answer.messages, extends_prompt=extends)
        else:  # who says nothing, and is not done, lets the policy go on
            said = answer.messages or [{"role": "user", "content": ""}]
            trunk.given = self._chat.observation(trunk.segments[-1].tokens, said)
            episode.messages += answer.messages

    def _opened(self, message: TurnSampled, key: Key, now_s: float) -> list[Act]:
        assert message.prompt is not None, "an opening brings the prompt"
        known = self._open.get(key)
        if known is not None and message.may_continue:
            known.moved_to(message.replica, message.opening, next(self._lives))
            sampling = [branch for branch in known.branches if branch.is_sampling]
            return [known.observation(branch, max_new_tokens=branch.num_asked) for branch in sampling]
        self.counts["episodes"] += known is None
        episode = KnownEpisode(
            key, message.prompt, message.replica, message.opening, now_s, next(self._lives), self._chat
        )
        self._open[key] = episode
        if known is None and message.partial is not None and episode.go_on_from(message.partial):
            return [self._open_call(episode)]
        self.counts["begun_again"] += message.is_again
        return [*([] if known is None else [Shut(key)]), self._open_call(episode)]

    def _open_call(self, episode: KnownEpisode) -> Open:
        """Return the call that begins an episode: with the state that a checkpoint held, where it has one."""
        source = self._sources.index_of(episode.key[1], episode.row)
        keeps_state = self._keeps_states and episode.key[0] < 0
        return Open(episode.key, source, columns_of(episode.row), keeps_state, episode.state, episode.turn)

    def _end(self, episode: KnownEpisode) -> list[Act]:
        episode.phase = "ending"
        return [Finish(episode.key)]

    def _spent(self, episode: KnownEpisode, seconds: float) -> None:
        episode.environment_s += seconds
        self.environment_s += seconds

    def _close(self, episode: KnownEpisode, record: EpisodeRecord) -> Observation:
        del self._open[episode.key]
        self.counts["ended"] += 1
        self.counts["failed"] += record.failure is not None
        self.counts["turns_of_ended"] += episode.turn
        self.counts["cut"] += record.is_cut
        self.counts["tool_calls"] += record.num_tool_calls
        self.counts["tool_errors"] += record.num_tool_errors
        self.counts["forks"] += len(record.branches)
        return episode.last_observation(record)


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
        """Return the index of the environment of group `ordinal`: the same for all its samples, and in every run.

        ConfigError as in `check`, for a row that is streamed.
        """
        if self.column is not None:
            self.check([prompt])
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
                raise ConfigError.unknown(
                    f"a row's column '{self.column}' names no environment",
                    str(name),
                    self.names,
                    got=repr(name) if self.column in prompt.columns else f"columns {', '.join(sorted(prompt.columns))}",
                )


def _key_of(answer: Answer) -> Key:
    assert isinstance(answer.key, tuple), "the pool has the keys that it was given"
    return answer.key


def columns_of(prompt: Prompt) -> dict[str, Any]:
    """Return the columns of the prompt's row, as environments are reset with: its fields, `prompt` and `answer`."""
    own = {"prompt": prompt.text if prompt.messages is None else prompt.messages, "answer": prompt.answer}
    return {**own, **prompt.columns}
