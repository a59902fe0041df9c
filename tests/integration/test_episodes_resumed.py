"""Runs of episodes that are cut off and resumed: those that were open go on where their environment has a state."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from audit import audit
from test_resume import AHEAD, STEPS, Cut, after_step, cut_off, events, small

import slipstream
from slipstream.core.run_log import RolloutLine, read_rollouts
from slipstream.core.saved import load_messages
from slipstream.core.unfinished_messages import Partial, PartialEpisode

SOURCE = Path(__file__).with_name("turn_environments.py")
BETWEEN = AHEAD | {"weight_update": "between_batches"}
Key = tuple[int, int]
__all__ = ["Cut", "small"]


@pytest.fixture
def episodes(small: dict[str, Any]) -> dict[str, Any]:
    return small | {
        "environment": {"class_path": f"{SOURCE}:Kept", "max_turns": 4, "max_episode_tokens": 40},
        "generator": {"num_slots": 8, "max_new_tokens": 8},
        "rewards": {"terms": []},
        "warm_start": {"steps": 0},
        "trainer": {"checkpoint_every": 1, "keep_checkpoints": STEPS},
    }


def saved_in(run: Path, step: int, node: str) -> dict[Key, PartialEpisode]:
    """What a process saved of episodes beside a checkpoint, of groups that it owes."""
    checkpoint = run / "checkpoints" / f"step_{step}"
    path = checkpoint.with_name(f"{checkpoint.name}.rollouts") / f"{node}.safetensors"
    if not path.exists():
        return {}
    cut = json.loads((checkpoint / "state.json").read_text())["extra"]
    kinds: Any = Partial | PartialEpisode
    found = load_messages(path, kinds, cut=cut["cut"])
    assert {one.ordinal for one in found} <= set(cut["schedule"]["readmit"])
    return {(one.ordinal, one.sample): one for one in found}


def cut_back_to(run: Path, node: str | None) -> int:
    """Leave of a run's checkpoints those up to the newest one for which `node` has saved something; return its step."""
    steps = [step for step in range(1, STEPS) if (run / "checkpoints" / f"step_{step}").exists()]
    while node is not None and not saved_in(run, steps[-1], node):
        shutil.rmtree(run / "checkpoints" / f"step_{steps.pop()}")
    return steps[-1]


def num_sampled(partial: PartialEpisode) -> int:
    return sum(len(segment.tokens) for segment in partial.segments if segment.is_sampled)


def restored_in(run: Path) -> dict[Key, int]:
    """The sampled tokens that a resume has brought, of completions that have any."""
    told = events(run, "CompletionFinished")
    return {(one["ordinal"], one["sample"]): one["num_restored"] for one in told if one["num_restored"]}


def admitted_again(run: Path, saved: dict[Key, PartialEpisode]) -> set[Key]:
    """Those of `saved` whose group was not whole with its trainer, and so was admitted once more."""
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    started = Counter(one["ordinal"] for line in lines for one in line["commands"] if one["type"] == "StartGroup")
    return {key for key in saved if started[key[0]] > 1}


def trained(run: Path) -> dict[Key, RolloutLine]:
    lines = [line for line in read_rollouts(run / "rollouts.jsonl") if line.step is not None]
    assert all(line.failure is None for line in lines)
    return {(line.ordinal, line.sample): line for line in lines}


@pytest.mark.parametrize("at", [None, pytest.param("turn", marks=pytest.mark.slow)], ids=["in flight", "at turns"])
def test_open_episodes_go_on_and_the_bound_holds(at, episodes, tmp_path, monkeypatch):
    run = tmp_path / "run"
    at_turns = BETWEEN | {"generator": episodes["generator"] | {"weight_update_at": at}}
    cut_off(monkeypatch, episodes | (at_turns if at else AHEAD), run, after_step(4))
    step = cut_back_to(run, "environments")
    saved, over = saved_in(run, step, "environments"), saved_in(run, step, "generator-0")
    assert not saved.keys() & over.keys()
    resumed = slipstream.run("quickstart", resume=run, display=False)
    audit(run)
    restored, told = restored_in(run), resumed.summary["episodes"]
    assert told["restored"] == len(saved), "none was sampled from its beginning"
    whole = {key: num_sampled(one) for key, one in over.items() if key in admitted_again(run, over)}
    assert restored == {key: num_sampled(one) for key, one in saved.items()} | whole
    lines = trained(run)
    for key in restored:
        partial, line = {**saved, **over}[key], lines[key]
        assert line.episode is not None
        messages = partial.record.messages
        assert line.episode.messages[: len(messages)] == messages
        spans = [span.version for segment in partial.segments for span in segment.version_spans]
        assert [version for _, version in line.versions if version >= 0][: len(spans)] == spans
        assert line.episode.turns == len(line.episode.turn_rewards) >= len(partial.record.turn_rewards)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rule"), [("Lost", AHEAD), ("Unpunctual", AHEAD), ("Kept", BETWEEN)])
def test_episodes_that_cannot_go_on_begin_again_and_are_counted(name, rule, episodes, tmp_path, monkeypatch):
    """Without a state, with one that is of no use, and where no episode spans versions."""
    run = tmp_path / "run"
    environment = episodes["environment"] | {"class_path": f"{SOURCE}:{name}", "dry_run": False}
    cut_off(monkeypatch, episodes | rule | {"environment": environment}, run, after_step(4))
    step = cut_back_to(run, "environments" if name == "Lost" else None)
    saved, over = saved_in(run, step, "environments"), saved_in(run, step, "generator-0")
    assert (len(saved) > 0) == (name == "Lost")
    owed = json.loads((run / "checkpoints" / f"step_{step}" / "state.json").read_text())["extra"]["schedule"]["readmit"]
    resumed = slipstream.run("quickstart", resume=run, display=False)
    audit(run)
    told = resumed.summary["episodes"]
    again = admitted_again(run, {(ordinal, sample): None for ordinal in owed for sample in range(4)})
    assert (told["restored"], told["restarts"]) == (0, len(saved))
    assert told["begun_again"] == len(again - over.keys())
    assert restored_in(run).keys() == over.keys() & again
    trained(run)
