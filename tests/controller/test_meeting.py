"""Where groups meet: what the controller announces, and what a group believes."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from listeners import held_port

from slipstream.controller import meeting as meeting_module
from slipstream.controller.meeting import (
    SPEC_KEY,
    Cluster,
    Listen,
    Meeting,
    MeetingPlace,
    RunSpec,
    attend,
    read_address,
    read_spec,
)
from slipstream.controller.pipeline import Node, Pipeline
from slipstream.core.channel_spec import ChannelSpec, Kind
from slipstream.core.errors import ChannelTimeout, ConfigError, RunIsOver, SlipstreamError
from slipstream.core.keys import RunKeys

SPEC = RunSpec(
    run_id="run-1",
    start="s",
    run_dir=Path("/runs/a"),
    nodes=(Node("trainer", os.path.join, host="torchrun", ranks=2), Node("rewards", os.path.join)),
    channels=(ChannelSpec("rollouts", Kind.SCATTER, "rewards.rollouts", "trainer.rollouts", route="rollouts/samples"),),
    deadline_s=60.0,
    lease_s=5.0,
    delta=True,
    relays=False,
    wall_minus_clock_s=1.5,
    started_s=7.0,
)


def test_a_group_reads_what_the_controller_announced(tmp_path: Path) -> None:
    keys, file = RunKeys.new(), tmp_path / "address"
    meeting = Meeting(Listen(address_file=file), timeout_s=10)
    meeting.announce(SPEC, keys)
    store = attend(str(file), timeout_s=10)
    assert read_address(str(file), timeout_s=0.1) == ("127.0.0.1", meeting.port)
    assert read_spec(store, keys, timeout_s=5) == SPEC
    assert SPEC.node("trainer").ranks == 2
    with pytest.raises(ConfigError, match="no such group"):
        SPEC.node("rewards")


def test_a_specification_that_somebody_else_wrote_is_not_even_decoded() -> None:
    """It names code to import: whoever reaches the store could have it run."""
    keys, meeting = RunKeys.new(), Meeting(Listen(), timeout_s=10)
    for forged in (RunKeys.new().seal(SPEC.encode(), SPEC_KEY), SPEC.encode(), "not JSON at all", b"\xff" * 80):
        meeting.store.set(SPEC_KEY, forged)
        with pytest.raises(ConfigError, match="not sealed with the key of the run"):
            read_spec(meeting.store, keys, timeout_s=5)


def test_a_specification_of_an_earlier_start_leads_to_nobody(tmp_path: Path) -> None:
    """With its seal, which still counts: the channels of the next start have other keys."""
    keys, pipeline = RunKeys.new(), Pipeline(nodes=SPEC.nodes, channels=())
    starts, channels = [], []
    for _ in range(2):
        place = MeetingPlace(Cluster(Listen(), keys), pipeline, lease_s=5.0, deadline_s=10.0)
        place.open(tmp_path, "run-1", delta=False, relays=True, started_s=0.0)
        spec = read_spec(attend(place.address, timeout_s=10), keys, timeout_s=5)
        starts.append(keys.of_start(spec.start))
        channels.append(place.addresses(tmp_path).keys)
        assert RunKeys.take(place.child_environment()) == channels[-1]
    assert starts == channels
    assert channels[0] != channels[1]
    assert keys not in channels


def test_waits_for_a_controller_have_a_deadline_and_say_whom_they_wait_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "not yet").write_text("\n")
    for file in ("never", "not yet"):
        with pytest.raises(SlipstreamError, match=r"no address of a controller for 0.1 s[\s\S]*--join-timeout"):
            read_address(str(tmp_path / file), timeout_s=0.1)
    with pytest.raises(SlipstreamError, match="announced no run"):
        read_spec(Meeting(Listen(), timeout_s=10).store, RunKeys.new(), timeout_s=0.1)
    with held_port() as port:
        with pytest.raises(SlipstreamError, match=f"no controller answered for 0.5 s[\\s\\S]*127.0.0.1:{port}"):
            attend(f"127.0.0.1:{port}", timeout_s=0.5)
        monkeypatch.setattr(meeting_module, "READ_AGAIN_S", 0.1)
        asked = iter([False, True])
        with pytest.raises(RunIsOver):
            attend(f"127.0.0.1:{port}", timeout_s=60.0, is_over=lambda: next(asked))


def test_a_file_that_vanishes_between_two_looks_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller that wrote it has ended, and another comes."""
    file, read = tmp_path / "address", Path.read_text
    file.write_text("127.0.0.1:5\n")
    answers = [OSError(errno.ESTALE, "Stale file handle"), FileNotFoundError()]

    def read_text(path: Path) -> str:
        if answers:
            raise answers.pop()
        return read(path)

    monkeypatch.setattr(Path, "read_text", read_text)
    assert read_address(str(file), timeout_s=60) == ("127.0.0.1", 5)


