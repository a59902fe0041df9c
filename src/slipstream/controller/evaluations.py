"""Evaluations under way: who was asked what, and what has come back. Pure: it says what to send and sends nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slipstream.core.types import EvalScored, Evaluate, Prompt

GREEDY, SAMPLED = 0.0, 1.0


@dataclass
class Evaluation:
    """Answers at `temperature` of the version that `replica` held when it was asked; None: no replica is there."""

    eval_id: int
    temperature: float
    prompts: tuple[Prompt, ...]
    replica: int | None = None
    answers: dict[int, EvalScored] = field(default_factory=dict)
    """By ordinal: an answer may come again from rewards that were started again."""

    @property
    def scores(self) -> list[EvalScored]:
        return list(self.answers.values())


Request = tuple[int, Evaluate]
"""What is to be sent to which replica."""


class Evaluations:
    """`versions`, where it is asked for, are those that the replicas sample from: the newest one is evaluated."""

    def __init__(self) -> None:
        self._pending: dict[int, Evaluation] = {}
        self._num_begun = 0

    def __bool__(self) -> bool:
        """Whether answers are still to come."""
        return bool(self._pending)

    def begin(
        self, prompts: Sequence[Prompt], temperatures: Sequence[float], versions: Mapping[int, int]
    ) -> list[Request]:
        """Evaluate on `prompts`, at each of `temperatures`."""
        asked = temperatures if prompts else ()
        return [request for temperature in asked for request in self._begin(temperature, tuple(prompts), versions)]

    def ask_again(self, versions: Mapping[int, int]) -> list[Request]:
        """Begin anew what replicas that are gone were asked: another may hold another version, and none are mixed."""
        gone = [one for one in self._pending.values() if one.replica is None or one.replica not in versions]
        requests: list[Request] = []
        for evaluation in gone:
            del self._pending[evaluation.eval_id]
            requests += self._begin(evaluation.temperature, evaluation.prompts, versions)
        return requests

    def scored(self, message: EvalScored) -> Evaluation | None:
        """Take an answer; the whole evaluation when it was the last one. What nobody waits for any more is dropped."""
        evaluation = self._pending.get(message.eval_id)
        if evaluation is None:
            return None
        evaluation.answers.setdefault(message.ordinal, message)
        if len(evaluation.answers) < len(evaluation.prompts):
            return None
        return self._pending.pop(message.eval_id)

    def _begin(self, temperature: float, prompts: tuple[Prompt, ...], versions: Mapping[int, int]) -> list[Request]:
        evaluation = Evaluation(self._num_begun, temperature, prompts)
        self._num_begun += 1
        self._pending[evaluation.eval_id] = evaluation
        evaluation.replica = max(versions, key=lambda replica: (versions[replica], -replica), default=None)
        if evaluation.replica is None:
            return []
        return [(evaluation.replica, Evaluate(eval_id=evaluation.eval_id, prompts=prompts, temperature=temperature))]
