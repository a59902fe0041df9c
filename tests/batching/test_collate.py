import itertools
from dataclasses import replace

import numpy as np
import pytest
from drawn import drawn
from hypothesis import given
from hypothesis import strategies as st

from slipstream.batching import collate as collation
from slipstream.batching.balance import balanced_permutation
from slipstream.batching.collate import (
    Atom,
    collate,
    first_fit,
    padded_layout_frac,
    padding_frac,
    split_minibatches,
)
from slipstream.core.errors import ConfigError, ShapeError
from slipstream.core.packed import Batching, TrainSequence
from slipstream.core.types import Group


def sequence(key: tuple[int, int], length: int, trained: tuple[int, ...]) -> TrainSequence:
    mask = np.zeros(length, dtype=bool)
    mask[list(trained)] = True
    base = 1000 * (key[0] + 1) + 100 * key[1]
    return TrainSequence(
        key=key,
        tokens=np.arange(base, base + length, dtype=np.int32),
        mask=mask,
        behaviour_logprobs=np.where(mask, -np.arange(length) / 8, 0).astype(np.float32),
        advantages=np.where(mask, float(key[1] + 1), 0).astype(np.float32),
        versions=np.where(mask, key[0], -1).astype(np.int32),
    )


def test_golden_packing_predicts_token_t_from_row_t_minus_1():
    # A prompt of 2, 2 sampled tokens, 1 given, 1 sampled; and a prompt of 3 with 1 sampled.
    packed = collate([sequence((0, 0), 6, (2, 3, 5)), sequence((0, 1), 4, (3,))], 100)
    assert len(packed) == 1
    microbatch = packed[0]
    assert microbatch.tokens.tolist() == [1000, 1001, 1002, 1003, 1004, 1100, 1101, 1102]
    assert microbatch.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert microbatch.lengths == (5, 3)
    assert microbatch.rows.tolist() == list(range(8))
    assert microbatch.target_index.tolist() == [1, 2, 4, 7]
    assert microbatch.targets.tolist() == [1002, 1003, 1005, 1103]
    assert microbatch.behaviour_logprobs.tolist() == [-2 / 8, -3 / 8, -5 / 8, -3 / 8]
    assert microbatch.advantages.tolist() == [1, 1, 1, 2]
    assert microbatch.versions.tolist() == [0, 0, 0, 0]
    assert microbatch.segment_ids.tolist() == [0, 0, 0, 1]
    assert microbatch.keys == ((0, 0), (0, 1))


def completion(key: tuple[int, int], prompt: int, own: int) -> TrainSequence:
    """A sequence whose prompt is its ordinal's and whose other tokens, all trained on, are its own."""
    ordinal, sample = key
    tokens = np.concatenate([np.arange(prompt) + 1000 * ordinal, np.arange(own) + 1000 * ordinal + 100 * (sample + 1)])
    mask = np.arange(prompt + own) >= prompt
    return TrainSequence(
        key=key,
        tokens=tokens.astype(np.int32),
        mask=mask,
        behaviour_logprobs=np.where(mask, -tokens / 8, 0).astype(np.float32),
        advantages=np.where(mask, tokens / 4, 0).astype(np.float32),
        versions=np.where(mask, tokens, -1).astype(np.int32),
    )


def test_golden_packing_of_two_completions_of_one_prompt():
    # A prompt of 2 with completions of 3 and 1 tokens (the last token is only predicted), and a lone sequence.
    (microbatch,) = collate([completion((0, 0), 2, 1), completion((0, 1), 2, 3), completion((1, 0), 1, 2)], 100)
    assert microbatch.keys == ((0, 1), (0, 0), (1, 0))
    assert microbatch.tokens.tolist() == [0, 1, 200, 201, 1000, 1100]
    assert microbatch.positions.tolist() == [0, 1, 2, 3, 0, 1]
    assert microbatch.lengths == (4, 2, 2)
    assert microbatch.rows.tolist() == [0, 1, 2, 3] + [0, 1] + [4, 5]
    assert microbatch.target_index.tolist() == [1, 2, 3] + [1] + [4, 5]
    assert microbatch.targets.tolist() == [200, 201, 202] + [100] + [1100, 1101]
    assert microbatch.segment_ids.tolist() == [0, 0, 0, 1, 2, 2]