def test_groups_are_waited_for_longer_than_the_controllers_own_children(tmp_path: Path) -> None:
    pipeline = Pipeline(nodes=SPEC.nodes, channels=())
    for join_timeout_s, found in ((600.0, 600.0), (0.1, 0.3)):
        cluster = Cluster(Listen(), RunKeys.new(), join_timeout_s=join_timeout_s)
        place = MeetingPlace(cluster, pipeline, lease_s=5.0, deadline_s=0.3)
        assert place.patience_s == {"trainer": found, "trainer@1": found}
    cluster = Cluster(Listen(), RunKeys.new(), join_timeout_s=0.4)
    place = MeetingPlace(cluster, Pipeline(nodes=SPEC.nodes, channels=SPEC.channels), lease_s=5.0, deadline_s=0.2)
    tmp_path.chmod(0o700)
    for executor, limit in (("trainer", "0.4"), ("rewards", "0.2")):
        with pytest.raises(ChannelTimeout, match=f"'{executor}' did not come.* within {limit} s"):
            place.addresses(tmp_path).find(f"{executor}.in")


@pytest.mark.parametrize(("status", "steps", "is_over"), [("done", 3, True), ("done", 2, False), ("failed", 3, False)])
def test_a_run_that_has_done_its_steps_needs_no_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str, steps: int, is_over: bool
) -> None:
    monkeypatch.setattr(meeting_module, "read_summary", lambda _: SimpleNamespace(status=status, steps=steps))
    assert meeting_module.is_done(tmp_path, 3) == is_over
    assert not meeting_module.is_done(None, None)


def test_a_folder_without_a_summary_is_of_no_run_that_is_done(tmp_path: Path) -> None:
    assert not meeting_module.is_done(tmp_path, 0)


def test_a_group_finds_a_controller_that_was_started_again_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that it reads first is of an earlier start."""
    monkeypatch.setattr(meeting_module, "READ_AGAIN_S", 0.5)
    file = tmp_path / "address"
    with held_port() as port, ThreadPoolExecutor(1) as pool:
        file.write_text(f"127.0.0.1:{port}\n")
        attending = pool.submit(attend, str(file), timeout_s=60)
        assert wait([attending], timeout=0.5).not_done
        meeting = Meeting(Listen(address_file=file), timeout_s=10)
        store = attending.result(timeout=60)
    meeting.store.set("said", "heard")
    assert store.get("said") == b"heard"
    assert store.timeout.total_seconds() == 60, "of what is asked from it later"


@pytest.mark.parametrize("content", ["host", "host:port"])
def test_a_file_without_an_address_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "address"
    file.write_text(content)
    with pytest.raises(ConfigError, match="not the address"):
        read_address(str(file), timeout_s=0.1)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_address(str(tmp_path), timeout_s=0.1)


def test_an_address_in_use_or_of_another_machine_is_bad_input() -> None:
    meeting = Meeting(Listen(), timeout_s=10)
    for listen in (Listen(port=meeting.port), replace(Listen(), host="192.0.2.1")):
        with pytest.raises(ConfigError, match="cannot listen there"):
            Meeting(listen, timeout_s=10)
