"""A run on a Ray cluster. Ray finds machines for its groups, starts their commands and shows them; the run's data goes
over its own channels and links, as everywhere. The only module that imports ray.

An actor stands for each machine of a group, in a bundle of one placement group; a thread of this process keeps each
group: starts it, and starts it again where it failed or lost a machine, for which Ray finds another.
"""

from __future__ import annotations

import logging
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from slipstream.controller.pipeline import CONTROLLER
from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError, SlipstreamError
from slipstream.core.interrupts import GO_ON_VARIABLE, Interrupts
from slipstream.core.keys import RunKeys
from slipstream.core.recipes import config_toml
from slipstream.jobs.machines import (
    CONTROLLER_RESTARTS,
    GROUP_RESTARTS,
    JOB_JOIN_TIMEOUT_S,
    Machines,
    group_command,
    lay_out,
    termination_s,
)

try:
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError, RayError
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise ConfigError(
        "Ray is not installed here", got=str(error), allowed="on all machines: pip install 'slipstream-rl[ray]'"
    ) from error

QUIET = {"TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")}  # c10d tells of each attempt
FOUND_WITHIN_S = 600.0
OVER_CODES = (0, 2, 130, 143, 129)
"""Exit codes of a controller after which nothing starts again: done, bad input, interrupted."""


class _Machine:
    """One machine of a group, as an actor: it runs a command there, and has what it says in Ray's logs."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._heard: int | None = None
        self._lock = threading.Lock()  # a signal comes in another thread

    def whereabouts(self) -> tuple[str, int]:
        """Return the machine's address, and a port that is free there."""
        address = ray.util.get_node_ip_address()
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as found:
            found.bind((address, 0))
            return address, found.getsockname()[1]

    def holds(self, path: str) -> bool:
        """Return whether there is a file `path`."""
        return Path(path).exists()

    def run(self, arguments: Sequence[str], environment: Mapping[str, str], folder: str, recipe: str) -> int:
        """Return the exit code of `slipstream` with `arguments`, in `folder`; '@recipe' in them is a file with that."""
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch, "recipe.toml")
            path.write_text(recipe, encoding="utf-8")
            command = [sys.executable, "-m", "slipstream", *(str(path) if a == "@recipe" else a for a in arguments)]
            with self._lock:
                if self._heard is not None:
                    return 128 + self._heard
                self._process = subprocess.Popen(command, cwd=folder, env={**os.environ, **environment})
            return self._process.wait()

    def signal(self, number: int) -> None:
        """Pass a signal on to the command; one that has not started yet does not start."""
        with self._lock:
            self._heard = number
            if self._process is not None:
                self._process.send_signal(number)


def fate(group: str, code: int | None, restarts_left: int) -> str:
    """Return what follows the end of a group's command: 'again', 'left' (nothing starts), or 'over', the run's end.

    `code` is its exit code, None for a machine that was lost. Bad input (2) would fail again.
    """
    if group == CONTROLLER:
        return "over" if code in OVER_CODES or not restarts_left else "again"
    if code == 2:
        return "over"
    return "left" if code == 0 or not restarts_left else "again"


@dataclass
class _Group:
    """A group and its machines: `bundles` are the numbers of their places in the placement group."""

    name: str
    machines: Machines
    bundles: range
    restarts_left: int
    actors: list[Any] = field(default_factory=list)
    is_moving: bool = False
    """Its machines were told to end since the controller has another address; that is no failure."""


