"""What experiments there are, in the order of docs/results.md. `experiments/<name>/experiment.py`: `section(lab)`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """`minutes`: what it takes on two cores with nothing kept."""

    title: str
    minutes: int


EXPERIMENTS: dict[str, Entry] = {
    "async_vs_sync": Entry("asynchronous equals synchronous in quality, and beats it in time", 95),
    "staleness_by_loss": Entry("how much staleness each loss bears", 100),
    "policy_or_reward_size": Entry("policy size or reward-model size", 60),
    "gpu": Entry("GPU edition of async_vs_sync, stale_kv_cache and peers; left out without a GPU", 90),
}
HEADLINE: tuple[str, ...] = ("async_vs_sync",)
"""What `make experiments` runs, in under three hours."""
