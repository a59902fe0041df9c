"""Hostile verifiers and completions change nothing outside their worker, and the pool goes on scoring."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym
from barriers import needs, secret_at_home
from covering import with_slow
from processes import below, not_gone
from reward_jobs import GENEROUS_S, HERE, job, run_jobs

from slipstream.core.clock import VirtualClock
from slipstream.core.errors import ConfigError
from slipstream.jail.isolation import BARRIERS
from slipstream.rewards.checks import isolation_report
from slipstream.rewards.pool import ScoredJob, ScoringPool
from slipstream.rewards.protocol import RewardJob, Task

ATTACK = (f"{HERE / 'hostile_verifiers.py'}:attack", {})
MakePool = Callable[..., ScoringPool]


@pytest.fixture(scope="module")
def pool(make_pool: MakePool) -> Iterator[ScoringPool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIPSTREAM_TEST_SECRET", "token")
        yield make_pool(ATTACK)


def keeper_trees(pool: ScoringPool) -> set[int]:
    return set().union(*(below(slot.worker._keeper.pid) for slot in pool._slots))


def test_isolation_is_reported() -> None:
    report = isolation_report()
    assert tuple(report) == BARRIERS
    assert report["limits"]


@pytest.mark.parametrize(
    ("attack", "failure"),
    [
        ("memory", "MemoryError"),
        ("fork_and_die", "worker died"),
        ("flood", "bad output"),
        ("forge", "bad output"),
        ("raise", "ValueError"),
        ("exit", "SystemExit"),
        ("many", "100 rewards for 1 completion"),
        ("text", "TypeError"),
        ("fill", "OSError"),
    ],
)
def test_an_attack_fails_its_own_rollout_only(pool: ScoringPool, attack: str, failure: str) -> None:
    done = run_jobs(pool, [job(0, "ok"), job(1, attack), job(2, "ok"), job(3, "ok")])
    assert failure in (done[1].failure or ""), done[1]
    assert len(done[1].failure or "") < 1100
    assert [done[i].parts for i in (0, 2, 3)] == [[1.0]] * 3


def test_a_completion_without_end_fails_its_own_rollout_only(make_pool: MakePool) -> None:
    """The deadline passes when the clock is told so, not when a slow machine has taken long for the others."""
    clock = VirtualClock()
    pool = make_pool(ATTACK, timeout_s=1.0, clock=clock)
    assert run_jobs(pool, [job(0, "ok")])[0].parts == [1.0]
    for one in (job(1, "loop"), job(2, "ok"), job(3, "ok")):
        pool.submit(one)
    assert pool.poll() == []
    clock.advance(1.0)
    assert pool.poll() == [], "it may be any of the three: each is scored again, alone"
    while not any(slot.jobs for slot in pool._slots):
        assert select.select(pool.fds(), [], [], GENEROUS_S)[0]
        assert pool.poll() == []
    assert [[job.job_id for job in slot.jobs] for slot in pool._slots if slot.jobs] == [[1]]
    clock.advance(1.0)
    (hung,) = pool.poll()
    assert (hung.job_id, hung.failure) == (1, f"{ATTACK[0]}: timed out after 1 s")
    done = run_jobs(pool, [], expected=2)
    assert [done[i].parts for i in (2, 3)] == [[1.0]] * 2


def test_a_worker_that_closes_its_connection_and_goes_on_is_merely_silent(make_pool: MakePool) -> None:
    """The pool waits for no such worker, however many there are: its job is late in the end."""
    clock = VirtualClock()
    pool = make_pool(ATTACK, timeout_s=1.0, clock=clock)
    pool.submit(job(0, "closes"))
    end_s = time.monotonic() + 0.5  # it has closed by then, on a machine that is not too slow
    while (wait_s := end_s - time.monotonic()) > 0:
        assert pool.poll() == []
        select.select(pool.fds(), [], [], wait_s)
    clock.advance(1.0)
    [closed] = pool.poll()
    assert (closed.job_id, closed.failure) == (0, f"{ATTACK[0]}: timed out after 1 s")
    assert run_jobs(pool, [job(1, "ok")])[1].parts == [1.0]


def test_signals_to_all_processes_of_a_run_end_no_worker(make_pool: MakePool) -> None:
    """Only what a verifier forks can be terminated, as by `multiprocessing`."""
    pool = make_pool(ATTACK)
    keepers = {slot.worker._keeper.pid for slot in pool._slots}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        for pid in keepers | keeper_trees(pool):
            os.kill(pid, number)
    done = run_jobs(pool, [job(0, "ok"), job(1, "terminate")])
    assert [done[i].parts for i in (0, 1)] == [[1.0], [float(signal.SIGTERM)]], done
    assert pool.num_restarts == 0


def test_a_forked_copy_of_the_scorer_stays_silent(pool: ScoringPool) -> None:
    done = run_jobs(pool, [job(0, "fork_and_return"), job(1, "ok"), job(2, "ok")])
    assert [one.parts for _, one in sorted(done.items())] == [[1.0]] * 3


def test_what_a_verifier_forks_does_not_answer_again(make_pool: MakePool) -> None:
    """It says that it tried the network, while answers to the jobs before it wait to be sent together."""
    pool = make_pool(ATTACK)
    texts = ["ok"] * 8 + ["fork_and_call"] + ["ok"] * 8
    done = run_jobs(pool, [job(index, text) for index, text in enumerate(texts)])
    assert [done[index].parts for index in range(len(texts))] == [[1.0]] * len(texts)
    assert pool.num_restarts == 0


def test_a_flood_of_text_goes_nowhere(pool: ScoringPool) -> None:
    assert run_jobs(pool, [job(0, "stdout")])[0].parts == [1.0]


@pytest.mark.parametrize("attack", with_slow(["fork"], ["fork_and_hang"]))
def test_forked_children_that_left_their_session_die_with_the_worker(make_pool: MakePool, attack: str) -> None:
    needs("processes")
    clock = VirtualClock()
    pool = make_pool(ATTACK, timeout_s=1.5, clock=clock)
    pool.submit(job(0, attack))
    assert pool.poll() == []
    end_s = time.monotonic() + GENEROUS_S
    while len(forked := keeper_trees(pool)) <= 20:  # they are alive beside the worker, within its limit of processes
        assert time.monotonic() < end_s, "nothing is forked"
        time.sleep(0.01)
    if attack == "fork":
        done = run_jobs(pool, [job(1, "forge")], expected=2)
    else:
        clock.advance(1.5)
        done = run_jobs(pool, [], expected=1)
    assert (done[0].failure is None) == (attack == "fork")
    assert run_jobs(pool, [job(2, "ok")])[2].parts == [1.0]
    assert not not_gone(forked)


def test_nothing_is_written_outside_the_scratch_folder(pool: ScoringPool) -> None:
    needs("files")
    marker = Path(f"/slipstream-test-{os.getpid()}")
    with tempfile.TemporaryDirectory(dir="/tmp") as hidden:
        Path(hidden).chmod(0o777)
        attacks = [f"write {marker}", f"write {hidden}/marker", "write /tmp/marker", "scratch"]
        done = run_jobs(pool, [job(i, attack) for i, attack in enumerate(attacks)])
        assert not os.listdir(hidden)
    assert not marker.exists()
    assert "Read-only" in (done[0].failure or "")
    assert "No such file" in (done[1].failure or "")
    assert "Read-only" in (done[2].failure or "")
    assert done[3].parts == [4.0]


def test_secrets_network_descriptors_and_processes_are_out_of_reach(
    make_pool: MakePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("files", "network", "processes", "user")
    private = secret_at_home(tmp_path, monkeypatch)
    (tmp_path / "public").write_text("seen")
    monkeypatch.setenv("SLIPSTREAM_TEST_SECRET", "token")
    attacks = ["environment", "descriptors", "processes", "identity", "network"]
    attacks += [f"read {private}", f"read {tmp_path}/public"]
    done = run_jobs(make_pool(ATTACK), [job(i, attack) for i, attack in enumerate(attacks)])
    assert done[0].parts == [0.0]
    assert done[1].parts[0] <= 5  # three to nowhere, the connection, and the one that lists them
    assert done[2].parts[0] <= 5  # its own, and what earlier attacks left of themselves
    assert done[3].parts == [0.0]
    assert done[4].parts == [0.0]
    assert "Error" in (done[5].failure or "")
    assert done[6].failure is None


def test_a_worker_is_killed_first_and_dumps_no_core(pool: ScoringPool) -> None:
    needs("privileges")
    done = run_jobs(pool, [job(0, "oom"), job(1, "core")])
    assert [done[i].parts for i in range(2)] == [[1000.0], [0.0]]


def test_files_are_counted_and_shared_memory_is_its_own(pool: ScoringPool) -> None:
    needs("files", "processes")
    done = run_jobs(pool, [job(0, "inodes 5000"), job(1, f"ipc {os.readlink('/proc/self/ns/ipc')}")])
    assert 0 < done[0].parts[0] < 4096
    assert done[1].parts == [0.0]


def test_a_run_that_starts_at_home_shows_workers_none_of_it(
    make_pool: MakePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders below it, which modules come from, are there; a run's own folder below one of those is not."""
    needs("files")
    home = tmp_path / "home"
    project, run = home / "project", home / "project" / "runs" / "1"
    run.mkdir(parents=True)
    for folder in (home, project, run):
        folder.chmod(0o755)
        (folder / "text").write_text("seen")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    monkeypatch.syspath_prepend(str(project))
    pool = make_pool(ATTACK, private=[str(run)])
    assert "files" in pool.isolation
    done = run_jobs(pool, [job(i, f"read {folder}/text") for i, folder in enumerate((home, run, project))])
    assert ["No such file" in (done[i].failure or "") for i in range(3)] == [True, True, False]
    assert done[2].failure is None


