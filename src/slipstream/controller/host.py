"""Where an executor runs: inside the controller's process, or in a process of its own with the same code around it.

`python -m slipstream.controller.host SPEC` is such a process. It ends when its executor is finished, when it fails, or
when its standard input closes: the other end of that pipe is the controller, so no child outlives it. Until it serves,
it does not look at that pipe, and the system kills it with the controller (`core/lifeline.py`). Those of other
machines (`controller/member.py`) have a lease instead.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from slipstream.controller.pipeline import (
    CONTROLLER,
    MEMBERSHIP,
    Node,
    decode_channel,
    decode_node,
    encode_node,
    has_weights,
    replica_of,
    weight_readers,
)
from slipstream.controller.placement import thread_environment
from slipstream.core import lifeline
from slipstream.core.addresses import LocalAddresses, StoreAddresses
from slipstream.core.channel import ChannelSpec, Ports, connect_by_book, wait
from slipstream.core.clock import Clock, WallClock
from slipstream.core.errors import ChannelClosed, ChannelError, ChannelTimeout, RankError
from slipstream.core.executor import Context
from slipstream.core.interrupts import leave_to_the_run
from slipstream.core.keys import RunKeys
from slipstream.core.lease import Lease
from slipstream.core.rank_group import RankGroup
from slipstream.core.ranks import rank_name, split_rank_name
from slipstream.core.run_lock import inherited
from slipstream.core.scratch import file_prefix
from slipstream.core.types import Counters, Failed, Joined, Leaving, Left, PeerJoined, PeerLost
from slipstream.observe.timeline import TIME_PREFIX, Timeline, timeline_path

if TYPE_CHECKING:  # what needs torch is imported by the processes that do: the rewards' starts a second sooner
    from slipstream.controller.cluster import MeetingPlace
    from slipstream.weight_sync.publisher import Publisher
    from slipstream.weight_sync.subscriber import Subscriber
    from slipstream.weight_sync.weight_links import Links

CHECK_TETHER_EVERY_S = 0.5
COUNTERS_EVERY_S = 1.0
LOG_TAIL_CHARS = 2000
KILL_DEADLINE_S = 5.0


class Host:
    """An executor with its ports and timeline, in this process.

    `step` runs it once; `wait` sleeps until it may have work. Both hosts, inline and process, are made of these.
    """

    def __init__(
        self,
        node: Node,
        ports: Ports,
        channels: tuple[ChannelSpec, ...],
        run_dir: Path,
        *,
        run_id: str,
        group: RankGroup | None = None,
        clock: Clock | None = None,
        links: Links | None = None,
    ) -> None:
        clock = WallClock() if clock is None else clock
        group = RankGroup.alone() if group is None else group
        self.name = node.members[group.rank]
        self.ports = ports
        self.executor = node.build()
        self.timeline = Timeline(
            self.name,
            timeline_path(run_dir, self.name),
            clock,
            threads=node.num_threads,
            threads_alone=node.num_threads_alone,
            device=node.device,
            within=CONTROLLER if node.host == "inline" else "",
        )
        self.while_idle = ExitStack()
        if node.host == "inline":  # while the others of its process work
            self.while_idle.enter_context(self.timeline.idle())
        publisher: Publisher | None = None
        subscriber: Subscriber | None = None
        if has_weights(node.name, channels):
            from slipstream.controller.weights import weights_ends

            publisher, subscriber = weights_ends(node, ports, channels, run_id, group, links)
        self._peers: dict[str, tuple[int, bool]] = {}
        self._reader_ranks = weight_readers(channels)
        if MEMBERSHIP in ports.inputs:
            for inbox in ports.inputs.values():
                inbox.await_word()
        self.counted_s = clock.now_s()
        self.ends = ExitStack()
        """Closed last in, first out, each whatever the others do: all that was opened, and only that."""
        self.ends.callback(self.timeline.close)
        for end in (publisher, subscriber):
            if end is not None:
                self.ends.callback(end.close)
        self.context = Context(
            name=self.name,
            run_dir=run_dir,
            inputs=ports.inputs,
            outputs=ports.outputs,
            spans=self.timeline,
            clock=clock,
            num_threads=node.num_threads,
            num_threads_alone=node.num_threads_alone,
            publisher=publisher,
            subscriber=subscriber,
            scratch_prefix=file_prefix(run_id),
            group=group,
        )

    def init(self) -> None:
        """Initialise the executor."""
        with self.timeline.span("start_up"):
            self.ends.callback(self.executor.close)
            self.executor.init(self.context)

    def step(self) -> bool:
        """One step of the executor; about once a second, its time per state goes to the controller."""
        with self.timeline.span("overhead"):  # but for what the executor says of itself
            self._meet()
            now_s = self.context.clock.now_s()
            if now_s - self.counted_s >= COUNTERS_EVERY_S:
                self.counted_s = now_s
                totals = {f"{TIME_PREFIX}{state}": seconds for state, seconds in self.timeline.totals().items()}
                self.ports.outputs["events"].put(Counters(executor=self.name, values=totals | self.ports.refusals()))
            return not self.executor.is_finished and self.executor.step()

    def wait(self, extra_fds: list[int], timeout_s: float) -> None:
        """Sleep until a message, a descriptor or the executor's own deadline; at most `timeout_s`."""
        own = self.executor.wait_s()
        wait(
            self.ports.inputs.values(),
            self.ports.outputs.values(),
            [*extra_fds, *self.executor.wait_fds()],
            timeout_s if own is None else min(own, timeout_s),
            asleep=self.timeline.idle,
        )

    def close(self) -> None:
        with self.while_idle, self.timeline.span("shut_down"):
            self.ends.close()

    def _meet(self) -> None:
        """Take to those who joined, forget those who were lost. What is known already is told for others to hear."""
        inbox = self.ports.inputs.get(MEMBERSHIP)
        while inbox is not None and (message := inbox.get_nowait()) is not None:
            assert isinstance(message, PeerJoined | PeerLost), "the port is the controller's"
            is_there = isinstance(message, PeerJoined)
            if self._peers.get(message.executor) == (message.incarnation, is_there):
                continue
            self._peers[message.executor] = (message.incarnation, is_there)
            if is_there:
                self.ports.rejoin(message.executor, message.incarnation)
            else:
                self.ports.shut_out(message.executor, message.incarnation)
            self._publish_to(message.executor, is_there=is_there)
            if is_there:
                self.executor.rejoined(message.executor)

    def _publish_to(self, executor: str, *, is_there: bool) -> None:
        """Once for all ranks of a replica: it is gone with the first, and there with the last that is heard of."""
        publisher, replica = self.context.publisher, replica_of(executor)
        if publisher is None or replica is None or not self.context.group.is_leader:
            return
        group, rank = split_rank_name(executor)
        ranks = [rank_name(group, other) for other in range(self._reader_ranks.get(group, 1))]
        if not is_there and rank == 0:
            publisher.drop_reader(replica)
        elif executor in ranks and all(self._peers.get(other) == self._peers[executor] for other in ranks) and is_there:
            publisher.add_reader(replica)


