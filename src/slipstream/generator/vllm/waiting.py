"""The requests that wait for a room in vLLM: their order, and which of them pass a pause of admission."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace

from slipstream.generator.requests import Request, Session


class WaitingRequests:
    """Requests by stream, in the order of our own engine: resumed ones, then further turns of episodes, then new ones.

    While `is_paused`, only resumed ones, and further turns of episodes that have begun (`Request.goes_on`; not with
    `holds_turns`), may start.
    """

    def __init__(self, streams: Collection[int]) -> None:
        self.is_paused = self.holds_turns = False
        self._queues: dict[int, deque[Request]] = {stream: deque() for stream in streams}

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    @property
    def num_begun(self) -> int:
        """Resumed ones."""
        return len(self.begun)

    @property
    def begun(self) -> list[Request]:
        return [request for queue in self._queues.values() for request in queue if request.resume is not None]

    @property
    def resumed_versions(self) -> set[int]:
        """The versions of the last tokens of those that are to be resumed."""
        waiting = itertools.chain.from_iterable(self._queues.values())
        return {one.resume.version_spans[-1].version for one in waiting if one.resume and one.resume.version_spans}

    def add(self, requests: Sequence[Request]) -> None:
        """Queue `requests` in this order, each behind those of its kind; resumed ones before all that wait."""
        for request in requests:
            assert request.stream in self._queues, f"no room was given to stream {request.stream}"
            if request.resume is None:
                self._insert(request)
        for request in reversed(requests):
            if request.resume is not None:
                self._queues[request.stream].appendleft(request)

    def take(self, stream: int, count: int) -> list[Request]:
        """Take out the next requests of `stream` that may start, `count` at most."""
        queue = self._queues[stream]
        turns_go = not self.holds_turns
        may_start = (one for one in queue if not self.is_paused or one.resume is not None or (turns_go and one.goes_on))
        taken = list(itertools.islice(may_start, max(0, count)))
        for request in taken:
            queue.remove(request)
        return taken

    def let_go_on(self, session: Session) -> None:
        """Let the other branches of an episode that has begun go before what is new, also while paused."""
        queue = self._queues[session.stream]
        held = [one for one in queue if one.parks and not one.goes_on and one.session[:3] == session[:3]]
        for request in held:
            queue.remove(request)
            self.add([replace(request, goes_on=True)])

    def stop_parking(self, session: Session) -> None:
        """Let the requests of `session` leave nothing for a next turn: its episode has ended."""
        queue = self._queues[session.stream]
        for place, request in enumerate(queue):
            if request.parks and request.session == session:
                queue[place] = replace(request, parks=False)

    def _insert(self, request: Request) -> None:
        queue = self._queues[request.stream]
        if request.goes_on:
            new = (place for place, one in enumerate(queue) if one.resume is None and not one.goes_on)
            queue.insert(next(new, len(queue)), request)
        else:
            queue.append(request)
