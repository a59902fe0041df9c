"""The least memory that a run needs on this machine's CPU, by arithmetic, against what the machine has.

Nothing is made here. What is refused is out of all proportion; a model that just does not fit is not foreseen. Groups
on other machines and those that compute on GPUs are judged where they are.
"""

from __future__ import annotations

from collections.abc import Collection

from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.lora_section import LoraConfig
from slipstream.core.machine import memory_bytes
from slipstream.models.config import TransformerConfig

TRAINED_BYTES = 16  # per parameter of a trainer: weight, gradient and AdamW's two moments, in float32
KEY_AND_VALUE_BYTES = 8  # of one number of a head, in float32
ROLLOUT_BYTES = 1024  # of a finished completion, beside its tokens: identity, times, arrays, text
TOKEN_BYTES = 16  # id, behaviour logprob, version, text
PROMPT_BYTES = 1024  # of a prompt with its row


def num_parameters(shape: TransformerConfig) -> int:
    """Count all parameters. Identity: those of a `Transformer` of this shape."""
    hidden, query, kv, inner = shape.hidden_size, shape.query_size, shape.kv_size, shape.intermediate_size
    norm, matrices = (2 if shape.layer_norm else 1), (3 if shape.gated_mlp else 2)
    attention = 2 * hidden * (query + kv) + (query + 2 * kv) * shape.qkv_bias + hidden * shape.output_bias
    dense = matrices * hidden * inner + ((matrices - 1) * inner + hidden) * shape.mlp_bias
    mixture = shape.num_experts * hidden * (matrices * shape.expert_width + 1)
    norms = 2 * norm * (hidden + shape.head_dim * shape.qk_norm)
    sparse = shape.num_sparse_layers
    layers = shape.num_layers * (attention + norms) + (shape.num_layers - sparse) * dense + sparse * mixture
    learned = shape.max_positions if shape.rotary_dim == 0 else 0
    tables = shape.vocab_size * (1 if shape.tie_embeddings else 2) + learned
    return layers + hidden * (tables + norm)


def check_sizes(config: RunConfig, shape: TransformerConfig, here: Collection[str]) -> None:
    """Raise ConfigError for a policy of `shape`, or work, that the groups `here` have no memory for."""
    memory = memory_bytes()
    generator, trainer = config.generator, config.trainer
    trains, samples = "trainer" in here and trainer.device == "cpu", "generator" in here and generator.device == "cpu"
    if trains or samples:
        _check_model(shape, memory, trains=trains, lora=config.model.lora)
    longest = config.least_sequence
    if samples and generator.engine == "native":
        for field, slots, replicas in (
            ("generator.num_slots", generator.rows, generator.replicas),
            ("eval.num_slots", config.eval.num_slots, 1),
        ):
            hint = f"lower {field}, generator.max_new_tokens or prompts.max_prompt_tokens"
            check_slots(shape, field, slots, longest, replicas=replicas, hint=hint)
    if trains:
        _check_work(config, shape, memory)
    _check_samples(config, memory)


def check_on_gpu(config: RunConfig, shape: TransformerConfig, memory: int) -> None:
    """Raise ConfigError for a policy of `shape` that one process cannot train in `memory` bytes of a GPU."""
    trainer = config.trainer
    per_parameter = 8 + (0 if trainer.offload_moments else 8) + (2 if trainer.precision == "bfloat16" else 0)
    _fits(
        "the model cannot be trained in this GPU's memory, as one stage does by itself",
        per_parameter * num_parameters(shape),
        memory,
        of=f"{num_parameters(shape):.3g} parameters x {per_parameter} bytes",
        hint="trainer.device = 'cpu'" + ("" if trainer.offload_moments else ", or trainer.offload_moments = true"),
    )


def check_slots(
    shape: TransformerConfig, field: str, slots: int, longest: int, *, replicas: int = 1, hint: str
) -> None:
    """Raise ConfigError for keys and values of `slots` sequences of `longest` tokens that there is no memory for."""
    _fits(
        "keys and values of all slots are larger than this machine's memory",
        KEY_AND_VALUE_BYTES * shape.num_layers * shape.kv_size * longest * slots * replicas,
        memory_bytes(),
        of=f"{field} = {slots} slots of {longest} tokens x {shape.num_layers} layers x {shape.kv_size} numbers "
        f"x {KEY_AND_VALUE_BYTES} bytes" + (f" x {replicas} replicas" if replicas > 1 else ""),
        hint=hint,
    )


