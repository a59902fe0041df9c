"""Several runs on one page: what is laid over what, which numbers stand beside each other, and bad input."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from covering import covering
from synthetic_run import add_evaluation, make_run_dir, make_summary, measure_rewards

import slipstream
from slipstream import cli
from slipstream.core.errors import ConfigError
from slipstream.observe.report import write_comparison
from slipstream.observe.report.comparison import short_names
from slipstream.observe.summary import Evaluation, Evaluations, Staleness, Throughput, write_summary

Make = Callable[..., Path]


@pytest.fixture(autouse=True)
def _runs_are_accounted_for() -> None:
    """The runs here are made up, and some of them contradict themselves."""


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A run by name; `change` is what becomes of each line of its metrics."""

    def made(
        name: str, *, steps: int = 20, config: str = "", change: Callable[[dict[str, Any]], None] | None = None
    ) -> Path:
        run_dir = tmp_path / name
        run_dir.mkdir(parents=True)
        make_run_dir(run_dir, steps=steps)
        text = (run_dir / "config.toml").read_text()
        (run_dir / "config.toml").write_text(config + text)
        if change is not None:
            lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_bytes().splitlines()]
            for line in lines:
                change(line)
            (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return run_dir

    return made


def body(path: Path) -> ElementTree.Element:
    raw = path.read_text(encoding="utf-8")
    return ElementTree.fromstring(raw[raw.index("<body>") : raw.index("</html>")])


def card(root: ElementTree.Element, title: str) -> ElementTree.Element:
    return next(one for one in root.iter("article") if one.findtext("h3") == title)


def rows(table: ElementTree.Element) -> dict[str, list[str]]:
    found = [["".join(cell.itertext()) for cell in row] for row in table.iter("tr")]
    return {row[0]: row[1:] for row in found}


def tips(element: ElementTree.Element) -> list[str]:
    return [rect[0].text or "" for rect in element.iter("rect") if rect.get("class") == "strip"]


def slower(line: dict[str, Any]) -> None:
    """As if every step had taken twice as long."""
    line["wall_s"] *= 2
    if "step_s" in line:
        line["step_s"] *= 2


def test_runs_lie_over_each_other_on_three_clocks(make: Make, tmp_path: Path) -> None:
    fast, slow = make("fast"), make("slow", config="max_staleness = 0\n", change=slower)
    root = body(write_comparison([fast, slow], out=tmp_path / "page.html"))
    assert root.findtext("header/h1") == "2 runs beside each other"
    accuracy = card(root, "Held-out accuracy")
    by_step, _, by_time = (tips(div) for div in accuracy.iter("div") if div.get("class") is None)
    assert by_step == ["step: 0\nfast: 0.4\nslow: 0.4", "step: 10\nfast: 0.65\nslow: 0.65"]
    assert by_time == [
        "seconds since RL began: 0\nfast: 0.4\nslow: 0.4",
        "seconds since RL began: 6.2\nfast: 0.65",
        "seconds since RL began: 12.4\nslow: 0.65",
    ]
    classes = {line.get("class") for line in accuracy.iter("polyline")}
    assert classes == {"line c0", "line c1"}
    text = "".join(root.itertext())
    # Means of 3 steps rise from 0.41 to (0.76 + 0.78) / 2; their error is that of the first and last, 0.0032 / sqrt(2).
    assert (
        "RL until a smoothed reward of 0.765, which all reached: fast 12.4 s, slow 24.8 s (2.00 times as long)." in text
    )


def test_held_out_rewards_stand_beside_each_other_with_a_measure_or_without(make: Make, tmp_path: Path) -> None:
    bare, other, measured = make("bare"), make("other"), make("measured")
    measure_rewards(bare, has_accuracy=False)
    measure_rewards(other, has_accuracy=False)
    root = body(write_comparison([bare, other], out=tmp_path / "page.html"))
    assert "accuracy" not in "".join(root.itertext())
    assert "step: 10\nbare: -0.438\nother: -0.438" in tips(card(root, "Held-out reward"))
    measure_rewards(measured, has_accuracy=True)
    root = body(write_comparison([bare, measured], out=tmp_path / "page.html"))
    found = rows(card(root, "Outcomes"))
    assert found["held-out accuracy after, greedy"] == ["-", "50.0%"]
    assert found["held-out mean reward before, greedy"] == ["-0.75", "-0.75"]
    assert found["held-out mean reward after, greedy"] == ["-0.125", "-0.125"]
    assert "step: 10\nmeasured: 0.25" in tips(card(root, "Held-out accuracy"))


# Where a sentence, or bold, would be wrong


def told(make: Make, tmp_path: Path, *runs: Path) -> str:
    return "".join(body(write_comparison(list(runs), out=tmp_path / "page.html")).itertext())


def noisy(reward: Callable[[int], float], *, seed: int) -> Callable[[dict[str, Any]], None]:
    rng = random.Random(seed)

    def change(line: dict[str, Any]) -> None:
        if "reward" in line:
            line["reward"] = reward(line["step"]) + rng.gauss(0, 0.05)

    return change


def test_a_run_that_had_the_reward_from_its_beginning_did_not_win_a_race(make: Make, tmp_path: Path) -> None:
    def weaker(line: dict[str, Any]) -> None:
        slower(line)
        if "reward" in line:
            line["reward"] /= 2

    # The weak one ends at 0.385, where the strong one began: 0.41 is the mean of its first two steps.
    assert "times as long" not in told(make, tmp_path, make("strong"), make("weak", change=weaker))


@pytest.mark.parametrize(("seed", "slope"), covering(range(5), [0.0, 0.005]))
def test_runs_that_differ_by_noise_alone_are_not_raced(make: Make, tmp_path: Path, seed: int, slope: float) -> None:
    """Both learn nothing, or both the same."""
    runs = [make(f"{i}", steps=60, change=noisy(lambda step: 0.4 + slope * step, seed=10 * seed + i)) for i in range(2)]
    assert "times as long" not in told(make, tmp_path, *runs)


def test_short_runs_are_not_raced(make: Make, tmp_path: Path) -> None:
    assert "times as long" not in told(make, tmp_path, make("a", steps=19), make("b", steps=19, change=slower))


def test_a_resumed_run_is_not_raced_and_its_time_is_that_of_all_attempts(make: Make, tmp_path: Path) -> None:
    """What was abandoned is in no clock of the metrics, and a second start-up is."""
    whole, resumed, earlier = make("whole"), make("resumed", change=slower), make("earlier", steps=10)
    (resumed / "attempt_1").mkdir()
    (earlier / "timeline").rename(resumed / "attempt_1" / "timeline")
    page = write_comparison([whole, resumed], out=tmp_path / "page.html")
    text = "".join(body(page).itertext())
    assert "times as long" not in text
    assert "Resumed: resumed." in text
    assert rows(card(body(page), "Outcomes"))["whole run"] == ["12.5 s", "18.7 s"]  # and 10 steps of 0.62 s before
    alone = "".join(body(slipstream.report(resumed)).itertext())
    assert "20 steps in 19 s, 2 attempts, 6 s of it after the checkpoints that it went on from" in alone


def test_a_resumed_run_whose_earlier_time_is_lost_has_none(make: Make, tmp_path: Path) -> None:
    whole, resumed = make("whole"), make("resumed")
    (resumed / "attempt_1" / "timeline").mkdir(parents=True)
    (resumed / "attempt_1" / "timeline" / "trainer.jsonl").write_bytes(bytes(4096) + b"\n")
    page = write_comparison([whole, resumed], out=tmp_path / "page.html")
    assert rows(card(body(page), "Outcomes"))["whole run"] == ["12.5 s", "-"]
    assert "in an unknown time, 2 attempts" in "".join(body(slipstream.report(resumed)).itertext())


@pytest.mark.parametrize(
    ("first", "second", "is_bold"),
    [
        ((0.850, 500), (0.844, 500), False),  # noise: 0.6 points with a standard error of 2.3
        ((0.850, 100), (0.844, 500), False),
        ((0.850, 100), (0.800, 500), False),
        ((0.850, 500), (0.750, 500), True),
        ((0.950, 100), (0.750, 500), True),  # the test of two proportions takes any two numbers of prompts
        ((1.000, 3), (0.500, 500), False),
        ((0.850, 0), (0.100, 500), False),
        ((0.850, 500, 50), (0.750, 500, 50), False),  # the others were not judged
        ((0.850, 500, 500), (0.750, 500, 500), True),
    ],
)
def test_a_held_out_score_is_bold_where_it_is_better_by_more_than_noise(
    make: Make, tmp_path: Path, first: tuple[float, ...], second: tuple[float, ...], is_bold: bool
) -> None:
    runs = [make("a"), make("b")]
    for run_dir, (value, count, *judged) in zip(runs, (first, second), strict=True):
        score = Evaluations(before=None, after=Evaluation(value, None, count, num_judged=next(iter(judged), None)))
        write_summary(make_summary(eval=score), run_dir / "summary.json")
    page = write_comparison(runs, out=tmp_path / "page.html")
    table = card(body(page), "Outcomes")
    assert rows(table)["held-out prompts"] == [str(first[1]), str(second[1])]
    assert (f"{first[0]:.1%}" in ["".join(one.itertext()) for one in table.iter("b")]) == is_bold
    assert "by more than noise: twice the standard error" in "".join(table.itertext())


def test_nothing_is_bold_across_other_prompts_or_batches(make: Make, tmp_path: Path) -> None:
    other = "groups_per_step = 32\n[prompts]\nnum_eval = 7\n"
    runs = [make("a"), make("b", steps=30, config=other, change=slower)]
    (runs[1] / "config.toml").write_text('recipe = "quickstart"\n' + other)
    score = Evaluations(before=None, after=Evaluation(0.2, None, 500))
    write_summary(make_summary(eval=score), runs[1] / "summary.json")
    page = write_comparison(runs, out=tmp_path / "page.html")
    assert not list(card(body(page), "Outcomes").iter("b"))
    text = "".join(body(page).itertext())
    assert "Prompts or rewards differ, so rewards and held-out scores need not mean the same." in text
    assert "times as long" not in text


def test_prompts_from_python_are_the_same_where_their_file_is(make: Make, tmp_path: Path) -> None:
    """Its path is the run's own."""
    runs = []
    for name in ("a", "b"):
        run_dir = make(name, change=slower if name == "b" else None)
        (run_dir / "prompts.jsonl").write_text('{"prompt": "1 + 1"}\n')
        with (run_dir / "config.toml").open("a") as file:
            file.write(f'[prompts]\ndataset = "{run_dir / "prompts.jsonl"}"\n')
        runs.append(run_dir)
    assert "times as long" in told(make, tmp_path, *runs)
    (runs[1] / "prompts.jsonl").write_text('{"prompt": "2 + 2"}\n')
    assert "times as long" not in told(make, tmp_path, *runs)


def test_steps_and_rates_are_bold_by_the_spread_of_their_steps(make: Make, tmp_path: Path) -> None:
    def rate(mean: float, seed: int) -> Callable[[dict[str, Any]], None]:
        rng = random.Random(seed)

        def change(line: dict[str, Any]) -> None:
            if "reward" in line:
                line["trained_tokens_per_s"] = mean + rng.gauss(0, 500)

        return change

    for mean, is_bold in ((4890.0, True), (4200.0, False)):
        runs = [make(f"{mean}", change=rate(mean, 0)), make(f"{mean} slow", change=rate(4000.0, 1))]
        slow = make_summary(throughput=Throughput(None, 4000.0, None))
        fast = make_summary(throughput=Throughput(None, mean, None))
        for run_dir, summary in zip(runs, (fast, slow), strict=True):
            write_summary(summary, run_dir / "summary.json")
        table = card(body(write_comparison(runs, out=tmp_path / "page.html")), "Outcomes")
        assert (f"{mean:,.0f}" in ["".join(one.itertext()) for one in table.iter("b")]) == is_bold


def test_a_run_that_ended_before_its_first_step_has_no_rate(make: Make, tmp_path: Path) -> None:
    """Also where its summary was written by a version that divided by almost nothing."""
    runs = [make("a"), make("b", steps=0)]
    absurd = make_summary(status="interrupted", steps=0, throughput=Throughput(6.1336e13, 6.1336e13, 1e9))
    write_summary(absurd, runs[1] / "summary.json")
    found = rows(card(body(write_comparison(runs, out=tmp_path / "page.html")), "Outcomes"))
    assert found["trained tokens/s"] == ["4,890", "-"]
    assert "61,336" not in "".join(body(slipstream.report(runs[1])).itertext())


def test_outcomes_stand_beside_each_other_with_the_better_one_bold(make: Make, tmp_path: Path) -> None:
    a, b, c = make("a"), make("b", steps=10), make("c")
    (c / "summary.json").unlink()
    summary = make_summary(steps=10, staleness=Staleness(0, 0.0, 0, {0: 100}, 1))
    worse = msgspec.structs.replace(summary.eval.after, accuracy=0.5)
    write_summary(
        msgspec.structs.replace(summary, eval=msgspec.structs.replace(summary.eval, after=worse)), b / "summary.json"
    )
    table = card(body(write_comparison([a, b, c], out=tmp_path / "page.html")), "Outcomes")
    found = rows(table)
    assert found[""] == ["a", "b", "c"]
    assert found["held-out accuracy after, greedy"] == ["93.4%", "50.0%", "-"]
    assert found["steps"] == ["20", "10", "20"]
    assert found["a step, mean"] == ["0.609 s", "0.598 s", "0.609 s"]  # (0.62 n - 0.22) / n: it begins with its work
    assert found["age of a trained token, mean"] == ["0.78 steps", "0.78 steps", "0.78 steps"]
    assert found["alarms"] == ["0", "0", "0"]
    assert ["".join(one.itertext()) for one in table.iter("b")] == ["93.4%"]  # steps differ by their first one alone


def test_one_step_is_no_steps(make: Make, tmp_path: Path) -> None:
    def younger(line: dict[str, Any]) -> None:
        line.pop("staleness_tokens/lag_2", None)

    page = write_comparison([make("a", steps=3), make("b", steps=3, change=younger)], out=tmp_path / "page.html")
    assert rows(card(body(page), "Outcomes"))["age of a trained token, most"] == ["2 steps", "1 step"]


def test_bars_are_seconds_of_a_step_one_run_under_the_other(make: Make, tmp_path: Path) -> None:
    root = body(write_comparison([make("a"), make("b", steps=10)], out=tmp_path / "page.html"))
    names = [
        "".join(text.itertext())
        for text in card(root, "What a step is spent on").iter("text")
        if text.get("class") == "name"
    ]
    a, b = "a 0.609 s", "b 0.598 s"
    assert names == [f"generator-0 · {a}", f"generator-0 · {b}", f"trainer · {a}", f"trainer · {b}"]
    told = [rect[0].text for rect in card(root, "What a step is spent on").iter("rect") if len(rect)]
    assert "trainer · a: forward-backward 0.4 s, 66%" in told
    assert "trainer · b: forward-backward 0.4 s, 67%" in told


def test_differing_fields_are_told_and_equal_ones_are_not(make: Make, tmp_path: Path) -> None:
    a, b = make("a", config="max_staleness = 2\nseed = 1\n"), make("b", config="max_staleness = 0\nseed = 1\n")
    root = body(write_comparison([a, b], out=tmp_path / "page.html"))
    found = rows(card(root, "Configuration"))
    assert found["max_staleness"][:2] == ["2", "0"]
    assert found["max_staleness"][2].startswith("k: how many steps old")
    assert "seed" not in found
    equal = body(write_comparison([a, make("c", config="max_staleness = 2\nseed = 1\n")], out=tmp_path / "page.html"))
    assert "None: the runs have one configuration." in "".join(equal.itertext())


def labels_of(page: Path) -> dict[str, str]:
    """What each run is called on the page, and what stands beside it."""
    (names,) = (one for one in body(page).iter("ul") if one.get("class") == "runs")
    return {item.findtext("b") or "": "".join(item[-1].itertext()) for item in names}


def test_runs_are_called_by_what_sets_them_apart(make: Make, tmp_path: Path) -> None:
    common = 'recipe = "r"\nseed = {seed}\nmax_staleness = {bound}\n[loss]\nname = "{loss}"\n[trainer]\nlr = {lr}\n'

    def page_of(*configs: dict[str, object]) -> Path:
        made = []
        for i, one in enumerate(configs):
            folder = tmp_path / f"quickstart-20260101-12000{i}"
            if not folder.exists():
                make(folder.name)
            values = {"seed": 1, "bound": 2, "loss": "grpo", "lr": 0.001}
            (folder / "config.toml").write_text(common.format(**values | one))
            made.append(folder)
        return write_comparison(made, out=tmp_path / "page.html")

    page = page_of({"loss": "grpo"}, {"loss": "rloo", "seed": 2, "lr": 0.1})
    assert labels_of(page) == {"grpo": "quickstart…0101-120000", "rloo": "quickstart…0101-120001"}
    assert rows(card(body(page), "Outcomes"))[""] == ["grpo", "rloo"]
    assert list(labels_of(page_of({}, {"seed": 7}))) == ["seed 1", "seed 7"]
    assert list(labels_of(page_of({}, {"lr": 0.1}, {"lr": 0.2, "seed": 9}))) == [
        "trainer lr 0.001",
        "trainer lr 0.1",
        "trainer lr 0.2",
    ]
    crossed = page_of({}, {"loss": "rloo"}, {"bound": 0}, {"loss": "rloo", "bound": 0})
    assert list(labels_of(crossed)) == [
        "grpo, max_staleness 2",
        "rloo, max_staleness 2",
        "grpo, max_staleness 0",
        "rloo, max_staleness 0",
    ]
    assert list(labels_of(page_of({}, {}))) == ["quickstart…0101-120000", "quickstart…0101-120001"], "nothing differs"


def test_runs_whose_folders_somebody_has_named_are_called_so(make: Make, tmp_path: Path) -> None:
    a = make("baseline", config="max_staleness = 2\n")
    b = make("synchronous", config="max_staleness = 0\n")
    page = write_comparison([a, b], out=tmp_path / "page.html")
    assert labels_of(page) == {"baseline": "max_staleness 2", "synchronous": "max_staleness 0"}
    assert rows(card(body(page), "Outcomes"))[""] == ["baseline", "synchronous"]
    given = make("quickstart-20260101-120000", config="max_staleness = 4\n")
    assert list(labels_of(write_comparison([a, given], out=tmp_path / "page.html"))) == [
        "max_staleness 2",
        "max_staleness 4",
    ], "one of them has the name of its time"


def test_fields_that_a_checkpoint_excludes_are_no_differences(make: Make, tmp_path: Path) -> None:
    a, b = make("a"), make("b")
    for run_dir, size in ((a, 128), (b, 512)):
        model = f'[model]\npath = "org/{run_dir.name}"\nintermediate_size = {size}\n'
        (run_dir / "config.toml").write_text(f'recipe = "r"\n{model}')
    found = rows(card(body(write_comparison([a, b], out=tmp_path / "page.html")), "Configuration"))
    assert found["model.path"][:2] == ["org/a", "org/b"]
    assert "model.intermediate_size" not in found
    (b / "config.toml").write_text('recipe = "r"\n[model]\nintermediate_size = 512\n')
    found = rows(card(body(write_comparison([a, b], out=tmp_path / "page.html")), "Configuration"))
    assert found["model.intermediate_size"][:2] == ["-", "512"]
    changed = rows(next(card(body(slipstream.report(a)), "Configuration").iter("table")))
    assert "model.path" in changed
    assert "model.intermediate_size" not in changed, "nor is it one from the default"


def test_adapters_and_a_chat_template_are_differences_over_a_checkpoint_too(make: Make, tmp_path: Path) -> None:
    a, b = make("a"), make("b")
    for run_dir, rank in ((a, 8), (b, 4)):
        model = f'path = "org/base"\nchat_template = "{rank}"\nhidden_size = {rank}\n[model.lora]\nrank = {rank}\n'
        (run_dir / "config.toml").write_text(f'recipe = "r"\n[model]\n{model}')
    page = write_comparison([a, b], out=tmp_path / "page.html")
    found = rows(card(body(page), "Configuration"))
    assert found["model.lora.rank"][:2] == ["8", "4"]
    assert found["model.chat_template"][:2] == ["8", "4"]
    assert "model.hidden_size" not in found
    changed = rows(next(card(body(slipstream.report(a)), "Configuration").iter("table")))
    assert {"model.lora.rank", "model.chat_template"} <= changed.keys()


@pytest.mark.parametrize(("start", "is_fresh"), [("", True), ('[sft]\npath = "org/base"\n', False)])
def test_a_fresh_model_of_a_stage_has_its_sizes_from_the_recipe(
    make: Make, tmp_path: Path, start: str, is_fresh: bool
) -> None:
    a, b = make("a"), make("b")
    for run_dir, size in ((a, 128), (b, 512)):
        text = f'recipe = "r"\n[model]\npath = "stage:dpo"\nhidden_size = {size}\n[dpo]\npath = "stage:sft"\n{start}'
        (run_dir / "config.toml").write_text(text)
    found = rows(card(body(write_comparison([a, b], out=tmp_path / "page.html")), "Configuration"))
    assert ("model.hidden_size" in found) == is_fresh


def test_win_rates_lie_over_kl_where_both_were_measured(make: Make, tmp_path: Path) -> None:
    a, b, c = make("a"), make("b"), make("c")
    add_evaluation(a, (0.0, 0.2), (5.0, 0.6))
    add_evaluation(b, (0.0, 0.2), (10.0, 0.1))
    root = body(write_comparison([a, b, c], out=tmp_path / "page.html"))
    picture = card(root, "Gold win rate against KL")
    spots = {circle[0].text: (circle.get("cx"), float(circle.get("cy") or 0)) for circle in picture.iter("circle")}
    assert len(spots) == 4
    after = {name.split(",")[0]: place for name, place in spots.items() if "after" in name}
    assert (after["a"][0], after["b"][0]) == ("33.33%", "66.67%")  # of an axis to 15: b's error bar ends at 11
    assert after["a"][1] < after["b"][1]  # higher up
    numbers = rows(card(root, "The same in numbers"))
    assert numbers["a, after RL"] == ["5.00 ± 0.50", "60.0% ± 6.0%"]
    without = body(write_comparison([b, c], out=tmp_path / "page.html"))
    (a / "evaluation.json").unlink()
    (b / "evaluation.json").unlink()
    assert any(one.get("id") == "evaluation" for one in without.iter("section"))
    without = body(write_comparison([a, c], out=tmp_path / "page.html"))
    assert not any(one.get("id") == "evaluation" for one in without.iter("section"))


@pytest.mark.parametrize(
    ("field", "are_alike"),
    [
        ("timeout_s = 3.0", False),
        ("num_workers = 2\nmodel_ranks = 2\ndevice = 'cuda'", True),
        ("[environment]\nclass_path = 'maze.py:Maze'", False),
        ("[environment.parameters]\nsize = 9", False),
        ("[environment]\nnum_workers = 4\ndry_run = false", True),
    ],
)
def test_rewards_that_are_not_the_same_thing_are_not_raced(
    make: Make, tmp_path: Path, field: str, are_alike: bool
) -> None:
    a, b = make("a"), make("b", change=slower)
    (b / "config.toml").write_text(f'recipe = "quickstart"\n[rewards]\n{field}\n')
    text = "".join(body(write_comparison([a, b], out=tmp_path / "page.html")).itertext())
    assert ("RL until" in text) == are_alike
    assert ("Prompts or rewards differ" in text) != are_alike


@pytest.mark.parametrize(
    ("field", "are_alike"),
    [
        ("measure = 'task'", False),
        ("[[eval.sets]]\nname = 'own'\ndataset = 'own.jsonl'", False),
        ("num_slots = 8", True),
    ],
)
def test_held_out_scores_of_other_sets_or_measures_are_never_bold(
    make: Make, tmp_path: Path, field: str, are_alike: bool
) -> None:
    a, b = make("a"), make("b", change=slower)
    (b / "config.toml").write_text(f'recipe = "quickstart"\n[eval]\n{field}\n')
    weaker = Evaluations(before=None, after=Evaluation(0.2, None, 500))
    write_summary(make_summary(eval=weaker), b / "summary.json")
    root = body(write_comparison([a, b], out=tmp_path / "page.html"))
    assert ("93.4%" in ["".join(one.itertext()) for one in card(root, "Outcomes").iter("b")]) == are_alike
    text = "".join(root.itertext())
    assert ("Held-out sets or their measures differ" in text) != are_alike
    assert "RL until" in text, "their rewards are of one kind"


def test_names_are_escaped_and_as_short_as_they_can_be(make: Make, tmp_path: Path) -> None:
    a, b = make("x/<script>run"), make("y/<script>run")
    raw = write_comparison([a, b], out=tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<script" not in raw
    assert "x/&lt;script&gt;run" in raw
    places = [Path("/r/a/one"), Path("/r/b/one"), Path("/r/b/two")]
    assert list(short_names(places).values()) == ["a/one", "b/one", "b/two"]
    assert list(short_names(places[1:]).values()) == ["one", "two"]
    long = "quickstart-with-a-very-long-name"
    assert list(short_names([Path(f"/r/{long}-1"), Path(f"/r/{long}-2")]).values()) == [
        "quickstart…long-name-1",
        "quickstart…long-name-2",
    ]
    middles = [Path(f"/r/{long}{middle}{long}") for middle in "12"]
    assert list(short_names(middles).values()) == [f"{long}1{long}", f"{long}2{long}"]


def test_a_folder_whose_name_is_no_text_is_compared_too(make: Make, tmp_path: Path) -> None:
    runs = [make(os.fsdecode(b"caf\xe9")), make("tea")]
    raw = write_comparison(runs, out=tmp_path / "page.html").read_text(encoding="utf-8")
    assert "caf\\udce9" in raw


def test_a_run_that_goes_on_and_one_without_steps_are_compared_too(make: Make, tmp_path: Path) -> None:
    a, b = make("a"), make("b", steps=3)
    (b / "summary.json").unlink()
    (b / "metrics.jsonl").write_bytes(b'{"torn')
    text = "".join(body(write_comparison([a, b], out=tmp_path / "page.html")).itertext())
    assert "b: running, 0 steps so far." in text


def test_bad_input_is_told_and_ends_with_2(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    a, b = str(make("a")), str(make("b"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "young").mkdir()
    (tmp_path / "young" / "config.toml").write_text('recipe = "x"\n')
    for argv, message in (
        ([], "a run is needed"),
        ([a, "nowhere"], "no folder 'nowhere'"),
        ([a, str(tmp_path / "folder")], "is no run"),
        (["young"], "'young' has nothing to report yet"),
        ([a, b, a], "a run is compared with itself"),
        ([a, b, "--out", str(tmp_path / "folder")], "cannot be written there"),
        ([a, b, "--out", str(tmp_path / "no" / "page.html")], "cannot be written there"),
    ):
        assert cli.main(["report", *argv]) == 2
        out, err = capsys.readouterr()
        assert message in err
        assert not out
    (tmp_path / "b" / "metrics.jsonl").write_bytes(b'{"step": 1}\n!\n{"step": 2}\n')
    assert cli.main(["report", a, b]) == 2
    assert "metrics.jsonl is damaged" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="2 to 14"):
        write_comparison([Path(a)], out=tmp_path / "page.html")


def test_the_page_goes_to_the_working_directory_or_where_it_is_asked_to(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    a, b = make("a"), make("b")
    assert cli.main(["report", str(a), str(b)]) == 0
    assert "report: comparison.html" in capsys.readouterr().out
    assert body(tmp_path / "comparison.html").findtext("header/h1") == "2 runs beside each other"
    assert slipstream.report(a, b, out="both.html") == Path("both.html")
    assert slipstream.report(a) == a / "report.html"
    assert slipstream.report(str(a), out=tmp_path / "one.html") == tmp_path / "one.html"
    assert body(tmp_path / "one.html").findtext("header/p", "").startswith("a · 20 steps")


def test_a_report_needs_no_torch(make: Make) -> None:
    code = "import sys, slipstream; slipstream.report(sys.argv[1]); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, str(make("a"))], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
