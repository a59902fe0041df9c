"""CUDA graphs of a decode step: captured once per shape, replayed afterwards; elsewhere the step runs as it is."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from slipstream.core.errors import WeightSyncError


class WeightAddresses:
    """Where a model's tensors lay when this was made. A captured graph reads there, whatever the model says later."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._addresses = self._present()
        first, *_, last = model.parameters()
        self._ends = (first, last)
        self._end_addresses = (first.data_ptr(), last.data_ptr())

    def check(self) -> None:
        """WeightSyncError when a parameter or buffer lies elsewhere now, appeared or is gone."""
        present = self._present()
        moved = sorted(name for name in self._addresses | present if self._addresses.get(name) != present.get(name))
        if moved:
            raise WeightSyncError(
                "weights have moved since decode steps were captured, so that these would go on with the old ones",
                got=", ".join(moved[:3]) + (f" and {len(moved) - 3} more" if len(moved) > 3 else ""),
                hint="copy a new version into the same tensors on CUDA",
            )

    def check_ends(self) -> None:
        """`check`, if the first or the last parameter has moved: cheap enough for every step."""
        if tuple(parameter.data_ptr() for parameter in self._ends) != self._end_addresses:
            self.check()

    def _present(self) -> dict[str, int]:
        tensors = [*self._model.named_parameters(), *self._model.named_buffers()]
        return {name: tensor.data_ptr() for name, tensor in tensors}


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
            self._addresses.check_ends()
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
            self._addresses.check()

    def _capture(self, key: Hashable, step: Callable[[], Tensor]) -> None:
        if self._addresses is None:
            self._addresses = WeightAddresses(self._model)
        pool = next((captured.graph.pool() for captured in self._captured.values()), None)
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on using the device meanwhile: a version is being staged, for instance.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            output = step()
        self._captured[key] = _Captured(graph, output)
