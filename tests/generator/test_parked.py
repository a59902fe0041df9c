"""Parked sessions: an episode's next turn begins with the keys of its last one, and says what it would without them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from covering import covering, with_slow
from drawn import drawn
from engine_kit import STOP, assert_same_bits, drain, fill, random_model, random_prompt, run
from episode_kit import Script, check_turn, play
from hypothesis import strategies as st

from slipstream.core.errors import ConfigError
from slipstream.core.types import VersionSpan
from slipstream.generator.engine import Engine
from slipstream.generator.native import native_engine
from slipstream.generator.paged_runner import PagedRunner
from slipstream.generator.requests import Finished, KvOnUpdate, Request, Session, check_request
from slipstream.generator.runner import Chunk, Runner
from slipstream.generator.slot_runner import SlotRunner

MODEL = random_model()
WIDE = random_model(head_dim=16)  # attended by buckets of the length
PAGE = 16
MAX_LEN = 6 * PAGE
SEED = 7
BOTH = pytest.mark.parametrize("is_paged", [False, True], ids=["slots", "pages"])


def new_engine(is_paged: bool = False, *, num_rows: int = 4, num_pages: int | None = None, **options: object) -> Engine:
    runner: Runner = SlotRunner(MODEL, num_rows=num_rows, max_len=MAX_LEN)
    if is_paged:
        runner = PagedRunner(MODEL, num_rows=num_rows, max_len=MAX_LEN, num_pages=num_pages, parked_tokens=256)
    return Engine(runner, seed=SEED, **({"stop_token_ids": [], "parked_tokens": None} | options))  # type: ignore[arg-type]


def paged_runner(engine: Engine) -> PagedRunner:
    assert isinstance(engine._runner, PagedRunner)
    return engine._runner


def assert_nothing_is_held(engine: Engine) -> None:
    assert (len(engine._parked), engine._parked.num_tokens, engine.num_live, engine.num_waiting) == (0, 0, 0, 0)
    assert not engine._parked._waiting
    assert not engine._parked._lost
    assert not engine._prefixes._wanted
    if isinstance(engine._runner, PagedRunner):
        engine._runner._pages.check()
        engine.set_version(engine.version + 1)  # forgets the prompts
        assert engine._runner.num_free_pages == engine._runner._pages.num_pages


def contexts(turns: dict[int, list[Finished]]) -> list[tuple[int, int, int]]:
    """(tokens that were parked, tokens of the context that are new, tokens made at the end) of every later turn."""
    found = []
    for episode in turns.values():
        for before, turn in pairwise(episode):
            parked = len(before.request.prompt_tokens) + len(before.tokens) - 1
            prefilled = len(turn.request.prompt_tokens) - 1
            found.append((parked, prefilled - parked, prefilled + len(turn.tokens)))
    return found


SCRIPTS = st.lists(
    st.builds(
        Script,
        ordinal=st.just(0),
        num_prompt=st.integers(1, 20),
        observations=st.lists(st.sampled_from([0, 1, 2, 7, 15]), max_size=3).map(tuple),
        max_new_tokens=st.integers(1, 7),
        delays=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    ),
    min_size=1,
    max_size=5,
).map(lambda scripts: [replace(script, ordinal=ordinal) for ordinal, script in enumerate(scripts)])


@BOTH
@drawn(
    5,
    100,
    scripts=SCRIPTS,
    num_rows=st.integers(1, 4),
    num_pages=st.integers(7, 20),
    parked_tokens=st.sampled_from([0, 30, 70, None]),
    prefill_tokens=st.sampled_from([1, 16, 64]),
    prefill_chunk=st.sampled_from([8, 512]),
)
def test_episodes_say_what_a_plain_forward_says(
    is_paged: bool,
    scripts: list[Script],
    num_rows: int,
    num_pages: int,
    parked_tokens: int | None,
    prefill_tokens: int,
    prefill_chunk: int,
) -> None:
    """Whatever is parked and evicted; and the tokens that are held are bounded at all times."""
    engine = new_engine(
        is_paged,
        num_rows=num_rows,
        num_pages=num_pages,
        parked_tokens=parked_tokens,
        prefill_tokens=prefill_tokens,
        prefill_chunk=prefill_chunk,
        stop_token_ids=[STOP],
    )

    def look(engine: Engine) -> None:
        parked = engine._parked._parked
        assert engine._parked.num_tokens == sum(len(each.tokens) for each in parked.values())
        assert parked_tokens is None or engine._parked.num_tokens <= parked_tokens
        assert all(each.storage.num_tokens == len(each.tokens) for each in parked.values())
        if is_paged:
            paged_runner(engine)._pages.check()

    turns = play(engine, scripts, look=look)
    assert [len(turns[script.ordinal]) for script in scripts] == [len(s.observations) + 1 for s in scripts]
    for turn in (turn for episode in turns.values() for turn in episode):
        check_turn(MODEL, turn, seed=SEED)
    stats = engine.stats
    made_before = sum(parked for parked, _, _ in contexts(turns))
    assert stats.parked_hit_tokens + stats.parked_missed_tokens >= made_before
    assert stats.parked_missed_tokens <= stats.re_prefilled_tokens
    if parked_tokens == 0:
        assert (stats.parked_hit_tokens, stats.evicted_sessions) == (0, 0)
    if not stats.preemptions:
        assert stats.parked_hit_tokens + stats.parked_missed_tokens == made_before
        assert stats.parked_missed_tokens == stats.re_prefilled_tokens
    if not stats.preemptions and not stats.evicted_sessions and parked_tokens is None:
        assert stats.parked_missed_tokens == 0
    assert_nothing_is_held(engine)


@functools.cache
def without_parking(scripts: tuple[Script, ...]) -> dict[int, list[Finished]]:
    return play(new_engine(parked_tokens=0), scripts)


LONG = tuple(Script(i, 3 + 5 * i, (4, 0, 9, 1), max_new_tokens=4, delays=(i, 3 - i % 3, 2 * i % 5)) for i in range(5))


@BOTH
def test_only_what_is_new_is_prefilled(is_paged: bool) -> None:
    engine = new_engine(is_paged)
    turns = play(engine, LONG)
    for ordinal, expected in without_parking(LONG).items():
        for found, other in zip(turns[ordinal], expected, strict=True):
            assert np.array_equal(found.tokens, other.tokens)
            assert np.abs(found.logprobs - other.logprobs).max() < 1e-4
    parked, new, _ = (sum(column) for column in zip(*contexts(turns), strict=True))
    prompts = sum(script.num_prompt - 1 for script in LONG)
    assert new == sum(sum(script.observations) for script in LONG), "the last sampled token for the last given one"
    assert engine.stats.parked_hit_tokens == parked
    assert engine.stats.prefilled_tokens == prompts + new
    assert (engine.stats.re_prefilled_tokens, engine.stats.parked_missed_tokens) == (0, 0)
    assert_nothing_is_held(engine)


def test_most_tokens_are_beyond_the_margin_of_the_oracle() -> None:
    turns = [turn for episode in without_parking(LONG).values() for turn in episode]
    sure = sum(check_turn(MODEL, turn, seed=SEED) for turn in turns)
    assert sure > 0.9 * sum(len(turn.tokens) for turn in turns)


@pytest.mark.parametrize("model", with_slow([MODEL], [WIDE]), ids=["whole-length", "buckets"])
@drawn(
    4,
    40,
    scripts=SCRIPTS,
    num_rows=st.integers(1, 12),
    delay=st.integers(0, 5),
    prefill_tokens=st.sampled_from([1, 24, 512]),
)
def test_company_changes_no_bit_of_a_later_turn(
    model: object, scripts: list[Script], num_rows: int, delay: int, prefill_tokens: int
) -> None:
    """With all sessions parked: alone and in a crowd, in any number of rows, with any budget and interleaving."""

    def engine(num_rows: int, prefill_tokens: int) -> Engine:
        return native_engine(
            model,  # type: ignore[arg-type]
            num_slots=num_rows,
            max_len=MAX_LEN,
            seed=SEED,
            stop_token_ids=[STOP],
            prefill_tokens=prefill_tokens,
            prefill_chunk=8,
            parked_tokens=None,
        )

    crowd = play(
        engine(num_rows, prefill_tokens),
        [replace(script, delays=tuple(delay * i % 7 for i in range(3))) for script in scripts],
    )
    for script in scripts:
        alone = play(engine(1, 512), [replace(script, delays=())])
        for found, expected in zip(crowd[script.ordinal], alone[script.ordinal], strict=True):
            assert_same_bits(found, expected)


def test_company_changes_no_bit_of_long_contexts() -> None:
    """Over 256 positions, beyond the blocks that the weighted sum goes in, in chunks of 64."""
    model = random_model(head_dim=16, max_positions=512)

    def engine(num_rows: int, prefill_tokens: int) -> Engine:
        return native_engine(
            model, num_slots=num_rows, max_len=400, seed=SEED, stop_token_ids=[], prefill_tokens=prefill_tokens,
            prefill_chunk=64, parked_tokens=None,
        )  # fmt: skip

    scripts = [Script(i, 20 + 31 * i, (70, 3, 90), max_new_tokens=5, delays=(5 * i, 2)) for i in range(3)]
    crowd = play(engine(16, 100), scripts)
    for script in scripts:
        alone = play(engine(1, 512), [script])
        for found, expected in zip(crowd[script.ordinal], alone[script.ordinal], strict=True):
            assert_same_bits(found, expected)
            check_turn(model, found, seed=SEED)


@BOTH
def test_a_turn_that_is_sampled_again_is_the_same_turn(is_paged: bool) -> None:
    """In an engine that has never seen the episode; its noise is that of its place in the episode."""
    episode = play(new_engine(is_paged), LONG[2:3])[2]
    for turn in episode:
        again = new_engine(is_paged)
        (found,) = run(again, [replace(turn.request, is_again=True)]).values()
        assert np.array_equal(found.tokens, turn.tokens)
        assert again.num_re_prefilled == len(turn.request.prompt_tokens) - 1
        assert again.stats.parked_missed_tokens == (again.num_re_prefilled if turn.request.num_before else 0)
        (shifted,) = run(new_engine(is_paged), [replace(turn.request, num_before=0)]).values()
        assert np.array_equal(shifted.tokens, turn.tokens) == (turn.request.num_before == 0)


# Room


def parked_session(engine: Engine, ordinal: int, num_prompt: int, max_new_tokens: int = 3) -> Request:
    """Let an episode have its first turn; the request of its second one, behind 4 given tokens."""
    script = Script(ordinal, num_prompt, (4,), max_new_tokens=max_new_tokens)
    (turn,) = run(engine, [script.request([])]).values()
    return replace(script.request([turn]), parks=False)


@BOTH
def test_sessions_idle_longest_are_evicted_first_and_counted(is_paged: bool) -> None:
    engine = new_engine(is_paged, parked_tokens=40)
    later = [parked_session(engine, ordinal, 10) for ordinal in range(4)]  # 12 tokens each
    assert (len(engine._parked), engine._parked.num_tokens, engine.stats.evicted_sessions) == (3, 36, 1)
    assert [session.ordinal for session in engine._parked._parked] == [1, 2, 3]
    run(engine, [later[1]])  # was not evicted
    assert (engine.stats.parked_hit_tokens, engine.stats.parked_missed_tokens) == (12, 0)
    before = engine.stats.prefilled_tokens
    run(engine, [later[0]])
    assert engine.stats.prefilled_tokens - before == 12 + 4
    assert (engine.stats.parked_hit_tokens, engine.stats.parked_missed_tokens) == (12, 12)
    assert engine.stats.re_prefilled_tokens == 12, "what is new is not made again"
    assert len(engine._parked) == 2


@BOTH
def test_a_session_too_large_to_be_parked_evicts_nobody(is_paged: bool) -> None:
    engine = new_engine(is_paged, parked_tokens=20)
    parked_session(engine, 0, 10)
    too_large = parked_session(engine, 1, 30)
    assert [session.ordinal for session in engine._parked._parked] == [0]
    assert engine.stats.evicted_sessions == 1
    run(engine, [too_large])
    assert engine.stats.parked_missed_tokens == 32


@BOTH
def test_a_session_whose_next_turn_waits_is_not_idle(is_paged: bool) -> None:
    """It was parked before the other, which goes; and nobody goes where even that would not do."""
    engine = new_engine(is_paged, parked_tokens=30)
    later = [parked_session(engine, ordinal, 10) for ordinal in range(2)]
    engine.submit([later[0]])
    assert not engine._parked.make_room(Request(9, 0, random_prompt(3), 1).session, 20)
    assert len(engine._parked) == 2, "not even both would do"
    assert engine._parked.make_room(Request(9, 0, random_prompt(3), 1).session, 15)
    assert [session.ordinal for session in engine._parked._parked] == [0]
    drain(engine)
    assert engine.stats.parked_hit_tokens == 12


def test_nobody_evicts_a_session_whose_extension_is_being_prefilled() -> None:
    """Its keys are its turn's from the first chunk on; memory for others is found elsewhere or waited for."""
    engine = new_engine(True, num_rows=4, num_pages=8, prefill_chunk=8, prefill_tokens=1)
    script = Script(0, 20, (30,), max_new_tokens=3)
    (turn,) = run(engine, [script.request([])]).values()
    idle = parked_session(engine, 1, 10)
    engine.submit([replace(script.request([turn]), parks=False)])
    engine.step()
    assert (len(engine._parked), engine.num_live) == (1, 0)  # 22 of 52 tokens were there, 8 more are
    assert paged_runner(engine).num_free_pages == 8 - 4 - 1
    engine.submit([Request(2, 0, random_prompt(50, seed=2), max_new_tokens=30)])
    finished = drain(engine)
    assert set(finished) == {(0, 0), (2, 0)}
    assert engine.stats.parked_hit_tokens == 22
    assert engine.stats.evicted_sessions == 1, "the idle one"
    assert engine.stats.preemptions == 0
    run(engine, [idle])
    assert engine.stats.parked_missed_tokens == 12
    for each in finished.values():
        check_turn(MODEL, each, seed=SEED)


