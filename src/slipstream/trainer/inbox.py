"""Rollouts that wait at the trainer for their step, and the events that tell the controller of their groups."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.core import wire
from slipstream.core.config import RunConfig
from slipstream.core.executor import Context
from slipstream.core.packed import Batching, GroupCollector, NewCollector
from slipstream.core.peer_messages import Arrived, Shares
from slipstream.core.rank_group import RankGroup
from slipstream.core.ranks import data_parallel_rank
from slipstream.core.saved import SUFFIX, rollouts_dir, save_messages, saved_rollouts
from slipstream.core.service_messages import Checkpoint, Counters
from slipstream.core.staleness import oldest_version, place_of
from slipstream.core.types import Group, GroupScored, Rollout, RolloutHead, TrainStep
from slipstream.core.vetting import POISONED, Limits, is_of_run, vetted
from slipstream.trainer.dealing import balanced_ranks, exchanged
from slipstream.trainer.scores import ScoredGroup, dealt_by, has_signal, head_of, split_baseline

log = logging.getLogger(__name__)


class RolloutInbox:
    """Keep the rollouts that this rank is dealt; on rank 0 also the heads of all ranks' rollouts.

    Rank 0 knows from the heads when a group is whole, and tells the controller (`GroupScored`). Only the first of
    the ranks that share a model (`peers`) receives rollouts; the others get a step's from it (`shares`).
    """

    def __init__(
        self,
        config: RunConfig,
        context: Context,
        limits: Limits,
        *,
        new_buffer: NewCollector,
        data_ranks: RankGroup,
        peers: RankGroup,
    ) -> None:
        self._config, self._context, self._limits = config, context, limits
        self._ranks, self._data_ranks, self._peers = context.group, data_ranks, peers
        self._dealt = dealt_by(config.loss)
        self.rollouts: GroupCollector[Rollout] = new_buffer(expects=self._is_dealt_here)
        self.heads: GroupCollector[RolloutHead] = new_buffer()
        self._restored: list[RolloutHead] = []
        self._num_refused = 0

    def _is_dealt_here(self, ordinal: int, sample: int) -> bool:
        ranks = self._data_ranks
        return data_parallel_rank(ordinal, sample, ranks.world, by=self._dealt) == ranks.rank

    # Arrivals

    def receive(self, newest_version: int) -> bool:
        """Take what has arrived: rollouts on the ranks that are dealt some, their heads on rank 0. True for any."""
        has_news = False
        heads: list[RolloutHead] = []
        if self._peers.is_leader:
            rollouts = []
            while (message := self._context.inputs["rollouts"].get_nowait()) is not None:
                has_news = True
                assert isinstance(message, Rollout)
                if is_of_run(message, samples_per_group=self._config.samples_per_group):
                    rollouts.append(message)
                else:
                    self._refuse(message)
            heads = self._taken(rollouts, newest_version)
        if not self._ranks.is_leader:
            if heads:
                self._context.outputs["arrived"].put(Arrived(heads=tuple(heads)))
            return has_news
        if self._data_ranks.world > 1:
            while (message := self._context.inputs["arrived"].get_nowait()) is not None:
                has_news = True
                assert isinstance(message, Arrived)
                heads += message.heads
        self._count_in(heads)
        return has_news

    def _taken(self, rollouts: Sequence[Rollout], newest_version: int) -> list[RolloutHead]:
        """Keep `rollouts` until their step; return the heads of those that are no duplicates."""
        rollouts = vetted(rollouts, self._limits, newest_version=newest_version)
        return [head_of(rollout, self._config.rewards) for rollout in rollouts if self.rollouts.add(rollout)]

    def _count_in(self, heads: Iterable[RolloutHead]) -> None:
        """Tell the controller of groups that are whole with `heads`, which lie on some rank."""
        with self._context.together():
            for head in heads:
                if self.heads.add(head) and self.heads.is_complete(head.ordinal):
                    group = ScoredGroup(head.ordinal, self.heads.group(head.ordinal))
                    self._context.outputs["events"].put(group_scored(group, self._config))

    def _refuse(self, rollout: Rollout) -> None:
        """Count a rollout that names no place of any group: the group that it was meant for cannot be told."""
        self._num_refused += 1
        log.warning("a rollout of no group was dropped: ordinal %d, sample %d", rollout.ordinal, rollout.sample)
        values = {"refused_rollouts": float(self._num_refused)}
        self._context.outputs["events"].put(Counters(executor=self._context.name, values=values))

    # What a command names

    def relayed_heads(self, ordinals: Sequence[int]) -> tuple[RolloutHead, ...]:
        """Give up the heads of these groups, in canonical order. Rank 0 alone has them."""
        groups = self.heads.take(ordinals)
        return tuple(head for members in groups.values() for head in members)

    def own_groups(self, ordinals: Sequence[int]) -> list[Group]:
        """Give up what this data-parallel rank was dealt of these groups, all of which has arrived."""
        shares = self.rollouts.take(ordinals)
        return [Group(ordinal=ordinal, rollouts=members) for ordinal, members in shares.items() if members]

    def shares(self, command: TrainStep, batching: Batching) -> list[Group]:
        """Return what this rank trains of the step's groups, dealt by length. All ranks call it together."""
        groups = self.own_groups(command.ordinals) if self._peers.is_leader else []
        ranks = self._data_ranks
        if ranks.world > 1 and self._peers.is_leader:
            dealt = balanced_ranks(
                command.heads, config=self._config, step=command.step, batching=batching, num_ranks=ranks.world
            )
            groups = exchanged(groups, dealt, ranks)
        if self._peers.world == 1:
            return groups
        payload = wire.encode(Shares(groups=tuple(groups))) if self._peers.is_leader else b""
        return list(wire.decode_one(self._peers.broadcast(payload), Shares).groups)

    # Checkpoints

    def save(self, command: Checkpoint) -> None:
        """Write the rollouts of groups that a resumed run would sample again, beside the checkpoint."""
        rollouts = [rollout for ordinal in command.schedule["readmit"] for rollout in self.rollouts.group(ordinal)]
        save_messages(rollouts_dir(Path(command.path)) / f"{self._context.name}{SUFFIX}", rollouts, cut=command.cut)

    def restore(self, path: Path, extra: Mapping[str, Any], *, version: int) -> None:
        """Take what waited for its step when the checkpoint was made: each rank its own, dealt as they are dealt now.

        All data-parallel ranks call it. Rank 0 tells of whole groups in `announce_restored`.
        """
        schedule = extra.get("schedule", {})
        owed, dropped = schedule.get("readmit", ()), schedule.get("dropped", ())
        notes: list[str] = []
        saved = [
            rollout
            for rollout in saved_rollouts(path, cut=extra.get("cut", ""), owed=owed, step=version, notes=notes)
            if self._is_dealt_here(rollout.ordinal, rollout.sample) and self._may_still_be_trained(rollout, dropped)
        ]
        heads = self._taken(saved, version)
        for note in notes:
            log.warning("%s", note)
        if self._data_ranks.world > 1:
            parts = self._data_ranks.gather(wire.encode(Arrived(heads=tuple(heads))))
            heads = [head for part in parts for head in wire.decode_one(part, Arrived).heads]
        if self._ranks.is_leader:
            self._restored = heads

    def announce_restored(self) -> None:
        """Tell of restored groups that are whole, before there is a version to sample from: none is sampled again."""
        self._count_in(self._restored)
        self._restored = []

    def _may_still_be_trained(self, rollout: Rollout, dropped: Sequence[int]) -> bool:
        """Tell whether the bound holds for `rollout` in any step that could train it, by the drops that the cut knows.

        It does for all that was admitted before the cut. What came into the buffer between the cut and its saving may
        have started thanks to a drop that the resumed run need not repeat.
        """
        config = self._config
        if config.staleness_bound is None or not config.bounds_admissions:
            return True
        oldest = oldest_version(
            place_of(rollout.ordinal, dropped),
            groups_per_step=config.groups_per_step,
            reorder_window=config.window,
            max_staleness=config.staleness_bound,
        )
        return rollout.completion.min_version >= oldest


def group_scored(group: ScoredGroup, config: RunConfig) -> GroupScored:
    """Return the event that tells the controller of a group whose rollouts are all scored."""
    rewards = [head.reward for head in split_baseline(group, config)[0]]
    failures = [head.failure for head in group.heads if head.failure is not None]
    sampled = [head for head in group.heads if head.num_sampled]  # others have no version
    return GroupScored(
        ordinal=group.ordinal,
        has_signal=has_signal(group, config),
        mean_reward=sum(rewards) / len(rewards),
        num_failed=len(failures),
        min_version=min((head.min_version for head in sampled), default=0),
        max_version=max((head.max_version for head in sampled), default=0),
        num_poisoned=sum(failure.startswith(POISONED) for failure in failures),
        failure=next(iter(failures), None),
    )
