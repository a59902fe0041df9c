"""The process group of a link between machines: gloo, and NCCL where both ends have their versions on GPUs."""

from __future__ import annotations

import contextlib
import enum
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from slipstream.core import wire
from slipstream.core.errors import ChannelError, WeightSyncError
from slipstream.core.peer_messages import Holding, LinkMember, WeightsLinked
from slipstream.weight_sync.copying import Memory
from slipstream.weight_sync.device_memory import DeviceMemory
from slipstream.weight_sync.nccl import Pair, PairTransfer
from slipstream.weight_sync.resharding import Place, ReshardPlan, make_plan

_c10d: Any = dist  # whose stubs leave out stores and backends


class Tag(enum.IntEnum):
    """The kinds of messages."""

    REQUEST = 0
    HEADER = 1
    PAYLOAD = 2
    READY = 3  # to receive a payload over NCCL
    CLOSING = 4  # never sent


_ARRIVED = len(Tag)  # added to the tag of what has arrived
_MOST_UNDER_WAY = 8  # messages to one peer that nobody has waited for yet
_NOTHING = torch.zeros(1, dtype=torch.float32)


@dataclass(frozen=True)
class Ends:
    """The part that all links of a process share: c10d's store, the address of this process, the bound of waits, and
    the memory of its versions."""

    store: Any  # torch.distributed.Store
    hostname: str
    place: Place
    timeout: timedelta
    memory: Memory

    @property
    def has_pairs(self) -> bool:
        """Whether buckets go over NCCL, between pairs of GPUs."""
        return self.memory.device.type == "cuda"


class _Sent:
    """A message that has arrived when the receiver says so.

    gloo's own word would not do: a send that waits in its queue is not told when the connection breaks or is closed
    (`Pair::signalException` passes over unbound buffers; docs/log.md). Every receive is.
    """

    def __init__(self, work: Any, echo: Any) -> None:
        self._work: Any = work  # gloo drops what nobody holds, and all that is queued behind it stays
        self._echo = echo

    def wait(self, timeout: timedelta) -> None:
        """Raises RuntimeError when the link has broken, or takes too long."""
        if self._work is not None:
            self._echo.wait(timeout)
            self._work = None


@dataclass(frozen=True)
class _Arriving:
    """A message that is to come; `wait` tells the sender that it is here."""

    group: LinkGroup
    source: int
    tag: Tag
    work: Any

    def wait(self, timeout: timedelta) -> None:
        """Raises RuntimeError when the link has broken, or takes too long."""
        self.work.wait(timeout)
        with contextlib.suppress(RuntimeError):  # the message is here, whatever happens to the link
            self.group.say(self.source, self.tag + _ARRIVED)


