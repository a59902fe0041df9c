"""A run in virtual time: the real schedule among generators, rewards and a trainer that only take time.

    consumes      the schedule's commands
    produces      its events; the course of the run (`Simulated`); if asked, an `events.jsonl` that replays
    waits for     nothing: the clock jumps to the next event (`plan/event_loop.py`)
    ends when     the last step is done; ScheduleError where nothing can happen any more

The schedule is the real one (`controller/policies.py`), so admission, order, bound and batches are those of a run. The
rest of the system is modelled by the rules that its code follows (docs/planning.md, "The simulator"):

    generator   plan/simulated_generator.py
    rewards     `workers` score one completion each at a time, first come first served
    trainer     does one thing at a time: it takes rollouts, and tells of whole groups, between two commands only; a
                step, then the staging copy of a publish, then records; a command None saves a checkpoint
    weights     two versions may be in transit; a replica stages the newest beside decoding, at low priority
    controller  takes one event after the other; messages take a while either way
"""

from __future__ import annotations

import gc
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from slipstream.controller.schedule import SchedulingPolicy
from slipstream.core.errors import ScheduleError
from slipstream.core.run_log import Command, Event
from slipstream.core.types import CompletionFinished, GroupScored, Skip, StartGroup, StepDone, Swapped, TrainStep
from slipstream.observe.recorder import EventRecorder
from slipstream.plan.event_loop import Cores, EventLoop
from slipstream.plan.simulated_generator import Account, Replica, SimulatedRow, Spans, swapped
from slipstream.plan.simulated_run import Batch, Costs, GroupWork, Simulated, SimulatedSetup, SimulatedWorkload, Timed

VERSIONS_IN_TRANSIT = 2  # slots of a publisher (`controller/weights.py`)
DRAWN_AT_ONCE = 1024  # factors of jitter: one call draws so many


def simulate(
    policy: SchedulingPolicy,
    setup: SimulatedSetup,
    workload: SimulatedWorkload,
    costs: Costs,
    *,
    seed: int = 0,
    events: Path | None = None,
    window: tuple[int, int] | None = None,
) -> Simulated:
    """Run `policy` from its first event to its last step; a function of its arguments. ScheduleError for a deadlock.

    With `events` every decision is written there, as a run writes `events.jsonl`. With a `window` of steps (m, n) the
    run is left when n steps are done, and its course is told from the end of the first m on.
    """
    simulation = Simulation(policy, setup, workload, costs, seed=seed, events=events, window=window)
    was_collecting = gc.isenabled()
    gc.disable()  # millions of small objects and no cycle among them: looking for one is a tenth of the time
    try:
        return simulation.run()
    finally:
        if was_collecting:
            gc.enable()


