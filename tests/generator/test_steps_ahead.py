"""Steps launched before the ones before them are read, against the engine that reads each before it launches the next.

Outputs lie where the next step writes (`engine_kit.AheadRunner`), as those of captured steps do.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from drawn import drawn
from engine_kit import STOP, AheadRunner, fill, random_model, requests
from hypothesis import strategies as st

from slipstream.generator.engine import Engine
from slipstream.generator.paged_runner import PagedRunner
from slipstream.generator.requests import Finished, Request
from slipstream.models.transformer import Transformer

MAX_LEN = 48
WAYS = st.sampled_from([{}, {"temperature": 0.0}, {"top_k": 4, "keep_sets": True}, {"temperature": 0.7}])
REQUESTS = st.lists(st.tuples(st.integers(1, 18), WAYS), min_size=1, max_size=9)
SWAPS = st.lists(st.integers(1, 12), max_size=4)


def requests_of(drawn_ones: Sequence[tuple[int, dict[str, Any]]]) -> list[Request]:
    return [
        replace(request, max_new_tokens=length, **way)
        for request, (length, way) in zip(requests(len(drawn_ones)), drawn_ones, strict=True)
    ]


def engine_of(made: type[PagedRunner], model: Transformer, num_rows: int, *, num_pages: int | None = None) -> Engine:
    runner = made(model, num_rows=num_rows, max_len=MAX_LEN, num_pages=num_pages)
    return Engine(runner, seed=7, stop_token_ids=[STOP, 5, 9], prefill_tokens=512)


def swap(engine: Engine, model: Transformer, version: int, **how: Any) -> None:
    """Other weights in the same tensors."""
    with torch.inference_mode():
        fill(model, version)
    engine.set_version(version, **how)


def assert_equal(found: Finished, expected: Finished) -> None:
    """Logprobs up to rounding, as the number of rows of a step may differ."""
    assert found.tokens.tolist() == expected.tokens.tolist()
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5, rtol=0)
    assert found.finish_reason == expected.finish_reason
    assert found.version_spans == expected.version_spans
    assert (found.kept is None) == (expected.kept is None)
    if found.kept is not None and expected.kept is not None:
        assert found.kept.tokens.tolist() == expected.kept.tokens.tolist()


@drawn(4, 300, drawn_ones=REQUESTS, swaps=SWAPS)
def test_without_admissions_step_by_step_the_same(
    drawn_ones: Sequence[tuple[int, dict[str, Any]]], swaps: list[int]
) -> None:
    """Weights change between the same two tokens, and old keys stay; a swap may lie where a row has just ended."""
    batch, models = requests_of(drawn_ones), [random_model(), random_model()]
    pair = [engine_of(made, model, len(batch)) for made, model in zip((AheadRunner, PagedRunner), models, strict=True)]
    for engine in pair:
        engine.submit(batch)
    places, version = set(itertools.accumulate(swaps)), 0
    for number in range(1, 60):
        ahead, plain = (sorted(engine.step(), key=lambda one: one.ordinal) for engine in pair)
        assert [one.ordinal for one in ahead] == [one.ordinal for one in plain]
        for found, expected in zip(ahead, plain, strict=True):
            assert_equal(found, expected)
        if number in places:
            version += 1
            for engine, model in zip(pair, models, strict=True):
                swap(engine, model, version)
    assert pair[0].is_idle
    assert pair[1].is_idle


def replayed(request: Request, spans: Sequence[Any]) -> Finished:
    """The completion of `request` alone, without looking ahead, with the versions of `spans`."""
    model = random_model()
    engine = engine_of(PagedRunner, model, 1)
    swap(engine, model, spans[0].version)
    engine.submit([request])
    finished: list[Finished] = []
    for place in [*(span.start for span in spans[1:]), MAX_LEN]:
        while not finished and (not engine.num_live or engine._rows.num_new[0] < place):
            finished += engine.step()
        if finished:
            return finished[0]
        swap(engine, model, next(span.version for span in spans if span.start == place), kv_on_update="recompute")
    raise AssertionError("the completion does not end")


@drawn(
    4,
    200,
    drawn_ones=REQUESTS,
    swaps=SWAPS,
    num_rows=st.integers(1, 5),
    num_pages=st.integers(4, 12),
    in_parts=st.integers(1, 9),
)
def test_whatever_comes_and_goes_each_completion_is_that_of_its_versions(
    drawn_ones: Sequence[tuple[int, dict[str, Any]]], swaps: list[int], num_rows: int, num_pages: int, in_parts: int
) -> None:
    """Rows are admitted while a step runs, preempted for memory, and their keys made anew under each version."""
    model = random_model()
    batch, engine = requests_of(drawn_ones), engine_of(AheadRunner, model, num_rows, num_pages=num_pages)
    assert isinstance(engine._runner, PagedRunner)
    swap(engine, model, 0)
    places, version, finished = set(itertools.accumulate(swaps)), 0, list[Finished]()
    for number in range(400):
        if len(finished) == len(batch):
            break
        if number % 3 == 0:
            engine.submit(batch[number // 3 * in_parts : (number // 3 + 1) * in_parts])
        finished += engine.step()
        if number in places:
            version += 1
            swap(engine, model, version, kv_on_update="recompute")
        stored = {row: len(engine._rows.known_tokens(row)) - 1 for row in engine._rows.live_rows}
        assert stored == {row: engine._runner._pages.lengths[row] for row in stored}
    assert sorted(one.ordinal for one in finished) == list(range(len(batch)))
    for found in finished:
        assert_equal(found, replayed(batch[found.ordinal], found.version_spans))
    engine._runner._pages.check()


def test_a_row_that_begins_while_a_step_runs_has_its_first_token_one_step_later() -> None:
    """Two of four are in rows from the first step on; the others follow as these end."""
    batch = [replace(one, max_new_tokens=length) for one, length in zip(requests(4), (6, 4, 6, 4), strict=True)]
    steps: dict[type, list[int]] = {}
    for made in (PagedRunner, AheadRunner):
        engine = Engine(made(random_model(), num_rows=2, max_len=MAX_LEN), seed=7, stop_token_ids=[])
        engine.submit(batch)
        steps[made] = [number for number in range(1, 20) for _ in engine.step()]
    assert steps == {PagedRunner: [4, 6, 10, 10], AheadRunner: [4, 6, 11, 11]}
