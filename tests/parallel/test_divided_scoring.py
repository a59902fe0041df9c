"""Frozen models that several ranks hold together: they read what one rank reads that has the whole model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import scoring_jobs
import torch
from covering import with_slow
from rank_models import CONFIGS, MIXED, MIXTURE, whole_model
from rank_pool import RankPool
from sharded_jobs import Layout

from slipstream.core.errors import ConfigError
from slipstream.models.config import TransformerConfig
from slipstream.models.hf import save_model
from slipstream.models.scalar import new_scalar_model, save_scalar_model
from slipstream.models.sharded import Division

LAYOUTS = {"tp2": Layout(1, 2), "dp2": Layout(2, 1), "dp2_tp2": Layout(2, 2)}


MANY = ("llama", 4, 24)  # microbatches, of an odd number
ONE = ("llama_tied", 4, 10_000)  # other data-parallel ranks read an empty one
NONE = ("qwen2", 0, 24)


@pytest.mark.parametrize(
    ("layout", "case", "num_groups", "microbatch_tokens"),
    with_slow(
        [("dp2", *MANY), ("dp2_tp2", *ONE), ("dp2", *NONE)],
        [("tp2", *MANY), ("dp2_tp2", *MANY), ("tp2", *ONE), ("dp2", *ONE), ("tp2", *NONE), ("dp2_tp2", *NONE)],
    ),
)
def test_reference_and_teacher_read_what_one_rank_reads(
    ranks: RankPool, layout: str, case: str, num_groups: int, microbatch_tokens: int, tmp_path: Path
) -> None:
    save_model(whole_model(CONFIGS[case]), tmp_path)
    args = (str(tmp_path), num_groups, microbatch_tokens)
    expected = scoring_jobs.read(Division(), *args)
    found = ranks.run(scoring_jobs.read_by, LAYOUTS[layout], *args, world=LAYOUTS[layout].world)
    assert len(expected[0]) == 3 * num_groups
    for columns in found:  # on every rank, the last one too
        for mine, whole in zip(columns, expected, strict=True):
            for one, other in zip(mine, whole, strict=True):
                assert one.dtype == other.dtype
                np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize(
    ("layout", "config"), [pytest.param("dp2", MIXTURE, marks=pytest.mark.slow), ("tp2", MIXED)], ids=["dp2", "tp2"]
)
def test_a_mixture_of_experts_is_divided(
    ranks: RankPool, layout: str, config: TransformerConfig, tmp_path: Path
) -> None:
    save_model(whole_model(config), tmp_path)
    args = (str(tmp_path), 2, 24)
    expected = scoring_jobs.read(Division(), *args)
    for columns in ranks.run(scoring_jobs.read_by, LAYOUTS[layout], *args, world=2):
        for mine, whole in zip(columns[0], expected[0], strict=True):
            np.testing.assert_allclose(mine, whole, atol=1e-5)


@pytest.mark.parametrize(
    ("layout", "count", "microbatch_tokens"),
    with_slow(
        [("tp2", 9, 30), ("dp2", 1, 1000), ("dp2_tp2", 9, 30)],
        [("tp2", 1, 1000), ("dp2", 9, 30), ("dp2_tp2", 1, 1000)],
    ),
)
def test_reward_models_score_as_one_rank_does(
    ranks: RankPool, layout: str, count: int, microbatch_tokens: int, tmp_path: Path
) -> None:
    """Normalised ones: their gain and bias are folded into head and config.json when they are saved."""
    model = new_scalar_model(whole_model(CONFIGS["qwen3"]), head_init="reward", seed=5)
    with torch.no_grad():
        model.gain.fill_(3.5)
        model.bias.fill_(-2.25)
    save_scalar_model(model, tmp_path)
    args = (str(tmp_path), count, microbatch_tokens)
    expected = scoring_jobs.scored(Division(), *args)
    assert np.abs(expected + 2.25).max() > 0.1, "the head decides"
    for found in ranks.run(scoring_jobs.scored_by, LAYOUTS[layout], *args, world=LAYOUTS[layout].world):
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_each_rank_holds_its_part_also_between_batches(ranks: RankPool, tmp_path: Path) -> None:
    model = whole_model(CONFIGS["llama"])
    save_model(model, tmp_path)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    embedding = model.embedding.weight.nbytes
    for layout, share in ((LAYOUTS["dp2"], whole / 2), (LAYOUTS["dp2_tp2"], (whole + embedding) / 4)):
        for loaded, between in ranks.run(scoring_jobs.held, layout, str(tmp_path), world=layout.world):
            assert loaded == between == pytest.approx(share, rel=0.05)  # norms are whole, rows do not divide
    ((loaded, _), *_) = ranks.run(scoring_jobs.held, LAYOUTS["dp2"], str(tmp_path), "bfloat16", world=2)
    assert loaded == pytest.approx(whole / 4, rel=0.05), "frozen weights need no float32"


def test_a_language_model_is_no_reward_model_on_several_ranks_either(ranks: RankPool, tmp_path: Path) -> None:
    save_model(whole_model(CONFIGS["llama"]), tmp_path)
    with pytest.raises(ConfigError, match="has no scalar head"):
        scoring_jobs.scored(Division(), str(tmp_path), 1, 100)
    outcomes = ranks.outcomes(scoring_jobs.scored_by, LAYOUTS["tp2"], str(tmp_path), 1, 100, world=2)
    assert all(status == "failed" and "has no scalar head" in text for status, text in outcomes)


def test_a_lost_rank_ends_the_other_that_holds_its_copy(tmp_path: Path) -> None:
    """At once, in the middle of a batch, with an error that the controller takes for a consequence."""
    save_model(whole_model(CONFIGS["llama"]), tmp_path / "model")
    pool = RankPool(2, tmp_path)
    try:
        outcomes = pool.outcomes(scoring_jobs.outlive_a_rank, LAYOUTS["dp2"], str(tmp_path / "model"), world=2)
    finally:
        pool.close()
    (status, (may_follow, error)), died = outcomes
    assert (status, died) == ("done", ("died", None))
    assert may_follow, error
