"""The rows of an engine: what it remembers of each completion that is being decoded."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

import numpy as np

from slipstream.core.types import FinishReason, VersionSpan
from slipstream.generator.requests import Finished, KeptSets, Request, Resume, Session, extended_spans


@dataclass(eq=False)
class Live:
    """The part of a row's state that no step touches. `kv_version` is that of its oldest key."""

    request: Request
    version_spans: list[VersionSpan]
    started_s: float
    kv_version: int
    kept: list[np.ndarray] | None  # the kept set of each token, int32 [count]


@dataclass(eq=False)
class Rows:
    """The state of every row. Numpy arrays, so that a step costs few small operations."""

    is_live: np.ndarray  # bool [rows]
    num_new: np.ndarray  # int64 [rows]: tokens sampled so far
    max_new: np.ndarray  # int64 [rows]
    ends_s: np.ndarray  # float64 [rows]: when its time is over
    starts: np.ndarray  # int64 [rows]: counts up with every start; the largest is the youngest
    tokens: np.ndarray  # int32 [rows, max_len]
    logprobs: np.ndarray  # float32 [rows, max_len]
    live: list[Live | None] = field(default_factory=list)
    num_starts: int = 0

    @classmethod
    def empty(cls, num_rows: int, max_len: int) -> Rows:
        return cls(
            is_live=np.zeros(num_rows, dtype=bool),
            num_new=np.zeros(num_rows, dtype=np.int64),
            max_new=np.ones(num_rows, dtype=np.int64),
            ends_s=np.full(num_rows, np.inf),
            starts=np.zeros(num_rows, dtype=np.int64),
            tokens=np.zeros((num_rows, max_len), dtype=np.int32),
            logprobs=np.zeros((num_rows, max_len), dtype=np.float32),
            live=[None] * num_rows,
        )

    @property
    def num_live(self) -> int:
        return int(np.count_nonzero(self.is_live))

    @property
    def live_rows(self) -> list[int]:
        """The indices of live rows, ascending."""
        rows: list[int] = np.flatnonzero(self.is_live).tolist()
        return rows

    @property
    def versions(self) -> set[int]:
        """Those that live rows go on with."""
        return {self.live_at(row).version_spans[-1].version for row in self.live_rows}

    def live_at(self, row: int) -> Live:
        live = self.live[row]
        assert live is not None, f"row {row} is not live"
        return live

    def start(self, row: int, request: Request, *, version: int, kv_version: int, now_s: float) -> None:
        """Let `row` go on with `request` under the weights of `version`; the oldest of its keys is of `kv_version`."""
        resume = request.resume
        num_new, spans, started_s = 0, [], now_s
        if resume is not None:
            num_new, spans, started_s = len(resume.tokens), list(resume.version_spans), resume.started_s
            self.tokens[row, :num_new] = resume.tokens
            self.logprobs[row, :num_new] = resume.logprobs
        spans = extended_spans(spans, start=num_new, version=version)
        kept = None
        if request.keep_sets:
            kept = [] if resume is None or resume.kept is None else resume.kept.rows()
        self.live[row] = Live(request, spans, started_s, kv_version, kept)
        self.is_live[row] = True
        self.num_new[row] = num_new
        self.max_new[row] = request.max_new_tokens
        self.ends_s[row] = np.inf if request.time_limit_s is None else started_s + request.time_limit_s
        self.starts[row] = self.num_starts
        self.num_starts += 1

    def go_on_with(self, version: int) -> None:
        """Note that the next token of every live row is sampled by `version`."""
        for row in self.live_rows:
            live = self.live_at(row)
            live.version_spans = extended_spans(live.version_spans, start=int(self.num_new[row]), version=version)

    def stop_parking(self, session: Session) -> None:
        """Let the live rows of `session` no longer park."""
        for row in self.live_rows:
            live = self.live_at(row)
            if live.request.session == session:
                live.request = replace(live.request, parks=False)

    def known_tokens(self, row: int) -> np.ndarray:
        """int32 [n]: the prompt in `row`, and what it has sampled behind it."""
        prompt = self.live_at(row).request.prompt_tokens.astype(np.int32)
        return np.concatenate([prompt, self.tokens[row, : self.num_new[row]]])

    def append(self, rows: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray, kept: np.ndarray | None) -> None:
        """Add a token to each of `rows`, int64 [N]; `tokens` and `logprobs` are [N], `kept` as in `runner.Decoded`."""
        places = self.num_new[rows]
        self.tokens[rows, places] = tokens
        self.logprobs[rows, places] = logprobs
        self.num_new[rows] = places + 1
        if kept is not None:
            for row in rows.tolist():
                if (sets := self.live_at(row).kept) is not None:
                    sets.append(kept[row][kept[row] >= 0])  # a copy: the runner may use the array again

    def ended(self, rows: np.ndarray, is_stop: np.ndarray, now_s: float) -> list[tuple[int, FinishReason]]:
        """Return those of `rows`, int64 [N], that end with their last token, and why; `is_stop`, bool [N], is of it."""
        is_full = self.num_new[rows] == self.max_new[rows]
        ended: list[tuple[int, FinishReason]] = []
        for index in np.flatnonzero(is_stop | is_full | (self.ends_s[rows] <= now_s)).tolist():
            ended.append((int(rows[index]), "stop" if is_stop[index] else "length" if is_full[index] else "deadline"))
        return ended

    def resumable(self, row: int, routes: np.ndarray | None = None) -> Request:
        """Return the request that continues the completion in `row`, which has `routes`, here or elsewhere."""
        live, num_new = self.live_at(row), int(self.num_new[row])
        resume = Resume(
            tokens=self.tokens[row, :num_new].copy(),
            logprobs=self.logprobs[row, :num_new].copy(),
            version_spans=tuple(span for span in live.version_spans if span.start < num_new),
            started_s=live.started_s,
            kept=None if live.kept is None else KeptSets.of_rows(live.kept),
            routes=_first_routes(live.request.resume, routes),
        )
        return live.request.resumed_with(resume)

    def finished(self, row: int, reason: FinishReason, now_s: float, routes: np.ndarray | None = None) -> Finished:
        """Return the completion in `row`, which has ended for `reason`."""
        live, num_new = self.live_at(row), self.num_new[row]
        return Finished(
            request=live.request,
            tokens=self.tokens[row, :num_new].copy(),
            logprobs=self.logprobs[row, :num_new].copy(),
            version_spans=tuple(live.version_spans),
            finish_reason=reason,
            started_s=live.started_s,
            finished_s=now_s,
            kept=None if live.kept is None else KeptSets.of_rows(live.kept),
            routes=_first_routes(live.request.resume, routes),
        )

    def close(self, rows: list[int]) -> None:
        """Free these rows."""
        self.is_live[rows] = False
        for row in rows:
            self.live[row] = None

    def move(self, sources: list[int], destinations: list[int]) -> None:
        """Move what is in `sources` to `destinations`, which are free."""
        for each in fields(self):
            values = getattr(self, each.name)
            if isinstance(values, np.ndarray):
                values[destinations] = values[sources]
        for source, destination in zip(sources, destinations, strict=True):
            self.live[destination], self.live[source] = self.live[source], None
        self.is_live[sources] = False


def _first_routes(resume: Resume | None, routes: np.ndarray | None) -> np.ndarray | None:
    """Return the `routes` of a row, but of tokens that were sampled before those that they were sampled with.

    Their keys were made again, for which the last layer's experts are not computed.
    """
    if routes is not None and resume is not None and resume.routes is not None:
        first, again = resume.routes, routes[: len(resume.routes)]
        np.copyto(again, first[: len(again)], where=first[: len(again)] < np.iinfo(first.dtype).max)
    return routes
