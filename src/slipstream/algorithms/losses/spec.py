"""The inputs of every loss, and the metrics that losses share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from slipstream.algorithms.kl import k1, k2, k3
from slipstream.algorithms.losses.table import InputName
from slipstream.algorithms.ratios import ClippedSurrogate, sequence_ratios, token_ratios
from slipstream.algorithms.reduce import Mean, Metrics, Reduction, average, masked_max, masked_mean, masked_share
from slipstream.algorithms.segments import segment_counts
from slipstream.core.errors import MissingInputError, MissingLogprobsError, ShapeError

RATIO_EDGES = (0.0, 0.25, 0.5, 0.8, 0.9, 0.95, 0.98, 1.02, 1.05, 1.1, 1.2, 2.0, 4.0)
"""Lower edges of the histogram of ratios: narrow around 1, where they are, and wide in the tails, where they hurt."""
RATIO_SHARE = "ratio_share/"


@dataclass(frozen=True)
class LossInputs:
    """The targets of one microbatch: [T] over packed completions, [S] over its sequences.

    `mask` is True on tokens that count. `segment_ids` int64 names each token's sequence, ascending from 0 and
    contiguous, so that sequence losses can sum over it. `num_units` counts over the whole optimizer update: tokens for
    a token loss under `reduction` "token", sequences under its other reductions and for sequence losses, else pairs
    or choices. What a batch does not carry is None; a loss that needs it says so.

    Pairs are adjacent: sequence 2i is the preferred one, 2i + 1 the rejected one. A choice is `num_candidates`
    adjacent sequences and one label.
    """

    policy_logprobs: Tensor | None  # [T], differentiable
    advantages: Tensor | None  # [T]
    mask: Tensor  # bool [T]
    segment_ids: Tensor  # int64 [T]
    num_units: int
    lengths: Tensor | None = None  # int64 [S], the tokens of each sequence, for those who would have to count them
    behaviour_logprobs: Tensor | None = None  # [T], of the policy that sampled
    proximal_logprobs: Tensor | None = None  # [T], of the policy the clip is centred on
    reference_logprobs: Tensor | None = None  # [T], of the policy that is not to be left
    teacher_divergences: Tensor | None = None  # [T], differentiable: of the policy from its teacher, at each state
    values: Tensor | None = None  # [T], differentiable: the critic's
    anchor_values: Tensor | None = None  # [T], the critic's when the advantages were computed
    returns: Tensor | None = None  # [T], the critic's targets
    scores: Tensor | None = None  # [S], differentiable: the reward model's
    labels: Tensor | None = None  # int64 [S / num_candidates], index of the chosen candidate
    ratings: Tensor | None = None  # [S], what the scores are to be
    is_desirable: Tensor | None = None  # bool [S], the labels of single completions
    reference_kl: Tensor | None = None  # [], the estimate of KL(policy, reference) of the whole update
    reduction: Reduction = "token"
    max_tokens: int = 0  # the constant of reduction "constant"
    cutoff: Tensor | None = None  # [], of the whole update: what the loss masks beyond

    def need(self, name: InputName) -> Tensor:
        """Return the input called `name`; MissingInputError when the batch does not carry it (MissingLogprobsError of
        logprobs)."""
        value: Tensor | None = getattr(self, name)
        if value is None:
            is_anchor = name.endswith("_logprobs")
            raise (MissingLogprobsError if is_anchor else MissingInputError)(
                f"the loss needs {name}, which this batch does not carry",
                hint="a loss never guesses its anchor: record them, or take a loss that does without"
                if is_anchor
                else None,
            )
        return value

    def average(self, values: Tensor) -> Tensor:
        """This microbatch's part of the update's average of token `values` [T], under `reduction`: a scalar."""
        return average(
            values,
            self.mask,
            self.segment_ids,
            reduction=self.reduction,
            num_units=self.num_units,
            max_tokens=self.max_tokens,
            lengths=self.lengths,
        )

    @property
    def segments(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return `mask`, `segment_ids` and `lengths`, as the functions of whole sequences take them."""
        return self.mask, self.segment_ids, self.lengths


