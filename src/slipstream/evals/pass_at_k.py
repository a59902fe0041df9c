"""pass@k from n >= k samples per prompt, without bias."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.core.errors import ConfigError


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that at least one of `k` samples is correct, estimated from `num_correct` of `num_samples`.

        pass@k = 1 - C(n - c, k) / C(n, k) = 1 - prod_{i = n-c+1 .. n} (1 - k / i)

    Chen et al. 2021 (arXiv:2107.03374), equation 1 and figure 3: unbiased, unlike 1 - (1 - c/n)^k.
    Identities: k = 1 gives c / n; k = n gives 1 where c > 0.
    """
    if not 0 <= num_correct <= num_samples or not 1 <= k <= num_samples:
        raise ConfigError(
            "pass@k needs at least k samples",
            got=f"k = {k}, {num_correct} correct of {num_samples}",
            allowed="1 <= k <= samples, 0 <= correct <= samples",
        )
    all_wrong = 1.0
    for i in range(num_samples - num_correct + 1, num_samples + 1):
        all_wrong *= max(0.0, 1 - k / i)
    return 1 - all_wrong


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
