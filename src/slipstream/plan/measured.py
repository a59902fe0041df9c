"""Measured eta curves: seconds per sample against batch size, as one machine's trainer and engine really take.

`benchmarks/eta_curves.py` writes them, `slipstream plan --measured FILE` takes them in place of the hardware table.
LlamaRL (arXiv:2505.24034), definition 7.3: eta(b) = tau(b) / b, where tau(b) are the seconds of a batch of b samples.
Between lengths a share by the token is taken: of the rows that a trainer reads, of the tokens that an engine samples.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.files import decode_json
from slipstream.models.config import TransformerConfig
from slipstream.plan.cost_model import CostModel
from slipstream.plan.hardware import GpuCluster
from slipstream.plan.layouts import AsynchronousPlan, GeneratorLayout, Parts, TrainerLayout, Workload
from slipstream.plan.simulated_run import Batch, Costs, SimulatedWorkload

Side = Literal["trainer", "generator"]
FORMAT = 1
COMMUNICATION = ("tensor_parallel", "data_parallel", "pipeline", "context", "experts")
"""Parts that one GPU alone does not have: they stay as the cost model has them."""
_SHAPE = (
    *("family", "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"),
    *("num_experts", "experts_per_token", "expert_width"),
)


class Point(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A value of eta in seconds per sample, at `batch` samples: the median over turns, and its range."""

    batch: int
    seconds: float
    low: float
    high: float


