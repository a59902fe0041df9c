"""Checks of a checkpoint before it is loaded: its `config.json`, the headers of its weights, its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch

from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.models.build import build_tokenizer, policy_tokenizer_folder, stop_token_ids
from slipstream.models.config import TransformerConfig, config_from_hf, new_config
from slipstream.models.expert_parallel import check_experts
from slipstream.models.foreign_text import rehearse_tokenizer
from slipstream.models.hf import HEADS, canonical_name, misfit, read_hf_config, weight_files
from slipstream.models.hub import is_adapter
from slipstream.models.layout import layout
from slipstream.models.lora import AdapterShape
from slipstream.models.mxfp4 import BLOCK
from slipstream.models.peft import base_folder, planned_shapes, stored_shapes
from slipstream.models.safetensors_file import Header, tensor_headers
from slipstream.models.scalar import HEAD_NAME
from slipstream.models.sizes import check_tables
from slipstream.models.tokenizer import Tokenizer, has_tokenizer
from slipstream.models.transformer import Transformer

GROUPED_MULTIPLE = 8
"""Of rows and columns in `torch._grouped_mm` of bfloat16: 16 bytes."""
Head = Literal["language", "score", "any"]
"""The head of a checkpoint: logits, one score, or either."""

WEIGHTS = ("F64", "F32", "F16", "BF16")  # what weights are read from


def check_policy(config: RunConfig, *, is_sampled: bool = True) -> TransformerConfig:
    """Raise ConfigError where the policy's checkpoint, tokenizer and the run's lengths do not fit; returns its shape.

    A stage's checkpoint counts as what that stage starts from. Lengths and ends matter where the policy `is_sampled`.
    """
    path = config.first_checkpoint
    checked = None if path is None else check_checkpoint(Path(path), "language")
    model = config.model.model_copy(update={"path": path})
    if (folder := policy_tokenizer_folder(model)) is not None and has_tokenizer(folder):
        rehearse_tokenizer(folder)
    tokenizer = build_tokenizer(model)
    if path is None or checked is None:
        shape = new_config(config.model, vocab_size=len(tokenizer))
    else:
        shape = checked
        check_vocabulary(tokenizer, shape, Path(path))
        if is_adapter(Path(path)):
            _check_ranks(config, stored_shapes(Path(path), shape))
    if config.generator.routing_replay and (config.environment.is_set or not shape.num_experts):
        raise ConfigError(
            "routing is replayed for completions of mixtures of experts",
            got="generator.routing_replay with "
            + ("an environment" if shape.num_experts else "a model without experts"),
            allowed="a mixture of experts, and no environment",
        )
    if shape.num_experts:
        _check_mixture(config)
    _check_expert_ranks(config, shape)
    if config.generator.precision == "mxfp4":
        _check_blocks(config, shape)
    if config.model.lora.is_set:
        _check_ranks(config, planned_shapes(config.model.lora, shape))
    if is_sampled:
        config.check_lengths(
            shape.max_positions,
            of=f"the positions of {config.model.path}",
            hint="lower prompts.max_prompt_tokens (longer prompts are dropped) or generator.max_new_tokens",
        )
        _check_ends(config, tokenizer, shape)
    return shape


def _check_mixture(config: RunConfig) -> None:
    """Raise ConfigError for what a mixture of experts is not supported with (docs/experts.md)."""
    generator, base_precision = config.generator, config.model.lora.base_precision
    for field, got, is_wrong, allowed in (
        ("generator.engine", generator.engine, generator.engine != "native", "'native'"),
        (
            "generator.precision",
            generator.precision,
            generator.precision == "fp8",
            "'float32', 'bfloat16', 'int8' or 'mxfp4'",
        ),
        ("model.lora.base_precision", base_precision, base_precision != "float32", "'float32'"),
        ("trainer.context_parallel", config.trainer.context_parallel, config.trainer.context_parallel > 1, "1"),
        ("trainer.pipeline_parallel", config.trainer.pipeline_parallel, config.trainer.pipeline_parallel > 1, "1"),
    ):
        if is_wrong:
            raise ConfigError(
                f"a mixture of experts is not supported with this {field}", got=f"{field} = {got!r}", allowed=allowed
            )


def _check_expert_ranks(config: RunConfig, shape: TransformerConfig) -> None:
    """Raise ConfigError where the run's ranks do not divide the experts of a policy of `shape`, or are not to."""
    generator, trainer = config.generator, config.trainer
    divided = {
        "trainer.expert_parallel": trainer.expert_parallel,
        "trainer.tensor_parallel": trainer.tensor_parallel if shape.num_experts else 1,
        "generator.tensor_parallel": generator.tensor_parallel if shape.num_experts else 1,
    }
    fields = [f"{name} = {ranks}" for name, ranks in divided.items() if ranks > 1]
    if fields and config.model.lora.is_set and shape.num_experts:
        raise ConfigError(
            "the adapters of a mixture are not divided with its experts",
            got=f"model.lora with {fields[0]}",
            allowed=f"{fields[0].split(' = ')[0]} = 1",
            hint="data-parallel ranks (FSDP2) divide the base",
        )
    if trainer.expert_parallel > 1:
        of = f" (trainer.expert_parallel = {trainer.expert_parallel}, tensor_parallel = {trainer.tensor_parallel})"
        check_experts(shape.num_experts, trainer.expert_parallel * trainer.tensor_parallel, of=of)