def test_equal_prompts_of_two_groups_and_unequal_ones_of_one_group_are_not_shared():
    one, other = completion((0, 0), 4, 2), completion((0, 1), 4, 2)
    (shared,) = collate([one, other], 100)
    assert shared.num_tokens == 4 + 1 + 1
    (of_two_groups,) = collate([one, replace(other, key=(1, 1))], 100)
    assert of_two_groups.num_tokens == 5 + 5
    (unequal,) = collate([one, replace(other, tokens=other.tokens + 1)], 100)
    assert unequal.num_tokens == 5 + 5


def atoms(*shapes: tuple[int, int, int]) -> list[Atom]:
    """From (ordinal, prompt tokens, own tokens)."""
    return [
        Atom((ordinal, i), ((ordinal, prompt), ((ordinal, i), own))) for i, (ordinal, prompt, own) in enumerate(shapes)
    ]


def test_longest_first_into_the_first_microbatch_with_room():
    lone = atoms(*((ordinal, 1, length - 1) for ordinal, length in enumerate([2, 5, 3, 4, 1])))
    assert first_fit(lone, 7) == [[1, 0], [3, 2]] + [[4]]
    assert first_fit(atoms((0, 4, 5)), 7) == [[0]]


def test_siblings_follow_their_longest_and_prefer_the_microbatch_that_reads_their_prompt():
    # 4 + 3 + 2 + 1 rows for the first group although the second has a longer second sequence.
    assert first_fit(atoms((0, 4, 3), (0, 4, 2), (0, 4, 1), (1, 4, 2)), 10) == [[0, 1, 2], [3]]
    # The first microbatch has room for a token more, but reading the prompt again would cost 4.
    assert first_fit(atoms((0, 1, 8), (1, 4, 3), (1, 4, 1)), 10) == [[0], [1, 2]]
    # A prompt is read again where its siblings do not fit beside the first.
    assert first_fit(atoms((0, 4, 5), (0, 4, 2), (0, 4, 2)), 10) == [[0], [1, 2]]


def test_ties_go_by_key_not_by_arrival():
    sequences = [sequence((o, s), 5, (4,)) for o in range(3) for s in range(2)]
    order = [microbatch.keys for microbatch in collate(sequences, 8)]
    assert order == [microbatch.keys for microbatch in collate(sequences[::-1], 8)]
    assert order[0] == ((0, 0), (0, 1))


def test_golden_packing_of_pairs():
    """A pair shares its prompt, stands in the order given, and goes where both of it fit."""
    first = completion((0, 1), 2, 1), completion((0, 0), 2, 3)
    second = completion((1, 0), 2, 2), completion((1, 1), 2, 1)
    (microbatch,) = collate([*first, *second], 10, atom_size=2)
    assert microbatch.keys == ((0, 1), (0, 0), (1, 0), (1, 1))  # the longer pair first
    assert microbatch.num_tokens == 2 + 0 + 2 + 2 + 1 + 0
    assert [m.keys for m in collate([*second, *first], 6, atom_size=2)] == [((0, 1), (0, 0)), ((1, 0), (1, 1))]
    assert [m.keys for m in collate([*first, *second], 1, atom_size=2)] == [((0, 1), (0, 0)), ((1, 0), (1, 1))]
    masked = replace(first[1], mask=np.zeros(5, dtype=bool))
    assert [m.keys for m in collate([first[0], masked, *second], 10, atom_size=2)] == [((1, 0), (1, 1))]
    with pytest.raises(ShapeError, match="whole atoms"):
        collate(first + second[:1], 10, atom_size=2)


