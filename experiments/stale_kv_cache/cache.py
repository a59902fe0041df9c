"""What keys and values of old weights do to logprobs, and what making them anew costs: the engine alone."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.core.recipes import resolve
from slipstream.core.sections import ModelConfig
from slipstream.core.training_sections import OptimizerConfig
from slipstream.evals.drift import DriftSample, sampled_token_logprobs
from slipstream.generator.engine import Engine
from slipstream.generator.native import native_engine
from slipstream.generator.requests import Finished, KvOnUpdate, Request
from slipstream.models.build import build_policy
from slipstream.models.flat import FlatParameters
from slipstream.models.initialise import new_model
from slipstream.models.transformer import Transformer
from slipstream.prompts import build_prompts
from slipstream.trainer.checkpoint import Checkpoints
from slipstream.trainer.checkpoint_folder import checkpoint_path
from slipstream.trainer.optim import AdamW

KEEP: KvOnUpdate = "keep"
RECOMPUTE: KvOnUpdate = "recompute"
WAYS = (KEEP, RECOMPUTE)
EARLY_TOKENS = 16
"""Behind a swap, whose keys are nearly all old."""


@dataclass(frozen=True)
class Swapped:
    """A completion over one swap: logprobs of its tokens behind it, float64 [T].

    `recorded` are the engine's, under the cache that it had; `fresh` those of the new weights with keys and values of
    their own; `old` those of the weights before the swap.
    """

    recorded: np.ndarray
    fresh: np.ndarray
    old: np.ndarray


def swap_errors(swapped: Sequence[Swapped]) -> dict[str, float]:
    """Means over tokens, in nats: what the cache does, how much of it soon behind the swap, and what the weights do.

    error = |recorded - fresh|,   shift = |fresh - old|
    """
    error = np.concatenate([np.abs(one.recorded - one.fresh) for one in swapped])
    early = np.concatenate([np.abs(one.recorded - one.fresh)[:EARLY_TOKENS] for one in swapped])
    shift = np.concatenate([np.abs(one.fresh - one.old) for one in swapped])
    ratio = np.exp(np.concatenate([one.fresh - one.recorded for one in swapped]))
    return {
        "error": float(error.mean()),
        "early": float(early.mean()),
        "largest": float(error.max()),
        "shift": float(shift.mean()),
        "ratio_std": float(ratio.std()),
        "tokens": float(len(error)),
    }


def load_version(model: Transformer, run: Path, version: int) -> None:
    """Give `model` the weights of a run's checkpoint."""
    optimizer = AdamW(FlatParameters(model), OptimizerConfig(), total_updates=1)
    with closing(Checkpoints()) as checkpoints:
        checkpoints.load(checkpoint_path(run / "checkpoints", version), {"policy": (model, optimizer)})


def drain(engine: Engine) -> list[Finished]:
    finished: list[Finished] = []
    while not engine.is_idle:
        finished += engine.step()
    return finished


