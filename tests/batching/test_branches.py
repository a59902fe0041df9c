"""Sequences of several contexts: each is read alone, every target once; those of one context are packed as ever."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import fields

import numpy as np
import pytest
from drawn import drawn
from hypothesis import strategies as st

from slipstream.batching.collate import collate, padded_layout_frac
from slipstream.core.packed import PackedMicrobatch, TrainSequence


def numbers(seed: int) -> Iterator[int]:
    """Yield the high bits of a linear congruential generator: the same for ever, on every machine."""
    state = seed
    while True:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        yield state >> 33


def plain_case(seed: int) -> tuple[list[TrainSequence], int, int]:
    """Return sequences of one context, shared prompts and given tokens among them, a capacity and an atom size.

    Two sequences begin alike by a whole prompt or not at all: a prompt of an atom's own and each completion have a
    first token that no sibling has.
    """
    draw = numbers(seed)
    atom_size, has_columns, has_sets = 1 + next(draw) % 2, next(draw) % 2, next(draw) % 2
    sequences = []
    for ordinal in range(1 + next(draw) % 6):
        prompt = [next(draw) % 50 for _ in range(1 + next(draw) % 9)]
        for sample in range(2 * (1 + next(draw) % 3)):
            if sample % atom_size == 0:
                own_prompt = [60 + sample, *prompt] if next(draw) % 5 == 0 else prompt
            turns = [(bool(i % 2 == 0), 1 + next(draw) % 7) for i in range(1 + next(draw) % 4)]
            mask = [False] * len(own_prompt) + [sampled for sampled, count in turns for _ in range(count)]
            if next(draw) % 11 == 0:
                mask = [False] * len(mask)
            tokens = own_prompt + [next(draw) % 50 for _ in range(len(mask) - len(own_prompt))]
            tokens[len(own_prompt)] = 70 + sample
            column = np.array([next(draw) % 1000 / 8 for _ in mask], dtype=np.float32) * mask
            counts = np.array([1 + next(draw) % 3 for _ in mask], dtype=np.int32) * mask
            more = {"values": column + 1, "returns": column - 1} if has_columns else {}
            if has_sets:
                more |= {"kept_counts": counts, "kept_tokens": np.arange(counts.sum(), dtype=np.int32)}
            sequences.append(
                TrainSequence(
                    key=(ordinal, sample),
                    tokens=np.array(tokens, dtype=np.int32),
                    mask=np.array(mask),
                    behaviour_logprobs=-column,
                    advantages=column / 2,
                    versions=np.where(mask, ordinal, -1).astype(np.int32),
                    **more,
                )
            )
    return sequences, 1 + next(draw) % 80, atom_size


LATER = {"teacher_tokens", "teacher_logprobs", "routes"}
"""Fields that came behind the recorded digest."""


def digest(microbatches: list[PackedMicrobatch]) -> str:
    """Return a hash of every field of `microbatches`, with types and shapes; of a later one where it is set."""
    found = hashlib.sha256()
    for microbatch in microbatches:
        for field in fields(microbatch):
            value = getattr(microbatch, field.name)
            if value is None and field.name in LATER:
                continue
            is_array = isinstance(value, np.ndarray)
            found.update(f"{field.name} {(value.dtype.str, value.shape) if is_array else value}".encode())
            found.update(np.ascontiguousarray(value).tobytes() if is_array else b"")
    return found.hexdigest()


@pytest.mark.parametrize(
    ("num_cases", "expected"),
    [
        pytest.param(60, "5bacf71b1970a30c0b905cea6b9e40b5fcfb1bde80b27e46073e29a8bec0132f", id="60"),
        pytest.param(
            300,
            "215624f1412592aeb3aaa371d9de988072cfc86458d5437e305cb5260c401a3f",
            id="300",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_sequences_that_share_whole_prompts_are_packed_as_before_there_was_more_to_share(
    num_cases: int, expected: str
) -> None:
    """The expected digests are those of the packing before branches and prefix trees, over the same cases."""
    found = hashlib.sha256()
    for seed in range(num_cases):
        sequences, capacity, atom_size = plain_case(seed)
        found.update(digest(collate(sequences, capacity, atom_size=atom_size)).encode())
    assert found.hexdigest() == expected


def of_branches(key: tuple[int, int], *branches: tuple[list[int], list[tuple[bool, list[int]]]]) -> TrainSequence:
    """Return the sequence of (context, [(is sampled, tokens), ...]) branches; `versions` number its targets."""
    tokens: list[int] = []
    mask: list[bool] = []
    starts = []
    for context, turns in branches:
        starts.append(len(tokens))
        for is_sampled, said in [(False, context), *turns]:
            tokens += said
            mask += [is_sampled] * len(said)
    column = np.where(mask, np.arange(len(mask)) + 1000 * key[0] + 100_000 * key[1], 0)
    return TrainSequence(
        key=key,
        tokens=np.array(tokens, dtype=np.int32),
        mask=np.array(mask),
        behaviour_logprobs=-column.astype(np.float32),
        advantages=column.astype(np.float32),
        versions=np.where(mask, column, -1).astype(np.int32),
        starts=tuple(starts),
    )


def test_golden_packing_of_an_episode_with_three_branches() -> None:
    """The second branch goes on from the first turn, the third has a context of its own and the end of it is not read.

    A sibling shares the prompt; a branch without a turn is not read at all.
    """
    first = of_branches(
        (0, 0),
        ([1, 2], [(True, [3, 4]), (False, [5]), (True, [6])]),
        ([1, 2, 3, 4, 7], [(True, [8])]),
        ([9], [(True, [10]), (False, [11, 12])]),
        ([13, 14], []),
    )
    (microbatch,) = collate([first, of_branches((0, 1), ([1, 2], [(True, [15, 16])]))], 100)
    assert microbatch.keys == ((0, 0), (0, 1))
    assert microbatch.tokens.tolist() == [1, 2, 3, 4, 5] + [7] + [9] + [15]
    assert microbatch.positions.tolist() == [0, 1, 2, 3, 4] + [4] + [0] + [2]
    assert microbatch.lengths == (5, 5, 1, 3)
    assert microbatch.rows.tolist() == [0, 1, 2, 3, 4] + [0, 1, 2, 3, 5] + [6] + [0, 1, 7]
    assert microbatch.target_index.tolist() == [1, 2, 4] + [5] + [6] + [1, 7]
    assert microbatch.targets.tolist() == [3, 4, 6] + [8] + [10] + [15, 16]
    assert microbatch.segment_ids.tolist() == [0] * 5 + [1] * 2
    assert padded_layout_frac([microbatch]) == 1 - (5 + 5 + 1 + 3) / (4 * 5)
    assert first.num_inputs == 5 + 5 + 1
    assert first.prompt.tolist() == [1, 2]
    assert [one.num_tokens for one in collate([first], 100)] == [7]


def test_an_episode_whose_trunk_has_nothing_to_train_on_begins_with_its_first_turn() -> None:
    sequence = of_branches((0, 0), ([1, 2], []), ([3], [(True, [4])]))
    assert (sequence.prompt.tolist(), sequence.num_inputs) == ([3], 1)
    (microbatch,) = collate([sequence, of_branches((0, 1), ([3], [(True, [5])]))], 100)
    assert (microbatch.tokens.tolist(), microbatch.rows.tolist()) == ([3], [0, 0])
    assert microbatch.target_index.tolist() == [0, 0]


words = st.lists(st.integers(0, 2), max_size=4)  # few tokens, so that contexts often begin alike


@st.composite
def episodes(draw: st.DrawFn, key: tuple[int, int], prompt: list[int]) -> TrainSequence:
    branches: list[tuple[list[int], list[tuple[bool, list[int]]]]] = []
    for _ in range(draw(st.sampled_from([1, 1, 2, 3, 5]))):
        context = prompt
        if branches:
            earlier, turns = draw(st.sampled_from(branches))
            said = [*earlier, *(token for _, tokens in turns for token in tokens)]
            context = said[: draw(st.integers(0, len(said)))] + draw(words) or [0]
        branches.append((context, draw(st.lists(st.tuples(st.booleans(), words), max_size=4))))
    return of_branches(key, *branches)


@st.composite
def batches(draw: st.DrawFn) -> list[TrainSequence]:
    prompts = draw(st.lists(words.filter(bool), min_size=1, max_size=4))
    return [
        draw(episodes((ordinal, sample), prompt if draw(st.booleans()) else [*prompt, sample % 3]))
        for ordinal, prompt in enumerate(prompts)
        for sample in range(draw(st.sampled_from([2, 4])))
    ]


def seen_by_row(microbatch: PackedMicrobatch) -> dict[int, tuple[int, ...]]:
    """Return the tokens that each row attends to, by brute force: the same ones wherever it occurs."""
    seen: dict[int, tuple[int, ...]] = {}
    rest = microbatch.rows.tolist()
    for length in microbatch.lengths:
        context, rest = rest[:length], rest[length:]
        for index, row in enumerate(context):
            visible = tuple(microbatch.tokens[context[: index + 1]].tolist())
            assert seen.setdefault(row, visible) == visible
            assert microbatch.positions[row] == index
    assert not rest
    return seen


def beginnings(sequence: TrainSequence) -> set[tuple[int, tuple[int, ...]]]:
    """Return the rows that a sequence needs, by name: what begins alike in its group has the same ones."""
    needed: set[tuple[int, tuple[int, ...]]] = set()
    for start, end in zip(sequence.starts, [*sequence.starts[1:], len(sequence.tokens)], strict=True):
        trained = [at for at in range(start, end) if sequence.mask[at]]
        read = tuple(sequence.tokens[start : trained[-1]].tolist()) if trained else ()
        needed |= {(sequence.key[0], read[:length]) for length in range(1, len(read) + 1)}
    return needed


@drawn(20, 60, sequences=batches(), capacity=st.integers(1, 80), atom_size=st.sampled_from([1, 2]))
def test_every_target_once_and_behind_its_own_branch_alone(
    sequences: list[TrainSequence], capacity: int, atom_size: int
) -> None:
    by_key = {one.key: one for one in sequences}
    whole = [sequences[i : i + atom_size] for i in range(0, len(sequences), atom_size)]
    trained = [one for members in whole if all(one.mask.any() for one in members) for one in members]
    found: list[int] = []
    keys: list[tuple[int, int]] = []
    for microbatch in collate(sequences, capacity, atom_size=atom_size):
        seen = seen_by_row(microbatch)
        assert sorted(seen) == list(range(microbatch.num_tokens)), "no row is read for nothing"
        assert microbatch.num_tokens <= capacity or len(microbatch.keys) == atom_size
        names = set[tuple[int, tuple[int, ...]]]().union(*(beginnings(by_key[key]) for key in microbatch.keys))
        assert microbatch.num_tokens == len(names), "what begins alike in a group is read once"
        for index in range(microbatch.num_targets):
            sequence = by_key[microbatch.keys[microbatch.segment_ids[index]]]
            at = int(np.flatnonzero(sequence.versions == microbatch.versions[index])[0])
            start = max(one for one in sequence.starts if one <= at)
            assert microbatch.targets[index] == sequence.tokens[at]
            assert seen[int(microbatch.target_index[index])] == tuple(sequence.tokens[start:at].tolist())
            assert microbatch.advantages[index] == -microbatch.behaviour_logprobs[index] == sequence.advantages[at]
        for segment, key in enumerate(microbatch.keys):
            own = microbatch.versions[microbatch.segment_ids == segment]
            assert own.tolist() == by_key[key].versions[by_key[key].mask].tolist()
        found += microbatch.versions.tolist()
        keys += microbatch.keys
    assert sorted(keys) == sorted(one.key for one in trained)
    assert sorted(found) == sorted(version for one in trained for version in one.versions[one.mask].tolist())
