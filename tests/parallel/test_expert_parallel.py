"""Experts divided over ranks: training and generating as one rank does, and which boxes lie where."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sharded_jobs
from rank_models import MIXTURE
from rank_pool import RankPool
from sharded_jobs import Layout, assembled
from test_sharded import SETTINGS, relative

MIXED = replace(MIXTURE, num_experts=8, experts_per_token=2)


@pytest.mark.parametrize(
    ("layout", "gradient_error", "weight_error"),
    [
        (Layout(2, 1, experts=2), 3e-6, 1e-5),
        (Layout(4, 1, experts=2), 3e-6, 1e-5),
        (Layout(4, 1, experts=4, reduce_once=True, recomputes=True), 3e-6, 1e-5),
        (Layout(1, 2), 3e-6, 1e-5),
        (Layout(2, 2, experts=2), 3e-6, 1e-5),
        (Layout(2, 1, experts=2, precision="bfloat16"), 0.1, 3e-3),  # rounding may send tokens to other experts
    ],
)
def test_training_is_that_of_one_rank(
    ranks: RankPool, layout: Layout, gradient_error: float, weight_error: float
) -> None:
    one = sharded_jobs.train_alone(MIXED, SETTINGS, 3)
    by_rank = ranks.run(sharded_jobs.train, MIXED, layout, SETTINGS, 3, world=layout.world)
    gradient = assembled([seen.first_gradient for seen in by_rank])
    assert relative(gradient, one.first_gradient) < gradient_error
    assert relative(assembled([seen.weights for seen in by_rank]), one.weights) < weight_error
