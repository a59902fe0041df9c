"""A generator that plays scripted completions: the engine's interface without a model, for tests and the simulator."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.core.clock import Clock, WallClock
from slipstream.core.types import VersionSpan
from slipstream.generator.requests import (
    Finished,
    KvOnUpdate,
    Request,
    Resume,
    Session,
    check_request,
    extended_spans,
)

Script = Callable[[Request], Sequence[int]]


@dataclass(eq=False)
class _Playing:
    request: Request
    script: list[int]
    num_new: int
    logprobs: list[float]
    version_spans: list[VersionSpan]
    started_s: float


class ScriptedGenerator:
    """Plays `script(request)` at one token per step and live request; the same calls as `Engine`.

    A script that ends within `max_new_tokens` finishes with "stop" (its last token stands for the stop token), a longer
    one is cut and finishes with "length". Every token carries `logprob`. `script` must depend on the request's identity
    alone, since a resumed request is asked for again.
    """

    def __init__(
        self,
        script: Script,
        *,
        num_slots: int,
        max_len: int = 1 << 20,
        version: int = 0,
        logprob: float = -1.0,
        clock: Clock | None = None,
    ) -> None:
        self.version = version
        self.max_len = max_len
        self.num_generated_tokens = 0
        self.num_re_prefilled = 0  # it makes no keys and values at all
        self.session_counts: dict[str, int] = {}
        self._script = script
        self._num_slots = num_slots
        self._logprob = logprob
        self._clock = clock if clock is not None else WallClock()
        self._is_paused = self._holds_turns = False
        self._waiting: deque[Request] = deque()
        self._playing: list[_Playing] = []

    @property
    def num_live(self) -> int:
        return len(self._playing)

    @property
    def num_begun(self) -> int:
        return len(self._playing) + sum(request.resume is not None for request in self._waiting)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_idle(self) -> bool:
        return not self._playing and not self._waiting

    @property
    def has_work(self) -> bool:
        return bool(self._playing) or self._may_start

    @property
    def _may_start(self) -> bool:
        if not self._waiting or not self._is_paused:
            return bool(self._waiting)
        return self._waiting[0].resume is not None or (self._waiting[0].goes_on and not self._holds_turns)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue `requests`; resumed ones and further turns go before everything that has not started."""
        for request in requests:
            check_request(request, max_len=self.max_len)
        ahead = [request for request in requests if request.resume is not None or request.goes_on]
        self._waiting.extend(request for request in requests if request.resume is None and not request.goes_on)
        self._waiting.extendleft(reversed(ahead))

    def pause_admission(self, is_paused: bool, *, holds_turns: bool = False) -> None:
        """While paused nothing new starts; what has begun goes on, further turns of episodes not with `holds_turns`."""
        self._is_paused, self._holds_turns = is_paused, holds_turns

    def step(self) -> list[Finished]:
        """Start what fits, play one token of every live request, return what finished."""
        now_s = self._clock.now_s()
        while self._may_start and len(self._playing) < self._num_slots:
            self._playing.append(self._start(self._waiting.popleft(), now_s))
        finished, still_playing = [], []
        for playing in self._playing:
            playing.num_new += 1
            playing.logprobs.append(self._logprob)
            self.num_generated_tokens += 1
            is_complete = playing.num_new == len(playing.script)
            if is_complete or playing.num_new == playing.request.max_new_tokens:
                finished.append(
                    Finished(
                        request=playing.request,
                        tokens=np.array(playing.script[: playing.num_new], dtype=np.int32),
                        logprobs=np.array(playing.logprobs, dtype=np.float32),
                        version_spans=tuple(playing.version_spans),
                        finish_reason="stop" if is_complete else "length",
                        started_s=playing.started_s,
                        finished_s=now_s,
                    )
                )
            else:
                still_playing.append(playing)
        self._playing = still_playing
        return finished

    def set_version(
        self,
        version: int,
        *,
        kv_on_update: KvOnUpdate = "keep",
        max_kv_age: int = 0,
    ) -> None:
        """Tokens from here on are stamped with `version`."""
        self.version = version
        for playing in self._playing:
            playing.version_spans = extended_spans(playing.version_spans, start=playing.num_new, version=version)

    def begun(self) -> list[Request]:
        """Every request that has tokens, as `submit` could resume it; by ordinal and sample."""
        requests = [
            playing.request.resumed_with(
                Resume(
                    tokens=np.array(playing.script[: playing.num_new], dtype=np.int32),
                    logprobs=np.array(playing.logprobs, dtype=np.float32),
                    version_spans=tuple(span for span in playing.version_spans if span.start < playing.num_new),
                    started_s=playing.started_s,
                )
            )
            for playing in self._playing
        ]
        return sorted(requests, key=lambda request: (request.stream, request.ordinal, request.sample))

    def export_live(self) -> list[Request]:
        """Take every live request out, resumable by `submit`; by ordinal and sample."""
        exported = self.begun()
        self._playing = []
        return exported

    def release(self, session: Session) -> None:
        """Nothing is kept between turns."""

    def let_go_on(self, session: Session) -> None:
        """Nothing waits for a pause that an episode's branches may not wait for."""

    def _start(self, request: Request, now_s: float) -> _Playing:
        script = list(self._script(request))
        if not script:
            raise ValueError(f"the script of ordinal {request.ordinal} sample {request.sample} has no token")
        resume = request.resume
        if resume is None:
            return _Playing(request, script, 0, [], [VersionSpan(start=0, version=self.version)], now_s)
        num_new = len(resume.tokens)
        spans = extended_spans(list(resume.version_spans), start=num_new, version=self.version)
        return _Playing(request, script, num_new, resume.logprobs.tolist(), spans, resume.started_s)