class LinkGroup:
    """The process group of a link: sources, then the replica's ranks. What is in buckets lies in `memory`, all else on
    the CPU. `send` and `receive` return what can be waited for; that raises RuntimeError when the link has broken."""

    def __init__(self, ends: Ends, linked: WeightsLinked, rank: int) -> None:
        self.ends, self.rank = ends, rank
        self.num_sources, self.size = linked.sources, linked.sources + linked.world
        self.store = _c10d.PrefixStore(f"weights/{linked.replica}/{linked.epoch}", ends.store.clone())
        self.store.set_timeout(ends.timeout)
        options = _c10d.ProcessGroupGloo._Options()
        options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=ends.hostname)]
        options._timeout = ends.timeout
        self.gloo: Any = _c10d.ProcessGroupGloo(_c10d.PrefixStore("gloo", self.store), rank, self.size, options)
        self._pairs: dict[int, Pair] = {}
        # Of each peer, used by the one thread that talks with it.
        self._under_way: dict[int, deque[_Sent]] = defaultdict(deque)
        self._said: dict[int, deque[Any]] = defaultdict(lambda: deque(maxlen=2 * _MOST_UNDER_WAY))

    def agree(self, holding: Holding) -> ReshardPlan:
        """The plan that all ranks of the link have made.

        Raises WeightSyncError when they differ, and for what cannot be: others may have written to the store.
        """
        place = self.ends.place
        mine = LinkMember(holding=holding, host=place.host, device=place.device)
        self.store.set(f"member/{self.rank}", wire.encode(mine))
        told = [self.store.get(f"member/{rank}") for rank in range(self.size)]
        plan = plan_of(told, mine, self.rank, self.num_sources)
        self.store.set(f"plan/{self.rank}", f"{plan.hash:x}")
        others = [self.store.get(f"plan/{rank}").decode(errors="replace") for rank in range(self.size)]
        if others != [f"{plan.hash:x}"] * self.size:
            raise WeightSyncError(
                "the ends of a link have made different plans", got=others, hint="do both run the same version of this?"
            )
        return plan

    def connect(self, peer: int) -> None:
        """Before the first bucket: source and destination call it in the order in which they meet."""
        if self.ends.has_pairs:
            memory = self.ends.memory
            assert isinstance(memory, DeviceMemory), "HostMemory is on no GPU"
            source, destination = min(self.rank, peer), max(self.rank, peer)  # sources come first
            store = _c10d.PrefixStore(f"nccl/{source}/{destination}", self.store)
            self._pairs[peer] = Pair(store, memory, is_source=source == self.rank, timeout=self.ends.timeout)

    def send(self, tensor: torch.Tensor, to: int, tag: Tag) -> _Sent | PairTransfer:
        if tag != Tag.PAYLOAD or to not in self._pairs:
            under_way = self._under_way[to]
            while len(under_way) == _MOST_UNDER_WAY:
                under_way.popleft().wait(self.ends.timeout)
            echo = self.gloo.recv([torch.zeros(1)], to, tag + _ARRIVED)
            under_way.append(_Sent(self.gloo.send([tensor], to, tag), echo))
            return under_way[-1]
        self.gloo.recv([torch.zeros(1)], to, Tag.READY).wait(self.ends.timeout)
        return self._pairs[to].send(tensor)

    def receive(self, tensor: torch.Tensor, source: int, tag: Tag) -> _Arriving | PairTransfer:
        if tag != Tag.PAYLOAD or source not in self._pairs:
            return _Arriving(self, source, tag, self.gloo.recv([tensor], source, tag))
        work = self._pairs[source].receive(tensor)
        self.say(source, Tag.READY)
        return work

    def say(self, to: int, tag: int) -> None:
        """Send a message without content, which nobody waits for. It is held until later ones show that it has gone:
        a peer that has not heard of `_MOST_UNDER_WAY` messages sends no other."""
        self._said[to].append(self.gloo.send([_NOTHING], to, tag))

    def close(self) -> None:
        """End the link, and with it every wait for it, in other threads too. Idempotent."""
        for peer in range(self.size):
            if peer != self.rank:
                with contextlib.suppress(RuntimeError):
                    # gloo's `abort` ends no wait. But a wait that takes too long closes all of a group's connections;
                    # one for a peer that has closed its own fails at once, and closes none.
                    self.gloo.recv([torch.zeros(1)], peer, Tag.CLOSING).wait(timedelta(milliseconds=1))
        for pair in list(self._pairs.values()):
            pair.close()


def plan_of(told: Sequence[bytes], mine: LinkMember, rank: int, num_sources: int) -> ReshardPlan:
    """The plan from what the ranks of a link, sources first, have `told` in the store; of `rank` itself, `mine` counts.

    Raises WeightSyncError for what no rank would have told, and for a plan that reaches beyond this rank's bytes.
    """
    try:
        members = [mine if of == rank else wire.decode_one(content, LinkMember) for of, content in enumerate(told)]
        holdings = [m.holding for m in members]
        places = [Place(m.host, m.device) for m in members]
        plan = make_plan(
            holdings[:num_sources],
            holdings[num_sources:],
            source_places=places[:num_sources],
            destination_places=places[num_sources:],
        )
    except (ChannelError, ValueError, TypeError, IndexError, OverflowError, MemoryError) as error:
        raise WeightSyncError(
            "a rank of this link tells of itself what cannot be", got=f"{type(error).__name__}: {error}"
        ) from error
    for (source, destination), copies in plan.copies.items():
        extents = [copies.reads] * (source == rank) + [copies.writes] * (destination + num_sources == rank)
        if not all(copies.lie_within(mine.holding.num_bytes, extent) for extent in extents):
            raise WeightSyncError("the plan of this link reaches beyond what this rank holds", got=extents)
    return plan
