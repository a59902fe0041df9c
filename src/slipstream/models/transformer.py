"""One decoder for every family, shared by trainer and generator: the same code, so the same log-probabilities.

Tokens of all sequences lie end to end in one dimension [N]; which of them may look at which is the business of the
`Attention` that the caller hands in (`PackedAttention` in the trainer, the key-value slots in the engine). How the
model is divided over processes is the business of its `Ranks`: `OneRank` here, or `tensor_parallel.TensorParallel`.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from slipstream.core.rank_group import RankGroup
from slipstream.models.compute_copy import ComputeCopy
from slipstream.models.config import TransformerConfig
from slipstream.models.expert_parallel import ExpertShare
from slipstream.models.experts import Experts
from slipstream.models.layer_functions import RotateHeads, gated, is_fused
from slipstream.models.linear import Embedding, Linear, find_onednn, linear
from slipstream.models.packed import MicrobatchReader, OneReader
from slipstream.models.stages import Stage

if TYPE_CHECKING:
    from slipstream.models.stage_passes import StagePasses

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class Attention(Protocol):
    """Scaled dot-product attention of one layer; decides what each token sees and keeps whatever cache it needs."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [N, H, D], k and v [N, Hkv, D], both rotated already -> [N, H, D]; the scale is D ** -0.5.

        Or [M, H, D] of the first M tokens, where nobody needs the others: the layer goes on without them.
        """
        ...

    def route(self, layer: int, chosen: Tensor) -> Tensor:
        """Experts that a router chose, int64 [N, k] -> those to go through: recorded ones, or the same, recorded."""
        ...


class Ranks(Protocol):
    """How a model lies on several ranks, each with a share of the heads, the MLP's inner width and the vocabulary."""

    counts_once: bool
    """Whether this rank has what must be counted once of a sum over ranks: the biases of `output` and `down`, and the
    gradient of looking up a tied embedding. One rank does."""
    first_row: int
    """The first of this rank's rows of the head."""

    def vocab_rows(self, vocab_size: int) -> range:
        """The rows of the head that this rank multiplies by."""
        ...

    def experts(self, num_experts: int) -> ExpertShare | None:
        """The experts of this rank in a layer that has so many; None: all of them."""
        ...

    def fork(self, x: Tensor) -> Tensor:
        """x, alike on all ranks, before each takes its share of the work: its gradients are summed over ranks."""
        ...

    def join(self, x: Tensor, *branches: Tensor) -> Tensor:
        """x [N, hidden] plus all branches [N, hidden], each of which is a share of a sum over ranks."""
        ...

    def sum(self, share: Tensor) -> Tensor:
        """The sum over ranks of each element, the same bits on every rank; consumes `share`. No gradient passes."""
        ...

    def max(self, share: Tensor) -> Tensor:
        """The largest over ranks of each element; consumes `share`. No gradient passes."""
        ...

    def local_vocab(self, weight: Tensor) -> Tensor:
        """`vocab_rows` of a weight [V, hidden] that this rank holds whole."""
        ...

    def gather_vocab(self, logits: Tensor) -> Tensor:
        """All logits [..., V] from this rank's [..., number of `vocab_rows`]; the same bits on every rank."""
        ...


class Base(Protocol):
    """The matrices that a frozen model computes with instead of parameters of its own (`stored_base.StoredBase`)."""

    @property
    def digest(self) -> str:
        """The SHA-256 of the numbers before they were rounded."""
        ...

    def head(self, hidden: Tensor, rows: Callable[[Tensor], Tensor]) -> Tensor:
        """fp32 products [..., V] of hidden [..., hidden] with the head's weights, or `rows` of those it is tied to."""
        ...

    def put_into(self, model: Transformer) -> None:
        """Let `model` compute with these matrices."""
        ...


class OneRank:
    """The whole model in one process: there is nothing to sum and nothing to gather. Only experts may be divided, over
    ranks that `exchange` tokens.
    """

    counts_once, first_row = True, 0

    def __init__(self, exchange: RankGroup = RankGroup.alone()) -> None:
        self._exchange = exchange

    def vocab_rows(self, vocab_size: int) -> range:
        return range(vocab_size)

    def experts(self, num_experts: int) -> ExpertShare | None:
        return ExpertShare.of(num_experts, exchange=self._exchange)

    def fork(self, x: Tensor) -> Tensor:
        return x

    def join(self, x: Tensor, *branches: Tensor) -> Tensor:
        for branch in branches:
            x = x + branch
        return x

    def sum(self, share: Tensor) -> Tensor:
        return share

    def max(self, share: Tensor) -> Tensor:
        return share

    def local_vocab(self, weight: Tensor) -> Tensor:
        return weight

    def gather_vocab(self, logits: Tensor) -> Tensor:
        return logits


