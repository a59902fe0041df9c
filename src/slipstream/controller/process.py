"""An executor in a process of its own: a child of the controller, or a rank of a torchrun job on another machine.

    python -m slipstream.controller.process SPEC                                       what `nursery.py` starts
    torchrun ... -m slipstream.controller.process --controller HOST:PORT --group ...   what `slipstream launch` starts

A child ends when its executor is finished, when it fails, or when its standard input closes: the other end of that pipe
is the controller, so no child outlives it. Until it serves, it does not look at that pipe, and the system kills it with
the controller (`core/lifeline.py`). A rank on another machine has a lease instead. It ends with 0 when the run is over,
and with 1 when its executor failed, it was shut out, or the controller is gone; then torchrun's agent starts the group
again, with a higher incarnation.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.controller.host import Host, report, serve
from slipstream.controller.nursery import NURSERY, search_path
from slipstream.controller.pipeline import CONTROLLER, Node, decode_channel, decode_node, encode_node
from slipstream.controller.placement import thread_environment
from slipstream.core import lifeline
from slipstream.core.addresses import LOOPBACK, LocalAddresses, StoreAddresses, grant_incarnation
from slipstream.core.channel import Ports, connect_by_book
from slipstream.core.channel_spec import ChannelSpec
from slipstream.core.clock import ShiftedClock, WallClock, wall_minus_clock_s
from slipstream.core.errors import ConfigError, RunIsOver, SlipstreamError
from slipstream.core.interrupts import LEAVING, leave_to_the_run
from slipstream.core.keys import RunKeys
from slipstream.core.lease import Lease
from slipstream.core.peer_messages import Joined
from slipstream.core.processes import open_pidfd
from slipstream.core.rank_group import RankGroup
from slipstream.core.ranks import rank_name
from slipstream.core.run_lock import inherited
from slipstream.core.scratch import sweep

if TYPE_CHECKING:  # what needs torch is imported by the processes that do: the rewards' starts a second sooner
    from torch.distributed import Store  # type: ignore[attr-defined]

    from slipstream.controller.meeting import MeetingPlace

LOG_TAIL_CHARS = 2000
KILL_DEADLINE_S = 5.0

MODULE = "slipstream.controller.process"
OF_TORCHRUN = {"RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
"""Variables of a torchrun in which a run was started: they say nothing of its children, and vLLM would read them."""


class PipeTether:
    """A pipe whose other end is the controller, or dies with it."""

    def __init__(self, descriptor: int) -> None:
        self.fds = [descriptor]

    def is_cut(self) -> bool:
        return bool(select.select(self.fds, [], [], 0)[0])


class LeaseTether:
    """Signs of life of a controller on another machine, and of this process to its peers; and the life of its agent.

    A controller that still waits for other groups says nothing: until its first word a connection is enough. `agent` is
    a pidfd: a process that outlives its agent would be in the way of the one that the next agent starts.
    """

    def __init__(self, ports: Ports, lease_s: float, *, agent: int) -> None:
        self.fds = [agent]
        self._ports = ports
        self._lease = Lease(lease_s, WallClock())
        self._lease.watch(CONTROLLER)

    def is_cut(self) -> bool:
        if self._lease.is_beat_due():
            self._ports.beat()
        has_begun = any(CONTROLLER in inbox.heard_s for inbox in self._ports.inputs.values())
        self._ports.hear(self._lease, busy=[] if has_begun else [CONTROLLER])
        self._lease.listens()  # this process may have been stopped, and the signs of life of that time be on their way
        return bool(self._lease.silent()) or bool(select.select(self.fds, [], [], 0)[0])


def run_child(spec_path: str) -> int:
    """Host one executor in a child of the controller until it is finished, fails, or the controller is gone."""
    leave_to_the_run()
    spec = json.loads(Path(spec_path).read_text())
    channels = tuple(decode_channel(channel) for channel in spec["channels"])
    name = rank_name(spec["node"]["name"], spec["rank"])
    transport_dir = Path(spec["transport_dir"])
    ports = _connect(channels, name, transport_dir, spec)
    host: Host | None = None
    try:
        node = decode_node(spec["node"])
        group = _join(node, spec["rank"], transport_dir, timeout_s=spec["deadline_s"], incarnation=spec["incarnation"])
        host = Host(node, ports, channels, Path(spec["run_dir"]), run_id=spec["run_id"], group=group)
        host.timeline.backdate("start_up", spec["started_s"])
        with host.timeline.span("start_up"):
            host.init()
            if spec["incarnation"] > 1:  # the first ones need not join; later ones do when nobody has to wait for them
                ports.outputs["events"].put(Joined(executor=name, incarnation=spec["incarnation"]))
        lifeline.ends_with(sys.stdin.fileno())
        return serve(host, PipeTether(sys.stdin.fileno()))
    except Exception as error:  # noqa: BLE001 - whatever it is, the controller must hear of it
        with nullcontext() if host is None else host.timeline.span("shut_down"):
            return report(ports, name, error, num_ranks=spec["node"]["ranks"])
    finally:
        if host is not None:
            host.close()
        ports.close()


def _join(node: Node, rank: int, transport_dir: Path, *, timeout_s: float, incarnation: int) -> RankGroup:
    if not node.needs_group:
        return RankGroup.alone()
    from slipstream.controller.groups import join_on_one_machine

    return join_on_one_machine(node, rank, transport_dir, timeout_s=timeout_s, incarnation=incarnation)


def _connect(channels: tuple[ChannelSpec, ...], name: str, transport_dir: Path, spec: Mapping[str, Any]) -> Ports:
    """Connect the ports: in `transport_dir`, and through the controller's store where groups are on other machines."""
    if spec["store"] is None:
        local = LocalAddresses(channels, transport_dir, spec["incarnations"])
        return connect_by_book(channels, [name], local, spec["incarnation"])[name]
    from slipstream.controller.meeting import attend

    book = StoreAddresses(
        channels,
        attend(spec["store"], timeout_s=spec["deadline_s"]),
        RunKeys.take(),
        host=spec["store_host"],
        transport_dir=transport_dir,
        deadline_s=spec["deadline_s"],
        patience_s=spec["patience_s"],
    )
    ports = connect_by_book(channels, [name], book, spec["incarnation"])[name]
    timeout_s = spec["deadline_s"] + sum(spec["patience_s"].values())  # one may have waited for each in turn
    book.meet(spec["node"]["name"], spec["incarnation"], spec["node"]["ranks"], timeout_s=timeout_s)
    return ports