class _Rewards:
    """`workers` servers, first come first served; with 0 of them completions do not wait."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation, self.workers, self.num_busy = simulation, simulation.setup.workers, 0
        self.queue: deque[int | None] = deque()

    def score(self, ordinals: Sequence[int | None]) -> None:
        """Take completions: of training groups, or of an evaluation (None), whose scores go nowhere here."""
        if not self.workers:
            self._begin(ordinals)
            return
        self.queue.extend(ordinals)
        while self.queue and self.num_busy < self.workers:
            self._begin((self.queue.popleft(),))

    def _begin(self, ordinals: Sequence[int | None]) -> None:
        simulation = self.simulation
        self.num_busy += 1
        simulation.later(simulation.costs.score_s * simulation.drawn("score"), partial(self._scored, ordinals))

    def _scored(self, ordinals: Sequence[int | None]) -> None:
        self.num_busy -= 1
        self.simulation.later(self.simulation.costs.from_rewards_s, partial(self.simulation.trainer.take, ordinals))
        if self.queue:
            self.score(())


class _Trainer:
    """The trainer process: it takes rollouts that arrived, then commands up to one step, and again."""

    def __init__(self, simulation: Simulation, device: Cores) -> None:
        self.simulation, self.setup, self.costs, self.device = simulation, simulation.setup, simulation.costs, device
        self.account = Account(simulation.loop, "wait_generation")
        self.reason = "generation"
        self.commands: deque[TrainStep | Skip | None] = deque()
        self.num_arrived = 0  # rollouts
        self.whole: list[int] = []  # groups that are whole with them
        self.missing: dict[int, int] = {}  # ordinal -> rollouts to come
        self.todo: deque[tuple[Mapping[str, float], Callable[[], None]]] = deque()  # before anything else
        self.is_busy = False
        self.working: Mapping[str, float] = {}
        self.reading: dict[int, set[int]] = {}  # version in transit -> replicas that have not released it
        self.held: int | None = None  # was published while none could go on its way

    def take(self, ordinals: Sequence[int | None]) -> None:
        """Take rollouts of these groups, but not those of an evaluation (None)."""
        for ordinal in ordinals:
            if ordinal is None:
                continue
            left = self.missing.pop(ordinal, self.simulation.policy.config.completions_per_group) - 1
            if left:
                self.missing[ordinal] = left
            else:
                self.whole.append(ordinal)
            self.num_arrived += 1
            if not left or self.costs.receive_s:
                self.wake()

    def obey(self, command: TrainStep | Skip | None) -> None:
        self.commands.append(command)
        self.wake()

    def wait_for(self, reason: str) -> None:
        self.reason = reason
        if not self.is_busy:
            self.account.enter(f"wait_{reason}")

    def release(self, version: int, replica: int) -> None:
        self.reading[version].discard(replica)
        if not self.reading[version]:
            del self.reading[version]
            self.wake()

    def wake(self) -> None:
        if not self.is_busy:
            self.is_busy = True
            self.account.enter("receive")
            if self.costs.wake_s:
                self.todo.append(({"overhead": self.costs.wake_s}, _nothing))
            self._go_on()

    def _go_on(self) -> None:
        while (next_up := self._next()) is not None:
            states, then = next_up
            work_s = sum(states.values())
            if work_s > 0:
                self.working = states
                self.device.run("train", self.setup.trainer_threads, work_s, partial(self._done, then))
                return
            then()
        self.is_busy = False
        self.account.enter(f"wait_{self.reason}")

    def _done(self, then: Callable[[], None]) -> None:
        self.account.spend(self.working)
        self.working = {}
        then()
        self._go_on()

    def _next(self) -> tuple[Mapping[str, float], Callable[[], None]] | None:
        """Return the seconds by state of the next piece of work, and what is done after it."""
        costs = self.costs
        if self.todo:
            return self.todo.popleft()
        if self.held is not None and len(self.reading) < VERSIONS_IN_TRANSIT:
            version, self.held = self.held, None
            self._offer(version)
        if self.num_arrived:
            count, whole = self.num_arrived, self.whole
            self.num_arrived, self.whole = 0, []
            return {"receive": count * costs.receive_s}, partial(self.simulation.scored, whole)
        if not self.commands:
            return None
        match self.commands.popleft():
            case TrainStep() as command:
                batch, factor = self.simulation.began(command), self.simulation.drawn("train")
                states = {state: seconds * factor for state, seconds in costs.train(batch).items()}
                return states, partial(self._trained, command, batch)
            case Skip() as command:
                rollouts = len(command.ordinals) * self.simulation.policy.config.completions_per_group
                return {"record": rollouts * costs.record_s}, _nothing
            case None:
                return {"checkpoint": costs.checkpoint_s}, _nothing

    def _trained(self, command: TrainStep, batch: Batch) -> None:
        version, config = command.step + 1, self.simulation.policy.config
        self.simulation.tell(StepDone(step=command.step, version=version, metrics={}))
        if version % config.publish_every == 0 or version == config.steps:
            self.todo.append(({"stage": self.costs.publish_s}, partial(self._publish, version)))
        self.todo.append(({"record": batch.completions * self.costs.record_s}, _nothing))

    def _publish(self, version: int) -> None:
        has_room = len(self.reading) < VERSIONS_IN_TRANSIT
        self.held = None if has_room else version
        self.simulation.result.publishes_skipped += not has_room
        if has_room:
            self._offer(version)

    def _offer(self, version: int) -> None:
        self.reading[version] = {replica.index for replica in self.simulation.replicas}
        for replica in self.simulation.replicas:
            self.simulation.later(self.costs.to_generator_s, partial(replica.offer, version))

    def spend(self) -> None:
        """Put the time so far of what is under way into the account."""
        if self.working:
            self.account.spend(self.working)
        else:
            self.account.enter(f"wait_{self.reason}")


def _nothing() -> None:
    """End a piece of work that only takes time."""


class Simulation:
    """The controller, and the clock, messages, noise and result that all processes share. `run` it once."""

    def __init__(
        self,
        policy: SchedulingPolicy,
        setup: SimulatedSetup,
        workload: SimulatedWorkload,
        costs: Costs,
        *,
        seed: int = 0,
        events: Path | None = None,
        window: tuple[int, int] | None = None,
    ) -> None:
        self.policy, self.setup, self.workload, self.costs = policy, setup, workload, costs
        self.loop, self.result = EventLoop(), Simulated()
        self._random = np.random.default_rng((seed, 0))
        self._drawn: dict[str, list[float]] = {}
        self._first, self._last = (0, policy.config.steps) if window is None else window
        self._origin_s = 0.0  # of the result's times
        cores = None if setup.cores is None else Cores(self.loop, setup.cores, setup.beside, setup.background)
        self.trainer = _Trainer(self, cores or Cores(self.loop))
        self.rewards = _Rewards(self)
        self.replicas = [Replica(self, index, cores or Cores(self.loop)) for index in range(setup.replicas)]
        self._recorder = None if events is None else EventRecorder(events, self.loop)
        self._groups: dict[int, GroupWork] = {}  # admitted, not trained or dropped
        self._tokens: dict[int, dict[int, int]] = {}  # what is finished of them, by version
        self._begun: dict[int, tuple[tuple[int, ...], float, Batch]] = {}  # step -> groups, when, of what
        self._events: deque[Event] = deque()
        self._is_deciding = False
        self._free_s = 0.0  # when the controller has come to the last event
        self._evaluation_due: int | None = None

    def run(self) -> Simulated:
        """Run to the last step. ScheduleError where it deadlocks."""
        if self._recorder is not None:
            self._recorder.record(self.policy.began(), [])
        try:
            for replica in self.replicas:
                self._decide(swapped(replica.index, 0))
            for _ in range(self.setup.evaluates_first):
                self._evaluate(0)
            policy, step = self.policy, self.loop.step
            last = min(self._last, policy.config.steps)
            while policy.steps_done < last:
                if not step():
                    got = f"after step {policy.steps_done} the trainer waits for {policy.waits_for()}"
                    raise ScheduleError("the schedule is stuck: nothing can happen any more", got=got)
        finally:
            if self._recorder is not None:
                self._recorder.close()
        return self._finished()

    def later(self, seconds: float, do: Callable[[], None]) -> None:
        """Call `do` after `seconds`; at once, and not by way of the heap, where that is nothing."""
        if seconds > 0:
            self.loop.at(self.loop.time_s + seconds, do)
        else:
            do()

    def drawn(self, kind: str, count: int = 1) -> float:
        """Draw a factor of the jitter of `kind`; for `count` pieces on end one that varies as their mean does."""
        factors = self.costs.jitter.get(kind)
        if not factors:
            return 1.0
        drawn = self._drawn.setdefault(kind, [])
        if not drawn:
            drawn.extend(self._random.choice(np.asarray(factors), DRAWN_AT_ONCE).tolist())
        factor = drawn.pop()
        return factor if count <= 1 else 1.0 + (factor - 1.0) / math.sqrt(count)

    def tell(self, *events: Event) -> None:
        """Send events to the controller."""
        self.later(self.costs.to_controller_s, partial(self._hear, events))

    def score(self, ordinals: Sequence[int | None]) -> None:
        """Send completions to the rewards: of training groups, or of an evaluation (None)."""
        self.later(self.costs.to_rewards_s, partial(self.rewards.score, ordinals))

    def finished(self, replica: int, rows: Sequence[tuple[SimulatedRow, Spans]]) -> None:
        """Send completions to the rewards, and word of them to the controller."""
        told = []
        for row, spans in rows:
            tokens = self._tokens[row.ordinal]
            for version, count in spans:
                tokens[version] = tokens.get(version, 0) + count
            done = {"ordinal": row.ordinal, "sample": row.sample, "replica": replica, "num_tokens": row.length}
            told.append(CompletionFinished(**done, min_version=0, max_version=0))
        self.tell(*told)
        self.score([row.ordinal for row, _ in rows])

    def scored(self, ordinals: Sequence[int]) -> None:
        """Send word of groups that are scored and beside the trainer."""
        for ordinal in ordinals:
            work, versions = self._groups[ordinal], self._tokens[ordinal]
            scored = partial(GroupScored, ordinal=ordinal, has_signal=work.has_signal, mean_reward=0.5, num_failed=0)
            self.tell(scored(min_version=min(versions), max_version=max(versions)))

    def began(self, command: TrainStep) -> Batch:
        """Note that the trainer begins a step; return the tokens that it reads."""
        works = [self._groups.pop(ordinal) for ordinal in command.ordinals]
        total = 0
        for ordinal in command.ordinals:
            for version, count in self._tokens.pop(ordinal).items():
                self.result.lags[command.step - version] += count
                total += count
        given = sum(work.given_tokens for work in works)
        batch = Batch(
            groups=len(works),
            completions=sum(len(work.lengths) for work in works),
            prompt_tokens=sum(work.prompt_tokens for work in works),
            completion_tokens=total + given,
            given_tokens=given,
        )
        self._begun[command.step] = (command.ordinals, self.loop.time_s, batch)
        return batch

    def _hear(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, StepDone):
                ordinals, start_s, batch = self._begun.pop(event.step)
                origin_s = self._origin_s
                self.result.timed.append(Timed(ordinals, start_s - origin_s, self.loop.time_s - origin_s, batch))
                if event.version == self._first:
                    processes: list[_Trainer | Replica] = [self.trainer, *self.replicas]
                    for process in processes:  # forget the run so far
                        process.spend()
                        process.account.seconds.clear()
                    self.result, self._origin_s = Simulated(), self.loop.time_s
            self._decide(event)
            due = self._evaluation_due
            if due is not None and isinstance(event, Swapped) and event.version >= due:
                self._evaluation_due = None
                self._evaluate(event.version)

    def _decide(self, event: Event) -> None:
        """Give the schedule one event after the other, and carry out its commands."""
        self._events.append(event)
        if self._is_deciding:
            return
        self._is_deciding = True
        while self._events:
            event = self._events.popleft()
            commands = self.policy.apply(event)
            self.result.num_events += 1
            if self._recorder is not None:
                self._recorder.record(event, commands)
            self._free_s = max(self._free_s, self.loop.time_s) + self.costs.decide_s
            if isinstance(event, StepDone):
                setup, done = self.setup, event.version
                if setup.checkpoint_every and done % setup.checkpoint_every == 0:
                    self._send(self.costs.to_trainer_s, partial(self.trainer.obey, None))
                if setup.evaluate_every and done % setup.evaluate_every == 0 and done < self.policy.config.steps:
                    self._evaluation_due = done
            if commands:
                self._carry_out(commands)
            if (reason := self.policy.waits_for()) != self.trainer.reason:
                self.trainer.wait_for(reason)
        self._is_deciding = False

    def _carry_out(self, commands: Sequence[Command]) -> None:
        admitted: dict[int, list[tuple[int, GroupWork]]] = {}
        for command in commands:
            match command:
                case StartGroup():
                    admitted.setdefault(command.replica, []).append(self._start(command))
                case TrainStep():
                    self._send(self.costs.to_trainer_s, partial(self.trainer.obey, command))
                case Skip():
                    self._skip(command)
        for replica, groups in admitted.items():  # what is ready together travels together
            self._send(self.costs.to_generator_s, partial(self.replicas[replica].admit, groups))

    def _send(self, seconds: float, do: Callable[[], None]) -> None:
        """Call `do` `seconds` after the controller has come to it."""
        self.later(self._free_s - self.loop.time_s + seconds, do)

    def _start(self, command: StartGroup) -> tuple[int, GroupWork]:
        ordinal, config = command.ordinal, self.policy.config
        work = self.workload.group(ordinal, self.policy.place(ordinal) // config.groups_per_step)
        self._groups[ordinal], self._tokens[ordinal] = work, {}
        self.result.started[command.replica] += 1
        return ordinal, work

    def _skip(self, command: Skip) -> None:
        for ordinal in command.ordinals:
            self.result.dropped[ordinal] = command.cause
            del self._groups[ordinal]
            tokens = sum(self._tokens.pop(ordinal).values())
            self.result.stale_tokens += tokens if command.cause == "stale" else 0
        self._send(self.costs.to_trainer_s, partial(self.trainer.obey, command))

    def _evaluate(self, version: int) -> None:
        """Evaluate on the first replica with the newest version."""
        versions = self.policy.versions
        newest = max(self.replicas, key=lambda replica: (versions[replica.index], -replica.index))
        prompts = self.workload.held_out(version)
        self._send(self.costs.to_generator_s, partial(newest.evaluate, prompts, version))

    def _finished(self) -> Simulated:
        result = self.result
        self.trainer.spend()
        result.left_tokens = sum(replica.end_run() for replica in self.replicas)
        result.left_tokens += sum(sum(tokens.values()) for tokens in self._tokens.values())
        result.accounting["trainer"] = self.trainer.account.seconds
        result.accounting |= {replica.name: replica.account.seconds for replica in self.replicas}
        result.wall_s, result.num_jumps = self.loop.time_s - self._origin_s, self.loop.num_events
        result.slot_s = len(self.replicas) * self.setup.slots * result.wall_s
        return result
