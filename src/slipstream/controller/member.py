"""A process of a torchrun job that runs one rank of a group of a run on several machines.

    torchrun --nproc-per-node RANKS -m slipstream.controller.member --controller HOST:PORT --group generator-0 ...

`slipstream launch --group` starts this. It ends with 0 when the run is over, and with 1 when its executor failed, it
was shut out, or the controller is gone; then torchrun's agent starts the group again, with a higher incarnation.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from slipstream.controller.groups import join_under_torchrun
from slipstream.controller.host import Host, LeaseTether, report, serve
from slipstream.controller.meeting import JOIN_TIMEOUT_S, attend, read_spec
from slipstream.controller.weights import memory_of
from slipstream.core.addresses import LOOPBACK, Store, StoreAddresses, grant_incarnation
from slipstream.core.channel import connect_by_book
from slipstream.core.clock import ShiftedClock, wall_minus_clock_s
from slipstream.core.errors import ConfigError, SlipstreamError
from slipstream.core.interrupts import LEAVING
from slipstream.core.keys import RunKeys
from slipstream.core.rank_group import RankGroup
from slipstream.core.ranks import rank_name
from slipstream.core.scratch import sweep
from slipstream.core.types import Joined
from slipstream.weight_sync.resharding import Place
from slipstream.weight_sync.weight_links import Links


def main(argv: Sequence[str]) -> int:
    """Be one rank of a group until the run is over."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--controller", required=True)
    parser.add_argument("--group", required=True)
    parser.add_argument("--address", default=LOOPBACK)
    parser.add_argument("--key-file", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(argv)
    agent = os.pidfd_open(os.getppid())  # before anything is waited for: it may end meanwhile
    leaving: list[int] = []
    signal.signal(LEAVING, lambda number, _frame: leaving.append(number))
    sweep()
    keys = RunKeys.load(options.key_file) if options.key_file is not None else RunKeys.take()
    if keys is None:
        raise ConfigError("a group needs the run's key", allowed="--key-file, or SLIPSTREAM_RUN_KEY")
    store = attend(options.controller, timeout_s=JOIN_TIMEOUT_S)
    spec = read_spec(store, keys, timeout_s=JOIN_TIMEOUT_S)
    node = replace(spec.node(options.group), num_threads=options.threads, num_threads_alone=options.threads)
    group = join_under_torchrun(node, options.address, timeout_s=spec.deadline_s)
    name = rank_name(node.name, group.rank)
    incarnation = _incarnation(store, node.name, group)
    book = StoreAddresses(
        spec.channels, store, keys.of_start(spec.start), host=options.address, deadline_s=JOIN_TIMEOUT_S
    )
    ports = connect_by_book(spec.channels, [name], book, incarnation)[name]
    host: Host | None = None
    try:
        ports.outputs["events"].put(Joined(executor=name, incarnation=incarnation))
        clock = ShiftedClock(wall_minus_clock_s() - spec.wall_minus_clock_s)
        links = Links(
            store,
            hostname=options.address,
            place=Place(host=options.address),  # a name would be no help: containers share theirs
            timeout_s=spec.deadline_s,
            delta=spec.delta,
            relays=spec.relays,
            memory=memory_of(node, group),
        )
        host = Host(node, ports, spec.channels, spec.run_dir, run_id=spec.run_id, group=group, clock=clock, links=links)
        if incarnation == 1:
            host.timeline.backdate("start_up", spec.started_s)
        host.init()
        return serve(host, LeaseTether(ports, spec.lease_s, agent=agent), is_leaving=lambda: bool(leaving))
    except Exception as error:  # noqa: BLE001 - whatever it is, the controller must hear of it
        with nullcontext() if host is None else host.timeline.span("shut_down"):
            return report(ports, name, error, num_ranks=node.ranks)
    finally:
        if host is not None:
            host.close()
        ports.close()


def _incarnation(store: Store, name: str, group: RankGroup) -> int:
    """One for all ranks."""
    granted = grant_incarnation(store, name) if group.is_leader else 0
    return int(group.broadcast(str(granted).encode()))


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
    except SlipstreamError as error:
        sys.stderr.write(f"{error}\n")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
