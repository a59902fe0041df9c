"""By what rollouts are dealt to the trainer's data-parallel ranks."""

from __future__ import annotations

from slipstream.core.config import RunConfig
from slipstream.core.ranks import Dealt
from slipstream.trainer.scores import is_of_pairs


def dealt_by(config: RunConfig) -> Dealt:
    """Each rollout by itself; whole groups where which of them are trained on is known once all are scored."""
    return "groups" if is_of_pairs(config) or config.loss.select != "all" else "samples"
