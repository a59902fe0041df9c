"""How long completions are, and how many were cut off."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.core.errors import ConfigError
from slipstream.core.types import Completion


@dataclass(frozen=True)
class Lengths:
    """Completion lengths in tokens; `truncated_share` (0..1) did not end by themselves.

    `p50` and `p95` interpolate linearly between the two nearest lengths.
    """

    mean: float
    p50: float
    p95: float
    longest: int
    truncated_share: float
    count: int


def length_statistics(num_tokens: Sequence[int], finish_reasons: Sequence[str]) -> Lengths:
    """Statistics of `num_tokens`; every reason but "stop" counts as truncated. ConfigError without completions."""
    if not len(num_tokens) or len(num_tokens) != len(finish_reasons):
        raise ConfigError(
            "length statistics need completions, each with the reason it ended",
            got=f"{len(num_tokens)} lengths and {len(finish_reasons)} reasons",
        )
    p50, p95 = np.percentile(num_tokens, [50, 95])
    return Lengths(
        mean=float(np.mean(num_tokens)),
        p50=float(p50),
        p95=float(p95),
        longest=int(max(num_tokens)),
        truncated_share=sum(reason != "stop" for reason in finish_reasons) / len(finish_reasons),
        count=len(num_tokens),
    )


def completion_lengths(completions: Iterable[Completion]) -> Lengths:
    """`length_statistics` of completions as the generator makes them; given tokens (a tool's answer) count, too."""
    pairs = [(completion.num_tokens, completion.finish_reason) for completion in completions]
    return length_statistics([num for num, _ in pairs], [reason for _, reason in pairs])
