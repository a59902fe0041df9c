"""How long a version takes from the trainer's weights to a generator's, on one machine.

    python benchmarks/weight_sync.py [--repeats 15] [--params 1000000 4000000 135000000]

The subscriber is a process of its own. stage: the trainer's copy into the slot, with checksum. transfer: slot to shadow
buffer, with checksum, beside decoding. pause: pointer flip and probe (an empty one here). memcpy is the bound: numpy
copying between two warm buffers of that size in the publisher's process, one thread, as staging does.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from slipstream.core.channel import ChannelSpec, Kind, connect, make_transport_dir, wait
from slipstream.core.types import Stop, Swapped
from slipstream.weight_sync.publisher import Publisher
from slipstream.weight_sync.segment import SharedMemory, cleanup
from slipstream.weight_sync.subscriber import Subscriber

TOKENS = np.arange(4, dtype=np.int32)
SPECS = [
    ChannelSpec("offers", Kind.WEIGHTS, "trainer.offers", "generator.offers"),
    ChannelSpec("releases", Kind.GATHER, "generator.releases", "trainer.releases"),
    ChannelSpec("commands", Kind.BROADCAST, "trainer.commands", "generator.commands"),
    ChannelSpec("events", Kind.GATHER, "generator.events", "trainer.events"),
]


class Parameters:
    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat
        self.holding = None

    def prepare(self, flat: torch.Tensor) -> None: ...

    def rebind(self, flat: torch.Tensor) -> None:
        self.flat = flat


def generate(directory: Path, run_id: str, num_params: int) -> None:
    """The subscriber's process: commit whatever comes and report it, until told to stop."""
    ports = connect(SPECS, "generator", directory, 1)
    subscriber = Subscriber(ports.inputs["offers"], ports.outputs["releases"], SharedMemory(run_id), replica=0)
    parameters = Parameters(torch.zeros(num_params))
    subscriber.open(parameters, lambda tokens: parameters.flat[: len(tokens) - 1].numpy(), 1e-3, is_threaded=True)
    while ports.inputs["commands"].get_nowait() != Stop():
        if not subscriber.poll():
            wait(ports.inputs.values(), ports.outputs.values(), subscriber.wait_fds())
        if (swap := subscriber.commit()) is not None:
            ports.outputs["events"].put(
                Swapped(
                    replica=0,
                    version=swap.version,
                    transfer_s=swap.transfer_s,
                    pause_s=swap.pause_s,
                    probe_error=swap.probe_error,
                )
            )
    subscriber.close()
    ports.close()


def measure(num_params: int, repeats: int) -> None:
    run_id, directory = f"bench-{os.getpid()}", make_transport_dir()
    ports = connect(SPECS, "trainer", directory, 1)
    child = subprocess.Popen([sys.executable, __file__, "--generate", str(directory), run_id, str(num_params)])
    publisher = Publisher(
        ports.outputs["offers"], ports.inputs["releases"], SharedMemory(run_id), num_readers=1, num_slots=2
    )
    live = torch.rand(num_params)
    stage_s, transfer_s, pause_s, copy_s = [], [], [], []
    try:
        publisher.open(live)
        for version in range(repeats + 2):  # the first touch of each of the two slots and buffers is not counted
            published = publisher.publish(version, TOKENS, live[:3].numpy().copy())
            assert published, "the reader had released its slots"
            while not isinstance(event := ports.inputs["events"].get_nowait(), Swapped):
                if not wait([ports.inputs["events"]], ports.outputs.values(), timeout_s=30):
                    raise SystemExit("the generator process did not answer within 30 s")
            publisher.poll()
            if version >= 2:
                stage_s.append(publisher.stats.staging_s)
                transfer_s.append(event.transfer_s)
                pause_s.append(event.pause_s)
        source, target = live.numpy(), np.zeros(num_params, np.float32)
        for _ in range(repeats):
            started_s = time.perf_counter()
            np.copyto(target, source)
            copy_s.append(time.perf_counter() - started_s)
        ports.outputs["commands"].put(Stop())
        child.wait(30)
    finally:
        child.kill()
        child.wait()
        publisher.close()
        ports.close()
        shutil.rmtree(directory)
        cleanup(run_id)

    num_bytes = 4 * num_params
    cells = [f"{num_params / 1e6:7.0f} M {num_bytes / 1e6:8.1f} MB"]
    for name, times in (("stage", stage_s), ("transfer", transfer_s), ("memcpy", copy_s)):
        median = statistics.median(times)
        cells.append(f"{name} {median * 1e3:8.2f} ms ({num_bytes / median / 1e9:5.2f} GB/s)")
    cells.append(f"pause {statistics.median(pause_s) * 1e6:6.0f} us (max {max(pause_s) * 1e6:.0f})")
    print("  ".join(cells), flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--generate"]:
        generate(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--params", type=int, nargs="+", default=[1_000_000, 4_000_000, 135_000_000])
    arguments = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    print("command ", "python benchmarks/weight_sync.py", *sys.argv[1:])
    print("commit  ", commit.strip() or "unknown")
    print("hardware", platform.machine(), f"{os.cpu_count()} cores", f"load {os.getloadavg()[0]:.1f}")
    print("versions", "python", platform.python_version(), "torch", torch.__version__, "numpy", np.__version__)
    print("medians of", arguments.repeats)
    for num_params in arguments.params:
        measure(num_params, arguments.repeats)


if __name__ == "__main__":
    main()