class EtaCurve(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One side on `devices` devices (cores of a CPU, GPUs): points by ascending batch.

    A batch is a microbatch of the trainer, whose optimizer update takes `update_s` besides, or the completions that an
    engine decodes at once.
    """

    side: Side
    devices: int
    precision: str
    points: tuple[Point, ...]
    update_s: float = 0.0


class Together(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Both sides at the same time on one machine: seconds per sample over those that the side takes alone."""

    trainer_devices: int
    generator_devices: int
    trainer: float
    generator: float


class MeasuredModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The curves of one model; a sample is a prompt and a completion of these lengths, in tokens."""

    name: str
    shape: dict[str, Any]
    num_params: int
    prompt_tokens: int
    completion_tokens: int
    curves: tuple[EtaCurve, ...]
    together: tuple[Together, ...] = ()


class MeasuredCurves(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The curves of one machine; `hardware` has the lines that `slipstream doctor` shows of it."""

    format: int
    command: str
    commit: str
    device: Literal["cpu", "cuda"]
    num_devices: int
    hardware: dict[str, str]
    models: tuple[MeasuredModel, ...]


def read_measured(path: Path) -> MeasuredCurves:
    """Read a file that `benchmarks/eta_curves.py` wrote. ConfigError for any other."""
    hint = "docs/planning.md says how to measure"
    try:
        measured = decode_json(path, MeasuredCurves)
    except OSError as error:
        raise ConfigError(
            f"'{path}' cannot be read", got=error.strerror, allowed="measured curves", hint=hint
        ) from error
    except ValueError as error:  # msgspec's errors are ValueErrors, and so is bad UTF-8
        raise ConfigError(f"'{path}' holds no measured curves", got=error, hint=hint) from error
    if measured.format != FORMAT:
        raise ConfigError(f"'{path}' is of another format", got=measured.format, allowed=FORMAT, hint=hint)
    for name, curve in ((model.name, curve) for model in measured.models for curve in model.curves):
        where, batches = f"({name}, {curve.side} on {curve.devices})", [point.batch for point in curve.points]
        if not batches or batches[0] < 1 or batches != sorted(set(batches)):
            what = f"'{path}' has a curve without order {where}"
            raise ConfigError(what, got=batches, allowed="ascending batches >= 1")
        if curve.devices < 1 or not all(0 < point.seconds < float("inf") for point in curve.points):
            raise ConfigError(f"'{path}' has a curve that cannot be {where}", got=curve, allowed="positive numbers")
    return measured


def interpolated(points: Sequence[tuple[float, float]], at: float) -> float:
    """Return the power law through the neighbours of `at`, beyond the ends the value there; `points` ascend, > 0."""
    places = [place for place, _ in points]
    after = bisect.bisect_left(places, at)
    if after == 0:
        return points[0][1]
    if after == len(points):
        return points[-1][1]
    (x0, y0), (x1, y1) = points[after - 1], points[after]
    share = math.log(at / x0) / math.log(x1 / x0)
    return float(y0 * (y1 / y0) ** share)


def measured_model(measured: MeasuredCurves, shape: TransformerConfig) -> MeasuredModel:
    """Return the curves of the model with this shape. ConfigError where it was not measured."""
    wanted = {name: vars(shape)[name] for name in _SHAPE}
    for model in measured.models:
        if {name: model.shape.get(name, 0) for name in _SHAPE} == wanted:
            return model
    raise ConfigError(
        "the file of measured curves does not have this model",
        got=", ".join(f"{name} {value}" for name, value in wanted.items()),
        allowed=", ".join(
            f"{model.name} ({', '.join(f'{name} {model.shape.get(name)}' for name in _SHAPE[:5])})"
            for model in measured.models
        ),
        hint="docs/planning.md says how to measure others",
    )


PlannedWork = tuple[Costs, dict[str, Any], SimulatedWorkload | None]
"""The work of a plan on a machine's cores, for the simulator: seconds, fields of `SimulatedSetup`, and groups.

The fields are `beside`, and the `row_multiple` that decode steps are filled up to. Without groups there are completions
of the workload's lengths.
"""


class Curves:
    """Seconds of both sides of one measured model, on any number of cores, for any batch and lengths."""

    def __init__(self, model: MeasuredModel) -> None:
        self.model = model
        self.mean_context = model.prompt_tokens + model.completion_tokens / 2  # of a completion while it was measured
        self._rows = model.prompt_tokens + model.completion_tokens - 1  # that the trainer reads of a sample

    def trained_row_s(self, cores: int, rows: float) -> float:
        """Seconds of a forward and backward pass per row, in a microbatch of so many rows."""
        return self._seconds("trainer", cores, rows / self._rows) / self._rows

    def update_s(self, cores: int) -> float:
        """Seconds of an optimizer update; between numbers of cores a straight line."""
        curves = self._of("trainer")
        return float(np.interp(cores, [curve.devices for curve in curves], [curve.update_s for curve in curves]))

    def decoded_token_s(self, cores: int, rows: float) -> float:
        """Seconds per token, with so many completions decoded at once; their prompts are in it."""
        return self._seconds("generator", cores, rows) / self.model.completion_tokens

    def together(self, trainer_cores: int, generator_cores: int) -> tuple[float, float]:
        """Return how much longer trainer and generators take beside each other, in the nearest division measured."""
        if not self.model.together:
            return 1.0, 1.0
        nearest = min(
            self.model.together,
            key=lambda one: (
                abs(math.log(one.trainer_devices / trainer_cores))
                + abs(math.log(one.generator_devices / generator_cores))
            ),
        )
        return max(1.0, nearest.trainer), max(1.0, nearest.generator)

    def train(self, layout: TrainerLayout, workload: Workload) -> Parts:
        """Seconds of a training step, alone on its cores."""
        rows, read = (work.trained_rollouts * work.trained_tokens for work in (workload, workload.of_reference))
        return Parts(self._trained(layout, workload, rows, read))

    def _trained(self, layout: TrainerLayout, workload: Workload, rows: float, read: float) -> dict[str, float]:
        """Return the seconds of a step of so many rows: of the `read` rows of a reference a third of the passes, of a
        critic as long as the policy."""
        row_s = self.trained_row_s(layout.devices, layout.microbatch * workload.trained_tokens)
        models, updates = 1 + workload.critic, workload.epochs * workload.minibatches
        parts = {"forward_backward": models * workload.epochs * rows * row_s}
        parts["optimizer"] = models * updates * self.update_s(layout.devices)
        return parts | ({"reference": read * row_s / 3} if workload.reference else {})

    def generate(self, layout: GeneratorLayout, workload: Workload) -> Parts:
        """Seconds in which the replicas generate a step's completions with all slots taken, alone on their cores."""
        token_s = self.decoded_token_s(layout.tensor_parallel, layout.slots)
        return Parts({"decode": workload.rollouts * workload.lengths.mean * token_s / layout.replicas})

    def guessed(self, plan: AsynchronousPlan) -> str | None:
        """Name the numbers of cores of `plan` that were not measured; None where all were."""
        wanted: dict[Side, int] = {"trainer": plan.trainer.devices, "generator": plan.generator.tensor_parallel}
        unseen = [
            f"the {side} on {cores}"
            for side, cores in wanted.items()
            if cores not in [curve.devices for curve in self._of(side)]
        ]
        return f"No curve was measured of {' or '.join(unseen)} cores: it was interpolated." if unseen else None

    def simulated(self, config: RunConfig, plan: AsynchronousPlan, workload: Workload) -> PlannedWork:  # noqa: ARG002
        """Return the seconds of every piece of work; the curves include what padding costs."""
        cores = plan.generator.tensor_parallel
        shares = [work.trained_rollouts / work.rollouts for work in (workload, workload.of_reference)]

        def train(batch: Batch) -> dict[str, float]:
            rows, read = (batch.prompt_tokens + share * batch.completion_tokens for share in shares)
            return self._trained(plan.trainer, workload, rows, read)

        slower = self.together(plan.trainer.devices, plan.generator.devices)
        beside = {"train": 1 / slower[0], "decode": 1 / slower[1]}
        costs = Costs(decode=lambda _, rows, __: rows * self.decoded_token_s(cores, rows), train=train)
        return costs, {"beside": beside, "row_multiple": 1}, None

    def _seconds(self, side: Side, cores: int, batch: float) -> float:
        curves = [(curve.devices, [(one.batch, one.seconds) for one in curve.points]) for curve in self._of(side)]
        return interpolated([(devices, interpolated(points, batch)) for devices, points in curves], cores)

    def _of(self, side: Side) -> list[EtaCurve]:
        curves = sorted((curve for curve in self.model.curves if curve.side == side), key=lambda curve: curve.devices)
        if not curves:
            raise ConfigError(f"no curve of the {side} was measured for {self.model.name}")
        return curves


class CalibratedCostModel(CostModel):
    """A cost model of which every part that one GPU does alone is scaled by measured over modelled seconds.

    The curves are of the model itself on one GPU. What several GPUs do of it shrinks as the hardware table says, and
    what they send each other is the table's: neither can be measured on one.
    """

    def __init__(
        self, model: TransformerConfig, cluster: GpuCluster, workload: Workload, measured: MeasuredModel
    ) -> None:
        super().__init__(model, cluster, workload)
        self._curves = Curves(measured)

    def _microbatch(self, layout: TrainerLayout, rollouts: float) -> Parts:
        rows = rollouts * self.workload.trained_tokens
        alone = replace(layout, devices=1, tensor_parallel=1, microbatch=rollouts, head_precision=layout.head)
        alone = replace(alone, pipeline_parallel=1, chunks=1, context_parallel=1, expert_parallel=1)
        factor = rows * self._curves.trained_row_s(1, rows) / super()._microbatch(alone, rollouts).total
        return _scaled(super()._microbatch(layout, rollouts), factor)

    def train_floor_s(self, layout: TrainerLayout) -> float:
        """Return 0: measured curves need not fall, so that no layout can be ruled out without timing it."""
        del layout
        return 0.0

    def decode_step(self, layout: GeneratorLayout, *, live: float, context: float) -> Parts:
        return _scaled(super().decode_step(layout, live=live, context=context), self._generator_factor(layout, live))

    def prefill(self, layout: GeneratorLayout, *, prompts: float) -> Parts:
        return _scaled(super().prefill(layout, prompts=prompts), self._generator_factor(layout, layout.slots))

    def _generator_factor(self, layout: GeneratorLayout, live: float) -> float:
        """Measured over modelled seconds of a step of one GPU, in which as many prompts are read as completions end."""
        alone = GeneratorLayout(devices=1, tensor_parallel=1, slots=layout.slots, precision=layout.precision)
        decode_s = super().decode_step(alone, live=live, context=self._curves.mean_context).total
        ended = live / self._curves.model.completion_tokens
        prompts = ended * self._curves.model.prompt_tokens / self.workload.lengths.prompt_mean
        modelled_s = decode_s + super().prefill(alone, prompts=prompts).total
        return live * self._curves.decoded_token_s(1, live) / modelled_s


def _scaled(parts: Parts, factor: float) -> Parts:
    return Parts(
        {name: seconds if name in COMMUNICATION else factor * seconds for name, seconds in parts.parts.items()}
    )