def _check_model(shape: TransformerConfig, memory: int, *, trains: bool, lora: LoraConfig) -> None:
    parameters = num_parameters(shape)
    per_parameter = TRAINED_BYTES if trains and not lora.is_set else 4  # beside adapters no weight has a gradient
    _fits(
        "the model cannot be trained in this machine's memory" if trains else "the model is larger than the memory",
        per_parameter * parameters,
        memory,
        of=f"{parameters:.3g} parameters x {per_parameter} bytes",
        hint="lower model.hidden_size, model.intermediate_size, model.num_layers"
        + (" or model.num_experts" if shape.num_experts else "")
        + (" or model.max_positions, which are learned" if shape.rotary_dim == 0 else ""),
    )
    check_tables(
        shape,
        of="the model",
        hint="model.max_positions need not be more than prompts.max_prompt_tokens + generator.max_new_tokens",
    )


def check_tables(shape: TransformerConfig, *, of: str, hint: str) -> None:
    """Raise ConfigError for a longest sequence whose cosines and sines are larger than this machine's memory.

    Of a checkpoint no tensor bounds it.
    """
    _fits(
        f"the table of positions of {of} is larger than this machine's memory",
        4 * 4 * shape.max_positions * shape.rotary_dim,  # cos and sin, and what they are made of
        memory_bytes(),
        of=f"{shape.max_positions} positions x {shape.rotary_dim} numbers x 16 bytes",
        hint=hint,
    )


def _check_work(config: RunConfig, shape: TransformerConfig, memory: int) -> None:
    longest = config.least_sequence
    rollouts = config.completions_per_step
    _fits(
        "the rollouts of one step are larger than this machine's memory",
        rollouts * (ROLLOUT_BYTES + TOKEN_BYTES * longest),
        memory,
        of=f"groups_per_step = {config.groups_per_step} x completions_per_group = {config.completions_per_group} "
        f"x ({ROLLOUT_BYTES} + {TOKEN_BYTES} bytes x up to {longest} tokens)",
        hint="lower groups_per_step or completions_per_group",
    )
    batches = {"groups_per_step x completions_per_group": rollouts // config.trainer.minibatches}
    if config.warm_start.steps:
        batches["warm_start.batch_size"] = config.warm_start.batch_size
    inner = shape.experts_per_token * shape.expert_width if shape.num_experts else shape.intermediate_size
    kept = 2 * shape.hidden_size if config.trainer.recompute else 4 * shape.hidden_size + 2 * inner
    for field, batch in batches.items():
        tokens = min(config.trainer.microbatch_tokens, batch * longest)
        _fits(
            "what a microbatch keeps for its backward pass is larger than this machine's memory",
            4 * tokens * kept * shape.num_layers,
            memory,
            of=f"a microbatch of up to {tokens} tokens ({field} = {batch}) x {kept} numbers "
            f"x {shape.num_layers} layers x 4 bytes",
            hint="lower trainer.microbatch_tokens",
        )


def _check_samples(config: RunConfig, memory: int) -> None:
    """Prompts and completions that this process makes all at once."""
    prompts, tokens = config.prompts, config.generator.max_new_tokens
    if prompts.tasks:
        count = prompts.num_train + prompts.num_eval
        _fits(
            "the prompts are larger than this machine's memory",
            PROMPT_BYTES * count,
            memory,
            of=f"prompts.num_train + prompts.num_eval = {count} x {PROMPT_BYTES} bytes",
            hint="the stream reshuffles prompts.num_train prompts when they end",
        )
    preferences, evaluation = config.preferences, config.evaluation
    for stage, field, count, each in (
        ("preferences", "preferences.num_prompts", preferences.num_prompts, preferences.samples_per_prompt),
        ("reward_model", "reward_model.normalise_samples", config.reward_model.normalise_samples, 1),
        ("evaluate", "evaluation.num_prompts", config.num_evaluated or 0, evaluation.num_samples),
    ):
        if stage in config.stages:
            check_completions(field, count, each, max_tokens=tokens)


def check_completions(field: str, num_prompts: int, samples: int, *, max_tokens: int) -> None:
    """Raise ConfigError for more completions than this machine's memory holds, `samples` for each of `num_prompts`."""
    _fits(
        "the completions are larger than this machine's memory",
        num_prompts * samples * (ROLLOUT_BYTES + TOKEN_BYTES * max_tokens),
        memory_bytes(),
        of=f"{field} = {num_prompts} x {samples} samples x ({ROLLOUT_BYTES} + {TOKEN_BYTES} x {max_tokens} bytes)",
        hint="lower the number of prompts or of samples",
    )


def _fits(what: str, needed: int, memory: int, *, of: str, hint: str) -> None:
    if needed > memory:
        raise ConfigError(
            what, got=f"{of} = {needed / 1e9:.3g} GB", allowed=f"{memory / 1e9:.3g} GB, what there is", hint=hint
        )
