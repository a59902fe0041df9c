"""Measured curves as functions: seconds of both sides on any number of cores, for any batch and lengths.

Between points that were measured a power of the batch (and of the number of cores), between lengths by the token: a
trainer's time is per row that it reads, an engine's per token that it samples, with what its prompt took.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

import numpy as np

from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.models.config import TransformerConfig
from slipstream.plan.layouts import AsynchronousPlan, GeneratorLayout, Parts, TrainerLayout, Workload
from slipstream.plan.measured import Curve, Measured, MeasuredModel, Point, Side, Together
from slipstream.plan.simulated_run import Batch, Costs

_SHAPE = ("family", "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")


def interpolated(points: Sequence[tuple[float, float]], at: float) -> float:
    """The power law through the two neighbours of `at`, beyond the ends the value there; points ascend, positive."""
    places = [place for place, _ in points]
    after = bisect.bisect_left(places, at)
    if after == 0:
        return points[0][1]
    if after == len(points):
        return points[-1][1]
    (x0, y0), (x1, y1) = points[after - 1], points[after]
    share = math.log(at / x0) / math.log(x1 / x0)
    return float(y0 * (y1 / y0) ** share)


def measured_model(measured: Measured, shape: TransformerConfig) -> MeasuredModel:
    """The curves of the model with this shape. ConfigError where it was not measured."""
    wanted = {name: vars(shape)[name] for name in _SHAPE}
    for model in measured.models:
        if {name: model.shape.get(name) for name in _SHAPE} == wanted:
            return model
    raise ConfigError(
        "the file of measured curves does not have this model",
        got=", ".join(f"{name} {value}" for name, value in wanted.items()),
        allowed=", ".join(
            f"{model.name} ({', '.join(f'{name} {model.shape.get(name)}' for name in _SHAPE[:5])})"
            for model in measured.models
        ),
        hint="in a checkout, `python benchmarks/eta_curves.py --json FILE` measures some: see its --models",
    )


class Curves:
    """Seconds of both sides of one measured model. Implements `machine.Times`."""

    def __init__(self, model: MeasuredModel) -> None:
        self.model = model
        self._rows = model.prompt_tokens + model.completion_tokens - 1  # that the trainer reads of a sample

    @property
    def mean_context(self) -> float:
        """Tokens that a completion saw in the mean while it was measured."""
        return self.model.prompt_tokens + self.model.completion_tokens / 2

    def trained_row_s(self, cores: int, rows: float) -> float:
        """Forward and backward pass per row, in a microbatch of so many rows."""
        return self._seconds("trainer", cores, rows / self._rows) / self._rows

    def update_s(self, cores: int) -> float:
        """Of the optimizer; between numbers of cores a straight line."""
        curves = self._of("trainer")
        return float(np.interp(cores, [curve.devices for curve in curves], [curve.update_s for curve in curves]))

    def decoded_token_s(self, cores: int, rows: float) -> float:
        """Per token, with so many completions decoded at once; their prompts are in it."""
        return self._seconds("generator", cores, rows) / self.model.completion_tokens

    def together(self, trainer_cores: int, generator_cores: int) -> tuple[float, float]:
        """By what factor trainer and generators take longer beside each other; of the nearest division measured."""
        if not self.model.together:
            return 1.0, 1.0

        def distance(one: Together) -> float:
            trainer, generator = one.trainer_devices / trainer_cores, one.generator_devices / generator_cores
            return abs(math.log(trainer)) + abs(math.log(generator))

        nearest = min(self.model.together, key=distance)
        return max(1.0, nearest.trainer), max(1.0, nearest.generator)

    def train(self, layout: TrainerLayout, workload: Workload) -> Parts:
        """Seconds of a training step, alone on its cores."""
        rows = workload.rollouts * workload.trained_tokens
        row_s = self.trained_row_s(layout.devices, layout.microbatch * workload.trained_tokens)
        updates = workload.epochs * workload.minibatches
        return Parts(
            {
                "forward_backward": workload.epochs * rows * row_s,
                "optimizer": updates * self.update_s(layout.devices),
            }
        )

    def generate(self, layout: GeneratorLayout, workload: Workload) -> Parts:
        """Seconds in which the replicas generate a step's completions with all slots taken, alone on their cores."""
        token_s = self.decoded_token_s(layout.tensor_parallel, layout.slots)
        return Parts({"decode": workload.rollouts * workload.lengths.mean * token_s / layout.replicas})

    def beside(self, plan: AsynchronousPlan) -> dict[str, float]:
        """The speed of each kind of work with all cores busy, of its speed alone."""
        trainer, generator = self.together(plan.trainer.devices, plan.generator.devices)
        return {"train": 1 / trainer, "decode": 1 / generator}

    def row_multiple(self, config: RunConfig) -> int:  # noqa: ARG002
        """What padding costs is in the curves."""
        return 1

    def guessed(self, plan: AsynchronousPlan) -> str | None:
        """What was not measured of the cores that `plan` takes, in words."""
        wanted: dict[Side, int] = {"trainer": plan.trainer.devices, "generator": plan.generator.tensor_parallel}
        unseen = [f"the {side} on {cores}" for side, cores in wanted.items() if self.model.curve(side, cores) is None]
        return f"No curve was measured of {' or '.join(unseen)} cores: it was interpolated." if unseen else None

    def costs(self, config: RunConfig, plan: AsynchronousPlan, workload: Workload) -> Costs:  # noqa: ARG002
        """What the simulator is to take for every piece of work."""
        trainer, cores = plan.trainer, plan.generator.tensor_parallel
        row_s = self.trained_row_s(trainer.devices, trainer.microbatch * workload.trained_tokens)
        update_s = workload.epochs * workload.minibatches * self.update_s(trainer.devices)

        def train(batch: Batch) -> dict[str, float]:
            rows = batch.prompt_tokens + batch.completion_tokens
            return {"forward_backward": workload.epochs * rows * row_s, "optimizer": update_s}

        def decode(replica: int, rows: int, context: float) -> float:  # noqa: ARG001
            return rows * self.decoded_token_s(cores, rows)

        return Costs(decode=decode, train=train)

    def work(self, workload: Workload, seed: int) -> None:
        """Nothing is recorded: completions are drawn from the workload's lengths."""

    def _seconds(self, side: Side, cores: int, batch: float) -> float:
        at_batch = [(curve.devices, interpolated(_pairs(curve.points), batch)) for curve in self._of(side)]
        return interpolated(at_batch, cores)

    def _of(self, side: Side) -> list[Curve]:
        curves = sorted((curve for curve in self.model.curves if curve.side == side), key=lambda curve: curve.devices)
        if not curves:
            raise ConfigError(f"no curve of the {side} was measured for {self.model.name}")
        return curves


def _pairs(points: Sequence[Point]) -> list[tuple[float, float]]:
    return [(point.batch, point.seconds) for point in points]
