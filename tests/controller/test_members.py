"""Groups that join, are lost and come back; evaluations of replicas that were lost."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.controller.evaluations import GREEDY, SAMPLED, Evaluations
from slipstream.controller.members import Change, Members
from slipstream.core.types import EvalScored, Prompt

TWO = ("generator-0", "generator-0@1")


def test_a_group_has_joined_when_all_its_ranks_have_with_one_incarnation():
    members = Members({"generator-0": TWO, "trainer": ("trainer",)})
    assert members.absent == ["generator-0", "trainer"]
    assert members.joined("generator-0@1", 1) == []
    assert members.joined("generator-0", 2) == []
    assert members.joined("generator-0@1", 2) == [Change("generator-0", TWO, 2, is_lost=False)]
    assert members.absent == ["trainer"]


def test_a_group_that_was_started_again_is_lost_before_it_joins():
    members = Members({"trainer": ("trainer",)})
    members.joined("trainer", 1)
    assert members.joined("trainer", 1) == [], "said twice"
    assert members.joined("trainer", 3) == [
        Change("trainer", ("trainer",), 1, is_lost=True),
        Change("trainer", ("trainer",), 3, is_lost=False),
    ]
    assert members.joined("trainer", 2) == [], "an earlier incarnation, late"


def test_what_was_lost_comes_back_with_a_higher_incarnation_only():
    members = Members({"generator-0": TWO})
    for member in TWO:
        members.joined(member, 1)
    assert members.lost("generator-0@1") == [Change("generator-0", TWO, 1, is_lost=True)]
    assert members.lost("generator-0") == [], "its other rank"
    for member in TWO:
        assert members.joined(member, 1) == []
    members.joined(TWO[0], 2)
    assert members.joined(TWO[1], 2) == [Change("generator-0", TWO, 2, is_lost=False)]


@given(seed=st.integers(0, 2**32))
def test_joins_and_losses_alternate_whatever_happens(seed):
    rng = random.Random(seed)
    members, is_there, newest = Members({"generator-0": TWO}), False, 0
    for _ in range(60):
        name = rng.choice(TWO)
        changes = members.lost(name) if rng.random() < 0.2 else members.joined(name, rng.randint(1, 8))
        for change in changes:
            assert change.is_lost == is_there
            assert change.is_lost or change.incarnation > newest
            is_there, newest = not change.is_lost, change.incarnation
        assert ("generator-0" in members.absent) == (not is_there)


PROMPTS = [Prompt(prompt_id=str(i), text="", tokens=np.zeros(1, np.int32), task="t") for i in range(3)]


def answer(eval_id: int, ordinal: int) -> EvalScored:
    return EvalScored(
        eval_id=eval_id, ordinal=ordinal, reward=1.0, completion_text="", prompt_text="", answer=None, num_tokens=1
    )


def test_the_replica_with_the_newest_version_is_asked():
    evaluations = Evaluations()
    requests = evaluations.begin(PROMPTS, (GREEDY, SAMPLED), {0: 3, 1: 4, 2: 4})
    assert [(replica, request.temperature) for replica, request in requests] == [(1, GREEDY), (1, SAMPLED)]
    first = requests[0][1].eval_id
    assert [evaluations.scored(answer(first, i)) is None for i in range(3)] == [True, True, False]
    assert evaluations


@pytest.mark.parametrize("others", [{}, {0: 7}])
def test_an_evaluation_of_a_lost_replica_begins_anew(others):
    evaluations = Evaluations()
    [(_, request)] = evaluations.begin(PROMPTS, (GREEDY,), {1: 7})
    evaluations.scored(answer(request.eval_id, 0))
    asked = evaluations.ask_again(others)
    if not others:
        assert asked == []
        assert evaluations, "it waits for a replica"
        asked = evaluations.ask_again({1: 8})
    [(replica, anew)] = asked
    assert replica == (0 if others else 1)
    assert len(anew.prompts) == 3
    assert evaluations.scored(answer(request.eval_id, 1)) is None, "an answer of the one that was lost"
    done = [evaluations.scored(answer(anew.eval_id, i)) for i in range(3)][-1]
    assert done is not None
    assert len(done.scores) == 3
    assert not evaluations


def test_an_answer_that_comes_twice_counts_once():
    """Rewards that were started again score once more what may have been scored."""
    evaluations = Evaluations()
    [(_, request)] = evaluations.begin(PROMPTS, (GREEDY,), {0: 0})
    assert [evaluations.scored(answer(request.eval_id, i)) for i in (0, 1, 0, 1)] == [None] * 4
    done = evaluations.scored(answer(request.eval_id, 2))
    assert done is not None
    assert [score.ordinal for score in done.scores] == [0, 1, 2]
    assert evaluations.scored(answer(request.eval_id, 2)) is None


def test_without_held_out_prompts_nothing_is_evaluated():
    evaluations = Evaluations()
    assert evaluations.begin([], (GREEDY,), {0: 0}) == []
    assert not evaluations
