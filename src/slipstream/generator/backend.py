"""What stands behind the generator's executor: weights, a check of them, and an engine that decodes with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from slipstream.core.weights import FlatWeights
from slipstream.generator.requests import GenerationEngine, StateSpans


@dataclass(frozen=True, eq=False)
class Pin:
    """A version an evaluation holds on to, with a copy of its weights where the backend makes one."""

    version: int
    weights: torch.Tensor | None = None


class Backend(Protocol):
    """The policy, ready to be sampled from: in this process (`native.NativeBackend`) or by vLLM (`vllm/backend.py`)."""

    @property
    def engine(self) -> GenerationEngine:
        """The one that training completions come from."""
        ...

    @property
    def weights(self) -> FlatWeights:
        """Weight sync commits to these, between two steps of the engine."""
        ...

    @property
    def max_len(self) -> int:
        """Tokens of the longest prompt and completion together."""
        ...

    probes_prepared: bool
    """Whether `probe` computes with the weights that were prepared last, else with the live ones."""

    def probe(self, tokens: np.ndarray) -> np.ndarray:
        """float32 [T - 1]: logprobs of `tokens` int32 [T], as the engine computes them."""
        ...

    def pin(self) -> Pin:
        """Keep the present version for an evaluation, until `unpin`."""
        ...

    def unpin(self, pin: Pin) -> None: ...

    @property
    def may_swap(self) -> bool:
        """Whether weights may be replaced now: a backend that holds one version only cannot while one is pinned."""
        ...

    def evaluation_engine(self, pin: Pin, spans: StateSpans) -> GenerationEngine:
        """What decodes the pinned version: an engine of its own, or `engine` itself."""
        ...

    def has_work(self) -> bool:
        """Whether a step of `engine` would do anything now."""
        ...

    @property
    def working_state(self) -> str | None:
        """What another process does for this one while `step` has nothing to do, if anything."""
        ...

    def wait_fds(self) -> list[int]:
        """Descriptors whose readability means that there may be work."""
        ...

    def wait_s(self) -> float | None:
        """Seconds until there is work whatever arrives; None for never."""
        ...

    def close(self) -> None: ...
