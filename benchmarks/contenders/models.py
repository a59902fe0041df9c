"""The models that engines are compared on, by shape."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from slipstream.models.config import Llama3RopeScaling, TransformerConfig
from slipstream.models.hf import save_model
from slipstream.models.initialise import initialise
from slipstream.models.transformer import Transformer

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Model:
    """A shape, and the folder of a checkpoint with it where there may be one."""

    config: TransformerConfig
    checkpoint: str | None = None

    def folder(self, scratch: Path, name: str) -> tuple[Path, str]:
        """A Hugging Face checkpoint, and in words whose weights it has; random ones are written below `scratch`."""
        if self.checkpoint is not None and (REPOSITORY / self.checkpoint / "config.json").exists():
            return REPOSITORY / self.checkpoint, self.checkpoint
        model = Transformer(self.config)
        initialise(model, 0)
        folder = scratch / name
        save_model(model, folder)
        return folder, "random weights"


SMALL = TransformerConfig(
    family="llama",
    vocab_size=72,
    hidden_size=256,
    intermediate_size=768,
    num_layers=4,
    num_heads=4,
    num_kv_heads=4,
    head_dim=64,
    max_positions=2048,
    tie_embeddings=False,
)
SMOLLM2 = TransformerConfig(
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
MODELS = {
    "small": Model(SMALL),  # of the comparison with TRL, 3.4 M parameters
    "tiny": Model(replace(SMALL, hidden_size=128, intermediate_size=384, num_layers=3, head_dim=32)),  # quickstart's
    "smollm2": Model(SMOLLM2, "models/smollm2-135m-instruct"),
}

QWEN_05B = TransformerConfig(
    family="qwen2",
    vocab_size=151936,
    hidden_size=896,
    intermediate_size=4864,
    num_layers=24,
    num_heads=14,
    num_kv_heads=2,
    head_dim=64,
    max_positions=32768,
    tie_embeddings=True,
    rope_theta=1_000_000.0,
    qkv_bias=True,
)
SHAPES = {  # for a GPU, with random weights
    "qwen2.5-0.5b": QWEN_05B,
    "qwen2.5-1.5b": replace(
        QWEN_05B, hidden_size=1536, intermediate_size=8960, num_layers=28, num_heads=12, num_kv_heads=2, head_dim=128
    ),
    "llama-3.1-8b": TransformerConfig(
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
        rope_scaling=Llama3RopeScaling(8.0, 1.0, 4.0, 8192),
    ),
}


def matmul_params(config: TransformerConfig) -> int:
    """Weights that every decoded token is multiplied with: all linear layers and the head."""
    inner = (3 if config.gated_mlp else 2) * config.intermediate_size
    mixing = 2 * config.query_size + 2 * config.kv_size
    return config.num_layers * config.hidden_size * (mixing + inner) + config.vocab_size * config.hidden_size


def kv_bytes_per_token(config: TransformerConfig, bytes_per_number: int) -> int:
    """Keys and values of one token in all layers."""
    return 2 * config.num_layers * config.kv_size * bytes_per_number


def attention_flop(config: TransformerConfig, context: float) -> float:
    """Scores and weighted sum of one new token over `context` tokens, in all layers."""
    return 4.0 * config.num_layers * config.query_size * context
