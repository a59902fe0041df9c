"""Episodes for the generator's tests: a driver of turns and observations, and an oracle that knows no cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from engine_kit import random_prompt

from slipstream.generator.engine import Engine
from slipstream.generator.noise import noise_key, uniform
from slipstream.generator.requests import Finished, Request, Session
from slipstream.models.attention import PackedAttention
from slipstream.models.transformer import Transformer


@dataclass(frozen=True)
class Script:
    """An episode: its prompt, and the observation behind each of its turns but the last."""

    ordinal: int
    num_prompt: int
    observations: tuple[int, ...]  # tokens of each
    max_new_tokens: int = 6
    delays: tuple[int, ...] = ()  # steps from a turn's end to the next one's request; 0 where none is given
    sample: int = 0

    @property
    def prompt(self) -> np.ndarray:
        return random_prompt(self.num_prompt, seed=self.ordinal)

    def observation(self, turn: int) -> np.ndarray:
        return random_prompt(self.observations[turn], seed=1000 * self.ordinal + turn)

    def request(self, turns: Sequence[Finished]) -> Request:
        """The request of the turn behind `turns`."""
        said = [part for i, turn in enumerate(turns) for part in (turn.tokens, self.observation(i))]
        context = np.concatenate([self.prompt, *said])
        return Request(
            self.ordinal,
            self.sample,
            context,
            self.max_new_tokens,
            num_before=len(context) - self.num_prompt,
            parks=len(turns) < len(self.observations),
        )


@dataclass(eq=False)
class Episodes:
    """Plays scripts on an engine. `waiting` has (steps left, request) of those whose environment works."""

    scripts: Sequence[Script]
    turns: dict[int, list[Finished]] = field(default_factory=dict)
    waiting: list[tuple[int, Request]] = field(default_factory=list)

    def play(self, engine: Engine, look: Callable[[Engine], None] | None = None, *, releases: bool = True) -> None:
        """All episodes to their ends; `look` is called before and after every step."""
        script_of = {script.ordinal: script for script in self.scripts}
        self.turns = {script.ordinal: [] for script in self.scripts}
        engine.submit([script.request([]) for script in self.scripts])
        while self.waiting or not engine.is_idle:
            engine.submit([request for steps, request in self.waiting if steps <= 0])
            self.waiting = [(steps - 1, request) for steps, request in self.waiting if steps > 0]
            look = look or (lambda _: None)
            look(engine)
            for finished in engine.step():
                script, turns = script_of[finished.ordinal], self.turns[finished.ordinal]
                delay = script.delays[len(turns)] if len(turns) < len(script.delays) else 0
                turns.append(finished)
                if len(turns) <= len(script.observations):
                    self.waiting.append((delay, script.request(turns)))
                elif releases:
                    engine.release(Session(0, script.ordinal, script.sample))
            look(engine)


def play(engine: Engine, scripts: Sequence[Script], **options: object) -> dict[int, list[Finished]]:
    """The turns of every episode, by ordinal."""
    episodes = Episodes(scripts)
    episodes.play(engine, **options)  # type: ignore[arg-type]
    return episodes.turns


def check_turn(model: Transformer, turn: Finished, *, seed: int, margin: float = 1e-4) -> int:
    """Assert the logprobs of a turn, sampled at temperature 1, and its tokens, by one causal forward over all of it.

    A token must be the one that inverse CDF draws with the noise of its place in the episode, unless the number lies
    within `margin` of where another token begins. Returns how many tokens were beyond it.
    """
    request = turn.request
    context = len(request.prompt_tokens)
    sequence = torch.from_numpy(np.concatenate([request.prompt_tokens, turn.tokens]).astype(np.int64))
    with torch.inference_mode():
        hidden = model(sequence, torch.arange(len(sequence)), PackedAttention([len(sequence)]))
        logits = model.logits(hidden).double()[context - 1 : -1]
    logprobs = torch.log_softmax(logits, -1)
    mine = logprobs.gather(1, sequence[context:, None])[:, 0].numpy()
    assert np.abs(mine - turn.logprobs).max() < 1e-4
    key = noise_key(seed, request.stream, request.ordinal, request.sample)
    places = request.num_before + np.arange(len(turn.tokens))
    numbers = uniform(np.full(len(places), key, dtype=np.uint64), places)
    num_sure = 0
    for token, number, ends in zip(turn.tokens, numbers, logprobs.exp().cumsum(-1).numpy(), strict=True):
        if np.abs(ends[:-1] - number).min() > margin:
            assert token == np.searchsorted(ends, number)
            num_sure += 1
    return num_sure
