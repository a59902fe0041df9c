"""Hostile environments change nothing outside their worker, and the pool goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from barriers import needs, secret_at_home
from drawn import drawn
from drive import GENEROUS_S, asked, opened, take_all, text, wait_for
from episode_world import PlainNumbers, prompt
from hosted_agents import run_light
from hypothesis import strategies as st
from ports import start
from processes import below, children, not_gone
from test_environment_notes import CONFIG

from slipstream.core.clock import VirtualClock
from slipstream.core.errors import ConfigError
from slipstream.core.recipes import resolve
from slipstream.core.turn_messages import TurnSampled
from slipstream.core.types import Prompt
from slipstream.environments import hosting
from slipstream.environments.answers import Lost, Said
from slipstream.environments.episodes import CHARGES
from slipstream.environments.executor import Environments
from slipstream.environments.given import with_given_environment
from slipstream.environments.pool import EpisodePool, HostLink
from slipstream.environments.workers import EnvironmentPool
from slipstream.jail import sandbox
from slipstream.jail.protocol import WorkerReady, frame

MakePool = Callable[..., EnvironmentPool]
LIMIT_S = 7.0


@pytest.fixture
def hostile(keep_workers: MakePool) -> EnvironmentPool:
    """A pool with a worker that lives, whatever the tests before have done to theirs."""
    return keep_workers("Hostile", "AsyncHostile", step_limit_s=LIMIT_S, clock=VirtualClock())


def trees(pool: EnvironmentPool) -> set[int]:
    keepers = {site.host._keeper.pid for site in pool._sites}  # type: ignore[attr-defined]
    return keepers.union(*map(below, keepers))


def guilt(told: list[Any]) -> dict[Any, bool | None]:
    assert all(isinstance(one, Lost) for one in told), told
    return {one.key: one.is_guilty for one in told}


def process_of(told: Any) -> str:
    """Return the worker that a `Diary` writes down."""
    return text(told).split()[3]


def test_episodes_stay_on_the_worker_that_has_the_fewest(make_workers: MakePool) -> None:
    pool = make_workers("Diary", num_workers=2)
    while not all(site.is_ready for site in pool._sites):
        pool._advance(GENEROUS_S)
    opened(pool, list(range(10)), 0, name="n")
    first = {key: process_of(one) for key, one in take_all(pool, list(range(10)), "x").items()}
    assert sorted(list(first.values()).count(each) for each in set(first.values())) == [5, 5]
    gone = [key for key, process in first.items() if process == first[0]]
    for key in gone:
        pool.finish(key)
    wait_for(pool, 5)
    opened(pool, [100 + key for key in range(4)], 0, name="n")
    new = take_all(pool, [100 + key for key in range(4)], "x")
    assert len({process_of(one) for one in new.values()} - {first[0]}) == 0, "the other has five already"
    left = [key for key in first if key not in gone]
    assert {key: process_of(one) for key, one in take_all(pool, left, "y", turn=2).items()} == {
        key: first[key] for key in left
    }


def test_a_worker_that_dies_takes_its_episodes_along(hostile: EnvironmentPool) -> None:
    pool = hostile
    opened(pool, ["dies", "idle"], 0)
    pool.take("dies", 1, {"content": "die"})
    told = wait_for(pool, 2)
    assert guilt(told) == {"dies": True, "idle": False}
    assert {one.key: text(one) for one in told} == {
        "dies": "worker died (exit code 7)",
        "idle": "another episode of its worker: worker died (exit code 7)",
    }
    opened(pool, ["dies", "idle"], 0)
    assert text(asked(pool, "idle", "ok")).startswith("ok")
    assert pool.num_restarts == 1


def test_who_of_several_ended_a_worker_is_not_known(hostile: EnvironmentPool) -> None:
    pool = hostile
    opened(pool, ["dies", "idle"], 0)
    opened(pool, ["waits"], 1)
    pool.take("waits", 1, {"content": "wait"})
    pool.poll()
    pool.take("dies", 1, {"content": "die"})
    assert guilt(wait_for(pool, 3)) == {"dies": None, "waits": None, "idle": False}


def test_who_ended_a_worker_between_two_calls_is_not_known(hostile: EnvironmentPool) -> None:
    """Each is charged: what an environment leaves behind, a thread, may end every worker that it gets."""
    pool = hostile
    opened(pool, ["a", "b"], 0)
    [server] = [pid for pid in trees(pool) if not children(pid)]
    os.kill(server, signal.SIGKILL)
    told = wait_for(pool, 2)
    assert guilt(told) == {"a": None, "b": None}
    assert {text(one) for one in told} == {"worker died (signal 9)"}


def test_a_pool_opens_episodes_again_after_any_number_of_deaths(hostile: EnvironmentPool) -> None:
    for number in range(3):  # as many as workers may fail to start in a row
        opened(hostile, [number], 0)
        assert isinstance(asked(hostile, number, "die"), Lost)
    assert hostile.num_restarts == 3


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        pytest.param("flood", "bad output", marks=pytest.mark.slow),  # as of reward workers: `test_sandbox.py`
        pytest.param("forge 0500000093019101c0", "bad output", marks=pytest.mark.slow),
    ],
)
def test_output_that_is_no_message_ends_the_worker(hostile: EnvironmentPool, attack: str, reason: str) -> None:
    pool = hostile
    opened(pool, ["bad"], 0)
    assert reason in text(asked(pool, "bad", attack))
    opened(pool, ["good"], 0)
    assert text(asked(pool, "good", "ok")).startswith("ok")


def spoke(episode: int, turn: int, **changed: Any) -> hosting.Spoke:
    fields: dict[str, Any] = {"messages": [], "done": False, "reward": 1.0, "seconds": 0.0}
    counts = {"num_tool_calls": 0, "num_tool_errors": 0}
    return hosting.Spoke(episode, turn, **(fields | counts | changed))


FORGED = {
    "another episode": spoke(7, 1),
    "another turn": spoke(0, 2),
    "the turn before": spoke(0, 0),
    "an idle episode": spoke(1, 0),
    "an end that nobody asked for": hosting.Closed(0, 1.0),
    "a reward that is none": spoke(0, 1, reward=float("nan")),
    "a time that is none": spoke(0, 1, seconds=float("inf")),
    "a count that is none": spoke(0, 1, num_tool_calls=-1),
    "a role of the policy's": spoke(0, 1, messages=[{"role": "assistant", "content": "I won"}]),
    "no text": spoke(0, 1, messages=[{"role": "user", "content": [1]}]),
    "a second start": WorkerReady(isolation=["files"]),
    "stuck without being late": hosting.Stuck(0),
    "a fault of an idle episode": hosting.Faulted(1, "x"),
}


REALLY_FORGED = ("a role of the policy's",)


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[] if what in REALLY_FORGED else pytest.mark.slow) for what in FORGED]
)
def test_a_forged_answer_ends_the_worker(hostile: EnvironmentPool, what: str) -> None:
    pool = hostile
    opened(pool, ["bad"], 0)
    opened(pool, ["idle"], 0)
    message = FORGED[what]
    if hasattr(message, "episode"):  # the pool has had others
        message = msgspec.structs.replace(message, episode=pool._by_key["bad"].number + message.episode)
    pool.take("bad", 1, {"content": f"forge {frame(message).hex()}"})
    told = wait_for(pool, 2)
    assert guilt(told) == {"bad": True, "idle": False}
    assert "bad output" in text(next(one for one in told if one.key == "bad"))


def test_an_answer_given_twice_ends_the_worker(hostile: EnvironmentPool) -> None:
    """A forged one for the call in hand cannot be told from a true one, until the true one comes."""
    pool = hostile
    opened(pool, ["bad"], 0)
    pool.take("bad", 1, {"content": f"forge {frame(spoke(pool._by_key['bad'].number, 1)).hex()}"})
    forged, lost = wait_for(pool, 2)
    assert isinstance(forged, Said)
    assert (lost.key, text(lost)) == ("bad", "worker sent bad output: an answer to no question")


def test_an_environment_that_forks_and_returns_answers_once(hostile: EnvironmentPool) -> None:
    pool = hostile
    opened(pool, ["plain"], 0)
    opened(pool, ["async"], 1)
    for turn in (1, 2, 3):
        for key in ("plain", "async"):
            assert text(asked(pool, key, "return_twice", turn=turn)) == "once"
    assert pool.num_restarts == 0


@pytest.mark.slow  # the jail is that of reward workers, whose test of the same name is a usual one
def test_forked_children_that_left_their_session_die_with_the_worker(make_workers: MakePool) -> None:
    needs("processes")
    pool = make_workers("Hostile")
    opened(pool, ["a"], 0)
    assert 0 < int(text(asked(pool, "a", "fork 20"))) <= 20
    forked = trees(pool)
    assert len(forked) > 20
    assert isinstance(asked(pool, "a", "die", turn=2), Lost)
    assert not not_gone(forked)


def test_closing_ends_all_processes_and_removes_their_folders(make_workers: MakePool) -> None:
    pool = make_workers("Hostile", num_workers=2)
    opened(pool, ["a", "b"], 0)
    take_all(pool, ["a", "b"], "fork 5")
    pool.take("a", 2, {"content": "flood"})
    folders = [Path(site.host._scratch) for site in pool._sites]  # type: ignore[attr-defined]
    processes = trees(pool)
    assert all(folder.is_dir() for folder in folders)
    pool.close()
    assert not not_gone(processes)
    assert not any(folder.exists() for folder in folders)


def test_memory_processes_and_output_are_bounded(make_workers: MakePool) -> None:
    needs("user")
    pool = make_workers("Hostile")
    opened(pool, ["a", "b", "c"], 0)
    assert "MemoryError" in text(asked(pool, "a", "memory"))
    assert text(asked(pool, "b", "print")) == "printed"
    assert int(text(asked(pool, "c", "fork 1000"))) < 400
    assert pool.num_restarts == 0


def test_files_network_secrets_and_processes_are_out_of_reach(
    make_workers: MakePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("files", "network", "processes", "user")
    private, marker = secret_at_home(tmp_path, monkeypatch), Path(f"/slipstream-environment-test-{os.getpid()}")
    monkeypatch.setenv("SLIPSTREAM_TEST_SECRET", "token")
    monkeypatch.setenv("SLIPSTREAM_TEST_NAMED", "told")
    pool = make_workers("Hostile", environment=["SLIPSTREAM_TEST_NAMED"])
    assert pool.isolation >= {"files", "network", "processes", "user", "limits", "syscalls"}
    opened(pool, list(range(8)), 0)
    commands = ["environment SLIPSTREAM_TEST_SECRET", "environment SLIPSTREAM_TEST_NAMED", "identity"]
    commands += ["network", f"read {private}", f"write {marker}", "write note.txt", "processes"]
    for key, command in enumerate(commands):
        pool.take(key, 1, {"content": command})
    told = {one.key: text(one) for one in wait_for(pool, len(commands))}
    assert not marker.exists()
    assert [told[key] for key in range(3)] == ["unset", "told", "False"]
    assert "PermissionError" in told[3]
    assert told[3].endswith("or give it to slipstream.run as a Python class)")
    assert "FileNotFoundError" in told[4] or "PermissionError" in told[4]
    assert "Read-only" in told[5]
    assert told[6] == "written"
    assert int(told[7]) <= 4


@pytest.mark.parametrize("how", ["hold_the_lock", "close"])
def test_what_holds_the_interpreter_or_hangs_up_costs_its_worker(hostile: EnvironmentPool, how: str) -> None:
    """Nothing in the worker runs any more, or nothing that it says arrives: it cannot say that it is stuck."""
    pool, clock = hostile, hostile._clock
    assert isinstance(clock, VirtualClock)
    opened(pool, ["holds", "idle"], 0)
    pool.take("holds", 1, {"content": how})
    pool.poll()
    clock.advance(LIMIT_S)
    assert pool.poll() == []
    clock.advance(5.0)
    assert guilt(wait_for(pool, 2)) == {"holds": True, "idle": False}


def test_a_worker_that_is_stopped_is_ended(hostile: EnvironmentPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_KEEPER_GRACE_S", 0.5)  # its keeper is stopped, too
    pool, clock = hostile, hostile._clock
    assert isinstance(clock, VirtualClock)
    opened(pool, ["a", "b", "c"], 0)
    for pid in trees(pool):
        os.kill(pid, signal.SIGSTOP)
    for key in "ab":
        pool.take(key, 1, {"content": "ok " + "x" * 3_000_000})  # more than a socket holds
    assert any(site.host.has_unsent for site in pool._sites)
    pool.poll()
    clock.advance(LIMIT_S)
    pool.poll()
    clock.advance(5.0)
    assert guilt(wait_for(pool, 3)) == {"a": None, "b": None, "c": False}
    opened(pool, ["a"], 0)


def test_an_environment_that_cannot_be_imported_is_an_error_before_anything_starts(make_workers: MakePool) -> None:
    with pytest.raises(ConfigError, match="has no class 'Nothing'"):
        make_workers("Nothing")


def test_more_episodes_than_fit_wait_for_room(hostile: EnvironmentPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.environments.pool.MAX_EPISODES_PER_HOST", 2)
    pool = hostile
    for key in range(3):
        pool.open(key, 0, {})
    assert {one.key for one in wait_for(pool, 2)} == {0, 1}
    assert pool.num_open == 3
    assert pool.next_deadline_s() is None
    pool.finish(1)
    assert [one.key for one in wait_for(pool, 2)] == [1, 2]


class Scripted:
    """A host whose messages are drawn, behind a pipe that is always readable."""

    failure: str | None = None
    has_unsent = False

    def __init__(self, messages: list[Any]) -> None:
        self._messages = messages
        self._read, self._write = os.pipe()
        os.write(self._write, b"\0")

    def fileno(self) -> int:
        return self._read

    def send(self, messages: Any) -> None: ...

    def flush(self) -> None: ...

    def receive(self) -> list[Any]:
        messages, self._messages = self._messages, []
        return messages

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)


class ScriptedPool(EpisodePool):
    def __init__(self, scripts: list[list[Any]], *, num_spares: int = 0, clock: VirtualClock | None = None) -> None:
        self._scripts = scripts
        clock = clock or VirtualClock()
        super().__init__(
            num_hosts=1, num_spares=num_spares, num_sources=1, step_limit_s=1.0, max_chars=1000, clock=clock
        )

    def _start_host(self) -> HostLink:
        return Scripted([WorkerReady([]), *(self._scripts.pop(0) if self._scripts else [])])

    def _abandons(self, host: HostLink, episode: int) -> bool:
        return False


def test_an_episode_that_is_lost_right_behind_its_answer_is_asked_nothing() -> None:
    """Both are told in one `poll`; whoever acts on the first one does not know the second yet."""
    pool = ScriptedPool([])
    try:
        pool.poll()
        pool.open("a", 0, {})
        pool.poll()
        pool._sites[0].host._messages = [spoke(0, 0), spoke(0, 0)]  # type: ignore[attr-defined]
        answer, lost = pool.poll()
        assert (type(answer), type(lost)) == (Said, Lost)
        pool.take("a", 1, {})
        pool.finish("a")
        assert pool.poll() == []
        assert pool.num_open == 0
        pool.open("a", 0, {})
    finally:
        pool.close()


class Refusing(PlainNumbers):
    """A chat whose template takes nothing."""

    def opening(self, *_: Any, **__: Any) -> Prompt:
        raise ConfigError("no template takes it", got="", allowed="other messages")


def test_an_answer_that_cannot_be_read_and_the_end_of_its_worker_are_one_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both come in one `poll`: the second one is not one of the environment that is opened for the first one."""
    pool = ScriptedPool([])
    monkeypatch.setattr("slipstream.environments.executor.make_pool", lambda *_, **__: pool)
    monkeypatch.setattr("slipstream.environments.executor.build_chat", lambda *_: Refusing())
    config, given = with_given_environment(resolve(CONFIG, {"rewards": {"terms": []}}), agent=run_light)
    executor = Environments(config=config, given=given)
    try:
        ports = start(executor, tmp_path, name="environments")
        ports["turns"].put(TurnSampled(ordinal=0, sample=0, replica=0, turn=0, prompt=prompt()))
        executor.step()
        pool._sites[0].host._messages = [spoke(0, 0), spoke(0, 0)]  # type: ignore[attr-defined]
        executor.step()
        assert (pool.num_open, pool.num_restarts) == (1, 1)
        [episode] = executor._episodes._open.values()
        assert (episode.num_restarts, episode.charges) == (1, CHARGES[True])
    finally:
        executor.close()


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_answer_ends_the_host(what: str) -> None:
    """As of a worker, without the process."""
    pool = ScriptedPool([])
    try:
        pool.poll()
        host: Any = pool._sites[0].host
        for key in ("bad", "idle"):
            pool.open(key, 0, {})
        pool.poll()
        host._messages = [spoke(0, 0), spoke(1, 0)]
        assert [type(one) for one in pool.poll()] == [Said, Said]
        pool.take("bad", 1, {"content": "x"})
        pool.poll()
        host._messages = [FORGED[what]]
        told = pool.poll()
        assert guilt(told) == {"bad": True, "idle": False}
        assert "bad output" in text(next(one for one in told if one.key == "bad"))
    finally:
        pool.close()


