"""Channels: typed, bounded, closable; a deadline on every wait; one behaviour inside a process and between processes.

A channel joins an output port to an input port. Channels that share an output port fan out (`BROADCAST`, `SCATTER`,
`WEIGHTS`), channels that share an input port fan in (`GATHER`). `connect_by_book` makes the ports of the executors of a
process: channels between them are queues, all others ZeroMQ sockets at the addresses of a book (`core/addresses.py`),
with keys (`core/keys.py`) across machines. `connect` and `connect_local` are its two simplest cases.

Back-pressure is end to end: a message counts against its channel's capacity until the receiver has taken it.

A connection that breaks restores itself and loses nothing. When an executor dies, its peers are told to `shut_out` its
incarnation, and to `rejoin` the next one when it has announced itself.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.core.addresses import AddressBook, LocalAddresses
from slipstream.core.channel_spec import ROUTES, ChannelSpec, Kind, executor_of
from slipstream.core.clock import WallClock
from slipstream.core.errors import ChannelClosed, ChannelError
from slipstream.core.lease import Lease
from slipstream.core.links import poll
from slipstream.core.ports import Inbox, Outbox, Turn
from slipstream.core.scratch import FOLDER_PREFIX, socket_directory

_CLOCK = WallClock()


@dataclass(frozen=True)
class Ports:
    """The ends that an executor gets from its host, by port name."""

    inputs: Mapping[str, Inbox] = field(default_factory=dict)
    outputs: Mapping[str, Outbox] = field(default_factory=dict)
    turn: Turn = field(default_factory=Turn)

    def together(self) -> Turn:
        """Return a context: messages that are put inside leave together at its end."""
        return self.turn

    @property
    def _ends(self) -> list[Inbox | Outbox]:
        return [*self.inputs.values(), *self.outputs.values()]

    def shut_out(self, executor: str, incarnation: int) -> None:
        """Take nothing more from `executor`, which is dead or taken for dead, of this incarnation and earlier ones.

        Messages for it and messages from it that wait here are dropped. Broadcasts pass it by; a message for it alone
        is ChannelClosed.
        """
        for outbox in self.outputs.values():
            outbox.disconnect(executor)
        for inbox in self.inputs.values():
            inbox.fence(executor, incarnation + 1)

    def rejoin(self, executor: str, incarnation: int) -> None:
        """Exchange messages with `executor` as `incarnation` from now on; refuse earlier incarnations.

        Waits until it has announced its addresses (ChannelTimeout). Does nothing where it is connected already.
        """
        for inbox in self.inputs.values():
            inbox.fence(executor, incarnation)
        for outbox in self.outputs.values():
            outbox.reconnect(executor, incarnation)

    def beat(self) -> None:
        """Send a sign of life to all targets, which they answer: both sides hear of each other."""
        for outbox in self.outputs.values():
            outbox.beat()

    def hear(self, lease: Lease, *, busy: Collection[str] = ()) -> None:
        """Tell `lease` which executors have sent or answered anything since the last call.

        An executor answers when it reads its ports, so it is silent for the length of one of its steps. For those in
        `busy` it is enough that their process is connected.
        """
        heard = [end.heard_s for end in self._ends]
        now_s = _CLOCK.now_s()  # the lease may have another clock
        for name, heard_s in (item for end in heard for item in end.items()):
            lease.heard(name, ago_s=now_s - heard_s)
        for outbox in self.outputs.values():
            for name in outbox.connected.intersection(busy):
                lease.heard(name)

    def refusals(self) -> dict[str, float]:
        """Return the counts of refusals above 0 (`ChannelStats`): 'refused_frames/port' and 'refused_peers/port'."""
        counters = {}
        for end in self._ends:
            end.pump()
            counters[f"refused_frames/{end.port}"] = float(end.stats.refused)
            counters[f"refused_peers/{end.port}"] = float(end.stats.refused_peers)
        return {name: count for name, count in counters.items() if count}

    def close(self) -> None:
        for outbox in self.outputs.values():
            outbox.close()
        for inbox in self.inputs.values():
            inbox.close()


def connect(specs: Sequence[ChannelSpec], executor: str, transport_dir: Path, incarnation: int) -> Ports:
    """Return the ports of an executor that has this process to itself; the other executors are on this machine."""
    book = LocalAddresses(specs, transport_dir)
    return connect_by_book(specs, [executor], book, incarnation)[executor]


def connect_local(specs: Sequence[ChannelSpec], *, is_threaded: bool = False) -> dict[str, Ports]:
    """Return the ports of every executor of `specs`, all in this process."""
    hosted = {executor_of(port) for spec in specs for port in (spec.source, spec.target)}
    return connect_by_book(specs, hosted, LocalAddresses(specs, None), 0, is_threaded=is_threaded)


def connect_by_book(
    specs: Sequence[ChannelSpec],
    hosted: Collection[str],
    book: AddressBook,
    incarnation: int,
    *,
    is_threaded: bool = False,
) -> dict[str, Ports]:
    """Return the ports of the executors `hosted` by this process; the others listen where `book` says.

    Binds and announces the ports of this process first and then waits for the addresses of those that it puts to: the
    processes of a run may start in any order. ChannelTimeout names one that does not come. Every process must be given
    the same `specs`. The controller grants `incarnation`, which grows with every restart. `is_threaded`: executors of
    this process run in threads, so a full local channel can be waited for; else it is a ChannelTimeout at once.
    """
    fan_outs, fan_ins = _by(specs, lambda spec: spec.source), _by(specs, lambda spec: spec.target)
    _check(specs, fan_outs)
    inboxes: dict[str, Inbox] = {}
    outboxes: dict[str, Outbox] = {}
    turns = {executor: Turn() for executor in hosted}
    with contextlib.ExitStack() as opened:
        for port, fan_in in fan_ins.items():
            if executor_of(port) in hosted:
                is_remote = any(executor_of(spec.source) not in hosted for spec in fan_in)
                inboxes[port] = Inbox(port, fan_in, book if is_remote else None, incarnation)
                opened.callback(inboxes[port].close)
        for executor in hosted:
            bound = {port: inbox.addresses for port, inbox in inboxes.items() if executor_of(port) == executor}
            book.announce(executor, incarnation, bound)
        for port, fan_out in fan_outs.items():
            if executor_of(port) in hosted:
                route = ROUTES[fan_out[0].route] if fan_out[0].kind is Kind.SCATTER else None
                outboxes[port] = Outbox(
                    port,
                    fan_out,
                    inboxes,
                    book,
                    incarnation,
                    route=route,
                    is_threaded=is_threaded,
                    turn=turns[executor_of(port)],
                )
                opened.callback(outboxes[port].close)
        opened.pop_all()
    return {
        executor: Ports(
            inputs={port.split(".")[1]: inbox for port, inbox in inboxes.items() if executor_of(port) == executor},
            outputs={port.split(".")[1]: outbox for port, outbox in outboxes.items() if executor_of(port) == executor},
            turn=turns[executor],
        )
        for executor in hosted
    }


def wait(
    receivers: Iterable[Inbox],
    senders: Iterable[Outbox] = (),
    extra_fds: Iterable[int] = (),
    timeout_s: float | None = None,
    *,
    held: Collection[Inbox] = (),
    asleep: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> bool:
    """Sleep until there is something to do; False when `timeout_s` passed first.

    Unblocked by: a message at a receiver, room at a sender whose `has_room_for` said no, a readable descriptor, a
    closed end. Meanwhile messages leave, acknowledgements are read and given, and what a broken connection lost is sent
    again. Of receivers that are `held` nothing is taken now: a message there ends no wait. Only the sleep itself is
    inside the context that `asleep` returns: all around it is work.
    """
    receivers, senders, extra_fds = list(receivers), list(senders), list(extra_fds)
    ends: list[Inbox | Outbox] = [*receivers, *senders]
    deadline_s = None if timeout_s is None else _CLOCK.now_s() + timeout_s
    with contextlib.ExitStack() as stack:
        for end in ends:
            try:
                stack.enter_context(end)
            except ChannelClosed:
                return True
        is_over = False
        while True:
            now_s = _CLOCK.now_s()
            for end in ends:
                if end.is_due(now_s):
                    end.pump()
            has_news = any(receiver.has_messages for receiver in receivers if receiver not in held)
            if has_news or any(end.is_closed for end in ends):
                return True
            if any(sender.is_relieved for sender in senders):
                return True
            if is_over:
                return False
            awaited = {pollable: end for end in ends if end not in held for pollable in end.pollables()}
            awaited |= {pollable: inbox for inbox in held for pollable in inbox.sockets}
            with asleep():
                ready = poll([*awaited, *extra_fds], None if deadline_s is None else deadline_s - _CLOCK.now_s())
            for end in {awaited[pollable] for pollable in ready if pollable in awaited}:
                end.pump()
            if any(fd in ready for fd in extra_fds):
                return True
            is_over = deadline_s is not None and _CLOCK.now_s() >= deadline_s


def make_transport_dir() -> Path:
    """Make a private directory (0700) with a path short enough for sockets; the caller removes it."""
    return Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=socket_directory()))


def _by(specs: Sequence[ChannelSpec], key: Callable[[ChannelSpec], str]) -> dict[str, list[ChannelSpec]]:
    groups: dict[str, list[ChannelSpec]] = {}
    for spec in specs:
        groups.setdefault(key(spec), []).append(spec)
    return groups


def _check(specs: Sequence[ChannelSpec], fan_outs: Mapping[str, list[ChannelSpec]]) -> None:
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        raise ChannelError("two channels have the same name", got=sorted({n for n in names if names.count(n) > 1}))
    for port, fan_out in fan_outs.items():
        kinds = {(spec.kind, spec.route) for spec in fan_out}
        if len(kinds) > 1 or (fan_out[0].kind is Kind.GATHER and len(fan_out) > 1):
            what = f"the channels from '{port}' do not fit together"
            allowed = "one kind and route per port; GATHER has one target"
            raise ChannelError(what, got=", ".join(f"{spec.name}: {spec.kind}" for spec in fan_out), allowed=allowed)
        if fan_out[0].kind is Kind.SCATTER and fan_out[0].route not in ROUTES:
            raise ChannelError.unknown(f"unknown route '{fan_out[0].route}'", fan_out[0].route, ROUTES)
