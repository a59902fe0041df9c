"""The shape of a decoder, for every supported family, and its translation from and to Hugging Face's `config.json`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from slipstream.core.errors import ConfigError, clip
from slipstream.core.sections import ModelConfig
from slipstream.models.hf_fields import known_fields

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gpt_neox", "gpt2")
MIXTURES = ("qwen3_moe", "mixtral")
"""The families whose layers are mixtures of experts."""


MAX_LOGITS = {"cpu": 1 << 26, "cuda": 1 << 28}
"""Logits that a trainer holds at once at most, in elements, by type of device; larger heads run in chunks.

On a GPU each chunk adds to a whole gradient of the head in memory. At 2^26 and a vocabulary of 152,000 that would take
as long as the chunk's products, by bytes and peak rates of an H200; at 2^28 a quarter. A trainer takes fewer where its
memory is short (`trainer/logit_room.py`).
"""


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Frequency-dependent stretching of rotary positions, as in Llama 3.1 (`rope_type = "llama3"`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class TransformerConfig:
    """Everything that determines a decoder's computation; `family` is Hugging Face's `model_type`.

    `head_dim` is per head, `max_positions` in tokens; `rotary_fraction` is the share of each head that is rotated
    (0 means learned absolute positions, as in GPT-2). With `num_experts` the MLP of every layer but `dense_layers` is a
    mixture of that many, `expert_width` wide inside, of which a token has `experts_per_token`; with `normalises_gates`
    their weights add up to 1.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    tie_embeddings: bool
    norm_eps: float = 1e-6
    activation: str = "silu"
    rope_theta: float = 10_000.0
    rotary_fraction: float = 1.0
    rope_scaling: Llama3RopeScaling | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    gated_mlp: bool = True
    layer_norm: bool = False
    qk_norm: bool = False
    parallel_residual: bool = False
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    num_experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    normalises_gates: bool = True
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ConfigError("unsupported model family", got=self.family, allowed=", ".join(FAMILIES))
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                "query heads must share key and value heads evenly",
                got=f"num_heads = {self.num_heads}, num_kv_heads = {self.num_kv_heads}",
                allowed="num_heads % num_kv_heads == 0",
            )
        if self.rotary_dim % 2:
            raise ConfigError("rotated dimensions come in pairs", got=f"{self.rotary_dim} per head", allowed="even")
        if self.experts_per_token > self.num_experts:
            raise ConfigError(
                "a token cannot have more experts than there are",
                got=f"{self.experts_per_token} of {self.num_experts}",
                allowed=f"1..{self.num_experts}",
            )

    def is_sparse(self, layer: int) -> bool:
        """Tell whether the MLP of `layer` is a mixture of experts."""
        return self.num_experts > 0 and layer not in self.dense_layers

    @property
    def num_sparse_layers(self) -> int:
        return self.num_layers - len(self.dense_layers) if self.num_experts else 0

    @property
    def rotary_dim(self) -> int:
        """Rotated dimensions of each head."""
        return int(self.head_dim * self.rotary_fraction)

    @property
    def can_fuse(self) -> bool:
        """Whether `generator/fused_decode.py` knows layers like these: RMSNorm, rotated, one branch after the other."""
        return not self.layer_norm and not self.parallel_residual and self.rotary_dim > 0

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or all value) heads together."""
        return self.num_kv_heads * self.head_dim


def local_config(config: TransformerConfig, world: int) -> TransformerConfig:
    """`config` with the heads and the inner width of one of `world` ranks; vocabulary and experts, of which a rank has
    some, count all (`transformer.Ranks`).

    Raises ConfigError, listing the numbers of ranks that are possible.
    """
    if not _divides(config, world):
        raise ConfigError(
            "the model cannot be divided over this number of ranks",
            got=f"{world} ranks for {config.num_heads} heads, {config.num_kv_heads} key-value heads and an "
            f"intermediate_size of {config.intermediate_size}"
            + (f", {config.num_experts} experts" if config.num_experts else ""),
            allowed=", ".join(str(n) for n in range(1, config.num_heads + 1) if _divides(config, n)) + " ranks",
            hint="every rank gets whole heads, all as many; key-value heads may be shared by ranks, all by as many"
            + ("; experts are whole, equally many on each" if config.num_experts else ""),
        )
    return replace(
        config,
        num_heads=config.num_heads // world,
        num_kv_heads=max(config.num_kv_heads // world, 1),
        intermediate_size=config.intermediate_size // world,
    )


def _divides(config: TransformerConfig, world: int) -> bool:
    shares_evenly = world >= 1 and (config.num_kv_heads % world == 0 or world % config.num_kv_heads == 0)
    return (
        shares_evenly
        and config.num_heads % world == 0
        and config.num_experts % world == 0
        and (config.num_sparse_layers == config.num_layers or config.intermediate_size % world == 0)
        and config.vocab_size >= world
    )


def config_from_hf(raw: Mapping[str, Any], *, max_positions: int | None = None) -> TransformerConfig:
    """The `TransformerConfig` of a parsed `config.json`; `max_positions` lowers the longest sequence, in tokens.

    Learned positions are weights, and all of them stay.
    transformers' own config class fills in defaults and old spellings; it sees `hf_fields.known_fields` only. Raises
    ConfigError for values out of range, and for an architecture or option whose logits this decoder would not
    reproduce.
    """
    from transformers import CONFIG_MAPPING  # a second of import time, only where checkpoints are read

    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ConfigError("unsupported model family in config.json", got=clip(family), allowed=", ".join(FAMILIES))
    if raw.get("quantization_config") is not None:
        raise ConfigError(
            "quantized checkpoints are not supported",
            got=clip(raw["quantization_config"]),
            hint="dequantize the model with transformers and save it with save_pretrained",
        )
    try:
        hf: dict[str, Any] = CONFIG_MAPPING[family].from_dict(known_fields(raw)).to_dict()
        hf["eos_token_id"] = raw.get("eos_token_id")  # a class's default ends no completion of this model
        _check_routing(raw, hf)
        config = _from_hf(family, hf)
    except ConfigError:
        raise
    except Exception as error:  # a library's opinion of a file that may hold anything
        raise ConfigError(f"config.json is not that of a {family} model", got=clip(error)) from error
    if outside := [token for token in config.eos_token_ids if token >= config.vocab_size]:
        raise ConfigError(
            "config.json ends completions with tokens outside the vocabulary",
            got=f"eos_token_id = {outside[0]}",
            allowed=f"0..{config.vocab_size - 1} (vocab_size = {config.vocab_size})",
        )
    if max_positions is not None and config.rotary_dim:
        config = replace(config, max_positions=min(max_positions, config.max_positions))
    window = hf.get("sliding_window") if hf.get("use_sliding_window", True) else None
    if window is not None and window < config.max_positions:
        raise ConfigError(
            "sliding-window attention is not supported",
            got=f"sliding_window = {window} below max_positions = {config.max_positions}",
            allowed="sequences no longer than the window",
            hint=f"set max_position_embeddings to {window} in a copy of config.json: sequences are no longer then",
        )
    return config


def _eos(hf: Mapping[str, Any]) -> tuple[int, ...]:
    eos = hf["eos_token_id"]
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)


FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "max_positions": "max_position_embeddings",
    "tie_embeddings": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
    "activation": "hidden_act",
    "pad_token_id": "pad_token_id",
    "bos_token_id": "bos_token_id",
}
"""Our fields and the names that transformers has for them."""
_ROUTED = {"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"}
FIELDS_OF_FAMILY = {
    "qwen3_moe": FIELDS | {"expert_width": "moe_intermediate_size", "normalises_gates": "norm_topk_prob"} | _ROUTED,
    "mixtral": FIELDS | {"expert_width": "intermediate_size"} | _ROUTED,
    "gpt_neox": FIELDS | {"norm_eps": "layer_norm_eps"},
    "gpt2": FIELDS
    | {
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "num_layers": "n_layer",
        "num_heads": "n_head",
        "max_positions": "n_positions",
        "norm_eps": "layer_norm_epsilon",
        "activation": "activation_function",
    },
}
"""The same for the families that differ."""


def usual_parts(family: str) -> dict[str, Any]:
    """Return which norms, biases and MLP the layers of `family` have, unless a checkpoint says otherwise."""
    is_gpt = family in ("gpt2", "gpt_neox")
    return {
        "qkv_bias": is_gpt or family == "qwen2",
        "output_bias": is_gpt,
        "mlp_bias": is_gpt,
        "gated_mlp": not is_gpt,
        "layer_norm": is_gpt,
        "qk_norm": family in ("qwen3", "qwen3_moe"),
    }


_KNOWN_ROUTING = (
    *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
    *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
)
_ROUTING_WORDS = ("expert", "router", "routed", "routing", "moe_", "topk", "n_group", "scoring")


def _check_routing(raw: Mapping[str, Any], hf: Mapping[str, Any]) -> None:
    """Raise ConfigError for a mixture of experts whose config.json asks for what `experts.Experts` does not do."""
    if raw["model_type"] not in MIXTURES:
        return
    odd = [name for name in raw if name not in _KNOWN_ROUTING and any(word in name for word in _ROUTING_WORDS)]
    if odd := [name for name in odd if raw[name]] or (["router_jitter_noise"] if hf.get("router_jitter_noise") else []):
        raise ConfigError(
            "this mixture of experts is not supported",
            got=", ".join(f"{clip(name)} = {clip(raw[name])}" for name in odd),
            allowed="experts chosen by the softmax of a router alone, without jitter, groups or shared experts",
        )


def _from_hf(family: str, hf: Mapping[str, Any]) -> TransformerConfig:
    is_gpt2 = family == "gpt2"
    if is_gpt2 and (hf["scale_attn_by_inverse_layer_idx"] or not hf["scale_attn_weights"] or hf["add_cross_attention"]):
        raise ConfigError(
            "this GPT-2 variant is not supported",
            got="scale_attn_by_inverse_layer_idx, unscaled attention or cross attention",
            allowed="plain GPT-2",
        )
    given = {ours: hf[theirs] for ours, theirs in FIELDS_OF_FAMILY.get(family, FIELDS).items()}
    given["activation"] = _activation(given["activation"])
    given["intermediate_size"] = given["intermediate_size"] or 4 * given["hidden_size"]  # GPT-2 may leave it out
    parts = usual_parts(family)
    if family in ("llama", "qwen3", "qwen3_moe", "gpt_neox"):  # the layers of others do not look at the field
        parts["qkv_bias"] = hf.get("attention_bias", parts["qkv_bias"])
    parts["output_bias"] = parts["qkv_bias"] and family != "qwen2"
    parts["mlp_bias"] = parts["mlp_bias"] or hf.get("mlp_bias", False)
    rope = {"rope_theta": 10_000.0, "partial_rotary_factor": 0.0} if is_gpt2 else hf["rope_parameters"]
    rotary_fraction = rope.get("partial_rotary_factor", 1.0)
    if rotary_fraction != 1.0 and family not in ("gpt2", "gpt_neox"):
        raise ConfigError(
            f"heads of a {family} model that are rotated in part are not supported",
            got=f"partial_rotary_factor = {rotary_fraction}",
            allowed="1.0",
            hint="transformers rotates whole heads of this family, whatever the field says: remove it from config.json "
            "if the model was trained so",
        )
    if family == "qwen3_moe":
        step, dense = hf["decoder_sparse_step"], hf["mlp_only_layers"]
        layers = range(given["num_layers"])
        given["dense_layers"] = tuple(i for i in layers if i in dense or (i + 1) % step)
    return TransformerConfig(
        family=family,
        **given,
        **parts,
        num_kv_heads=hf.get("num_key_value_heads") or given["num_heads"],
        head_dim=hf.get("head_dim") or given["hidden_size"] // given["num_heads"],
        rope_theta=rope["rope_theta"],
        rotary_fraction=rotary_fraction,
        rope_scaling=_rope_scaling(rope),
        parallel_residual=family == "gpt_neox" and hf["use_parallel_residual"],
        eos_token_ids=_eos(hf),
    )


_HF_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def _activation(name: str) -> str:
    if name not in _HF_ACTIVATIONS:
        raise ConfigError("unsupported activation", got=clip(name), allowed=", ".join(_HF_ACTIVATIONS))
    return _HF_ACTIVATIONS[name]


def _rope_scaling(rope: Mapping[str, Any]) -> Llama3RopeScaling | None:
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return None
    if kind != "llama3":
        raise ConfigError("unsupported rotary scaling", got=f"rope_type = {kind!r}", allowed="'default', 'llama3'")
    return Llama3RopeScaling(
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_max_positions=rope["original_max_position_embeddings"],
    )


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """The `config.json` of `config`, complete with transformers' defaults and `architectures`, without importing it.

    Identity: `config_from_hf(config_to_hf(c)) == c`, but for the `intermediate_size` of a mixtral, which has none.
    """
    eos: int | list[int] | None = list(config.eos_token_ids) or None
    if len(config.eos_token_ids) == 1:
        eos = config.eos_token_ids[0]
    names = FIELDS_OF_FAMILY.get(config.family, FIELDS)
    hf = {"model_type": config.family, "transformers_version": version("transformers")} | _defaults(config.family)
    hf |= {theirs: getattr(config, ours) for ours, theirs in names.items()}
    hf |= {"eos_token_id": eos, "dtype": "float32"} | ({} if config.family == "gpt2" else _rotary_to_hf(config))
    hf[names["activation"]] = {"gelu_tanh": "gelu_new"}.get(config.activation, config.activation)
    if config.family == "qwen3_moe":  # as published; transformers 5 has another name, which older versions ignore
        hf["num_experts"] = hf.pop("num_local_experts")
    return hf


def _defaults(family: str) -> dict[str, Any]:
    tables = tomllib.loads(Path(__file__).with_name("hf_defaults.toml").read_text(encoding="utf-8"))
    return {**tables["usual"], **tables[family]}


def _rotary_to_hf(config: TransformerConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default"}
    fields: dict[str, Any] = {"rope_theta": config.rope_theta}  # transformers 4 passes over `rope_parameters`
    if config.rope_scaling is not None:
        rope = {
            "rope_type": "llama3",
            "factor": config.rope_scaling.factor,
            "low_freq_factor": config.rope_scaling.low_freq_factor,
            "high_freq_factor": config.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": config.rope_scaling.original_max_positions,
        }
        fields["rope_scaling"] = rope
    fields["rope_parameters"] = rope | {"rope_theta": config.rope_theta}
    if config.family == "gpt_neox":
        fields["rope_parameters"]["partial_rotary_factor"] = config.rotary_fraction
        fields |= {"rotary_emb_base": fields.pop("rope_theta"), "rotary_pct": config.rotary_fraction}
        return fields | {"attention_bias": config.qkv_bias, "use_parallel_residual": config.parallel_residual}
    fields["num_key_value_heads"] = config.num_kv_heads
    if config.family in ("qwen2", "qwen3"):
        fields |= {"use_sliding_window": False, "layer_types": ["full_attention"] * config.num_layers}
    fields["head_dim"] = config.head_dim
    if config.family == "qwen2":
        return fields
    if config.family in ("mistral", "mixtral"):
        return fields | {"sliding_window": None}
    if config.family == "qwen3":
        return fields | {"attention_bias": config.qkv_bias}
    if config.family == "qwen3_moe":
        dense = list(config.dense_layers)
        return fields | {"attention_bias": config.qkv_bias, "use_sliding_window": False, "mlp_only_layers": dense}
    return fields | {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}


def new_config(
    config: ModelConfig, vocab_size: int, *, eos_token_id: int | None = None, pad_token_id: int | None = None
) -> TransformerConfig:
    """The decoder that `config` describes, with its family's usual norms, biases and activation."""
    is_gpt = config.family in ("gpt2", "gpt_neox")
    is_mixture = config.num_experts > 0
    return TransformerConfig(
        family=config.family,
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_heads if is_gpt else config.num_kv_heads,
        head_dim=config.hidden_size // config.num_heads,
        max_positions=config.max_positions,
        tie_embeddings=config.tie_embeddings,
        norm_eps=1e-5 if is_gpt else 1e-6,
        activation={"gpt2": "gelu_tanh", "gpt_neox": "gelu"}.get(config.family, "silu"),
        rotary_fraction={"gpt2": 0.0, "gpt_neox": 0.25}.get(config.family, 1.0),
        **usual_parts(config.family),
        parallel_residual=config.family == "gpt_neox",
        eos_token_ids=() if eos_token_id is None else (eos_token_id,),
        pad_token_id=pad_token_id,
        num_experts=config.num_experts,
        experts_per_token=config.experts_per_token if is_mixture else 0,
        expert_width=(config.expert_width or config.intermediate_size) if is_mixture else 0,
    )
