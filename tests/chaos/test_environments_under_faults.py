"""Runs of episodes whose workers, environments, generators and controllers are killed in the middle of episodes."""

from __future__ import annotations

import itertools
import json
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from adversary import Adversary, Fault, Lines, StartUp
from chaos_config import SHORT, SYNC
from chaos_run import ChaosRun, scratch, weights
from lineage_audit import audit, lines

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1200)]
ROOT = Path(__file__).resolve().parents[2]
TWO = ("--generator.replicas", "2", "--generator.num-slots", "32")
VICTIMS = ("host", "host_keeper", "environments", "generator", "controller")
"""`host` is the process that runs the environments (`process_tree.py`)."""
ENVIRONMENT = """
[rewards]
terms = []

[environment]
max_turns = 4
max_episode_tokens = 40
num_workers = 2
"""
SOURCE = ROOT / "tests" / "integration" / "turn_environments.py"
KINDS = {"class": f'class = "{SOURCE}:Unpunctual"\n', "agent": f'agent = "{SOURCE}:echo_agent"\n'}
"""The same environment, once as a class, and once as an agent that asks for its turns over HTTP."""


def with_environments(folder: Path, kind: str) -> str:
    """The quickstart with episodes of up to four turns, whose environments take up to 30 ms for an answer."""
    path = folder / "episodes.toml"
    recipe = (ROOT / "recipes" / "quickstart.toml").read_text()
    path.write_text(recipe.replace('measure = "task"\n', "") + ENVIRONMENT + KINDS[kind])
    return str(path)


def struck(
    folder: Path, flags: tuple[str, ...], faults: list[Fault], *, missable: int = 0, kind: str = "class"
) -> ChaosRun:
    """A run, done, that all but `missable` of `faults` have struck."""
    run = ChaosRun(folder, flags, with_environments(folder, kind))
    adversary = Adversary(run.run_dir, iter(faults), None, lambda: run.controller, run.has_trained_all)
    run.until_done(adversary)
    told = f"{adversary.strikes}{run.said()}"
    assert len(adversary.strikes) >= len(faults) - missable, f"not every fault struck: {told}"
    found = audit(run.run_dir)
    assert found.findings + run.leftovers() == [], told
    assert (found.numbers["lost"], found.numbers["repeated"], found.numbers["pending"]) == (0, 0, 0)
    check_episodes(run.run_dir, told, has_turn_rewards=kind == "class")
    return run


def check_episodes(run_dir: Path, told: str, *, has_turn_rewards: bool) -> None:
    """Every episode is whole, with as many turns as its environment answered; none failed for what others did."""
    for rollout in lines(run_dir / "rollouts.jsonl"):
        episode = rollout["episode"]
        assert rollout["failure"] is None, f"{rollout}{told}"
        assert episode["turns"] >= 1, f"{rollout}{told}"
        assert len(episode["turn_rewards"]) == (episode["turns"] if has_turn_rewards else 0), f"{rollout}{told}"
        assert not episode.get("branches"), f"{rollout}{told}"
        turns = [message for message in episode["messages"] if message["role"] == "assistant"]
        assert len(turns) == episode["turns"], f"{rollout}{told}"


@pytest.fixture(scope="module")
def undisturbed_weights() -> Iterator[str]:
    with scratch() as folder:
        yield weights(struck(folder, (*SYNC, "--host", "inline"), []).run_dir)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_kill_changes_nothing_at_staleness_0(victim, kind, undisturbed_weights, folder):
    """Episodes that begin again sample the same turns, and their environments say the same."""
    run = struck(folder, (*SYNC, *TWO), [Fault("kill", victim, Lines(400), pick=0.9)], kind=kind)
    assert weights(run.run_dir) == undisturbed_weights
    summary = json.loads((run.run_dir / "summary.json").read_text())
    if victim == "controller":
        assert [attempt.code for attempt in run.attempts] == [-signal.SIGKILL, 0]
    else:
        name = {"environments": "environments", "generator": "generator-1"}.get(victim)
        assert summary["restarts"] == ({name: 1} if name else {})


@pytest.mark.parametrize("kind", KINDS)
def test_all_of_them_repeatedly_in_continuous_training(kind, folder):
    """The audit looks at every token's age and at every group's fate."""
    rng = random.Random(0)
    victims = itertools.islice(itertools.cycle(VICTIMS), 15)
    faults = [
        Fault(
            "kill",
            victim,
            StartUp(rng.uniform(0.0, 3.0)) if number % 5 == 1 else Lines(rng.randint(100, 500)),
            pick=rng.random(),
        )
        for number, victim in enumerate(victims)
    ]
    run = struck(folder, (*SHORT, *TWO, "--steps", "80"), faults, missable=5, kind=kind)
    assert len(run.attempts) >= 2
