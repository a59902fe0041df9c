"""A loop of both ends of episodes, the generator's and the environments', in which chance decides what happens next."""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from slipstream.core import wire
from slipstream.core.errors import ChannelClosed
from slipstream.core.saved import prompt_crc32
from slipstream.core.turn_messages import Observation, TurnSampled
from slipstream.core.types import Message, Prompt, Segment, VersionSpan
from slipstream.core.unfinished_messages import PartialEpisode
from slipstream.environments.answers import LastWord, Lost, Said
from slipstream.environments.episodes import EpisodeTable, Finish, Open, Shut, Sources, Take
from slipstream.environments.known_episode import EpisodeLimits, Key
from slipstream.generator.episodes import EndedEpisode
from slipstream.generator.episodes import Episodes as GeneratorEpisodes
from slipstream.generator.requests import Finished, Request

OPENINGS = itertools.count(1)
PROMPT = np.arange(5, dtype=np.int32)
LIMITS = EpisodeLimits(
    max_turns=4, max_turn_tokens=6, max_episode_tokens=40, max_len=48, episode_limit_s=1e9, max_restarts=2
)


class PlainNumbers:
    """A chat whose text is its token ids: what was said can be read back from either end."""

    def opening(self, prompt: Prompt, messages: Sequence[dict[str, Any]], *, extends_prompt: bool = False) -> Prompt:
        if not messages:
            return prompt
        tokens = np.concatenate([prompt.tokens, self._ids(messages)])
        return msgspec.structs.replace(prompt, tokens=tokens, text=f"{prompt.text}+")

    def observation(self, tokens: np.ndarray, messages: Sequence[dict[str, Any]]) -> np.ndarray:
        return self._ids(messages)

    def context(self, row: Prompt, messages: Sequence[dict[str, Any]]) -> Prompt:
        return msgspec.structs.replace(row, tokens=self._ids(messages), messages=list(messages))

    def message(self, tokens: np.ndarray) -> dict[str, Any]:
        return {"role": "assistant", "content": " ".join(map(str, tokens))}

    def plain_message(self, tokens: np.ndarray) -> dict[str, Any]:
        return self.message(tokens)

    def text_of(self, tokens: np.ndarray) -> str:
        return " ".join(map(str, tokens))

    def pieces(self, tokens: np.ndarray) -> list[str]:
        return [str(token) for token in tokens]

    def _ids(self, messages: Sequence[dict[str, Any]]) -> np.ndarray:
        return np.array([int(word) for one in messages for word in one["content"].split()], dtype=np.int32)


def prompt(ordinal: int = 0, **columns: Any) -> Prompt:
    return Prompt(prompt_id=str(ordinal), text=f"p{ordinal}", tokens=PROMPT, task="t", answer="7", columns=columns)


@dataclass
class Wire:
    """A channel's writing end that may lead to nobody."""

    name: str
    waiting: deque[Message] = field(default_factory=deque)
    is_closed: bool = False
    targets = frozenset({"environments"})

    def put(self, message: Message) -> None:
        if self.is_closed:
            raise ChannelClosed(f"'{self.name}' is gone")
        self.waiting.append(message)

    def has_room_for(self, message: Message) -> bool:
        return len(self.waiting) < 3


@dataclass
class Replica:
    number: int
    wire: Wire
    spans_versions: bool = True
    version: int = 0
    episodes: GeneratorEpisodes = field(init=False)
    queued: list[Request] = field(default_factory=list)
    inbox: deque[Observation] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.episodes = GeneratorEpisodes(
            self.wire,
            replica=self.number,
            release=lambda _: None,
            may_follow=self._may_follow,
            new_opening=lambda: next(OPENINGS),
        )

    def _may_follow(self, versions: Collection[int]) -> bool:
        newest = max(versions, default=self.version)
        return newest <= self.version if self.spans_versions else set(versions) <= {self.version}

    @property
    def may_swap(self) -> bool:
        return self.spans_versions or not (self.queued or self.episodes.num_begun)


