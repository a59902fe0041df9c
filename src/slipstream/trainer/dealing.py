"""The data-parallel rank that trains each rollout of a step: dealt anew by length, now that all lengths are known.

Rollouts arrive by the pre-set permutation (`core.ranks.data_parallel_rank`), so each can be sent when it is scored.
Then ranks exchange them: one with longer completions than the others would let these wait in every reduction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, groupby

import numpy as np

from slipstream.core import wire
from slipstream.core.config import RunConfig
from slipstream.core.packed import Batching
from slipstream.core.peer_messages import Shares
from slipstream.core.rank_group import RankGroup
from slipstream.core.types import Group, Rollout, RolloutHead
from slipstream.trainer.measure import Key
from slipstream.trainer.scores import ScoredGroup, dealt_by, key_of, penalises_reward, scored_groups, selected


def order_of_groups(config: RunConfig, step: int, epoch: int, num_groups: int) -> list[int] | None:
    """Return the order in which a pass deals the groups of a step to its minibatches; None is the canonical one."""
    if not config.trainer.shuffle:
        return None
    order: list[int] = np.random.default_rng((config.seed, step, epoch)).permutation(num_groups).tolist()
    return order


def balanced_ranks(
    heads: Sequence[RolloutHead], *, config: RunConfig, step: int, batching: Batching, num_ranks: int
) -> dict[Key, int]:
    """Return the data-parallel rank of each rollout: ranks have about equally many tokens of each minibatch.

    That holds for the first pass; with `trainer.shuffle` later ones deal groups to minibatches anew. In one minibatch
    the tokens of two ranks differ by at most those of the longest unit (`batching.balance.balanced_permutation`): a
    rollout, or where losses compare a group's rollouts all of it. A prompt counts in equal parts for the rollouts that
    share it on a rank. `heads` are those of all ranks, so each finds the same.
    """
    groups = scored_groups(heads)
    order = order_of_groups(config, step, 0, len(groups))
    found: dict[Key, int] = {}
    for part in batching.split_minibatches(groups, config.trainer.minibatches, order=order):
        units = list(chain.from_iterable(_units(group, config, num_ranks) for group in part))
        shares = batching.balanced_permutation([length for _, length in units], num_ranks)
        found |= {key: rank for rank, share in enumerate(shares) for index in share for key in units[index][0]}
    return found


def _units(group: ScoredGroup, config: RunConfig, num_ranks: int) -> list[tuple[list[Key], int]]:
    """Return what of a group goes to one rank together, with the tokens that it makes a rank read."""
    keys = [key_of(head) for head in group.heads]
    trained = {key_of(head): head for head in selected(group, config)}
    is_read = {
        key: head.num_sampled > 0 and (penalises_reward(config.kl) or not _is_masked(head, config))
        for key, head in trained.items()
    }
    read = [head for key, head in trained.items() if is_read[key]]
    if not read:
        return [(keys, 0)]
    if dealt_by(config.loss) == "groups":
        return [(keys, read[0].num_prompt + sum(head.num_tokens for head in read))]
    prompt = read[0].num_prompt * min(num_ranks, len(read)) // len(read)
    return [([key], prompt + trained[key].num_tokens if is_read.get(key) else 0) for key in keys]


def _is_masked(head: RolloutHead, config: RunConfig) -> bool:
    return config.loss.truncated == "mask" and head.is_truncated


def exchanged(groups: Sequence[Group], rank_of: Mapping[Key, int], ranks: RankGroup) -> list[Group]:
    """Give the rollouts of `groups` to their ranks; return this rank's, in canonical order. All `ranks` call it."""
    leaving: list[list[Rollout]] = [[] for _ in range(ranks.world)]
    for rollout in chain.from_iterable(group.rollouts for group in groups):
        leaving[rank_of[rollout.ordinal, rollout.sample]].append(rollout)
    staying, leaving[ranks.rank] = leaving[ranks.rank], []
    payloads = [wire.encode(Shares(groups=tuple(_by_group(part)))) if part else b"" for part in leaving]
    arrived = [_rollouts_in(payload) for payload in ranks.exchange(payloads) if payload]
    return _by_group(chain(staying, *arrived))


def _by_group(rollouts: Sequence[Rollout] | chain[Rollout]) -> list[Group]:
    ordered = sorted(rollouts, key=lambda one: (one.ordinal, one.sample))
    return [Group(ordinal=at, rollouts=tuple(members)) for at, members in groupby(ordered, lambda one: one.ordinal)]


def _rollouts_in(payload: bytes) -> list[Rollout]:
    return [rollout for group in wire.decode_one(payload, Shares).groups for rollout in group.rollouts]
