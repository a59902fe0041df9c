"""A teacher that vLLM holds: the likeliest tokens where others were sampled, by the logprobs of prompts.

Nothing is sampled and no weights are sent: the process starts with the checkpoint, and one that takes the place of a
lost one is asked again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from slipstream.algorithms.distillation import LEAST_LOGPROB
from slipstream.core.config import RunConfig, stage_of
from slipstream.core.errors import ChannelError, ChannelTimeout, ExecutorDied
from slipstream.core.executor import Context
from slipstream.generator.vllm import protocol
from slipstream.generator.vllm.backend import WORKER, check_heads, common_arguments, environment, model_room
from slipstream.generator.vllm.folder import WeightFolder, save_base
from slipstream.generator.vllm.process import Launch, WorkerProcess
from slipstream.generator.vllm.settings import check_imports, interpreter
from slipstream.models.build import max_positions
from slipstream.models.config import config_from_hf
from slipstream.models.hf import load_model, read_hf_config
from slipstream.models.hub import is_adapter
from slipstream.models.lora import merged
from slipstream.models.sizes import num_parameters
from slipstream.models.transformer import Transformer

ROOMS = 64
"""Sequences in vLLM at once: its process holds their answers, and makes one after the other."""
_LOG = logging.getLogger(__name__)


def check_reader(config: RunConfig) -> None:
    """Raise ConfigError, before anything starts, for a missing environment and a teacher that vLLM would refuse.

    That the checkpoint is there has been seen. One that a stage will make is not looked at.
    """
    teacher = config.teacher
    if teacher.engine != "vllm" or teacher.path is None:
        return
    check_imports(teacher.vllm, "teacher")
    if config.prompts.max_prompt_tokens is not None:  # else asked again when the longest prompt is known
        model_room(teacher.vllm, config.longest_sequence(max_positions(config)), "teacher")
    if stage_of(teacher.path) is None:
        shape = config_from_hf(read_hf_config(Path(teacher.path)))
        check_heads(shape, "take another teacher, or teacher.engine = 'native'")


class VLLMReader:
    """The teacher of `config` in a vLLM process; implements `trainer.teacher_executor.Reader`.

    Logprobs of prompts are of all rows of the head, at temperature 1. So a checkpoint is written anew where it has more
    rows than the `num_tokens` that stand for tokens, where it is an adapter, and where `temperature` is another: cut,
    merged, and with the head divided by it. All others are served from where they lie.

    `likeliest` waits, at most `silence_timeout_s` for each answer. A process that dies or falls silent is replaced,
    `max_restarts` times in all; after that its error goes to the caller, as does every failure of a first start.
    """

    def __init__(self, config: RunConfig, context: Context, *, num_tokens: int, temperature: float) -> None:
        teacher, settings = config.teacher, config.teacher.vllm
        assert teacher.path is not None
        assert teacher.top_k is not None
        self._top_k, self._count = teacher.top_k, min(teacher.top_k + 1, num_tokens)
        self._settings, self.num_restarts, self._num_ids = settings, 0, 0
        self._launch = Launch(
            command=[str(interpreter(settings, "teacher")), str(WORKER)],
            environment=environment(settings, num_threads=context.num_threads),
            log_path=context.run_dir / "logs" / f"{context.name}-vllm.log",
        )
        path = source = Path(teacher.path)
        shape = config_from_hf(read_hf_config(source))
        max_len = config.longest_sequence(max_positions(config))
        self.config = replace(shape, vocab_size=num_tokens, max_positions=max_len)
        is_written = shape.vocab_size != num_tokens or temperature != 1.0 or is_adapter(source)
        dtype = teacher.precision

        def write(folder: Path) -> None:
            model = load_model(source, dtype=getattr(torch, dtype))
            model = merged(model).to(getattr(torch, dtype)) if is_adapter(source) else model
            save_base(cut(model, num_tokens), folder, dtype, temperature=temperature)

        num_bytes = getattr(torch, dtype).itemsize * num_parameters(shape) * is_written
        self._folder = WeightFolder(num_bytes, write, context.scratch_prefix)
        try:
            if is_written:
                path = self._folder.write(0)
            self._spec = _spec(config, path, self._folder.path, max_len=max_len, max_logprobs=self._count)
            self._worker = self._started()
        except BaseException:
            self._folder.close()
            raise

    @property
    def pid(self) -> int:
        return self._worker.pid

    def likeliest(self, contexts: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the teacher's `top_k` likeliest tokens at each place of `contexts`, int32 [P, K] ascending, and their
        logprobs with that of all others behind them, float32 [P, K + 1].

        A context has tokens, int32 [T], and places, int64 [P], from 1: told is what comes there, given those before.
        """
        return [
            coarse(tokens[:, 1:], logprobs[:, 1:], self._top_k, self.config.vocab_size)
            for tokens, logprobs in self.read(contexts)
        ]

    def read(self, contexts: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return tokens and logprobs [P, 1 + count] of each of `contexts`: the one that is there, the likeliest."""
        found: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        waiting = deque(range(len(contexts)))
        asked: dict[int, int] = {}  # indices of contexts by the id of their question
        while waiting or asked:
            try:
                while waiting and len(asked) < ROOMS:
                    self._num_ids += 1
                    asked[self._num_ids] = waiting.popleft()
                    tokens, places = (part.tolist() for part in contexts[asked[self._num_ids]])
                    question = protocol.Predict(id=self._num_ids, tokens=tokens, places=places, count=self._count)
                    self._worker.send(question)
                what = f"what the teacher says of {len(asked)} sequences"
                answer = self._worker.wait_for(protocol.Predicted, what, self._settings.silence_timeout_s)
                if answer.id not in asked:
                    raise ChannelError(f"{self._worker.name} answered what nobody asked", got=answer.id)
                index = asked.pop(answer.id)
                found[index] = self._checked(answer, *contexts[index])
            except (ExecutorDied, ChannelTimeout) as error:
                waiting.extendleft(sorted(asked.values(), reverse=True))
                asked.clear()
                self._replace(error)
        return [found[index] for index in range(len(contexts))]

    def close(self) -> None:
        """End the process and remove what was written for it. Idempotent."""
        self._worker.close()
        self._folder.close()

    def _checked(
        self, answer: protocol.Predicted, tokens: np.ndarray, places: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        shape = len(places), 1 + self._count
        num_bytes = 4 * shape[0] * shape[1]
        if len(answer.tokens) == len(answer.logprobs) == num_bytes:
            ids = np.frombuffer(answer.tokens, dtype=np.int32).reshape(shape)
            logprobs = np.frombuffer(answer.logprobs, dtype=np.float32).reshape(shape)
            is_known = ids.min(initial=0) >= 0 and ids.max(initial=0) < self.config.vocab_size
            if is_known and (ids[:, 0] == tokens[places]).all() and np.isfinite(logprobs).all():
                return ids, logprobs
        raise ChannelError(
            f"what came from {self._worker.name} is not about what it was asked",
            got=f"{len(answer.tokens)} and {len(answer.logprobs)} bytes for {shape[0]} places",
            allowed=f"{num_bytes} each: ids below {self.config.vocab_size}, the sequence's own first, finite logprobs",
        )

    def _started(self) -> WorkerProcess:
        worker = WorkerProcess(self._launch, name="the teacher's vLLM process", spec=self._spec)
        try:
            worker.wait_for(protocol.Started, "vLLM to start with the teacher", self._settings.start_timeout_s)
        except BaseException:
            worker.close(is_orderly=False)
            raise
        return worker

    def _replace(self, error: ExecutorDied | ChannelTimeout) -> None:
        """Start processes until one serves; raises the last `error` when there were too many."""
        self._worker.close(is_orderly=False)
        while self.num_restarts < self._settings.max_restarts:
            _LOG.warning("the teacher's vLLM is started again: %s", error)
            self.num_restarts += 1
            try:
                self._worker = self._started()
            except (ExecutorDied, ChannelTimeout) as again:
                error = again
            else:
                return
        raise error


def coarse(tokens: np.ndarray, logprobs: np.ndarray, top_k: int, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first `top_k` of `tokens` [P, C], likeliest first, ascending by id, int32 [P, K], and their logprobs
    with that of all others of `num_tokens` behind them, float32 [P, K + 1].

    That of the others is of 1 - sum, whose rounding it is lost in where it is small. So it is kept between the bounds
    that the next token, the first behind `top_k`, gives: at least its own, at most that of as many as there are others.
    """
    order = np.argsort(tokens[:, :top_k], axis=1)
    kept = np.take_along_axis(logprobs[:, :top_k], order, axis=1)
    rest = np.full((len(tokens), 1), LEAST_LOGPROB)
    if num_tokens > top_k:
        following = np.exp(logprobs[:, top_k : top_k + 1], dtype=np.float64)
        left = 1.0 - np.exp(kept, dtype=np.float64).sum(axis=1, keepdims=True)
        left = np.clip(left, following, (num_tokens - top_k) * following)
        rest = np.log(np.maximum(left, np.exp(LEAST_LOGPROB)))
    found = np.take_along_axis(tokens[:, :top_k], order, axis=1)
    return found.astype(np.int32), np.concatenate([kept, rest], axis=1).astype(np.float32)


def cut(model: Transformer, num_tokens: int) -> Transformer:
    """Leave `model` the rows of embedding and head that stand for tokens."""
    model.config = replace(model.config, vocab_size=num_tokens)
    for layer in [model.embedding] if model.config.tie_embeddings else [model.embedding, model.head]:
        layer.weight = nn.Parameter(layer.get_parameter("weight")[:num_tokens].detach().clone(), False)
    return model


def _spec(config: RunConfig, path: Path, folder: Path, *, max_len: int, max_logprobs: int) -> protocol.Spec:
    """Return the spec of a process that serves the checkpoint in `path`, and removes `folder` at its end."""
    settings = config.teacher.vllm
    room = model_room(settings, max_len, "teacher")
    precision, num_tokens = config.teacher.precision, config.trainer.microbatch_tokens
    arguments = common_arguments(settings, dtype=precision, room=room, num_seqs=ROOMS, num_tokens=num_tokens) | {
        "logprobs_mode": "raw_logprobs",
        "max_logprobs": max_logprobs,
        "enable_prefix_caching": False,  # a prompt's logprobs need every token computed
    }
    return protocol.Spec(
        address="",
        folder=str(folder),
        model=str(path),
        push=0,
        stop_token_ids=[],
        engine_args=arguments | settings.engine_args,
    )
