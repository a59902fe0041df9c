"""A run on two machines, joined by a cable: it learns, survives a pulled cable, and heals a killed group."""

from __future__ import annotations

import itertools
import os
import signal
import time

import pytest
from cluster_run import ClusterRun, generator
from machines import are_possible, two_machines, wait_until
from slow_link import compare, measure

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not are_possible(), reason="network namespaces need Linux, root and iproute2"),
    pytest.mark.timeout(900),
]


def check_books(summary: dict) -> None:
    prompts = summary["prompts"]
    assert prompts["lost"] == 0
    assert prompts["repeated"] == 0
    assert prompts["admitted"] == sum(prompts[key] for key in ("trained", "skipped", "failed", "pending"))
    assert summary["staleness"]["max"] <= summary["staleness"]["bound"]
    assert summary["status"] == "done"


def test_a_run_on_two_machines_learns_through_a_pulled_cable_and_a_killed_group(tmp_path):
    with two_machines(tmp_path) as (near, far, cable):
        run = ClusterRun(near, far, tmp_path, "--eval.num-prompts", "200", "--prompts.num-eval", "200")
        stranger = tmp_path / "other-key"
        run.wait_for_step(5)

        cable.pull()
        time.sleep(10.0)  # what is tested
        cable.plug()
        reached = run.steps()
        run.wait_for_step(reached + 5, timeout_s=60)
        assert run.count("ReplicaLost") == 0, "ten seconds are less than a lease"

        run.generators[0].kill()
        killed_at = run.steps()
        run.generators[0] = run.join(far, *generator(0))
        wait_until(lambda: run.count("ReplicaLost") == 1, "the controller hears of the loss", timeout_s=60)
        run.wait_for_step(killed_at + 5, timeout_s=120)
        check_that_it_heals_within_one_version(run.events())

        stranger.write_text("ab" * 32 + "\n")
        stranger.chmod(0o600)
        assert run.join(far, *generator(0), key=stranger).wait(60) == 2, "bad input: another run's key"

        summary = run.end()
        check_books(summary)
        assert summary["eval"]["after"]["accuracy"] > summary["eval"]["before"]["accuracy"] + 0.3
        assert run.trainers[0].wait(30) == 0
        assert run.generators[0].wait(30) == 0


def check_that_it_heals_within_one_version(events: list[dict]) -> None:
    """The first version it samples from is, at most, one behind what the trainer has done by then."""
    kinds = [event["event"]["type"] for event in events]
    lost = kinds.index("ReplicaLost")
    healed = kinds.index("Swapped", lost)
    done = sum(kind == "StepDone" for kind in kinds[:healed])
    assert events[healed]["event"]["version"] >= done - 1


def test_a_replica_that_stands_still_is_shut_out_and_delays_the_trainer_by_a_lease_at_most(tmp_path):
    lease_s, regeneration_s = 6.0, 10.0
    with two_machines(tmp_path) as (near, far, _):
        run = ClusterRun(
            near,
            far,
            tmp_path,
            *("--lease-s", str(lease_s), "--steps", "60", "--warm-start.steps", "20", "--eval.every", "0"),
            *("--eval.num-prompts", "20", "--prompts.num-eval", "20"),
            num_replicas=2,
        )
        run.wait_for_step(5)
        [worker] = run.generators[0].children  # which may be the one that hands versions on to the other
        os.kill(worker, signal.SIGSTOP)
        wait_until(lambda: run.count("ReplicaLost") == 1, "the silent replica is shut out", timeout_s=2 * lease_s)
        run.wait_for_step(run.steps() + 5, timeout_s=60)
        os.kill(worker, signal.SIGCONT)  # it learns that it was replaced, ends, and its agent starts it again
        wait_until(lambda: healed(run.events()), "it joins again", timeout_s=90)
        check_books(run.end())
        times = [event["time_s"] for event in run.events() if event["event"]["type"] == "StepDone"]
        assert max(later - earlier for earlier, later in itertools.pairwise(times)) < lease_s + regeneration_s


def healed(events: list[dict]) -> bool:
    """Whether replica 0 samples again after its loss."""
    kinds = [(event["event"]["type"], event["event"].get("replica")) for event in events]
    return ("Swapped", 0) in kinds[kinds.index(("ReplicaLost", 0)) :]


def test_replicas_of_one_machine_get_a_version_over_the_cable_once(tmp_path):
    carried = measure(tmp_path / "run", 2, 15, None, num_replicas=3).copies_carried
    assert 0.9 < carried < 1.9, (
        "three, if each had its own from the trainer; and some are carried that nobody decodes with"
    )


def test_one_group_may_be_on_both_machines(tmp_path):
    """Its ranks talk to each other by the addresses they were given: here all machines have the same name."""
    with two_machines(tmp_path) as (near, far, _):
        run = ClusterRun(
            near,
            far,
            tmp_path,
            *("--trainer.ranks", "2", "--steps", "6", "--warm-start.steps", "10", "--eval.every", "0"),
            *("--eval.num-prompts", "8", "--prompts.num-eval", "8"),
            shares_trainer=True,
        )
        check_books(run.end(timeout_s=240))
        for trainer in run.trainers:
            assert trainer.wait(30) == 0


def test_one_more_step_of_staleness_hides_a_transfer_that_takes_a_step(tmp_path):
    found = compare(tmp_path, steps=25)
    limited = found["k = 1"].transfer_s
    assert limited > 0.5 * found["k = 2, no limit"].step_s, "the cable was no bottleneck"
    # In seconds of a step that are waited: a step's own length is what else runs on these cores, a run later.
    for side in ("trainer_idle", "generator_idle"):
        waits_s = {name: getattr(measured, side) * measured.step_s for name, measured in found.items()}
        assert waits_s["k = 2"] < waits_s["k = 1"], f"{side}: {waits_s}"
        if side == "trainer_idle":
            assert waits_s["k = 3"] < 0.5 * waits_s["k = 1"], f"{side}: {waits_s}"
