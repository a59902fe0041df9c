"""Training prompts of a data set that is read while the run goes on: bounded memory, and no size known beforehand."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np

from slipstream.core.errors import ConfigError, SlipstreamError
from slipstream.core.types import Prompt

KEPT = 4096
"""Prompts that are kept after they were given: a group that starts again asks for one of the last ordinals."""
READ_WITHIN_S = 600.0
"""For the next rows: longer than the library that fetches them tries again by itself."""
TELL_EVERY_S = 0.2
_BUFFER_KEY = 0x42756666

Batches = Callable[[], Iterator[list[Prompt]]]
"""Begins to read the data set anew."""


class StreamedPrompts:
    """Endless passes over what `batches` reads, shuffled by a buffer; the ordinal is all the state there is.

    A pass fills `buffer` places in the order of the data. Its draw d takes the place that Philox, keyed by (seed, pass,
    d), says, and the next row fills it; when no row is left, the last place does. So the prompt of an ordinal is a pure
    function of data, seed and ordinal, and a resumed run has the same. It reads again up to there: at most one whole
    pass, which tells how long passes are, and a part of one. The next rows are read in a thread meanwhile.
    Identity: each pass gives every prompt exactly once; a buffer of one keeps the order.
    """

    def __init__(self, batches: Batches, seed: int, buffer: int) -> None:
        self._batches, self._seed, self._size = batches, seed, buffer
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="prompt-stream")
        self._kept: OrderedDict[int, Prompt] = OrderedDict()
        self._length: int | None = None  # of a pass, once one has ended
        self.while_waiting: Callable[[], None] = lambda: None
        """Called again and again while the next rows do not come."""
        self._begin(0, 0)
        if not self._buffer:
            raise ConfigError("there are no training prompts", got="0 prompts", hint="see prompts.max_prompt_tokens")
        self._sample = list(self._buffer)

    def __len__(self) -> int:
        """Return how many prompts are known: those of a pass, or, before one has ended, of the first buffer."""
        return self._length or len(self._sample)

    @property
    def prompts(self) -> list[Prompt]:
        """Return the first prompts, as far as the buffer holds them, to try things with."""
        return self._sample

    def prompt(self, ordinal: int) -> Prompt:
        """Return the prompt of group `ordinal` (>= 0)."""
        if ordinal < 0:
            raise IndexError(f"ordinals start at 0, got {ordinal}")
        if ordinal not in self._kept:
            if ordinal < self._next:
                self._begin(0, 0)
            while self._next <= ordinal:
                if self._length is not None and (number := ordinal // self._length) > self._pass:
                    self._begin(number, number * self._length)
                self._draw()
        return self._kept[ordinal]

    def _begin(self, number: int, ordinal: int) -> None:
        """Begin pass `number`, whose first prompt is that of `ordinal`."""
        self._pass, self._first, self._next = number, ordinal, ordinal
        self._rows = self._batches()
        self._waiting: list[Prompt] = []
        self._ahead: Future[list[Prompt] | None] | None = self._reader.submit(next, self._rows, None)
        self._buffer: list[Prompt] = []
        self._random = np.random.Philox(np.random.SeedSequence((self._seed, number, _BUFFER_KEY)))
        while len(self._buffer) < self._size and (row := self._row()) is not None:
            self._buffer.append(row)

    def _row(self) -> Prompt | None:
        """Return the next prompt of the pass, or None at its end."""
        while not self._waiting and self._ahead is not None:
            end_s = time.monotonic() + READ_WITHIN_S
            while not wait([self._ahead], TELL_EVERY_S).done:
                self.while_waiting()
                if time.monotonic() >= end_s:
                    got = f"nothing within {READ_WITHIN_S:g} s, after {self._next} prompts"
                    hint = "is its source reachable? A resume goes on with the same prompt"
                    raise SlipstreamError("the next rows of the data set have not come", got=got, hint=hint)
            batch = self._ahead.result()
            self._waiting = [] if batch is None else batch[::-1]
            self._ahead = None if batch is None else self._reader.submit(next, self._rows, None)
        return self._waiting.pop() if self._waiting else None

    def _draw(self) -> None:
        if not self._buffer:
            self._length = self._next - self._first
            self._begin(self._pass + 1, self._next)
        place = int(self._random.random_raw()) % len(self._buffer)
        self._kept[self._next] = self._buffer[place]
        self._next += 1
        last = self._row() or self._buffer.pop()
        if place < len(self._buffer):
            self._buffer[place] = last
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
