"""Who was heard of when, and whose silence has lasted too long.

Pure: somebody else listens (`core.channel.Ports.hear`), sends signs of life (`Ports.beat`) and sleeps.

    lease = Lease(lease_s, clock)               in a host: its controller; in the controller: its executors
    lease.watch("controller")
    loop:
        if lease.is_beat_due():
            ports.beat()                        a frame to every peer, which answers: both hear of each other
        ports.hear(lease)
        if lease.silent():                      end, or fence them
        wait(..., timeout_s=lease.wait_s())     no longer than until the next beat or the next end of a lease
"""

from __future__ import annotations

from slipstream.core.clock import Clock

BEATS_PER_LEASE = 4


class Lease:
    """The watched peers; each may be silent for `lease_s` seconds."""

    def __init__(self, lease_s: float, clock: Clock) -> None:
        self.lease_s = lease_s
        self._clock = clock
        self._heard_s: dict[str, float] = {}
        self._beat_s = -float("inf")

    def watch(self, name: str) -> None:
        """Its lease begins now (again, after a restart)."""
        self._heard_s[name] = self._clock.now_s()

    def forget(self, name: str) -> None:
        self._heard_s.pop(name, None)

    def heard(self, name: str, *, ago_s: float = 0.0) -> None:
        """A sign of life of `name`, `ago_s` seconds ago. Of one that is not watched, nothing is kept."""
        if name in self._heard_s:
            self._heard_s[name] = max(self._heard_s[name], self._clock.now_s() - ago_s)

    @property
    def watched(self) -> tuple[str, ...]:
        return tuple(self._heard_s)

    def silent(self) -> list[str]:
        """Whose lease has ended, the longest silent first."""
        limit_s = self._clock.now_s() - self.lease_s
        return sorted((n for n, s in self._heard_s.items() if s <= limit_s), key=lambda n: (self._heard_s[n], n))

    def silence_s(self, name: str) -> float:
        """Seconds since `name` was heard of."""
        return self._clock.now_s() - self._heard_s[name]

    def is_beat_due(self) -> bool:
        """True BEATS_PER_LEASE times in every lease; being told so counts as having done it."""
        now_s = self._clock.now_s()
        if now_s - self._beat_s < self.lease_s / BEATS_PER_LEASE:
            return False
        self._beat_s = now_s
        return True

    def wait_s(self) -> float:
        """Seconds until the next beat is due or the next lease ends; at least 0."""
        next_s = min(
            [self._beat_s + self.lease_s / BEATS_PER_LEASE, *(s + self.lease_s for s in self._heard_s.values())]
        )
        return max(0.0, next_s - self._clock.now_s())
