"""What one controller carries: a real controller, schedule, ledger and channels, and replicas that only talk.

    python benchmarks/fleet.py [--replicas 512] [--groups 16] [--completions 64] [--steps 100] [--together 8]
    python benchmarks/fleet.py --replicas 1024 --groups 1024 --completions 16 --step-s 16 --steps 4 [--hours 1]
    python benchmarks/fleet.py --paper 10000 --replicas 256 --groups 1024 --completions 16 --steps 20

A second process plays all replicas and the trainer, over the real channels. Without `--step-s` it reports completions
as soon as a group is admitted, `--together` of them in a message as a decode step would, then the score of the group,
each step as soon as it is told to train it, and each version in every replica. So the controller never waits for work.

With `--step-s` it plays them in real time: a completion takes as long as it has tokens (lognormal with sigma 1, cut at
four times the mean, by ordinal and sample), a replica has slots for what the fleet needs to keep up and a tenth more,
the trainer needs 0.9 of `--step-s` for a step, replicas take a version within 0.2 s, and each reports its counters as
often as a host does. 1 % of the replicas are lost in an hour, and `--hours` of this fall into the run: such a replica
is silent for 5 s, then its agent has started it again. Printed are the idle shares of generators' slots and trainer.

Printed of the controller are its CPU seconds per completion, in its timeline's states, the rate at which it would be
busy all the time, its memory, the bytes of its files, and the seconds of a resume from them.

`--paper` also prints what a cluster of so many GPUs would ask of one controller, by arithmetic from these costs.
"""

from __future__ import annotations

import argparse
import functools
import heapq
import itertools
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from slipstream.controller.controller import Controller
from slipstream.controller.executors import Executors
from slipstream.controller.ledger import Cut, Ledger
from slipstream.controller.meeting import Cluster
from slipstream.controller.observers import Observers
from slipstream.controller.pipeline import CONTROLLER, Node, Pipeline, RunInput
from slipstream.controller.schedule import Schedule
from slipstream.controller.tally import Tally
from slipstream.core import links, wire
from slipstream.core.addresses import LocalAddresses
from slipstream.core.channel import Ports, connect_by_book
from slipstream.core.clock import WallClock
from slipstream.core.links import poll
from slipstream.core.peer_messages import Joined
from slipstream.core.ports import Inbox
from slipstream.core.recipes import resolve
from slipstream.core.run_log import ScheduleConfig, Snapshot, read_metrics
from slipstream.core.service_messages import (
    Admit,
    Checkpoint,
    CheckpointSaved,
    CompletionsFinished,
    Counters,
    Ready,
    counters_every_s,
)
from slipstream.core.types import CompletionFinished, GroupScored, Message, Prompt, StepDone, Stop, Swapped, TrainStep
from slipstream.launch import allow_connections
from slipstream.observe.hardware import describe
from slipstream.observe.recorder import EventRecorder
from slipstream.stages.resume import prepare_resume

PROMPT = Prompt(prompt_id="0", text="a question", tokens=np.zeros(64, np.int32), task="t")
METRICS = dict.fromkeys(
    ("tokens_trained", "tokens_read", "padding_frac", "staleness_updates_max", "reward_mean", "completions_trained"),
    1.0,
)
MEAN_TOKENS, MEAN_S, LONGEST = 1000, 10.0, 4.0  # of a completion; times the mean
SPARE, TRAINER_SHARE, SWAP_S, SCORE_S, SILENT_S = 1.1, 0.9, 0.2, 0.05, 5.0
LOST_PER_HOUR = 0.01
HOST_TIMES = {f"time/{state}": 1.0 for state in ("decode", "sample", "send", "receive", "swap", "wait_prompt", "idle")}


def pipeline_of(num_replicas: int) -> Pipeline:
    names = ["trainer", *(f"generator-{replica}" for replica in range(num_replicas))]
    return Pipeline(tuple(Node(name, os.path.join, host="torchrun") for name in names), ())


class PlayedExecutors(Executors):
    """Executors whose processes are all played by one other process."""

    def launch(self, transport_dir: Path, run_id: str, cluster: Cluster | None) -> None:
        book = LocalAddresses(self.pipeline.all_channels, transport_dir)
        self._ports = connect_by_book(self.pipeline.all_channels, [CONTROLLER], book, 1)[CONTROLLER]

    num_lost = 0

    def _forget(self, *about) -> None:
        self.num_lost += 1
        super()._forget(*about)

    def send(self, executor: str, message: Message) -> None:
        if isinstance(message, Checkpoint) and executor == "trainer":
            self.saved = message
        super().send(executor, message)


