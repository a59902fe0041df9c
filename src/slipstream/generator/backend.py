"""The weights of a generator, a check of them, and an engine that decodes with them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from slipstream.core.weights import FlatWeights
from slipstream.generator.requests import GenerationEngine, StateSpans


@dataclass(frozen=True, eq=False)
class Pin:
    """A version an evaluation holds on to, with what the backend keeps of its weights."""

    version: int
    weights: object = None


class Backend(ABC):
    """The policy, ready to be sampled from: in this process (`native.NativeBackend`) or by vLLM (`vllm/backend.py`).

    `engine` decodes training completions; weight sync commits to `weights` between two of its steps. `max_len` bounds
    the longest prompt and completion together, in tokens.
    """

    engine: GenerationEngine
    weights: FlatWeights
    max_len: int
    num_versions = 1
    """Versions that may be held side by side: of adapters, else 1."""
    probes_prepared = False
    """Whether `probe` computes with the weights that were prepared last, else with the live ones."""

    @abstractmethod
    def probe(self, tokens: np.ndarray) -> np.ndarray:
        """float32 [T - 1]: logprobs of `tokens` int32 [T], as the engine computes them."""

    @abstractmethod
    def pin(self) -> Pin:
        """Keep the present version for an evaluation, until `unpin`."""

    @abstractmethod
    def unpin(self, pin: Pin) -> None: ...

    def prepare_evaluations(self, spans: StateSpans) -> None:  # noqa: B027 - most have nothing to prepare
        """Make ready at the start what all evaluations share; `spans` as for `evaluation_engine`."""

    @abstractmethod
    def evaluation_engine(self, pin: Pin, spans: StateSpans) -> GenerationEngine:
        """Return the engine that decodes the pinned version: one of its own, or `engine` itself."""

    @property
    def may_swap(self) -> bool:
        """Whether weights may be replaced now: a backend that holds one version only cannot while one is pinned."""
        return True

    @property
    def keeps_versions(self) -> bool:
        """Whether what has begun goes on with the version that it began with, beside newer ones."""
        return self.num_versions > 1

    @property
    def has_room_for_version(self) -> bool:
        """With `keeps_versions`: whether one more may be held now."""
        return len(self.engine.versions_in_use) < self.num_versions

    def settle(self) -> None:  # noqa: B027 - most have nothing under way between two steps
        """Weights are to be replaced: end what needs the present ones."""

    def has_work(self) -> bool:
        """Whether a step of `engine` would do anything now."""
        return not self.engine.is_idle

    @property
    def working_state(self) -> str | None:
        """The state of a process that works for this one while `step` has nothing to do, if there is one."""
        return None

    def wait_fds(self) -> list[int]:
        """Descriptors whose readability means that there may be work."""
        return []

    def wait_s(self) -> float | None:
        """Seconds until there is work whatever arrives; None for never."""
        return None

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """End what the backend has started."""