def test_a_spare_host_starts_behind_the_first_and_has_no_episode() -> None:
    clock = VirtualClock()
    pool = ScriptedPool([], num_spares=1, clock=clock)
    try:
        pool.poll()
        assert len(pool._sites) == 1
        due_s = pool.next_deadline_s()
        assert due_s is not None
        clock.advance(due_s - clock.now_s())
        pool.poll()
        assert len(pool._sites) == 2
        assert pool.next_deadline_s() is not None, "for the spare to be ready"
        for key in range(4):
            pool.open(key, 0, {})
        pool.poll()
        assert [len(site.episodes) for site in pool._sites] == [4, 0]
    finally:
        pool.close()


NUMBERS = st.integers(-1, 3)
REWARDS = st.sampled_from([None, 1.0, float("nan")])
MESSAGES = st.one_of(
    st.builds(lambda number, turn, reward: spoke(number, turn, reward=reward), NUMBERS, NUMBERS, REWARDS),
    st.builds(hosting.Closed, NUMBERS, REWARDS),
    st.builds(hosting.Faulted, NUMBERS, st.just("x")),
    st.builds(hosting.Stuck, NUMBERS),
    st.builds(hosting.AskedNetwork, NUMBERS),
    st.just(WorkerReady([])),
)
ACTS = st.sampled_from(["take", "finish", "shut", "poll", "late"])


