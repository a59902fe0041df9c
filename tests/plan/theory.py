"""LlamaRL's theory of asynchronous speed-up as it is stated (arXiv:2505.24034, section 7), to calculate with.

A model of W0 bytes, on G0 devices of M0 bytes, trains B0 samples a step. Model-parallel degrees m are real numbers,
communication is free, and seconds per sample eta depend on the batch b alone and fall with it (assumption 7.1):

    trainer      (4 W0 + A_t b_t) / m_t <= M0        generator    (W0 + K_g b_g) / m_g <= M0
    synchronous  ((4 W0 + A_t b_t) + (W0 + K_g b_g)) / m <= M0,      step  (B0 / G0) m (eta_t + eta_g)
    asynchronous                                                     step  (B0 / G0) max(eta_t m_t / theta,
                                                                                         eta_g m_g / (1 - theta))

A side costs T = min_b eta(b) (fixed + per_sample b) / M0 device-seconds per sample; then theta* = T_t / (T_t + T_g) and
the asynchronous optimum is (B0 / G0) (T_t + T_g) (lemma 11.3). Batches come from a finite list: with unbounded ones
the minimum need not exist (eta = 1 / b falls for ever). At a bound, lemma 11.1's room to increase b is room to lower m.

What this leaves out is what `cost_model.py` is for: integer degrees, communication, copies, more executors than two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from slipstream.core.errors import ConfigError
from slipstream.plan.cost_model import CostModel
from slipstream.plan.layouts import GeneratorLayout, TrainerLayout

Eta = Callable[[float], float]
"""Seconds per sample by batch."""


def eta_t(model: CostModel, layout: TrainerLayout) -> float:
    """Seconds per rollout of a microbatch: LlamaRL's eta_t(b) = tau_t(b) / b, b = `layout.microbatch`."""
    return model._microbatch(layout, layout.microbatch).total / layout.microbatch


def eta_g(model: CostModel, layout: GeneratorLayout) -> float:
    """Seconds per completion with all slots taken: LlamaRL's eta_g(b) = tau_g(b) / b, b = `layout.slots`."""
    return model._full(layout, 1.0).total


@dataclass(frozen=True, kw_only=True)
class Side:
    """Trainer (`fixed` = 4 W0, `per_sample` = A_t) or generator (W0, K_g): bytes, and `eta` over its `batches`."""

    fixed: float
    per_sample: float
    eta: Eta
    batches: Sequence[float]

    def memory(self, batch: float) -> float:
        """Bytes on all devices of one model-parallel group."""
        return self.fixed + self.per_sample * batch


@dataclass(frozen=True, kw_only=True)
class Best:
    """A side's best batch, the degree at which memory is just full, and device-seconds per sample."""

    batch: float
    degree: float
    cost: float


@dataclass(frozen=True, kw_only=True)
class Asynchronous:
    """The optimum of problem (7); `theta` is the trainer's share of devices."""

    trainer: Best
    generator: Best
    theta: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Synchronous:
    """The optimum of problem (6)."""

    train_batch: float
    generate_batch: float
    degree: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Theory:
    """Definition 7.2: `device_bytes` is M0, `devices` G0, `samples` B0."""

    trainer: Side
    generator: Side
    device_bytes: float
    devices: float
    samples: float

    def asynchronous_step(
        self, *, train_batch: float, generate_batch: float, train_degree: float, generate_degree: float, theta: float
    ) -> float:
        """Seconds of a step, equation (3). ConfigError where memory does not hold it, or theta is no share."""
        if not 0 < theta < 1:
            raise ConfigError("theta is the trainer's share of the devices", got=theta, allowed="0 < theta < 1")
        self._check(self.trainer.memory(train_batch), train_degree)
        self._check(self.generator.memory(generate_batch), generate_degree)
        training = self.trainer.eta(train_batch) * train_degree / theta
        generating = self.generator.eta(generate_batch) * generate_degree / (1 - theta)
        return self.samples / self.devices * max(training, generating)

    def synchronous_step(self, *, train_batch: float, generate_batch: float, degree: float) -> float:
        """Seconds of a step, equation (2). ConfigError where memory does not hold it."""
        self._check(self.trainer.memory(train_batch) + self.generator.memory(generate_batch), degree)
        per_sample = self.trainer.eta(train_batch) + self.generator.eta(generate_batch)
        return self.samples / self.devices * degree * per_sample

    def asynchronous(self) -> Asynchronous:
        """The best configuration with a side's own degree each, and a split of the devices (lemmas 11.2 and 11.3)."""
        trainer, generator = self._best(self.trainer), self._best(self.generator)
        total = trainer.cost + generator.cost
        return Asynchronous(
            trainer=trainer,
            generator=generator,
            theta=trainer.cost / total,
            seconds=self.samples / self.devices * total,
        )

    def synchronous(self) -> Synchronous:
        """The best configuration with everything on all devices and one degree (lemma 11.1)."""
        pairs = ((train, generate) for train in self.trainer.batches for generate in self.generator.batches)
        return min((self._full(*pair) for pair in pairs), key=lambda found: found.seconds)

    def _full(self, train_batch: float, generate_batch: float) -> Synchronous:
        degree = (self.trainer.memory(train_batch) + self.generator.memory(generate_batch)) / self.device_bytes
        per_sample = self.trainer.eta(train_batch) + self.generator.eta(generate_batch)
        return Synchronous(
            train_batch=train_batch,
            generate_batch=generate_batch,
            degree=degree,
            seconds=self.samples / self.devices * degree * per_sample,
        )

    def _best(self, side: Side) -> Best:
        """T of equation (10): the constraint is active, as a lower degree costs less."""
        found: Iterable[Best] = (
            Best(batch=batch, degree=degree, cost=side.eta(batch) * degree)
            for batch in side.batches
            for degree in (side.memory(batch) / self.device_bytes,)
        )
        return min(found, key=lambda best: best.cost)

    def _check(self, nbytes: float, degree: float) -> None:
        if nbytes > degree * self.device_bytes * (1 + 1e-12):  # rounding of what is just full
            raise ConfigError(
                "this does not fit in memory",
                got=f"{nbytes:.3g} bytes on {degree:.3g} devices",
                allowed=f"{self.device_bytes:.3g} bytes each",
            )
