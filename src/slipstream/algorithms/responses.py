"""The end of a response, and the part of it that is scored: rules on arrays of tokens, no tensors.

Responses are int [T], sampled tokens only. The policy is trained on the whole response; only what is scored is cut
(N, item 25).
"""

from __future__ import annotations

import numpy as np


def has_token(response: np.ndarray, token: int, *, after: int = 0) -> bool:
    """True where `response` has `token` at an index >= `after`, counted from 0.

    N, item 26: "ends properly" is a period (13 in GPT-2's vocabulary) at index 16 or later of 24, or EOS anywhere.
    """
    return bool((response[after:] == token).any())


def truncate_at_token(response: np.ndarray, token: int | None, *, after: int = 0) -> np.ndarray:
    """`response` up to and with its first `token` at an index >= `after`; all of it where there is none (None: never).

    N, item 24: 13 (".") after 16 for sentiment, 198 (a line feed) after 55 for TL;DR and CNN/DM; EOS after 0 in the
    TL;DR reproduction (arXiv:2403.17031) and in TRL. These replace the rest by padding: padded to the old length,
    this is theirs.
    Identity: truncating twice is truncating once.
    """
    if token is None:
        return response
    found = np.flatnonzero(response[after:] == token)
    return response[: after + int(found[0]) + 1] if len(found) else response
