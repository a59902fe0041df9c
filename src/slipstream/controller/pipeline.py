"""A pipeline is a list of executors and a list of channels; the controller adds its own two to each executor.

A `Node` says how to make an executor, so that any process can: a class or function by import path, and keyword
arguments that JSON can carry (a RunConfig counts). Nodes are what users compose; see examples/custom_pipeline.py.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from slipstream.core.channel_spec import ChannelSpec, Kind, executor_of
from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.executor import Executor
from slipstream.core.ranks import RANK_MARK, rank_name, split_rank_name
from slipstream.core.service_messages import WarmStart
from slipstream.core.types import Prompt
from slipstream.core.unfinished_messages import Unfinished
from slipstream.core.user_code import imported
from slipstream.models.hub import with_folders

CONTROLLER = "controller"
MEMBERSHIP = "membership"
"""The port at which processes hear who has joined and who was lost."""
HostKind = Literal["process", "inline", "torchrun"]


@dataclass(frozen=True)
class Node:
    """An executor of the pipeline: its name, what makes it, and where it runs.

    `factory` returns the executor when called with `kwargs`. `host = "inline"` runs it inside the controller's process,
    "process" in processes that the controller starts, "torchrun" in those of a torchrun job that joins the run from
    anywhere (`slipstream launch`). With several `ranks` that many processes run the executor together; they have a
    process group. `device` is that of its tensors: where it is CUDA, a single process has a group, too. Executors whose
    ranks only share work out have no collectives and need no group on CUDA, whatever they compute on. Thread counts,
    each rank's, are those of `controller/placement.py`.

    One that `is_replaceable` has no state that the others could not give it again: where the controller has started its
    processes, it starts them again when they are lost, while the run goes on. One that `joins_later` is away at first,
    as if it had been lost: nothing waits for it, and it may join, leave and join again at any time.
    """

    name: str
    factory: Callable[..., Executor]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    host: HostKind = "process"
    num_threads: int = 1
    num_threads_alone: int = 1
    ranks: int = 1
    device: str = "cpu"
    is_replaceable: bool = False
    joins_later: bool = False

    def __post_init__(self) -> None:
        if self.host == "inline" and self.ranks > 1:
            got = f"{self.ranks} ranks of '{self.name}' with host = 'inline'"
            raise ConfigError("several ranks need processes of their own", got=got, allowed="host = 'process'")

    @property
    def members(self) -> tuple[str, ...]:
        """The names of its processes, by rank."""
        return tuple(rank_name(self.name, rank) for rank in range(self.ranks))

    @property
    def needs_group(self) -> bool:
        """Whether its processes have a `torch.distributed` group."""
        return self.ranks > 1 or self.device.startswith("cuda")

    def build(self) -> Executor:
        """The executor, made on the machine that it runs on: hub ids become folders of this machine's cache."""
        return self.factory(**{key: _with_folders(value) for key, value in self.kwargs.items()})

    def fetch(self, tell: Callable[[str], None]) -> None:
        """Download what `build` would, where there is a screen to tell of it."""
        for value in self.kwargs.values():
            _with_folders(value, tell)


def _with_folders(value: Any, tell: Callable[[str], None] | None = None) -> Any:
    return with_folders(value, tell=tell, is_first=tell is not None) if isinstance(value, RunConfig) else value


def encode_node(node: Node) -> dict[str, Any]:
    """Return the node in JSON types, for the process that will host it."""
    kwargs = {
        key: {"$config": value.model_dump(mode="json")} if isinstance(value, RunConfig) else value
        for key, value in node.kwargs.items()
    }
    return vars(node) | {"factory": import_path(node.factory), "kwargs": kwargs}


def decode_node(data: Mapping[str, Any]) -> Node:
    """Return the node that `encode_node` was given: imports the factory."""
    kwargs = {
        key: RunConfig.model_validate(value["$config"]) if isinstance(value, dict) and "$config" in value else value
        for key, value in data["kwargs"].items()
    }
    factory = imported(data["factory"], what="executor factory", modules={})
    return Node(**{**data, "factory": factory, "kwargs": kwargs})