def test_when_memory_is_short_prefixes_go_before_sessions_and_sessions_before_rows() -> None:
    engine = new_engine(True, num_rows=2, num_pages=8, prefix_cache_tokens=100)
    runner = paged_runner(engine)
    parked_session(engine, 0, 33)  # leaves a prefix of 32 tokens, 2 pages, and parks 35: one page more
    assert runner.num_free_pages == 8 - 2 - 1
    assert len(engine._prefixes._entries) == 1
    engine.submit([Request(1, 0, random_prompt(5, seed=1), max_new_tokens=80)])
    held = []
    while not engine.is_idle:
        held.append((len(engine._prefixes._entries), len(engine._parked)))
        engine.step()
    held.append((len(engine._prefixes._entries), len(engine._parked)))
    order = [pair for index, pair in enumerate(held) if index == 0 or pair != held[index - 1]]
    assert order == [(1, 1), (2, 1), (0, 1), (0, 0)]  # the first prefix shares its pages, and frees none
    assert engine.stats.preemptions == 0


def test_sessions_are_given_up_before_a_row_is_preempted() -> None:
    engine = new_engine(True, num_rows=2, num_pages=9)
    later = [parked_session(engine, ordinal, 20) for ordinal in range(3)]  # 22 tokens, 2 pages each
    assert paged_runner(engine).num_free_pages == 3
    engine.submit([Request(i, 0, random_prompt(5, seed=i), max_new_tokens=70) for i in (8, 9)])
    found = drain(engine)
    assert engine.stats.evicted_sessions == 3  # two rows of 74 tokens need 10 pages
    assert engine.stats.preemptions >= 1
    paged_runner(engine)._pages.check()
    for each in [*found.values(), *run(engine, later).values()]:
        check_turn(MODEL, each, seed=SEED)
    assert engine.stats.parked_missed_tokens == 3 * 22


