"""A generator's end of weight sync: stage in a second buffer while decoding goes on, verify, flip between two steps."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from slipstream.core.background import start_thread
from slipstream.core.clock import WallClock
from slipstream.core.errors import NotReproducedError, WeightSyncError
from slipstream.core.executor import Receiver, Sender
from slipstream.core.links import WakeUp
from slipstream.core.peer_messages import WeightsLinked, WeightsOffered, WeightsReleased, WeightsWanted
from slipstream.core.spans import NoSpans, Spans
from slipstream.core.weights import FlatWeights, PlacedWeights, Swap
from slipstream.weight_sync.cuda_ipc import HostWantedError
from slipstream.weight_sync.reader import Fetch, OwnSlots, SegmentReader, SlotReader
from slipstream.weight_sync.relay import Shelf
from slipstream.weight_sync.slots import Transport, VersionGoneError
from slipstream.weight_sync.weight_links import Links, give_way

Probe = Callable[[np.ndarray], np.ndarray]

_CLOCK = WallClock()
_CLOSE_DEADLINE_S = 10.0
_LOG = logging.getLogger(__name__)


@dataclass
class SubscribeStats:
    """Cumulative: versions committed, released unread for a newer one, lost in transfer, refused by the probe."""

    num_committed: int = 0
    num_passed_over: int = 0
    num_failed_transfers: int = 0
    num_failed_probes: int = 0


class Staging:
    """One transfer: a version brought to the shadow buffer, verified, and prepared. `run` may be another thread's work.

    With a `probe` of prepared weights it ends with `probe_error`, the mean difference to the trainer's logprobs.
    """

    def __init__(
        self,
        offer: WeightsOffered,
        shadow: torch.Tensor,
        weights: FlatWeights,
        fetch: Fetch,
        probe: Probe | None,
        own_slots: OwnSlots | None = None,
    ) -> None:
        self.offer = offer
        self.probe_error: float | None = None
        self.error: Exception | None = WeightSyncError(f"staging version {offer.version} did not finish")
        self.is_done = threading.Event()
        self.is_void = False  # the trainer has forgotten that this is being read
        self.transfer_s = 0.0
        self.fetch, self._shadow, self._weights, self._probe = fetch, shadow, weights, probe
        self._own_slots = own_slots

    def run(self) -> None:
        started_s = _CLOCK.now_s()
        try:
            if self._own_slots is None:
                self.fetch.fetch(self.offer, self._shadow)
            else:
                self._own_slots.fetch(self.fetch, self.offer, self._shadow)
            self._weights.prepare(self._shadow)
            if self._probe is not None:
                self.probe_error = _probe_error(self._probe, self.offer)
            self.error = None
        except Exception as error:  # noqa: BLE001 - `poll` tells a transfer that failed from a fault, and raises that
            self.error = error
        self.transfer_s = _CLOCK.now_s() - started_s


class Subscriber:
    """Implements `core.weights.WeightsSubscriber`: offers come in on `offers`, releases go out on `releases`.

    Two buffers: the live one and a shadow; or one, where no live weights are read from it (`FlatWeights.reads_flat`).
    Only staging writes the shadow, and only `commit` exchanges the two, so live weights are never written. Only the
    newest offer counts: an older one that waits is released unread, and one that is staged but not committed gives way
    (`pending_version` is None meanwhile). One thread calls everything here; the staging thread touches the shadow
    buffer alone.

    `PlacedWeights` are read where they lie. Without links nothing is copied: the slots of the live version and of one
    that is ready are released when another has taken its place, so what reads them may read them again.

    One on each rank `rank` of the `world` of a replica, with channels of its own. It maps segments by `transport`; with
    `links` versions come over a link to the trainer; all ranks get another whenever a transfer over it fails at one.
    """

    def __init__(
        self,
        offers: Receiver,
        releases: Sender,
        transport: Transport,
        *,
        replica: int,
        rank: int = 0,
        world: int = 1,
        links: Links | None = None,
    ) -> None:
        self.stats = SubscribeStats()
        self.failure: WeightSyncError | None = None
        self._version = -1
        self._offers, self._releases, self._transport, self._links = offers, releases, transport, links
        self._replica, self._rank, self._world = replica, rank, world
        self._fetch: Fetch | None = None
        self._shelf: Shelf | None = None
        self._wake = WakeUp()
        self._newest_seen = -1
        self._epoch = 0  # of the link
        self._waiting: WeightsOffered | None = None
        self._staging: Staging | None = None
        self._thread: threading.Thread | None = None
        self._pending: Staging | None = None
        self._parameters: FlatWeights | None = None
        self._shadow: torch.Tensor | None = None
        self._own_slots: OwnSlots | None = None
        self._holds_slots = False
        self._live: WeightsOffered | None = None  # whose slot is held

    def open(
        self,
        parameters: FlatWeights,
        probe: Probe,
        tolerance: float,
        *,
        is_threaded: bool,
        probes_prepared: bool = False,
        spans: Spans | None = None,
    ) -> None:
        """Commits go to `parameters`; `probe` recomputes the probe text's logprobs with them, `tolerance` in nats.

        `is_threaded` stages in a background thread; else `poll` does, for a host that must be deterministic, and tells
        `spans`.
        `probes_prepared`: `probe` computes with what `prepare` was given last, so that staging does it, beside
        decoding; else with what is live, so that `commit` does it, and undoes the exchange when it fails.
        """
        if self._parameters is not None:
            raise WeightSyncError("this subscriber is open already")
        self._parameters, self._probe, self._tolerance, self._is_threaded = parameters, probe, tolerance, is_threaded
        self._probes_prepared = probes_prepared
        self._spans = NoSpans() if spans is None else spans
        if isinstance(parameters, PlacedWeights):
            self._holds_slots = self._links is None
            if not self._holds_slots:
                self._own_slots = OwnSlots(self._transport, parameters)
                parameters.flat, self._shadow = self._own_slots.buffers
        if self._shadow is None:
            flat = parameters.flat
            is_shared = self._links is None and not parameters.reads_flat  # over links it is sent on from there, too
            self._shadow = (
                flat if is_shared else torch.empty_like(flat, requires_grad=False, pin_memory=flat.is_pinned())
            )
        if isinstance(parameters, PlacedWeights) and self._holds_slots:
            self._fetch = SlotReader(self._transport, parameters)
        elif self._links is None:
            rotation = self._replica * self._world + self._rank
            self._fetch = SegmentReader(self._transport, parameters.holding, rotation=rotation)
        elif not is_threaded or parameters.holding is None:
            raise WeightSyncError("a link needs a staging thread and weights that say what they hold (`holding`)")
        else:
            self._shelf = Shelf(parameters.holding)
        self._want()

    @property
    def version(self) -> int:
        """The last version committed; -1 before the first."""
        return self._version

    @property
    def is_staging(self) -> bool:
        """A version is on its way to the shadow buffer, or being prepared there."""
        return self._staging is not None

    @property
    def pending_version(self) -> int | None:
        """A newer version that lies staged and verified, ready to commit."""
        return None if self._pending is None else self._pending.offer.version

    def poll(self) -> bool:
        """Take offers, finish a transfer, start staging the newest. True when anything happened.

        A failed transfer is counted, logged and kept in `failure`; the old version keeps running. Any other fault of
        preparing or probing is raised, whatever it was.
        """
        self._wake.clear()
        has_finished = self._finish()
        has_offer = self._take_offers()
        # A version that became ready in this call is left for one `commit` before a newer one may overwrite it.
        has_started = not has_finished and self._start()
        return has_finished or has_offer or has_started

    def commit(self) -> Swap | None:
        """Switch to the pending version between two decode steps; None when none is pending.

        Raises NotReproducedError, with the old version back in place, when the probe disagrees.
        """
        if self._pending is None or self._parameters is None or self._shadow is None:
            return None
        staged, self._pending = self._pending, None
        offer, probe_error = staged.offer, staged.probe_error
        started_s = _CLOCK.now_s()
        previous = self._parameters.flat
        was_probed, is_good = probe_error is not None, False
        if not was_probed:
            self._parameters.rebind(self._shadow)
        try:
            if probe_error is None:
                probe_error = _probe_error(self._probe, offer)
            is_good = probe_error <= self._tolerance  # False for nan
        finally:
            if not is_good:
                self.stats.num_failed_probes += 1
                if not was_probed:
                    self._parameters.rebind(previous)
                if self._holds_slots:
                    self._release(offer)
        if not is_good:
            self.failure = NotReproducedError(
                f"version {offer.version} does not reproduce the trainer's logprobs; version {self._version} runs on",
                got=f"mean difference {probe_error:.3g} nats",
                allowed=f"{self._tolerance:.3g} nats",
            )
            raise self.failure
        if was_probed:
            self._parameters.rebind(self._shadow)
        self._shadow = previous
        if self._holds_slots:
            if self._live is not None:
                self._release(self._live)
            self._live = offer
        self._version = offer.version
        self.stats.num_committed += 1
        return Swap(
            version=offer.version,
            transfer_s=staged.transfer_s,
            pause_s=_CLOCK.now_s() - started_s,
            probe_error=probe_error,
        )

    def wait_fds(self) -> list[int]:
        """Readable when a transfer has finished and `poll` has work."""
        return [self._wake.fileno()]

    def close(self) -> None:
        """Wait for the transfer in hand and let go of segments and links. Idempotent.

        One that does not end in time is left behind with what it reads and writes: the process is about to end.
        """
        if self._links is not None and self._fetch is not None:
            self._fetch.close()  # which ends a transfer that waits for the other side
        if self._thread is not None:
            self._thread.join(_CLOSE_DEADLINE_S)
            if self._thread.is_alive():
                _LOG.warning("replica %d: staging did not end within %g s", self._replica, _CLOSE_DEADLINE_S)
                return
            self._thread = None
        if self._fetch is not None:
            self._fetch.close()
        if self._links is not None:
            self._links.close()
        if self._own_slots is not None:
            self._own_slots.close()
        self._wake.close()

    def _take_offers(self) -> bool:
        took = False
        while (message := self._offers.get_nowait()) is not None:
            took = True
            if isinstance(message, WeightsLinked):
                self._link(message)
                continue
            if not isinstance(message, WeightsOffered):
                raise WeightSyncError("an offer was expected", got=type(message).__name__)
            if message.replica not in (-1, self._replica):
                continue
            if message.version in self._in_hand:
                continue  # offered again to one that has come back: it is released once, when it has been read
            if message.version <= self._newest_seen:
                self._pass_over(message)
                continue
            self._newest_seen = message.version
            if self._waiting is not None:
                self._pass_over(self._waiting)
            self._waiting = message
        return took

    @property
    def _in_hand(self) -> tuple[int, ...]:
        """Versions that are being read, or are to be read next; or whose slots are held."""
        reading = None if self._staging is None or self._staging.is_void else self._staging.offer
        pending = self._pending.offer if self._pending is not None and self._holds_slots else None
        return tuple(offer.version for offer in (reading, self._waiting, pending, self._live) if offer is not None)

    def _start(self) -> bool:
        if self._waiting is None or self._staging is not None or self._fetch is None:
            return False
        assert self._shadow is not None, "open has seen to that"
        assert self._parameters is not None
        offer, self._waiting = self._waiting, None
        if self._pending is not None:
            self.stats.num_passed_over += 1
            if self._holds_slots:
                self._release(self._pending.offer)
            self._pending = None
        probe = self._probe if self._probes_prepared else None
        self._staging = Staging(offer, self._shadow, self._parameters, self._fetch, probe, self._own_slots)
        if self._is_threaded:
            torch.get_num_threads()  # binds this thread to its number, which the other one's would replace else
            self._thread = start_thread(self._stage_aside, args=(self._staging,), name="weight-staging")
        else:
            with self._spans.span("stage"):
                self._stage(self._staging)
            self._finish()
        return True

    def _stage_aside(self, staging: Staging) -> None:
        """In a thread of its own, which gives way to decoding."""
        give_way()
        self._stage(staging)

    def _stage(self, staging: Staging) -> None:
        try:
            staging.run()
        finally:
            staging.is_done.set()
            self._wake.set()

    def _finish(self) -> bool:
        if self._staging is None or not self._staging.is_done.is_set():
            return False
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        staging, self._staging = self._staging, None
        if isinstance(staging.error, HostWantedError) and self._waiting is None:
            self._waiting = staging.offer  # and is read once more
        elif not staging.is_void and not (self._holds_slots and staging.error is None):
            self._release(staging.offer)
        if staging.error is None:
            self._pending = staging
        elif isinstance(staging.error, VersionGoneError):
            self.stats.num_passed_over += 1
        elif isinstance(staging.error, HostWantedError):
            self.stats.num_passed_over += self._waiting is not staging.offer
            self._want(in_host_memory=True)
        elif not isinstance(staging.error, WeightSyncError):
            raise staging.error
        else:
            self.stats.num_failed_transfers += 1
            self.failure = staging.error
            if self._links is not None and self._fetch is staging.fetch:
                self._fetch.close()
                self._fetch = None
                self._newest_seen = self._version  # so that what was lost may be offered again
                self._want()
            _LOG.warning("replica %d keeps version %d: %s", self._replica, self._version, staging.error)
        return True

    # The trainer

    def _want(self, *, in_host_memory: bool = False) -> None:
        self._releases.put(
            WeightsWanted(
                replica=self._replica,
                rank=self._rank,
                world=self._world,
                is_linked=self._links is not None,
                host="" if self._links is None else self._links.place.host,
                in_host_memory=in_host_memory,
                holds_slots=self._holds_slots,
                lost_epoch=self._epoch,
            )
        )

    def _link(self, linked: WeightsLinked) -> None:
        """Make a new link to this replica's source, or to a replica that is fed from here; or end the latter."""
        if self._links is None or self._shelf is None:
            return
        if linked.parent == self._replica:
            self._links.serve(linked, self._shelf, self._rank, gives_way=True)
        else:
            self._links.drop(linked.replica)
        if linked.replica != self._replica:
            return
        if linked.is_renewed:
            self._forget_offers()
        if self._fetch is not None:
            self._fetch.close()
        self._fetch = self._links.receive(linked, self._rank, self._shelf)
        self._epoch = linked.epoch

    def _forget_offers(self) -> None:
        """The trainer no longer counts on their release, and offers the last version again."""
        self._waiting = None
        if self._staging is not None:
            self._staging.is_void = True
        self._newest_seen = self._version if self._pending is None else self._pending.offer.version

    def _release(self, offer: WeightsOffered) -> None:
        self._releases.put(
            WeightsReleased(replica=self._replica, rank=self._rank, version=offer.version, slot=offer.slot)
        )

    def _pass_over(self, offer: WeightsOffered) -> None:
        self.stats.num_passed_over += 1
        self._release(offer)


def _probe_error(probe: Probe, offer: WeightsOffered) -> float:
    """mean |ours - the trainer's| logprob of the probe text in nats; inf when the shapes differ.

    The largest one is a poor judge of quantised weights: it grows with the text, and one improbable token is enough.
    """
    ours, theirs = probe(offer.probe_tokens), offer.probe_logprobs
    if ours.shape != theirs.shape:
        return float("inf")
    return float(np.abs(ours.astype(np.float64) - theirs.astype(np.float64)).mean()) if len(ours) else 0.0