def decode_channel(data: Mapping[str, Any]) -> ChannelSpec:
    """Return a channel from JSON types, as `dataclasses.asdict` gives them."""
    return ChannelSpec(**{**data, "kind": Kind(data["kind"]), "accepts": tuple(data["accepts"])})


def import_path(factory: Callable[..., Any]) -> str:
    """'module:name' of a class or function; 'file.py:name' when it was defined in the script being run."""
    name = factory.__qualname__
    if "." in name or "<" in name:
        raise ConfigError(
            "an executor in a process of its own needs a factory that can be imported",
            got=f"{factory.__module__}:{name}",
            allowed="a class or function at the top level of a module",
            hint="move it there, or use host = 'inline'",
        )
    if factory.__module__ != "__main__":
        return f"{factory.__module__}:{name}"
    path = sys.modules["__main__"].__dict__.get("__file__")
    if path is None:
        what = "an executor defined in a notebook cell cannot be imported by another process"
        allowed = "a class or function of a module or script"
        raise ConfigError(what, got=name, allowed=allowed, hint="move it to a file, or use host = 'inline'")
    return f"{Path(path).resolve()}:{name}"


@dataclass(frozen=True)
class Pipeline:
    """Executors and the channels between them; `all_channels` includes the controller's own."""

    nodes: tuple[Node, ...]
    channels: tuple[ChannelSpec, ...]
    deadline_s: float = 120.0

    def __post_init__(self) -> None:
        nodes = [node.name for node in self.nodes]
        if len(set(nodes)) != len(nodes) or CONTROLLER in nodes or any(RANK_MARK in name for name in nodes):
            raise ConfigError(
                "executors need distinct names", got=", ".join(nodes), allowed=f"not '{CONTROLLER}', no '@'"
            )
        names = self.members
        for channel in self.channels:
            for port in (channel.source, channel.target):
                executor = executor_of(port)
                if executor not in names:
                    raise ConfigError.unknown(
                        f"channel '{channel.name}' names an executor that is not in the pipeline",
                        executor,
                        names,
                        got=port,
                    )

    @property
    def inline_threads_alone(self) -> int:
        """The threads of an executor inside the controller's process while no other computes."""
        return max([node.num_threads_alone for node in self.nodes if node.host == "inline"], default=1)

    @property
    def members(self) -> list[str]:
        """The names of all processes and inline executors."""
        return [member for node in self.nodes for member in node.members]

    @property
    def all_channels(self) -> tuple[ChannelSpec, ...]:
        """The channels given, and what every executor has besides: commands, events, releases, relays between ranks."""
        own = [channel for node in self.nodes for channel in _own_channels(node, self.deadline_s)]
        members = self.members
        if any(node.host != "inline" for node in self.nodes):
            own += [
                ChannelSpec(
                    name=f"{MEMBERSHIP}/{member}",
                    kind=Kind.SCATTER,
                    source=f"{CONTROLLER}.{MEMBERSHIP}",
                    target=f"{member}.{MEMBERSHIP}",
                    capacity=1024 + 8 * len(members),  # who loads a model or trains reads nothing of many losses
                    deadline_s=self.deadline_s,
                    route=MEMBERSHIP,
                )
                for member in members
            ]
        channels = (*self.channels, *(release for c in self.channels if (release := _release_of(c))), *own)
        later = {node.name for node in self.nodes if node.joins_later}
        return tuple(replace(c, is_awaited=False) if later and _leads_to(later, c) else c for c in channels)

    @property
    def first_replicas(self) -> set[int]:
        """The replicas with which the run starts."""
        found = {replica_of(node.name) for node in self.nodes if not node.joins_later}
        return {replica for replica in found if replica is not None}


def _leads_to(groups: Collection[str], channel: ChannelSpec) -> bool:
    """Whether it leads into one of `groups` from another one."""
    source, target = (split_rank_name(executor_of(port))[0] for port in (channel.source, channel.target))
    return target in groups and source != target


