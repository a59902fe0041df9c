"""Reward models as terms of the weighted sum, and the node of them, in processes beside generator and trainer.

A model's score of prompt and completion is that at the completion's last token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import torch

from slipstream.algorithms.responses import truncate_at_token
from slipstream.core.errors import ConfigError
from slipstream.core.executor import Context, Executor, takes_stop
from slipstream.core.holders import Holders
from slipstream.core.packed import Batching
from slipstream.core.sections import RewardModelTerm, RewardsConfig, RewardTerm
from slipstream.core.service_messages import Counters, EvalScored, Ready
from slipstream.core.types import Completion, Rollout
from slipstream.core.vetting import Limits, vetted
from slipstream.models.device import scoring_device
from slipstream.models.scoring import Sample, score
from slipstream.models.sharded import Division, load_frozen_scalar
from slipstream.rewards.functions import combined_reward, why_no_reward

_COUNTERS_EVERY_S = 1.0


class ModelScorer:
    """Adds the parts of `config.models` to rollouts, and the reward that all their parts come to.

        r = sum_i weight_i part_i over functions, judges and models, at most violation_cap where one is violated

    A model reads the prompt's tokens and those of the completion up to `truncate_token`, where one is set (N, items 1
    and 25). Of an episode with branches it reads the trunk: one text that goes on from the prompt. `terms` are the
    functions that scored before, in the order of their parts. A failed rollout stays as it is.
    """

    def __init__(
        self,
        config: RewardsConfig,
        *,
        terms: Sequence[RewardTerm],
        batching: Batching,
        microbatch_tokens: int,
        max_tokens: int,
        holders: Holders | None = None,
        local_rank: int = 0,
    ) -> None:
        """Load the models. ConfigError for one that is not there or reads fewer than `max_tokens` tokens.

        On CUDA, `local_rank` chooses the GPU. The `holders` of a copy, where there are several, score together.
        """
        self._config = config
        self._terms: list[RewardTerm | RewardModelTerm] = [*terms, *config.models]
        self._batching = batching
        self._microbatch_tokens = microbatch_tokens
        division = Division(device=scoring_device(config.device, local_rank), stored=config.precision)
        if holders is not None:
            division = replace(division, data_parallel=holders.data_parallel, tensor_parallel=holders.tensor_parallel)
        self._ranks = division.data_parallel
        self._models = [(term.name, load_frozen_scalar(term.path, division)) for term in config.models]
        for name, model in self._models:
            if model.config.max_positions < max_tokens:
                what = f"reward model '{name}' does not read prompts and completions of this run"
                allowed = f"at least {max_tokens} (prompts.max_prompt_tokens + generator.max_new_tokens)"
                raise ConfigError(what, got=f"at most {model.config.max_positions} tokens", allowed=allowed)

    @property
    def vocab_size(self) -> int:
        """Token ids below it are read by all models."""
        return min(model.config.vocab_size for _, model in self._models)

    @property
    def max_positions(self) -> int:
        """Return how many tokens all models read."""
        return min(model.config.max_positions for _, model in self._models)

    def score(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return the rollouts with every part and their reward; one that is longer than a model reads, or whose sum is
        not finite, has failed."""
        rollouts = [self._if_read(rollout) for rollout in rollouts]
        sound = [rollout for rollout in rollouts if rollout.failure is None]
        samples = [self._sample(rollout.completion) for rollout in sound]
        parts = {
            name: score(
                model,
                samples,
                microbatch_tokens=self._microbatch_tokens,
                batching=self._batching,
                ranks=self._ranks,
            )
            for name, model in self._models
        }
        scored = iter(
            self._combined(rollout, {name: float(scores[index]) for name, scores in parts.items()})
            for index, rollout in enumerate(sound)
        )
        return [rollout if rollout.failure is not None else next(scored) for rollout in rollouts]

    def _if_read(self, rollout: Rollout) -> Rollout:
        length = sum(map(len, self._sample(rollout.completion)))
        if rollout.failure is not None or length <= self.max_positions:
            return rollout
        failure = f"{length} tokens with its prompt, the reward models read {self.max_positions}"
        return self._failed(rollout, failure)

    def _failed(self, rollout: Rollout, failure: str) -> Rollout:
        reward = self._config.failure_reward
        return msgspec.structs.replace(rollout, reward=reward, reward_parts={}, failure=failure)

    def _sample(self, completion: Completion) -> Sample:
        end, after = self._config.truncate_token, self._config.truncate_after
        return completion.prompt.tokens, truncate_at_token(completion.trunk_tokens, end, after=after)

    def _combined(self, rollout: Rollout, of_models: dict[str, float]) -> Rollout:
        parts = rollout.reward_parts | of_models
        try:
            reward = combined_reward(self._terms, list(parts.values()), violation_cap=self._config.violation_cap)
        except ValueError as error:
            return self._failed(rollout, why_no_reward(error, rollout.completion.episode))
        return msgspec.structs.replace(rollout, reward=reward, reward_parts=parts)


