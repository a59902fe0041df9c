"""Completions and episodes across a resume: saved as far as they are at a checkpoint, gone on with afterwards.

Why the staleness bound holds for them. A group that a checkpoint owes was admitted before it, by the admission rule, on
a replica of version v with d drops known below it: all its tokens are of versions >= v, and the step that trains it is
n <= floor((o - d + W - 1) / P) (`controller/schedule.py`). The snapshot has these drops, none is ever taken back, and
the training rule is the same after the resume: so n - v <= k for the tokens that are restored as well. They are of
versions up to the checkpoint's, which are of its lineage, and no replica holds an older one afterwards: they ascend.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from slipstream.core.clock import Clock
from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.saved import prompt_crc32
from slipstream.core.types import Completion, Prompt
from slipstream.core.unfinished_messages import Partial, PartialEpisode, Unfinished
from slipstream.generator.requests import Finished, KeptSets, Request, Resume, check_request, segment_of

log = logging.getLogger(__name__)


def partial_of(request: Request) -> Partial:
    """Return the message that holds what a resumed `request` has sampled so far."""
    assert request.resume is not None, "it has begun"
    return Partial(
        ordinal=request.ordinal,
        sample=request.sample,
        prompt_crc32=prompt_crc32(request.prompt_tokens),
        segment=segment_of(request.resume),
    )


def partial_of_finished(completion: Completion, row: Prompt) -> Unfinished:
    """Return the message that holds a `completion` of the prompt `row` which waits for its verdict."""
    if completion.episode is not None:
        return PartialEpisode(
            ordinal=completion.ordinal,
            sample=completion.sample,
            prompt_crc32=prompt_crc32(row.tokens),
            segments=completion.segments,
            record=completion.episode,
            prompt=completion.prompt,
            finish_reason=completion.finish_reason,
        )
    (segment,) = completion.segments
    return Partial(
        ordinal=completion.ordinal,
        sample=completion.sample,
        prompt_crc32=prompt_crc32(row.tokens),
        segment=segment,
        finish_reason=completion.finish_reason,
    )


class Continued:
    """The saved completions that a generator continues, and the tokens that each has brought."""

    def __init__(self, config: RunConfig, *, max_len: int, clock: Clock) -> None:
        self._max_len, self._clock = max_len, clock
        self._mixes_turns = config.mixes_turns
        self._spans_versions = config.weight_update == "in_flight" or config.generator.segment_tokens is not None
        self._keeps_bits = config.max_staleness == 0
        self._restored: dict[tuple[int, int], tuple[int, int]] = {}

    def split(
        self, requests: Sequence[Request], partials: Sequence[Unfinished], version: int
    ) -> tuple[list[Request], list[Finished]]:
        """Divide `requests` of one group into those to decode, continued where a partial fits, and those finished."""
        saved = {partial.sample: partial for partial in partials if isinstance(partial, Partial)}
        to_decode: list[Request] = []
        finished: list[Finished] = []
        for request in requests:
            partial = saved.get(request.sample)
            if partial is None or not self.fits(partial, request, version):
                to_decode.append(request)
            elif partial.finish_reason is None:
                to_decode.append(self.resumed(partial, request))
            else:
                finished.append(self.finished(partial, request))
        return to_decode, finished

    def fits(self, partial: Partial, request: Request, version: int) -> bool:
        """Whether `request` may go on from `partial` under weights of `version`.

        With `between_batches` no completion spans versions: one that was begun under an older one is sampled again. So
        is each that has not ended at staleness 0, where a run has the bits of one that nothing has cut off: the cache
        of tokens that are read at once has other bits than that of tokens which were decoded one by one.
        """
        segment = partial.segment
        if partial.prompt_crc32 != prompt_crc32(request.prompt_tokens) or segment.behaviour_logprobs is None:
            return False
        versions = partial.versions
        if not versions or max(versions) > version:
            return False
        if partial.finish_reason is not None:
            return True
        if self._keeps_bits or (not self._spans_versions and versions != {version}):
            return False
        try:
            check_request(request.resumed_with(self._resume(partial)), max_len=self._max_len)
        except ConfigError as error:
            log.warning("ordinal %d is sampled again: %s", partial.ordinal, error)
            return False
        return True

    def episode(self, request: Request, partials: Sequence[Unfinished], version: int) -> PartialEpisode | None:
        """Return the episode from which `request` may go on under weights of `version`, which is no older than its own;
        where an episode has one version, the same."""
        for one in partials:
            if not isinstance(one, PartialEpisode) or one.sample != request.sample or not one.versions:
                continue
            if one.prompt_crc32 != prompt_crc32(request.prompt_tokens) or max(one.versions) > version:
                continue
            if one.state is None or self._mixes_turns or one.versions == {version}:
                return one
        return None

    def resumed(self, partial: Partial, request: Request) -> Request:
        self._note(partial)
        return request.resumed_with(self._resume(partial))

    def finished(self, partial: Partial, request: Request) -> Finished:
        self._note(partial)
        resume = self._resume(partial)
        assert partial.finish_reason is not None
        return Finished(
            request=request,
            tokens=resume.tokens,
            logprobs=resume.logprobs,
            version_spans=resume.version_spans,
            finish_reason=partial.finish_reason,
            started_s=resume.started_s,
            finished_s=resume.started_s,
            kept=resume.kept,
            routes=resume.routes,
        )

    def _note(self, partial: Partial) -> None:
        self._restored[partial.ordinal, partial.sample] = len(partial.segment.tokens), partial.handed_over_by

    def take(self, ordinal: int, sample: int) -> tuple[int, int]:
        """Return the number of this completion's tokens that were not sampled here, and the replica that handed it
        over, or -1; asked once, when it leaves."""
        return self._restored.pop((ordinal, sample), (0, -1))

    def _resume(self, partial: Partial) -> Resume:
        """Its time begins anew: the clock that it was begun by may be another machine's."""
        segment = partial.segment
        assert segment.behaviour_logprobs is not None
        kept = None
        if segment.kept_tokens is not None and segment.kept_counts is not None:
            kept = KeptSets(segment.kept_tokens, segment.kept_counts)
        now_s, routes = self._clock.now_s(), segment.routes
        return Resume(segment.tokens, segment.behaviour_logprobs, segment.version_spans, now_s, kept, routes)