@drawn(
    60,
    200,
    scripts=st.lists(st.lists(MESSAGES, max_size=6), max_size=8),
    acts=st.lists(st.tuples(ACTS, st.integers(0, 2)), max_size=20),
)
def test_whatever_hosts_say_each_call_has_one_answer(scripts: list[list[Any]], acts: list[tuple[str, int]]) -> None:
    """And none has one that is not open: checked against a table of the calls in flight."""
    pool = ScriptedPool(scripts)
    in_call: dict[int, bool] = {}

    def poll() -> None:
        for one in pool.poll():
            assert one.key in in_call
            if isinstance(one, Lost):
                del in_call[one.key]
            else:
                assert in_call[one.key], "an answer without a call"
                in_call[one.key] = False
                if not isinstance(one, Said):
                    del in_call[one.key]
                else:
                    assert one.reward is None or one.reward == 1.0

    try:
        for act, key in acts:
            if act == "poll":
                poll()
            elif act == "late":
                pool._clock.advance(6.0)  # type: ignore[attr-defined]
                poll()
            elif act == "shut":
                pool.shut(key)
                in_call.pop(key, None)
            elif key not in in_call:
                pool.open(key, 0, {})
                in_call[key] = True
            elif not in_call[key] and key in pool._by_key:
                if act == "take":
                    pool.take(key, 1, {})
                else:
                    pool.finish(key)
                in_call[key] = True
        poll()
        assert pool.num_open == len(in_call)
        assert pool.num_calls == sum(in_call.values())
        assert set(pool._site_of) == {number for site in pool._sites for number in site.episodes}
    finally:
        pool.close()


@drawn(60, 200, body=st.binary(max_size=200))
def test_bytes_that_are_no_message_are_refused(body: bytes) -> None:
    decoder = msgspec.msgpack.Decoder(hosting.FromHost, strict=True)
    try:
        decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return
