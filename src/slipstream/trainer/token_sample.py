"""Single tokens of some groups, as they are trained on: what `tokens.jsonl` is made of."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from slipstream.core.packed import PackedMicrobatch
from slipstream.trainer.measure import Key


@dataclass
class TokenSample:
    """Policy logprobs and advantages of the groups whose ordinal is a multiple of `every`; of none if that is 0.

    `trained` maps a completion to both, float32 [T] over its sampled tokens, as they were at its first update.
    """

    every: int
    trained: dict[Key, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    def wants(self, ordinal: int) -> bool:
        return self.every > 0 and ordinal % self.every == 0

    def take(self, microbatch: PackedMicrobatch, policy_logprobs: Tensor) -> None:
        """Note what is wanted of a microbatch; `policy_logprobs` are those of its targets [M]."""
        wanted = [
            (index, key) for index, key in enumerate(microbatch.keys) if self.wants(key[0]) and key not in self.trained
        ]
        if not wanted:
            return
        logprobs = policy_logprobs.detach().float().cpu().numpy()
        for index, key in wanted:
            own = slice(*np.searchsorted(microbatch.segment_ids, [index, index + 1]))
            self.trained[key] = (logprobs[own].copy(), microbatch.advantages[own].copy())
