"""Does one more step of staleness hide a slow transfer of weights? PRIME-RL: k = 2 hides one over the Internet.

    python tests/cluster/slow_link.py [--steps 40]        (Linux, root)
    python tests/cluster/slow_link.py --replicas 3        (do replicas that hand versions on spare the cable?)

Two machines, trainer on one and generator on the other. The cable is throttled so that a version takes about as long as
a training step, which an unthrottled run has measured. Idle: the share of the time from the first training step to the
last in which the trainer has nothing to train on, or the generator may not begin anything.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cluster_run import ClusterRun
from machines import two_machines

from slipstream.observe.timeline import Slice, account, read_timeline, timeline_path

TRAINER_WAITS = ("wait_generation", "wait_rewards", "wait_straggler")


@dataclass(frozen=True)
class Measured:
    """A run: seconds per step and of a transfer (medians), and the idle shares of both sides."""

    step_s: float
    transfer_s: float
    payload_bytes: int
    trainer_idle: float
    generator_idle: float
    copies_carried: float  # bytes that left the trainer's machine, over those of the versions that became live

    def __str__(self) -> str:
        return (
            f"step {self.step_s:5.2f} s   transfer {self.transfer_s:5.2f} s   idle: trainer {self.trainer_idle:6.1%}   "
            f"generator {self.generator_idle:6.1%}   over the cable {self.copies_carried:.2f} copies a version"
        )


def measure(
    folder: Path,
    max_staleness: int,
    steps: int,
    mbit_per_s: float | None,
    *options: str,
    num_replicas: int = 1,
) -> Measured:
    """The quickstart at this staleness, over a cable of this rate (None: as it is)."""
    folder.mkdir()
    with two_machines(folder) as (near, far, cable):
        if mbit_per_s is not None:
            cable.throttle(mbit_per_s)
        run = ClusterRun(
            near,
            far,
            folder,
            *("--max-staleness", str(max_staleness), "--steps", str(steps), "--warm-start.steps", "20"),
            *("--eval.num-prompts", "8", "--prompts.num-eval", "8", "--eval.every", "0"),
            *options,
            num_replicas=num_replicas,
        )
        summary = run.end(timeout_s=600)
        carried = cable.carried(near)
    trainer = list(read_timeline(timeline_path(run.out, "trainer")))
    trains = [record for record in trainer if isinstance(record, Slice) and "step" in record.args]
    window = trains[0].start_ns / 1e9, trains[-1].end_ns / 1e9
    waits = account(trainer, *window)
    generator = account(list(read_timeline(timeline_path(run.out, "generator-0"))), *window)
    length_s = window[1] - window[0]
    swaps = [event["event"] for event in run.events() if event["event"]["type"] == "Swapped"]
    payload_bytes = summary["weight_sync"]["bytes"] // max(1, summary["weight_sync"]["count"])
    return Measured(
        step_s=length_s / steps,
        transfer_s=statistics.median(swap["transfer_s"] for swap in swaps),
        payload_bytes=payload_bytes,
        trainer_idle=sum(waits.get(state, 0.0) for state in TRAINER_WAITS) / length_s,
        generator_idle=generator.get("wait_trainer", 0.0) / length_s,
        copies_carried=carried / (payload_bytes * len({swap["version"] for swap in swaps})),
    )


def compare(folder: Path, steps: int) -> dict[str, Measured]:
    """Without a limit at k = 2, then with one at k = 1, 2 and 3; printed as they come."""
    found = {"k = 2, no limit": measure(folder / "free", 2, steps, None)}
    free = found["k = 2, no limit"]
    mbit_per_s = free.payload_bytes * 8 / 1e6 / free.step_s
    print(
        f"k = 2, no limit: {free}\n{free.payload_bytes / 1e6:.2f} MB a version; limit {mbit_per_s:.1f} Mbit/s",
        flush=True,
    )
    for k in (1, 2, 3):
        found[f"k = {k}"] = measure(folder / f"k{k}", k, steps, mbit_per_s)
        print(f"k = {k}: {found[f'k = {k}']}", flush=True)
    return found


def compare_relays(folder: Path, steps: int, num_replicas: int) -> dict[str, Measured]:
    """`num_replicas` on the other machine, at k = 2: all fed by the trainer, or one that feeds the next.

    The cable carries one version in a step, as an unthrottled run has measured it.
    """
    free = measure(folder / "free", 2, steps, None, num_replicas=num_replicas)
    mbit_per_s = free.payload_bytes * 8 / 1e6 / free.step_s
    print(f"no limit: {free}\n{num_replicas} replicas; limit {mbit_per_s:.1f} Mbit/s", flush=True)
    found = {}
    for option in ("--generator.no-relays", "--generator.relays"):
        found[option] = measure(folder / option.strip("-"), 2, steps, mbit_per_s, option, num_replicas=num_replicas)
        print(f"{option:23} {found[option]}", flush=True)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--replicas", type=int, help="compare with and without relays")
    given = parser.parse_args(sys.argv[1:])
    with tempfile.TemporaryDirectory() as made:
        if given.replicas is None:
            compare(Path(made), given.steps)
        else:
            compare_relays(Path(made), given.steps, given.replicas)
