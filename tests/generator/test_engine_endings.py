"""How completions leave their rows: preempted, stale, out of time; and that none of it changes what they say."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from engine_kit import drain, new_engine, random_model, random_prompt, requests, run

from slipstream.core.clock import VirtualClock
from slipstream.core.errors import ConfigError
from slipstream.core.types import VersionSpan
from slipstream.generator.requests import Finished, Request


def assert_same_text(left: Finished, right: Finished) -> None:
    """Tokens exactly; logprobs up to the rounding between decoded and prefilled keys."""
    assert np.array_equal(left.tokens, right.tokens)
    assert np.abs(left.logprobs - right.logprobs).max() < 1e-5
    assert left.finish_reason == right.finish_reason


def test_preemption_changes_no_text() -> None:
    model, batch = random_model(), requests(4, 3, max_new_tokens=20)
    undisturbed = run(new_engine(model), batch)
    engine = new_engine(model, num_slots=8)
    engine.submit(batch)
    finished = {}
    for count in (0, 3, 0, 8, 1, 0, 0, 2):
        finished.update({(f.ordinal, f.sample): f for f in engine.step()})
        engine.preempt(count)
    finished.update(drain(engine))
    assert finished.keys() == undisturbed.keys()
    for key, completion in undisturbed.items():
        assert_same_text(finished[key], completion)
        assert finished[key].version_spans == (VersionSpan(start=0, version=0),)


def test_the_youngest_are_preempted_and_go_before_what_has_not_started() -> None:
    engine = new_engine(random_model(), num_slots=3, stop_token_ids=[])
    engine.submit([Request(i, 0, random_prompt(5, seed=i), max_new_tokens=4 + i) for i in range(5)])
    engine.step()
    engine.preempt(2)
    assert (engine.num_live, engine.num_waiting, engine._runner.num_rows - engine._rows.num_live) == (3, 2, 2)
    assert engine.step() == []
    assert [r.ordinal for r in engine.export_live()] == [0, 1, 2]
    assert (engine.num_live, engine.num_waiting) == (0, 2)


def test_what_was_preempted_drains_while_admission_is_paused() -> None:
    engine = new_engine(random_model(), num_slots=4, stop_token_ids=[])
    engine.submit(requests(6, max_new_tokens=5))
    engine.step()
    engine.pause_admission(True)
    engine.preempt(4)
    assert engine.num_live == 4
    finished = [f for _ in range(4) for f in engine.step()]
    assert sorted(f.ordinal for f in finished) == [0, 1, 2, 3]
    assert (engine.num_live, engine.num_waiting) == (0, 2)


def test_export_takes_what_waits_to_get_back_as_well() -> None:
    model, batch = random_model(), requests(4, 2)
    undisturbed = run(new_engine(model), batch)
    engine = new_engine(model)
    engine.submit(batch)
    for _ in range(3):
        engine.step()
    engine.preempt(5)
    exported = engine.export_live()
    assert engine.is_idle
    assert [(r.ordinal, r.sample) for r in exported] == [(r.ordinal, r.sample) for r in batch]
    for key, completion in run(new_engine(model), exported).items():
        assert_same_text(completion, undisturbed[key])


def test_only_caches_beyond_the_age_are_made_again() -> None:
    model = random_model()
    engine = new_engine(model, num_slots=8, stop_token_ids=[])
    engine.submit([Request(0, 0, random_prompt(9), max_new_tokens=40)])
    engine.step()
    engine.set_version(1, kv_on_update="recompute_if_older_than", max_kv_age=2)
    engine.submit([Request(1, 0, random_prompt(9, seed=1), max_new_tokens=40)])
    engine.step()
    engine.step()
    recomputed = []
    for version in (2, 3, 4, 5, 6, 7):
        engine.set_version(version, kv_on_update="recompute_if_older_than", max_kv_age=2)
        recomputed.append(engine.stats.recomputed_caches)
        engine.step()
        engine.step()
    # The first holds keys of version 0 until 3, of 3 until 6; the second those of 1 until 4, of 4 until 7.
    assert recomputed == [0, 1, 2, 2, 3, 4]
    engine.set_version(8, kv_on_update="recompute")
    assert engine.stats.recomputed_caches == 6
    assert all(len(f.tokens) == 40 for f in drain(engine).values())


def test_recomputing_goes_on_within_the_budget_of_the_steps() -> None:
    engine = new_engine(random_model(), num_slots=8, stop_token_ids=[], prefill_tokens=16, prefill_chunk=16)
    engine.submit([Request(i, 0, random_prompt(17, seed=i), max_new_tokens=60) for i in range(4)])
    while engine.num_waiting:
        engine.step()
    before, generated = engine.stats.prefilled_tokens, engine.stats.generated_tokens
    engine.set_version(1, kv_on_update="recompute")
    steps = []
    for _ in range(8):
        engine.step()
        steps.append((engine.stats.prefilled_tokens - before, engine.stats.generated_tokens - generated))
    assert all(after[0] - now[0] <= 16 for now, after in itertools.pairwise(steps))
    assert steps[-1][1] > 4  # those whose cache is ready go on meanwhile


def test_time_limits_count_from_the_start_and_leave_a_token() -> None:
    clock = VirtualClock()
    engine = new_engine(random_model(), num_slots=2, stop_token_ids=[], clock=clock)
    limits = [3.0, None, 0.5, 100.0]
    engine.submit(
        [
            Request(i, 0, random_prompt(4, seed=i), max_new_tokens=7, time_limit_s=limit)
            for i, limit in enumerate(limits)
        ]
    )
    finished: dict[int, Finished] = {}
    while not engine.is_idle:
        clock.advance(1.0)
        finished.update({f.ordinal: f for f in engine.step()})
    assert {i: (len(f.tokens), f.finish_reason) for i, f in finished.items()} == {
        0: (4, "deadline"),
        1: (7, "length"),
        2: (2, "deadline"),
        3: (7, "length"),
    }


def test_time_passes_while_a_completion_waits_to_get_back() -> None:
    clock = VirtualClock()
    engine = new_engine(random_model(), stop_token_ids=[], clock=clock)
    engine.submit([Request(0, 0, random_prompt(4), max_new_tokens=50, time_limit_s=5.0)])
    engine.step()
    [exported] = engine.export_live()
    clock.advance(10.0)
    [finished] = run(engine, [exported]).values()
    assert (len(finished.tokens), finished.finish_reason, finished.started_s) == (2, "deadline", 0.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 1.5},
        {"time_limit_s": 0.0},
        {"keep_sets": True},
        {"keep_sets": True, "top_k": 4, "temperature": 0.0},
    ],
)
def test_impossible_settings_are_refused(wrong: dict[str, float]) -> None:
    request = dataclasses.replace(Request(0, 0, random_prompt(4), max_new_tokens=4), **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        new_engine(random_model()).submit([request])


def test_requests_are_withdrawn_wherever_they_are() -> None:
    """The others go on as if they had never been there, and what was withdrawn as if it had never left."""
    batch = requests(8, max_new_tokens=15)
    alone = run(new_engine(random_model(), stop_token_ids=[]), batch)
    engine = new_engine(random_model(), num_slots=3, stop_token_ids=[])
    engine.submit(batch)
    for _ in range(4):
        engine.step()
    engine.preempt(1)
    gone = {0, 2, 5}
    left = engine.withdraw(lambda request: request.ordinal in gone)
    assert [request.ordinal for request in left] == sorted(gone)
    assert [request.resume is not None for request in left] == [True, True, False], "5 had no row"
    assert (engine.num_live, engine.num_waiting) == (1, 4)
    rest = drain(engine)
    assert {ordinal for ordinal, _ in rest} == set(range(8)) - gone
    rest |= run(engine, left)
    assert engine.is_idle
    for key, finished in rest.items():
        assert finished.tokens.tolist() == alone[key].tokens.tolist()
    assert engine.withdraw(lambda _: True) == []
