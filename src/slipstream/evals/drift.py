"""How far a policy has drifted from the model it started as: perplexity of its text, and sampled KL.

`reference` is the initial (SFT) model throughout; `samples` are what the policy wrote.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from slipstream.batching.collate import collate
from slipstream.core.errors import ConfigError, ShapeError
from slipstream.core.packed import TrainSequence
from slipstream.core.types import Completion
from slipstream.evals.statistics import Spread, spread
from slipstream.models.transformer import Transformer
from slipstream.trainer.measure import microbatch_logprobs


@dataclass(frozen=True)
class DriftSample:
    """A prompt int32 [Tp] and a completion int32 [T].

    `is_sampled` bool [T] is False on tokens that were given (a tool's answer); None: all were sampled.
    `policy_logprobs` float32 [T] are those the tokens were sampled with, where they are known. `branches` are the
    offsets in `tokens` where further branches of an episode begin.
    """

    prompt_tokens: np.ndarray
    tokens: np.ndarray
    policy_logprobs: np.ndarray | None = None
    is_sampled: np.ndarray | None = None
    branches: tuple[int, ...] = ()

    @property
    def mask(self) -> np.ndarray:
        """bool [T]: True on sampled tokens."""
        return np.ones(len(self.tokens), dtype=bool) if self.is_sampled is None else self.is_sampled

    @property
    def num_sampled(self) -> int:
        return int(np.count_nonzero(self.mask))

    @property
    def num_predicted(self) -> int:
        """Tokens of prompt and completion that have one before them in their context: Tp + T - 1 without branches."""
        return len(self.prompt_tokens) + len(self.tokens) - len(self.starts)

    @property
    def starts(self) -> tuple[int, ...]:
        """The offsets in prompt and completion where contexts begin."""
        return (0, *(len(self.prompt_tokens) + branch for branch in self.branches))


@dataclass(frozen=True)
class Perplexity:
    """Perplexity of completions, averaged over them; `per_response_token` is the true one.

    `per_text_token` divides by the prompt's tokens as well, as async_rlhf does (see `perplexity`).
    """

    per_response_token: Spread
    per_text_token: Spread


@dataclass(frozen=True)
class SampledKL:
    """KL(policy || reference) in nats, estimated from the policy's own samples: per completion, and per token."""

    per_sequence: Spread
    per_token: float


@dataclass(frozen=True)
class Drift:
    """Perplexity under the reference, and the KL where policy logprobs are known (`num_with_policy` completions).

    `num_empty` completions had no sampled token and count nowhere else.
    """

    perplexity: Perplexity
    kl: SampledKL | None
    num_tokens: int
    num_with_policy: int
    num_empty: int


def sample_of(completion: Completion) -> DriftSample:
    """The sample in a generator's completion; its policy logprobs are the behaviour's, at the sampling temperature."""
    segments = completion.segments
    parts = [
        np.zeros(len(segment.tokens), dtype=np.float32)
        if segment.behaviour_logprobs is None
        else segment.behaviour_logprobs
        for segment in segments
    ]
    empty = np.zeros(0, dtype=np.int32)
    starts = [0, *itertools.accumulate(len(segment.tokens) for segment in segments)]
    return DriftSample(
        prompt_tokens=completion.prompt.tokens,
        tokens=np.concatenate([empty, *(segment.tokens for segment in segments)]),
        policy_logprobs=np.concatenate([empty.astype(np.float32), *parts]),
        is_sampled=np.concatenate(
            [empty.astype(bool), *(np.full(len(segment.tokens), segment.is_sampled) for segment in segments)]
        ),
        branches=tuple(start for start, segment in zip(starts, segments, strict=False) if segment.begins),
    )


@torch.no_grad()
def sampled_token_logprobs(
    model: Transformer, samples: Sequence[DriftSample], *, temperature: float = 1.0, microbatch_tokens: int = 8192
) -> list[np.ndarray]:
    """The model's logprobs of each sample's sampled tokens, float32 [num_sampled] each, in nats.

    Read in packed microbatches of at most `microbatch_tokens` rows, samples of equal prompts sharing them.
    Identity: equals every sample read alone. ConfigError when a sample does not fit the model.
    """
    prompts: dict[bytes, int] = {}
    sequences = []
    for index, sample in enumerate(samples):
        _check(model, sample, index)
        ordinal = prompts.setdefault(sample.prompt_tokens.astype(np.int32).tobytes(), len(prompts))
        tokens = np.concatenate([sample.prompt_tokens, sample.tokens])
        mask = np.concatenate([np.zeros(len(sample.prompt_tokens), dtype=bool), sample.mask])
        sequences.append(TrainSequence.read_only((ordinal, index), tokens, mask, starts=sample.starts))
    logprobs = [np.zeros(0, dtype=np.float32)] * len(samples)
    for microbatch in collate(sequences, microbatch_tokens):
        values, _ = microbatch_logprobs(model, microbatch, temperature=temperature)
        ends = np.flatnonzero(np.diff(microbatch.segment_ids)) + 1
        for (_, index), own in zip(microbatch.keys, np.split(values.cpu().numpy(), ends), strict=True):
            logprobs[index] = own
    return logprobs


def perplexity(
    logprobs: Sequence[np.ndarray], num_predicted: Sequence[int], prompts: Sequence[Hashable] | None = None
) -> Perplexity:
    """Perplexity of each completion under the model that gave `logprobs`, averaged over completions.

        per_response_token = mean_i exp(-(1 / T_i) sum_t logp_it)
        per_text_token     = mean_i exp(-(1 / (Tp_i + T_i - 1)) sum_t logp_it)

    `logprobs` [T_i] of the response's tokens, T_i >= 1; `num_predicted` the second denominator. The second is what
    the code of Asynchronous RLHF (arXiv:2410.18252) computes: labels of the prompt are ignored in the sum but not in
    the count, so its values lie near 1 and fall as prompts grow. It is here to compare with that paper's figures.
    `prompts` are as in `gold_win_rate`.
    Identities: a prompt of one token makes both equal; a uniform model gives the size of its vocabulary.
    """
    if len(logprobs) != len(num_predicted) or not all(len(own) for own in logprobs):
        what = "perplexity needs at least one token per completion, and the length of each text"
        raise ShapeError(what, got=f"{[len(own) for own in logprobs][:8]} tokens, {len(num_predicted)} lengths")
    nll = np.array([-own.sum(dtype=np.float64) for own in logprobs])
    with np.errstate(over="ignore"):
        per_response = np.exp(nll / np.array([len(own) for own in logprobs]))
        per_text = np.exp(nll / np.array(num_predicted))
    return Perplexity(spread(per_response, prompts), spread(per_text, prompts))


def sampled_kl(
    policy_logprobs: Sequence[np.ndarray],
    reference_logprobs: Sequence[np.ndarray],
    prompts: Sequence[Hashable] | None = None,
) -> SampledKL:
    """KL of whole completions, from the logprobs [T_i] that policy and reference give to what the policy sampled.

        KL = mean_i sum_t (policy_it - reference_it),   per token: the same sum over all tokens, divided by them

    The estimator k1: unbiased where both are at the temperature of sampling, and possibly negative. `prompts` are as in
    `gold_win_rate`.
    Identity: 0 where policy = reference.
    """
    if [len(own) for own in policy_logprobs] != [len(own) for own in reference_logprobs]:
        raise ShapeError("policy and reference need logprobs of the same tokens")
    per_sequence = [
        (policy.astype(np.float64) - reference).sum()
        for policy, reference in zip(policy_logprobs, reference_logprobs, strict=True)
    ]
    num_tokens = sum(len(own) for own in policy_logprobs)
    return SampledKL(spread(per_sequence, prompts), float(np.sum(per_sequence)) / num_tokens if num_tokens else 0.0)


def measure_drift(
    reference: Transformer, samples: Sequence[DriftSample], *, temperature: float = 1.0, microbatch_tokens: int = 8192
) -> Drift:
    """Perplexity of `samples` under `reference`, and KL(policy || reference).

    `temperature` is that of sampling, hence of `policy_logprobs`: the KL's. Perplexity is at temperature 1 always.
    ConfigError when no sample has a sampled token.
    """
    written = [sample for sample in samples if sample.num_sampled]
    if not written:
        raise ConfigError("drift needs completions with sampled tokens", got=f"none in {len(samples)} samples")
    logprobs = sampled_token_logprobs(reference, written, microbatch_tokens=microbatch_tokens)
    known = [index for index, sample in enumerate(written) if sample.policy_logprobs is not None]
    if temperature == 1.0:
        tempered = [logprobs[index] for index in known]
    else:
        tempered = sampled_token_logprobs(
            reference,
            [written[index] for index in known],
            temperature=temperature,
            microbatch_tokens=microbatch_tokens,
        )
    policy = [
        sample.policy_logprobs[sample.mask]
        for sample in (written[i] for i in known)
        if sample.policy_logprobs is not None
    ]
    asked = [sample.prompt_tokens.tobytes() for sample in written]
    return Drift(
        perplexity=perplexity(logprobs, [sample.num_predicted for sample in written], asked),
        kl=sampled_kl(policy, tempered, [asked[index] for index in known]) if known else None,
        num_tokens=sum(len(own) for own in logprobs),
        num_with_policy=len(known),
        num_empty=len(samples) - len(written),
    )


def _check(model: Transformer, sample: DriftSample, index: int) -> None:
    if not len(sample.prompt_tokens):
        raise ConfigError(f"sample {index} has no prompt", hint="begin with one token, e.g. the tokenizer's BOS")
    for name, column in (("policy_logprobs", sample.policy_logprobs), ("is_sampled", sample.is_sampled)):
        if column is not None and len(column) != len(sample.tokens):
            raise ShapeError(
                f"sample {index}: {name} needs one entry per token", got=len(column), allowed=len(sample.tokens)
            )
    longest = max(np.diff([*sample.starts, len(sample.prompt_tokens) + len(sample.tokens)])) - 1
    if longest > model.config.max_positions:
        what = f"sample {index} is longer than the model reads"
        raise ConfigError(what, got=f"{longest} tokens to read", allowed=f"at most {model.config.max_positions}")
    largest = max(int(sample.prompt_tokens.max()), int(sample.tokens.max(initial=0)))
    if largest >= model.config.vocab_size:
        what = f"sample {index} is not in the model's vocabulary"
        hint = "policy and reference must share a tokenizer"
        raise ConfigError(what, got=f"token {largest}", allowed=f"below {model.config.vocab_size}", hint=hint)
