"""The weights a generator computes with: bytes as they arrive, made ready in the background, exchanged between steps.

Two ways to exchange them. On a CPU each version brings products of its own, packed while the old version decodes, and
copies of all else; the exchange points the model at them. The buffer that it came in is free for the next. On CUDA
captured graphs hold addresses, so nothing may move: a version is brought to a second buffer on the device, and the
exchange copies it into place. In both, the version before stays whole, which is what an exchange is undone with.

Where versions arrive on the device (`on_device`), the model computes with the bytes of a buffer as they lie there, its
home. An exchange swaps the contents of the two buffers, and then their tensors: so `flat` is what is live, the other
tensor has the version before, as elsewhere, and a GPU holds the weights twice, not three times.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from slipstream.core.errors import ConfigError
from slipstream.core.fields import Precision
from slipstream.core.peer_messages import Holding
from slipstream.core.rank_group import RankGroup
from slipstream.models.config import TransformerConfig
from slipstream.models.experts import ExpertsLinear, Groups, multiplies_groups
from slipstream.models.linear import Linear
from slipstream.models.lora import (
    EMBEDDING,
    HEAD,
    AdapterShape,
    GroupedProduct,
    OwnVersion,
    adapted_experts,
    adapted_product,
    rows_of,
    shapes_of,
    stacked_adapter,
    stacked_experts,
)
from slipstream.models.products import (
    PACKS,
    AddedProduct,
    DenseProduct,
    ExpertsProduct,
    Fp8Product,
    Product,
    WideProduct,
    cpu_dtype,
    looked_up,
)
from slipstream.models.quantized import FP8, LARGEST, StoredWeight, WeightLayout
from slipstream.models.shards import base_digest
from slipstream.models.transformer import Transformer


class ServedExperts(nn.Module):
    """Stands in for an `ExpertsLinear`; its products, one for each expert, are exchanged with the weights."""

    product: GroupedProduct

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts

    def forward(self, x: Tensor, groups: Groups) -> Tensor:
        """x [P, in_features], sorted by expert -> [P, out_features of one]."""
        return self.product(x, groups)


class ServedLinear(nn.Module):
    """Stands in for a `Linear`, or the `Embedding` of tokens; its product is exchanged with the weights."""

    product: Product

    def forward(self, x: Tensor) -> Tensor:
        """x [N, in_features], or int64 [N] -> [N, out_features]."""
        return self.product(x)


_EXCHANGED_BYTES = 64 << 20  # at once: what an exchange of buffers takes besides them


@dataclass(frozen=True, eq=False)
class _Version:
    """Everything of one version that the model points at."""

    products: Mapping[str, Product]  # by the layer's name, of linear ones and `EMBEDDING`
    head: Product | None  # None: of a pipeline stage that is not the last
    vectors: Mapping[str, Tensor]  # norms, routers and position embeddings
    experts: Mapping[str, GroupedProduct] = field(default_factory=dict)
    adapters: Mapping[str, tuple[Tensor, Tensor]] | None = None  # A and B by the layer's name
    reordered: Sequence[tuple[Tensor, Tensor]] = ()  # what is not multiplied as it lies: a copy, and what it is of

    def renew(self) -> None:
        """Bring the copies up to what they are of, which has new contents in the same place."""
        for copied, source in self.reordered:
            copied.copy_(source)


@dataclass(frozen=True, eq=False)
class FrozenBase:
    """The weights beside adapters, made ready once: no version brings any, and all engines of a process share them.

    `digest` is that of the fp32 numbers, before a precision rounded them.
    """

    digest: str
    shapes: Mapping[str, AdapterShape]
    num_bytes: int  # as stored
    version: _Version

    def adapted(self, weights: Mapping[str, Tensor], *, packs: bool) -> _Version:
        """Return the base with the adapters in `weights` beside its products."""
        adapters = {name: (weights[f"{name}.adapter.a"], weights[f"{name}.adapter.b"]) for name in self.shapes}
        return replace(self._beside(adapters, packs=packs), adapters=adapters)

    def stacked(self, versions: Sequence[_Version], own: OwnVersion) -> _Version:
        """Return the base with the adapters of all `versions`, of which each row of a pass has its `own`."""
        each = [version.adapters for version in versions if version.adapters is not None]
        stacks = {
            name: (stacked_experts if shape.num_experts else stacked_adapter)(shape, [one[name] for one in each])
            for name, shape in self.shapes.items()
        }
        return self._beside(stacks, packs=True, own=own)

    def _beside(
        self, adapters: Mapping[str, tuple[Tensor, Tensor]], *, packs: bool, own: OwnVersion | None = None
    ) -> _Version:
        assert self.version.head is not None, "adapters are beside whole models"
        products, experts = {**self.version.products, HEAD: self.version.head}, dict(self.version.experts)
        reordered: list[tuple[Tensor, Tensor]] = []
        for name, (a, b) in adapters.items():
            shape = self.shapes[name]
            if shape.num_experts:
                sources = (a, b) if own is not None else shape.of_experts(a, b)
                pair = [_in_order(one) for one in sources]
                if not packs:
                    reordered += [(copied, one) for copied, one in zip(pair, sources, strict=True) if copied is not one]
                grouped = [ExpertsProduct(one.flatten(0, 1), None, shape.num_experts, packs=packs) for one in pair]
                base = experts[name]
                experts[name] = partial(
                    adapted_experts, base=base, down=grouped[0], up=grouped[1], shape=shape, own=own
                )
                continue
            if shape.looks_up:
                down: Product = rows_of(a.t().contiguous() if packs else a.t())
            else:
                down = DenseProduct(a, packs=packs)
            products[name] = partial(
                adapted_product,
                base=products[name],
                down=down,
                up=[AddedProduct(rows, packs=packs) for rows in torch.split(b, shape.rows)],
                shape=shape,
                own=own,
            )
        return replace(self.version, products=products, head=products[HEAD], experts=experts, reordered=reordered)


class _Skeleton:
    """A model without weights (`_hollow_out`), and where those of a version belong."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.linears = {name: module for name, module in model.named_modules() if isinstance(module, ServedLinear)}
        self.experts = {name: module for name, module in model.named_modules() if isinstance(module, ServedExperts)}
        self.vectors = dict(model.named_parameters())

    def twin(self) -> _Skeleton:
        """Another one of the same model, to point elsewhere. To be made before the first `point_at`."""
        shared = [*self.model.buffers(), self.model.ranks]
        return _Skeleton(copy.deepcopy(self.model, {id(each): each for each in shared}))

    def point_at(self, version: _Version) -> None:
        for name, linear in self.linears.items():
            linear.product = version.products[name]
        for name, experts in self.experts.items():
            experts.product = version.experts[name]
        self.model.served_head = version.head
        for name, vector in version.vectors.items():
            self.vectors[name].data = vector


