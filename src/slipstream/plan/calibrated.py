"""The cost model with curves that were measured on one of its GPUs in place of the hardware table."""

from __future__ import annotations

from slipstream.models.config import TransformerConfig
from slipstream.plan.cost_model import CostModel
from slipstream.plan.curves import Curves
from slipstream.plan.hardware import Cluster
from slipstream.plan.layouts import GeneratorLayout, Parts, TrainerLayout, Workload
from slipstream.plan.measured import MeasuredModel

COMMUNICATION = ("tensor_parallel", "data_parallel")
"""Parts that one GPU alone does not have: they stay as the model has them."""


class CalibratedCostModel(CostModel):
    """Every part of a pass that one GPU does alone is scaled by measured over modelled seconds, at the same batch.

    The curves are of the model itself on one GPU. What several GPUs do of it shrinks as the hardware table says, and
    what they send each other is the table's: neither can be measured on one.
    """

    def __init__(self, model: TransformerConfig, cluster: Cluster, workload: Workload, measured: MeasuredModel) -> None:
        super().__init__(model, cluster, workload)
        self._curves = Curves(measured)

    def _microbatch(self, layout: TrainerLayout, rollouts: float) -> Parts:
        rows = rollouts * self.workload.trained_tokens
        alone = TrainerLayout(
            devices=1,
            tensor_parallel=1,
            microbatch=rollouts,
            precision=layout.precision,
            recompute=layout.recompute,
            head_precision=layout.head_precision,
        )
        factor = rows * self._curves.trained_row_s(1, rows) / super()._microbatch(alone, rollouts).total
        return _scaled(super()._microbatch(layout, rollouts), factor)

    def decode_step(self, layout: GeneratorLayout, *, live: float, context: float) -> Parts:
        alone = GeneratorLayout(devices=1, tensor_parallel=1, slots=layout.slots, precision=layout.precision)
        seen = self._curves.mean_context
        measured_s = live * self._curves.decoded_token_s(1, live)
        factor = measured_s / super().decode_step(alone, live=live, context=seen).total
        return _scaled(super().decode_step(layout, live=live, context=context), factor)


def _scaled(parts: Parts, factor: float) -> Parts:
    return Parts(
        {name: seconds if name in COMMUNICATION else factor * seconds for name, seconds in parts.parts.items()}
    )
