"""The page about a run: its structure, its numbers against the run's files, hostile text, odd runs, its size."""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import time
import tomllib
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from covering import with_slow
from synthetic_run import (
    HOSTILE,
    RATIO_EDGES,
    add_evaluation,
    make_group,
    make_run_dir,
    make_summary,
    measure_rewards,
    record_group,
)

import slipstream
from slipstream.core.errors import ConfigError, SlipstreamError
from slipstream.core.jsonl import JsonlWriter
from slipstream.core.types import EpisodeRecord
from slipstream.observe.hardware import Hardware
from slipstream.observe.health import RULES, Alarm
from slipstream.observe.metrics import MetricsWriter
from slipstream.observe.recorder import RolloutRecorder
from slipstream.observe.report import charts as charts_module
from slipstream.observe.report import write_report
from slipstream.observe.report.data import by_side, flat, read_run
from slipstream.observe.report.page import differing
from slipstream.observe.report.timing import read_row, read_window
from slipstream.observe.samples import Sample, write_samples
from slipstream.observe.summary import Evaluation, Evaluations, read_summary, write_summary
from slipstream.observe.timeline import Slice
from slipstream.observe.transcript import TranscriptPart

MACHINE = Hardware(
    cpu="a processor",
    num_cores=2,
    num_cores_machine=4,
    memory_bytes=1 << 34,
    shm_free_bytes=None,
    gpus=(),
    torch_threads=2,
    platform="Linux",
)
PARTS = ["overview", "learning", "off-policy", "time", "text", "setup"]


@pytest.fixture(autouse=True)
def _runs_are_accounted_for() -> None:
    """The runs here are made up, and some of them contradict themselves."""


@pytest.fixture(scope="module")
def made_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run_dir(tmp_path_factory.mktemp("made"))


@pytest.fixture
def run_dir(tmp_path: Path, made_run: Path) -> Path:
    return Path(shutil.copytree(made_run, tmp_path, dirs_exist_ok=True, copy_function=shutil.copy))


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """750 steps of 0.62 s, from second 50 on."""
    return make_run_dir(tmp_path_factory.mktemp("long"), steps=750)