class RewardModels(Executor):
    """Scores what has arrived as one batch, at most `model_batch_size`, while others sample and train.

    Consumes `completions`: a `Rollout` that reward functions have scored, or a `Completion` where there are no
    functions. Emits a `Rollout` on `scored`; for evaluation completions `EvalScored` on `events`. Waits for: either of
    them. Ends when: told to stop and nothing is left; rank 0 passes the end on. Of the ranks that hold a copy of the
    models (`Holders`) the first does this, and all score what it is dealt.
    """

    inputs = ("completions",)
    outputs = ("scored",)

    def __init__(
        self,
        config: RewardsConfig,
        *,
        terms: Sequence[RewardTerm],
        batching: Batching,
        microbatch_tokens: int,
        max_tokens: int,
        deadline_s: float = 120.0,
    ) -> None:
        self._config, self._terms = config, terms
        self._batching = batching
        self._microbatch_tokens, self._max_tokens, self._deadline_s = microbatch_tokens, max_tokens, deadline_s
        self._counts = {"scored": 0, "eval_scored": 0, "batches": 0}
        self._counted_s = 0.0
        self._is_stopping = self._is_finished = False

    def init(self, context: Context) -> None:
        self._context = context
        torch.set_num_threads(context.num_threads)
        self._holders = Holders(
            context,
            tensor_parallel=self._config.model_tensor_parallel,
            is_sharded=self._config.models_sharded,
            timeout_s=self._deadline_s,
        )
        self._scorer = ModelScorer(
            self._config,
            terms=self._terms,
            batching=self._batching,
            microbatch_tokens=self._microbatch_tokens,
            max_tokens=self._max_tokens,
            holders=self._holders,
            local_rank=context.group.local_rank,
        )
        self._limits = Limits(
            vocab_size=self._scorer.vocab_size,
            max_positions=self._scorer.max_positions,
            reads_branches=False,
            failure_reward=self._config.failure_reward,
        )
        context.spans.set_idle_state("wait_completions")
        context.outputs["events"].put(Ready(executor=context.name))

    def step(self) -> bool:
        """Take a batch of what arrived, score it, and pass it on."""
        self._is_stopping |= takes_stop(self._context)
        with self._context.spans.span("receive"):
            batch = self._holders.batch(self._take)
        if batch:
            self._score(batch)
        elif not self._is_finished and self._holders.ends(is_stopping=self._is_stopping):
            self._report(is_last=True)
            self._is_finished = True
            return True
        self._report(is_last=False)
        return bool(batch)

    @property
    def is_finished(self) -> bool:
        return self._is_finished

    def _score(self, batch: Sequence[Rollout]) -> None:
        is_leader = self._holders.is_leader
        with self._context.spans.span("score"):
            scored = self._scorer.score(batch)
            read = (rollout.completion for rollout in batch)
            self._context.spans.did(sum(len(one.prompt.tokens) + len(one.trunk_tokens) for one in read) * is_leader)
        if not is_leader:
            return
        self._counts["batches"] += 1
        with self._context.spans.span("send"), self._context.together():
            for rollout in scored:
                self._emit(rollout)

    def _take(self) -> list[Rollout]:
        batch: list[Rollout] = []
        while len(batch) < self._config.model_batch_size:
            message = self._context.inputs["completions"].get_nowait()
            if message is None:
                break
            if isinstance(message, Completion):
                message = Rollout(completion=message, reward=0.0)
            assert isinstance(message, Rollout)
            batch += vetted([message], self._limits)
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
