"""The node of the critic: values before a step's advantages, updates while the policy makes its own
(`critic.executor = "own"`)."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, reduce
from pathlib import Path

import numpy as np
import torch

from slipstream.algorithms.reduce import Metrics, decode_metrics, encode_metrics, merge_metrics
from slipstream.core.config import RunConfig
from slipstream.core.disk import disk_errors
from slipstream.core.errors import NonFiniteError
from slipstream.core.executor import Context, Executor
from slipstream.core.holders import HANDED, Holders
from slipstream.core.packed import Batching, PackedMicrobatch, TrainSequence
from slipstream.core.peer_messages import (
    CriticCheckpoint,
    CriticSaved,
    CriticSequence,
    CriticStart,
    CriticUpdate,
    CriticUpdated,
    TargetNumbers,
    ValuesRead,
    ValuesWanted,
)
from slipstream.core.rank_group import RankGroup
from slipstream.core.service_messages import Ready
from slipstream.core.types import Message, Stop
from slipstream.models.build import build_tokenizer
from slipstream.models.device import scoring_device, take_share
from slipstream.models.sharded import Division, build_sharded_policy, read_shard
from slipstream.models.turns import read_in_turns
from slipstream.trainer.checkpoint import CRITIC, Checkpoints, Trained
from slipstream.trainer.critic import Critic
from slipstream.trainer.critic_link import ANSWERED, ASKED, PARTS_FOLDER, by_key
from slipstream.trainer.measure import Key, filled, with_columns
from slipstream.trainer.policy import trained_division

NO_STATES = torch.empty(0, dtype=torch.float32)  # of the policy: only a head reads them


def starts_from_warm_start(config: RunConfig) -> bool:
    """Tell whether the critic starts from what the warm start makes: the trainer has to write it for it."""
    return config.critic.path is None and config.warm_start.steps > 0


class CriticModel(Executor):
    """Tells the values of each batch, and makes the critic's updates from the returns that it is sent.

    Consumes: `asked`, from the trainer's rank 0, in order (on other ranks `handed`, the same from rank 0). Emits:
    `answered`. Waits for: a message. Ends when: the trainer has stopped and says so. All `critic.ranks` hold one critic
    together, `tensor_parallel` of them each layer, and read every i-th microbatch. With `resume` it goes on from that
    checkpoint, whatever ranks trained the critic; from what the warm start makes it starts when the trainer says so.
    """

    inputs = (ASKED,)
    outputs = (ANSWERED,)

    def __init__(self, *, config: RunConfig, batching: Batching, resume: str | None = None) -> None:
        self._config, self._batching, self._resume = config, batching, resume
        self._arrived: dict[Key, TrainSequence] = {}
        self._batch: dict[Key, TrainSequence] = {}  # of the present step, with its values
        self._returns: dict[Key, np.ndarray] = {}
        self._is_saving = self._is_finished = False
        self._ends = ExitStack()

    def init(self, context: Context) -> None:
        self._context = context
        torch.set_num_threads(context.num_threads)
        critic = self._config.critic
        self._holders = Holders(
            context, tensor_parallel=critic.tensor_parallel, is_sharded=True, timeout_s=self._config.deadline_s
        )
        if context.group.is_leader:  # of saves that were interrupted
            shutil.rmtree(context.run_dir / "checkpoints" / PARTS_FOLDER, ignore_errors=True)
        if self._resume is not None or not starts_from_warm_start(self._config):
            self._load()
        context.spans.set_idle_state("wait_batch")
        context.outputs["events"].put(Ready(executor=context.name))

    def step(self) -> bool:
        """Carry out one message of the trainer's; tell of a checkpoint that has become whole."""
        self._context.inputs["commands"].get_nowait()  # the trainer says when it is over, not the controller
        self._report_saved()
        leads = self._context.group.is_leader
        message = self._context.inputs[ASKED if leads else HANDED].get_nowait()
        if message is None:
            return False
        if leads and self._context.group.world > 1:
            self._context.outputs[HANDED].put(message)
        self._obey(message)
        return True

    @property
    def is_finished(self) -> bool:
        return self._is_finished

    @property
    def trained(self) -> Trained:
        """The critic's part on this rank, and its optimizer."""
        return self._critic.module, self._critic.optimizer

    def wait_fds(self) -> list[int]:
        return [self._checkpoints.fileno()] if self._is_saving else []

    def close(self) -> None:
        self._ends.close()

    @cached_property
    def _division(self) -> Division:
        device = scoring_device(self._config.critic.device, self._context.group.local_rank)
        take_share(self._config.critic.gpu_share, device)
        return trained_division(self._config, self._holders.data_parallel, self._holders.tensor_parallel, device)

    def _load(self, start: Path | None = None) -> None:
        """Make the critic as the trainer's would start, beside a policy that is given up again: the one in folder
        `start`, or (None) the first one of the run."""
        config, tokenizer = self._config, build_tokenizer(self._config.model)
        plain = replace(self._division, precision="float32")  # without a copy, which would outlive it
        policy = build_sharded_policy(config.model, plain, seed=config.seed, tokenizer=tokenizer)
        if start is not None:
            read_shard(policy, start)
        self._critic = Critic(config, policy, self._division)
        del policy  # before there are moments
        trained = {CRITIC: self.trained}
        if self._resume is not None:
            self._checkpoints.load(Path(self._resume), trained)

    @cached_property
    def _checkpoints(self) -> Checkpoints:
        """Checkpoints of the critic, whose ranks' files stand behind those of the trainer's."""
        made = Checkpoints(self._context.group, first_rank=self._config.trainer.ranks)
        self._ends.callback(made.close)
        return made

    @property
    def _ranks(self) -> RankGroup:
        return self._holders.data_parallel

    def _obey(self, message: Message) -> None:
        match message:
            case CriticStart():
                with self._context.spans.span("start_up"):
                    self._load(Path(message.path))
            case CriticSequence():
                key = (message.ordinal, message.sample)
                self._arrived[key] = TrainSequence.read_only(key, message.tokens, message.mask, starts=message.starts)
            case ValuesWanted():
                self._tell_values(message)
            case TargetNumbers():
                self._returns |= by_key(message)
            case CriticUpdate():
                returns, self._returns = self._returns, {}
                self._answer(self._updated(message, returns))
            case CriticCheckpoint():
                self._save(message)
            case Stop():
                self._report_saved(wait=True)
                self._is_finished = True
            case _:
                raise TypeError(f"a critic does not take {type(message).__name__}")

    def _answer(self, message: Message) -> None:
        if self._context.group.is_leader:
            self._context.outputs[ANSWERED].put(message)

    def _tell_values(self, asked: ValuesWanted) -> None:
        """Read the values of the batch that has arrived, and keep both for the step's updates."""
        batch, self._arrived = self._arrived, {}
        assert len(batch) == asked.num_sequences, "a channel loses nothing and keeps the order"
        spans = self._context.spans
        with spans.span("values", step=asked.step):
            microbatches = self._batching.collate(list(batch.values()), self._config.trainer.microbatch_tokens)
            found = self._read(microbatches)
            spans.did(sum(one.num_tokens for one in microbatches) * self._context.group.is_leader)
        values: dict[Key, np.ndarray] = {key: np.zeros(0, np.float32) for key in batch}
        with self._context.together():
            for microbatch, numbers in zip(microbatches, found, strict=True):
                counts = np.bincount(microbatch.segment_ids, minlength=len(microbatch.keys))
                told = TargetNumbers(keys=np.array(microbatch.keys, np.int64), counts=counts, numbers=numbers)
                values |= by_key(told)
                self._answer(told)
            self._answer(ValuesRead(step=asked.step))
        self._batch = {key: with_columns(one, values=values[key]) for key, one in batch.items()}

    def _read(self, microbatches: Sequence[PackedMicrobatch]) -> list[np.ndarray]:
        critic = self._critic
        found = read_in_turns(
            critic.module, microbatches, lambda one: (critic.values(one, NO_STATES).float(),), self._ranks
        )
        return [values for (values,) in found]

    def _updated(self, asked: CriticUpdate, returns: dict[Key, np.ndarray]) -> CriticUpdated:
        """Make one update as the trainer would beside the policy's; a refused one changes nothing."""
        config, optimizer, spans = self._config, self._critic.optimizer, self._context.spans
        optimizer.planned = asked.step * config.updates_per_step + asked.index
        sequences = [with_columns(self._batch[key], returns=numbers) for key, numbers in returns.items()]
        microbatches = self._batching.collate(sequences, config.capacity_tokens)
        try:
            with spans.span("forward_backward", step=asked.step):
                metrics = self._accumulate(microbatches)
            with spans.span("optimizer", step=asked.step):
                norm = optimizer.step()
        except NonFiniteError as error:  # on all ranks alike
            failure, nothing = f"{error.what}: {error.got}", np.zeros(0, np.uint8)
            return CriticUpdated(step=asked.step, index=asked.index, metrics=nothing, failure=failure)
        told = np.frombuffer(encode_metrics(metrics), np.uint8)
        return CriticUpdated(step=asked.step, index=asked.index, metrics=told, grad_norm=norm)

    def _accumulate(self, microbatches: Sequence[PackedMicrobatch]) -> Metrics:
        """Leave the update's gradients in the optimizer; return the metrics of its loss over all ranks."""
        critic, ranks = self._critic, self._ranks
        num_tokens = sum(one.num_targets for one in microbatches)
        critic.optimizer.zero_grad()
        mine = filled(microbatches[ranks.rank :: ranks.world], -(-len(microbatches) // ranks.world))
        losses: list[torch.Tensor] = []
        metrics: Metrics = {}
        for index, microbatch in enumerate(mine):
            critic.optimizer.before_backward(is_last=index == len(mine) - 1)
            values = critic.values(microbatch, NO_STATES)
            loss, found = critic.loss(microbatch.tensors(values.device), values, num_tokens=num_tokens)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach().double())
            metrics = merge_metrics(metrics, found)
            self._context.spans.did(microbatch.num_tokens)
        total = float(ranks.sum(torch.stack(losses).sum().cpu()))
        if not np.isfinite(total):
            got = f"value loss {total} at update {critic.optimizer.num_updates}"
            raise NonFiniteError("the value loss is not finite", got=got)
        return reduce(merge_metrics, map(decode_metrics, ranks.gather(encode_metrics(metrics))))

    # Checkpoints

    def _save(self, asked: CriticCheckpoint) -> None:
        path = Path(asked.path)
        with self._context.spans.span("checkpoint"), disk_errors(path):
            if self._context.group.is_leader:
                path.parent.parent.mkdir(exist_ok=True)
            self._checkpoints.save(path, {CRITIC: self.trained}, step=asked.step)
        self._is_saving = True
        self._report_saved()

    def _report_saved(self, *, wait: bool = False) -> None:
        if not self._is_saving:
            return
        with self._context.spans.span("checkpoint"):
            saved = self._checkpoints.wait() if wait else self._checkpoints.poll()
        if saved is not None:
            self._is_saving = False
            self._answer(CriticSaved(step=saved.step))