class Page(HTMLParser):
    """An independent reading of the page: its tags, attributes and text."""

    VOID = ("meta", "img", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "wbr":  # the word goes on behind it
            self.text = self.text.removesuffix("\n")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data + "\n"

    @property
    def words(self) -> str:
        """Without line breaks, for sentences that go over tags."""
        return re.sub(r"\s+", " ", self.text)


def read(path: Path) -> Page:
    page = Page(path.read_text(encoding="utf-8"))
    assert page.open == []
    return page


def body(path: Path) -> ElementTree.Element:
    """The body as a tree: it is well formed as XML, too."""
    raw = path.read_text(encoding="utf-8")
    return ElementTree.fromstring(raw[raw.index("<body>") : raw.index("</html>")])


def card(root: ElementTree.Element, title: str) -> ElementTree.Element:
    return next(one for one in root.iter("article") if one.findtext("h3") == title)


def tips(element: ElementTree.Element) -> list[dict[str, str]]:
    """What the strips of a card's plots say, line by line; the first one says where."""
    found = [rect[0].text or "" for rect in element.iter("rect") if rect.get("class") == "strip"]
    return [{"at": tip.split("\n")[0]} | dict(line.rsplit(": ", 1) for line in tip.split("\n")[1:]) for tip in found]


def metrics_of(run_dir: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "reward" in line]


# Structure


def test_every_part_is_there_and_every_picture_has_a_title_a_reading_and_numbers(run_dir: Path) -> None:
    root = body(write_report(run_dir, MACHINE))
    assert [section.get("id") for section in root.iter("section")] == PARTS
    links = [link.get("href") for link in root.iter("a")]
    assert links == [f"#{part}" for part in PARTS]
    plots = [svg for svg in root.iter("svg") if "plot" in (svg.get("class") or "")]
    assert len(plots) == 21
    for plot in plots:
        assert plot.get("role") == "img"
        assert plot.findtext("title")
        assert plot.findtext("desc")
    for article in root.iter("article"):
        assert article.findtext("h3")
        has_plot = any("plot" in (svg.get("class") or "") for svg in article.iter("svg"))
        note = next((p.text for p in article.iter("p") if p.get("class") == "note"), None)
        assert not has_plot or (note or "").endswith("."), article.findtext("h3")
    empty = [p.text for p in root.iter("p") if p.get("class") == "empty"]
    assert empty == ["Not known: there are no decisions of this run."]
    assert all(details[0].tag == "summary" for details in root.iter("details"))
    assert len([table for table in root.iter("table") if table.get("class") == "numbers"]) >= 13


def test_the_page_holds_the_outcome_of_the_run(run_dir: Path) -> None:
    page = read(write_report(run_dir, MACHINE))
    for expected in (
        "41.2 → 93.4%",
        "Held-out accuracy went from 41.2% to 93.4% (500 prompts, greedy) in 20 steps.",
        "4,890 trained tokens a second (5,210 sampled)",
        "0.78 steps old is a trained token (most 2, bound 2)",
        "A trained token was 0.78 steps old on average and 2 at most, as promised at most 2.",
        "20 steps in 12 s · seed 0 · 0.65 M parameters",
        "generator.max_new_tokens",
        "Longest completion, in tokens",  # what a field is, from the schema
        "16.0 GiB",  # of the machine
        "abc>",
        "✗ abc",
    ):
        assert expected in page.words, expected
    assert ("title", "reward 0") in page.attributes  # why that answer is marked
    assert "contradicts" not in page.text


def test_without_a_measure_the_page_speaks_of_the_mean_reward_and_of_no_accuracy(run_dir: Path) -> None:
    measure_rewards(run_dir, has_accuracy=False)
    path = write_report(run_dir)
    page, root = read(path), body(path)
    assert "-0.75 → -0.125 held-out mean reward, greedy" in page.words
    assert (
        "The held-out mean reward went from -0.75 to -0.125, format from -0.75 to -0.125, "
        "brevity from -0.375 to -0.0625 (500 prompts, greedy) in 20 steps." in page.words
    )
    by_step = tips(card(root, "Reward"))
    assert next(tip for tip in by_step if tip["at"] == "step: 10")["held-out mean reward, greedy"] == "-0.438"
    parts = tips(card(root, "Reward by term"))
    assert next(tip for tip in parts if tip["at"] == "step: 10")["brevity, held out"] == "-0.219"
    assert "-0.75 abc" in page.words  # the answers are told by their reward, and no mark says what is right
    shown = re.sub(r"eval\.(before|after)\.(sampled_)?accuracy -", "", page.words)  # fields of summary.json
    for word in ("accuracy", "✓", "✗"):
        assert word not in shown, shown[shown.index(word) - 80 :][:160]


def test_with_a_measure_the_page_speaks_of_accuracy_and_of_the_mean_reward(run_dir: Path) -> None:
    measure_rewards(run_dir, has_accuracy=True)
    page = read(write_report(run_dir))
    assert "25.0 → 50.0% held-out accuracy, greedy" in page.words
    assert "Held-out accuracy went from 25.0% to 50.0%, the mean reward from -0.75 to -0.125, format" in page.words
    assert "✗ abc" in page.words
    assert "✓ cba" in page.words
    found = tips(card(body(run_dir / "report.html"), "Reward and accuracy"))
    at_10 = next(tip for tip in found if tip["at"] == "step: 10")
    assert (at_10["held-out accuracy, greedy"], at_10["held-out mean reward, greedy"]) == ("0.25", "-0.438")


def test_a_run_that_goes_on_one_that_was_killed_and_one_that_failed_say_so(run_dir: Path) -> None:
    write_summary(make_summary(status="failed"), run_dir / "summary.json")
    page = read(write_report(run_dir))
    assert "The run failed" in page.text
    assert "slipstream run --resume" not in page.text, "there is no checkpoint"
    (run_dir / "checkpoints" / "step_20").mkdir(parents=True)
    assert "slipstream run --resume" in read(write_report(run_dir)).text
    (run_dir / "summary.json").unlink()
    assert re.search(r"The run goes on; its newest line was \d+ s old", read(write_report(run_dir)).text)
    old_s = time.time() - 3600
    os.utime(run_dir / "metrics.jsonl", (old_s, old_s))
    page = read(write_report(run_dir))
    assert "not finished" in page.text
    assert "20 steps so far" in page.text
    assert f"slipstream run --resume {run_dir}" in page.text
    assert "no bound was promised" in page.text
    config = run_dir / "config.toml"
    config.write_text("max_staleness = 3\n" + config.read_text())
    assert "2 at most, as promised at most 3." in read(write_report(run_dir)).text
    config.write_text(config.read_text() + '[schedule]\npolicy = "finished_first"\n')
    assert "no bound was promised" in read(write_report(run_dir)).text


# Numbers, against plain arithmetic over the files


def test_the_three_clocks_are_steps_tokens_and_time_since_the_first_admission(run_dir: Path) -> None:
    pictures = card(body(write_report(run_dir)), "Reward and accuracy")
    by_step, by_tokens, by_time = (tips(div) for div in pictures.iter("div") if div.get("class") is None)
    lines = metrics_of(run_dir)
    tokens, total = {}, 0.0
    for line in lines:
        total += line["tokens_trained"]
        tokens[total] = line
    assert next(tip for tip in by_step if tip["at"] == "step: 7")["reward of each batch"] == f"{lines[7]['reward']:.3g}"
    assert next(tip for tip in by_tokens if tip["at"] == "tokens trained on: 1,080")["reward of each batch"] == (
        f"{tokens[1080.0]['reward']:.3g}"
    )
    # Step n ends 0.62 (n + 1) seconds after the first admission, which is when the first step began: at 0 here.
    at_last = next(tip for tip in by_time if tip["at"] == "seconds since RL began: 12.4")
    assert at_last["reward of each batch"] == f"{lines[-1]['reward']:.3g}"
    # Version 10 was made by step 9: 10 steps, 1350 tokens, 6.2 s; version 0 lies at 0 on all three.
    for found, place in (
        (by_step, "step: 10"),
        (by_tokens, "tokens trained on: 1,350"),
        (by_time, "seconds since RL began: 6.2"),
    ):
        assert next(tip for tip in found if tip["at"] == place)["held-out accuracy, greedy"] == "0.65"
        assert found[0]["held-out accuracy, greedy"] == "0.4"
        assert found[0]["at"].endswith(": 0")


def test_staleness_and_ratios_are_those_of_the_metrics(run_dir: Path) -> None:
    root = body(write_report(run_dir))
    lines = metrics_of(run_dir)
    ages = card(root, "Age of the trained tokens")
    for tip, line in zip(tips(ages), lines, strict=True):
        counts = [line[f"staleness_tokens/lag_{lag}"] for lag in range(3)]
        for lag, count in enumerate(counts):
            assert tip[str(lag)] == f"{count / sum(counts):.0%}"
    texts = [text.text for text in ages.iter("text")]
    assert texts[texts.index("1") + 1] == "56%"  # 1500 of 2700
    assert "bound 2" in texts
    ratios = card(root, "Importance ratios")
    names = ["0.5 – 0.98", "0.98 – 1.02", "1.02 – 2", "≥ 2"]
    for tip, line in zip(tips(ratios), lines, strict=True):
        for name, edge in zip(names, RATIO_EDGES[1:], strict=True):
            share = line[f"ratio_share/{edge}"]
            assert tip.get(name, "0%") == (
                "0%" if share < 1e-9 else f"{share:.0%}" if share >= 0.0995 else f"{share:.1%}"
            )


def test_the_margin_of_a_heat_map_weighs_steps_by_their_tokens(run_dir: Path) -> None:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_bytes().splitlines()]
    for line in lines:
        if "reward" in line:  # one step of 19 tokens far from 1, the others of one token at 1
            is_far = line["step"] == 4
            line |= dict.fromkeys((f"ratio_share/{edge}" for edge in RATIO_EDGES), 0.0)
            line |= {"tokens_trained": 19.0 if is_far else 1.0, "ratio_share/0" if is_far else "ratio_share/0.98": 1.0}
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    texts = [text.text for text in card(body(write_report(run_dir)), "Importance ratios").iter("text")]
    assert texts[texts.index("< 0.5") + 1] == "50%"
    assert texts[texts.index("0.98 – 1.02") + 1] == "50%"


