"""Prefix trees against brute force: sets of beginnings, for tokens alone and with recorded experts."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
from drawn import drawn
from hypothesis import given
from hypothesis import strategies as st

from slipstream.batching import prefix_tree
from slipstream.batching.collate import Atom, collate, first_fit
from slipstream.batching.prefix_tree import PrefixForest, Stretch
from slipstream.core.packed import TrainSequence

contexts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=9)


def stretches(ends: list[Stretch]) -> list[Stretch]:
    return list(dict.fromkeys(one for end in ends for one in end.path))


@given(drawn=contexts, shuffle=st.randoms(use_true_random=False), first_compared=st.sampled_from([1, 2, 256]))
def test_stretches_are_the_beginnings_of_all_contexts(
    drawn: list[list[int]], shuffle: random.Random, first_compared: int
) -> None:
    """Each beginning is one row, in whatever order contexts come and however many tokens are compared at once."""
    given = [np.array(tokens, dtype=np.int32) for tokens in drawn]
    order = list(range(len(given)))
    shuffle.shuffle(order)
    was, prefix_tree.FIRST_COMPARED = prefix_tree.FIRST_COMPARED, first_compared
    try:
        forest = PrefixForest()
        ends = {index: forest.add("one", given[index]) for index in order}
    finally:
        prefix_tree.FIRST_COMPARED = was
    beginnings = {tuple(tokens[:length]) for tokens in drawn for length in range(1, len(tokens) + 1)}
    found = stretches([ends[index] for index in range(len(given))])
    assert sum(len(one.tokens) for one in found) == len(beginnings)
    for index, tokens in enumerate(drawn):
        assert np.concatenate([one.tokens for one in ends[index].path]).tolist() == tokens
    again = PrefixForest()
    in_order = [again.add("one", tokens) for tokens in given]
    assert [[len(one.tokens) for one in end.path] for end in in_order] == [
        [len(one.tokens) for one in ends[index].path] for index in range(len(given))
    ]
    assert stretches([PrefixForest().add("one", given[0]), forest.add("another", given[0])])[1:], "trees share nothing"


def completion(key: tuple[int, int], prompt: list[int], own: list[int], routes: list[int] | None) -> TrainSequence:
    tokens = np.array([*prompt, *own], dtype=np.int32)
    sequence = TrainSequence.read_only(key, tokens, np.arange(len(tokens)) >= len(prompt))
    if routes is None:
        return sequence
    return replace(sequence, routes=np.array(routes, dtype=np.uint8)[: len(tokens) - 1, None, None].repeat(2, axis=1))


two = st.integers(0, 1)


@drawn(
    30,
    100,
    prompts=st.lists(st.lists(two, min_size=1, max_size=3), min_size=1, max_size=2),
    own=st.lists(
        st.tuples(two, st.lists(two, min_size=1, max_size=5), st.lists(two, min_size=8, max_size=8)), min_size=1
    ),
)
def test_rows_with_other_experts_are_shared_in_the_prompt_alone(
    prompts: list[list[int]], own: list[tuple[int, list[int], list[int]]]
) -> None:
    """By brute force: a row is named by its prompt, and behind it by the tokens and experts up to it."""
    sequences = [
        completion((0, sample), prompts[which % len(prompts)], tokens, routes)
        for sample, (which, tokens, routes) in enumerate(own)
    ]
    names: dict[object, int] = {}
    (microbatch,) = collate(sequences, 10_000)
    assert microbatch.routes is not None
    rest = microbatch.rows
    for key, length in zip(microbatch.keys, microbatch.lengths, strict=True):
        rows, rest = rest[:length], rest[length:]
        one = sequences[key[1]]
        assert one.routes is not None
        num_prompt = len(one.prompt)
        experts = one.routes[:, 0, 0].tolist()
        for at, row in enumerate(rows.tolist()):
            behind = max(at + 1, num_prompt)
            name = (*one.prompt.tolist(),), at, (*one.tokens[: at + 1],), (*experts[num_prompt:behind],)
            assert names.setdefault(name, row) == row
            assert at < num_prompt or (microbatch.routes[row] == one.routes[at]).all(), "its own experts"
            assert microbatch.tokens[row] == one.tokens[at]
    assert len(names) == microbatch.num_tokens == len(microbatch.routes)


def test_golden_packing_of_completions_that_begin_alike() -> None:
    """By hand: 1 2 | 3 4 5, 1 2 | 3 4 6 7, 1 2 | 3: one row each for 1, 2, 3 and 4, and one for 6; nothing reads 5."""
    own = [[3, 4, 5], [3, 4, 6, 7], [3]]
    (microbatch,) = collate([completion((0, at), [1, 2], tokens, None) for at, tokens in enumerate(own)], 100)
    assert microbatch.keys == ((0, 1), (0, 0), (0, 2))
    assert microbatch.tokens.tolist() == [1, 2, 3, 4, 6]
    assert microbatch.positions.tolist() == [0, 1, 2, 3, 4]
    assert microbatch.lengths == (5, 4, 2)
    assert microbatch.rows.tolist() == [0, 1, 2, 3, 4] + [0, 1, 2, 3] + [0, 1]
    assert microbatch.targets.tolist() == [3, 4, 6, 7] + [3, 4, 5] + [3]
    assert microbatch.target_index.tolist() == [1, 2, 3, 4] + [1, 2, 3] + [1]
    assert microbatch.segment_ids.tolist() == [0] * 4 + [1] * 3 + [2]


def test_what_shares_most_goes_together() -> None:
    """Two forks of four each, by turns: a microbatch with room for one fork reads that one, not halves of both."""
    parts = (("prompt", 2), ("left", 4)), (("prompt", 2), ("right", 4))
    atoms = [Atom((0, at), (*parts[at % 2], (at, 3))) for at in range(8)]
    assert first_fit(atoms, 2 + 4 + 4 * 3) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    # The first microbatch has room, but only the prompt in common; the second has the fork, too.
    late = Atom((0, 9), (*parts[1], (9, 1)))
    assert first_fit([*atoms, late], 2 + 4 + 4 * 3 + 2) == [[0, 2, 4, 6], [1, 3, 5, 7, 8]]
    # It reads more of what the second holds, which has no room: so it goes where there is some.
    wide = Atom((0, 9), (*parts[1], (9, 2)))
    assert first_fit([*atoms, wide], 2 + 4 + 4 * 3 + 1) == [[0, 2, 4, 6], [1, 3, 5, 7], [8]]


@drawn(
    20,
    60,
    shapes=st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 1), min_size=1, max_size=6)), min_size=1),
        min_size=1,
        max_size=4,
    ),
    capacity=st.integers(1, 40),
    shuffle=st.randoms(use_true_random=False),
)
def test_the_order_of_the_input_decides_nothing(
    shapes: list[list[tuple[int, list[int]]]], capacity: int, shuffle: random.Random
) -> None:
    """Nor is a microbatch fuller than its capacity, counted by the beginnings of its sequences."""
    sequences = [
        completion((ordinal, sample), [7, first], tokens, None)
        for ordinal, members in enumerate(shapes)
        for sample, (first, tokens) in enumerate(members)
    ]
    packed = collate(sequences, capacity)
    by_key = {one.key: one for one in sequences}
    for one in packed:
        names = {
            (key[0], (*by_key[key].tokens[:length],))
            for key in one.keys
            for length in range(1, by_key[key].num_inputs + 1)
        }
        assert one.num_tokens == len(names)
        assert len(names) <= capacity or len(one.keys) == 1
    shuffle.shuffle(sequences)
    again = collate(sequences, capacity)
    assert [one.keys for one in again] == [one.keys for one in packed]
    for one, other in zip(again, packed, strict=True):
        assert (one.tokens.tolist(), one.rows.tolist()) == (other.tokens.tolist(), other.rows.tolist())
