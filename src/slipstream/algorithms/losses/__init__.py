"""Losses: the table by name, which needs no torch (`table.py`), and what they compute with (`spec.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slipstream.algorithms.losses.table import LOSSES, Loss, loss_named

if TYPE_CHECKING:
    from slipstream.algorithms.losses.spec import LossInputs

__all__ = ["LOSSES", "Loss", "LossInputs", "loss_named"]


def __getattr__(name: str) -> Any:
    """Import `LossInputs`, and torch with it, on first use."""
    if name != "LossInputs":
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    from slipstream.algorithms.losses.spec import LossInputs

    return LossInputs
