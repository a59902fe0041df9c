"""Staleness, computed here only.

The staleness of a token, in steps, is (version the step that trains on it starts from) - (version that sampled it);
that of a batch is the maximum over its tokens. Step n starts from version n, so a token of version v trained in
step n has staleness n - v. Minibatches and epochs inside a step add distance in optimizer updates.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

import numpy as np

from slipstream.core.errors import StalenessError
from slipstream.core.types import Segment


def token_versions(segments: Iterable[Segment]) -> np.ndarray:
    """Return the policy version that sampled each token of `segments`, int32 [T]; -1 on tokens that were given."""
    pieces = []
    for segment in segments:
        versions = np.full(len(segment.tokens), -1, dtype=np.int32)
        for span in segment.version_spans:  # spans ascend, so a later one overwrites the tail of an earlier one
            versions[span.start :] = span.version
        pieces.append(versions)
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int32)


def staleness_of(versions: np.ndarray, *, step: int) -> np.ndarray:
    """Return the staleness of each sampled token (version >= 0) when `step` trains on it, int32 [sampled tokens]."""
    return (step - versions[versions >= 0]).astype(np.int32)


def place_of(ordinal: int, dropped: Sequence[int]) -> int:
    """Return the place of group `ordinal`: its ordinal less the `dropped` ones below it, of groups no step will train.

    `dropped` ascends.
    """
    return ordinal - bisect.bisect_left(dropped, ordinal)


def oldest_version(place: int, *, groups_per_step: int, reorder_window: int, max_staleness: int) -> int:
    """Return the oldest version that may sample the group at `place`: floor((place + W - 1) / P) - k.

    The quotient is the last step that can train it. This is the admission rule, proved in `controller/schedule.py`.
    """
    return (place + reorder_window - 1) // groups_per_step - max_staleness


def check_bound(staleness: np.ndarray, *, max_staleness: int | None, step: int) -> None:
    """Raise StalenessError if a token is staler than the bound, or of a version after `step`: a bug in the schedule.

    `max_staleness` is None under a scheduling policy without a bound.
    """
    if not staleness.size:
        return
    is_too_old = max_staleness is not None and staleness.max() > max_staleness
    if is_too_old or staleness.min() < 0:
        raise StalenessError(
            f"step {step} consumed tokens outside the staleness bound",
            got=f"staleness {int(staleness.min())}..{int(staleness.max())} steps",
            allowed="0 or more" if max_staleness is None else f"0..{max_staleness}",
            hint="this is a bug in the schedule; keep events.jsonl and report it",
        )


def staleness_in_updates(staleness_steps: np.ndarray, *, updates_per_step: int, update_in_step: int) -> np.ndarray:
    """Return the staleness in optimizer updates, at the `update_in_step`-th (from 0) update of the step.

    It is at most (k + 1) * updates_per_step - 1, for a token k steps old in the last update.
    """
    return np.asarray(staleness_steps * updates_per_step + update_in_step)
