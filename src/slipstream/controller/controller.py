"""The spine: one process that launches the executors, runs the schedule, keeps the ledger, evaluates, and ends the run.

    consumes      events of all executors (and the deaths of their processes)
    produces      commands: admissions, training steps, evaluations, checkpoints, the end
    waits for     any event, at most `deadline_s` without one
    ends when     the last step is trained and swapped in, evaluated and exported; or on Ctrl-C; or with an error

Decisions are the schedule's (`controller/schedule.py`); payloads never come here.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import msgspec
import numpy as np

from slipstream.controller.cluster import Cluster, RemoteGroups
from slipstream.controller.evaluations import GREEDY, SAMPLED, Evaluations, Request
from slipstream.controller.host import Child, Host
from slipstream.controller.ledger import Ledger
from slipstream.controller.members import Change
from slipstream.controller.pipeline import CONTROLLER, Pipeline, replica_of
from slipstream.controller.schedule import Command, Event, Schedule, Snapshot
from slipstream.controller.tally import Tally
from slipstream.controller.watch import Observer
from slipstream.core.addresses import AddressBook, LocalAddresses
from slipstream.core.channel import Ports, connect_by_book, make_transport_dir, wait
from slipstream.core.clock import Clock, WallClock
from slipstream.core.config import RunConfig
from slipstream.core.errors import ChannelClosed, ExecutorDied, SlipstreamError
from slipstream.core.ranks import RANK_MARK
from slipstream.core.types import (
    Admit,
    Checkpoint,
    CheckpointSaved,
    CompletionFinished,
    Counters,
    EvalScored,
    Export,
    Exported,
    Failed,
    GroupScored,
    Joined,
    Left,
    Message,
    Progress,
    Prompt,
    Published,
    Ready,
    ReplicaLost,
    Skip,
    StartGroup,
    StepDone,
    Stop,
    Swapped,
    TrainStep,
    Waiting,
    WarmStart,
)
from slipstream.observe.metrics import MetricsWriter
from slipstream.observe.recorder import EventRecorder
from slipstream.observe.timeline import Timeline, timeline_path
from slipstream.weight_sync.segment import cleanup

WAKE_EVERY_S = 1.0  # how often a silent run looks at its deadline; decisions never wait for it
STOP_DEADLINE_S = 10.0
LET_GO_DEADLINE_S = 2.0


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
        schedule: Schedule,
        work: Work,
        *,
        run_dir: Path,
        tally: Tally,
        observer: Observer,
        clock: Clock | None = None,
        cluster: Cluster | None = None,
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
        self.timeline = Timeline(CONTROLLER, timeline_path(run_dir, CONTROLLER), self.clock)
        self.timeline.backdate("start_up", tally.started_s)
        self.ledger = Ledger(run_dir / "ledger.jsonl")
        self.events = EventRecorder(run_dir / "events.jsonl", self.clock)
        self.metrics = MetricsWriter(run_dir / "metrics.jsonl")
        self.ports = Ports()
        self.hosts: list[Host] = []
        self.children: list[Child] = []
        self.remote: RemoteGroups | None = None
        self.ready: set[str] = set()
        self.evaluations = Evaluations()
        self.evaluation_due: int | None = None  # once a replica holds this version
        self.waiting_reason = ""
        self.checkpointed: int | None = None
        self.is_exported = False
        self.is_interrupted = False
        self.heard_s = self.clock.now_s()

    # The run

    def run(self) -> Tally:
        """Launch, train, end. Raises ExecutorDied or SlipstreamError; whatever happens, no process survives it."""
        transport_dir = make_transport_dir()
        run_id = transport_dir.name
        try:
            with self._catch_interrupts():
                self._launch(transport_dir, run_id)
                self._train()
                if self.schedule.versions:
                    self._finish()
                self.tally.status = "interrupted" if self.is_interrupted else "done"
        finally:
            self._shut_down()
            shutil.rmtree(transport_dir, ignore_errors=True)
            cleanup(run_id)
        return self.tally

    def _launch(self, transport_dir: Path, run_id: str) -> None:
        with self.timeline.span("start_up"):
            channels = self.pipeline.all_channels
            book: AddressBook = LocalAddresses(channels, transport_dir)
            if self.cluster is not None:
                self.remote = RemoteGroups(
                    self.pipeline,
                    self.cluster,
                    lease_s=self.config.lease_s,
                    deadline_s=self.config.deadline_s,
                    clock=self.clock,
                )
                book = self.remote.addresses(channels, transport_dir)
                self.remote.announce(channels, self.run_dir, run_id, delta=self.config.generator.delta)
                self.observer.note(f"the controller listens at {self.remote.address}")
            inline = [node for node in self.pipeline.nodes if node.host == "inline"]
            for node in self.pipeline.nodes:
                for rank in range(node.ranks if node.host == "process" else 0):
                    self.children.append(
                        Child.start(
                            node,
                            rank,
                            channels,
                            run_dir=self.run_dir,
                            transport_dir=transport_dir,
                            run_id=run_id,
                            incarnation=1,
                            deadline_s=self.config.deadline_s,
                            remote=self.remote,
                        )
                    )
            hosted = [CONTROLLER, *(node.name for node in inline)]
            ports = connect_by_book(channels, hosted, book, incarnation=1)
            self.ports = ports[CONTROLLER]
            self.hosts = [Host(node, ports[node.name], channels, self.run_dir, run_id=run_id) for node in inline]
            for host in self.hosts:
                host.init(is_inline=True)
            if self.work.warm_start is not None:
                self._send("trainer", self.work.warm_start)

    def _train(self) -> None:
        """From the first event to the last step; a Ctrl-C before the first version leaves nothing to save."""
        self._run_until(
            lambda: len(self.ready) == len(self.pipeline.members) or self.is_interrupted, "all executors to be ready"
        )
        first = self.schedule.steps_done
        replicas = [node.name for node in self.pipeline.nodes if node.name.startswith("generator")]
        self._run_until(
            lambda: len(self.schedule.versions) == len(replicas) or self.is_interrupted,
            "generators to hold the first version",
        )
        if first == 0 and not self.is_interrupted:
            self._evaluate()
        self._run_until(lambda: self.schedule.is_finished or self.is_interrupted, "training")
        if self.is_interrupted:
            self._decide(Stop())
            self._run_until(lambda: not self.schedule.training, "the current step")

    def _finish(self) -> None:
        last = self.schedule.steps_done
        if not self.is_interrupted:
            versions = self.schedule.versions
            self._run_until(lambda: bool(versions) and min(versions.values()) >= last, "the last version in generators")
            self._evaluate()
            self._run_until(lambda: not self.evaluations, "the last evaluation")
        self._checkpoint()
        self._send("trainer", Export(path=str(self.run_dir / "model")))
        self._run_until(lambda: self.checkpointed == last and self.is_exported, "checkpoint and export")

    # The loop

    def _run_until(self, is_done: Callable[[], bool], what: str) -> None:
        """Handle events until `is_done`.

        Waits for: events. Unblocked by: any executor. Ends when: `is_done`, a death, or `deadline_s` without news.
        """
        self.heard_s = self.clock.now_s()
        while not is_done():
            has_worked = self._step()
            for host in self.hosts:
                has_worked |= host.step()
            if self.remote is not None:
                self._changed(self.remote.check(self.ports, busy=self._busy()))
            if not has_worked and not is_done():
                self._sleep()
                self._check_deadline(what)

    def _step(self) -> bool:
        has_worked = False
        inbox = self.ports.inputs["events"]
        while (message := inbox.get_nowait()) is not None:
            has_worked = True
            if not isinstance(message, Counters):
                self.heard_s = self.clock.now_s()
            with self.timeline.span("schedule"):
                self._handle(message)
        return has_worked

    def _sleep(self) -> None:
        with self.timeline.idle():
            inboxes = [*self.ports.inputs.values(), *(i for host in self.hosts for i in host.ports.inputs.values())]
            fds = [child.pidfd for child in self.children]
            fds += [fd for host in self.hosts for fd in host.executor.wait_fds()]
            deadlines = [s for host in self.hosts if (s := host.executor.wait_s()) is not None]
            deadlines += [] if self.remote is None else [self.remote.wait_s()]
            wait(inboxes, self.ports.outputs.values(), fds, min([WAKE_EVERY_S, *deadlines]))
        self._check_children()

    def _check_children(self) -> None:
        dead = next((child for child in self.children if child.has_ended), None)
        if dead is not None:
            self._step()  # it may have said why
            raise dead.death()

    def _check_deadline(self, what: str) -> None:
        silent_s = self.clock.now_s() - self.heard_s
        if silent_s > self.config.deadline_s:
            missing = sorted(set(self.pipeline.members) - self.ready)
            raise SlipstreamError(
                f"nothing happened for {silent_s:.0f} s while waiting for {what}",
                got=f"not ready: {', '.join(missing)}" if missing else f"the trainer waits for {self.waiting_reason}",
                allowed=f"deadline_s = {self.config.deadline_s:g}",
                hint=f"see {self.run_dir / 'logs'}; raise deadline_s if a single step takes longer",
            )

    @contextlib.contextmanager
    def _catch_interrupts(self) -> Iterator[None]:
        """The first Ctrl-C ends the run after the current step with a checkpoint; the second one at once."""

        def interrupt(_number: int, _frame: FrameType | None) -> None:
            if self.is_interrupted:
                raise KeyboardInterrupt
            self.is_interrupted = True

        try:
            previous = signal.signal(signal.SIGINT, interrupt)
        except ValueError:  # not the main thread: somebody else handles signals
            yield
            return
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    # Events

    def _handle(self, message: Message) -> None:
        match message:
            case Swapped() | CompletionFinished() if self._is_absent(f"generator-{message.replica}"):
                pass  # last words of a replica that was lost
            case Swapped() | CompletionFinished() | GroupScored() | StepDone():
                if isinstance(message, Swapped):
                    self.tally.swapped(message)
                    self.observer.swapped(message)
                if isinstance(message, StepDone):
                    self._stepped(message)
                self._decide(message)
            case Joined():
                assert self.remote is not None
                self._changed(self.remote.joined(message, self.ports))
            case Ready():
                self.ready.add(message.executor)
                self.tally.num_params = max(self.tally.num_params, message.num_params)
            case Published():
                self.tally.published(message)
            case EvalScored():
                self._evaluated(message)
            case Counters():
                self.tally.counted(message, self.clock.now_s())
                self.observer.counted(message)
            case Progress():
                self.observer.progress(message)
            case CheckpointSaved():
                self.checkpointed = message.step
            case Exported():
                self.is_exported = True
            case Left():
                pass  # a child: its process is watched
            case Failed() if self.remote is not None and self.remote.may_come_back(message.executor):
                self.observer.note(f"{message.executor} failed: {message.error}")
                self._changed(self.remote.lost(message.executor, self.ports))
            case Failed():
                raise ExecutorDied(
                    f"'{message.executor}' failed", got=message.error, hint=f"see logs/{message.executor}.log"
                )
            case _:
                raise TypeError(f"the controller does not take {type(message).__name__}")

    # Groups on other machines

    def _is_absent(self, executor: str) -> bool:
        return self.remote is not None and self.remote.is_absent(executor)

    def _busy(self) -> list[str]:
        """Who of the groups on other machines may be at work for longer than a lease: loading a model, or training."""
        return [name for name in self.pipeline.members if name not in self.ready or replica_of(name) is None]

    def _changed(self, changes: Sequence[Change]) -> None:
        """A lost generator's groups go elsewhere, and it is welcome back; without another group there is no run."""
        for change in changes:
            if not change.is_lost:
                self.observer.note(f"{change.group} has joined (incarnation {change.incarnation})")
                continue
            replica = replica_of(change.group)
            if replica is None:
                raise ExecutorDied(
                    f"'{change.group}' was lost: silent for {self.config.lease_s:g} s, or started again",
                    hint="its own log says why; `--resume` goes on from the last checkpoint",
                )
            self.observer.note(f"{change.group} was lost; its unfinished groups go elsewhere")
            self.tally.lost(change.group)
            self.ready.difference_update(change.members)
            self._decide(ReplicaLost(replica=replica))

    def _decide(self, event: Event) -> None:
        """Let the schedule decide; carry it out; tell the trainer what it is waiting for when that changed."""
        commands = self.schedule.apply(event)
        self.events.record(event, commands)
        if isinstance(event, StepDone):
            self._after_step()  # a checkpoint comes before the next step: it has the weights between the two
        for command in commands:
            self._carry_out(command, event)
        reason = self.schedule.waits_for()
        if reason != self.waiting_reason:
            self.waiting_reason = reason
            self._send("trainer", Waiting(reason=reason))
        if isinstance(event, Swapped | ReplicaLost):
            self._ask(self.evaluations.ask_again(self.schedule.versions))
        if isinstance(event, Swapped) and self.evaluation_due is not None and event.version >= self.evaluation_due:
            self.evaluation_due = None
            self._evaluate(with_samples=False)

    def _carry_out(self, command: Command, event: Event) -> None:
        match command:
            case StartGroup():
                self.tally.started(self.clock.now_s())
                self.ledger.admit(command.ordinal)
                admit = Admit(
                    ordinal=command.ordinal,
                    replica=command.replica,
                    prompt=self.work.prompt_of(command.ordinal),
                    num_samples=self.config.samples_per_group,
                )
                self._send(f"generator-{command.replica}", admit)
            case TrainStep():
                self._send("trainer", command)
            case Skip():
                assert isinstance(event, GroupScored)
                has_failed = event.num_failed >= self.config.samples_per_group
                for ordinal in command.ordinals:
                    self.ledger.dropped(ordinal, has_failed=has_failed)
                self._send("trainer", command)

    def _stepped(self, message: StepDone) -> None:
        now_s = self.clock.now_s()
        ordinals = self.schedule.training
        self.ledger.trained(ordinals, step=message.step)
        metrics = self.tally.stepped(message, now_s)
        wall_s = now_s - self.tally.started_s
        self.metrics.write(step=message.step, version=message.version, wall_s=wall_s, metrics=metrics)
        self.observer.stepped({"step": message.step, "version": message.version, "wall_s": wall_s} | metrics)

    def _after_step(self) -> None:
        done, config = self.schedule.steps_done, self.config
        if config.trainer.checkpoint_every and done % config.trainer.checkpoint_every == 0 and not self.is_interrupted:
            self._checkpoint()
        if config.eval.every and done % config.eval.every == 0 and done < config.steps:
            self.evaluation_due = done

    def _checkpoint(self) -> None:
        """Save one consistent cut: policy and optimizer by the trainer, the schedule's state beside them."""
        if self.checkpointed == self.schedule.steps_done:
            return
        path = self.run_dir / "checkpoints" / f"step_{self.schedule.steps_done}"
        snapshot = msgspec.to_builtins(self.schedule.snapshot())
        step, num_events = self.schedule.steps_done, self.events.num_events
        self._send("trainer", Checkpoint(step=step, path=str(path), schedule=snapshot, num_events=num_events))

    # Evaluation

    def _evaluate(self, *, with_samples: bool = True) -> None:
        """Ask for greedy answers to the held-out prompts, and at the ends for sampled ones too."""
        prompts = self.work.held_out[: self.config.eval.num_prompts]
        temperatures = (GREEDY, SAMPLED) if with_samples else (GREEDY,)
        self._ask(self.evaluations.begin(prompts, temperatures, self.schedule.versions))

    def _ask(self, requests: Sequence[Request]) -> None:
        for replica, request in requests:
            self._send(f"generator-{replica}", request)

    def _evaluated(self, message: EvalScored) -> None:
        evaluation = self.evaluations.scored(message)
        if evaluation is None:
            return
        accuracy = float(np.mean([score.reward >= 1 - 1e-6 for score in evaluation.scores]))
        is_greedy = evaluation.temperature == GREEDY
        self.tally.evaluated(message.version, accuracy, evaluation.scores, is_greedy=is_greedy)
        metrics = {"eval_accuracy" if is_greedy else "eval_sampled_accuracy": accuracy}
        if is_greedy and self.config.has_critic:  # the TL;DR reproduction's name of it
            metrics["objective/validation_score"] = float(np.mean([score.reward for score in evaluation.scores]))
        self.metrics.write(
            step=message.version,
            version=message.version,
            wall_s=self.clock.now_s() - self.tally.started_s,
            metrics=metrics,
        )
        self.observer.evaluated(self.tally, message.version)

    # Ends

    def _send(self, executor: str, message: Message) -> None:
        """To a group on another machine, if it is there: one that has ended is lost, and what it was sent with it."""
        try:
            self.ports.outputs[f"to-{executor}"].put(message)
        except ChannelClosed:
            if self.remote is None or executor not in self.remote:
                raise
            self._changed(self.remote.lost(executor, self.ports))

    def _shut_down(self) -> None:
        """Stop what still listens, wait for it, kill what does not end; close everything. Runs after errors too."""
        with contextlib.ExitStack() as ends:  # each is closed whatever the others do
            for ports in [*(host.ports for host in self.hosts), self.ports]:
                ends.callback(ports.close)
            for writer in (self.metrics, self.events, self.ledger, self.timeline):
                ends.callback(writer.close)
            ends.callback(self._note_end)
            ends.enter_context(self.timeline.span("shut_down"))
            for host in reversed(self.hosts):
                ends.callback(host.close)
            for child in self.children:
                if not child.has_ended and child.name in self.ready and RANK_MARK not in child.name:
                    with contextlib.suppress(SlipstreamError):
                        self._send(child.name, Stop())
            self._stop_remote()
            for child in self.children:
                self._take_last_words(child)
            for child in self.children:
                child.let_go()
            for child in self.children:
                child.end(LET_GO_DEADLINE_S)

    def _stop_remote(self) -> None:
        """Tell the groups on other machines that the run is over, and hear their last words."""
        if self.remote is None or self.tally.status == "failed":
            return  # of a failure their leases tell them
        for name in self.remote.present:
            with contextlib.suppress(SlipstreamError):
                self._send(name, Stop())
        deadline_s = self.clock.now_s() + STOP_DEADLINE_S
        while self.remote.present and self.clock.now_s() < deadline_s:
            wait(self.ports.inputs.values(), self.ports.outputs.values(), [], WAKE_EVERY_S)
            self._hear_last_words()

    def _hear_last_words(self) -> None:
        while (message := self.ports.inputs["events"].get_nowait()) is not None:
            if isinstance(message, Counters):
                self.tally.counted(message, self.clock.now_s())
            if isinstance(message, Left) and self.remote is not None:
                self.remote.left(message.executor)

    def _note_end(self) -> None:
        self.tally.ended_s = self.clock.now_s()
        self.tally.prompts = self.ledger.counts()

    def _take_last_words(self, child: Child) -> None:
        """Give a child that was told to stop its time to end by itself; a failed run grants none."""
        deadline_s = self.clock.now_s() + STOP_DEADLINE_S
        while self.tally.status != "failed" and not child.has_ended and self.clock.now_s() < deadline_s:
            wait(self.ports.inputs.values(), self.ports.outputs.values(), [child.pidfd], WAKE_EVERY_S)
            self._hear_last_words()


def read_snapshot(checkpoint: Path) -> tuple[Snapshot, int]:
    """The schedule's state in a checkpoint, and how many lines of `events.jsonl` led to it."""
    extra = msgspec.json.decode((checkpoint / "state.json").read_bytes())["extra"]
    return msgspec.convert(extra["schedule"], Snapshot), int(extra["num_events"])
