"""Episodes of a checkpoint outside a run, in one process: by the table, environments, engine and noise of the run.

request -> Episodes -> EpisodeTable -> EpisodePool -> EpisodeTable -> Episodes -> engine -> Episodes -> ... -> over
           (tokens)    (turns)         (environments)
"""

from __future__ import annotations

import itertools
import select
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

from slipstream.core.clock import Clock, WallClock
from slipstream.core.config import RunConfig
from slipstream.core.turn_messages import Observation, TurnSampled
from slipstream.core.types import Completion, Message, Prompt
from slipstream.environments.acting import carry_out, take_answer
from slipstream.environments.build import build_chat, build_chats, make_pool, tools_of
from slipstream.environments.checks import Given
from slipstream.environments.episodes import EpisodeTable, Sources
from slipstream.environments.known_episode import EpisodeLimits
from slipstream.environments.pool import EpisodePool
from slipstream.evals.sampling import give_back, kv_bytes_here, sample_completions
from slipstream.generator.completions import EVAL_STREAM, completion_of_episode, request_of
from slipstream.generator.engine import Engine
from slipstream.generator.episodes import EndedEpisode, Episodes
from slipstream.generator.native import native_engine
from slipstream.generator.requests import Request
from slipstream.models.build import stop_token_ids
from slipstream.models.tokenizer import Tokenizer
from slipstream.models.transformer import Transformer

WAKE_EVERY_S = 1.0
OPEN_PER_SLOT = 2
"""Episodes that are open for each slot of the engine, as some wait for their environments: the default of runs."""


class Answers(Protocol):
    """Answers prompts with completions, as `sample_completions` does: of one turn, or whole episodes."""

    def __call__(
        self,
        model: Transformer,
        prompts: Sequence[Prompt],
        *,
        temperature: float,
        num_samples: int = 1,
        num_slots: int,
        on_progress: Callable[[int], None] | None = None,
    ) -> list[Completion]: ...


@contextmanager
def answering(
    config: RunConfig, tokenizer: Tokenizer, given: Given | None = None, *, private: Sequence[str] = ()
) -> Iterator[Answers]:
    """Yield the function that answers prompts; with an environment, its hosts are there until the end.

    `given` are environments that were handed over from Python; others do not see `private` folders. ConfigError where
    a host cannot make one.
    """
    if not config.environment.is_set:

        def answer(model: Transformer, prompts: Sequence[Prompt], **named: object) -> list[Completion]:
            return sample_completions(config, model, tokenizer, prompts, **named)  # type: ignore[arg-type]

        yield answer
        return
    pool = make_pool(config, given, private=private)
    try:
        pool.wait_ready()
        yield partial(play_episodes, config, pool, tokenizer)
    finally:
        pool.close()


def private_folders(config: RunConfig) -> list[str]:
    """Return the folder that environments do not see: that of the run of the checkpoint, or the checkpoint's."""
    checkpoint = Path(str(config.model.path))
    run_dir = checkpoint.parent
    return [str(run_dir if (run_dir / "config.toml").is_file() else checkpoint)]


def play_episodes(
    config: RunConfig,
    pool: EpisodePool,
    tokenizer: Tokenizer,
    model: Transformer,
    prompts: Sequence[Prompt],
    *,
    temperature: float,
    num_samples: int = 1,
    num_slots: int,
    on_progress: Callable[[int], None] | None = None,
) -> list[Completion]:
    """`num_samples` episodes per prompt, as `sample_completions` returns them; `pool` is ready, and empty afterwards.

    `OPEN_PER_SLOT` x `num_slots` are open at a time. An episode whose environment fails too often is among the
    completions, with the `failure` in its record.
    """
    max_len = config.longest_sequence(model.config.max_positions)
    table = EpisodeTable(
        EpisodeLimits.of(config, max_len, len(tokenizer)),
        build_chat(config, tokenizer, tools_of(pool)),
        Sources.of(config),
        chats=build_chats(config, tokenizer),
    )
    ask = partial(
        request_of, config.generator, max_len=max_len, temperature=temperature, stream=EVAL_STREAM, is_whole=True
    )
    requests = (
        (ask(prompt, ordinal=ordinal, sample=sample), prompt)
        for ordinal, prompt in enumerate(prompts)
        for sample in range(num_samples)
    )
    engine = _engine(config, tokenizer, model, num_slots=num_slots, max_len=max_len)
    play = _Play(engine, table, pool, max_open=OPEN_PER_SLOT * num_slots)
    completions: list[Completion] = []
    for ended in play.run(requests):
        now_s = play.clock.now_s()
        completions.append(completion_of_episode(ended, tokenizer=tokenizer, replica=0, finished_s=now_s))
        if on_progress is not None:
            on_progress(len(completions))
    del engine, play
    give_back(model)
    return sorted(completions, key=lambda completion: (completion.ordinal, completion.sample))


