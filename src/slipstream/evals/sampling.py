"""Completions of a checkpoint outside a run, by the engine and the noise of the run itself."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial

import torch

from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.fields import Precision
from slipstream.core.types import Completion, Prompt
from slipstream.generator.completions import EVAL_STREAM, completion_of, request_of
from slipstream.generator.device import USABLE_MEMORY
from slipstream.generator.native import move_but_linear, native_engine
from slipstream.models.build import stop_token_ids
from slipstream.models.config import TransformerConfig
from slipstream.models.device import single_device, take_gpu
from slipstream.models.served import ServedWeights, check_mixture, check_precision
from slipstream.models.tokenizer import Tokenizer
from slipstream.models.transformer import Transformer
from slipstream.trainer.logit_room import free_bytes


def check_sampling(config: RunConfig, shape: TransformerConfig) -> RunConfig:
    """Return `config` with the device that `to_sample` takes. ConfigError where a model of `shape` cannot sample there,
    in `generator.precision`."""
    device, precision = single_device(config.samples_on), config.generator.precision
    if device.type == "cuda":
        check_precision(precision, device)
        check_mixture(shape, precision, device)
    return config.model_copy(update={"generator": config.generator.model_copy(update={"device": str(device)})})


def to_sample(config: RunConfig, model: Transformer) -> Transformer:
    """Bring a whole `model` on the CPU to where [generator] computes, and return it.

    On a GPU its weights are at `generator.precision`, as in a run, and nobody trains it. On the CPU, which it is where
    this machine has no GPU, it stays as it is, in float32. `check_sampling` has been called.
    """
    device = single_device(config.samples_on)
    if device.type == "cuda":
        take_gpu(device, config.generator.gpu_share)
        _check_room(model, config.generator.precision, free_bytes(device, config.generator.gpu_share))
        served_on(device, model, config.generator.precision)
    return model


def _check_room(model: Transformer, precision: Precision, free: int) -> None:
    weight_bytes = sum(one.numel() for one in model.parameters()) * {"float32": 4, "bfloat16": 2}.get(precision, 1)
    if weight_bytes > free:
        raise ConfigError(
            "the GPU has no room for the weights",
            got=f"{weight_bytes / 1e9:.3g} GB at generator.precision = '{precision}'",
            allowed=f"{free / 1e9:.3g} GB, what is free there",
            hint="does something else compute on it? with its device 'cpu' the model is sampled on the CPU",
        )


def served_on(device: torch.device, model: Transformer, precision: Precision) -> None:
    """Have `model` compute on `device` with weights at `precision`, which lie there once."""
    move_but_linear(model, device)
    ServedWeights(model, precision, on_device=True)


def give_back(model: Transformer) -> None:
    """Let go of the pages of an engine over `model` that nobody names any more: it is a cycle, and a GPU has little."""
    if model.cos.device.type == "cuda":
        gc.collect()


def kv_bytes_here(config: RunConfig, model: Transformer) -> int | None:
    """Return the bound on an engine's keys and values for a `model` of `to_sample`; None: no bound, on a CPU."""
    if model.cos.device.type == "cpu":
        return None
    if config.generator.kv_cache_gb is not None:
        return int(config.generator.kv_cache_gb * 2**30)
    return int(USABLE_MEMORY * free_bytes(model.cos.device, config.generator.gpu_share))


def sample_completions(
    config: RunConfig,
    model: Transformer,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    *,
    temperature: float,
    num_samples: int = 1,
    num_slots: int,
    stream: int = EVAL_STREAM,
    on_progress: Callable[[int], None] | None = None,
) -> list[Completion]:
    """`num_samples` completions per prompt, sorted by (prompt, sample), `ordinal` counting `prompts`; 0 is greedy.

    Their noise is keyed by (seed, `stream`, prompt, sample): what else is sampled changes none of them. `on_progress`
    hears how many are finished.
    """
    generator = config.generator
    longest = config.prompts.max_prompt_tokens or max((len(prompt.tokens) for prompt in prompts), default=1)
    max_len = min(model.config.max_positions, longest + generator.max_new_tokens)
    stop_ids = stop_token_ids(tokenizer, generator, model.config)
    engine = native_engine(
        model,
        num_slots=num_slots,
        max_len=max_len,
        seed=config.seed,
        stop_token_ids=stop_ids,
        prefill_tokens=generator.prefilled,
        prefill_chunk=generator.prefill_chunk,
        kv_bytes=kv_bytes_here(config, model),
    )
    engine.submit(
        [
            request_of(
                generator,
                prompt,
                ordinal=ordinal,
                sample=sample,
                max_len=max_len,
                temperature=temperature,
                stream=stream,
                is_whole=True,
            )
            for ordinal, prompt in enumerate(prompts)
            for sample in range(num_samples)
        ]
    )
    complete = partial(completion_of, tokenizer=tokenizer, stop_ids=stop_ids, rewards=config.rewards)
    completions: list[Completion] = []
    while not engine.is_idle:
        finished = engine.step()
        completions += [complete(item, prompts[item.ordinal]) for item in finished]
        if finished and on_progress is not None:
            on_progress(len(completions))
    del engine
    give_back(model)
    return sorted(completions, key=lambda completion: (completion.ordinal, completion.sample))
