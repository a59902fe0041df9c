"""Any order of events, on both runners: every completion once, with its own text, and the engine empty at the end."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from covering import with_slow
from drawn import drawn
from engine_kit import STOP, AheadRunner, assert_same_bits, drain, random_model, requests, run
from hypothesis import strategies as st

from slipstream.generator.engine import Engine
from slipstream.generator.paged_runner import PagedRunner
from slipstream.generator.requests import Finished, Request
from slipstream.generator.runner import Runner
from slipstream.generator.slot_runner import SlotRunner

MODEL = random_model()
MAX_LEN = 48  # 3 pages
FEWEST_PAGES = 4
MOST_STEPS = 600  # 14 completions of 7 tokens: 98 steps one by one, as many again for chunks that were made in vain
Key = tuple[int, int]


def new_engine(runner: Runner, *, prefill_chunk: int = 512, prefill_tokens: int = 512, version: int = 0) -> Engine:
    return Engine(
        runner,
        seed=7,
        stop_token_ids=[STOP],
        prefill_chunk=prefill_chunk,
        prefill_tokens=prefill_tokens,
        prefix_cache_tokens=30,
        version=version,
    )


def slots(num_rows: int) -> SlotRunner:
    return SlotRunner(MODEL, num_rows=num_rows, max_len=MAX_LEN)


def sampled_in_several_ways() -> list[Request]:
    """Six prompts, the first of one token, two completions each; cut, greedy and plain; two begun elsewhere."""
    ways = [{"top_k": 5, "top_p": 0.9, "keep_sets": True}, {"temperature": 0.0}, {}, {"temperature": 0.7, "min_p": 0.1}]
    batch = requests(6, 2, max_new_tokens=7)
    batch = [replace(r, prompt_tokens=r.prompt_tokens[:1]) if r.ordinal == 0 else r for r in batch]
    batch = [replace(request, **ways[index % 4]) for index, request in enumerate(batch)]  # type: ignore[arg-type]
    elsewhere = new_engine(slots(2), version=-1)
    elsewhere.submit([replace(request, ordinal=request.ordinal + 10) for request in batch[4:6]])
    for _ in range(3):
        assert elsewhere.step() == []
    return batch + elsewhere.export_live()


BATCH = sampled_in_several_ways()


@functools.cache
def alone(prefill_chunk: int) -> dict[Key, Finished]:
    """What each request gives when it has an engine for itself."""
    found: dict[Key, Finished] = {}
    for request in BATCH:
        found |= run(new_engine(slots(1), prefill_chunk=prefill_chunk), [request])
    return found


ACTIONS = st.one_of(
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.just("submit"), st.integers(1, 5)),
    st.tuples(st.just("preempt"), st.integers(1, 4)),
    st.tuples(st.just("move"), st.integers(1, 9)),
    st.tuples(st.sampled_from(["keep", "recompute", "recompute_if_older_than"]), st.integers(0, 2)),
    st.tuples(st.just("pause"), st.integers(0, 1)),
)
PREFILLED_AGAIN = {"preempt", "move", "recompute", "recompute_if_older_than"}


@pytest.mark.parametrize("kind", with_slow(["slots", "ahead"], ["pages"]))
@drawn(
    3,
    100,
    actions=st.lists(ACTIONS, max_size=40),
    order=st.permutations(range(len(BATCH))),
    num_rows=st.integers(1, 9),
    num_pages=st.integers(FEWEST_PAGES, 16),
    prefill_tokens=st.sampled_from([1, 16, 64]),
    prefill_chunk=st.sampled_from([8, 512]),
)
def test_every_request_finishes_once_with_its_own_text(
    kind: str,
    actions: list[tuple[str, int]],
    order: list[int],
    num_rows: int,
    num_pages: int,
    prefill_tokens: int,
    prefill_chunk: int,
) -> None:
    is_paged = kind != "slots"

    def begin(num_rows: int, version: int = 0) -> Engine:
        made = AheadRunner if kind == "ahead" else PagedRunner
        paged = functools.partial(made, MODEL, max_len=MAX_LEN, num_pages=num_pages)
        runner = paged(num_rows=num_rows) if is_paged else slots(num_rows)
        return new_engine(runner, prefill_chunk=prefill_chunk, prefill_tokens=prefill_tokens, version=version)

    engine, engines = begin(num_rows), []
    waiting = [BATCH[index] for index in order]
    asked: dict[Key, Request] = {}  # as it was submitted last
    finished: list[Finished] = []
    sampled_by: Counter[int] = Counter({-1: sum(len(r.resume.tokens) for r in BATCH if r.resume is not None)})

    def step() -> None:
        before = engine.stats.generated_tokens
        finished.extend(engine.step())
        sampled_by[engine.version] += engine.stats.generated_tokens - before
        assert engine.num_live + engine.num_waiting == len(asked) - len(finished)

    def submit(count: int) -> None:
        engine.submit(waiting[:count])
        asked.update({key_of(request): request for request in waiting[:count]})
        del waiting[:count]

    for action, number in actions:
        match action:
            case "step":
                for _ in range(number):
                    step()
            case "submit":
                submit(number)
            case "preempt":
                num_live = engine.num_live
                engine.preempt(number)
                assert engine.num_live == num_live
            case "move":  # what has begun goes on in an engine of another size, what has not is asked for there
                live = engine.export_live()
                assert engine.num_live == 0
                assert engine.num_waiting == len(asked) - len(finished) - len(live)
                asked |= {key_of(request): request for request in live}
                gone = {key_of(one) for one in [*live, *finished]}
                engines.append(engine)
                engine = begin(number, engine.version)
                engine.submit([request for key, request in asked.items() if key not in gone])
                engine.submit(live)
            case "pause":
                engine.pause_admission(bool(number))
            case _:
                engine.set_version(engine.version + 1, kv_on_update=action, max_kv_age=number)  # type: ignore[arg-type]
    engine.pause_admission(False)
    submit(len(waiting))
    for _ in range(MOST_STEPS):
        if engine.is_idle:
            break
        step()
    assert (engine.is_idle, engine.num_live, engine.num_waiting) == (True, 0, 0)

    expected = alone(prefill_chunk)
    assert Counter(map(key_of, finished)) == Counter(expected.keys())
    for found in finished:
        assert_same_text(found, expected[key_of(found)])
        if not is_paged and not PREFILLED_AGAIN & {action for action, _ in actions}:
            assert_same_bits(found, expected[key_of(found)])
        lengths = span_lengths(found)
        assert all(length > 0 for _, length in lengths)
        assert all(left[0] != right[0] for left, right in itertools.pairwise(lengths))
        sampled_by.subtract(dict_of_sums(lengths))
    assert not any(sampled_by.values()), f"tokens are labelled with other versions than sampled them: {sampled_by}"
    if is_paged:
        for each in [*engines, engine]:
            drain(each) if each is engine else each.export_live()
            each.set_version(each.version + 1)  # forgets the prefixes
            assert isinstance(each._runner, PagedRunner)
            assert each._runner.num_free_pages == num_pages
            each._runner._pages.check()


def key_of(one: Request | Finished) -> Key:
    return one.ordinal, one.sample


def assert_same_text(found: Finished, expected: Finished) -> None:
    """Tokens and sets exactly, logprobs up to rounding."""
    assert np.array_equal(found.tokens, expected.tokens)
    assert np.abs(found.logprobs - expected.logprobs).max() < 1e-5
    assert found.finish_reason == expected.finish_reason
    assert (found.kept is None) == (expected.kept is None) == (not found.request.keep_sets)
    if found.kept is not None and expected.kept is not None:
        assert np.array_equal(found.kept.tokens, expected.kept.tokens)
        assert np.array_equal(found.kept.counts, expected.kept.counts)


def span_lengths(finished: Finished) -> list[tuple[int, int]]:
    """(version, tokens) of every span."""
    spans = finished.version_spans
    assert spans[0].start == 0
    stops = [*(span.start for span in spans[1:]), len(finished.tokens)]
    return [(span.version, stop - span.start) for span, stop in zip(spans, stops, strict=True)]


def dict_of_sums(pairs: list[tuple[int, int]]) -> Counter[int]:
    sums: Counter[int] = Counter()
    for key, number in pairs:
        sums[key] += number
    return sums
