"""Which page of memory holds whose keys and values: a pure allocator, numbers only.

Memory is cut into pages of `page_size` tokens. A *prefix* is a list of pages; the rows that are opened on it share its
full pages and get a copy each of the last one when that is only partly filled, so a page that somebody writes to has
one owner. A row that ends may hand its pages to a prefix, and a prefix to a longer one, or share its full ones with
another. A page is free again when its last owner has let go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from slipstream.core.errors import ConfigError

TRASH_PAGE = 0
"""Belongs to nobody and is never handed out: padding writes there, and unused entries of a block table point at it."""


def pages_of(num_tokens: int, page_size: int) -> int:
    """Pages that `num_tokens` tokens need."""
    return -(-num_tokens // page_size)


@dataclass(frozen=True, eq=False)
class PagedPrefix:
    """The pages of the first `num_tokens` tokens of a sequence, in order; the last may be partly filled."""

    num_tokens: int
    pages: np.ndarray  # int32 [pages_of(num_tokens)]


class PageCopies(NamedTuple):
    """The copies to make before rows may be used: page `sources[i]` to page `destinations[i]`, whole."""

    sources: list[int]
    destinations: list[int]


class PageTable:
    """Owners of `num_pages` pages: rows, by their block tables, and prefixes.

    Pages are numbered 1 to `num_pages`; page 0 is the trash page, beyond that number. Block j of row r, the tokens
    from j * page_size on, lies in page `blocks[r, j]`. Every operation either happens or says that memory is short and
    changes nothing.

    Identity: a page's references = the block tables and prefixes it occurs in, and free pages have none.
    """

    def __init__(self, *, num_pages: int, page_size: int, num_rows: int, max_len: int) -> None:
        max_blocks = pages_of(max_len, page_size)
        if num_pages < max_blocks + 1:
            raise ConfigError(
                "too few pages for the keys and values of one sequence",
                got=num_pages,
                allowed=f"at least {max_blocks + 1} of {page_size} tokens for max_len {max_len}",
                hint="give the cache more memory (generator.kv_cache_gb), or lower the longest sequence",
            )
        self.page_size = page_size
        self.num_pages = num_pages
        self.max_len = max_len
        self.blocks = np.full((num_rows, max_blocks), TRASH_PAGE, dtype=np.int32)
        self.num_blocks = np.zeros(num_rows, dtype=np.int64)
        self.lengths = np.zeros(num_rows, dtype=np.int64)  # tokens with stored keys, 0 for closed rows
        self.is_open = np.zeros(num_rows, dtype=bool)
        self.is_changed = True  # since somebody who mirrors `blocks` set it to False
        self._references = np.zeros(num_pages + 1, dtype=np.int32)
        self._free = list(range(num_pages, 0, -1))
        self._prefixes: set[PagedPrefix] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def open_prefix(self, num_tokens: int) -> PagedPrefix | None:
        """Pages for `num_tokens` >= 1 tokens, owned by nobody else; None when there are too few.

        One page more has to be free and stays so: prefixes alone never take the page that the first row needs.
        """
        assert 1 <= num_tokens < self.max_len, f"a prefix of {num_tokens} tokens, one of {self.max_len} is to follow"
        num_pages = pages_of(num_tokens, self.page_size)
        if self.num_free < num_pages + 1:
            return None
        pages = self._take(num_pages)
        assert pages is not None
        prefix = PagedPrefix(num_tokens, pages)
        self._prefixes.add(prefix)
        return prefix

    def extend_prefix(self, prefix: PagedPrefix, num_tokens: int) -> PagedPrefix | None:
        """The pages of `prefix` and more for `num_tokens` tokens in all; `prefix` is closed. None: too few pages.

        One page more has to be free, as in `open_prefix`.
        """
        assert prefix in self._prefixes, "the prefix was closed"
        assert prefix.num_tokens <= num_tokens < self.max_len, f"{prefix.num_tokens} tokens extended to {num_tokens}"
        num_more = pages_of(num_tokens, self.page_size) - len(prefix.pages)
        if self.num_free < num_more + 1:
            return None
        more = self._take(num_more)
        assert more is not None
        longer = PagedPrefix(num_tokens, np.concatenate([prefix.pages, more]))
        self._prefixes.remove(prefix)
        self._prefixes.add(longer)
        return longer

    def share_prefix(self, prefix: PagedPrefix, num_shared: int, num_tokens: int) -> PagedPrefix | None:
        """Pages for `num_tokens` tokens, of which the full ones of the first `num_shared` are those of `prefix`.

        None: too few pages. One page more has to be free, as in `open_prefix`.
        """
        assert prefix in self._prefixes, "the prefix was closed"
        assert num_shared <= min(prefix.num_tokens, num_tokens), f"{num_shared} of {prefix.num_tokens}, {num_tokens}"
        assert 1 <= num_tokens < self.max_len, f"a prefix of {num_tokens} tokens, one of {self.max_len} is to follow"
        shared = prefix.pages[: num_shared // self.page_size]
        num_own = pages_of(num_tokens, self.page_size) - len(shared)
        if self.num_free < num_own + 1:
            return None
        own = self._take(num_own)
        assert own is not None
        self._references[shared] += 1
        other = PagedPrefix(num_tokens, np.concatenate([shared, own]))
        self._prefixes.add(other)
        return other

    def close_prefix(self, prefix: PagedPrefix) -> None:
        """The prefix lets go of its pages; rows keep those they share."""
        self._prefixes.remove(prefix)
        self._release(prefix.pages)

    def open_rows(self, rows: Sequence[int], prefix: PagedPrefix | None) -> PageCopies | None:
        """Rows behind `prefix`, each with a page of its own for the next token; None when there are too few pages."""
        assert not self.is_open[list(rows)].any(), f"rows {list(rows)} are not all closed"
        assert len(set(rows)) == len(rows), f"a row occurs twice in {list(rows)}"
        assert prefix is None or prefix in self._prefixes, "the prefix was closed"
        num_tokens = 0 if prefix is None else prefix.num_tokens
        assert num_tokens < self.max_len, "no room for a token behind the prefix"
        own = self._take(len(rows))
        if own is None:
            return None
        num_full = num_tokens // self.page_size
        index = np.asarray(rows, dtype=np.int64)
        if prefix is not None:
            shared = prefix.pages[:num_full]
            self._references[shared] += len(index)
            self.blocks[index, :num_full] = shared
        self.blocks[index, num_full] = own
        self.num_blocks[index] = num_full + 1
        self.lengths[index] = num_tokens
        self.is_open[index] = True
        self.is_changed = True
        if prefix is None or num_tokens % self.page_size == 0:
            return PageCopies([], [])
        return PageCopies([int(prefix.pages[num_full])] * len(index), own.tolist())

    def close_rows(self, rows: Sequence[int]) -> None:
        """Open `rows` let go of their pages."""
        for row in rows:
            assert self.is_open[row], f"row {row} is closed"
            self._release(self.blocks[row, : self.num_blocks[row]])
            self._forget(row)

    def park_row(self, row: int) -> PagedPrefix:
        """Close `row`, which has stored a token at least; return a prefix that owns the pages of its tokens."""
        length, num_blocks = int(self.lengths[row]), self.num_blocks[row]
        assert self.is_open[row], f"row {row} is closed"
        assert length > 0, f"row {row} has stored nothing"
        num_pages = pages_of(length, self.page_size)
        prefix = PagedPrefix(length, self.blocks[row, :num_pages].copy())
        self._release(self.blocks[row, num_pages:num_blocks])
        self._prefixes.add(prefix)
        self._forget(row)
        return prefix

    def move_rows(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Open row `sources[i]` is called `destinations[i]`, a closed one, from here on; no page moves."""
        for source, destination in zip(sources, destinations, strict=True):
            assert self.is_open[source], f"row {source} is closed"
            assert not self.is_open[destination], f"row {destination} is open"
            for values in (self.blocks, self.num_blocks, self.lengths, self.is_open):
                values[destination] = values[source]
            self._forget(source)

    def grow(self) -> list[int]:
        """A page for every open row whose next token has none, lowest row first; the rows for which none was left."""
        full = np.flatnonzero(self._is_full())
        rows, without = np.split(full, [self.num_free])
        pages = self._take(len(rows))
        assert pages is not None
        assert (self.lengths[rows] < self.max_len).all(), "a row has its full length already"
        self.blocks[rows, self.num_blocks[rows]] = pages
        self.num_blocks[rows] += 1
        self.is_changed |= len(rows) > 0
        return [int(row) for row in without]

    def advance(self, took_part: np.ndarray | bool = True) -> None:
        """Every open row, or those of them that took part, has stored one more token, in a page of its own."""
        self.expect_room()
        self.lengths += self.is_open & took_part

    def expect_room(self) -> None:
        """Assert that every open row has a page for its next token."""
        assert not self._is_full().any(), f"no page for the next token of rows {np.flatnonzero(self._is_full())}"

    def slots(self, prefix: PagedPrefix, start: int, stop: int) -> np.ndarray:
        """int64 [stop - start]: slots of tokens `start` to `stop` of `prefix`, page * page_size + place in the page."""
        assert 0 <= start < stop <= prefix.num_tokens, f"tokens {start}..{stop} of {prefix.num_tokens}"
        positions = np.arange(start, stop)
        slots: np.ndarray = prefix.pages[positions // self.page_size].astype(np.int64) * self.page_size
        return slots + positions % self.page_size

    def check(self) -> None:
        """Assert everything that must hold between two operations; for tests."""
        owned = [prefix.pages for prefix in self._prefixes]
        owned += [self.blocks[row, : self.num_blocks[row]] for row in np.flatnonzero(self.is_open)]
        for pages in owned:
            assert len(np.unique(pages)) == len(pages), f"a page occurs twice in {pages}"
        counts = np.bincount(np.concatenate([*owned, np.empty(0, np.int32)]), minlength=self.num_pages + 1)
        assert np.array_equal(counts, self._references), "references differ from owners"
        assert counts[TRASH_PAGE] == 0, "the trash page has an owner"
        assert sorted(self._free) == (1 + np.flatnonzero(counts[1:] == 0)).tolist(), "free pages have owners"
        for row, (length, num_blocks) in enumerate(zip(self.lengths, self.num_blocks, strict=True)):
            assert (self.blocks[row, num_blocks:] == TRASH_PAGE).all(), f"row {row} remembers a page it let go"
            if not self.is_open[row]:
                assert length == num_blocks == 0, f"closed row {row} owns something"
                continue
            assert pages_of(int(length), self.page_size) <= num_blocks, f"row {row} has tokens without a page"
            if length < num_blocks * self.page_size:
                written = self.blocks[row, length // self.page_size]
                assert counts[written] == 1, f"row {row} writes to page {written}, which is shared"

    def _is_full(self) -> np.ndarray:
        is_full: np.ndarray = self.is_open & (self.lengths == self.num_blocks * self.page_size)
        return is_full

    def _take(self, count: int) -> np.ndarray | None:
        """int32 [count] free pages, with one reference each."""
        if count > len(self._free):
            return None
        keep = len(self._free) - count
        pages = np.array(self._free[keep:], dtype=np.int32)
        del self._free[keep:]
        self._references[pages] = 1
        return pages

    def _release(self, pages: np.ndarray) -> None:
        """One reference less to each of `pages`, which are distinct."""
        left = self._references[pages] - 1
        assert (left >= 0).all(), "a page is let go more often than it was taken"
        self._references[pages] = left
        self._free.extend(pages[left == 0].tolist())

    def _forget(self, row: int) -> None:
        self.blocks[row] = TRASH_PAGE
        self.num_blocks[row] = self.lengths[row] = 0
        self.is_open[row] = False
        self.is_changed = True
