"""Routing replay in the engine: the experts recorded for each token are those of one pass over the whole text."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_kit import drain, new_engine, random_mixture, random_model, requests, run

from slipstream.generator.engine import Engine
from slipstream.generator.requests import Finished
from slipstream.models.attention import PackedAttention
from slipstream.models.transformer import Transformer

UNKNOWN = 255


def chosen_in_one_pass(model: Transformer, tokens: np.ndarray) -> np.ndarray:
    """The three likeliest experts by every router's own output, [N, L, 3]: no cache, no chunks, nobody else."""
    found: list[torch.Tensor] = []
    hooks = [
        layer.experts.router.register_forward_hook(lambda *seen: found.append(seen[2].argsort(-1, descending=True)))
        for layer in model.layers
    ]
    with torch.no_grad():
        model(torch.from_numpy(tokens).long(), torch.arange(len(tokens)), PackedAttention([len(tokens)]))
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1)[..., :3].numpy()


def check(model: Transformer, finished: Finished) -> None:
    prompt, routes = finished.request.prompt_tokens, finished.routes
    assert routes is not None
    assert routes.dtype == np.uint8
    expected = chosen_in_one_pass(model, np.concatenate([prompt, finished.tokens])[:-1])
    assert routes.shape == expected.shape
    # Of the prompt nothing needs the last layer's experts: they are not computed, and nothing in training does either.
    assert (routes[: len(prompt) - 1, -1] == UNKNOWN).all()
    routes[: len(prompt) - 1, -1] = expected[: len(prompt) - 1, -1]
    np.testing.assert_array_equal(routes, expected)


def engine_of(model: Transformer, *, is_paged: bool, **options: object) -> Engine:
    return new_engine(model, records_routes=True, is_paged=is_paged, **options)


@pytest.mark.parametrize("is_paged", [False, True])
def test_recorded_experts_are_those_of_one_pass(is_paged: bool) -> None:
    """Groups share prefilled prompts, long ones in chunks; slots and pages are used again."""
    model = random_mixture()
    engine = engine_of(model, is_paged=is_paged, num_slots=7, prefill_tokens=16, prefill_chunk=8)
    for finished in run(engine, requests(6, 2, max_new_tokens=5)).values():
        check(model, finished)


@pytest.mark.parametrize("is_paged", [False, True])
def test_completions_that_leave_their_rows_record_again(is_paged: bool) -> None:
    model = random_mixture()
    engine = engine_of(model, is_paged=is_paged)
    engine.submit(requests(4, 2, max_new_tokens=13))
    early = {}
    for count in (3, 2):
        for _ in range(5):
            early.update({(one.ordinal, one.sample): one for one in engine.step()})
        engine.preempt(count)
    exported = engine.export_live()
    other = engine_of(model, is_paged=is_paged, num_slots=3)
    other.submit(exported)
    finished = early | drain(other)
    assert len(finished) == 8
    for one in finished.values():
        check(model, one)


def test_nothing_is_recorded_unasked() -> None:
    for model in (random_mixture(), random_model()):
        for finished in run(new_engine(model), requests(2, max_new_tokens=8)).values():
            assert finished.routes is None


def test_recording_changes_no_token() -> None:
    model, batch = random_mixture(), requests(3, 2, max_new_tokens=16)
    plain, recorded = run(new_engine(model), batch), run(engine_of(model, is_paged=False), batch)
    for key, finished in plain.items():
        assert np.array_equal(finished.tokens, recorded[key].tokens)
        assert np.array_equal(finished.logprobs, recorded[key].logprobs)
