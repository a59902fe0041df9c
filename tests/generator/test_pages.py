"""The page allocator: any sequence of operations leaves every page with exactly its owners."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from slipstream.core.errors import ConfigError
from slipstream.generator.pages import PagedPrefix, PageTable, pages_of

PAGE = 4


def table(num_pages: int = 12, num_rows: int = 4, max_len: int = 20) -> PageTable:
    return PageTable(num_pages=num_pages, page_size=PAGE, num_rows=num_rows, max_len=max_len)


def snapshot(pages: PageTable) -> tuple[object, ...]:
    return (
        pages.blocks.tobytes(),
        pages.num_blocks.tobytes(),
        pages.lengths.tobytes(),
        pages.is_open.tobytes(),
        pages.num_free,
    )


def test_full_pages_are_shared_and_the_last_one_copied() -> None:
    pages = table()
    prefix = pages.open_prefix(10)
    assert prefix is not None
    assert len(prefix.pages) == 3
    copies = pages.open_rows([0, 2], prefix)
    assert copies is not None
    assert copies.sources == [prefix.pages[2]] * 2
    assert np.array_equal(pages.blocks[[0, 2], :2], [prefix.pages[:2]] * 2)
    assert copies.destinations == pages.blocks[[0, 2], 2].tolist()
    assert len({*copies.destinations, *prefix.pages.tolist()}) == 5
    assert pages.num_free == 12 - 3 - 2
    pages.check()


def test_a_prefix_that_fills_its_pages_needs_no_copy() -> None:
    pages = table()
    prefix = pages.open_prefix(8)
    assert pages.open_rows([0], prefix) == ([], [])
    assert pages.num_blocks[0] == 3  # one for the next token
    assert pages.grow() == []
    assert pages.num_blocks[0] == 3
    pages.check()


def test_pages_of_a_closed_prefix_live_as_long_as_its_rows() -> None:
    pages = table()
    prefix = pages.open_prefix(10)
    assert prefix is not None
    pages.open_rows([0, 1], prefix)
    pages.close_prefix(prefix)
    assert pages.num_free == 12 - 2 - 2  # the partly filled page is nobody's now
    pages.close_rows([0])
    assert pages.num_free == 12 - 3
    pages.close_rows([1])
    assert pages.num_free == 12
    with pytest.raises(AssertionError, match="closed"):
        pages.open_rows([0], prefix)


def test_pages_are_given_lowest_row_first_until_none_is_left() -> None:
    pages = table(num_pages=6, num_rows=4)
    pages.open_rows([3, 1, 0, 2], None)
    for _ in range(PAGE):
        assert pages.grow() == []
        pages.advance()
    assert pages.grow() == [2, 3]
    assert pages.num_blocks.tolist() == [2, 2, 1, 1]
    with pytest.raises(AssertionError, match="no page for the next token"):
        pages.advance()
    pages.close_rows([3])
    assert pages.grow() == []
    pages.advance()
    pages.check()


def test_exhaustion_changes_nothing() -> None:
    pages = table(num_pages=7, num_rows=4)
    prefix = pages.open_prefix(18)
    assert prefix is not None
    before = snapshot(pages)
    assert pages.open_prefix(5) is None  # one page has to be left for a row
    assert pages.open_rows([0, 1, 2], prefix) is None
    assert snapshot(pages) == before
    assert pages.open_rows([0, 1], prefix) is not None
    pages.check()


def test_a_row_that_is_parked_hands_over_its_pages() -> None:
    pages = table()
    prefix = pages.open_prefix(10)
    assert prefix is not None
    pages.open_rows([2], prefix)
    blocks = pages.blocks[2, :3].copy()
    parked = pages.park_row(2)  # before its first token, in the page that it would have gone on in
    pages.close_prefix(prefix)
    assert (parked.num_tokens, parked.pages.tolist()) == (10, blocks.tolist())
    assert (pages.num_free, pages.is_open[2]) == (12 - 3, False)
    longer = pages.extend_prefix(parked, 13)
    assert longer is not None
    assert (longer.pages[:3].tolist(), len(longer.pages)) == (blocks.tolist(), 4)
    with pytest.raises(AssertionError, match="closed"):
        pages.extend_prefix(parked, 13)
    with pytest.raises(AssertionError, match="extended to"):
        pages.extend_prefix(longer, 12)
    pages.close_prefix(longer)
    pages.open_rows([0], pages.open_prefix(8))
    pages.park_row(0)
    assert pages.num_free == 12 - 2, "the page for its next token is free"
    pages.check()
    pages.open_rows([1], None)
    with pytest.raises(AssertionError, match="stored nothing"):
        pages.park_row(1)


def test_a_move_renames_a_row() -> None:
    pages = table()
    pages.open_rows([3], pages.open_prefix(6))
    blocks = pages.blocks[3].copy()
    pages.move_rows([3], [1])
    assert np.array_equal(pages.blocks[1], blocks)
    assert not pages.blocks[3].any()
    assert pages.is_open.tolist() == [False, True, False, False]
    pages.check()


def test_slots_name_the_place_of_every_token() -> None:
    pages = table()
    prefix = pages.open_prefix(10)
    assert prefix is not None
    first, second, _ = prefix.pages.tolist()
    assert pages.slots(prefix, 2, 6).tolist() == [first * 4 + 2, first * 4 + 3, second * 4, second * 4 + 1]


def test_one_sequence_has_to_fit() -> None:
    table(num_pages=6)
    with pytest.raises(ConfigError, match="too few pages"):
        table(num_pages=5)


class Pages(RuleBasedStateMachine):
    """Any sequence of operations, beside a model that knows what each row and prefix has stored."""

    prefixes = Bundle("prefixes")

    @initialize(num_pages=st.integers(6, 24), num_rows=st.integers(1, 5))
    def start(self, num_pages: int, num_rows: int) -> None:
        self.pages = table(num_pages=num_pages, num_rows=num_rows)
        self.lengths: dict[int, int] = {}
        self.open_prefixes: list[PagedPrefix] = []

    def closed_rows(self) -> list[int]:
        return [row for row in range(len(self.pages.is_open)) if row not in self.lengths]

    @rule(target=prefixes, num_tokens=st.integers(1, 19))
    def open_prefix(self, num_tokens: int) -> PagedPrefix | None:
        before, free = snapshot(self.pages), self.pages.num_free
        prefix = self.pages.open_prefix(num_tokens)
        needed = pages_of(num_tokens, PAGE)
        assert (prefix is None) == (needed + 1 > free)
        if prefix is None:
            assert snapshot(self.pages) == before
        else:
            assert self.pages.num_free == free - needed
            self.open_prefixes.append(prefix)
        return prefix

    @rule(prefix=consumes(prefixes))
    def close_prefix(self, prefix: PagedPrefix | None) -> None:
        if prefix is not None:
            self.pages.close_prefix(prefix)
            self.open_prefixes.remove(prefix)

    @rule(prefix=prefixes, count=st.integers(1, 5))
    def open_rows(self, prefix: PagedPrefix | None, count: int) -> None:
        """A prefix that found no memory stands for opening behind nothing."""
        rows = self.closed_rows()[-count:]
        if not rows:
            return
        before, free = snapshot(self.pages), self.pages.num_free
        copies = self.pages.open_rows(rows, prefix)
        assert (copies is None) == (len(rows) > free)
        if copies is None:
            assert snapshot(self.pages) == before
            return
        length = 0 if prefix is None else prefix.num_tokens
        self.lengths.update(dict.fromkeys(rows, length))
        assert len(copies.sources) == (len(rows) if length % PAGE else 0)

    @rule(target=prefixes, data=st.data())
    def park_row(self, data: st.DataObject) -> PagedPrefix | None:
        """Its pages are the prefix's; one that it had for its next token alone is free."""
        if not (rows := sorted(row for row, length in self.lengths.items() if 0 < length < 20)):
            return None
        row = data.draw(st.sampled_from(rows))
        length, free = self.lengths.pop(row), self.pages.num_free
        blocks = self.pages.blocks[row, : self.pages.num_blocks[row]].copy()
        prefix = self.pages.park_row(row)
        assert prefix.num_tokens == length
        assert np.array_equal(prefix.pages, blocks[: pages_of(length, PAGE)])
        assert self.pages.num_free == free + len(blocks) - len(prefix.pages)
        self.open_prefixes.append(prefix)
        return prefix

    @rule(target=prefixes, prefix=consumes(prefixes), num_more=st.integers(0, 12))
    def extend_prefix(self, prefix: PagedPrefix | None, num_more: int) -> PagedPrefix | None:
        if prefix is None:
            return None
        before, free = snapshot(self.pages), self.pages.num_free
        num_tokens = min(19, prefix.num_tokens + num_more)
        longer = self.pages.extend_prefix(prefix, num_tokens)
        needed = pages_of(num_tokens, PAGE) - len(prefix.pages)
        assert (longer is None) == (needed + 1 > free)
        if longer is None:
            assert snapshot(self.pages) == before
            return prefix
        assert np.array_equal(longer.pages[: len(prefix.pages)], prefix.pages)
        assert (longer.num_tokens, self.pages.num_free) == (num_tokens, free - needed)
        if prefix.num_tokens % PAGE:  # it goes on in its last page, which nobody else may read or write
            assert self.pages._references[prefix.pages[-1]] == 1
        self.open_prefixes.remove(prefix)
        self.open_prefixes.append(longer)
        return longer

    @rule(target=prefixes, prefix=prefixes, num_shared=st.integers(0, 19), num_more=st.integers(0, 12))
    def share_prefix(self, prefix: PagedPrefix | None, num_shared: int, num_more: int) -> PagedPrefix | None:
        """The full pages that both begin with have one more owner, and the first one stays as it is."""
        if prefix is None or prefix not in self.open_prefixes:
            return None
        before, free = snapshot(self.pages), self.pages.num_free
        num_shared = min(num_shared, prefix.num_tokens)
        num_tokens = max(1, min(19, num_shared + num_more))
        other = self.pages.share_prefix(prefix, num_shared, num_tokens)
        num_full = num_shared // PAGE
        needed = pages_of(num_tokens, PAGE) - num_full
        assert (other is None) == (needed + 1 > free)
        if other is None:
            assert snapshot(self.pages) == before
            return None
        assert np.array_equal(other.pages[:num_full], prefix.pages[:num_full])
        assert not {*other.pages[num_full:].tolist()} & {*prefix.pages.tolist()}
        assert (other.num_tokens, self.pages.num_free) == (num_tokens, free - needed)
        self.open_prefixes.append(other)
        return other

    @rule(data=st.data())
    def close_rows(self, data: st.DataObject) -> None:
        rows = sorted(row for row in self.lengths if data.draw(st.booleans()))
        self.pages.close_rows(rows)
        for row in rows:
            del self.lengths[row]

    @rule(data=st.data())
    def move_rows(self, data: st.DataObject) -> None:
        closed = self.closed_rows()
        sources = [row for row in sorted(self.lengths) if data.draw(st.booleans())][: len(closed)]
        destinations = closed[: len(sources)]
        blocks = self.pages.blocks[sources].copy()
        self.pages.move_rows(sources, destinations)
        assert np.array_equal(self.pages.blocks[destinations], blocks)
        moved = {destination: self.lengths.pop(s) for s, destination in zip(sources, destinations, strict=True)}
        self.lengths.update(moved)

    @rule()
    def decode(self) -> None:
        """A token for every row; those without room are preempted, those with their full length end before."""
        self.pages.close_rows(ended := [row for row, length in self.lengths.items() if length == 20])
        for row in ended:
            del self.lengths[row]
        needy = sorted(row for row, n in self.lengths.items() if n == PAGE * self.pages.num_blocks[row])
        free = self.pages.num_free
        assert self.pages.grow() == needy[free:]
        self.pages.close_rows(needy[free:])
        for row in needy[free:]:
            del self.lengths[row]
        self.pages.advance()
        self.lengths = {row: length + 1 for row, length in self.lengths.items()}

    @invariant()
    def owners_are_right(self) -> None:
        if not hasattr(self, "pages"):
            return
        self.pages.check()
        assert {row: int(self.pages.lengths[row]) for row in self.lengths} == self.lengths
        assert np.flatnonzero(self.pages.is_open).tolist() == sorted(self.lengths)

    def teardown(self) -> None:
        if not hasattr(self, "pages"):
            return
        self.pages.close_rows(sorted(self.lengths))
        for prefix in self.open_prefixes:
            self.pages.close_prefix(prefix)
        self.pages.check()
        assert self.pages.num_free == self.pages.num_pages


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


@pytest.mark.slow
class TestManyPages(TestPages):
    settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
