"""What a generator keeps until it has its verdict, and sends again to whoever comes after a scorer that was lost."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from ports import Port
from test_executor_swaps import Node

from slipstream.core.clock import VirtualClock
from slipstream.core.service_messages import Admit, CompletionsFinished, Evaluate, Settled
from slipstream.core.types import Completion, Prompt, Segment
from slipstream.generator.outgoing import GATHER_S
from slipstream.generator.unsettled import Unsettled

PROMPT = Prompt(prompt_id="p", text="x", tokens=np.zeros(1, np.int32), task="t")


def completion(ordinal: int, sample: int = 0, *, eval_id: int = -1) -> Completion:
    segment = Segment(tokens=np.zeros(2, np.int32))
    return Completion(
        ordinal=ordinal,
        sample=sample,
        prompt=PROMPT,
        segments=(segment,),
        text="",
        finish_reason="stop",
        purpose="train" if eval_id < 0 else "eval",
        eval_id=eval_id,
    )


def sent(port: Port) -> list[tuple[int, int, int]]:
    found = [(m.eval_id, m.ordinal, m.sample) for m in port.messages if isinstance(m, Completion)]
    port.messages.clear()
    return found


def test_each_is_sent_when_asked_and_kept_until_its_group_is_settled() -> None:
    port = Port("rewards")
    unsettled = Unsettled(port)
    for ordinal, sample in [(3, 0), (3, 1), (4, 0)]:
        unsettled.add(completion(ordinal, sample))
        assert sent(port) == []
        assert unsettled.send()
        assert sent(port) == [(-1, ordinal, sample)]
    assert len(unsettled) == 3
    unsettled.settle(Settled(ordinals=(3, 9)))
    unsettled.rejoined("rewards")
    assert sent(port) == [(-1, 4, 0)]
    unsettled.rejoined("generator-1")
    assert sent(port) == [], "of others it is none of our business"


def test_groups_and_the_prompts_of_evaluations_are_counted_apart() -> None:
    port = Port("rewards")
    unsettled = Unsettled(port)
    for one in (completion(1), completion(1, eval_id=0), completion(2, eval_id=0), completion(1, eval_id=1)):
        unsettled.add(one)
    unsettled.settle(Settled(ordinals=(1,)))
    unsettled.send()
    sent(port)
    unsettled.rejoined("rewards")
    assert sent(port) == [(0, 1, 0), (0, 2, 0), (1, 1, 0)]
    unsettled.settle(Settled(eval_ids=(0,)))
    unsettled.rejoined("rewards")
    assert sent(port) == [(1, 1, 0)]


def test_nothing_waits_for_room_and_nothing_is_out_of_order() -> None:
    port = Port("rewards", room=2)
    unsettled = Unsettled(port)
    for ordinal in range(5):
        unsettled.add(completion(ordinal))
    assert unsettled.send()
    assert not unsettled.send()
    assert sent(port) == [(-1, 0, 0), (-1, 1, 0)]
    unsettled.settle(Settled(ordinals=(2,)))  # elsewhere
    assert unsettled.send()
    assert sent(port) == [(-1, 3, 0), (-1, 4, 0)]
    assert not unsettled.send(), "there is nothing left to send"


def test_while_nobody_is_there_all_is_kept() -> None:
    port = Port("rewards")
    unsettled = Unsettled(port)
    unsettled.add(completion(0))
    unsettled.send()
    sent(port)
    port.is_closed = True
    unsettled.add(completion(1))
    unsettled.add(completion(2))
    assert not unsettled.send()
    port.is_closed = False
    assert not unsettled.send(), "a successor is told of, not guessed"
    unsettled.rejoined("rewards")
    assert sent(port) == [(-1, 0, 0), (-1, 1, 0), (-1, 2, 0)]


@pytest.mark.parametrize("seed", range(30))
def test_every_scorer_that_lives_long_enough_gets_all_that_has_no_verdict(seed: int) -> None:
    """Against a plain model: what was added and not settled; losses, full channels and verdicts at random."""
    rng, port = random.Random(seed), Port("rewards", room=3)
    unsettled, has_no_verdict, has_got = Unsettled(port), {}, set()
    for number in range(300):
        match rng.choice(["add", "add", "take", "settle", "lose"]):
            case "add":
                ordinal = rng.randrange(40)
                has_no_verdict.setdefault(ordinal, []).append(number)
                unsettled.add(completion(ordinal, number))
                unsettled.send()
            case "take":
                has_got.update(sent(port))
                unsettled.send()
            case "settle" if has_no_verdict:
                ordinal = rng.choice(sorted(has_no_verdict))
                del has_no_verdict[ordinal]
                unsettled.settle(Settled(ordinals=(ordinal,)))
            case "lose":
                port.messages.clear()
                has_got.clear()
                unsettled.rejoined("rewards")
    expected = {(-1, ordinal, number) for ordinal, numbers in has_no_verdict.items() for number in numbers}
    assert len(unsettled) == len(expected)
    while got := sent(port):
        has_got.update(got)
        unsettled.send()
    assert expected <= has_got


def test_a_generator_keeps_what_it_has_finished_and_sends_no_group_that_others_were_scored_for(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.admit(0, 2)
    node.admit(1, 2)
    node.steps(4)
    node.commands.put(Settled(ordinals=(1,)))  # its first copy was scored after all
    node.steps(60)
    told = [m for m in node.events.messages if isinstance(m, CompletionsFinished)]
    finished = [one.ordinal for message in told for one in message.finished]
    assert sorted(finished) == [0, 0, 1, 1], "the schedule hears of all"
    assert set(node.finished()) == {(0, 0), (0, 1)}
    node.completions.messages.clear()
    node.generator.rejoined("peer")
    assert set(node.finished()) == {(0, 0), (0, 1)}
    node.commands.put(Settled(ordinals=(0,)))
    node.steps(1)
    node.completions.messages.clear()
    node.generator.rejoined("peer")
    assert not node.completions.messages
    assert not node.generator.outgoing.settled_early, "nothing is remembered of what is over"


@pytest.mark.parametrize("host", ["process", "inline"])
def test_completions_gather_for_a_moment_while_more_is_decoded(tmp_path: Path, host: str) -> None:
    outgoing = Node(tmp_path, host=host).generator.outgoing
    clock, unsettled = outgoing._context.clock, outgoing.unsettled
    assert isinstance(clock, VirtualClock)
    assert unsettled is not None
    assert not outgoing.is_due(more_comes=False), "there is nothing"
    unsettled.add(completion(0))
    assert outgoing.is_due(more_comes=True), "the last ones left long ago"
    assert outgoing.send()
    unsettled.add(completion(1))
    assert outgoing.is_due(more_comes=True) == (host == "inline"), "between processes a frame costs more than it does"
    assert outgoing.is_due(more_comes=False)
    clock.advance(GATHER_S)
    assert outgoing.is_due(more_comes=True)


def test_the_last_completion_of_a_group_is_not_held_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedule has heard that the group is finished: what it waits for now are its scores."""
    outgoing = Node(tmp_path).generator.outgoing
    monkeypatch.setattr(outgoing, "completion_of", lambda ended, prompt: ended)
    ended: list[Any] = [completion(0), completion(0, 1)]
    outgoing.send()
    outgoing.prompts[0] = (PROMPT, 2)
    outgoing.pass_on(ended[0])
    assert not outgoing.is_due(more_comes=True)
    outgoing.pass_on(ended[1])
    assert outgoing.is_due(more_comes=True)
    outgoing.send()
    assert not outgoing.is_due(more_comes=True)


