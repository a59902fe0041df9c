"""`several_rewards = "normalise_then_sum"` with an environment, whose reward is a part with a weight of its own."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from drawn import drawn
from hypothesis import strategies as st
from pydantic import ValidationError
from training_data import make_rollout, run_config, scored_group

from slipstream.core.config import RunConfig
from slipstream.core.types import Group
from slipstream.trainer.scores import has_signal, rollout_advantages

STD_EPS = 1e-3
TERMS = [{"function": "task", "weight": 2.0}, {"function": "length", "weight": -0.5}]
MODELS = [{"path": "nowhere", "name": "judge", "weight": 0.25}]

Parts = list[float | None]


def configured(weight: float, *, terms: Any = TERMS, models: Any = ()) -> RunConfig:
    return run_config(
        loss={"name": "grpo", "several_rewards": "normalise_then_sum", "std_eps": STD_EPS},
        environment={"class_path": "guess", "reward_weight": weight},
        rewards={"terms": list(terms), "models": list(models)},
        model={"max_positions": 4096},
    )


def episodes(names: list[str], rows: list[Parts], failed: int | None = None) -> Group:
    """An episode for each of `rows`, whose parts are in the order in which the rewards' executors put them."""
    rollouts = []
    for sample, row in enumerate(rows):
        plain = make_rollout(0, sample, np.random.default_rng(sample), turn_rewards=[None], reward=-1.0)
        fields: dict[str, Any] = {"reward_parts": dict(zip(names, row, strict=True))}
        if sample == failed:
            fields = {"reward_parts": {}, "failure": "its environment is gone"}
        rollouts.append(msgspec.structs.replace(plain, **fields))
    return Group(ordinal=0, rollouts=tuple(rollouts))


def advantages(group: Group, config: RunConfig) -> list[float]:
    found = rollout_advantages([scored_group(group, config)], config)
    return [found[0, sample] for sample in range(len(group.rollouts))]


def in_float64(rows: list[Parts], weights: list[float]) -> list[float]:
    """sum_k w_k (r_ik - mean_k) / (std_k + eps), over the rows to which part k applies."""
    total = [0.0] * len(rows)
    for k, weight in enumerate(weights):
        there = [(i, row[k]) for i, row in enumerate(rows) if row[k] is not None]
        values = [value for _, value in there]
        if not values:
            continue
        mean = math.fsum(values) / len(values)
        std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
        for i, value in there:
            total[i] += weight * (value - mean) / (std + STD_EPS)
    return total


PART = st.one_of(st.none(), st.integers(-8, 8).map(lambda n: n / 4))


@drawn(
    20,
    60,
    rows=st.lists(st.tuples(PART, PART, PART, PART).map(list), min_size=2, max_size=5),
    weight=st.sampled_from([0.0, 1.0, 3.0]),
)
def test_the_environments_part_counts_with_its_weight(rows: list[Parts], weight: float) -> None:
    names = ["task", "length", "environment", "judge"]
    config = configured(weight, models=MODELS)
    expected = in_float64(rows, [2.0, -0.5, weight, 0.25])
    np.testing.assert_allclose(advantages(episodes(names, rows), config), expected, rtol=1e-4, atol=1e-4)


def test_it_may_be_the_only_part() -> None:
    rows: list[Parts] = [[0.0], [1.0], [None], [5.0]]
    config = configured(2.0, terms=[])
    group = episodes(["environment"], rows)
    np.testing.assert_allclose(advantages(group, config), in_float64(rows, [2.0]), rtol=1e-5)
    assert has_signal(scored_group(group, config), config)


def test_a_failed_episode_has_its_reward_for_every_part() -> None:
    rows: list[Parts] = [[1.0, 2.0, 3.0], [-1.0, -1.0, -1.0], [0.0, 1.0, 7.0]]
    config = configured(0.5)
    group = episodes(["task", "length", "environment"], rows, failed=1)
    np.testing.assert_allclose(advantages(group, config), in_float64(rows, [2.0, -0.5, 0.5]), rtol=1e-4)


def test_its_reward_is_a_signal_unless_it_is_measured_only() -> None:
    group = episodes(["task", "length", "environment"], [[1.0, 0.5, 0.0], [1.0, 0.5, 1.0], [1.0, 0.5, None]])
    for weight, has in ((1.0, True), (-2.0, True), (0.0, False)):
        config = configured(weight)
        assert has_signal(scored_group(group, config), config) is has


def test_no_other_part_has_its_name() -> None:
    with pytest.raises(ValidationError, match="'environment'"):
        configured(1.0, terms=[{"function": "judges.py:environment"}])
    with pytest.raises(ValidationError, match="'environment'"):
        configured(1.0, models=[{"path": "nowhere", "name": "environment"}])
