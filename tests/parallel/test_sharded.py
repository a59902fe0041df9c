"""Training on several ranks equals training on one: gradients, norms, and the weights after many updates."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np
import pytest
import sharded_jobs
from covering import covering, with_slow
from rank_models import CONFIGS
from rank_pool import RankPool
from sharded_jobs import Layout, Trained, assembled

from slipstream.models.config import TransformerConfig

LAYOUTS = {
    "dp2": Layout(2, 1),
    "dp4": Layout(4, 1),
    "tp2": Layout(1, 2),
    "tp4": Layout(1, 4),
    "dp2_tp2": Layout(2, 2),
}
SETTINGS = {"lr": 2e-3, "weight_decay": 0.1, "max_grad_norm": 1.9, "warmup_updates": 3, "schedule": "linear"}
"""Clips in some updates and in others not."""


@functools.cache
def alone(case: str, num_updates: int) -> Trained:
    return sharded_jobs.train_alone(CONFIGS[case], SETTINGS, num_updates)


def relative(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> float:
    """Norm of the difference of all tensors, as one vector, over that of the expected."""
    assert found.keys() == expected.keys()
    squares = sum(float(np.square(found[name].astype(np.float64) - expected[name]).sum()) for name in expected)
    return (squares / sum(float(np.square(expected[name].astype(np.float64)).sum()) for name in expected)) ** 0.5


def without_key_biases(tensors: Mapping[str, np.ndarray], config: TransformerConfig) -> dict[str, np.ndarray]:
    """Where keys are not rotated, what all have in common changes no softmax: the true gradient of their biases is 0.

    AdamW makes whole steps of what rounding leaves of it.
    """
    kept = dict(tensors)
    for name in [name for name in kept if name.endswith(("attn.c_attn.bias", "query_key_value.bias"))]:
        order = (3, -1, config.head_dim) if config.family == "gpt2" else (-1, 3, config.head_dim)
        by_part = kept[name].reshape(order)
        kept[name] = np.delete(by_part, 1, axis=0 if config.family == "gpt2" else 1)
    return kept


@pytest.mark.parametrize(("case", "layout"), covering(CONFIGS, LAYOUTS))
def test_gradients_are_those_of_one_rank(ranks: RankPool, case: str, layout: str) -> None:
    one = alone(case, 1)
    by_rank = ranks.run(sharded_jobs.train, CONFIGS[case], LAYOUTS[layout], SETTINGS, 1, world=LAYOUTS[layout].world)
    gradient = assembled([seen.first_gradient for seen in by_rank])
    assert relative(gradient, one.first_gradient) < 3e-6
    for name, expected in one.first_gradient.items():  # each by itself: a small tensor's fault drowns in the whole
        scale = max(float(np.linalg.norm(expected)), 1e-3)
        assert np.linalg.norm(gradient[name] - expected) < 1e-5 * scale, name
    assert {seen.grad_norms[0] for seen in by_rank} == {by_rank[0].grad_norms[0]}
    assert by_rank[0].grad_norms == pytest.approx(one.grad_norms, rel=1e-6)


PAIRS = [("dp4", "gpt_neox"), ("tp2", "qwen3"), ("dp2_tp2", "llama_tied"), ("tp4", "mistral"), ("dp2", "gpt2")]
PAIRS += [("dp2", "gpt_neox_serial"), ("tp2", "gpt2_untied"), ("dp2_tp2", "qwen2")]


@pytest.mark.parametrize(
    ("layout", "case", "num_updates"),
    with_slow([("dp2_tp2", "llama_tied", 4)], [("dp4", "gpt_neox", 4), *((*pair, 20) for pair in PAIRS)]),
)
def test_weights_after_updates_are_those_of_one_rank(ranks: RankPool, layout: str, case: str, num_updates: int) -> None:
    config, one = CONFIGS[case], alone(case, num_updates)
    assert min(one.grad_norms) < SETTINGS["max_grad_norm"] < max(one.grad_norms), "clips in some updates only"
    by_rank = ranks.run(sharded_jobs.train, config, LAYOUTS[layout], SETTINGS, num_updates, world=LAYOUTS[layout].world)
    weights = assembled([seen.weights for seen in by_rank])
    assert relative(without_key_biases(weights, config), without_key_biases(one.weights, config)) < 1e-5
    assert relative(assembled([seen.moments for seen in by_rank]), one.moments) < 1e-3
    for seen in by_rank:
        assert seen.grad_norms == by_rank[0].grad_norms
        assert seen.losses == pytest.approx(one.losses, rel=1e-4, abs=1e-5)
    assert by_rank[0].grad_norms == pytest.approx(one.grad_norms, rel=1e-4)
