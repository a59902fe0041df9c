"""CUDA graphs of a decode step: captured once per shape, replayed afterwards; elsewhere the step runs as it is."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from slipstream.core.errors import WeightSyncError


class _Place(NamedTuple):
    """Where a tensor is found, or what leads to one: under `key` of `holder`."""

    holder: Any
    key: Any
    value: Any
    name: str


def _holders(value: Any) -> Iterator[tuple[Any, Any]]:
    """The places inside of a module, or of what served weights are multiplied by."""
    own: dict[str, Any] = getattr(value, "__dict__", {})
    if isinstance(value, nn.Module):
        for kind in ("_parameters", "_buffers", "_modules"):
            yield from ((own[kind], key) for key in own[kind])
        yield from ((own, key) for key in ("product", "served_head") if key in own)
    elif isinstance(value, list | tuple):
        yield from ((value, index) for index in range(len(value)))
    elif isinstance(value, partial):
        yield from ((value.keywords, key) for key in value.keywords)
    elif type(value).__module__.startswith("slipstream."):
        yield from ((own, key) for key in own)


def _places(value: Any, name: str = "") -> list[_Place]:
    found = []
    for holder, key in _holders(value):
        child, of_child = holder[key], f"{name}.{key}".lstrip(".")
        inner = [] if isinstance(child, Tensor) else _places(child, of_child)
        if inner or isinstance(child, Tensor):
            found += [_Place(holder, key, child, of_child), *inner]
    return found


def _is_stored(value: Any) -> bool:
    """Whether this is a tensor with an address: those that oneDNN has packed, on a CPU, have none."""
    return isinstance(value, Tensor) and value.layout == torch.strided


def _addresses(places: list[_Place]) -> dict[str, int]:
    return {place.name: place.value.data_ptr() for place in places if _is_stored(place.value)}


class WeightAddresses:
    """Where a model's tensors lay when this was made, those of served products too. A captured graph reads there."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._remember(_places(model))

    def check(self) -> None:
        """WeightSyncError when a parameter, a buffer or a served weight lies elsewhere now, appeared or is gone."""
        places = _places(self._model)
        known, present = self._addresses, _addresses(places)
        moved = sorted(name for name in known | present if known.get(name) != present.get(name))
        if moved:
            raise WeightSyncError(
                "weights have moved since decode steps were captured, so that these would go on with the old ones",
                got=", ".join(moved[:3]) + (f" and {len(moved) - 3} more" if len(moved) > 3 else ""),
                hint="copy a new version into the same tensors on CUDA",
            )
        self._remember(places)

    def check_known(self) -> None:
        """`check`, if something known lies elsewhere or is another object: cheap enough for every step."""
        try:
            is_same = all(holder[key] is value for holder, key, value, _ in self._places)
        except (LookupError, TypeError):
            is_same = False
        if not is_same or list(map(Tensor.data_ptr, self._tensors)) != list(self._addresses.values()):
            self.check()

    def _remember(self, places: list[_Place]) -> None:
        self._places, self._addresses = places, _addresses(places)
        self._tensors = [place.value for place in places if _is_stored(place.value)]


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    output: Tensor


class StepGraphs:
    """Runs a step of `model`, a function of tensors that stay where they are, for each of several keys.

    On CUDA a key's first step runs as it is, which compiles and initialises what it needs, and is then captured (a
    capture executes nothing); later ones are replayed. All graphs share one pool of memory, so an output has to be read
    before the next step. On other devices, and where `captures` is False, every step runs as it is.
    """

    def __init__(self, model: nn.Module, device: torch.device, *, captures: bool = True) -> None:
        self._model = model
        self._captures = captures and device.type == "cuda"
        self._captured: dict[Hashable, _Captured] = {}
        self._addresses: WeightAddresses | None = None

    def __len__(self) -> int:
        """Graphs captured so far."""
        return len(self._captured)

    def run(self, key: Hashable, step: Callable[[], Tensor]) -> Tensor:
        """Run `step`, or its graph; return its output. It acts on tensors only, and does the same for the same key."""
        if not self._captures:
            return step()
        if self._addresses is not None:
            self._addresses.check_known()
        captured = self._captured.get(key)
        if captured is None:
            output = step()
            self._capture(key, step)
            return output
        captured.graph.replay()
        return captured.output

    def check_addresses(self) -> None:
        """WeightSyncError when the model's tensors have moved since the first capture."""
        if self._addresses is not None:
            self._addresses.check_known()

    def _capture(self, key: Hashable, step: Callable[[], Tensor]) -> None:
        if self._addresses is None:
            self._addresses = WeightAddresses(self._model)
        pool = next((captured.graph.pool() for captured in self._captured.values()), None)
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on using the device meanwhile: a version is being staged, for instance.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            output = step()
        self._captured[key] = _Captured(graph, output)
