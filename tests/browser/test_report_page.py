"""The report as people see it: on a wide screen, a tablet and a phone, in light, in dark and on paper."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from browsing import until
from covering import covering, with_slow
from synthetic_run import HOSTILE, add_evaluation, make_run_dir

from slipstream.core.jsonl import JsonlWriter
from slipstream.observe.health import Alarm
from slipstream.observe.report import write_comparison, write_report

if TYPE_CHECKING:
    from playwright.sync_api import Page

Visit = Callable[..., "Page"]

# Of every plot: pairs of texts that lie on each other, texts that leave the card or their bar, and the smallest text.
TEXTS = """() => {
  const found = {overlaps: [], outside: [], smallest: 99, count: 0, onBars: 0};
  for (const plot of document.querySelectorAll('svg.plot')) {
    const texts = [...plot.querySelectorAll('text')].map(text => [text.textContent, text.getBoundingClientRect()]);
    found.count += texts.length;
    for (const [i, [name, a]] of texts.entries()) {
      found.smallest = Math.min(found.smallest, a.height);
      for (const [other, b] of texts.slice(i + 1)) {
        const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (across > 1 && down > 3) found.overlaps.push([plot.querySelector('title').textContent, name, other]);
      }
      const card = plot.closest('.card').getBoundingClientRect();
      if (!plot.closest('.gantt') && (a.left < card.left || a.right > card.right)) found.outside.push(name);
    }
    for (const text of plot.querySelectorAll('[class^=on-]')) {
      const words = text.getBoundingClientRect(), bar = text.previousElementSibling.getBoundingClientRect();
      if (words.left < bar.left || words.right > bar.right) found.outside.push(text.textContent);
      found.onBars += 1;
    }
  }
  return found;
}"""

# Everything that a phone folds away, and every table of numbers, as after touching them all.
OPEN = "() => document.querySelectorAll('details').forEach((one) => (one.open = true))"

# Words that are broken between two letters, of what is no text of a model.
BROKEN_WORDS = """() => {
  const found = [];
  const places = 'h1, h2, h3, h4, p, li, th, code, summary, dt, figcaption, .lane-label, .key, .legend';
  for (const place of document.querySelectorAll(places)) {
    const walker = document.createTreeWalker(place, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const node = walker.currentNode;
      if (node.parentElement.closest('.model, .text, svg')) continue;
      for (const word of node.data.matchAll(/[\\p{L}\\p{N}]+/gu)) {
        const range = document.createRange();
        range.setStart(node, word.index);
        range.setEnd(node, word.index + word[0].length);
        const boxes = [...range.getClientRects()].filter((box) => box.width > 0.5);
        if (new Set(boxes.map((box) => Math.round(box.top))).size > 1) found.push(word[0]);
      }
    }
  }
  return found;
}"""

# Texts whose contrast with what lies behind them (WCAG 2) is below 4.5, or 3 where they are large.
FAINT = """() => {
  const parse = color => color.match(/[\\d.]+/g).map(Number);
  const luminance = color => {
    const linear = c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = parse(color).slice(0, 3).map(c => linear(c / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = element => {
    for (let one = element; one; one = one.parentElement) {
      const color = getComputedStyle(one).backgroundColor;
      if (parse(color).length === 3 || parse(color)[3] === 1) return color;
    }
    return 'rgb(255, 255, 255)';
  };
  const faint = [];
  const texts = 'h1, h2, h3, h4, p, li, th, td, summary, a, b, span, svg.plot text:not([class^=on-])';
  for (const element of document.querySelectorAll(texts)) {
    if (!element.textContent.trim() || element.closest('details:not([open]) > :not(summary)')) continue;
    const style = getComputedStyle(element);
    const ink = luminance(element instanceof SVGElement ? style.fill : style.color);
    const page = luminance(behind(element));
    const contrast = (Math.max(ink, page) + 0.05) / (Math.min(ink, page) + 0.05);
    const least = parseFloat(style.fontSize) >= 18 ? 3 : 4.5;
    if (contrast < least) faint.push([element.textContent.slice(0, 40), contrast]);
  }
  return faint;
}"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A report with everything in it, and a comparison, of made-up runs; their addresses."""
    runs = []
    for name, steps in (("first", 20), ("second run with a name that is rather long", 4000)):
        run_dir = tmp_path_factory.mktemp(name)
        make_run_dir(run_dir, steps=min(steps, 60))
        add_evaluation(run_dir, (0.0, 0.25), (8.0, 0.5 if name == "first" else 0.2))
        config = (
            'recipe = "quickstart"\nmax_staleness = 2\n[prompts]\ntemplate = "{q}"\n[model]\nintermediate_size = 9\n'
        )
        (run_dir / "config.toml").write_text(config)
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_bytes().splitlines()]
        more = {
            "kl_reference_sum": 1.5,
            "kl_coef": 0.1,
            "explained_variance": -0.3,
            "reward_parts/a": 0.1,
            "reward_parts/b": -9.0,
        }
        with (run_dir / "metrics.jsonl").open("w") as file:
            for index in range(0, steps, len(lines)):
                for line in lines[: steps - index + 6]:
                    shift = {key: line[key] + index for key in ("step", "version", "wall_s")}
                    file.write(json.dumps(line | more | shift) + "\n")
        alarm = Alarm(
            step=3, name="no_signal", event="began", severity="warning", value=0.95, threshold=0.9, text=HOSTILE
        )
        writer = JsonlWriter(run_dir / "alarms.jsonl")
        writer.write(alarm, msgspec.structs.replace(alarm, step=9, event="ended"))
        writer.close()
        runs.append(run_dir)
    places = {"first": write_report(runs[0]), "long": write_report(runs[1])}
    places["comparison"] = write_comparison(runs, out=Path(runs[0]) / "comparison.html")
    return {name: path.resolve().as_uri() for name, path in places.items()}


@pytest.mark.parametrize(("name", "width"), covering(["first", "long", "comparison"], [390, 768, 1280]))
def test_nothing_lies_on_anything_or_leaves_the_page(
    visit: Visit, pages: dict[str, str], name: str, width: int
) -> None:
    page = visit(pages[name], width=width)
    page.evaluate(OPEN)
    found: dict[str, Any] = page.evaluate(TEXTS)
    assert found["count"] > 150
    assert found["overlaps"] == []
    assert found["outside"] == []
    assert found["onBars"] >= 4
    assert found["smallest"] >= 12.0  # the height of a line of 11.5 pixels
    assert page.evaluate("document.documentElement.scrollWidth") == width


@pytest.mark.parametrize(
    ("name", "width"),
    with_slow(
        [("comparison", 390), ("first", 768), ("first", 1280)],
        [("first", 390), ("comparison", 768), ("comparison", 1280)],
    ),
)
def test_no_word_is_broken_between_its_letters(visit: Visit, pages: dict[str, str], name: str, width: int) -> None:
    page = visit(pages[name], width=width)
    page.evaluate(OPEN)
    assert page.evaluate(BROKEN_WORDS) == []


@pytest.mark.parametrize("width", [pytest.param(1280, marks=pytest.mark.slow), 1000])
def test_what_the_fields_of_a_comparison_are_is_seen_beside_long_values(
    visit: Visit, tmp_path_factory: pytest.TempPathFactory, width: int
) -> None:
    folder, runs = tmp_path_factory.mktemp("compared"), []
    for name in ("baseline", "a name that is rather long", "quickstart-20260101-120000", "d"):
        run_dir = folder / name
        run_dir.mkdir()
        make_run_dir(run_dir, steps=2)
        commit = f"{name[0]:0>40}"
        (run_dir / "config.toml").write_text(
            f'recipe = "r"\n[model]\npath = "some-company/SomeModel-135M-Instruct@{commit}"\n'
            f'[prompts]\ntemplate = "Think step by step about this question of {name}: {{question}}"\n'
        )
        runs.append(run_dir)
    page = visit(write_comparison(runs, out=folder / "page.html").resolve().as_uri(), width=width)
    inside, whole, column = page.evaluate("""() => {
        const table = document.querySelector('table.config');
        return [table.parentElement.clientWidth, table.scrollWidth, table.rows[1].lastChild.clientWidth];
    }""")
    assert whole <= inside
    assert column > 200
    assert page.evaluate(BROKEN_WORDS) == []


@pytest.mark.parametrize("name", with_slow(["first"], ["long", "comparison"]))
def test_a_phone_gets_a_short_page_that_holds_the_whole_one(visit: Visit, pages: dict[str, str], name: str) -> None:
    """Each part shows its first picture, the others by their titles; a touch opens one, and nothing is left out."""
    page = visit(pages[name], width=390, height=844)
    assert page.evaluate("document.documentElement.scrollHeight") < 6000
    titles = page.locator(".fold summary")
    assert titles.count() > 5
    assert all(box["height"] >= 44 for box in (titles.nth(i).bounding_box() for i in range(titles.count())) if box)
    seen = "() => [...document.querySelectorAll('h3, svg.plot, table, .note')].filter((one) => one.offsetHeight || "
    seen += "one.getBoundingClientRect().height).map((one) => one.matches('svg') ? one.textContent : one.innerText)"
    first = titles.first
    card = page.locator("article:has(> .fold)").first
    assert not card.locator(".note").is_visible()
    card.locator("summary").first.tap()
    assert card.locator(".note").is_visible()
    page.evaluate(OPEN)
    on_phone = page.evaluate(seen)
    wide = visit(pages[name], width=1280)
    assert wide.locator(".fold:visible").count() == 0
    wide.evaluate(OPEN)
    assert len(on_phone) == len(wide.evaluate(seen)) > 20
    assert first.is_visible()


@pytest.mark.parametrize(("name", "dark"), covering(["first", "comparison"], [False, True]))
def test_everything_can_be_read_in_light_and_in_dark(
    visit: Visit, pages: dict[str, str], name: str, dark: bool
) -> None:
    page = visit(pages[name], dark=dark)
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (light == "rgb(245, 246, 248)") is not dark
    assert page.evaluate(FAINT) == []


@pytest.mark.slow
def test_lines_dots_and_ticks_are_of_one_scale(visit: Visit, pages: dict[str, str]) -> None:
    """Lines are stretched and dots are not: they must meet, at any width."""
    for width in (390, 1280):
        page = visit(pages["first"], width=width)
        found = page.evaluate(
            """() => [...document.querySelectorAll('svg.plot')].map(plot => {
                const line = plot.querySelector('polyline.line.c1')?.getBoundingClientRect();
                const middle = dot => dot.getBoundingClientRect().left + dot.getBoundingClientRect().width / 2;
                const dots = [...plot.querySelectorAll('circle.c1')].map(middle);
                return dots.length && line ? [dots[0], dots.at(-1), line.left, line.right] : null;
            }).filter(Boolean)"""
        )
        assert len(found) >= 3
        for first, last, left, right in found:
            assert abs(first - left) < 1.5
            assert abs(last - right) < 1.5


def test_it_can_be_gone_through_by_keyboard_and_by_its_menu(visit: Visit, pages: dict[str, str]) -> None:
    page = visit(pages["first"])
    page.get_by_role("link", name="Time").click()
    until(page, "Math.abs(document.querySelector('#time').getBoundingClientRect().top - 56) < 3")  # below the menu
    summary = page.locator("#learning summary:visible").first
    summary.focus()
    page.keyboard.press("Enter")
    assert page.locator("#learning details:visible").first.get_attribute("open") is not None
    assert page.locator("#learning table").first.is_visible()
    strip = page.locator("#learning rect.strip").nth(3)
    assert strip.evaluate("strip => getComputedStyle(strip).fillOpacity") == "0"
    strip.hover()
    assert float(strip.evaluate("strip => getComputedStyle(strip).fillOpacity")) > 0.0


@pytest.mark.slow
def test_on_paper_there_are_no_menus_and_no_dark(visit: Visit, pages: dict[str, str]) -> None:
    page = visit(pages["first"], dark=True)
    page.emulate_media(media="print", color_scheme="dark")
    assert not page.locator("nav").is_visible()
    assert all(one.is_visible() for one in page.locator(".folds .note").all()), "nothing is folded on paper"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate(FAINT) == []


def test_what_a_model_wrote_does_nothing(visit: Visit, pages: dict[str, str]) -> None:
    page = visit(pages["first"])  # which fails, at its end, for a dialog, a request or a script
    assert page.locator("script, img, iframe").count() == 0
    assert page.get_by_text("alert('x')").count() > 0
