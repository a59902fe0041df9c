"""The settings of runs small enough for every test run."""

from __future__ import annotations

from typing import Any


def tiny_tables() -> dict[str, Any]:
    """Overrides of the quickstart: seconds, not minutes."""
    return {
        "steps": 5,
        "groups_per_step": 4,
        "completions_per_group": 4,
        "deadline_s": 60.0,
        "model": {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2},
        "prompts": {"num_train": 300, "num_eval": 24},
        "generator": {"num_slots": 16},
        "trainer": {"minibatches": 2},
        "warm_start": {"steps": 30, "batch_size": 16, "num_demonstrations": 300},
        "eval": {"every": 0, "num_prompts": 8, "num_slots": 8},
    }
