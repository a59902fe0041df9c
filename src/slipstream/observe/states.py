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

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from slipstream.core.ranks import split_rank_name
from slipstream.observe.timeline import ABSENT, LOST, UNLABELLED

Kind = Literal["work", "wait", "gone"]


@dataclass(frozen=True)
class State:
    """`words` follow the name of a process: "trainer: waits for generation 20%". `is_ready`: a wait that limits nobody,
    of a process that has done what it was asked for."""

    words: str
    colour: str
    meaning: str
    kind: Kind = "work"
    is_ready: bool = False


WAIT_COLOUR = "#c9431f"  # of waits that are not in the table
OTHER_COLOUR = "#8c8c6b"

STATES: dict[str, State] = {
    # Generators
    "decode": State("decode", "#2f7ed8", "one token for every live completion, prefill that rides along included"),
    "prefill": State("prefill", "#7cb5ec", "keys and values of prompts"),
    "re_prefill": State("re-prefill", "#b05f9e", "keys and values made a second time: after a swap, for what goes on"),
    "evaluate": State("evaluate", "#8e6bbf", "answers to held-out prompts, under a pinned version"),
    "drain": State("drain", "#1d4f91", "decodes what is live while a newer version waits for its end"),
    "swap": State("swap", "#c43d7a", "exchanges the weights between two decode steps"),
    # Trainer
    "forward_backward": State("forward-backward", "#2a9d6f", "losses and gradients of microbatches"),
    "optimizer": State("optimizer", "#1f6f54", "gradient norm, clipping and the update of the weights"),
    "collate": State("collate", "#8fbf6a", "advantages and packing of a step's batch"),
    "reference": State("reference", "#3f7f9d", "logprobs of the frozen reference policy"),
    "proximal": State("proximal", "#5aa5a0", "logprobs of the policy before the step's first update"),
    "values": State("values", "#4f9f7f", "the critic's values before the step's first update"),
    "train": State("train", "#2a9d6f", "updates of the model that a stage trains, besides RL"),
    "warm_start": State("warm start", "#7bc8a4", "supervised updates before the first step"),
    "publish": State("publish", "#c43d7a", "the probe text under the new version, and word of it"),
    "record": State("record", "#9ab0bd", "writes rollouts, or the ledger, to disk"),
    "checkpoint": State("checkpoint", "#5b7f95", "saves policy, optimizer and what waits for its step"),
    "export": State("export", "#5b7f95", "writes the policy as a Hugging Face checkpoint"),
    # Both ends of weight sync
    "stage": State("stage", "#e07aa8", "copies a version: to a slot, or, with nothing else to do, from one"),
    # Rewards
    "score": State("score", "#2a9d9d", "verifiers, reward functions or reward models judge completions"),
    # Controller
    "schedule": State("schedule", "#5b6ee1", "takes an event, decides, sends commands"),
    # All
    "start_up": State("start up", "#6d7f8f", "from the start of the process to its readiness"),
    "shut_down": State("shut down", "#6d7f8f", "from the last command to the end of the process"),
    "receive": State("receive", "#a9b8c6", "takes and checks what has arrived"),
    "send": State("send", "#a9b8c6", "hands on what is finished"),
    "overhead": State("overhead", "#cfb9de", "the loop around the work: ports, counters, signs of life"),
    # Waits in which work is missed
    "wait_generation": State("waits for generation", "#e56c3c", "no batch of scored groups yet", "wait"),
    "wait_rewards": State("waits for rewards", "#e5c451", "the oldest group is sampled and not scored", "wait"),
    "wait_straggler": State("waits for a straggler", "#761c28", "a batch lies ready behind one old group", "wait"),
    "wait_trainer": State("waits for the trainer", "#e98f0a", "the staleness bound admits no further group", "wait"),
    "wait_prompt": State("waits for a prompt", "#e6a37f", "the bound would admit a group; none has come", "wait"),
    "wait_ranks": State("waits for its other ranks", "#684613", "the slowest rank of its group has not come", "wait"),
    # Waits of those that are ready before they are needed
    "wait_nothing": State(
        "waits for nothing", "#636363", "its part of the run is done, or a command is on its way", "wait", is_ready=True
    ),
    "wait_completions": State("waits for completions", "#888893", "nothing to score", "wait", is_ready=True),
    "wait_rollouts": State("waits for rollouts", "#403e49", "nothing to measure", "wait", is_ready=True),
    "idle": State("idle", "#b0b2b4", "waits for whatever comes first", "wait", is_ready=True),
    # No process
    ABSENT: State("absent", "#eef0f2", "not started yet, or ended", "gone"),
    LOST: State("lost", "#4a4a4a", "killed: from its last written line until its successor is there", "gone"),
    UNLABELLED: State("unlabelled", "#a7adb5", "nobody has said what it was"),
}


DECODES = frozenset({"decode", "drain"})
"""Of generators: the states that sample tokens for training."""
GENERATES = DECODES | {"prefill", "re_prefill", "evaluate"}
"""Of generators: those that run the model."""
TRAINS = frozenset({"forward_backward", "optimizer", "collate", "reference", "proximal", "values", "stage", "publish"})
"""Of the trainer: those of a step that compute, or move weights."""


AWAITED = {
    "wait_generation": "generator",
    "wait_straggler": "generator",
    "wait_rewards": "rewards",
    "wait_trainer": "trainer",
    "wait_prompt": "prompts",
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
    """What of `seconds` by state is of one kind."""
    return sum(value for state, value in seconds.items() if kind(state) == kind_of_state)


def totals_of(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the sums of several numbers by name: seconds by state, counts by row."""
    totals: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            totals[name] = totals.get(name, 0.0) + value
    return totals


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