def _hollow_out(model: Transformer) -> None:
    """Replace linear layers and embedding by ones that point at weights elsewhere; the model's own are let go."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Linear):
            parent, _, attribute = name.rpartition(".")
            experts = module.num_experts if isinstance(module, ExpertsLinear) else 0
            setattr(model.get_submodule(parent), attribute, ServedExperts(experts) if experts else ServedLinear())
    if model.config.tie_embeddings and HEAD in dict(model.named_children()):
        del model.head  # it has an adapter alone
    model.served_head = None
    if model.has_embedding:
        model.embedding = ServedLinear()  # type: ignore[assignment]
    for parameter in model.parameters():
        parameter.requires_grad_(False)


def _in_order(x: Tensor) -> Tensor:
    """Return `x`, or a copy that lies in the order of its indices."""
    return x if x.is_contiguous() else torch.empty_like(x, memory_format=torch.contiguous_format).copy_(x)


def _return_freed_memory() -> None:
    """Have the C library give the system what is free: the thread that packs next has another heap than the last."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def check_precision(precision: Precision, device: torch.device) -> None:
    """Raise ConfigError where generating at `precision` on `device` is slower than at bfloat16, or is not possible."""
    if precision == "fp8" and not Fp8Product.is_native((16, 16), device):
        raise ConfigError(
            "fp8 needs a GPU that multiplies it: compute capability 9.0 (Hopper) or newer",
            got=f"generator.precision = 'fp8' on {device}",
            allowed="'bfloat16', or 'int8' on a CPU",
        )
    if precision == "int8" and device.type != "cpu":
        raise ConfigError(
            "int8 weights are for CPUs", got=f"generator.precision = 'int8' on {device}", allowed="'bfloat16' or 'fp8'"
        )
    if precision == "mxfp4" and device.type != "cpu":
        raise ConfigError(
            "mxfp4 weights are for CPUs: on a GPU they would be held in bfloat16, beside the bytes that arrive",
            got=f"generator.precision = 'mxfp4' on {device}",
            allowed="'bfloat16' or 'fp8'",
        )


