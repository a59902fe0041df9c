"""The fields of a `config.json` that decide a decoder's shape: their types and ranges, for all families.

Everything else in the file is dropped before a library sees it, so no field that is not named here does anything:
`auto_map` is not followed, and a number that a library would count up to is bounded here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from slipstream.core.errors import ConfigError, clip
from slipstream.core.files import read_json

Layers = Annotated[int, Field(ge=1, le=1024)]
Labels = Annotated[int, Field(ge=0, le=2**16)]
Heads = Annotated[int, Field(ge=1, le=2**13)]
Width = Annotated[int, Field(ge=1, le=2**20)]
Experts = Annotated[int, Field(ge=1, le=2**12)]
Vocabulary = Annotated[int, Field(ge=1, le=2**24)]
Positions = Annotated[int, Field(ge=1, le=2**27)]
Token = Annotated[int, Field(ge=0, le=2**31)]
NoToken = Annotated[int, Field(ge=-1, le=2**31)]  # some checkpoints say -1 for "there is none"
Tokens = Token | Annotated[list[Token], Field(max_length=1024)] | None
Positive = Annotated[float, Field(gt=0, le=1e15)]
Epsilon = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Word = Annotated[str, Field(max_length=100)]


class _Fields(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True, protected_namespaces=())


class Rope(_Fields):
    """Rotary positions: `rope_parameters`, or `rope_scaling` as older files call it."""

    rope_type: Word = "default"
    type: Word = "default"
    rope_theta: Positive = 10_000.0
    partial_rotary_factor: Share = 1.0
    factor: Positive = 1.0
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    original_max_position_embeddings: Positions = 8192


class HfFields(_Fields):
    """The fields that are read of any family. What a file leaves out, transformers' defaults fill in.

    Old spellings stand beside new ones: GPT-2's `n_embd`, GPT-NeoX's `rotary_pct`.
    """

    vocab_size: Vocabulary = 1
    hidden_size: Width = 1
    n_embd: Width = 1
    intermediate_size: Width = 1
    n_inner: Width | None = None
    num_hidden_layers: Layers = 1
    n_layer: Layers = 1
    num_attention_heads: Heads = 1
    n_head: Heads = 1
    num_key_value_heads: Heads | None = None
    head_dim: Width | None = None
    max_position_embeddings: Positions = 1
    n_positions: Positions = 1
    hidden_act: Word = ""
    activation_function: Word = ""
    rms_norm_eps: Epsilon = 0.0
    layer_norm_eps: Epsilon = 0.0
    layer_norm_epsilon: Epsilon = 0.0
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    use_parallel_residual: bool = False
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    add_cross_attention: bool = False
    rope_theta: Positive = 1.0
    rotary_emb_base: Positive = 1.0
    rotary_pct: Share = 1.0
    partial_rotary_factor: Share = 1.0
    rope_parameters: Rope | None = None
    rope_scaling: Rope | None = None
    use_sliding_window: bool = False
    sliding_window: Positions | None = None
    eos_token_id: Tokens = None
    bos_token_id: NoToken | None = None
    pad_token_id: NoToken | None = None
    num_experts: Experts = 1
    num_local_experts: Experts = 1
    num_experts_per_tok: Experts = 1
    moe_intermediate_size: Width = 1
    norm_topk_prob: bool = False
    router_jitter_noise: Share = 0.0
    decoder_sparse_step: Layers = 1
    mlp_only_layers: Annotated[list[Annotated[int, Field(ge=0, le=1024)]], Field(max_length=1024)] | None = None
    num_labels: Labels = 1  # nothing is done with it, but a library counts up to it


def read_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint. ConfigError for anything else."""
    try:
        data: Any = read_json(file)
    except ValueError as error:
        raise ConfigError(f"'{file}' is not valid JSON", got=error, hint="was its download interrupted?") from error
    except OSError as error:
        raise ConfigError(f"'{file}' cannot be read", got=error.strerror) from error
    if not isinstance(data, dict):
        raise ConfigError(f"'{file}' is no JSON object", got=type(data).__name__, allowed="an object")
    return data


def known_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a parsed `config.json` that are read here, as they are given.

    Raises ConfigError, naming the field, for one of another type or out of its range.
    """
    try:
        return HfFields.model_validate(dict(raw)).model_dump(exclude_unset=True)
    except ValidationError as invalid:
        problem = invalid.errors()[0]
        raise ConfigError(
            f"config.json has a field that is out of range: {_name(problem['loc'])}",
            got=clip(repr(problem["input"]), 100),
            allowed=problem["msg"].removeprefix("Input should be "),
            hint="is the file damaged? fetch it again",
        ) from None


def _name(location: tuple[int | str, ...]) -> str:
    """The field, and the one inside of it, without the names that pydantic gives to alternatives."""
    return ".".join(str(part) for part in location if part in HfFields.model_fields or part in Rope.model_fields)
