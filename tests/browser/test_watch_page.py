"""`slipstream watch` as people use it: in a browser, with a mouse, a keyboard or a phone, in light and dark."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browsing import until
from covering import with_slow
from made_up_loop import RAW_START_S, VERDICT, Loop
from test_report_page import BROKEN_WORDS
from written import loop_at

from slipstream.core.run_log import decode_decision
from slipstream.observe.watch import Watch

if TYPE_CHECKING:
    from playwright.sync_api import Page

Visit = Callable[..., "Page"]

DOCUMENT = Path(__file__).parents[2] / "docs" / "observability.md"
HOSTILE = (
    '</script></p><script>window.pwned = 1</script><img src=x onerror="window.pwned = 2">'
    "<svg onload='window.pwned = 3'><a href='javascript:window.pwned=4'>x</a>"
    "{{7*7}}${7*7}&lt;b&gt;&amp;\u202e\u2066evil\u0000\u001b[31m\ud7ff\u2028<style>*{display:none}</style>" + "W" * 400
)


MOVING = "document.getAnimations().filter((one) => one.playState === 'running').length"


@pytest.fixture(scope="module")
def made() -> Loop:
    return Loop(seed=1, steps=20, lost_at_s=6.0).run()


def without_measure(made: Loop, folder: Path) -> Path:
    """The same run as one whose reward names no measure: its evaluations have a mean reward, and no accuracy."""
    for _, line in made.metrics:
        if "eval_accuracy" in line:
            line["eval_reward"] = line.pop("eval_accuracy") - 1.0
    return made.write(folder)


@pytest.mark.slow
def test_the_headline_is_accuracy_where_there_is_a_measure_and_the_mean_reward_elsewhere(
    page_of_made: Watch, visit: Visit, servers: ExitStack, tmp_path_factory: pytest.TempPathFactory
) -> None:
    page = visit(page_of_made.url)
    page.locator("#slider").press("End")
    until(page, "document.querySelector('#headline div:nth-child(3) dd').textContent.endsWith('%')")
    assert text(page, "#headline div:nth-child(3) .note") == "accuracy, was 30%"
    other = servers.enter_context(
        Watch(without_measure(Loop(seed=1, steps=20).run(), tmp_path_factory.mktemp("runs") / "made"))
    )
    page = visit(other.url)
    page.locator("#slider").press("End")
    until(page, "document.querySelector('#headline div:nth-child(3) dd').textContent === '0.05'")
    assert text(page, "#headline div:nth-child(3) .note") == "mean reward, was -0.7"
    assert "accuracy" not in text(page, "body")


@pytest.fixture(scope="module")
def folder_of_made(made: Loop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.write(tmp_path_factory.mktemp("runs") / "made")


@pytest.fixture(autouse=True)
def page_of_made(folder_of_made: Path) -> Iterator[Watch]:
    """There before the browser comes and until it has gone: connections end with each test."""
    with Watch(folder_of_made) as page:
        yield page


def at(page: Page, time_s: float) -> None:
    """Go to a time, as a link does; returns when the loop of that time is drawn."""
    page.evaluate(f"location.hash = '#t={time_s}'")
    settled(page, f"Math.abs(Number(document.getElementById('slider').value) - {time_s}) < 0.01")


def hide(page: Page, *, is_hidden: bool) -> None:
    """As a browser does with a page in another tab."""
    page.evaluate(
        f"Object.defineProperty(document, 'hidden', {{ value: {json.dumps(is_hidden)}, configurable: true }})"
    )
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")


def settled(page: Page, condition: str) -> None:
    until(page, condition)
    page.wait_for_timeout(350)  # what is loaded beside it, and what is drawn seldom


def text(page: Page, selector: str) -> str:
    return (page.locator(selector).text_content() or "").strip()


def dots(page: Page) -> dict[str, set[int]]:
    """Ordinals by the place that their dots are in, from where they lie on the screen."""
    found: dict[str, list[int]] = page.evaluate("""() => {
        const found = {};
        for (const dot of document.querySelectorAll('.dots-layer .dot:not(.gone)')) {
            const box = dot.getBoundingClientRect();
            const [x, y] = [(box.left + box.right) / 2, (box.top + box.bottom) / 2];
            const place = [...document.querySelectorAll('.dots')].find((element) => {
                const area = element.getBoundingClientRect();
                return x >= area.left - 1 && x <= area.right + 1 && y >= area.top - 1 && y <= area.bottom + 1;
            });
            const name = place ? place.dataset.place : 'nowhere';
            (found[name] ??= []).push(Number(dot.dataset.ordinal));
        }
        return found;
    }""")
    return {place: set(ordinals) for place, ordinals in found.items()}


def expected_dots(run_dir: Path, time_s: float) -> dict[str, set[int]]:
    lines = [decode_decision(line) for line in (run_dir / "events.jsonl").read_bytes().splitlines()]
    known = [(line, line.time_s - RAW_START_S) for line in lines]
    found: dict[str, set[int]] = {}
    for group in loop_at(known, time_s).groups.values():
        place = {"waiting": "prompts", "sampling": f"replica-{group.replica}"}.get(group.phase, group.phase)
        found.setdefault(place, set()).add(group.ordinal)
    return found


def test_a_finished_run_is_there_and_its_dots_lie_where_its_groups_are(visit: Visit, page_of_made: Watch) -> None:
    page = visit(page_of_made.url + "#t=8", still=True)
    settled(page, "document.querySelector('.dot')")
    assert page.title() == "made – Slipstream"
    assert text(page, "#life") == "done"
    until(page, f"document.getElementById('verdict').textContent.includes('{VERDICT[:10]}')")  # it is found beside
    assert text(page, "#verdict") == f"The whole run: {VERDICT}"
    assert "chain sum" not in text(page, "#facts")
    assert "4 prompts × 4 completions" in text(page, "#facts")
    assert text(page, "#headline div:nth-child(1) dt") == "steps done"  # a count: the last step is number 19
    assert text(page, "#headline div:nth-child(1) .note") == "of 20"
    assert page.locator(".lane").count() == 5
    assert page.locator(".chart").count() == 6
    rng = random.Random(0)
    for time_s in [6.05, *(round(rng.uniform(3, 14), 2) for _ in range(5))]:
        at(page, time_s)
        assert dots(page) == expected_dots(page_of_made.index.run_dir, time_s), f"at {time_s}"


def test_the_pages_state_is_the_servers_at_any_time(visit: Visit, page_of_made: Watch) -> None:
    page = visit(page_of_made.url + "#t=8")
    rng = random.Random(0)
    times = [rng.uniform(0, 14) for _ in range(80)]
    found = page.evaluate(
        """async (times) => {
            const { Passage } = await import('/js/loop_state.js');
            const { get } = await import('/js/api.js');
            const passage = new Passage(await get('loop', { from: 0, to: 15 }));
            return times.map((time) => {
                passage.goTo(time);
                const [versions, fates] = [Object.fromEntries(passage.versions), { ...passage.fates }];
                return [[...passage.groups.values()], passage.version, versions, fates, passage.counts()];
            });
        }""",
        times,
    )
    lines = [decode_decision(x) for x in (page_of_made.index.run_dir / "events.jsonl").read_bytes().splitlines()]
    known = [(line, line.time_s - RAW_START_S) for line in lines]
    for time_s, (groups, version, versions, fates, counts) in zip(times, found, strict=True):
        truth = loop_at(known, time_s)
        mine = {row[0]: (row[1], row[3], row[4], row[5], row[6]) for row in groups}
        theirs = {g.ordinal: (g.phase, g.replica, g.finished, g.version, g.step) for g in truth.groups.values()}
        assert mine == theirs
        assert version == truth.version
        assert versions == {str(replica): version for replica, version in truth.versions.items()}
        assert fates == truth.fates
        assert counts == list(truth.counts.values())


def test_numbers_have_three_digits_that_matter_and_an_error_is_not_asked_for_at_once(
    visit: Visit, page_of_made: Watch
) -> None:
    page = visit(page_of_made.url + "#t=8")
    values = [0, 1e-4, 0.00037, -0.0003, 0.00149, 0.0123, 0.05, -0.1, 0.25, 1.5, 12.34, 123.4, 1936, 9e-5, 3.1e6]
    assert page.evaluate(
        "async (values) => values.map((await import('/js/format.js')).number)", values
    ) == ["0", "0.0001", "0.00037", "-0.0003", "0.00149", "0.0123", "0.05", "-0.1", "0.25", "1.5", "12.3", "123",
          "1,936", "9.0e-5", "3.1e6"]  # fmt: skip
    num_asked, took_ms = page.evaluate("""async () => {
        const { Latest } = await import('/js/api.js');
        const latest = new Latest(() => {});
        let asked = 0;
        const began = performance.now();
        const job = async () => {
            asked += 1;
            throw new Error('the server has gone');
        };
        for (let frame = 0; frame < 20; frame++) {
            latest.run(job);
            await new Promise((done) => setTimeout(done, 16));
        }
        return [asked, performance.now() - began];
    }""")
    assert num_asked <= 1 + took_ms / 1000, "a replay asks with every frame"
    assert num_asked < 20


def test_a_slider_that_is_dragged_works_where_the_browser_refuses_its_addresses(
    visit: Visit, page_of_made: Watch
) -> None:
    page = visit(page_of_made.url + "#t=8")
    settled(page, "document.querySelector('.dot')")
    num_refused = page.evaluate("""async () => {
        let refused = 0;
        history.replaceState = () => {
            refused += 1;
            throw new DOMException('100 times per 10 seconds', 'SecurityError'); // as Safari does
        };
        const slider = document.getElementById('slider');
        for (let time = 3; time < 6; time += 0.1) {
            slider.value = time;
            slider.dispatchEvent(new Event('input'));
            await new Promise((done) => setTimeout(done, 16));
        }
        await new Promise((done) => setTimeout(done, 500));
        return refused;
    }""")
    assert 1 <= num_refused < 10, "not with each of its 30 moves"
    time_s = float(page.locator("#slider").input_value())
    settled(page, "document.getElementById('loop-readout')")
    assert dots(page) == expected_dots(page_of_made.index.run_dir, time_s)


def test_a_curve_that_is_added_is_drawn_however_many_there_are(
    visit: Visit, servers: ExitStack, tmp_path_factory: pytest.TempPathFactory
) -> None:
    made = Loop(seed=1, steps=6).run()
    for _, line in made.metrics:
        line.update({f"mine_{n}": n for n in range(30)})
    watch = servers.enter_context(Watch(made.write(tmp_path_factory.mktemp("runs") / "many")))
    page = visit(watch.url)
    settled(page, "document.querySelectorAll('#add-curve option').length > 30")
    num_charts = page.locator(".chart").count()
    for n in range(30):
        page.locator("#add-curve").select_option(f"mine_{n}")
    until(page, f"document.querySelectorAll('.chart').length === {num_charts + 30}")
    until(page, "[...document.querySelectorAll('.chart')].every((one) => one.querySelector('path.line'))")


def test_a_finished_run_opens_at_what_it_came_to(visit: Visit, page_of_made: Watch) -> None:
    page = visit(page_of_made.url)
    until(page, "document.querySelector('#headline dd')?.textContent === '20'")
    assert text(page, "#life") == "done"
    assert float(page.locator("#slider").input_value()) == pytest.approx(page_of_made.index.end_s, abs=0.02)
    assert page.get_by_role("button", name="Play", exact=True).is_visible(), "it stands still"
    until(page, "document.getElementById('loop-readout').textContent.startsWith('Nothing is on its way any more')")
    at(page, 8.0)
    assert "Point at a dot" in text(page, "#loop-readout")
    until(page, f"document.querySelector('.wait') && {MOVING} === 0")  # what stands still is painted once
    page.keyboard.press(" ")
    until(page, f"{MOVING} > 0")


@pytest.mark.slow
def test_it_plays_from_its_start_and_pauses(visit: Visit, page_of_made: Watch) -> None:
    page = visit(page_of_made.url)
    until(page, "document.querySelector('#headline dd')?.textContent === '20'")
    page.locator("#play").click()
    until(page, "Number(document.getElementById('slider').value) < 8")
    until(page, "Number(document.getElementById('slider').value) > 2.2")
    assert page.get_by_role("button", name="Pause").is_visible()
    page.locator("#play").click()
    before = page.locator("#slider").input_value()
    page.wait_for_timeout(250)
    assert page.locator("#slider").input_value() == before
    page.select_option("#speed", "10")
    page.locator("#play").click()
    now = "() => [performance.now() / 1000, Number(document.getElementById('slider').value)]"
    began_s, from_s = page.evaluate(now)
    until(page, "Number(document.getElementById('slider').value) > 9")
    ended_s, to_s = page.evaluate(now)
    assert to_s - from_s > 2.5 * (ended_s - began_s), "ten times, less what loading takes"


def test_everything_works_from_the_keyboard(visit: Visit, page_of_made: Watch, made: Loop) -> None:
    page = visit(page_of_made.url + "#t=8")
    settled(page, "document.querySelector('#group-list button') && document.querySelector('.token')")

    def time_s() -> float:
        return float(page.locator("#slider").input_value())

    def press(*keys: str) -> None:
        for key in keys:
            page.keyboard.press(key)
        page.wait_for_timeout(150)

    def comes_to(at_s: float) -> None:
        until(page, f"Math.abs(Number(document.getElementById('slider').value) - {at_s}) < 0.02")

    press("ArrowRight", "ArrowRight")
    assert time_s() == pytest.approx(10.0, abs=0.02)
    press("Shift+ArrowLeft")
    assert time_s() == pytest.approx(page_of_made.index.events.first_s - 1, abs=0.05), "it ends where the slider begins"  # type: ignore[operator]
    begins = [start_s - RAW_START_S for start_s, _, state, _ in made.spans["trainer"] if state == "forward_backward"]
    for key, step in ((".", 0), (".", 1), (".", 2), (",", 1)):
        press(key)
        comes_to(begins[step])
    press("End")
    assert time_s() == pytest.approx(page_of_made.index.end_s, abs=0.02)
    press("Home", "-")
    assert page.locator("#speed").input_value() == "0.5"
    press("+", " ")
    until(page, "Number(document.getElementById('slider').value) > 1.2")
    press(" ")
    assert page.get_by_role("button", name="Play", exact=True).is_visible()

    page.locator("#slider").focus()
    at_s = time_s()
    press("ArrowRight")
    comes_to(at_s + 1)  # the slider itself goes by seconds, too

    press("?")
    assert page.locator("#help").is_visible()
    keys, words = page.locator("#keys dt").all_text_contents(), page.locator("#keys dd").all_text_contents()
    told = re.search(r"\| key \| does \|\n\|---\|---\|\n(.*?)\n\n", DOCUMENT.read_text(), flags=re.DOTALL)
    assert told
    assert [f"| {key} | {word} |" for key, word in zip(keys, words, strict=True)] == told[1].splitlines()
    press("Escape")
    assert not page.locator("#help").is_visible()

    press("r")
    assert page.evaluate("document.activeElement.closest('#group-list') !== null")
    at_s = time_s()
    page.locator("#group-list button").nth(1).focus()
    press(" ")
    assert page.locator("#group-list button").nth(1).get_attribute("aria-pressed") == "true", "a button takes its space"
    page.locator(".token").first.focus()
    press("ArrowRight", "ArrowRight")
    assert text(page, ".token-readout").startswith("Token 3 of 6 “ so” (id 2): version ")
    press("Home")
    assert "Token 1 of 6" in text(page, ".token-readout")
    assert time_s() == at_s, "and time stands still meanwhile"


@pytest.mark.slow
def test_the_focus_goes_everywhere_and_is_seen(visit: Visit, page_of_made: Watch) -> None:
    page = visit(page_of_made.url + "#t=8")
    settled(page, "document.querySelector('.token')")
    seen, unseen = [], []
    for _ in range(90):
        page.keyboard.press("Tab")
        name, is_outlined = page.evaluate("""() => {
            const element = document.activeElement;
            const shown = element.matches('.choice input') ? element.nextElementSibling : element;
            const style = getComputedStyle(shown);
            return [element.id || element.className || element.name || element.tagName,
                    style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2];
        }""")
        if name == "BODY":
            break
        seen.append(name)
        if not is_outlined:
            unseen.append(name)
    assert not unseen
    assert {"play", "slider", "speed", "help-button", "follow", "zoom", "sample", "add-curve", "earlier"} <= set(seen)


def test_reading_single_tokens(visit: Visit, page_of_made: Watch) -> None:
    page = visit(page_of_made.url + "#t=8")
    settled(page, "document.querySelector('.token')")
    tokens = page.locator(".tokens .token")
    assert tokens.count() == 6
    assert tokens.all_text_contents() == ["2", "+", " so", "↵\n", " 9", "<eos>"]
    ordinal = page.locator("#group-list [aria-pressed=true]").get_attribute("data-ordinal")
    group = page.evaluate("(ordinal) => fetch(`/api/group?ordinal=${ordinal}`).then((r) => r.json())", ordinal)
    rollout = group["rollouts"][0]
    version = rollout["tokens"]["versions"][0][1]
    lag = group["group"]["step"] - version
    classes = [re.search(r"age-(\d)", name or "") for name in (tokens.nth(i).get_attribute("class") for i in range(6))]
    assert [int(found[1]) for found in classes if found] == [lag] * 3 + [max(0, lag - 1)] * 3
    tokens.nth(1).hover()
    old = "fresh" if lag == 0 else f"{lag} version old"
    assert text(page, ".token-readout") == (
        f"Token 2 of 6 “+” (id 1): version {version}, {old} · logprob -0.5 when sampled, -0.6 when trained on "
        f"(gap -0.1) · advantage {rollout['reward'] - 0.5}"
    )
    page.get_by_text("logprob gap", exact=True).click()
    kinds = [tokens.nth(i).get_attribute("class") for i in range(6)]
    assert kinds == ["token less", "token less", "token more", "token more", "token more", "token more"]
    tones = tokens.evaluate_all("(all) => all.map((one) => parseInt(one.style.getPropertyValue('--tone')))")
    assert tones[0] > tones[1] > tones[2] == 0 < tones[3] < tones[4]
    page.get_by_text("advantage", exact=True).click()
    kind = "token more" if rollout["reward"] else "token less"
    assert [tokens.nth(i).get_attribute("class") for i in range(6)] == [kind] * 5 + ["token given"]
    page.locator(".sample").nth(2).click()
    assert page.locator(".sample").nth(2).get_attribute("aria-pressed") == "true"
    page.locator("#only-tokens").uncheck()
    until(page, "[...document.querySelectorAll('#group-list button')].some((one) => !one.querySelector('.badge'))")
    page.locator("#group-list button:not(:has(.badge))").first.click()
    until(page, "document.querySelector('.answer pre')")
    assert "Single tokens are written for some groups only" in text(page, ".answer")


def test_tokens_of_earlier_groups_are_read_where_the_last_ones_have_none_and_long_completions_to_their_end(
    visit: Visit, servers: ExitStack, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run_dir = Loop(seed=1, steps=6).run().write(tmp_path_factory.mktemp("runs") / "cut")
    lines = [json.loads(line) for line in (run_dir / "tokens.jsonl").read_text().splitlines()][:12]
    (run_dir / "tokens.jsonl").unlink()
    rollouts = [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]
    long = [line | {"completion": "so " * 9_000 + "the answer is nine"} for line in rollouts]
    (run_dir / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in long))
    watch = servers.enter_context(Watch(run_dir))
    page = visit(watch.url)
    settled(page, "document.querySelector('.answer pre')")
    assert not page.locator("#only-tokens").is_checked(), "none were written yet"
    (run_dir / "tokens.jsonl").write_text("".join(json.dumps(line | {"num_tokens": 16_000}) + "\n" for line in lines))
    deadline_s = time.monotonic() + 20
    while not watch.index.tokens.places:  # files are looked at once a second
        assert time.monotonic() < deadline_s
        page.wait_for_timeout(50)
    page.locator("#previous").click()
    until(page, "document.querySelector('.token')")
    assert page.locator("#only-tokens").is_checked()
    newest = page.locator("#group-list [data-ordinal]").last
    assert newest.get_attribute("data-ordinal") == str(lines[-1]["ordinal"])
    assert newest.get_attribute("aria-pressed") == "true"
    assert "The first 6 of 16,000 tokens:" in text(page, ".answer")
    assert text(page, ".answer pre").endswith("the answer is nine")
    page.locator(".token").first.focus()
    assert text(page, ".token-readout").startswith("Token 1 of 16000 ")


def test_a_click_on_a_dot_opens_its_group_and_one_on_a_curve_goes_to_its_step(
    visit: Visit, page_of_made: Watch
) -> None:
    page = visit(page_of_made.url + "#t=8", still=True)
    settled(page, "document.querySelector('.dot')")
    dot = page.locator(".dot").first
    ordinal = dot.get_attribute("data-ordinal")
    box = dot.bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert text(page, "#loop-readout").startswith(f"Group {ordinal}: ")
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    until(page, f"document.querySelector('#reader h3')?.textContent.startsWith('Group {ordinal} ')")
    plot = page.locator(".plot").first
    plot.click(position={"x": plot.bounding_box()["width"] - 2, "y": 20})  # type: ignore[index]
    until(page, "document.querySelector('#headline dd')?.textContent === '20'")


def test_alarms_are_shown_as_they_were(visit: Visit, page_of_made: Watch) -> None:
    page = visit(page_of_made.url + "#t=3", still=True)
    settled(page, "document.querySelector('.alarm')")
    assert "later" in (page.locator(".alarm").get_attribute("class") or "")
    page.locator(".alarm button").click()
    until(page, "document.querySelector('.alarm').className.includes('on warning')")
    at(page, 14.0)
    assert page.locator(".alarm").get_attribute("class") == "alarm over"
    assert "entropy collapse from step 3 to 5: 0.1 (threshold 0.3)" in text(page, ".alarm")
    page.evaluate("document.querySelectorAll('.alarm, #paths path').forEach((one) => (one.wasThere = true))")
    page_of_made.index.revision += 1  # the page asks for everything again
    with page.expect_response("**/api/overview*"):
        page_of_made._tell()
    page.wait_for_timeout(350)
    kept = "[...document.querySelectorAll('.alarm, #paths path')].map((one) => one.wasThere)"
    assert page.evaluate(kept) == [True] * 6, "what is as it was stays where the focus is"


def test_it_follows_a_run_that_grows_is_resumed_and_ends(
    visit: Visit, servers: ExitStack, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run_dir = tmp_path_factory.mktemp("grows")
    made = Loop(seed=3, steps=9, replicas=1).run()
    watch = servers.enter_context(Watch(run_dir))
    page = visit(watch.url)
    until(page, "document.getElementById('life').textContent === 'has not begun'")
    assert "begins by itself" in text(page, "#notice")
    made.write(run_dir, until_s=4.0)
    until(page, "document.getElementById('life').textContent === 'running'")
    until(page, "document.querySelectorAll('.dot').length > 3")
    watch.verdict.sentence, watch.verdict.steps = "The trainer starves.", 1
    watch._tell()
    until(page, "document.getElementById('verdict').textContent === 'Up to step 1: The trainer starves.'")
    assert page.locator("#go-live").get_attribute("aria-pressed") == "true"
    until(page, "document.querySelector('.wait')")
    assert page.evaluate("document.querySelector('.wait').getAnimations().length") == 0, "the run has the cores"
    hide(page, is_hidden=True)
    page.wait_for_timeout(300)  # what had come is drawn
    end_s = page.locator("#slider").get_attribute("max")
    made.write(run_dir, until_s=6.0)
    deadline_s = time.monotonic() + 20
    while watch.index.end_s < 5:
        assert time.monotonic() < deadline_s
        page.wait_for_timeout(50)
    page.wait_for_timeout(500)
    assert page.locator("#slider").get_attribute("max") == end_s, "nobody looks at it"
    hide(page, is_hidden=False)
    until(page, "Number(document.getElementById('slider').max) > 5")
    made.write(run_dir, until_s=7.0)
    until(
        page,
        "Number(document.getElementById('slider').max) > 6 && Number(document.getElementById('slider').value) > 4",
    )
    page.keyboard.press("ArrowLeft")
    assert page.locator("#go-live").get_attribute("aria-pressed") == "false", "who looks back is left alone"
    (run_dir / "attempt_1").mkdir()
    (run_dir / "timeline").rename(run_dir / "attempt_1" / "timeline")
    other = Loop(seed=4, steps=2, replicas=1, start_s=RAW_START_S + 60).run()
    for path in run_dir.glob("*.jsonl"):
        path.unlink()
    other.write(run_dir, until_s=3.0)
    until(page, "Number(document.getElementById('slider').max) < 4")
    page.locator("#go-live").click()
    other.write(run_dir)
    until(page, "document.getElementById('life').textContent === 'done'")
    assert page.locator("#go-live").is_hidden()
    page.keyboard.press("End")
    until(page, "document.querySelector('#headline dd')?.textContent === '2'")
    assert dots(page) == {}


def test_a_server_that_is_gone_is_told_of(visit: Visit, page_of_made: Watch) -> None:
    with Watch(page_of_made.index.run_dir) as watch:
        page = visit(watch.url + "#t=8")
        settled(page, "document.querySelector('.dot')")
    until(page, "document.getElementById('notice').textContent.includes('does not answer')")
    with Watch(page_of_made.index.run_dir, port=watch.port):
        until(page, "document.getElementById('notice').hidden")


def test_hostile_text_is_shown_and_never_run(
    visit: Visit, servers: ExitStack, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run_dir = tmp_path_factory.mktemp("runs") / "<img src=x onerror=alert(1)>"
    Loop(steps=6, hostile=HOSTILE, has_episodes=True).run().write(run_dir)
    (run_dir / "timeline" / "<b>generator-9<script>alert(1)<").with_suffix(".jsonl").write_text(
        json.dumps({"kind": "slice", "state": HOSTILE[:100], "start_ns": 5003 * 10**9, "end_ns": 5009 * 10**9,
                    "args": {"<img src=x onerror=alert(1)>": HOSTILE}}) + "\n"
    )  # fmt: skip
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5, "version": 6, "wall_s": 1, "<img src=x onerror=alert(2)>": 1.0}) + "\n")
    with (run_dir / "alarms.jsonl").open("w") as file:
        alarm = {"name": "entropy_collapse", "severity": "warning", "value": 0.1, "threshold": 0.3, "text": HOSTILE}
        file.write(json.dumps(alarm | {"step": 0, "event": "began"}) + "\n")
    watch = servers.enter_context(Watch(run_dir))
    page = visit(watch.url + "#t=4")
    settled(page, "document.querySelector('.token') && document.querySelector('.alarm')")
    page.locator("#only-tokens").uncheck()
    for ordinal in (0, 8):
        page.evaluate("document.getElementById('follow').checked = false")
        page.wait_for_selector(f"#group-list [data-ordinal='{ordinal}']")
        page.locator(f"#group-list [data-ordinal='{ordinal}']").click()
        until(page, f"document.querySelector('#reader h3').textContent.startsWith('Group {ordinal} ')")
        for sample in (0, 1):
            page.locator(".sample").nth(sample).click()
            assert "<script>window.pwned = 1</script>" in text(page, "#reader")
            assert "<script>window.pwned = 1</script>" in text(page, ".transcript")
    assert "<script>window.pwned = 1</script>" in text(page, ".tokens")
    for lane in page.locator(".lane").all():
        lane.hover()
    page.locator(".token").first.hover()
    assert page.evaluate("window.pwned") is None
    assert page.locator("script").count() == 1
    assert page.locator("img, iframe, object, embed, style, a[href]").count() == 0
    assert "\\u{202e}" in text(page, "#reader")
    assert not re.search("[\u202e\u2066\u0000\u001b\u2028]", text(page, "body"))
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280


def test_an_episode_is_read_turn_by_turn(
    visit: Visit, servers: ExitStack, tmp_path_factory: pytest.TempPathFactory
) -> None:
    made = Loop(seed=1, steps=8, has_episodes=True).run()
    watch = servers.enter_context(Watch(made.write(tmp_path_factory.mktemp("runs") / "episodes")))
    page = visit(watch.url + "#t=6")
    settled(page, "document.querySelector('.transcript') && document.querySelector('.token')")
    ordinal = int(page.locator("#group-list [aria-pressed=true]").get_attribute("data-ordinal") or "")
    said = next(one["completion"] for one in made.rollouts if one["ordinal"] == ordinal)
    name, told = said[:40], page.locator(".transcript li")
    assert told.locator(".label").all_text_contents() == [
        "assistant 1 · reward 0.25", "call", f"tool {name}", "assistant 2",
    ]  # fmt: skip
    assert told.locator("pre").all_text_contents() == [
        said, f'{name}({name}="{said}")', f"heard: {said}", "done",
    ]  # fmt: skip
    facts = text(page, ".answer .facts")
    assert "2 turns, cut by a limit · 1 tool call (1 failed) · 0.125 s in its environment" in facts
    tokens = page.locator(".tokens .token")
    kinds = [(tokens.nth(i).get_attribute("class") or "").split() for i in range(6)]
    assert [("turn" in kind, "given" in kind) for kind in kinds] == [
        (True, False), (False, False), (False, True), (False, True), (True, False), (False, False),
    ]  # fmt: skip
    tokens.nth(2).hover()
    assert text(page, ".token-readout").endswith(": given, not sampled")
    tokens.nth(4).hover()
    assert ": turn 2, version " in text(page, ".token-readout")
    page.get_by_text("logprob gap", exact=True).click()
    assert "given" in (tokens.nth(2).get_attribute("class") or "")
    assert "environments: " in text(page, '.station[data-station="rewards"]')
    assert page.locator(".lane").count() == 6


@pytest.mark.slow
def test_forks_are_read_below_the_trunk(
    visit: Visit, servers: ExitStack, tmp_path_factory: pytest.TempPathFactory
) -> None:
    made = Loop(seed=1, steps=8, has_episodes=True, has_forks=True).run()
    watch = servers.enter_context(Watch(made.write(tmp_path_factory.mktemp("runs") / "forks")))
    page = visit(watch.url + "#t=6")
    settled(page, "document.querySelector('.transcript') && document.querySelector('.token')")
    trunk, fork = page.locator(".transcript").all()
    assert fork.get_attribute("aria-label") == "Transcript of fork 1 of 1"
    assert fork.locator(".label").all_text_contents() == ["user", "assistant 3"]
    assert trunk.locator("li").count() == 4
    assert text(page, ".label.fork") == "Fork 1 of 1: a context of its own, of 1 message"
    assert "3 turns, cut by a limit · 1 fork · 1 tool call" in text(page, ".answer .facts")
    pieces = page.locator(".tokens > *")
    assert pieces.count() == 7
    assert pieces.nth(2).text_content() == "fork 1"
    tokens = page.locator(".tokens .token")
    tokens.nth(2).hover()
    assert text(page, ".token-readout").endswith(": fork 1, given, not sampled")
    tokens.nth(4).hover()
    assert ": fork 1, turn 3, version " in text(page, ".token-readout")
    tokens.nth(1).focus()
    page.keyboard.press("ArrowRight")
    assert ": fork 1, given" in text(page, ".token-readout")
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280


@pytest.mark.parametrize("dark", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_on_a_phone_nothing_is_cut_off(visit: Visit, page_of_made: Watch, dark: bool) -> None:
    page = visit(page_of_made.url + "#t=8", width=390, height=844, dark=dark)
    settled(page, "document.querySelector('.token') && document.querySelectorAll('.chart path').length")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    wide = page.evaluate("""() => [...document.querySelectorAll('body *')].filter((one) => {
        const box = one.getBoundingClientRect();
        return box.width && !one.closest('.hidden, dialog, #overlay') && (box.right > 390.5 || box.left < -0.5);
    }).map((one) => one.id || one.className || one.tagName)""")
    assert wide == []
    small = page.evaluate("""() => [...document.querySelectorAll('button, select, input[type=range]')].filter((one) => {
        const box = one.getBoundingClientRect();
        return box.width && (box.width < 30 || box.height < 24);
    }).map((one) => one.id || one.className)""")
    assert small == [], "fingers are wider than that"
    assert dots(page) == expected_dots(page_of_made.index.run_dir, 8.0)
    page.locator("#play").tap()
    until(page, "Number(document.getElementById('slider').value) > 8.3")


# What of the loop is written and lies under a dot at rest, or where dots may fly.
COVERED = """() => {
    const meet = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 0.5
        && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 0.5;
    const boxOf = (one) => one.getBoundingClientRect();
    const written = '.stage h3, .tagline, .stage .count, .now, .replica-head, #count-dropped';
    const texts = [...document.querySelectorAll(written)];
    const dots = [...document.querySelectorAll('.dots-layer .dot')].map(boxOf);
    const stage = boxOf(document.getElementById('overlay'));
    const ground = [...document.querySelectorAll('#open-ground rect')].map((one) => {
        const [x, y, width, height] = ['x', 'y', 'width', 'height'].map((name) => Number(one.getAttribute(name)));
        return new DOMRect(stage.left + x, stage.top + y, width, height);
    });
    const under = (boxes) =>
        texts.filter((text) => boxes.some((box) => meet(box, boxOf(text)))).map((text) => text.textContent);
    const layer = document.querySelector('.dots-layer');
    return { dots: dots.length, ground: ground.length, clip: layer.getAttribute('clip-path'),
             atRest: under(dots), inFlight: under(ground) };
}"""


@pytest.mark.slow
def test_on_a_phone_dots_cover_nothing_that_is_written(
    visit: Visit, servers: ExitStack, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """However many: 330 groups of a step wait, fly and are trained at once."""
    run_dir = (
        Loop(steps=2, groups=330, size=2, replicas=1, staleness=2).run().write(tmp_path_factory.mktemp("runs") / "many")
    )
    watch = servers.enter_context(Watch(run_dir))
    page = visit(watch.url, width=390, height=844, still=True)
    until(page, "document.querySelector('#headline dd')?.textContent === '2'")
    most = 0
    begin_s = watch.index.events.step_starts[0]
    for time_s in (0.5 * begin_s, begin_s - 0.02, begin_s + 0.05, begin_s + 20.0):
        at(page, round(time_s, 2))
        found = page.evaluate(COVERED)
        most = max(most, found["dots"])
        assert found["atRest"] == []
        assert found["inFlight"] == []
        assert found["clip"] == "url(#open-ground)"
        assert found["ground"] > 8
    assert most > 300


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_what_axes_say_lies_beside_their_curves_and_no_word_is_broken(
    visit: Visit, page_of_made: Watch, width: int
) -> None:
    page = visit(page_of_made.url + "#t=8", width=width)
    settled(page, "document.querySelector('.token') && document.querySelectorAll('.chart path').length")
    found = page.evaluate("""() => [...document.querySelectorAll('.chart')].flatMap((chart) => {
        const plot = chart.querySelector('svg').getBoundingClientRect();
        return [...chart.querySelectorAll('.y-axis span')].map((label) => {
            const box = label.getBoundingClientRect();
            const [first, last] = [chart.getBoundingClientRect().left, plot.left];
            return [label.textContent, box.width > 0 && box.left >= first && box.right <= last];
        });
    })""")
    assert len(found) == 12
    assert [label for label, is_beside in found if not is_beside] == []
    assert page.evaluate(BROKEN_WORDS) == []


@pytest.mark.slow
def test_an_axis_ends_where_all_of_its_lines_do(
    visit: Visit, servers: ExitStack, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Rewards that are never above 0, beside held-out ones that are all 0: none of them is near 1."""
    made = Loop(seed=1, steps=20).run()
    for _, line in made.metrics:
        if "eval_accuracy" in line:
            line["eval_reward"] = 0.0 * line.pop("eval_accuracy")
        else:
            line["reward"] = -0.2 * (1 + line["step"] % 2)
    other = servers.enter_context(Watch(made.write(tmp_path_factory.mktemp("runs") / "made")))
    page = visit(other.url)
    settled(page, "document.querySelector('.chart .y-axis span')?.textContent")
    high, low = page.locator(".chart .y-axis").first.locator("span").all_text_contents()
    assert (float(low), float(high)) == (-0.4, 0.0)


