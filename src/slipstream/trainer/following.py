"""A reference policy that follows the policy: Learn Your Reference Model, arXiv:2404.09656 (TRL's `sync_ref_model`)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from slipstream.models.sharded import Division, Parameters, stored_parameters
from slipstream.models.transformer import Transformer


class FollowingReference:
    """The weights of a reference `model` that is divided over ranks as the policy is.

    It is `trainer.checkpoint.StoredModel`, like an optimizer without moments: checkpoints hold it.
    """

    num_updates = 0

    def __init__(self, model: Transformer, division: Division) -> None:
        self.model = model
        self.parameters: Parameters = stored_parameters(model.requires_grad_(True), division)
        model.requires_grad_(False)

    @torch.no_grad()
    def follow(self, policy: Parameters, share: float) -> None:
        """Go `share` of the way to `policy`: reference <- (1 - share) reference + share policy, weight by weight."""
        theirs = policy.named_views()
        for name, ours in self.parameters.named_views().items():
            ours.mul_(1.0 - share).add_(theirs[name], alpha=share)

    def named_moments(self) -> Mapping[str, Mapping[str, Tensor]]:
        return {}

    def resumed(self, num_updates: int) -> None:
        """Do nothing: its place in the run is that of the policy."""