def test_of_waiting_turns_the_last_loses_its_keys_first() -> None:
    engine = new_engine(True, num_rows=1, num_pages=7)
    later = [parked_session(engine, ordinal, 20) for ordinal in range(3)]  # 6 pages of 7
    engine.submit([Request(9, 0, random_prompt(3), max_new_tokens=60), *later])
    engine.step()
    while len(engine._parked) > 1:
        engine.step()
    assert [session.ordinal for session in engine._parked._parked] == [0]
    found = drain(engine)
    assert list(found) == [(9, 0), (0, 0), (1, 0), (2, 0)]
    assert (engine.stats.parked_hit_tokens, engine.stats.parked_missed_tokens) == (22, 44)
    assert engine.stats.preemptions == 0


def test_sessions_that_fill_the_memory_and_wait_make_room_for_the_first() -> None:
    """Nothing is live, every page but one is parked, and every session waits: the first one starts all the same."""
    engine = new_engine(True, num_rows=3, num_pages=7)
    later = [parked_session(engine, ordinal, 28 + 2 * ordinal) for ordinal in range(3)]  # 2, 2 and 3 pages
    assert engine._parked.num_tokens == 30 + 32 + 34
    assert paged_runner(engine).num_free_pages == 0
    found = run(engine, later)
    assert len(found) == 3
    for each in found.values():
        check_turn(MODEL, each, seed=SEED)
    assert engine.stats.parked_hit_tokens >= 30
    paged_runner(engine)._pages.check()
    assert paged_runner(engine).num_free_pages == 7


