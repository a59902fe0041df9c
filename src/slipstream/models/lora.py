"""Adapters of low rank beside a frozen decoder, the same function in trainer and engine, never merged.

    y = W x + b,   and on the rows of each adapted matrix p within it:   y_p += s B_p A_p x
    y_t = E_t,     and where the embedding of tokens is adapted:         y_t += s B A_{:,t}
    and of the experts of a mixture, each with an A and a B of its own:  y_p += s B_e A_e x_p for a row p of expert e

Hu et al. (arXiv:2106.09685), section 4.1; s = alpha / r, or alpha / sqrt(r) (rsLoRA, arXiv:2312.03732). The matrices
that are adapted are those of the checkpoint (q, k and v are rows of one `Linear` here), by the names that PEFT gives
them. The A's of one linear layer are stacked, so that one product gives all of them. At the precision bfloat16 both
sides compute with A and B rounded to it, which is what a version has; the trainer updates float32 ones.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.core.errors import ConfigError
from slipstream.core.lora_section import AdapterPrecision
from slipstream.models.config import TransformerConfig
from slipstream.models.experts import ExpertsLinear, Groups, grouped_product
from slipstream.models.layout import LogicalTensor, layout
from slipstream.models.linear import Embedding, Linear, linear
from slipstream.models.transformer import OneRank, Ranks, Transformer

Product = Callable[[Tensor], Tensor]
Raising = Callable[[Tensor, Tensor | None], Tensor]
GroupedProduct = Callable[[Tensor, Groups], Tensor]
HEAD = "head"
"""The head among linear layers, tied or not."""
HEAD_NAME, OLD_HEAD_NAME = "lm_head", "embed_out"
"""The head as transformers calls it, and called it in GPT-NeoX, whose files still do."""
EMBEDDING = "embedding"
"""The embedding of tokens among layers that may have an adapter; a head that is tied to it has none of this one."""


@dataclass(frozen=True)
class Piece:
    """A matrix of the checkpoint within a linear layer, `name` without '.weight': its rows, in the file's order.

    They are the layer's rows start + sum_d index[d] strides[d], for all indices over `sizes`, the last one fastest.
    `stacked` and `unit` say how several ranks divide them (`layout.LogicalTensor`). Of the joined matrices of
    `num_experts` experts the rows are those of one.
    """

    name: str
    start: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    stacked: int = 1
    unit: int = 1
    num_experts: int = 0

    @property
    def num_rows(self) -> int:
        return math.prod(self.sizes)

    @property
    def target(self) -> str:
        """Its name within its layer, as PEFT's `target_modules` has it."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class Fused:
    """A linear layer [out_features, in_features] and the matrices that its rows are, ascending.

    The embedding of tokens is one from one-hot vectors.
    """

    in_features: int
    out_features: int
    pieces: tuple[Piece, ...]


@functools.cache
def linear_layers(config: TransformerConfig) -> Mapping[str, Fused]:
    """Return every layer of a whole model that may have an adapter, by its name in it; the head and embedding last."""
    return layers_of(config, OneRank())


def layers_of(config: TransformerConfig, ranks: Ranks) -> dict[str, Fused]:
    """`linear_layers` of one rank's part of a model, whose own config is `config`."""
    with torch.device("meta"):
        model = Transformer(config, ranks)
    linears = {
        module.weight.untyped_storage()._cdata: (name, module)
        for name, module in model.named_modules()
        if isinstance(module, Linear)
    }
    pieces: dict[str, list[Piece]] = defaultdict(list)
    tensors = layout(model)
    for tensor in tensors:
        owner = linears.get(tensor.view.untyped_storage()._cdata)
        if owner is not None and tensor.name.endswith(".weight") and not isinstance(owner[1], ExpertsLinear):
            pieces[owner[0]].append(_piece(tensor, owner[1].in_features))
    found = {}
    for name, module in linears.values():
        out_features = module.out_features
        if isinstance(module, ExpertsLinear):
            out_features //= module.num_experts
            piece = Piece(_joined_name(name), 0, (out_features,), (1,), num_experts=module.num_experts)
            pieces[name] = [piece]
        found[name] = Fused(module.in_features, out_features, tuple(pieces[name]))
    rows = len(ranks.vocab_rows(config.vocab_size))
    found[HEAD] = Fused(config.hidden_size, rows, (Piece(HEAD_NAME, 0, (rows,), (1,)),))
    piece = Piece(tensors[0].name.removesuffix(".weight"), 0, (config.hidden_size,), (1,))
    found[EMBEDDING] = Fused(config.vocab_size, config.hidden_size, (piece,))
    return found


