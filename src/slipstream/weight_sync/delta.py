"""Changes of a bucket's bytes: words of 2 bytes and their places, for slow links.

bf16 weights mostly stay as they are at the learning rates of RL (arXiv:2602.03839).
"""

from __future__ import annotations

import numpy as np

from slipstream.core.errors import WeightSyncError
from slipstream.weight_sync.copying import Bytes

_WORD = np.uint16


def changes_of(base: Bytes, new: Bytes) -> Bytes | None:
    """int32 places, then values, of the words that changed, and the odd byte at the end; None where that is no less."""
    whole = len(new) // 2 * 2
    is_new = base[:whole].view(_WORD) != new[:whole].view(_WORD)
    count = int(np.count_nonzero(is_new))
    if 6 * count + len(new) - whole >= len(new) or len(new) >= 1 << 32:
        return None
    places = np.flatnonzero(is_new).astype(np.uint32)
    values = new[:whole].view(_WORD)[places]
    return np.concatenate([places.view(np.uint8), values.view(np.uint8), new[whole:], np.zeros(1, np.uint8)])


def apply_changes(base: Bytes, changes: Bytes) -> None:
    """Make `base` what `changes` were found in. Raises WeightSyncError for changes that lie outside of it."""
    odd = len(base) % 2
    count, rest = divmod(len(changes) - 1 - odd, 6)
    if count < 0 or rest:
        raise WeightSyncError("changes of a length that none have", got=len(changes), allowed=f"6 n + {1 + odd}")
    places, values = changes[: 4 * count].view(np.uint32), changes[4 * count : 6 * count].view(_WORD)
    if count and places.max() >= len(base) // 2:
        raise WeightSyncError("changes lie outside of their bucket", got=int(places.max()), allowed=len(base) // 2)
    base[: len(base) - odd].view(_WORD)[places] = values
    base[len(base) - odd :] = changes[6 * count : 6 * count + odd]