# In a process of its own


class Tether(Protocol):
    """What ties a process to its controller: when it is cut, the process ends."""

    fds: list[int]
    """Readable when it is time to look."""

    def is_cut(self) -> bool: ...


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
        return bool(self._lease.silent()) or bool(select.select(self.fds, [], [], 0)[0])


def main(spec_path: str) -> int:
    """Host one executor until it is finished, fails, or the controller is gone."""
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
    """On one machine ports meet in `transport_dir`; where groups are on others, through the controller's store too."""
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
    )
    return connect_by_book(channels, [name], book, spec["incarnation"])[name]


def serve(host: Host, tether: Tether, *, is_leaving: Callable[[], bool] = lambda: False) -> int:
    """Consumes: its executor's ports. Unblocked by: a message or descriptor. Ends when: finished, or cut off.

    The controller is told, once, when the process `is_leaving`.
    """
    clock = host.context.clock
    checked_s, has_told = clock.now_s(), False
    with host.timeline.span("overhead"):
        while not host.executor.is_finished:
            if not host.step() and not host.executor.is_finished:
                host.wait(tether.fds, CHECK_TETHER_EVERY_S)
                checked_s = 0.0
            if not has_told and is_leaving():
                has_told = True
                host.ports.outputs["events"].put(Leaving(executor=host.name))
            if clock.now_s() - checked_s >= CHECK_TETHER_EVERY_S:
                checked_s = clock.now_s()
                if tether.is_cut():
                    sys.stderr.write("the controller, or the agent that started this process, is gone\n")
                    return 1
    with host.timeline.span("shut_down"):
        host.ports.outputs["events"].put(Left(executor=host.name))
        for outbox in host.ports.outputs.values():
            outbox.flush(deadline_s=10.0)
    return 0