@drawn(
    30,
    100,
    shapes=st.lists(st.tuples(st.integers(1, 4), st.lists(st.integers(1, 6), min_size=4, max_size=4)), max_size=6),
    capacity=st.integers(1, 60),
    atom_size=st.sampled_from([1, 2, 4]),
    distinct=st.booleans(),
)
def test_atoms_are_whole_in_order_and_within_capacity(shapes, capacity, atom_size, distinct):
    sequences = [
        completion((ordinal, sample), prompt + distinct * sample, own)
        for ordinal, (prompt, owns) in enumerate(shapes)
        for sample, own in enumerate(owns)
    ]
    packed = collate(sequences, capacity, atom_size=atom_size)
    atoms_given = [tuple(s.key for s in sequences[i : i + atom_size]) for i in range(0, len(sequences), atom_size)]
    found = []
    for microbatch in packed:
        atoms_here = [microbatch.keys[i : i + atom_size] for i in range(0, len(microbatch.keys), atom_size)]
        assert microbatch.num_tokens <= capacity or len(atoms_here) == 1
        found += atoms_here
        by_key = {s.key: s for s in sequences}
        for segment, key in enumerate(microbatch.keys):
            at = microbatch.segment_ids == segment
            assert microbatch.targets[at].tolist() == by_key[key].tokens[by_key[key].mask].tolist()
            rows = microbatch.tokens[
                microbatch.rows[sum(microbatch.lengths[:segment]) :][: microbatch.lengths[segment]]
            ]
            assert rows.tolist() == by_key[key].tokens[: by_key[key].num_inputs].tolist()
    assert sorted(found) == sorted(atoms_given)


def test_sequences_without_targets_are_left_out():
    assert collate([sequence((0, 0), 5, ())], 10) == []


