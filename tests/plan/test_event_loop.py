"""Virtual time, and cores that jobs share: against hand-computed times, and against small steps of time."""

from __future__ import annotations

import random

import pytest

from slipstream.plan.event_loop import BACKGROUND_SHARE, Cores, EventLoop


def run(loop: EventLoop) -> None:
    while loop.step():
        pass


def finish_times(num_cores: int, beside: dict[str, float], jobs: list[tuple]) -> list[float]:
    """When the jobs (kind, threads, start, work, is_background) are done."""
    loop = EventLoop()
    cores, done = Cores(loop, num_cores, beside), [0.0] * len(jobs)

    def start(index: int) -> None:
        kind, threads, _, work, *background = jobs[index]
        cores.run(kind, threads, work, lambda: done.__setitem__(index, loop.time_s), is_background=bool(background))

    for index, job in enumerate(jobs):
        loop.at(job[2], lambda index=index: start(index))
    run(loop)
    return done


def test_two_jobs_share_a_core_pair_by_hand():
    """A has 2 s alone; both go at 0.6 until B's 3 s are done, at 7; of A's 10 s 5 are left then."""
    assert finish_times(2, {"a": 0.6, "b": 0.6}, [("a", 1, 0.0, 10.0), ("b", 1, 2.0, 3.0)]) == pytest.approx([12, 7])


def test_each_kind_is_slowed_by_what_it_needs():
    """B at 0.5 takes 4 s for 2; A at 0.8 does 3.2 of its 4 meanwhile, and the rest alone."""
    assert finish_times(2, {"a": 0.8, "b": 0.5}, [("a", 1, 0.0, 4.0), ("b", 1, 0.0, 2.0)]) == pytest.approx([4.8, 4])


def test_more_threads_than_cores_take_turns():
    """Three threads on two cores that are 0.75 fast together: 0.5 each."""
    assert finish_times(2, {"a": 0.75}, [("a", 1, 0.0, 6.0)] * 3) == pytest.approx([12] * 3)


def test_threads_of_one_job_are_no_company():
    """Times are told as the job takes them with its threads: two threads on two cores are alone."""
    assert finish_times(2, {"a": 0.6}, [("a", 2, 0.0, 6.0)]) == pytest.approx([6])
    # Beside a third thread two of three get their turn: 2/3 of the time for each.
    assert finish_times(2, {"a": 0.6}, [("a", 2, 0.0, 6.0), ("b", 1, 0.0, 100.0)])[0] == pytest.approx(9)


def test_on_many_cores_the_slowdown_grows_with_the_company():
    """r = 0.7 with all 4 cores busy, so 0.9 with 2."""
    assert finish_times(4, {"a": 0.7}, [("a", 1, 0.0, 9.0)] * 2) == pytest.approx([10] * 2)
    assert finish_times(4, {"a": 0.7}, [("a", 1, 0.0, 7.0)] * 4) == pytest.approx([10] * 4)


def test_a_background_job_takes_what_is_free():
    both = [("a", 1, 0.0, 10.0), ("b", 1, 0.0, 10.0)]
    a, b, staging = finish_times(2, {}, [*both, ("stage", 1, 0.0, 2.0, True)])
    assert (a, b) == pytest.approx((10, 10)), "it slows nobody"
    assert staging == pytest.approx(10 + 2 - 10 * BACKGROUND_SHARE)
    a, staging = finish_times(2, {"a": 0.5, "stage": 0.5}, [("a", 1, 0.0, 3.0), ("stage", 1, 0.0, 2.0, True)])
    assert (a, staging) == pytest.approx((5, 4)), "on a core of its own it counts"


@pytest.mark.parametrize("seed", range(5))
def test_cores_against_small_steps_of_time(seed):
    """Whatever the jobs: the rates of the class's docstring, integrated in steps of a millisecond."""
    rng = random.Random(seed)
    num_cores = rng.choice([1, 2, 3])
    beside = {"a": rng.uniform(0.4, 1), "b": rng.uniform(0.4, 1)}
    jobs = [
        (rng.choice("ab"), rng.randint(1, num_cores), rng.uniform(0, 2), rng.uniform(0.1, 1), *[True][: i == 0])
        for i in range(6)
    ]

    def per_thread(kind: str, busy: int) -> float:
        r = beside[kind]
        if busy > num_cores:
            return r * num_cores / busy
        return 1 - (1 - r) * (busy - 1) / max(num_cores - 1, 1)

    left, done, now, dt = [job[3] for job in jobs], [None] * len(jobs), 0.0, 1e-3
    while None in done:
        there = [i for i, job in enumerate(jobs) if job[2] <= now and done[i] is None]
        normal = sum(jobs[i][1] for i in there if len(jobs[i]) == 4)
        lent = sum(jobs[i][1] for i in there if len(jobs[i]) == 5) if normal < num_cores else 0
        lent = min(lent, num_cores - normal) if lent else 0
        for i in there:
            kind, threads, *_ = jobs[i]
            if len(jobs[i]) == 5 and not lent:
                rate = BACKGROUND_SHARE * per_thread(kind, num_cores)
            else:
                rate = min(1.0, per_thread(kind, normal + lent) / per_thread(kind, threads))
            left[i] -= rate * dt
            if left[i] <= 0:
                done[i] = now + dt
        now += dt
    assert finish_times(num_cores, beside, jobs) == pytest.approx(done, abs=0.05)


@pytest.mark.parametrize("device", ["own", "cores"])
def test_a_job_that_is_shortened_ends_sooner(device):
    loop = EventLoop()
    ended = []
    one = Cores(loop) if device == "own" else Cores(loop, 2, {})
    job = one.run("a", 1, 10.0, lambda: ended.append(loop.time_s))
    loop.at(4.0, lambda: (ended.append(job.done_s()), job.shorten(6.0)))
    run(loop)
    assert ended == pytest.approx([4.0, 6.0]), "once"


def test_what_is_asked_for_first_happens_first():
    loop, seen = EventLoop(), []
    for name in "abc":
        loop.at(1.0, lambda name=name: seen.append(name))
    loop.at(0.5, lambda: loop.at(0.2, lambda: seen.append("late")))
    run(loop)
    assert seen == ["late", "a", "b", "c"], "the past is now"
    assert loop.now_s() == 1.0
