"""The engine of a served model, in a thread of its own: jobs come and go while others are decoded."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from slipstream.core.errors import ConfigError
from slipstream.generator.engine import Engine
from slipstream.generator.requests import Finished, Request

IDLE_S = 60.0
"""Longest wait of an idle engine for a job, before it waits again."""
GLANCE_EVERY = 8
"""Steps between two looks at the tokens of jobs that may end on a text."""


@dataclass(eq=False)
class DecodeJob:
    """A request with who is told of it, both in the engine's thread: of its end, and of its tokens so far.

    `on_end` is called once, with the completion or with why there is none. `on_tokens` is called every GLANCE_EVERY
    steps, or after each one if `is_followed`, int32 [n]. The request's array of prompt tokens is its own: jobs are
    known by it.
    """

    request: Request
    on_end: Callable[[Finished | Exception], None]
    on_tokens: Callable[[np.ndarray], None] | None = None
    is_followed: bool = False

    @property
    def key(self) -> int:
        return id(self.request.prompt_tokens)


class DecodeThread:
    """Steps an engine as long as there are jobs.

    Consumes: the inbox. Waits for: a job, where there is none. Unblocked by: `submit`, `withdraw`, `close`. Ends when:
    `close`, or the engine fails; `on_failure` is told then, behind all jobs. The bound on the jobs is the caller's.
    """

    def __init__(self, engine: Engine, *, on_failure: Callable[[Exception], None]) -> None:
        self._engine, self._on_failure = engine, on_failure
        self._jobs: dict[int, DecodeJob] = {}
        self._inbox = queue.SimpleQueue[Callable[[], None] | None]()
        self._steps = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="serve-engine", daemon=True)
        self._thread.start()

    def submit(self, job: DecodeJob) -> None:
        """Queue `job`. Any thread."""
        self._inbox.put(partial(self._add, job))

    def withdraw(self, job: DecodeJob) -> None:
        """End `job` with the tokens that it has, if it has not ended. Any thread."""
        self._inbox.put(partial(self._withdraw, job))

    def close(self, limit_s: float) -> None:
        """End the thread behind its present step; wait for that at most `limit_s`."""
        self._inbox.put(None)
        self._thread.join(limit_s)

    def _run(self) -> None:
        try:
            while not self._is_closed:
                self._listen()
                for finished in self._engine.step():
                    self._jobs.pop(id(finished.request.prompt_tokens)).on_end(finished)
                self._steps += 1
                if self._steps % GLANCE_EVERY == 0 or any(job.is_followed for job in self._jobs.values()):
                    self._glance()
        except Exception as error:  # noqa: BLE001 - the engine's: nothing can be decoded any more
            for job in self._jobs.values():
                job.on_end(error)
            self._on_failure(error)

    def _listen(self) -> None:
        """Do what the inbox says; wait for it where there is nothing to decode."""
        wait_s = IDLE_S if self._engine.is_idle else 0.0
        while True:
            try:
                do = self._inbox.get(timeout=wait_s)
            except queue.Empty:
                return
            if do is None:
                self._is_closed = True
                return
            do()
            wait_s = 0.0

    def _add(self, job: DecodeJob) -> None:
        try:
            self._engine.submit([job.request])
        except ConfigError as error:
            job.on_end(error)
        else:
            self._jobs[job.key] = job

    def _withdraw(self, job: DecodeJob) -> None:
        if self._jobs.pop(job.key, None) is None:
            return
        for request in self._engine.withdraw(lambda one: one.prompt_tokens is job.request.prompt_tokens):
            job.on_end(_ended(request))

    def _glance(self) -> None:
        if not any(job.on_tokens for job in self._jobs.values()):
            return
        for request in self._engine.begun():
            job = self._jobs[id(request.prompt_tokens)]
            if job.on_tokens is not None and request.resume is not None:
                job.on_tokens(request.resume.tokens)


def _ended(request: Request) -> Finished:
    """Return a request that was taken out as a completion that has ended."""
    resume = request.resume
    return Finished(
        request=request,
        tokens=np.zeros(0, dtype=np.int32) if resume is None else resume.tokens,
        logprobs=np.zeros(0, dtype=np.float32) if resume is None else resume.logprobs,
        version_spans=() if resume is None else resume.version_spans,
        finish_reason="stop",
        started_s=0.0,
        finished_s=0.0,
    )
