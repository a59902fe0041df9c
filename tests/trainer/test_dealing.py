"""Rollouts are dealt to ranks by their lengths: evenly, each once, by the same numbers on every rank."""

from collections import Counter

import numpy as np
import pytest
from drawn import drawn
from hypothesis import strategies as st
from rank_threads import on_ranks, results
from training_data import make_rollout, run_config

from slipstream.batching import collate as batching
from slipstream.core.ranks import data_parallel_rank
from slipstream.core.types import Group, RolloutHead
from slipstream.trainer.dealing import balanced_ranks, exchanged, order_of_groups
from slipstream.trainer.scores import dealt_by, scored_groups, selected
from slipstream.trainer.step_metrics import rank_wait_frac

LOSSES = [
    {"name": "grpo"},
    {"name": "grpo", "truncated": "mask"},
    {"name": "grpo", "advantages": "greedy_baseline"},
    {"name": "best_of_n", "select": "best"},
    {"name": "online_dpo", "select": "best_and_worst"},
]


@st.composite
def steps(draw):
    """(config, heads, ranks): completions of any length, some that nothing was sampled of; prompts count as nothing."""
    num_groups, per_group = draw(st.integers(1, 12)), draw(st.integers(2, 6))
    loss = draw(st.sampled_from(LOSSES))
    trainer = {"minibatches": draw(st.integers(1, num_groups)), "shuffle": draw(st.booleans())}
    config = run_config(loss=loss, groups_per_step=num_groups, completions_per_group=per_group, trainer=trainer)
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    heads = []
    for ordinal in range(num_groups):
        for sample in range(config.samples_per_group):
            length = int(rng.lognormal(3, 1.2)) if rng.random() < 0.9 else 0
            heads.append(
                RolloutHead(
                    ordinal=3 + 2 * ordinal,
                    sample=sample,
                    reward=float(rng.integers(0, 3)),
                    is_truncated=bool(rng.random() < 0.3),
                    num_tokens=length,
                    num_sampled=length,
                )
            )
    return config, heads, draw(st.integers(1, 5))


@drawn(30, 400, case=steps())
def test_every_rollout_has_one_rank_and_ranks_differ_by_the_longest_unit_at_most(case):
    config, heads, world = case
    found = balanced_ranks(heads, config=config, step=4, batching=batching, num_ranks=world)
    assert sorted(found) == [(head.ordinal, head.sample) for head in heads]
    assert set(found.values()) <= set(range(world))
    whole = dealt_by(config.loss) == "groups"
    groups = scored_groups(heads)
    order = order_of_groups(config, 4, 0, len(groups))
    for part in batching.split_minibatches(groups, config.trainer.minibatches, order=order):
        if whole:
            assert all(len({found[group.ordinal, head.sample] for head in group.heads}) == 1 for group in part)
        trained = {(head.ordinal, head.sample): head for group in part for head in selected(group, config)}
        tokens = Counter(dict.fromkeys(range(world), 0))
        for key, head in trained.items():
            if config.loss.truncated != "mask" or not head.is_truncated:
                tokens[found[key]] += head.num_tokens
        longest = max(((2 * head.num_tokens if whole else head.num_tokens) for head in trained.values()), default=0)
        assert max(tokens.values()) - min(tokens.values()) <= longest


def test_prompts_count_where_they_are_read():
    """Groups as a whole go where prompts are short; single rollouts share the prompt of their group on a rank."""
    lengths = {0: 90, 1: 30, 2: 30, 3: 30}
    heads = [
        RolloutHead(ordinal=o, sample=s, reward=float(s), num_prompt=n, num_tokens=1, num_sampled=1)
        for o, n in lengths.items()
        for s in range(2)
    ]
    for loss, sums in (({"name": "online_dpo", "select": "best_and_worst"}, [90, 90]), ({"name": "grpo"}, [180, 180])):
        config = run_config(loss=loss, groups_per_step=4, completions_per_group=2)
        found = balanced_ranks(heads, config=config, step=0, batching=batching, num_ranks=2)
        prompts = {(rank, ordinal) for (ordinal, _), rank in found.items()}
        assert [sum(lengths[ordinal] for on, ordinal in prompts if on == rank) for rank in range(2)] == sums


