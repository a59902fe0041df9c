"""Statistics of what a policy writes: means and how far to trust them, lengths, pass@k."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.core.errors import ConfigError
from slipstream.core.held_out import clustered_error
from slipstream.core.types import Completion


@dataclass(frozen=True)
class Spread:
    """The mean of `count` values, their standard deviation (Bessel's) and the standard error of the mean.

    With one value nothing is known of its spread: both are NaN.
    """

    mean: float
    std: float
    standard_error: float
    count: int


def spread(values: Sequence[float] | np.ndarray, clusters: Sequence[Hashable] | None = None) -> Spread:
    """mean, std = sqrt(sum (x - mean)^2 / (n - 1)), standard error = std / sqrt(n), in float64.

    Values with the same entry in `clusters` [n], answers to one prompt say, are not independent of each other: the
    standard error is that of `clustered_error` then. ConfigError without values. An infinite value gives an infinite
    mean and no spread.
    """
    array = np.asarray(values, dtype=np.float64)
    count = len(array)
    if not count:
        raise ConfigError("there is nothing to average", got="no values", allowed="at least one")
    mean = float(array.mean())
    if count == 1 or not math.isfinite(mean):
        return Spread(mean, math.nan, math.nan, count)
    std = float(array.std(ddof=1))
    error = std / math.sqrt(count) if clusters is None else clustered_error(array.tolist(), clusters)
    return Spread(mean, std, math.nan if error is None else error, count)


@dataclass(frozen=True)
class LengthStatistics:
    """Completion lengths in tokens; `truncated_share` (0..1) did not end by themselves.

    `p50` and `p95` interpolate linearly between the two nearest lengths.
    """

    mean: float
    p50: float
    p95: float
    longest: int
    truncated_share: float
    count: int


def length_statistics(num_tokens: Sequence[int], finish_reasons: Sequence[str]) -> LengthStatistics:
    """Statistics of `num_tokens`; every reason but "stop" counts as truncated. ConfigError without completions."""
    if not len(num_tokens) or len(num_tokens) != len(finish_reasons):
        what = "length statistics need completions, each with the reason it ended"
        raise ConfigError(what, got=f"{len(num_tokens)} lengths and {len(finish_reasons)} reasons")
    p50, p95 = np.percentile(num_tokens, [50, 95])
    return LengthStatistics(
        mean=float(np.mean(num_tokens)),
        p50=float(p50),
        p95=float(p95),
        longest=int(max(num_tokens)),
        truncated_share=sum(reason != "stop" for reason in finish_reasons) / len(finish_reasons),
        count=len(num_tokens),
    )


def completion_lengths(completions: Iterable[Completion]) -> LengthStatistics:
    """`length_statistics` of completions as the generator makes them; given tokens (a tool's answer) count, too."""
    pairs = [(completion.num_tokens, completion.finish_reason) for completion in completions]
    return length_statistics([num for num, _ in pairs], [reason for _, reason in pairs])


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that at least one of `k` samples is correct, estimated from `num_correct` of `num_samples`.

        pass@k = 1 - C(n - c, k) / C(n, k)

    Chen et al. 2021 (arXiv:2107.03374), equation 1 and figure 3: unbiased, unlike 1 - (1 - c/n)^k.
    Identities: k = 1 gives c / n; k = n gives 1 where c > 0.
    """
    if not 0 <= num_correct <= num_samples or not 1 <= k <= num_samples:
        got = f"k = {k}, {num_correct} correct of {num_samples}"
        allowed = "1 <= k <= samples, 0 <= correct <= samples"
        raise ConfigError("pass@k needs at least k samples", got=got, allowed=allowed)
    return 1 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def pass_at_k_of(is_right: Sequence[bool | None], num_samples: int) -> dict[int, float]:
    """`mean_pass_at_k` from verdicts, `num_samples` in a row for each prompt.

    Prompts with a sample that nothing judged (None) are left out; empty where that leaves none.
    """
    groups = [is_right[start : start + num_samples] for start in range(0, len(is_right), num_samples)]
    num_correct = [group.count(True) for group in groups if None not in group]
    return mean_pass_at_k(num_correct, num_samples) if num_correct else {}


def mean_pass_at_k(num_correct: Sequence[int], num_samples: int) -> dict[int, float]:
    """pass@k averaged over prompts, for k = 1, 2, 4, ... and `num_samples`; `num_correct` counts per prompt."""
    ks = sorted({*(1 << i for i in range(num_samples.bit_length())), num_samples})
    return {k: sum(pass_at_k(num_samples, correct, k) for correct in num_correct) / len(num_correct) for k in ks}
