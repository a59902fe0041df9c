"""What every policy loss takes, gives and declares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from slipstream.algorithms.kl import k1, k3
from slipstream.algorithms.reduce import Mean, Metrics, masked_max, masked_mean
from slipstream.core.errors import MissingLogprobsError

Unit = Literal["token", "sequence"]
Anchor = Literal["behaviour_logprobs", "proximal_logprobs", "reference_logprobs"]


@dataclass(frozen=True)
class LossInputs:
    """The targets of one microbatch, all [T] over packed completions.

    `mask` is True on tokens that count. `segment_ids` int64 names each token's sequence, ascending from 0 and
    contiguous, so that sequence losses can sum over it. `num_units` counts the loss's unit (tokens or sequences)
    over the whole optimizer update. Anchors a batch does not carry are None; a loss that needs one says so.
    """

    policy_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    segment_ids: Tensor
    num_units: int
    behaviour_logprobs: Tensor | None = None
    proximal_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None

    def anchor(self, name: Anchor) -> Tensor:
        """The anchor's logprobs [T]; MissingLogprobsError when the batch does not carry them."""
        logprobs = {
            "behaviour_logprobs": self.behaviour_logprobs,
            "proximal_logprobs": self.proximal_logprobs,
            "reference_logprobs": self.reference_logprobs,
        }[name]
        if logprobs is None:
            raise MissingLogprobsError(
                f"the loss needs {name}, which this batch does not carry",
                hint="a loss never guesses its anchor: record them, or take a loss that does without",
            )
        return logprobs


LossFunction = Callable[..., tuple[Tensor, Metrics]]


@dataclass(frozen=True)
class Loss:
    """An entry of LOSSES: `function(inputs, **params) -> (scalar loss, metrics)`.

    `unit` is what the sum is divided by the count of; `requires` names the anchors it cannot do without;
    `params` are its constants with their defaults.
    """

    function: LossFunction
    unit: Unit
    requires: tuple[Anchor, ...]
    params: Mapping[str, float] = field(default_factory=dict)

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        """The loss of a microbatch and its metrics as parts that add up. Raises MissingLogprobsError."""
        for name in self.requires:
            inputs.anchor(name)
        return self.function(inputs, **self.params)


@torch.no_grad()
def off_policy_metrics(inputs: LossInputs, ratios: Tensor, *, clipped: Tensor) -> Metrics:
    """How far the policy is from the one that sampled: what every loss reports, as parts that add up.

    `ratios` [T] before truncation; `clipped` bool [T] marks tokens that truncation or clipping changed. KL(behaviour
    || policy) is estimated from the behaviour policy's own samples.
    """
    behaviour = inputs.anchor("behaviour_logprobs")
    policy, mask = inputs.policy_logprobs.detach(), inputs.mask
    ratios = ratios.detach()
    return {
        "ratio": masked_mean(ratios, mask),
        "ratio_squared": masked_mean(ratios.square(), mask),
        "ratio_max": masked_max(ratios, mask),
        "clipped_frac": Mean((clipped & mask).sum(), mask.sum()),
        "kl_k1": masked_mean(k1(behaviour, policy), mask),
        "kl_k3": masked_mean(k3(behaviour, policy), mask),
        "logprob_diff_mean": masked_mean((policy - behaviour).abs(), mask),
        "logprob_diff_max": masked_max((policy - behaviour).abs(), mask),
    }