def rope_frequencies(config: TransformerConfig) -> Tensor:
    """Angular frequencies [rotary_dim / 2] in radians per token: theta ** (-2 i / rotary_dim).

    Su et al. (arXiv:2104.09864), section 3.2.2; with `rope_scaling`, Llama 3.1's: wavelengths beyond
    original_max_positions / low_freq_factor are stretched by `factor`, those below original_max_positions /
    high_freq_factor stay, the ones between are interpolated.
    """
    exponent = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / max(config.rotary_dim, 1)
    frequency = 1.0 / (config.rope_theta**exponent)
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    turns = scaling.original_max_positions * frequency / (2 * math.pi)  # full turns over the original context
    kept = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return (1 - kept) * frequency / scaling.factor + kept * frequency


def rope_tables(config: TransformerConfig) -> tuple[Tensor, Tensor]:
    """cos and signed sin, each [max_positions, rotary_dim] fp32, as `rotate` takes them; on `meta` without values.

    There the first product would import sympy and torch's decompositions, for seconds.
    """
    if torch.get_default_device().type == "meta":
        shape = (config.max_positions, config.rotary_dim)
        return torch.empty(shape, dtype=torch.float32), torch.empty(shape, dtype=torch.float32)
    angle = torch.arange(config.max_positions, dtype=torch.float32)[:, None] * rope_frequencies(config)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotate the pairs (x_i, x_{i+R/2}) of the first R dimensions of each head by their position's angle.

        y = x * cos + (x_{i+R/2}, x_i) * (-sin, sin)

    x [N, H, D]; cos, signed_sin [N, 1, R]. Heads wider than R pass their other dimensions through.
    """
    rotary_dim = cos.shape[-1]
    if rotary_dim < x.shape[-1]:
        return torch.cat((rotate(x[..., :rotary_dim], cos, signed_sin), x[..., rotary_dim:]), -1)
    return torch.addcmul(x * cos, x.roll(rotary_dim // 2, -1), signed_sin)


def _embedding(rows: int, width: int) -> Embedding:
    embedding: Embedding = Embedding.from_pretrained(torch.empty(rows, width, dtype=torch.float32), freeze=False)  # type: ignore[no-untyped-call]
    return embedding


def _norm(config: TransformerConfig, size: int) -> nn.Module:
    norm = nn.LayerNorm if config.layer_norm else nn.RMSNorm
    return norm(size, config.norm_eps, dtype=torch.float32)


@cache
def product_operators() -> list[Any]:
    """Return torch's operators of products and attention, as far as this torch has them."""
    names = ["mm", "addmm", "bmm", "_grouped_mm"]
    names += [f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")]
    names += ["_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_attention_math"]
    found = [getattr(torch.ops.aten, name).default for name in names if hasattr(torch.ops.aten, name)]
    if (onednn := find_onednn()) is not None:
        found.append(onednn.default)
    if importlib.util.find_spec("torch.nn.attention.varlen") is not None:
        importlib.import_module("torch.nn.attention.varlen")
        found.append(torch.ops.torch_attn._varlen_attn.default)
    return found


def keeping_products() -> Any:
    """Return the two contexts of a layer that runs again: what products and attention gave is not computed again."""
    return create_selective_checkpoint_contexts(product_operators())  # type: ignore[no-untyped-call]


class Layer(nn.Module):
    """Attention and MLP around the residual stream. `qkv` stacks the rows of q, k, v; `up` those of gate and up.

    In a sparse layer `experts` stands in for `up` and `down`.

    `config` counts the heads and the inner width of this rank; `output` and `mlp` give its share of a sum over ranks.
    """

    def __init__(self, config: TransformerConfig, index: int, ranks: Ranks) -> None:
        super().__init__()
        self.config, self.index, self.ranks = config, index, ranks
        hidden, inner = config.hidden_size, config.intermediate_size
        self.attention_norm = _norm(config, hidden)
        self.qkv = Linear(hidden, config.query_size + 2 * config.kv_size, config.qkv_bias)
        self.output = Linear(config.query_size, hidden, config.output_bias and ranks.counts_once)
        if config.qk_norm:
            self.q_norm = _norm(config, config.head_dim)
            self.k_norm = _norm(config, config.head_dim)
        self.mlp_norm = _norm(config, hidden)
        self.activation = ACTIVATIONS[config.activation]
        self.is_sparse = config.is_sparse(index)
        if self.is_sparse:
            self.experts = Experts(config, self.activation, ranks.experts(config.num_experts))
        else:
            self.up = Linear(hidden, 2 * inner if config.gated_mlp else inner, config.mlp_bias)
            self.down = Linear(inner, hidden, config.mlp_bias and ranks.counts_once)
        self.recomputes = False  # whether the backward pass runs the layer again, instead of keeping what is in it
        self.keeps_products = False  # whether it then has the results of products and attention

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, attention: Attention) -> Tensor:
        """x [N, hidden] -> [N, hidden], or what `attention` leaves of it; rope is (cos, signed sin), each
        [N, 1, rotary_dim], or None."""
        if self.recomputes and torch.is_grad_enabled():
            context_fn = keeping_products if self.keeps_products else noop_context_fn
            out: Tensor = checkpoint(self._forward, x, rope, attention, use_reentrant=False, context_fn=context_fn)
            return out
        return self._forward(x, rope, attention)

    def compile_parts(self, backend: str) -> None:
        """Compile what is before attention, and without experts what is behind it, for any number of tokens."""
        self._enter = torch.compile(self._enter, dynamic=True, backend=backend)  # type: ignore[method-assign]
        if not self.is_sparse:
            self._leave = torch.compile(self._leave, dynamic=True, backend=backend)  # type: ignore[method-assign]

    def _forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, attention: Attention) -> Tensor:
        mixed = attention(self.index, *self._enter(x, rope))
        if len(mixed) < len(x):
            x = x[: len(mixed)]
        return self._leave(x, mixed, attention if self.is_sparse else None)

    def _enter(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        return self.project(self.attention_norm(x), rope)

    def _leave(self, x: Tensor, mixed: Tensor, attention: Attention | None) -> Tensor:
        """Residual stream x [N, hidden] and what attention mixed [N, H, D] -> the stream behind the layer."""
        join, attended = self.ranks.join, self.output(mixed.reshape(-1, self.config.query_size))
        if self.config.parallel_residual:
            return join(x, attended, self.mlp(self.mlp_norm(x), attention))
        x = join(x, attended)
        return join(x, self.mlp(self.mlp_norm(x), attention))

    def project(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [N, H, D] and keys [N, Hkv, D], and values [N, Hkv, D], of normalised x [N, hidden]."""
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        qkv = self.qkv(self.ranks.fork(x)).view(-1, heads + 2 * kv_heads, self.config.head_dim)
        if self.config.qk_norm:
            q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
            qkv = torch.cat((self.q_norm(q), self.k_norm(k), v), 1)
        if rope is not None and is_fused(qkv):
            rotated: tuple[Tensor, Tensor, Tensor] = RotateHeads.apply(qkv, *rope, kv_heads)  # type: ignore[no-untyped-call]
            return rotated
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if rope is not None:
            qk = rotate(qk, *rope)
        return qk[:, :heads], qk[:, heads:], v

    def mlp(self, x: Tensor, attention: Attention | None = None) -> Tensor:
        """Position-wise MLP, or mixture of experts, of normalised x [N, hidden] -> [N, hidden]."""
        x = self.ranks.fork(x)
        if self.is_sparse:
            mixed: Tensor = self.experts(x, None if attention is None else partial(attention.route, self.index))
            return mixed
        if self.config.gated_mlp:
            inner = gated(self.activation, self.up(x))
        else:
            inner = self.activation(self.up(x))
        out: Tensor = self.down(inner)
        return out


class Transformer(nn.Module):
    """A causal decoder: embedding, layers, final norm; `logits` is the head, tied to the embedding or not.

    A tied head has no parameter of its own, so `parameters()` lists every weight exactly once. `config` counts the
    heads and inner width of this rank, and the whole vocabulary and all layers; a pipeline `stage` has some of them.
    """

    cos: Tensor
    signed_sin: Tensor

    def __init__(self, config: TransformerConfig, ranks: Ranks = OneRank(), stage: Stage = Stage()) -> None:
        super().__init__()
        self.config, self.ranks, self.stage = config, ranks, stage
        self.has_embedding = stage.is_first or (stage.is_last and config.tie_embeddings)
        if self.has_embedding:
            self.embedding = _embedding(config.vocab_size, config.hidden_size)
        if stage.is_first and config.rotary_dim == 0:
            self.position_embedding = _embedding(config.max_positions, config.hidden_size)
        layers = nn.ModuleList()
        for index in stage.layers(config.num_layers):
            layers.add_module(str(index), Layer(config, index, ranks))
        self.layers = cast("list[Layer]", layers)
        if stage.is_last:
            self.final_norm = _norm(config, config.hidden_size)
        if stage.is_last and not config.tie_embeddings:
            self.head = Linear(config.hidden_size, len(ranks.vocab_rows(config.vocab_size)), bias=False)
        self.served_head: Callable[[Tensor], Tensor] | None = None  # what `served.py` or `lora.py` put in place
        self.stored_base: Base | None = None
        self.compute_copy: ComputeCopy | None = None  # what `sharded.divide` puts in the parameters' places
        self.passes: StagePasses | None = None  # what `sharded.divide` gives a stage: passes run through all of them
        self.max_logits: int | None = None  # that are held at once; None: `config.MAX_LOGITS` of the device
        self.varlen = True  # whether packed sequences go to `attention.flash` where that is right
        self.reader: MicrobatchReader = OneReader()  # which rows of a microbatch are read here
        cos, signed_sin = rope_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("signed_sin", signed_sin, persistent=False)

    def forward(
        self, tokens: Tensor, positions: Tensor, attention: Attention, stream: Tensor | None = None, chunk: int = 0
    ) -> Tensor:
        """Tokens [N] int64 at positions [N] int64 of their sequences -> states [N, hidden] after the final norm.

        A stage runs one `chunk` of its layers, from the residual `stream` [N, hidden] of the chunk before it, and gives
        the stream behind them; the last chunk gives the states.
        """
        x, rope = self._embed(tokens, positions, stream)
        is_whole, own = self.stage.num_chunks == 1, self.stage.layers_of(chunk, self.config.num_layers)
        for layer in self.layers if is_whole else [layer for layer in self.layers if layer.index in own]:
            x = layer(x, rope, attention)
        out: Tensor = self.final_norm(x) if chunk == self.stage.num_chunks - 1 else x
        return out

    def prefill(self, tokens: Tensor, positions: Tensor, attention: Attention, stream: Tensor | None = None) -> None:
        """`forward` for a caller who wants keys and values only: ends as `attention` has got the last layer's."""
        x, rope = self._embed(tokens, positions, stream)
        *before, last = self.layers
        for layer in before:
            x = layer(x, rope, attention)
        attention(last.index, *last.project(last.attention_norm(x), rope))

    def _embed(
        self, tokens: Tensor, positions: Tensor, stream: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """The residual stream's start [N, hidden], unless it has one, and what rotates queries and keys in layers."""
        x: Tensor = self.embedding(tokens) if stream is None else stream
        is_tied = stream is None and self.config.tie_embeddings
        if is_tied and not self.ranks.counts_once and x.requires_grad and self.embedding.is_trained:
            x = x.detach()
        if self.config.rotary_dim == 0:
            return x + self.position_embedding(positions) if stream is None else x, None
        cos, signed_sin = self.cos[positions], self.signed_sin[positions]
        return x, (cos[:, None].to(x.dtype), signed_sin[:, None].to(x.dtype))

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [..., V] of hidden states [..., hidden], computed in fp32 unless `served_head` does otherwise."""
        product = self.head_product if self.served_head is None else self.served_head
        return self.ranks.gather_vocab(product(self.ranks.fork(hidden.float())))

    @property
    def head_weight(self) -> Tensor | None:
        """The matrix [V, hidden] that logits are the product with, this rank's rows of it, after a `forward` that has
        gathered it. None where adapters or other precisions take part.
        """
        if self.served_head is not None or self.stored_base is not None:
            return None
        return self._own_head()

    def _own_head(self) -> Tensor:
        tied = self.config.tie_embeddings
        weight: Tensor = self.ranks.local_vocab(self.embedding.weight) if tied else self.head.weight
        return weight

    def head_product(self, hidden: Tensor) -> Tensor:
        """fp32 products [..., vocabulary rows of this rank] of hidden [..., hidden] with the head's own weights."""
        if self.stored_base is not None:
            return self.stored_base.head(hidden, self.ranks.local_vocab)
        return linear(hidden, self._own_head().float())
