"""Pictures of a run's pages for the docs.

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
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from slipstream.observe.report import report
from slipstream.observe.watch import watch

MAX_BYTES = 250_000


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--at", type=float, default=0.0, help="time of the run, seconds")
    parser.add_argument("--episodes", action="store_true", help="the two pictures of episodes, no others")
    parser.add_argument("--group", type=int, required=True, help="ordinal of a group whose tokens were written")
    parser.add_argument("--sample", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with watch(options.run) as served, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        if options.episodes:
            shoot_episodes(browser, options.run, served.url, options)
            return
        shoot_report(browser, options.run, options.out)
        link = f"{served.url}#t={options.at}"
        page = browser.new_page(viewport={"width": 1280, "height": 960}, color_scheme="light")
        page.goto(link)
        shoot(page, options.out / "watch.png")
        read_group(page, served.url, options.group, options.sample, "logprob gap")
        shoot(page, options.out / "watch_tokens.png", "#rollouts")
        phone = browser.new_page(viewport={"width": 390, "height": 844}, color_scheme="dark", device_scale_factor=2)
        phone.goto(link)
        phone.wait_for_timeout(1500)
        phone.evaluate("document.getElementById('loop').scrollIntoView()")
        shoot(phone, options.out / "watch_phone.png")
        browser.close()


if __name__ == "__main__":
    main()
