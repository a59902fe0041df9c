"""How long decoding stalls when weights are swapped under it: 50 swaps of SmolLM2's 538 MB, beside the gaps without.

    python benchmarks/swap_gap.py [--models smollm2] [--batch 8 64] [--swaps 50] [--threads N]

A publisher in a process of its own (one thread) copies a version into shared memory; here the subscriber stages and
packs it in its background thread while the engine decodes, and commits it between two steps, as the generator's
executor does. The publisher prepares a version's weights and probe beforehand and then sleeps until it is told to
publish: what is seen is publishing, transfer and swap, not training. As in a run, decoding leaves the trainer a core;
with a decoding thread on every core, publishing and staging keep one of them waiting at each of OpenMP's barriers.

Batches start together and end together, so no prefill falls between two measured tokens. A *gap* is the time between
the ends of two decode steps, which give every row a token each. *Quiet* gaps are those with nothing in transit, taken
between the swaps of the same rows. A swap's *window* runs from the order to publish to the first token under the new
version; its gap is the longest in the window, of which *commit* (flip, probe text, `set_version`) is a part.

Afterwards the first batch is generated once more by an engine of its own, each version put in place between the same
two steps without threads or shared memory. Its tokens and logprobs must be the same: what was generated before a swap
stands, and no step saw a version half written.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from contenders.models import MODELS
from contenders.ours import new_engine

from slipstream.algorithms.logprobs import probe_logprobs
from slipstream.controller.placement import thread_environment
from slipstream.core.channel import connect, make_transport_dir, wait
from slipstream.core.channel_spec import ChannelSpec, Kind
from slipstream.core.scratch import cleanup
from slipstream.generator.requests import Finished, GenerationEngine, Request
from slipstream.models.flat import FlatParameters
from slipstream.models.hf import load_model
from slipstream.models.served import ServedWeights
from slipstream.observe.hardware import describe
from slipstream.observe.summary import versions
from slipstream.weight_sync.publisher import Publisher
from slipstream.weight_sync.segment import SharedMemory
from slipstream.weight_sync.subscriber import Subscriber

PROMPT_TOKENS, NEW_TOKENS = 32, 288
PROBE = np.arange(2, 34, dtype=np.int32)
TOLERANCE = 1e-3  # nats
QUIET_STEPS = 8  # before every swap
PATIENCE_S = 120.0
SPECS = [
    ChannelSpec("offers", Kind.WEIGHTS, "trainer.offers", "generator.offers"),
    ChannelSpec("releases", Kind.GATHER, "generator.releases", "trainer.releases"),
]


def factor(version: int) -> float:
    """Version v is the first version's weights times this."""
    return 1.0 + version / 4096


# The publisher's process


def publish(folder: str, directory: Path, run_id: str) -> None:
    """For every line `<version>` on the standard input prepare it and say so; for the next line publish it."""
    model = load_model(folder, max_positions=len(PROBE))
    parameters = FlatParameters(model)
    base = parameters.flat.clone()
    ports = connect(SPECS, "trainer", directory, 1)
    publisher = Publisher(
        ports.outputs["offers"], ports.inputs["releases"], SharedMemory(run_id), num_readers=1, num_slots=2
    )
    publisher.open(parameters.flat)
    lines = Lines(sys.stdin.fileno())

    def next_line() -> str:
        while (line := lines.next()) is None:  # between orders as a trainer between steps: releases come in
            wait(ports.inputs.values(), ports.outputs.values(), [sys.stdin.fileno()])
            publisher.poll()
        return line

    while True:
        version = int(next_line())
        with torch.inference_mode():
            torch.mul(base, factor(version), out=parameters.flat)
            logprobs = probe_logprobs(model, PROBE)
        print("prepared", flush=True)
        next_line()
        publisher.publish(version, PROBE, logprobs)
        while publisher.stats.num_published < version:  # no slot was free: it is offered when one comes free
            if not wait(ports.inputs.values(), ports.outputs.values(), timeout_s=PATIENCE_S):
                raise SystemExit(f"no release within {PATIENCE_S:.0f} s")
            publisher.poll()
        print(publisher.stats.staging_s, flush=True)


