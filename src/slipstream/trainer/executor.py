"""The trainer node: scored rollouts in, a new policy version out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from slipstream.algorithms.kl import AdaptiveKL
from slipstream.algorithms.logprobs import probe_logprobs
from slipstream.core.config import RunConfig
from slipstream.core.executor import Context, Executor
from slipstream.core.packed import Batching, GroupCollector
from slipstream.core.types import (
    Checkpoint,
    CheckpointSaved,
    Export,
    Exported,
    Group,
    GroupScored,
    Message,
    Progress,
    Published,
    Ready,
    Rollout,
    Skip,
    StepDone,
    Stop,
    TrainStep,
    Waiting,
    WarmStart,
)
from slipstream.models.build import build_policy
from slipstream.models.flat import FlatParameters
from slipstream.models.hf import save_model
from slipstream.models.quantized import Packer, WeightLayout
from slipstream.models.transformer import Transformer
from slipstream.observe.recorder import RolloutRecorder
from slipstream.trainer.checkpoint import Trained, load_checkpoint, save_checkpoint
from slipstream.trainer.critic import Critic
from slipstream.trainer.optim import FlatAdamW
from slipstream.trainer.scores import effective_reward, has_signal
from slipstream.trainer.step import Auxiliary, needed_columns, train_on_batch
from slipstream.trainer.supervised import SupervisedUpdate, supervised_updates

PROBE_TOKENS = 32


class Trainer(Executor):
    """One rank: buffers groups, trains the ones the schedule names, publishes versions, saves checkpoints.

    Consumes: `Rollout` (rollouts), `WarmStart`, `TrainStep`, `Skip`, `Waiting`, `Checkpoint`, `Export`, `Stop`
    (commands). Produces: versions (its WEIGHTS channel), `GroupScored`, `StepDone`, `Published` (events). Waits for: a
    `TrainStep`. Ends when: told to stop. With `resume` it starts from that checkpoint instead of a warm start.
    """

    inputs = ("rollouts",)

    def __init__(
        self, *, config: RunConfig, buffer: GroupCollector, batching: Batching, resume: str | None = None
    ) -> None:
        self.config = config
        self.buffer = buffer
        self.batching = batching
        self.resume = resume
        self._is_finished = False
        self._ends = ExitStack()

    def init(self, context: Context) -> None:
        self.context = context
        config = self.config
        torch.set_num_threads(context.num_threads)
        self.model, self.tokenizer = build_policy(config.model, seed=config.seed)
        self.parameters = FlatParameters(self.model)
        updates = config.steps * config.updates_per_step
        self.optimizer = FlatAdamW(
            self.model,
            self.parameters,
            config.trainer.optimizer,
            total_updates=updates,
            updates_per_step=config.updates_per_step,
        )
        self.version = 0
        assert context.publisher is not None, "a trainer needs a WEIGHTS channel"
        self.publisher = context.publisher
        self.publisher.open(self.parameters.flat, self._packer())
        generator = np.random.default_rng(config.seed)
        vocab_size = self.model.config.vocab_size
        num_tokens = min(PROBE_TOKENS, self.model.config.max_positions)
        self.probe_tokens = generator.integers(0, vocab_size, num_tokens, dtype=np.int32)
        self.recorder = self._ends.enter_context(closing(RolloutRecorder(context.run_dir / "rollouts.jsonl")))
        self.warm_start: Iterator[SupervisedUpdate] | None = None
        self.reference: Transformer | None = None
        self.critic: Critic | None = None
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
        """One update of the warm start; or all waiting rollouts, and commands up to one training step."""
        if self.warm_start is not None:
            self._warm_up()
            return True
        with self.context.spans.span("receive"):
            has_news = self._receive()
        while (message := self.context.inputs["commands"].get_nowait()) is not None:
            has_news = True
            self._obey(message)
            if isinstance(message, TrainStep):
                break
        return has_news

    # Before the first step

    def _warm_start(self, message: WarmStart) -> Iterator[SupervisedUpdate]:
        torch.set_num_threads(self.context.num_threads_alone)
        lengths = np.stack([message.prompt_lengths, message.completion_lengths], axis=1).reshape(-1)
        pieces = np.split(message.tokens, np.cumsum(lengths)[:-1])
        return supervised_updates(
            self.model,
            self.parameters,
            list(zip(pieces[0::2], pieces[1::2], strict=True)),
            config=self.config.warm_start,
            microbatch_tokens=self.config.trainer.microbatch_tokens,
            seed=self.config.seed,
            batching=self.batching,
        )

    def _warm_up(self) -> None:
        assert self.warm_start is not None
        with self.context.spans.span("warm_start"):
            update = next(self.warm_start, None)
        if update is None:
            self.warm_start = None
            torch.set_num_threads(self.context.num_threads)
            self._be_ready()
        elif update.index % 10 == 9:
            self.context.outputs["events"].put(
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
        restored = load_checkpoint(path, self.parameters, self.optimizer, critic=self._trained_critic())
        self.version = restored.step
        self.kl = replace(self.kl, coef=restored.extra.get("kl_coef", self.kl.coef))

    def _build_auxiliary(self) -> None:
        """The reference and the critic, from the policy at version 0 where the config names nothing else."""
        config = self.config
        if config.has_critic:
            self.critic = Critic(config, self.model)
        if "reference_logprobs" not in needed_columns(config):
            return
        path = config.kl.reference
        if path is None and config.warm_start.steps:  # no checkpoint on disk has these weights yet
            folder = self.context.run_dir / "reference"
            if self.resume is None:
                save_model(self.model, folder, self.tokenizer)
            path = str(folder)
        model = config.model if path is None else config.model.model_copy(update={"path": path})
        self.reference, _ = build_policy(model, seed=config.seed, tokenizer=self.tokenizer)
        self.reference.requires_grad_(False)

    def _trained_critic(self) -> Trained | None:
        return None if self.critic is None else (self.critic.flat, self.critic.optimizer)

    def _be_ready(self) -> None:
        if self.resume is None:
            self._build_auxiliary()
        num_params = self.parameters.flat.numel()
        self.context.outputs["events"].put(
            Ready(executor=self.context.name, num_params=num_params, version=self.version)
        )
        self._publish()

    # The loop

    def _receive(self) -> bool:
        has_news = self.publisher.poll()
        while (message := self.context.inputs["rollouts"].get_nowait()) is not None:
            has_news = True
            assert isinstance(message, Rollout)
            group = self.buffer.add(message)
            if group is not None:
                self.context.outputs["events"].put(self._scored(group))
        return has_news

    def _scored(self, group: Group) -> GroupScored:
        rewards = [effective_reward(rollout, self.config) for rollout in group.rollouts]
        return GroupScored(
            ordinal=group.ordinal,
            has_signal=has_signal(group, self.config),
            mean_reward=sum(rewards) / len(rewards),
            num_failed=sum(rollout.failure is not None for rollout in group.rollouts),
            min_version=min(rollout.completion.min_version for rollout in group.rollouts),
            max_version=max(rollout.completion.max_version for rollout in group.rollouts),
        )

    def _obey(self, message: Message) -> None:
        events = self.context.outputs["events"]
        match message:
            case WarmStart():
                self.warm_start = self._warm_start(message)
            case TrainStep():
                self._train(message)
            case Skip():
                for group in self.buffer.take(message.ordinals):
                    self.recorder.record_group(group, step=None)
            case Waiting():
                self.context.spans.set_idle_state(f"wait_{message.reason}")
            case Checkpoint():
                with self.context.spans.span("checkpoint"):
                    save_checkpoint(
                        Path(message.path),
                        self.parameters,
                        self.optimizer,
                        step=self.version,
                        keep=self.config.trainer.keep_checkpoints,
                        extra={"schedule": message.schedule, "num_events": message.num_events, "kl_coef": self.kl.coef},
                        critic=self._trained_critic(),
                    )
                events.put(CheckpointSaved(step=message.step, path=message.path))
            case Export():
                with self.context.spans.span("export"):
                    save_model(self.model, Path(message.path), self.tokenizer)
                events.put(Exported(path=message.path))
            case Stop():
                self._is_finished = True
            case _:
                raise TypeError(f"a trainer does not take {type(message).__name__}")

    def _train(self, command: TrainStep) -> None:
        groups = self.buffer.take(command.ordinals)
        with self.context.spans.span("train", step=command.step):
            metrics = train_on_batch(
                self.model,
                self.optimizer,
                groups,
                config=self.config,
                step=command.step,
                batching=self.batching,
                auxiliary=Auxiliary(self.reference, self.critic, self.kl.coef),
            )
        if self.config.kl.target is not None and "kl_reference_sum" in metrics:
            self.kl = self.kl.updated(metrics["kl_reference_sum"], self.config.completions_per_step)
        self.version = command.step + 1
        self.context.outputs["events"].put(StepDone(step=command.step, version=self.version, metrics=metrics))
        is_last = self.version == self.config.steps
        if self.version % self.config.publish_every == 0 or is_last:
            self._publish()
        with self.context.spans.span("record"):
            for group in groups:
                self.recorder.record_group(group, step=command.step)

    def _packer(self) -> Packer | None:
        """What quantises a version between two updates; None where generators take float32 as it is."""
        precision = self.config.generator.precision
        if precision == "float32":
            return None
        return Packer(WeightLayout(self.model, precision), self.parameters.named_views())

    def _publish(self) -> None:
        with self.context.spans.span("publish", version=self.version):
            started_s = self.context.clock.now_s()
            logprobs = probe_logprobs(self.model, self.probe_tokens)
            is_offered = self.publisher.publish(self.version, self.probe_tokens, logprobs)
            staging_s = self.context.clock.now_s() - started_s
        self.context.outputs["events"].put(
            Published(
                version=self.version,
                payload_bytes=self.publisher.num_bytes,
                staging_s=staging_s,
                skipped=not is_offered,
            )
        )

    def close(self) -> None:
        self._ends.close()
