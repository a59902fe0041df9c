"""Whole training steps on several ranks equal those of one: gradients, metrics, and the weights after many steps."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import training_jobs
from rank_pool import RankPool
from sharded_jobs import Layout, assembled
from training_jobs import Boxes, Seen

LAYOUTS = {"dp2": Layout(2, 1), "dp4": Layout(4, 1), "dp2_tp2": Layout(2, 2)}
TRAINER = {"optimizer": {"lr": 1e-3, "max_grad_norm": 0.7}, "microbatch_tokens": 48}
CRITIC = {"optimizer": {"lr": 1e-3}, "head_init": "reward"}
CASES = {
    "grpo": {"loss": {"name": "grpo"}, "trainer": {**TRAINER, "minibatches": 2}},
    "ppo": {
        "loss": {"name": "ppo", "advantages": "gae", "whiten_advantages": "minibatch"},
        "trainer": {**TRAINER, "minibatches": 2, "shuffle": True},
        "critic": {**CRITIC, "whiten_rewards": True},
        "kl": {"coef": 0.1},
    },
    "ppo_head": {
        "loss": {"name": "ppo", "advantages": "gae"},
        "trainer": TRAINER,
        "critic": {**CRITIC, "model": "head"},
    },
    "online_dpo": {
        "loss": {"name": "online_dpo", "select": "best_and_worst", "truncated": "mask", "skip_no_signal": False},
        "trainer": TRAINER,
    },
    "whitened": {
        "loss": {"name": "reinforce", "advantages": "reward", "whiten_advantages": "batch"},
        "trainer": TRAINER,
    },
}
PACKING = {"num_microbatches", "tokens_read", "padding_frac", "padded_layout_frac", "train_s"}


@functools.cache
def one_rank(case: str, num_steps: int) -> Seen:
    return training_jobs.train_alone(CASES[case], num_steps)


def relative(found: list[Boxes], expected: Boxes) -> float:
    """Norm of the difference of all tensors, as one vector, over that of the expected."""
    whole, truth = assembled(found), assembled([expected])
    assert whole.keys() == truth.keys()
    squares = sum(float(np.square(whole[name].astype(np.float64) - truth[name]).sum()) for name in truth)
    return (squares / sum(float(np.square(truth[name].astype(np.float64)).sum()) for name in truth)) ** 0.5


@pytest.mark.parametrize(
    ("case", "layout"),
    [*((case, "dp2") for case in CASES), ("grpo", "dp4"), ("ppo", "dp4"), ("grpo", "dp2_tp2"), ("ppo", "dp2_tp2")],
)
def test_twenty_steps_are_those_of_one_rank(ranks: RankPool, case: str, layout: str) -> None:
    one = one_rank(case, 20)
    by_rank = ranks.run(training_jobs.train, CASES[case], LAYOUTS[layout], 20, world=LAYOUTS[layout].world)
    assert {seen.num_params for seen in by_rank} == {one.num_params}
    assert relative([seen.first_gradient for seen in by_rank], one.first_gradient) < 1e-5
    assert relative([seen.weights for seen in by_rank], one.weights) < 1e-5
    for seen in by_rank:
        for mine, expected in zip(seen.metrics, one.metrics, strict=True):
            assert mine.keys() == expected.keys()
            for name in expected.keys() - PACKING:
                assert mine[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-4), name


@pytest.mark.parametrize("layout", ["dp2", "dp2_tp2"])
def test_a_warm_start_is_that_of_one_rank(ranks: RankPool, layout: str) -> None:
    one = training_jobs.warm_up_alone()
    by_rank = ranks.run(training_jobs.warm_up, LAYOUTS[layout], world=LAYOUTS[layout].world)
    assert relative([seen.weights for seen in by_rank], one.weights) < 1e-5
    for seen in by_rank:
        assert [m["tokens"] for m in seen.metrics] == [m["tokens"] for m in one.metrics]
        assert [m["loss"] for m in seen.metrics] == pytest.approx([m["loss"] for m in one.metrics], rel=1e-5)
        assert [m["grad_norm"] for m in seen.metrics] == pytest.approx([m["grad_norm"] for m in one.metrics], rel=1e-4)