def check_mixture(config: TransformerConfig, precision: Precision, device: torch.device) -> None:
    """Raise ConfigError where a mixture of experts of `config` cannot generate at `precision` on `device`."""
    if not config.num_experts or (device.type == "cpu" and precision != "fp8"):
        return
    if precision != "bfloat16":
        raise ConfigError(
            "a mixture of experts does not generate at this precision here",
            got=f"generator.precision = '{precision}' on {device}",
            allowed="'bfloat16' on a GPU; 'float32', 'bfloat16', 'int8' or 'mxfp4' on a CPU",
        )
    if not multiplies_groups(device, torch.bfloat16):
        raise ConfigError(
            "a mixture of experts generates on GPUs with grouped products only",
            got=torch.cuda.get_device_name(device),
            allowed="compute capability 9.0 (Hopper) or newer",
        )


class ServedWeights:
    """`model`'s weights at `precision`. Implements `core.weights.FlatWeights`.

    `flat` uint8 [num_bytes] (on the CPU, or `on_device`) holds the version that is live, in the layout of
    `WeightLayout`; to begin with `flat` as given, or else the model's own weights, which are released. Linear layers
    and the embedding are replaced; the residual stream is fp32 on a CPU, and on CUDA bfloat16 for all precisions but
    float32.

    With adapters a version is those alone, at their own precision and multiplied in float32 (on CUDA in the type of the
    residual stream), beside a `base` at `precision` that stays: made of the model's own weights, or given, so that
    `model` need not have them.
    Versions that `hold` has named stay when another is live; `select` says which of them each row of the next pass
    computes with.

    `in_place`: copy into stable storage; None: where the model is on CUDA. `on_device`: `flat` lies there, and is this
    storage for all that is computed with as it is stored; a tensor that `rebind` is given changes its contents. Without
    `stages` nothing is ever prepared: what is loaded comes from the host tensor by tensor, and lies on a GPU once.

    Of a divided model these are one rank's weights. Its own are packed with the scales of whole rows, for which all
    ranks of `group` do it together; nothing else here needs the others.
    """

    def __init__(
        self,
        model: Transformer,
        precision: Precision,
        *,
        flat: Tensor | None = None,
        in_place: bool | None = None,
        on_device: bool = False,
        group: RankGroup | None = None,
        base: FrozenBase | None = None,
        stages: bool = True,
    ) -> None:
        self._device = next(model.parameters()).device
        check_mixture(model.config, precision, self._device)
        shapes = shapes_of(model)
        digest = base.digest if base is not None else base_digest(model) if shapes else ""
        self._precision, self._layout = precision, WeightLayout(model, precision, base=digest)
        frozen = WeightLayout(model, precision, is_base=True) if shapes and base is None else None
        self._on_device, self._stages = on_device, stages
        self._is_in_place = on_device or (self._device.type == "cuda" if in_place is None else in_place)
        is_wide = self._device.type == "cpu" or precision == "float32"
        self._activations = torch.float32 if is_wide else torch.bfloat16
        self._parameters = dict(model.named_parameters())
        stored = [*self._layout.stored, *([] if frozen is None else frozen.stored)]
        self._held_types = {s.name: self._held_type(s.name, s.dtype, s.shape) for s in stored}
        self._prepared: tuple[Tensor, _Version] | None = None
        self._live: tuple[Tensor, _Version] | None = None
        self._residents: dict[int, _Version] = {}
        self._own = OwnVersion(torch.empty(0, dtype=torch.float32))
        self._stacked: _Version | None = None  # all that are held
        self._selected: _Version | None = None
        if flat is None:
            if on_device:
                flat = torch.zeros(self.num_bytes, dtype=torch.uint8, device=self._device)
            else:
                flat = torch.zeros(self.num_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            self._pack(self._layout, flat, group)
        elif on_device:
            flat = flat.to(self._device)
        _hollow_out(model)
        self._serving = _Skeleton(model)
        self._checking = self._serving.twin()
        self.base = (
            base if frozen is None else FrozenBase(digest, shapes, frozen.num_bytes, self._frozen(frozen, group))
        )
        self._parameters = {}
        if self._is_in_place:
            self._open_storage(flat if on_device else None)
        self.flat = flat
        self.rebind(flat)

    @property
    def num_bytes(self) -> int:
        return self._layout.num_bytes

    @property
    def base_bytes(self) -> int:
        """Bytes that lie beside all versions: of the adapters' base, which other engines share."""
        return 0 if self.base is None else self.base.num_bytes

    @property
    def holding(self) -> Holding:
        """Which boxes of the checkpoint's tensors lie where in `flat`."""
        return self._layout.holding

    @property
    def prepared_model(self) -> Transformer:
        """The model with the weights that `prepare` was given last, to check them before they are live."""
        return self._checking.model

    @torch.no_grad()
    def prepare(self, flat: Tensor) -> None:
        """Make the version in `flat` ready for `rebind`, beside the live one. May be called from another thread."""
        # The version before the live one goes first: never three at once.
        self._prepared = None
        if self._live is not None:
            self._checking.point_at(self._live[1])
        if not self._is_in_place:
            _return_freed_memory()
            self._prepared = (flat, self._packed(flat))
            self._checking.point_at(self._prepared[1])
        elif self._device.type == "cuda" and not self._on_device:
            with torch.cuda.device(self._device):  # of this thread
                self._bring(flat)
                self._checking.point_at(self._version(self._layout.views(self._arrival), packs=False))
        else:
            self._checking.point_at(self._version(self._layout.views(flat), packs=False))

    @torch.no_grad()
    def rebind(self, flat: Tensor) -> None:
        """Compute with the weights in `flat` from here on: at once if `prepare` has seen it last, or `rebind` before.

        Raises ShapeError, changing nothing, when these are not the bytes of this layout.
        """
        if self._on_device:
            self._exchange(flat)
        elif self._is_in_place:
            self._copy_in(flat)
        else:
            if self._prepared is None or self._prepared[0] is not flat:
                self._prepared = (flat, self._packed(flat))
            self._live, self._prepared = self._prepared, self._live
            self._point_at(self._live[1])
        self.flat = flat

    @property
    def reads_flat(self) -> bool:
        """Whether the live version reads `flat`, or stands by itself."""
        return self._is_in_place

    def pinned(self) -> object:
        """Return the live version as it is now, for `serve`: itself where it stands by itself, else a copy."""
        assert self._live is not None or self._is_in_place, "made by now"
        return self.flat.to("cpu", copy=True) if self._live is None else self._live[1]

    def serve(self, model: Transformer, pinned: object) -> ServedWeights | None:
        """Let another `model` like this one, without weights, compute with what `pinned` returned.

        Return its weights where they lie in place, for `load`.
        """
        if isinstance(pinned, _Version):
            _hollow_out(model)
            _Skeleton(model).point_at(pinned)
            return None
        assert isinstance(pinned, Tensor), "nothing else is returned"
        return ServedWeights(
            model,
            self._precision,
            flat=pinned,
            in_place=self._is_in_place,
            on_device=self._on_device,
            base=self.base,
            stages=False,
        )

    @torch.no_grad()
    def load(self, pinned: object) -> None:
        """Compute with what `pinned` of weights like these returned, in the same place."""
        assert self._is_in_place
        assert isinstance(pinned, Tensor)
        if self._on_device:
            pinned = self.flat.copy_(pinned)
        self.rebind(pinned)

    # Versions side by side

    @property
    def versions(self) -> Collection[int]:
        """Those that are held, ascending."""
        return self._residents.keys()

    def hold(self, version: int, others: Collection[int]) -> None:
        """Hold what is live as `version`, the newest, and `others` of those held so far; forget the rest."""
        assert self._live is not None, "made by now"
        held = {one: self._residents[one] for one in sorted(others) if one != version} | {version: self._live[1]}
        if held != self._residents:
            self._residents, self._stacked = held, None

    @torch.no_grad()
    def select(self, versions: np.ndarray) -> None:
        """Compute the next pass with these versions, int64 [N], one for each of its rows.

        A pass of one version is what it would be if no other were held, and rows of it have the same bits in both.
        """
        if (versions == versions[0]).all():
            self._point_at(self._residents[int(versions[0])])
            return
        assert self.base is not None, "only adapters are kept"
        if self._stacked is None:
            self._stacked = self.base.stacked(list(self._residents.values()), self._own)
        shape = next(iter(self.base.shapes.values()))  # all have one rank and one scale
        is_own = versions[:, None] == np.fromiter(self._residents, np.int64)
        self._own.scale = torch.from_numpy(is_own * np.float32(shape.scaling)).repeat_interleave(shape.rank, 1)
        self._point_at(self._stacked)

    def _point_at(self, version: _Version) -> None:
        if version is not self._selected:
            self._serving.point_at(version)
            self._selected = version

    # Versions

    def _packed(self, flat: Tensor) -> _Version:
        """Return a version that stays as it is when `flat` has the next: matrices are packed, the rest is copied."""
        serving = self._serving
        packed = {f"{name}.weight" for name in (*serving.linears, *serving.experts)} if PACKS else set()
        packed.discard("embedding.weight")
        weights = {
            name: replace(
                view,
                values=view.values if name in packed else view.values.clone(),
                scales=None if view.scales is None else view.scales.clone(),
            )
            for name, view in self._layout.views(flat).items()
        }
        return self._version(weights, packs=True)

    def _version(self, weights: dict[str, StoredWeight], *, packs: bool) -> _Version:
        """Products and views over `weights`: views of bytes, or of stable storage."""
        if self.base is None:
            return self._whole(weights, packs)
        adapters = {name: self._held(name, weight).values for name, weight in weights.items()}
        return self.base.adapted(adapters, packs=packs)

    @torch.no_grad()
    def _pack(self, layout: WeightLayout, flat: Tensor, group: RankGroup | None) -> None:
        """Write the model's own weights to `flat`."""
        for _ in layout.pack(self._parameters, flat, over_ranks=group.max if group is not None else None):
            pass

    def _frozen(self, layout: WeightLayout, group: RankGroup | None) -> _Version:
        """Make the weights ready that no version brings, each released as soon as it is packed."""
        weights = {}
        for name, weight in layout.stored_weights(self._parameters, over_ranks=None if group is None else group.max):
            scales = None if weight.scales is None else weight.scales.to(self._device)
            weights[name] = replace(weight, values=weight.values.to(self._device), scales=scales)
            del self._parameters[name], weight
        return self._whole(weights, packs=True)

    def _whole(self, weights: dict[str, StoredWeight], packs: bool) -> _Version:
        """`_version` of weights that are all there; those that are packed are taken out."""
        take = weights.pop if packs else weights.__getitem__
        products: dict[str, Product] = {}
        for name in self._serving.linears.keys() - {EMBEDDING}:
            bias = weights.get(f"{name}.bias")
            products[name] = self._product(
                f"{name}.weight", take(f"{name}.weight"), None if bias is None else bias.values, packs
            )
        experts: dict[str, GroupedProduct] = {}
        for name, module in self._serving.experts.items():
            held = self._held(f"{name}.weight", take(f"{name}.weight"))
            experts[name] = ExpertsProduct(held.values, held.scales, module.num_experts, packs=packs)
        head = products.get(HEAD)
        if (table := weights.get("embedding.weight")) is not None:
            products[EMBEDDING] = partial(looked_up, table=table, dtype=self._activations)
            if head is None and self._serving.model.stage.is_last:
                head = self._product("embedding.weight", self._rows_of_head(table), None, packs)
        vectors = {name: self._held(name, weights[name]).values for name in self._serving.vectors}
        return _Version(products, head, vectors, experts)

    def _product(self, name: str, weight: StoredWeight, bias: Tensor | None, packs: bool) -> Product:
        held = self._held(name, weight)
        values, scales = held.values, held.scales
        is_head = name in ("head.weight", "embedding.weight")
        if is_head and values.dtype != torch.float32 and values.device.type == "cuda":
            return WideProduct(values, scales)
        if self._precision == "fp8" and not is_head:
            assert scales is not None, "fp8 weights have scales"
            return Fp8Product(values, scales, bias, packs=packs)
        return DenseProduct(values, scales, bias, packs=packs)

    def _rows_of_head(self, table: StoredWeight) -> StoredWeight:
        """Return the rows of a tied embedding that this rank multiplies by; with one rank all of them."""
        local = self._serving.model.ranks.local_vocab
        return StoredWeight(local(table.values), None if table.scales is None else local(table.scales))

    # Storage

    def _held_type(self, name: str, stored: torch.dtype, shape: tuple[int, ...]) -> torch.dtype:
        """Return the type that a weight is multiplied in, or a vector added in."""
        is_matrix = name.endswith(".weight") and len(shape) == 2 and name != "position_embedding.weight"
        if self._device.type == "cpu":
            return cpu_dtype(stored) if is_matrix else torch.float32
        if not is_matrix:
            return self._activations
        if stored == FP8 and not Fp8Product.is_native(shape, self._device):
            return torch.bfloat16
        return torch.bfloat16 if stored == torch.int8 else stored

    def _held(self, name: str, weight: StoredWeight) -> StoredWeight:
        return weight.in_type(self._held_types[name])

    def _open_storage(self, home: Tensor | None) -> None:
        """Tensors that keep their addresses, and the products over them; in `home` what is held as it is stored."""
        self._storage = {
            s.name: StoredWeight(
                torch.empty(s.shape, dtype=self._held_types[s.name], device=self._device),
                torch.empty(s.shape[0], device=self._device) if s.dtype in LARGEST else None,
            )
            for s in self._layout.stored
            if home is None or self._held_types[s.name] != s.dtype
        }
        self._converted = tuple(self._storage)
        if home is not None:
            self._storage = {
                name: StoredWeight(self._storage[name].values, view.scales if view.columns is None else None)
                if name in self._storage
                else view
                for name, view in self._layout.views(home).items()
            }
        self._stable = self._version(self._storage, packs=False)
        self._serving.point_at(self._stable)
        if home is None and self._device.type == "cuda":
            if self._stages:
                self._arrival = torch.empty(self.num_bytes, dtype=torch.uint8, device=self._device)
            self._arrived: Tensor | None = None  # whose bytes lie in `_arrival`
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()  # the memory's former owner may be reading it until here

    def _copy_in(self, flat: Tensor) -> None:
        source = flat
        self._layout.views(flat)  # raises before anything changes
        if self._device.type == "cuda" and self._stages:
            if self._arrived is not flat:
                self._bring(flat)
            source = self._arrival
        for name, weight in self._layout.views(source).items():
            target, held = self._storage[name], weight.in_type(self._storage[name].values.dtype)
            target.values.copy_(held.values)
            if target.scales is not None:
                assert held.scales is not None, "both follow one layout"
                target.scales.copy_(held.scales)
        self._stable.renew()
        if self._device.type == "cuda":
            self._copied.record()
            self._copied.synchronize()  # so that who measures a swap sees all of it

    def _exchange(self, flat: Tensor) -> None:
        """Swap the contents of `flat` and of the home, then what the two tensors name: `flat` becomes the home."""
        self._layout.views(flat)  # raises before anything changes
        if flat.data_ptr() != self.flat.data_ptr():
            parts = (torch.split(buffer, _EXCHANGED_BYTES) for buffer in (self.flat, flat))
            for here, there in zip(*parts, strict=True):
                before = here.clone()
                here.copy_(there)
                there.copy_(before)
            flat.data, self.flat.data = self.flat.data, flat.data
        views = self._layout.views(flat)
        for name in self._converted:
            stable = self._storage[name].values
            stable.copy_(views[name].in_type(stable.dtype).values)
        self._stable.renew()
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # staging may write to the other buffer from here on

    def _bring(self, flat: Tensor) -> None:
        """Copy `flat` to the device beside what runs there; returns when it has arrived."""
        self._arrived = None
        self._stream.wait_event(self._copied)  # the last exchange still reads the buffer until then
        with torch.cuda.stream(self._stream):
            self._arrival.copy_(flat, non_blocking=True)
        self._stream.synchronize()
        self._arrived = flat
