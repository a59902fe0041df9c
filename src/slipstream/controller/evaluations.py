"""Evaluations of a run: when they are due, who was asked what, and what has come back. Pure: it sends nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from slipstream.core.held_out import Measured
from slipstream.core.run_log import Event
from slipstream.core.service_messages import EvalScored, Evaluate, Evaluating
from slipstream.core.types import Prompt, StepDone, Swapped

GREEDY, SAMPLED = 0.0, 1.0
"""The kinds of an evaluation, by the temperature of its answers; a set of `eval.sets` has its own for the first."""


class EvaluationDone(NamedTuple):
    """The answers of `version`, of a kind, to the held-out prompts, and what they come to.

    `name` is that of their set: empty for the primary one.
    """

    version: int
    temperature: float
    found: Measured
    scores: list[EvalScored]
    name: str = ""


@dataclass
class PendingEvaluation:
    """Answers, of the kind `temperature`, of the version that `replica` held when asked; None: no replica is there.

    Those of the set `name` are sampled `at` a temperature.
    """

    eval_id: int
    temperature: float
    prompts: tuple[Prompt, ...]
    name: str = ""
    at: float = GREEDY
    replica: int | None = None
    version: int | None = None
    """The version that answers; None until the replica has said it."""
    answers: dict[int, EvalScored] = field(default_factory=dict)
    """By ordinal: an answer may come again from rewards that were started again."""

    @property
    def scores(self) -> list[EvalScored]:
        return list(self.answers.values())


Request = tuple[int, Evaluate]
"""A replica, and what is to be sent to it."""


class PendingEvaluations:
    """The evaluations of a run of `steps` steps: at its ends, and every `every` steps (0: never). Of `versions`, the
    newest is evaluated."""

    def __init__(self, *, every: int = 0, steps: int = 0) -> None:
        self._every, self._steps = every, steps
        self._due: int | None = None  # once a replica holds this version
        self._is_first_due = False
        self._pending: dict[int, PendingEvaluation] = {}
        self._num_begun = 0

    def __bool__(self) -> bool:
        """Return whether answers are still to come."""
        return bool(self._pending)

    def first(self, step: int, known: Collection[int]) -> tuple[float, ...]:
        """Return the temperatures at which the policy that RL begins with is to be evaluated.

        After a resume that is what a crash has cut off: version `step`, if it was due and is not among the `known`.
        """
        self._is_first_due = step == 0 or (self._is_due_at(step) and step not in known)
        return (GREEDY, SAMPLED)[: 2 if step == 0 else self._is_first_due]

    def may_be_of(self, version: int) -> bool:
        """Whether `version` is evaluated, or may yet be: the version of an evaluation that is due is not known."""
        is_due = self._is_first_due or (self._due is not None and version >= self._due)
        greedy = [one.version for one in self._pending.values() if one.temperature == GREEDY and not one.name]
        return is_due or version in greedy or None in greedy

    def may_run_of(self, version: int) -> bool:
        """Whether answers to come are of `version`, or of one that is not known yet."""
        return any(one.version in (None, version) for one in self._pending.values())

    def began(self, message: Evaluating) -> None:
        """Take from a replica which version answers."""
        if message.eval_id in self._pending:
            self._pending[message.eval_id].version = message.version

    def next(self, event: Event) -> tuple[float, ...]:
        """Return the temperatures at which an evaluation is to begin upon `event`."""
        if isinstance(event, StepDone) and self._is_due_at(event.step + 1):
            self._due = event.step + 1
        if self._due is None or not isinstance(event, Swapped) or event.version < self._due:
            return ()
        self._due = None
        return (GREEDY,)

    def _is_due_at(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0 and step < self._steps

    def begin(
        self,
        prompts: Sequence[Prompt],
        temperature: float,
        versions: Mapping[int, int],
        *,
        name: str = "",
        at: float | None = None,
    ) -> list[Request]:
        """Begin an evaluation on `prompts` at `temperature`; return what is to be sent."""
        self._is_first_due = False
        asked = PendingEvaluation(0, temperature, tuple(prompts), name=name, at=temperature if at is None else at)
        return self._begin(asked, versions) if prompts else []

    def ask_again(self, versions: Mapping[int, int]) -> list[Request]:
        """Begin anew what replicas were asked that are gone; answers of two versions are not mixed."""
        gone = [one for one in self._pending.values() if one.replica is None or one.replica not in versions]
        requests: list[Request] = []
        for evaluation in gone:
            del self._pending[evaluation.eval_id]
            requests += self._begin(evaluation, versions)
        return requests

    def scored(self, message: EvalScored) -> PendingEvaluation | None:
        """Take an answer; return its evaluation when it was the last one. Answers that nobody waits for are dropped."""
        evaluation = self._pending.get(message.eval_id)
        if evaluation is None:
            return None
        evaluation.answers.setdefault(message.ordinal, message)
        if len(evaluation.answers) < len(evaluation.prompts):
            return None
        return self._pending.pop(message.eval_id)

    def _begin(self, asked: PendingEvaluation, versions: Mapping[int, int]) -> list[Request]:
        evaluation = replace(asked, eval_id=self._num_begun, version=None, answers={})
        self._num_begun += 1
        self._pending[evaluation.eval_id] = evaluation
        evaluation.replica = max(versions, key=lambda replica: (versions[replica], -replica), default=None)
        if evaluation.replica is None:
            return []
        request = Evaluate(eval_id=evaluation.eval_id, prompts=evaluation.prompts, temperature=evaluation.at)
        return [(evaluation.replica, request)]
