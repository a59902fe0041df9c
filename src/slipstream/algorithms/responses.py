"""What a score sees of a response, and what it costs not to have ended: rules on arrays of tokens, no tensors.

Responses are int [T], sampled tokens only. The policy is trained on the whole response; only what is scored is cut
(N, item 25).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from slipstream.core.errors import ConfigError, ShapeError


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


def penalise_missing_token(
    scores: np.ndarray,
    responses: Sequence[np.ndarray],
    token: int,
    *,
    after: int = 0,
    penalty: float = 1.0,
    mode: Literal["replace", "subtract"] = "replace",
) -> np.ndarray:
    """Scores float [S], with a penalty where a response lacks `token` at an index >= `after`.

        replace:   -penalty            the original RLHF code, its reproduction (N, item 26), TL;DR's, and A's -1
        subtract:  score - penalty     TRL's missing_eos_penalty

    `penalty` is in units of the score and not negative: ConfigError otherwise, because the sources write -1 for the
    one and 1 for the other. Identity: where every response has the token nothing changes.
    """
    if penalty < 0:
        raise ConfigError(
            "a penalty is what the score loses",
            got=f"penalty = {penalty}",
            allowed="0 or more",
            hint=f"write {-penalty} for a score of {penalty}",
        )
    if scores.shape != (len(responses),):
        raise ShapeError("one score is needed per response", got=f"{scores.shape} and {len(responses)} responses")
    is_missing = np.array([not has_token(response, token, after=after) for response in responses], dtype=bool)
    penalised = np.full_like(scores, -penalty) if mode == "replace" else scores - scores.dtype.type(penalty)
    return np.where(is_missing, penalised, scores)
