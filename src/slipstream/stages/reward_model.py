"""The stage `reward_model`: preferences in, a Hugging Face checkpoint with one score out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.batching import collate
from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.jsonl import JsonlWriter
from slipstream.core.recipes import stage_dir
from slipstream.evals.sampling import to_sample
from slipstream.models.build import build_policy
from slipstream.models.scalar import ScalarModel, load_scalar_model, new_scalar_model, save_scalar_model
from slipstream.models.scoring import Sample, score
from slipstream.models.tokenizer import Tokenizer
from slipstream.models.transformer import Transformer
from slipstream.prompts import build_prompts
from slipstream.stages.completions import (
    NORMALISATION_STREAM,
    reference_completions,
    sampled,
    scored_tokens,
    split_by_prompt,
)
from slipstream.stages.preference_data import (
    FoundPreferences,
    LabelledRecord,
    has_candidates,
    positions_from,
    read_dataset,
    read_lines,
    that_fit,
)
from slipstream.stages.preferences import FILE
from slipstream.stages.progress import StageProgress, StageTimes, fresh_folder, recent_mean, write_record
from slipstream.trainer.alone import Alone
from slipstream.trainer.metric_names import reward_model_names
from slipstream.trainer.reward_model import RewardModelUpdate, preference_accuracy, reward_model_updates


def run_reward_model(config: RunConfig, run_dir: Path, progress: StageProgress) -> dict[str, Any]:
    """Train on the preferences; writes `reward_model/model`, `metrics.jsonl` and `stage.json` with its accuracies."""
    times = StageTimes()
    settings = config.reward_model
    with times.span("start_up"):
        folder = fresh_folder(run_dir, "reward_model")
        policy, tokenizer = build_policy(config.model, seed=config.seed)
        found = read_preferences(config, run_dir, tokenizer)
        progress.note(f"preferences: {found}")
        train, held_out = found.train, found.held_out
        made = _start(config, policy)
    with times.span("decode"):
        samples = _samples(config, policy, tokenizer, made.config.max_positions, progress)
        del policy
    alone = Alone(config)
    model, weights = alone.trained(made)
    total = settings.steps or settings.epochs * math.ceil(len(train) / settings.batch_size)
    accuracies = []
    with times.span("train"), closing(JsonlWriter(folder / "metrics.jsonl")) as metrics:
        for update in reward_model_updates(
            model,
            train,
            config=settings,
            microbatch_tokens=config.trainer.microbatch_tokens,
            seed=config.seed,
            batching=collate,
            samples=samples,
            **weights,
        ):
            metrics.write(_line(update))
            accuracies.append(update.accuracy)
            progress.phase("reward model", update.index + 1, total, {"loss": update.loss, "accuracy": update.accuracy})
        metrics.sync()
    with times.span("export"):
        save_scalar_model(model, folder / "model", tokenizer)
    capacity = config.trainer.microbatch_tokens
    with times.span("evaluate"):
        accuracy = (
            preference_accuracy(model, held_out, microbatch_tokens=capacity, batching=collate) if held_out else None
        )
        scores = score(model, samples, microbatch_tokens=capacity, batching=collate)
    if accuracy is not None:
        progress.note(f"held-out accuracy of the reward model: {accuracy:.3f} ({len(held_out)} preferences)")
    return write_record(
        run_dir,
        "reward_model",
        times=times,
        device=str(alone.device),
        num_preferences=len(train),
        num_held_out=len(held_out),
        num_equal=found.num_equal,
        num_too_long=found.num_too_long,
        steps=total,
        train_accuracy=recent_mean(accuracies),
        held_out_accuracy=accuracy,
        **{"test/accuracy": accuracy, "eval/rm/held_out/accuracy": accuracy},  # as the reproductions name it
        sample_score_mean=float(scores.mean()) if len(scores) else None,
        sample_score_std=float(scores.std()) if len(scores) else None,
    )


def _start(config: RunConfig, policy: Transformer) -> ScalarModel:
    """Return the reward model before its training, from a checkpoint or beside a fresh `policy`."""
    settings, path = config.reward_model, config.reward_model.path or config.model.path
    start = partial(new_scalar_model, policy) if path is None else partial(load_scalar_model, path)
    return start(head_init=settings.head_init, seed=config.seed)


def _line(update: RewardModelUpdate) -> dict[str, Any]:
    chosen, rejected = update.chosen_mean, update.rejected_mean
    return asdict(update) | reward_model_names(
        loss=update.loss, accuracy=update.accuracy, chosen=chosen, rejected=rejected, lr=update.lr
    )


def read_preferences(config: RunConfig, run_dir: Path, tokenizer: Tokenizer) -> FoundPreferences:
    """Return the stage's preferences, or those of `reward_model.preferences`, that the reward model can read.

    That is a file of the stage's own form (lines with `candidates`, as tokens), or a dataset of pairs or rated texts.
    ConfigError where nothing is left to train on.
    """
    source, most = config.reward_model.preferences, positions_from(config, config.reward_model.path)
    path = stage_dir(run_dir, "preferences") / FILE if source is None else Path(source).expanduser()
    if source is None or has_candidates(path):
        parts = read_lines(path, tokenizer)
        train, held_out = (that_fit(part, most) for part in parts)
        num_too_long = sum(map(len, parts)) - len(train) - len(held_out)
        found = FoundPreferences(train, held_out, num_equal=0, num_too_long=num_too_long)
    else:
        found = _from_dataset(config, source, tokenizer, most)
    if not found.train:
        hint = "see preferences.held_out, prompts.max_prompt_tokens and rewards.truncate_token"
        raise ConfigError(f"'{source or path}' has no preferences to train on", got=str(found), hint=hint)
    return found


def _from_dataset(config: RunConfig, source: str, tokenizer: Tokenizer, max_positions: int) -> FoundPreferences:
    is_rated = config.reward_model.candidates == 1
    found, num_too_long = read_dataset(source, partial(_labelled, is_rated=is_rated), config, tokenizer)
    fitting = that_fit(found, max_positions)
    num_too_long += len(found) - len(fitting)
    decided = [one for one in fitting if is_rated or not np.array_equal(one.candidates[0], one.candidates[1])]
    train, held_out = split_by_prompt(
        decided, lambda one: one.prompt_tokens, share=config.preferences.held_out, seed=config.seed
    )
    return FoundPreferences(train, held_out, len(fitting) - len(decided), num_too_long)


def _labelled(record: Mapping[str, Any], where: str, *, is_rated: bool) -> LabelledRecord:
    names = ("completion",) if is_rated else ("chosen", "rejected")
    is_text = all(isinstance(record.get(name), str) for name in ("prompt", *names))
    rating = record.get("rating") if is_rated else None
    if not is_text or (is_rated and (isinstance(rating, bool) or not isinstance(rating, int | float))):
        raise ConfigError(
            f"{where} is no {'rating' if is_rated else 'preference'}",
            got=", ".join(record),
            allowed=f"texts in the columns prompt, {', '.join(names)}"
            + (", and a number in rating" if is_rated else ""),
        )
    return LabelledRecord(record, tuple(record[name] for name in names), rating)


def _samples(
    config: RunConfig, policy: Any, tokenizer: Tokenizer, max_positions: int, progress: StageProgress
) -> Sequence[Sample]:
    """Return the samples that scores are normalised on (N, items 20 and 21): the policy's for the first
    `normalise_samples` training prompts, or the references of all of them.

    Those of more than `max_positions` tokens are left out.
    """
    settings = config.reward_model
    if settings.normalise == "none":
        return []
    prompts = build_prompts(config, tokenizer).train.prompts
    if settings.normalise == "reference_bias":
        completions = reference_completions(config.prompts.reference, prompts, tokenizer)
    else:
        chosen = prompts[: settings.normalise_samples]
        completions = sampled(config, to_sample(config, policy), tokenizer, chosen, stream=NORMALISATION_STREAM)
    every = [(one.prompt.tokens, scored_tokens(one.tokens, config.rewards)) for one in completions]
    found = [sample for sample in every if sum(map(len, sample)) <= max_positions]
    if len(found) < len(every):
        progress.note(f"{len(every) - len(found)} of {len(every)} samples to normalise on are too long")
    return found
