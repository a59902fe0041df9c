"""Completions and answers in any order, copies and restarts: each group is scored by the whole of itself."""

from __future__ import annotations

import random

import numpy as np
import pytest
from drawn import drawn
from hypothesis import strategies as st

from slipstream.core.types import Completion, Prompt, Segment
from slipstream.rewards.assembly import Assembly, Call, ScoreEntry, Where

G, ORDINALS = 3, 4
PLAIN: Where = (False, "completion")
RANKED: Where = (False, "group")
OWN: Where = (True, "completion")
OWN_RANKED: Where = (True, "group")
PROMPT = Prompt(prompt_id="", text="q", tokens=np.zeros(1, dtype=np.int32), task="")


def completion(ordinal: int, sample: int, text: str, *, purpose: str = "train") -> Completion:
    return Completion(
        ordinal=ordinal, sample=sample, prompt=PROMPT, segments=(Segment(tokens=PROMPT.tokens),), text=text,
        finish_reason="stop", purpose=purpose, eval_id=5 if purpose == "eval" else -1,
    )  # fmt: skip


def of_one(text: str, term: int) -> float:
    return float(term * 1000 + len(text))


def of_group(texts: list[str], term: int) -> list[float]:
    return [float(term * 1000 + sorted(texts).index(text)) for text in texts]


def answered(call: Call, terms: list[Where]) -> list[float | None]:
    """What a scorer says: its terms of this kind, one after the other, each for all completions."""
    texts = [entry.completion.text for entry in call.entries]
    found: list[float | None] = []
    for index, where in enumerate(terms):
        if where == call.where:
            found += of_group(texts, index) if where[1] == "group" else [of_one(text, index) for text in texts]
    return found


class World:
    """Generators that keep what is not settled, rewards that forget all at a restart, a buffer that takes each once."""

    def __init__(self, terms: list[Where], chance: random.Random) -> None:
        self.terms, self.chance = terms, chance
        self.assembly, self.calls = Assembly(terms, G), []
        self.buffer: dict[int, dict[int, ScoreEntry]] = {ordinal: {} for ordinal in range(ORDINALS)}
        self.kept = {
            o: [completion(o, s, f"{o}.{s}." + "x" * chance.randrange(9)) for s in range(G)] for o in self.buffer
        }
        self.on_its_way = [one for group in self.kept.values() for one in group]
        chance.shuffle(self.on_its_way)

    def deliver(self) -> None:
        if self.on_its_way:
            self.calls += self.assembly.add(self.on_its_way.pop())

    def answer(self) -> None:
        if self.calls:
            call = self.calls.pop(self.chance.randrange(len(self.calls)))
            for entry in self.assembly.answer(call.job_id, answered(call, self.terms), None):
                group = self.buffer[entry.completion.ordinal]
                group.setdefault(entry.completion.sample, entry)
                if len(group) == G:
                    self.kept.pop(entry.completion.ordinal, None)

    def restart(self) -> None:
        """Who scored is gone with all it had; its successor is sent everything that is not settled."""
        self.assembly, self.calls = Assembly(self.terms, G), []
        self.on_its_way = [one for group in self.kept.values() for one in group]
        self.chance.shuffle(self.on_its_way)

    def lose_replica(self) -> None:
        """Some completions of a group never come; another replica samples all of it again, to other texts."""
        if not self.kept:
            return
        ordinal = self.chance.choice(sorted(self.kept))
        self.on_its_way = [one for one in self.on_its_way if one.ordinal != ordinal or self.chance.random() < 0.5]
        self.kept[ordinal] = [completion(ordinal, s, f"{ordinal}.{s}.again" + "y" * s) for s in range(G)]
        self.on_its_way[:0] = self.kept[ordinal]


@drawn(
    60,
    300,
    seed=st.integers(0, 2**32),
    terms=st.lists(st.sampled_from([PLAIN, RANKED, OWN, OWN_RANKED]), min_size=1, max_size=4),
)
def test_whatever_the_order_each_group_is_scored_as_a_whole(seed: int, terms: list[Where]) -> None:
    chance = random.Random(seed)
    world = World(terms, chance)
    for _ in range(chance.randrange(80)):
        chance.choice([world.deliver] * 4 + [world.answer] * 4 + [world.restart, world.lose_replica])()
    while world.on_its_way or world.calls:
        chance.choice([world.deliver, world.answer])()
    assert not world.kept, "every group is whole in the end"
    assert not world.assembly.num_called
    for group in world.buffer.values():
        assert sorted(group) == list(range(G))
        texts = [group[sample].completion.text for sample in range(G)]
        for index, where in enumerate(terms):
            found = [group[sample].parts[index] for sample in range(G)]
            one_by_one = [of_one(text, index) for text in texts]
            assert found == (of_group(texts, index) if where[1] == "group" else one_by_one)


def test_what_cannot_be_scored_does_not_hold_up_its_group() -> None:
    assembly = Assembly([RANKED], G)
    assert assembly.add(completion(0, 2, "c")) == assembly.leave_out(completion(0, 1, "")) == []
    (call,) = assembly.add(completion(0, 0, "a"))
    assert [entry.completion.sample for entry in call.entries] == [0, 2]
    assert assembly.num_called == 2
    done = assembly.answer(call.job_id, [1.0, 2.0], None)
    assert [entry.parts for entry in done] == [[1.0], [2.0]]
    assert not assembly.num_called


def test_the_last_of_a_group_may_be_one_that_cannot_be_scored() -> None:
    assembly = Assembly([RANKED], 2)
    assembly.add(completion(0, 1, "b"))
    (call,) = assembly.leave_out(completion(0, 0, ""))
    assert [entry.completion.sample for entry in call.entries] == [1]
    assert Assembly([RANKED], 1).leave_out(completion(0, 0, "")) == []  # nothing is left to call with


@pytest.mark.parametrize("sizes", [(1, 3), (2, 2), (3, 1)])
def test_a_call_that_fails_fails_its_whole_group_and_no_other(sizes: tuple[int, int]) -> None:
    assembly = Assembly([PLAIN, RANKED], 2)
    calls = [call for o in range(2) for s in range(2) for call in assembly.add(completion(o, s, "t" * sizes[s]))]
    done: list[ScoreEntry] = []
    for call in calls:
        is_bad = call.where == RANKED and call.entries[0].completion.ordinal == 0
        done += assembly.answer(call.job_id, [] if is_bad else [1.0] * len(call.entries), "it died" if is_bad else None)
    assert [(entry.completion.ordinal, entry.failure) for entry in done] == [
        (0, "it died"), (0, "it died"), (1, None), (1, None)
    ]  # fmt: skip


def test_an_answer_of_the_wrong_length_is_none() -> None:
    """Workers are not trusted."""
    assembly = Assembly([RANKED], 2)
    assembly.add(completion(0, 0, "a"))
    (call,) = assembly.add(completion(0, 1, "b"))
    failures = {entry.failure for entry in assembly.answer(call.job_id, [1.0], None)}
    assert failures == {"worker sent bad output: 1 parts for 2"}


def test_a_completion_of_an_evaluation_is_a_group_of_its_own() -> None:
    (call,) = Assembly([RANKED], G).add(completion(0, 0, "a", purpose="eval"))
    assert len(call.entries) == 1
