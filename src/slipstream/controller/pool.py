"""The replicas that may join a run while it goes on (`generator.max_replicas`), and which command has which of them.

The run's store has for each of them 'INCARNATION:CLAIM', where the claim names a command and the incarnation is of the
process that it has started last, 0 before; or FREE. Every change is a comparison with what was there, so that two
commands that ask at once get different replicas. One is free again when its command has ended, or when the controller
has lost the incarnation that is written there; its command, if it lives, takes it once more unless another one has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

FREE = "free"
TAKEN = "this generator belongs to another command, which has joined with --join"
HINT = "slipstream launch --group generator --join ... gets a free number"
_PREFIX = "slipstream/pool/"


def hold(store: Store, replica: str, claim: str, incarnation: int = 0) -> bool:
    """Give `replica` to the command `claim`; False: another one has it."""
    mine = f"{incarnation}:{claim}"
    for expected in ("", FREE):  # '' where nothing was written
        there = store.compare_set(_PREFIX + replica, expected, mine).decode(errors="replace")
        if there == mine:
            return True
    is_ours = there.partition(":")[2] == claim
    return is_ours and store.compare_set(_PREFIX + replica, there, mine).decode(errors="replace") == mine


def hold_any(store: Store, replicas: Sequence[str], claim: str) -> str | None:
    """Give the first free one of `replicas` to the command `claim`; None: there is none."""
    return next((replica for replica in replicas if hold(store, replica, claim)), None)


def free(store: Store, replica: str, *, claim: str | None = None, up_to: int | None = None) -> None:
    """Take `replica` from the command `claim`, or from whoever has it with an incarnation of at most `up_to`."""
    key = _PREFIX + replica
    there = store.get(key).decode(errors="replace") if store.check([key]) else FREE
    incarnation, _, holder = there.partition(":")
    is_lost = up_to is not None and incarnation.isdecimal() and int(incarnation) <= up_to
    if is_lost or (claim is not None and holder == claim):
        store.compare_set(key, there, FREE)
