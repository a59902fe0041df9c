"""What experiments there are, in the order of docs/results.md. `experiments/<name>/experiment.py`: `section(lab)`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """`minutes`: what it takes on two cores with nothing kept."""

    title: str
    minutes: int


EXPERIMENTS: dict[str, Entry] = {
    "async_vs_sync": Entry("asynchronous equals synchronous in quality, and beats it in time", 80),
    "learning_rates": Entry("synchronous and continuous training at the best learning rate of each", 80),
    "staleness_by_loss": Entry("how much staleness each loss bears", 209),
    "corrections": Entry("which correction keeps continuous training stable at staleness 8", 105),
    "far_off_policy": Entry("losses made for very old samples, at lags of 32, 64 and 128 updates", 430),
    "policy_or_reward_size": Entry("policy size or reward-model size", 140),
    "idle_compute": Entry("more updates per batch, or the best and the worst of more completions", 180),
    "stale_kv_cache": Entry("keep or recompute the cache when weights change", 10),
    "collation": Entry("what greedy collation saves", 3),
    "adam_epsilon": Entry("where Adam's epsilon stands", 2),
    "stylistic_details": Entry("the original pipeline, one detail left out at a time", 155),
    "peers": Entry("TRL and the scheduling policies of other systems beside ours", 45),
    "stragglers": Entry("long completions under a hard bound: what the preset tolerant gains and costs", 15),
    "real_model": Entry("SmolLM2-135M on word problems, beside TRL; left out without its weights", 90),
    "gpu": Entry("GPU edition of async_vs_sync, stale_kv_cache and peers; left out without a GPU", 90),
}
HEADLINE: tuple[str, ...] = ("async_vs_sync", "learning_rates", "stale_kv_cache", "collation", "adam_epsilon")
"""What `make experiments` runs, in under three hours (`tests/experiments/test_overview.py`)."""
