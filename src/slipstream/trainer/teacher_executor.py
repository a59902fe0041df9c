"""The node of the teacher: rollouts get what it says on their way to the trainer (`teacher.executor = "own"`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np
import torch

from slipstream.core.config import RunConfig
from slipstream.core.executor import Context, Executor
from slipstream.core.packed import Batching
from slipstream.core.service_messages import Ready
from slipstream.core.types import Rollout
from slipstream.models.build import build_policy, build_tokenizer
from slipstream.models.device import DTYPES, scoring_device
from slipstream.models.packed import at_targets
from slipstream.models.tokenizer import Tokenizer
from slipstream.models.transformer import Transformer
from slipstream.trainer.batch import train_sequence
from slipstream.trainer.measure import per_sequence, rows_at_once
from slipstream.trainer.station import Station
from slipstream.trainer.teacher import Teacher


class TeacherModel(Executor):
    """Gives rollouts `teacher_tokens` and `teacher_logprobs`; the loop is that of `Station`."""

    inputs = ("rollouts",)
    outputs = ("measured",)

    def __init__(self, *, config: RunConfig, batching: Batching) -> None:
        self._config = config
        self._batching = batching

    def init(self, context: Context) -> None:
        self._context = context
        torch.set_num_threads(context.num_threads)
        self._tokenizer = build_tokenizer(self._config.model)
        read = partial(taught, config=self._config, tokenizer=self._tokenizer, batching=self._batching)
        self._station = Station(context, self._config, state="teacher", load=self._load, read=read)
        self._station.load_now()
        context.spans.set_idle_state("wait_rollouts")
        context.outputs["events"].put(Ready(executor=context.name))

    def step(self) -> bool:
        """Take about a microbatch of what arrived, read it, and pass it on."""
        return self._station.step()

    @property
    def is_finished(self) -> bool:
        return self._station.is_finished

    def _load(self) -> Transformer:
        teacher = self._config.teacher
        shape = self._config.model.model_copy(update={"path": teacher.path})
        model, _ = build_policy(shape, seed=self._config.seed, tokenizer=self._tokenizer)
        device = scoring_device(teacher.device, self._context.group.rank)
        return model.to(device, DTYPES[teacher.precision]).requires_grad_(False)


@torch.no_grad()
def taught(
    model: Transformer, rollouts: Sequence[Rollout], *, config: RunConfig, tokenizer: Tokenizer, batching: Batching
) -> list[Rollout]:
    """`rollouts` with the teacher's likeliest tokens where each of their tokens was sampled, and with their logprobs.

    Identity: what a trainer that holds the teacher compares with, whatever else is among `rollouts`, up to rounding.
    """
    teacher, top_k = Teacher.of(config, tokenizer, model), config.teacher.top_k or 0
    # Keys of their own: after the loss of a replica, a rollout and its second version may meet here.
    sequences = [
        replace(train_sequence(rollout.completion), key=(rollout.ordinal, index))
        for index, rollout in enumerate(rollouts)
    ]
    tokens = {one.key: np.zeros((0, top_k), dtype=np.int32) for one in sequences}
    logprobs = {one.key: np.zeros((0, top_k + 1), dtype=np.float32) for one in sequences}
    for microbatch in batching.collate(sequences, config.trainer.microbatch_tokens):
        states = at_targets(model, microbatch)
        read = [teacher.likeliest(rows) for rows in torch.split(states, rows_at_once(model, device=states.device.type))]
        tokens |= per_sequence(microbatch, torch.cat([part for part, _ in read]).int())
        logprobs |= per_sequence(microbatch, torch.cat([part for _, part in read]))
    return [
        msgspec.structs.replace(rollout, teacher_tokens=tokens[sequence.key], teacher_logprobs=logprobs[sequence.key])
        for rollout, sequence in zip(rollouts, sequences, strict=True)
    ]