class RayRun:
    """A run on the cluster that `ray.init` has connected to: `run` places it, and returns its exit code."""

    def __init__(
        self,
        config: RunConfig,
        out: Path,
        resumed_with: Sequence[str] | None,
        groups: Sequence[_Group],
        remote: Sequence[str],
    ) -> None:
        self._config, self._out, self._resumed_with = config, out.absolute(), resumed_with
        self._groups, self._remote = groups, list(remote)
        go_on = f"slipstream launch --ray ADDRESS --resume {shlex.quote(str(self._out))}"
        self._environment = RunKeys.new().as_environment() | QUIET | {GO_ON_VARIABLE: go_on}
        self._lock = threading.Condition()
        self._address: str | None = None
        self._heard: int | None = None  # the signal that is to end the run
        self._is_over = False
        self._news: SimpleQueue[int | Exception | None] = SimpleQueue()

    def run(self, say: Callable[[str], None]) -> int:
        """Place all groups, keep them until the run is over, and return the controller's exit code.

        The first signal is passed on to the controller, which ends the run with a checkpoint.
        """
        bundles = [_bundle(group.machines) for group in self._groups for _ in group.bundles]
        self._placed = placement_group(bundles, strategy="PACK", name=f"slipstream {self._out.name}")
        try:
            self._find_machines(bundles)
            say(f"on Ray: {', '.join(group.name for group in self._groups)}; their lines are in its logs and dashboard")
            for group in self._groups:
                threading.Thread(target=self._keep, args=(group,), name=f"keeps {group.name}", daemon=True).start()
            with Interrupts() as interrupts:
                grace_s = self._config.shutdown_grace_s + termination_s(self._config)
                with interrupts.deferred(grace_s, lambda: self._news.put(None)):
                    while (found := self._news.get()) is None:
                        assert interrupts.number is not None, "a signal has come"
                        say(interrupts.heard("the run ends after the current step, with a checkpoint"))
                        self._signal_controller(interrupts.number)
            if isinstance(found, Exception):
                raise found
            return found
        finally:
            self._end()

    def _find_machines(self, bundles: Sequence[Mapping[str, int]]) -> None:
        try:
            ray.get(self._placed.ready(), timeout=FOUND_WITHIN_S)
        except GetTimeoutError:
            raise SlipstreamError(
                f"Ray has found no machines for the run within {FOUND_WITHIN_S:g} s",
                got=f"{len(bundles)} asked for: {', '.join(map(str, bundles))}",
                allowed=f"what the cluster has: {ray.cluster_resources()}",
                hint="--gpus-per-node says how many ranks share a machine; eight cores are asked for each rank",
            ) from None

    def _signal_controller(self, number: int) -> None:
        with self._lock:
            self._heard, actors = number, list(self._groups[0].actors)
        for actor in actors:
            actor.signal.remote(number)

    def _keep(self, group: _Group) -> None:
        """Run the machines of `group`, again and again, until it has ended for good, or the run has."""
        try:
            while not self._is_over:
                code = self._run_once(group)
                with self._lock:
                    if self._is_over or group.is_moving:
                        group.is_moving = False
                        continue
                    found = fate(group.name, code, group.restarts_left)
                    if group.name == CONTROLLER and self._heard is not None:
                        found, code = "over", 128 + self._heard if code is None else code
                    if found == "left":
                        self._lock.wait_for(lambda: self._is_over or group.is_moving)
                        continue
                    group.restarts_left -= 1
                if found == "over":
                    self._news.put(1 if code is None else code)
                    return
        except Exception as error:  # noqa: BLE001 - the thread's: `run` raises it
            self._news.put(error if isinstance(error, SlipstreamError) else _as_ours(group.name, error))

    def _run_once(self, group: _Group) -> int | None:
        """Start the group's machines, wait for the first that fails or for all, and return its exit code, or 0."""
        actors = self._start(group)
        try:
            # A lost controller must be found another machine; of other groups the controller says when they are missed.
            timeout_s = FOUND_WITHIN_S if group.name == CONTROLLER else None
            address, port = ray.get(actors[0].whereabouts.remote(), timeout=timeout_s)
            commands = self._commands(group, actors, address, port)
            if commands is None:
                return None
            waiting = [
                actor.run.remote(command, self._environment, str(Path.cwd()), config_toml(self._config))
                for actor, command in zip(actors, commands, strict=True)
            ]
            while waiting:
                done, waiting = ray.wait(waiting)
                if code := ray.get(done[0]):
                    return int(code)
            return 0
        except GetTimeoutError:
            what = f"Ray has found no machine for the controller within {FOUND_WITHIN_S:g} s"
            raise SlipstreamError(
                what, got=str(_bundle(group.machines)), hint="--resume goes on with the run"
            ) from None
        except RayActorError:
            return None
        finally:
            _kill(actors)

    def _start(self, group: _Group) -> list[Any]:
        actors = []
        for index in group.bundles:
            where = PlacementGroupSchedulingStrategy(self._placed, placement_group_bundle_index=index)
            bundle = _bundle(group.machines)
            actors.append(
                ray.remote(_Machine)
                .options(
                    name=f"{self._out.name} {group.name} {index - group.bundles[0]} {group.restarts_left}",
                    num_cpus=bundle["CPU"],
                    num_gpus=bundle.get("GPU", 0),
                    scheduling_strategy=where,
                    max_concurrency=2,  # a signal comes while a command runs
                )
                .remote()
            )
        with self._lock:
            group.actors = actors
            if group.name == CONTROLLER and self._heard is not None:
                actors[0].signal.remote(self._heard)
        return actors

    def _commands(self, group: _Group, actors: Sequence[Any], address: str, port: int) -> list[list[str]] | None:
        """Return the command of each machine, the first of which is at `address`; None where the run is over."""
        if group.name == CONTROLLER:
            goes_on = self._resumed_with is not None or (
                group.restarts_left < CONTROLLER_RESTARTS
                and ray.get(actors[0].holds.remote(str(self._out / "config.toml")))
            )
            what = ["--resume", str(self._out), *(self._resumed_with or ())]
            what = what if goes_on else ["@recipe", "--out", str(self._out)]
            remote = ["--remote", *self._remote] if self._remote else []
            self._move(f"{address}:{port}")
            there = ["--listen", f"{address}:{port}", "--join-timeout", str(JOB_JOIN_TIMEOUT_S)]
            return [["launch", *what, "--group", CONTROLLER, *remote, *there]]
        with self._lock:
            self._lock.wait_for(lambda: self._address is not None or self._is_over)
            controller = self._address
        if controller is None:
            return None
        own = [address, *(ray.get(actor.whereabouts.remote())[0] for actor in actors[1:])]
        return [
            group_command(self._config, group.name, group.machines, controller, each, str(node), f"{address}:{port}")
            for node, each in enumerate(own)
        ]

    def _move(self, address: str) -> None:
        """Tell the groups of the controller's address; those that had another one start anew."""
        with self._lock:
            is_first, self._address = self._address is None, address
            for group in self._groups[1:]:
                if not is_first:
                    group.is_moving = True
                    _kill(group.actors)
            self._lock.notify_all()

    def _end(self) -> None:
        with self._lock:
            self._is_over = True
            self._lock.notify_all()
            for group in self._groups:
                _kill(group.actors)
        remove_placement_group(self._placed)


