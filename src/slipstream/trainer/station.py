"""The way of rollouts through an executor whose frozen model reads them before the trainer gets them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from slipstream.core.config import RunConfig
from slipstream.core.executor import Context, takes_stop
from slipstream.core.holders import Holders
from slipstream.core.types import Rollout
from slipstream.core.vetting import Limits, vetted
from slipstream.models.config import TransformerConfig

Reading = Callable[[Any, Sequence[Rollout]], list[Rollout]]
"""What `load` made and rollouts -> the rollouts, with what it says of them. It waits for one in another process."""


class Shaped(Protocol):
    """A model, here or in another process: `config` bounds what it may be given."""

    config: TransformerConfig


class Station:
    """Read what has arrived, about a microbatch at once, while others sample and train.

    Consumes `rollouts`, emits them on `measured`. Waits for: a rollout. Ends when: told to stop and nothing is left;
    rank 0 passes the end on. Of the `holders` of a copy of the model the first does this, and all read what it is
    dealt. Evaluation does not come here. `load` makes the model: with the first rollout, or in `load_now`. `state` is
    the timeline's for it.
    """

    def __init__(
        self,
        context: Context,
        config: RunConfig,
        *,
        holders: Holders,
        state: str,
        load: Callable[[], Shaped],
        read: Reading,
    ) -> None:
        self._context, self._config, self._holders, self._state = context, config, holders, state
        self._load, self._read = load, read
        self._model: Shaped | None = None
        self._is_stopping = self.is_finished = False

    def load_now(self) -> None:
        """Load the model; the executor is still starting."""
        self._model = self._load()

    def step(self) -> bool:
        """Take about a microbatch of what arrived, read it, and pass it on."""
        self._is_stopping |= takes_stop(self._context)
        with self._context.spans.span("receive"):
            batch = self._holders.batch(self._take)
        if not batch:
            self.is_finished = self._holders.ends(is_stopping=self._is_stopping)
            return self.is_finished
        if self._model is None:
            with self._context.spans.span("start_up"):
                self.load_now()
        assert self._model is not None
        batch = vetted(batch, limits_of(self._model, self._config))
        with self._context.spans.span(self._state):
            measured = self._read(self._model, batch)
            self._context.spans.did(sum(_num_tokens(rollout) for rollout in batch) * self._holders.is_leader)
        if not self._holders.is_leader:
            return True
        with self._context.spans.span("send"), self._context.together():
            for rollout in measured:
                self._context.outputs["measured"].put(rollout)
        return True

    def _take(self) -> list[Rollout]:
        """Take about a microbatch for each data-parallel rank of what has arrived: more would only delay the first."""
        batch: list[Rollout] = []
        num_tokens = 0
        while num_tokens < self._config.trainer.microbatch_tokens * self._holders.data_parallel.world:
            rollout = self._context.inputs["rollouts"].get_nowait()
            if rollout is None:
                break
            assert isinstance(rollout, Rollout)
            [rollout] = vetted([rollout], Limits())  # what has no shape has no length
            batch.append(rollout)
            num_tokens += _num_tokens(rollout)
        return batch


def _num_tokens(rollout: Rollout) -> int:
    return len(rollout.completion.prompt.tokens) + rollout.completion.num_tokens


def limits_of(model: Shaped, config: RunConfig) -> Limits:
    """Return the limits that a rollout must keep before a frozen model may read its tokens."""
    return Limits(
        vocab_size=model.config.vocab_size,
        max_positions=model.config.max_positions,
        failure_reward=config.rewards.failure_reward,
    )
