"""LlamaRL's lemmas against brute force, over random memory, bounds and decreasing eta, tabulated and parametric."""

from __future__ import annotations

import itertools
import math

import pytest
from drawn import drawn
from hypothesis import given, settings
from hypothesis import strategies as st
from theory import Eta, Side, Theory

from slipstream.core.errors import ConfigError

positive = st.floats(0.01, 100.0)
SLACK = (1.0, 1.001, 1.2, 3.0)
"""Degrees that are tried, over the one at which memory is full."""
SHARES = [i / 40 for i in range(1, 40)]


@st.composite
def tabulated(draw: st.DrawFn, count: int) -> Eta:
    """Any strictly decreasing numbers for batches 1 .. count."""
    steps = draw(st.lists(st.floats(0.001, 10.0), min_size=count, max_size=count))
    table = list(itertools.accumulate(steps, initial=draw(st.floats(0.001, 1.0))))[count:0:-1]
    return lambda batch: table[int(batch) - 1]


@st.composite
def parametric(draw: st.DrawFn) -> Eta:
    """Saturating throughput: a floor, and what a batch costs whatever its size, shared by its samples."""
    floor, shared, power = draw(st.floats(0.0, 2.0)), draw(positive), draw(st.floats(0.2, 2.0))
    return lambda batch: floor + shared / batch**power


@st.composite
def theories(draw: st.DrawFn) -> Theory:
    def side(weights: float) -> Side:
        count = draw(st.integers(1, 8))
        eta = draw(st.one_of(tabulated(count), parametric()))
        return Side(fixed=weights, per_sample=draw(positive), eta=eta, batches=range(1, count + 1))

    weights = draw(positive)
    return Theory(
        trainer=side(4 * weights),
        generator=side(weights),
        device_bytes=draw(positive),
        devices=draw(st.floats(1, 1000)),
        samples=draw(st.floats(1, 1000)),
    )


def asynchronous_points(theory: Theory, shares: list[float]):
    """Feasible points of problem (7): all batches, degrees with and without slack, and shares."""
    for b_t, b_g, slack_t, slack_g, theta in itertools.product(
        theory.trainer.batches, theory.generator.batches, SLACK, SLACK, shares
    ):
        m_t = slack_t * (theory.trainer.fixed + theory.trainer.per_sample * b_t) / theory.device_bytes
        m_g = slack_g * (theory.generator.fixed + theory.generator.per_sample * b_g) / theory.device_bytes
        yield b_t, b_g, m_t, m_g, theta


def step(theory: Theory, b_t: float, b_g: float, m_t: float, m_g: float, theta: float) -> float:
    """Equation (3), written out."""
    training = theory.trainer.eta(b_t) * m_t / theta
    generating = theory.generator.eta(b_g) * m_g / (1 - theta)
    return theory.samples / theory.devices * max(training, generating)


@given(theories())
@settings(max_examples=25, deadline=None)
def test_no_asynchronous_point_beats_the_optimum(theory: Theory) -> None:
    found = theory.asynchronous()
    reached = theory.asynchronous_step(
        train_batch=found.trainer.batch,
        generate_batch=found.generator.batch,
        train_degree=found.trainer.degree,
        generate_degree=found.generator.degree,
        theta=found.theta,
    )
    assert reached == pytest.approx(found.seconds)
    shares = [*SHARES[::4], found.theta]
    best = min(step(theory, *point) for point in asynchronous_points(theory, shares))
    assert best == pytest.approx(found.seconds)


@drawn(30, 100, theory=theories())
def test_memory_is_full_and_both_sides_take_as_long(theory: Theory) -> None:
    found = theory.asynchronous()
    for side, best in ((theory.trainer, found.trainer), (theory.generator, found.generator)):
        assert (side.fixed + side.per_sample * best.batch) / best.degree == pytest.approx(theory.device_bytes)
    training, generating = found.trainer.cost / found.theta, found.generator.cost / (1 - found.theta)
    assert training == pytest.approx(generating)
    assert theory.samples / theory.devices * training == pytest.approx(found.seconds)


@drawn(30, 100, theory=theories(), slack=st.floats(1.0001, 10), shift=st.floats(-0.2, 0.2))
def test_slack_in_memory_and_another_split_cost_time(theory: Theory, slack: float, shift: float) -> None:
    found = theory.asynchronous()
    at = (found.trainer.batch, found.generator.batch, found.trainer.degree, found.generator.degree, found.theta)
    b_t, b_g, m_t, m_g, theta = at
    assert step(theory, b_t, b_g, m_t * slack, m_g, theta) > step(theory, *at)
    assert step(theory, b_t, b_g, m_t, m_g * slack, theta) > step(theory, *at)
    other = min(max(theta + shift, theta / 2), (1 + theta) / 2)
    if abs(other - theta) > 1e-9:
        assert step(theory, b_t, b_g, m_t, m_g, other) > step(theory, *at)


