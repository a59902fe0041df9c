"""Evaluations inside a run: each is decoded by the version that was live when it was asked for."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from slipstream.core.sections import GeneratorConfig
from slipstream.core.service_messages import Evaluate
from slipstream.core.spans import Spans
from slipstream.core.types import Prompt
from slipstream.generator.backend import Backend, Pin
from slipstream.generator.completions import EVAL_STREAM, request_of
from slipstream.generator.episodes import EndedEpisode, Episodes
from slipstream.generator.requests import Finished, GenerationEngine, Labelled


@dataclass
class EvalJob:
    """An evaluation, the version that it is pinned to, and the engine that decodes it once it has started."""

    request: Evaluate
    pin: Pin
    remaining: int
    engine: GenerationEngine | None = None


class EvalJobs:
    """A queue of evaluations; one runs at a time. With an environment its answers are `episodes`."""

    def __init__(
        self, backend: Backend, generator: GeneratorConfig, spans: Spans, episodes: Episodes | None = None
    ) -> None:
        self._backend, self._generator, self._spans, self._episodes = backend, generator, spans, episodes
        self._jobs: deque[EvalJob] = deque()
        self._labelled = Labelled(spans, state="evaluate")

    def prepare(self) -> None:
        """Make ready at the start what is decoded with."""
        self._backend.prepare_evaluations(self._labelled)

    @property
    def engine(self) -> GenerationEngine | None:
        """The engine of the evaluation that runs, if one does."""
        return self._jobs[0].engine if self._jobs else None

    @property
    def eval_id(self) -> int:
        """The evaluation that runs; -2 for none, as a turn that nobody waits for may end after its episode."""
        return self._jobs[0].request.eval_id if self._jobs else -2

    def add(self, request: Evaluate) -> int:
        """Queue an evaluation of the version that is live now; return that."""
        job = EvalJob(request, self._backend.pin(), len(request.prompts))
        self._jobs.append(job)
        return job.pin.version

    def step(self) -> list[Finished] | None:
        """Start the oldest evaluation, or decode one step of it; None where there was nothing to do.

        An evaluation that shares the engine of training shares its steps too, and has none of its own; one whose
        environments are to answer has none now.
        """
        if not self._jobs:
            return None
        job = self._jobs[0]
        if job.engine is None:
            with self._spans.span("evaluate"):
                job.engine = self._start(job)
            return []
        return None if job.engine is self._backend.engine or job.engine.is_idle else job.engine.step()

    @staticmethod
    def is_of(ended: Finished | EndedEpisode) -> bool:
        """Whether it is an answer of an evaluation."""
        request = ended.episode.request if isinstance(ended, EndedEpisode) else ended.request
        return request.stream == EVAL_STREAM

    def take(self, item: Finished | EndedEpisode) -> tuple[Prompt, int]:
        """Count a finished answer of the running evaluation; return its prompt and the evaluation's id.

        An episode may have failed before its first token.
        """
        job = self._jobs[0]
        versions = {span.version for span in item.version_spans}
        is_empty = isinstance(item, EndedEpisode) and not versions
        assert is_empty or versions == {job.pin.version}, "not of the version it is pinned to"
        job.remaining -= 1
        if not job.remaining:
            self._jobs.popleft()
            self._backend.unpin(job.pin)
        return job.request.prompts[item.ordinal], job.request.eval_id

    def _start(self, job: EvalJob) -> GenerationEngine:
        self._labelled.version = job.pin.version
        engine = self._backend.evaluation_engine(job.pin, self._labelled)
        requests = [
            request_of(
                self._generator,
                prompt,
                ordinal=ordinal,
                max_len=self._backend.max_len,
                temperature=job.request.temperature,
                stream=EVAL_STREAM,
                is_whole=True,
            )
            for ordinal, prompt in enumerate(job.request.prompts)
        ]
        if self._episodes is None:
            engine.submit(requests)
        else:
            for request, prompt in zip(requests, job.request.prompts, strict=True):
                self._episodes.begin(request, prompt, eval_id=job.request.eval_id)
        return engine