class Lines:
    """Whole lines from a descriptor, without waiting for them."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._read = b""

    def next(self, timeout_s: float = 0.0) -> str | None:
        """The next line, or None when there is none yet. Ends the program at the end of the file."""
        until_s = time.perf_counter() + timeout_s
        while b"\n" not in self._read:  # a line may come in pieces
            if not select.select([self._fd], [], [], max(0.0, until_s - time.perf_counter()))[0]:
                return None
            data = os.read(self._fd, 4096)
            if not data:
                raise SystemExit("the other process has ended")
            self._read += data
        line, _, self._read = self._read.partition(b"\n")
        return line.decode()


class Trainer:
    """The other process, seen from here. Nothing waits for it but `open`."""

    def __init__(self, folder: str, directory: Path, run_id: str) -> None:
        command = [sys.executable, __file__, "--publish", folder, str(directory), run_id]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | thread_environment(1)
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders, self._answers = self._process.stdin.fileno(), Lines(self._process.stdout.fileno())

    def order(self, line: str) -> None:
        os.write(self._orders, f"{line}\n".encode())

    def answer(self, timeout_s: float = 0.0) -> str | None:
        """Its next line, or None when there is none yet."""
        return self._answers.next(timeout_s)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


# Decoding


@dataclass(frozen=True)
class Swap:
    """Seconds, but for `num_steps`: decode steps that ended inside the window."""

    gap_s: float  # the longest between two tokens in the window
    step_s: float  # the median one in the window
    commit_s: float  # commit and set_version
    pause_s: float  # of these the flip and the probe
    stage_s: float  # slot to shadow buffer, with checksum, and packing, beside decoding
    publish_s: float  # live weights to slot, with checksum, in the other process
    window_s: float
    num_steps: int


@dataclass
class Recording:
    """Swaps and quiet gaps of one batch size; and of the first batch of requests what is needed to repeat it."""

    swaps: list[Swap]
    quiet_s: list[float]
    num_unfinished: int  # windows that the end of a batch cut off: not counted
    first: list[Finished]
    first_swaps: list[tuple[int, int]]  # (steps before it, version)


def batch_of_requests(batch: int, turn: int, vocab_size: int) -> list[Request]:
    prompts = np.random.default_rng(turn).integers(2, vocab_size, (batch, PROMPT_TOKENS)).astype(np.int32)
    return [
        Request(ordinal=turn * batch + i, sample=0, prompt_tokens=prompt, max_new_tokens=NEW_TOKENS)
        for i, prompt in enumerate(prompts)
    ]


class Decoding:
    """One engine, its subscriber, and the other process; `run` decodes until enough swaps are seen."""

    def __init__(self, folder: str, batch: int, directory: Path, run_id: str) -> None:
        self.folder, self.batch = folder, batch
        self.model = load_model(folder, max_positions=PROMPT_TOKENS + NEW_TOKENS)
        self.engine, self.weights = self._new_engine()
        self.base = self.weights.flat.view(torch.float32).clone()
        self.ports = connect(SPECS, "generator", directory, 1)
        transport = SharedMemory(run_id)
        self.subscriber = Subscriber(self.ports.inputs["offers"], self.ports.outputs["releases"], transport, replica=0)
        self.subscriber.open(
            self.weights,
            lambda tokens: probe_logprobs(self.weights.prepared_model, tokens),
            TOLERANCE,
            is_threaded=True,
            probes_prepared=True,
        )
        self.trainer = Trainer(folder, directory, run_id)
        self.version = 0
        self.recording = Recording([], [], 0, [], [])

    def _new_engine(self) -> tuple[GenerationEngine, ServedWeights]:
        return new_engine(self.model, precision="float32", num_slots=self.batch, max_len=PROMPT_TOKENS + NEW_TOKENS)

    def close(self) -> None:
        self.trainer.close()
        self.subscriber.close()
        self.ports.close()

    def run(self, num_swaps: int, *, num_dropped: int = 2) -> Recording:
        """The first swaps, which touch slots and buffers for the first time, are dropped."""
        turn = 0
        while len(self.recording.swaps) < num_swaps + num_dropped:
            self._decode_batch(turn, num_swaps + num_dropped)
            turn += 1
            if turn > 4 * (num_swaps + num_dropped):
                raise SystemExit("windows are longer than batches: nothing can be measured on so busy a machine")
        del self.recording.swaps[:num_dropped]
        return self.recording

    def _decode_batch(self, turn: int, num_swaps: int) -> None:
        """Start all rows; then repeat: some quiet steps, publish, decode until the swap, wait for the next version."""
        engine, trainer, recording = self.engine, self.trainer, self.recording
        finished: list[Finished] = []
        engine.submit(batch_of_requests(self.batch, turn, self.model.config.vocab_size))
        self._prepare_next()
        if (answer := self.trainer.answer(PATIENCE_S)) != "prepared":
            raise SystemExit(f"version {self.version} was not prepared within {PATIENCE_S:.0f} s: {answer}")
        num_steps = 0
        while engine.num_waiting or engine.num_live < self.batch:
            engine.step()
            num_steps += 1
        state, num_quiet = "quiet", 0
        gaps: list[float] = []  # of the window
        commit_s = pause_s = stage_s = ordered_s = 0.0
        publish_s: float | None = None
        has_committed = False
        ended_s = time.perf_counter()
        while not engine.is_idle:
            # As the executor's step: take messages, swap if a version is staged, decode.
            self.subscriber.poll()
            if self.subscriber.pending_version is not None:
                started_s = time.perf_counter()
                swap = self.subscriber.commit()
                assert swap is not None
                engine.set_version(swap.version)
                commit_s = time.perf_counter() - started_s
                pause_s, stage_s, has_committed = swap.pause_s, swap.transfer_s, True
                if turn == 0:
                    recording.first_swaps.append((num_steps, swap.version))
            finished += engine.step()
            num_steps += 1
            now_s = time.perf_counter()
            gap_s, ended_s = now_s - ended_s, now_s
            is_full = engine.num_live == self.batch
            if state == "preparing":
                if trainer.answer() == "prepared":
                    state, num_quiet = "quiet", 0
            elif state == "quiet":
                num_quiet += 1
                if num_quiet > 1 and is_full:  # the first one began while the other process was at work
                    recording.quiet_s.append(gap_s)
                if num_quiet > QUIET_STEPS and is_full and len(recording.swaps) < num_swaps:
                    trainer.order("publish")
                    state, gaps, publish_s, has_committed, ordered_s = "window", [], None, False, time.perf_counter()
            else:
                gaps.append(gap_s)
                if publish_s is None and (answer := trainer.answer()) is not None:
                    publish_s = float(answer)
                if has_committed and publish_s is not None:
                    seen = Swap(
                        gap_s=max(gaps),
                        step_s=statistics.median(gaps),
                        commit_s=commit_s,
                        pause_s=pause_s,
                        stage_s=stage_s,
                        publish_s=publish_s,
                        window_s=now_s - ordered_s,
                        num_steps=len(gaps),
                    )
                    if is_full:
                        recording.swaps.append(seen)
                    else:
                        recording.num_unfinished += 1
                    self._prepare_next()
                    state = "preparing"
        self._settle(state, publish_s, has_committed)
        if turn == 0:
            recording.first = finished

    def _prepare_next(self) -> None:
        self.version += 1
        self.trainer.order(str(self.version))

    def _settle(self, state: str, publish_s: float | None, has_committed: bool) -> None:
        """Bring what is in transit at a batch's end to its end, uncounted, so that the next batch starts from rest."""
        deadline_s = time.perf_counter() + PATIENCE_S
        is_window = state == "window"
        has_committed = is_window and has_committed  # of the version in transit, not the one before
        self.recording.num_unfinished += is_window
        needs_prepared, needs_published = state == "preparing", not is_window or publish_s is None
        while needs_prepared or needs_published or not has_committed:
            if time.perf_counter() > deadline_s:
                raise SystemExit(f"version {self.version} did not arrive within {PATIENCE_S:.0f} s")
            if state == "quiet":
                self.trainer.order("publish")
                state = "window"
            answer = self.trainer.answer()
            if needs_prepared and answer == "prepared":
                needs_prepared, state = False, "quiet"
            elif needs_published and answer is not None:
                needs_published = False
            self.subscriber.poll()
            if (swap := self.subscriber.commit()) is not None:
                self.engine.set_version(swap.version)
                has_committed = True
            wait(self.ports.inputs.values(), self.ports.outputs.values(), self.subscriber.wait_fds(), timeout_s=0.02)

    def repeat_first(self) -> tuple[int, int]:
        """Generate the first batch again, versions put in place at rest: (completions that are equal, of how many)."""
        self.model = load_model(self.folder, max_positions=PROMPT_TOKENS + NEW_TOKENS)
        engine, weights = self._new_engine()
        engine.submit(batch_of_requests(self.batch, 0, self.model.config.vocab_size))
        swaps = dict(self.recording.first_swaps)
        again: list[Finished] = []
        num_steps = 0
        while not engine.is_idle:
            if (version := swaps.get(num_steps)) is not None:
                weights.rebind((self.base * factor(version)).view(torch.uint8))
                engine.set_version(version)
            again += engine.step()
            num_steps += 1
        by_ordinal = {item.ordinal: item for item in again}
        num_equal = sum(is_same(item, by_ordinal[item.ordinal]) for item in self.recording.first)
        return num_equal, len(self.recording.first)


