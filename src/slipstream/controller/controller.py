"""The spine: one process that runs the schedule over the executors, keeps the ledger, evaluates, and ends the run.

    consumes      events of all executors, and that one was lost (`controller/executors.py`)
    produces      commands: admissions, training steps, evaluations, checkpoints, the end
    waits for     any event, at most `deadline_s` without one
    ends when     the last step is trained and swapped in, evaluated and exported; or is interrupted; or with an error

Decisions are the schedule's (`controller/schedule.py`); payloads never come here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from slipstream.controller.cluster import Cluster
from slipstream.controller.evaluations import GREEDY, SAMPLED, Evaluations, Request
from slipstream.controller.executors import Executors
from slipstream.controller.ledger import Ledger
from slipstream.controller.machine import SchedulingPolicy
from slipstream.controller.pipeline import CONTROLLER, Pipeline
from slipstream.controller.tally import Tally
from slipstream.controller.watch import Observer, write_samples
from slipstream.core.channel import make_transport_dir
from slipstream.core.clock import Clock, WallClock
from slipstream.core.config import RunConfig
from slipstream.core.errors import CheckpointError, SlipstreamError, clip
from slipstream.core.files import decode_json
from slipstream.core.held_out import GREEDY_PREFIX, SAMPLED_PREFIX, measured
from slipstream.core.interrupts import Interrupts
from slipstream.core.run_log import Command, Decision, Event, Snapshot
from slipstream.core.scratch import claim, cleanup, sweep
from slipstream.core.types import (
    Admit,
    Checkpoint,
    CheckpointSaved,
    CompletionFinished,
    Counters,
    EvalScored,
    Export,
    Exported,
    GroupScored,
    Leaving,
    Left,
    Message,
    Noted,
    Partial,
    Progress,
    Prompt,
    Published,
    Ready,
    ReplicaLost,
    Settled,
    Skip,
    StartGroup,
    StepDone,
    Stop,
    Swapped,
    TrainStep,
    Waiting,
    WarmStart,
)
from slipstream.observe.health import Alarm, Watchman, in_a_line, unfit
from slipstream.observe.metrics import MetricsWriter
from slipstream.observe.recorder import EventRecorder
from slipstream.observe.timeline import TIME_PREFIX, Timeline, timeline_path
from slipstream.observe.trackers import Trackers
from slipstream.observe.vitals import Vitals
from slipstream.observe.waste import SampledTokens


@dataclass(frozen=True)
class Work:
    """What a run trains on, handed in by `controller/build.py`: prompts by ordinal, held-out ones, demonstrations."""

    prompt_of: Callable[[int], Prompt]
    held_out: tuple[Prompt, ...]
    warm_start: WarmStart | None


class Controller:
    """Runs a pipeline once. `run` returns the tally; the caller writes summary and report from it."""

    def __init__(
        self,
        config: RunConfig,
        pipeline: Pipeline,
        schedule: SchedulingPolicy,
        work: Work,
        *,
        run_dir: Path,
        tally: Tally,
        observer: Observer,
        clock: Clock | None = None,
        cluster: Cluster | None = None,
        partials: Mapping[int, tuple[Partial, ...]] | None = None,
        trackers: Trackers | None = None,
        interrupts: Interrupts | None = None,
        num_events: int = 0,
    ) -> None:
        self.config = config
        self.pipeline = pipeline
        self.schedule = schedule
        self.work = work
        self.run_dir = run_dir.resolve()  # groups on other machines have another working directory
        self.cluster = cluster
        self.tally = tally
        self.observer = observer
        self.clock = WallClock() if clock is None else clock
        self.timeline = Timeline(
            CONTROLLER,
            timeline_path(run_dir, CONTROLLER),
            self.clock,
            threads_alone=max([node.num_threads_alone for node in pipeline.nodes if node.host == "inline"], default=1),
        )
        self.ledger = Ledger(run_dir / "ledger.jsonl")
        self.events = EventRecorder(run_dir / "events.jsonl", self.clock, num_events=num_events)
        told = [] if trackers is None else [trackers]
        self.metrics = MetricsWriter(run_dir / "metrics.jsonl", sinks=[one.metrics for one in told])
        self.vitals = Vitals(config.samples_per_group, config.max_staleness)
        self.sampled = SampledTokens()
        self.watchman = Watchman(config.health, run_dir, sinks=[one.alarm for one in told], silent=unfit(config))
        self.executors = Executors(
            config,
            pipeline,
            self.run_dir,
            clock=self.clock,
            note=observer.note,
            lost=tally.lost,
            spans=self.timeline,
            restarts=tally.restarts,
        )
        self.evaluations = Evaluations()
        self.holders: dict[int, int] = {}  # ordinal -> the replica that samples it, or keeps it until it is scored
        self.evaluation_due: int | None = None  # once a replica holds this version
        self.waiting_reason = ""
        self.held_back: frozenset[int] | None = None  # versions on which nothing may start; None: all steps are done
        self.told: dict[int, str] = {}  # replica -> what it was told that it waits for
        self.checkpointed: int | None = None
        self.cut_at: tuple[int, int] | None = None  # steps and events at the last cut, saved or not
        self.is_exported = False
        self.is_checkpoint_wanted = False  # out of turn: who holds the weights is about to end
        self.partials = dict(partials or {})  # by ordinal: what a resume has found, for its first admission
        self.interrupts = Interrupts() if interrupts is None else interrupts
        self.has_told_of_interrupt = False

    # The run

    @property
    def is_interrupted(self) -> bool:
        """The run is to end after the current step, with a checkpoint."""
        return self.interrupts.number is not None

    def run(self) -> Tally:
        """Launch, train, end. Raises ExecutorDied or SlipstreamError; whatever happens, no process survives it."""
        self.timeline.backdate("start_up", self.tally.started_s)
        with self.timeline.span("overhead"):  # but for what is said below, until the timeline is closed
            return self._run()

    def _run(self) -> Tally:
        with self.timeline.span("start_up"):
            if left := sweep():
                self.observer.note(f"removed {len(left)} files and folders that runs left behind which were killed")
            transport_dir = make_transport_dir()
            run_id, owner = transport_dir.name, claim(transport_dir)
        try:
            with self.timeline.span("start_up"):
                self._waste_of(self.events.record(self.schedule.began(), []))
                self.executors.launch(transport_dir, run_id, self.cluster)
                if self.work.warm_start is not None:
                    self.executors.send("trainer", self.work.warm_start)
            self._train()
            if self.schedule.versions:
                self._finish()
            self.tally.status = "interrupted" if self.is_interrupted else "done"
        finally:
            self._shut_down()
            shutil.rmtree(transport_dir, ignore_errors=True)
            cleanup(run_id)
            os.close(owner)
        return self.tally

    def _train(self) -> None:
        """From the first event to the last step; an interrupt before the first version leaves nothing to save."""
        self._run_until(lambda: not self.executors.missing or self.is_interrupted, "all executors to be ready")
        first = self.schedule.steps_done
        replicas = [node.name for node in self.pipeline.nodes if node.name.startswith("generator")]
        self._run_until(
            lambda: len(self.schedule.versions) == len(replicas) or self.is_interrupted,
            "generators to hold the first version",
        )
        if not self.is_interrupted:
            self._evaluate_first(first)
        self._run_until(lambda: self.schedule.is_finished or self.is_interrupted, "training")
        if self.is_interrupted:
            self._tell_of_interrupt()  # before the schedule hears of it, which then has no next step
            self._decide(Stop())
            self._run_until(lambda: not self.schedule.training, "the current step")

    def _tell_of_interrupt(self) -> None:
        """Say once what the run still does, and that a second signal stops that, too."""
        number, done = self.interrupts.number, self.schedule.steps_done
        if number is None or self.has_told_of_interrupt:
            return
        self.has_told_of_interrupt = True
        if not self.schedule.versions:
            what = "ending, as there is nothing to save yet"
        elif self.schedule.training:
            what = f"finishing step {done + 1}, then a checkpoint"
        else:
            what = f"writing a checkpoint of step {done}"
        who = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        grace = "" if number == signal.SIGINT else f", within {self.config.shutdown_grace_s:g} s"
        self.observer.note(f"{who}: {what}{grace}; once more to stop now")

    def _evaluate_first(self, first: int) -> None:
        """The policy that RL begins with; after a resume what a crash has cut off, if that was due."""
        every = self.config.eval.every
        if first == 0:
            self._evaluate((GREEDY, SAMPLED))
        elif every and first % every == 0 and first < self.config.steps and first not in self.tally.evaluations:
            self._evaluate((GREEDY,))

    def _finish(self) -> None:
        last = self.schedule.steps_done
        if not self.is_interrupted:
            versions = self.schedule.versions
            self._run_until(
                lambda: (bool(versions) and min(versions.values()) >= last) or self.is_interrupted,
                "the last version in generators",
            )
        if not self.is_interrupted:  # else a resume makes what is left out here
            self._evaluate(self.tally.unevaluated(last))  # after a resume, the checkpoint may have what is known
            self._run_until(lambda: not self.evaluations or self.is_interrupted, "the last evaluation")
        self._tell_of_interrupt()
        self._checkpoint()
        self.executors.send("trainer", Export(path=str(self.run_dir / "model")))
        self._run_until(lambda: self.checkpointed == last and self.is_exported, "checkpoint and export")

    # The loop

    def _run_until(self, is_done: Callable[[], bool], what: str) -> None:
        """Handle events until `is_done`.

        Waits for: events. Unblocked by: any executor. Ends when: `is_done`, a death, or `deadline_s` without news.
        """
        started_s = self.clock.now_s()
        while not is_done():
            self._tell_of_interrupt()
            has_worked = self._take_events()
            has_worked |= self.executors.work()
            if not has_worked and not is_done():
                self.executors.sleep(self.timeline.idle)
                self._check_deadline(what, started_s)

    def _take_events(self) -> bool:
        has_worked = False
        while (message := self.executors.receive()) is not None:
            has_worked = True
            with self.timeline.span("schedule"):
                self._handle(message)
        return has_worked

    def _check_deadline(self, what: str, started_s: float) -> None:
        silent_s = self.clock.now_s() - max(started_s, self.executors.heard_s)
        if silent_s > self.config.deadline_s:
            if self.executors.accuse_the_silent():
                return
            missing = self.executors.missing
            raise SlipstreamError(
                f"nothing happened for {silent_s:.0f} s while waiting for {what}",
                got=f"not ready: {', '.join(missing)}" if missing else f"the trainer waits for {self.waiting_reason}",
                allowed=f"deadline_s = {self.config.deadline_s:g}",
                hint=f"see {self.run_dir / 'logs'}; raise deadline_s if a single step takes longer",
            )

    # Events

    def _handle(self, message: Message) -> None:
        self.vitals.take(message)
        match message:
            case CompletionFinished():
                self._decide(message)
            case GroupScored():
                self._settle(message)
                self._decide(message)
            case Swapped():
                self.tally.swapped(message)
                self.observer.swapped(message)
                self._decide(message)
            case StepDone():
                self._stepped(message)
                self._decide(message)
            case ReplicaLost():
                self.holders = {o: replica for o, replica in self.holders.items() if replica != message.replica}
                self._decide(message)
            case Ready():
                self.tally.num_params = max(self.tally.num_params, message.num_params)
            case Published():
                self.tally.published(message)
            case EvalScored():
                self._evaluated(message)
            case Counters():
                self.tally.counted(message, self.clock.now_s())
                self.observer.counted(message)
            case Noted():
                self.observer.note(f"{message.executor}: {message.text}")
            case Progress():
                self.observer.progress(message)
            case CheckpointSaved():
                self.checkpointed = message.step
            case Exported():
                self.is_exported = True
            case Leaving():
                self.observer.note(f"{message.executor} was told to end: a checkpoint follows the current step")
                self.is_checkpoint_wanted = True
            case Left():
                pass  # a child: its process is watched
            case _:
                raise TypeError(f"the controller does not take {type(message).__name__}")

    def _decide(self, event: Event) -> None:
        """Let the schedule decide; carry it out; tell the trainer what it is waiting for when that changed."""
        try:
            commands = self.schedule.apply(event)
        except SlipstreamError as error:  # the run ends; a replay of its events should end the same way
            self.events.record(event, [], error=error.what)
            raise
        self._waste_of(self.events.record(event, commands))
        if isinstance(event, StepDone):
            self._after_step()  # a checkpoint comes before the next step: it has the weights between the two
        for command in commands:
            self._carry_out(command)
        reason = self.schedule.waits_for()
        if reason != self.waiting_reason:
            self.waiting_reason = reason
            self.executors.send("trainer", Waiting(reason=reason))
        self._tell_generators(event)
        if isinstance(event, Swapped | ReplicaLost):
            self._ask(self.evaluations.ask_again(self.schedule.versions))
        if isinstance(event, Swapped) and self.evaluation_due is not None and event.version >= self.evaluation_due:
            self.evaluation_due = None
            self._evaluate((GREEDY,))

    def _waste_of(self, decision: Decision) -> None:
        for cause, tokens in self.sampled.take(decision):
            self.vitals.waste(cause, tokens)
            if cause == "regenerated":
                self.tally.regenerated_tokens += tokens

    def _tell_generators(self, event: Event) -> None:
        """What they wait for without work, when that has changed."""
        held_back = None if self.schedule.is_finished else self.schedule.held_back()
        if held_back == self.held_back and not isinstance(event, Swapped | ReplicaLost):
            return
        self.held_back = held_back
        if isinstance(event, ReplicaLost):
            self.told.pop(event.replica, None)
        for replica, version in self.schedule.versions.items():
            reason: Literal["nothing", "trainer", "prompt"] = (
                "nothing" if held_back is None else "trainer" if version in held_back else "prompt"
            )
            if self.told.get(replica, "trainer") != reason:
                self.told[replica] = reason
                self.executors.send(f"generator-{replica}", Waiting(reason=reason))

    def _settle(self, message: GroupScored) -> None:
        """What its replica has kept of the group, in case rewards are lost, has done its duty. Count its failures."""
        self.tally.scored(message)
        if message.failure is not None:
            count, num_scored = self.tally.failed_completions, self.tally.scored_completions
            self._tell_of(self.watchman.failed(self.schedule.steps_done, count, num_scored, message.failure))
        replica = self.holders.pop(message.ordinal, None)
        if replica is not None:
            self.executors.send(f"generator-{replica}", Settled(ordinals=(message.ordinal,)))

    def _carry_out(self, command: Command) -> None:
        match command:
            case StartGroup():
                self.tally.started(self.clock.now_s())
                is_again = command.ordinal in self.ledger.states
                self.ledger.admit(command.ordinal)
                self.holders[command.ordinal] = command.replica
                admit = Admit(
                    ordinal=command.ordinal,
                    replica=command.replica,
                    prompt=self.work.prompt_of(command.ordinal),
                    num_samples=self.config.samples_per_group,
                    partials=self.partials.pop(command.ordinal, ()),
                    is_again=is_again,
                )
                self.executors.send(f"generator-{command.replica}", admit)
            case TrainStep():
                self.tally.started(self.clock.now_s())  # a resume may bring a whole batch, before anything is admitted
                self.executors.send("trainer", command)
            case Skip():
                self.tally.skipped(command)
                for ordinal in command.ordinals:
                    self.ledger.dropped(ordinal, has_failed=command.cause == "failed")
                self.executors.send("trainer", command)

    def _stepped(self, message: StepDone) -> None:
        now_s = self.clock.now_s()
        states = {f"{TIME_PREFIX}{state}": seconds for state, seconds in self.timeline.totals().items()}
        self.vitals.take(Counters(executor=CONTROLLER, values=states))
        ordinals = self.schedule.training
        self.ledger.trained(ordinals, step=message.step)
        metrics = self.tally.stepped(message, now_s) | self.vitals.of_step(message.version)
        wall_s = self.tally.wall_s(now_s)
        self.metrics.write(step=message.step, version=message.version, wall_s=wall_s, metrics=metrics)
        self.observer.stepped({"step": message.step, "version": message.version, "wall_s": wall_s} | metrics)
        self._tell_of(self.watchman.watch({"step": message.step} | metrics))

    def _tell_of(self, alarms: Sequence[Alarm]) -> None:
        for alarm in alarms:
            self.observer.note(in_a_line(alarm))

    def _after_step(self) -> None:
        done, config = self.schedule.steps_done, self.config
        is_due = config.trainer.checkpoint_every and done % config.trainer.checkpoint_every == 0
        if (is_due or self.is_checkpoint_wanted) and not self.is_interrupted:
            self.is_checkpoint_wanted = False
            self._checkpoint()
        if config.eval.every and done % config.eval.every == 0 and done < config.steps:
            self.evaluation_due = done

    def _checkpoint(self) -> None:
        """Save one consistent cut: policy and optimizer by the trainer, the schedule's state beside them.

        What belongs to it in this process's files is on the disk before the trainer hears of it: a checkpoint that is
        there has its lines.
        """
        step, num_events = self.schedule.steps_done, self.events.num_events
        if self.cut_at == (step, num_events):
            return
        self.cut_at, self.checkpointed = (step, num_events), None
        for writer in (self.ledger, self.events, self.metrics):
            writer.sync()
        command = Checkpoint(
            step=step,
            path=str(self.run_dir / "checkpoints" / f"step_{step}"),
            schedule=msgspec.to_builtins(self.schedule.snapshot()),
            num_events=num_events,
            cut=uuid.uuid4().hex,
            run=self.tally.saved(self.clock.now_s()),
        )
        for executor in ("trainer", *(f"generator-{replica}" for replica in self.schedule.versions)):
            self.executors.send(executor, command)

    # Evaluation

    def _evaluate(self, temperatures: Sequence[float]) -> None:
        """Ask for answers to the held-out prompts: greedy ones, and at the ends sampled ones too."""
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
            settled = Settled(eval_ids=(evaluation.eval_id,))
            self.executors.send(f"generator-{evaluation.replica}", settled)
        found = measured(evaluation.scores, self.config.eval.measure)
        is_greedy = evaluation.temperature == GREEDY
        self.tally.evaluated(message.version, found, evaluation.scores, is_greedy=is_greedy)
        metrics = found.metrics(GREEDY_PREFIX if is_greedy else SAMPLED_PREFIX)
        if is_greedy and self.config.has_critic:  # the TL;DR reproduction's name of it
            metrics["objective/validation_score"] = found.reward
        self.metrics.write(
            step=message.version,
            version=message.version,
            wall_s=self.tally.wall_s(self.clock.now_s()),
            metrics=metrics,
        )
        self.observer.evaluated(self.tally, message.version)
        if is_greedy and message.version in (0, self.config.steps):
            write_samples(self.tally, self.run_dir)  # a resume knows them from there

    # Ends

    def _shut_down(self) -> None:
        with contextlib.ExitStack() as ends:  # each is closed whatever the others do
            ends.callback(self.executors.close)
            for writer in (self.metrics, self.watchman, self.events, self.ledger, self.timeline):
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
            self.tally.counted(message, self.clock.now_s())

    def _note_end(self) -> None:
        self.tally.ended_s = self.clock.now_s()
        self.tally.prompts = self.ledger.counts()


class Cut(msgspec.Struct, frozen=True):
    """What a checkpoint says of the run besides its weights: the `Checkpoint` command that it was saved by."""

    schedule: Snapshot
    num_events: int
    cut: str = ""
    run: dict[str, float] = {}


def read_cut(checkpoint: Path) -> Cut:
    """The cut that `checkpoint` belongs to. CheckpointError for one that no run has saved."""

    class State(msgspec.Struct):
        extra: Cut

    try:
        return decode_json(checkpoint / "state.json", State).extra
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{checkpoint} is no checkpoint of a run", got=clip(error)) from error
