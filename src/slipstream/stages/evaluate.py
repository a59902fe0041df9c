"""The stage `evaluate`: held-out completions of the policy before and after RL (or `dpo`), by gold, judge and drift.

With an environment they are episodes, which have no references.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from slipstream.core.config import RunConfig
from slipstream.core.disk import replace_file
from slipstream.core.held_out import RIGHT_FROM
from slipstream.core.jsonl import finite
from slipstream.core.recipes import stage_dir
from slipstream.core.sections import RewardModelTerm, RewardsConfig
from slipstream.core.stage_sections import JudgeConfig
from slipstream.core.types import Completion, Prompt, Rollout
from slipstream.environments.rehearsal import Rehearsal
from slipstream.evals.drift import measure_drift, sample_of
from slipstream.evals.episodes import answering
from slipstream.evals.sampling import to_sample
from slipstream.evals.scoring import numbered, score_by
from slipstream.evals.statistics import completion_lengths, mean_pass_at_k
from slipstream.evals.win_rate import Comparison, gold_win_rate, judge_win_rate
from slipstream.models.build import build_tokenizer
from slipstream.models.device import single_device
from slipstream.models.hf import load_model
from slipstream.models.peft import with_adapters
from slipstream.models.tokenizer import Tokenizer
from slipstream.models.transformer import Transformer
from slipstream.observe.evaluation import EVALUATION_FILE
from slipstream.prompts import build_prompts
from slipstream.prompts.template import Template
from slipstream.stages.completions import build_judge, reference_completions
from slipstream.stages.progress import StageProgress, StageTimes
from slipstream.trainer.alone import Alone

MOMENTS = ("before", "after")


def run_evaluation(config: RunConfig, run_dir: Path, progress: StageProgress) -> dict[str, Any]:
    """Measure the checkpoint RL, or else `dpo`, started from and the one it ended with; write `evaluation.json`.

    Both answer the same held-out prompts with the same noise. Drift is from `kl.reference`, or else the start. Whatever
    needs reference completions is left out where prompts have none.
    """
    times, settings = StageTimes(), config.evaluation
    has_rl, start = "rl" in config.stages, start_of(config, run_dir)
    end = run_dir / "model" if has_rl else stage_dir(run_dir, "dpo") / "model"
    checkpoints = dict(zip(MOMENTS, (_adapter(config) or start, end), strict=True))
    with times.span("start_up"):
        tokenizer = build_tokenizer(config.model.model_copy(update={"path": str(start)}))
        with Rehearsal(config, None, private=[str(run_dir)]) as rehearsal:  # which tools prompts tell of
            read = build_prompts(config, tokenizer, rehearsal.tools)
    prompts, config = read.eval[: config.num_evaluated], config.with_longest_prompt(read.report.longest)
    temperature = config.generator.temperature if settings.temperature is None else settings.temperature
    written: dict[str, list[Completion]] = {}
    with times.span("decode"), answering(config, tokenizer, private=[str(run_dir)]) as answer:
        for moment, path in checkpoints.items():
            written[moment] = answer(
                to_sample(config, _first(config, start) if moment == "before" else load_model(path)),
                prompts,
                temperature=temperature,
                num_samples=settings.num_samples,
                num_slots=config.eval.num_slots,
                on_progress=partial(progress.phase, f"evaluate {moment}", total=len(prompts) * settings.num_samples),
            )
    with times.span("score"):
        references = None if config.environment.is_set else _references(config.prompts.reference, prompts, tokenizer)
        gold = _scores(config, config.gold_rewards, written, references, environment_weight=_gold_weight(config))
        proxy = _scores(config, _models_alone(config.rewards), written, references)
    with times.span("reference"):
        reference_policy = _reference_policy(config, start)
    found: dict[str, Any] = {
        "num_prompts": len(prompts),
        "num_samples": settings.num_samples,
        "temperature": temperature,
        "device": str(single_device(config.samples_on)),
        "checkpoints": {moment: str(path) for moment, path in checkpoints.items()},
    }
    models, judge = config.rewards.models, config.judge
    for moment in MOMENTS:
        with times.span("score"):
            found[moment] = {
                "gold": _gold(gold[moment], gold["references"], settings.num_samples),
                **_by_models(gold[moment], proxy[moment], models),
                "judge": _judged(judge, written[moment], references) if judge.is_given and references else None,
            }
        with times.span("reference"):
            samples, capacity = [sample_of(one) for one in written[moment]], config.trainer.microbatch_tokens
            drift = measure_drift(reference_policy, samples, temperature=temperature, microbatch_tokens=capacity)
            found[moment]["drift"] = finite(asdict(drift))
        found[moment]["lengths"] = asdict(completion_lengths(written[moment]))
        if config.environment.is_set:
            found[moment]["episodes"] = _episodes(written[moment])
    found["references"] = _by_models(gold["references"], proxy["references"], models)
    found |= times.so_far()
    replace_file(run_dir / EVALUATION_FILE, msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    return found


def _adapter(config: RunConfig) -> str | None:
    """Return the adapter that RL went on with beside `start_of`; after a warm start that folder has its adapters."""
    return config.model.lora.path if "rl" in config.stages and not config.warm_start.steps else None


def _first(config: RunConfig, start: Path) -> Transformer:
    """Return the policy that RL, or else `dpo`, started from."""
    model = load_model(start)
    return model if _adapter(config) is None else with_adapters(model, config.model.lora, seed=config.seed)


def _reference_policy(config: RunConfig, start: Path) -> Transformer:
    """Return the policy that drift is measured from, where the trainer computes."""
    path = config.kl.reference
    return Alone(config).read(_first(config, start) if path is None else load_model(path))


def start_of(config: RunConfig, run_dir: Path) -> Path:
    """Return the checkpoint that RL started from; without RL, that `dpo` did."""
    if "rl" not in config.stages:
        path = config.dpo.path or config.model.path
        assert path is not None, "check_order asks for one"
        return Path(path)
    if config.model.path is not None and not config.warm_start.steps:
        return Path(config.model.path)
    return run_dir / "reference"  # of a policy that the run itself warm-started, for its KL penalty


def _references(reference: str, prompts: Sequence[Prompt], tokenizer: Tokenizer) -> list[Completion] | None:
    """Return one reference per prompt; None where some prompt has none."""
    template = Template(reference, field="prompts.reference")
    if not all(template.is_filled_by({"answer": one.answer, **one.columns}) for one in prompts):
        return None
    return reference_completions(reference, prompts, tokenizer)


def _scores(
    config: RunConfig,
    rewards: RewardsConfig,
    written: dict[str, list[Completion]],
    references: list[Completion] | None,
    *,
    environment_weight: float | None = None,
) -> dict[str, list[Rollout]]:
    """Score the completions of both moments and the references, all at once."""
    parts = {**written, "references": references or []}
    if not rewards.weighted and environment_weight is None:
        return {name: [] for name in parts}
    completions = numbered([c for part in parts.values() for c in part])
    rollouts = iter(score_by(config, rewards, completions, environment_weight=environment_weight))
    return {name: [next(rollouts) for _ in part] for name, part in parts.items()}


def _models_alone(rewards: RewardsConfig) -> RewardsConfig:
    """Return the models of `rewards` as terms of a sum, whose parts are their scores: without others, a constraint
    would leave no sum."""
    models = [model.model_copy(update={"at_least": None}) for model in rewards.models]
    return rewards.model_copy(update={"terms": [], "judges": [], "models": models})


def _gold_weight(config: RunConfig) -> float | None:
    """Return the weight of the environment's own reward in the gold score: 0 where [gold] says what that is."""
    if not config.environment.is_set:
        return None
    return 0.0 if config.gold.weighted else config.environment.reward_weight


