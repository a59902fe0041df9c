"""Checks of `[generator]` for vLLM: what it cannot do is refused before a run starts, without torch or vLLM."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from slipstream.core.errors import ConfigError
from slipstream.core.sections import GeneratorConfig

OWN_ARGS = frozenset(
    {
        "model",
        "dtype",
        "enforce_eager",
        "gpu_memory_utilization",
        "max_model_len",
        "max_num_batched_tokens",
        "max_num_seqs",
        "enable_chunked_prefill",
        "skip_tokenizer_init",
        "logprobs_mode",
        "load_format",
        "worker_extension_cls",
        "disable_log_stats",
        "enable_lora",
        "max_loras",
        "max_lora_rank",
        "lora_target_modules",
    }
)
"""Engine arguments that `backend.py` and `worker.py` set themselves."""
MIN_TEMPERATURE = 0.01
"""vLLM raises lower ones to it, with a warning in its log (`SamplingParams`, 0.32); 0 is greedy."""


def check_settings(generator: GeneratorConfig) -> None:
    """Raise ConfigError for fields of `generator` that vLLM has no counterpart for, where it is the engine."""
    ours = sorted(OWN_ARGS & generator.vllm.engine_args.keys())
    if ours:
        raise ConfigError(
            "some arguments of vLLM are set by Slipstream",
            got=f"generator.vllm.engine_args with {', '.join(ours)}",
            hint="[generator], [eval] and [generator.vllm] have fields for them",
        )
    if generator.engine == "vllm":
        _check_memory(generator)
        _check_sampling(generator)


def interpreter(generator: GeneratorConfig) -> Path:
    """Return the Python of vLLM's environment. Raises ConfigError where there is none."""
    if not sys.platform.startswith("linux"):
        raise ConfigError("generator.engine = 'vllm' needs Linux", got=sys.platform)
    path = Path(generator.vllm.python)
    if not os.access(path, os.X_OK) or path.is_dir():
        raise ConfigError(
            "there is no environment with vLLM",
            got=f"generator.vllm.python = '{path}', from {Path.cwd()}",
            allowed="a Python interpreter that can import vllm",
            hint="in a checkout, `make vllm-env` makes .venv-vllm; elsewhere, name an interpreter that has vllm",
        )
    return path.absolute()  # not resolved: a link into an environment is what makes it one


def _check_memory(generator: GeneratorConfig) -> None:
    if generator.kv_on_update == "recompute_if_older_than":
        raise ConfigError(
            "vLLM keeps all of its cache or none",
            got="generator.kv_on_update = 'recompute_if_older_than' with generator.engine = 'vllm'",
            allowed="'keep' or 'recompute'",
        )
    if generator.parked_tokens is not None:
        raise ConfigError(
            "vLLM keeps what turns have computed in its prefix cache, as far as its memory has room",
            got=f"generator.parked_tokens = {generator.parked_tokens} with generator.engine = 'vllm'",
            allowed="generator.parked_tokens = null, the default",
            hint="generator.vllm.kv_cache_gb on a CPU, generator.vllm.gpu_memory_utilization on a GPU",
        )
    if generator.precision not in ("float32", "bfloat16"):
        raise ConfigError(
            "vLLM is given weights as the trainer's slots hold them, without scales",
            got=f"generator.precision = '{generator.precision}' with generator.engine = 'vllm'",
            allowed="'float32' or 'bfloat16', in which vLLM then computes",
            hint="generator.engine = 'native' has them all",
        )
    if generator.tensor_parallel > 1:
        raise ConfigError(
            "vLLM divides models by itself",
            got=f"generator.tensor_parallel = {generator.tensor_parallel} with generator.engine = 'vllm'",
            allowed="generator.tensor_parallel = 1",
            hint="generator.vllm.engine_args = { tensor_parallel_size = 2 }",
        )
    if generator.device != "cpu":
        raise ConfigError(
            "generator.device is the native engine's: vLLM computes on what it was built for",
            got=f"generator.device = '{generator.device}' with generator.engine = 'vllm'",
            allowed="generator.device = 'cpu', the default",
            hint="in a checkout, `make vllm-env` installs vLLM for a GPU where there is one (docs/vllm.md)",
        )


def _check_sampling(generator: GeneratorConfig) -> None:
    if generator.keep_sets:
        raise ConfigError(
            "vLLM does not report the sets that tokens were drawn from",
            got="generator.keep_sets with generator.engine = 'vllm'",
            allowed="generator.keep_sets = false, or generator.engine = 'native'",
        )
    if generator.seeds == "per_replica":
        raise ConfigError(
            "vLLM draws its own noise: that of the original RLHF code is not to be had from it",
            got="generator.seeds = 'per_replica' with generator.engine = 'vllm'",
            allowed="generator.seeds = 'shared', or generator.engine = 'native'",
        )
    if generator.temperature < MIN_TEMPERATURE:
        raise ConfigError(
            "vLLM samples at no lower temperature: it would take this one for another",
            got=f"generator.temperature = {generator.temperature:g} with generator.engine = 'vllm'",
            allowed=f"at least {MIN_TEMPERATURE:g}",
        )
    if generator.top_p < 1.0 and generator.min_p > 0.0:
        raise ConfigError(
            "vLLM applies min_p before top_p, the native engine behind it: the samples would be others",
            got=f"generator.top_p = {generator.top_p:g}, min_p = {generator.min_p:g}, engine = 'vllm'",
            allowed="one of the two, with or without top_k",
        )
