"""Checks of what is asked of vLLM: what it cannot do is refused before a run starts, without torch or vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.fields import Precision
from slipstream.core.sections import GeneratorConfig, VLLMConfig
from slipstream.core.stage_sections import EvalSet

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
TEACHER_ARGS = OWN_ARGS | {"max_logprobs", "enable_prefix_caching"}
"""Those of a teacher's vLLM (`reader.py`)."""
FOREIGN_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Variables by which vLLM's interpreter would find the packages of ours."""
LOOK_S = 60.0
DTYPES: dict[Precision, str] = {"float32": "float32", "bfloat16": "bfloat16", "fp8": "bfloat16"}
"""vLLM's `dtype` by what slots hold. With fp8 this is all that is not e4m3: embedding, head, norms and biases."""
MIN_TEMPERATURE = 0.01
"""vLLM raises lower ones to it, with a warning in its log (`SamplingParams`, 0.32); 0 is greedy."""


def check_settings(config: RunConfig) -> None:
    """Raise ConfigError for arguments of vLLM that are not the user's to give, and for fields of `[generator]` that it
    has no counterpart for, where it is the engine."""
    generator = config.generator
    if (size := generator.vllm.engine_args.get("tensor_parallel_size")) is not None:
        raise ConfigError(
            "generator.tensor_parallel divides the model, whatever the engine is",
            got=f"generator.vllm.engine_args with tensor_parallel_size = {size}",
            allowed="generator.tensor_parallel, without generator.vllm.engine_args.tensor_parallel_size",
            hint=f"generator.tensor_parallel = {size}",
        )
    for section, settings, args, others in (
        ("generator", generator.vllm, OWN_ARGS, ", [eval]"),
        ("teacher", config.teacher.vllm, TEACHER_ARGS, ""),
    ):
        if ours := sorted(args & settings.engine_args.keys()):
            raise ConfigError(
                "some arguments of vLLM are set by Slipstream",
                got=f"{section}.vllm.engine_args with {', '.join(ours)}",
                hint=f"[{section}]{others} and [{section}.vllm] have fields for them",
            )
    if generator.engine == "vllm":
        _check_memory(generator)
        _check_sampling(generator, config.eval.sets)


def interpreter(settings: VLLMConfig, section: str = "generator") -> Path:
    """Return the Python of vLLM's environment. Raises ConfigError where there is none."""
    if not sys.platform.startswith("linux"):
        raise ConfigError(f"{section}.engine = 'vllm' needs Linux", got=sys.platform)
    path = Path(settings.python)
    if not os.access(path, os.X_OK) or path.is_dir():
        raise _no_environment(f"{section}.vllm.python = '{path}', from {Path.cwd()}")
    return path.absolute()  # not resolved: a link into an environment is what makes it one


def check_imports(settings: VLLMConfig, section: str) -> None:
    """Raise ConfigError for an interpreter that does not find vLLM, which is looked for without being loaded."""
    _look(interpreter(settings, section), section)


@cache  # an error is not kept
def _look(python: Path, section: str) -> None:
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    kept = {name: value for name, value in os.environ.items() if name not in FOREIGN_VARIABLES}
    try:
        # In its own folder: one named vllm in ours would pass for it.
        looked = subprocess.run(
            [str(python), "-c", look], env=kept, cwd=python.parent, timeout=LOOK_S, capture_output=True, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _no_environment(f"{section}.vllm.python = '{python}': {error}") from error
    if looked.returncode:
        raise _no_environment(f"{section}.vllm.python = '{python}', which finds no vllm")


def _no_environment(got: str) -> ConfigError:
    return ConfigError(
        "there is no environment with vLLM",
        got=got,
        allowed="a Python interpreter that can import vllm",
        hint="in a checkout, `make vllm-env` makes .venv-vllm; elsewhere, name an interpreter that has vllm",
    )


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
    if generator.precision not in DTYPES:
        raise ConfigError(
            "vLLM is given matrices as the trainer's slots hold them: without scales, or in fp8 with one for each row",
            got=f"generator.precision = '{generator.precision}' with generator.engine = 'vllm'",
            allowed=", ".join(f"'{name}'" for name in DTYPES),
            hint="generator.engine = 'native' has them all",
        )
    if (stages := generator.pipeline_parallel) > 1:
        raise ConfigError(
            "vLLM divides models by itself",
            got=f"generator.pipeline_parallel = {stages} with generator.engine = 'vllm'",
            allowed="generator.pipeline_parallel = 1",
            hint=f"generator.vllm.engine_args = {{ pipeline_parallel_size = {stages} }}",
        )
    if generator.device != "cpu":
        raise ConfigError(
            "generator.device is the native engine's: vLLM computes on what it was built for",
            got=f"generator.device = '{generator.device}' with generator.engine = 'vllm'",
            allowed="generator.device = 'cpu', the default",
            hint="leave it out: generator.vllm.python names the environment, of vLLM for a GPU or a CPU (docs/vllm.md)",
        )


def _check_sampling(generator: GeneratorConfig, sets: Sequence[EvalSet]) -> None:
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
    temperatures = {"generator.temperature": generator.temperature}
    temperatures |= {f"eval.sets.{at}.temperature": one.temperature for at, one in enumerate(sets)}
    for field, temperature in temperatures.items():
        if 0.0 < temperature < MIN_TEMPERATURE:
            raise ConfigError(
                "vLLM samples at no lower temperature: it would take this one for another",
                got=f"{field} = {temperature:g} with generator.engine = 'vllm'",
                allowed=f"at least {MIN_TEMPERATURE:g}" + ", or 0 (greedy)" * field.startswith("eval."),
            )
    if generator.top_p < 1.0 and generator.min_p > 0.0:
        raise ConfigError(
            "vLLM applies min_p before top_p, the native engine behind it: the samples would be others",
            got=f"generator.top_p = {generator.top_p:g}, min_p = {generator.min_p:g}, engine = 'vllm'",
            allowed="one of the two, with or without top_k",
        )
