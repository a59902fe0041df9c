"""Evaluations: when they are due, which replica is asked, and what becomes of answers."""

import numpy as np
import pytest

from slipstream.controller.evaluations import GREEDY, SAMPLED, PendingEvaluations
from slipstream.core.service_messages import EvalScored
from slipstream.core.types import Prompt, StepDone, Swapped

PROMPTS = [Prompt(prompt_id=str(i), text="", tokens=np.zeros(1, np.int32), task="t") for i in range(3)]


def answer(eval_id: int, ordinal: int) -> EvalScored:
    return EvalScored(
        eval_id=eval_id, ordinal=ordinal, reward=1.0, completion_text="", prompt_text="", answer=None, num_tokens=1
    )


def test_the_replica_with_the_newest_version_is_asked():
    evaluations = PendingEvaluations()
    requests = [one for kind in (GREEDY, SAMPLED) for one in evaluations.begin(PROMPTS, kind, {0: 3, 1: 4, 2: 4})]
    assert [(replica, request.temperature) for replica, request in requests] == [(1, GREEDY), (1, SAMPLED)]
    first = requests[0][1].eval_id
    assert [evaluations.scored(answer(first, i)) is None for i in range(3)] == [True, True, False]
    assert evaluations


@pytest.mark.parametrize("others", [{}, {0: 7}])
def test_an_evaluation_of_a_lost_replica_begins_anew(others):
    evaluations = PendingEvaluations()
    [(_, request)] = evaluations.begin(PROMPTS, GREEDY, {1: 7})
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
    evaluations = PendingEvaluations()
    [(_, request)] = evaluations.begin(PROMPTS, GREEDY, {0: 0})
    assert [evaluations.scored(answer(request.eval_id, i)) for i in (0, 1, 0, 1)] == [None] * 4
    done = evaluations.scored(answer(request.eval_id, 2))
    assert done is not None
    assert [score.ordinal for score in done.scores] == [0, 1, 2]
    assert evaluations.scored(answer(request.eval_id, 2)) is None


def test_without_held_out_prompts_nothing_is_evaluated():
    evaluations = PendingEvaluations()
    assert evaluations.begin([], GREEDY, {0: 0}) == []
    assert not evaluations


def swapped(version: int) -> Swapped:
    return Swapped(replica=0, version=version, transfer_s=0.0, pause_s=0.0, probe_error=0.0)


def done(step: int) -> StepDone:
    return StepDone(step=step, version=step + 1, metrics={})


def test_an_evaluation_is_due_every_few_steps_but_the_last_and_begins_with_the_swap():
    evaluations = PendingEvaluations(every=2, steps=6)
    begun = []
    for step in range(6):
        assert evaluations.next(done(step)) == ()
        if step != 1:  # the version of step 1 is published late
            begun += [step + 1] * len(evaluations.next(swapped(step + 1)))
    assert begun == [3, 4]


def test_the_first_evaluation_is_of_both_kinds_and_after_a_resume_of_what_was_cut_off():
    evaluations = PendingEvaluations(every=2, steps=6)
    assert evaluations.first(0, ()) == (GREEDY, SAMPLED)
    assert evaluations.first(4, {2: None}) == (GREEDY,)
    assert evaluations.first(4, {4: None}) == ()
    assert evaluations.first(3, ()) == evaluations.first(6, ()) == ()
    assert PendingEvaluations(every=0, steps=6).first(4, ()) == ()
