"""Whole training steps on several ranks equal those of one: gradients, metrics, and the weights after many steps."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
import training_jobs
from covering import with_slow
from rank_pool import RankPool
from safetensors.numpy import load_file
from sharded_jobs import Layout, assembled
from training_jobs import Boxes, Seen, Span

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
        "trainer": {**TRAINER, "reduce_once": True, "recompute": True},
    },
    "min_variance": {
        "loss": {"name": "aipo", "baseline": "min_variance"},
        "trainer": {**TRAINER, "reduce_once": True},
    },
}
PACKING = {
    "num_microbatches",
    "tokens_read",
    "expert_load_max",
    "padding_frac",
    "padded_layout_frac",
    "rank_wait_frac",
    "train_s",
}


PAIRS = [
    ("grpo", "dp2_tp2"),
    ("ppo", "dp2"),
    ("grpo", "dp2"),
    ("grpo", "dp4"),
    ("online_dpo", "dp2"),
    ("ppo_head", "dp2"),
    ("whitened", "dp2"),
    ("ppo", "dp4"),
    ("ppo", "dp2_tp2"),
    ("min_variance", "dp2"),
    ("min_variance", "dp2_tp2"),
]


@functools.cache
def one_rank(case: str, num_steps: int) -> Seen:
    return training_jobs.train_alone(CASES[case], Span(num_steps))


def relative(found: list[Boxes], expected: Boxes) -> float:
    """Norm of the difference of all tensors, as one vector, over that of the expected."""
    whole, truth = assembled(found), assembled([expected])
    assert whole.keys() == truth.keys()
    squares = sum(float(np.square(whole[name].astype(np.float64) - truth[name]).sum()) for name in truth)
    return (squares / sum(float(np.square(truth[name].astype(np.float64)).sum()) for name in truth)) ** 0.5


def require_same_training(by_rank: list[Seen], one: Seen) -> None:
    """Hold first gradient, weights and metrics of ranks against those of one, but for what microbatches decide."""
    assert relative([seen.first_gradient for seen in by_rank], one.first_gradient) < 1e-5
    assert relative([seen.weights for seen in by_rank], one.weights) < 1e-5
    for seen in by_rank:
        for mine, expected in zip(seen.metrics, one.metrics, strict=True):
            assert mine.keys() == expected.keys()
            for name in expected.keys() - PACKING:
                assert mine[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-4), name


@pytest.mark.parametrize(
    ("case", "layout", "num_steps"),
    with_slow(
        [("grpo", "dp2_tp2", 3), ("ppo", "dp2", 3)],
        [("ppo", "dp2", 4), *((case, layout, 20) for case, layout in PAIRS)],
    ),
)
def test_steps_are_those_of_one_rank(ranks: RankPool, case: str, layout: str, num_steps: int) -> None:
    one, how = one_rank(case, num_steps), LAYOUTS[layout]
    by_rank = ranks.run(training_jobs.train, CASES[case], how, Span(num_steps), world=how.world)
    assert {seen.num_params for seen in by_rank} == {one.num_params}
    require_same_training(by_rank, one)


@pytest.mark.parametrize("layouts", with_slow([["dp2_tp2"]], [["dp4", "dp2_tp2"]]), ids=", ".join)
def test_a_run_goes_on_where_it_was_saved_on_other_ranks(ranks: RankPool, layouts: list[str], tmp_path: Path) -> None:
    """A step on one rank, one on the ranks of each of `layouts`, one on one rank: all as on one."""
    case, last = CASES["ppo"], len(layouts) + 1
    training_jobs.train_alone(case, Span(1, save=tmp_path / "step_1"))
    for step, layout in enumerate(layouts, 1):
        old, new = tmp_path / f"step_{step}", tmp_path / f"step_{step + 1}"
        span = Span(step + 1, step, old, new, tmp_path / "model" if step + 1 == last else None)
        by_rank = ranks.run(training_jobs.train, case, LAYOUTS[layout], span, world=4)
    exported: dict[str, np.ndarray] = {}
    for file in (tmp_path / "model").glob("*.safetensors"):
        exported |= {f"policy/{name}": tensor for name, tensor in load_file(file).items()}
    trained = assembled([seen.weights for seen in by_rank])
    assert exported.keys() == {name for name in trained if name.startswith("policy/")}
    assert all(np.array_equal(tensor, trained[name]) for name, tensor in exported.items())
    alone = training_jobs.train_alone(case, Span(last + 1, last, tmp_path / f"step_{last}"))
    assert relative([alone.weights], one_rank("ppo", last + 1).weights) < 1e-5


@pytest.mark.parametrize("layout", with_slow(["dp2"], ["dp2_tp2"]))
def test_a_warm_start_is_that_of_one_rank(ranks: RankPool, layout: str) -> None:
    one = training_jobs.warm_up_alone()
    by_rank = ranks.run(training_jobs.warm_up, LAYOUTS[layout], world=LAYOUTS[layout].world)
    assert relative([seen.weights for seen in by_rank], one.weights) < 1e-5
    for seen in by_rank:
        assert [m["tokens"] for m in seen.metrics] == [m["tokens"] for m in one.metrics]
        assert [m["loss"] for m in seen.metrics] == pytest.approx([m["loss"] for m in one.metrics], rel=1e-5)
        assert [m["grad_norm"] for m in seen.metrics] == pytest.approx([m["grad_norm"] for m in one.metrics], rel=1e-4)
