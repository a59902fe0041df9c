"""Rows dealt to ranks that read a microbatch together, and their attention, one rank after the other in one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from drawn import drawn as examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attention import dense_attention, families, shared_rows
from test_varlen import one_by_one

from slipstream.core.errors import ShapeError
from slipstream.core.packed import empty_microbatch
from slipstream.core.rank_group import RankGroup
from slipstream.models import attention, context_parallel
from slipstream.models.context_parallel import ContextParallel, Share, SharedAttention, Structure, dealt_rows

drawn_families = families.filter(lambda drawn: shared_rows(drawn)[0])


def filled(drawn, multiple):
    """Lengths and rows with one more sequence that fills the rows up, int64 [T] end to end."""
    lengths, rows = shared_rows(drawn)
    num_rows = 1 + max(map(max, rows))
    if filler := -num_rows % multiple:
        lengths, rows = [*lengths, filler], [*rows, list(range(num_rows, num_rows + filler))]
    return lengths, np.concatenate([np.array(own, dtype=np.int64) for own in rows])


def any_dealing(num_rows, world, seed):
    """Rows in no order that a microbatch has."""
    return np.sort(np.random.default_rng(seed).permutation(num_rows).reshape(world, -1), axis=1)


@given(st.lists(st.integers(0, 50), min_size=12, max_size=12), st.sampled_from([1, 2, 3, 6]))
def test_every_row_is_dealt_once_and_to_all_as_many(work, world):
    dealt = dealt_rows(np.array(work), world)
    assert dealt.shape == (world, 12 // world)
    assert sorted(dealt.flatten()) == list(range(12))
    assert (np.diff(dealt, axis=1) > 0).all()
    blocks = sorted(np.array(work).reshape(2 * world, -1).sum(1))
    of_rank = np.array(work)[dealt].sum(1)
    assert of_rank.max() - of_rank.min() <= 2 * (blocks[-1] - blocks[0]), "ranks differ by no more than their blocks do"


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=9), st.sampled_from([2, 4]))
@settings(max_examples=30, deadline=None)
def test_no_rank_waits_long_for_another(lengths, world):
    """The rank with most has at most the dearest block more than the mean."""
    filler = -sum(lengths) % (64 * world)
    lengths = [*lengths, *([filler] if filler else [])]
    work = Structure(lengths, np.arange(sum(lengths))).keys_seen
    of_rank = work[dealt_rows(work, world)].sum(1)
    assert of_rank.max() <= of_rank.mean() + work.reshape(2 * world, -1).sum(1).max()


def test_one_long_sequence_among_short_ones_is_cut_further():
    """With 2 blocks each, the one with the end of the long sequence costs more than the mean of all ranks."""
    lengths = [2048, *([128] * 48)]
    work = Structure(lengths, np.arange(sum(lengths))).keys_seen
    blocks = work.reshape(16, -1).sum(1)
    assert (blocks.max() + blocks.min()) / (blocks.sum() / 8) > 1.3
    of_rank = work[dealt_rows(work, 8)].sum(1)
    assert of_rank.max() / of_rank.mean() < 1.1


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_ranks_have_equal_shares_of_one_sequence(world):
    """Of one long sequence: blocks r and 2C - 1 - r, and the same number of keys to the last one."""
    structure = Structure([256], np.arange(256))
    dealt = dealt_rows(structure.keys_seen, world)
    size = 256 // (2 * world)
    assert {tuple(own[::size] // size) for own in dealt} == {(r, 2 * world - 1 - r) for r in range(world)}
    assert {int(structure.keys_seen[own].sum()) for own in dealt} == {256 * 257 // 2 // world}


@given(drawn_families, st.sampled_from([1, 2, 3]), st.integers(0, 9), st.sampled_from([None, 1, 3]))
@settings(deadline=None)
def test_pieces_are_all_own_rows_in_order(drawn, world, seed, most_queries):
    lengths, rows = filled(drawn, 2 * world)
    structure, sequences = Structure(lengths, rows), np.split(rows, np.cumsum(lengths)[:-1])
    for own in any_dealing(int(rows.max()) + 1, world, seed):
        pieces, start, start_key = structure.pieces(own, most_queries), 0, 0
        for num_queries, num_keys in zip(pieces.num_queries, pieces.num_keys, strict=True):
            keys = pieces.keys[start_key : start_key + num_keys].tolist()
            assert keys[-num_queries:] == own[start : start + num_queries].tolist()
            assert any(keys == one[:num_keys].tolist() for one in sequences)
            assert num_queries <= (most_queries or len(own))
            start, start_key = start + num_queries, start_key + num_keys
        assert (start, start_key) == (len(own), len(pieces.keys))


def attend_in_turn(structure, dealt, fused, heads, kv_heads, *, varlen):
    """What each rank computes from its rows' queries and the keys and values of all, back in the order of the rows."""
    place = np.empty(dealt.size, dtype=np.int64)
    place[dealt.flatten()] = np.arange(dealt.size)
    gathered = fused[dealt.flatten(), heads:]
    shares = [
        SharedAttention(structure, own, place, RankGroup.alone(), varlen=varlen).attend(fused[own, :heads], gathered)
        for own in dealt
    ]
    assert gathered.shape[1] == 2 * kv_heads
    return torch.cat(shares)[place]


