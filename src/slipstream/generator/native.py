"""Slipstream's own engine as the generator's backend: model, weights and decode loop in this process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from slipstream.algorithms.logprobs import probe_logprobs
from slipstream.core.clock import Clock
from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.generator.engine import PREFILL_CHUNK, Engine
from slipstream.generator.requests import StateSpans
from slipstream.generator.slot_runner import SlotRunner
from slipstream.models.build import build_policy
from slipstream.models.flat import FlatParameters
from slipstream.models.transformer import Transformer


def native_engine(
    model: Transformer,
    *,
    num_slots: int,
    max_len: int,
    seed: int,
    stop_token_ids: Sequence[int],
    prefill_tokens: int = 512,
    prefill_chunk: int = PREFILL_CHUNK,
    prefix_cache_tokens: int = 2048,
    version: int = 0,
    spans: StateSpans | None = None,
    clock: Clock | None = None,
) -> Engine:
    """An engine with the runner that suits the model's device. `max_len` bounds prompt + completion in tokens."""
    outside = [token for token in stop_token_ids if not 0 <= token < model.config.vocab_size]
    if outside:
        allowed = f"0..{model.config.vocab_size - 1}"
        raise ConfigError("stop tokens outside the vocabulary", got=outside, allowed=allowed)
    return Engine(
        SlotRunner(model, num_rows=num_slots, max_len=max_len),
        seed=seed,
        stop_token_ids=stop_token_ids,
        prefill_tokens=prefill_tokens,
        prefill_chunk=prefill_chunk,
        prefix_cache_tokens=prefix_cache_tokens,
        version=version,
        spans=spans,
        clock=clock,
    )


class NativeBackend:
    """The policy, its flat weights and an engine over it. Implements `backend.Backend`."""

    def __init__(
        self,
        config: RunConfig,
        *,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
        stop_token_ids: Sequence[int],
        spans: StateSpans,
        clock: Clock,
    ) -> None:
        self._config, self._stop_token_ids, self._clock = config, stop_token_ids, clock
        self._model, self._tokenizer = build_policy(config.model, seed=config.seed, tokenizer=tokenizer)
        self.weights = FlatParameters(self._model)
        longest = config.prompts.max_prompt_tokens + config.generator.max_new_tokens
        self._max_len = min(self._model.config.max_positions, longest)
        self.engine = self._new_engine(self._model, config.generator.num_slots, spans, seed)

    def probe(self, tokens: np.ndarray) -> np.ndarray:
        """float32 [T - 1]: logprobs of `tokens` int32 [T] under the present weights, outside the live cache."""
        return probe_logprobs(self._model, tokens)

    def snapshot(self) -> torch.Tensor:
        """A copy of the present weights, for an evaluation pinned to them."""
        return self.weights.flat.clone()

    def evaluation_engine(self, weights: torch.Tensor, version: int, spans: StateSpans) -> Engine:
        """An engine of its own, with its own slots, on a snapshot of the weights."""
        model, _ = build_policy(self._config.model, seed=self._config.seed, tokenizer=self._tokenizer)
        FlatParameters(model).rebind(weights)
        engine = self._new_engine(model, self._config.eval.num_slots, spans, self._config.seed)
        engine.set_version(version)
        return engine

    @property
    def max_len(self) -> int:
        return self._max_len

    def wait_fds(self) -> list[int]:
        return []

    def close(self) -> None: ...

    def _new_engine(self, model: Transformer, num_slots: int, spans: StateSpans, seed: int) -> Engine:
        return native_engine(
            model,
            num_slots=num_slots,
            max_len=self._max_len,
            seed=seed,
            stop_token_ids=self._stop_token_ids,
            prefill_tokens=self._config.generator.prefill_tokens,
            prefill_chunk=self._config.generator.prefill_chunk,
            prefix_cache_tokens=self._config.generator.prefix_cache_tokens,
            spans=spans,
            clock=self._clock,
        )