def test_bars_and_areas_are_the_seconds_of_the_timeline(run_dir: Path) -> None:
    root = body(write_report(run_dir))
    # Of a step's 0.62 s the trainer computes 0.4 and waits 0.2; the first one begins with its computing.
    trained_s = 20 * 0.4 + 19 * 0.2 + 19 * 0.02
    bars = [rect[0].text for rect in card(root, "While it trained").iter("rect") if len(rect)]
    assert f"trainer: forward-backward 8 s, {8 / trained_s:.0%}" in bars
    assert f"trainer: waits for generation 3.8 s, {3.8 / trained_s:.0%}" in bars
    whole = [rect[0].text for rect in card(root, "The whole run").iter("rect") if len(rect)]
    assert f"trainer: forward-backward 8 s, {8 / 12.5:.0%}" in whole
    columns = tips(card(root, "Over time"))
    of_trainer = [tip for tip in columns if "forward-backward" in tip]
    assert len(of_trainer) == 20
    assert of_trainer[5]["forward-backward"] == f"{0.4 / 0.62:.0%}"
    assert of_trainer[5]["waits for generation"] == f"{0.2 / 0.62:.0%}"


def test_the_window_is_made_of_whole_steps_from_the_middle(run_dir: Path) -> None:
    window = read_window(run_dir)
    assert window is not None
    assert window.title == "steps 11 to 14"
    assert window.origin == "the end of step 10"
    assert (window.start_s, window.end_s) == (pytest.approx(50.6 + 10 * 0.62), pytest.approx(50.6 + 14 * 0.62))
    by_name = {row.name: row for row in window.rows}
    steps = [bar.text for bar in by_name["trainer"].bars if bar.text]
    assert steps == ["step 11", "step 12", "step 13", "step 14"]
    marks = [text for _, text in by_name["generator-0"].marks]
    assert marks == [f"swapped, version {version}" for version in (11, 12, 13, 14)]


@pytest.fixture
def read_ahead(monkeypatch: pytest.MonkeyPatch) -> int:
    """A quarter of what it is: a run is long with a quarter of the steps."""
    monkeypatch.setattr("slipstream.observe.report.timing.READ_AHEAD", 1 << 16)
    return 1 << 16


@pytest.mark.usefixtures("read_ahead")
def test_the_window_of_a_long_run_is_found_without_reading_all_of_it(long_run: Path) -> None:
    """750 steps: the middle of the file is the middle of the run, and what is drawn is what lies in the window."""
    window = read_window(long_run)
    assert window is not None
    first, last = map(int, re.findall(r"\d+", window.title))
    assert last == first + 3
    assert 250 < first < 500
    assert window.start_s == pytest.approx(50.6 + 0.62 * (first - 1))
    bars = next(row.bars for row in window.rows if row.name == "trainer")
    inside = [bar for bar in bars if bar.end_s > window.start_s and bar.start_s < window.end_s]
    assert inside == list(bars)
    assert sum(min(b.end_s, window.end_s) - max(b.start_s, window.start_s) for b in bars) == pytest.approx(4 * 0.6)