def test_ranks_have_equally_many_tokens_of_a_heavy_tail_where_the_preset_permutation_does_not():
    """The long tail of `experiments/collation`, eight ranks with 64 completions each."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(64), 1.2, (64, 8)).round(), 16, 512).astype(int)
    heads = [
        RolloutHead(ordinal=o, sample=s, reward=float(s), num_prompt=1, num_tokens=int(n), num_sampled=int(n))
        for o, row in enumerate(lengths)
        for s, n in enumerate(row)
    ]
    config = run_config(loss={"name": "grpo"}, groups_per_step=64, completions_per_group=8)
    balanced = balanced_ranks(heads, config=config, step=0, batching=batching, num_ranks=8)
    assert waits(heads, balanced) < 0.03
    preset = {(h.ordinal, h.sample): data_parallel_rank(h.ordinal, h.sample, 8, by="samples") for h in heads}
    assert waits(heads, preset) > 0.1


def waits(heads, rank_of):
    """The share of the ranks' time in which they wait for the one with the most tokens, a microbatch each."""

    def job(ranks):
        own = sum(head.num_tokens for head in heads if rank_of[head.ordinal, head.sample] == ranks.rank)
        return rank_wait_frac([[own]], ranks)

    [wait] = set(results(on_ranks(8, job)))
    tokens = Counter()
    for head in heads:
        tokens[rank_of[head.ordinal, head.sample]] += head.num_tokens
    assert wait == pytest.approx(1 - np.mean(list(tokens.values())) / max(tokens.values()))
    return wait


def test_ranks_wait_in_every_microbatch_for_the_longest():
    rows = [[[5, 3], [4]], [[5], [2, 2]]]  # [rank][update][microbatch]
    found = results(on_ranks(2, lambda ranks: rank_wait_frac(rows[ranks.rank], ranks)))
    assert found == [pytest.approx(1 - 21 / (2 * (5 + 3 + 4 + 2)))] * 2
    assert results(on_ranks(2, lambda ranks: rank_wait_frac([], ranks))) == [0.0, 0.0]


@drawn(10, 100, seed=st.integers(0, 10_000), world=st.integers(1, 4))
def test_rollouts_arrive_whole_at_their_ranks(seed, world):
    rng = np.random.default_rng(seed)
    rollouts = [make_rollout(o, s, rng, version=1) for o in range(int(rng.integers(1, 6))) for s in range(3)]
    is_at = [int(rank) for rank in rng.integers(0, world, len(rollouts))]
    rank_of = {(one.ordinal, one.sample): int(rng.integers(world)) for one in rollouts}

    def job(ranks):
        own = [
            Group(ordinal=one.ordinal, rollouts=(one,))
            for one, at in zip(rollouts, is_at, strict=True)
            if at == ranks.rank
        ]
        return exchanged(own, rank_of, ranks)

    for rank, groups in enumerate(results(on_ranks(world, job))):
        expected = [one for one in rollouts if rank_of[one.ordinal, one.sample] == rank]
        assert [group.ordinal for group in groups] == sorted({one.ordinal for one in expected})
        found = [one for group in groups for one in group.rollouts]
        assert [(one.ordinal, one.sample) for one in found] == [(one.ordinal, one.sample) for one in expected]
        for one, sent in zip(found, expected, strict=True):
            assert one.reward == sent.reward
            for segment, original in zip(one.completion.segments, sent.completion.segments, strict=True):
                np.testing.assert_array_equal(segment.tokens, original.tokens)
                np.testing.assert_array_equal(segment.behaviour_logprobs, original.behaviour_logprobs)
