"""A run on Ray: what is started again and what is not, with a stand-in for Ray whose machines end as a test says.

Ray itself: tests/cluster/test_ray.py.
"""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from slipstream import cli
from slipstream.core.errors import SlipstreamError
from slipstream.core.recipes import resolve
from slipstream.flags import as_flags, parse
from slipstream.jobs.machines import CONTROLLER_RESTARTS, GROUP_RESTARTS, JOB_JOIN_TIMEOUT_S

LOST = "lost"


class ActorDied(Exception):
    """The stand-in's RayActorError."""


class Future:
    """What a method of an actor returns."""

    def __init__(self, result: Any = None) -> None:
        self.result, self.is_done = result, threading.Event()
        if result is not None:
            self.is_done.set()

    def end(self, result: Any) -> None:
        self.result = result
        self.is_done.set()


class Actor:
    """A machine; `command` is what it was asked to run."""

    def __init__(self, cluster: FakeRay, name: str) -> None:
        self.cluster, self.name, self.running, self.command = cluster, name, Future(), []
        self.signals: list[int] = []
        place = (f"10.0.0.{len(cluster.actors) + 1}", 5) if cluster.has_room else None
        self.whereabouts = SimpleNamespace(remote=lambda: Future(place))
        self.holds = SimpleNamespace(remote=lambda path: Future((cluster.is_begun, path)))
        self.run = SimpleNamespace(remote=self._run)
        self.signal = SimpleNamespace(remote=self.signals.append)

    def _run(self, command: list[str], environment: dict[str, str], *_: str) -> Future:
        self.command, self.environment = command, environment
        self.cluster.started.put(self)
        return self.running