def run_rank(options: argparse.Namespace) -> int:
    """Be one rank of a group, in a process of a torchrun job, until the run is over."""
    agent = open_pidfd(os.getppid())  # before anything takes time: it may end meanwhile
    from slipstream.controller import pool
    from slipstream.controller.groups import join_under_torchrun
    from slipstream.controller.meeting import attend, is_done, read_spec
    from slipstream.controller.weights import memory_of
    from slipstream.weight_sync.resharding import Place
    from slipstream.weight_sync.weight_links import Links

    leaving: list[int] = []
    signal.signal(LEAVING, lambda number, _frame: leaving.append(number))
    sweep()
    keys = RunKeys.load(options.key_file) if options.key_file is not None else RunKeys.take()
    if keys is None:
        raise ConfigError("a group needs the run's key", allowed="--key-file, or SLIPSTREAM_RUN_KEY")
    is_over = partial(is_done, options.out, options.steps)
    store = attend(options.controller, timeout_s=options.join_timeout, is_over=is_over)
    spec = read_spec(store, keys, timeout_s=options.join_timeout)
    node = replace(spec.node(options.group), num_threads=options.threads, num_threads_alone=options.threads)
    group = join_under_torchrun(node, options.address, timeout_s=spec.deadline_s)
    name = rank_name(node.name, group.rank)
    incarnation = _incarnation(store, node.name, group)
    if node.joins_later and group.is_leader and not pool.hold(store, node.name, options.claim, incarnation):
        raise ConfigError(pool.TAKEN, got=node.name, hint=pool.HINT)
    book = StoreAddresses(
        spec.channels, store, keys.of_start(spec.start), host=options.address, deadline_s=options.join_timeout
    )
    ports = connect_by_book(spec.channels, [name], book, incarnation)[name]
    timeout_s = len(spec.nodes) * options.join_timeout + spec.deadline_s  # one may have waited for each in turn
    book.meet(node.name, incarnation, node.ranks, timeout_s=timeout_s)
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
        if incarnation == 1 and not node.joins_later:
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
    """Grant one incarnation to all ranks of the group."""
    granted = grant_incarnation(store, name) if group.is_leader else 0
    return int(group.broadcast(str(granted).encode()))


# In the controller