def _own_channels(node: Node, deadline_s: float) -> Iterator[ChannelSpec]:
    """The controller speaks with rank 0, which passes on to the others what concerns them; every rank has events."""
    yield ChannelSpec(
        name=f"commands/{node.name}",
        kind=Kind.GATHER,
        source=f"{CONTROLLER}.to-{node.name}",
        target=f"{node.name}.commands",
        deadline_s=deadline_s,
    )
    for member in node.members[1:]:
        yield ChannelSpec(
            name=f"relay/{member}",
            kind=Kind.BROADCAST,
            source=f"{node.name}.relay",
            target=f"{member}.commands",
            deadline_s=deadline_s,
        )
    for member in node.members:
        yield ChannelSpec(
            name=f"events/{member}",
            kind=Kind.GATHER,
            source=f"{member}.events",
            target=f"{CONTROLLER}.events",
            capacity=8192,
            deadline_s=deadline_s,
        )


def _release_of(channel: ChannelSpec) -> ChannelSpec | None:
    """The way back of a WEIGHTS channel, on which generators release the slots they have read."""
    if channel.kind is not Kind.WEIGHTS:
        return None
    return ChannelSpec(
        name=f"{channel.name}/released",
        kind=Kind.GATHER,
        source=f"{channel.target}-released",
        target=f"{channel.source}-released",
        deadline_s=channel.deadline_s,
    )


def gather(name: str, source: str, target: str, *, capacity: int = 1024, deadline_s: float = 120.0) -> ChannelSpec:
    """A channel into one target, which several sources may share."""
    return ChannelSpec(name, Kind.GATHER, source, target, capacity=capacity, deadline_s=deadline_s)


def scatter(
    name: str, source: str, targets: Sequence[str], route: str, *, capacity: int = 1024, deadline_s: float = 120.0
) -> list[ChannelSpec]:
    """Channels from one port, of which `route` chooses one for each message; to a single target, plainly into it."""
    if len(targets) == 1:
        return [gather(name, source, targets[0], capacity=capacity, deadline_s=deadline_s)]
    return [
        ChannelSpec(
            f"{name}/{target.split('.')[0]}",
            Kind.SCATTER,
            source,
            target,
            capacity=capacity,
            deadline_s=deadline_s,
            route=route,
        )
        for target in targets
    ]


def weights(name: str, source: str, target: str, *, num_replicas: int = 1, deadline_s: float = 120.0) -> ChannelSpec:
    """A weight-sync link from the trainer to one of `num_replicas` generators, with room for what one that is stopped
    leaves unread: offers, and what is told of the links of all that join, twice."""
    return ChannelSpec(name, Kind.WEIGHTS, source, target, capacity=64 + 4 * num_replicas, deadline_s=deadline_s)


def replica_of(executor: str) -> int | None:
    """Return 3 of 'generator-3' or 'generator-3@1'; None for what is no generator."""
    prefix, _, number = split_rank_name(executor)[0].partition("-")
    return int(number) if prefix == "generator" and number.isdigit() else None


def has_weights(name: str, channels: Sequence[ChannelSpec]) -> bool:
    """Whether executor `name` gives or takes versions."""
    ends = [port for c in channels if c.kind is Kind.WEIGHTS for port in (c.source, c.target)]
    return name in {split_rank_name(executor_of(port))[0] for port in ends}


def weight_readers(channels: Sequence[ChannelSpec]) -> dict[str, int]:
    """The executors that take weights, each with the number of its ranks. Replica i is the i-th, by their channels."""
    members = [executor_of(channel.target) for channel in channels if channel.kind is Kind.WEIGHTS]
    return dict(Counter(split_rank_name(member)[0] for member in members))


@dataclass(frozen=True)
class RunInput:
    """The input of a run: prompts by ordinal, held-out ones (`sets` by name), demonstrations; and what a resume found.

    `partials` are completions by ordinal, for the first admission of their group; `num_events` those of the log so far;
    `first_ordinal` the first that is asked for.
    """

    prompt_of: Callable[[int], Prompt]
    held_out: tuple[Prompt, ...]
    warm_start: WarmStart | None
    partials: Mapping[int, tuple[Unfinished, ...]] = field(default_factory=dict)
    num_events: int = 0
    first_ordinal: int = 0
    sets: Mapping[str, Sequence[Prompt]] = field(default_factory=dict)
