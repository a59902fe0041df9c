"""The held-out side of a run: it asks replicas for evaluations, and acts on their results.

`PendingEvaluations` has their state, `EarlyStopping` the rules of an early end, `BestModel` the folder `best/`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from slipstream.controller.best import BestModel, EarlyStopping
from slipstream.controller.evaluations import GREEDY, SAMPLED, EvaluationDone, PendingEvaluations, Request
from slipstream.controller.observers import Observers
from slipstream.controller.pipeline import RunInput
from slipstream.controller.schedule import SchedulingPolicy
from slipstream.core.config import RunConfig
from slipstream.core.held_out import measured
from slipstream.core.service_messages import EvalScored, Evaluating, Settled
from slipstream.core.stage_sections import EvalSet
from slipstream.core.types import Message


class HeldOut:
    """The evaluations of a run on the held-out prompts of `work`. `send` takes an executor's name and a message."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        work: RunInput,
        schedule: SchedulingPolicy,
        observers: Observers,
        send: Callable[[str, Message], None],
    ) -> None:
        self._config, self._schedule, self._observers, self._send = config, schedule, observers, send
        own = EvalSet(name="own", num_prompts=config.eval.num_prompts)
        self._sets = [(one, work.sets[one.name]) for one in config.eval.sets]
        self._sets = self._sets or [(own, work.held_out[: own.num_prompts])]
        self.pending = PendingEvaluations(every=config.eval.every, steps=config.steps)
        self._began_at = schedule.steps_done  # a resumed run publishes the version that it goes on with
        self.early_stopping, self.best = EarlyStopping(config.eval), BestModel(run_dir, config.eval)
        for version, known in observers.tally.evaluations.items():
            if known.greedy is not None:
                self.early_stopping.take(known.greedy)
                self.best.evaluated(version, known.greedy)  # its export may have been cut off

    def first(self) -> tuple[float, ...]:
        """Return the temperatures at which the policy that this run begins with is to be evaluated."""
        schedule, tally = self._schedule, self._observers.tally
        names = ["" if index == 0 else one.name for index, (one, _) in enumerate(self._sets)]
        known = [version for version in tally.evaluations if all(tally.knows(version, name, GREEDY) for name in names)]
        return () if schedule.is_finished else self.pending.first(schedule.steps_done, known)

    def evaluate(self, temperatures: Sequence[float], version: int | None = None) -> None:
        """Ask for answers to the held-out prompts, at each temperature; of `version` those that are not known."""
        tally = self._observers.tally
        for index, (one, prompts) in enumerate(self._sets):
            name = one.name if index else ""
            for kind in temperatures:
                if (name and kind != GREEDY) or (version is not None and tally.knows(version, name, kind)):
                    continue
                times, at = (one.num_samples, one.temperature) if kind == GREEDY else (1, kind)
                asked = [prompt for _ in range(times) for prompt in prompts]
                self._ask(self.pending.begin(asked, kind, self._schedule.versions, name=name, at=at))

    def evaluate_last(self, version: int) -> None:
        """Ask for what is not known of the last version."""
        self.evaluate((GREEDY, SAMPLED), version)

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
        asked = [evaluation.prompts[ordinal].prompt_id for ordinal in evaluation.answers]
        found = measured(evaluation.scores, self._config.eval.measure_of(evaluation.name), asked)
        version = message.version if evaluation.version is None else evaluation.version
        self._observers.take(EvaluationDone(version, evaluation.temperature, found, evaluation.scores, evaluation.name))
        if evaluation.temperature == GREEDY and not evaluation.name:
            self.best.evaluated(version, found)
            self.early_stopping.take(found)

    def export_candidate(self, version: int) -> None:
        """Have the trainer export `version`, its present one, where it may be evaluated and become the best, or where
        its result, from before a resume, makes it the best."""
        is_published = version % self._config.publish_every == 0 or version == self._began_at
        may_be = is_published and self.pending.may_be_of(version)
        if command := self.best.candidate(version) if may_be else self.best.last(version):
            self._send("trainer", command)
