"""Draw the three pictures of docs/concepts.md: the loop, the dial, a completion's life.

python scripts/draw_concepts.py                   # into docs/images; --out FOLDER
"""

from __future__ import annotations

import argparse
from html import escape
from itertools import pairwise
from pathlib import Path

WIDTH = 960
VERSIONS = ("#2f6fde", "#5b3fbf", "#c2458f", "#d9661f", "#2f8f5b", "#8a6d00", "#4a6a8a", "#a03a3a")
INK, QUIET, LINE = "#1f2733", "#5b6675", "#9aa5b4"
STYLE = (
    "text{font:14px system-ui,sans-serif;fill:#1f2733}.small{font-size:12px;fill:#5b6675}"
    ".name{font-weight:600}.white{fill:#fff;font-weight:600;font-size:12px}"
)
ARROW = (
    '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    f'<path d="M0 0L8 4L0 8z" fill="{QUIET}"/></marker></defs>'
)


class Picture:
    """Shapes on a white sheet, so that it can be read on dark pages, too."""

    def __init__(self, height: int, title: str) -> None:
        self.height = height
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            f"<title>{escape(title)}</title><style>{STYLE}</style>{ARROW}",
            f'<rect width="{WIDTH}" height="{height}" rx="10" fill="#fff"/>',
        ]

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, height: float, fill: str, edge: str = "none") -> None:
        shape = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5"'
        self.parts.append(f'<rect {shape} fill="{fill}" stroke="{edge}"/>')

    def arrow(self, path: str, dashes: str = "none") -> None:
        style = f'fill="none" stroke="{QUIET}" stroke-width="1.5" stroke-dasharray="{dashes}" marker-end="url(#a)"'
        self.parts.append(f'<path d="{path}" {style}/>')

    def save(self, path: Path) -> None:
        path.write_text("\n".join([*self.parts, "</svg>\n"]), encoding="utf-8")


def draw_loop() -> Picture:
    """Nodes in the order of the loop, and the controller above them."""
    picture = Picture(330, "The loop: prompts, generator, rewards, batching, trainer, weight sync")
    nodes = {
        "prompts": ("a question,", "G samples each"),
        "generator": ("decodes with the", "newest weights"),
        "rewards": ("score, in a", "jail of their own"),
        "batching": ("P groups become", "a packed batch"),
        "trainer": ("one step makes", "one version"),
    }
    wide, gap, y = 148, 38, 130
    places = {name: 34 + index * (wide + gap) for index, name in enumerate(nodes)}
    for name, lines in nodes.items():
        picture.box(places[name], y, wide, 76, "#eef3fb", LINE)
        picture.text(places[name] + wide / 2, y + 24, name, "name", "middle")
        for number, line in enumerate(lines):
            picture.text(places[name] + wide / 2, y + 44 + 18 * number, line, "small", "middle")
    for left, right in pairwise(places.values()):
        picture.arrow(f"M{left + wide + 3} {y + 38}L{right - 3} {y + 38}")
    middle = {name: x + wide / 2 for name, x in places.items()}
    picture.box(middle["generator"], y + 122, middle["trainer"] - middle["generator"], 44, "#f6effb", LINE)
    picture.text((middle["generator"] + middle["trainer"]) / 2, y + 149, "weight sync: while it decodes", "", "middle")
    picture.arrow(f"M{middle['trainer'] - 12} {y + 79}L{middle['trainer'] - 12} {y + 119}")
    picture.arrow(f"M{middle['generator'] + 12} {y + 120}L{middle['generator'] + 12} {y + 80}")
    picture.box(34, 24, places["trainer"] + wide - 34, 48, "#f3f5f7", LINE)
    picture.text(WIDTH / 2, 44, "controller", "name", "middle")
    words = "decides what may start, what a step trains, what must be saved; no rollout and no weight passes here"
    picture.text(WIDTH / 2, 62, words, "small", "middle")
    for name in nodes:
        picture.arrow(f"M{middle[name]} 76L{middle[name]} {y - 3}", "3 4")
    words = "Generator, rewards, trainer: a process each, or several, on one machine or many. Arrows: bounded channels."
    picture.text(34, 316, words, "small")
    return picture


Spans = list[tuple[float, float]]


