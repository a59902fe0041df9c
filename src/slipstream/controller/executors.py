"""The executors of a run, as its controller sees them: children, those inside its process, groups on other machines.

Whoever ends before its time, or is silent for too long, is found out here. What of it may go on is decided here, too:

    reported an error                 the run ends with that error: it would only come again; a replica on another
                                      machine is lost, unless its weights are to blame (`_blames_weights`)
    lost, and nobody misses its state a child is killed for certain and started again, with a higher incarnation; a
                                      group on another machine is started by its agent (`controller/membership.py`)
    any other lost                    ExecutorLost: this attempt ends, and the run may go on from its last checkpoint

For the controller's loop the loss of a replica is an event, ReplicaLost; of other losses it sees nothing.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from slipstream.controller.host import Host
from slipstream.controller.meeting import Cluster, MeetingPlace
from slipstream.controller.membership import Change, Membership
from slipstream.controller.pipeline import CONTROLLER, Node, Pipeline, replica_of
from slipstream.controller.process import Child
from slipstream.controller.restarts import Patience, Restarts
from slipstream.core.addresses import AddressBook, LocalAddresses
from slipstream.core.background import repeated
from slipstream.core.channel import Ports, connect_by_book, wait
from slipstream.core.clock import Clock
from slipstream.core.config import RunConfig
from slipstream.core.errors import (
    ChannelClosed,
    ExecutorDied,
    ExecutorLost,
    NonFiniteError,
    NotReproducedError,
    SlipstreamError,
)
from slipstream.core.peer_messages import Failed, Joined, Left
from slipstream.core.plain import plural
from slipstream.core.ports import Turn
from slipstream.core.ranks import RANK_MARK, split_rank_name
from slipstream.core.service_messages import CompletionsFinished, Counters, Ready
from slipstream.core.spans import Spans
from slipstream.core.types import CompletionFinished, Message, ReplicaLost, Stop, Swapped

WAKE_EVERY_S = 1.0  # how often a silent run is looked at; decisions never wait for it
TELL_EVERY_S = 2.0  # that processes still load
MAX_NAMED = 4
STOP_DEADLINE_S = 10.0
STEPS_TO_STOP = 64  # of an executor in this process
LET_GO_DEADLINE_S = 2.0
CAUSE_DEADLINE_S = 2.0  # so long is a cause looked for, where an error may be the consequence of another's end


@dataclass(frozen=True)
class _Gone:
    """These processes are gone; all that they said before has been taken."""

    members: tuple[str, ...]


class Executors:
    """Start the executors, pass commands and events, restart those that the run can do without for a while, end them.

    `note` is told, in words, who comes and goes; `lost` the names of processes that are gone; `spans` gets the instants
    of both. `restarts` counts per executor how often it was started again, and goes on counting.
    """

    def __init__(
        self,
        config: RunConfig,
        pipeline: Pipeline,
        run_dir: Path,
        *,
        clock: Clock,
        note: Callable[[str], None],
        lost: Callable[[Sequence[str]], None],
        spans: Spans,
        restarts: Counter[str],
    ) -> None:
        self.config, self.pipeline, self.run_dir = config, pipeline, run_dir
        self.ready: set[str] = set()
        self.heard_s = clock.now_s()
        """The time of the last event that was no report of counters."""
        self._loading_s = self._told_s = self.heard_s  # since when processes load; when this was told
        self._serving: set[str] = set()  # those that have loaded: the trainer is ready after its warm start only
        self._clock, self._note, self._lost, self._spans = clock, note, lost, spans
        self._ports = Ports()
        self._place: MeetingPlace | None = None
        self._inline: list[Host] = []
        self._nodes = {node.name: node for node in pipeline.nodes}
        self._children: dict[str, Child] = {}
        self._incarnations = dict.fromkeys(self._nodes, 1)  # of the groups of children
        self._coming: dict[str, float] = {}  # groups that are being started again -> by when they must be there
        self._membership = Membership(pipeline, lease_s=config.lease_s, clock=clock)
        self._restarts = Restarts(config.max_restarts, clock, restarts)
        self._patience = Patience(config)
        self._committed: set[int] = set()  # replicas that have taken a version since they were started
        self._found: deque[Message | _Gone] = deque()  # out here, for the controller to take before anything else
        self._suspects: dict[str, tuple[Failed, float]] = {}  # whose error may follow from another's end -> until when

    def launch(self, transport_dir: Path, run_id: str, cluster: Cluster | None) -> None:
        """Start children, let groups join, connect. Waits for all to announce their ports.

        Children have `deadline_s` each for that, groups on other machines the `join_timeout_s` of `cluster`.
        """
        channels, deadline_s = self.pipeline.all_channels, self.config.deadline_s
        self._loading_s = self._told_s = self._clock.now_s()
        book: AddressBook = LocalAddresses(channels, transport_dir)
        self._transport_dir, self._run_id = transport_dir, run_id
        if cluster is not None:
            place = MeetingPlace(cluster, self.pipeline, lease_s=self.config.lease_s, deadline_s=deadline_s)
            book, self._place = place.addresses(transport_dir), place
            generator = self.config.generator
            place.open(
                self.run_dir,
                run_id,
                delta=generator.delta,
                relays=generator.relays,
                started_s=self._clock.now_s(),
            )
            self._note(f"the controller listens at {place.address}")
        inline = [node for node in self.pipeline.nodes if node.host == "inline"]
        with repeated(self._tell_of_loading, every_s=TELL_EVERY_S / 4):  # each of these may block for long
            for node in self.pipeline.nodes:
                if node.host == "process":
                    self._start(node)
            ports = connect_by_book(channels, [CONTROLLER, *(node.name for node in inline)], book, incarnation=1)
            self._ports = ports[CONTROLLER]
            self._inline = [Host(node, ports[node.name], channels, self.run_dir, run_id=run_id) for node in inline]
            with self._spans.span("idle"):  # of the controller: what goes on meanwhile is in their own timelines
                for host in self._inline:
                    host.init()

    @property
    def missing(self) -> list[str]:
        """Return the executors of those the run starts with that have not said yet that they are ready."""
        awaited = {member for node in self.pipeline.nodes if not node.joins_later for member in node.members}
        return sorted(awaited - self.ready)

    def send(self, executor: str, message: Message) -> None:
        """Send `message` to a group of processes. One that has ended is lost, and `message` with it."""
        try:
            self._ports.outputs[f"to-{executor}"].put(message)
        except ChannelClosed:
            if executor not in self._membership:
                raise
            if self._membership.is_remote(executor):
                self._lose_remote(executor)
            # Of a child the operating system tells.

    def together(self) -> Turn:
        """Return a context: messages that are sent inside leave together at its end."""
        return self._ports.together()

    def receive(self) -> Message | None:
        """Return the next event, or None. Of joins and losses, only the loss of a replica is returned."""
        while (message := self._next()) is not None:
            if isinstance(message, Counters):
                self._serving.add(message.executor)
            else:
                self.heard_s = self._clock.now_s()
            match message:
                case (
                    CompletionsFinished(finished=(CompletionFinished(replica=replica), *_))
                    | Swapped(replica=replica)
                    | CompletionFinished(replica=replica)
                ) if self._membership.is_absent(f"generator-{replica}"):
                    pass  # last words of a replica that was lost
                case Joined():
                    self._changed(self._membership.joined(message, self._ports))
                case Failed():
                    self._failed(message)
                case Swapped():
                    self._committed.add(message.replica)
                    return message
                case Left(executor=name) if self._membership.is_remote(name) and replica_of(name) is not None:
                    self._lose_remote(name, how="has left")
                case _Gone():
                    self._lost(message.members)
                case Ready():
                    self.ready.add(message.executor)
                    self._told_s = self._clock.now_s()
                    return message
                case _:
                    return message
        return None

    def work(self) -> bool:
        """Do what is to be done in this process: steps of executors inside it, signs of life, burials and restarts.

        Processes that have given no sign of life for too long are shut out. False: there was nothing to do.
        """
        has_worked = False
        if self._inline:
            with self._spans.span("idle"):
                for host in self._inline:
                    has_worked |= host.step()
        has_worked |= self._bury()
        self._tell_of_loading()
        for name in self._silent():
            has_worked = True
            self._lose_silent(name)
        for group in self._restarts.take_due():
            has_worked = True
            self._start_again(self._nodes[group])
        now_s = self._clock.now_s()
        for group in [group for group, end_s in self._coming.items() if end_s <= now_s]:
            has_worked = True
            self._lose(group, f"not there {self._patience.start_s:g} s after it was started")
        return has_worked

    def sleep(self, asleep: Callable[[], AbstractContextManager[None]]) -> None:
        """Sleep until there may be an event or work, a second at most. `asleep` is as in `core.channel.wait`.

        A process that was stopped meanwhile (Ctrl-Z, `docker pause`) has heard nobody, and waits anew.
        """
        if self._found:
            return
        inboxes = [*self._ports.inputs.values(), *(i for host in self._inline for i in host.ports.inputs.values())]
        fds = [child.pidfd for name, child in self._children.items() if name not in self._suspects]
        fds += [fd for host in self._inline for fd in host.executor.wait_fds()]
        ends = [s for host in self._inline if (s := host.executor.wait_s()) is not None]
        now_s = self._clock.now_s()
        ends += [max(0.0, end_s - now_s) for _, end_s in self._suspects.values()]
        ends += [WAKE_EVERY_S, self._membership.wait_s(), self._restarts.wait_s()]
        awaited = [outbox for outbox in self._ports.outputs.values() if not outbox.is_quiet]  # few of a large fleet's
        wait(inboxes, awaited, fds, min(ends), asleep=asleep)
        stopped_s = self._clock.now_s() - now_s - min(ends)
        if stopped_s > self.config.lease_s / 2:  # leases begin anew by themselves (`Lease.listens`)
            self.heard_s = self._clock.now_s()
            self._coming = {group: end_s + stopped_s for group, end_s in self._coming.items()}

    def check_deadline(self, what: str, waited_s: float, waits_for: str) -> None:
        """Raise SlipstreamError where there was no event for `deadline_s` of `waited_s`, and no process is to blame.

        The controller waits for `what`, the trainer for `waits_for`. While processes start, vLLM may take its time.
        """
        silent_s = min(waited_s, self._clock.now_s() - self.heard_s)
        missing = self.missing if silent_s > self.config.deadline_s else []
        limit_s = self._patience.start_s if missing else self.config.deadline_s
        if silent_s <= limit_s or self.accuse_the_silent():
            return
        raise SlipstreamError(
            f"nothing happened for {silent_s:.0f} s while waiting for {what}",
            got=f"not ready: {', '.join(missing)}" if missing else f"the trainer waits for {waits_for}",
            allowed=f"deadline_s = {self.config.deadline_s:g}" + (f"; {limit_s:g} s to start" if missing else ""),
            hint=f"see {self.run_dir / 'logs'}; raise deadline_s if a single step takes longer",
        )

    def accuse_the_silent(self) -> bool:
        """The run does not go on: shut out the process that is silent for longest, at least a lease; else False."""
        name = self._membership.most_silent()
        return name is not None and self._lose_silent(name)

    def end(self, hear: Callable[[Message], None], *, is_failed: bool, is_at_once: bool = False) -> None:
        """Stop all executors, wait for them, kill those that do not end. Runs after errors too.

        `hear` gets the last events. After a failure nobody is given time to do so, and other machines are told by their
        leases; `is_at_once`: nor to close what it has open.
        """
        with contextlib.ExitStack() as ends:  # each is closed whatever the others do
            ends.callback(self._kill_children)
            if is_at_once:
                self._kill_children()
            for host in reversed(self._inline):
                ends.callback(host.close)
            ends.callback(self._end_children)
            for child in self._children.values():
                ends.callback(child.let_go)
            for child in self._children.values():
                if not child.has_ended and child.name in self.ready and RANK_MARK not in child.name:
                    with contextlib.suppress(SlipstreamError):
                        self.send(child.name, Stop())
            if is_failed:
                return
            for name in self._membership.remote_present:
                with contextlib.suppress(SlipstreamError):
                    self.send(name, Stop())
            told = [child for child in self._children.values() if child.name in self.ready]  # others are starting
            for who in (None, *told):
                self._take_last_words(who, hear)
            for host in self._inline:
                self._stop_inline(host, hear)

    def close(self) -> None:
        """Close the executors' ports and the controller's."""
        with contextlib.ExitStack() as ends:
            for ports in (*(host.ports for host in self._inline), self._ports):
                ends.callback(ports.close)

    def _tell_of_loading(self) -> None:
        """Say every `TELL_EVERY_S` which processes have not loaded yet; not of groups elsewhere that are not there."""
        now_s = self._clock.now_s()
        if now_s - self._told_s < TELL_EVERY_S:
            return
        self._told_s = now_s
        there = self._membership
        gone = {name for name in self.missing if there.is_remote(name) and there.is_absent(name)}
        missing = [name for name in self.missing if name not in self._serving | gone]
        if not missing:
            return
        more = f" and {len(missing) - MAX_NAMED} more" if len(missing) > MAX_NAMED else ""
        self._note(f"loading: {', '.join(missing[:MAX_NAMED])}{more}, {now_s - self._loading_s:.0f} s")

    def _next(self) -> Message | _Gone | None:
        return self._found.popleft() if self._found else self._ports.inputs["events"].get_nowait()

    # Silence

    def keep_in_touch(self) -> None:
        """Give signs of life while the controller waits for something that is no event, such as the next prompts."""
        self._silent()  # whoever is, still is when the controller goes on
        self.heard_s = self._clock.now_s()

    def _silent(self) -> list[str]:
        """Give a sign of life when one is due; return the processes that have given none for too long."""
        if self._membership.wait_s() > 0.0:  # `check` has no work
            return []
        patience = {
            name: self._patience.of(self._nodes[split_rank_name(name)[0]], is_ready=name in self.ready)
            for name in self._children
        }
        return self._membership.check(self._ports, busy=self._busy(), patience=patience)

    def _busy(self) -> list[str]:
        """Return the processes of other machines that may be busy for longer than a lease."""
        return [
            name
            for name in self.pipeline.members
            if self._membership.is_remote(name) and (name not in self.ready or replica_of(name) is None)
        ]

    # Errors and losses

    def _failed(self, message: Failed) -> None:
        """Take an executor's error, which ends the run, unless it may follow from the end of another process."""
        name, replica = message.executor, replica_of(message.executor)
        is_remote = self._membership.is_remote(name)
        if is_remote and replica is not None and (message.may_follow or not self._blames_weights(replica, message)):
            self._note(f"{name} failed: {message.error}")
            self._lose_remote(name)
        elif message.may_follow and (is_remote or name in self._children):
            self._suspects.setdefault(name, (message, self._clock.now_s() + CAUSE_DEADLINE_S))
        else:
            raise self._error(message)

    def _blames_weights(self, replica: int, message: Failed) -> bool:
        """Return whether every replica would report this error: else the fault may be that of its machine."""
        kind = message.error.partition(":")[0]
        if kind == NotReproducedError.__name__:
            return replica in self._committed or not self._committed  # else a newcomer cannot do what others can
        return kind == NonFiniteError.__name__

    def _bury(self) -> bool:
        """Handle a child that has ended, causes before consequences; return whether there was one.

        A process that only gave up because of another is left until that one is found, for `CAUSE_DEADLINE_S` at most.
        On another machine that may be a rank that ended without a word, or the network: the group is lost, unless all
        its ranks have spoken and one of them names another error.
        """
        ended = [name for name, child in self._children.items() if child.has_ended]
        if ended and any(name not in self._suspects for name in ended):
            self._drain()  # it may have said why
        for name in ended:
            if name in self._children and name not in self._suspects:
                self._lose(name, self._children[name].how_it_ended, has_ended=True)
                return True
        now_s = self._clock.now_s()
        for message, end_s in self._suspects.values():
            if end_s <= now_s and self._membership.is_remote(message.executor):
                group = split_rank_name(message.executor)[0]
                said = [self._suspects[name][0] for name in self._nodes[group].members if name in self._suspects]
                own = next((one for one in said if _is_own(one.error)), None)
                if own is not None and len(said) == len(self._nodes[group].members):
                    raise self._error(own)
                hint = "the logs of its ranks say why; `--resume` goes on from the last checkpoint"
                raise ExecutorLost(f"'{group}' was lost", executor=group, got=message.error, hint=hint)
            if end_s <= now_s:
                raise self._error(message)
        return False

    def _error(self, message: Failed) -> ExecutorDied:
        log = self.run_dir / "logs" / f"{message.executor}.log"
        return ExecutorDied(f"'{message.executor}' failed", got=message.error, hint=f"see {log}")

    def _drain(self) -> None:
        """Take all messages sent so far before a process is declared lost."""
        while (message := self._ports.inputs["events"].get_nowait()) is not None:
            if isinstance(message, Failed):
                self._failed(message)
            else:
                self._found.append(message)

    def _lose(self, executor: str, why: str, *, has_ended: bool = False) -> None:
        """`executor`, a child, has ended by itself or is taken for dead: kill its group; start it again or give up."""
        group = split_rank_name(executor)[0]
        node = self._nodes[group]
        tail = self._children[executor].log_tail() if executor in self._children else ""
        with self._spans.span("replace"):
            for member in node.members:
                if (child := self._children.pop(member, None)) is not None:
                    child.kill()
                self._suspects.pop(member, None)
        self._coming.pop(group, None)
        self._spans.instant("lost", executor=executor, why=why)
        what = f"the process of '{executor}' ended" if has_ended else f"'{executor}' was lost"
        if not node.is_replaceable:
            raise ExecutorLost(what, executor=group, got=why, hint=tail or f"nothing in {executor}.log")
        self._forget(group, node.members, self._membership.lost(group, self._ports))
        delay_s = self._restarts.plan(group)
        if delay_s is None:
            times = self._restarts.max_restarts
            raise ExecutorDied(
                f"{what}: '{group}' was lost {plural(times + 1, 'time')}",
                got=why,
                allowed=f"max_restarts = {times}",
                hint=tail or f"nothing in {executor}.log",
            )
        left = self._restarts.left(group)
        self._note(
            f"{executor} was lost: {why}. {group} is started again in {delay_s:g} s;"
            f" {plural(left, 'restart')} of it left{_indented(tail)}"
        )
        self.heard_s = self._clock.now_s()
        while self._suspects:  # that was their cause
            self._lose(next(iter(self._suspects)), f"gave up because of {executor}")

    def _lose_silent(self, executor: str) -> bool:
        """Shut out a silent process; False for a child that has been lost meanwhile, with another of its group."""
        if self._membership.is_remote(executor):
            self._lose_remote(executor)
        elif executor in self._children:
            self._lose(executor, f"silent for {self._membership.silence_s(executor):.0f} s")
        else:
            return False
        return True

    def _lose_remote(self, executor: str, *, how: str = "was lost") -> None:
        self._changed(self._membership.lost(executor, self._ports), how)

    def _changed(self, changes: Sequence[Change], how: str = "was lost") -> None:
        """Take joins and losses. A lost generator may come back; any other loss ends the attempt (ExecutorLost)."""
        for change in changes:
            if not change.is_lost:
                self._coming.pop(change.group, None)
                for member in change.members:
                    self._suspects.pop(member, None)
                self._spans.instant("joined", executor=change.group, incarnation=change.incarnation)
                self._note(f"{change.group} has joined (incarnation {change.incarnation})")
                continue
            self._spans.instant("lost", executor=change.group)
            if replica_of(change.group) is None:
                raise ExecutorLost(
                    f"'{change.group}' was lost: silent for {self.config.lease_s:g} s, or started again",
                    executor=change.group,
                    hint="its own log says why; `--resume` goes on from the last checkpoint",
                )
            self._note(f"{change.group} {how}; its unfinished groups go elsewhere")
            if self._place is not None and self._nodes[change.group].joins_later:
                self._place.free(change.group, change.incarnation)
            self._forget(change.group, change.members, [change])

    def _forget(self, group: str, members: Sequence[str], changes: Collection[Change]) -> None:
        """Forget processes that are gone; the schedule is told of a replica that was there."""
        self.ready.difference_update(members)
        self._serving.difference_update(members)
        self._loading_s = self._told_s = self._clock.now_s()
        self._found.append(_Gone(tuple(members)))
        replica = replica_of(group)
        if replica is not None:
            self._committed.discard(replica)
        if replica is not None and changes:
            self._found.append(ReplicaLost(replica=replica))

    # Children

    def _start(self, node: Node) -> None:
        incarnation = self._incarnations[node.name]
        for rank, member in enumerate(node.members):
            self._children[member] = Child.start(
                node,
                rank,
                self.pipeline.all_channels,
                run_dir=self.run_dir,
                transport_dir=self._transport_dir,
                run_id=self._run_id,
                incarnation=incarnation,
                incarnations=self._membership.incarnations | dict.fromkeys(node.members, incarnation),
                deadline_s=self.config.deadline_s,
                place=self._place,
            )
        if incarnation == 1:
            self._membership.watch(node.members)

    def _start_again(self, node: Node) -> None:
        """Start `node` once more. It joins when it is ready; nothing waits for it meanwhile."""
        self._incarnations[node.name] += 1
        self._coming[node.name] = self._clock.now_s() + self._patience.start_s
        self._spans.instant("started again", executor=node.name, incarnation=self._incarnations[node.name])
        with self._spans.span("replace"):
            self._start(node)

    def _end_children(self) -> None:
        deadline_s = self._clock.now_s() + LET_GO_DEADLINE_S
        for name, child in list(self._children.items()):
            child.end(max(0.0, deadline_s - self._clock.now_s()))
            del self._children[name]

    def _kill_children(self) -> None:
        """Kill the children that are still there: after a second interrupt, or where one cut their end short."""
        for child in self._children.values():
            child.kill()
        self._children.clear()

    def _take_last_words(self, child: Child | None, hear: Callable[[Message], None]) -> None:
        """Wait for a child that was told to stop, or (None) all groups on other machines; hear their messages."""
        fds = [] if child is None else [child.pidfd]
        deadline_s = self._clock.now_s() + STOP_DEADLINE_S
        while self._clock.now_s() < deadline_s and (
            self._membership.remote_present if child is None else not child.has_ended
        ):
            wait(self._ports.inputs.values(), self._ports.outputs.values(), fds, WAKE_EVERY_S)
            while (message := self._ports.inputs["events"].get_nowait()) is not None:
                hear(message)
                if isinstance(message, Left):
                    self._membership.left(message.executor)

    def _stop_inline(self, host: Host, hear: Callable[[Message], None]) -> None:
        """Let an executor of this process stop, as the others do, and hear its last messages."""
        with contextlib.suppress(SlipstreamError):
            self.send(host.name, Stop())
            for _ in range(STEPS_TO_STOP):
                host.step()
                while (message := self._ports.inputs["events"].get_nowait()) is not None:
                    hear(message)
                if host.executor.is_finished:
                    break


def _is_own(error: str) -> bool:
    """Return whether an error that may follow from another's end is none of a channel, a collective or gloo.

    PyTorch has the same class for those of gloo as for many others.
    """
    return error.startswith("RuntimeError:") and "gloo" not in error


def _indented(tail: str) -> str:
    """Return the last lines of a log, to stand below a note."""
    return "".join(f"\n    {line}" for line in tail.splitlines()[-3:])
