"""Leases: when each peer was last heard of, and which peers have been silent for too long.

Pure: the caller listens (`core.channel.Ports.hear`), sends signs of life (`Ports.beat`) and sleeps.

    lease = Lease(lease_s, clock)               a host watches its controller; the controller watches its executors
    lease.watch("controller")
    loop:
        if lease.is_beat_due():
            ports.beat()                        a frame to every peer, which answers: both hear of each other
        ports.hear(lease)
        lease.listens()                         after a stop of this process all leases begin anew
        if lease.silent():                      end, or fence them
        wait(..., timeout_s=lease.wait_s())     until the next beat or the next end of a lease at most
"""

from __future__ import annotations

from slipstream.core.clock import Clock

BEATS_PER_LEASE = 4


class Lease:
    """The watched peers; each may be silent for `lease_s` seconds, or for as long as `allow` says.

    A watcher that was itself stopped could hear of no peer meanwhile. So it calls `listens` each time that it has
    listened; when the last call is too long ago, all leases begin anew.
    """

    def __init__(self, lease_s: float, clock: Clock) -> None:
        self.lease_s = lease_s
        self._clock = clock
        self._heard_s: dict[str, float] = {}
        self._allowed_s: dict[str, float] = {}
        self._beat_s = -float("inf")
        self._listened_s = clock.now_s()
        self._next_s = -float("inf")  # of `wait_s`; a sign of life only makes it later

    def watch(self, name: str) -> None:
        """Begin the lease of `name` now (again, after a restart)."""
        self._heard_s[name] = self._clock.now_s()
        self._next_s = -float("inf")

    def forget(self, name: str) -> None:
        self._heard_s.pop(name, None)
        self._allowed_s.pop(name, None)
        self._next_s = -float("inf")

    def allow(self, name: str, silence_s: float) -> None:
        """Let `name` be silent for `silence_s` seconds from now on."""
        self._allowed_s[name] = silence_s
        self._next_s = -float("inf")

    def listens(self) -> None:
        """Note that the watcher is awake and has read its ports. Called at least twice in every lease."""
        now_s = self._clock.now_s()
        if now_s - self._listened_s > self.lease_s / 2:
            self._heard_s = dict.fromkeys(self._heard_s, now_s)
        self._listened_s = now_s

    def heard(self, name: str, *, ago_s: float = 0.0) -> None:
        """Note a sign of life of `name`, `ago_s` seconds ago; ignored where `name` is not watched."""
        if name in self._heard_s:
            self._heard_s[name] = max(self._heard_s[name], self._clock.now_s() - ago_s)

    @property
    def watched(self) -> tuple[str, ...]:
        return tuple(self._heard_s)

    def silent(self) -> list[str]:
        """Return the peers whose lease has ended, the longest silent first."""
        now_s = self._clock.now_s()
        return sorted((n for n in self._heard_s if self._ends_s(n) <= now_s), key=lambda n: (self._heard_s[n], n))

    def silence_s(self, name: str) -> float:
        """Return the seconds since `name` was last heard of."""
        return self._clock.now_s() - self._heard_s[name]

    def is_beat_due(self) -> bool:
        """Return True BEATS_PER_LEASE times in every lease; the caller beats then."""
        now_s = self._clock.now_s()
        if now_s - self._beat_s < self.lease_s / BEATS_PER_LEASE:
            return False
        self._beat_s = now_s
        return True

    def wait_s(self) -> float:
        """Return the seconds until the next beat is due or the next lease ends; at least 0."""
        now_s = self._clock.now_s()
        if self._next_s <= now_s:
            self._next_s = min([self._beat_s + self.lease_s / BEATS_PER_LEASE, *map(self._ends_s, self._heard_s)])
        return max(0.0, self._next_s - now_s)

    def _ends_s(self, name: str) -> float:
        return self._heard_s[name] + self._allowed_s.get(name, self.lease_s)
