"""How far each step's policy has drifted, over all completions that it sampled, in a run that does not say so.

A run with a KL penalty in the reward measures the KL of all its completions before any is selected. One without has
the reference's logprobs of the completions that it trains on (Online DPO: none of a pair that ties), or of none.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from slipstream.core.config import RunConfig
from slipstream.core.recipes import resolve
from slipstream.core.run_log import read_rollouts
from slipstream.evals.drift import DriftSample, measure_drift
from slipstream.models.build import build_tokenizer
from slipstream.models.hf import load_model
from slipstream.models.transformer import Transformer
from slipstream.observe.tokens import TOKENS_FILE, read_tokens


def kl_by_step(run: str) -> list[float]:
    """KL from the reference in nats per completion for each step, mean over all completions that it sampled.

    The estimator is the run's own k1: logprobs that the tokens were sampled with less those of the reference, which
    reads them here. `run` kept all of its tokens (`observe.tokens_every = 1`), with logprobs to four digits.
    ValueError where some are missing. Identity: `kl_reference_sum` of a run with a penalty, up to that rounding.
    """
    config = resolve(Path(run) / "config.toml")
    assert config.kl.reference is not None, "a run begins with the policy of another one"
    reference = load_model(config.kl.reference)
    return [_kl(reference, samples, config.logprob_temperature) for samples in _sampled(Path(run), config)]


def _kl(reference: Transformer, samples: list[DriftSample], temperature: float) -> float:
    kl = measure_drift(reference, samples, temperature=temperature).kl
    assert kl is not None, "logprobs of what was sampled are known"
    return kl.per_sequence.mean


def _sampled(run: Path, config: RunConfig) -> list[list[DriftSample]]:
    """The completions of each step, with the logprobs that they were sampled with."""
    tokenizer = build_tokenizer(config.model)
    prompts, missing = dict[int, np.ndarray](), set[tuple[int, int]]()
    for rollout in read_rollouts(run / "rollouts.jsonl"):
        if rollout.outcome == "trained" and rollout.num_tokens:
            missing.add((rollout.ordinal, rollout.sample))
            if rollout.ordinal not in prompts:
                tokens = tokenizer.encode(rollout.prompt, add_special_tokens=True)
                prompts[rollout.ordinal] = np.asarray(tokens, dtype=np.int32)
    samples: list[list[DriftSample]] = [[] for _ in range(config.steps)]
    for line in read_tokens(run / TOKENS_FILE):
        missing.discard((line.ordinal, line.sample))
        samples[line.step].append(
            DriftSample(
                prompt_tokens=prompts[line.ordinal],
                tokens=np.asarray(line.tokens, dtype=np.int32),
                policy_logprobs=np.asarray(line.behaviour_logprobs, dtype=np.float32),
            )
        )
    if missing:
        raise ValueError(f"{run / TOKENS_FILE} lacks {len(missing)} completions, the first {min(missing)}")
    return samples
