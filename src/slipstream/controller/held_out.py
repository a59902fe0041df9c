"""The held-out side of a run: it asks replicas for evaluations, and acts on their results.

`PendingEvaluations` has their state, `EarlyStopping` the rules of an early end, `BestModel` the folder `best/`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from slipstream.controller.best import BestModel, EarlyStopping
from slipstream.controller.evaluations import GREEDY, EvaluationDone, PendingEvaluations, Request
from slipstream.controller.observers import Observers
from slipstream.controller.schedule import SchedulingPolicy
from slipstream.core.config import RunConfig
from slipstream.core.held_out import measured
from slipstream.core.service_messages import EvalScored, Evaluating, Settled
from slipstream.core.types import Message, Prompt


class HeldOut:
    """The evaluations of a run on held-out `prompts`. `send` takes an executor's name and a message for it."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        prompts: Sequence[Prompt],
        schedule: SchedulingPolicy,
        observers: Observers,
        send: Callable[[str, Message], None],
    ) -> None:
        self._config, self._schedule, self._observers, self._send = config, schedule, observers, send
        self._prompts = prompts[: config.eval.num_prompts]
        self.pending = PendingEvaluations(every=config.eval.every, steps=config.steps)
        self.early_stopping, self.best = EarlyStopping(config.eval), BestModel(run_dir, config.eval)
        for known in observers.tally.evaluations.values():
            if known.greedy is not None:
                self.early_stopping.take(known.greedy)

    def first(self) -> tuple[float, ...]:
        """Return the temperatures at which the policy that this run begins with is to be evaluated."""
        schedule, known = self._schedule, self._observers.tally.evaluations
        return () if schedule.is_finished else self.pending.first(schedule.steps_done, known)

    def evaluate(self, temperatures: Sequence[float]) -> None:
        """Ask for answers to the held-out prompts, at each temperature."""
        self._ask(self.pending.begin(self._prompts, temperatures, self._schedule.versions))

    def ask_again(self) -> None:
        """Ask other replicas for the answers of those that are lost."""
        self._ask(self.pending.ask_again(self._schedule.versions))

    def _ask(self, requests: Sequence[Request]) -> None:
        for replica, request in requests:
            self._send(f"generator-{replica}", request)

    def began(self, message: Evaluating) -> None:
        """Take from a replica which version answers; the candidates that no evaluation is of go."""
        self.pending.began(message)
        self.best.began(self.pending.may_be_of)

    def scored(self, message: EvalScored) -> None:
        """Take an answer. With the last one of an evaluation observers, the rules and the best model get its result."""
        evaluation = self.pending.scored(message)
        if evaluation is None:
            return
        if evaluation.replica is not None:
            self._send(f"generator-{evaluation.replica}", Settled(eval_ids=(evaluation.eval_id,)))
        found = measured(evaluation.scores, self._config.eval.measure)
        version = message.version if evaluation.version is None else evaluation.version
        self._observers.take(EvaluationDone(version, evaluation.temperature, found, evaluation.scores))
        if evaluation.temperature == GREEDY:
            self.best.evaluated(version, found)
            self.early_stopping.take(found)

    def export_candidate(self, version: int) -> None:
        """Have the trainer export `version`, its present one, where it may be evaluated and become the best."""
        is_published = version % self._config.publish_every == 0
        if is_published and self.pending.may_be_of(version) and (command := self.best.candidate(version)):
            self._send("trainer", command)
