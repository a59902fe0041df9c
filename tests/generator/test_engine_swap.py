"""Versions: swaps between steps with and without recomputed keys, spans, prefixes, export and resume, drain."""

from __future__ import annotations

import numpy as np
import torch
from engine_kit import assert_same_bits, drain, new_engine, random_model, random_prompt, requests, run

from slipstream.core.types import VersionSpan
from slipstream.generator.engine import Engine
from slipstream.generator.requests import Request
from slipstream.models.attention import PackedAttention
from slipstream.models.served import ServedWeights
from slipstream.models.transformer import Transformer


def with_weights_of(model: Transformer, other: Transformer) -> None:
    model.load_state_dict(other.state_dict())


def steps(engine: Engine, count: int) -> None:
    for _ in range(count):
        assert engine.step() == []


def scores_under(model: Transformer, request: Request, tokens: np.ndarray) -> np.ndarray:
    """Logprob of each completion token by one causal forward over prompt + completion, float64 softmax."""
    sequence = torch.from_numpy(np.concatenate([request.prompt_tokens, tokens]).astype(np.int64))
    with torch.inference_mode():
        hidden = model(sequence, torch.arange(len(sequence)), PackedAttention([len(sequence)]))
        logprobs = torch.log_softmax(model.logits(hidden).double() / request.temperature, -1)
    num_prompt = len(request.prompt_tokens)
    return logprobs[num_prompt - 1 : -1].gather(1, sequence[num_prompt:, None])[:, 0].numpy()


def test_behaviour_logprobs_equal_a_teacher_forced_forward() -> None:
    model = random_model()
    for completion in run(new_engine(model), requests(4, 2, temperature=0.8)).values():
        assert np.abs(scores_under(model, completion.request, completion.tokens) - completion.logprobs).max() < 1e-4
        assert completion.version_spans == (VersionSpan(start=0, version=0),)


def test_swap_to_identical_weights_changes_no_bit() -> None:
    model, batch = random_model(), requests(3, 4)
    uninterrupted = run(new_engine(model, stop_token_ids=[]), batch)
    engine = new_engine(model, stop_token_ids=[])
    engine.submit(batch)
    steps(engine, 10)
    engine.set_version(1)
    swapped = drain(engine)
    for key, completion in uninterrupted.items():
        assert_same_bits(swapped[key], completion)
        assert swapped[key].version_spans == (VersionSpan(start=0, version=0), VersionSpan(start=10, version=1))


def test_a_version_that_is_staged_and_refused_changes_no_bit() -> None:
    """What weight sync does while it stages, and when the probe disagrees: the old weights are back before a step."""
    batch = requests(3, 3)
    undisturbed = run(new_engine(random_model(0)), batch)
    model = random_model(0)
    weights, newer = (ServedWeights(each, "float32") for each in (model, random_model(1)))
    old, new = weights.flat, newer.flat
    engine = new_engine(model)
    engine.submit(batch)
    finished = {}
    for step in range(12):
        if step % 4 == 0:
            weights.prepare(new)
        if step % 4 == 2:
            weights.rebind(new)
            weights.rebind(old)
        finished |= {(each.ordinal, each.sample): each for each in engine.step()}
    finished |= drain(engine)
    assert finished.keys() == undisturbed.keys()
    for key, completion in undisturbed.items():
        assert_same_bits(finished[key], completion)
        assert finished[key].version_spans == (VersionSpan(start=0, version=0),)


def test_recompute_equals_a_fresh_prefill_under_the_new_weights() -> None:
    model, newer, batch = random_model(0), random_model(1), requests(3, 3)
    twin, engine = (new_engine(model, stop_token_ids=[], prefill_tokens=24) for _ in range(2))
    for each in (twin, engine):
        each.submit(batch)
        steps(each, 10)
    before = {(r.ordinal, r.sample): r.resume for r in twin.export_live()}
    assert engine.num_live == len(before) == len(batch)
    with_weights_of(model, newer)
    engine.set_version(5, kv_on_update="recompute")
    finished = drain(engine)
    assert finished.keys() == before.keys()
    for key, completion in finished.items():
        old = before[key]
        assert old is not None
        num_old = len(old.tokens)
        assert np.array_equal(completion.tokens[:num_old], old.tokens)
        assert completion.logprobs[:num_old].tobytes() == old.logprobs.tobytes()
        expected = scores_under(newer, completion.request, completion.tokens)
        assert np.abs(expected[num_old:] - completion.logprobs[num_old:]).max() < 1e-4


def test_export_and_resume_continue_the_same_completion() -> None:
    model, batch = random_model(), requests(4, 3)
    uninterrupted = run(new_engine(model), batch)
    engine = new_engine(model)
    engine.submit(batch)
    finished = {}
    for _ in range(7):
        finished.update({(f.ordinal, f.sample): f for f in engine.step()})
    exported = engine.export_live()
    assert engine.is_idle
    assert all(request.resume is not None and len(request.resume.tokens) == 7 for request in exported)
    elsewhere = new_engine(model, num_slots=5, version=2)
    finished.update(run(elsewhere, exported))
    assert finished.keys() == uninterrupted.keys()
    for key, completion in uninterrupted.items():
        assert np.array_equal(finished[key].tokens, completion.tokens)
        assert np.abs(finished[key].logprobs - completion.logprobs).max() < 1e-5
        if len(completion.tokens) > 7:
            assert finished[key].version_spans == (VersionSpan(start=0, version=0), VersionSpan(start=7, version=2))


def test_late_siblings_share_the_prefix_until_the_version_changes() -> None:
    model, newer = random_model(0), random_model(1)
    batch = [Request(0, sample, random_prompt(20), max_new_tokens=6) for sample in range(6)]
    calls: list[int] = []
    original = Transformer.prefill

    class Counting(Transformer):
        def prefill(self, tokens, positions, attention):  # type: ignore[no-untyped-def]
            calls.append(len(tokens))
            original(self, tokens, positions, attention)

    model.__class__ = Counting
    engine = new_engine(model, num_slots=2, stop_token_ids=[])
    engine.submit(batch)
    first = [f for _ in range(12) for f in engine.step()]
    assert [(f.sample, f.version_spans[0].version) for f in first] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert calls == [24]  # 19 prompt tokens, padded: one prefill for four completions
    with_weights_of(model, newer)
    engine.set_version(1)
    late = drain(engine)
    assert calls == [24, 24]
    alone = run(new_engine(newer, stop_token_ids=[], version=1), batch[4:])
    for key, completion in alone.items():
        assert_same_bits(late[key], completion)
        assert late[key].version_spans == (VersionSpan(start=0, version=1),)


def test_paused_admission_drains() -> None:
    engine = new_engine(random_model(), num_slots=4, stop_token_ids=[])
    engine.submit(requests(6, max_new_tokens=5))
    steps(engine, 2)
    engine.pause_admission(True)
    finished = [f for _ in range(3) for f in engine.step()]
    assert len(finished) == 4
    assert (engine.num_live, engine.num_waiting, engine.is_idle) == (0, 2, False)
    assert engine._runner.num_rows - engine._rows.num_live == 4
    assert engine.step() == []
    engine.set_version(1)
    engine.pause_admission(False)
    assert all(f.version_spans == (VersionSpan(start=0, version=1),) for f in drain(engine).values())
