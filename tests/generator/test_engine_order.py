"""Who goes first: after preemption, while admission is paused, and when the memory of a paged runner is short."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engine_kit import VOCAB, assert_same_bits, drain, new_engine, random_model, random_prompt, run

from slipstream.core.errors import ConfigError
from slipstream.core.types import VersionSpan
from slipstream.generator.engine import Engine
from slipstream.generator.paged_runner import PagedRunner
from slipstream.generator.requests import Finished, Request, Session
from slipstream.generator.runner import Chunk, Decoded

PAGE = 16


def request(ordinal: int, num_prompt: int, max_new_tokens: int) -> Request:
    return Request(ordinal, 0, random_prompt(num_prompt, seed=ordinal), max_new_tokens)


def paged(num_rows: int, num_pages: int, max_len: int = 3 * PAGE, **options: int) -> tuple[Engine, PagedRunner]:
    runner = PagedRunner(random_model(), num_rows=num_rows, max_len=max_len, num_pages=num_pages)
    return Engine(runner, seed=7, stop_token_ids=[], **options), runner


def ordinals(finished: list[Finished]) -> list[int]:
    return [each.ordinal for each in finished]


def test_rows_are_given_back_oldest_first_whatever_row_they_had() -> None:
    """Request 3 sits in the first row, which came free; 1 takes that when it comes back, and 3 keeps what it said."""
    model = random_model()
    batch = [request(0, 5, 1), request(1, 5, 3), request(2, 5, 3), request(3, 5, 2)]
    engine = new_engine(model, num_slots=3, stop_token_ids=[])
    engine.submit(batch)
    assert ordinals(engine.step()) == [0]
    assert engine.step() == []  # 3 has taken the row of 0; all lack one token now
    engine.preempt(3)
    engine._prefill_tokens = 1  # one comes back per step
    finished = [engine.step() for _ in range(3)]
    assert [ordinals(each) for each in finished] == [[1], [2], [3]]
    undisturbed = run(new_engine(model, stop_token_ids=[]), batch)
    for [each] in finished:
        assert np.array_equal(each.tokens, undisturbed[each.ordinal, 0].tokens)


def test_the_youngest_leave_first() -> None:
    engine = new_engine(random_model(), num_slots=2, stop_token_ids=[], prefill_chunk=8, prefill_tokens=1)
    engine.submit([request(0, 5, 30), request(1, 40, 30)])
    while engine.num_waiting:
        engine.step()
    engine.preempt(1)
    for _ in range(3):  # of six that its prefill takes
        assert engine.step() == []
    old, young = (each.resume for each in engine.export_live())
    assert old is not None
    assert young is not None
    assert len(young.tokens) == 1
    assert len(old.tokens) > 3 + len(young.tokens)


def test_what_was_begun_elsewhere_goes_before_what_has_not_started() -> None:
    elsewhere = new_engine(random_model(), stop_token_ids=[])
    elsewhere.submit([request(7, 5, 3), request(8, 5, 3)])
    elsewhere.step()
    engine = new_engine(random_model(), num_slots=1, stop_token_ids=[])
    engine.submit([request(0, 5, 2)])
    engine.submit([request(1, 5, 2), *elsewhere.export_live()])
    assert list(drain(engine)) == [(7, 0), (8, 0), (0, 0), (1, 0)]


def test_what_was_preempted_drains_before_what_was_begun_elsewhere() -> None:
    """A paused engine takes both: a swap that waits for what has begun would wait for ever else. New ones wait."""
    elsewhere = new_engine(random_model(), stop_token_ids=[])
    elsewhere.submit([request(7, 5, 9)])
    elsewhere.step()
    engine = new_engine(random_model(), num_slots=2, stop_token_ids=[])
    engine.submit([request(0, 5, 3), request(1, 5, 3)])
    engine.step()
    engine.pause_admission(True)
    engine.preempt(1)
    engine.submit([request(2, 5, 3), *elsewhere.export_live()])
    assert (engine.num_live, engine.num_waiting, engine.num_begun) == (2, 2, 3)
    assert ordinals([*engine.step(), *engine.step(), *engine.step()]) == [0, 1]
    assert (engine.num_waiting, engine.num_begun) == (1, 1)
    assert ordinals([one for _ in range(9) for one in engine.step()]) == [7]
    assert (engine.num_waiting, engine.num_begun, engine.has_work) == (1, 0, False)
    engine.pause_admission(False)
    assert [ordinal for ordinal, _ in drain(engine)] == [2]


def test_what_is_exported_leaves_nothing_behind() -> None:
    engine, runner = paged(4, 20, prefill_chunk=8, prefill_tokens=1)
    engine.submit([request(0, 30, 9)])
    while engine.num_waiting:
        engine.step()
    engine.set_version(3)
    engine.preempt(1)
    assert engine.step() == []  # a part of it has been prefilled again
    assert runner.num_free_pages < 20
    [exported] = engine.export_live()
    assert (engine.num_live, engine.num_waiting, runner.num_free_pages) == (0, 0, 20)
    assert exported.resume is not None
    assert exported.resume.version_spans == (VersionSpan(start=0, version=0),)


def test_an_export_right_after_a_swap_names_no_version_that_sampled_nothing() -> None:
    engine = new_engine(random_model(), stop_token_ids=[])
    engine.submit([request(0, 5, 9)])
    engine.step()
    engine.set_version(1)
    [exported] = engine.export_live()
    assert exported.resume is not None
    assert exported.resume.version_spans == (VersionSpan(start=0, version=0),)


def test_nobody_overtakes_one_that_finds_no_memory() -> None:
    """The long one needs all but two of the pages; the short ones behind it would always find one."""
    engine, _ = paged(4, 5)
    engine.submit([request(0, 2, 6), request(1, 2, 8), request(2, 40, 2), *(request(i, 2, 8) for i in range(3, 30))])
    order: list[int] = []
    while 2 not in order:
        order += ordinals(engine.step())
    assert order == [0, 1, 2]
    assert sorted([*order, *(ordinal for ordinal, _ in drain(engine))]) == list(range(30))


def test_nobody_takes_memory_ahead_of_one_that_lacks_it() -> None:
    engine, runner = paged(3, 4)
    engine.submit([request(0, 10, 30)])
    for _ in range(PAGE):
        engine.step()
    assert runner.num_free_pages == 2
    engine.submit([request(1, 41, 2), request(2, 10, 2)])
    engine.step()
    assert (runner.num_free_pages, engine.stats.prefilled_tokens) == (2, 9)
    assert ordinals([*engine.step(), *engine.step()]) == []
    assert [ordinal for ordinal, _ in drain(engine)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("method", "answer"), [("open_prefix", None), ("open_rows", False), ("rows_without_room", [0])]
)
def test_a_runner_that_never_has_room_is_an_error_and_no_endless_loop(method: str, answer: object) -> None:
    engine, runner = paged(2, 8)
    setattr(runner, method, lambda *_: answer)
    engine.submit([request(0, 10, 3)])
    with pytest.raises(ConfigError, match="no sequence fits into the memory"):
        engine.step()


def test_prompts_that_wait_take_no_memory_before_their_turn() -> None:
    """Nobody is preempted for the sake of prompts that the budget of the steps does not reach yet."""
    engine, runner = paged(8, 18, prefill_tokens=16, prefill_chunk=16)
    engine.submit([request(0, 2, 40), *(request(i, 33, 2) for i in range(1, 8))])
    engine.step()
    engine.step()
    assert runner.num_free_pages >= 18 - 1 - 2 * 2  # one is being prefilled and the next one at most is open
    assert len(drain(engine)) == 8
    assert engine.stats.preemptions == 0


def test_a_shortage_lasts_until_a_row_is_given_back() -> None:
    """Three rows of three pages at their ends do not fit into five; whoever has to leave comes back once, not again."""
    batch = [request(i, 10, 30) for i in range(3)]
    expected, _ = paged(3, 12)
    expected.submit(batch)
    texts = drain(expected)
    for is_disturbed in (False, True):
        engine, runner = paged(3, 5)
        engine.submit(batch)
        while not engine.stats.preemptions:
            engine.step()
        assert (engine.num_live, engine._runner.num_rows - engine._rows.num_live) == (3, 1)
        if is_disturbed:  # by somebody else than the shortage
            engine.preempt(1)
            assert (engine._runner.num_rows - engine._rows.num_live, runner.num_free_pages) == (2, 3)
            engine.step()
            assert engine._runner.num_rows - engine._rows.num_live == 1
        found = drain(engine)
        assert engine.stats.preemptions <= 3
        assert engine.stats.prefilled_tokens <= 3 * 9 + (3 + is_disturbed) * 38
        assert all(np.array_equal(found[key].tokens, each.tokens) for key, each in texts.items())


def test_rows_close_up_when_nobody_waits() -> None:
    """A step is as wide as there are rows to decode, once no others can come; while some wait, holes are for them."""
    engine = new_engine(random_model(), num_slots=16, stop_token_ids=[])
    widths = []
    decode = engine._runner.decode

    def recorded(num_rows: int, chunks: Sequence[Chunk] = ()) -> Decoded:
        widths.append(num_rows)
        return decode(num_rows, chunks)

    engine._runner.decode = recorded  # type: ignore[method-assign]
    engine.submit([request(i, 5, 2 + i) for i in range(16)])
    drain(engine)
    assert widths == [16, 16, *range(15, 0, -1)]


def test_every_stop_token_ends_a_completion() -> None:
    model, batch = random_model(), [request(0, 5, 8)]
    [whole] = run(new_engine(model, stop_token_ids=[]), batch).values()
    for token in set(whole.tokens.tolist()):
        first = whole.tokens.tolist().index(token)
        [cut] = run(new_engine(model, stop_token_ids=[VOCAB - 1 - token, token]), batch).values()
        other = VOCAB - 1 - token
        if other not in whole.tokens[:first]:
            assert (cut.tokens.tolist(), cut.finish_reason) == (whole.tokens[: first + 1].tolist(), "stop")


def test_the_same_request_twice_is_answered_twice() -> None:
    engine = new_engine(random_model())
    engine.submit([request(0, 9, 12)] * 2)
    left, right = [each for _ in range(12) for each in engine.step()]
    assert_same_bits(left, right)
    assert engine.is_idle


def test_further_turns_go_before_what_is_new_in_their_order_and_start_while_admission_is_paused() -> None:
    def turn(ordinal: int) -> Request:
        context = random_prompt(9, seed=ordinal)
        return Request(ordinal, 0, context, max_new_tokens=3, num_before=4, parks=True, goes_on=True)

    engine = new_engine(random_model(), num_slots=2, stop_token_ids=[])
    engine.submit([Request(i, 0, random_prompt(5, seed=i), max_new_tokens=3) for i in range(3)])
    engine.pause_admission(True)
    for ordinal in (10, 11, 12):
        engine.submit([turn(ordinal)])
    finished = [f.ordinal for _ in range(12) for f in engine.step()]
    assert finished == [10, 11, 12], "new ones wait"
    assert engine.num_waiting == 3
    engine.pause_admission(False)
    assert sorted(drain(engine)) == [(0, 0), (1, 0), (2, 0)]


def test_a_further_branch_of_an_episode_that_has_begun_starts_while_admission_is_paused() -> None:
    def turn(ordinal: int, sample: int = 0, branch: int = 0, **fields: Any) -> Request:
        context = random_prompt(5 + branch, seed=10 * ordinal + branch)
        return Request(ordinal, sample, context, max_new_tokens=3, branch=branch, parks=True, **fields)

    engine = new_engine(random_model(), num_slots=2, stop_token_ids=[])
    engine.submit([turn(7)])
    begun = drain(engine)
    assert list(begun) == [(7, 0)]
    engine.pause_admission(True)
    others = [turn(6), turn(7, sample=1), turn(7, stream=1), replace(turn(7, branch=3), parks=False)]
    engine.submit([*others, turn(7, branch=1), turn(7, branch=2)])
    assert not engine.has_work
    engine.let_go_on(Session(0, 7, 0, 0))
    finished = [one.request.session for _ in range(9) for one in engine.step()]
    assert finished == [Session(0, 7, 0, 1), Session(0, 7, 0, 2)], "those that wait, in their order"
    assert not engine.has_work
    assert engine.num_waiting == len(others)
    engine.pause_admission(False)
    finished = [one.request.session for _ in range(20) for one in engine.step()]
    assert sorted(finished) == sorted(other.session for other in others)


def test_of_several_branches_those_that_go_on_pass_what_is_new() -> None:
    """Without a pause, too; and what has begun before stays ahead."""
    engine = new_engine(random_model(), num_slots=1, stop_token_ids=[])
    first = Request(0, 0, random_prompt(9, seed=0), max_new_tokens=3)
    new = [Request(i, 0, random_prompt(5, seed=i), max_new_tokens=3, parks=True) for i in (1, 2)]
    branch = Request(3, 0, random_prompt(6, seed=3), max_new_tokens=3, parks=True, branch=1)
    engine.submit([first])
    engine.step()
    engine.submit([*new, branch])
    engine.let_go_on(Session(0, 3, 0, 0))
    finished = [one.request.session for _ in range(20) for one in engine.step()]
    assert finished == [Session(0, 0, 0), Session(0, 3, 0, 1), Session(0, 1, 0), Session(0, 2, 0)]
