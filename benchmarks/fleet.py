"""The completions per second that one controller carries: a real controller and schedule, and replicas that only talk.

    python benchmarks/fleet.py [--replicas 512] [--groups 16] [--completions 64] [--steps 100] [--together 8]

A second process plays all replicas and the trainer, over the real channels: it reports completions as soon as a group
is admitted, `--together` of them in a message as a decode step would, then the score of the group, each step as soon as
it is told to train it, and each version in every replica. So the controller never waits for work. Printed are its CPU
seconds per completion, in its timeline's states, and the rate at which it would be busy all the time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from slipstream.controller.controller import Controller
from slipstream.controller.executors import Executors
from slipstream.controller.meeting import Cluster
from slipstream.controller.observers import Observers
from slipstream.controller.pipeline import CONTROLLER, Node, Pipeline, RunInput
from slipstream.controller.schedule import Schedule
from slipstream.controller.tally import Tally
from slipstream.core.addresses import LocalAddresses
from slipstream.core.channel import Ports, connect_by_book, wait
from slipstream.core.clock import WallClock
from slipstream.core.recipes import resolve
from slipstream.core.run_log import ScheduleConfig
from slipstream.core.service_messages import Admit, CompletionsFinished, Ready
from slipstream.core.types import CompletionFinished, GroupScored, Message, Prompt, StepDone, Stop, Swapped, TrainStep
from slipstream.observe.hardware import describe

PROMPT = Prompt(prompt_id="0", text="a question", tokens=np.zeros(64, np.int32), task="t")
METRICS = dict.fromkeys(
    ("tokens_trained", "tokens_read", "padding_frac", "staleness_updates_max", "reward_mean", "completions_trained"),
    1.0,
)


def pipeline_of(num_replicas: int) -> Pipeline:
    names = ["trainer", *(f"generator-{replica}" for replica in range(num_replicas))]
    return Pipeline(tuple(Node(name, os.path.join) for name in names), ())


class PlayedExecutors(Executors):
    """Executors whose processes are all played by one other process."""

    def launch(self, transport_dir: Path, run_id: str, cluster: Cluster | None) -> None:
        book = LocalAddresses(self.pipeline.all_channels, transport_dir)
        self._ports = connect_by_book(self.pipeline.all_channels, [CONTROLLER], book, 1)[CONTROLLER]
        self._membership.watch(self.pipeline.members)


def play(num_replicas: int, together: int, transport_dir: Path) -> None:
    """Play all executors until the trainer is told to stop, or the parent ends."""
    pipeline = pipeline_of(num_replicas)
    book = LocalAddresses(pipeline.all_channels, transport_dir)
    ports = connect_by_book(pipeline.all_channels, pipeline.members, book, 1)
    inputs = [inbox for each in ports.values() for inbox in each.inputs.values()]
    outputs = [outbox for each in ports.values() for outbox in each.outputs.values()]
    for name, own in ports.items():
        say(own, Ready(executor=name))
        if name != "trainer":
            say(own, swapped(int(name.partition("-")[2]), 0))
    parent = os.getppid()
    while os.getppid() == parent:
        wait(inputs, outputs, timeout_s=1.0)
        for own in ports.values():
            for inbox in own.inputs.values():
                while (message := inbox.get_nowait()) is not None:
                    if isinstance(message, Stop):
                        return
                    answer(message, own, ports, together)


def answer(message: Message, own: Ports, ports: dict[str, Ports], together: int) -> None:
    match message:
        case Admit():
            finished = [*finished_of(message)]
            for first in range(0, len(finished), together):
                say(own, CompletionsFinished(finished=tuple(finished[first : first + together])))
            say(
                ports["trainer"],
                GroupScored(
                    ordinal=message.ordinal,
                    has_signal=True,
                    mean_reward=0.5,
                    num_failed=0,
                    min_version=0,
                    max_version=0,
                ),
            )
        case TrainStep(step=step):
            say(own, StepDone(step=step, version=step + 1, metrics=METRICS))
            for replica in range(len(ports) - 1):
                say(ports[f"generator-{replica}"], swapped(replica, step + 1))
        case _:
            pass


def finished_of(admit: Admit) -> Iterator[CompletionFinished]:
    for sample in range(admit.num_samples):
        yield CompletionFinished(
            ordinal=admit.ordinal,
            sample=sample,
            replica=admit.replica,
            num_tokens=100,
            min_version=0,
            max_version=0,
        )


def say(own: Ports, event: Message) -> None:
    own.outputs["events"].put(event)


def swapped(replica: int, version: int) -> Swapped:
    return Swapped(replica=replica, version=version, transfer_s=0.0, pause_s=0.0, probe_error=0.0)


def measure(options: argparse.Namespace, folder: Path) -> None:
    """Run the controller for so many steps; print what it cost."""
    shape = {"groups_per_step": options.groups, "completions_per_group": options.completions, "steps": options.steps}
    staleness = options.max_staleness or 2 + -(-options.replicas // options.groups)  # so that every replica has work
    config = resolve("quickstart", {**shape, "max_staleness": staleness, "health.stop_on": []})
    schedule = Schedule(
        ScheduleConfig(
            **shape, max_staleness=staleness, reorder_window=options.groups, capacity=2 * options.completions
        )
    )
    run_dir, transport_dir = folder / "run", folder / "t"
    run_dir.mkdir()
    transport_dir.mkdir(mode=0o700)
    work = RunInput(lambda ordinal: PROMPT, (), None)
    observers = Observers(config, run_dir, Tally(config, started_s=WallClock().now_s()))
    controller = Controller(config, pipeline_of(options.replicas), schedule, work, observers, run_dir=run_dir)
    controller.executors.__class__ = PlayedExecutors
    played = subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--play", str(transport_dir)])
    try:
        with controller.timeline.span("overhead"):
            observers.take(controller.events.record(schedule.began(), []))
            controller.executors.launch(transport_dir, "fleet", None)
            controller._run_until(lambda: len(schedule.versions) == options.replicas, "all replicas")
            cpu_s, wall_s, states = time.thread_time(), time.monotonic(), Counter(controller.timeline.totals())
            first = controller.events.num_events
            controller._run_until(lambda: schedule.is_finished, "training")
            cpu_s, wall_s = time.thread_time() - cpu_s, time.monotonic() - wall_s
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=512)
    parser.add_argument("--groups", type=int, default=16, help="of a step")
    parser.add_argument("--completions", type=int, default=64, help="of a group")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--together", type=int, default=8, help="completions that a decode step finishes")
    parser.add_argument("--max-staleness", type=int, default=0, help="0: so many that every replica has work")
    parser.add_argument("--play", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.play is not None:
        play(options.replicas, options.together, options.play)
        return
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    print(f"command: {' '.join(sys.argv)}\n{describe()}, commit {commit.stdout.strip()}")
    with tempfile.TemporaryDirectory() as name:
        measure(options, Path(name))


if __name__ == "__main__":
    main()