def report(ports: Ports, name: str, error: Exception, *, num_ranks: int) -> int:
    """Tell the controller why this process ends, which is one of `num_ranks`."""
    text = traceback.format_exc()
    sys.stderr.write(text)
    try:
        ports.outputs["events"].put(
            Failed(
                executor=name,
                error=f"{type(error).__name__}: {error}",
                traceback=text,
                may_follow=_may_follow(error, num_ranks),
            )
        )
        ports.outputs["events"].flush(deadline_s=2.0)
    except ChannelError:
        return 1  # the controller is gone, or will learn of it from our exit code
    return 1


def _may_follow(error: Exception, num_ranks: int) -> bool:
    """Whether another process's end may have led to it: a closed channel, or a collective that torch has given up."""
    if isinstance(error, RankError | ChannelClosed | ChannelTimeout):
        return True
    if num_ranks == 1:
        return False
    from torch.distributed import DistError

    return type(error) is RuntimeError or isinstance(error, DistError)  # gloo has no type of its own


# In the controller


@dataclass
class Child:
    """A process that hosts an executor; `pidfd` is readable once it has ended."""

    name: str
    process: subprocess.Popen[bytes]
    pidfd: int
    log_path: Path
    log_start: int = 0

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
            "started_s": WallClock().now_s(),
        }
        spec_path = transport_dir / f"{name}.json"
        spec_path.write_text(json.dumps(spec))
        log_path = run_dir / "logs" / f"{name}.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        search_path = os.pathsep.join(path or os.getcwd() for path in sys.path if not path.endswith(".zip"))
        environment = os.environ | thread_environment(node.num_threads) | {"PYTHONPATH": search_path}
        if place is not None:
            environment |= place.child_environment()
        with log_path.open("ab") as log:
            log_start = log.tell()
            process = subprocess.Popen(
                lifeline.command("slipstream.controller.host", str(spec_path)),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=inherited(run_dir),  # it writes there: the lock is to outlive a controller that is killed
                start_new_session=True,  # a Ctrl-C at the terminal reaches the controller only
            )
        return cls(name, process, os.pidfd_open(process.pid), log_path, log_start)

    @property
    def has_ended(self) -> bool:
        """Its number is not given to another process before `kill` or `end`."""
        return self.process.returncode is not None or bool(select.select([self.pidfd], [], [], 0)[0])

    @property
    def how_it_ended(self) -> str:
        """Of one that has."""
        status = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        assert status is not None, "it has ended"
        is_exit = status.si_code == os.CLD_EXITED
        return f"exit code {status.si_status}" if is_exit else f"killed by {signal.Signals(status.si_status).name}"

    def log_tail(self) -> str:
        """The end of what this process has logged; empty where its log is gone."""
        with suppress(FileNotFoundError), self.log_path.open("rb") as log:
            log.seek(max(self.log_start, log.seek(0, os.SEEK_END) - LOG_TAIL_CHARS))
            return log.read().decode(errors="replace").strip()
        return ""

    def kill(self) -> None:
        """End it and what it has started at once, so that it cannot come back."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # it is in the kernel, and comes out of it dead
            self.process.wait(KILL_DEADLINE_S)
        assert self.process.stdin is not None
        self.process.stdin.close()
        os.close(self.pidfd)

    def let_go(self) -> None:
        """Close the lifeline: the child ends by itself."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def end(self, deadline_s: float) -> None:
        """Wait for the end; kill what does not end in time."""
        try:
            self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self.kill()
        else:
            os.close(self.pidfd)


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # everything is flushed and closed; taking the interpreter apart would only hold up the run's end
