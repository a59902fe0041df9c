"""Reward models from choices: which of several completions is best."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.algorithms.losses.spec import LossInputs
from slipstream.algorithms.reduce import Mean, Metrics, masked_mean
from slipstream.core.errors import ShapeError


def choice_loss(inputs: LossInputs, *, num_candidates: float) -> tuple[Tensor, Metrics]:
    """Cross-entropy of the chosen candidate under a softmax over the candidates' scores.

        L = -(1/num_choices) * sum_c log softmax(score(y_c1), ..., score(y_cK))[label_c],   K = num_candidates

    Ziegler et al. (arXiv:1909.08593), equation 1, K = 4.
    Identity: equal scores give log K.
    """
    scores, labels = inputs.need("scores"), inputs.need("labels")
    if len(scores) != len(labels) * num_candidates:
        what = "a choice is one label and its candidates' scores"
        got = f"{len(labels)} labels and {len(scores)} scores"
        raise ShapeError(what, got=got, allowed=f"{num_candidates:g} scores per label")
    candidates = scores.view(len(labels), int(num_candidates))
    loss = F.cross_entropy(candidates, labels, reduction="sum") / inputs.num_units
    candidates = candidates.detach()
    everything = torch.ones_like(labels, dtype=torch.bool)
    return loss, {
        "choice_accuracy": Mean((candidates.argmax(dim=1) == labels).sum(), everything.sum()),
        "score_chosen": masked_mean(candidates.gather(1, labels.unsqueeze(1)).squeeze(1), everything),
        "score": masked_mean(candidates.mean(dim=1), everything),
    }
