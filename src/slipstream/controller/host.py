"""The code around an executor, the same inside the controller's process and in a process of its own."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from slipstream.controller.pipeline import CONTROLLER, MEMBERSHIP, Node, has_weights, replica_of, weight_readers
from slipstream.core.channel import Ports, wait
from slipstream.core.channel_spec import ChannelSpec
from slipstream.core.clock import Clock, WallClock
from slipstream.core.errors import ChannelClosed, ChannelError, ChannelTimeout, RankError
from slipstream.core.executor import Context
from slipstream.core.peer_messages import Failed, Leaving, Left, PeerJoined, Peers
from slipstream.core.rank_group import RankGroup
from slipstream.core.ranks import rank_name, split_rank_name
from slipstream.core.scratch import file_prefix
from slipstream.core.service_messages import Counters, counters_every_s
from slipstream.observe.timeline import TIME_PREFIX, Timeline, timeline_path

if TYPE_CHECKING:  # what needs torch is imported by the processes that do: the rewards' starts a second sooner
    from slipstream.weight_sync.publisher import Publisher
    from slipstream.weight_sync.subscriber import Subscriber
    from slipstream.weight_sync.weight_links import Links

CHECK_TETHER_EVERY_S = 0.5


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
        clock, group = clock or WallClock(), group or RankGroup.alone()
        self.name = node.members[group.rank]
        self.ports, self.executor = ports, node.build()
        self.timeline = Timeline(
            self.name,
            timeline_path(run_dir, self.name),
            clock,
            threads=node.num_threads,
            threads_alone=node.num_threads_alone,
            device=node.device,
            within=CONTROLLER if node.host == "inline" else "",
        )
        self.outermost = ExitStack()
        """The state whenever there is no other, until the timeline is closed; inline, others work meanwhile."""
        self.outermost.enter_context(self.timeline.idle() if node.host == "inline" else self.timeline.span("overhead"))
        weights: tuple[Publisher | None, Subscriber | None] = (None, None)
        if has_weights(node.name, channels):
            from slipstream.controller.weights import weights_ends

            weights = weights_ends(node, ports, channels, run_id, group, links)
        self._peers, self._reader_ranks = dict[str, tuple[int, bool]](), weight_readers(channels)
        self._count_every_s = counters_every_s(0 if replica_of(node.name) is None else len(self._reader_ranks))
        if MEMBERSHIP in ports.inputs:
            for inbox in ports.inputs.values():
                inbox.await_word()
        self.counted_s = clock.now_s()
        self.ends = ExitStack()
        """Closed last in, first out, each whatever the others do: all that was opened, and only that."""
        self.ends.callback(self.timeline.close)
        for end in weights:
            if end is not None:
                self.ends.callback(end.close)
        self.context = Context(
            name=self.name,
            run_dir=run_dir,
            inputs=ports.inputs,
            outputs=ports.outputs,
            spans=self.timeline,
            clock=clock,
            together=ports.together,
            num_threads=node.num_threads,
            num_threads_alone=node.num_threads_alone,
            publisher=weights[0],
            subscriber=weights[1],
            scratch_prefix=file_prefix(run_id),
            group=group,
            is_remote=node.host == "torchrun",
        )

    def init(self) -> None:
        """Initialise the executor."""
        with self.timeline.span("start_up"):
            self.ends.callback(self.executor.close)
            self.executor.init(self.context)

    def step(self) -> bool:
        """One step of the executor; now and then (`counters_every_s`) its time per state goes to the controller."""
        with self.timeline.span("overhead"):  # but for what the executor says of itself
            self._meet()
            now_s = self.context.clock.now_s()
            if now_s - self.counted_s >= self._count_every_s:
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
            held=[self.ports.inputs[name] for name in self.executor.held_inputs()],
            asleep=self.timeline.idle,
        )

    def close(self) -> None:
        """Close all that was opened, the timeline last. Again: nothing."""
        with self.outermost, self.timeline.span("shut_down"):
            self.ends.close()

    def _meet(self) -> None:
        """Connect to processes that joined, shut out those that were lost. The same news again changes nothing."""
        inbox = self.ports.inputs.get(MEMBERSHIP)
        while inbox is not None and (message := inbox.get_nowait()) is not None:
            assert isinstance(message, Peers), "the port is the controller's"
            for change in message.changes:
                executor, incarnation, is_there = change.executor, change.incarnation, isinstance(change, PeerJoined)
                if self._peers.get(executor) == (incarnation, is_there):
                    continue
                self._peers[executor] = (incarnation, is_there)
                if is_there:
                    self.ports.rejoin(executor, incarnation)
                else:
                    self.ports.shut_out(executor, incarnation)
                self._publish_to(executor, is_there=is_there)
                if is_there:
                    self.executor.rejoined(executor)

    def _publish_to(self, executor: str, *, is_there: bool) -> None:
        """Add or drop a replica as a reader of weights: drop it with its first rank, add it with its last."""
        publisher, replica = self.context.publisher, replica_of(executor)
        if publisher is None or replica is None or not self.context.group.is_leader:
            return
        group, rank = split_rank_name(executor)
        ranks = [rank_name(group, other) for other in range(self._reader_ranks.get(group, 1))]
        if not is_there and rank == 0:
            publisher.drop_reader(replica)
        elif executor in ranks and all(self._peers.get(other) == self._peers[executor] for other in ranks) and is_there:
            publisher.add_reader(replica)


# In a process of its own (`controller/process.py`)


class Tether(Protocol):
    """The tie between a process and its controller: when it is cut, the process ends."""

    fds: list[int]
    """Readable when it is time to look."""

    def is_cut(self) -> bool: ...


def serve(host: Host, tether: Tether, *, is_leaving: Callable[[], bool] = lambda: False) -> int:
    """Consumes: its executor's ports. Unblocked by: a message or descriptor. Ends when: finished, or cut off.

    The controller is told, once, when the process `is_leaving`. That it has left is said when the host is closed: the
    timeline is read then, so it is whole. What follows is not counted: others take what they were sent.
    """
    clock = host.context.clock
    checked_s, has_told = clock.now_s(), False
    while not host.executor.is_finished:
        if not host.step() and not host.executor.is_finished:
            host.wait(tether.fds, CHECK_TETHER_EVERY_S)
            checked_s = 0.0
        if not has_told and is_leaving():
            has_told = True
            host.ports.outputs["events"].put(Leaving(executor=host.name))
            host.executor.leave()
        if clock.now_s() - checked_s >= CHECK_TETHER_EVERY_S:
            checked_s = clock.now_s()
            if tether.is_cut():
                sys.stderr.write("the controller, or the agent that started this process, is gone\n")
                return 1
    host.close()
    for inbox in host.ports.inputs.values():
        inbox.settle()  # two that end together would wait for each other's word
    outputs = host.ports.outputs
    outputs["events"].put(Left(executor=host.name))
    outputs["events"].flush(deadline_s=10.0)
    for outbox in outputs.values():
        with suppress(ChannelTimeout):  # a peer that has ended takes nothing more
            outbox.flush(deadline_s=10.0)
    return 0


def report(ports: Ports, name: str, error: Exception, *, num_ranks: int) -> int:
    """Tell the controller why this process ends, which is one of `num_ranks`."""
    sys.stderr.write(traceback.format_exc())
    failed = Failed(executor=name, error=f"{type(error).__name__}: {error}", may_follow=_may_follow(error, num_ranks))
    with suppress(ChannelError):  # the controller is gone, or will learn of it from our exit code
        ports.outputs["events"].put(failed)
        ports.outputs["events"].flush(deadline_s=2.0)
    return 1


def _may_follow(error: Exception, num_ranks: int) -> bool:
    """Whether another process's end may have led to it: a closed channel, or a collective that torch has given up."""
    if isinstance(error, RankError | ChannelClosed | ChannelTimeout):
        return True
    if num_ranks == 1:
        return False
    from torch.distributed import DistError

    return type(error) is RuntimeError or isinstance(error, DistError)  # gloo has no type of its own
