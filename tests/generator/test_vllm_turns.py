"""Turns of episodes in vLLM, over a make-believe one: contexts, its prefix cache, swaps, pauses, and a lost process."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine_kit import random_model
from fake_vllm import BLOCK
from test_vllm_client import LADDER, check, resumed
from vllm_kit import drive, fake_engine, num_tokens, request, set_fake, set_weights

from slipstream.core.config import RunConfig
from slipstream.core.errors import ChannelError
from slipstream.generator.requests import Finished, Request, Session
from slipstream.generator.vllm.backend import spec_of
from slipstream.generator.vllm.waiting import WaitingRequests
from slipstream.models.transformer import Transformer

GIVEN = np.array([5, 6], dtype=np.int32)
EPISODE = Session(0, 0, 0)


@pytest.fixture
def model() -> Transformer:
    model = random_model()
    set_weights(model, 1.0)
    return model


def first_turn(ordinal: int = 0, *, num_new: int = 6, **changes: object) -> Request:
    return request(ordinal, max_new_tokens=num_new, **{"parks": True} | changes)


def next_turn(turn: Finished, *, num_new: int = 6, num_prompt: int = 3) -> Request:
    """The turn behind `turn` and what the environment has said to it."""
    context = np.concatenate([turn.request.prompt_tokens, turn.tokens, GIVEN])
    return replace(
        turn.request,
        prompt_tokens=context,
        num_before=len(context) - num_prompt,
        max_new_tokens=num_new,
        goes_on=True,
    )


def whole_blocks(num: int) -> int:
    return num // BLOCK * BLOCK


def counts(hit: int, missed: int) -> dict[str, int]:
    return {"parked_hit_tokens": hit, "parked_missed_tokens": missed}


def test_a_later_turn_is_asked_for_with_its_whole_context(model: Transformer, tmp_path: Path) -> None:
    """vLLM finds the whole blocks of what it has computed: all of the turn before but its last token."""
    hit = missed = 0
    with fake_engine(model, tmp_path) as engine:
        engine.submit([first_turn()])
        (turn,) = drive(engine)
        assert engine.session_counts == {}, "a first turn has nothing to find"
        for _ in range(2):
            num_computed = len(turn.request.prompt_tokens) + len(turn.tokens) - 1
            engine.submit([next_turn(turn, num_new=7)])
            (turn,) = drive(engine)
            check(turn, num_new=7)
            hit += whole_blocks(num_computed)
            missed += num_computed % BLOCK
            assert engine.session_counts == counts(hit, missed)
        assert hit > 0
        assert missed > 0
        assert engine.num_re_prefilled == missed


def test_samples_and_branches_of_an_episode_are_told_apart(model: Transformer, tmp_path: Path) -> None:
    turns = [first_turn(sample=sample, branch=branch) for sample in range(2) for branch in range(2)]
    with fake_engine(model, tmp_path) as engine:
        engine.submit(turns)
        firsts = drive(engine)
        engine.submit([next_turn(turn) for turn in firsts])
        seconds = drive(engine)
        assert engine.session_counts["parked_hit_tokens"] == 4 * BLOCK * 2
    assert {one.request.session for one in seconds} == {one.session for one in turns}
    assert len(seconds) == 4


@pytest.mark.parametrize("mode", ["keep", "recompute"])
@LADDER
def test_after_a_swap_contexts_are_computed_anew(
    model: Transformer, tmp_path: Path, fake: dict[str, object], mode: str
) -> None:
    """Whatever happens to completions under way: a turn that begins finds nothing of the weights before."""
    with fake_engine(model, tmp_path, fake=fake, kv_on_update=mode) as engine:
        engine.submit([first_turn()])
        (turn,) = drive(engine)
        num_computed = len(turn.request.prompt_tokens) + len(turn.tokens) - 1
        set_weights(model, 2.0)
        engine.push()
        engine.set_version(1, kv_on_update=mode)
        engine.submit([next_turn(turn)])
        (turn,) = drive(engine)
        check(turn, num_new=6, weights={1: 2.0})
        assert engine.session_counts == counts(0, num_computed)
        engine.submit([next_turn(turn)])
        (turn,) = drive(engine)
        assert engine.session_counts["parked_hit_tokens"] > 0, "those of the new weights"
        check(turn, num_new=6, weights={1: 2.0})


@LADDER
def test_a_swap_in_the_middle_of_a_turn(model: Transformer, tmp_path: Path, fake: dict[str, object]) -> None:
    with fake_engine(model, tmp_path, fake=fake | {"halts": [20]}) as engine:
        engine.submit([first_turn()])
        (turn,) = drive(engine)
        engine.submit([next_turn(turn, num_new=40)])
        drive(engine, lambda: num_tokens(engine) >= 5)
        set_weights(model, 2.0)
        engine.push()
        engine.set_version(1)
        (turn,) = drive(engine)
        check(turn, num_new=40, weights={0: 1.0, 1: 2.0})
        assert [span.version for span in turn.version_spans] == [0, 1]
        assert engine.session_counts == counts(BLOCK * 2, 0), "counted once"


@pytest.mark.parametrize(("num_before_death", "found"), [(0, counts(0, 7)), (5, counts(4, 3))])
def test_a_turn_whose_process_is_lost_is_sampled_again(
    model: Transformer, tmp_path: Path, num_before_death: int, found: dict[str, int]
) -> None:
    """It keeps the tokens that it has; without any, the new process finds nothing of its context."""
    with fake_engine(model, tmp_path, fake={"stuck_after": 5 + num_before_death}, max_restarts=1) as engine:
        engine.submit([first_turn(num_new=5)])
        (first,) = drive(engine)
        engine.submit([next_turn(first, num_new=30)])
        drive(engine, lambda: num_tokens(engine) == num_before_death)
        set_fake(engine, {})
        os.kill(engine.pid, signal.SIGKILL)
        (turn,) = drive(engine)
        assert engine.num_restarts == 1
        assert engine.session_counts == found, "each turn counts once"
    check(turn, num_new=30)
    assert turn.request.prompt_tokens.tolist() == next_turn(first).prompt_tokens.tolist()


def test_further_turns_pass_a_pause(model: Transformer, tmp_path: Path) -> None:
    """A swap between batches waits for begun episodes: their turns must not wait for it."""
    with fake_engine(model, tmp_path) as engine:
        engine.submit([first_turn()])
        (turn,) = drive(engine)
        engine.pause_admission(True)
        engine.submit([first_turn(1), first_turn(branch=1), next_turn(turn)])
        assert (engine.num_live, engine.num_waiting) == (1, 2)
        drive(engine, lambda: engine.num_live == 0)
        assert not engine.has_work(), "nothing that waits may start"
        engine.pause_admission(True, holds_turns=True)
        engine.let_go_on(EPISODE)
        assert (engine.num_live, engine.num_begun, engine.num_waiting) == (0, 0, 2)
        engine.pause_admission(True)
        assert (engine.num_live, engine.num_waiting) == (1, 1)
        (other,) = drive(engine, lambda: engine.num_live == 0)
        assert other.request.session == EPISODE._replace(branch=1)
        engine.pause_admission(False)
        (new,) = drive(engine)
        assert new.ordinal == 1


def test_a_turn_passes_a_pause_in_a_new_process(model: Transformer, tmp_path: Path) -> None:
    with fake_engine(model, tmp_path, fake={"stuck_after": 8}, max_restarts=1) as engine:
        engine.submit([first_turn()])
        (turn,) = drive(engine)
        engine.submit([next_turn(turn)])
        engine.pause_admission(True)
        engine.submit([first_turn(1)])
        set_fake(engine, {})
        os.kill(engine.pid, signal.SIGKILL)
        (turn,) = drive(engine, lambda: engine.num_live == 0)
        check(turn, num_new=6)
        assert (engine.num_restarts, engine.num_waiting) == (1, 1)


def test_what_waits_goes_in_the_order_of_our_own_engine() -> None:
    waiting = WaitingRequests([0, 1])
    waiting.add([request(0, parks=True), request(1, parks=True), request(0, parks=True, branch=1)])
    waiting.add([request(2, goes_on=True), request(3, goes_on=True), request(9, stream=1)])
    waiting.let_go_on(Session(0, 0, 0, 7))
    waiting.let_go_on(Session(1, 9, 0))
    waiting.add([resumed(request(4), 0), resumed(request(5, goes_on=True), 0)])
    waiting.is_paused = waiting.holds_turns = True
    assert waiting.num_begun == 2
    assert [(one.ordinal, one.branch) for one in waiting.take(0, 9)] == [(4, 0), (5, 0)], "those that have tokens"
    assert waiting.num_begun == 0
    waiting.holds_turns = False
    assert [(one.ordinal, one.branch) for one in waiting.take(0, 2)] == [(2, 0), (3, 0)]
    waiting.is_paused = False
    assert [(one.ordinal, one.branch) for one in waiting.take(0, 9)] == [(0, 0), (0, 1), (1, 0)]
    assert len(waiting) == 1
    assert waiting.take(1, -1) == []


def test_a_released_session_leaves_nothing(model: Transformer, tmp_path: Path) -> None:
    """A turn that is under way goes on, and is not what a later episode of this name finds."""
    with fake_engine(model, tmp_path, rooms={0: 1, 1: 2}) as engine:
        engine.wait_ready()
        engine.submit([first_turn(), first_turn(1), first_turn(2)])
        for ordinal in (0, 1):
            engine.release(Session(0, ordinal, 0))
        engine.release(Session(0, 7, 3))
        turns = sorted(drive(engine), key=lambda turn: turn.ordinal)
        assert len(turns) == 3
        engine.release(Session(0, 2, 0))
        engine.submit([next_turn(turn) for turn in turns])
        drive(engine)
        assert engine.session_counts == counts(0, 0)
        engine.submit([first_turn(2)])
        drive(engine)
        assert engine.is_idle


def test_an_episode_of_a_lost_replica_is_computed_again(model: Transformer, tmp_path: Path) -> None:
    with fake_engine(model, tmp_path) as engine:
        context = np.arange(10, 20, dtype=np.int32)
        engine.submit([replace(first_turn(), prompt_tokens=context, num_before=6, is_again=True)])
        drive(engine)
        assert engine.session_counts == counts(0, len(context))
        assert engine.num_re_prefilled == len(context)


def test_a_vllm_that_does_not_say_what_it_found(model: Transformer, tmp_path: Path) -> None:
    with fake_engine(model, tmp_path, fake={"found": "unsaid"}) as engine:
        engine.submit([first_turn()])
        (turn,) = drive(engine)
        engine.submit([next_turn(turn)])
        drive(engine)
        assert (engine.session_counts, engine.num_re_prefilled) == ({}, 0)


def test_more_found_than_was_asked_for_makes_no_sense(model: Transformer, tmp_path: Path) -> None:
    with fake_engine(model, tmp_path, fake={"found": 1000}) as engine:
        engine.submit([first_turn()])
        with pytest.raises(ChannelError, match="make no sense"):
            drive(engine)


def test_vllm_is_started_with_a_prefix_cache() -> None:
    def arguments(**sections: object) -> dict[str, object]:
        sections = {"prompts": {"tasks": [{"name": "chain_sum"}]}, "generator": {"engine": "vllm"}} | sections
        return spec_of(RunConfig(**sections), max_len=100, stop_token_ids=[]).engine_args  # type: ignore[arg-type]

    environment = {"class_path": "guess", "max_episode_tokens": 100}
    assert "enable_prefix_caching" not in arguments(), "vLLM's own default"
    assert arguments(environment=environment)["enable_prefix_caching"] is True
    generator = {"engine": "vllm", "vllm": {"engine_args": {"enable_prefix_caching": False}}}
    assert arguments(environment=environment, generator=generator)["enable_prefix_caching"] is False
