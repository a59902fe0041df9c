"""When what was lost is started again: on a virtual clock."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from slipstream.controller.pipeline import Node
from slipstream.controller.restarts import Patience, Restarts, delay_s
from slipstream.core.clock import VirtualClock
from slipstream.core.recipes import resolve


def test_the_delay_doubles_from_half_a_second_to_half_a_minute() -> None:
    assert [delay_s(count) for count in range(1, 10)] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert delay_s(10_000) == 30.0


def test_each_is_due_once_and_when_it_was_said() -> None:
    clock = VirtualClock(100.0)
    restarts = Restarts(3, clock)
    assert restarts.wait_s() == math.inf
    assert restarts.plan("a") == 0.5
    clock.advance(0.25)
    assert restarts.plan("b") == 0.5
    assert restarts.plan("b") == 1.0, "lost again before its time: the later one counts"
    assert restarts.wait_s() == pytest.approx(0.25)
    assert restarts.take_due() == []
    clock.advance(0.25)
    assert restarts.take_due() == ["a"]
    assert restarts.take_due() == []
    clock.advance(restarts.wait_s())
    assert restarts.take_due() == ["b"]
    assert restarts.wait_s() == math.inf
    assert restarts.counts == {"a": 1, "b": 2}


def test_each_has_a_budget_of_its_own_that_is_never_refilled() -> None:
    clock = VirtualClock()
    counts = Counter({"a": 1})
    restarts = Restarts(2, clock, counts)
    assert restarts.left("a") == 1
    assert restarts.plan("a") == 1.0, "the second one"
    assert restarts.left("a") == 0
    clock.advance(1e6)
    assert restarts.plan("a") is None
    assert restarts.plan("b") == 0.5
    assert counts == {"a": 2, "b": 1}
    assert Restarts(0, clock).plan("a") is None


@pytest.mark.parametrize(
    ("engine", "start_s", "generator_s"), [("native", 90.0, 10.0), ("vllm", 100.0 + 50.0, 100.0 + 50.0)]
)
def test_who_loads_a_model_trains_or_waits_for_vllm_may_be_silent_for_longer(
    engine: str, start_s: float, generator_s: float
) -> None:
    generator = {"vllm": {"start_timeout_s": 100.0, "answer_timeout_s": 50.0}}
    config = resolve("quickstart", {"lease_s": 10.0, "deadline_s": 90.0, "generator": generator})
    config = config.model_copy(update={"generator": config.generator.model_copy(update={"engine": engine})})
    patience = Patience(config)
    nodes = {
        name: Node(name, dict, is_replaceable=name != "trainer")  # type: ignore[arg-type]
        for name in ("generator-1", "rewards", "trainer")
    }
    assert {patience.of(node, is_ready=False) for node in nodes.values()} == {patience.start_s} == {start_s}
    assert [patience.of(node, is_ready=True) for node in nodes.values()] == [generator_s, 10.0, 90.0]


def test_a_teacher_that_waits_for_vllm_may_be_silent_for_longer() -> None:
    vllm = {"start_timeout_s": 200.0, "silence_timeout_s": 30.0}
    teacher = {"path": "t", "coef": 0.1, "executor": "own", "top_k": 4, "engine": "vllm", "vllm": vllm}
    patience = Patience(resolve("quickstart", {"lease_s": 10.0, "deadline_s": 90.0, "teacher": teacher}))
    assert patience.start_s == 230.0
    waits = [patience.of(Node(name, dict), is_ready=True) for name in ("teacher", "trainer")]  # type: ignore[arg-type]
    assert waits == [230.0, 90.0]
