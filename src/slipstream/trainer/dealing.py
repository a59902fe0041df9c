"""By what rollouts are dealt to the trainer's data-parallel ranks."""

from __future__ import annotations

from slipstream.algorithms.losses import loss_named
from slipstream.core.config import RunConfig
from slipstream.core.ranks import Dealt


def dealt_by(config: RunConfig) -> Dealt:
    """Each rollout by itself; whole groups where which of them are trained on is known once all are scored."""
    is_of_pairs = loss_named(config.loss.name, config.loss.params).atom == "pair"
    return "groups" if is_of_pairs or config.loss.select != "all" else "samples"
