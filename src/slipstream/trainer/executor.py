"""The trainer node: scored rollouts in, a new policy version out."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from slipstream.algorithms.kl import AdaptiveKL
from slipstream.algorithms.logprobs import probe_logprobs
from slipstream.core import wire
from slipstream.core.config import RunConfig
from slipstream.core.disk import disk_errors, sync_files
from slipstream.core.errors import NonFiniteError
from slipstream.core.executor import Context, Executor
from slipstream.core.packed import Batching, GroupCollector, NewCollector
from slipstream.core.rank_group import RankGroup
from slipstream.core.ranks import data_parallel_rank
from slipstream.core.saved import SUFFIX, rollouts_dir, save_messages, saved_rollouts
from slipstream.core.staleness import last_step
from slipstream.core.types import (
    Arrived,
    Checkpoint,
    CheckpointSaved,
    Counters,
    Export,
    Exported,
    Group,
    GroupScored,
    Message,
    Progress,
    Published,
    Ready,
    Rollout,
    RolloutHead,
    Shares,
    Skip,
    StepDone,
    Stop,
    TrainStep,
    Waiting,
    WarmStart,
    WeightsLinked,
)
from slipstream.core.vetting import Limits, is_of_run, vetted
from slipstream.models.tokenizer import TokenTexts
from slipstream.models.transformer import Transformer
from slipstream.observe.recorder import RolloutLine, RolloutRecorder, rollout_line
from slipstream.observe.timeline import TRAINED
from slipstream.observe.tokens import TOKENS_FILE, TokenLine, TokenRecorder, token_line
from slipstream.trainer.critic import ValueFunction
from slipstream.trainer.dealing import dealt_by
from slipstream.trainer.measure import Auxiliary, brings_reference, needed_columns
from slipstream.trainer.policy import Policy, WholePolicy
from slipstream.trainer.reference import follows_warm_start, reference_path
from slipstream.trainer.refused import write_report
from slipstream.trainer.scores import ScoredGroup, effective_reward, has_signal, head_of
from slipstream.trainer.step import train_on_batch
from slipstream.trainer.supervised import SupervisedUpdate, supervised_updates
from slipstream.trainer.token_sample import TokenSample

PROBE_TOKENS = 32

log = logging.getLogger(__name__)


def new_policy(config: RunConfig, ranks: RankGroup, data_ranks: RankGroup, tensor_ranks: RankGroup) -> Policy:
    """Whole on one CPU rank, as bits do not change there; else divided, also on one GPU."""
    if ranks.world == 1 and config.trainer.device == "cpu":
        return WholePolicy(config)
    from slipstream.trainer.sharded_policy import ShardedPolicy  # torch's distributed parts take a second to import

    return ShardedPolicy(config, ranks, data_ranks, tensor_ranks)


class Trainer(Executor):
    """Buffers rollouts, trains the groups that the schedule names, publishes versions, saves checkpoints.

    Consumes: `Rollout` (rollouts), `WarmStart`, `TrainStep`, `Skip`, `Waiting`, `Checkpoint`, `Export`, `Stop`
    (commands; and `WeightsLinked`, of rank 0's publisher). Produces: versions (its WEIGHTS channel), `GroupScored`,
    `StepDone`, `Published` (events). Waits for: a `TrainStep`. Ends when: told to stop. With `resume` it starts from
    that checkpoint instead of a warm start.

    With several ranks, each data-parallel one keeps the rollouts it is dealt, and tells rank 0 their heads (`Arrived`):
    rank 0 knows when a group is whole, alone speaks with the controller, and relays its commands. All ranks carry them
    out in one order, so whatever a command leads to, collectives included, they do together. Tensor-parallel peers get
    a step's rollouts from the first of them when it is trained.
    """

    inputs = ("rollouts",)

    def __init__(
        self, *, config: RunConfig, new_buffer: NewCollector, batching: Batching, resume: str | None = None
    ) -> None:
        self.config = config
        self.new_buffer = new_buffer
        self.batching = batching
        self.resume = resume
        self._is_finished = False
        self._ends = ExitStack()

    def init(self, context: Context) -> None:
        self.context = context
        config = self.config
        torch.set_num_threads(context.num_threads)
        self.ranks = context.group
        self.data_ranks, self.tensor_ranks = self.ranks.split(
            config.trainer.tensor_parallel, timeout_s=config.deadline_s
        )
        self.dealt = dealt_by(config)
        self.rollouts: GroupCollector[Rollout] = self.new_buffer(expects=self._is_dealt_here)
        self.restored_heads: list[RolloutHead] = []
        self.heads: GroupCollector[RolloutHead] = self.new_buffer()
        self.policy = new_policy(config, self.ranks, self.data_ranks, self.tensor_ranks)
        self._ends.callback(self.policy.close)
        self.version = 0
        assert context.publisher is not None, "a trainer needs a WEIGHTS channel"
        self.publisher = context.publisher
        self.policy.offer_to(self.publisher)
        self.limits = Limits.of(
            config,
            vocab_size=self.policy.model.config.vocab_size,
            max_positions=self.policy.model.config.max_positions,
            brings_reference=brings_reference(config),
        )
        self.num_refused = 0
        generator = np.random.default_rng(config.seed)
        model = self.policy.model.config
        num_tokens = min(PROBE_TOKENS, model.max_positions)
        self.probe_tokens = generator.integers(0, model.vocab_size, num_tokens, dtype=np.int32)
        if self.ranks.is_leader:
            self.recorder = self._ends.enter_context(closing(RolloutRecorder(context.run_dir / "rollouts.jsonl")))
            every, max_bytes = config.observe.tokens_every, config.observe.tokens_mb * 1_000_000
            self.token_recorder: TokenRecorder | None = None
            if every:
                recorder = TokenRecorder(context.run_dir / TOKENS_FILE, every=every, max_bytes=max_bytes)
                self.token_recorder = self._ends.enter_context(closing(recorder))
        self.token_texts = TokenTexts(self.policy.tokenizer)
        self.warm_start: Iterator[SupervisedUpdate] | None = None
        self.reference: Transformer | None = None
        self.critic: ValueFunction | None = None
        self.kl = AdaptiveKL(config.kl.coef, config.kl.target or 1.0, config.kl.horizon)
        if self.resume is not None:
            self._resume(Path(self.resume))
        context.spans.set_idle_state("wait_generation")
        if self.resume is not None or not config.warm_start.steps:
            self._be_ready()

    def _is_dealt_here(self, ordinal: int, sample: int) -> bool:
        ranks = self.data_ranks
        return data_parallel_rank(ordinal, sample, ranks.world, by=self.dealt) == ranks.rank

    @property
    def is_finished(self) -> bool:
        return self._is_finished

    def step(self) -> bool:
        """One update of the warm start; or all waiting rollouts, and commands up to one training step."""
        if self.warm_start is not None:
            self._warm_up()
            return True
        with self.context.spans.span("receive"):
            has_news = self._receive()
        self._report_saved()
        while (message := self.context.inputs["commands"].get_nowait()) is not None:
            has_news = True
            self._obey(self._relayed(message))
            if isinstance(message, TrainStep):
                break
        return has_news

    def wait_fds(self) -> list[int]:
        return self.policy.wait_fds()

    def close(self) -> None:
        self._ends.close()

    def _tell(self, event: Message) -> None:
        """Only rank 0 speaks with the controller; what it says holds for all ranks."""
        if self.ranks.is_leader:
            self.context.outputs["events"].put(event)

    # Before the first step

    def _warm_start(self, message: WarmStart) -> Iterator[SupervisedUpdate]:
        torch.set_num_threads(self.context.num_threads_alone)
        lengths = np.stack([message.prompt_lengths, message.completion_lengths], axis=1).reshape(-1)
        pieces = np.split(message.tokens, np.cumsum(lengths)[:-1])
        config = self.config.warm_start
        return supervised_updates(
            self.policy.model,
            self.policy.new_optimizer(config.optimizer, total_updates=config.steps),
            list(zip(pieces[0::2], pieces[1::2], strict=True)),
            config=config,
            microbatch_tokens=self.config.trainer.microbatch_tokens,
            seed=self.config.seed,
            batching=self.batching,
            ranks=self.data_ranks,
        )

    def _warm_up(self) -> None:
        assert self.warm_start is not None
        with self.context.spans.span("warm_start"):
            update = next(self.warm_start, None)
        if update is None:
            self.warm_start = None
            torch.set_num_threads(self.context.num_threads)
            with self.context.spans.span("start_up"):
                self._be_ready()
        elif update.index % 10 == 9:
            self._tell(
                Progress(
                    executor=self.context.name,
                    phase="warm start",
                    done=update.index + 1,
                    total=self.config.warm_start.steps,
                    metrics={"loss": update.loss},
                )
            )

    def _resume(self, path: Path) -> None:
        self._build_auxiliary()
        restored = self.policy.load(path, self.critic)
        self.version = restored.step
        self.kl = replace(self.kl, coef=restored.extra.get("kl_coef", self.kl.coef))
        if self.tensor_ranks.is_leader:
            self._restore_rollouts(path, restored.extra)

    def _restore_rollouts(self, path: Path, extra: Mapping[str, Any]) -> None:
        """Take what waited for its step when the checkpoint was made: each rank its own, dealt as they are dealt now.

        Rank 0 tells of groups that are whole before there is a version to sample from, so nobody samples them again.
        """
        notes: list[str] = []
        owed = extra.get("schedule", {}).get("readmit", ())
        heads = []
        dropped = extra.get("schedule", {}).get("dropped", ())
        for rollout in saved_rollouts(path, cut=extra.get("cut", ""), owed=owed, step=self.version, notes=notes):
            if self._is_dealt_here(rollout.ordinal, rollout.sample) and self._may_still_be_trained(rollout, dropped):
                heads += self._taken(rollout)
        for note in notes:
            log.warning("%s", note)
        if self.data_ranks.world > 1:
            parts = self.data_ranks.gather(wire.encode(Arrived(heads=tuple(heads))))
            heads = [head for part in parts for head in _heads_in(part)]
        if self.ranks.is_leader:
            self.restored_heads = heads

    def _may_still_be_trained(self, rollout: Rollout, dropped: Sequence[int]) -> bool:
        """Whether the bound holds for it in any step that could train it, by the drops that the cut knows.

        It does for all that was admitted before the cut. What came into the buffer between the cut and its saving may
        have started thanks to a drop that the resumed run need not repeat.
        """
        config = self.config
        if config.staleness_bound is None:
            return True
        last = last_step(
            rollout.ordinal, dropped, groups_per_step=config.groups_per_step, reorder_window=config.reorder_window
        )
        return last - rollout.completion.min_version <= config.staleness_bound

    def _build_auxiliary(self) -> None:
        """The reference and the critic, from the policy at version 0 where the config names nothing else."""
        config = self.config
        if config.has_critic:
            self.critic = self.policy.new_critic()
        if "reference_logprobs" not in needed_columns(config):
            return
        path = reference_path(config, self.context.run_dir)
        if path is not None and follows_warm_start(config) and self.resume is None:
            self.policy.export(Path(path))  # no checkpoint on disk has these weights yet
        if config.kl.executor == "trainer":
            self.reference = self.policy.reference(path)

    def _be_ready(self) -> None:
        if self.resume is None:
            self._build_auxiliary()
        self.context.outputs["events"].put(
            Ready(executor=self.context.name, num_params=self.policy.num_params, version=self.version)
        )
        self._count_in(self.restored_heads)
        self._publish()

    # The loop

    def _receive(self) -> bool:
        """Take what has arrived: rollouts on the ranks that are dealt some, their heads on rank 0."""
        has_news = self.publisher.poll()
        heads: list[RolloutHead] = []
        if self.tensor_ranks.is_leader:
            while (message := self.context.inputs["rollouts"].get_nowait()) is not None:
                has_news = True
                assert isinstance(message, Rollout)
                if not is_of_run(message, samples_per_group=self.config.samples_per_group):
                    self._refuse(message)
                    continue
                heads += self._taken(message)
        if not self.ranks.is_leader:
            if heads:
                self.context.outputs["arrived"].put(Arrived(heads=tuple(heads)))
            return has_news
        if self.data_ranks.world > 1:
            while (message := self.context.inputs["arrived"].get_nowait()) is not None:
                has_news = True
                assert isinstance(message, Arrived)
                heads += message.heads
        self._count_in(heads)
        return has_news

    def _taken(self, rollout: Rollout) -> list[RolloutHead]:
        """Keep `rollout` until its step; its head, unless it is a duplicate."""
        rollout = vetted(rollout, self.limits, newest_version=self.version)
        return [head_of(rollout, self.config)] if self.rollouts.add(rollout) else []

    def _count_in(self, heads: Iterable[RolloutHead]) -> None:
        """Tell the controller of groups that are whole with `heads`, which lie on some rank."""
        for head in heads:
            if self.heads.add(head) and self.heads.is_complete(head.ordinal):
                self._tell(self._scored(ScoredGroup(head.ordinal, self.heads.group(head.ordinal))))

    def _refuse(self, rollout: Rollout) -> None:
        """One that names no place of any group: whose it was meant to be cannot be told, so it is only counted."""
        self.num_refused += 1
        log.warning("a rollout of no group was dropped: ordinal %d, sample %d", rollout.ordinal, rollout.sample)
        values = {"refused_rollouts": float(self.num_refused)}
        self.context.outputs["events"].put(Counters(executor=self.context.name, values=values))

    def _scored(self, group: ScoredGroup) -> GroupScored:
        rewards = [effective_reward(head, self.config) for head in group.heads]
        failures = [head.failure for head in group.heads if head.failure is not None]
        sampled = [head for head in group.heads if head.num_sampled]  # poisoned ones have no version
        return GroupScored(
            ordinal=group.ordinal,
            has_signal=has_signal(group, self.config),
            mean_reward=sum(rewards) / len(rewards),
            num_failed=len(failures),
            min_version=min((head.min_version for head in sampled), default=0),
            max_version=max((head.max_version for head in sampled), default=0),
            num_poisoned=len(group.heads) - len(sampled),
            failure=next(iter(failures), None),
        )

    def _relayed(self, message: Message) -> Message:
        """The command as all ranks get it: a step with the heads of its rollouts."""
        if not self.ranks.is_leader:
            return message
        if isinstance(message, TrainStep):
            groups = self.heads.take(message.ordinals)
            heads = tuple(head for members in groups.values() for head in members)
            message = msgspec.structs.replace(message, heads=heads)
        elif isinstance(message, Skip):
            self.heads.take(message.ordinals)
        if self.ranks.world > 1:
            self.context.outputs["relay"].put(message)
        return message

    def _obey(self, message: Message) -> None:
        match message:
            case WarmStart():
                self.warm_start = self._warm_start(message)
            case TrainStep():
                self._train(message)
            case Skip():
                if self.tensor_ranks.is_leader:
                    with self.context.spans.span("record"):
                        self._record(self._own_groups(message.ordinals), step=None)
            case Waiting():
                self.context.spans.set_idle_state(f"wait_{message.reason}")
            case Checkpoint():
                self.save_checkpoint(message)
            case Export():
                with self.context.spans.span("export"):
                    self._export(Path(message.path))
                self._tell(Exported(path=message.path))
            case WeightsLinked():
                self.publisher.take(message)
            case Stop():
                self._report_saved(wait=True)
                self._is_finished = True
            case _:
                raise TypeError(f"a trainer does not take {type(message).__name__}")

    def _own_groups(self, ordinals: Sequence[int]) -> list[Group]:
        """What this data-parallel rank was dealt of these groups. It has it all: rank 0 knows of it from here."""
        shares = self.rollouts.take(ordinals)
        return [Group(ordinal=ordinal, rollouts=members) for ordinal, members in shares.items() if members]

    def _shares(self, ordinals: Sequence[int]) -> list[Group]:
        """What this rank trains of these groups: tensor-parallel peers get it from the first of them."""
        groups = self._own_groups(ordinals) if self.tensor_ranks.is_leader else []
        if self.tensor_ranks.world == 1:
            return groups
        payload = wire.encode(Shares(groups=tuple(groups))) if self.tensor_ranks.is_leader else b""
        shares = wire.decode(self.tensor_ranks.broadcast(payload), (Shares,))
        assert isinstance(shares, Shares)
        return list(shares.groups)

    def _train(self, command: TrainStep) -> None:
        sample = TokenSample(self.config.observe.tokens_every)
        with self.context.spans.span("collate", step=command.step):  # but for what the step says of itself
            groups = self._shares(command.ordinals)
            metrics = self._trained(groups, command, sample)
        self.context.spans.instant(TRAINED, step=command.step)
        if self.config.kl.target is not None and "kl_reference_sum" in metrics:
            self.kl = self.kl.updated(metrics["kl_reference_sum"], self.config.completions_per_step)
        self.version = command.step + 1
        self._tell(StepDone(step=command.step, version=self.version, metrics=metrics))
        is_last = self.version == self.config.steps
        if self.version % self.config.publish_every == 0 or is_last:
            self._publish()
        if self.tensor_ranks.is_leader:
            with self.context.spans.span("record"):
                self._record(groups, step=command.step)
                if any(map(sample.wants, command.ordinals)):
                    self._record_tokens(groups, sample, step=command.step)

    def _trained(self, groups: Sequence[Group], command: TrainStep, sample: TokenSample) -> dict[str, float]:
        """The metrics of the step. A step that is refused leaves a report in the run's folder, for a bug report."""
        try:
            return train_on_batch(
                self.policy.model,
                self.policy.optimizer,
                groups,
                config=self.config,
                step=command.step,
                batching=self.batching,
                auxiliary=Auxiliary(self.reference, self.critic, self.kl.coef),
                heads=command.heads,
                ranks=self.data_ranks,
                tokens=sample,
                spans=self.context.spans,
            )
        except NonFiniteError as error:
            path = self.context.run_dir / f"refused_step_{command.step}.json"
            if self.ranks.is_leader:
                write_report(error, groups, command.heads, path)
            raise NonFiniteError(
                error.what,
                got=error.got,
                hint=f"{error.hint}; {path} has the rollouts. Nothing of this step was published or saved: "
                "--resume goes on from the last checkpoint, and meets the same numbers unless something is changed",
                report=error.report,
            ) from error

    def _record(self, groups: Sequence[Group], *, step: int | None) -> None:
        """Rank 0 writes the lines of all data-parallel ranks, in the order in which one rank would."""
        lines = [rollout_line(rollout) for group in groups for rollout in group.rollouts]
        if self.data_ranks.world > 1:
            parts = self.data_ranks.gather(msgspec.msgpack.encode(lines))
            lines = [line for part in parts for line in msgspec.msgpack.decode(part, type=list[RolloutLine])]
        if self.ranks.is_leader:
            self.recorder.record(lines, step=step)

    def _record_tokens(self, groups: Sequence[Group], sample: TokenSample, *, step: int) -> None:
        """Rank 0 writes what all data-parallel ranks have of the sampled groups; what was emptied has no tokens."""
        lines = [
            token_line(one.completion, sample.trained.get((one.ordinal, one.sample)), step=step, texts=self.token_texts)
            for group in groups
            if sample.wants(group.ordinal)
            for one in group.rollouts
            if one.completion.num_tokens
        ]
        if self.data_ranks.world > 1:
            parts = self.data_ranks.gather(msgspec.msgpack.encode(lines))
            lines = [line for part in parts for line in msgspec.msgpack.decode(part, type=list[TokenLine])]
        if self.ranks.is_leader and self.token_recorder is not None:
            self.token_recorder.record(lines)

    def _export(self, path: Path) -> None:
        """On the disk when it is told of: a run that is done has its model, whatever happens then."""
        with disk_errors(path):
            self.policy.export(path)
            if self.ranks.is_leader:
                sync_files(path)

    def save_checkpoint(self, command: Checkpoint) -> None:
        """Rollouts first: a checkpoint that is there has what waited for its step beside it."""
        self._report_saved(wait=True)
        extra = {
            "schedule": command.schedule,
            "num_events": command.num_events,
            "cut": command.cut,
            "run": command.run,
            "kl_coef": self.kl.coef,
        }
        with self.context.spans.span("checkpoint"):
            if self.ranks.is_leader:
                self.recorder.sync()
            if self.tensor_ranks.is_leader:
                self._save_rollouts(command)
            self.policy.save(Path(command.path), step=self.version, extra=extra, critic=self.critic)
        self._report_saved()

    def _save_rollouts(self, command: Checkpoint) -> None:
        rollouts = [rollout for ordinal in command.schedule["readmit"] for rollout in self.rollouts.group(ordinal)]
        if rollouts:
            path = rollouts_dir(Path(command.path)) / f"{self.context.name}{SUFFIX}"
            save_messages(path, rollouts, cut=command.cut)

    def _report_saved(self, *, wait: bool = False) -> None:
        """Tell of a checkpoint once it is whole: a step counts as kept from then on."""
        if not self.policy.is_saving:
            return
        with self.context.spans.span("checkpoint"):
            saved = self.policy.saved(wait=wait)
        if saved is not None:
            self._tell(CheckpointSaved(step=saved.step, path=str(saved.path)))

    def _publish(self) -> None:
        with self.context.spans.span("publish", version=self.version):
            started_s = self.context.clock.now_s()
            logprobs = probe_logprobs(self.policy.model, self.probe_tokens)
            with self.context.spans.span("stage", version=self.version):
                is_offered = self.publisher.publish(self.version, self.probe_tokens, logprobs)
            staging_s = self.context.clock.now_s() - started_s
            self._tell(
                Published(
                    version=self.version,
                    payload_bytes=self.publisher.num_bytes,
                    staging_s=staging_s,
                    skipped=not is_offered,
                )
            )


def _heads_in(payload: bytes) -> Sequence[RolloutHead]:
    message = wire.decode(payload, (Arrived,))
    assert isinstance(message, Arrived)
    return message.heads
