"""Training in pipeline stages equals training on one rank: gradients, metrics, and the weights after many steps."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import training_jobs
from rank_pool import RankPool
from sharded_jobs import Layout
from test_training import PACKING, relative
from training_data import TINY
from training_jobs import Seen, Span

TRAINER = {"optimizer": {"lr": 1e-3, "max_grad_norm": 0.7}, "microbatch_tokens": 48}
MODEL = TINY.model_dump() | {"max_positions": 64, "num_layers": 5}
UNTIED = MODEL | {"tie_embeddings": False}


def case(model: dict[str, Any], stages: int, chunks: int = 1, tensor: int = 1, ranks: int = 2, **more: Any) -> Any:
    shape = {"ranks": ranks, "pipeline_parallel": stages, "pipeline_chunks": chunks, "tensor_parallel": tensor}
    return {"model": model, "loss": {"name": "grpo"}, "trainer": {**TRAINER, **more, **shape}, "kl": {"coef": 0.1}}


STAGES = {
    "1f1b": (case(MODEL, 2), Layout(1, 1, stages=2)),
    "tensor": (case(MODEL, 2, tensor=2, ranks=4), Layout(1, 2, stages=2)),
    "fsdp": (case(UNTIED, 2, ranks=4, reduce_once=True), Layout(2, 1, stages=2, reduce_once=True)),
    "interleaved": (case(MODEL, 2, 2), Layout(1, 1, stages=2)),
}


@functools.cache
def one_rank(name: str, num_steps: int) -> Seen:
    sections = STAGES[name][0]
    alone = {"ranks": 1, "pipeline_parallel": 1, "pipeline_chunks": 1, "tensor_parallel": 1}
    return training_jobs.train_alone(sections | {"trainer": sections["trainer"] | alone}, Span(num_steps))


@pytest.mark.parametrize("name", STAGES)
def test_twenty_steps_in_stages_are_those_of_one_rank(ranks: RankPool, name: str) -> None:
    sections, layout = STAGES[name]
    one = one_rank(name, 20)
    by_rank = ranks.run(training_jobs.train, sections, layout, Span(20), world=layout.world)
    assert relative([seen.first_gradient for seen in by_rank], one.first_gradient) < 1e-5
    assert relative([seen.weights for seen in by_rank], one.weights) < 1e-5
    for seen in by_rank:
        for mine, expected in zip(seen.metrics, one.metrics, strict=True):
            assert mine.keys() == expected.keys()
            for key in expected.keys() - PACKING:
                assert mine[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-4), key
