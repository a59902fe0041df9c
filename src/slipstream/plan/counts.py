"""Parameters, operations and bytes of a decoder, or of one rank's share of it, as `models/transformer.py` has them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache, cached_property

from slipstream.core.errors import ConfigError
from slipstream.core.fields import Precision
from slipstream.models.config import TransformerConfig, local_config
from slipstream.plan.pipeline import PlannedStage

BYTES: dict[Precision, float] = {"float32": 4, "bfloat16": 2, "fp8": 1, "int8": 1, "mxfp4": 17 / 32}
"""Bytes of an element of a matrix, of mxfp4 with its blocks' scales."""
COMPUTED_BYTES: dict[Precision, float] = {"float32": 4, "bfloat16": 2, "fp8": 2, "int8": 2, "mxfp4": 2}
"""Bytes of an element of an activation, a key or a value: 8 bits and less are formats of weights and operands alone."""


@dataclass(frozen=True)
class Counts:
    """Counts of one of `ranks` that share every layer (1: the whole model); per layer where the name says so.

    Embeddings lie whole on every rank, the head is cut by vocabulary, norms, biases and routers are on all of them
    (`models/tensor_parallel.py`), experts whole on one each. A token is taken to have as many experts on all ranks.
    """

    model: TransformerConfig
    ranks: int = 1

    @cached_property
    def local(self) -> TransformerConfig:
        """Heads and inner width of the rank. ConfigError when the model cannot be divided so, or has unequal layers."""
        if self.model.num_experts and self.model.dense_layers:
            raise ConfigError(
                "layers with and without experts in one model are not planned",
                got=f"{len(self.model.dense_layers)} of {self.model.num_layers} layers without",
                allowed="experts in every layer, or in none",
            )
        return local_config(self.model, self.ranks)

    @cached_property
    def layer_matrix(self) -> int:
        """Weights of a layer's products."""
        return self._attention_matrix + self._num_mlps * self._mlp_matrix

    @property
    def _num_mlps(self) -> int:
        return max(self.model.num_experts // self.ranks, 1)

    @property
    def _per_token(self) -> float:
        """The experts on this rank that a token goes through."""
        return self.model.experts_per_token / self.ranks

    @property
    def active_matrix(self) -> float:
        """Those that a token is multiplied by: `layer_matrix`, but for the experts that it does not go through."""
        if not self.model.num_experts:
            return self.layer_matrix
        router = self.model.num_experts * self.model.hidden_size
        return self._attention_matrix + self._per_token * self._mlp_matrix + router

    def touched_matrix(self, rows: float, expert_ranks: int = 1) -> float:
        """Weights of `layer_matrix` that so many tokens read: their experts, if each of them has k of E at random.

        attention + E (1 - (1 - k / E)^rows) MLP. Of `expert_ranks` that exchange as many tokens each, one reads those
        of its experts that the tokens of all have.
        """
        if not self.model.num_experts:
            return self.layer_matrix
        missed: float = (1 - self.model.experts_per_token / self.model.num_experts) ** (rows * expert_ranks)
        return self._attention_matrix + self._num_mlps / expert_ranks * (1 - missed) * self._mlp_matrix

    def experts_of(self, expert_ranks: int) -> int:
        """Return the weights of a layer that ranks which exchange tokens divide, where there are several: one's."""
        return self._num_mlps // expert_ranks * self._mlp_matrix if expert_ranks > 1 else 0

    def gathered_layer(self, expert_ranks: int) -> int:
        """Return the weights of a layer that one of so many ranks computes with."""
        if expert_ranks == 1:
            return self.layer
        return self.layer - self._num_mlps * self._mlp_matrix + self.experts_of(expert_ranks)

    def exchanged_elements(self, expert_ranks: int) -> float:
        """Return the numbers that a token sends to its experts in a layer, and gets back from them."""
        return self._per_token * self.model.hidden_size if expert_ranks > 1 else 0.0

    @cached_property
    def _attention_matrix(self) -> int:
        local = self.local
        return local.hidden_size * (local.query_size + 2 * local.kv_size) + local.query_size * local.hidden_size

    @cached_property
    def _mlp_matrix(self) -> int:
        """Weights of the MLP, or of one expert."""
        local = self.local
        width = local.expert_width if local.num_experts else local.intermediate_size
        return (3 if local.gated_mlp else 2) * local.hidden_size * width

    @property
    def inner(self) -> float:
        """The inner width that a token goes through, of all its experts on this rank together."""
        local = self.local
        return self._per_token * local.expert_width if local.num_experts else local.intermediate_size

    @cached_property
    def layer_vectors(self) -> int:
        """Norms, biases and router of a layer; the biases of `output` and `down` are on the first rank, which it is."""
        local = self.local
        hidden, norms = local.hidden_size, 2 if local.layer_norm else 1
        count = 2 * norms * hidden
        if local.qk_norm:
            count += 2 * norms * local.head_dim
        count += (local.query_size + 2 * local.kv_size) * local.qkv_bias + hidden * local.output_bias
        inner = (2 if local.gated_mlp else 1) * local.intermediate_size
        return count + (inner + hidden) * local.mlp_bias + local.num_experts * hidden

    @property
    def head_matrix(self) -> int:
        """Weights of the head's product, its own or those of the embedding it is tied to."""
        return math.ceil(self.model.vocab_size / self.ranks) * self.model.hidden_size

    @property
    def embedding(self) -> int:
        """Embeddings of tokens and, where they are learned, of positions."""
        positions = self.model.max_positions if self.model.rotary_dim == 0 else 0
        return (self.model.vocab_size + positions) * self.model.hidden_size

    @property
    def largest(self) -> int:
        """Numbers of the largest tensor: a table, the MLPs' first matrices, or those of queries, keys, values."""
        local, parts = self.local, 3 if self.local.gated_mlp else 2
        qkv = local.hidden_size * (local.query_size + 2 * local.kv_size)
        return max(self.embedding, self._num_mlps * self._mlp_matrix * (parts - 1) // parts, qkv)

    @cached_property
    def params(self) -> int:
        """All that the rank holds. Identity: that of a `Transformer` with this shape."""
        return self.model.num_layers * self.layer + self.root

    @property
    def active_params(self) -> float:
        """Those of `params` that take part in a token's pass, the embedding's whole table among them."""
        idle = (self.model.num_experts / self.ranks - self._per_token) * self._mlp_matrix
        return self.params - self.model.num_layers * idle

    @property
    def layer(self) -> int:
        """All of a layer."""
        return self.layer_matrix + self.layer_vectors

    @property
    def root(self) -> int:
        """Parameters outside the layers: embedding, head and final norm."""
        head = 0 if self.model.tie_embeddings else self.head_matrix
        return head + self.embedding + (2 if self.model.layer_norm else 1) * self.model.hidden_size

    @property
    def whole(self) -> PlannedStage:
        """The only stage of a model that is not divided into several."""
        return PlannedStage(self.model.num_layers, is_first=True, is_last=True)

    def root_of(self, stage: PlannedStage) -> int:
        """Return the parameters of a stage outside of its layers; a tied head apart from the embedding is a copy."""
        if stage.is_first and stage.is_last:
            return self.root
        norm = (2 if self.model.layer_norm else 1) * self.model.hidden_size
        return stage.is_first * self.embedding + stage.is_last * (self.head_matrix + norm)

    def params_of(self, stage: PlannedStage) -> int:
        """Return all that the rank of a stage holds. Identity: of the whole model `params`."""
        return stage.layers * self.layer + self.root_of(stage)

    def served_bytes(self, precision: Precision, stage: PlannedStage | None = None) -> float:
        """Bytes of a version, or of a stage's part, at a generator's precision, as `models/quantized.py` stores it."""
        stage = stage or self.whole
        matrix, looked_up = BYTES[precision], 4 if precision == "float32" else 2
        table = 2 if precision in ("fp8", "mxfp4") else matrix
        scale = 4 if matrix == 1 else 0
        local, model = self.local, self.model
        rows = local.query_size + 2 * local.kv_size + local.hidden_size
        width = local.expert_width if local.num_experts else local.intermediate_size
        rows += self._num_mlps * ((2 if local.gated_mlp else 1) * width + local.hidden_size)
        layer = self.layer_matrix * matrix + rows * scale + self.layer_vectors * 4
        tables: float = 0
        if stage.is_first:
            tables = model.vocab_size * model.hidden_size * (table if model.tie_embeddings else looked_up)
        if stage.is_last and not (model.tie_embeddings and stage.is_first):
            tables += self.head_matrix * table
        if stage.is_first and model.rotary_dim == 0:
            tables += model.max_positions * model.hidden_size * 4
        norm = stage.is_last * (2 if model.layer_norm else 1) * model.hidden_size * 4
        return stage.layers * layer + tables + norm

    def kv_bytes(self, precision: Precision, layers: int | None = None) -> float:
        """Keys and values of one token in all layers, or in so many."""
        return 2 * (layers or self.model.num_layers) * self.local.kv_size * COMPUTED_BYTES[precision]

    @property
    def joins(self) -> int:
        """Sums over ranks in a layer's forward pass: after attention and after the MLP, or after both together."""
        return 1 if self.model.parallel_residual else 2

    @cached_property
    def kept_elements(self) -> float:
        """Activations per token and layer that a backward pass without recomputation keeps.

        The residual stream before either norm and behind it (4 hidden), queries, keys, values and what attention gives,
        and the MLP's inner width: gate, up, and their product. Of experts also what each gets and gives.
        """
        local = self.local
        experts = (self._per_token + local.experts_per_token) * local.hidden_size  # answers have a place on all ranks
        attention = 2 * local.query_size + 2 * local.kv_size + experts
        return 4 * local.hidden_size + attention + (3 if local.gated_mlp else 2) * self.inner

    def padded_elements(self, length: float) -> float:
        """Padded queries, keys, values and answers of attention in float32, per token and layer, for a backward pass.

        Where heads share keys, torch has no fused kernel: keys and values for all heads, and `length` probabilities.
        """
        local = self.local
        shares = local.num_heads > local.num_kv_heads
        return 4 * local.query_size + shares * local.num_heads * length

    @property
    def passing_elements(self) -> float:
        """Gradients per token that a layer's backward pass holds at once beside what the layer has kept: of the
        residual stream and norms, and of gate and up, while their product's has the memory of the product."""
        return 2 * self.local.hidden_size + (2 if self.local.gated_mlp else 1) * self.inner

    @cached_property
    def product_elements(self) -> float:
        """Activations per token and layer that recomputation keeps without `trainer.recompute_products`: what products
        and attention gave."""
        local = self.local
        experts = (self._per_token - 1) * local.hidden_size if local.num_experts else 0
        attention = 2 * local.query_size + 2 * local.kv_size + 2 * local.hidden_size + experts
        return attention + (2 if local.gated_mlp else 1) * self.inner

    @cached_property
    def moved_elements(self) -> float:
        """Activations per token and layer that a forward pass writes and reads again between its products."""
        local = self.local
        heads = 2 * (local.query_size + local.kv_size)  # rotation
        hidden = (6 + self._per_token + local.experts_per_token) * local.hidden_size
        return 2 * (hidden + heads + (3 if local.gated_mlp else 2) * self.inner)


@cache
def counts_of(model: TransformerConfig, ranks: int = 1) -> Counts:
    """Return the counts of a shape, made once: a search asks for the same ones thousands of times."""
    return Counts(model, ranks)


@dataclass(frozen=True)
class Adapters:
    """Adapters of low rank beside a model (docs/lora.md): the numbers of all A and B, `head_params` those of the head.

    `kernels` start in a decode step, over all layers: in a linear layer one for all A, one for each B, and one that
    adds. `table_params` take part in no product of a token: A of an embedding, and the experts that it does not go
    through (a decode step is taken to meet no more). `item` are the bytes of a number in a version, at every precision
    of the generators. With tensor parallelism every rank is taken to have all of them. `base` is the precision in which
    trainers hold the model beside them.
    """

    params: int
    head_params: int
    kernels: int
    table_params: int = 0
    item: int = 4
    base: Precision = "float32"

    @property
    def multiplied(self) -> int:
        """The numbers that take part in products."""
        return self.params - self.table_params

    @property
    def version_bytes(self) -> float:
        """Bytes of a version."""
        return float(self.item * self.params)


NO_ADAPTERS = Adapters(0, 0, 0)
EXPANDED = 2**24  # numbers of a stored base that are expanded at a time (`models/stored_base.py`)
HEAD = "lm_head"
_ATTENTION = "self_attn.q_proj+self_attn.k_proj+self_attn.v_proj self_attn.o_proj"
_LLAMA = f"model.layers {_ATTENTION} mlp.gate_proj+mlp.up_proj mlp.down_proj"
_LINEARS = {
    "gpt2": "transformer.h attn.c_attn attn.c_proj mlp.c_fc mlp.c_proj",
    "gpt_neox": "gpt_neox.layers attention.query_key_value attention.dense mlp.dense_h_to_4h mlp.dense_4h_to_h",
}
"""The names of a layer's matrices in the checkpoint, behind their prefix; with a plus: one linear layer here."""
_EXPERTS = ".mlp.experts."
_EMBEDDINGS = {"gpt2": "transformer.wte", "gpt_neox": "gpt_neox.embed_in"}


def adapters_of(
    model: TransformerConfig,
    rank: int,
    targets: Collection[str] = (),
    precision: Precision = "float32",
    base: Precision = "float32",
) -> Adapters:
    """Return the adapters of the matrices that `targets` mean, the ends of their names; of none, all but experts.

    ConfigError for a target that means none. Identity: those that `models/lora.py` makes.
    """
    every = [one for one in _matrices(model) if targets or _EXPERTS not in one[0]]
    allowed = list(dict.fromkeys(name.rpartition(".")[2] for name, *_ in every))
    wanted = [HEAD if target == "embed_out" else target for target in targets] or allowed[:-2]
    chosen = dict[str, tuple[str, int, int]]()
    for target in wanted:
        meant = {one[0]: one[1:] for one in every if f".{one[0]}".endswith(f".{target}")}
        if not meant:
            what = "model.lora.targets names no layer"
            raise ConfigError.unknown(what, target, allowed, got=target)
        chosen |= meant
    sizes = {name: rank * (columns + rows) for name, (_, columns, rows) in chosen.items()}
    kernels = len(chosen) + 2 * len({linear for linear, *_ in chosen.values()})
    idle = 1 - model.experts_per_token / max(model.num_experts, 1)
    tables = rank * model.vocab_size * (every[-1][0] in chosen)
    tables += round(idle * sum(size for name, size in sizes.items() if _EXPERTS in name))
    return Adapters(sum(sizes.values()), sizes.get(HEAD, 0), kernels, tables, int(BYTES[precision]), base)


def _matrices(model: TransformerConfig) -> Iterator[tuple[str, str, int, int]]:
    """Yield the matrices that may have an adapter: name, layer, columns, rows; head and embedding last.

    Columns and rows of all experts where they are joined.
    """
    prefix, *linears = _LINEARS.get(model.family, _LLAMA).split()
    hidden, inner, query, kv = model.hidden_size, model.intermediate_size, model.query_size, model.kv_size
    up = (inner,) * (1 + model.gated_mlp)
    sizes = ((hidden, (query, kv, kv)), (query, (hidden,)), (hidden, up), (inner, (hidden,)))
    for index in range(model.num_layers):
        for linear, (columns, rows) in zip(linears[: 2 if model.is_sparse(index) else 4], sizes, strict=False):
            names = linear.split("+")
            for name, num_rows in zip(names, rows if len(names) > 1 else (sum(rows),), strict=True):
                yield f"{prefix}.{index}.{name}", f"{index}.{linear}", columns, num_rows
        if model.is_sparse(index):
            width, joined = model.num_experts * model.expert_width, model.num_experts * hidden
            yield f"{prefix}.{index}{_EXPERTS}gate_up_proj", f"{index}.experts.up", joined, 2 * width
            yield f"{prefix}.{index}{_EXPERTS}down_proj", f"{index}.experts.down", width, joined
    yield HEAD, HEAD, hidden, model.vocab_size
    name = _EMBEDDINGS.get(model.family, "model.embed_tokens")
    yield name, name, model.vocab_size, hidden