def test_a_row_has_what_lies_in_its_window_wherever_that_is(long_run: Path, read_ahead: int) -> None:
    path = long_run / "timeline" / "trainer.jsonl"
    assert path.stat().st_size > 3 * read_ahead
    slices = [json.loads(line) for line in path.read_bytes().splitlines() if b"slice" in line]
    for start_s in (40.0, 50.0, 50.7, 150.0, 270.05, 400.0, 511.0, 700.0):
        end_s = start_s + 2.0
        expected = [
            (one["start_ns"], one["end_ns"])
            for one in slices
            if one["end_ns"] > start_s * 1e9 and one["start_ns"] < end_s * 1e9
        ]
        found = [(round(bar.start_s * 1e9), round(bar.end_s * 1e9)) for bar in read_row(path, start_s, end_s).bars]
        assert found == expected, start_s


def test_a_slice_of_several_states_is_drawn_as_the_one_that_took_most_of_it(tmp_path: Path) -> None:
    path = tmp_path / "generator-0.jsonl"
    mixed = Slice("send", 0, 100_000_000, also={"decode": 70_000_000, "receive": 1_000_000})
    writer = JsonlWriter(path)
    writer.write(mixed)
    writer.close()
    (bar,) = read_row(path, 0.0, 1.0).bars
    assert bar.tip == "decode 100 ms, send 29.0 ms of it, receive 1.0 ms of it"


def test_lengths_are_counted_from_the_rollouts(run_dir: Path) -> None:
    recorder = RolloutRecorder(run_dir / "rollouts.jsonl")
    record_group(recorder, make_group(40), step=None)  # sampled, and dropped
    recorder.close()
    root = body(write_report(run_dir))
    lines = [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_bytes().splitlines()]
    sampled = Counter(line["num_tokens"] for line in lines)
    found = tips(card(root, "Lengths: sampled and trained on"))
    assert len(lines) == 42
    for tip in found:
        tokens = int(tip["at"].removeprefix("tokens: "))
        assert float(tip["sampled"]) == pytest.approx(sampled[tokens] / len(lines), abs=5e-3)
        assert float(tip["trained on"]) == float(tokens == 6)
    assert tips(card(root, "Lengths over time"))[0] == {"at": "step 0 to 1", "6": "100%"}


def test_noisy_curves_are_smoothed_and_their_numbers_are_not(tmp_path: Path) -> None:
    run_dir = make_run_dir(tmp_path, steps=60)
    root = body(write_report(run_dir))
    entropy = card(root, "Entropy")
    assert {line.get("class", "").split()[0] for line in entropy.iter("polyline")} == {"line", "faint"}
    assert tips(entropy)[3]["entropy"] == "0.5"  # 2 / (1 + 3)
    rows = [[cell.text for cell in row] for row in entropy.iter("tr")][1:]
    assert float(rows[0][1] or 0) == pytest.approx(statistics.fmean(2 / (1 + i) for i in range(5)), rel=1e-2)


# Text