class FakeRay(ModuleType):
    """As much of the module `ray` as is used, all in this process."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.actors: list[Actor] = []
        self.started: Queue[Actor] = Queue()
        self.is_begun, self.has_room = False, True
        self.bundles: list[dict[str, int]] = []

    def init(self, **_: Any) -> None: ...

    def shutdown(self) -> None: ...

    def placement_group(self, bundles: list[dict[str, int]], **_: Any) -> Any:
        self.bundles = bundles
        return SimpleNamespace(ready=lambda: Future(True))

    def remote(self, _kind: type) -> Any:
        def make(name: str, **_: Any) -> Any:
            self.actors.append(Actor(self, name))
            return SimpleNamespace(remote=lambda: self.actors[-1])

        return SimpleNamespace(options=make)

    def get(self, future: Future, timeout: float | None = None) -> Any:
        if not future.is_done.wait(60 if timeout is None else min(timeout, 60)):
            raise TimeoutError
        if future.result == LOST:
            raise ActorDied
        if isinstance(future.result, tuple) and isinstance(future.result[0], bool):
            return future.result[0]
        return future.result

    def wait(self, futures: list[Future]) -> tuple[list[Future], list[Future]]:
        deadline_s = time.monotonic() + 120
        while not (done := [future for future in futures if future.is_done.wait(0.01)]):
            assert time.monotonic() < deadline_s, "no machine ends"
        return done[:1], [future for future in futures if future is not done[0]]

    def kill(self, actor: Actor) -> None:
        actor.running.end(LOST)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    fake = FakeRay()
    exceptions = {"RayActorError": ActorDied, "RayError": Exception, "GetTimeoutError": TimeoutError}
    monkeypatch.setitem(sys.modules, "ray", fake)
    for name, members in {
        "ray.exceptions": exceptions,
        "ray.util": {},
        "ray.util.placement_group": {
            "placement_group": fake.placement_group,
            "remove_placement_group": lambda _group: None,
        },
        "ray.util.scheduling_strategies": {"PlacementGroupSchedulingStrategy": lambda *_, **__: None},
    }.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "slipstream.jobs.on_ray", raising=False)
    yield fake
    sys.modules.pop("slipstream.jobs.on_ray", None)


class Driver:
    """The command, in a thread; `next` is the machine that is started next, by group."""

    def __init__(self, ray: FakeRay, out: Path, **options: Any) -> None:
        from slipstream.jobs.on_ray import run_on_ray

        self.ray, self.codes = ray, Queue[int | SlipstreamError]()
        config = resolve("quickstart", {"generator": {"replicas": 2}, "trainer": {"ranks": 2}})

        def run() -> None:
            try:
                self.codes.put(run_on_ray(config, "auto", out, say=str, **options))
            except SlipstreamError as error:
                self.codes.put(error)

        threading.Thread(target=run, daemon=True).start()

    def next(self, count: int) -> dict[str, list[Actor]]:
        found: dict[str, list[Actor]] = {}
        for _ in range(count):
            actor = self.ray.started.get(timeout=60)
            found.setdefault(actor.command[actor.command.index("--group") + 1], []).append(actor)
        return found


def understood(actor: Actor) -> Any:
    return parse(cli.LaunchOptions, actor.command[1:], cli.launch_command)


def test_machines_join_the_controller_and_come_back_where_they_are_lost(ray: FakeRay, tmp_path: Path) -> None:
    driver = Driver(ray, tmp_path / "run", gpus_per_node=1)
    first = driver.next(5)
    assert {name: len(actors) for name, actors in first.items()} == {
        "controller": 1, "trainer": 2, "generator-0": 1, "generator-1": 1,
    }  # fmt: skip
    assert ray.bundles == [{"CPU": 3}, *[{"CPU": 8}] * 4]
    [controller] = first["controller"]
    told = understood(controller)
    assert (told.recipe, told.out, told.resume) == ("@recipe", (tmp_path / "run").absolute(), None)
    keys = {actor.environment["SLIPSTREAM_RUN_KEY"] for actors in first.values() for actor in actors}
    assert len(keys) == 1
    for actors in first.values():
        for options in map(understood, actors):
            assert options.group == "controller" or options.controller == told.listen
    places = [understood(actor) for actor in first["trainer"]]
    assert [(options.nnodes, options.node_rank) for options in places] == [(2, 0), (2, 1)]
    assert len({options.rendezvous for options in places}) == 1
    assert places[0].rendezvous == f"{places[0].address}:5"

    first["generator-1"][0].running.end(LOST)
    assert list(driver.next(1)) == ["generator-1"]
    first["trainer"][1].running.end(1)  # the other one cannot go on without it
    assert {name: len(actors) for name, actors in driver.next(2).items()} == {"trainer": 2}
    assert first["trainer"][0].running.result == LOST
    first["generator-0"][0].running.end(0)
    controller.running.end(0)
    assert driver.codes.get(timeout=60) == 0
    assert ray.started.empty()


def test_a_controller_elsewhere_has_all_groups_begin_anew(ray: FakeRay, tmp_path: Path) -> None:
    driver = Driver(ray, tmp_path / "run")
    first = driver.next(4)
    first["generator-0"][0].running.end(0)
    ray.is_begun = True
    first["controller"][0].running.end(1)
    second = driver.next(4)
    assert {name: len(actors) for name, actors in second.items()} == dict.fromkeys(first, 1)
    told = understood(second["controller"][0])
    assert told.listen != understood(first["controller"][0]).listen
    assert (told.recipe, told.resume) == (None, (tmp_path / "run").absolute())
    go_on = second["controller"][0].environment["SLIPSTREAM_GO_ON"]
    assert go_on == f"slipstream launch --ray ADDRESS --resume {tmp_path / 'run'}"
    assert {understood(actors[0]).join_timeout for actors in second.values()} == {JOB_JOIN_TIMEOUT_S}
    assert {understood(second[name][0]).controller for name in second if name != "controller"} == {told.listen}
    for _ in range(CONTROLLER_RESTARTS - 1):
        second["controller"][0].running.end(1)
        second = driver.next(4)
    second["controller"][0].running.end(LOST)
    assert driver.codes.get(timeout=60) == 1


def test_a_controller_for_which_there_is_no_machine_ends_the_run_with_a_word(
    ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("slipstream.jobs.on_ray"), "FOUND_WITHIN_S", 0.2)
    driver = Driver(ray, tmp_path / "run")
    first = driver.next(4)
    ray.has_room = False
    first["controller"][0].running.end(LOST)
    error = driver.codes.get(timeout=60)
    assert isinstance(error, SlipstreamError)
    assert "no machine for the controller within 0.2 s" in str(error)


def test_bad_input_of_any_group_ends_the_run(ray: FakeRay, tmp_path: Path) -> None:
    driver = Driver(ray, tmp_path / "run", resumed_with=["--steps", "9"])
    first = driver.next(4)
    told = understood(first["controller"][0])
    assert (told.resume, told.overrides) == ((tmp_path / "run").absolute(), {"steps": 9})
    first["trainer"][0].running.end(2)
    assert driver.codes.get(timeout=60) == 2
    assert all(actor.running.is_done.is_set() for actors in first.values() for actor in actors)


def test_a_signal_while_no_controller_runs_is_kept_for_the_next(
    ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("slipstream.jobs.on_ray")
    runs: list[Any] = []
    run = module.RayRun.run
    monkeypatch.setattr(module.RayRun, "run", lambda self, say: runs.append(self) or run(self, say))
    commands = module.RayRun._commands

    def interrupted(self: Any, group: Any, *more: Any) -> Any:
        """The second controller has a machine, and its command does not run yet."""
        if group.name == "controller" and group.restarts_left < CONTROLLER_RESTARTS:
            self._signal_controller(15)
        return commands(self, group, *more)

    monkeypatch.setattr(module.RayRun, "_commands", interrupted)
    driver = Driver(ray, tmp_path / "run")
    [first] = driver.next(4)["controller"]
    first.running.end(1)
    [second] = driver.next(4)["controller"]
    assert (first.signals, second.signals) == ([], [15])
    runs[0]._heard = None
    runs[0]._signal_controller(15)
    second.running.end(LOST)
    assert driver.codes.get(timeout=60) == 143, "nothing starts again"


@pytest.mark.usefixtures("ray")
def test_a_signal_before_the_command_of_a_machine_keeps_it_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("slipstream.jobs.on_ray")
    sent: list[int] = []
    process = SimpleNamespace(wait=lambda: 0, send_signal=sent.append)
    started: list[list[str]] = []
    monkeypatch.setattr(module.subprocess, "Popen", lambda command, **_: started.append(command) or process)
    machine = module._Machine()
    assert machine.run(["launch"], {}, ".", "") == 0
    machine.signal(15)
    assert (len(started), sent) == (1, [15])
    other = module._Machine()
    other.signal(2)
    assert other.run(["launch"], {}, ".", "") == 130
    assert len(started) == 1


@pytest.mark.usefixtures("ray")
@pytest.mark.parametrize(
    ("group", "code", "left", "found"),
    [
        *[("controller", code, 3, "over") for code in (0, 2, 130, 143, 129)],
        *[("controller", code, left, "again" if left else "over") for code in (1, None, -9) for left in (1, 0)],
        *[("trainer", code, left, "again" if left else "left") for code in (1, None, 143) for left in (1, 0)],
        ("trainer", 0, GROUP_RESTARTS, "left"),
        ("generator-0", 2, GROUP_RESTARTS, "over"),
    ],
)
def test_what_follows_an_end(group: str, code: int | None, left: int, found: str) -> None:
    from slipstream.jobs.on_ray import fate

    assert fate(group, code, left) == found


def test_overrides_as_flags() -> None:
    assert as_flags({"steps": 5, "eval": {"every": 2}}) == ["--steps", "5", "--eval.every", "2"]


def test_without_ray_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "slipstream.jobs.on_ray", raising=False)
    assert cli.main(["launch", "quickstart", "--ray", "auto", "--out", str(tmp_path / "run")]) == 2
    assert "slipstream-rl[ray]" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
