"""Decoding with adapters of several versions at once: the cost of a token beside that of the base alone.

    python benchmarks/adapters.py [--rows 64] [--rank 16] [--steps 30] [--threads 1] [--precision float32]
        [--adapter-precision float32]
    python benchmarks/adapters.py --versions [--rank 32] [--repeats 15]

Whole engine steps of a random model of SmolLM2-135M's shape with an adapter on every linear layer but the head: all
rows live, an equal part of them on each resident version, sampled at temperature 1. The engines take turns step by
step, and times are CPU time of the process, so that a busy machine disturbs all of them alike, and little. `ratio` is
the median over steps of a step's time by that of the base in the same turn, with its quartiles.

With `--versions` bytes and times of a version: of all weights, and of adapters, in float32 and bfloat16. stage: the
trainer packs it into the slot. live: from the call of `publish` to the news that a generator in another process, which
has packed it for its products, computes with it; the probe is an empty one. Medians; each kind takes turns with all
weights in float32, and shares are medians over turns.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from precision import SMOLLM2
from weight_sync import DEADLINE_S, SPECS, TOKENS, transport_of

from slipstream.core.channel import Ports, connect, make_transport_dir, wait
from slipstream.core.fields import Precision
from slipstream.core.lora_section import AdapterPrecision, LoraConfig
from slipstream.core.scratch import cleanup
from slipstream.core.types import Stop, Swapped
from slipstream.generator.engine import Engine
from slipstream.generator.native import native_engine
from slipstream.generator.requests import Request
from slipstream.models.flat import FlatParameters
from slipstream.models.initialise import new_model
from slipstream.models.peft import with_adapters
from slipstream.models.quantized import Packer, WeightLayout
from slipstream.models.served import FrozenBase, ServedWeights
from slipstream.models.shards import base_digest
from slipstream.models.transformer import Transformer
from slipstream.observe.hardware import describe
from slipstream.weight_sync.publisher import Publisher
from slipstream.weight_sync.subscriber import Subscriber

VERSIONS = (1, 2, 4)
VOCAB = 49152
KINDS = ("all float32", "adapters bfloat16", "adapters float32", "all bfloat16")


def adapted(rank: int, precision: AdapterPrecision = "float32") -> Transformer:
    lora = LoraConfig(rank=rank, adapter_precision=precision)
    return with_adapters(new_model(SMOLLM2, vocab_size=VOCAB, seed=0), lora, seed=0)


def random_version(weights: ServedWeights, seed: int) -> torch.Tensor:
    dtype = torch.bfloat16 if "bfloat16" in weights.holding.types else torch.float32
    values = np.random.default_rng(seed).normal(0, 0.02, weights.num_bytes // dtype.itemsize)
    return torch.from_numpy(values).to(dtype).view(torch.uint8)


def engine_of(model: Transformer, rows: int, num_steps: int, weights: ServedWeights | None, count: int) -> Engine:
    """All rows live, `rows` / `count` on each version, their prompts behind them."""
    engine = native_engine(model, num_slots=rows, max_len=num_steps + 64, seed=0, stop_token_ids=[], residents=weights)
    for version in range(count):
        if weights is not None:
            flat = random_version(weights, version)
            weights.prepare(flat)
            weights.rebind(flat)
            engine.set_version(version)
        ordinals = range(version * rows // count, (version + 1) * rows // count)
        prompt = np.arange(16, dtype=np.int32)
        engine.submit([Request(o, 0, prompt, num_steps + 32, 1.0, 0) for o in ordinals])
        engine.step()
        engine.step()
    assert engine.num_live == rows
    return engine


def engines_of(
    rows: int, num_steps: int, rank: int, precision: Precision, adapter_precision: AdapterPrecision
) -> dict[str, Engine]:
    plain = new_model(SMOLLM2, vocab_size=VOCAB, seed=0)
    ServedWeights(plain, precision)
    engines = {"base alone": engine_of(plain, rows, num_steps, None, 1)}
    base: FrozenBase | None = None
    for count in VERSIONS:
        model = adapted(rank, adapter_precision)
        weights = ServedWeights(model, precision, base=base)
        base = weights.base
        engines[f"{count} version{'s' * (count > 1)}"] = engine_of(model, rows, num_steps, weights, count)
        assert len(weights.versions) == count
    return engines


# Versions


def policy_of(kind: str, rank: int) -> tuple[Transformer, Precision]:
    """A policy of one of `KINDS`, and the precision of its generators."""
    which, precision = kind.split()
    if which == "all":
        return new_model(SMOLLM2, vocab_size=VOCAB, seed=0), precision
    return adapted(rank, precision), "float32"


def no_probe(tokens: np.ndarray) -> np.ndarray:
    return np.zeros(len(tokens) - 1, np.float32)


def generate(directory: Path, run_id: str, kind: str, rank: int) -> None:
    """The generator's process: take what comes, and tell of it, until told to stop."""
    torch.set_num_threads(1)
    ports = connect(SPECS, "generator", directory, 1)
    transport = transport_of("generator", run_id, False)
    subscriber = Subscriber(ports.inputs["offers"], ports.outputs["releases"], transport, replica=0)
    subscriber.open(ServedWeights(*policy_of(kind, rank)), no_probe, 1e-3, is_threaded=True)
    while ports.inputs["commands"].get_nowait() != Stop():
        if not subscriber.poll():
            wait(ports.inputs.values(), ports.outputs.values(), subscriber.wait_fds())
        if (swap := subscriber.commit()) is not None:
            error, pause_s, transfer_s = swap.probe_error, swap.pause_s, swap.transfer_s
            told = Swapped(replica=0, version=swap.version, transfer_s=transfer_s, pause_s=pause_s, probe_error=error)
            ports.outputs["events"].put(told)
    subscriber.close()
    ports.close()


