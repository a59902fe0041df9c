"""What a channel costs between two processes of one machine: Unix sockets, TCP, and TCP with CURVE.

    python benchmarks/channels.py [--messages 5000] [--bytes 100 20000 1000000] [--repeats 5]

rate: messages of that many bytes (an array's) put one after the other, until the last was taken, with the capacity of a
default channel. latency: there and back, one at a time, halved; median and 99th percentile. Median over the repeats,
with the least and the most; the three ways in turns. CPU: seconds of both processes per message of the rate.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
from torch.distributed import PrefixStore, Store, TCPStore

from slipstream.core.addresses import AddressBook, LocalAddresses, StoreAddresses
from slipstream.core.channel import Ports, connect_by_book, make_transport_dir, wait
from slipstream.core.channel_spec import ChannelSpec, Kind
from slipstream.core.keys import RunKeys
from slipstream.core.types import Message, Segment, Stop
from slipstream.observe.hardware import describe
from slipstream.observe.summary import versions

WAYS = ("ipc", "tcp", "tcp+CURVE")
ACCEPTS = ("Segment", "Stop")
SPECS = [
    ChannelSpec("to", Kind.GATHER, "here.out", "there.in", accepts=ACCEPTS),
    ChannelSpec("back", Kind.GATHER, "there.out", "here.in", accepts=ACCEPTS),
]
ECHO = 64  # messages of at most so many bytes come back; larger ones are counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=5000)
    parser.add_argument("--bytes", type=int, nargs="+", default=[100, 20_000, 1_000_000])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--there", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.there:
        serve(*options.there)
        return
    print(f"command: python {shlex.join(sys.argv)}\nversions: {versions()}")
    for name, value in describe().lines().items():
        print(f"{name}: {value}")
    keys, directory = RunKeys.new(), make_transport_dir()
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30))
    children, ends = [], {}
    try:
        for way in WAYS:
            environment = os.environ | (keys.as_environment() if way == "tcp+CURVE" else {})
            where = str(directory) if way == "ipc" else str(store.port)
            command = [sys.executable, __file__, "--there", way, where]
            children.append(subprocess.Popen(command, env=environment))
            book = book_of(way, directory, None if way == "ipc" else store, keys if way == "tcp+CURVE" else None)
            ends[way] = connect_by_book(SPECS, ["here"], book, 1)["here"]
            round_trips(ends[way], 100)
        pids = dict(zip(WAYS, (child.pid for child in children), strict=True))
        report(ends, pids, options.bytes, options.messages, options.repeats)
        for ports in ends.values():
            ports.outputs["out"].put(Stop())
        for child in children:
            child.wait(20)
    finally:
        for child in children:
            child.kill()
        for ports in ends.values():
            ports.close()
        shutil.rmtree(directory)


def book_of(way: str, directory: Path | None, store: Store | None, keys: RunKeys | None) -> AddressBook:
    if store is None:
        return LocalAddresses(SPECS, directory)
    return StoreAddresses(SPECS, PrefixStore(way, store), keys)


def serve(way: str, where: str) -> None:
    """The other process: take everything, and send back what is small."""
    if way == "ipc":
        book = book_of(way, Path(where), None, None)
    else:
        store = TCPStore("127.0.0.1", int(where), is_master=False, timeout=timedelta(seconds=30))
        book = book_of(way, None, store, RunKeys.take())
    ports = connect_by_book(SPECS, ["there"], book, 1)["there"]
    while True:
        wait(ports.inputs.values(), ports.outputs.values())
        while (message := ports.inputs["in"].get_nowait()) is not None:
            if isinstance(message, Stop):
                ports.close()
                return
            assert isinstance(message, Segment)
            if len(message.tokens) <= ECHO:
                ports.outputs["out"].put(message)


def message_of(num_bytes: int) -> Message:
    return Segment(tokens=np.zeros(num_bytes, np.int8))


def round_trips(ports: Ports, count: int) -> list[float]:
    seconds, message = [], message_of(8)
    for _ in range(count):
        started_s = time.perf_counter()
        ports.outputs["out"].put(message)
        while ports.inputs["in"].get_nowait() is None:
            wait(ports.inputs.values(), ports.outputs.values())
        seconds.append((time.perf_counter() - started_s) / 2)
    return seconds


def rate(ports: Ports, num_bytes: int, count: int) -> float:
    message = message_of(num_bytes)
    started_s = time.perf_counter()
    for _ in range(count):
        ports.outputs["out"].put(message)
    ports.outputs["out"].flush(120)
    return count / (time.perf_counter() - started_s)


def cpu_s(pid: int) -> float:
    """User and system time of this process and that one."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") + time.process_time()


def spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}}..{max(values):{form}})"


def report(ends: dict[str, Ports], pids: dict[str, int], sizes: list[int], messages: int, repeats: int) -> None:
    latencies: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    rates: dict[tuple[str, int], list[float]] = {(way, size): [] for way in WAYS for size in sizes}
    cpus: dict[tuple[str, int], list[float]] = {key: [] for key in rates}
    counts = {size: max(50, min(messages, messages * 20_000 // size)) for size in sizes}
    for _ in range(repeats):
        for way, ports in ends.items():
            latencies[way].append(sorted(round_trips(ports, 500)))
            for size in sizes:
                before_s = cpu_s(pids[way])
                rates[way, size].append(rate(ports, size, counts[size]))
                cpus[way, size].append((cpu_s(pids[way]) - before_s) / counts[size])
    print("\n| way | latency, us: median | 99 % |\n|---|---|---|")
    for way in WAYS:
        medians = [1e6 * statistics.median(one) for one in latencies[way]]
        tails = [1e6 * one[int(0.99 * len(one))] for one in latencies[way]]
        print(f"| {way} | {spread(medians, '.0f')} | {spread(tails, '.0f')} |")
    print("\n| way | bytes | messages/s | MB/s | CPU us per message |\n|---|---|---|---|---|")
    for (way, size), found in rates.items():
        megabytes = statistics.median(found) * size / 1e6
        cpu_us = 1e6 * statistics.median(cpus[way, size])
        print(f"| {way} | {size} | {spread(found, '.0f')} | {megabytes:.0f} | {cpu_us:.0f} |")


if __name__ == "__main__":
    main()
