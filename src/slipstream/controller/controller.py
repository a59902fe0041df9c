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
import uuid
from collections.abc import Callable
from pathlib import Path

import msgspec

from slipstream.controller.callbacks import Callbacks
from slipstream.controller.executors import Executors
from slipstream.controller.held_out import HeldOut
from slipstream.controller.ledger import Ledger, parts
from slipstream.controller.meeting import Cluster
from slipstream.controller.observers import Observers
from slipstream.controller.pipeline import CONTROLLER, Pipeline, RunInput, replica_of
from slipstream.controller.schedule import SchedulingPolicy
from slipstream.controller.tally import Tally
from slipstream.controller.waiting import WaitReasons, work_left
from slipstream.core import service_messages as messages
from slipstream.core.clock import WallClock
from slipstream.core.config import RunConfig
from slipstream.core.errors import SlipstreamError
from slipstream.core.interrupts import Interrupts
from slipstream.core.peer_messages import Leaving, Left
from slipstream.core.run_log import Command, Event
from slipstream.core.scratch import run_scratch
from slipstream.core.types import (
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
from slipstream.core.unfinished_messages import HandedOver
from slipstream.observe.recorder import EventRecorder
from slipstream.observe.timeline import TIME_PREFIX, Timeline, timeline_path

OBSERVED = (messages.Counters, messages.Noted, messages.Progress, messages.Published, messages.Ready, Left)
"""Messages on which the controller does nothing; that a child has ended (`Left`), the operating system reports."""


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
        self.held_out = HeldOut(config, self.run_dir, work, schedule, observers, self.executors.send)
        self.callbacks = Callbacks() if callbacks is None else callbacks
        self.waits = WaitReasons()
        self.partials = dict(work.partials)
        self.holder_of: dict[int, int] = {}  # ordinal -> the replica that has the group until it is scored
        self.num_unsaved = 0  # checkpoints that were asked for and are not whole yet; two may be of one step
        self.cut_at: tuple[int, int] | None = None  # steps and events at the last cut, saved or not
        self.is_checkpoint_wanted = False  # out of turn: a process that holds the weights is about to end
        self.is_exported = False
        self.has_begun = False  # a replica has held a version, or a step is trained: there is something to save

    # The run

    @property
    def is_interrupted(self) -> bool:
        """Return whether the run is to end after the current step, with a checkpoint, and may be resumed."""
        return self.interrupts.number is not None or self.callbacks.error is not None

    def run(self) -> Tally:
        """Launch, train, end. Raises ExecutorDied or SlipstreamError; whatever happens, no process survives it."""
        self.timeline.backdate("start_up", self.tally.started_s)
        with self.timeline.span("overhead"):  # but for the spans below, until the timeline is closed
            self._run()
        try:
            self.callbacks.finish()  # nothing else waits for it
        except Exception:  # with an interrupt the run is saved, and stays so
            self.tally.status = "failed"
            raise
        return self.tally

    def _run(self) -> None:
        with contextlib.ExitStack() as ends:
            with self.timeline.span("start_up"):
                transport_dir = ends.enter_context(run_scratch(self.observers.note))
                ends.callback(self._shut_down)
                self.observers.take(self.events.record(self.schedule.began(), []))
                with self.interrupts.at_once():  # prompts of a stream, and groups elsewhere, may take very long
                    self.work.prompt_of(self.work.first_ordinal)
                    self.executors.launch(transport_dir, transport_dir.name, self.cluster)
                if self.work.warm_start is not None:
                    self.executors.send("trainer", self.work.warm_start)
            self._stop_early(self.held_out.early_stopping.cause or self.tally.stopped_because)  # of a run that goes on
            self._train()
            if self.has_begun:
                self._finish()
            if self.callbacks.error is not None:
                raise self.callbacks.error
            self.tally.status = "interrupted" if self.is_interrupted else "done"

    def _train(self) -> None:
        """Evaluate where that is due, and go on to the last step."""
        first = self.held_out.first()
        self.held_out.export_candidate(self.schedule.steps_done)
        self._unless_interrupted(lambda: not self.executors.missing, "all executors to be ready")
        replicas = self.pipeline.first_replicas
        self._unless_interrupted(lambda: replicas <= self.schedule.versions.keys(), "generators to hold a version")
        if not self.is_interrupted:
            self.held_out.evaluate(first, self.schedule.steps_done)
        self._unless_interrupted(lambda: self.schedule.is_finished, "training")
        if self.is_interrupted:
            self._tell_of_interrupt()  # before the `Stop`, after which the schedule has no next step
            self._decide(Stop())
            self._run_until(lambda: not self.schedule.training, "the current step")

    def _finish(self) -> None:
        last, versions = self.schedule.steps_done, self.schedule.versions
        if self.schedule.stopped_because is not None:
            self.executors.send("trainer", messages.Publish())
        self._unless_interrupted(lambda: bool(versions) and min(versions.values()) >= last, "the last version")
        self._unless_interrupted(lambda: not self.held_out.pending.may_run_of(last), "the last evaluation")
        if not self.is_interrupted:  # else a resume evaluates; it restores the scores that there are
            self.held_out.evaluate_last(last)
        self._unless_interrupted(lambda: not self.held_out.pending, "the last evaluation")
        self._tell_of_interrupt()
        self._checkpoint()
        if (command := self.held_out.best.last(last)) is not None:
            self.executors.send("trainer", command)
        self.executors.send("trainer", messages.Export(path=str(self.run_dir / "model")))
        self._run_until(lambda: not self.num_unsaved and self.is_exported, "checkpoint and export")
        for version in self.held_out.best.missed:
            self.observers.note(f"version {version} was better, and is not kept: its replica or its export was lost")

    def _tell_of_interrupt(self) -> None:
        """Say once what the run still does, and that a second signal stops that, too."""
        if self.interrupts.is_news():
            self.observers.note(self.interrupts.heard(work_left(self.schedule, has_begun=self.has_begun)))

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
                self.ledger.flush()  # before any message that was decided on leaves
                self.events.flush()
            if not self.executors.work() and not is_done():
                self.executors.sleep(self.timeline.idle)
                self.executors.check_deadline(what, self.clock.now_s() - started_s, self.schedule.waits_for())

    def _handle(self, message: Message) -> None:
        if isinstance(message, StepDone):  # committed before any other process or observer is told
            self.ledger.trained(self.schedule.training, step=message.step)
            times = {f"{TIME_PREFIX}{state}": seconds for state, seconds in self.timeline.totals().items()}
            self.observers.take(messages.Counters(executor=CONTROLLER, values=times))
        self.observers.take(message)
        match message:
            case messages.CompletionsFinished(finished=(_, *_) as finished):
                self._decide(*finished)
            case CompletionFinished() | Swapped() | StepDone():
                self._decide(message)
            case GroupScored(ordinal=ordinal):
                self.partials.pop(ordinal, None)  # of a copy whose last completions were on their way
                if (replica := self.holder_of.pop(ordinal, None)) is not None:
                    self.executors.send(f"generator-{replica}", messages.Settled(ordinals=(ordinal,)))
                self._decide(message)
            case ReplicaLost():
                self.holder_of = {o: replica for o, replica in self.holder_of.items() if replica != message.replica}
                self._decide(message)
            case messages.EvalScored():
                self.held_out.scored(message)
                self._stop_early(self.held_out.early_stopping.cause)
            case messages.CheckpointSaved():
                self.num_unsaved -= 1
            case messages.Evaluating():
                self.held_out.began(message)
            case messages.Exported(path=path) if path == str(self.run_dir / "model"):
                self.is_exported = True
            case messages.Exported(path=path):
                self.held_out.best.exported(path)
            case HandedOver(ordinal=ordinal) if ordinal in self.holder_of:
                self.partials[ordinal] = message.partials
            case Leaving(executor=executor):
                self.is_checkpoint_wanted |= replica_of(executor) is None
                if self.is_checkpoint_wanted and self.has_begun and not (self.schedule.training or self.num_unsaved):
                    self._checkpoint()  # now; and again after the next step, if there is time for one
            case _ if not isinstance(message, (*OBSERVED, HandedOver, messages.CompletionsFinished)):  # or an empty one
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
            temperatures = self.held_out.pending.next(event)
            for skip in (command for command in commands if isinstance(command, Skip)):
                self._carry_out(skip)  # first: a checkpoint knows of it, and syncs the ledger
            if isinstance(event, StepDone):
                self._save_if_due()  # before the next step: the checkpoint has the weights between the two
                self.held_out.export_candidate(event.version)
            for command in (command for command in commands if not isinstance(command, Skip)):
                self._carry_out(command)
        for executor, waiting in self.waits.changed(event, self.schedule):
            self.executors.send(executor, waiting)
        self.has_begun |= isinstance(event, Swapped | StepDone)
        if isinstance(event, Swapped | ReplicaLost):
            self.held_out.ask_again()
        if temperatures:
            self.held_out.evaluate(temperatures)

    def _carry_out(self, command: Command) -> None:
        match command:
            case StartGroup(ordinal=ordinal, replica=replica):
                is_again = ordinal in self.ledger.states
                self.ledger.admit(ordinal)
                self.holder_of[ordinal] = replica
                admit = messages.Admit(
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
        every = self.config.trainer.checkpoint_every or float("inf")
        if (self.schedule.steps_done % every == 0 or self.is_checkpoint_wanted) and not self.is_interrupted:
            self.is_checkpoint_wanted = False
            self._checkpoint()

    def _checkpoint(self) -> None:
        """Save one consistent cut: policy and optimizer by the trainer, the schedule's state beside them.

        The lines of this process's files that belong to it are on the disk before the trainer gets the command.
        """
        step, num_events = self.schedule.steps_done, self.events.num_events
        if self.cut_at == (step, num_events):
            return
        self.cut_at, self.num_unsaved = (step, num_events), self.num_unsaved + 1
        for writer in (self.ledger, self.events, self.observers):
            writer.sync()
        command = messages.Checkpoint(
            step=step,
            path=str(self.run_dir / "checkpoints" / f"step_{step}"),
            schedule=msgspec.to_builtins(self.schedule.snapshot()),
            num_events=num_events,
            cut=uuid.uuid4().hex,
            run=self.tally.saved([*self.schedule.ready, *self.schedule.training]),
        )
        for executor, part in parts(command, self.config, self.holder_of, self.schedule.versions):
            self.executors.send(executor, part)

    # An early end

    def _stop_early(self, cause: StopCause | None) -> None:
        """End the run after the current step where there is a `cause`."""
        if cause is None or self.schedule.is_finished or self.schedule.is_stopping:
            return
        why = "a callback ends it" if cause == "callback" else self.held_out.early_stopping.in_words()
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
            ends.callback(self.held_out.best.clear)
            for writer in (self.observers, self.events, self.ledger, self.timeline):
                ends.callback(writer.close)
            ends.callback(self._note_end)
            ends.enter_context(self.timeline.span("shut_down"))
            has_nothing_to_save = self.is_interrupted and not self.has_begun
            self.executors.end(
                lambda last: self.tally.take(last) if isinstance(last, messages.Counters) else None,
                is_failed=self.tally.status == "failed" or has_nothing_to_save,
                is_at_once=self.interrupts.is_at_once,
            )

    def _note_end(self) -> None:
        self.tally.ended_s, self.tally.prompts = self.clock.now_s(), self.ledger.counts()
        self.tally.callback_s = self.callbacks.seconds