def over_a_swap(
    before: Transformer, after: Transformer, requests: Sequence[Request], *, way: KvOnUpdate, swap_at: int, seed: int
) -> list[Swapped]:
    """Completions that begin under `before` and go on under `after` from token `swap_at`; shorter ones are left out.

    All of them decode side by side, so that the swap finds each at the same place. The stop token is the model's.
    """
    live = Transformer(before.config)
    live.load_state_dict(before.state_dict())
    longest = max(len(request.prompt_tokens) + request.max_new_tokens for request in requests)
    engine = native_engine(
        live,
        num_slots=-(-len(requests) // 8) * 8,
        max_len=longest,
        seed=seed,
        stop_token_ids=before.config.eos_token_ids,
        prefill_tokens=longest * len(requests),
    )
    engine.submit(requests)
    finished = [one for _ in range(swap_at) for one in engine.step()]
    live.load_state_dict(after.state_dict())
    engine.set_version(1, kv_on_update=way)
    finished += drain(engine)
    crossing = [one for one in finished if len(one.tokens) > swap_at]
    assert all(one.version_spans[-1].start == swap_at for one in crossing), "they did not begin together"
    samples = [DriftSample(one.request.prompt_tokens, one.tokens) for one in crossing]
    fresh, old = (sampled_token_logprobs(model, samples) for model in (after, before))
    return [
        Swapped(*(np.asarray(column, dtype=np.float64)[swap_at:] for column in (one.logprobs, ours, theirs)))
        for one, ours, theirs in zip(crossing, fresh, old, strict=True)
    ]


def errors_by_lag(
    *, run: str, starts: Sequence[int], lags: Sequence[int], swap_at: int, max_new_tokens: int, num_prompts: int
) -> dict[str, dict[str, list[dict[str, float]]]]:
    """way -> lag -> `swap_errors`, one for each version of `starts` that completions begin under.

    `run` has a checkpoint of each version; its held-out prompts are answered at temperature 1.
    """
    folder = Path(run)
    config = resolve(folder / "config.toml")
    before, tokenizer = build_policy(config.model, seed=config.seed)
    after = Transformer(before.config)
    prompts = build_prompts(config, tokenizer).eval[:num_prompts]
    requests = [
        Request(ordinal=ordinal, sample=0, prompt_tokens=prompt.tokens, max_new_tokens=max_new_tokens)
        for ordinal, prompt in enumerate(prompts)
    ]
    found: dict[str, dict[str, list[dict[str, float]]]] = {way: {} for way in WAYS}
    for start in starts:
        load_version(before, folder, start)
        for lag in lags:
            load_version(after, folder, start + lag)
            for way in WAYS:
                swapped = over_a_swap(before, after, requests, way=way, swap_at=swap_at, seed=config.seed)
                found[way].setdefault(str(lag), []).append(swap_errors(swapped))
    return found


def speed_by_swaps(
    *,
    model: Mapping[str, Any],
    swap_every: Sequence[int],
    rows: int,
    prompt_tokens: int,
    new_tokens: int,
    repeats: int,
) -> dict[str, dict[str, list[dict[str, float]]]]:
    """way -> steps between swaps (0: none) -> tokens/s and share of re-prefilled tokens, per repeat.

    Completions of `new_tokens`, three for each row, one after the other. A swap replaces nothing: what is timed is what
    the cache costs. Both ways take turns; the first round warms up and is left out.
    """
    policy = new_model(ModelConfig.model_validate(dict(model)), 64, 0)
    rng = np.random.default_rng(0)
    requests = [
        Request(ordinal, 0, rng.integers(2, 64, prompt_tokens).astype(np.int32), max_new_tokens=new_tokens)
        for ordinal in range(3 * rows)
    ]
    found: dict[str, dict[str, list[dict[str, float]]]] = {
        way: {str(every): [] for every in swap_every} for way in WAYS
    }
    for repeat in range(repeats + 1):
        for every in swap_every:
            for way in WAYS:
                engine = native_engine(
                    policy, num_slots=rows, max_len=prompt_tokens + new_tokens, seed=0, stop_token_ids=[]
                )
                engine.submit(requests)
                started_s = time.perf_counter()
                _decode_with_swaps(engine, every, way)
                seconds = time.perf_counter() - started_s
                if repeat:
                    found[way][str(every)].append(
                        {
                            "tokens_per_s": engine.stats.generated_tokens / seconds,
                            "re_prefilled": engine.stats.re_prefilled_tokens / engine.stats.generated_tokens,
                        }
                    )
    return found


def _decode_with_swaps(engine: Engine, every: int, way: KvOnUpdate) -> None:
    """Consumes: all requests. Ends when: none is left. A new version after every `every` steps."""
    steps = 0
    while not engine.is_idle:
        engine.step()
        steps += 1
        if every and steps % every == 0:
            engine.set_version(engine.version + 1, kv_on_update=way)