def _check_blocks(config: RunConfig, shape: TransformerConfig) -> None:
    """Raise ConfigError where tensor parallelism would cut blocks of mxfp4 (`quantized.CUT_BY_COLUMNS`)."""
    widths = {"heads' outputs": shape.query_size, "inner numbers of the MLP": shape.intermediate_size}
    for section, ranks in (
        ("generator", config.generator.tensor_parallel),
        ("trainer", config.trainer.tensor_parallel),
    ):
        for name, width in widths.items():
            if ranks > 1 and width % (BLOCK * ranks):
                raise ConfigError(
                    f"with generator.precision = 'mxfp4' a rank has whole blocks of {BLOCK} columns",
                    got=f"{section}.tensor_parallel = {ranks} with {width} {name}",
                    allowed=f"ranks with a multiple of {BLOCK} columns each",
                    hint="fewer ranks, or generator.precision = 'bfloat16'",
                )


def _check_ranks(config: RunConfig, shapes: Mapping[str, AdapterShape]) -> None:
    """Raise ConfigError for adapters of experts whose products a GPU's grouped kernel has no alignment for."""
    ranks = {shape.rank for shape in shapes.values() if shape.num_experts and shape.rank % GROUPED_MULTIPLE}
    if ranks and config.computes_on_gpu:
        raise ConfigError(
            "on GPUs the rank of experts' adapters is a multiple of what grouped products align to",
            got=f"rank {', '.join(map(str, ranks))}",
            allowed=f"a multiple of {GROUPED_MULTIPLE}",
        )


def check_checkpoint(path: Path, head: Head) -> TransformerConfig:
    """The shape of the checkpoint in folder `path`. ConfigError unless its files have just the tensors that it needs.

    Reads headers: damage to the numbers behind them is not seen. An adapter is checked together with its base.
    """
    if is_adapter(path):
        if head != "language":
            hint = f"`slipstream export {path} FOLDER --merged` writes the whole model"
            raise ConfigError(
                "a model with a head of its own is no adapter", got=path, allowed="a whole model", hint=hint
            )
        shape = check_checkpoint(base_folder(path), head)
        stored_shapes(path, shape)
        return shape
    shape = config_from_hf(read_hf_config(path))
    check_tables(shape, of=f"the checkpoint in {path}", hint="is its config.json damaged? fetch it again")
    stored: dict[str, Header] = {}
    for file in weight_files(path):
        found = tensor_headers(file)
        if repeated := sorted(found.keys() & stored.keys()):
            raise misfit(path, [f"{repeated[0]} is in two files"], allowed="every tensor once")
        stored |= found
    with torch.device("meta"):
        wanted = {tensor.name: tensor.shape for tensor in layout(Transformer(shape))}
    is_scored = head == "score" or (head == "any" and HEAD_NAME in stored)
    if head == "score" and HEAD_NAME not in stored:
        raise ConfigError(
            f"the checkpoint in {path} has no scalar head",
            got=f"no tensor {HEAD_NAME}",
            allowed="a `*ForSequenceClassification` checkpoint with one label",
            hint="it is a language model: a reward model's folder is needed",
        )
    if is_scored:
        wanted = {name: of for name, of in wanted.items() if name not in HEADS}
        wanted[HEAD_NAME] = (1, shape.hidden_size)
    problems = []
    for stored_name, header in stored.items():
        name = canonical_name(stored_name, wanted, tied=shape.tie_embeddings or is_scored)
        if name is None:
            continue
        if name not in wanted:
            problems.append(f"unexpected {stored_name}")
        elif (expected := wanted.pop(name)) != tuple(header.shape):
            problems.append(f"{name} has shape {header.shape}, not {list(expected)}")
        elif header.dtype not in WEIGHTS:
            problems.append(f"{name} is in {header.dtype}, which is none of {', '.join(WEIGHTS)}")
    problems += [f"missing {name}" for name in wanted]
    if problems:
        raise misfit(path, problems, allowed=f"exactly the tensors of a {shape.family} model")
    return shape


def check_vocabulary(tokenizer: Tokenizer, shape: TransformerConfig, path: Path) -> None:
    """Raise ConfigError for a tokenizer with ids that the model has no embedding for."""
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= shape.vocab_size:
        raise ConfigError(
            f"the tokenizer in {path} has more tokens than the model",
            got=f"token ids up to {largest}",
            allowed=f"0..{shape.vocab_size - 1} (vocab_size = {shape.vocab_size} in config.json)",
            hint="take tokenizer and weights from the same checkpoint, or resize its embedding with transformers",
        )


def _check_ends(config: RunConfig, tokenizer: Tokenizer, shape: TransformerConfig) -> None:
    ends = stop_token_ids(tokenizer, config.generator, shape)
    allowed = f"0..{shape.vocab_size - 1}, the model's vocabulary"
    if outside := [token for token in ends if not 0 <= token < shape.vocab_size]:
        raise ConfigError(
            "stop tokens outside the vocabulary", got=outside, allowed=allowed, hint="see generator.stop_token_ids"
        )
    truncate = config.rewards.truncate_token
    if truncate is not None and truncate >= shape.vocab_size:
        raise ConfigError("rewards.truncate_token is outside the vocabulary", got=truncate, allowed=allowed)
    if config.generator.stop_at_eos and not ends and truncate is None:
        raise ConfigError(
            "no token ends a completion",
            got="a tokenizer without an EOS token, a model without eos_token_id, and no generator.stop_token_ids",
            allowed="a tokenizer with eos_token, or generator.stop_token_ids = [...]",
            hint="generator.stop_at_eos = false samples max_new_tokens always",
        )