def times(k: int, generation: list[float], training: float) -> tuple[Spans, Spans]:
    """Return from when to when each batch is sampled and trained: batch n may be sampled with version n - k."""
    sampled: Spans = []
    trained: Spans = []
    for number, length in enumerate(generation):
        free = sampled[-1][1] if sampled else 0.0
        version = trained[number - k - 1][1] if number > k else 0.0
        start = max(free, version)
        sampled.append((start, start + length))
        begin = max(sampled[-1][1], trained[-1][1] if trained else 0.0)
        trained.append((begin, begin + training))
    return sampled, trained


def draw_dial() -> Picture:
    """The same batches at k = 0, 1 and 2, computed by `times`."""
    picture = Picture(400, "The dial: generator and trainer at max_staleness 0, 1 and 2")
    generation, training = [4.0, 6.0, 3.0, 5.0, 4.0, 6.0, 3.0, 5.0, 4.0, 5.0, 4.0, 6.0], 4.5
    left, scale, end_s = 256, 17.5, 39.0
    for row, k in enumerate((0, 1, 2)):
        y = 30 + row * 118
        picture.text(24, y + 16, f"max_staleness = {k}", "name")
        sampled, trained = times(k, generation, training)
        done = sum(end <= end_s for _, end in trained)
        told = "they take turns" if k == 0 else f"up to {k} step{'s' * (k > 1)} ahead"
        picture.text(24, y + 36, told, "small")
        picture.text(24, y + 56, f"{done} steps", "small")
        for lane, (name, spans) in enumerate((("generator", sampled), ("trainer", trained))):
            top = y + lane * 42
            picture.box(left, top, end_s * scale, 32, "#eceff3")
            picture.text(left - 8, top + 21, name, "small", "end")
            for number, (start, end) in enumerate(spans):
                if start >= end_s:
                    break
                version = next(v for v in range(number, -1, -1) if v == 0 or trained[v - 1][1] <= start)
                colour = VERSIONS[version % len(VERSIONS)] if lane == 0 else "#3c4a5c"
                width = (min(end, end_s) - start) * scale - 2
                picture.box(left + start * scale, top + 2, width, 28, colour)
                label = f"v{version}" if lane == 0 else f"step {number}"
                if width > 40:
                    picture.text(left + start * scale + width / 2, top + 21, label, "white", "middle")
    words = (
        "Grey is idle. vN: sampled with version N, which step N - 1 has made. Step n trains batch n: n - N steps stale."
    )
    picture.text(24, 386, words, "small")
    return picture


def draw_life() -> Picture:
    """A completion that two versions sampled, from its admission to its step."""
    picture = Picture(300, "A completion's life, from admission to training")
    stops = ["admitted", "prefilled", "decoded", "scored", "ready", "trained"]
    told = [
        ("on place p,", "at version 4"),
        ("its prompt once", "for the group"),
        ("new weights arrive", "at its 6th token"),
        ("as soon as it", "is finished"),
        ("waits for its turn;", "never thrown away"),
        ("in step 6,", "with k = 2"),
    ]
    xs = [90 + index * 156 for index in range(len(stops))]
    for x, name, lines in zip(xs, stops, told, strict=True):
        picture.parts.append(f'<circle cx="{x}" cy="60" r="9" fill="{INK}"/>')
        picture.text(x, 38, name, "name", "middle")
        for number, line in enumerate(lines):
            picture.text(x, 92 + 18 * number, line, "small", "middle")
    for left, right in pairwise(xs):
        picture.arrow(f"M{left + 12} 60L{right - 13} 60")
    words = ["The", "quick", "fox", "ran", "over", "to", "us", "."]
    versions = [4] * 5 + [5] * 3
    picture.text(24, 160, "its tokens", "name")
    for index, (word, version) in enumerate(zip(words, versions, strict=True)):
        x = 130 + index * 98
        picture.box(x, 140, 92, 32, VERSIONS[version - 4])
        picture.text(x + 46, 161, word, "white", "middle")
        picture.text(x + 46, 194, f"version {version}", "small", "middle")
        picture.text(x + 46, 214, f"{6 - version} step{'s' * (6 - version > 1)} stale", "small", "middle")
    lines = [
        "Every token keeps its version and the logprob it was sampled with: the loss corrects by their ratio.",
        "Lost on the way (a killed process)? It is sampled again with the same noise, and what had come is kept.",
    ]
    for number, line in enumerate(lines):
        picture.text(24, 252 + 22 * number, line, "small")
    return picture


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, draw in (("loop", draw_loop), ("dial", draw_dial), ("life", draw_life)):
        draw().save(out / f"{name}.svg")
        print(out / f"{name}.svg")


if __name__ == "__main__":
    main()
