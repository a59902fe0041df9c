"""The node of the teacher: rollouts get what it says on their way to the trainer (`teacher.executor = "own"`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from slipstream.core.config import RunConfig
from slipstream.core.executor import Context, Executor
from slipstream.core.holders import Holders
from slipstream.core.lora_section import LoraConfig
from slipstream.core.packed import Batching, PackedMicrobatch
from slipstream.core.rank_group import RankGroup
from slipstream.core.service_messages import Ready
from slipstream.core.types import Rollout
from slipstream.models.build import build_tokenizer
from slipstream.models.config import TransformerConfig
from slipstream.models.device import scoring_device
from slipstream.models.packed import at_targets
from slipstream.models.sharded import Division, build_frozen
from slipstream.models.tokenizer import Tokenizer, vocabulary_size
from slipstream.models.transformer import Transformer
from slipstream.models.turns import collated, read_in_turns
from slipstream.trainer.batch import train_sequence
from slipstream.trainer.measure import per_sequence, rows_at_once
from slipstream.trainer.station import Station
from slipstream.trainer.teacher import Teacher


class Reader(Protocol):
    """A teacher in a process of its own, of which `close` is the end: vLLM's (`generator/vllm/reader.py`)."""

    config: TransformerConfig

    def likeliest(self, contexts: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[tuple[np.ndarray, np.ndarray]]: ...

    def close(self) -> None: ...


class TeacherModel(Executor):
    """Gives rollouts `teacher_tokens` and `teacher_logprobs`; the loop is that of `Station`.

    With `new_reader` the teacher is in the process that it starts, for so many tokens and at a temperature.
    """

    inputs = ("rollouts",)
    outputs = ("measured",)

    def __init__(
        self, *, config: RunConfig, batching: Batching, new_reader: Callable[..., Reader] | None = None
    ) -> None:
        self._config = config
        self._batching = batching
        self._new_reader = new_reader
        self._reader: Reader | None = None

    def init(self, context: Context) -> None:
        self._context = context
        torch.set_num_threads(context.num_threads)
        self._tokenizer = build_tokenizer(self._config.model)
        teacher = self._config.teacher
        self._holders = Holders(
            context,
            tensor_parallel=teacher.tensor_parallel,
            is_sharded=teacher.sharded,
            timeout_s=self._config.deadline_s,
        )
        read = partial(
            taught,
            config=self._config,
            tokenizer=self._tokenizer,
            batching=self._batching,
            ranks=self._holders.data_parallel,
        )
        by = partial(read_by, top_k=self._config.teacher.top_k or 0)
        load, read = (self._load, read) if self._new_reader is None else (self._start, by)
        self._station = Station(context, self._config, holders=self._holders, state="teacher", load=load, read=read)
        self._station.load_now()
        context.spans.set_idle_state("wait_rollouts")
        context.outputs["events"].put(Ready(executor=context.name))

    def step(self) -> bool:
        """Take about a microbatch of what arrived, read it, and pass it on."""
        return self._station.step()

    @property
    def is_finished(self) -> bool:
        return self._station.is_finished

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()

    def _start(self) -> Reader:
        assert self._new_reader is not None
        asked = self._config.teacher.temperature
        self._reader = self._new_reader(
            self._config,
            self._context,
            num_tokens=vocabulary_size(self._tokenizer),
            temperature=self._config.logprob_temperature if asked is None else asked,
        )
        return self._reader

    def _load(self) -> Transformer:
        teacher = self._config.teacher
        division = Division(
            self._holders.data_parallel,
            self._holders.tensor_parallel,
            device=scoring_device(teacher.device, self._context.group.local_rank),
            stored=teacher.precision,
        )
        shape = self._config.model.model_copy(update={"path": teacher.path, "lora": LoraConfig()})
        return build_frozen(shape, division, seed=self._config.seed, tokenizer=self._tokenizer)


def taught(
    model: Transformer,
    rollouts: Sequence[Rollout],
    *,
    config: RunConfig,
    tokenizer: Tokenizer,
    batching: Batching,
    ranks: RankGroup = RankGroup.alone(),
) -> list[Rollout]:
    """`rollouts` with the teacher's likeliest tokens where each of their tokens was sampled, and with their logprobs.

    Data-parallel `ranks` of the model call it together, with the same `rollouts`.
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
    microbatches = collated(batching, sequences, config.trainer.microbatch_tokens)
    found = read_in_turns(model, microbatches, partial(_likeliest, teacher, model), ranks)
    for microbatch, (best, measured) in zip(microbatches, found, strict=True):
        tokens |= per_sequence(microbatch, best)
        logprobs |= per_sequence(microbatch, measured)
    return [
        msgspec.structs.replace(rollout, teacher_tokens=tokens[sequence.key], teacher_logprobs=logprobs[sequence.key])
        for rollout, sequence in zip(rollouts, sequences, strict=True)
    ]


def _likeliest(teacher: Teacher, model: Transformer, microbatch: PackedMicrobatch) -> tuple[Tensor, Tensor]:
    """Return `Teacher.likeliest` at the microbatch's targets, tokens int32."""
    states = at_targets(model, microbatch)
    read = [teacher.likeliest(rows) for rows in torch.split(states, rows_at_once(model, device=states.device.type))]
    return torch.cat([part for part, _ in read]).int(), torch.cat([part for _, part in read])


def read_by(reader: Reader, rollouts: Sequence[Rollout], *, top_k: int) -> list[Rollout]:
    """`rollouts` as `taught` gives them, by a teacher in a process of its own, which gets each branch alone."""
    sequences = [train_sequence(rollout.completion) for rollout in rollouts]
    parts = [(one.tokens, start, trained) for one in sequences for start, trained in one.contexts]
    contexts = [(tokens[start : trained[-1] + 1], trained - start) for tokens, start, trained in parts]
    found, measured = iter(reader.likeliest(contexts)), []
    for rollout, sequence in zip(rollouts, sequences, strict=True):
        read = [(np.zeros((0, top_k), np.int32), np.zeros((0, top_k + 1), np.float32))]
        read += [next(found) for _ in sequence.contexts]
        tokens, logprobs = (np.concatenate(column) for column in zip(*read, strict=True))
        measured.append(msgspec.structs.replace(rollout, teacher_tokens=tokens, teacher_logprobs=logprobs))
    return measured