def _joined_name(layer: str) -> str:
    """Return what transformers calls the parameter in which it joins the experts' matrices `layer` of all families."""
    experts, _, attribute = layer.rpartition(".experts.")
    return f"model.{experts}.mlp.experts.{'gate_up_proj' if attribute == 'up' else 'down_proj'}"


def _piece(tensor: LogicalTensor, in_features: int) -> Piece:
    """Return the rows that the tensor's view has of a layer's weight: all of its dimensions but that over columns."""
    view = tensor.view
    columns = max(axis for axis in range(view.ndim) if view.stride(axis) == 1 and view.shape[axis] == in_features)
    rows = [axis for axis in range(view.ndim) if axis != columns]
    return Piece(
        tensor.name.removesuffix(".weight"),
        view.storage_offset() // in_features,
        tuple(view.shape[axis] for axis in rows),
        tuple(view.stride(axis) // in_features for axis in rows),
        tensor.stacked,
        tensor.unit,
    )


@dataclass(frozen=True)
class AdapterShape:
    """The adapter of a linear layer: of its `pieces`, ascending, each with A [rank, in_features] and B [rows, rank].

    That of E experts' joined matrices has A [E rank, in_features], expert behind expert, and B [rows, rank E], in which
    an expert has every E-th column: so they lie in PEFT's files. One that `looks_up` gets tokens, A's columns.
    `precision` is that of the numbers that both sides compute with.
    """

    in_features: int
    out_features: int
    pieces: tuple[Piece, ...]
    rank: int
    alpha: float
    use_rslora: bool = False
    looks_up: bool = False
    precision: AdapterPrecision = "float32"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bfloat16" else torch.float32

    def rounded(self, values: Tensor) -> Tensor:
        """Return the numbers of A or B that are computed with, whose gradient is that of `values`."""
        if self.precision == "float32":
            return values
        return values + (values.to(self.dtype) - values).detach()  # without rounding: the two differ by few bits

    @property
    def scaling(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

    @cached_property
    def rows(self) -> list[int]:
        return [piece.num_rows for piece in self.pieces]

    @property
    def num_experts(self) -> int:
        return self.pieces[0].num_experts

    @property
    def width(self) -> int:
        """The rows of A of a piece, and the columns of B: `rank`, for each expert."""
        return self.rank * max(self.num_experts, 1)

    def of_experts(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return A [E, rank, in_features] and B [E, rows, rank] of the experts."""
        count, rank = self.num_experts, a.shape[0] // self.num_experts
        return a.view(count, rank, -1), b.view(-1, rank, count).permute(2, 0, 1)

    @property
    def num_params(self) -> int:
        return self.width * (len(self.pieces) * self.in_features + sum(self.rows))

    def slices(self, out: Tensor) -> Iterator[Tensor]:
        """Yield the columns of `out` [..., out_features] that are the pieces'."""
        return (out.narrow(-1, piece.start, piece.num_rows) for piece in self.pieces)


class _Added(torch.autograd.Function):
    """Sums into the pieces' slices, whose gradients are views: autograd's own copies all of them for every slice."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, shape: AdapterShape, *parts: Tensor) -> Tensor:
        ctx.shape = shape
        ctx.mark_dirty(out)
        for own, part in zip(shape.slices(out), parts, strict=True):
            own.add_(part)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, *ctx.shape.slices(grad)


@dataclass(eq=False)
class OwnVersion:
    """Which of K versions each row of a pass is of: `scale` [N, K rank], s at its own version's places, 0 elsewhere."""

    scale: Tensor


def adapted_product(
    x: Tensor,
    *,
    base: Product,
    down: Product,
    up: Sequence[Raising],
    shape: AdapterShape,
    own: OwnVersion | None = None,
) -> Tensor:
    """Return the adapted layer's y [N, out_features] of x [N, in_features], or of tokens [N]; see above.

    `base` multiplies by W and adds b, `down` by all A's, each of `up` by one B, the product returned or, without
    gradients, added to what it is given: whatever way the caller multiplies.
    With `own` each A and B is K versions' (`stacked_adapter`), and all but each row's own one are masked: exact zeros.
    Identity: B = 0 gives what `base` gives.
    """
    scale = shape.scaling if own is None else own.scale[: len(x), None]
    low = (down(x).unflatten(-1, (len(shape.pieces), -1)) * scale).unbind(-2)  # type: ignore[no-untyped-call]
    out = base(x)
    if not torch.is_grad_enabled():
        for product, part, into in zip(up, low, shape.slices(out), strict=True):
            product(part, into)
        return out
    # oneDNN takes the gradient of a product with strided rows 50 times as long
    parts = [product(part.contiguous(), None) for product, part in zip(up, low, strict=True)]
    return _Added.apply(out, shape, *parts)  # type: ignore[no-any-return, no-untyped-call]


def adapted_experts(
    x: Tensor,
    groups: Groups,
    *,
    base: GroupedProduct,
    down: GroupedProduct,
    up: GroupedProduct,
    shape: AdapterShape,
    own: OwnVersion | None = None,
) -> Tensor:
    """`adapted_product` of rows x [P, in_features] sorted by expert, whose A's and B's are their experts'."""
    scale = shape.scaling if own is None else own.scale.index_select(0, groups.source)
    return base(x, groups) + up(down(x, groups) * scale, groups)


def stacked_experts(shape: AdapterShape, versions: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return A [E, K rank, in_features] and B [E, rows, K rank] of K `versions` of an adapter of experts."""
    each = [shape.of_experts(a, b) for a, b in versions]
    return torch.cat([a for a, _ in each], 1), torch.cat([b for _, b in each], 2)


def stacked_adapter(shape: AdapterShape, versions: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the A's and B's of K `versions` of one adapter as `adapted_product` takes them with `own`.

    A [num_pieces K rank, in_features], every piece's K versions together; B [rows of all pieces, K rank].
    """
    a = torch.stack([a.view(len(shape.pieces), shape.rank, -1) for a, _ in versions], 1)
    return a.flatten(0, 2), torch.cat([b for _, b in versions], 1)


def rows_of(table: Tensor) -> Product:
    """Return the product of one-hot vectors with `table` [V, K]: tokens int64 [N] -> [N, K]."""
    return partial(F.embedding, weight=table)


def _raised(low: Tensor, out: Tensor | None, *, weight: Tensor) -> Tensor:
    product = linear(low.contiguous(), weight)
    return product if out is None else out.add_(product)


class Adapter(nn.Module):
    """The trained part of a linear layer: `a` [num_pieces rank, in_features] and `b` [rows of all pieces, rank]."""

    def __init__(self, shape: AdapterShape) -> None:
        super().__init__()
        self.shape = shape
        self.a = nn.Parameter(torch.empty(len(shape.pieces) * shape.width, shape.in_features, dtype=torch.float32))
        self.b = nn.Parameter(torch.empty(sum(shape.rows), shape.width, dtype=torch.float32))

    def forward(self, x: Tensor, base: Product) -> Tensor:
        """Add to `base`(x), of x [N, in_features] -> [N, out_features]; products are in the precision of x, if any."""
        a, b = self.shape.rounded(self.a), self.shape.rounded(self.b)
        if not self.shape.looks_up:
            a, b = a.to(x.dtype), b.to(x.dtype)
        down = rows_of(a.t()) if self.shape.looks_up else partial(linear, weight=a)
        up = [partial(_raised, weight=rows) for rows in torch.split(b, self.shape.rows)]
        return adapted_product(x, base=base, down=down, up=up, shape=self.shape)

    def of_groups(self, x: Tensor, groups: Groups, base: GroupedProduct) -> Tensor:
        """`forward` of rows x [P, in_features] sorted by expert -> [P, out_features of one]."""
        a, b = self.shape.rounded(self.a).to(x.dtype), self.shape.rounded(self.b).to(x.dtype)
        down, up = (partial(grouped_product, weight=one.contiguous()) for one in self.shape.of_experts(a, b))
        return adapted_experts(x, groups, base=base, down=down, up=up, shape=self.shape)


class AdaptedLinear(Linear):
    """A `Linear` over the weights of `base`, with an adapter beside them."""

    def __init__(self, base: Linear, adapter: Adapter) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.adapter = base.weight, adapter
        self.register_parameter("bias", base.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [N, in_features] -> [N, out_features]."""
        out: Tensor = self.adapter(x, super().forward)
        return out


class AdaptedExperts(ExpertsLinear):
    """An `ExpertsLinear` over the weights of `base`, with an adapter of every expert beside them."""

    def __init__(self, base: ExpertsLinear, adapter: Adapter) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.num_experts = base.in_features, base.out_features, base.num_experts
        self.weight, self.adapter = base.weight, adapter
        self.register_parameter("bias", None)

    def forward(self, x: Tensor, groups: Groups) -> Tensor:  # type: ignore[override]
        """x [P, in_features], sorted by expert -> [P, out_features of one]."""
        return self.adapter.of_groups(x, groups, super().forward)


class AdaptedEmbedding(Embedding):
    """An `Embedding` over the weights of `base`, with an adapter beside them."""

    is_trained = False

    def __init__(self, base: Embedding, adapter: Adapter) -> None:
        nn.Module.__init__(self)
        for name in base.__constants__:
            setattr(self, name, getattr(base, name))
        self.weight, self.adapter = base.weight, adapter

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens int64 [N] -> [N, embedding_dim]."""
        out: Tensor = self.adapter(tokens, super().forward)
        return out


# Adapters of a model


def shapes_of(model: nn.Module) -> dict[str, AdapterShape]:
    """Return the adapters of a model by the names of their linear layers; none if all weights are trained."""
    modules = model.named_modules()
    return {name.removesuffix(".adapter"): module.shape for name, module in modules if isinstance(module, Adapter)}


def precision_of(shapes: Mapping[str, AdapterShape]) -> AdapterPrecision:
    """Return the precision of the adapters, which all have one."""
    return next(iter(shapes.values())).precision


def resized(shapes: Mapping[str, AdapterShape], layers: Mapping[str, Fused]) -> dict[str, AdapterShape]:
    """Return the adapters of `shapes` beside `layers` of the same names: one rank's of a whole model's, or back."""
    found = {}
    for name, shape in shapes.items():
        layer, names = layers[name], {piece.name for piece in shape.pieces}
        pieces = tuple(piece for piece in layer.pieces if piece.name in names)
        found[name] = replace(shape, in_features=layer.in_features, out_features=layer.out_features, pieces=pieces)
    return found


def install(model: Transformer, shapes: Mapping[str, AdapterShape]) -> Transformer:
    """Put uninitialised adapters into `model`, freeze all else, and return it.

    `shapes` may be those of the whole model that `model` is a rank's part of; FSDP2 must not have divided it yet.
    """
    model.requires_grad_(False)
    layers = layers_of(model.config, model.ranks) if shapes else {}
    for name, shape in resized(shapes, layers).items():
        with model.cos.device:
            adapter = Adapter(shape)
        if name == HEAD:  # `logits` multiplies by its weights itself
            if model.config.tie_embeddings:
                model.add_module(HEAD, nn.Module())
            model.get_submodule(HEAD).add_module("adapter", adapter)
            model.served_head = partial(adapter, base=model.head_product)
        elif name == EMBEDDING:
            model.embedding = AdaptedEmbedding(model.embedding, adapter)
        else:
            parent, _, attribute = name.rpartition(".")
            owner = model.get_submodule(parent)
            layer = owner.get_submodule(attribute)
            assert isinstance(layer, Linear), "linear_layers has named it"
            if isinstance(layer, ExpertsLinear):
                setattr(owner, attribute, AdaptedExperts(layer, adapter))
            else:
                setattr(owner, attribute, AdaptedLinear(layer, adapter))
    return model


def base_of(
    model: Transformer,
    shapes: Mapping[str, AdapterShape] | None = None,
    divide: Callable[[Transformer], None] | None = None,
) -> Transformer:
    """Return `model` without its adapters, over the same tensors; with `shapes` there are other ones, uninitialised.

    `divide` cuts what is returned, which lies on "meta", as `model` was cut.
    """
    with torch.device("meta"):
        base = Transformer(model.config, model.ranks)
    names = [name for name, _ in base.named_parameters()]
    base.cos, base.signed_sin, base.reader = model.cos, model.signed_sin, model.reader
    install(base, shapes or {})
    if divide is not None:
        divide(base)
    parameters = dict(model.named_parameters())
    for name in filter(parameters.__contains__, names):
        owner, _, attribute = name.rpartition(".")
        setattr(base.get_submodule(owner), attribute, nn.Parameter(parameters[name].detach(), requires_grad=False))
    if model.stored_base is not None:
        model.stored_base.put_into(base)
    return base


def drawn_adapter(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return the start of the whole tensor `name`: B is 0, A uniform in 1/sqrt(in_features), as PEFT's.

    Of an embedding A is 0, B normal. What is drawn depends on `seed` and the tensor's own name alone. The global
    random state is left alone.
    """
    if name.endswith((B_SUFFIX, EMBEDDING_A)):
        return torch.zeros(shape, dtype=torch.float32)
    key = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "little"))
    if name.endswith(EMBEDDING_B):
        return torch.randn(shape, generator=generator, dtype=torch.float32)
    bound = 1 / math.sqrt(shape[1])
    return (2 * torch.rand(shape, generator=generator, dtype=torch.float32) - 1) * bound


@torch.no_grad()
def merged(model: Transformer) -> Transformer:
    """Return a model without adapters that computes what `model` does: W + s B A in place of W, up to rounding.

    A tied head is tied no longer where it or the embedding has an adapter.
    """
    shapes, tensors = shapes_of(model), dict(model.named_parameters())
    tied = model.config.tie_embeddings and not shapes.keys() & {HEAD, EMBEDDING}
    whole = Transformer(replace(model.config, tie_embeddings=tied))
    for name, parameter in whole.named_parameters():
        source = "embedding.weight" if name == "head.weight" and model.config.tie_embeddings else name
        parameter.copy_(tensors[source])
    weights = dict(whole.named_parameters())
    for name, shape in shapes.items():
        weight = weights[f"{name}.weight"].t() if shape.looks_up else weights[f"{name}.weight"]
        a, b = (shape.rounded(tensors[f"{name}.adapter.{which}"]) for which in "ab")
        if shape.num_experts:
            down, up = shape.of_experts(a, b)
            weight.add_(shape.scaling * (up @ down).flatten(0, 1))
            continue
        for piece, down, up in zip(shape.pieces, torch.split(a, shape.rank), torch.split(b, shape.rows), strict=True):
            weight[piece.start : piece.start + piece.num_rows] += shape.scaling * (up @ down)
    return whole


# Adapters of a checkpoint

A_SUFFIX, B_SUFFIX = ".lora_A.weight", ".lora_B.weight"
EMBEDDING_A, EMBEDDING_B = ".lora_embedding_A", ".lora_embedding_B"


def adapter_tensors(
    shapes: Mapping[str, AdapterShape], parameters: Mapping[str, Tensor]
) -> Iterator[tuple[str, LogicalTensor]]:
    """Yield A and B of every piece as PEFT's files have them, and the name of the parameter that each is a view of."""
    for layer, shape in shapes.items():
        a, b = (parameters[f"{layer}.adapter.{which}"].detach() for which in "ab")
        suffixes = (EMBEDDING_A, EMBEDDING_B) if shape.looks_up else (A_SUFFIX, B_SUFFIX)
        pieces = zip(shape.pieces, torch.split(a, shape.width), torch.split(b, shape.rows), strict=True)
        for piece, down, rows in pieces:
            name = _wrapper(piece.name, layer, shapes) if shape.num_experts else piece.name
            yield f"{layer}.adapter.a", LogicalTensor(name + suffixes[0], down, tuple(down.shape))
            strides = tuple(stride * b.stride(0) for stride in piece.strides)
            up = rows.as_strided((*piece.sizes, shape.width), (*strides, b.stride(1)))
            b_shape = piece.num_rows, shape.width
            yield f"{layer}.adapter.b", LogicalTensor(name + suffixes[1], up, b_shape, piece.stacked, piece.unit)


def _wrapper(name: str, layer: str, shapes: Mapping[str, AdapterShape]) -> str:
    """Return PEFT's name of the module that holds the adapter of a parameter `name` of joined experts.

    It wraps the module of the parameters, once for each that is adapted: the last of them is outermost.
    """
    owner, _, attribute = layer.rpartition(".")
    is_inner = attribute == "up" and f"{owner}.down" in shapes
    return name.rpartition(".")[0] + ".base_layer" * is_inner


def meta_parameters(shapes: Mapping[str, AdapterShape]) -> dict[str, Tensor]:
    """Return the parameters of adapters by name, without values, each in storage of its own."""
    with torch.device("meta"):
        adapters = {layer: Adapter(shape) for layer, shape in shapes.items()}
    return {
        f"{layer}.adapter.{name}": parameter.detach()
        for layer, adapter in adapters.items()
        for name, parameter in adapter.named_parameters()
    }


def shapes_for(
    config: TransformerConfig,
    names: Collection[str],
    *,
    rank: int,
    alpha: float,
    use_rslora: bool,
    precision: AdapterPrecision = "float32",
) -> dict[str, AdapterShape]:
    """Return the adapters of the matrices `names` of a model of `config`."""
    found = {}
    for layer, fused in linear_layers(config).items():
        pieces = tuple(piece for piece in fused.pieces if piece.name in names)
        if pieces:
            sizes, looks_up = (fused.in_features, fused.out_features), layer == EMBEDDING
            found[layer] = AdapterShape(*sizes, pieces, rank, alpha, use_rslora, looks_up, precision)
    return found


def matrices(config: TransformerConfig) -> list[Piece]:
    """Return every matrix of a model of `config` that may have an adapter."""
    return [piece for fused in linear_layers(config).values() for piece in fused.pieces]


def is_named(piece: Piece, target: str) -> bool:
    """Tell whether PEFT's `target_modules` means `piece` by `target`: the end of its name, from a dot on."""
    target = HEAD_NAME if target == OLD_HEAD_NAME else target
    return piece.name == target or piece.name.endswith(f".{target}")


def targeted(config: TransformerConfig, targets: Collection[str]) -> list[str]:
    """Return the names of the matrices that `targets` mean; of none, all but experts, the head and the embedding.

    ConfigError for a target that means none.
    """
    every = matrices(config)
    if not targets:
        return [piece.name for piece in every[:-2] if not piece.num_experts]
    for target in targets:
        if not any(is_named(piece, target) for piece in every):
            allowed = list(dict.fromkeys(piece.target for piece in every))
            raise ConfigError.unknown("model.lora.targets names no layer", target, allowed, got=target)
    return [piece.name for piece in every if any(is_named(piece, target) for target in targets)]
