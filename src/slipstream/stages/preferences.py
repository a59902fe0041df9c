"""The stage `preferences`: completions sampled from the policy, paired, and labelled by what they are worth."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.jsonl import JsonlWriter
from slipstream.core.stage_sections import JudgeConfig
from slipstream.core.types import Prompt
from slipstream.evals.sampling import to_sample
from slipstream.evals.scoring import numbered, score_by
from slipstream.evals.win_rate import Comparison, judge_win_rate
from slipstream.models.build import build_policy
from slipstream.models.device import single_device
from slipstream.prompts import build_prompts
from slipstream.stages.completions import (
    PREFERENCE_STREAM,
    build_judge,
    reference_completions,
    sampled,
    scored_tokens,
)
from slipstream.stages.progress import StageProgress, StageTimes, fresh_folder, write_record

FILE = "preferences.jsonl"


class Candidate(msgspec.Struct, frozen=True):
    """A completion of a preference: its tokens, EOS included where it was sampled, up to `rewards.truncate_token`.

    `score` is gold's, if it decided.
    """

    text: str
    tokens: list[int]
    score: float | None = None
    is_reference: bool = False


class PreferenceLine(msgspec.Struct, frozen=True):
    """A line of `preferences.jsonl`: of `candidates`, that at index `best` is preferred to all others."""

    prompt_id: str
    prompt: str
    prompt_tokens: list[int]
    candidates: list[Candidate]
    best: int
    is_held_out: bool


@dataclass(frozen=True)
class ScoredPrompt:
    """A prompt with the candidates that are compared."""

    prompt: Prompt
    candidates: list[Candidate]


def run_preferences(config: RunConfig, run_dir: Path, progress: StageProgress) -> dict[str, Any]:
    """Sample, label and pair; writes `preferences/preferences.jsonl` and `preferences/stage.json`."""
    times = StageTimes()
    with times.span("start_up"):
        folder = fresh_folder(run_dir, "preferences")
    scored = sampled_candidates(config, progress, times)
    with times.span("score"):
        lines = labelled(scored, config)
    if not lines:
        what = "no completion is better than another: there are no preferences"
        hint = "raise preferences.temperature or samples_per_prompt, or look at what labels them"
        raise ConfigError(what, got=f"{len(scored)} prompts", hint=hint)
    with times.span("record"):
        writer = JsonlWriter(folder / FILE)
        writer.write(*lines)
        writer.close()
    num_pairs = sum(len(list(_subsets(one, config.reward_model.candidates))) for one in scored)
    num_held_out = sum(line.is_held_out for line in lines)
    progress.note(f"preferences: {len(lines)} of {num_pairs} sets of candidates, {num_held_out} held out")
    return write_record(
        run_dir,
        "preferences",
        times=times,
        device=str(single_device(config.samples_on)),
        num_prompts=len(scored),
        num_preferences=len(lines),
        num_held_out=num_held_out,
        undecided_share=1.0 - len(lines) / num_pairs if config.preferences.max_per_prompt is None else None,
        reference_best_share=_reference_best_share(lines),
    )


def sampled_candidates(config: RunConfig, progress: StageProgress, times: StageTimes) -> list[ScoredPrompt]:
    """Distinct completions of the first prompts, the reference among them where asked for, with their gold scores."""
    settings = config.preferences
    with times.span("start_up"):
        policy = config.model.model_copy(update={"path": settings.path or config.model.path})
        made, tokenizer = build_policy(policy, seed=config.seed)
        model = to_sample(config, made)
        prompts = list(build_prompts(config, tokenizer).train.prompts)[: settings.num_prompts]
    total = len(prompts) * settings.samples_per_prompt
    with times.span("decode"):
        completions = sampled(
            config,
            model,
            tokenizer,
            prompts,
            num_samples=settings.samples_per_prompt,
            stream=PREFERENCE_STREAM,
            on_progress=lambda done: progress.phase("sample", done, total),
        )
    if settings.with_reference:
        references = reference_completions(config.prompts.reference, prompts, tokenizer)
        completions = sorted([*completions, *references], key=lambda completion: completion.ordinal)
    scores: list[float | None] = [None] * len(completions)
    if settings.labels == "gold":
        with times.span("score"):
            scores = [
                None if rollout.failure is not None else rollout.reward
                for rollout in score_by(config, config.gold_rewards, numbered(completions))
            ]
    found: list[ScoredPrompt] = [ScoredPrompt(prompt, []) for prompt in prompts]
    for completion, value in zip(completions, scores, strict=True):
        tokens = scored_tokens(completion.tokens, config.rewards).tolist()
        candidates = found[completion.ordinal].candidates
        is_known = any(candidate.tokens == tokens for candidate in candidates)
        if is_known or (value is None and settings.labels == "gold"):
            continue
        is_reference = not completion.segments[0].is_sampled
        candidates.append(Candidate(completion.text, tokens, value, is_reference))
    return found


def labelled(scored: Sequence[ScoredPrompt], config: RunConfig) -> list[PreferenceLine]:
    """All decided pairs (or fours) of each prompt's candidates; `max_per_prompt` of them, drawn by the seed.

    Undecided are equal scores at the top, and pairs whose two verdicts differ or are ties.
    """
    settings = config.preferences
    sets: list[tuple[ScoredPrompt, tuple[Candidate, ...]]] = []
    for one in scored:
        chosen = list(_subsets(one, config.reward_model.candidates))
        if settings.max_per_prompt is not None:
            random.Random(_digest(one.prompt, config)).shuffle(chosen)
            if settings.labels == "judge":  # a verdict costs too much to ask for more of them
                chosen = chosen[: settings.max_per_prompt]
        sets += [(one, candidates) for candidates in chosen]
    bests = _judged(sets, config.judge) if settings.labels == "judge" else [_best_by_score(found) for _, found in sets]
    lines: list[PreferenceLine] = []
    kept: Counter[str] = Counter()
    for (one, candidates), best in zip(sets, bests, strict=True):
        prompt = one.prompt
        if best is None or kept[prompt.prompt_id] == settings.max_per_prompt:
            continue
        kept[prompt.prompt_id] += 1
        lines.append(
            PreferenceLine(
                prompt_id=prompt.prompt_id,
                prompt=prompt.text,
                prompt_tokens=prompt.tokens.tolist(),
                candidates=list(candidates),
                best=best,
                is_held_out=int.from_bytes(_digest(prompt, config), "little") / 2**64 < settings.held_out,
            )
        )
    return lines


def _digest(prompt: Prompt, config: RunConfig) -> bytes:
    """Return the bytes by which prompts are held out and shuffled: of the tokens, where several prompts have them."""
    of_tokens, seed = config.prompts.identity == "row", config.seed
    known = prompt.tokens.tobytes().hex() if of_tokens else prompt.prompt_id
    return hashlib.blake2b(f"preferences:{seed}:{known}".encode(), digest_size=8).digest()


def _subsets(scored: ScoredPrompt, size: int) -> Iterator[tuple[Candidate, ...]]:
    return itertools.combinations(scored.candidates, size)


def _best_by_score(candidates: Sequence[Candidate]) -> int | None:
    scores = [candidate.score for candidate in candidates if candidate.score is not None]
    highest = max(scores)
    return scores.index(highest) if scores.count(highest) == 1 else None


def _judged(sets: Sequence[tuple[ScoredPrompt, Sequence[Candidate]]], config: JudgeConfig) -> list[int | None]:
    comparisons = [Comparison(one.prompt.text, pair[0].text, pair[1].text) for one, pair in sets]
    if not comparisons:
        return []
    found = judge_win_rate(build_judge(config), comparisons, max_concurrency=config.max_concurrency)
    return [{1.0: 0, 0.0: 1}.get(judgement.outcome) for judgement in found.judgements]


def _reference_best_share(lines: Sequence[PreferenceLine]) -> float | None:
    """Return the share of preferences with a reference in which it is the best; None without any."""
    involved = [line for line in lines if any(candidate.is_reference for candidate in line.candidates)]
    if not involved:
        return None
    return sum(line.candidates[line.best].is_reference for line in involved) / len(involved)
