"""Published architectures by name, so that a plan needs no checkpoint: the fields of their `config.json`.

Sources: the model cards and configurations of meta-llama, Qwen, mistralai, HuggingFaceTB (SmolLM) and EleutherAI
(Pythia) on the Hugging Face hub. Numbers of parameters follow from the shapes; a test compares them with the published.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.models.config import TransformerConfig

_LLAMA = {"family": "llama", "vocab_size": 128256, "max_positions": 131072, "norm_eps": 1e-5, "rope_theta": 5e5}
_QWEN = {"max_positions": 32768, "rope_theta": 1e6}
_QWEN25 = _QWEN | {"family": "qwen2", "vocab_size": 152064, "qkv_bias": True}
_SMALL_QWEN25 = _QWEN25 | {"vocab_size": 151936, "tie_embeddings": True}
_QWEN3 = _QWEN | {"family": "qwen3", "vocab_size": 151936, "max_positions": 40960, "head_dim": 128, "qk_norm": True}
_SMALL_QWEN3 = _QWEN3 | {"tie_embeddings": True}
_MISTRAL = {"family": "mistral", "vocab_size": 32768, "max_positions": 32768, "norm_eps": 1e-5, "rope_theta": 1e6}
_SMOLLM2 = _LLAMA | {"vocab_size": 49152, "max_positions": 8192, "rope_theta": 1e5, "tie_embeddings": True}
_PYTHIA = {
    "family": "gpt_neox",
    "vocab_size": 50304,
    "max_positions": 2048,
    "norm_eps": 1e-5,
    "activation": "gelu",
    "rotary_fraction": 0.25,
    "gated_mlp": False,
    **dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias", "layer_norm", "parallel_residual"), True),
}


def _of(
    base: Mapping[str, Any], hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **changes: Any
) -> TransformerConfig:
    """Return the shape of a family in one size; its heads are hidden / heads wide unless `head_dim` says otherwise."""
    fields = {"head_dim": hidden // heads, "tie_embeddings": False, **base, **changes}
    return TransformerConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        **fields,
    )


ARCHITECTURES: Mapping[str, TransformerConfig] = {
    "llama-3.1-8b": _of(_LLAMA, 4096, 14336, 32, 32, 8),
    "llama-3.1-70b": _of(_LLAMA, 8192, 28672, 80, 64, 8),
    "llama-3.1-405b": _of(_LLAMA, 16384, 53248, 126, 128, 8),
    "llama-3.2-1b": _of(_LLAMA, 2048, 8192, 16, 32, 8, tie_embeddings=True),
    "llama-3.2-3b": _of(_LLAMA, 3072, 8192, 28, 24, 8, tie_embeddings=True),
    "llama-3.3-70b": _of(_LLAMA, 8192, 28672, 80, 64, 8),
    "qwen2.5-0.5b": _of(_SMALL_QWEN25, 896, 4864, 24, 14, 2),
    "qwen2.5-1.5b": _of(_SMALL_QWEN25, 1536, 8960, 28, 12, 2),
    "qwen2.5-3b": _of(_SMALL_QWEN25, 2048, 11008, 36, 16, 2),
    "qwen2.5-7b": _of(_QWEN25, 3584, 18944, 28, 28, 4),
    "qwen2.5-14b": _of(_QWEN25, 5120, 13824, 48, 40, 8),
    "qwen2.5-32b": _of(_QWEN25, 5120, 27648, 64, 40, 8),
    "qwen2.5-72b": _of(_QWEN25, 8192, 29568, 80, 64, 8),
    "qwen3-0.6b": _of(_SMALL_QWEN3, 1024, 3072, 28, 16, 8),
    "qwen3-1.7b": _of(_SMALL_QWEN3, 2048, 6144, 28, 16, 8),
    "qwen3-4b": _of(_SMALL_QWEN3, 2560, 9728, 36, 32, 8),
    "qwen3-8b": _of(_QWEN3, 4096, 12288, 36, 32, 8),
    "qwen3-14b": _of(_QWEN3, 5120, 17408, 40, 40, 8),
    "qwen3-32b": _of(_QWEN3, 5120, 25600, 64, 64, 8),
    "mistral-7b": _of(_MISTRAL, 4096, 14336, 32, 32, 8),
    "mistral-small-24b": _of(_MISTRAL, 5120, 32768, 40, 32, 8, head_dim=128, vocab_size=131072),
    "mistral-large-123b": _of(_MISTRAL, 12288, 28672, 88, 96, 8),
    "smollm2-135m": _of(_SMOLLM2, 576, 1536, 30, 9, 3),
    "smollm2-360m": _of(_SMOLLM2, 960, 2560, 32, 15, 5),
    "smollm2-1.7b": _of(_SMOLLM2, 2048, 8192, 24, 32, 32, rope_theta=130_000.0),
    "pythia-410m": _of(_PYTHIA, 1024, 4096, 24, 16, 16),
    "pythia-1b": _of(_PYTHIA, 2048, 8192, 16, 8, 8),
    "pythia-2.8b": _of(_PYTHIA, 2560, 10240, 32, 32, 32),
    "pythia-6.9b": _of(_PYTHIA, 4096, 16384, 32, 32, 32, vocab_size=50432),
}
"""Name, in lower case -> shape."""