@pytest.mark.parametrize(
    ("parked_tokens", "is_paged"),
    covering([0, None], [False, True]),
    ids=["0-slots", "0-pages", "None-slots", "None-pages"],
)
def test_the_prefix_cache_keeps_prompts_and_no_later_turn(is_paged: bool, parked_tokens: int | None) -> None:
    engine = new_engine(is_paged, parked_tokens=parked_tokens, prefix_cache_tokens=500)
    turns = play(engine, LONG)
    prompts = [script.prompt[:-1].tobytes() for script in LONG]
    assert sorted(engine._prefixes._entries, key=str) == sorted(prompts, key=str)
    (again,) = run(engine, [turns[1][0].request]).values()
    assert np.array_equal(again.tokens, turns[1][0].tokens)
    assert engine.stats.prefix_hits == 1


# Contexts that are others


@BOTH
@pytest.mark.parametrize("how", ["other", "shorter"])
def test_a_context_that_is_not_the_parked_one_drops_the_keys(is_paged: bool, how: str) -> None:
    engine = new_engine(is_paged)
    later = parked_session(engine, 0, 10)  # 12 tokens parked
    tokens = later.prompt_tokens.copy()
    tokens[7] = tokens[7] % 40 + 2 if tokens[7] != tokens[7] % 40 + 2 else 3
    fork = replace(later, prompt_tokens=tokens if how == "other" else later.prompt_tokens[:12], num_before=2)
    before = engine.stats.prefilled_tokens
    (found,) = run(engine, [fork]).values()
    check_turn(MODEL, found, seed=SEED)
    same = 7 if how == "other" else 11
    assert engine.stats.prefilled_tokens - before == len(fork.prompt_tokens) - 1
    assert (engine.stats.mismatched_sessions, engine.stats.evicted_sessions) == (1, 0)
    assert (engine.stats.parked_hit_tokens, engine.stats.parked_missed_tokens) == (0, same)
    assert_nothing_is_held(engine)


