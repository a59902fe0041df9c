"""The living replicas of the generator, by version and load, in the order in which the schedule asks for them. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Callable, KeysView


class Replicas:
    """The version that each replica samples from, and its load: completions that it was given and has not finished.

    Kept in order for each version, so that no event costs a look at every replica, whichever versions may start.
    """

    def __init__(self) -> None:
        self.versions: dict[int, int] = {}
        self._load: dict[int, int] = {}
        self._by_load: dict[int, list[tuple[int, int]]] = {}  # version -> ascending: load, replica; never empty

    @property
    def held(self) -> KeysView[int]:
        """The versions that replicas hold."""
        return self._by_load.keys()

    def hold(self, replica: int, version: int) -> None:
        """Note that `replica` holds `version`; it never goes back to an older one."""
        load = self._load.get(replica, 0)
        if replica in self.versions:
            version = max(version, self.versions[replica])
            self._take_out(replica)
        self.versions[replica] = version
        self._load[replica] = load
        bisect.insort(self._by_load.setdefault(version, []), (load, replica))

    def remove(self, replica: int) -> None:
        """Forget `replica`, which is there."""
        self._take_out(replica)
        del self.versions[replica]

    def _take_out(self, replica: int) -> None:
        version, load = self.versions[replica], self._load.pop(replica)
        ordered = self._by_load[version]
        del ordered[bisect.bisect_left(ordered, (load, replica))]
        if not ordered:
            del self._by_load[version]

    def give(self, replica: int, count: int) -> None:
        """Add `count` completions to the load of `replica`."""
        ordered, load = self._by_load[self.versions[replica]], self._load[replica]
        del ordered[bisect.bisect_left(ordered, (load, replica))]
        bisect.insort(ordered, (load + count, replica))
        self._load[replica] = load + count

    def least_loaded(self, most: int, may_start: Callable[[int], bool]) -> int | None:
        """Return the replica with the least load, of equals the freshest, then the first; or None.

        Its load is at most `most`, and its version one that `may_start`.
        """
        first = [(*ordered[0], -version) for version, ordered in self._by_load.items() if ordered[0][0] <= most]
        able = [(load, minus_version, replica) for load, replica, minus_version in first if may_start(-minus_version)]
        return min(able)[2] if able else None
