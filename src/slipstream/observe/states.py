"""The states of a process in plain words and fixed colours, the same on the terminal and in the report."""

from __future__ import annotations

from slipstream.observe.timeline import UNLABELLED

_AWAITED = {
    "generation": "generation",
    "rewards": "rewards",
    "straggler": "a straggler",
    "trainer": "the trainer",
    "completions": "completions",
    "ranks": "its other ranks",
    "nothing": "nothing",
}
_COLOURS = {
    "decode": "#2f7ed8",
    "prefill": "#7cb5ec",
    "evaluate": "#8e6bbf",
    "drain": "#d9a441",
    "swap": "#c43d7a",
    "publish": "#c43d7a",
    "train": "#2a9d6f",
    "warm_start": "#7bc8a4",
    "checkpoint": "#5b7f95",
    "export": "#5b7f95",
    "record": "#9ab0bd",
    "score": "#2a9d9d",
    "reference": "#3f7f9d",
    "start_up": "#6d7f8f",
    "shut_down": "#6d7f8f",
    "schedule": "#5b6ee1",
    "idle": "#d6d9dd",
    UNLABELLED: "#a7adb5",
}
_WAIT_COLOURS = {"wait_straggler": "#d1495b", "wait_rewards": "#e9a178", "wait_nothing": "#d6d9dd"}
WAIT_COLOUR = "#e8863a"
OTHER_COLOUR = "#8c8c6b"


def in_words(state: str) -> str:
    """`wait_generation` as "waits for generation", `warm_start` as "warm start"."""
    if state.startswith("wait_"):
        awaited = state.removeprefix("wait_")
        return f"waits for {_AWAITED.get(awaited, awaited.replace('_', ' '))}"
    return state.replace("_", " ")


def colour(state: str) -> str:
    """The colour of a state, `#rrggbb`; every kind of waiting is warm."""
    if state.startswith("wait_"):
        return _WAIT_COLOURS.get(state, WAIT_COLOUR)
    return _COLOURS.get(state, OTHER_COLOUR)


def shares(seconds: dict[str, float]) -> list[tuple[str, float]]:
    """(state, share of the whole), largest first; empty when there is no time at all."""
    total_s = sum(seconds.values())
    if total_s <= 0:
        return []
    return sorted(((state, s / total_s) for state, s in seconds.items() if s > 0), key=lambda item: (-item[1], item[0]))