def is_same(one: Finished, other: Finished) -> bool:
    return (
        np.array_equal(one.tokens, other.tokens)
        and np.array_equal(one.logprobs, other.logprobs)
        and one.version_spans == other.version_spans
    )


def measure(name: str, batch: int, num_swaps: int, scratch: Path) -> dict[str, Any]:
    """One batch size, printed and returned."""
    folder, weights = MODELS[name].folder(scratch, name)
    run_id, directory = f"swap-{os.getpid()}-{batch}", make_transport_dir()
    decoding = Decoding(str(folder), batch, directory, run_id)
    try:
        recording = decoding.run(num_swaps)
        num_equal, num_first = decoding.repeat_first()
    finally:
        decoding.close()
        shutil.rmtree(directory)
        cleanup(run_id)
    num_bytes = decoding.base.nbytes
    swaps = recording.swaps
    quiet_s, p95_s = statistics.median(recording.quiet_s), float(np.quantile(recording.quiet_s, 0.95))
    print(f"\n## {name} ({weights}), {num_bytes / 1e6:.0f} MB, batch {batch}, {len(swaps)} swaps\n")
    print("| | median | p95 | longest |")
    print("|---|---|---|---|")
    rows = {
        "gap between tokens, quiet, ms": recording.quiet_s,
        "longest gap of a swap's window, ms": [swap.gap_s for swap in swaps],
        "commit (flip, probe, set_version), ms": [swap.commit_s for swap in swaps],
        "flip and probe, ms": [swap.pause_s for swap in swaps],
        "median gap inside the windows, ms": [swap.step_s for swap in swaps],
        "publishing, other process, ms": [swap.publish_s for swap in swaps],
        "staging, background thread, ms": [swap.stage_s for swap in swaps],
        "window, order to first new token, ms": [swap.window_s for swap in swaps],
    }
    for words, values in rows.items():
        cells = (statistics.median(values), float(np.quantile(values, 0.95)), max(values))
        print(f"| {words} | " + " | ".join(f"{1e3 * value:.2f}" for value in cells) + " |")
    gaps = np.array([swap.gap_s for swap in swaps])
    print(
        f"\nLongest gap of a window in quiet steps: {np.median(gaps) / quiet_s:.2f} at the median swap, "
        f"{gaps.max() / quiet_s:.2f} at the worst ({gaps.max() / p95_s:.2f} of the quiet p95); "
        f"{statistics.median(swap.num_steps for swap in swaps):.0f} steps in a window; "
        f"{recording.num_unfinished} windows cut off and not counted."
    )
    is_identical = num_equal == num_first > 0 and bool(recording.first_swaps)
    worst = gaps.max() / quiet_s
    print(f"{'yes' if worst <= 2 else 'NO '}  longest gap of all swaps: {worst:.2f} decode steps (at most 2)")
    print(
        f"{'yes' if is_identical else 'NO '}  generated again without threads: {num_equal} of {num_first} completions "
        f"are the same, bit for bit, across {len(recording.first_swaps)} swaps"
    )
    return {
        "model": name,
        "batch": batch,
        "bytes": num_bytes,
        "quiet_s": recording.quiet_s,
        "swaps": [vars(swap) for swap in swaps],
        "identical": [num_equal, num_first],
    }


def main() -> None:
    if sys.argv[1:2] == ["--publish"]:
        publish(sys.argv[2], Path(sys.argv[3]), sys.argv[4])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["smollm2"])
    parser.add_argument("--batch", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--swaps", type=int, default=50)
    most = max(1, (os.cpu_count() or 1) - 1)
    parser.add_argument("--threads", type=int, default=most, help="of the decoding process; default: all but one")
    parser.add_argument("--json", type=Path, help="write all measurements there, too")
    arguments = parser.parse_args()
    environment = thread_environment(arguments.threads)
    if any(os.environ.get(name) != value for name, value in environment.items()):  # read when torch is loaded
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | environment)
    torch.set_num_threads(arguments.threads)
    print(f"command: python {shlex.join(sys.argv)}")
    print(f"versions: {versions()}")
    for name, value in describe().lines().items():
        print(f"{name}: {value}")
    print(f"load: {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        measured = [
            measure(name, batch, arguments.swaps, Path(scratch))
            for name in arguments.models
            for batch in arguments.batch
        ]
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
