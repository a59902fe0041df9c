import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from synthetic_run import HOSTILE, make_run_dir, make_summary

from slipstream.observe.hardware import describe
from slipstream.observe.health import Alarm
from slipstream.observe.jsonl import JsonlWriter
from slipstream.observe.metrics import MetricsWriter
from slipstream.observe.report import write_report
from slipstream.observe.summary import write_summary
from slipstream.observe.svg import histogram, line_chart, thin, ticks


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return make_run_dir(tmp_path)


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

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


def read(path: Path) -> Page:
    page = Page(path.read_text(encoding="utf-8"))
    assert page.open == []
    return page


def test_the_page_holds_the_data_of_the_run(run_dir: Path):
    page = read(write_report(run_dir, describe()))
    for expected in (
        "41.2% → 93.4%",
        "5,210",
        "0.80 / 2",
        "Share of tokens by age; the bound is 2.",
        "55.6%",  # of the tokens one step old: 1500 / 2700
        "What each process did during steps 8 to 11. The whole of it: timeline.json, in ui.perfetto.dev.",
        "forward-backward step 9: 400.0 ms",
        "swapped version 9",
        "waits for generation",
        "held-out, greedy: 0.65 at 10",
        "generator.num_slots",
        "prompts.admitted",
        "torch threads",
        "abc>",
    ):
        assert expected in page.text, expected
    assert page.tags.count("svg") == 6
    assert "nothing recorded" not in page.text
    assert "contradicts" not in page.text


def test_text_of_the_model_stays_text_and_nothing_is_fetched(run_dir: Path):
    path = write_report(run_dir)
    page, raw = read(path), path.read_text(encoding="utf-8")
    assert not {"script", "img", "link", "iframe"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "href")]
    assert "</script><script>alert('x')</script>" in page.text  # shown, not run
    assert "\x00" not in raw
    assert not re.search(r"https?://|url\(|@import", raw)


def test_an_interrupted_run_gets_a_page_from_what_there_is(run_dir: Path):
    (run_dir / "summary.json").unlink()
    (run_dir / "samples.json").unlink()
    for name in ("metrics.jsonl", "rollouts.jsonl", "timeline/trainer.jsonl"):
        with (run_dir / name).open("ab") as file:
            file.write(b'{"torn": ')
    page = read(write_report(run_dir))
    assert "not finished" in page.text
    assert "trainer forward-backward: 8.00 s, 64.5%" in page.text  # 20 x 0.4 s of 12.4 s
    assert "steps so far" in page.text
    # Step n trains on 3 tokens of version n and n + 1 of the synthetic groups: staleness 0 and -1, 2 to 2.
    assert page.text.count("50.0%") == 2


def test_every_file_may_be_missing(tmp_path: Path, run_dir: Path):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "nothing recorded" in read(write_report(empty)).text
    for name in ("config.toml", "metrics.jsonl", "rollouts.jsonl", "samples.json", "summary.json"):
        (run_dir / name).unlink()
        read(write_report(run_dir))
    shutil.rmtree(run_dir / "timeline")
    read(write_report(run_dir))


def test_a_summary_that_contradicts_itself_is_shown_as_such(run_dir: Path):
    write_summary(make_summary(wall_s=99.0), run_dir / "summary.json")
    assert "accounting: trainer sums to 12.500000 s, but wall_s is 99.000000" in read(write_report(run_dir)).text


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (0.0, 0.0), (3.0, 3.0), (-2.0, 7.5), (0.0, 123456.0), (1e-9, 2e-9)]
)
def test_ticks_cover_the_range_with_a_few_round_numbers(low: float, high: float):
    values = ticks(low, high, 5)
    assert values[0] <= low + 1e-12
    assert values[-1] >= high - 1e-12
    assert 2 <= len(values) <= 12


def test_long_series_are_averaged_and_odd_ones_survive():
    points = [(float(i), float(i % 2)) for i in range(10_000)]
    thinned = thin(points)
    assert len(thinned) == 400
    assert thinned[0] == (12.0, pytest.approx(0.48))
    assert "nothing recorded" in line_chart([], x_label="step")
    assert "nothing recorded" in histogram({}, x_label="staleness", fill="#000000")


def test_terms_of_a_reward_and_the_kl_have_plots_where_there_are_any(run_dir: Path):
    assert "Reward by term" not in read(write_report(run_dir)).text
    assert "KL to the reference" not in read(write_report(run_dir)).text
    writer = MetricsWriter(run_dir / "metrics.jsonl")
    for step in range(41, 44):
        terms = {"reward_parts/<model>": step / 50, "reward_parts/gold": 1 - step / 50, "kl_reference_sum": 0.1 * step}
        writer.write(step=step, version=step, wall_s=step * 0.6, metrics=terms)
    writer.close()
    page = read(write_report(run_dir))
    for expected in ("Reward by term", "<model>", "gold", "KL to the reference", "nats per completion"):
        assert expected in page.text
    assert "model" not in page.tags


def test_alarms_are_listed_with_their_steps_and_as_text(run_dir: Path):
    assert "Alarms" not in read(write_report(run_dir)).text
    alarm = Alarm(
        step=7, name="straggler", event="began", severity="warning", value=0.5, threshold=0.3, text=f"slow {HOSTILE}"
    )
    ended = msgspec.structs.replace(alarm, step=9, event="ended")
    writer = JsonlWriter(run_dir / "alarms.jsonl")
    writer.write(alarm, ended, msgspec.structs.replace(alarm, name="poisoned", step=8))
    writer.close()
    page = read(write_report(run_dir))
    assert "straggler" in page.text
    assert "poisoned" in page.text
    assert "the end" in page.text  # the second one is still on
    assert "<script>alert" in page.text  # shown, not run
    assert "script" not in page.tags