COUNTDOWN: Any = reasoning_gym.create_dataset("countdown", seed=1, size=1)[0]


def countdown_job(job_id: int, text: str) -> RewardJob:
    return job(job_id, text, task="countdown", entry=COUNTDOWN)


@pytest.fixture(scope="module")
def countdown(make_pool: MakePool) -> tuple[ScoringPool, VirtualClock]:
    """One pool for all: a worker imports for seconds."""
    clock = VirtualClock()
    tasks: dict[str, Any] = {"tasks": {"countdown": Task("countdown", {})}}
    return make_pool(("task", {}), **tasks, timeout_s=1.0, clock=clock), clock


def scored_within_a_second(pool: ScoringPool, clock: VirtualClock, one: RewardJob) -> ScoredJob:
    """The deadline of one second on `clock` passes when the worker has had a second of this machine's time."""
    pool.submit(one)
    done, end_s = pool.poll(), time.monotonic() + 1.0
    while not done and (left_s := end_s - time.monotonic()) > 0:
        select.select(pool.fds(), [], [], left_s)
        done = pool.poll()
    if not done:
        clock.advance(1.0)
        done = pool.poll()
    (scored,) = done
    return scored


def test_a_shell_command_in_a_countdown_answer_does_nothing(countdown: tuple[ScoringPool, VirtualClock]) -> None:
    needs("files", "user")
    marker = Path("/tmp") / f"slipstream-marker-{os.getpid()}"
    texts = [
        f"__import__('os').system('touch {marker}')",
        f"__import__('os').kill({os.getpid()}, 9)",
        COUNTDOWN["answer"],
    ]
    done = run_jobs(countdown[0], [countdown_job(i, text) for i, text in enumerate(texts)])
    assert not marker.exists()
    assert done[0].failure is None  # it ran, in there
    assert done[0].parts[0] < 1
    assert done[2].parts == [1.0]


