"""Episodes of several turns in simulated runs: times by hand, what is recorded, and that one turn changes nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from drawn import drawn
from hypothesis import given
from hypothesis import strategies as st

from slipstream.controller.policies import make_policy
from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.run_log import EpisodeLine, RolloutLine, ScheduleConfig
from slipstream.plan.answer import answer
from slipstream.plan.calibrate import generator_dials
from slipstream.plan.lengths import MOST, Turns, WithTurns, recorded_turns
from slipstream.plan.question import question_of
from slipstream.plan.simulated_generator import Replica
from slipstream.plan.simulated_run import (
    FOR_ENVIRONMENTS,
    Costs,
    GroupWork,
    MadeUp,
    Simulated,
    SimulatedSetup,
    SimulatedTurn,
)
from slipstream.plan.simulator import Simulation, simulate

P, G, LENGTH = 4, 2, 12
DECODE_S, TRAIN_S, PREFILL_S = 0.1, 3.0, 0.01
COSTS = Costs(decode=lambda *_: DECODE_S, train=lambda _: {"forward_backward": TRAIN_S})
IN_TURN = SimulatedSetup(slots=P * G, weight_update="between_batches")


class Fixed:
    """The same episodes in every group."""

    def __init__(self, *turns: SimulatedTurn) -> None:
        self.turns = turns

    def group(self, ordinal: int, step: int) -> GroupWork:
        length = sum(turn.sampled for turn in self.turns)
        return GroupWork(1, (length,) * G, turns=(self.turns,) * G)

    def held_out(self, version: int) -> tuple[GroupWork, ...]:
        return ()


def run(work, costs: Costs = COSTS, setup: SimulatedSetup = IN_TURN, *, sessions: int = P * G, **dials) -> Simulated:
    config = {"groups_per_step": P, "completions_per_group": G, "max_staleness": 0, "reorder_window": 1, "steps": 6}
    schedule = make_policy("oldest_first", ScheduleConfig(**config | {"capacity": sessions + G} | dials))
    return simulate(schedule, setup, work, costs)


def test_in_turns_every_answer_is_waited_for():
    found = run(Fixed(SimulatedTurn(4, 3, 0.5), SimulatedTurn(2, 5, 0.25), SimulatedTurn(6, 0, 1.0)))
    step_s = LENGTH * DECODE_S + (0.5 + 0.25 + 1.0) + TRAIN_S
    assert found.wall_s == pytest.approx(6 * step_s)
    assert found.accounting["generator-0"]["wait_environment"] == pytest.approx(6 * 1.75)
    assert found.accounting["generator-0"]["decode"] == pytest.approx(6 * LENGTH * DECODE_S)
    assert found.outcome.idle[FOR_ENVIRONMENTS] == pytest.approx(1.75 / step_s)
    assert found.lags == {0: 6 * P * G * LENGTH}, "given tokens have no version"
    assert [step.batch.completion_tokens for step in found.timed] == [P * G * (LENGTH + 8)] * 6
    assert found.timed[0].batch.given_tokens == P * G * 8


def test_only_given_tokens_are_prefilled_at_a_turn():
    costs = replace(COSTS, prefill=lambda _, tokens, __: tokens * PREFILL_S)
    found = run(
        Fixed(SimulatedTurn(4, 3, 0.5), SimulatedTurn(8, 0, 0.0)), costs, replace(IN_TURN, prefill_tokens=10**6)
    )
    states = found.accounting["generator-0"]
    assert states["prefill"] == pytest.approx(6 * P * G * 3 * PREFILL_S), "a prompt of one token needs none"
    assert "re_prefill" not in states


def test_sessions_hide_the_environment():
    """Two rows are busy for 2.4 s with four episodes, of which each takes 3.2 s; with many there is always one to go
    on with."""
    work = Fixed(SimulatedTurn(6, 0, 1.0), SimulatedTurn(6, 0, 1.0))
    setup = SimulatedSetup(slots=2)
    costs = replace(COSTS, train=lambda _: {"forward_backward": 0.1})
    dials = {"max_staleness": 3, "steps": 40}
    few, many = (run(work, costs, setup, sessions=n, **dials).outcome for n in (2, 32))
    assert few.idle[FOR_ENVIRONMENTS] == pytest.approx(1 - 2.4 / 3.2, abs=0.02)
    assert many.idle["generator"] < 0.05
    assert many.step_s == pytest.approx(P * G * LENGTH * DECODE_S / 2, rel=0.1)


def test_between_batches_a_version_waits_for_episodes_that_have_begun():
    """No episode spans two versions, though its environment works while the version is there."""
    work = Fixed(SimulatedTurn(6, 1, 2.0), SimulatedTurn(6, 0, 2.0))
    found = run(work, setup=replace(IN_TURN, slots=3), max_staleness=2, steps=20, sessions=12)
    assert found.generated_tokens == found.left_tokens + sum(found.lags.values())
    for states in found.accounting.values():
        assert sum(states.values()) == pytest.approx(found.wall_s)


@pytest.fixture
def ended(monkeypatch) -> list[list[tuple[int, int]]]:
    """Return the (version, tokens) of every completion that ends."""
    found, tell = [], Simulation.finished

    def finished(simulation, replica, rows) -> None:
        found.extend(spans for _, spans in rows)
        tell(simulation, replica, rows)

    monkeypatch.setattr(Simulation, "finished", finished)
    return found


TURNED = Fixed(SimulatedTurn(6, 1, 2.0), SimulatedTurn(6, 0, 2.0))


def test_at_turns_a_version_waits_for_rows_alone(ended):
    found, versions = {}, {}
    for at in ("episode", "turn"):
        ended.clear()
        setup = replace(IN_TURN, slots=3, weight_update_at=at)
        found[at] = run(TURNED, setup=setup, max_staleness=2, steps=20, sessions=12)
        versions[at] = {len({version for version, _ in spans}) for spans in ended}
        assert all(spans in ([(a, 12)], [(a, 6), (b, 6)]) for spans in ended for a, b in [(spans[0][0], spans[-1][0])])
        assert max(found[at].lags) <= 2
    assert versions == {"episode": {1}, "turn": {1, 2}}
    drain, turns = (found[at].accounting["generator-0"]["drain"] for at in ("episode", "turn"))
    assert 0 < turns < drain / 2
    assert found["turn"].wall_s < found["episode"].wall_s


@pytest.mark.parametrize("work", [TURNED, Fixed(SimulatedTurn(12))], ids=["episodes", "completions"])
def test_with_adapters_nothing_waits_and_all_keep_their_version(work, ended, monkeypatch):
    held, commit = [], Replica._commit

    def committing(replica, version, ahead) -> None:
        commit(replica, version, ahead)
        held.append(len(replica.engine.versions_in_use | {row.version for row in replica.away} | {version}))

    monkeypatch.setattr(Replica, "_commit", committing)
    setup = replace(IN_TURN, slots=3, resident_versions=3)
    found = run(work, setup=setup, max_staleness=2, steps=20, sessions=12)
    waits = run(work, setup=replace(setup, resident_versions=1), max_staleness=2, steps=20, sessions=12)
    assert all(len({version for version, _ in spans}) == 1 for spans in ended)
    assert 2 <= max(held) <= 3
    assert max(found.lags) <= 2
    assert "drain" in waits.accounting["generator-0"]
    assert "drain" not in found.accounting["generator-0"]
    assert found.wall_s <= waits.wall_s


def test_a_run_is_simulated_with_its_versions():
    between: dict[str, Any] = {"weight_update": "between_batches"}
    lora = {"model": {"path": "a/b", "lora": {"rank": 4}}}
    cases = (between | lora, lora, between, between | {"generator": {"weight_update_at": "turn"}})
    recipe = {"prompts": {"tasks": [{"name": "chain_sum"}]}, "max_staleness": 3}
    setups = [SimulatedSetup(**generator_dials(RunConfig.model_validate(recipe | case))) for case in cases]
    assert [setup.resident_versions for setup in setups] == [4, 1, 1, 1]
    assert [setup.weight_update_at for setup in setups] == ["episode"] * 3 + ["turn"]


@drawn(
    15,
    40,
    seed=st.integers(0, 99),
    update=st.sampled_from(["in_flight", "between_batches"]),
    slots=st.integers(1, 8),
    turns=st.floats(1.0, 5.0),
    given_tokens=st.integers(0, 9),
    environment_s=st.sampled_from([0.0, 0.05, 1.0]),
    staleness=st.integers(0, 3),
    kv=st.sampled_from(["keep", "recompute"]),
    at=st.sampled_from(["episode", "turn", "any: versions stay"]),
)
def test_nothing_is_lost(seed, update, slots, turns, given_tokens, environment_s, staleness, kv, at):
    lengths = np.random.default_rng(seed).integers(1, 30, (200, G)).tolist()
    shape = Turns(turns=turns, given_tokens=given_tokens, environment_s=environment_s)
    work = WithTurns(MadeUp(lengths=lambda o: tuple(lengths[o]), prompt_tokens=5), shape, seed)
    setup = SimulatedSetup(slots=slots, weight_update=update, kv_on_update=kv if update == "in_flight" else "keep")
    if update == "between_batches":
        keeps = at.startswith("any")
        dials = {"resident_versions": staleness + 1} if keeps else {"weight_update_at": at}
        setup = replace(setup, **dials)
    costs = replace(COSTS, prefill=lambda _, tokens, __: tokens * PREFILL_S, stage_s=0.1, swap_s=0.05)
    found = run(work, costs, setup, max_staleness=staleness, sessions=3 * slots)
    assert len(found.timed) == 6
    assert found.generated_tokens == found.left_tokens + sum(found.lags.values())
    assert max(found.lags) <= staleness
    for states in found.accounting.values():
        assert sum(states.values()) == pytest.approx(found.wall_s)


def test_one_turn_whose_environment_says_nothing_at_once_changes_nothing():
    work = MadeUp(lengths=lambda o: (3 + o % 7, 20 - o % 5), prompt_tokens=4)
    setup = SimulatedSetup(slots=4)
    plain = run(work, setup=setup, max_staleness=2, steps=20)
    turned = run(WithTurns(work, Turns(turns=1.0, environment_s=0.0)), setup=setup, max_staleness=2, steps=20)
    assert (turned.timed, turned.accounting, turned.lags) == (plain.timed, plain.accounting, plain.lags)
    assert FOR_ENVIRONMENTS not in plain.outcome.idle


@given(length=st.integers(1, 500), turns=st.floats(1.0, 40.0), seed=st.integers(0, 9))
def test_turns_share_a_completion_out(length, turns, seed):
    shape = Turns(turns=turns, given_tokens=7, environment_s=2.0)
    found = shape.episode([SimulatedTurn(length)], np.random.default_rng(seed))
    assert sum(turn.sampled for turn in found) == length
    assert len(found) in {min(length, int(turns)), min(length, int(turns) + 1)}
    assert max(turn.sampled for turn in found) - min(turn.sampled for turn in found) <= 1
    assert [turn.given for turn in found] == [7] * (len(found) - 1) + [0]
    assert all(0 < turn.environment_s <= 2.0 * MOST for turn in found)


def test_the_mean_of_an_answer_and_of_the_turns_is_what_was_asked_for():
    shape, rng = Turns(turns=3.25, environment_s=2.0), np.random.default_rng(0)
    episodes = [shape.episode([SimulatedTurn(100)], rng) for _ in range(10_000)]
    assert np.mean([len(one) for one in episodes]) == pytest.approx(3.25, abs=0.02)
    assert np.mean([turn.environment_s for one in episodes for turn in one]) == pytest.approx(2.0, rel=0.03)


def test_what_is_not_named_stays_as_recorded():
    recorded, rng = (SimulatedTurn(5, 2, 1.0), SimulatedTurn(7, 0, 3.0)), np.random.default_rng(0)
    assert Turns().episode(recorded, rng) == recorded
    assert Turns(given_tokens=9).episode(recorded, rng) == (SimulatedTurn(5, 9, 1.0), SimulatedTurn(7, 0, 3.0))
    split = Turns(turns=4.0).episode(recorded, rng)
    assert [turn.sampled for turn in split] == [3] * 4
    assert sum(turn.environment_s for turn in split) == pytest.approx(4.0)


LINE = msgspec.convert(
    {
        **{"outcome": "trained", "step": 0, "ordinal": 0, "sample": 0, "prompt_id": "", "task": "", "prompt": "a"},
        **{"completion": "", "answer": None, "reward": 1.0, "parts": {}, "failure": None, "finish_reason": "stop"},
        **{"num_tokens": 20, "versions": [(0, 3), (4, 4), (6, -1), (9, 4), (15, -1), (18, 5)], "replica": 0},
        **{"mean_behaviour_logprob": None, "started_s": 0.0, "finished_s": 1.0, "scored_s": 2.0},
    },
    RolloutLine,
    strict=False,
)


def test_a_recorded_episode_has_its_turns():
    assert recorded_turns(LINE) == ()
    episode = EpisodeLine(messages=[], turns=3, turn_rewards=[], environment_s=6.0)
    found = recorded_turns(msgspec.structs.replace(LINE, episode=episode))
    assert found == (SimulatedTurn(6, 3, 2.0), SimulatedTurn(6, 3, 2.0), SimulatedTurn(2, 0, 2.0))


@pytest.mark.parametrize(
    "wrong", [{"turns": 0.5}, {"turns": float("nan")}, {"given_tokens": -1}, {"environment_s": float("inf")}]
)
def test_numbers_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError, match="out of range"):
        Turns(**wrong)


@pytest.mark.slow
def test_a_plan_of_episodes_has_their_environment_in_it():
    lengths = {"prompt_tokens": 256.0, "completion_tokens": 512.0, "p99_tokens": 1024.0, "max_new_tokens": 2048}
    sizes = {"groups_per_step": 16, "completions_per_group": 4, "max_staleness": 2, "rows": 1}
    asked = question_of(model="llama-3.1-8b", gpus=8, gpu="h100", **lengths, **sizes)
    slow = replace(asked, turns=4.0, given_tokens=100, environment_s=5.0)
    plain, waiting, served = (answer(one) for one in (asked, slow, replace(slow, sessions=4096)))
    assert "turns" not in plain.to_dict()
    assert FOR_ENVIRONMENTS not in plain.plan.rows[0].rehearsed.idle
    assert waiting.plan.synchronous is not None
    assert plain.plan.synchronous is not None
    assert waiting.plan.synchronous.seconds > plain.plan.synchronous.seconds + 4 * 5.0
    assert waiting.plan.rows[0].rehearsed.step_s > plain.plan.rows[0].rehearsed.step_s
    assert served.plan.rows[0].rehearsed.step_s <= waiting.plan.rows[0].rehearsed.step_s * 1.01
    assert waiting.to_dict()["turns"] == {"turns": 4.0, "given_tokens": 100, "environment_s": 5.0}
