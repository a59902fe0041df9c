"""The states of a process: what each means, in plain words, and its colour; the same everywhere.

Every second of every process is in exactly one state. A state is of one *kind*, and all shares follow from kinds:

    work   the process computes or moves data; busy time is the sum of these
    wait   it has nothing to do, and says for what it waits: what others call idle
    gone   there is no such process: not yet, no longer, or it was killed

What is in no state is `unlabelled`, and of no kind: at most 1 % of any process.

Every page draws waiting hatched (thin on the watch page). It is warm where work is missed meanwhile, and grey where the
process is ready before it is needed (`is_ready`): faster work of others would change nothing then.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slipstream.core.ranks import split_rank_name

UNLABELLED = "unlabelled"
Kind = Literal["work", "wait", "gone"]


@dataclass(frozen=True)
class ProcessState:
    """`words` follow the name of a process: "trainer: waits for generation 20%". `is_ready`: a wait that limits nobody,
    of a process that has done what it was asked for."""

    words: str
    colour: str
    meaning: str
    kind: Kind = "work"
    is_ready: bool = False


WAIT_COLOUR = "#c9431f"  # of waits that are not in the table
OTHER_COLOUR = "#8c8c6b"

KINDS: dict[str, Kind] = {"work": "work", "missed": "wait", "ready": "wait", "gone": "gone", "unknown": "work"}
STATES = {
    name: ProcessState(words, shade, meaning, KINDS[table], is_ready=table == "ready")
    for table, entries in tomllib.loads(Path(__file__).with_name("states.toml").read_text(encoding="utf-8")).items()
    for name, (words, shade, meaning) in entries.items()
}
"""The states that ours have, of `states.toml`."""

DECODES = frozenset({"decode", "drain"})
"""Of generators: the states that sample tokens for training."""
GENERATES = DECODES | {"prefill", "re_prefill", "evaluate"}
"""Of generators: those that run the model."""
TRAINS = frozenset(
    {"forward_backward", "optimizer", "collate", "reference", "teacher", "proximal", "values", "stage", "publish"}
)
"""Of the trainer: those of a step that compute, or move weights."""
COMPUTES = GENERATES | {
    *("forward_backward", "optimizer", "reference", "teacher", "proximal", "values", "train", "warm_start")
}
"""Of all: those in which the model is computed, sampled from or updated."""

AWAITED = {
    "wait_generation": "generator",
    "wait_straggler": "generator",
    "wait_rewards": "rewards",
    "wait_trainer": "trainer",
    "wait_prompt": "prompts",
    "wait_environment": "environments",
    "wait_critic": "critic",
}
"""Wait -> the side of the loop whose work would end it."""

WAITING = (
    " is waiting: in warm colours where work is missed meanwhile, in grey where a process is ready before it is "
    "needed, as rewards should be."
)
"""How the pages draw waits, for their reader: what is hatched in the report is thin on the watch page."""


def in_words(state: str) -> str:
    """`wait_generation` as "waits for generation", `warm_start` as "warm start"; others' states, too."""
    if (known := STATES.get(state)) is not None:
        return known.words
    return state.replace("wait_", "waits for ", 1).replace("_", " ")


def colour(state: str) -> str:
    """The colour of a state, `#rrggbb`."""
    if (known := STATES.get(state)) is not None:
        return known.colour
    return WAIT_COLOUR if state.startswith("wait_") else OTHER_COLOUR


def kind(state: str) -> Kind | None:
    """The kind of a state; what is not in the table, of a custom executor, waits if it says so, else it works."""
    if state == UNLABELLED:
        return None
    if (known := STATES.get(state)) is not None:
        return known.kind
    return "wait" if state.startswith("wait_") else "work"


def is_missed(state: str) -> bool:
    """Whether `state` is a wait in which work is missed: one that is not of a process ready before it is needed."""
    return kind(state) == "wait" and not (state in STATES and STATES[state].is_ready)


def seconds_of(kind_of_state: Kind, seconds: Mapping[str, float]) -> float:
    """Return the sum of `seconds` over the states of one kind."""
    return sum(value for state, value in seconds.items() if kind(state) == kind_of_state)


def totals_of(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the sums of several numbers by name: seconds by state, counts by row."""
    totals: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            totals[name] = totals.get(name, 0.0) + value
    return totals


def model_share(seconds: Mapping[str, Mapping[str, float]]) -> float:
    """Return the share of the model's states (`COMPUTES`) in the work of all processes, from process -> state -> s."""
    totals = totals_of(seconds.values())
    work_s = seconds_of("work", totals)
    return sum(totals.get(state, 0.0) for state in COMPUTES) / work_s if work_s > 0 else 0.0


def idle_share(seconds: Mapping[str, float]) -> float:
    """Share of waiting in the time that the process was there; 0 for one that never was."""
    there_s = sum(seconds.values()) - seconds_of("gone", seconds)
    return seconds_of("wait", seconds) / there_s if there_s > 0 else 0.0


def waited_for(seconds: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Side -> share of their time that those who need its work waited for it, from the seconds by process and state.

    The largest is of the side that limits the run. Names may be of whole sides, as "generator (4)".
    """
    sides: dict[str, dict[str, float]] = {}
    for process, states in seconds.items():
        side = side_of(process.partition(" (")[0])
        sides[side] = totals_of([sides.get(side, {}), states])
    found: dict[str, float] = {}
    for states in sides.values():
        there_s = sum(states.values()) - seconds_of("gone", states)
        for state, side in AWAITED.items():
            if there_s > 0 and states.get(state):
                found[side] = found.get(side, 0.0) + states[state] / there_s
    return {side: found.get(side, 0.0) for side in sides if side in AWAITED.values()}


def side_of(process: str) -> str:
    """The side of the loop that a process is of: "generator" of 'generator-3@1', else its name without the rank."""
    name = split_rank_name(process)[0]
    word, _, number = name.partition("-")
    return word if number.isdigit() else name


def shares(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    """(state, share of the whole), largest first; empty when there is no time at all."""
    total_s = sum(seconds.values())
    if total_s <= 0:
        return []
    return sorted(((state, s / total_s) for state, s in seconds.items() if s > 0), key=lambda item: (-item[1], item[0]))