@pytest.mark.parametrize("text", with_slow(["9**9**9**9"], ["__import__('time').sleep(600)"]))
def test_an_endless_countdown_answer_is_ended(countdown: tuple[ScoringPool, VirtualClock], text: str) -> None:
    pool, clock = countdown
    assert run_jobs(pool, [countdown_job(0, COUNTDOWN["answer"])])[0].parts == [1.0]
    assert "timed out" in (scored_within_a_second(pool, clock, countdown_job(1, text)).failure or "")


def test_math_verify_is_stopped_at_the_deadline(make_pool: MakePool) -> None:
    clock = VirtualClock()
    pool = make_pool(("math", {}), timeout_s=1.0, clock=clock)
    done = run_jobs(pool, [job(0, r"so \boxed{\frac{1}{2}}", answer="0.5")])
    assert done[0].parts == [1.0]
    endless = scored_within_a_second(pool, clock, job(1, "$9^{9^{9^9}}$", answer="1"))
    assert endless.failure is not None or endless.parts == [0.0]


def test_a_worker_killed_from_outside_is_replaced(make_pool: MakePool) -> None:
    pool = make_pool(ATTACK)
    victims = keeper_trees(pool)
    pool.submit(job(0, "ok"))
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):  # the first one takes the others with it
            os.kill(pid, signal.SIGKILL)
    done = run_jobs(pool, [job(i, "ok") for i in range(1, 6)])
    assert sum(one.parts == [1.0] for one in done.values()) >= 3  # at most one per killed worker
    end_s = time.monotonic() + GENEROUS_S
    while not pool.num_restarts:  # the jobs may have been done before an end was seen, by a worker that began late
        assert time.monotonic() < end_s, "no end of a worker was noticed"
        select.select(pool.fds(), [], [], GENEROUS_S)
        pool.poll()


def test_a_job_for_which_earlier_ones_left_no_memory_is_scored_in_a_new_worker(make_pool: MakePool) -> None:
    pool = make_pool(ATTACK)
    texts = ["ok", f"keep {300 << 10}", "need 300", "ok", "need 300"]
    done = run_jobs(pool, [job(job_id, text) for job_id, text in enumerate(texts)])
    assert [done[i].parts for i in range(5)] == [[1.0], [1.0], [300.0], [1.0], [300.0]]
    assert pool.num_restarts == 1


