"""The executors of a run, as its controller sees them: children, those inside its process, groups on other machines.

Whoever ends before its time is found out here. A child's death ends the run. So does a group's on another machine,
except a generator's, which may come back (`controller/cluster.py`): for the controller that is an event, ReplicaLost.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from slipstream.controller.cluster import Cluster, MeetingPlace, RemoteGroups
from slipstream.controller.host import Child, Host
from slipstream.controller.members import Change
from slipstream.controller.pipeline import CONTROLLER, Pipeline, replica_of
from slipstream.core.addresses import AddressBook, LocalAddresses
from slipstream.core.channel import Ports, connect_by_book, wait
from slipstream.core.clock import Clock
from slipstream.core.config import RunConfig
from slipstream.core.errors import ChannelClosed, ExecutorDied, SlipstreamError
from slipstream.core.ranks import RANK_MARK
from slipstream.core.types import (
    CompletionFinished,
    Counters,
    Failed,
    Joined,
    Left,
    Message,
    Ready,
    ReplicaLost,
    Stop,
    Swapped,
)

WAKE_EVERY_S = 1.0  # how often a silent run is looked at; decisions never wait for it
STOP_DEADLINE_S = 10.0
LET_GO_DEADLINE_S = 2.0


class Executors:
    """Starts them, passes commands and events, ends them. `note` is told, in words, who comes and goes."""

    def __init__(
        self, config: RunConfig, pipeline: Pipeline, run_dir: Path, *, clock: Clock, note: Callable[[str], None]
    ) -> None:
        self.config, self.pipeline, self.run_dir = config, pipeline, run_dir
        self.ready: set[str] = set()
        self.heard_s = clock.now_s()
        """When the last event came, other than a report of counters."""
        self._clock, self._note = clock, note
        self._ports = Ports()
        self._inline: list[Host] = []
        self._children: list[Child] = []
        self._remote = RemoteGroups(pipeline, lease_s=config.lease_s, clock=clock)
        self._losses: deque[ReplicaLost] = deque()  # found out here, for the controller to take

    def launch(self, transport_dir: Path, run_id: str, cluster: Cluster | None) -> None:
        """Start children, let groups join, connect. Waits for all to announce their ports: `deadline_s` for each."""
        channels, deadline_s = self.pipeline.all_channels, self.config.deadline_s
        book: AddressBook = LocalAddresses(channels, transport_dir)
        place: MeetingPlace | None = None
        if cluster is not None:
            place = MeetingPlace(cluster, self.pipeline, lease_s=self.config.lease_s, deadline_s=deadline_s)
            book = place.addresses(transport_dir)
            generator = self.config.generator
            place.announce(
                self.run_dir,
                run_id,
                delta=generator.delta,
                relays=generator.relays,
                started_s=self._clock.now_s(),
            )
            self._note(f"the controller listens at {place.address}")
        for node in self.pipeline.nodes:
            for rank in range(node.ranks if node.host == "process" else 0):
                self._children.append(
                    Child.start(
                        node,
                        rank,
                        channels,
                        run_dir=self.run_dir,
                        transport_dir=transport_dir,
                        run_id=run_id,
                        incarnation=1,
                        deadline_s=deadline_s,
                        place=place,
                    )
                )
        inline = [node for node in self.pipeline.nodes if node.host == "inline"]
        ports = connect_by_book(channels, [CONTROLLER, *(node.name for node in inline)], book, incarnation=1)
        self._ports = ports[CONTROLLER]
        self._inline = [Host(node, ports[node.name], channels, self.run_dir, run_id=run_id) for node in inline]
        for host in self._inline:
            host.init(is_inline=True)

    @property
    def missing(self) -> list[str]:
        """Who has not said yet that it is ready."""
        return sorted(set(self.pipeline.members) - self.ready)

    def send(self, executor: str, message: Message) -> None:
        """To a group on another machine, if it is there: one that has ended is lost, and what it was sent with it."""
        try:
            self._ports.outputs[f"to-{executor}"].put(message)
        except ChannelClosed:
            if executor not in self._remote:
                raise
            self._changed(self._remote.lost(executor, self._ports))

    def receive(self) -> Message | None:
        """The next event, or None. What is about the coming and going of groups ends here, but for what is lost."""
        while (message := self._next()) is not None:
            if not isinstance(message, Counters):
                self.heard_s = self._clock.now_s()
            match message:
                case Swapped() | CompletionFinished() if self._remote.is_absent(f"generator-{message.replica}"):
                    pass  # last words of a replica that was lost
                case Joined():
                    self._changed(self._remote.joined(message, self._ports))
                case Failed() if self._remote.may_come_back(message.executor):
                    self._note(f"{message.executor} failed: {message.error}")
                    self._changed(self._remote.lost(message.executor, self._ports))
                case Failed():
                    log = f"see logs/{message.executor}.log"
                    raise ExecutorDied(f"'{message.executor}' failed", got=message.error, hint=log)
                case Ready():
                    self.ready.add(message.executor)
                    return message
                case _:
                    return message
        return None

    def work(self) -> bool:
        """Do what is to be done in this process: steps of executors inside it, signs of life. False: there was nothing.

        Groups on other machines that have given no sign of life for `lease_s` are shut out.
        """
        has_worked = False
        for host in self._inline:
            has_worked |= host.step()
        changes = self._remote.check(self._ports, busy=self._busy())
        self._changed(changes)
        return has_worked or bool(changes)

    def sleep(self) -> None:
        """Until there may be an event or work; a second at most."""
        if self._losses:
            return
        inboxes = [*self._ports.inputs.values(), *(i for host in self._inline for i in host.ports.inputs.values())]
        fds = [child.pidfd for child in self._children]
        fds += [fd for host in self._inline for fd in host.executor.wait_fds()]
        deadlines = [s for host in self._inline if (s := host.executor.wait_s()) is not None]
        wait(inboxes, self._ports.outputs.values(), fds, min([WAKE_EVERY_S, self._remote.wait_s(), *deadlines]))

    @property
    def death(self) -> ExecutorDied | None:
        """Of a child, if one has ended."""
        dead = next((child for child in self._children if child.has_ended), None)
        return None if dead is None else dead.death()

    def end(self, hear: Callable[[Message], None], *, is_failed: bool) -> None:
        """Stop who still listens, wait for it, kill what does not end. Runs after errors too.

        `hear` gets the last events. After a failure nobody is given time, and other machines are told by their leases.
        """
        with contextlib.ExitStack() as ends:  # each is closed whatever the others do
            for host in reversed(self._inline):
                ends.callback(host.close)
            for child in self._children:
                ends.callback(child.end, LET_GO_DEADLINE_S)
            for child in self._children:
                ends.callback(child.let_go)
            for child in self._children:
                if not child.has_ended and child.name in self.ready and RANK_MARK not in child.name:
                    with contextlib.suppress(SlipstreamError):
                        self.send(child.name, Stop())
            if is_failed:
                return
            for name in self._remote.present:
                with contextlib.suppress(SlipstreamError):
                    self.send(name, Stop())
            for who in (None, *self._children):
                self._take_last_words(who, hear)

    def close(self) -> None:
        """Their ports and the controller's."""
        with contextlib.ExitStack() as ends:
            for ports in (*(host.ports for host in self._inline), self._ports):
                ends.callback(ports.close)

    def _next(self) -> Message | None:
        return self._losses.popleft() if self._losses else self._ports.inputs["events"].get_nowait()

    def _busy(self) -> list[str]:
        """Who may be at work for longer than a lease: loading a model, or training."""
        return [name for name in self.pipeline.members if name not in self.ready or replica_of(name) is None]

    def _changed(self, changes: Sequence[Change]) -> None:
        """A lost generator's groups go elsewhere, and it is welcome back; without another group there is no run."""
        for change in changes:
            if not change.is_lost:
                self._note(f"{change.group} has joined (incarnation {change.incarnation})")
                continue
            replica = replica_of(change.group)
            if replica is None:
                raise ExecutorDied(
                    f"'{change.group}' was lost: silent for {self.config.lease_s:g} s, or started again",
                    hint="its own log says why; `--resume` goes on from the last checkpoint",
                )
            self._note(f"{change.group} was lost; its unfinished groups go elsewhere")
            self.ready.difference_update(change.members)
            self._losses.append(ReplicaLost(replica=replica))

    def _take_last_words(self, child: Child | None, hear: Callable[[Message], None]) -> None:
        """Give a child that was told to stop its time to end by itself, or (None) all groups on other machines."""
        fds = [] if child is None else [child.pidfd]
        deadline_s = self._clock.now_s() + STOP_DEADLINE_S
        while self._clock.now_s() < deadline_s and (self._remote.present if child is None else not child.has_ended):
            wait(self._ports.inputs.values(), self._ports.outputs.values(), fds, WAKE_EVERY_S)
            while (message := self._ports.inputs["events"].get_nowait()) is not None:
                hear(message)
                if isinstance(message, Left):
                    self._remote.left(message.executor)
