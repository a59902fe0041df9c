"""Several runs on one page: what is laid over what, which numbers stand beside each other, and bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from synthetic_run import add_evaluation, make_run_dir, make_summary

import slipstream
from slipstream import cli
from slipstream.core.errors import ConfigError
from slipstream.observe.report import write_comparison
from slipstream.observe.report.comparison import short_names
from slipstream.observe.summary import Staleness, write_summary

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
    # The mean of 3 steps, at the end of the last 2: (0.76 + 0.78) / 2.
    assert (
        "RL until a smoothed reward of 0.770, which all reached: fast 12.4 s, slow 24.8 s (2.00 times as long)." in text
    )


def test_the_race_is_to_the_best_reward_of_the_weakest(make: Make, tmp_path: Path) -> None:
    def weaker(line: dict[str, Any]) -> None:
        slower(line)
        if "reward" in line:
            line["reward"] /= 2

    root = body(write_comparison([make("strong"), make("weak", change=weaker)], out=tmp_path / "page.html"))
    # The weak one ends at 0.385, where the strong one began: 0.41 is the mean of its first two steps.
    assert "reward of 0.385, which all reached: strong 0.6 s, weak 24.8 s (40.00 times as long)." in "".join(
        root.itertext()
    )


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
    bold = ["".join(one.itertext()) for one in table.iter("b")]
    assert "93.4%" in bold
    assert "0.598 s" in bold
    assert "50.0%" not in bold


def test_bars_are_seconds_of_a_step_one_run_under_the_other(make: Make, tmp_path: Path) -> None:
    root = body(write_comparison([make("a"), make("b", steps=10)], out=tmp_path / "page.html"))
    names = [
        "".join(text.itertext())
        for text in card(root, "What a step is spent on").iter("text")
        if text.get("class") == "name"
    ]
    a, b = "steps 20 0.609 s", "steps 10 0.598 s"
    assert names == [f"generator-0 · {a}", f"generator-0 · {b}", f"trainer · {a}", f"trainer · {b}"]
    told = [rect[0].text for rect in card(root, "What a step is spent on").iter("rect") if len(rect)]
    assert "trainer · steps 20: forward-backward 0.4 s, 66%" in told
    assert "trainer · steps 10: forward-backward 0.4 s, 67%" in told


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


def test_rewards_that_are_not_the_same_thing_are_not_raced(make: Make, tmp_path: Path) -> None:
    a, b = make("a"), make("b", config="[rewards]\ntimeout_s = 3.0\n", change=slower)
    (b / "config.toml").write_text('recipe = "quickstart"\n[rewards]\ntimeout_s = 3.0\n')
    text = "".join(body(write_comparison([a, b], out=tmp_path / "page.html")).itertext())
    assert "RL until" not in text


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


def test_a_run_that_goes_on_and_one_without_steps_are_compared_too(make: Make, tmp_path: Path) -> None:
    a, b = make("a"), make("b", steps=3)
    (b / "summary.json").unlink()
    (b / "metrics.jsonl").write_bytes(b'{"torn')
    text = "".join(body(write_comparison([a, b], out=tmp_path / "page.html")).itertext())
    assert "steps 3: running, 0 steps so far." in text


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
        ([a, "nowhere"], "'nowhere' is no run"),
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
