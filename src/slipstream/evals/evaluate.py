"""Evaluation of a model's answers to held-out prompts: the prompts, engine, noise and rewards of the run itself.

With an environment an answer is an episode, played by the run's own environments.

The greedy answers are those of the evaluation inside a run for the same weights; with one sample per prompt the sampled
ones are, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from slipstream.core.config import RunConfig
from slipstream.core.disk import replace_file
from slipstream.core.errors import ConfigError
from slipstream.core.held_out import check_measure, is_right, measured
from slipstream.core.recipes import names_terms
from slipstream.core.types import Completion, Prompt, Rollout
from slipstream.environments.checks import Given, check_environments
from slipstream.environments.episodes import Sources
from slipstream.environments.given import AgentFunction, EnvironmentMaker, with_given_environment
from slipstream.environments.rehearsal import Rehearsal
from slipstream.evals.episodes import answering, private_folders
from slipstream.evals.sampling import check_sampling, to_sample
from slipstream.evals.scoring import numbered, score_by
from slipstream.evals.statistics import pass_at_k_of
from slipstream.evals.target import eval_target
from slipstream.models.build import build_policy, build_tokenizer
from slipstream.models.config import TransformerConfig
from slipstream.models.preflight import check_policy
from slipstream.models.sizes import check_completions, check_sizes
from slipstream.models.tokenizer import Tokenizer
from slipstream.observe.summary import longest_prompt
from slipstream.observe.transcript import TranscriptPart, transcript_of
from slipstream.prompts import build_prompts, held_out_prompts, task_table
from slipstream.rewards.checks import check_rewards
from slipstream.rewards.dry_call import dry_call
from slipstream.rewards.given import Functions, Reward, with_given
from slipstream.rewards.user_functions import columns_needed


@dataclass(frozen=True)
class PlayedEpisode:
    """How an answer of several turns came about; `turns` is its transcript, with the environment's rewards.

    `environment` is the name of its choice, where there are several. `is_cut`: a limit ended it.
    """

    environment: str
    num_turns: int
    is_cut: bool
    num_tool_calls: int
    num_tool_errors: int
    num_restarts: int
    turns: tuple[TranscriptPart, ...]


@dataclass(frozen=True)
class HeldOutAnswer:
    """One answer to one held-out prompt. `reference` is the dataset's answer, `failure` why scoring failed.

    `reward` is what would be trained on, `reward_parts` its terms (None: abstained); `is_correct` is what the term
    `eval.measure` says, None where it is not set or abstained. `episode` is there with an environment; the `text` is
    then that of all its turns, and a `failure` may be the environment's.
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
    episode: PlayedEpisode | None = None


@dataclass(frozen=True)
class EpisodeMeans:
    """Means over the episodes of answers. `rewards` are the mean rewards by environment, where there are several."""

    num_turns: float
    cut_frac: float
    num_tool_calls: float
    num_tool_errors: float
    rewards: dict[str, float]


