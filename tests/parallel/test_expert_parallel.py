"""Experts divided over ranks: training and generating as one rank does, and which boxes lie where."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import expert_jobs
import numpy as np
import pytest
import sharded_jobs
import torch
import training_jobs
from rank_models import MIXED
from rank_pool import RankPool
from sharded_jobs import Layout, Trained, assembled
from test_rank_engines import requests
from test_sharded import SETTINGS, relative
from test_training import relative as relative_boxes
from test_training import require_same_training
from training_jobs import Seen, Span

from slipstream.core.errors import ConfigError
from slipstream.models import expert_parallel
from slipstream.models import experts as experts_module
from slipstream.models.expert_parallel import ExpertShare, check_experts

PAIR, FOUR = Layout(2, 1, experts=2), Layout(4, 1, experts=4)


# A layer's experts


def drawn(counts: list[int], dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each rank's tokens, and the weights of what they become."""
    generator = torch.Generator().manual_seed(len(counts))
    both = [torch.randn(2, count, MIXED.hidden_size, generator=generator, dtype=torch.float64) for count in counts]
    return [(pair[0].to(dtype), pair[1].to(dtype)) for pair in both]


@pytest.mark.parametrize("counts", [[40, 9], [0, 17], [0, 0], [5, 0, 33, 1]], ids=str)
def test_an_exchange_gives_what_one_rank_does(ranks: RankPool, counts: list[int]) -> None:
    """To the bit forward; gradients in float64, those of experts by rank behind one another."""
    single, rows = drawn(counts, torch.float32), drawn(counts, torch.float64)
    by_rank = ranks.run(expert_jobs.exchange, MIXED, single, torch.float32, world=len(counts))
    whole = expert_jobs.whole_experts(MIXED, torch.float32)
    with torch.no_grad():
        for (first, again), (x, _) in zip(by_rank, single, strict=True):
            assert torch.equal(first.out, whole(x))
            assert torch.equal(again.out, first.out)
    by_rank = ranks.run(expert_jobs.exchange, MIXED, rows, torch.float64, world=len(counts))
    joined = [torch.cat(column) for column in zip(*rows, strict=True)]
    expected = expert_jobs.passed(expert_jobs.whole_experts(MIXED, torch.float64), joined[0], joined[1])
    for name in ("out", "tokens", "up", "down"):
        found = torch.cat([getattr(first, name) for first, _ in by_rank])
        torch.testing.assert_close(found, getattr(expected, name), rtol=1e-9, atol=1e-11)
    total = sum(first.router for first, _ in by_rank)
    torch.testing.assert_close(total, expected.router, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kernel", ["loop", "grouped", "grouped_with_gradients"])
def test_ranks_with_the_same_tokens_add_up(world: int, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each computes what its own experts give, as a decode step on CUDA does too: without a count on the host."""
    dtype = torch.float32 if kernel == "loop" else torch.bfloat16
    if kernel != "loop":
        for module in (experts_module, expert_parallel):
            monkeypatch.setattr(module, "multiplies_groups", lambda *_: True)
    if kernel == "grouped":
        monkeypatch.setattr(ExpertShare, "_at_their_ranks", None)
    whole = expert_jobs.whole_experts(MIXED, dtype)
    [(x, _)] = drawn([23], dtype)
    shares = [ExpertShare.of(MIXED.num_experts, rank=rank, world=world) for rank in range(world)]
    with torch.set_grad_enabled(kernel == "grouped_with_gradients"):
        expected = whole(x).float()
        parts = [expert_jobs.experts_of(share, whole, MIXED)(x).float() for share in shares]
    tolerance = 1e-6 if kernel == "loop" else 0.02
    torch.testing.assert_close(
        sum(parts), expected, rtol=tolerance, atol=tolerance * float(expected.detach().abs().max())
    )
    assert all(float(part.detach().abs().max()) > 0 for part in parts)


def test_experts_that_ranks_do_not_divide() -> None:
    assert ExpertShare.of(5) is None
    for num_experts, ranks, message in ((5, 2, "allowed: 1, 5 ranks"), (0, 2, "a mixture of experts, or 1 rank")):
        with pytest.raises(ConfigError, match=message):
            check_experts(num_experts, ranks)


# Training


@functools.cache
def alone() -> Trained:
    return sharded_jobs.train_alone(MIXED, SETTINGS, 3)


@pytest.mark.parametrize(
    ("layout", "gradient_error", "weight_error"),
    [
        pytest.param(PAIR, 3e-6, 1e-5, marks=pytest.mark.slow),
        pytest.param(Layout(4, 1, experts=2), 3e-6, 1e-5, marks=pytest.mark.slow),
        (replace(FOUR, reduce_once=True, recomputes=True), 3e-6, 1e-5),
        pytest.param(Layout(1, 2), 3e-6, 1e-5, marks=pytest.mark.slow),
        (Layout(2, 2, experts=2), 3e-6, 1e-5),
        (replace(PAIR, precision="bfloat16"), 0.1, 3e-3),  # rounding may send tokens to other experts
    ],
)
def test_gradients_and_weights_are_those_of_one_rank(
    ranks: RankPool, layout: Layout, gradient_error: float, weight_error: float
) -> None:
    """In the third update all sequences belong to one rank: the others have nothing but its tokens."""
    one = alone()
    by_rank = ranks.run(sharded_jobs.train, MIXED, layout, SETTINGS, 3, world=layout.world)
    gradient = assembled([seen.first_gradient for seen in by_rank])
    assert relative(gradient, one.first_gradient) < gradient_error
    if layout.precision == "float32":
        for name, expected in one.first_gradient.items():
            scale = max(float(np.linalg.norm(expected)), 1e-3)
            assert np.linalg.norm(gradient[name] - expected) < 1e-5 * scale, name
    assert relative(assembled([seen.weights for seen in by_rank]), one.weights) < weight_error
    for seen in by_rank:
        assert seen.grad_norms == by_rank[0].grad_norms


SHAPE = training_jobs.TINY.model_dump() | {"family": "qwen3_moe", "num_experts": 4, "max_positions": 64}
CASES: dict[str, dict[str, Any]] = {
    "kl": {
        "loss": {"name": "grpo"},
        "kl": {"coef": 0.1},
        "trainer": {"optimizer": {"lr": 1e-3, "max_grad_norm": 0.7}, "microbatch_tokens": 96},
    },
    "replayed": {
        "loss": {"name": "aipo"},
        "generator": {"max_new_tokens": 16, "routing_replay": True},
        "trainer": {"optimizer": {"lr": 1e-3}, "microbatch_tokens": 48, "recompute": True},
    },
    "critic": {
        "loss": {"name": "ppo", "advantages": "gae"},
        "critic": {"optimizer": {"lr": 1e-3}, "head_init": "reward"},
        "trainer": {"optimizer": {"lr": 1e-3}, "microbatch_tokens": 48},
    },
}
CASES = {name: case | {"model": SHAPE} for name, case in CASES.items()}


@functools.cache
def one_rank(case: str, num_steps: int) -> Seen:
    return training_jobs.train_alone(CASES[case], Span(num_steps))


@pytest.mark.parametrize(
    ("case", "layout", "num_steps"),
    [
        ("kl", PAIR, 3),
        ("replayed", Layout(2, 2, experts=2), 2),
        pytest.param("kl", Layout(4, 1, experts=2), 20, marks=pytest.mark.slow),
        pytest.param("kl", Layout(1, 2), 20, marks=pytest.mark.slow),
        pytest.param("replayed", PAIR, 20, marks=pytest.mark.slow),
        pytest.param("critic", FOUR, 8, marks=pytest.mark.slow),
        pytest.param("kl", PAIR, 20, marks=pytest.mark.slow, id="kl-layout0-20"),
    ],
)
def test_steps_are_those_of_one_rank(ranks: RankPool, case: str, layout: Layout, num_steps: int) -> None:
    by_rank = ranks.run(training_jobs.train, CASES[case], layout, Span(num_steps), world=layout.world)
    require_same_training(by_rank, one_rank(case, num_steps))


def test_a_run_goes_on_where_it_was_saved_in_another_division(ranks: RankPool, tmp_path: Path) -> None:
    """A step on ranks that divide experts, one on one rank, one under FSDP2 alone, one on divided experts again."""
    case = CASES["kl"]
    spans = [
        Span(1, save=tmp_path / "step_1"),
        Span(2, 1, tmp_path / "step_1", tmp_path / "step_2"),
        Span(3, 2, tmp_path / "step_2", tmp_path / "step_3"),
        Span(4, 3, tmp_path / "step_3", export=tmp_path / "model"),
    ]
    ranks.run(training_jobs.train, case, PAIR, spans[0], world=2)
    training_jobs.train_alone(case, spans[1])
    ranks.run(training_jobs.train, case, Layout(2, 1), spans[2], world=2)
    by_rank = ranks.run(training_jobs.train, case, PAIR, spans[3], world=2)
    assert relative_boxes([seen.weights for seen in by_rank], one_rank("kl", 4).weights) < 1e-5
    assert (tmp_path / "model" / "config.json").exists()


# What lies where


@pytest.mark.parametrize("layout", [PAIR, Layout(4, 1, experts=2), Layout(1, 2), Layout(2, 2, experts=2)], ids=str)
def test_a_rank_holds_boxes_of_its_own_experts_alone(ranks: RankPool, layout: Layout) -> None:
    found = ranks.run(expert_jobs.held, MIXED, layout, world=layout.world)
    num_ranks = layout.experts * layout.tensor_parallel
    each, per_rank = MIXED.num_layers * 3 * 4 * MIXED.hidden_size * MIXED.expert_width, MIXED.num_experts // num_ranks
    for rank, (boxes, nbytes, turn) in enumerate(found):
        names = {box.name for box in boxes if ".experts." in box.name}
        experts = {int(name.split(".experts.")[1].split(".")[0]) for name in names}
        place = rank % layout.tensor_parallel * layout.experts + turn
        assert experts <= set(range(place * per_rank, (place + 1) * per_rank))
        assert nbytes == each * MIXED.num_experts // layout.world
    covered = sum(math.prod(box.extent) for boxes, _, _ in found for box in boxes if ".experts." in box.name)
    assert covered == each * MIXED.num_experts // 4, "every expert's number lies on one rank"


# Generating


@pytest.mark.parametrize(
    ("world", "paged"),
    [(2, True), pytest.param(2, False, marks=pytest.mark.slow), pytest.param(4, False, marks=pytest.mark.slow)],
)
def test_a_replicas_tokens_and_experts_are_those_of_one_engine(ranks: RankPool, world: int, paged: bool) -> None:
    batch = requests(5)
    expected = expert_jobs.generate_alone(MIXED, batch)
    by_rank = ranks.run(expert_jobs.generate, MIXED, batch, paged, world=world)
    for found in by_rank:
        assert found.keys() == expected.keys()
        for ordinal, (tokens, logprobs, routes) in found.items():
            assert tokens == expected[ordinal][0]
            np.testing.assert_allclose(logprobs, expected[ordinal][1], rtol=0, atol=1e-4)
            np.testing.assert_array_equal(routes, expected[ordinal][2])