@BOTH
def test_branches_of_an_episode_at_once(is_paged: bool) -> None:
    """Two later turns of one session, of which one goes on from the parked keys, and two that are the same."""
    engine = new_engine(is_paged)
    later = parked_session(engine, 0, 10)
    other = replace(later, prompt_tokens=np.concatenate([later.prompt_tokens[:10], random_prompt(9)]), num_before=9)
    engine.submit([later, other, later])
    found = []
    while not engine.is_idle:
        found += engine.step()
    assert len(found) == 3
    for each in found:
        check_turn(MODEL, each, seed=SEED)
    assert engine.stats.parked_hit_tokens == 24
    assert_nothing_is_held(engine)


@BOTH
def test_there_is_nothing_to_do_while_a_pause_holds_back_all_that_waits(is_paged: bool) -> None:
    engine = new_engine(is_paged)
    assert not engine.has_work
    later = parked_session(engine, 0, 10)
    engine.submit([Script(1, 10, ()).request([])])
    assert engine.has_work
    engine.pause_admission(True)
    assert (engine.has_work, engine.is_idle) == (False, False), "an episode that would begin"
    assert engine.step() == []
    engine.submit([replace(later, goes_on=True)])
    assert engine.has_work, "a further turn passes"
    engine.pause_admission(True, holds_turns=True)
    assert not engine.has_work
    engine.pause_admission(True)
    found: list[Finished] = []
    while engine.has_work:
        found += engine.step()
    assert [one.ordinal for one in found] == [0]
    engine.pause_admission(False)
    assert engine.has_work
    assert [one.ordinal for one in drain(engine).values()] == [1]


