"""What does it say? Completions before and after, and how long they are."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from slipstream.observe.report.html import card, cards, model_text, part, table
from slipstream.observe.report.learning import BLUE, ORANGE, column_numbers, numbers
from slipstream.observe.report.run import Length, Run
from slipstream.observe.samples import Sample
from slipstream.observe.svg import Axis, Series, line_chart, number
from slipstream.observe.svg_blocks import MAX_COLUMNS, Column, heat_map

MAX_BINS = 12


def words(run: Run) -> str:
    pictures = [_samples(run.samples), cards(*_lengths(run))]
    return part("text", "What does it say?", "Numbers can be fooled; read a few answers.", pictures)


def _samples(samples: Sequence[Sample]) -> str:
    if not samples:
        return ""
    rows = [
        [
            f'<span class="model">{model_text(s.prompt)}</span>',
            f'<span class="model">{model_text(s.answer)}</span>',
            _answer(s.before, s.before_reward, s.before_is_right),
            _answer(s.after, s.after_reward, s.after_is_right),
        ]
        for s in samples
    ]
    is_held_out = any(s.before is not None and s.after is not None for s in samples)
    note = (
        "The same held-out prompts, answered greedily before and after training."
        if is_held_out
        else "Completions from the first steps (before) and the last ones (after); no held-out answers were kept."
    )
    head = ["prompt", "expected", "before", "after"]
    return card("Before and after", note, table(head, rows, kind="samples", row_heads=False), size="wide")


def _answer(answer: str | None, reward: float | None, is_right: bool | None) -> str:
    """The answer with a mark where it is known whether it is right, else with its reward."""
    if answer is None:
        return ""
    shown = f'<span class="model">{model_text(answer)}</span>'
    if reward is None:
        return shown
    if is_right is None:
        return f'<span title="reward {reward:g}"><b>{number(reward)}</b> {shown}</span>'
    mark, kind = ("✓", "right") if is_right else ("✗", "wrong")
    return f'<span class="{kind}" title="reward {reward:g}">{mark} {shown}</span>'


def _lengths(run: Run) -> list[str]:
    """Trained against sampled, and the trained over time."""
    lengths = run.lengths
    trained = [one for one in lengths if one.step is not None]
    if not trained:
        return []
    width, num_bins = _bins(max(one.num_tokens for one in lengths))
    series = [
        Series("sampled", _shares(lengths, width, num_bins), ORANGE),
        Series("trained on", _shares(trained, width, num_bins), BLUE, is_dashed=True),
    ]
    axis = Axis("tokens" if width == 1 else f"tokens, in bins of {width}")
    chart = line_chart(series, title="Lengths of completions", x=axis, y=Axis("share", low=0.0, is_share=True))
    note = "Where the dashed line lies left of the other, long answers were trained on less often than sampled."
    return [
        card("Lengths: sampled and trained on", note, chart, details=numbers(series, "tokens"), folds=True),
        _lengths_over_time(trained, width, num_bins),
    ]


def _bins(longest: int) -> tuple[int, int]:
    """The width of a bin, a round number, and how many it takes from length 0 on."""
    width = max(1, math.ceil((longest + 1) / MAX_BINS))
    if width > 1:
        magnitude = 10 ** math.floor(math.log10(width))
        width = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= width)
    return width, longest // width + 1


def _shares(lengths: Sequence[Length], width: int, num_bins: int) -> list[tuple[float, float]]:
    counts = Counter(one.num_tokens // width for one in lengths)
    return [(float(i * width), counts[i] / len(lengths)) for i in range(num_bins)]


def _lengths_over_time(trained: Sequence[Length], width: int, num_bins: int) -> str:
    names = [str(i) if width == 1 else f"{i * width} – {(i + 1) * width - 1}" for i in range(num_bins)]
    steps = [one.step for one in trained if one.step is not None]
    first, last = min(steps), max(steps)
    pitch = max(1, math.ceil((last - first + 1) / MAX_COLUMNS))
    counts: dict[int, Counter[str]] = {}
    for one, step in zip(trained, steps, strict=True):
        counts.setdefault((step - first) // pitch, Counter())[names[one.num_tokens // width]] += 1
    columns = [
        Column(float(first + i * pitch), float(min(first + (i + 1) * pitch, last + 1)), counts.get(i, Counter()))
        for i in range((last - first) // pitch + 1)
    ]
    used = [i for i, name in enumerate(names) if any(column.counts.get(name) for column in columns)]
    shown = names[used[0] : used[-1] + 1]
    chart = heat_map(
        columns,
        shown,
        title="Lengths of the trained completions by step",
        x=Axis("step"),
        label="tokens",
        left=46 if width == 1 else 76,
    )
    note = "What the batch of a step was made of."
    return card("Lengths over time", note, chart, details=column_numbers(columns, shown, "step"), folds=True)
