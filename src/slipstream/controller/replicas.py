"""The living replicas of the generator, by version and load, in the order in which the schedule asks for them. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Callable, KeysView


class Replicas:
    """The version that each replica samples from, and its load: completions that it was given and has not finished.

    Kept in order, so that no event costs a look at every replica.
    """

    def __init__(self) -> None:
        self.versions: dict[int, int] = {}
        self._load: dict[int, int] = {}
        self._by_load: list[tuple[int, int, int]] = []  # ascending: load, -version, replica
        self._num_holding: dict[int, int] = {}  # version -> replicas

    @property
    def held(self) -> KeysView[int]:
        """The versions that replicas hold."""
        return self._num_holding.keys()

    def hold(self, replica: int, version: int) -> None:
        """Note that `replica` holds `version`; it never goes back to an older one."""
        load = self._load.get(replica, 0)
        if replica in self.versions:
            version = max(version, self.versions[replica])
            self._take_out(replica)
        self.versions[replica] = version
        self._load[replica] = load
        self._num_holding[version] = self._num_holding.get(version, 0) + 1
        bisect.insort(self._by_load, (load, -version, replica))

    def remove(self, replica: int) -> None:
        """Forget `replica`, which is there."""
        self._take_out(replica)
        del self.versions[replica]

    def _take_out(self, replica: int) -> None:
        version, load = self.versions[replica], self._load.pop(replica)
        del self._by_load[bisect.bisect_left(self._by_load, (load, -version, replica))]
        self._num_holding[version] -= 1
        if not self._num_holding[version]:
            del self._num_holding[version]

    def give(self, replica: int, count: int) -> None:
        """Add `count` completions to the load of `replica`."""
        by_load, version, load = self._by_load, self.versions[replica], self._load[replica]
        del by_load[bisect.bisect_left(by_load, (load, -version, replica))]
        bisect.insort(by_load, (load + count, -version, replica))
        self._load[replica] = load + count

    def least_loaded(self, most: int, may_start: Callable[[int], bool]) -> int | None:
        """Return the replica with the least load, of equals the freshest, then the first; or None.

        Its load is at most `most`, and its version one that `may_start`.
        """
        refused: set[int] = set()
        for load, minus_version, replica in self._by_load:
            if load > most:
                return None
            if minus_version in refused:
                continue
            if may_start(-minus_version):
                return replica
            refused.add(minus_version)
            if len(refused) == len(self._num_holding):
                return None
        return None
