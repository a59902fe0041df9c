"""The controller: a process that runs the schedule over the executors, keeps the ledger, evaluates, ends the run.

    consumes      events of all executors, and that one was lost (`controller/executors.py`)
    produces      commands: admissions, training steps, evaluations, checkpoints, the end
    waits for     any event, at most `deadline_s` without one
    ends when     the last step is trained and swapped in, evaluated and exported; or is interrupted; or with an error

Decisions are the schedule's (`controller/schedule.py`); completions and weights never come here. Observers take each
message and each decision (`controller/observers.py`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from slipstream.controller.best import BestModel, EarlyStopping
from slipstream.controller.callbacks import Callbacks
from slipstream.controller.evaluations import GREEDY, EvaluationDone, PendingEvaluations, Request
from slipstream.controller.executors import Executors
from slipstream.controller.ledger import Ledger
from slipstream.controller.meeting import Cluster
from slipstream.controller.observers import Observers
from slipstream.controller.pipeline import CONTROLLER, Pipeline, RunInput, replica_of
from slipstream.controller.schedule import SchedulingPolicy
from slipstream.controller.tally import Tally
from slipstream.controller.waiting import WaitReasons
from slipstream.core.channel import make_transport_dir
from slipstream.core.clock import WallClock
from slipstream.core.config import RunConfig
from slipstream.core.errors import SlipstreamError
from slipstream.core.held_out import measured
from slipstream.core.interrupts import Interrupts
from slipstream.core.peer_messages import Leaving, Left
from slipstream.core.run_log import Command, Event
from slipstream.core.scratch import claim, cleanup, sweep
from slipstream.core.service_messages import (
    Checkpoint,
    CheckpointSaved,
    CompletionsFinished,
    Counters,
    EvalScored,
    Evaluating,
    Export,
    Exported,
    Noted,
    Progress,
    Publish,
    Published,
    Ready,
    Settled,
)
from slipstream.core.types import (
    Admit,
    CompletionFinished,
    GroupScored,
    Message,
    ReplicaLost,
    Skip,
    StartGroup,
    StepDone,
    Stop,
    StopCause,
    Swapped,
    TrainStep,
)
from slipstream.observe.recorder import EventRecorder
from slipstream.observe.timeline import TIME_PREFIX, Timeline, timeline_path


class Controller:
    """Run a pipeline once. `run` returns the tally; the caller writes summary and report from it."""

    def __init__(
        self,
        config: RunConfig,
        pipeline: Pipeline,
        schedule: SchedulingPolicy,
        work: RunInput,
        observers: Observers,
        *,
        run_dir: Path,
        cluster: Cluster | None = None,
        interrupts: Interrupts | None = None,
        callbacks: Callbacks | None = None,
    ) -> None:
        self.config, self.pipeline, self.schedule, self.work = config, pipeline, schedule, work
        self.observers, self.tally = observers, observers.tally
        self.run_dir = run_dir.resolve()  # groups on other machines have another working directory
        self.cluster, self.interrupts = cluster, Interrupts() if interrupts is None else interrupts
        self.clock = WallClock()
        path, threads = timeline_path(run_dir, CONTROLLER), pipeline.inline_threads_alone
        self.timeline = Timeline(CONTROLLER, path, self.clock, threads_alone=threads)
        self.ledger = Ledger(run_dir / "ledger.jsonl")
        self.events = EventRecorder(run_dir / "events.jsonl", self.clock, num_events=work.num_events)
        self.executors = Executors(
            config,
            pipeline,
            self.run_dir,
            clock=self.clock,
            note=observers.note,
            lost=self.tally.lost,
            spans=self.timeline,
            restarts=self.tally.restarts,
        )
        self.evaluations = PendingEvaluations(every=config.eval.every, steps=config.steps)
        self.early_stopping, self.best = EarlyStopping(config.eval), BestModel(self.run_dir, config.eval)
        for known in self.tally.evaluations.values():
            if known.greedy is not None:
                self.early_stopping.take(known.greedy)
        self.callbacks = Callbacks() if callbacks is None else callbacks
        self.waits = WaitReasons()
        self.partials = dict(work.partials)
        self.holder_of: dict[int, int] = {}  # ordinal -> the replica that has the group until it is scored
        self.checkpointed: int | None = None
        self.cut_at: tuple[int, int] | None = None  # steps and events at the last cut, saved or not
        self.is_checkpoint_wanted = False  # out of turn: a process that holds the weights is about to end
        self.is_exported = False

    # The run

    @property
    def is_interrupted(self) -> bool:
        """Return whether the run is to end after the current step, with a checkpoint, and may be resumed."""
        return self.interrupts.number is not None or self.callbacks.error is not None

    def run(self) -> Tally:
        """Launch, train, end. Raises ExecutorDied or SlipstreamError; whatever happens, no process survives it."""
        self.timeline.backdate("start_up", self.tally.started_s)
        with self.timeline.span("overhead"):  # but for the spans below, until the timeline is closed
            try:
                self._run()
            except BaseException:
                self.callbacks.close()
                raise
        try:
            self.callbacks.finish()  # nothing else waits for it
        except BaseException:
            self.tally.status = "failed"
            raise
        return self.tally

    def _run(self) -> None:
        with self.timeline.span("start_up"):
            if left := sweep():
                self.observers.note(f"removed {len(left)} files and folders that runs left behind which were killed")
            transport_dir = make_transport_dir()
            run_id, owner = transport_dir.name, claim(transport_dir)
        try:
            with self.timeline.span("start_up"):
                self.observers.take(self.events.record(self.schedule.began(), []))
                self.executors.launch(transport_dir, run_id, self.cluster)
                if self.work.warm_start is not None:
                    self.executors.send("trainer", self.work.warm_start)
            self._stop_early(self.early_stopping.cause or self.tally.stopped_because)  # of a run that goes on
            done, is_over = self.schedule.steps_done, self.schedule.is_finished
            self._train(() if is_over else self.evaluations.first(done, self.tally.evaluations))
            if self.schedule.versions:
                self._finish()
            if self.callbacks.error is not None:
                raise self.callbacks.error
            self.tally.status = "interrupted" if self.is_interrupted else "done"
        finally:
            self._shut_down()
            shutil.rmtree(transport_dir, ignore_errors=True)
            cleanup(run_id)
            os.close(owner)

    def _train(self, first: Sequence[float]) -> None:
        """Evaluate at the `first` temperatures, and go on to the last step.

        An interrupt before the first version leaves nothing to save.
        """
        self._export_candidate(self.schedule.steps_done)
        self._unless_interrupted(lambda: not self.executors.missing, "all executors to be ready")
        num_replicas = sum(replica_of(node.name) is not None for node in self.pipeline.nodes)
        self._unless_interrupted(
            lambda: len(self.schedule.versions) == num_replicas, "generators to hold the first version"
        )
        if not self.is_interrupted:
            self._evaluate(first)
        self._unless_interrupted(lambda: self.schedule.is_finished, "training")
        if self.is_interrupted:
            self._tell_of_interrupt()  # before the schedule hears of it, which then has no next step
            self._decide(Stop())
            self._run_until(lambda: not self.schedule.training, "the current step")

    def _finish(self) -> None:
        last, versions = self.schedule.steps_done, self.schedule.versions
        if self.schedule.stopped_because is not None:
            self.executors.send("trainer", Publish())
        self._unless_interrupted(lambda: bool(versions) and min(versions.values()) >= last, "the last version")
        if not self.is_interrupted:  # else a resume evaluates; it restores the scores that there are
            self._evaluate(self.tally.unevaluated(last))
        self._unless_interrupted(lambda: not self.evaluations, "the last evaluation")
        self._tell_of_interrupt()
        self._checkpoint()
        if (command := self.best.last(last)) is not None:
            self.executors.send("trainer", command)
        self.executors.send("trainer", Export(path=str(self.run_dir / "model")))
        self._run_until(lambda: self.checkpointed == last and self.is_exported, "checkpoint and export")
        for version in self.best.missed:
            self.observers.note(f"version {version} was better, and is not kept: its replica was lost")

    def _tell_of_interrupt(self) -> None:
        """Say once what the run still does, and that a second signal stops that, too."""
        if not self.interrupts.is_news():
            return
        if not self.schedule.versions:
            what = "ending, as there is nothing to save yet"
        elif self.schedule.training:
            what = f"finishing step {self.schedule.steps_done + 1}, then a checkpoint"
        else:
            what = f"writing a checkpoint of step {self.schedule.steps_done}"
        self.observers.note(self.interrupts.heard(what))

    # The loop

    def _unless_interrupted(self, is_done: Callable[[], bool], what: str) -> None:
        self._run_until(lambda: is_done() or self.is_interrupted, what)

    def _run_until(self, is_done: Callable[[], bool], what: str) -> None:
        """Handle events until `is_done`.

        Waits for: events. Unblocked by: any executor. Ends when: `is_done`, a death, or `deadline_s` without news.
        """
        started_s = self.clock.now_s()
        while not is_done():
            self._tell_of_interrupt()
            self._hear_callbacks()
            with self.executors.together(), self.timeline.span("schedule"):
                while (message := self.executors.receive()) is not None:
                    self._handle(message)
                self.ledger.flush()  # before anybody hears of what was decided
                self.events.flush()
            if not self.executors.work() and not is_done():
                self.executors.sleep(self.timeline.idle)
                self._check_deadline(what, started_s)

    def _check_deadline(self, what: str, started_s: float) -> None:
        silent_s = self.clock.now_s() - max(started_s, self.executors.heard_s)
        if silent_s <= self.config.deadline_s or self.executors.accuse_the_silent():
            return
        missing = self.executors.missing
        got = f"not ready: {', '.join(missing)}" if missing else f"the trainer waits for {self.schedule.waits_for()}"
        raise SlipstreamError(
            f"nothing happened for {silent_s:.0f} s while waiting for {what}",
            got=got,
            allowed=f"deadline_s = {self.config.deadline_s:g}",
            hint=f"see {self.run_dir / 'logs'}; raise deadline_s if a single step takes longer",
        )

    def _handle(self, message: Message) -> None:
        if isinstance(message, StepDone):  # committed before anybody is told
            self.ledger.trained(self.schedule.training, step=message.step)
            times = {f"{TIME_PREFIX}{state}": seconds for state, seconds in self.timeline.totals().items()}
            self.observers.take(Counters(executor=CONTROLLER, values=times))
        self.observers.take(message)
        match message:
            case CompletionsFinished(finished=(_, *_)):
                self._decide(*message.finished)
            case CompletionFinished() | Swapped() | StepDone():
                self._decide(message)
            case GroupScored(ordinal=ordinal):
                if (replica := self.holder_of.pop(ordinal, None)) is not None:
                    self.executors.send(f"generator-{replica}", Settled(ordinals=(ordinal,)))
                self._decide(message)
            case ReplicaLost():
                self.holder_of = {o: replica for o, replica in self.holder_of.items() if replica != message.replica}
                self._decide(message)
            case EvalScored():
                self._evaluated(message)
            case CheckpointSaved(step=step):
                self.checkpointed = step
            case Evaluating():
                self.evaluations.began(message)
                self.best.began(self.evaluations.may_be_of)
            case Exported(path=path) if path == str(self.run_dir / "model"):
                self.is_exported = True
            case Exported(path=path):
                self.best.exported(path)
            case Leaving(executor=executor):
                self.observers.note(f"{executor} was told to end: a checkpoint follows the current step")
                self.is_checkpoint_wanted = True
            case Counters() | Noted() | Progress() | Published() | Ready() | Left() | CompletionsFinished():
                pass  # for observers, or empty; of a child's end the system tells
            case _:
                raise TypeError(f"the controller does not take {type(message).__name__}")

    def _decide(self, *events: Event) -> None:
        """Let the schedule decide; carry it out; tell executors what they wait for when that has changed."""
        for event in events:
            try:
                commands = self.schedule.apply(event)
            except SlipstreamError as error:  # the run ends; a replay of its events should end the same way
                self.events.record(event, [], error=error.what)
                raise
            self.observers.take(self.events.record(event, commands))
            temperatures = self.evaluations.next(event)
            if isinstance(event, StepDone):
                self._save_if_due()  # before the next step: the checkpoint has the weights between the two
                self._export_candidate(event.version)
            for command in commands:
                self._carry_out(command)
        for executor, waiting in self.waits.changed(event, self.schedule):
            self.executors.send(executor, waiting)
        if isinstance(event, Swapped | ReplicaLost):
            self._ask(self.evaluations.ask_again(self.schedule.versions))
        if temperatures:
            self._evaluate(temperatures)

    def _carry_out(self, command: Command) -> None:
        match command:
            case StartGroup(ordinal=ordinal, replica=replica):
                is_again = ordinal in self.ledger.states
                self.ledger.admit(ordinal)
                self.holder_of[ordinal] = replica
                admit = Admit(
                    ordinal=ordinal,
                    replica=replica,
                    prompt=self.work.prompt_of(ordinal),
                    num_samples=self.config.samples_per_group,
                    partials=self.partials.pop(ordinal, ()),
                    is_again=is_again,
                )
                self.executors.send(f"generator-{replica}", admit)
            case TrainStep():
                self.executors.send("trainer", command)
            case Skip(ordinals=ordinals):
                for ordinal in ordinals:
                    self.ledger.dropped(ordinal, has_failed=command.cause == "failed")
                self.executors.send("trainer", command)

    # Checkpoints

    def _save_if_due(self) -> None:
        done, every = self.schedule.steps_done, self.config.trainer.checkpoint_every
        is_due = every > 0 and done % every == 0
        if (is_due or self.is_checkpoint_wanted) and not self.is_interrupted:
            self.is_checkpoint_wanted = False
            self._checkpoint()

    def _checkpoint(self) -> None:
        """Save one consistent cut: policy and optimizer by the trainer, the schedule's state beside them.

        The lines of this process's files that belong to it are on the disk before the trainer hears of it: a checkpoint
        that is there has its lines.
        """
        step, num_events = self.schedule.steps_done, self.events.num_events
        if self.cut_at == (step, num_events):
            return
        self.cut_at, self.checkpointed = (step, num_events), None
        for writer in (self.ledger, self.events, self.observers):
            writer.sync()
        command = Checkpoint(
            step=step,
            path=str(self.run_dir / "checkpoints" / f"step_{step}"),
            schedule=msgspec.to_builtins(self.schedule.snapshot()),
            num_events=num_events,
            cut=uuid.uuid4().hex,
            run=self.tally.saved(),
        )
        environments = ("environments",) if self.config.environment.is_set else ()
        for executor in ("trainer", *environments, *(f"generator-{replica}" for replica in self.schedule.versions)):
            self.executors.send(executor, command)

    # Evaluations

    def _evaluate(self, temperatures: Sequence[float]) -> None:
        """Ask for answers to the held-out prompts."""
        prompts = self.work.held_out[: self.config.eval.num_prompts]
        self._ask(self.evaluations.begin(prompts, temperatures, self.schedule.versions))

    def _ask(self, requests: Sequence[Request]) -> None:
        for replica, request in requests:
            self.executors.send(f"generator-{replica}", request)

    def _evaluated(self, message: EvalScored) -> None:
        evaluation = self.evaluations.scored(message)
        if evaluation is None:
            return
        if evaluation.replica is not None:
            self.executors.send(f"generator-{evaluation.replica}", Settled(eval_ids=(evaluation.eval_id,)))
        found = measured(evaluation.scores, self.config.eval.measure)
        version = message.version if evaluation.version is None else evaluation.version
        self.observers.take(EvaluationDone(version, evaluation.temperature, found, evaluation.scores))
        if evaluation.temperature == GREEDY:
            self.best.evaluated(version, found)
            self.early_stopping.take(found)
            self._stop_early(self.early_stopping.cause)

    def _export_candidate(self, version: int) -> None:
        """Have the trainer export `version`, its present one, where it may be evaluated and become the best."""
        is_published = version % self.config.publish_every == 0
        if is_published and self.evaluations.may_be_of(version) and (command := self.best.candidate(version)):
            self.executors.send("trainer", command)

    def _stop_early(self, cause: StopCause | None) -> None:
        """End the run after the current step where there is a `cause`."""
        if cause is None or self.schedule.is_finished or self.schedule.is_stopping:
            return
        why = "a callback ends it" if cause == "callback" else self.early_stopping.in_words()
        self.observers.note(f"the run ends after the current step: {why}")
        self._decide(Stop(because=cause))

    def _hear_callbacks(self) -> None:
        if self.callbacks.wants_stop:
            self._stop_early("callback")
        if self.callbacks.has_failed():
            self.observers.note("a callback has failed: the run ends after the current step, with a checkpoint")

    # The end

    def _shut_down(self) -> None:
        with contextlib.ExitStack() as ends:  # each is closed whatever the others do
            ends.callback(self.executors.close)
            ends.callback(self.best.clear)
            for writer in (self.observers, self.events, self.ledger, self.timeline):
                ends.callback(writer.close)
            ends.callback(self._note_end)
            ends.enter_context(self.timeline.span("shut_down"))
            has_nothing_to_save = self.is_interrupted and not self.schedule.versions
            self.executors.end(
                self._hear_last_words,
                is_failed=self.tally.status == "failed" or has_nothing_to_save,
                is_at_once=self.interrupts.is_at_once,
            )

    def _hear_last_words(self, message: Message) -> None:
        if isinstance(message, Counters):
            self.tally.take(message)

    def _note_end(self) -> None:
        self.tally.ended_s = self.clock.now_s()
        self.tally.prompts = self.ledger.counts()
        self.tally.callback_s = self.callbacks.seconds
