"""Prefill: in chunks, within a budget, once per prompt and version, without stalling anybody."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from engine_kit import VOCAB, assert_same_bits, drain, new_engine, random_model, random_prompt, run

from slipstream.generator.engine import Engine
from slipstream.generator.paged_runner import PagedRunner
from slipstream.generator.requests import Request
from slipstream.generator.runner import Chunk, Decoded
from slipstream.generator.slot_runner import SlotRunner


def long_prompts(num: int = 4) -> list[Request]:
    return [Request(i, 0, random_prompt(30 + 17 * i, seed=i), max_new_tokens=12) for i in range(num)]


def test_chunks_give_what_one_piece_gives() -> None:
    model = random_model()
    whole = run(new_engine(model), long_prompts())
    for prefill_chunk in (8, 24, 37):
        chunked = run(new_engine(model, prefill_chunk=prefill_chunk), long_prompts())
        for key, completion in whole.items():
            assert np.array_equal(chunked[key].tokens, completion.tokens)
            assert np.abs(chunked[key].logprobs - completion.logprobs).max() < 1e-5


def test_the_budget_and_the_company_change_no_bit_of_a_chunked_prefill() -> None:
    model = random_model()
    crowd = run(new_engine(model, prefill_chunk=16, prefill_tokens=512), long_prompts())
    for prefill_tokens in (1, 40, 100):
        other = run(new_engine(model, prefill_chunk=16, prefill_tokens=prefill_tokens), long_prompts())
        for key, completion in crowd.items():
            assert_same_bits(other[key], completion)
    for request in long_prompts():
        alone = run(new_engine(model, prefill_chunk=16), [request])
        assert_same_bits(alone[request.ordinal, 0], crowd[request.ordinal, 0])


def prefilled_in_a_step(engine: Engine) -> int:
    before = engine.stats.prefilled_tokens
    engine.step()
    return engine.stats.prefilled_tokens - before


def test_a_long_prompt_does_not_stall_decoding() -> None:
    engine = new_engine(random_model(), stop_token_ids=[], prefill_chunk=16, prefill_tokens=32)
    engine.submit([Request(0, 0, random_prompt(5), max_new_tokens=60)])
    engine.step()
    engine.submit([Request(1, 0, random_prompt(101, seed=1), max_new_tokens=5)])
    prefilled, generated = [], []
    while engine.num_waiting:
        before = engine.stats.generated_tokens
        prefilled.append(prefilled_in_a_step(engine))
        generated.append(engine.stats.generated_tokens - before)
    assert prefilled == [16, 16, 16, 16, 16, 16, 4, 0]
    assert generated == [1, 1, 1, 1, 1, 1, 1, 2]


@pytest.mark.parametrize("prefill_tokens", [32, 40])
def test_the_budget_is_shared_by_prompts_and_spent_once_a_step(prefill_tokens: int) -> None:
    engine = new_engine(random_model(), num_slots=8, stop_token_ids=[], prefill_chunk=16, prefill_tokens=prefill_tokens)
    engine.submit([Request(i, 0, random_prompt(17, seed=i), max_new_tokens=30) for i in range(5)])
    assert [(prefilled_in_a_step(engine), engine.num_live) for _ in range(4)] == [(32, 2), (32, 2), (16, 4), (0, 5)]


@pytest.mark.parametrize("is_paged", [False, True])
def test_prefill_joins_the_pass_that_decodes_where_the_runner_can(is_paged: bool) -> None:
    engine = new_engine(random_model(), num_slots=2, stop_token_ids=[])
    if is_paged:
        engine = Engine(PagedRunner(random_model(), num_rows=2, max_len=48), seed=7, stop_token_ids=[])
    alone, beside = [], []
    prefill, decode = engine._runner.prefill, engine._runner.decode

    def recorded_prefill(chunks: Sequence[Chunk]) -> None:
        alone.append([len(chunk.tokens) for chunk in chunks])
        prefill(chunks)

    def recorded_decode(num_rows: int, chunks: Sequence[Chunk] = ()) -> Decoded:
        beside.append([len(chunk.tokens) for chunk in chunks])
        return decode(num_rows, chunks)

    engine._runner.prefill = recorded_prefill  # type: ignore[method-assign]
    engine._runner.decode = recorded_decode  # type: ignore[method-assign]
    engine.submit([Request(i, 0, random_prompt(5 + i, seed=i), max_new_tokens=3 + i) for i in range(4)])
    drain(engine)
    # Either way no row is ever empty: the first has 3 and then 5 tokens, the second 4 and then 6.
    if is_paged:
        assert alone == [[4, 5], [6], [7]]
        assert beside == [[]] * 10
    else:
        assert alone == [[4, 5]]  # there was nothing to decode
        assert beside == [[], [6], [7], *[[]] * 7]


def test_rows_that_a_stop_token_frees_do_not_wait_for_their_prompts() -> None:
    """It takes hardly more steps than where a prompt is stored in the step that admits it."""
    steps = []
    for runner_type in (SlotRunner, PagedRunner):
        runner = runner_type(random_model(), num_rows=32, max_len=48)
        engine = Engine(runner, seed=7, stop_token_ids=list(range(0, VOCAB, 8)))
        engine.submit([Request(i, 0, random_prompt(9, seed=i), max_new_tokens=30) for i in range(160)])
        num_steps = 0
        while not engine.is_idle:
            engine.step()
            num_steps += 1
        steps.append(num_steps)
    assert steps[0] <= steps[1] + 2, steps


def test_an_eighth_of_the_rows_has_its_prompts_stored_ahead() -> None:
    """Who can tell which rows a stop token frees?"""
    engine = new_engine(random_model(), num_slots=16, stop_token_ids=[])
    engine.submit([Request(i, 0, random_prompt(5, seed=i), max_new_tokens=9) for i in range(30)])
    assert [prefilled_in_a_step(engine) for _ in range(3)] == [16 * 4, 2 * 4, 0]


def test_one_chunk_is_made_however_small_the_budget() -> None:
    engine = new_engine(random_model(), stop_token_ids=[], prefill_chunk=16, prefill_tokens=1)
    engine.submit([Request(0, 0, random_prompt(41), max_new_tokens=2)])
    assert [prefilled_in_a_step(engine) for _ in range(3)] == [16, 16, 8]
    assert engine.num_live == 1


def test_short_prompts_pass_a_long_one_which_gets_on_all_the_same() -> None:
    engine = new_engine(random_model(), num_slots=2, stop_token_ids=[], prefill_chunk=8, prefill_tokens=24)
    long = Request(0, 0, random_prompt(101), max_new_tokens=2)
    short = [Request(i, 0, random_prompt(6, seed=i), max_new_tokens=3) for i in range(1, 30)]
    engine.submit([short[0], long, *short[1:]])
    order: list[int] = []
    num_steps = 0
    while 0 not in order:
        order.extend(f.ordinal for f in engine.step())
        num_steps += 1
    assert order[0] == 1
    assert 2 in order[: order.index(0)]  # it would have idled behind the long one
    assert num_steps <= 16  # 100 tokens, at least 8 a step, and a few steps for a row to come free
    assert sorted([*order, *(ordinal for ordinal, _ in drain(engine))]) == list(range(30))


def test_a_prompt_that_is_passed_keeps_what_is_stored_of_it() -> None:
    engine = new_engine(random_model(), num_slots=2, stop_token_ids=[], prefill_chunk=8, prefill_tokens=64)
    engine.submit([Request(9, 0, random_prompt(4), max_new_tokens=20)])
    engine.step()
    engine.submit([Request(i, 0, random_prompt(n, seed=i), max_new_tokens=2) for i, n in enumerate((13, 4))])
    assert prefilled_in_a_step(engine) == 8 + 3
    assert (engine.num_live, engine.num_waiting) == (1, 2)
    assert prefilled_in_a_step(engine) == 4  # beside the second, which has taken the row
    assert (engine.num_live, engine.num_waiting) == (2, 1)
    assert [ordinal for ordinal, _ in drain(engine)] == [1, 0, 9]
    assert engine.stats.prefilled_tokens == 3 + 12 + 3


def test_a_prompt_that_comes_again_is_not_prefilled_again_until_the_version_changes() -> None:
    model = random_model()
    engine = new_engine(model, prefix_cache_tokens=64)
    request = [Request(0, sample, random_prompt(21), max_new_tokens=6) for sample in range(2)]
    first = run(engine, request[:1])
    assert (engine.stats.prefilled_tokens, engine.stats.prefix_hits) == (20, 0)
    again = run(engine, request)
    assert (engine.stats.prefilled_tokens, engine.stats.prefix_hits) == (20, 2)
    assert_same_bits(again[0, 0], first[0, 0])
    engine.set_version(1)
    run(engine, request)
    assert (engine.stats.prefilled_tokens, engine.stats.prefix_hits) == (40, 3)


def test_the_prefix_cache_is_bounded_and_forgets_what_was_used_longest_ago() -> None:
    engine = new_engine(random_model(), prefix_cache_tokens=45)
    requests = [Request(i, 0, random_prompt(21, seed=i), max_new_tokens=2) for i in range(3)]
    for index, prefilled in ((0, 20), (1, 40), (0, 40), (2, 60), (0, 60), (1, 80)):
        run(engine, [requests[index]])
        assert engine.stats.prefilled_tokens == prefilled, index
    uncached = new_engine(random_model(), prefix_cache_tokens=0)
    run(uncached, requests[:1])
    run(uncached, requests[:1])
    assert uncached.stats.prefilled_tokens == 40
