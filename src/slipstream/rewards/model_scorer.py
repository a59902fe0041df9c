"""Reward models as terms of the weighted sum: the score of prompt and completion at the completion's last token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from slipstream.algorithms.responses import truncate_at_token
from slipstream.core.errors import ConfigError
from slipstream.core.packed import Batching
from slipstream.core.sections import RewardModelTerm, RewardsConfig, RewardTerm
from slipstream.core.types import Completion, Rollout
from slipstream.models.device import DTYPES, scoring_device
from slipstream.models.scalar import load_scalar_model
from slipstream.models.scoring import Sample, score
from slipstream.rewards.functions import combined_reward


class ModelScorer:
    """Adds the parts of `config.models` to rollouts, and the reward that all their parts come to.

        r = sum_i weight_i part_i over functions and models, at most violation_cap where a constraint is violated

    A model reads the prompt's tokens and those of the completion up to `truncate_token`, where one is set (N, items 1
    and 25). `terms` are the functions that scored before, in the order of their parts. A failed rollout stays as it is.
    """

    def __init__(
        self,
        config: RewardsConfig,
        *,
        terms: Sequence[RewardTerm],
        batching: Batching,
        microbatch_tokens: int,
        max_tokens: int,
        rank: int = 0,
    ) -> None:
        """Loads the models. ConfigError for one that is not there or reads fewer than `max_tokens` tokens.

        On CUDA, `rank` chooses the GPU.
        """
        self._config = config
        self._terms: list[RewardTerm | RewardModelTerm] = [*terms, *config.models]
        self._batching = batching
        self._microbatch_tokens = microbatch_tokens
        device, dtype = scoring_device(config.device, rank), DTYPES[config.precision]
        self._models = [
            (term.name, load_scalar_model(Path(term.path), dtype=dtype).to(device)) for term in config.models
        ]
        for name, model in self._models:
            if model.config.max_positions < max_tokens:
                raise ConfigError(
                    f"reward model '{name}' does not read prompts and completions of this run",
                    got=f"at most {model.config.max_positions} tokens",
                    allowed=f"at least {max_tokens} (prompts.max_prompt_tokens + generator.max_new_tokens)",
                )

    @property
    def vocab_size(self) -> int:
        """Token ids below it are read by all models."""
        return min(model.config.vocab_size for _, model in self._models)

    def score(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The same rollouts with every part and their reward; one whose sum is not finite has failed."""
        sound = [rollout for rollout in rollouts if rollout.failure is None]
        samples = [self._sample(rollout.completion) for rollout in sound]
        parts = {
            name: score(model, samples, microbatch_tokens=self._microbatch_tokens, batching=self._batching)
            for name, model in self._models
        }
        scored = iter(
            [
                self._combined(rollout, {name: float(scores[index]) for name, scores in parts.items()})
                for index, rollout in enumerate(sound)
            ]
        )
        return [rollout if rollout.failure is not None else next(scored) for rollout in rollouts]

    def _sample(self, completion: Completion) -> Sample:
        end, after = self._config.truncate_token, self._config.truncate_after
        return completion.prompt.tokens, truncate_at_token(completion.tokens, end, after=after)

    def _combined(self, rollout: Rollout, of_models: dict[str, float]) -> Rollout:
        parts = rollout.reward_parts | of_models
        try:
            reward = combined_reward(self._terms, list(parts.values()), violation_cap=self._config.violation_cap)
        except ValueError as error:
            return msgspec.structs.replace(
                rollout, reward=self._config.failure_reward, reward_parts={}, failure=str(error)
            )
        return msgspec.structs.replace(rollout, reward=reward, reward_parts=parts)
