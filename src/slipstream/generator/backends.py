"""The engines that a generator may decode with, by `generator.engine`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slipstream.core.clock import Clock
from slipstream.core.config import RunConfig
from slipstream.core.executor import Context
from slipstream.generator.backend import Backend
from slipstream.generator.native import NativeBackend
from slipstream.generator.requests import StateSpans
from slipstream.generator.vllm.backend import VLLMBackend
from slipstream.models.tokenizer import Tokenizer

SEEDS_APART = 100_003  # between the seeds of two processes in the original RLHF code (N, item 9)


@dataclass(frozen=True)
class Setting:
    """A replica's process, and what its engine samples with."""

    config: RunConfig
    context: Context
    replica: int
    tokenizer: Tokenizer
    stop_token_ids: Sequence[int]
    spans: StateSpans
    clock: Clock


def training_seed(config: RunConfig, replica: int) -> int:
    """Return the seed of `replica`'s noise for training: the run's, or one per replica as in the original (N)."""
    return config.seed + (replica * SEEDS_APART if config.generator.seeds == "per_replica" else 0)


def _native(here: Setting) -> Backend:
    return NativeBackend(
        here.config,
        tokenizer=here.tokenizer,
        seed=training_seed(here.config, here.replica),
        stop_token_ids=here.stop_token_ids,
        spans=here.spans,
        clock=here.clock,
        replica=here.replica,
        parked_tokens=here.config.generator.parked_tokens if here.config.environment.is_set else 0,
        group=here.context.group,
        is_remote=here.context.is_remote,
    )


def _vllm(here: Setting) -> Backend:
    return VLLMBackend(
        here.config,
        here.context,
        tokenizer=here.tokenizer,
        seed=training_seed(here.config, here.replica),
        stop_token_ids=here.stop_token_ids,
    )


BACKENDS: dict[str, Callable[[Setting], Backend]] = {"native": _native, "vllm": _vllm}
