"""Parameters, operations and bytes of a decoder, or of one rank's share of it, as `models/transformer.py` has them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property

from slipstream.core.fields import Precision
from slipstream.models.config import TransformerConfig, local_config

BYTES: dict[Precision, float] = {"float32": 4, "bfloat16": 2, "fp8": 1, "int8": 1}  # bytes of an element of a matrix
COMPUTED_BYTES: dict[Precision, float] = {"float32": 4, "bfloat16": 2, "fp8": 2, "int8": 2}
"""Bytes of an element of an activation, a key or a value: fp8 and int8 are formats of weights and operands alone."""


@dataclass(frozen=True)
class Counts:
    """Counts of one of `ranks` that share every layer (1: the whole model); per layer where the name says so.

    Embeddings lie whole on every rank, the head is cut by vocabulary, norms and biases are on all of them
    (`models/tensor_parallel.py`).
    """

    model: TransformerConfig
    ranks: int = 1

    @cached_property
    def local(self) -> TransformerConfig:
        """Heads and inner width of the rank. ConfigError when the model cannot be divided so."""
        return local_config(self.model, self.ranks)

    @cached_property
    def layer_matrix(self) -> int:
        """Weights of a layer's products."""
        local = self.local
        attention = local.hidden_size * (local.query_size + 2 * local.kv_size) + local.query_size * local.hidden_size
        return attention + (3 if local.gated_mlp else 2) * local.hidden_size * local.intermediate_size

    @cached_property
    def layer_vectors(self) -> int:
        """Norms and biases of a layer; those of `output` and `down` lie on the first rank, which is this one."""
        local = self.local
        hidden, norms = local.hidden_size, 2 if local.layer_norm else 1
        count = 2 * norms * hidden
        if local.qk_norm:
            count += 2 * norms * local.head_dim
        count += (local.query_size + 2 * local.kv_size) * local.qkv_bias + hidden * local.output_bias
        inner = (2 if local.gated_mlp else 1) * local.intermediate_size
        return count + (inner + hidden) * local.mlp_bias

    @property
    def head_matrix(self) -> int:
        """Weights of the head's product, its own or those of the embedding it is tied to."""
        return math.ceil(self.model.vocab_size / self.ranks) * self.model.hidden_size

    @property
    def embedding(self) -> int:
        """Embeddings of tokens and, where they are learned, of positions."""
        positions = self.model.max_positions if self.model.rotary_dim == 0 else 0
        return (self.model.vocab_size + positions) * self.model.hidden_size

    @cached_property
    def params(self) -> int:
        """All that the rank holds. Identity: that of a `Transformer` with this shape."""
        return self.model.num_layers * self.layer + self.root

    @property
    def layer(self) -> int:
        """All of a layer."""
        return self.layer_matrix + self.layer_vectors

    @property
    def root(self) -> int:
        """Parameters outside the layers: embedding, head and final norm."""
        head = 0 if self.model.tie_embeddings else self.head_matrix
        return head + self.embedding + (2 if self.model.layer_norm else 1) * self.model.hidden_size

    def served_bytes(self, precision: Precision) -> float:
        """Bytes of a version at a generator's precision, stored as `FORMATS` of `models/quantized.py` says."""
        matrix, looked_up = BYTES[precision], 4 if precision == "float32" else 2
        table = 2 if precision == "fp8" else matrix
        scale = 4 if matrix == 1 else 0
        local, model = self.local, self.model
        rows = local.query_size + 2 * local.kv_size + 2 * local.hidden_size
        rows += (2 if local.gated_mlp else 1) * local.intermediate_size
        layer = self.layer_matrix * matrix + rows * scale + self.layer_vectors * 4
        tables = model.vocab_size * model.hidden_size * (table if model.tie_embeddings else looked_up)
        if not model.tie_embeddings:
            tables += self.head_matrix * table
        if model.rotary_dim == 0:
            tables += model.max_positions * model.hidden_size * 4
        return model.num_layers * layer + tables

    def kv_bytes(self, precision: Precision) -> float:
        """Keys and values of one token in all layers."""
        return 2 * self.model.num_layers * self.local.kv_size * COMPUTED_BYTES[precision]

    @property
    def joins(self) -> int:
        """Sums over ranks in a layer's forward pass: after attention and after the MLP, or after both together."""
        return 1 if self.model.parallel_residual else 2

    @cached_property
    def kept_elements(self) -> int:
        """Activations per token and layer that a backward pass without recomputation keeps.

        The residual stream before either norm and behind it (4 hidden), queries, keys, values and what attention gives,
        and the MLP's inner width: gate, up, and their product.
        """
        local = self.local
        attention = 2 * local.query_size + 2 * local.kv_size
        return 4 * local.hidden_size + attention + (3 if local.gated_mlp else 2) * local.intermediate_size

    @cached_property
    def moved_elements(self) -> int:
        """Activations per token and layer that a forward pass writes and reads again between its products."""
        local = self.local
        heads = 2 * (local.query_size + local.kv_size)  # rotation
        return 2 * (6 * local.hidden_size + heads + (3 if local.gated_mlp else 2) * local.intermediate_size)


@cache
def counts_of(model: TransformerConfig, ranks: int = 1) -> Counts:
    """Return the counts of a shape, made once: a search asks for the same ones thousands of times."""
    return Counts(model, ranks)
