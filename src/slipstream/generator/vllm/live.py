"""The completions that are in vLLM: what is known of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from slipstream.core.types import VersionSpan
from slipstream.generator.requests import Request, Resume


@dataclass(eq=False)
class LiveCompletion:
    """A completion in vLLM: every token so far. `first` is the index of its present job's first token.

    `version` is that of its next token, where versions stay side by side.
    """

    request: Request
    started_s: float
    first: int
    version: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, request: Request, now_s: float, version: int) -> LiveCompletion:
        """Return the completion of `request`, with the tokens that it is resumed after."""
        resume = request.resume
        if resume is None:
            return cls(request, now_s, 0, version)
        ends = [*(span.start for span in resume.version_spans[1:]), len(resume.tokens)]
        versions = [
            span.version
            for span, end in zip(resume.version_spans, ends, strict=bool(resume.version_spans))
            for _ in range(span.start, end)
        ]
        tokens, logprobs = resume.tokens.tolist(), resume.logprobs.tolist()
        return cls(request, resume.started_s, len(tokens), version, tokens, logprobs, versions)

    @property
    def resume(self) -> Resume:
        return Resume(
            tokens=np.array(self.tokens, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            version_spans=spans_of(self.versions),
            started_s=self.started_s,
        )

    @property
    def num_known(self) -> int:
        """Tokens of context and completion together."""
        return len(self.request.prompt_tokens) + len(self.tokens)

    @property
    def end_s(self) -> float | None:
        """When the completion is out of time, on the engine's clock; never before its first token."""
        limit_s = self.request.time_limit_s
        return None if limit_s is None or not self.tokens else self.started_s + limit_s


def spans_of(versions: Sequence[int]) -> tuple[VersionSpan, ...]:
    """The versions [T] of single tokens as spans."""
    starts = [i for i, version in enumerate(versions) if i == 0 or versions[i - 1] != version]
    return tuple(VersionSpan(start=start, version=versions[start]) for start in starts)