@given(theories())
@settings(max_examples=60, deadline=None)
def test_no_synchronous_point_beats_the_optimum_and_memory_is_full(theory: Theory) -> None:
    found = theory.synchronous()
    trainer, generator = theory.trainer, theory.generator
    best = math.inf
    for b_t, b_g, slack in itertools.product(trainer.batches, generator.batches, SLACK):
        nbytes = trainer.fixed + trainer.per_sample * b_t + generator.fixed + generator.per_sample * b_g
        seconds = slack * nbytes / theory.device_bytes * (trainer.eta(b_t) + generator.eta(b_g))
        best = min(best, theory.samples / theory.devices * seconds)
    assert found.seconds == pytest.approx(best)
    held = trainer.memory(found.train_batch) + generator.memory(found.generate_batch)
    assert held / found.degree == pytest.approx(theory.device_bytes)


@drawn(50, 200, theory=theories())
def test_asynchronous_is_strictly_faster(theory: Theory) -> None:
    """Theorem 7.5."""
    assert theory.asynchronous().seconds < theory.synchronous().seconds


@drawn(30, 100, theory=theories(), gain=st.floats(0.3, 0.9))
def test_lemma_11_3_moves_theta_down_not_up(theory: Theory, gain: float) -> None:
    """A trainer that costs less lets both sides finish earlier with a smaller share; the print shifts theta up,

    where b / (1 - theta - e) < b / (1 - theta) fails and the generator, which decides, takes longer.
    """
    found = theory.asynchronous()
    training, generating, theta = gain * found.trainer.cost, found.generator.cost, found.theta
    shift = 0.01 * min(theta, 1 - theta) * (1 - gain)
    before = max(found.trainer.cost / theta, generating / (1 - theta))
    assert max(training / (theta - shift), generating / (1 - theta + shift)) < before
    assert generating / (1 - theta - shift) > before


def test_by_hand() -> None:
    """W0 = 10, A = K = 1, M0 = 10: training one sample at a time takes m = 4.1, ten at a time m = 5 and a third."""
    theory = Theory(
        trainer=Side(fixed=40, per_sample=1, eta={1: 3.0, 10: 1.0}.__getitem__, batches=(1, 10)),
        generator=Side(fixed=10, per_sample=1, eta={1: 2.0, 10: 0.5}.__getitem__, batches=(1, 10)),
        device_bytes=10,
        devices=60,
        samples=120,
    )
    found = theory.asynchronous()
    assert (found.trainer.batch, found.trainer.degree, found.trainer.cost) == (10, 5.0, 5.0)
    assert (found.generator.batch, found.generator.degree, found.generator.cost) == (10, 2.0, 1.0)
    assert found.theta == pytest.approx(5 / 6)
    assert found.seconds == pytest.approx(2 * (5 + 1))
    together = theory.synchronous()
    assert (together.train_batch, together.generate_batch, together.degree) == (10, 10, 7.0)
    assert together.seconds == pytest.approx(2 * 7 * 1.5)


def test_without_a_bound_on_batches_there_may_be_no_optimum() -> None:
    """eta = 1 / b: device-seconds fall with every larger batch, towards A / M0."""
    costs = []
    for bound in (10, 100, 1000):
        side = Side(fixed=4.0, per_sample=2.0, eta=lambda batch: 1 / batch, batches=range(1, bound + 1))
        theory = Theory(trainer=side, generator=side, device_bytes=1.0, devices=1.0, samples=1.0)
        best = theory.asynchronous().trainer
        assert best.batch == bound
        costs.append(best.cost)
    assert costs[0] > costs[1] > costs[2] > 2.0


def test_what_does_not_fit_is_refused() -> None:
    side = Side(fixed=4.0, per_sample=1.0, eta=lambda batch: 1 / batch, batches=(1,))
    theory = Theory(trainer=side, generator=side, device_bytes=1.0, devices=10.0, samples=1.0)
    with pytest.raises(ConfigError, match="does not fit"):
        theory.asynchronous_step(train_batch=1, generate_batch=1, train_degree=4.9, generate_degree=5, theta=0.5)
    with pytest.raises(ConfigError, match="share of the devices"):
        theory.asynchronous_step(train_batch=1, generate_batch=1, train_degree=5, generate_degree=5, theta=1.0)
    with pytest.raises(ConfigError, match="does not fit"):
        theory.synchronous_step(train_batch=1, generate_batch=1, degree=9.9)
