"""What ties a process on another machine to its controller. The test is both ends of real ports over loopback."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from slipstream.controller.process import LeaseTether
from slipstream.core.addresses import StoreAddresses
from slipstream.core.channel import Ports, connect_by_book, wait
from slipstream.core.channel_spec import ChannelSpec, Kind
from slipstream.core.keys import RunKeys
from slipstream.core.processes import open_pidfd
from slipstream.core.types import Stop

LEASE_S = 0.3
SPECS = (
    ChannelSpec("commands", Kind.GATHER, "controller.to-generator-0", "generator-0.commands"),
    ChannelSpec("events", Kind.GATHER, "generator-0.events", "controller.events"),
)


@pytest.fixture
def ends() -> Iterator[tuple[Ports, Ports]]:
    """(the controller's, the group's)."""
    book = StoreAddresses(SPECS, HashStore(), RunKeys.new(), deadline_s=20.0)
    with ThreadPoolExecutor(2) as pool:
        coming = [
            pool.submit(lambda name=name: connect_by_book(SPECS, [name], book, 1)[name])
            for name in ("controller", "generator-0")
        ]
        controller, group = (future.result() for future in coming)
    yield controller, group
    group.close()
    controller.close()


@pytest.fixture
def agent() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """It, and what is readable once it has ended."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    descriptor = open_pidfd(process.pid)
    yield process, descriptor
    process.kill()
    process.communicate()
    os.close(descriptor)


def live(ports: Ports, until: Callable[[], bool], *, at_most_s: float) -> bool:
    """Wait as `serve` does, until `until`; False when that does not come to pass."""
    end_s = time.monotonic() + at_most_s
    while not until():
        if time.monotonic() > end_s:
            return False
        wait(ports.inputs.values(), ports.outputs.values(), timeout_s=0.02)
        while ports.inputs["commands"].get_nowait() is not None:
            pass
    return True


def test_a_controller_that_still_waits_for_other_groups_is_not_taken_for_dead(
    ends: tuple[Ports, Ports], agent: tuple[subprocess.Popen[bytes], int]
) -> None:
    """Until all are there it reads and says nothing; groups may be started minutes apart."""
    controller, group = ends
    tether = LeaseTether(group, LEASE_S, agent=agent[1])
    assert live(group, lambda: group.outputs["events"].connected == {"controller"}, at_most_s=10)
    assert not live(group, tether.is_cut, at_most_s=3 * LEASE_S)
    controller.outputs["to-generator-0"].put(Stop())  # the run has begun
    assert live(group, lambda: bool(group.inputs["commands"].heard_s), at_most_s=10)
    assert live(group, tether.is_cut, at_most_s=10), "from then on silence is death"


def test_a_controller_that_ends_while_it_waits_is_missed_after_a_lease(
    ends: tuple[Ports, Ports], agent: tuple[subprocess.Popen[bytes], int]
) -> None:
    controller, group = ends
    tether = LeaseTether(group, LEASE_S, agent=agent[1])
    assert live(group, lambda: group.outputs["events"].connected == {"controller"}, at_most_s=10)
    controller.close()
    assert live(group, tether.is_cut, at_most_s=10)


def test_a_process_that_was_stopped_waits_for_its_controller_anew(
    ends: tuple[Ports, Ports], agent: tuple[subprocess.Popen[bytes], int]
) -> None:
    controller, group = ends
    tether = LeaseTether(group, LEASE_S, agent=agent[1])
    controller.outputs["to-generator-0"].put(Stop())
    assert live(group, lambda: bool(group.inputs["commands"].heard_s), at_most_s=10)
    assert live(group, lambda: group.outputs["events"].connected == {"controller"}, at_most_s=10)
    time.sleep(2 * LEASE_S)  # stopped: it hears nothing, and asks nothing
    assert not tether.is_cut()
    assert live(group, tether.is_cut, at_most_s=10)


def test_a_process_does_not_outlive_its_agent(
    ends: tuple[Ports, Ports], agent: tuple[subprocess.Popen[bytes], int]
) -> None:
    process, descriptor = agent
    tether = LeaseTether(ends[1], 100 * LEASE_S, agent=descriptor)
    assert tether.fds == [descriptor]
    assert not tether.is_cut()
    process.kill()
    process.wait()
    assert tether.is_cut()


def test_it_gives_signs_of_life_itself_now_and_then(
    ends: tuple[Ports, Ports], agent: tuple[subprocess.Popen[bytes], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    beats: list[Ports] = []
    monkeypatch.setattr(Ports, "beat", lambda ports: beats.append(ports))
    tether = LeaseTether(ends[1], 100 * LEASE_S, agent=agent[1])
    assert not tether.is_cut()
    assert not tether.is_cut()
    assert beats == [ends[1]], "once in a part of a lease"
