"""At staleness 0 weights are the same, bit for bit, whatever happens: slow rewards, two generators, kills, stops."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from adversary import Adversary, Fault, Lines
from chaos_config import SHORT, SLOW_REWARD, SYNC
from chaos_run import ChaosRun, scratch, weights
from lineage_audit import audit

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[2]
ONE = ("--generator.replicas", "1", "--generator.num-slots", "64")
TWO = ("--generator.replicas", "2", "--generator.num-slots", "32")
EVERYBODY = ("generator", "rewards", "keeper", "scorer", "trainer", "controller")


def with_slow_rewards(folder: Path) -> str:
    """The quickstart whose scores come late and out of order."""
    path = folder / "slow.toml"
    path.write_text((ROOT / "recipes" / "quickstart.toml").read_text() + SLOW_REWARD)
    return str(path)


def struck(folder: Path, flags: tuple[str, ...], faults: list[Fault], *, is_slow: bool = True) -> ChaosRun:
    """A run, done, that each of `faults` has struck."""
    run = ChaosRun(folder, flags, with_slow_rewards(folder)) if is_slow else ChaosRun(folder, flags)
    adversary = Adversary(run.run_dir, iter(faults), None, lambda: run.controller, run.has_trained_all)
    run.until_done(adversary)
    told = f"{adversary.strikes}{run.said()}"
    assert [strike.fault for strike in adversary.strikes] == faults, f"not every fault struck: {told}"
    assert audit(run.run_dir).findings + run.leftovers() == [], told
    return run


@pytest.fixture(scope="module")
def undisturbed_weights() -> Iterator[str]:
    """One process, its executors step by step, rewards at once."""
    with scratch() as folder:
        run = ChaosRun(folder, (*SYNC, "--host", "inline"))
        run.until_done()
        assert audit(run.run_dir).findings + run.leftovers() == []
        yield weights(run.run_dir)


@pytest.mark.parametrize("replicas", [ONE, TWO], ids=["one generator", "two generators"])
def test_slow_rewards_change_nothing(replicas, undisturbed_weights, folder):
    run = struck(folder, (*SYNC, *replicas), [])
    assert weights(run.run_dir) == undisturbed_weights


@pytest.mark.parametrize("victim", ["controller", "trainer", "generator", "rewards"])
def test_a_kill_changes_nothing(victim, undisturbed_weights, folder):
    run = struck(folder, (*SYNC, *TWO), [Fault("kill", victim, Lines(400), pick=0.9)])
    assert weights(run.run_dir) == undisturbed_weights
    if victim == "controller":
        assert [attempt.code for attempt in run.attempts] == [-signal.SIGKILL, 0]


def test_a_second_of_standstill_of_anybody_changes_nothing(undisturbed_weights, folder):
    """Each kind of process stands still once; at staleness 0 what came too late or twice would show in the weights."""
    run = struck(folder, (*SYNC, *TWO), [Fault("stop", victim, Lines(90), 1.0) for victim in EVERYBODY])
    assert weights(run.run_dir) == undisturbed_weights
    assert len(run.attempts) == 1, "a second is no reason to fail"


def test_a_second_of_standstill_neither_breaks_the_bound_nor_repeats_a_group(folder):
    """The same in continuous training; the audit looks at every token's age and every group's fate."""
    run = struck(folder, (*SHORT, *TWO), [Fault("stop", victim, Lines(90), 1.0) for victim in EVERYBODY], is_slow=False)
    assert len(run.attempts) == 1, "a second is no reason to fail"
