"""The node of reward models: it adds their scores to rollouts, in processes of its own beside generator and trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from slipstream.core.executor import Context, Executor, takes_stop
from slipstream.core.packed import Batching
from slipstream.core.sections import RewardsConfig, RewardTerm
from slipstream.core.types import Completion, Counters, EvalScored, Ready, Rollout
from slipstream.core.vetting import Limits, vetted
from slipstream.rewards.model_scorer import ModelScorer

_COUNTERS_EVERY_S = 1.0


class RewardModels(Executor):
    """Scores what has arrived as one batch, at most `model_batch_size`, while others sample and train.

    Consumes `completions`: a `Rollout` that reward functions have scored, or a `Completion` where there are no
    functions. Emits a `Rollout` on `scored`; for evaluation completions `EvalScored` on `events`. Waits for: either of
    them. Ends when: told to stop and nothing is left. Of several ranks each has all of the models and scores what it is
    dealt; rank 0 passes the end on.
    """

    inputs = ("completions",)
    outputs = ("scored",)

    def __init__(
        self,
        config: RewardsConfig | Mapping[str, Any],
        *,
        terms: Sequence[RewardTerm | Mapping[str, Any]],
        batching: Batching,
        microbatch_tokens: int,
        max_tokens: int,
    ) -> None:
        self._config = RewardsConfig.model_validate(config)
        self._terms = [RewardTerm.model_validate(term) for term in terms]
        self._batching = batching
        self._microbatch_tokens, self._max_tokens = microbatch_tokens, max_tokens
        self._counts = {"scored": 0, "eval_scored": 0, "batches": 0}
        self._counted_s = 0.0
        self._is_stopping = self._is_finished = False

    def init(self, context: Context) -> None:
        self._context = context
        torch.set_num_threads(context.num_threads)
        self._scorer = ModelScorer(
            self._config,
            terms=self._terms,
            batching=self._batching,
            microbatch_tokens=self._microbatch_tokens,
            max_tokens=self._max_tokens,
            rank=context.group.rank,
        )
        self._limits = Limits(
            vocab_size=self._scorer.vocab_size,
            max_positions=self._max_tokens,
            failure_reward=self._config.failure_reward,
        )
        context.spans.set_idle_state("wait_completions")
        context.outputs["events"].put(Ready(executor=context.name))

    def step(self) -> bool:
        """Take a batch of what arrived, score it, and pass it on."""
        self._is_stopping |= takes_stop(self._context)
        with self._context.spans.span("receive"):
            batch = self._take()
        if batch:
            with self._context.spans.span("score"):
                scored = self._scorer.score(batch)
                self._context.spans.did(sum(_num_tokens(rollout) for rollout in batch))
            self._counts["batches"] += 1
            with self._context.spans.span("send"):
                for rollout in scored:
                    self._emit(rollout)
        elif self._is_stopping and not self._is_finished:
            self._report(is_last=True)
            self._is_finished = True
            return True
        self._report(is_last=False)
        return bool(batch)

    @property
    def is_finished(self) -> bool:
        return self._is_finished

    def _take(self) -> list[Rollout]:
        batch: list[Rollout] = []
        while len(batch) < self._config.model_batch_size:
            message = self._context.inputs["completions"].get_nowait()
            if message is None:
                break
            if isinstance(message, Completion):
                message = Rollout(completion=message, reward=0.0)
            assert isinstance(message, Rollout)
            batch.append(vetted(message, self._limits))
        return batch

    def _emit(self, rollout: Rollout) -> None:
        if rollout.completion.purpose == "train":
            self._counts["scored"] += 1
            stamped = msgspec.structs.replace(rollout, scored_s=self._context.clock.now_s())
            self._context.outputs["scored"].put(stamped)
            return
        self._counts["eval_scored"] += 1
        self._context.outputs["events"].put(EvalScored.of(rollout))

    def _report(self, *, is_last: bool) -> None:
        now_s = self._context.clock.now_s()
        if is_last or now_s - self._counted_s >= _COUNTERS_EVERY_S:
            self._counted_s = now_s
            values = {name: float(count) for name, count in self._counts.items()}
            self._context.outputs["events"].put(Counters(executor=self._context.name, values=values))


def _num_tokens(rollout: Rollout) -> int:
    """Return how many tokens of a rollout a model reads."""
    return len(rollout.completion.prompt.tokens) + rollout.completion.num_tokens
