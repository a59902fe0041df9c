"""Where weights lie in place, as on CUDA, all evaluations of a process are decoded by one engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from slipstream.core.clock import WallClock
from slipstream.core.recipes import resolve
from slipstream.core.service_messages import Evaluate
from slipstream.core.spans import NoSpans
from slipstream.core.types import Prompt
from slipstream.generator import native
from slipstream.generator.evaluations import EvalJobs
from slipstream.generator.native import NativeBackend, likely_evaluations
from slipstream.generator.paged_runner import StepShape
from slipstream.generator.sampler import SamplingPlan
from slipstream.generator.step_graphs import StepGraphs
from slipstream.models.build import build_tokenizer

MODEL = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2}
CONFIG = resolve("quickstart", {"model": MODEL, "generator": {"max_new_tokens": 6}, "eval": {"num_slots": 8}})


def new_backend(*, is_paged: bool, replica: int = 0) -> NativeBackend:
    return NativeBackend(
        CONFIG,
        replica=replica,
        tokenizer=build_tokenizer(CONFIG.model),
        seed=0,
        stop_token_ids=[],
        spans=NoSpans(),
        clock=WallClock(),
        is_paged=is_paged,
    )


def go_on(backend: NativeBackend, version: int) -> None:
    """Another version, of other weights."""
    weights = torch.randn(backend.weights.num_bytes // 4, generator=torch.Generator().manual_seed(version))
    backend.weights.rebind((0.2 * weights).view(torch.uint8))
    backend.engine.set_version(version)


def request(eval_id: int, temperature: float = 1.0, num_prompts: int = 3) -> Evaluate:
    prompts = tuple(
        Prompt(prompt_id=str(length), text="", tokens=np.arange(2, 2 + length, dtype=np.int32), task="")
        for length in range(5, 5 + num_prompts)
    )
    return Evaluate(eval_id=eval_id, prompts=prompts, temperature=temperature)


def answers(jobs: EvalJobs, eval_id: int) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    while jobs.eval_id == eval_id:
        for item in jobs.step() or ():
            found[item.request.ordinal] = item.tokens.tolist()
            jobs.take(item)
    return found


def test_one_engine_answers_every_evaluation_as_a_new_one_would(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    native_engine = native.native_engine
    monkeypatch.setattr(native, "native_engine", lambda *args, **rest: made.append(1) or native_engine(*args, **rest))
    backend = new_backend(is_paged=True)
    jobs = EvalJobs(backend, CONFIG.generator, NoSpans())
    found = []
    for version in range(3):
        go_on(backend, version)
        jobs.add(request(2 * version))
        jobs.add(request(2 * version + 1))
        go_on(backend, 10 + version)  # training goes on before the evaluations begin
        found += [answers(jobs, 2 * version + which) for which in (0, 1)]
    assert len(made) == 2, "training's, and one for evaluations"
    assert found[0] == found[1] != found[2] == found[3] != found[4] == found[5]

    for version in range(3):
        fresh = new_backend(is_paged=True)
        go_on(fresh, version)
        one = EvalJobs(fresh, CONFIG.generator, NoSpans())
        one.add(request(0))
        assert answers(one, 0) == found[2 * version]
    assert len(made) == 2 + 3 * 2


GREEDY, WHOLE = SamplingPlan(has_greedy=True, all_greedy=True, has_whole=False), SamplingPlan()


def test_likely_steps_of_evaluations_are_ready_before_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA: full rounds, greedy and sampled, ask for no step but those; answers are those of an engine made late.

    Training cuts what it samples from; evaluations never do.
    """
    asked: list[StepShape] = []
    run_step = StepGraphs.run
    monkeypatch.setattr(StepGraphs, "run", lambda self, key, step: (asked.append(key), run_step(self, key, step))[1])
    found = []
    for captures in (True, False):
        backend = new_backend(is_paged=True)
        backend._captures = captures
        jobs = EvalJobs(backend, CONFIG.generator.model_copy(update={"top_k": 3}), NoSpans())
        asked.clear()
        jobs.prepare()
        ready = list(asked)
        assert {shape.plan for shape in ready} == ({GREEDY, WHOLE} if captures else set())
        assert {shape.num_rows for shape in ready} == ({8, 4, 2, 1} if captures else set())
        asked.clear()
        for eval_id, temperature in enumerate((0.0, 1.0)):
            go_on(backend, 1 + eval_id)
            jobs.add(request(eval_id, temperature, num_prompts=8))
            found.append(answers(jobs, eval_id))
        assert {shape.plan for shape in asked} == {GREEDY, WHOLE}
        assert not captures or set(asked) <= set(ready)
    assert found[:2] == found[2:]
    assert found[0] != found[1]


def test_only_the_replica_that_is_asked_first_is_prepared() -> None:
    """Another one would hold weights and pages before anybody asks it."""
    for replica, is_prepared in ((0, True), (1, False)):
        backend = new_backend(is_paged=True, replica=replica)
        backend._captures = True
        EvalJobs(backend, CONFIG.generator, NoSpans()).prepare()
        assert (backend._evaluating is not None) is is_prepared
        assert not backend._pins


def test_likely_evaluations_are_of_each_temperature_once() -> None:
    sets = [{"name": "a", "temperature": 0.3}, {"name": "b", "temperature": 0.6}, {"name": "c", "temperature": 1.0}]
    warm = SamplingPlan(has_temperature=True)
    assert likely_evaluations(CONFIG.eval) == [GREEDY, WHOLE]
    assert likely_evaluations(type(CONFIG.eval).model_validate({"sets": sets})) == [warm, WHOLE]
