"""Reward models from ratings: what number a completion was given."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.algorithms.losses.spec import LossInputs
from slipstream.algorithms.reduce import Metrics, masked_mean
from slipstream.core.errors import ShapeError


def rating_loss(inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """Mean squared error of the scores, as regression on ratings.

        L = (1/num_sequences) * sum_i (score(y_i) - rating_i)^2

    OpenAI's lm-human-preferences, scalar ratings: without a half. Identity: scores equal to the ratings give 0.
    """
    scores, ratings = inputs.need("scores"), inputs.need("ratings")
    if scores.shape != ratings.shape:
        raise ShapeError("one rating is needed per score", got=f"{tuple(ratings.shape)} for {tuple(scores.shape)}")
    loss = (scores - ratings).square().sum() / inputs.num_units
    everything = torch.ones_like(ratings, dtype=torch.bool)
    return loss, {"score": masked_mean(scores.detach(), everything), "rating": masked_mean(ratings, everything)}