@dataclass(frozen=True)
class EvalResult:
    """Means over `num_prompts` held-out prompts, and every answer: greedy ones first, by prompt.

    `sampled_` is the mean over `num_samples` samples per prompt at temperature 1, or their set's. `reward_parts` are
    the means of the reward's terms. Accuracies, in 0..1, are None where `eval.measure` is not set, and `pass_at_k` is
    empty; it maps k to the unbiased estimate from the samples. `signal_frac` is the share of prompts whose samples
    differ in reward, as RL with groups of `num_samples` needs. `num_failed` counts answers whose scoring, or whose
    environment, failed, and `failures` the reasons. `episodes` and `sampled_episodes` are there with an environment.
    `data` is the data set of the prompts, None where they are split off the run's own; `eval_set` the name of theirs
    of `eval.sets`. They were `sampled_on` this device.
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
    failures: dict[str, int] = field(default_factory=dict)
    episodes: EpisodeMeans | None = None
    sampled_episodes: EpisodeMeans | None = None
    data: str | None = None
    eval_set: str = ""
    sampled_on: str = "cpu"

    @property
    def greedy_answers(self) -> tuple[HeldOutAnswer, ...]:
        return self.answers[: self.num_prompts]


def evaluate_model(
    path: str | Path,
    *,
    recipe: str | Path | Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    reward: Reward | Sequence[Reward] | None = None,
    environment: EnvironmentMaker | None = None,
    tools: Sequence[Callable[..., Any] | str] | None = None,
    environment_factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None = None,
    agent: AgentFunction | None = None,
    num_prompts: int | None = None,
    num_samples: int | None = None,
    data: str | Path | None = None,
    eval_set: str | None = None,
) -> EvalResult:
    """Evaluate a run's directory, or a Hugging Face checkpoint's under `recipe`.

    `reward`, `environment`, `tools`, `environment_factory` and `agent` are what the run was started with, where that
    was from Python. With a `recipe` they are as in `slipstream.run`: what gives rewards takes the place of the terms,
    unless the tables name those. With `data`, a file, folder or hub id, it answers all prompts of that, or the first
    `num_prompts`, in place of the held-out ones. `eval_set` names one of `eval.sets`; else it is the first of them.
    `num_samples` is 1, or what the set says. ConfigError for bad input.
    """
    _, config = eval_target(path, recipe=recipe, overrides=overrides, data=data, num_prompts=num_prompts)
    keeps_terms = recipe is None or reward is not None
    keeps_terms |= any(names_terms(one) for one in (recipe, overrides) if one is not None)
    config, environments = with_given_environment(
        config, environment, tools, environment_factory, agent, keeps_terms=keeps_terms
    )
    return evaluate(
        config,
        reward=reward,
        environments=environments,
        num_prompts=num_prompts,
        num_samples=num_samples,
        is_whole=data is not None,
        eval_set=eval_set,
    )


def evaluate(
    config: RunConfig,
    *,
    reward: Reward | Sequence[Reward] | None = None,
    environments: Given | None = None,
    num_prompts: int | None = None,
    num_samples: int | None = None,
    is_whole: bool = False,
    eval_set: str | None = None,
) -> EvalResult:
    """Greedy answers, and `num_samples` sampled ones per prompt, of the checkpoint `config.model.path`.

    `num_prompts` defaults to `eval.num_prompts`; at most `prompts.num_eval` are held out. With `is_whole`, all of
    `prompts.eval_dataset` are. Of `eval.sets` it is `eval_set`, or the first, whose temperature, where it is not 0, and
    numbers are the defaults. `environments` are those that were handed over from Python.
    """
    config, functions = with_given(config, reward)
    name, temperature = config.eval.primary if eval_set is None else eval_set, 1.0
    if name:
        chosen, config, is_whole = config.eval.sets, config.for_set(name), True
        one = next(one for one in chosen if one.name == name)
        num_prompts = one.num_prompts if num_prompts is None else num_prompts
        num_samples = one.num_samples if num_samples is None else num_samples
        temperature = one.temperature or temperature
    num_samples = 1 if num_samples is None else num_samples
    if num_prompts is None and not is_whole:
        num_prompts = config.eval.num_prompts
    shape = _check(config, functions, environments, num_prompts or 1, num_samples)
    tokenizer = build_tokenizer(config.model)
    needed = columns_needed(config.rewards, functions)
    held_out = _held_out(config, tokenizer, environments, num_prompts, needed, is_whole=is_whole)
    config = _with_longest_prompt(config, held_out)
    check_sizes(check_sampling(config, shape), shape, {"generator"})
    check_completions("num_prompts", len(held_out), num_samples, max_tokens=config.longest_completion)
    tasks = task_table(config.prompts.tasks)
    dry_call(config.rewards, tasks, held_out, functions=functions, group_size=num_samples)
    made, _ = build_policy(config.model, seed=config.seed, tokenizer=tokenizer)
    model = to_sample(config, made)
    with answering(config, tokenizer, environments, private=private_folders(config)) as answer:
        ask = partial(answer, model, held_out, num_slots=config.eval.num_slots)
        completions = ask(temperature=0.0)
        num_greedy = len(completions)
        completions += ask(temperature=temperature, num_samples=num_samples)
    rollouts = _scored(config, completions, num_greedy, num_samples, functions)
    answers = tuple(
        _as_answer(
            rollout,
            config.eval.measure,
            sample=completion.sample,
            temperature=0.0 if index < num_greedy else temperature,
            episode=_as_played(completion, Sources.of(config)),
        )
        for index, (completion, rollout) in enumerate(zip(completions, rollouts, strict=True))
    )
    result = _result(config, answers, num_greedy, num_samples)
    return replace(result, eval_set=name, sampled_on=str(model.cos.device))


def _check(
    config: RunConfig, functions: Functions, environments: Given | None, num_prompts: int, num_samples: int
) -> TransformerConfig:
    """Return the model's sizes. ConfigError for what could not be evaluated, before anything is read or sampled."""
    if num_samples < 1:
        raise ConfigError("an evaluation needs at least one sample per prompt", got=num_samples, allowed=">= 1")
    check_environments(config, environments)
    check_measure(config)
    if config.needs_functions:
        check_rewards(config.rewards, task_table(config.prompts.tasks), functions)
    shape = check_policy(config)
    check_sizes(check_sampling(config, shape), shape, {"generator"})
    check_completions("num_prompts", num_prompts, num_samples, max_tokens=config.longest_completion)
    return shape


def _with_longest_prompt(config: RunConfig, held_out: Sequence[Prompt]) -> RunConfig:
    """Return `config` with the longest prompt, as the run had it: its training prompts, which are not read here, count
    as its summary says."""
    of_run = longest_prompt(Path(str(config.model.path)).parent)
    return config.with_longest_prompt(max(of_run, *(len(prompt.tokens) for prompt in held_out)))


