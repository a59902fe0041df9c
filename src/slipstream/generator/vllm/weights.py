"""The policy's weights as vLLM gets them: versions that it reads where they lie, or adapters written for it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from slipstream.core.errors import WeightSyncError
from slipstream.core.fields import Precision
from slipstream.core.peer_messages import Holding
from slipstream.core.weights import SlotPlace
from slipstream.generator.vllm.folder import HEADS
from slipstream.models.config import TransformerConfig
from slipstream.models.peft import save_adapter
from slipstream.models.quantized import WeightLayout
from slipstream.models.transformer import Transformer

SCALES = "/scales"
"""How the names of scales end in slots (`quantized.py`)."""


class SlotWeights:
    """Implements `core.weights.PlacedWeights`: a version is a file that tells vLLM what to read where.

    `push` has vLLM load what `write` writes.
    """

    reads_flat = True

    def __init__(self, config: TransformerConfig, precision: Precision) -> None:
        self.flat = torch.zeros(1, dtype=torch.uint8)  # over links a buffer of `holding`
        self.push: Callable[[], None] = lambda: None
        self._config, self._precision = config, precision
        self._places: dict[int, Sequence[SlotPlace]] = {}  # by the address of `flat`

    @property
    def holding(self) -> Holding:
        return whole_holding(self._config, self._precision)

    def place(self, flat: torch.Tensor, places: Sequence[SlotPlace]) -> None:
        self._places[flat.data_ptr()] = places

    def prepare(self, flat: torch.Tensor) -> None:
        """Nothing is to be done before `rebind`."""

    def rebind(self, flat: torch.Tensor) -> None:
        """Have vLLM load what `flat` stands for; if it cannot, that is an error, and the old version stays here."""
        previous, self.flat = self.flat, flat
        if flat.data_ptr() not in self._places:
            return  # it was before the first version
        try:
            self.push()
        except BaseException:
            self.flat = previous
            raise

    def write(self, path: Path) -> None:
        """Write the push of the version bound last to file `path`; see `slot_extension.py`."""
        push = describe(self._places[self.flat.data_ptr()], self._config, self._precision)
        path.write_text(json.dumps(push, separators=(",", ":")), encoding="utf-8")


@cache
def whole_holding(config: TransformerConfig, precision: Precision) -> Holding:
    """Return the tensors of the whole model as slots hold them at `precision`: scales are tensors of their own."""
    with torch.device("meta"):
        return WeightLayout(Transformer(config), precision).holding


def describe(places: Sequence[SlotPlace], config: TransformerConfig, precision: Precision) -> dict[str, Any]:
    """Return a push: where every tensor of the checkpoint lies, a tied head a second time under a name of its own.

    Scales are those of a checkpoint in vLLM's format "compressed-tensors": NAME.weight_scale [rows, 1] beside
    NAME.weight. Raises WeightSyncError where `places` do not hold the model of `config` at `precision`.
    """
    whole = whole_holding(config, precision)
    expected = {name: (shape, dtype) for name, shape, dtype in zip(whole.names, whole.shapes, whole.types, strict=True)}
    boxes: dict[str, dict[object, list[Any]]] = {name: {} for name in expected}
    for part, place in enumerate(places):
        held = place.holding
        columns = (held.tensor, held.offset, held.start, held.stop, held.strides)
        for number, offset, start, stop, strides in zip(*(column.tolist() for column in columns), strict=True):
            name, found = held.names[number], (held.shapes[number], held.types[number])
            if expected.get(name) != found:
                raise WeightSyncError(
                    f"the trainer's {name} is not of vLLM's model", got=found, allowed=expected.get(name)
                )
            axes = len(found[0])
            box = [part, offset, start[:axes], stop[:axes], strides[:axes]]
            boxes[name].setdefault((*start, *stop), box)  # ranks may hold the same
    tensors: list[list[Any]] = []
    for name, (shape, dtype) in expected.items():
        held_boxes = list(boxes[name].values())
        if sum(_volume(start, stop) for _, _, start, stop, _ in held_boxes) < math.prod(shape):
            raise WeightSyncError("no rank of the trainer holds some of a tensor's numbers", got=name)
        if name.endswith(SCALES):
            column = [[part, at, [*start, 0], [*stop, 1], [*by, 4]] for part, at, start, stop, by in held_boxes]
            tensors.append([name.removesuffix(SCALES) + "_scale", [*shape, 1], dtype, column])
        else:
            tensors.append([name, shape, dtype, held_boxes])
    if config.tie_embeddings:
        tensors.append([HEADS.get(config.family, "lm_head.weight"), *tensors[0][1:]])  # the embedding is the first
    parts = [[one.path, one.mark_start, one.mark.hex(), one.start, one.holding.num_bytes] for one in places]
    return {"parts": parts, "tensors": tensors}


def _volume(start: Sequence[int], stop: Sequence[int]) -> int:
    return math.prod(end - first for first, end in zip(start, stop, strict=True))


class AdapterWeights:
    """Flat adapters whose exchange takes effect in vLLM as well. Implements `core.weights.FlatWeights`."""

    reads_flat = True

    def __init__(self, model: Transformer, digest: str) -> None:
        self._model, self._layout = model, WeightLayout(model, "float32", base=digest)
        self.holding, self.flat = self._layout.holding, torch.zeros(self._layout.num_bytes, dtype=torch.uint8)
        for _ in self._layout.pack(dict(model.named_parameters()), self.flat):
            pass
        self.push: Callable[[], None] = lambda: None

    def prepare(self, flat: torch.Tensor) -> None:
        """Nothing is to be done before `rebind`."""

    def rebind(self, flat: torch.Tensor) -> None:
        """Have vLLM load `flat` uint8 [num_bytes]. If it cannot, that is an error and the old ones stay bound here."""
        previous, self.flat = self.flat, flat
        try:
            self.push()
        except BaseException:
            self.flat = previous
            raise

    @torch.no_grad()
    def write(self, path: Path) -> None:
        """Write the version bound last to folder `path`, in PEFT's format."""
        parameters = dict(self._model.named_parameters())
        for name, weight in self._layout.views(self.flat).items():
            parameters[name].copy_(weight.values)
        save_adapter(self._model, path, base=None, digest="")
