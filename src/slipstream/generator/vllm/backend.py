"""vLLM as the generator's backend: decoding in a process of its own, which reads the policy's weights itself."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.executor import Context
from slipstream.core.sections import VLLMConfig
from slipstream.generator.backend import Backend, Pin
from slipstream.generator.requests import StateSpans
from slipstream.generator.vllm import protocol
from slipstream.generator.vllm.engine import Deadlines, VLLMEngine
from slipstream.generator.vllm.folder import WeightFolder, save_base, save_config
from slipstream.generator.vllm.process import Launch
from slipstream.generator.vllm.settings import DTYPES, FOREIGN_VARIABLES, interpreter
from slipstream.generator.vllm.weights import AdapterWeights, SlotWeights
from slipstream.models.build import build_policy, first_shape
from slipstream.models.config import TransformerConfig
from slipstream.models.hub import is_adapter
from slipstream.models.lora import EMBEDDING, HEAD, AdapterShape, base_of, shapes_of
from slipstream.models.peft import planned_shapes, with_adapters
from slipstream.models.shards import base_digest
from slipstream.models.tokenizer import Tokenizer

WORKER = Path(__file__).with_name("worker.py")
PROBE_ROOM = 64  # tokens; the trainer's probe text is shorter
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes that vLLM's attention kernels for CPUs take (`CPUAttentionBackend.get_supported_head_sizes`, 0.32)."""
LORA_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose models in vLLM take adapters (`SupportsLoRA`, 0.32)."""
LORA_RANKS = (8, 16, 32, 64, 128, 256, 512)
"""Ranks that vLLM has room for, of all its versions (`MaxLoRARanks`); it pads adapters of others with zeros."""


class VLLMBackend(Backend):
    """An engine in another process, and the weights or adapters that it is given."""

    engine: VLLMEngine

    def __init__(
        self,
        config: RunConfig,
        context: Context,
        *,
        tokenizer: Tokenizer,
        seed: int,
        stop_token_ids: Sequence[int],
    ) -> None:
        self.max_len = config.longest_sequence(first_shape(config).max_positions)
        self.num_versions = config.resident_versions
        self._pins: list[Pin] = []
        if has_adapters(config):
            self._hold_adapters(config, context, tokenizer)
        else:
            self._hold_slots(config, context)
        try:
            self.engine = self._start(config, context, seed=seed, stop_token_ids=stop_token_ids)
        except BaseException:
            self._folder.close()
            raise
        self.weights.push = self.engine.push
        try:
            self.engine.wait_ready()
        except BaseException:
            self.close()
            raise

    def _hold_slots(self, config: RunConfig, context: Context) -> None:
        shape, precision = first_shape(config), config.generator.precision
        self._shapes: Mapping[str, AdapterShape] = {}
        self._vocab_size = shape.vocab_size
        self.weights: SlotWeights | AdapterWeights = SlotWeights(shape, precision)
        self._folder = WeightFolder(0, self.weights.write, context.scratch_prefix)
        self._folder.write_base(partial(save_config, shape, precision=precision))

    def _hold_adapters(self, config: RunConfig, context: Context, tokenizer: Tokenizer) -> None:
        """Write the base once, and let go of it: vLLM has it, and a process that replaces another reads it there."""
        model, _ = build_policy(config.model, seed=config.seed, tokenizer=tokenizer)
        if config.model.lora.is_set:
            with_adapters(model, config.model.lora, seed=config.seed)
        self._shapes, self._vocab_size = shapes_of(model), model.config.vocab_size
        self.weights = AdapterWeights(model, base_digest(model))
        frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        dtype = config.generator.precision
        num_bytes = sum(one.numel() for one in frozen) * getattr(torch, dtype).itemsize
        num_bytes += self.num_versions * self.weights.flat.nbytes
        self._folder = WeightFolder(num_bytes, self.weights.write, context.scratch_prefix)
        try:
            self._folder.write_base(partial(save_base, base_of(model), dtype=dtype))
        except BaseException:
            self._folder.close()
            raise
        for parameter in frozen:
            parameter.data = parameter.data.new_empty(0)

    def _start(self, config: RunConfig, context: Context, *, seed: int, stop_token_ids: Sequence[int]) -> VLLMEngine:
        settings = config.generator.vllm
        return VLLMEngine(
            self._folder,
            Launch(
                command=[str(interpreter(settings)), str(WORKER)],
                environment=environment(
                    settings, num_threads=context.num_threads, ranks=config.generator.tensor_parallel
                ),
                log_path=context.run_dir / "logs" / f"{context.name}-vllm.log",
            ),
            spec_of(config, max_len=self.max_len, stop_token_ids=stop_token_ids, shapes=self._shapes),
            rooms={0: config.generator.rows, 1: config.eval.num_slots},
            max_len=self.max_len,
            seed=seed,
            kv_on_update=config.generator.kv_on_update,
            deadlines=Deadlines(settings.start_timeout_s, settings.answer_timeout_s, settings.silence_timeout_s),
            max_restarts=settings.max_restarts,
            probe_tolerance=config.generator.max_probe_error,
            vocab_size=self._vocab_size,
            is_empty=not self._shapes,
            clock=context.clock,
        )

    def probe(self, tokens: np.ndarray) -> np.ndarray:
        """float32 [T - 1]: logprobs of `tokens` int32 [T] by vLLM, so that a reload is checked where it counts."""
        return self.engine.probe(tokens)

    def pin(self) -> Pin:
        pin = Pin(self.engine.version)
        self._pins.append(pin)
        return pin

    def unpin(self, pin: Pin) -> None:
        self._pins.remove(pin)

    @property
    def may_swap(self) -> bool:
        """vLLM holds one set of weights, or adapters for training alone: what an evaluation needs stays."""
        return not self._pins

    def evaluation_engine(self, pin: Pin, spans: StateSpans) -> VLLMEngine:  # noqa: ARG002 - its time is not ours
        assert pin in self._pins, "an evaluation of a version that was not kept"
        return self.engine

    def has_work(self) -> bool:
        return self.engine.has_work()

    @property
    def working_state(self) -> str | None:
        if not self.engine.num_live:
            return None
        return "evaluate" if self.engine.only_evaluates else "decode"

    def wait_fds(self) -> list[int]:
        return self.engine.wait_fds()

    def wait_s(self) -> float | None:
        return 0.0 if self.engine.has_work() else self.engine.wait_s()

    def close(self) -> None:
        self.engine.close()


def spec_of(
    config: RunConfig, *, max_len: int, stop_token_ids: Sequence[int], shapes: Mapping[str, AdapterShape] | None = None
) -> protocol.Spec:
    """Return the spec that the worker is started with; the engine fills in the address and the weights.

    `shapes` are those of the policy's adapters, if it has any.
    """
    settings = config.generator.vllm
    arguments = common_arguments(
        settings,
        dtype=DTYPES[config.generator.precision],
        room=model_room(settings, max_len),
        num_seqs=config.generator.rows + config.eval.num_slots,
        num_tokens=config.generator.prefilled,
    )
    arguments["tensor_parallel_size"] = config.generator.tensor_parallel
    arguments["logprobs_mode"] = "processed_logprobs"  # after temperature and truncation: what was really sampled from
    if config.environment.is_set:
        arguments["enable_prefix_caching"] = True  # a turn's context is found there; vLLM's default goes by the model
    if shapes:
        rank = next(iter(shapes.values())).rank
        arguments |= {
            "enable_lora": True,
            "max_lora_rank": next(most for most in LORA_RANKS if most >= rank),
            # Beside those in use stays the newest, while the next is probed.
            "max_loras": config.resident_versions + (config.resident_versions > 1),
            # The head must not be among them: its engine dies of a prompt's logprobs beside other rows (0.32).
            "lora_target_modules": sorted({piece.target for shape in shapes.values() for piece in shape.pieces}),
        }
    else:
        arguments |= {"load_format": "dummy", "worker_extension_cls": "slot_extension.SlotExtension"}
    return protocol.Spec(
        address="",
        folder="",
        model="",
        push=0,
        stop_token_ids=list(stop_token_ids),
        engine_args=arguments | settings.engine_args,
        has_adapters=bool(shapes),
        side_by_side=config.resident_versions > 1,
    )


def common_arguments(settings: VLLMConfig, *, dtype: str, room: int, num_seqs: int, num_tokens: int) -> dict[str, Any]:
    """vLLM's engine arguments for `num_seqs` sequences of `room` tokens at once, and steps of `num_tokens` or so."""
    return {
        "dtype": dtype,
        "enforce_eager": settings.enforce_eager,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "max_model_len": room,
        "max_num_seqs": num_seqs,
        "max_num_batched_tokens": max(num_tokens, room) + num_seqs,  # the longest fits one step
        "skip_tokenizer_init": True,  # tokens in, tokens out
        "disable_log_stats": True,
    }