@torch.no_grad()
def off_policy_metrics(inputs: LossInputs) -> Metrics:
    """Return how far the policy is from the one that sampled, per token, as parts that add up: for all policy losses.

    Nothing where the batch carries no behaviour logprobs. KL(behaviour || policy) is estimated from the behaviour
    policy's own samples; k2 is the "approxkl" of PPO's implementations.
    """
    if inputs.behaviour_logprobs is None:
        return {}
    behaviour, policy, mask = inputs.behaviour_logprobs, inputs.need("policy_logprobs").detach(), inputs.mask
    ratios = token_ratios(policy, behaviour, mask)
    return {
        "ratio": masked_mean(ratios, mask),
        "ratio_squared": masked_mean(ratios.square(), mask),
        "ratio_max": masked_max(ratios, mask),
        "kl_k1": masked_mean(k1(behaviour, policy), mask),
        "kl_k2": masked_mean(k2(behaviour, policy), mask),
        "kl_k3": masked_mean(k3(behaviour, policy), mask),
        "logprob_diff_mean": masked_mean((policy - behaviour).abs(), mask),
        "logprob_diff_max": masked_max((policy - behaviour).abs(), mask),
        **ratio_shares(ratios, mask),
    }


@cache
def _edges(device: torch.device) -> Tensor:
    """A copy to a device waits for it: once is enough."""
    return torch.tensor(RATIO_EDGES[1:], device=device, dtype=torch.float32)


def ratio_shares(ratios: Tensor, mask: Tensor) -> Metrics:
    """The histogram of the tokens' `ratios` [T] where `mask` [T]: `ratio_share/<edge>` is the share of those from that
    edge of RATIO_EDGES to the next, the last bin being open. Identity: the shares sum to 1."""
    bins = torch.bucketize(ratios, _edges(ratios.device), right=True)
    is_inside = bins[:, None] == torch.arange(len(RATIO_EDGES), device=ratios.device)
    counts, total = (is_inside & mask[:, None]).sum(0), mask.sum()
    return {f"{RATIO_SHARE}{edge:g}": Mean(counts[index], total) for index, edge in enumerate(RATIO_EDGES)}


@torch.no_grad()
def clip_metrics(surrogate: ClippedSurrogate, mask: Tensor) -> Metrics:
    """Return the share of tokens (or sequences) where `mask` is True that the clip holds back, in all and by side."""
    return {
        "clipped_frac": masked_share(surrogate.is_low | surrogate.is_high, mask),
        "clipped_low_frac": masked_share(surrogate.is_low, mask),
        "clipped_high_frac": masked_share(surrogate.is_high, mask),
    }


@torch.no_grad()
def sequence_ratio_metrics(ratios: Tensor) -> Metrics:
    """Mean and maximum of the ratios [S] of whole sequences."""
    everything = torch.ones_like(ratios, dtype=torch.bool)
    return {"sequence_ratio": masked_mean(ratios, everything), "sequence_ratio_max": masked_max(ratios, everything)}


@torch.no_grad()
def sequence_weight_metrics(inputs: LossInputs) -> Metrics:
    """Return both moments of the completions' importance ratios pi(y|x) / mu(y|x), in float64, as parts that add up."""
    policy, behaviour = inputs.need("policy_logprobs").double(), inputs.need("behaviour_logprobs")
    ratios = sequence_ratios(policy, behaviour, *inputs.segments)
    is_counted = segment_counts(*inputs.segments) > 0
    return {
        "sequence_weight": masked_mean(ratios, is_counted),
        "sequence_weight_squared": masked_mean(ratios.square(), is_counted),
    }


def pair_up(per_sequence: Tensor) -> tuple[Tensor, Tensor]:
    """[S] as the preferred and the rejected of S / 2 adjacent pairs. ShapeError when one is without the other."""
    if len(per_sequence) % 2:
        raise ShapeError("pairs are two adjacent sequences", got=f"{len(per_sequence)} sequences")
    return per_sequence[0::2], per_sequence[1::2]


@torch.no_grad()
def preference_metrics(preferred: Tensor, rejected: Tensor) -> Metrics:
    """Return how often and by how much the preferred of each pair has the larger score; scores [P], a tie is half."""
    everything = torch.ones_like(preferred, dtype=torch.bool)
    return {
        "preference_accuracy": masked_mean((preferred > rejected) + 0.5 * (preferred == rejected), everything),
        "preference_margin": masked_mean(preferred - rejected, everything),
        "score_preferred": masked_mean(preferred, everything),
        "score_rejected": masked_mean(rejected, everything),
    }
