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
from slipstream.generator.native import NativeBackend
from slipstream.models.build import build_tokenizer

MODEL = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2}
CONFIG = resolve("quickstart", {"model": MODEL, "generator": {"max_new_tokens": 6}, "eval": {"num_slots": 8}})


def new_backend(*, is_paged: bool) -> NativeBackend:
    return NativeBackend(
        CONFIG,
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


def request(eval_id: int) -> Evaluate:
    prompts = tuple(
        Prompt(prompt_id=str(length), text="", tokens=np.arange(2, 2 + length, dtype=np.int32), task="")
        for length in (5, 6, 7)
    )
    return Evaluate(eval_id=eval_id, prompts=prompts, temperature=1.0)


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
