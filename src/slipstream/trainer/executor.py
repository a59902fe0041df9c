"""The trainer node: scored rollouts in, a new policy version out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch

from slipstream.algorithms.kl import AdaptiveKL
from slipstream.core.config import RunConfig
from slipstream.core.disk import disk_errors, sync_files
from slipstream.core.errors import NonFiniteError
from slipstream.core.executor import Context, Executor
from slipstream.core.packed import Batching, NewCollector
from slipstream.core.peer_messages import WeightsLinked, WeightsWanted
from slipstream.core.service_messages import (
    Checkpoint,
    CheckpointSaved,
    Export,
    Exported,
    Noted,
    Progress,
    Publish,
    Published,
    Ready,
    Waiting,
    WarmStart,
)
from slipstream.core.types import Group, Message, Skip, StepDone, Stop, TrainStep
from slipstream.core.vetting import Limits
from slipstream.models.transformer import Transformer
from slipstream.observe.timeline import TRAINED
from slipstream.trainer.checkpoint import CRITIC, REFERENCE, Trained
from slipstream.trainer.critic import Critic
from slipstream.trainer.critic_executor import starts_from_warm_start
from slipstream.trainer.critic_link import CriticLink
from slipstream.trainer.following import FollowingReference
from slipstream.trainer.inbox import RolloutInbox
from slipstream.trainer.logit_room import choose_logits, free_bytes
from slipstream.trainer.loss_checks import needed_columns
from slipstream.trainer.measure import (
    Auxiliary,
    brings_reference,
    follows_warm_start,
    least_vocabulary,
    probed,
    reference_path,
)
from slipstream.trainer.policy import Policy
from slipstream.trainer.rank_axes import RankAxes
from slipstream.trainer.records import Records, TokenSample
from slipstream.trainer.refused import write_report
from slipstream.trainer.step import train_on_batch
from slipstream.trainer.supervised import SupervisedUpdate, supervised_updates
from slipstream.trainer.teacher import Teacher

PROBE_TOKENS = 32


class Trainer(Executor):
    """Buffers rollouts, trains the groups that the schedule names, publishes versions, saves checkpoints.

    Consumes: `Rollout` (rollouts), `WarmStart`, `TrainStep`, `Skip`, `Waiting`, `Checkpoint`, `Export`, `Publish`,
    `Stop` (commands; and what rank 0's publisher relays). Produces: versions (its WEIGHTS channel),
    `GroupScored`, `StepDone`, `Published` (events). A critic of its own executor is asked, and waited for, in a step
    (`critic_link.py`). Waits for: a `TrainStep`. Ends when: told to stop. With `resume` it
    starts from that checkpoint instead of a warm start.

    With several ranks, each data-parallel one keeps the rollouts it is dealt, and tells rank 0 their heads (`Arrived`):
    rank 0 knows when a group is whole, alone speaks with the controller, and relays its commands. All ranks carry them
    out in one order, so whatever a command leads to, collectives included, they do together. Peers, the stages,
    context- and tensor-parallel ranks of one model, get a step's rollouts from the first of them when it is trained.
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
        self.context, self.ranks, config = context, context.group, self.config
        torch.set_num_threads(context.num_threads)
        axes = RankAxes.of(self.ranks, config.trainer, timeout_s=config.deadline_s)
        self.data_ranks, self.peers = axes.data, axes.peers
        self.policy = Policy(config, self.ranks, axes.sharing, axes.tensor, axes.context, axes.stage, axes.experts)
        self._ends.callback(self.policy.close)
        self.version, self.published = 0, -1
        self._next: Message | None = None  # a command that was taken and is yet to be obeyed
        self._had_gradient = False  # since the last version was published
        self._probed = np.empty(0, np.float32)  # the probe text's logprobs by the last version
        assert context.publisher is not None, "a trainer needs a WEIGHTS channel"
        self.publisher = context.publisher
        self.policy.offer_to(self.publisher)
        model = self.policy.model.config
        limits = Limits.of(
            config,
            vocab_size=least_vocabulary(config, model.vocab_size),
            max_positions=model.max_positions,
            brings_reference=brings_reference(config),
            routed=(model.num_layers, model.experts_per_token, model.num_experts),
        )
        self.inbox = RolloutInbox(
            config,
            context,
            limits,
            new_buffer=self.new_buffer,
            data_ranks=self.data_ranks,
            peers=self.peers,
        )
        num_tokens = min(PROBE_TOKENS, model.max_positions)
        self.probe_tokens = np.random.default_rng(config.seed).integers(0, model.vocab_size, num_tokens, dtype=np.int32)
        is_leader, tokenizer = self.ranks.is_leader, self.policy.tokenizer
        records = Records(config.observe, context.run_dir, tokenizer, is_leader=is_leader, ranks=self.data_ranks)
        self.records = self._ends.enter_context(closing(records))
        self.warm_start: Iterator[SupervisedUpdate] | None = None
        self.reference: Transformer | None = None
        self.following: FollowingReference | None = None
        self.critic: Critic | None = None
        self.own_critic: CriticLink | None = None
        if config.has_own_critic:
            self.own_critic = CriticLink(context, config, data_ranks=self.data_ranks, peers=self.peers)
        self.teacher: Teacher | None = None
        self.kl = AdaptiveKL(config.kl.coef, config.kl.target or 1.0, config.kl.horizon)
        if self.resume is not None:
            self._resume(Path(self.resume))
        context.spans.set_idle_state("wait_generation")
        if self.resume is not None or not config.warm_start.steps:
            self._be_ready()

    @property
    def is_finished(self) -> bool:
        return self._is_finished

    def step(self) -> bool:
        """Make one update of the warm start; or take all waiting rollouts, and commands up to one training step."""
        if self.warm_start is not None:
            self._warm_up()
            return True
        with self.context.spans.span("receive"):
            has_news = self.publisher.poll()
            has_news |= self.inbox.receive(self.version)
        self._report_saved()
        while (message := self._next_command()) is not None:
            has_news = True
            self._obey(self._relayed(message))
            if isinstance(message, TrainStep | WarmStart):
                break
        return has_news

    def _next_command(self) -> Message | None:
        """Take the oldest command, a step only when weights may change: the release of the last version wakes us."""
        if self._next is None:
            self._next = self.context.inputs["commands"].get_nowait()
        if isinstance(self._next, TrainStep) and not self.publisher.withdraw():
            return None
        message, self._next = self._next, None
        return message

    def wait_fds(self) -> list[int]:
        return self.policy.wait_fds()

    def close(self) -> None:
        self._ends.close()

    def _tell(self, event: Message) -> None:
        """Send `event` to the controller, from rank 0 alone: it holds for all ranks."""
        if self.ranks.is_leader:
            self.context.outputs["events"].put(event)

    # Before the first step

    def _warm_start(self, message: WarmStart) -> Iterator[SupervisedUpdate]:
        torch.set_num_threads(self.context.num_threads_alone)
        self._choose_logits()
        lengths = np.stack([message.prompt_lengths, message.completion_lengths], axis=1).reshape(-1)
        pieces = np.split(message.tokens, np.cumsum(lengths)[:-1])
        config = self.config.warm_start
        return supervised_updates(
            self.policy.model,
            self.policy.optimizer.lent(config.optimizer, total_updates=config.steps),
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
            self.policy.optimizer.restart()
            torch.set_num_threads(self.context.num_threads)
            with self.context.spans.span("start_up"):
                self._be_ready()
        elif update.index % 10 == 9:
            name, total = self.context.name, self.config.warm_start.steps
            metrics = {"loss": update.loss}
            self._tell(Progress(executor=name, phase="warm start", done=update.index + 1, total=total, metrics=metrics))

    def _resume(self, path: Path) -> None:
        self._build_auxiliary()
        restored = self.policy.load(path, self._others)
        self.version = restored.step
        self._choose_logits(restored.extra.get("max_logits"))
        self.kl = replace(self.kl, coef=restored.extra.get("kl_coef", self.kl.coef))
        if self.peers.is_leader:
            self.inbox.restore(path, restored.extra, version=self.version)

    def _build_auxiliary(self) -> None:
        """Build the frozen models and the critic, from the policy at version 0 where the config names nothing else."""
        config = self.config
        if config.has_critic and not config.has_own_critic:
            self.critic = self.policy.new_critic()
        if self.own_critic is not None and starts_from_warm_start(config) and self.resume is None:
            start = self.context.run_dir / "critic_start"
            self.policy.export(start)
            self.own_critic.start(start)
        if config.has_teacher:
            model = None if config.has_own_teacher else self.policy.reference(config.teacher.path)
            self.teacher = Teacher.of(config, self.policy.tokenizer, model)
        if "reference_logprobs" not in needed_columns(config):
            return
        path = reference_path(config, self.context.run_dir)
        if path is not None and follows_warm_start(config) and self.resume is None:
            self._export(Path(path))  # no checkpoint on disk has these weights yet
        if config.kl.executor == "trainer":
            self.reference = self.policy.reference(path)
            if config.kl.sync_every is not None:
                self.following = FollowingReference(self.reference, self.policy.division)

    def _choose_logits(self, before: int | None = None) -> None:
        """Say on a GPU how many logits are held at once, by what is free beside all models that are there now."""
        if (device := self.policy.division.device).type != "cuda":
            return
        optimizers = [self.policy.optimizer, *([] if self.critic is None else [self.critic.optimizer])]
        read = partial(free_bytes, device, self.config.trainer.gpu_share)
        chosen, free = choose_logits(optimizers, self.ranks, read, before)
        for model in (self.policy.model, self.reference, None if self.teacher is None else self.teacher.model):
            if model is not None:
                model.max_logits = chosen
        text = f"2^{chosen.bit_length() - 1} logits at once, of {free / 2**30:.1f} GiB free on a GPU"
        self._tell(Noted(executor=self.context.name, text=text))

    @property
    def _others(self) -> dict[str, Trained]:
        """The models besides the policy that change, which checkpoints hold."""
        critic = {} if self.critic is None else {CRITIC: (self.critic.module, self.critic.optimizer)}
        return critic | ({} if self.following is None else {REFERENCE: (self.following.model, self.following)})

    def _follow(self, metrics: dict[str, float]) -> None:
        """Let the reference follow the policy, if it is its turn; tell which one the step was measured against."""
        every = self.config.kl.sync_every
        if every is None or self.following is None:
            return
        metrics["reference_version"] = float((self.version - 1) // every * every)
        if self.version % every == 0:
            with self.context.spans.span("reference", step=self.version - 1):
                self.following.follow(self.policy.parameters, self.config.kl.mixup)

    def _be_ready(self) -> None:
        if self.resume is None:
            self._build_auxiliary()
            self._choose_logits()
        self.context.outputs["events"].put(
            Ready(
                executor=self.context.name,
                num_params=self.policy.num_params,
                num_adapter_params=self.policy.num_adapter_params,
                version=self.version,
            )
        )
        self.inbox.announce_restored()
        self._publish()

    def _relayed(self, message: Message) -> Message:
        """Return the command as all ranks get it: a step with the heads of its rollouts."""
        if not self.ranks.is_leader:
            return message
        if isinstance(message, TrainStep):
            message = msgspec.structs.replace(message, heads=self.inbox.relayed_heads(message.ordinals))
        elif isinstance(message, Skip):
            self.inbox.relayed_heads(message.ordinals)
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
                if self.peers.is_leader:
                    with self.context.spans.span("record"):
                        self.records.write(self.inbox.own_groups(message.ordinals), step=None)
            case Waiting():
                self.context.spans.set_idle_state(f"wait_{message.reason}")
            case Checkpoint():
                self.save_checkpoint(message)
            case Export():
                with self.context.spans.span("export"):
                    self._export(Path(message.path))
                self._tell(Exported(path=message.path))
            case Publish():
                if self.published != self.version:
                    self._publish()
            case WeightsLinked() | WeightsWanted():
                self.publisher.take(message)
            case Stop():
                self._report_saved(wait=True)
                if self.own_critic is not None:
                    self.own_critic.stop()
                self._is_finished = True
            case _:
                raise TypeError(f"a trainer does not take {type(message).__name__}")

    def _train(self, command: TrainStep) -> None:
        sample = TokenSample(self.config.observe.tokens_every)
        with self.context.spans.span("collate", step=command.step):  # but for what the step says of itself
            groups = self.inbox.shares(command, self.batching)
            metrics = self._trained(groups, command, sample)
        self.context.spans.instant(TRAINED, step=command.step)
        if self.config.kl.target is not None and "kl_reference_sum" in metrics:
            self.kl = self.kl.updated(metrics["kl_reference_sum"], self.config.completions_per_step)
        self._had_gradient |= metrics.get("grad_norm", 0.0) > 0.0
        self.version = command.step + 1
        self._follow(metrics)
        self._tell(StepDone(step=command.step, version=self.version, metrics=metrics))
        is_last = self.version == self.config.steps
        if self.version % self.config.publish_every == 0 or is_last:
            self._publish()
        if self.peers.is_leader:
            with self.context.spans.span("record"):
                self.records.write(groups, step=command.step)
                if any(map(sample.wants, command.ordinals)):
                    self.records.write_tokens(groups, sample, step=command.step)

    def _trained(self, groups: Sequence[Group], command: TrainStep, sample: TokenSample) -> dict[str, float]:
        """Return the metrics of the step. A step that is refused leaves a report in the run's folder."""
        try:
            return train_on_batch(
                self.policy.model,
                self.policy.optimizer,
                groups,
                config=self.config,
                step=command.step,
                batching=self.batching,
                auxiliary=Auxiliary(self.reference, self.critic, self.kl.coef, self.teacher, self.own_critic),
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

    def _export(self, path: Path) -> None:
        """Write the model; on return it is on the disk: a run that is done has it, whatever happens then."""
        with disk_errors(path):
            self.policy.export(path)
            if self.ranks.is_leader:
                sync_files(path)

    def save_checkpoint(self, command: Checkpoint) -> None:
        """Save the rollouts first: a checkpoint that is there has what waited for its step beside it."""
        self._report_saved(wait=True)
        extra = {
            "schedule": command.schedule,
            "num_events": command.num_events,
            "cut": command.cut,
            "run": command.run,
            "kl_coef": self.kl.coef,
        }
        if self.policy.model.max_logits is not None:
            extra["max_logits"] = self.policy.model.max_logits
        with self.context.spans.span("checkpoint"):
            self.records.sync()
            if self.peers.is_leader:
                self.inbox.save(command)
            part = None if self.own_critic is None else self.own_critic.part
            if self.own_critic is not None:
                self.own_critic.save(Path(command.path), self.version)
                if self.policy.saves_at_once:
                    self.own_critic.hear_of_part(wait=True)
            self.policy.save(Path(command.path), step=self.version, extra=extra, others=self._others, part=part)
        self._report_saved()

    def _report_saved(self, *, wait: bool = False) -> None:
        """Tell the controller of a checkpoint once it is whole: a step counts as kept from then on."""
        if not self.policy.is_saving:
            return
        with self.context.spans.span("checkpoint"):
            if self.own_critic is not None:
                self.own_critic.hear_of_part(wait=wait)
            saved = self.policy.saved(wait=wait)
        if saved is not None:
            self._tell(CheckpointSaved(step=saved.step, path=str(saved.path)))

    def _publish(self) -> None:
        self.published = self.version
        with self.context.spans.span("publish", version=self.version):
            started_s = self.context.clock.now_s()
            logprobs = probed(self.policy.model, self.probe_tokens, self.batching)
            with self.context.spans.span("stage", version=self.version):
                is_offered = self.publisher.publish(self.version, self.probe_tokens, logprobs)
            is_unmoved = not self.publisher.has_moved or np.array_equal(logprobs, self._probed)
            staging_s = self.context.clock.now_s() - started_s
            self._tell(
                Published(
                    version=self.version,
                    payload_bytes=self.publisher.num_bytes,
                    staging_s=staging_s,
                    skipped=not is_offered,
                    is_same=self._had_gradient and is_unmoved,
                )
            )
            self._had_gradient, self._probed = False, logprobs
