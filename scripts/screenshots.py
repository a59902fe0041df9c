"""Pictures of a run's pages for the docs.

    python scripts/screenshots.py                           # trains what they show into runs/figures, and draws all
    python scripts/screenshots.py RUN --at SECONDS --group ORDINAL
    python scripts/screenshots.py RUN --episodes --group ORDINAL       # of a run with an environment

report.png         the top of the report
report_time.png    its part on time
report_phone.png   three parts of it on a phone
watch.png          the watch page of RUN at that time of the run, as a desktop shows it
watch_tokens.png   reading a group token by token, by logprob gap
watch_phone.png    the watch page on a phone, in dark

report_episodes.png  held-out episodes before and after training, turn by turn
watch_episode.png    reading an episode token by token, by version

comparison.png     four presets beside each other (of no RUN alone)
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from slipstream.observe.report import report
from slipstream.observe.watch import watch

MAX_BYTES = 250_000
PRESETS = ("sync", "one_step", "bounded", "continuous")
RUNS = {
    "pages": ("quickstart", "--steps", "60", "--preset", "continuous", "--generator.replicas", "2"),
    "episodes": ("calculator_mini",),
    **{preset: ("quickstart", "--steps", "100", "--preset", preset) for preset in PRESETS},
}


def shoot(page: Page, path: Path, selector: str | None = None) -> None:
    page.wait_for_timeout(2500)  # until everything is loaded and has come to rest
    if selector is None:
        page.screenshot(path=path)
    else:
        page.locator(selector).screenshot(path=path)
    with Image.open(path) as picture:
        fewer = picture.convert("RGB").quantize(method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    fewer.save(path, optimize=True)
    if (size := path.stat().st_size) > MAX_BYTES:
        raise SystemExit(f"{path} has {size:,} bytes, more than {MAX_BYTES:,}")
    print(f"{path}: {size:,} bytes")


def shoot_report(browser: Browser, run: Path, out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        address = report(run, out=Path(folder) / "report.html").resolve().as_uri()
        page = browser.new_page(viewport={"width": 1280, "height": 1180}, color_scheme="light")
        page.goto(address)
        shoot(page, out / "report.png")
        page.locator("nav").evaluate("menu => menu.remove()")  # it would lie across the part
        shoot(page, out / "report_time.png", "#time")
        frames = "".join(
            f'<iframe src="{address}{part}" width="390" height="1076" style="border:0"></iframe>'
            for part in ("", "#off-policy", "#time")
        )
        beside = Path(folder) / "phones.html"
        beside.write_text(f'<body style="margin:0;display:flex;gap:24px;background:#c8ccd6">{frames}', encoding="utf-8")
        phones = browser.new_page(viewport={"width": 3 * 390 + 2 * 24, "height": 1076}, color_scheme="light")
        phones.goto(beside.as_uri())
        shoot(phones, out / "report_phone.png")


def shoot_comparison(browser: Browser, runs: list[Path], out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        page = browser.new_page(viewport={"width": 1280, "height": 1545}, color_scheme="light")
        page.goto(report(*runs, out=Path(folder) / "comparison.html").resolve().as_uri())
        shoot(page, out / "comparison.png")


def group_to_read(run: Path) -> int:
    """Return the ordinal of a group whose tokens were written: that of the most versions, the last of these."""
    with (run / "tokens.jsonl").open("rb") as lines:
        found = [json.loads(line) for line in lines]
    return int(max(found, key=lambda line: (len(line["versions"]), line["ordinal"]))["ordinal"])


def train(name: str, folder: Path) -> Path:
    """Return the run `name` of RUNS; trained, unless it is there. What is left of one that was stopped is removed."""
    run = folder / name
    told = run / "summary.json"
    if not told.exists() or json.loads(told.read_text(encoding="utf-8"))["status"] != "done":
        shutil.rmtree(run, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "slipstream", "run", *RUNS[name], "--out", run], check=True)
    return run


def ask(url: str, question: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}api/{question}", timeout=10) as answer:
        return dict(json.load(answer))


def read_group(page: Page, url: str, ordinal: int, sample: int, colour: str) -> None:
    """Open a completion of the group `ordinal` at the time when its step was done, and point at one of its tokens."""
    step = ask(url, f"group?ordinal={ordinal}")["group"]["step"]
    done_s = ask(url, f"step?step={step}")["end_s"]
    page.evaluate(f"location.hash = '#t={done_s + 0.01:.2f}'")
    page.wait_for_selector(f"#group-list [data-ordinal='{ordinal}']")
    page.wait_for_timeout(500)
    page.locator(f"#group-list [data-ordinal='{ordinal}']").click()
    page.locator(".sample").nth(sample).click()
    page.get_by_text(colour, exact=True).click()
    page.locator(".token").nth(2).hover()


def shoot_episodes(browser: Browser, run: Path, url: str, options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        page = browser.new_page(viewport={"width": 1280, "height": 1180}, color_scheme="light")
        page.goto(report(run, out=Path(folder) / "report.html").resolve().as_uri())
        shoot(page, options.out / "report_episodes.png", "#text .wide")
    page = browser.new_page(viewport={"width": 1280, "height": 960}, color_scheme="light")
    page.goto(url)
    read_group(page, url, options.group, options.sample, "version")
    shoot(page, options.out / "watch_episode.png", "#rollouts")


def shoot_pages(browser: Browser, run: Path, url: str, options: argparse.Namespace) -> None:
    shoot_report(browser, run, options.out)
    at_s = options.at
    if at_s is None:  # late in the run, while it trains
        steps = json.loads((run / "summary.json").read_text(encoding="utf-8"))["steps"]
        at_s = ask(url, f"step?step={steps * 3 // 4}")["end_s"]
    link = f"{url}#t={at_s}"
    page = browser.new_page(viewport={"width": 1280, "height": 960}, color_scheme="light")
    page.goto(link)
    shoot(page, options.out / "watch.png")
    read_group(page, url, options.group, options.sample, "logprob gap")
    shoot(page, options.out / "watch_tokens.png", "#rollouts")
    phone = browser.new_page(viewport={"width": 390, "height": 844}, color_scheme="dark", device_scale_factor=2)
    phone.goto(link)
    phone.wait_for_timeout(1500)
    phone.evaluate("document.getElementById('loop').scrollIntoView()")
    shoot(phone, options.out / "watch_phone.png")


def shoot_run(browser: Browser, run: Path, options: argparse.Namespace) -> None:
    group = group_to_read(run) if options.group is None else options.group
    draw = shoot_episodes if options.episodes else shoot_pages
    with watch(run) as served:
        draw(browser, run, served.url, argparse.Namespace(**vars(options) | {"group": group}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", help="folder of a run; without one, all are trained and drawn")
    parser.add_argument("--at", type=float, help="time of the run, seconds; by default late in it")
    parser.add_argument("--episodes", action="store_true", help="the two pictures of episodes, no others")
    parser.add_argument("--group", type=int, help="ordinal of a group whose tokens were written")
    parser.add_argument("--sample", type=int, default=0)
    parser.add_argument("--runs", type=Path, default=Path("runs/figures"), help="folder of what is trained")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        parser.error("a Chromium is needed: Debian's package `chromium`, or Google's Chrome")
    runs = {} if options.run is not None else {name: train(name, options.runs) for name in RUNS}
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        if options.run is not None:
            shoot_run(browser, options.run, options)
        else:
            shoot_run(browser, runs["pages"], options)
            shoot_run(browser, runs["episodes"], argparse.Namespace(**vars(options) | {"episodes": True}))
            shoot_comparison(browser, [runs[preset] for preset in PRESETS], options.out)
        browser.close()


if __name__ == "__main__":
    main()
