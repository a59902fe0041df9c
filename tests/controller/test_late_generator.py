"""A trainer of two ranks whose generator comes later than the deadline of their collectives may be.

The ranks are processes of their own; the test is the controller, and the generator in the end.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from listeners import held_port
from torch.distributed import HashStore

from slipstream.controller.meeting import Cluster, Listen, MeetingPlace, attend, read_spec
from slipstream.controller.pipeline import CONTROLLER, Node, Pipeline, weights
from slipstream.core.addresses import StoreAddresses
from slipstream.core.channel import Ports, connect_by_book, wait
from slipstream.core.errors import ChannelTimeout
from slipstream.core.keys import RunKeys
from slipstream.core.peer_messages import Failed, Joined

TIMEOUT_S = 120.0
MEMBERS = ("trainer", "trainer@1")


class Run:
    """A run of a trainer, which is started, and of a generator, which is not; rank 0 alone awaits it."""

    def __init__(self, folder: Path, opened: ExitStack) -> None:
        nodes = tuple(
            Node(name, os.path.join, host="torchrun", ranks=ranks)
            for name, ranks in (("trainer", 2), ("generator-0", 1))
        )
        offers = weights("weights/generator-0", "trainer.weights", "generator-0.weights")
        self.opened, self.folder = opened, folder
        self.pipeline, self.keys = Pipeline(nodes, (offers,)), RunKeys.new()
        cluster = Cluster(Listen(), self.keys, join_timeout_s=TIMEOUT_S)
        self.place = MeetingPlace(cluster, self.pipeline, lease_s=TIMEOUT_S, deadline_s=TIMEOUT_S)
        self.place.open(folder, "run-1", delta=False, relays=True, started_s=0.0)
        self.store = attend(self.place.address, timeout_s=TIMEOUT_S)  # the controller's own is busy while it waits

    def connect(self, name: str, book: StoreAddresses) -> Ports:
        ports = connect_by_book(self.pipeline.all_channels, [name], book, 1)[name]
        self.opened.callback(ports.close)
        return ports

    def start(self, rank: int, port: int) -> subprocess.Popen[bytes]:
        """As torchrun's agent does."""
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        environment = os.environ | meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | self.keys.as_environment()
        command = ["-m", "slipstream.controller.process", "--controller", self.place.address, "--group", "trainer"]
        log = self.opened.enter_context((self.folder / f"{rank}.log").open("wb"))
        process = subprocess.Popen(
            [sys.executable, *command, "--join-timeout", str(TIMEOUT_S)], env=environment, stdout=log, stderr=log
        )
        self.opened.callback(process.wait)
        self.opened.callback(process.kill)
        return process

    def until(self, *keys: str, alive: subprocess.Popen[bytes]) -> None:
        """Wait until the store has these, and `alive` has not ended."""
        end_s = time.monotonic() + TIMEOUT_S
        while not self.store.check(list(keys)):
            assert alive.poll() is None, (self.folder / "1.log").read_text()
            assert time.monotonic() < end_s, keys
            time.sleep(0.05)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    tmp_path.chmod(0o700)
    with ExitStack() as opened:
        yield Run(tmp_path, opened)


def test_no_rank_of_a_trainer_joins_before_the_one_that_waits_for_a_generator(run: Run) -> None:
    """Else it begins to load, and gives up in its first collective, where rank 0 is missing."""
    with held_port() as port:
        ranks = [run.start(rank, port) for rank in range(2)]
        with ThreadPoolExecutor(1) as pool:
            controller = pool.submit(run.connect, CONTROLLER, run.place.addresses(run.folder))
            channels = "slipstream/channels"
            run.until(f"{channels}/trainer", f"{channels}/trainer@1", f"{channels}/trainer/1/met/ranks", alive=ranks[1])
            assert not controller.done(), "it waits for the generator, too"
            assert not run.store.check([f"{channels}/trainer/1/met"])
            keys = run.keys.of_start(read_spec(run.store, run.keys, timeout_s=TIMEOUT_S).start)
            run.connect("generator-0", StoreAddresses(run.pipeline.all_channels, run.store, keys))
            events = controller.result(TIMEOUT_S).inputs["events"]
        joined: list[str] = []
        while set(joined) != set(MEMBERS):
            assert wait([events], timeout_s=TIMEOUT_S), joined
            while (message := events.get_nowait()) is not None:
                assert isinstance(message, Joined | Failed)  # what they are to run is no executor
                joined += [message.executor] if isinstance(message, Joined) else []


def test_ranks_that_do_not_meet_are_named_after_a_time() -> None:
    book = StoreAddresses([], HashStore(), None)
    with pytest.raises(ChannelTimeout, match="not all ranks of 'trainer' have found their peers"):
        book.meet("trainer", 1, 2, timeout_s=0.1)
    book.meet("trainer", 1, 2, timeout_s=TIMEOUT_S)