def has_adapters(config: RunConfig) -> bool:
    """Tell whether the policy is adapters beside a base that stays."""
    path = config.model.path
    return config.model.lora.is_set or (path is not None and is_adapter(path))


def environment(settings: VLLMConfig, *, num_threads: int, ranks: int = 1) -> dict[str, str]:
    """The variables of the worker: ours without what would let it find our packages. Its `ranks` divide the threads."""
    kept = {name: value for name, value in os.environ.items() if name not in FOREIGN_VARIABLES}
    return kept | {
        "VLLM_CPU_KVCACHE_SPACE": str(settings.kv_cache_gb),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the cores are shared with the trainer
        "OMP_NUM_THREADS": str(max(1, num_threads // ranks)),
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # one more than the model has positions: the probe's unused next token
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def model_room(settings: VLLMConfig, max_len: int, section: str = "generator") -> int:
    """vLLM's `max_model_len` for sequences of `max_len` tokens. Raises ConfigError when the one given is too short."""
    given, needed = settings.max_model_len, max(max_len, PROBE_ROOM) + 1
    if given is not None and given < needed:
        raise ConfigError(
            f"{section}.vllm.max_model_len is too short",
            got=given,
            allowed=f"at least {needed} tokens: prompt, completion and one more",
        )
    return given or needed


def check_vllm(config: RunConfig) -> None:
    """Raise ConfigError, before anything starts, for a missing environment and what vLLM would refuse of the model."""
    if config.generator.engine != "vllm":
        return
    interpreter(config.generator.vllm)
    shape = first_shape(config)
    if config.generator.precision == "fp8" and has_adapters(config):
        raise ConfigError(
            "vLLM is given the base beside adapters without scales",
            got="generator.precision = 'fp8' with adapters and generator.engine = 'vllm'",
            allowed="'float32' or 'bfloat16'",
            hint="generator.engine = 'native' has a base in fp8",
        )
    if config.model.lora.is_set:
        check_adapters(config, shape)
    if config.prompts.max_prompt_tokens is not None:  # else asked again when the longest prompt is known
        model_room(config.generator.vllm, config.longest_sequence(shape.max_positions))
    check_heads(shape, "change model.hidden_size or model.num_heads, or use generator.engine = 'native'")


def check_heads(shape: TransformerConfig, hint: str) -> None:
    """Raise ConfigError for heads of a size that vLLM has no attention for, on a machine without a GPU."""
    if shutil.which("nvidia-smi") is None and shape.head_dim not in CPU_HEAD_DIMS:
        raise ConfigError(
            "vLLM on a CPU has no attention for heads of this size",
            got=f"{shape.head_dim} dimensions per head",
            allowed=", ".join(map(str, CPU_HEAD_DIMS)),
            hint=hint,
        )


def check_adapters(config: RunConfig, shape: TransformerConfig) -> None:
    """Raise ConfigError for adapters beside a model of `shape` that vLLM would refuse, or compute otherwise."""
    shapes = planned_shapes(config.model.lora, shape)
    rank = next(iter(shapes.values())).rank
    for is_refused, what, got, allowed in (
        (shape.family not in LORA_FAMILIES, "vLLM has no adapters for this family", shape.family, LORA_FAMILIES),
        (HEAD in shapes, "vLLM cannot probe an adapter of the head", "lm_head", "all other layers"),
        (EMBEDDING in shapes, "vLLM is given no adapter of an embedding", "the embedding", "all other layers"),
        (rank > LORA_RANKS[-1], "vLLM has no room for adapters of this rank", rank, f"1..{LORA_RANKS[-1]}"),
    ):
        if is_refused:
            raise ConfigError(
                what,
                got=f"{got} with model.lora and generator.engine = 'vllm'",
                allowed=", ".join(allowed) if isinstance(allowed, tuple) else allowed,
                hint="generator.engine = 'native' has them all",
            )