@BOTH
def test_an_episode_that_begins_again_drops_the_keys(is_paged: bool) -> None:
    engine = new_engine(is_paged)
    parked_session(engine, 0, 10)
    engine.submit([Script(0, 10, (4,)).request([])])
    assert len(engine._parked) == 0
    drain(engine)
    assert len(engine._parked) == 1
    engine.release(Session(0, 0, 0))
    assert_nothing_is_held(engine)


# Release


@BOTH
def test_release_frees_all_and_forgives(is_paged: bool) -> None:
    engine = new_engine(is_paged)
    for ordinal in range(3):
        parked_session(engine, ordinal, 10)
    engine.release(Session(0, 1, 0))
    engine.release(Session(0, 1, 0))
    engine.release(Session(3, 1, 9))
    assert [session.ordinal for session in engine._parked._parked] == [0, 2]
    for ordinal in (0, 2):
        engine.release(Session(0, ordinal, 0))
    assert_nothing_is_held(engine)


@BOTH
@pytest.mark.parametrize("num_steps", [0, 1, 3], ids=["waiting", "live", "later"])
def test_a_turn_that_is_released_goes_on_and_does_not_park(is_paged: bool, num_steps: int) -> None:
    engine = new_engine(is_paged)
    later = replace(parked_session(engine, 0, 10), parks=True, max_new_tokens=6)
    engine.submit([later])
    for _ in range(num_steps):
        engine.step()
    engine.release(Session(0, 0, 0))
    assert len(engine._parked) == 0
    (found,) = drain(engine).values()
    check_turn(MODEL, found, seed=SEED)
    assert engine.stats.parked_hit_tokens == (12 if num_steps else 0)
    assert_nothing_is_held(engine)


# Versions


def swapped(engine: Engine, version: int, how: KvOnUpdate, max_kv_age: int = 0) -> None:
    engine.set_version(version, kv_on_update=how, max_kv_age=max_kv_age)


@BOTH
@pytest.mark.parametrize("how", ["keep", "recompute", "recompute_if_older_than"])
def test_parked_keys_age_as_those_of_rows_do(is_paged: bool, how: KvOnUpdate) -> None:
    """With unchanged weights, so that the oracle holds: what counts is whose keys are made again."""
    engine = new_engine(is_paged)
    script = Script(0, 10, (4, 4), max_new_tokens=3)
    (turn,) = run(engine, [script.request([])]).values()
    swapped(engine, 1, how, 1)
    is_kept = how != "recompute"
    assert len(engine._parked) == is_kept
    engine.submit([script.request([turn])])
    engine.step()
    (row,) = engine._rows.live_rows
    assert engine._rows.live_at(row).kv_version == (0 if is_kept else 1)
    (second,) = drain(engine).values()
    assert second.version_spans == (VersionSpan(start=0, version=1),)
    assert engine.stats.parked_missed_tokens == engine.num_re_prefilled == (0 if is_kept else 12)
    swapped(engine, 2, how, 1)
    assert len(engine._parked) == (how == "keep"), (
        "its oldest key is two versions old, or one that must not be old at all"
    )
    (third,) = run(engine, [script.request([turn, second])]).values()
    assert engine.stats.parked_missed_tokens == {"keep": 0, "recompute": 12 + 19}.get(how, 19)
    for each in (turn, second, third):
        check_turn(MODEL, each, seed=SEED)
    engine.release(Session(0, 0, 0))
    assert_nothing_is_held(engine)