@functools.cache
def durations_of(ordinal: int, count: int) -> np.ndarray:
    """Seconds of the completions of a group: heavy-tailed, with mean MEAN_S before the longest are cut."""
    drawn = np.random.default_rng(ordinal).lognormal(-0.5, 1.0, count)
    return MEAN_S * np.minimum(drawn, LONGEST)


MEAN_CUT_S = float(np.mean(durations_of(2**40, 100_000)))


def slots_of(options: argparse.Namespace) -> int:
    """Slots of a replica: what the fleet needs to keep up with the trainer, and a tenth more."""
    per_s = options.groups * options.completions / options.step_s if options.step_s else 0.0
    return -(-round(per_s * MEAN_CUT_S * SPARE) // options.replicas)


@dataclass(eq=False)
class Replica:
    """A played generator: groups wait for its slots, its completions end in time."""

    ports: Ports
    incarnation: int = 1
    version: int = 0
    is_silent: bool = False
    num_live: int = 0
    waiting: deque[tuple[int, int, float]] = field(default_factory=deque)
    left: dict[int, int] = field(default_factory=dict)  # ordinal -> completions to come


class Player:
    """All executors, played until the trainer is told to stop, or the parent ends.

    Consumes: commands. Waits for: them, and the end of the next thing that takes time. Ends when: Stop.
    """

    def __init__(self, options: argparse.Namespace, transport_dir: Path) -> None:
        self.options, self.pipeline = options, pipeline_of(options.replicas)
        self.channels = self.pipeline.all_channels
        self.book = LocalAddresses(self.channels, transport_dir)
        ports = connect_by_book(self.channels, self.pipeline.members, self.book, 1)
        self.trainer = ports.pop("trainer")
        self.replicas = [Replica(ports[f"generator-{number}"]) for number in range(options.replicas)]
        self.slots = slots_of(options)
        self.due: list[tuple[float, int, tuple]] = []  # heap: time, tie-break, what happens
        self.numbers = itertools.count()
        self.inboxes: dict[object, tuple[Inbox, int]] = {}
        self.unacknowledged: dict[Inbox, float] = {}  # when it was read
        self.busy_s = self.trained_s = 0.0
        self.since_s: float | None = None  # the first step has begun
        self.until: tuple[float, float] | None = None  # the last group was admitted: the time, and busy_s
        self.rng = random.Random(options.seed)

    def play(self) -> None:
        self._listen(self.trainer, -1)
        for own, name, number in self._all():
            self._listen(own, number)
            say(own, Joined(executor=name, incarnation=1), Ready(executor=name))
            if number >= 0:
                say(own, swapped(number, 0))
        parent, now_s = os.getppid(), time.monotonic()
        if self.options.step_s:
            for number in range(self.options.replicas):
                self._at(now_s + self.options.count_every_s * self.rng.random(), "count", number)
            self._plan_losses(now_s)
        sockets = [*self.inboxes]
        while os.getppid() == parent:
            wait_s = min(self.due[0][0] - time.monotonic(), 0.02) if self.due else 0.02
            ready = poll(sockets, max(0.0, wait_s))
            if len(sockets) != len(self.inboxes) or any(socket not in self.inboxes for socket in ready):
                sockets = [*self.inboxes]
            for socket in ready:
                if socket in self.inboxes and self._read(*self.inboxes[socket]):
                    return
            self._happen(time.monotonic())
            self._acknowledge()

    def _all(self) -> Iterator[tuple[Ports, str, int]]:
        yield self.trainer, "trainer", -1
        for number, replica in enumerate(self.replicas):
            yield replica.ports, f"generator-{number}", number

    def _listen(self, own: Ports, number: int) -> None:
        for inbox in own.inputs.values():
            self.inboxes[inbox.pollables()[1]] = inbox, number

    def _at(self, time_s: float, *what: object) -> None:
        heapq.heappush(self.due, (time_s, next(self.numbers), what))

    def _read(self, inbox: Inbox, number: int) -> bool:
        self.unacknowledged[inbox] = time.monotonic()
        if number >= 0 and self.replicas[number].is_silent:
            return False
        while (message := inbox.get_nowait()) is not None:
            if isinstance(message, Stop):
                return True
            self._answer(message, number)
        return False

    def _acknowledge(self) -> None:
        now_s = time.monotonic()
        for inbox, read_s in [*self.unacknowledged.items()]:
            if inbox.is_due(now_s):
                inbox.pump()
            elif now_s - read_s > 0.5:
                del self.unacknowledged[inbox]

    def _answer(self, message: Message, number: int) -> None:
        match message:
            case Admit() if self.options.step_s:
                self._admitted(message, number)
            case Admit():
                together = self.options.together
                finished = [finished_of(message.ordinal, n, number) for n in range(message.num_samples)]
                for first in range(0, len(finished), together):
                    say(
                        self.replicas[number].ports,
                        CompletionsFinished(finished=tuple(finished[first : first + together])),
                    )
                say(self.trainer, scored(message.ordinal))
            case TrainStep(step=step) if self.options.step_s:
                if self.since_s is None:
                    self.since_s, self.busy_s, self.trained_s = time.monotonic(), 0.0, 0.0
                self._at(time.monotonic() + TRAINER_SHARE * self.options.step_s, "trained", step)
            case TrainStep(step=step):
                self._trained(step)
            case Checkpoint(step=step, path=path) if number < 0:
                say(self.trainer, CheckpointSaved(step=step, path=path))

    def _trained(self, step: int) -> None:
        say(self.trainer, StepDone(step=step, version=step + 1, metrics=METRICS))
        for number, replica in enumerate(self.replicas):
            if self.options.step_s:
                self._at(time.monotonic() + SWAP_S * self.rng.random(), "swap", number, step + 1)
            else:
                say(replica.ports, swapped(number, step + 1))

    # In time

    def _admitted(self, message: Admit, number: int) -> None:
        replica = self.replicas[number]
        replica.left[message.ordinal] = message.num_samples
        if message.ordinal + 1 == self.options.steps * self.options.groups:
            self.until = time.monotonic(), self.busy_s
        durations = durations_of(message.ordinal, message.num_samples)
        replica.waiting.extend((message.ordinal, n, float(s)) for n, s in enumerate(durations))
        self._start(number)

    def _start(self, number: int) -> None:
        replica, now_s = self.replicas[number], time.monotonic()
        while replica.waiting and replica.num_live < self.slots:
            ordinal, sample, seconds = replica.waiting.popleft()
            replica.num_live += 1
            self._at(now_s + seconds, "end", number, replica.incarnation, ordinal, sample, seconds)

    def _happen(self, now_s: float) -> None:
        finished: dict[int, list[CompletionFinished]] = {}
        groups: list[int] = []
        while self.due and self.due[0][0] <= now_s:
            match heapq.heappop(self.due)[2]:
                case ("end", number, incarnation, ordinal, sample, seconds):
                    replica = self.replicas[number]
                    if incarnation != replica.incarnation or replica.is_silent:
                        continue
                    self.busy_s += seconds
                    replica.num_live -= 1
                    replica.left[ordinal] -= 1
                    finished.setdefault(number, []).append(finished_of(ordinal, sample, number, seconds))
                    if not replica.left[ordinal]:
                        del replica.left[ordinal]
                        groups.append(ordinal)
                case ("score", ordinal):
                    say(self.trainer, scored(ordinal))
                case ("swap", number, version) if not self.replicas[number].is_silent:
                    self.replicas[number].version = version
                    say(self.replicas[number].ports, swapped(number, version))
                case ("trained", step):
                    self.trained_s += TRAINER_SHARE * self.options.step_s
                    self._trained(step)
                    if step + 1 == self.options.steps:
                        self._tell(now_s)
                case ("count", number):
                    self._count(number, now_s)
                case ("silence", number) if not self.replicas[number].is_silent:
                    self.replicas[number].is_silent = True
                    self._at(now_s + SILENT_S, "again", number)
                case ("again", number):
                    self._start_again(number)
        for number, ended in finished.items():
            say(self.replicas[number].ports, CompletionsFinished(finished=tuple(ended)))
            self._start(number)
        for ordinal in groups:
            self._at(now_s + SCORE_S, "score", ordinal)

    def _count(self, number: int, now_s: float) -> None:
        """Say what a host and its executor say."""
        replica, name = self.replicas[number], f"generator-{number}"
        if not replica.is_silent:
            counts = {"generated_tokens": now_s, "live": float(replica.num_live), "re_prefilled_tokens": 0.0}
            say(replica.ports, Counters(executor=name, values=HOST_TIMES))
            say(replica.ports, Counters(executor=name, values=counts))
        self._at(now_s + self.options.count_every_s, "count", number)

    def _plan_losses(self, now_s: float) -> None:
        options, rng = self.options, self.rng
        count = round(LOST_PER_HOUR * options.hours * options.replicas)
        for number in rng.sample(range(options.replicas), min(count, options.replicas)):
            self._at(now_s + options.step_s * (1.0 + rng.random() * (options.steps - 1)), "silence", number)

    def _start_again(self, number: int) -> None:
        name, old = f"generator-{number}", self.replicas[number]
        for socket in [s for s, (_, owner) in self.inboxes.items() if owner == number]:
            self.unacknowledged.pop(self.inboxes.pop(socket)[0], None)
        old.ports.close()
        incarnation = old.incarnation + 1
        ports = connect_by_book(self.channels, [name], self.book, incarnation)[name]
        self.replicas[number] = Replica(ports, incarnation, old.version)
        self._listen(ports, number)
        say(
            ports,
            Joined(executor=name, incarnation=incarnation),
            Ready(executor=name),
            swapped(number, old.version),
        )

    def _tell(self, now_s: float) -> None:
        """Print the idle shares: slots until the last admission, trainer until the last step."""
        assert self.since_s is not None
        assert self.until is not None
        until_s, busy_s = self.until
        seconds = until_s - self.since_s
        idle = f"{1 - busy_s / (self.slots * len(self.replicas) * seconds):.1%}" if seconds > LONGEST * MEAN_S else "?"
        wall_s = now_s - self.since_s
        print(f"  generators: {self.slots} slots each, {idle} idle in {seconds:.0f} s; ", end="")
        print(
            f"trainer: {1 - self.trained_s / wall_s:.1%} idle; {wall_s / self.options.steps:.1f} s per step", flush=True
        )


def finished_of(ordinal: int, sample: int, replica: int, seconds: float = MEAN_S) -> CompletionFinished:
    num_tokens = round(seconds / MEAN_S * MEAN_TOKENS)
    return CompletionFinished(
        ordinal=ordinal, sample=sample, replica=replica, num_tokens=num_tokens, min_version=0, max_version=0
    )


def scored(ordinal: int) -> GroupScored:
    return GroupScored(ordinal=ordinal, has_signal=True, mean_reward=0.5, num_failed=0, min_version=0, max_version=0)


def say(own: Ports, *events: Message) -> None:
    for event in events:
        own.outputs["events"].put(event)


def swapped(replica: int, version: int) -> Swapped:
    return Swapped(replica=replica, version=version, transfer_s=0.0, pause_s=0.0, probe_error=0.0)


def memory_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


@dataclass(frozen=True)
class Measured:
    """What steps cost their controller: CPU and resume seconds and bytes per completion, the rest per replica."""

    cpu_s: float
    event_bytes: float
    ledger_bytes: float
    resume_s: float
    memory_mb: float
    descriptors: float


def measure(options: argparse.Namespace, folder: Path) -> Measured:
    """Run the controller for so many steps; print what it cost."""
    shape = {"groups_per_step": options.groups, "completions_per_group": options.completions, "steps": options.steps}
    staleness = options.max_staleness or 2 + -(-options.replicas // options.groups)  # so that every replica has work
    settings = {"max_staleness": staleness, "health.stop_on": [], "trainer.checkpoint_every": 1, "deadline_s": 600.0}
    config = resolve("quickstart", {**shape, **settings})
    room = max(options.completions, slots_of(options)) + options.completions  # its slots and one group in reserve
    capacity = max(2 * options.completions, room)
    schedule = Schedule(
        ScheduleConfig(**shape, max_staleness=staleness, reorder_window=options.groups, capacity=capacity)
    )
    run_dir, transport_dir = folder / "run", folder / "t"
    run_dir.mkdir()
    transport_dir.mkdir(mode=0o700)
    work = RunInput(lambda ordinal: PROMPT, (), None)
    observers = Observers(config, run_dir, Tally(config, started_s=WallClock().now_s()))
    controller = Controller(config, pipeline_of(options.replicas), schedule, work, observers, run_dir=run_dir)
    controller.executors.__class__ = PlayedExecutors
    alone_mb, alone_fds = memory_mb(), len(os.listdir("/proc/self/fd"))
    played = subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--play", str(transport_dir)])
    try:
        with controller.timeline.span("overhead"):
            observers.take(controller.events.record(schedule.began(), []))
            controller.executors.launch(transport_dir, "fleet", None)
            schedule.is_stopping = True  # nothing is admitted while the replicas are looked at as they rest
            controller._run_until(lambda: len(schedule.versions) == options.replicas, "all replicas")
            fds = len(os.listdir("/proc/self/fd"))
            at_rest = rest(controller) if options.step_s else (0.0, 0.0)
            schedule.is_stopping = False
            first_mb, cpu_s, wall_s, all_s = memory_mb(), time.thread_time(), time.monotonic(), time.process_time()
            states, first = Counter(controller.timeline.totals()), controller.events.num_events
            controller._decide(swapped(0, 0))  # which admits
            controller._run_until(lambda: schedule.is_finished, "training")
            cpu_s, wall_s = time.thread_time() - cpu_s, time.monotonic() - wall_s
            all_s = time.process_time() - all_s
            states = Counter(controller.timeline.totals()) - states
    finally:
        played.kill()
        played.wait()
        controller.tally.status = "failed"  # nobody is waited for
        controller._shut_down()
    count, num_events = options.groups * options.completions * options.steps, controller.events.num_events - first
    print(f"{options.replicas} replicas, {options.groups} groups x {options.completions} completions, ", end="")
    print(f"{options.steps} steps, k = {staleness}: {count:,} completions, {num_events:,} events")
    print(f"  controller: {cpu_s / count * 1e3:.4f} ms of CPU per completion, saturated at {count / cpu_s:,.0f} per s")
    print(f"  {count / wall_s:,.0f} per s here, beside the process that plays the replicas: ", end="")
    print(", ".join(f"{state} {seconds / wall_s:.0%}" for state, seconds in states.most_common()))
    if options.step_s:
        print(f"  {cpu_s / wall_s:.1%} of a core, with ZeroMQ's thread {all_s / wall_s:.1%}; ", end="")
        print(f"{at_rest[0] / at_rest[1]:.1%} at rest; {controller.executors.num_lost} replicas lost")
    print(f"  memory: {first_mb:.0f} MB before the first step, {memory_mb():.0f} after the last")
    sizes = {path.name: path.stat().st_size for path in sorted(run_dir.glob("*.jsonl"))}
    print(f"  bytes per step: {', '.join(f'{name} {size / options.steps:,.0f}' for name, size in sizes.items())}")
    print(f"  descriptors: {fds}")
    return Measured(
        cpu_s / count,
        sizes["events.jsonl"] / count,
        sizes["ledger.jsonl"] / count,
        resume(controller, run_dir) / count,
        (first_mb - alone_mb) / options.replicas,
        (fds - alone_fds) / options.replicas,
    )


def rest(controller: Controller, seconds: float = 5.0) -> tuple[float, float]:
    """Return the CPU seconds of the controller while the replicas only report, and the seconds that this took."""
    cpu_s, since_s = time.thread_time(), time.monotonic()
    controller._run_until(lambda: time.monotonic() - since_s > seconds, "a while")
    return time.thread_time() - cpu_s, time.monotonic() - since_s


def resume(controller: Controller, run_dir: Path) -> float:
    """Print and return the seconds until a controller has the state of the last checkpoint again, from its files."""
    command = controller.executors.saved
    checkpoint = run_dir / "checkpoints" / f"step_{command.step}"
    checkpoint.mkdir(parents=True)
    extra = Cut(msgspec.convert(command.schedule, Snapshot), command.num_events, command.cut, command.run)
    (checkpoint / "state.json").write_bytes(msgspec.json.encode({"extra": extra}))
    since_s = time.perf_counter()
    resumed = prepare_resume(run_dir, (checkpoint, []))
    cut_s = time.perf_counter() - since_s
    Schedule.restore(controller.schedule.config, resumed.cut.schedule)
    Ledger(run_dir / "ledger.jsonl").close()
    EventRecorder(run_dir / "events.jsonl", WallClock(), num_events=resumed.cut.num_events).close()
    for line in read_metrics(run_dir / "metrics.jsonl"):
        controller.tally.recall(line)
    all_s = time.perf_counter() - since_s
    print(f"  resume at step {command.step}: {all_s:.2f} s, of which {cut_s:.2f} s ", end="")
    print(f"to set aside and cut the files; the command to save it has {len(wire.encode(command)):,} bytes")
    return all_s


def paper(gpus: int, found: Measured, group: int) -> None:
    """Print what a cluster asks of one controller, by arithmetic from `found` and the assumptions that it names."""
    tokens_per_s, tokens, weights_gb, link_gb_s, step_s, steps = 1000, 4000, 140, 50, 120, 1000
    generating = gpus * 3 // 4
    per_s = generating * tokens_per_s / tokens
    print(
        f"\n{gpus:,} GPUs, of which {generating:,} generate {tokens_per_s:,} tokens/s each, completions of {tokens:,}"
    )
    print(f"tokens in groups of {group}, steps of {step_s} s, a model of {weights_gb} GB, links of {link_gb_s} GB/s:")
    print(f"  {per_s:,.0f} completions/s, {per_s * step_s:,.0f} a step, {per_s / group:,.0f} groups/s")
    print(f"  controller: {per_s * found.cpu_s:.0%} of a core for completions, at {found.cpu_s * 1e3:.3f} ms each")
    day = per_s * 86400 / 1e9
    print(
        f"  events.jsonl {per_s * found.event_bytes / 1e6:.2f} MB/s, {day * found.event_bytes:.0f} GB a day; ", end=""
    )
    print(f"ledger.jsonl {per_s * found.ledger_bytes / 1e3:.0f} kB/s, {day * found.ledger_bytes:.1f} GB a day")
    print(f"  resume after {steps:,} steps: {per_s * step_s * steps * found.resume_s / 60:.0f} minutes")
    for each in (8, 1):
        replicas = generating // each
        mb, fds = replicas * found.memory_mb, replicas * found.descriptors
        all_gb, told = replicas * weights_gb, replicas * 2 / counters_every_s(replicas)
        print(
            f"  {replicas:,} replicas of {each} GPU{'s' if each > 1 else ''}: {mb / 1e3:.1f} GB in the controller, ",
            end="",
        )
        print(f"{fds:,.0f} descriptors, {6 * replicas:,} sockets of at most {links._MAX_SOCKETS:,}; ", end="")
        print(f"{told:.0f} reports/s, {replicas / step_s:.1f} swaps/s")
        print(f"    weights: {all_gb / 1e3:,.0f} TB a version; from the trainer alone ", end="")
        print(
            f"{replicas * weights_gb / link_gb_s:,.0f} s over one link, relayed {weights_gb / link_gb_s:.1f} s ",
            end="",
        )
        print(f"and {replicas * 64e-3 / link_gb_s:.1f} s for the buckets of 64 MB to pass through it")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=512)
    parser.add_argument("--groups", type=int, default=16, help="of a step")
    parser.add_argument("--completions", type=int, default=64, help="of a group")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--together", type=int, default=8, help="completions that a decode step finishes")
    parser.add_argument("--max-staleness", type=int, default=0, help="0: so many that every replica has work")
    parser.add_argument("--step-s", type=float, default=0.0, help="seconds of a step in real time; 0: none has any")
    parser.add_argument("--hours", type=float, default=1.0, help="of losses that fall into the run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--paper", type=int, default=0, metavar="GPUS", help="arithmetic for so many of them")
    parser.add_argument("--play", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--count-every-s", type=float, help="between two reports of a replica; else as a run has it")
    options = parser.parse_args()
    options.count_every_s = options.count_every_s or counters_every_s(options.replicas)
    allow_connections()
    if options.play is not None:
        Player(options, options.play).play()
        return
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    print(f"command: {' '.join(sys.argv)}\n{describe()}, commit {commit.stdout.strip()}")
    with tempfile.TemporaryDirectory() as name:
        found = measure(options, Path(name))
    if options.paper:
        paper(options.paper, found, options.completions)


if __name__ == "__main__":
    main()
