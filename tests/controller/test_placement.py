"""Who gets how many threads, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.controller.placement import Threads, place
from slipstream.core.recipes import resolve

MODEL = {"models": [{"path": "rm"}]}

OWN = {"coef": 0.1, "executor": "own", "ranks": 2}


def placed(cores: int, **overrides: Any) -> dict[str, tuple[int, int]]:
    threads = place(resolve("quickstart", overrides), cores)
    return {name: (one.together, one.alone) for name, one in threads.items()}


@pytest.mark.parametrize(
    ("cores", "overrides", "expected"),
    [
        (2, {}, {"trainer": (1, 2), "generator": (1, 2)}),
        (8, {"generator": {"replicas": 2}}, {"trainer": (4, 8), "generator": (2, 4)}),
        (8, {"max_staleness": 0}, {"trainer": (8, 8), "generator": (8, 8)}),
        (8, {"max_staleness": 0, "sync_placement": "split"}, {"trainer": (4, 8), "generator": (4, 8)}),
        (8, {"max_staleness": 0, "sync_placement": "split", "generator": {"replicas": 3}},
         {"trainer": (2, 8), "generator": (2, 2)}),
        (8, {"max_staleness": 1, "sync_placement": "colocated"}, {"trainer": (4, 8), "generator": (4, 8)}),
        (8, {"rewards": MODEL}, {"trainer": (4, 8), "generator": (2, 8), "reward_models": (2, 8)}),
        (8, {"rewards": MODEL | {"model_ranks": 2}}, {"trainer": (4, 8), "reward_models": (1, 4)}),
        (8, {"rewards": MODEL | {"model_ranks": 2, "device": "cuda"}},
         {"trainer": (3, 8), "generator": (3, 8), "reward_models": (1, 1)}),
        (8, {"kl": OWN, "rewards": MODEL},
         {"trainer": (2, 8), "generator": (2, 8), "reward_models": (2, 8), "reference": (1, 4)}),
        (8, {"kl": OWN | {"device": "cuda"}}, {"trainer": (3, 8), "generator": (3, 8), "reference": (1, 1)}),
        (8, {"trainer": {"ranks": 4}}, {"trainer": (1, 2), "generator": (4, 8)}),
    ],
)  # fmt: skip
def test_cores_are_divided(cores: int, overrides: dict[str, Any], expected: dict[str, tuple[int, int]]) -> None:
    found = placed(cores, **overrides)
    assert {name: found[name] for name in expected} == expected


def test_a_split_baseline_has_the_shares_of_an_asynchronous_run() -> None:
    for cores in range(1, 9):
        for replicas in (1, 2, 3):
            split = placed(cores, max_staleness=0, sync_placement="split", generator={"replicas": replicas})
            assert split == placed(cores, max_staleness=1, generator={"replicas": replicas})


def test_everybody_gets_a_thread() -> None:
    threads = place(resolve("quickstart", {"rewards": MODEL | {"model_ranks": 3}, "trainer": {"ranks": 3}}), 1)
    assert set(threads.values()) == {Threads(together=1, alone=1)}