def _engine(config: RunConfig, tokenizer: Tokenizer, model: Transformer, *, num_slots: int, max_len: int) -> Engine:
    """Return an engine as a run's evaluation has it, which keeps keys between the turns of episodes."""
    generator = config.generator
    return native_engine(
        model,
        num_slots=num_slots,
        max_len=max_len,
        seed=config.seed,
        stop_token_ids=stop_token_ids(tokenizer, generator, model.config),
        prefill_tokens=generator.prefilled,
        prefill_chunk=generator.prefill_chunk,
        prefix_cache_tokens=generator.prefix_cache_tokens,
        parked_tokens=generator.parked_tokens,
        kv_bytes=kv_bytes_here(config, model),
    )


class TurnsAtHand:
    """The turns on their way to the table, in the place of a channel; at most one of each branch that is open."""

    targets: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self._waiting: deque[TurnSampled] = deque()

    def has_room_for(self, message: Message) -> bool:  # noqa: ARG002 - a Sender's
        return True

    def put(self, message: Message) -> None:
        assert isinstance(message, TurnSampled)
        self._waiting.append(message)

    def take(self) -> TurnSampled | None:
        """Return the oldest; None without any."""
        return self._waiting.popleft() if self._waiting else None


class _Play:
    """Plays episodes, at most `max_open` at a time, with an engine and a pool of environments.

    Consumes: requests, turns of the engine, and answers of the pool. Waits for: the pool alone, while the engine has
    nothing to decode. Unblocked by: an answer, or the pool's next deadline. Ends when: every episode is over; each
    environment's answer has a deadline, and each turn a number of tokens.
    """

    def __init__(self, engine: Engine, table: EpisodeTable, pool: EpisodePool, *, max_open: int) -> None:
        self.clock: Clock = WallClock()
        self._engine, self._table, self._pool, self._max_open = engine, table, pool, max_open
        self._turns = TurnsAtHand()
        self._ended: list[EndedEpisode] = []
        self._episodes = Episodes(
            self._turns,
            replica=0,
            release=self._release,
            may_follow=lambda _: True,
            new_opening=itertools.count(1).__next__,
        )

    def run(self, requests: Iterator[tuple[Request, Prompt]]) -> Iterator[EndedEpisode]:
        """Yield the episodes as they end."""
        coming = next(requests, None)
        while coming is not None or len(self._episodes):
            while coming is not None and len(self._episodes) < self._max_open:
                self._episodes.begin(*coming)
                coming = next(requests, None)
            has_news = self._exchange()
            if not self._engine.is_idle:
                self._decode()
            elif not has_news:
                self._wait()
            ended, self._ended = self._ended, []
            yield from ended

    def _exchange(self) -> bool:
        """Hand turns to environments and their answers to the engine; whether there were any."""
        has_news = False
        while (turn := self._turns.take()) is not None:
            has_news = True
            self._observe(carry_out(self._table.sampled(turn, self.clock.now_s()), self._pool))
        for answer in self._pool.answers():
            has_news = True
            self._observe(carry_out(take_answer(self._table, answer, self.clock.now_s()), self._pool))
        return has_news

    def _observe(self, observations: Sequence[Observation]) -> None:
        """Sample the next turns of episodes, and note those that are over."""
        for observation in observations:
            following = self._episodes.observe(observation)
            if isinstance(following, Request):
                self._engine.submit([following])
            elif following is not None:
                self._ended.append(following)

    def _decode(self) -> None:
        for item in self._engine.step():
            if self._episodes.finished(item):
                self._engine.let_go_on(item.request.session)

    def _wait(self) -> None:
        deadline_s = self._pool.next_deadline_s()
        assert deadline_s is not None, "episodes are open, and none waits for its environment"
        timeout_s = min(WAKE_EVERY_S, max(0.0, deadline_s - self.clock.now_s()))
        select.select(self._pool.fds(), [], [], timeout_s)

    def _release(self, request: Request) -> None:
        self._engine.release(request.session)
