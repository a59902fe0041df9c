"""A whole run on cut samples: the trainer's logprobs are those of the generator, over the same sets."""

from __future__ import annotations

from typing import Any

import pytest

import slipstream
from slipstream.core.errors import ConfigError
from slipstream.core.run_log import read_metrics

SYNC: dict[str, Any] = {"max_staleness": 0, "weight_update": "between_batches", "host": "inline", "steps": 2}


@pytest.mark.parametrize(
    "cut",
    [
        pytest.param({"top_k": 8}, marks=pytest.mark.slow),
        {"top_k": 8, "top_p": 0.9, "min_p": 0.02, "temperature": 0.8},
    ],
)
def test_at_staleness_0_ratios_are_one_over_the_kept_sets(cut: dict[str, Any], tiny: Any, tmp_path: Any) -> None:
    generator = tiny["generator"] | cut | {"keep_sets": True}
    overrides = tiny | SYNC | {"generator": generator, "kl": {"coef": 0.05}}
    run = slipstream.run("quickstart", overrides=overrides, out=tmp_path / "run", display=False)
    steps = [line for line in read_metrics(run.out / "metrics.jsonl") if "reward_mean" in line]
    assert len(steps) == 2
    for line in steps:
        assert line["logprob_diff_max/lag_0"] < 1e-4
        assert line["logprob_diff_mean/lag_0"] > 0, "two computations, never one compared with itself"


def test_ratios_over_samples_of_a_part_of_the_vocabulary_are_refused(tiny: Any, tmp_path: Any) -> None:
    overrides = tiny | SYNC | {"generator": tiny["generator"] | {"top_k": 8}}
    with pytest.raises(ConfigError, match="ratios of loss"):
        slipstream.run("quickstart", overrides=overrides, out=tmp_path / "run", display=False)
