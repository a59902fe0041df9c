"""Published architectures by name, so that a plan needs no checkpoint: what their `config.json` says.

Sources: the model cards and configurations on the Hugging Face hub, of the organisations named in `SOURCES`. Numbers of
parameters follow from the shapes and are compared with the published ones by a test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from slipstream.models.config import TransformerConfig

SOURCES = {
    "llama": "huggingface.co/meta-llama",
    "qwen": "huggingface.co/Qwen",
    "mistral": "huggingface.co/mistralai",
    "smollm": "huggingface.co/HuggingFaceTB",
    "pythia": "huggingface.co/EleutherAI",
}

_LLAMA = TransformerConfig(
    family="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_positions=131072,
    tie_embeddings=False,
    norm_eps=1e-5,
    rope_theta=500_000.0,
)
_QWEN25 = TransformerConfig(
    family="qwen2",
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_layers=28,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    max_positions=32768,
    tie_embeddings=False,
    rope_theta=1_000_000.0,
    qkv_bias=True,
)
_QWEN3 = TransformerConfig(
    family="qwen3",
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_positions=40960,
    tie_embeddings=False,
    rope_theta=1_000_000.0,
    qk_norm=True,
)
_MISTRAL = TransformerConfig(
    family="mistral",
    vocab_size=32768,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_positions=32768,
    tie_embeddings=False,
    norm_eps=1e-5,
    rope_theta=1_000_000.0,
)
_SMOLLM2 = TransformerConfig(
    family="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_positions=8192,
    tie_embeddings=True,
    norm_eps=1e-5,
    rope_theta=100_000.0,
)
_PYTHIA = TransformerConfig(
    family="gpt_neox",
    vocab_size=50304,
    hidden_size=1024,
    intermediate_size=4096,
    num_layers=24,
    num_heads=16,
    num_kv_heads=16,
    head_dim=64,
    max_positions=2048,
    tie_embeddings=False,
    norm_eps=1e-5,
    activation="gelu",
    rotary_fraction=0.25,
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    gated_mlp=False,
    layer_norm=True,
    parallel_residual=True,
)


def _of(
    base: TransformerConfig, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **changes: object
) -> TransformerConfig:
    """`base` in another size; its heads are hidden / heads wide unless `head_dim` says otherwise."""
    fields: dict[str, object] = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": hidden // heads,
    }
    return replace(base, **(fields | changes))  # type: ignore[arg-type]


_LARGE_QWEN3 = {"head_dim": 128}
_SMALL_QWEN3 = {"head_dim": 128, "tie_embeddings": True}
_SMALL_QWEN25 = {"tie_embeddings": True, "vocab_size": 151936}

ARCHITECTURES: Mapping[str, TransformerConfig] = {
    "llama-3.1-8b": _LLAMA,
    "llama-3.1-70b": _of(_LLAMA, 8192, 28672, 80, 64, 8),
    "llama-3.1-405b": _of(_LLAMA, 16384, 53248, 126, 128, 8),
    "llama-3.2-1b": _of(_LLAMA, 2048, 8192, 16, 32, 8, tie_embeddings=True),
    "llama-3.2-3b": _of(_LLAMA, 3072, 8192, 28, 24, 8, tie_embeddings=True),
    "llama-3.3-70b": _of(_LLAMA, 8192, 28672, 80, 64, 8),
    "qwen2.5-0.5b": _of(_QWEN25, 896, 4864, 24, 14, 2, **_SMALL_QWEN25),
    "qwen2.5-1.5b": _of(_QWEN25, 1536, 8960, 28, 12, 2, **_SMALL_QWEN25),
    "qwen2.5-3b": _of(_QWEN25, 2048, 11008, 36, 16, 2, **_SMALL_QWEN25),
    "qwen2.5-7b": _QWEN25,
    "qwen2.5-14b": _of(_QWEN25, 5120, 13824, 48, 40, 8),
    "qwen2.5-32b": _of(_QWEN25, 5120, 27648, 64, 40, 8),
    "qwen2.5-72b": _of(_QWEN25, 8192, 29568, 80, 64, 8),
    "qwen3-0.6b": _of(_QWEN3, 1024, 3072, 28, 16, 8, **_SMALL_QWEN3),
    "qwen3-1.7b": _of(_QWEN3, 2048, 6144, 28, 16, 8, **_SMALL_QWEN3),
    "qwen3-4b": _of(_QWEN3, 2560, 9728, 36, 32, 8, **_SMALL_QWEN3),
    "qwen3-8b": _QWEN3,
    "qwen3-14b": _of(_QWEN3, 5120, 17408, 40, 40, 8, **_LARGE_QWEN3),
    "qwen3-32b": _of(_QWEN3, 5120, 25600, 64, 64, 8, **_LARGE_QWEN3),
    "mistral-7b": _MISTRAL,
    "mistral-small-24b": _of(_MISTRAL, 5120, 32768, 40, 32, 8, head_dim=128, vocab_size=131072),
    "mistral-large-123b": _of(_MISTRAL, 12288, 28672, 88, 96, 8),
    "smollm2-135m": _SMOLLM2,
    "smollm2-360m": _of(_SMOLLM2, 960, 2560, 32, 15, 5),
    "smollm2-1.7b": _of(_SMOLLM2, 2048, 8192, 24, 32, 32, rope_theta=130_000.0),
    "pythia-410m": _PYTHIA,
    "pythia-1b": _of(_PYTHIA, 2048, 8192, 16, 8, 8),
    "pythia-2.8b": _of(_PYTHIA, 2560, 10240, 32, 32, 32),
    "pythia-6.9b": _of(_PYTHIA, 4096, 16384, 32, 32, 32, vocab_size=50432),
}
"""Name, in lower case -> shape."""
