"""Input errors, finish reasons and the scripted generator's equal interface."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engine_kit import STOP, drain, new_engine, random_model, random_prompt, requests, run
from scripted_generator import ScriptedGenerator

from slipstream.core.clock import VirtualClock
from slipstream.core.errors import ConfigError, NonFiniteError
from slipstream.core.types import VersionSpan
from slipstream.generator.requests import KeptSets, Request, Resume, check_request


@pytest.mark.parametrize(
    "request_",
    [
        Request(0, 0, random_prompt(100), max_new_tokens=29),
        Request(0, 0, random_prompt(0), max_new_tokens=4),
        Request(0, 0, random_prompt(4), max_new_tokens=0),
        Request(0, 0, random_prompt(4), max_new_tokens=4, temperature=-1.0),
        Request(0, 0, random_prompt(4), max_new_tokens=4, temperature=1e-38),
    ],
)
def test_impossible_requests_are_refused_before_anything_is_queued(request_: Request) -> None:
    engine = new_engine(random_model())
    with pytest.raises(ConfigError):
        engine.submit([Request(1, 0, random_prompt(4), max_new_tokens=4), request_])
    assert engine.is_idle


def resume(**changes: Any) -> Resume:
    """Of three tokens, the last one by version 1; whole but for `changes`."""
    fitting: dict[str, Any] = {
        "tokens": np.array([3, 4, 5], np.int32),
        "logprobs": np.zeros(3, np.float32),
        "version_spans": (VersionSpan(0, 0), VersionSpan(2, 1)),
        "started_s": 0.0,
    }
    return Resume(**fitting | changes)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"tokens": np.full(4, 3, np.int32), "logprobs": np.zeros(4, np.float32)}, "already complete"),
        ({"logprobs": np.zeros(2, np.float32)}, "does not fit together"),
        ({"version_spans": ()}, "does not fit together"),
        ({"version_spans": (VersionSpan(1, 0),)}, "does not fit together"),
        ({"version_spans": (VersionSpan(0, 0), VersionSpan(3, 1))}, "does not fit together"),
        ({"version_spans": (VersionSpan(0, 0), VersionSpan(0, 1))}, "does not fit together"),
        ({"kept": KeptSets(np.zeros(3, np.int32), np.ones(3, np.int32))}, "does not fit together"),
    ],
)
def test_a_resume_that_does_not_fit_is_refused(changes: dict[str, Any], match: str) -> None:
    (request,) = requests(1, max_new_tokens=4)
    check_request(request.resumed_with(resume()), max_len=64)
    with pytest.raises(ConfigError, match=match):
        check_request(request.resumed_with(resume(**changes)), max_len=64)


def test_kept_sets_are_resumed_with_the_tokens_they_belong_to() -> None:
    (request,) = requests(1, max_new_tokens=8)
    kept = KeptSets(np.array([3, 4, 5], np.int32), np.ones(3, np.int32))
    cut = replace(request, top_k=2, keep_sets=True)
    check_request(cut.resumed_with(resume(kept=kept)), max_len=64)
    with pytest.raises(ConfigError, match="0 kept sets"):
        check_request(cut.resumed_with(resume()), max_len=64)


def test_max_len_beyond_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_len"):
        new_engine(random_model(), max_len=161)


def test_stop_tokens_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(ConfigError, match="outside the vocabulary"):
        new_engine(random_model(), stop_token_ids=[10**6])


def test_a_slot_filled_to_the_last_position_and_a_one_token_prompt() -> None:
    engine = new_engine(random_model(), max_len=160, stop_token_ids=[])
    finished = run(
        engine,
        [Request(0, 0, random_prompt(155), max_new_tokens=5), Request(1, 0, random_prompt(1), max_new_tokens=159)],
    )
    assert [len(finished[key].tokens) for key in ((0, 0), (1, 0))] == [5, 159]
    assert all(f.finish_reason == "length" for f in finished.values())


def test_the_stop_token_is_kept_with_its_logprob() -> None:
    finished = run(new_engine(random_model()), requests(8, 3)).values()
    stopped = [f for f in finished if f.finish_reason == "stop"]
    assert stopped
    for completion in finished:
        assert (completion.tokens[-1] == STOP) == (completion.finish_reason == "stop")
        assert STOP not in completion.tokens[:-1]
        assert len(completion.logprobs) == len(completion.tokens)
        assert completion.tokens.dtype == np.int32
        assert completion.logprobs.dtype == np.float32


def test_broken_weights_are_reported() -> None:
    model = random_model()
    with torch.no_grad():
        model.final_norm.weight.fill_(torch.nan)
    engine = new_engine(model)
    engine.submit(requests(1))
    with pytest.raises(NonFiniteError):
        engine.step()


def test_streams_draw_different_noise() -> None:
    model = random_model()
    train, evaluation = (Request(0, 0, random_prompt(5), max_new_tokens=30, stream=stream) for stream in (0, 1))
    tokens = [run(new_engine(model, stop_token_ids=[]), [r])[0, 0].tokens.tolist() for r in (train, evaluation)]
    assert tokens[0] != tokens[1]


def test_scripted_generator_plays_lengths_versions_and_resumes() -> None:
    clock = VirtualClock()
    fake = ScriptedGenerator(lambda r: list(range(10, 10 + 2 + r.sample)), num_slots=2, clock=clock)
    fake.submit([Request(0, sample, random_prompt(3), max_new_tokens=4) for sample in range(4)])
    assert fake.step() == []
    clock.advance(1.0)
    fake.set_version(3)
    [first] = fake.step()
    assert (first.tokens.tolist(), first.finish_reason, first.started_s, first.finished_s) == (
        [10, 11],
        "stop",
        0.0,
        1.0,
    )
    assert first.version_spans == (VersionSpan(start=0, version=0), VersionSpan(start=1, version=3))
    exported = fake.export_live()
    assert [request.sample for request in exported] == [1]
    fake.submit(exported)
    rest = {f.sample: f for f in drain(fake).values()}  # type: ignore[arg-type]
    assert {s: (len(f.tokens), f.finish_reason) for s, f in rest.items()} == {
        1: (3, "stop"),
        2: (4, "stop"),
        3: (4, "length"),
    }
    assert fake.is_idle