@BOTH
@pytest.mark.parametrize("how", ["keep", "recompute", "recompute_if_older_than"])
def test_a_swap_while_an_extension_is_being_prefilled(is_paged: bool, how: KvOnUpdate) -> None:
    engine = new_engine(is_paged, prefill_chunk=8, prefill_tokens=8)
    script = Script(0, 10, (30,), max_new_tokens=3)
    (turn,) = run(engine, [script.request([])]).values()
    engine.submit([script.request([turn])])
    engine.step()
    assert (len(engine._parked), engine.num_live) == (0, 0)
    swapped(engine, 1, how, 0)
    engine.step()
    (second,) = drain(engine).values()
    check_turn(MODEL, second, seed=SEED)
    missed = 0 if how == "keep" else 12 + 8
    assert engine.stats.parked_hit_tokens == (12 if how == "keep" else 0)
    assert engine.stats.parked_missed_tokens == engine.num_re_prefilled == missed
    engine.release(Session(0, 0, 0))
    assert_nothing_is_held(engine)


@BOTH
def test_kept_keys_are_those_of_the_old_weights(is_paged: bool) -> None:
    """The second turn's logprobs differ from those under new keys, and recomputed ones do not."""
    model = random_model()
    engines = {}
    for how in ("keep", "recompute"):
        fill(model, 0)
        engine = native_engine(
            model, num_slots=2, max_len=MAX_LEN, seed=SEED, stop_token_ids=[], parked_tokens=None, is_paged=is_paged
        )
        script = Script(0, 30, (4,), max_new_tokens=8)
        (turn,) = run(engine, [script.request([])]).values()
        fill(model, 1)
        engine.set_version(1, kv_on_update=how)  # type: ignore[arg-type]
        (engines[how],) = run(engine, [script.request([turn])]).values()
    check_turn(model, engines["recompute"], seed=SEED)
    with pytest.raises(AssertionError):
        check_turn(model, engines["keep"], seed=SEED)


# Rows that leave unfinished


@BOTH
@pytest.mark.parametrize("how", ["export", "preempt"])
def test_a_later_turn_goes_on_where_it_was(is_paged: bool, how: str) -> None:
    engine, other = new_engine(is_paged), new_engine(is_paged)
    script = Script(0, 10, (4, 4), max_new_tokens=8)
    (turn,) = run(engine, [script.request([])]).values()
    parked_session(engine, 5, 10)
    engine.submit([script.request([turn])])
    for _ in range(3):
        engine.step()
    if how == "export":
        (exported,) = engine.export_live()
        assert (exported.num_before, exported.parks) == (8 + 4, True)
        assert [session.ordinal for session in engine._parked._parked] == [5], "nothing of it stays"
        other.submit([exported])
    else:
        engine.preempt(1)
        other = engine
    (second,) = drain(other).values()
    check_turn(MODEL, second, seed=SEED)
    assert len(second.tokens) == 8
    assert other.num_re_prefilled == 10 + 8 + 4 + 3 - 1
    assert other.stats.parked_missed_tokens == 0, "it had begun"
    (third,) = run(other, [script.request([turn, second])]).values()
    check_turn(MODEL, third, seed=SEED)
    assert other.stats.parked_hit_tokens == 29 + (17 if how == "preempt" else 0)
    for each in (engine, other):
        for ordinal in (0, 5):
            each.release(Session(0, ordinal, 0))
        assert_nothing_is_held(each)


@BOTH
def test_a_turn_that_was_begun_elsewhere_uses_the_keys_that_are_parked_here(is_paged: bool) -> None:
    engine, elsewhere = new_engine(is_paged), new_engine(is_paged)
    later = replace(parked_session(engine, 0, 10), max_new_tokens=8)
    elsewhere.submit([later])
    for _ in range(3):
        elsewhere.step()
    (found,) = run(engine, elsewhere.export_live()).values()
    check_turn(MODEL, found, seed=SEED)
    assert engine.stats.parked_hit_tokens == 12
    assert_nothing_is_held(engine)
    elsewhere.release(Session(0, 0, 0))
    assert_nothing_is_held(elsewhere)


@BOTH
def test_a_preempted_turn_that_is_exported_leaves_nothing(is_paged: bool) -> None:
    engine = new_engine(is_paged, prefill_chunk=8, prefill_tokens=1)
    later = replace(parked_session(engine, 0, 10), max_new_tokens=8, parks=True)
    engine.submit([later])
    while not engine.num_live:
        engine.step()
    engine.preempt(1)
    engine.step()  # the first chunk of its second prefill
    (exported,) = engine.export_live()
    assert exported.parks
    engine.release(Session(0, 0, 0))
    assert_nothing_is_held(engine)