def test_the_last_completions_of_all_leave_in_the_step_that_ends_them(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.admit(0, 4)
    while node.generator.step():
        if not node.backend.has_work():
            assert len(node.finished()) == 4
    assert len(node.finished()) == 4


def test_tokens_that_a_resume_brought_were_not_generated_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node, passed_on = Node(tmp_path), []
    outgoing = node.generator.outgoing
    pass_on = outgoing.pass_on
    monkeypatch.setattr(outgoing, "pass_on", lambda one, **named: passed_on.append(one) or pass_on(one, **named))
    node.admit(0, 1)
    node.steps(60)
    [whole] = node.finished().values()
    assert outgoing.generated_tokens == whole.num_tokens
    outgoing.prompts[0] = (whole.prompt, 1)
    pass_on(passed_on[0], num_restored=whole.num_tokens - 2)
    assert outgoing.generated_tokens == whole.num_tokens + 2


@pytest.mark.parametrize(("num_restored", "num_sampled"), [(0, 0), (3, 3), (6, 4), (9, 6)])  # of all, and of those
def test_the_news_of_an_episode_counts_its_sampled_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_restored: int, num_sampled: int
) -> None:
    given = Segment(tokens=np.zeros(3, np.int32))
    sampled = Segment(tokens=np.zeros(4, np.int32), behaviour_logprobs=np.zeros(4, np.float32))
    episode = msgspec.structs.replace(completion(0), segments=(sampled, given, sampled))
    outgoing = Node(tmp_path).generator.outgoing
    outgoing.prompts[0] = (PROMPT, 1)
    monkeypatch.setattr(outgoing, "completion_of", lambda ended, prompt: ended)
    ended: Any = episode
    told = outgoing.pass_on(ended, num_restored=num_restored)
    assert told is not None
    assert (told.num_tokens, told.num_restored) == (8, num_sampled)
    assert outgoing.generated_tokens == 8 - num_sampled


def test_answers_of_evaluations_are_kept_too(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.commands.put(Evaluate(eval_id=7, prompts=(PROMPT, PROMPT), temperature=0.0))
    node.steps(60)
    answers: list[Any] = list(node.completions.messages)
    assert [(m.eval_id, m.ordinal) for m in answers] == [(7, 0), (7, 1)]
    node.completions.messages.clear()
    node.generator.rejoined("peer")
    assert list(node.completions.messages) == answers
    node.commands.put(Settled(eval_ids=(7,)))
    node.commands.put(Admit(ordinal=0, replica=0, prompt=PROMPT, num_samples=1))
    node.steps(1)
    node.completions.messages.clear()
    node.generator.rejoined("peer")
    assert not [m for m in node.completions.messages if isinstance(m, Completion) and m.purpose == "eval"]
