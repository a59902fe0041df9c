"""When an executor counts as lost, and when a lost one is started again. Pure: the caller watches and starts them."""

from __future__ import annotations

import math
from collections import Counter

from slipstream.controller.pipeline import Node, replica_of
from slipstream.core.clock import Clock
from slipstream.core.config import RunConfig

FIRST_S, LONGEST_S = 0.5, 30.0


def delay_s(count: int) -> float:
    """Return the seconds before the `count`-th restart: min(0.5 * 2^(count - 1), 30)."""
    return min(FIRST_S * 2.0 ** min(count - 1, 32), LONGEST_S)


class Restarts:
    """At most `max_restarts` of each executor, the first after half a second, each after twice the time of the last."""

    def __init__(self, max_restarts: int, clock: Clock, counts: Counter[str] | None = None) -> None:
        """`counts`: how often each was started again so far, those that wait for it included; goes on counting."""
        self.max_restarts = max_restarts
        self.counts: Counter[str] = Counter() if counts is None else counts
        self._clock = clock
        self._due_s: dict[str, float] = {}

    def plan(self, executor: str) -> float | None:
        """Return the seconds until `executor`, which was lost, is started again; None after `max_restarts` times."""
        if self.counts[executor] >= self.max_restarts:
            return None
        self.counts[executor] += 1
        delay = delay_s(self.counts[executor])
        self._due_s[executor] = self._clock.now_s() + delay
        return delay

    def left(self, executor: str) -> int:
        return self.max_restarts - self.counts[executor]

    def take_due(self) -> list[str]:
        """Return the executors whose time has come, each once, the earliest first."""
        now_s = self._clock.now_s()
        due = sorted((s, name) for name, s in self._due_s.items() if s <= now_s)
        for _, name in due:
            del self._due_s[name]
        return [name for _, name in due]

    def wait_s(self) -> float:
        """Return the seconds until `take_due` has an executor."""
        return max(0.0, min(self._due_s.values(), default=math.inf) - self._clock.now_s())


class Patience:
    """The seconds that children may work without a message, and `start_s` for one that is started again to join."""

    def __init__(self, config: RunConfig) -> None:
        generator, teacher = config.generator, config.teacher
        vllm_s = generator.vllm.start_timeout_s + generator.vllm.answer_timeout_s if generator.engine == "vllm" else 0.0
        self._lease_s = config.lease_s
        self._generator_s = max(config.lease_s, vllm_s)  # its longest wait for vLLM in a step
        self._trainer_s = self._teacher_s = max(config.lease_s, config.deadline_s)
        if config.has_own_teacher and teacher.engine == "vllm":
            self._teacher_s = max(self._trainer_s, teacher.vllm.start_timeout_s + teacher.vllm.silence_timeout_s)
        self.start_s = max(self._teacher_s, self._generator_s)

    def of(self, node: Node, *, is_ready: bool) -> float:
        """Return those of a process of `node`: more than a lease where it loads a model, trains, or waits for vLLM."""
        if not is_ready:
            return self.start_s
        if not node.is_replaceable:
            return self._teacher_s if node.name == "teacher" else self._trainer_s
        return self._lease_s if replica_of(node.name) is None else self._generator_s
