"""The critic's loss: squared error, clipped around the values that the advantages came from."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.algorithms.losses.spec import LossInputs
from slipstream.algorithms.reduce import Metrics, masked_mean, masked_share


def value_loss(inputs: LossInputs, *, clip: float) -> tuple[Tensor, Metrics]:
    """Half the squared error of the values, taken pessimistically.

        L = (1/num_tokens) * sum_t mask_t * 0.5 * max((v_t - R_t)^2, (v_old_t + clip(v_t - v_old_t, +-clip) - R_t)^2)

    N, "Value function loss clipping": OpenAI's lm-human-preferences, whose coefficient of 0.1 is the trainer's. The
    metrics give its val/{vpred, error, clipfrac, var_explained} and returns/{mean, var}.
    Identity: clip = inf gives half the squared error.
    """
    values, anchor, returns = inputs.need("values"), inputs.need("anchor_values"), inputs.need("returns")
    # Masked before squaring: what stands at other tokens may be anything.
    error = torch.where(inputs.mask, values - returns, 0.0)
    moved = torch.where(inputs.mask, values - anchor, 0.0)
    clipped_error = torch.where(inputs.mask, anchor - returns, 0.0) + moved.clamp(-clip, clip)
    loss = inputs.average(0.5 * torch.maximum(error.square(), clipped_error.square()))
    is_clipped = (moved.abs() > clip) & (clipped_error.square() > error.square())
    values = values.detach()
    return loss, {
        "value": masked_mean(values, inputs.mask),
        "value_squared": masked_mean(values.square(), inputs.mask),
        "value_error": masked_mean(error.detach().square(), inputs.mask),
        "value_clipped_frac": masked_share(is_clipped, inputs.mask),
        "return": masked_mean(returns, inputs.mask),
        "return_squared": masked_mean(returns.square(), inputs.mask),
    }
