"""Ranks that read each microbatch together give what one rank does: columns, gradients, training, checkpoints."""

from __future__ import annotations

from pathlib import Path

import context_jobs
import numpy as np
import pytest
import test_training
import training_jobs
from covering import with_slow
from rank_models import CONFIGS
from rank_pool import RankPool
from sharded_jobs import Layout, assembled
from test_sharded import relative as relative_by_name
from test_training import TRAINER, one_rank, relative, require_same_training
from training_jobs import Span

LAYOUTS = {
    "cp2": Layout(1, 1, context_parallel=2),
    "cp4": Layout(1, 1, context_parallel=4),
    "cp2_tp2": Layout(1, 2, context_parallel=2),
    "dp2_cp2": Layout(2, 1, context_parallel=2),
}
GSPO = {"loss": {"name": "gspo"}, "trainer": TRAINER}


@pytest.mark.parametrize(
    ("case", "layout"),
    with_slow([("gpt2", "cp2")], [("gpt2", "dp2_cp2"), ("llama", "cp2"), ("qwen3", "cp4"), ("gpt_neox", "cp2_tp2")]),
)
def test_columns_and_gradients_are_those_of_one_rank(ranks: RankPool, case: str, layout: str) -> None:
    """In the slow cases every data-parallel rank reads all of them, so that gradients are as many times as large."""
    config, how = CONFIGS[case], LAYOUTS[layout]
    columns, gradient = context_jobs.read_alone(config)
    by_rank = ranks.run(context_jobs.read_together, config, how, world=how.world)
    for mine in by_rank:
        for found, expected, same in zip(mine.columns, columns, by_rank[0].columns, strict=True):
            assert len(found) == len(expected)
            for one, alone, first in zip(found, expected, same, strict=True):
                np.testing.assert_allclose(one, alone, rtol=2e-5, atol=2e-5)
                assert np.array_equal(one, first), "all ranks go on from the same numbers"
    summed = {name: how.data_parallel * tensor for name, tensor in gradient.items()}
    assert relative_by_name(assembled([mine.gradient for mine in by_rank]), summed) < 1e-5


@pytest.mark.parametrize(
    ("case", "layout", "num_steps"),
    with_slow(
        [("whitened", "cp2", 3), ("online_dpo", "dp2_cp2", 3)],
        [
            ("whitened", "cp2", 20),
            ("gspo", "cp2_tp2", 20),
            ("online_dpo", "dp2_cp2", 20),
            *((case, layout, 20) for case in ("ppo", "ppo_head", "min_variance") for layout in ("cp2", "dp2_cp2")),
        ],
    ),
)
def test_steps_are_those_of_one_rank(
    ranks: RankPool, monkeypatch: pytest.MonkeyPatch, case: str, layout: str, num_steps: int
) -> None:
    """Layers that run again, a ratio of whole sequences, pairs; and critics; microbatches with few rows."""
    monkeypatch.setitem(test_training.CASES, "gspo", GSPO)
    one, how = one_rank(case, num_steps), LAYOUTS[layout]
    by_rank = ranks.run(training_jobs.train, test_training.CASES[case], how, Span(num_steps), world=how.world)
    require_same_training(by_rank, one)
    if how.data_parallel == 1:
        packed = ("num_microbatches", "tokens_read")
        for seen in by_rank:
            assert [[line[name] for name in packed] for line in seen.metrics] == [
                [line[name] for name in packed] for line in one.metrics
            ]


def test_a_run_goes_on_alone_where_two_ranks_saved_it(ranks: RankPool, tmp_path: Path) -> None:
    """With a critic, and a reference."""
    case = test_training.CASES["ppo"]
    ranks.run(training_jobs.train, case, LAYOUTS["cp2"], Span(1, save=tmp_path / "step_1"), world=2)
    alone = training_jobs.train_alone(case, Span(2, 1, tmp_path / "step_1"))
    assert relative([alone.weights], one_rank("ppo", 2).weights) < 1e-5


@pytest.mark.slow
def test_a_warm_start_is_that_of_one_rank(ranks: RankPool) -> None:
    one = training_jobs.warm_up_alone()
    by_rank = ranks.run(training_jobs.warm_up, LAYOUTS["cp2"], world=2)
    assert relative([seen.weights for seen in by_rank], one.weights) < 1e-5
