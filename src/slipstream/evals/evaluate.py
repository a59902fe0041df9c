"""Evaluation of a model's answers to held-out prompts: the prompts, engine, noise and rewards of the run itself.

The greedy answers are those of the evaluation inside a run for the same weights; with one sample per prompt the sampled
ones are, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.held_out import check_measure, is_right, measured
from slipstream.core.types import Prompt, Rollout
from slipstream.evals.sampling import sample_completions
from slipstream.evals.scoring import numbered, score_by
from slipstream.evals.statistics import pass_at_k_of
from slipstream.evals.target import eval_target
from slipstream.models.build import build_policy, build_tokenizer
from slipstream.models.preflight import check_policy
from slipstream.models.sizes import check_completions, check_sizes
from slipstream.models.tokenizer import Tokenizer
from slipstream.prompts import build_prompts, task_table
from slipstream.rewards.checks import check_rewards
from slipstream.rewards.dry_call import dry_call
from slipstream.rewards.given import Reward, with_given


@dataclass(frozen=True)
class HeldOutAnswer:
    """One answer to one held-out prompt. `reference` is the dataset's answer, `failure` why scoring failed.

    `reward` is what would be trained on, `reward_parts` its terms (None: abstained); `is_correct` is what the term
    `eval.measure` says, None where it is not set or abstained.
    """

    prompt_id: str
    prompt: str
    reference: str | None
    temperature: float
    sample: int
    text: str
    num_tokens: int
    finish_reason: str
    reward: float
    reward_parts: dict[str, float | None]
    is_correct: bool | None
    failure: str | None


@dataclass(frozen=True)
class EvalResult:
    """Means over `num_prompts` held-out prompts, and every answer: greedy ones first, by prompt.

    `sampled_` is the mean over `num_samples` samples per prompt at temperature 1. `reward_parts` are the means of the
    reward's terms. Accuracies, in 0..1, are None where `eval.measure` is not set, and `pass_at_k` is empty; it maps k
    to the unbiased estimate from the samples. `signal_frac` is the share of prompts whose samples differ in reward, as
    RL with groups of `num_samples` needs. `num_failed` counts answers whose scoring failed.
    """

    checkpoint: str
    recipe: str
    reward: float | None
    sampled_reward: float | None
    reward_parts: dict[str, float]
    sampled_reward_parts: dict[str, float]
    accuracy: float | None
    sampled_accuracy: float | None
    pass_at_k: dict[int, float]
    signal_frac: float
    num_prompts: int
    num_samples: int
    num_failed: int
    answers: tuple[HeldOutAnswer, ...]

    @property
    def greedy_answers(self) -> tuple[HeldOutAnswer, ...]:
        return self.answers[: self.num_prompts]


def evaluate_model(
    path: str | Path,
    *,
    recipe: str | Path | Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    reward: Reward | Sequence[Reward] | None = None,
    num_prompts: int | None = None,
    num_samples: int = 1,
) -> EvalResult:
    """Evaluate a run's directory, or a Hugging Face checkpoint's under `recipe`.

    `reward` is what the run was started with, where that was from Python. ConfigError for bad input.
    """
    _, config = eval_target(path, recipe=recipe, overrides=overrides)
    return evaluate(config, reward=reward, num_prompts=num_prompts, num_samples=num_samples)


def evaluate(
    config: RunConfig,
    *,
    reward: Reward | Sequence[Reward] | None = None,
    num_prompts: int | None = None,
    num_samples: int = 1,
) -> EvalResult:
    """Greedy answers, and `num_samples` sampled ones per prompt, of the checkpoint `config.model.path`.

    `num_prompts` defaults to `eval.num_prompts`; at most `prompts.num_eval` are held out.
    """
    if num_samples < 1:
        raise ConfigError("an evaluation needs at least one sample per prompt", got=num_samples, allowed=">= 1")
    config, functions = with_given(config, reward)
    check_measure(config)
    tasks = task_table(config.prompts.tasks)
    if config.rewards.terms or not config.rewards.models:
        check_rewards(config.rewards, tasks, functions)
    check_sizes(config, check_policy(config), {"generator"})
    asked = config.eval.num_prompts if num_prompts is None else num_prompts
    check_completions("num_prompts", asked, num_samples, max_tokens=config.generator.max_new_tokens)
    tokenizer = build_tokenizer(config.model)
    held_out = _held_out(config, tokenizer, num_prompts)
    dry_call(config.rewards, tasks, held_out, functions=functions, group_size=num_samples)
    model, _ = build_policy(config.model, seed=config.seed, tokenizer=tokenizer)
    answer = partial(sample_completions, config, model, tokenizer, held_out, num_slots=config.eval.num_slots)
    completions = answer(temperature=0.0)
    num_greedy = len(completions)
    completions += answer(temperature=1.0, num_samples=num_samples)
    if any(term.per == "group" for term in config.rewards.terms):  # the greedy answer is a group of its own
        scores = partial(score_by, config, config.rewards, functions=functions)
        rollouts = scores(numbered(completions[:num_greedy]))
        rollouts += scores(numbered(completions[num_greedy:], num_samples), group_size=num_samples)
    else:
        rollouts = score_by(config, config.rewards, numbered(completions), functions=functions)
    measure = config.eval.measure
    answers = tuple(
        _as_answer(rollout, measure, sample=completion.sample, temperature=0.0 if index < num_greedy else 1.0)
        for index, (completion, rollout) in enumerate(zip(completions, rollouts, strict=True))
    )
    greedy, sampled = measured(answers[:num_greedy], measure), measured(answers[num_greedy:], measure)
    groups = [answers[start : start + num_samples] for start in range(num_greedy, len(answers), num_samples)]
    has_signal = [len({answer.reward for answer in group}) > 1 for group in groups]
    return EvalResult(
        checkpoint=str(config.model.path),
        recipe=config.recipe,
        reward=greedy.reward,
        sampled_reward=sampled.reward,
        reward_parts=greedy.reward_parts,
        sampled_reward_parts=sampled.reward_parts,
        accuracy=greedy.accuracy,
        sampled_accuracy=sampled.accuracy,
        pass_at_k=pass_at_k_of([answer.is_correct for answer in answers[num_greedy:]], num_samples),
        signal_frac=sum(has_signal) / len(has_signal),
        num_prompts=num_greedy,
        num_samples=num_samples,
        num_failed=sum(answer.failure is not None for answer in answers),
        answers=answers,
    )


def write_answers(result: EvalResult, path: Path) -> None:
    """One JSON object per answer and line; replaces what was there."""
    encoder = msgspec.json.Encoder()
    path.write_bytes(b"".join(encoder.encode(answer) + b"\n" for answer in result.answers))


def _held_out(config: RunConfig, tokenizer: Tokenizer, num_prompts: int | None) -> list[Prompt]:
    held_out = build_prompts(config, tokenizer).eval
    wanted = config.eval.num_prompts if num_prompts is None else num_prompts
    if not 1 <= wanted <= len(held_out):
        raise ConfigError(
            "so many prompts are not held out",
            got=f"num_prompts = {wanted}",
            allowed=f"1..{len(held_out)} (prompts.num_eval)",
            hint="another prompts.num_eval is another split: some of its held-out prompts may have been trained on",
        )
    return held_out[:wanted]


def _as_answer(rollout: Rollout, measure: str | None, *, sample: int, temperature: float) -> HeldOutAnswer:
    completion = rollout.completion
    return HeldOutAnswer(
        prompt_id=completion.prompt.prompt_id,
        prompt=completion.prompt.text,
        reference=completion.prompt.answer,
        temperature=temperature,
        sample=sample,
        text=completion.text,
        num_tokens=completion.num_tokens,
        finish_reason=completion.finish_reason,
        reward=rollout.reward,
        reward_parts=rollout.reward_parts,
        is_correct=is_right(rollout, measure),
        failure=rollout.failure,
    )