@given(
    shapes=st.lists(st.tuples(st.integers(2, 40), st.integers(1, 39)), min_size=1, max_size=30),
    capacity=st.integers(1, 90),
)
def test_every_target_once_capacity_and_order(shapes, capacity):
    sequences = [
        sequence((i // 3, i % 3), length, tuple(range(min(first, length - 1), length)))
        for i, (length, first) in enumerate(shapes)
    ]
    packed = collate(sequences, capacity)
    targets = np.concatenate([m.targets for m in packed])
    expected = np.concatenate([s.tokens[s.mask] for s in sequences])
    assert sorted(targets) == sorted(expected)
    assert sorted(key for m in packed for key in m.keys) == sorted(s.key for s in sequences)
    for m in packed:
        assert m.num_tokens == sum(m.lengths)
        assert m.num_tokens <= capacity or len(m.lengths) == 1
        assert list(m.lengths) == sorted(m.lengths, reverse=True)
        # The row that predicts a target holds the token before it: token values here count up within a sequence.
        assert (m.tokens[m.target_index] == m.targets - 1).all()
    # First fit: what opened a microbatch did not fit into the one before it.
    for later in range(1, len(packed)):
        assert packed[later].lengths[0] + packed[later - 1].num_tokens > capacity
    assert 0 <= padding_frac(packed) < 1
    assert 0 <= padded_layout_frac(packed) < 1


@drawn(
    30,
    100,
    groups=st.lists(
        st.tuples(st.integers(1, 12), st.lists(st.integers(1, 20), min_size=1, max_size=6)), min_size=1, max_size=8
    ),
    capacity=st.integers(1, 90),
    shuffle=st.randoms(use_true_random=False),
)
def test_every_rollout_once_and_every_prompt_once_per_microbatch(groups, capacity, shuffle):
    sequences = {
        (ordinal, sample): completion((ordinal, sample), prompt, own)
        for ordinal, (prompt, own_lengths) in enumerate(groups)
        for sample, own in enumerate(own_lengths)
    }
    arrivals = list(sequences.values())
    shuffle.shuffle(arrivals)
    packed = collate(arrivals, capacity)
    assert [m.keys for m in packed] == [m.keys for m in collate(list(sequences.values()), capacity)]
    assert sorted(key for m in packed for key in m.keys) == sorted(sequences)
    for m in packed:
        own = sum(sequences[key].num_inputs - len(sequences[key].prompt) for key in m.keys)
        prompts = sum(groups[ordinal][0] for ordinal in {ordinal for ordinal, _ in m.keys})
        assert m.num_tokens == len(m.positions) == prompts + own
        assert m.num_tokens <= capacity or len(m.keys) == 1
        assert set(m.rows.tolist()) == set(range(m.num_tokens))
        begin = 0
        for segment, (key, length) in enumerate(zip(m.keys, m.lengths, strict=True)):
            sequence, rows = sequences[key], m.rows[begin : begin + length]
            begin += length
            assert (m.tokens[rows] == sequence.tokens[:-1]).all()
            assert m.positions[rows].tolist() == list(range(length))
            of_segment = m.segment_ids == segment
            assert (m.target_index[of_segment] == rows[np.flatnonzero(sequence.mask) - 1]).all()
            assert (m.targets[of_segment] == sequence.tokens[sequence.mask]).all()
            for name in ("behaviour_logprobs", "advantages", "versions"):
                assert (vars(m)[name][of_segment] == vars(sequence)[name][sequence.mask]).all()
        assert begin == len(m.rows)


def test_padding_counts():
    packed = collate([sequence((0, 0), 5, (4,)), sequence((0, 1), 3, (2,))], 100)
    assert padded_layout_frac(packed) == pytest.approx(1 - 6 / 8)
    assert padding_frac(packed) == 0.0
    assert padding_frac(collate([sequence((0, 0), 5, (4,)), sequence((0, 1), 3, (2,))], 4)) == pytest.approx(1 - 6 / 8)


def test_padding_counts_of_a_shared_prompt():
    siblings = [completion((0, 0), 4, 3), completion((0, 1), 4, 1)]
    assert padded_layout_frac(collate(siblings, 100)) == pytest.approx(1 - 10 / 12)
    assert padding_frac(collate([*siblings, completion((1, 0), 2, 2)], 6)) == pytest.approx(1 - (6 + 3) / 12)


@given(num_groups=st.integers(1, 20), num_minibatches=st.integers(1, 20))
def test_minibatches_deal_whole_groups(num_groups, num_minibatches):
    groups = [Group(ordinal=ordinal, rollouts=()) for ordinal in range(num_groups)]
    if num_minibatches > num_groups:
        with pytest.raises(ConfigError):
            split_minibatches(groups, num_minibatches)
        return
    parts = split_minibatches(groups[::-1], num_minibatches)
    assert sorted(g.ordinal for part in parts for g in part) == list(range(num_groups))
    assert all([g.ordinal for g in part] == sorted(g.ordinal for g in part) for part in parts)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(lengths=st.lists(st.integers(1, 500), max_size=40), num_ranks=st.integers(1, 8))
def test_scatter_gives_each_atom_to_one_rank(lengths, num_ranks):
    balanced = balanced_permutation(lengths, num_ranks)
    assert sorted(atom for rank in balanced for atom in rank) == list(range(len(lengths)))
    tokens = [sum(lengths[atom] for atom in rank) for rank in balanced]
    assert max(tokens) - min(tokens) <= max(lengths, default=0)


@drawn(15, 200, lengths=st.lists(st.integers(0, 50), min_size=1, max_size=6), num_ranks=st.integers(1, 3))
def test_no_assignment_to_ranks_is_much_better_than_the_balanced_one(lengths, num_ranks):
    """Graham's bound, against all assignments."""

    def most(assigned):
        return max(sum(n for n, to in zip(lengths, assigned, strict=True) if to == rank) for rank in range(num_ranks))

    best = min(most(assigned) for assigned in itertools.product(range(num_ranks), repeat=len(lengths)))
    found = max(sum(lengths[atom] for atom in rank) for rank in balanced_permutation(lengths, num_ranks))
    assert best <= found <= (4 / 3 - 1 / (3 * num_ranks)) * best + 1e-9


def test_the_module_is_what_the_trainer_expects():
    provider: Batching = collation
    assert provider.collate([], 8) == []
