"""Groups that join, are lost and come back."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from slipstream.controller.membership import Change, Incarnations

TWO = ("generator-0", "generator-0@1")


def test_a_group_has_joined_when_all_its_ranks_have_with_one_incarnation():
    members = Incarnations({"generator-0": TWO, "trainer": ("trainer",)})
    assert members.absent == ["generator-0", "trainer"]
    assert members.joined("generator-0@1", 1) == []
    assert members.joined("generator-0", 2) == []
    assert members.joined("generator-0@1", 2) == [Change("generator-0", TWO, 2, is_lost=False)]
    assert members.absent == ["trainer"]


def test_a_group_that_was_started_again_is_lost_before_it_joins():
    members = Incarnations({"trainer": ("trainer",)})
    members.joined("trainer", 1)
    assert members.joined("trainer", 1) == [], "said twice"
    assert members.joined("trainer", 3) == [
        Change("trainer", ("trainer",), 1, is_lost=True),
        Change("trainer", ("trainer",), 3, is_lost=False),
    ]
    assert members.joined("trainer", 2) == [], "an earlier incarnation, late"


def test_what_was_lost_comes_back_with_a_higher_incarnation_only():
    members = Incarnations({"generator-0": TWO})
    for member in TWO:
        members.joined(member, 1)
    assert members.lost("generator-0@1") == [Change("generator-0", TWO, 1, is_lost=True)]
    assert members.lost("generator-0") == [], "its other rank"
    for member in TWO:
        assert members.joined(member, 1) == []
    members.joined(TWO[0], 2)
    assert members.joined(TWO[1], 2) == [Change("generator-0", TWO, 2, is_lost=False)]


@given(seed=st.integers(0, 2**32))
def test_joins_and_losses_alternate_whatever_happens(seed):
    rng = random.Random(seed)
    members, is_there, newest = Incarnations({"generator-0": TWO}), False, 0
    for _ in range(60):
        name = rng.choice(TWO)
        changes = members.lost(name) if rng.random() < 0.2 else members.joined(name, rng.randint(1, 8))
        for change in changes:
            assert change.is_lost == is_there
            assert change.is_lost or change.incarnation > newest
            is_there, newest = not change.is_lost, change.incarnation
        assert ("generator-0" in members.absent) == (not is_there)


def test_what_comes_later_is_news_as_soon_as_it_is_there():
    """A process that is started later takes it for away; of all others it supposes that they are there."""
    groups = {"generator-0": ("generator-0",), "generator-1": ("generator-1",)}
    members = Incarnations(groups, later=["generator-1"])
    assert members.joined("generator-0", 1)
    assert members.news() == []
    joined = members.joined("generator-1", 1)
    assert members.news() == joined == [Change("generator-1", ("generator-1",), 1, is_lost=False)]
    lost = members.lost("generator-1")
    assert members.news() == lost == [Change("generator-1", ("generator-1",), 1, is_lost=True)]
