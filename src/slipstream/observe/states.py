"""The states of a process: what each means, in plain words, and its colour; the same everywhere.

Every second of every process is in exactly one state. A state is of one *kind*, and all shares follow from kinds:

    work   the process computes or moves data; busy time is the sum of these
    wait   it has nothing to do, and says for what it waits: what others call idle
    gone   there is no such process: not yet, no longer, or it was killed

What is in no state is `unlabelled`, and of no kind: at most 1 % of any process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from slipstream.core.ranks import split_rank_name
from slipstream.observe.timeline import ABSENT, LOST, UNLABELLED

Kind = Literal["work", "wait", "gone"]


@dataclass(frozen=True)
class State:
    """`words` follow the name of a process: "trainer: waits for generation 20%"."""

    words: str
    colour: str
    meaning: str
    kind: Kind = "work"


WAIT_COLOUR = "#e8863a"
OTHER_COLOUR = "#8c8c6b"

STATES: dict[str, State] = {
    # Generators
    "decode": State("decode", "#2f7ed8", "one token for every live completion, prefill that rides along included"),
    "prefill": State("prefill", "#7cb5ec", "keys and values of prompts"),
    "re_prefill": State("re-prefill", "#b05f9e", "keys and values made a second time: after a swap, for what goes on"),
    "evaluate": State("evaluate", "#8e6bbf", "answers to held-out prompts, under a pinned version"),
    "drain": State("drain", "#d9a441", "decodes what is live while a newer version waits for its end"),
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
    "overhead": State("overhead", "#c2b280", "the loop around the work: ports, counters, signs of life"),
    # Waits
    "wait_generation": State("waits for generation", WAIT_COLOUR, "no batch of scored groups yet", "wait"),
    "wait_rewards": State("waits for rewards", "#e9a178", "the oldest group is sampled and not scored", "wait"),
    "wait_straggler": State("waits for a straggler", "#d1495b", "a batch lies ready behind one old group", "wait"),
    "wait_nothing": State(
        "waits for nothing", "#d6d9dd", "its part of the run is done, or a command is on its way", "wait"
    ),
    "wait_trainer": State("waits for the trainer", WAIT_COLOUR, "the staleness bound admits no further group", "wait"),
    "wait_prompt": State("waits for a prompt", "#f0b27a", "the bound would admit a group; none has come", "wait"),
    "wait_completions": State("waits for completions", WAIT_COLOUR, "nothing to score", "wait"),
    "wait_rollouts": State("waits for rollouts", WAIT_COLOUR, "nothing to measure", "wait"),
    "wait_ranks": State("waits for its other ranks", "#d98e5f", "the slowest rank of its group has not come", "wait"),
    "idle": State("idle", "#d6d9dd", "waits for whatever comes first", "wait"),
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


def in_words(state: str) -> str:
    """`wait_generation` as "waits for generation", `warm_start` as "warm start"; others' states, too."""
    if (known := STATES.get(state)) is not None:
        return known.words
    return state.replace("wait_", "waits for ", 1).replace("_", " ")


def colour(state: str) -> str:
    """The colour of a state, `#rrggbb`; every kind of waiting is warm."""
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


def seconds_of(kind_of_state: Kind, seconds: Mapping[str, float]) -> float:
    """What of `seconds` by state is of one kind."""
    return sum(value for state, value in seconds.items() if kind(state) == kind_of_state)


def idle_share(seconds: Mapping[str, float]) -> float:
    """Share of waiting in the time that the process was there; 0 for one that never was."""
    there_s = sum(seconds.values()) - seconds_of("gone", seconds)
    return seconds_of("wait", seconds) / there_s if there_s > 0 else 0.0


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
