"""Cut sampling through the engine: the sets of every token, whoever its neighbours are, across export and resume."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_kit import VOCAB, assert_same_bits, drain, new_engine, random_model, requests, run

from slipstream.core.packed import check_kept_sets
from slipstream.generator.requests import Finished, Request
from slipstream.models.attention import PackedAttention
from slipstream.models.transformer import Transformer

TOP_K = 5


def cut(batch: list[Request], **changes: object) -> list[Request]:
    return [replace(request, **{"top_k": TOP_K, "top_p": 0.9, "keep_sets": True} | changes) for request in batch]  # type: ignore[arg-type]


def sets_of(finished: Finished) -> list[list[int]]:
    assert finished.kept is not None
    return [row.tolist() for row in finished.kept.rows()]


def logits_under(model: Transformer, finished: Finished) -> np.ndarray:
    """float64 [T, V]: the logits every token was drawn from, by one causal forward over prompt and completion."""
    prompt = finished.request.prompt_tokens
    sequence = torch.from_numpy(np.concatenate([prompt, finished.tokens]).astype(np.int64))
    with torch.inference_mode():
        hidden = model(sequence, torch.arange(len(sequence)), PackedAttention([len(sequence)]))
        logits: np.ndarray = model.logits(hidden).double().numpy()
    return logits[len(prompt) - 1 : -1] / finished.request.temperature


def test_sets_and_logprobs_are_those_of_a_plain_forward() -> None:
    model = random_model()
    for finished in run(new_engine(model), cut(requests(3, 3, temperature=0.8))).values():
        assert finished.kept is not None
        check_kept_sets(finished.tokens, finished.kept.tokens, finished.kept.counts)
        for logits, kept, token, logprob in zip(
            logits_under(model, finished), sets_of(finished), finished.tokens, finished.logprobs, strict=True
        ):
            likeliest = np.argsort(-logits)[:TOP_K]
            weights = np.exp(logits[likeliest])
            before = np.cumsum(weights) - weights
            assert kept == sorted(likeliest[before < np.float32(0.9) * weights.sum()].tolist())
            assert logprob == pytest.approx(logits[token] - np.log(np.exp(logits[kept]).sum()), abs=1e-4)


def test_neighbours_that_are_not_cut_change_no_bit() -> None:
    model, batch = random_model(), requests(4, 2, max_new_tokens=12)
    mixed = [
        *cut(batch[:3]),
        *batch[3:5],
        replace(batch[5], temperature=0.0),
        *cut(batch[6:], top_k=0, keep_sets=False),
    ]
    together = run(new_engine(model), mixed)
    for request in mixed:
        (alone,) = run(new_engine(model), [request]).values()
        finished = together[request.ordinal, request.sample]
        assert_same_bits(finished, alone)
        assert (finished.kept is None) == (not request.keep_sets)
        if request.keep_sets:
            assert sets_of(finished) == sets_of(alone)


def test_sets_go_on_after_export_and_resume() -> None:
    model, batch = random_model(), cut(requests(3, 2, max_new_tokens=16))
    whole = run(new_engine(model, stop_token_ids=[]), batch)
    engine, other = (new_engine(model, stop_token_ids=[]) for _ in range(2))
    engine.submit(batch)
    for _ in range(7):
        engine.step()
    exported = engine.export_live()
    assert [len(request.resume.kept.counts) for request in exported if request.resume and request.resume.kept] == [
        7
    ] * 6
    other.submit(exported)
    moved = drain(other)
    assert moved.keys() == whole.keys()
    for key, finished in moved.items():
        assert np.array_equal(finished.tokens, whole[key].tokens)
        assert sets_of(finished) == sets_of(whole[key])


def test_a_request_without_a_cut_reports_no_sets() -> None:
    (finished,) = run(new_engine(random_model()), requests(1)).values()
    assert finished.kept is None
    assert finished.tokens.max() < VOCAB