def _episodes(completions: Sequence[Completion]) -> dict[str, Any]:
    """Return the means over episodes; `mean_reward` is the environments' own, over those that gave one."""
    records = [one.episode for one in completions if one.episode is not None]
    rewards = [record.reward for record in records if record.reward is not None]
    num_turns = sum(segment.is_sampled for one in completions for segment in one.segments)
    return {
        "mean_reward": math.fsum(rewards) / len(rewards) if rewards else None,
        "mean_turns": num_turns / len(records),
        "cut_share": sum(record.is_cut for record in records) / len(records),
        "num_failed": sum(record.failure is not None for record in records),
    }


def _gold(rollouts: Sequence[Rollout], references: Sequence[Rollout], num_samples: int) -> dict[str, Any]:
    """Return the mean score, pass@k (from a score of 1 on), win rate and difference where there are references.

    Failed ones count nowhere else.
    """
    sound = [rollout.reward for rollout in rollouts if rollout.failure is None]
    correct = [rollout.failure is None and rollout.reward >= RIGHT_FROM for rollout in rollouts]
    num_correct = [sum(correct[at : at + num_samples]) for at in range(0, len(correct), num_samples)]
    gold: dict[str, Any] = {
        "mean_score": sum(sound) / len(sound) if sound else None,
        "num_failed": len(rollouts) - len(sound),
        "pass_at_k": mean_pass_at_k(num_correct, num_samples) if num_correct else {},
    }
    if not references:
        return gold
    pairs = [
        (rollout.reward, references[index // num_samples].reward, index // num_samples)
        for index, rollout in enumerate(rollouts)
        if rollout.failure is None and references[index // num_samples].failure is None
    ]
    if pairs:
        ours, theirs, prompts = zip(*pairs, strict=True)
        gold |= finite(asdict(gold_win_rate(ours, theirs, prompts)))
    return gold


def _means(rollouts: Sequence[Rollout], models: Sequence[RewardModelTerm]) -> dict[str, float]:
    """Return the mean score by each reward model that RL maximises, over what they could score; nothing without any."""
    sound = [rollout.reward_parts for rollout in rollouts if rollout.failure is None]
    return {
        model.name: math.fsum(float(parts[model.name] or 0.0) for parts in sound) / len(sound)
        for model in models
        if sound
    }


def _by_models(gold: Sequence[Rollout], proxy: Sequence[Rollout], models: Sequence[RewardModelTerm]) -> dict[str, Any]:
    """Return the mean scores by the reward models, and how many completions gold or these could not score."""
    failed = {at for scored in (gold, proxy) for at, rollout in enumerate(scored) if rollout.failure is not None}
    return {"reward_models": _means(proxy, models) if models and proxy else None, "num_failed": len(failed)}


def _judged(config: JudgeConfig, completions: Sequence[Completion], references: Sequence[Completion]) -> dict[str, Any]:
    comparisons = [
        Comparison(completion.prompt.text, completion.text, references[completion.ordinal].text)
        for completion in completions
    ]
    found = judge_win_rate(build_judge(config), comparisons, max_concurrency=config.max_concurrency)
    return {name: value for name, value in finite(asdict(found)).items() if name != "judgements"}