def test_a_job_that_meets_the_end_of_memory_in_a_new_worker_has_failed(make_pool: MakePool) -> None:
    pool = make_pool(ATTACK)
    assert run_jobs(pool, [job(0, "ok"), job(1, "ok")])[0].parts == [1.0]
    done = run_jobs(pool, [job(2, "keep_all"), job(3, "ok"), job(4, "ok")])
    assert "MemoryError" in (done[2].failure or "")
    assert [done[i].parts for i in (3, 4)] == [[1.0]] * 2
    assert pool.num_restarts == 1
    assert run_jobs(pool, [job(5, "need 300")])[5].parts == [300.0]
    assert pool.num_restarts == 2


def test_a_job_that_leaves_no_memory_taken_is_no_reason_for_a_new_worker(make_pool: MakePool) -> None:
    pool = make_pool(ATTACK)
    done = run_jobs(pool, [job(0, "ok"), job(1, "memory"), job(2, "memory"), job(3, "ok")])
    assert ["MemoryError" in (done[i].failure or "") for i in range(4)] == [False, True, True, False]
    assert pool.num_restarts == 0


def test_a_worker_whose_memory_is_nearly_used_up_is_replaced_before_a_job_fails_for_it(make_pool: MakePool) -> None:
    pool = make_pool(ATTACK)
    done = run_jobs(pool, [job(i, "keep 1900") for i in range(256)])
    assert all(one.parts == [1.0] for one in done.values())
    assert run_jobs(pool, [job(256, "need 300")])[256].parts == [300.0]
    assert pool.num_restarts == 1


def test_a_killed_trainer_leaves_no_workers(tmp_path: Path) -> None:
    """The keeper ends everything as soon as its stdin closes, so even SIGKILL of the owner leaves nothing."""
    pid = os.fork()
    if pid == 0:  # the owner of a pool, killed before it can clean up
        os.setsid()
        os.execvp(
            sys.executable,
            [sys.executable, "-c", _OWNER, str(tmp_path / "tree")],
        )
    listing = tmp_path / "tree"
    end_s = time.monotonic() + GENEROUS_S
    while not listing.exists() and time.monotonic() < end_s:
        time.sleep(0.02)
    tree = below(pid)
    assert len(tree) >= 2
    scratch = [Path(line) for line in listing.read_text().splitlines()]
    assert all(folder.is_dir() for folder in scratch)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while not_gone(tree) and time.monotonic() < end_s:
        time.sleep(0.02)
    assert not not_gone(tree)
    while any(folder.exists() for folder in scratch) and time.monotonic() < end_s:
        time.sleep(0.02)
    assert not any(folder.exists() for folder in scratch)


_OWNER = """
import sys, time, pathlib
from slipstream.rewards.pool import ScoringPool
from slipstream.rewards.protocol import WorkerSetup
pool = ScoringPool(WorkerSetup([], {}, 1 << 29, 1.0), num_workers=1)
pool.wait_ready()
pathlib.Path(sys.argv[1] + ".tmp").write_text("\\n".join(s.worker._scratch for s in pool._slots))
pathlib.Path(sys.argv[1] + ".tmp").rename(sys.argv[1])
time.sleep(600)
"""


def test_scratch_folders_are_removed(make_pool: MakePool) -> None:
    pool = make_pool(ATTACK)
    folders = [Path(slot.worker._scratch) for slot in pool._slots]
    assert all(folder.is_dir() for folder in folders)
    run_jobs(pool, [job(0, "scratch")])
    pool.close()
    assert not any(folder.exists() for folder in folders)


def test_a_broken_reward_function_is_an_error_before_anything_starts(make_pool: MakePool, tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import nothing_of_this_name\n")
    with pytest.raises(ConfigError, match="nothing_of_this_name"):
        make_pool((f"{broken}:f", {}))
    with pytest.raises(ConfigError, match="did you mean 'attack'"):
        make_pool((ATTACK[0].replace(":attack", ":atack"), {}))


@pytest.mark.timeout(120)  # where it was blocked, nothing else would end it
def test_the_pool_is_not_blocked_by_a_worker_that_reads_slowly(make_pool: MakePool) -> None:
    """It does not read at all while the pool hands it more than any socket holds."""
    pool = make_pool(ATTACK)
    workers = keeper_trees(pool)
    signal_all(workers, signal.SIGSTOP)
    try:
        for i in range(16):
            pool.submit(job(i, "ok", ballast="x" * 400_000))
        assert pool.poll() == []
        assert any(slot.worker.has_unsent for slot in pool._slots)
    finally:
        signal_all(workers, signal.SIGCONT)
    assert all(one.parts == [1.0] for one in run_jobs(pool, [], expected=16).values())


def signal_all(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
