"""The agents of a group meet: what they read in their store counts with the run's seal only."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
from listeners import listening
from torch.distributed import DistError, HashStore, TCPStore
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousStateError

from slipstream.controller.groups import Rendezvous, SealedState
from slipstream.controller.meeting import Listen, Meeting, RunSpec, host_store
from slipstream.controller.pipeline import Node
from slipstream.core.channel_spec import ChannelSpec, Kind
from slipstream.core.keys import RunKeys

KEYS = RunKeys(b"k" * 32)


def test_a_state_is_replaced_by_who_has_seen_it_last() -> None:
    store = HashStore()
    one, other = (SealedState(store, "run-1-trainer", KEYS) for _ in range(2))
    assert one.get_state() is None
    first = one.set_state(b"first")
    assert first is not None
    assert first[0] == b"first"
    assert first[2]
    assert other.get_state() == first[:2]
    late = other.set_state(b"late")
    assert late == (*first[:2], False), "there is one already"
    second = other.set_state(b"second", first[1])
    assert second is not None
    assert (second[0], second[2]) == (b"second", True)
    assert one.set_state(b"stale", first[1]) == (*second[:2], False)
    assert one.get_state() == second[:2]


def sealed_elsewhere(keys: RunKeys, name: str) -> str:
    store = HashStore()
    SealedState(store, name, keys).set_state(b"x")
    return store.get(f"rendezvous/{name}").decode()


@pytest.mark.parametrize(
    "written",
    [
        "x",
        b64encode(b"x").decode(),
        sealed_elsewhere(RunKeys(b"j" * 32), "run-1-trainer"),
        sealed_elsewhere(KEYS, "run-2-trainer"),
        sealed_elsewhere(KEYS, "run-1-generator-0"),
        KEYS.seal(b64encode(b"x").decode(), "run"),
    ],
    ids=["junk", "no seal", "another key", "another run", "another group", "another place"],
)
def test_a_state_of_somebody_else_is_refused(written: str) -> None:
    store = HashStore()
    state = SealedState(store, "run-1-trainer", KEYS)
    store.set("rendezvous/run-1-trainer", written)
    for attempt in (state.get_state, lambda: state.set_state(b"ours"), lambda: state.set_state(b"ours", b"token")):
        with pytest.raises(RendezvousStateError, match="without this run's key"):
            attempt()


def test_a_store_that_is_gone_is_an_error_that_torch_knows() -> None:
    class Gone(HashStore):
        def compare_set(self, *_: object) -> bytes:
            raise DistError("gone")

    with pytest.raises(RendezvousConnectionError):
        SealedState(Gone(), "run-1-trainer", KEYS).get_state()


@pytest.mark.slow
def test_each_start_of_a_group_meets_in_a_store_of_its_own() -> None:
    """Gloo leaves the addresses of ranks in it: a rank that comes first would connect to where another was before."""
    store, timeout = HashStore(), timedelta(seconds=5)
    state = SealedState(store, "run-1-trainer", KEYS)
    handler = Rendezvous.from_backend("run-1-trainer", store, state, 1, 1, "127.0.0.1")
    try:
        met = [handler.next_rendezvous().bootstrap_store_info for _ in range(2)]
    finally:
        handler.shutdown()
    assert met[0].master_port != met[1].master_port
    assert met[0].master_port not in {port for _, port in listening(os.getpid())}
    assert TCPStore(met[1].master_addr, met[1].master_port, is_master=False, timeout=timeout).num_keys() <= 1


# The attack: whoever reaches a port of the group's agent writes a pickle wherever a state might be read


class Runs:
    """What a pickle would run."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self._marker),)


@pytest.fixture
def announced(tmp_path: Path) -> Iterator[Meeting]:
    """A run with a key in `tmp_path`, whose trainer has one rank per machine and waits for its controller's ports."""
    keys = RunKeys.new()
    keys.save(tmp_path / "key")
    meeting = Meeting(Listen(), timeout_s=30)
    nodes = (Node("trainer", os.path.join, host="torchrun", ranks=2),)
    channels = (ChannelSpec("trainer.events", Kind.GATHER, "trainer.events", "controller.events"),)
    meeting.announce(
        RunSpec(
            "run-1", "start-1", tmp_path, nodes, channels, 60.0, 5.0, delta=False, relays=True, wall_minus_clock_s=0.0,
            started_s=0.0,
        ),
        keys,
    )  # fmt: skip
    yield meeting
    del meeting  # and with it the store


@contextmanager
def launched(meeting: Meeting, folder: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "slipstream.cli", "launch", "--group", "trainer"]
    command += ["--controller", f"127.0.0.1:{meeting.port}", "--key-file", str(folder / "key"), *options]
    with (folder / "log").open("ab") as log:
        agent = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        yield agent
    finally:
        with suppress(ProcessLookupError):
            os.killpg(agent.pid, 9)
        agent.wait()


def until(found: Callable[[], bool], what: str, log: Path, timeout_s: float = 120.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not found():
        assert time.monotonic() < deadline_s, f"{what}\n{log.read_text()}"
        time.sleep(0.2)  # each look asks every store that listens


def poison(port: int, pickled: bytes) -> int:
    """Overwrite everything in the store at `port`, and torch's own key for the state; returns how many there were."""
    try:
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=5))
        found = {*store.list_keys(), "torch.rendezvous.run-1-trainer"}
        for key in found:
            store.set(key, b64encode(pickled).decode())
    except DistError:  # it has ended, or is no store
        return 0
    return len(found)


@pytest.mark.skipif(sys.platform != "linux", reason="looks for ports in /proc")
@pytest.mark.parametrize("where", [pytest.param("one machine", marks=pytest.mark.slow), "two machines"])
def test_a_pickle_in_the_rendezvous_runs_nothing_and_ends_the_group(
    announced: Meeting, tmp_path: Path, where: str
) -> None:
    """Written as soon as the agent's store answers, and again until the agent ends."""
    marker, log = tmp_path / "ran", tmp_path / "log"
    pickled = pickle.dumps(Runs(marker))
    options = ["--address", "127.0.0.2"]
    if where == "two machines":
        options = ["--nnodes", "2", "--node-rank", "0", "--rendezvous", "127.0.0.1:0", "--address", "127.0.0.1"]
    with launched(announced, tmp_path, *options) as agent:

        def has_state() -> bool:
            """The agents' own store has it, the processes' store does not."""
            for _, port in listening(agent.pid):
                with suppress(DistError):
                    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=5))
                    if any("rendezvous" in key for key in store.list_keys()):
                        return True
            return agent.poll() is not None

        until(has_state, "the agent does not meet anybody", log)
        assert {address for address, _ in listening(agent.pid)} == {"127.0.0.1"}, "others' machines have no way in"

        def attacked_to_the_end() -> bool:
            for _, port in listening(agent.pid):
                poison(port, pickled)
            return agent.poll() is not None or marker.exists()

        until(attacked_to_the_end, "the agent goes on", log)
    assert not marker.exists(), "what was written to the store has run"
    assert agent.returncode == 1
    assert "somebody without this run's key has written to the store of the rendezvous" in log.read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="as Linux tells it")
def test_a_store_listens_at_one_address() -> None:
    store = host_store(Listen("127.0.0.2", 0), timeout=timedelta(seconds=5))
    assert {address for address, port in listening(os.getpid()) if port == store.port} == {"127.0.0.2"}