@dataclass
class Child:
    """A process that hosts an executor; `pidfd` is readable once it has ended. It ends when `lifeline` is closed."""

    name: str
    pid: int
    pidfd: int
    lifeline: int
    log_path: Path
    log_start: int = 0
    is_reaped: bool = False

    @classmethod
    def start(
        cls,
        node: Node,
        rank: int,
        channels: tuple[ChannelSpec, ...],
        *,
        run_dir: Path,
        transport_dir: Path,
        run_id: str,
        incarnation: int,
        incarnations: Mapping[str, int],
        deadline_s: float,
        place: MeetingPlace | None = None,
    ) -> Child:
        """Start the process of one rank of `node`, which meets groups on other machines at `place`.

        `incarnations` are those of processes that have been started again.
        """
        name = node.members[rank]
        spec: dict[str, Any] = {
            "node": encode_node(node),
            "rank": rank,
            "channels": [asdict(channel) for channel in channels],
            "run_dir": str(run_dir.resolve()),
            "transport_dir": str(transport_dir),
            "run_id": run_id,
            "incarnation": incarnation,
            "incarnations": dict(incarnations),
            "deadline_s": deadline_s,
            "store": None if place is None else place.address,
            "store_host": None if place is None else place.host,
            "patience_s": {} if place is None else place.patience_s,
            "started_s": WallClock().now_s(),
        }
        spec_path = transport_dir / f"{name}.json"
        spec_path.write_text(json.dumps(spec))
        log_path = run_dir / "logs" / f"{name}.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        environment = {name: value for name, value in os.environ.items() if name not in OF_TORCHRUN}
        environment |= thread_environment(node.num_threads) | {"PYTHONPATH": search_path()}
        if place is not None:
            environment |= place.child_environment()
        stdin, line = os.pipe()
        try:
            with log_path.open("ab") as log:
                log_start = log.tell()
                pid = NURSERY.start(
                    [str(spec_path)],
                    environment=environment,
                    stdin=stdin,
                    log=log.fileno(),
                    keep=inherited(run_dir),  # it writes there: the lock is to outlive a controller that is killed
                )
        except BaseException:
            os.close(line)
            raise
        finally:
            os.close(stdin)
        return cls(name, pid, open_pidfd(pid), line, log_path, log_start)

    @property
    def has_ended(self) -> bool:
        """Return whether it has ended; its number is not given to another process before `kill` or `end`."""
        return self.is_reaped or self._ends_within(0.0)

    @property
    def how_it_ended(self) -> str:
        """Return 'exit code 1' or 'killed by SIGKILL', of a process that has ended."""
        status = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert status is not None, "it has ended"
        is_exit = status.si_code == os.CLD_EXITED
        return f"exit code {status.si_status}" if is_exit else f"killed by {signal.Signals(status.si_status).name}"

    def log_tail(self) -> str:
        """Return the end of what this process has logged; empty where its log is gone."""
        with suppress(FileNotFoundError), self.log_path.open("rb") as log:
            log.seek(max(self.log_start, log.seek(0, os.SEEK_END) - LOG_TAIL_CHARS))
            return log.read().decode(errors="replace").strip()
        return ""

    def kill(self) -> None:
        """End it and what it has started at once, so that it cannot come back."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._reap(KILL_DEADLINE_S)  # where it is in the kernel so long, it comes out of it dead
        self.let_go()
        os.close(self.pidfd)

    def let_go(self) -> None:
        """Close the lifeline: the child ends by itself."""
        if self.lifeline >= 0:
            os.close(self.lifeline)
        self.lifeline = -1

    def end(self, deadline_s: float) -> None:
        """Wait for the end; kill what does not end in time."""
        if self._reap(deadline_s):
            self.let_go()
            os.close(self.pidfd)
        else:
            self.kill()

    def _ends_within(self, timeout_s: float) -> bool:
        return bool(select.select([self.pidfd], [], [], timeout_s)[0])

    def _reap(self, timeout_s: float) -> bool:
        """Wait for the end, and let the system forget the process; whether it has ended."""
        if not self.is_reaped and self._ends_within(timeout_s):
            os.waitid(os.P_PID, self.pid, os.WEXITED)
            self.is_reaped = True
        return self.is_reaped


def main(argv: list[str]) -> int:
    """Run a child, whose specification is the only argument, or a rank of a group."""
    if len(argv) == 1:
        return run_child(argv[0])
    parser = argparse.ArgumentParser()
    parser.add_argument("--controller", required=True)
    parser.add_argument("--group", required=True)
    parser.add_argument("--claim", default="")
    parser.add_argument("--address", default=LOOPBACK)
    parser.add_argument("--key-file", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--join-timeout", type=float, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int)
    try:
        return run_rank(parser.parse_args(argv))
    except RunIsOver as over:
        sys.stderr.write(f"{over}\n")
        return 0
    except SlipstreamError as error:
        sys.stderr.write(f"{error}\n")
        return 1


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # everything is flushed and closed; taking the interpreter apart would only hold up the run's end
