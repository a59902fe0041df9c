"""The observers of a run: each takes all news, and then what others make of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.controller.evaluations import GREEDY, SAMPLED, EvaluationDone
from slipstream.controller.observers import Observers, Screen, StepWritten
from slipstream.controller.tally import Tally
from slipstream.core.clock import VirtualClock
from slipstream.core.errors import AlarmError
from slipstream.core.held_out import Measured
from slipstream.core.recipes import resolve
from slipstream.core.run_log import Command, Decision, ScheduleBegan, ScheduleConfig
from slipstream.core.service_messages import Counters, Noted
from slipstream.core.types import (
    CompletionFinished,
    GroupScored,
    Message,
    ReplicaLost,
    Skip,
    StartGroup,
    StepDone,
    Swapped,
    TrainStep,
)
from slipstream.observe.health import Alarm
from slipstream.observe.waste import Wasted

STEP = {
    "tokens_trained": 640.0,
    "tokens_read": 700.0,
    "padding_frac": 0.0,
    "staleness_updates_max": 0.0,
    "staleness_tokens/lag_0": 640.0,
    "reward_mean": 0.5,
}
BEGAN = ScheduleBegan(
    policy="oldest_first",
    config=ScheduleConfig(
        groups_per_step=1, completions_per_group=1, max_staleness=1, reorder_window=1, steps=4, capacity=4
    ),
)
FINISHED = CompletionFinished(ordinal=0, sample=0, replica=0, num_tokens=7, min_version=0, max_version=0)


def scored(*, failure: str | None = None) -> GroupScored:
    return GroupScored(
        ordinal=0,
        has_signal=False,
        mean_reward=0.0,
        num_failed=0 if failure is None else 1,
        min_version=0,
        max_version=0,
        failure=failure,
    )


class Run:
    """Observers in virtual time, and what the last of them was told."""

    hears = (object,)

    def __init__(self, run_dir: Path, **overrides: Any) -> None:
        self.run_dir, self.news, self.clock = run_dir, list[object](), VirtualClock()
        config = resolve("quickstart", overrides)
        self.observers = Observers(config, run_dir, Tally(config, started_s=0.0, clock=self.clock), screen=self)

    def take(self, news: object) -> None:
        self.news.append(news)

    def tell(self, event: Any, *commands: Command) -> None:
        """As the controller does: the message, then the decision."""
        self.clock.advance(1.0)
        if isinstance(event, Message):
            self.observers.take(event)
        self.observers.take(Decision(0, self.clock.now_s(), event, list(commands)))

    def lines(self) -> list[dict[str, Any]]:
        self.observers.close()
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]


def test_what_observers_make_of_news_follows_it(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.tell(BEGAN)
    run.tell(FINISHED, StartGroup(ordinal=0, replica=0))
    run.tell(FINISHED)
    run.tell(scored(), Skip(ordinals=(0,)))
    run.tell(StepDone(step=0, version=1, metrics=STEP | {"tokens_trained": 600.0}))
    wasted = next(place for place, one in enumerate(run.news) if isinstance(one, Wasted))
    assert run.news[wasted] == Wasted(4_000_000_000, "no_signal", 7)
    assert isinstance(run.news[wasted - 1], Decision)
    done = next(place for place, one in enumerate(run.news) if isinstance(one, StepDone))
    [line] = run.lines()
    assert run.news[done + 1] == StepWritten(line)
    assert (line["step"], line["version"], line["wall_s"]) == (0, 1, 5.0)
    assert (line["wasted_tokens/no_signal"], line["dropped/no_signal"], line["groups_scored"]) == (7.0, 1.0, 1.0)
    assert line["wasted_tokens/not_selected"] == 40.0, "in the step's own line"
    assert line["step_s"] == 3.0, "since the first admission"


def test_an_alarm_is_news_for_all_and_ends_the_run_where_it_is_to(tmp_path: Path) -> None:
    told = []
    for number, stop_on in enumerate(([], ["failed_rewards"])):
        run = Run(tmp_path / str(number), health={"stop_on": stop_on}, completions_per_group=2)
        try:
            for _ in range(40):
                run.tell(scored(failure="boom"))
        except AlarmError:
            told.append("ended")
        told += [one.name for one in run.news if isinstance(one, Alarm)]
        run.observers.close()
    assert told == ["failed_rewards", "ended"]


def test_a_reward_that_is_always_the_same_rings_before_any_step(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for _ in range(200):
        run.tell(scored(), Skip(ordinals=(0,)))
    (alarm,) = [one for one in run.news if isinstance(one, Alarm)]
    run.observers.close()
    assert (alarm.name, alarm.step, alarm.value) == ("equal_rewards", 0, 64.0)


def test_evaluations_are_lines_too_and_the_end_ones_are_samples(tmp_path: Path) -> None:
    run = Run(tmp_path, steps=3)
    for version, temperature in ((0, GREEDY), (0, SAMPLED), (2, GREEDY)):
        run.observers.take(EvaluationDone(version, temperature, Measured(reward=0.25), []))
    lines = run.lines()
    assert [(line["step"], "eval_reward" in line, "eval_sampled_reward" in line) for line in lines] == [
        (0, True, False),
        (0, False, True),
        (2, True, False),
    ]
    assert (tmp_path / "samples.json").exists()


@pytest.mark.parametrize("order", [(GREEDY, SAMPLED), (SAMPLED, GREEDY)])
def test_the_screen_shows_both_evaluations_whichever_ends_first(
    order: tuple[float, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = Screen(resolve("quickstart"), tmp_path)
    for temperature in order:
        screen.take(EvaluationDone(0, temperature, Measured(reward=0.25 + temperature / 2), []))
    screen.close()
    shown = capsys.readouterr().out
    assert "held-out reward before" in shown
    assert shown.count("sampled at temperature 1") == 1


def test_the_screen_forgets_a_replica_that_is_lost(tmp_path: Path) -> None:
    screen = Screen(resolve("quickstart"), tmp_path)
    for replica in (0, 1):
        screen.take(Swapped(replica=replica, version=2, transfer_s=0.0, pause_s=0.0, probe_error=0.0))
    screen.take(ReplicaLost(replica=0))
    screen.close()
    assert screen._display._replicas == {1: 2}


def test_the_screen_says_who_noted_what_but_for_the_controller(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = Screen(resolve("quickstart"), tmp_path)
    for news in (
        Noted(executor="trainer", text="one"),
        Noted(executor="controller", text="two"),
        Counters(executor="controller", values={"time/idle": 1.0}),
        TrainStep(step=0, ordinals=()),
    ):
        screen.take(news)
    screen.close()
    assert capsys.readouterr().out.splitlines()[-2:] == ["trainer: one", "two"]


def test_files_are_told_from_where_the_run_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """However long its path is, and wherever a reward has gone since."""
    run_dir, elsewhere = tmp_path / "runs" / "mine", tmp_path / "elsewhere"
    for folder in (run_dir, elsewhere):
        folder.mkdir(parents=True)
    (run_dir / "report.html").touch()
    tally = Tally(resolve("quickstart"), started_s=0.0, clock=VirtualClock())
    for start in (tmp_path, elsewhere):
        monkeypatch.chdir(start)
        screen = Screen(tally.config, run_dir)
        monkeypatch.chdir("/")
        screen.finished([], tally.summary(run_dir))
        screen.close()
    told = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("report.html")]
    assert told == [["report.html", "runs/mine/report.html"], ["report.html", str(run_dir / "report.html")]]
