"""Forks of an episode: another branch begins with the keys that are parked for the one it leaves, which goes on."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from drawn import drawn
from engine_kit import random_prompt
from episode_kit import check_turn
from hypothesis import strategies as st
from test_parked import BOTH, MODEL, PAGE, SEED, assert_nothing_is_held, new_engine, paged_runner

from slipstream.generator.engine import Engine
from slipstream.generator.parked import num_common
from slipstream.generator.requests import Finished, Request, Session


def run(engine: Engine, *requests: Request) -> list[Finished]:
    """Return the turns of these requests, each checked by a forward pass over all of it."""
    engine.submit(requests)
    found: list[Finished] = []
    while not engine.is_idle:
        found += engine.step()
    for turn in found:
        request = turn.request  # the noise of a branch is that of a sample of its own
        check_turn(MODEL, replace(turn, request=replace(request, sample=request.branch << 32)), seed=SEED)
    return sorted(found, key=lambda turn: turn.request.branch)


def behind(turn: Finished, said: np.ndarray, *, num_kept: int | None = None, branch: int = 0) -> Request:
    """Return the request of the next turn, or with `num_kept` that of a fork behind so many of its tokens."""
    known = np.concatenate([turn.request.prompt_tokens, turn.tokens])
    context = np.concatenate([known[:num_kept], said])
    before = turn.request.num_before + len(turn.tokens) + len(said) if num_kept is None else 0
    return replace(turn.request, prompt_tokens=context, num_before=before, branch=branch, goes_on=True, resume=None)


FIRST = Request(0, 0, random_prompt(40, seed=1), 6, parks=True)


@BOTH
@pytest.mark.parametrize("num_kept", [0, 1, PAGE - 1, PAGE, 2 * PAGE + 5, 45, 46])
def test_a_fork_prefills_only_what_is_not_parked(is_paged: bool, num_kept: int) -> None:
    engine = new_engine(is_paged)
    [first] = run(engine, FIRST)
    fork = behind(first, random_prompt(9, seed=2), num_kept=num_kept, branch=1)
    before = engine.stats.prefilled_tokens
    [forked] = run(engine, fork)
    known = np.concatenate([first.request.prompt_tokens, first.tokens])[:-1]
    num_same = num_common(known, fork.prompt_tokens[:-1])
    assert num_same >= min(num_kept, len(known))
    num_shared = num_same - num_same % PAGE if is_paged else num_same
    assert engine.stats.prefilled_tokens - before == len(fork.prompt_tokens) - 1 - num_shared
    assert engine.stats.parked_hit_tokens == num_shared
    before = engine.stats.prefilled_tokens
    said = [random_prompt(3, seed=3), random_prompt(4, seed=4)]
    run(engine, behind(first, said[0]), behind(forked, said[1], branch=1))
    assert engine.stats.prefilled_tokens - before == 3 + 4, "both go on from their own keys"
    if is_paged:
        paged_runner(engine)._pages.check()
    for branch in (0, 1):
        engine.release(Session(0, 0, 0, branch))
    assert_nothing_is_held(engine)


def test_pages_are_shared_until_the_last_branch_lets_go() -> None:
    engine = new_engine(True)
    pages = paged_runner(engine)._pages
    [first] = run(engine, FIRST)
    free = pages.num_free
    run(engine, behind(first, random_prompt(9, seed=2), num_kept=40, branch=1))
    assert free - pages.num_free == -(-(40 + 9 + 5) // PAGE) - 2, "two of its pages are those of the first branch"
    engine.release(Session(0, 0, 0, 0))
    [parked] = engine._parked._parked.values()
    assert pages.slots(parked.storage, 0, 54).size == 54  # type: ignore[arg-type]
    pages.check()
    engine.release(Session(0, 0, 0, 1))
    assert_nothing_is_held(engine)


@BOTH
def test_another_episode_takes_nothing_and_a_new_version_leaves_nothing_in_the_table(is_paged: bool) -> None:
    engine = new_engine(is_paged, prefix_cache_tokens=1000)
    [first] = run(engine, FIRST)
    stranger = replace(behind(first, random_prompt(9, seed=2), num_kept=40, branch=1), ordinal=1)
    engine.submit([stranger])
    before = engine.stats.prefilled_tokens
    while not engine.is_idle:
        engine.step()
    assert engine.stats.prefilled_tokens - before == len(stranger.prompt_tokens) - 1
    engine.set_version(1)
    run(engine, replace(behind(first, random_prompt(9, seed=5), num_kept=40, branch=2)))
    assert not len(engine._prefixes._entries), "keys of an older version are kept for nobody"
    for session in [*engine._parked._parked]:
        engine.release(session)
    assert_nothing_is_held(engine)


@BOTH
@drawn(
    3,
    100,
    seed=st.integers(0, 10_000),
    num_pages=st.integers(8, 24),
    parked_tokens=st.sampled_from([0, 60, None]),
    prefill_chunk=st.sampled_from([8, 512]),
    kv_on_update=st.sampled_from(["keep", "recompute"]),
)
def test_any_tree_of_branches_says_what_a_plain_forward_says(
    is_paged: bool, seed: int, num_pages: int, parked_tokens: int | None, prefill_chunk: int, kv_on_update: str
) -> None:
    rng = random.Random(seed)
    engine = new_engine(is_paged, num_pages=num_pages, parked_tokens=parked_tokens, prefill_chunk=prefill_chunk)
    last = {0: run(engine, Request(0, 0, random_prompt(rng.randint(1, 40), seed=seed), 5, parks=True))[0]}
    num_branches = 1
    for place in range(4):
        asked: dict[int, Request] = {}
        for each in range(rng.randint(1, 3)):
            turn = last[rng.choice([*last])]
            said, own = random_prompt(rng.randint(1, 9), seed=seed + 10 * place + each), turn.request.branch
            if rng.random() < 0.4 and own not in asked:
                request = behind(turn, said, branch=own)
            else:
                num_kept = rng.randint(0, len(turn.request.prompt_tokens) + len(turn.tokens))
                request = behind(turn, said, num_kept=num_kept, branch=num_branches)
                num_branches += 1
            if len(request.prompt_tokens) + 5 <= engine.max_len:
                asked[request.branch] = request
        for turn in run(engine, *asked.values()):
            last[turn.request.branch] = turn
        if is_paged:
            paged_runner(engine)._pages.check()
        if rng.random() < 0.3:
            engine.set_version(engine.version + 1, kv_on_update=kv_on_update)  # type: ignore[arg-type]
    for branch in range(num_branches):
        engine.release(Session(0, 0, 0, branch))
    assert_nothing_is_held(engine)
