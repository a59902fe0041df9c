"""The division of devices over executors against brute force over all of them."""

from __future__ import annotations

import itertools

import pytest
from drawn import drawn
from hypothesis import strategies as st

from slipstream.plan.search import Choice, best_split, frontier

seconds = st.integers(1, 12).map(float)  # few values: ties are what goes wrong
choices = st.lists(
    st.builds(Choice, devices=st.integers(1, 6), seconds=seconds, layout=st.none()), min_size=1, max_size=6
)


def brute_force(given_choices, devices):
    """The times of the best division, largest first; None where nothing fits."""
    fitting = [
        tuple(sorted((choice.seconds for choice in chosen), reverse=True))
        for chosen in itertools.product(*given_choices)
        if sum(choice.devices for choice in chosen) <= devices
    ]
    return min(fitting) if fitting else None


@drawn(50, 100, given_choices=st.lists(choices, min_size=1, max_size=4), devices=st.integers(1, 16))
def test_equals_brute_force_over_all_divisions(given_choices, devices):
    frontiers = {str(index): frontier(those) for index, those in enumerate(given_choices)}
    found = best_split(frontiers, devices)
    expected = brute_force(given_choices, devices)
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert list(found) == list(frontiers)
    assert sum(choice.devices for choice in found.values()) <= devices
    assert all(choice in those for choice, those in zip(found.values(), given_choices, strict=True))
    assert tuple(sorted((choice.seconds for choice in found.values()), reverse=True)) == expected


@pytest.mark.parametrize(("devices", "expected"), [(1, None), (2, (12.0, 6.0)), (3, (6.0, 6.0)), (9, (2.0, 2.0))])
def test_work_that_divides_evenly_is_divided_by_its_amount(devices, expected):
    """12 and 6 device-seconds of work: twice as many devices for the first."""
    frontiers = {
        "trainer": frontier([Choice(n, 12 / n, n) for n in range(1, 13)]),
        "generator": frontier([Choice(n, 6 / n, n) for n in range(1, 13)]),
    }
    found = best_split(frontiers, devices)
    assert (found and (found["trainer"].seconds, found["generator"].seconds)) == expected


def test_devices_that_help_nobody_are_left_over():
    found = best_split({"one": frontier([Choice(2, 3.0, "x")]), "other": frontier([Choice(1, 1.0, "y")])}, 64)
    assert found is not None
    assert [choice.devices for choice in found.values()] == [2, 1]
