"""The training stream: which prompt each ordinal gets, as a pure function of (seed, ordinal)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slipstream.core.errors import ConfigError
from slipstream.core.types import Prompt

_STREAM_KEY = 0x5374726D  # keeps the shuffles apart from other uses of the run's seed
_CACHED_EPOCHS = 4


class PromptStream:
    """Endless, reshuffled epochs over `prompts`; the ordinal is all the state there is.

    Ordinal o is in epoch e = o // n and gets prompt `permutation_e[o % n]`, n = len(prompts). The permutation sorts
    64-bit draws of Philox keyed by (seed, e), whose raw stream numpy guarantees to be the same on every platform.
    Identity: the n ordinals of any epoch give every prompt exactly once, in whatever order they are asked for.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        if not prompts:
            raise ConfigError("there are no training prompts", got="0 prompts", hint="see prompts.num_train")
        self._prompts = prompts
        self._seed = seed
        self._permutations: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        """Distinct prompts, that is ordinals per epoch."""
        return len(self._prompts)

    @property
    def prompts(self) -> Sequence[Prompt]:
        """The distinct prompts, unshuffled."""
        return self._prompts

    def prompt(self, ordinal: int) -> Prompt:
        """The prompt of group `ordinal` (>= 0)."""
        if ordinal < 0:
            raise IndexError(f"ordinals start at 0, got {ordinal}")
        epoch, index = divmod(ordinal, len(self._prompts))
        return self._prompts[int(self._permutation(epoch)[index])]

    def _permutation(self, epoch: int) -> np.ndarray:
        """int64 [n]; the last few epochs are kept, as ordinals in flight straddle a boundary."""
        if epoch not in self._permutations:
            while len(self._permutations) >= _CACHED_EPOCHS:
                del self._permutations[next(iter(self._permutations))]
            bits = np.random.Philox(np.random.SeedSequence((self._seed, epoch, _STREAM_KEY)))
            self._permutations[epoch] = np.argsort(bits.random_raw(len(self._prompts)), kind="stable")
        return self._permutations[epoch]