@dataclass
class Sync:
    """A trainer's weights of one kind, and the process that they go to."""

    publisher: Publisher
    ports: Ports
    version: int = 0

    def publish(self) -> tuple[float, float]:
        """Seconds in which the next version is staged, and until it is live."""
        started_s = time.perf_counter()
        assert self.publisher.publish(self.version, TOKENS, no_probe(TOKENS)), "the reader had released its slots"
        while not isinstance(self.ports.inputs["events"].get_nowait(), Swapped):
            if not wait([self.ports.inputs["events"]], self.ports.outputs.values(), timeout_s=DEADLINE_S):
                raise SystemExit(f"the generator's process did not answer within {DEADLINE_S:.0f} s")
        ended_s = time.perf_counter()
        self.publisher.poll()
        self.version += 1
        return self.publisher.stats.staging_s, ended_s - started_s


@contextmanager
def sync_of(kind: str, rank: int) -> Iterator[Sync]:
    run_id, directory = f"bench-{os.getpid()}-{KINDS.index(kind)}", make_transport_dir()
    ports = connect(SPECS, "trainer", directory, 1)
    command = [sys.executable, __file__, "--generate", str(directory), run_id, kind, "--rank", str(rank)]
    child = subprocess.Popen(command)
    transport = transport_of("trainer", run_id, False)
    publisher = Publisher(ports.outputs["offers"], ports.inputs["releases"], transport, num_readers=1, num_slots=2)
    try:
        model, precision = policy_of(kind, rank)
        parameters = FlatParameters(model)
        layout = WeightLayout(model, precision, base=base_digest(model) if kind.startswith("adapters") else "")
        if layout.precision == "float32":
            publisher.open(parameters.flat, None, layout.holding)
        else:
            publisher.open(None, Packer(layout, parameters.named_views()))
        yield Sync(publisher, ports)
        ports.outputs["commands"].put(Stop())
        child.wait(DEADLINE_S)
    finally:
        child.kill()
        child.wait()
        publisher.close()
        ports.close()
        shutil.rmtree(directory)
        cleanup(run_id)


def measure_versions(rank: int, repeats: int) -> None:
    """Versions of each kind beside all weights in float32, in turns: a busy machine disturbs both alike."""
    print(f"\n{f'rank {rank}':18} {'MB':>8} {'stage ms':>9} {'live ms':>9}   of all float32: bytes, stage, live")
    for kind in KINDS[1:]:
        taken: list[tuple[float, ...]] = []
        with sync_of(KINDS[0], rank) as whole, sync_of(kind, rank) as other:
            for turn in range(repeats + 2):  # the first touch of each of the two slots and buffers is not counted
                seconds = *whole.publish(), *other.publish()
                taken += [seconds] * (turn >= 2)
            sizes = whole.publisher.num_bytes, other.publisher.num_bytes
        ratios = [(turn[2] / turn[0], turn[3] / turn[1]) for turn in taken]
        medians = [statistics.median(column) for column in zip(*taken, strict=True)]
        stage, live = (statistics.median(column) for column in zip(*ratios, strict=True))
        for name, size, (stage_s, live_s) in zip((KINDS[0], kind), sizes, (medians[:2], medians[2:]), strict=True):
            shares = f"  1/{sizes[0] / size:.1f}  {stage:.3f}  {live:.3f}" if name == kind else ""
            print(f"{name:18} {size / 1e6:8.1f} {stage_s * 1e3:9.1f} {live_s * 1e3:9.1f} {shares}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--adapter-precision", default="float32")
    parser.add_argument("--versions", action="store_true")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--generate", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.generate is not None:
        directory, run_id, kind = options.generate
        generate(Path(directory), run_id, kind, options.rank)
        return
    torch.set_num_threads(options.threads)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    print(f"{describe()}, {options.threads} threads, torch {torch.__version__}, commit {commit.stdout.strip()}")
    if options.versions:
        measure_versions(options.rank, options.repeats)
        return
    print(f"SmolLM2-135M's shape, random, {options.precision}; {options.rows} rows, rank {options.rank}, adapters in")
    print(options.adapter_precision)
    engines = engines_of(options.rows, options.steps, options.rank, options.precision, options.adapter_precision)
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(options.steps):
        for name, engine in engines.items():
            started_s = time.process_time()
            engine.step()
            times[name].append(time.process_time() - started_s)
    print(f"\n{'':12} {'ms/step':>8} {'us/token':>9} {'ratio':>6}  quartiles")
    for name, values in times.items():
        ratios = [value / base for value, base in zip(values, times["base alone"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        step_s = statistics.median(values)
        print(f"{name:12} {step_s * 1e3:8.1f} {step_s / options.rows * 1e6:9.0f} {middle:6.3f}  {low:.3f} {high:.3f}")


if __name__ == "__main__":
    main()
