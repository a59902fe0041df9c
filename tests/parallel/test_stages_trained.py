"""Training in pipeline stages equals training on one rank: gradients, metrics, and the weights after many steps."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import training_jobs
from covering import with_slow
from rank_models import CONFIGS
from rank_pool import RankPool
from safetensors.numpy import load_file
from sharded_jobs import Layout, assembled
from test_training import relative, require_same_training
from training_data import TINY
from training_jobs import Seen, Span

TRAINER = {"optimizer": {"lr": 1e-3, "max_grad_norm": 0.7}, "microbatch_tokens": 48}
MODEL = TINY.model_dump() | {"max_positions": 64, "num_layers": 5}
UNTIED = MODEL | {"tie_embeddings": False}
ALONE = {"ranks": 1, "pipeline_parallel": 1, "pipeline_chunks": 1, "tensor_parallel": 1, "reduce_once": False}
TWO = Layout(1, 1, stages=2)
SOME = ("llama_biased", "mistral", "qwen3", "gpt_neox", "gpt2", "gpt2_untied")


def case(model: dict[str, Any], stages: int, chunks: int = 1, tensor: int = 1, ranks: int = 2, **more: Any) -> Any:
    shape = {"ranks": ranks, "pipeline_parallel": stages, "pipeline_chunks": chunks, "tensor_parallel": tensor}
    return {"model": model, "loss": {"name": "grpo"}, "trainer": {**TRAINER, **shape, **more}, "kl": {"coef": 0.1}}


STAGES = {
    "1f1b": (case(MODEL, 2), TWO),
    "tensor": (case(MODEL, 2, tensor=2, ranks=4), Layout(1, 2, stages=2)),
    "fsdp": (case(UNTIED, 2, ranks=4, reduce_once=True), Layout(2, 1, stages=2)),
    "interleaved": (case(MODEL, 2, 2), TWO),
    "interleaved_fsdp": (case(MODEL, 2, 2, ranks=4), Layout(2, 1, stages=2)),
}


def one_rank(sections: dict[str, Any], num_steps: int) -> Seen:
    return _one_rank(json.dumps(sections | {"trainer": sections["trainer"] | ALONE}), num_steps)


@functools.cache
def _one_rank(sections: str, num_steps: int) -> Seen:
    return training_jobs.train_alone(json.loads(sections), Span(num_steps))


@pytest.mark.parametrize(
    ("name", "num_steps"), with_slow([("fsdp", 3)], [(name, 20) for name in ("fsdp", "1f1b", "tensor", "interleaved")])
)
def test_steps_in_stages_are_those_of_one_rank(ranks: RankPool, name: str, num_steps: int) -> None:
    """A tied embedding, on two stages, stays equal to the bit (`assembled`). Microbatches are of unequal lengths."""
    sections, layout = STAGES[name]
    by_rank = ranks.run(training_jobs.train, sections, layout, Span(num_steps), world=layout.world)
    require_same_training(by_rank, one_rank(sections, num_steps))


@pytest.mark.parametrize(
    ("name", "microbatch_tokens"),
    with_slow([("1f1b", 2000), ("interleaved", 20)], [("fsdp", 2000), ("interleaved_fsdp", 24)]),
)
def test_few_and_odd_numbers_of_microbatches(ranks: RankPool, name: str, microbatch_tokens: int) -> None:
    """One microbatch for two stages, also where it is the last one; and numbers that the interleaved schedule does not
    take as they are."""
    sections, layout = STAGES[name]
    sections = sections | {"trainer": sections["trainer"] | {"microbatch_tokens": microbatch_tokens}}
    by_rank = ranks.run(training_jobs.train, sections, layout, Span(2), world=layout.world)
    one = one_rank(sections, 2)
    count = int(by_rank[0].metrics[0]["num_microbatches"])  # of all data-parallel ranks
    assert microbatch_tokens != 2000 or one.metrics[0]["num_microbatches"] == 1
    assert name != "interleaved" or count % (count // 2), "taken as they are"
    require_same_training(by_rank, one)


def test_a_run_goes_on_with_and_without_stages(ranks: RankPool, tmp_path: Path) -> None:
    """A step in stages, one on one rank, one in stages of two chunks over FSDP2: all three as on one rank."""
    sections = STAGES["1f1b"][0]
    alone = sections | {"trainer": sections["trainer"] | ALONE}
    ranks.run(training_jobs.train, sections, TWO, Span(1, save=tmp_path / "step_1"), world=2)
    training_jobs.train_alone(alone, Span(2, 1, tmp_path / "step_1", tmp_path / "step_2"))
    sections, layout = STAGES["interleaved_fsdp"]
    last = Span(3, 2, tmp_path / "step_2", export=tmp_path / "model")
    by_rank = ranks.run(training_jobs.train, sections, layout, last, world=4)
    assert relative([seen.weights for seen in by_rank], one_rank(sections, 3).weights) < 1e-5
    exported: dict[str, np.ndarray] = {}
    for file in (tmp_path / "model").glob("*.safetensors"):
        exported |= {f"policy/{name}": tensor for name, tensor in load_file(file).items()}
    trained = assembled([seen.weights for seen in by_rank])
    assert exported.keys() == trained.keys()
    assert all(np.array_equal(tensor, trained[name]) for name, tensor in exported.items())


def test_a_warm_start_in_stages_is_that_of_one_rank(ranks: RankPool) -> None:
    one = training_jobs.warm_up_alone()
    by_rank = ranks.run(training_jobs.warm_up, TWO, world=2)
    assert relative([seen.weights for seen in by_rank], one.weights) < 1e-5
    for seen in by_rank:
        for name in ("loss", "grad_norm", "tokens"):
            assert [m[name] for m in seen.metrics] == pytest.approx([m[name] for m in one.metrics], rel=1e-4)


@pytest.mark.parametrize(
    ("families", "layout"),
    with_slow(
        [(SOME, replace(TWO, chunks=2)), (("llama", "qwen2"), Layout(1, 2, stages=2))],
        [(tuple(CONFIGS), replace(TWO, chunks=2))],
    ),
    ids=["some_chunks", "tensor", "chunks"],
)
def test_families_read_in_stages_as_on_one_rank(ranks: RankPool, families: tuple[str, ...], layout: Layout) -> None:
    """Positions that are looked up, parallel residuals, biases; tied heads and others. All stages get all numbers."""
    configs = {name: replace(CONFIGS[name], num_layers=4) for name in families}
    expected = training_jobs.read_alone(configs)
    for found in ranks.run(training_jobs.read, configs, layout, world=layout.world):
        for name in configs:
            for mine, theirs in zip(found[name], expected[name], strict=True):
                assert mine.keys() == theirs.keys()
                for key, values in theirs.items():
                    np.testing.assert_allclose(mine[key], values, rtol=1e-4, atol=1e-5, err_msg=name)


def test_numbers_that_are_not_finite_refuse_a_step_on_all_stages(ranks: RankPool) -> None:
    by_rank = ranks.run(training_jobs.refused, STAGES["1f1b"][0], TWO, world=2)
    assert by_rank[0] == by_rank[1]
    loss, gradient = by_rank[0]
    assert "behaviour logprob of 1/2" in loss
    assert "layers.0.qkv.weight" in gradient