def test_text_of_the_model_stays_text_and_nothing_is_fetched(run_dir: Path) -> None:
    path = write_report(run_dir)
    page, raw = read(path), path.read_text(encoding="utf-8")
    assert not {"script", "img", "link", "iframe", "form", "input", "object"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on") or name == "src"]
    assert all((value or "").startswith("#") for name, value in page.attributes if name == "href")
    assert "</script><script>alert('x')</script>" in page.text  # shown, not run
    assert "\x00" not in raw
    assert not re.search(r"https?://|url\((?!#)|@import", raw)
    policy = [value for _, value in page.attributes if value and "default-src" in value]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_every_name_that_a_run_can_choose_is_escaped(tmp_path: Path) -> None:
    """Of its folder, recipe, reward terms, alarms, processes, states, causes; and values of its configuration."""
    bad = "<script>alert(1)</script>"
    run_dir = tmp_path / "<b>run"
    run_dir.mkdir()
    make_run_dir(run_dir)
    (run_dir / "config.toml").write_text(f'recipe = "{bad}"\n[prompts]\ntemplate = "{bad}"\n["{bad}"]\nx = "{bad}"\n')
    shutil.copy(run_dir / "timeline" / "trainer.jsonl", run_dir / "timeline" / "<b>.jsonl")
    with (run_dir / "timeline" / "<b>.jsonl").open("ab") as file:
        file.write(
            msgspec.json.encode({"kind": "slice", "state": bad, "start_ns": 50_600_000_000, "end_ns": 60_000_000_000})
            + b"\n"
            + msgspec.json.encode({"kind": "instant", "name": bad, "time_ns": 51_000_000_000, "args": {bad: bad}})
            + b"\n"
        )
    writer = MetricsWriter(run_dir / "metrics.jsonl")
    for step in (20, 21):
        terms = {f"reward_parts/{bad}": 0.5, "reward_parts/b": 0.25, "step_s": 0.6, "reward": 0.5}
        writer.write(step=step, version=step + 1, wall_s=13.0 + step, metrics=terms)
    writer.close()
    page = read(write_report(run_dir))
    assert "script" not in page.tags
    assert page.text.count(bad) >= 6
    assert "<b>run" in page.text


def test_alarms_are_listed_with_their_steps_and_shade_their_charts(run_dir: Path) -> None:
    assert "suspicion" not in read(write_report(run_dir)).text
    alarm = Alarm(
        step=7, name="no_signal", event="began", severity="warning", value=0.95, threshold=0.9, text=f"slow {HOSTILE}"
    )
    ended = msgspec.structs.replace(alarm, step=9, event="ended")
    writer = JsonlWriter(run_dir / "alarms.jsonl")
    writer.write(alarm, ended, msgspec.structs.replace(alarm, name="poisoned", step=8))
    writer.close()
    path = write_report(run_dir)
    page, root = read(path), body(path)
    assert "Alarms that rang: no_signal, poisoned." in page.text
    assert "7 – 9" in page.text
    assert "8 – the end" in page.text
    assert "<script>alert" in page.text  # shown, not run
    assert "script" not in page.tags
    (band,) = (rect for rect in card(root, "Groups that can teach").iter("rect") if rect.get("class") == "band")
    assert (band.get("x"), band.get("width")) == (f"{100 * 7 / 19:.4g}%", f"{100 * 2 / 19:.4g}%")
    assert not [rect for rect in card(root, "Entropy").iter("rect") if rect.get("class") == "band"]


# Episodes


def test_episodes_have_curves_and_transcripts_and_only_runs_with_them(run_dir: Path) -> None:
    titles = ("Turns of an episode", "Episodes cut, tokens given", "Calls of tools", "Time in environments", "Forks")
    before = read(write_report(run_dir)).text
    assert not any(title in before for title in titles)
    lines = metrics_of(run_dir)
    for line in lines:
        names = ("turns_mean", "turns_max", "cut_frac", "given_frac", "forks", "tool_calls_mean", "tool_errors_mean")
        line |= {f"episode/{name}": 0.25 for name in (*names, "environment_s_mean", "environment_s_max")}
        line["episode/turns_max"] = 3.0 + line["step"]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    root = body(write_report(run_dir))
    assert next(tip for tip in tips(card(root, titles[0])) if tip["at"] == "step: 7")["most"] == "10"
    shown = {one.findtext("h3") for one in root.iter("article")}
    assert shown >= {titles[0], titles[1], titles[3]}
    assert titles[2] not in shown, "no tool was ever called more often than at other times"
    assert titles[4] not in shown, "nor was there another number of forks"
    for line in lines:
        line["episode/forks"] = float(line["step"] % 3)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert titles[4] in {one.findtext("h3") for one in body(write_report(run_dir)).iter("article")}
    turns = [
        TranscriptPart("assistant", HOSTILE, 1, 0.5),
        TranscriptPart("call", f"add({HOSTILE})"),
        TranscriptPart(f"tool {HOSTILE}", "2"),
        TranscriptPart("fork 1 of 1", "a context of its own", fork=1),
        TranscriptPart("assistant", f"forked {HOSTILE}", 2),
    ]
    sample = Sample("abc>", "cba", "whole", None, before_reward=0.5, before_is_right=False, before_turns=turns)
    write_samples([sample], run_dir / "samples.json")
    page = read(write_report(run_dir))
    assert "script" not in page.tags
    assert "img" not in page.tags
    assert page.text.count("<script>alert") >= 4
    assert "fork 1 of 1" in page.text
    assert "add(</script>" in page.text
    assert "whole" not in page.text.split("Before and after")[1].split("Lengths")[0]


def test_of_an_unfinished_run_the_samples_are_transcripts_too(run_dir: Path) -> None:
    (run_dir / "samples.json").unlink()
    recorder = RolloutRecorder(run_dir / "rollouts.jsonl")
    group = make_group(60)
    messages = [{"role": "assistant", "content": "eight"}, {"role": "user", "content": "higher"}]
    record = EpisodeRecord(messages=messages, turn_rewards=[0.25], branches=[[messages[0] | {"content": "aside"}]])
    told = [
        msgspec.structs.replace(one, completion=msgspec.structs.replace(one.completion, episode=record))
        for one in group.rollouts
    ]
    record_group(recorder, msgspec.structs.replace(group, rollouts=tuple(told)), step=20)
    recorder.close()
    text = read(write_report(run_dir)).text
    assert "eight" in text
    assert "higher" in text
    assert "fork 1 of 1" in text
    assert "aside" in text


# Odd runs


def test_an_interrupted_run_gets_a_page_from_what_there_is(run_dir: Path) -> None:
    (run_dir / "summary.json").unlink()
    (run_dir / "samples.json").unlink()
    for name in ("metrics.jsonl", "rollouts.jsonl", "timeline/trainer.jsonl"):
        with (run_dir / name).open("ab") as file:
            file.write(b'{"torn": ')
    page = read(write_report(run_dir))
    assert "trainer: forward-backward 8 s, 65%" in page.text
    assert "0.59\nreward, mean of 20 steps" in page.text
    assert "no held-out answers were kept" in page.text


def test_lines_that_are_lost_are_told_of(run_dir: Path) -> None:
    assert "Incomplete" not in read(write_report(run_dir)).text
    lines = (run_dir / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    steps = [line for line in lines if b'"eval_accuracy"' not in line]
    (run_dir / "metrics.jsonl").write_bytes(b"".join(line for line in lines if line not in steps[:3]))
    with (run_dir / "events.jsonl").open("wb") as file:
        file.writelines(b'{"seq":%d,"time_s":1.0,"event":{"type":"Stop"},"commands":[]}\n' % seq for seq in (7, 8, 9))
    page = read(write_report(run_dir))
    assert "Incomplete: 3 steps are missing" in page.text
    assert "Incomplete: 7 events are missing" in page.text


@pytest.mark.parametrize("name", ["metrics.jsonl", "rollouts.jsonl", "timeline/trainer.jsonl", "summary.json"])
def test_a_damaged_file_is_an_error_that_names_it(run_dir: Path, name: str) -> None:
    path = run_dir / name
    path.write_bytes(b"\xff{" + path.read_bytes())
    with pytest.raises(SlipstreamError, match=Path(name).name):
        write_report(run_dir)
    with pytest.raises(ConfigError, match=Path(name).name):
        slipstream.report(run_dir)


@pytest.mark.parametrize("line", [b'{"a": 1}', b'{"step": 1, "version": null, "wall_s": 1.0, "step_s": 1.0}'])
def test_a_line_without_what_every_line_has_is_an_error_that_names_it(run_dir: Path, line: bytes) -> None:
    path = run_dir / "metrics.jsonl"
    path.write_bytes(line + b"\n" + path.read_bytes())
    with pytest.raises(SlipstreamError, match=r"metrics\.jsonl"):
        write_report(run_dir)


def test_every_file_may_be_missing(tmp_path: Path, run_dir: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    page = read(write_report(empty))
    assert "No step is done yet." in page.text
    assert "svg" in page.tags  # the pattern alone
    assert not any("plot" in (value or "") for name, value in page.attributes if name == "class")
    for name in ("config.toml", "metrics.jsonl", "rollouts.jsonl", "samples.json", "summary.json"):
        (run_dir / name).unlink()
        body(write_report(run_dir))
    shutil.rmtree(run_dir / "timeline")
    body(write_report(run_dir))


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_short_runs_have_whole_pages(tmp_path: Path, steps: int) -> None:
    root = body(write_report(make_run_dir(tmp_path, steps=steps)))
    assert len(tips(card(root, "Age of the trained tokens"))) == steps


def test_values_that_are_no_numbers_are_left_out(run_dir: Path) -> None:
    writer = MetricsWriter(run_dir / "metrics.jsonl")
    odd = {
        "reward": float("nan"),
        "entropy": None,
        "step_s": 0.6,
        "grad_norm": -1.0,
        "ess": 1e300,
        "tokens_trained": None,
    }
    writer.write(step=20, version=21, wall_s=13.1, metrics=odd)
    writer.write(step=21, version=22, wall_s=13.7, metrics={"step_s": None, "reward": 0.1})
    writer.close()
    raw = write_report(run_dir).read_text(encoding="utf-8")
    assert "nan" not in re.sub(r"[a-z]*nan[a-z]+|[a-z]+nan", "", raw)
    assert "inf" not in re.sub(r"[A-Za-z]*inf[A-Za-z.]+", "", raw)
    body(run_dir / "report.html")


def test_what_a_run_did_not_measure_has_no_picture_or_a_reason(run_dir: Path) -> None:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    kept = [{k: v for k, v in json.loads(line).items() if "ratio" not in k and "kl" not in k} for line in lines]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    page = read(write_report(run_dir))
    assert "This run recorded no ratios" in page.words
    assert "Drift within a batch" not in page.text
    assert "What the critic foresees" not in page.text


def test_a_summary_that_contradicts_itself_is_shown_as_such(run_dir: Path) -> None:
    write_summary(make_summary(wall_s=99.0), run_dir / "summary.json")
    assert "accounting: trainer sums to 12.500000 s, but wall_s is 99.000000" in read(write_report(run_dir)).text


def test_terms_of_a_reward_the_kl_and_the_critic_have_pictures_where_there_are_any(run_dir: Path) -> None:
    page = read(write_report(run_dir))
    for title in ("Reward by term", "KL to the reference", "What the critic foresees", "Coefficient of the KL penalty"):
        assert title not in page.text
    writer = MetricsWriter(run_dir / "metrics.jsonl")
    for step in range(41, 44):
        terms = {"reward_parts/<model>": step / 50, "reward_parts/gold": 1 - step / 50, "kl_reference_sum": 0.1 * step,
                 "kl_coef": step / 100, "explained_variance": 0.5, "step_s": 0.6, "reward": 0.5}  # fmt: skip
        writer.write(step=step, version=step, wall_s=step * 0.6, metrics=terms)
    writer.close()
    page = read(write_report(run_dir))
    for title in ("Reward by term", "<model>", "gold", "KL to the reference", "What the critic foresees",
                  "Coefficient of the KL penalty"):  # fmt: skip
        assert title in page.text
    assert "model" not in page.tags


def test_only_fields_that_differ_come_first() -> None:
    found = differing(
        flat({"recipe": "quickstart", "seed": 0, "steps": 7, "generator": {"temperature": 1.0}, "new": {"x": 1}})
    )
    assert found["steps"][0] == 7
    assert not {"seed", "generator.temperature"} & found.keys()
    assert found["new.x"] == (1, None)  # of another version of the schema
    assert differing(flat({"trainer": {"optimizer": {"betas": [0.9, 0.95]}}})).keys() <= {"trainer.optimizer.betas"}


def test_what_the_evaluation_found_has_a_part_of_its_own(run_dir: Path) -> None:
    add_evaluation(run_dir, (0.0, 0.25), (8.0, 0.5))
    root = body(write_report(run_dir))
    assert [section.get("id") for section in root.iter("section")][:3] == ["overview", "learning", "evaluation"]
    spots = [circle[0].text or "" for circle in card(root, "Gold win rate against KL").iter("circle")]
    assert [spot.split("\n") for spot in spots] == [
        ["before RL", "KL to the reference, nats per completion 0 ± 0", "gold win rate 0.25 ± 0.025"],
        ["after RL", "KL to the reference, nats per completion 8 ± 0.8", "gold win rate 0.5 ± 0.05"],
    ]
    rows = [["".join(cell.itertext()) for cell in row] for row in card(root, "Gold, judge and drift").iter("tr")]
    assert ["gold win rate against references", "0.250 ± 0.025", "0.500 ± 0.050"] in rows
    assert "25.0 → 50.0%" in "".join(root.itertext())


def test_stages_before_rl_have_their_curves_and_held_out_numbers(run_dir: Path) -> None:
    for stage in ("sft", "dpo", "reward_model"):
        (run_dir / stage).mkdir()
        writer = JsonlWriter(run_dir / stage / "metrics.jsonl")
        writer.write(*({"index": i, "loss": 5.0 - i / 10, "accuracy": 0.5 + i / 100} for i in range(40)))
        writer.close()
    held_out = {"before": {"loss": 4.67, "accuracy": 0.0}, "after": {"loss": 1.42, "accuracy": 0.63}}
    (run_dir / "sft" / "stage.json").write_text(json.dumps({"num_held_out": 300, "held_out": held_out}))
    losses = {"first_loss": 0.693, "last_loss": 0.412}
    after = {"loss": 0.456, "accuracy": 0.81, "margin": 0.789}
    dpo = losses | {"num_held_out": 70, "held_out": {"before": {"loss": 0.695, "accuracy": 0.5}, "after": after}}
    (run_dir / "dpo" / "stage.json").write_text(json.dumps(dpo))
    record = {"num_held_out": 283, "held_out_accuracy": 0.73}
    (run_dir / "reward_model" / "stage.json").write_text(json.dumps(record))
    root = body(write_report(run_dir))
    text = "".join(root.itertext())
    assert "On 300 held-out ones it went from 4.67 to 1.42, and the share of tokens foretold from 0% to 63%." in text
    assert "Of 70 held-out preferences it gets 81% right. Their mean margin is 0.789." in text
    assert "0.693 at first, 0.412 in the last ten. Held out: 0.695, then 0.456." in text
    assert "Of 283 held-out preferences it gets 73% right." in text
    assert tips(card(root, "Supervised fine-tuning"))[10] == {"at": "update: 10", "loss": "4"}
    assert tips(card(root, "Reward model: accuracy"))[10] == {"at": "update: 10", "accuracy": "0.6"}
    assert tips(card(root, "Preferences: accuracy"))[10] == {"at": "update: 10", "accuracy": "0.6"}
    for stage, record in (
        ("sft", {"num_held_out": 0, "held_out": None}),
        ("dpo", losses | {"num_held_out": 0, "held_out": None}),
        ("reward_model", {"num_held_out": 0, "held_out_accuracy": None}),
    ):
        (run_dir / stage / "stage.json").write_text(json.dumps(record))
    text = "".join(body(write_report(run_dir)).itertext())
    assert "held-out ones" not in text
    assert "held-out preferences" not in text


# Size


@pytest.mark.parametrize("steps", with_slow([5000], [10_000]))
def test_thousands_of_steps_make_a_small_page_at_once(tmp_path: Path, steps: int) -> None:
    lines = metrics_of(make_run_dir(tmp_path, steps=100))
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(steps):
            line = lines[step % 100] | {"step": step, "version": step + 1, "wall_s": 0.62 * (step + 1), "loss": 0.0}
            file.write(json.dumps(line) + "\n")
    rollout = (tmp_path / "rollouts.jsonl").read_bytes().splitlines(keepends=True)[0]
    with (tmp_path / "rollouts.jsonl").open("wb") as out:
        for step in range(steps):
            out.write(rollout.replace(b'"step":0', b'"step":%d' % step))
    started_s = time.process_time()
    path = write_report(tmp_path)
    assert time.process_time() - started_s < 10.0
    assert path.stat().st_size < 2_000_000
    root = body(path)
    for svg in root.iter("svg"):
        assert len(list(svg.iter())) < 3_000
    assert len(tips(card(root, "Importance ratios"))) <= 80


def test_of_a_long_run_the_times_are_those_that_its_processes_reported(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_bytes().splitlines()]
    for line in lines:
        if "reward" in line:
            first = 100.0 if line["step"] == 0 else 0.0  # the first report is of everything since the start
            line |= {
                "time/trainer/forward_backward": 0.4 + first,
                "time/trainer/wait_generation": 0.2,
                "time/generator/decode": 0.6,
            }
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr("slipstream.observe.report.data.EXACT_BYTES", 0)
    (run_dir / "events.jsonl").write_bytes(b"damaged, which nothing notices that does not read it\n")
    root = body(write_report(run_dir))
    bars = [rect[0].text for rect in card(root, "While it trained").iter("rect") if len(rect)]
    assert bars == [
        "generator: decode 11.4 s, 100%",  # in the order of the loop
        "trainer: forward-backward 7.6 s, 67%",
        "trainer: waits for generation 3.8 s, 33%",
    ]
    whole = [rect[0].text or "" for rect in card(root, "The whole run").iter("rect") if len(rect)]
    assert "trainer: forward-backward 8 s, 64%" in whole  # of summary.json, like the verdict
    assert "Generation is the bottleneck: the trainer idles 32% of the time" in "".join(root.itertext())
    found = tips(card(root, "Over time"))
    assert [tip["forward-backward"] for tip in found if "forward-backward" in tip] == ["67%"] * 19
    (run_dir / "summary.json").unlink()
    assert "Known when the run has ended." in "".join(body(write_report(run_dir)).itertext())


def test_of_a_long_run_the_times_are_those_of_the_last_attempt(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It went on at step 12, whose report has the second start-up of the trainer."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_bytes().splitlines()]
    for line in lines:
        if "reward" in line:
            line["time/trainer/load"] = 100.0 if line["step"] in (0, 12) else 0.0
            line["time/trainer/forward_backward"] = 0.4
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    path = run_dir / "timeline" / "trainer.jsonl"
    records = [line for line in path.read_text().splitlines() if json.loads(line).get("args", {}).get("step", 12) >= 12]
    path.write_text("".join(line + "\n" for line in records))
    monkeypatch.setattr("slipstream.observe.report.data.EXACT_BYTES", 0)
    times = read_run(run_dir).times
    assert times.loop == {"trainer": {"load": 0.0, "forward_backward": pytest.approx(7 * 0.4)}}  # steps 13 to 19


def test_of_many_processes_the_means_of_a_side_are_shown() -> None:
    few = {"trainer": {"optimizer": 1.0}, "generator-0": {"decode": 2.0}}
    assert by_side(few) == few
    many = few | {f"generator-{i}": {"decode": 1.0, "swap": 0.5} for i in range(1, 20)}
    assert by_side(many) == {"trainer": {"optimizer": 1.0}, "generator (20)": {"decode": 1.05, "swap": 0.475}}


def test_the_models_share_is_of_all_processes_however_they_are_shown(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accounting = {"trainer": {"collate": 4.0}} | {f"generator-{i}": {"decode": 1.0} for i in range(16)}
    write_summary(make_summary(accounting=accounting), run_dir / "summary.json")
    monkeypatch.setattr("slipstream.observe.report.data.EXACT_BYTES", 0)
    times = read_run(run_dir).times
    assert times.whole == {"trainer": {"collate": 4.0}, "generator (16)": {"decode": 1.0}}
    assert times.model_share == 0.8


def test_a_chart_that_says_when_an_alarm_rings_draws_what_it_watches() -> None:
    charts = tomllib.loads(Path(charts_module.__file__).with_name("charts.toml").read_text(encoding="utf-8"))["chart"]
    named = [chart for chart in charts if "an alarm rings" in chart.get("note", "")]
    assert named
    for chart in named:
        [rule] = [RULES[name] for name in chart["alarms"]]
        assert f"From {rule.threshold:g} on" in chart["note"]
        assert rule.arguments[0] in {name for name, *_ in chart["lines"]}


def test_an_accuracy_that_reads_0_throughout_is_explained(run_dir: Path) -> None:
    wrong = Evaluation(0.0, 0.0, 500, reward=0.5)
    summary = read_summary(run_dir / "summary.json")
    told = msgspec.structs.replace(summary, eval=Evaluations(before=wrong, after=wrong))
    assert "eval.measure" not in read(write_report(run_dir)).text
    write_summary(told, run_dir / "summary.json")
    assert "no held-out answer reached 1 by eval.measure" in read(write_report(run_dir)).text