# Limits


@pytest.mark.parametrize("num_before", [-1, 5, 9])
def test_an_episode_begins_with_a_prompt(num_before: int) -> None:
    request = Request(0, 0, random_prompt(5), 1, num_before=num_before)
    with pytest.raises(ConfigError, match=rf"num_before = {num_before} of 5 prompt tokens"):
        check_request(request, max_len=64)
    check_request(replace(request, num_before=4), max_len=64)


def test_the_bound_must_not_be_negative() -> None:
    with pytest.raises(ConfigError, match="parked_tokens"):
        new_engine(parked_tokens=-1)


# Runners


RUNNERS: list[Callable[[], Runner]] = [
    lambda: SlotRunner(MODEL, num_rows=4, max_len=MAX_LEN),
    lambda: PagedRunner(MODEL, num_rows=4, max_len=MAX_LEN),
]


@pytest.mark.parametrize("make", RUNNERS, ids=["slots", "pages"])
@pytest.mark.parametrize("num_more", [0, 1, 5, 40])
def test_a_longer_prefix_begins_with_what_the_shorter_one_held(make: Callable[[], Runner], num_more: int) -> None:
    """Filled behind its beginning alone, it is what one made at once is."""
    tokens, runner = random_prompt(21 + num_more), make()
    short = runner.open_prefix(21)
    assert short is not None
    runner.prefill([Chunk(short, tokens[:21], 0)])
    long = runner.extend_prefix(short, 21 + num_more)
    assert long is not None
    assert long.num_tokens == 21 + num_more
    if num_more:
        runner.prefill([Chunk(long, tokens[21:], 21)])
    whole = make()
    expected = whole.open_prefix(21 + num_more)
    assert expected is not None
    whole.prefill([Chunk(expected, tokens, 0)])
    for left, right in zip(stored(runner, long), stored(whole, expected), strict=True):
        assert np.abs(left - right).max() < 1e-5


def stored(runner: Runner, prefix: object) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values [L, Hkv, n, D] of a prefix."""
    if isinstance(runner, SlotRunner):
        return prefix.keys.detach().numpy(), prefix.values.detach().numpy()  # type: ignore[attr-defined]
    assert isinstance(runner, PagedRunner)
    slots = runner._pages.slots(prefix, 0, prefix.num_tokens)  # type: ignore[arg-type,attr-defined]
    keys, values = (
        kept.flatten(1, 2)[:, slots].transpose(1, 2).numpy() for kept in (runner._kv.keys, runner._kv.values)
    )
    return keys, values


def test_pages_are_handed_over_and_not_copied() -> None:
    engine = new_engine(True, num_rows=2)
    runner, copied = paged_runner(engine), []
    copy_pages = runner._kv.copy_pages
    runner._kv.copy_pages = lambda sources, destinations: (  # type: ignore[method-assign]
        copied.append(len(sources)),
        copy_pages(sources, destinations),
    )[1]
    later = parked_session(engine, 0, 30, max_new_tokens=10)
    copied.clear()
    (parked,) = engine._parked._parked.values()
    pages = parked.storage.pages.tolist()  # type: ignore[attr-defined]
    engine.submit([later])
    engine.step()
    (row,) = engine._rows.live_rows
    assert runner._pages.blocks[row, :2].tolist() == pages[:2]
    assert copied == [1], "the last page, where the row goes on"


def test_memory_for_parked_sessions_comes_on_top_of_that_for_rows() -> None:
    sizes = [PagedRunner(MODEL, num_rows=2, max_len=64, parked_tokens=n)._pages.num_pages for n in (0, 100, None)]
    assert sizes[1] - sizes[0] == 7
    assert sizes[2] == 2 * sizes[0]
    page_bytes = 2 * 2 * PAGE * 2 * 8 * 4
    bounded = [
        PagedRunner(MODEL, num_rows=2, max_len=64, kv_bytes=40 * page_bytes, parked_tokens=n) for n in (0, 1000, None)
    ]
    assert [runner._pages.num_pages for runner in bounded] == [sizes[0], 39, 39]