def _scored(
    config: RunConfig, completions: Sequence[Completion], num_greedy: int, num_samples: int, functions: Functions
) -> list[Rollout]:
    """Return the rollouts of the greedy answers and of the sampled ones, in their order."""
    scores = partial(score_by, config, config.rewards, functions=functions)
    if config.environment.is_set:
        scores = partial(scores, environment_weight=config.environment.reward_weight)
    if not any(term.per == "group" for term in config.rewards.terms):
        return scores(numbered(completions))
    greedy = scores(numbered(completions[:num_greedy]))  # a group of its own
    return greedy + scores(numbered(completions[num_greedy:], num_samples), group_size=num_samples)


def _result(config: RunConfig, answers: tuple[HeldOutAnswer, ...], num_greedy: int, num_samples: int) -> EvalResult:
    """Return the means of the answers, of which the first `num_greedy` are greedy."""
    measure = config.eval.measure
    asked = [answer.prompt_id for answer in answers]
    greedy = measured(answers[:num_greedy], measure, asked[:num_greedy])
    sampled = measured(answers[num_greedy:], measure, asked[num_greedy:])
    groups = [answers[start : start + num_samples] for start in range(num_greedy, len(answers), num_samples)]
    has_signal = [len({answer.reward for answer in group}) > 1 for group in groups]
    failures = Counter(answer.failure for answer in answers if answer.failure is not None)
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
        num_failed=failures.total(),
        answers=answers,
        failures=dict(failures.most_common()),
        episodes=_episode_means(answers[:num_greedy]),
        sampled_episodes=_episode_means(answers[num_greedy:]),
        data=config.prompts.eval_dataset,
    )


def write_answers(result: EvalResult, path: Path) -> None:
    """One JSON object per answer and line; replaces what was there, all of it or nothing. DiskError."""
    encoder = msgspec.json.Encoder()
    replace_file(path, b"".join(encoder.encode(answer) + b"\n" for answer in result.answers))


def _held_out(
    config: RunConfig,
    tokenizer: Tokenizer,
    environments: Given | None,
    num_prompts: int | None,
    needed: Mapping[str, str],
    *,
    is_whole: bool,
) -> list[Prompt]:
    """Return the prompts to answer, of which the first and the last have been tried with their environments."""
    with Rehearsal(config, environments, private=private_folders(config)) as rehearsal:
        most = config.prompts.num_eval
        if num_prompts is not None and not 1 <= num_prompts <= (num_prompts if is_whole else most):
            raise ConfigError(
                "so many prompts are not held out",
                got=f"num_prompts = {num_prompts}",
                allowed="1 or more" if is_whole else f"1..{most} (prompts.num_eval)",
                hint="another prompts.num_eval is another split: some of its held-out prompts may have been trained on",
            )
        if config.prompts.eval_dataset is not None:
            held_out = held_out_prompts(config, tokenizer, rehearsal.tools, num_prompts, needed)
        else:
            held_out = build_prompts(config, tokenizer, rehearsal.tools, needed).eval[:num_prompts]
        rehearsal.play(held_out, tokenizer)
        return held_out


def _as_answer(
    rollout: Rollout, measure: str | None, *, sample: int, temperature: float, episode: PlayedEpisode | None = None
) -> HeldOutAnswer:
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
        episode=episode,
    )


def _as_played(completion: Completion, sources: Sources) -> PlayedEpisode | None:
    """Return the episode of a completion, if it is one; its ordinal is that of its prompt."""
    record = completion.episode
    if record is None:
        return None
    return PlayedEpisode(
        environment=sources.names[sources.index_of(completion.ordinal, completion.prompt)],
        num_turns=sum(segment.is_sampled for segment in completion.segments),
        is_cut=record.is_cut,
        num_tool_calls=record.num_tool_calls,
        num_tool_errors=record.num_tool_errors,
        num_restarts=record.num_restarts,
        turns=tuple(transcript_of(record)),
    )


def _episode_means(answers: Sequence[HeldOutAnswer]) -> EpisodeMeans | None:
    """Return the means over the episodes of `answers`; None where these are of one turn."""
    played = [(answer.reward, answer.episode) for answer in answers if answer.episode is not None]
    if not played:
        return None
    rewards: dict[str, list[float]] = {}
    for reward, episode in played:
        rewards.setdefault(episode.environment, []).append(reward)
    return EpisodeMeans(
        num_turns=fmean(episode.num_turns for _, episode in played),
        cut_frac=fmean(episode.is_cut for _, episode in played),
        num_tool_calls=fmean(episode.num_tool_calls for _, episode in played),
        num_tool_errors=fmean(episode.num_tool_errors for _, episode in played),
        rewards={name: fmean(rewards[name]) for name in sorted(rewards) if name},
    )
