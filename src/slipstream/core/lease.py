"""Who was heard of when, and whose silence has lasted too long.

Pure: somebody else listens (`core.channel.Ports.hear`), sends signs of life (`Ports.beat`) and sleeps.

    lease = Lease(lease_s, clock)               in a host: its controller; in the controller: its executors
    lease.watch("controller")
    loop:
        if lease.is_beat_due():
            ports.beat()                        a frame to every peer, which answers: both hear of each other
        ports.hear(lease)
        lease.listens()                         one that was stopped accuses nobody of having been silent meanwhile
        if lease.silent():                      end, or fence them
        wait(..., timeout_s=lease.wait_s())     no longer than until the next beat or the next end of a lease
"""

from __future__ import annotations

from slipstream.core.clock import Clock

BEATS_PER_LEASE = 4


class Lease:
    """The watched peers; each may be silent for `lease_s` seconds, or for as long as it is allowed to be.

    A watcher that was itself stopped has heard nobody meanwhile, and must accuse nobody of it: `listens` is told each
    time that it listens, and when the last time is too long ago, all leases begin anew.
    """

    def __init__(self, lease_s: float, clock: Clock) -> None:
        self.lease_s = lease_s
        self._clock = clock
        self._heard_s: dict[str, float] = {}
        self._allowed_s: dict[str, float] = {}
        self._beat_s = -float("inf")
        self._listened_s = clock.now_s()

    def watch(self, name: str) -> None:
        """Its lease begins now (again, after a restart)."""
        self._heard_s[name] = self._clock.now_s()

    def forget(self, name: str) -> None:
        self._heard_s.pop(name, None)
        self._allowed_s.pop(name, None)

    def allow(self, name: str, silence_s: float) -> None:
        """From now on `name` may be silent for so many seconds."""
        self._allowed_s[name] = silence_s

    def listens(self) -> None:
        """Who watches is awake, and has read what there is; called at least twice in every lease."""
        now_s = self._clock.now_s()
        if now_s - self._listened_s > self.lease_s / 2:
            self._heard_s = dict.fromkeys(self._heard_s, now_s)
        self._listened_s = now_s

    def heard(self, name: str, *, ago_s: float = 0.0) -> None:
        """A sign of life of `name`, `ago_s` seconds ago. Of one that is not watched, nothing is kept."""
        if name in self._heard_s:
            self._heard_s[name] = max(self._heard_s[name], self._clock.now_s() - ago_s)

    @property
    def watched(self) -> tuple[str, ...]:
        return tuple(self._heard_s)

    def silent(self) -> list[str]:
        """Whose lease has ended, the longest silent first."""
        now_s = self._clock.now_s()
        return sorted((n for n in self._heard_s if self._ends_s(n) <= now_s), key=lambda n: (self._heard_s[n], n))

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
        next_s = min([self._beat_s + self.lease_s / BEATS_PER_LEASE, *map(self._ends_s, self._heard_s)])
        return max(0.0, next_s - self._clock.now_s())

    def _ends_s(self, name: str) -> float:
        return self._heard_s[name] + self._allowed_s.get(name, self.lease_s)