def versions_of(segments: Sequence[Segment]) -> list[int]:
    return [span.version for segment in segments for span in segment.version_spans]


class World:
    """A loop of replicas, environments and their calls in which a source of randomness decides what happens next."""

    def __init__(
        self,
        rng: random.Random,
        *,
        num_replicas: int,
        samples: int,
        spans_versions: bool = True,
        break_rate: float = 0.1,
    ) -> None:
        self.break_rate = break_rate
        self.rng, self.spans_versions, self.newest = rng, spans_versions, 0
        self.replicas = [self._replica(number) for number in range(num_replicas)]
        self.table = self._table()
        self.calls: dict[Key, Open | Take | Finish] = {}
        self.keys = [(-1, ordinal, sample) for ordinal in range(2) for sample in range(samples)]
        self.holder = {key: key[1] % num_replicas for key in self.keys}
        self.done: dict[Key, EndedEpisode] = {}
        self.num_failures = self.num_restored = 0
        for key in self.keys:
            self._begin(key)

    def _replica(self, number: int) -> Replica:
        return Replica(number, Wire("environments"), self.spans_versions, self.newest)

    def _swap(self) -> None:
        """A replica takes the newest version, or one that is newer still; others are behind it then."""
        replica = self.rng.choice(self.replicas)
        if replica.may_swap:
            self.newest += self.rng.randrange(2)
            replica.version = self.newest

    def _table(self) -> EpisodeTable:
        return EpisodeTable(LIMITS, PlainNumbers(), Sources(("",), (1.0,)), keeps_states=True)

    def _begin(self, key: Key, *, may_continue: bool = False, partial: PartialEpisode | None = None) -> None:
        request = Request(ordinal=key[1], sample=key[2], prompt_tokens=PROMPT, max_new_tokens=6)
        episodes = self.replicas[self.holder[key]].episodes
        episodes.begin(request, prompt(key[1]), may_continue=may_continue, partial=partial)

    def step(self, *, may_break: bool) -> None:
        moves = [
            self._take_turn,
            self._take_observation,
            self._decode,
            self._answer,
            self._answer,
            self._send,
            self._swap,
        ]
        if may_break and self.rng.random() < self.break_rate:
            moves = [self._lose_replica, self._lose_environments, self._fail, self._lose_innocent, self._resume]
        self.rng.choice(moves)()

    def _send(self) -> None:
        self.rng.choice(self.replicas).episodes.send()

    def _take_turn(self) -> None:
        replica = self.rng.choice(self.replicas)
        if replica.wire.waiting:
            message = replica.wire.waiting.popleft()
            assert isinstance(message, TurnSampled)
            self._do(self.table.sampled(message, 0.0))

    def _take_observation(self) -> None:
        replica = self.rng.choice(self.replicas)
        if not replica.inbox:
            return
        message = replica.inbox.popleft()
        following = replica.episodes.observe(message)
        if isinstance(following, EndedEpisode):
            key = following.episode.key
            assert key not in self.done, "an episode ends once"
            self.done[key] = following
        elif following is not None:
            assert following.max_new_tokens >= 1
            assert len(following.prompt_tokens) + following.max_new_tokens <= LIMITS.max_len
            replica.queued.append(following)

    def _decode(self) -> None:
        replica = self.rng.choice(self.replicas)
        if not replica.queued:
            return
        request = replica.queued.pop(self.rng.randrange(len(replica.queued)))
        count = self.rng.randint(1, request.max_new_tokens)
        # what is sampled depends on its place alone, as the engine's noise does
        start = 1000 * request.sample + 10_000 * request.branch + request.num_before
        tokens = np.arange(start, start + count, dtype=np.int32)
        replica.episodes.finished(
            Finished(
                request=request,
                tokens=tokens,
                logprobs=-np.ones(count, dtype=np.float32),
                version_spans=(VersionSpan(start=0, version=replica.version),),
                finish_reason="stop",
                started_s=0.0,
                finished_s=1.0,
            )
        )

    def _do(self, acts: Sequence[Any]) -> None:
        for act in acts:
            match act:
                case Observation():
                    self.replicas[act.replica].inbox.append(act)
                case Shut():
                    self.calls.pop(act.key, None)
                case Open() | Take() | Finish():
                    assert act.key not in self.calls, "an environment has one call at a time"
                    self.calls[act.key] = act

    def _answer(self) -> None:
        if not self.calls:
            return
        call = self.calls.pop(self.rng.choice(sorted(self.calls)))
        if isinstance(call, Finish):
            self._do(self.table.ended(LastWord(call.key, 0.5), 0.0))
            return
        if isinstance(call, Open) and call.state is not None:
            assert call.state in (str(call.turn), str(call.turn - 1)), "it is restored as it was at its last answer"
            self.num_restored += 1
            self._do(self.table.answered(Said(call.key, call.turn, [], False, None), 0.0))
            return
        assert not isinstance(call, Open) or call.keeps_state
        turn = call.turn if isinstance(call, Take) else 0
        words = " ".join(str(self.rng.randint(50, 60)) for _ in range(self.rng.randint(0, 5)))
        is_done = turn > 0 and self.rng.random() < 0.3
        said = [{"role": "user", "content": words}] if words else []
        self._do(self.table.answered(Said(call.key, turn, said, is_done, 0.25 if turn else None, state=str(turn)), 0.0))

    def _fail(self) -> None:
        if self.calls:
            key = self.rng.choice(sorted(self.calls))
            del self.calls[key]
            self.num_failures += 1
            self._do(self.table.failed(Lost(key, "it broke", is_guilty=self.rng.choice([True, None, False])), 0.0))

    def _lose_innocent(self) -> None:
        """Its worker is lost by another one's doing, while the policy samples or its environment has a call."""
        if self.table._open:
            key = self.rng.choice(sorted(self.table._open))
            self.calls.pop(key, None)
            self._do(self.table.failed(Lost(key, "another one broke", is_guilty=False), 0.0))

    def _lose_replica(self) -> None:
        """It comes back empty, and is admitted again what it had; or another one is."""
        lost = self.rng.randrange(len(self.replicas))
        self.replicas[lost] = self._replica(lost)
        for key in self.keys:
            if self.holder[key] == lost:
                self.done.pop(key, None)  # its completion was not settled
                self.holder[key] = self.rng.randrange(len(self.replicas))
                self._begin(key, may_continue=self.rng.random() < 0.7)

    def _lose_environments(self) -> None:
        self.table = self._table()
        self.calls.clear()
        for replica in self.replicas:
            replica.inbox.clear()  # of an incarnation that is shut out
            replica.wire.waiting.clear()
            replica.episodes.begin_again()

    def _resume(self) -> None:
        """All processes end; new ones know what a checkpoint held."""
        frames = [wire.encode(one) for one in self.table.partials({key[1] for key in self.keys})]
        saved = {(-1, one.ordinal, one.sample): one for one in (wire.decode(f, (PartialEpisode,)) for f in frames)}
        self.table = self._table()
        self.calls.clear()
        self.replicas = [self._replica(replica.number) for replica in self.replicas]
        for key in self.keys:
            if key in self.done:
                continue
            partial = saved.get(key)
            if partial is not None:
                assert partial.prompt_crc32 == prompt_crc32(PROMPT)
                if not self.spans_versions and partial.versions != {self.newest}:
                    partial = None
            self._begin(key, may_continue=True, partial=partial)

    def finish(self) -> None:
        for _ in range(20_000):
            if len(self.done) == len(self.keys):
                return
            self.step(may_break=False)
        raise AssertionError(f"episodes that never end: {set(self.keys) - self.done.keys()}")