@pytest.mark.parametrize("path", ["tiles", "flash"])
@examples(
    12,
    30,
    families=drawn_families,
    heads_and_kv_heads=st.sampled_from([(2, 2), (4, 2)]),
    world=st.sampled_from([1, 2, 3]),
    is_any=st.booleans(),
)
def test_shares_in_turn_are_dense_attention(path, families, heads_and_kv_heads, world, is_any):
    """Shared prompts, sequences that lie wholly in one of them, more ranks than a sequence has rows; any dealing."""
    heads, kv_heads = heads_and_kv_heads
    lengths, rows = filled(families, 2 * world)
    flat, num_rows, structure = torch.from_numpy(rows), int(rows.max()) + 1, Structure(lengths, rows)
    dealt = any_dealing(num_rows, world, len(rows)) if is_any else dealt_rows(structure.keys_seen, world)
    generator = torch.Generator().manual_seed(num_rows)
    fused = torch.randn(num_rows, heads + 2 * kv_heads, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(num_rows, heads, 8, generator=generator, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(context_parallel, "TILE_QUERIES", 3)
        patched.setattr(context_parallel, "takes_flash", lambda q, k: path == "flash")
        patched.setattr(attention, "flash", one_by_one)
        out = attend_in_turn(structure, dealt, fused, heads, kv_heads, varlen=True)
        (grad,) = torch.autograd.grad((out * weight).sum(), fused)
    copies = dense_attention(*fused[flat].split([heads, kv_heads, kv_heads], 1), lengths)
    first = torch.tensor([rows.tolist().index(row) for row in range(num_rows)])
    torch.testing.assert_close(out, copies[first], atol=1e-12, rtol=1e-10)
    (expected,) = torch.autograd.grad((copies[first] * weight).sum(), fused)
    torch.testing.assert_close(grad, expected, atol=1e-12, rtol=1e-10)


def test_rows_without_a_token_are_refused():
    with pytest.raises(ShapeError, match="do not fit"):
        Structure([3], np.array([0, 2, 3]))
    with pytest.raises(ShapeError, match="do not fit"):
        Structure([3], np.array([0, 1]))
    attended = SharedAttention(Structure([4], np.arange(4)), np.array([0, 3]), np.arange(4), RankGroup.alone())
    with pytest.raises(ShapeError, match="allowed: 2"):
        attended(0, *torch.zeros(3, 4, 1, 2).unbind(0))


class Described(RankGroup):
    """Rank `rank` of `world`, which runs nothing."""

    def __init__(self, rank, world):
        self.rank, self.world, self.pg = rank, world, None


def test_a_microbatch_without_targets_gives_every_rank_as_many_rows():
    shares = [Share.of(empty_microbatch(), Described(rank, 4), varlen=False) for rank in range(4)]
    assert [len(share.rows.tokens) for share in shares] == [64] * 4
    assert all(len(share.targets) == len(share.order) == 0 for share in shares)
    assert {share.most for share in shares} == {1}


def test_a_share_is_found_once_for_each_microbatch(monkeypatch):
    made, one, other = [], empty_microbatch(), empty_microbatch()
    monkeypatch.setattr(
        Share, "of", classmethod(lambda cls, *args, **how: made.append(args) or cls(None, None, None, 1))
    )
    reader = ContextParallel(Described(0, 2))
    for microbatch in (one, one, other):
        reader.rows(microbatch, varlen=True, replays=False)
        reader.targets(microbatch)
    assert [args[0] for args in made] == [one, other]