CONTRAST = """() => {
    const probe = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
    const rgb = (colour) => {
        probe.clearRect(0, 0, 1, 1); probe.fillStyle = colour; probe.fillRect(0, 0, 1, 1);
        return [...probe.getImageData(0, 0, 1, 1).data];
    };
    const light = ([r, g, b]) => {
        const linear = (v) => (v <= 10.31 ? v / 3294.6 : ((v / 255 + 0.055) / 1.055) ** 2.4);
        return 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
    };
    const behind = (element) => {
        let colour = [255, 255, 255, 255];
        const path = [];
        for (let one = element; one; one = one.parentElement) path.unshift(rgb(getComputedStyle(one).backgroundColor));
        for (const [r, g, b, a] of path) colour = [r, g, b].map((v, i) => v * a / 255 + colour[i] * (1 - a / 255));
        return colour;
    };
    const found = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const element = walker.currentNode.parentElement;
        if (!walker.currentNode.textContent.trim() || !element.getClientRects().length) continue;
        if (element.closest('svg, dialog, .hidden, .later, .unseen, :disabled')) continue;
        const [a, b] = [light(rgb(getComputedStyle(element).color)), light(behind(element))];
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < 4.5) found.push([element.className, element.textContent.slice(0, 30), ratio.toFixed(2)]);
    }
    return found;
}"""


@pytest.mark.parametrize("dark", with_slow([True], [False]))
def test_text_can_be_read_in_light_and_in_dark(visit: Visit, page_of_made: Watch, dark: bool) -> None:
    """Contrast of at least 4.5, as WCAG 2.2 AA asks of normal text."""
    page = visit(page_of_made.url + "#t=8", dark=dark)
    settled(page, "document.querySelector('.token') && document.querySelector('.alarm')")
    assert page.evaluate(CONTRAST) == []
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background))) < 200) == dark


def test_who_wants_no_motion_gets_none(visit: Visit, page_of_made: Watch) -> None:
    page = visit(page_of_made.url, still=True)
    until(page, "document.querySelector('.lane-row')")
    page.wait_for_timeout(400)
    assert page.get_by_role("button", name="Play", exact=True).is_visible(), "it does not play by itself"
    assert page.evaluate("document.getAnimations().length") == 0