def groups_of(config: RunConfig, remote: Collection[str] | None, gpus_per_node: int) -> tuple[list[_Group], list[str]]:
    """Return all groups, the controller first, with their bundles; and those that the controller leaves to others."""
    layout = lay_out(config, remote, ranks_per_node=gpus_per_node)
    named = [(CONTROLLER, layout.controller, CONTROLLER_RESTARTS)]
    named += [(group, job.machines, GROUP_RESTARTS) for job in layout.groups for group in job.groups]
    groups, next_bundle = [], 0
    for name, machines, restarts in named:
        groups.append(_Group(name, machines, range(next_bundle, next_bundle + machines.nodes), restarts))
        next_bundle += machines.nodes
    return groups, layout.remote


def run_on_ray(
    config: RunConfig,
    address: str,
    out: Path,
    *,
    resumed_with: Sequence[str] | None = None,
    remote: Collection[str] | None = None,
    gpus_per_node: int = 8,
    say: Callable[[str], None] = print,
) -> int:
    """Run `config` on the Ray cluster at `address` ('auto': this machine's), and return the run's exit code.

    `out` is the run's folder; `resumed_with` are flags for a run there that is to go on. That folder, the working
    folder and Python's environment are seen by all machines. `remote` as in `lay_out`. ConfigError where no cluster is.
    """
    groups, told = groups_of(config, remote, gpus_per_node)
    try:
        ray.init(address=address, namespace="slipstream", log_to_driver=True, logging_level=logging.WARNING)
    except (ConnectionError, ValueError) as error:
        hint = "`ray start --head` starts one; --ray auto, or HOST:PORT of its head"
        raise ConfigError("no Ray cluster is there", got=f"{address}: {error}", hint=hint) from error
    try:
        return RayRun(config, out, resumed_with, groups, told).run(say)
    finally:
        ray.shutdown()


def _bundle(machines: Machines) -> dict[str, int]:
    return {"CPU": machines.cpus} | ({"GPU": machines.gpus} if machines.gpus else {})


def _kill(actors: Sequence[Any]) -> None:
    for actor in actors:
        ray.kill(actor)


def _as_ours(group: str, error: Exception) -> SlipstreamError:
    what = f"Ray could not run '{group}'" if isinstance(error, RayError) else f"'{group}' could not be kept"
    return SlipstreamError(what, got=str(error).strip().rpartition("\n")[2] or type(error).__name__)
