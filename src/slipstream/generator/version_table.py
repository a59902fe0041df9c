"""Versions side by side in an engine: which one each request goes on with, and which are let go."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from slipstream.generator.requests import Request, Session


class HeldVersions(Protocol):
    """Several versions at once; the newest of them is live."""

    @property
    def versions(self) -> Collection[int]: ...

    def hold(self, version: int, others: Collection[int]) -> None:
        """Hold what is live as `version`, the newest, and `others` of those held so far; forget the rest."""
        ...


class VersionTable:
    """A row goes on with the version that was the newest when it began, an episode with that of when its first turn
    was submitted, until its `release`; a version is let go when nothing goes on with it and it is not the newest.

    `begun` returns the versions that rows and waiting requests go on with. Without `residents` there is one version,
    and this table has nothing in it.
    """

    def __init__(self, residents: HeldVersions | None, begun: Callable[[], set[int]], newest: int) -> None:
        self._residents, self._begun, self._newest = residents, begun, newest
        self._of_episode: dict[tuple[int, int, int], int] = {}
        if residents is not None:
            residents.hold(newest, ())

    @property
    def in_use(self) -> set[int]:
        """The versions that rows, waiting requests and open episodes go on with."""
        return self._begun() | set(self._of_episode.values())

    def bound_to(self, request: Request) -> int | None:
        """Return the version that `request` must go on with: its episode's, or that of its tokens if it is held."""
        if self._residents is None:
            return None
        episode = request.session[:3]
        if request.parks or episode in self._of_episode:
            return self._of_episode.setdefault(episode, self._newest)
        spans = () if request.resume is None else request.resume.version_spans
        return spans[-1].version if spans and spans[-1].version in self._residents.versions else None

    def release(self, session: Session) -> None:
        """The episode is over, or begins again."""
        self._of_episode.pop(session[:3], None)

    def take(self, version: int) -> bool:
        """Hold the live weights as `version`, beside those in use; False where one version takes the other's place."""
        self._newest = version
        if self._residents is not None:
            self._residents.hold(version, self.in_use)
        return self._residents is not None

    def let_go(self) -> None:
        """Forget the versions that nothing goes on with any more."""
        if self._residents is not None and len(self._residents.versions) > 1:
            self._residents.hold(self._newest, self.in_use)
