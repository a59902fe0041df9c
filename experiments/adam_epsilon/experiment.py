"""Where Adam's epsilon stands: N's ten statistics for PyTorch's and TensorFlow's Adam, at three sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from experiments.adam_epsilon.ratios import after_epochs, checkpoint, excess, published
from experiments.comparison import is_greater
from experiments.figures import COLOURS, lines, panels, svg, ticks
from experiments.lab import Lab, Spec
from experiments.section import Section, Verdict, markdown_table, spread
from experiments.stylistic_details.runs import PIPELINES, RECIPE, USUAL

PIPELINE = PIPELINES[USUAL]
VERSION = 1
"""Of what is measured: raised when it changes."""
SIZES: dict[str, dict[str, Any]] = {
    "0.1M": {"hidden_size": 64, "intermediate_size": 192, "num_layers": 2},
    "3.2M": {"hidden_size": 256, "intermediate_size": 768, "num_layers": 4},
}
"""Besides the pipeline's own policy."""
MIDDLE = "0.6M"
NAMES = ("0.1M", MIDDLE, "3.2M")
SFT_STEPS = 400
SEEDS = (0, 1, 2)
COMPLETIONS = 128
ADAMS = ("torch", "tensorflow")
EPOCHS = (1, 2)
AFTER = "2"
"""Epochs of the table."""
PUBLISHED_SIZE = 124e6
GREATER = ("policy/approxkl", "policy/clipfrac", "ratio_var", "logprob_diff_var", "ratio_max", "logprob_diff_max")
LESS = ("ratio_min", "logprob_diff_min")
"""Which way PyTorch's Adam differs there."""
SIZED = ("policy/approxkl", "policy/clipfrac", "logprob_diff_var")
"""Of which N says how many times as large."""
DRAWN = ("policy/approxkl", "logprob_diff_var")
"""Which are never 0."""
FACTOR = 2.0

Found = Mapping[str, Sequence[Mapping[str, Any]]]
"""Size -> what `after_epochs` found, per seed."""


def sft_spec(size: str) -> Spec:
    """A policy of another size, from the same demonstrations."""
    gold = {"function": "overlap", "params": {"column": "key", "characters": True}}
    overrides = {
        "stages": ["sft"],
        "host": "inline",
        "model": SIZES[size],
        "sft": {"steps": SFT_STEPS},
        "rewards": {"models": [], "terms": [gold]},  # not used: the pipeline's reward model scores all sizes
    }
    return Spec(f"stylistic policy {size}", RECIPE, overrides, cores=1)


def measured(lab: Lab) -> Found:
    pipeline, *others = lab.run_all([PIPELINE, *(sft_spec(size) for size in SIZES)])
    policies = {MIDDLE: pipeline} | dict(zip(SIZES, others, strict=True))
    return {
        size: [
            lab.measure(
                f"adam epsilon {size} seed={seed}",
                lambda version, **parameters: after_epochs(**parameters),  # noqa: ARG005 - what it is kept by
                version=VERSION,
                policy=checkpoint(policies[size]),
                reward_model=str(pipeline / "reward_model" / "model"),
                adams=list(ADAMS),
                epochs=list(EPOCHS),
                completions=COMPLETIONS,
                seed=seed,
            )
            for seed in SEEDS
        ]
        for size in NAMES
    }


def statistic(found: Found, size: str, adam: str, name: str, after: str = AFTER) -> list[float]:
    """One number per seed."""
    return [seed[adam][after][name] for seed in found[size]]


def excesses(found: Found, size: str, name: str, after: str = AFTER) -> list[float]:
    """PyTorch's number over TensorFlow's, per seed."""
    return [excess({adam: seed[adam][after] for adam in ADAMS}, name) for seed in found[size]]


def verdicts(found: Found) -> list[Verdict]:
    """By the rules of the README."""
    return [_direction(found), _size_of_effect(found), _larger_models(found)]


def _direction(found: Found) -> Verdict:
    pairs = [
        (value, other) if name in GREATER else (other, value)
        for size in NAMES
        for name in (*GREATER, *LESS)
        for value, other in zip(
            statistic(found, size, "torch", name), statistic(found, size, "tensorflow", name), strict=True
        )
    ]
    decided = [above > below for above, below in pairs if above != below]
    agree, ties = sum(decided), len(pairs) - len(decided)
    return Verdict(
        "PyTorch's Adam makes the more aggressive update with the same epsilon.",
        "N, Adam",
        True if agree == len(decided) > len(pairs) // 2 else False if agree <= len(decided) // 2 else None,
        f"{agree} of {len(decided)} comparisons (eight statistics, three sizes, three seeds) go the published way"
        + (f"; {ties} more are ties, where nothing is clipped" if ties else ""),
    )


def _size_of_effect(found: Found) -> Verdict:
    largest, of_source = NAMES[-1], published()
    told, is_near = [], []
    for name in SIZED:
        wanted, seen = excess(of_source, name), fmean(excesses(found, largest, name))
        is_near.append(math.isfinite(seen) and wanted / FACTOR <= seen <= wanted * FACTOR)
        told.append(f"{name.removeprefix('policy/')} {seen:.1f} ({wanted:.1f})")
    return Verdict(
        "The update is six times as large in approximate KL and variance, and 4 times in clipping.",
        "N, Adam, its table",
        True if all(is_near) else None if any(is_near) else False,
        f"at {largest}, published in brackets: {', '.join(told)}",
    )


def _larger_models(found: Found) -> Verdict:
    by_size = {size: excesses(found, size, "policy/approxkl") for size in NAMES}
    largest, smallest = by_size[NAMES[-1]], by_size[NAMES[0]]
    are_numbers = all(map(math.isfinite, [*largest, *smallest]))
    return Verdict(
        "Larger models get affected more.",
        "N, Adam (gpt2 against gpt2-xl)",
        is_greater(largest, smallest) if are_numbers else None,
        "approximate KL, times as large: " + ", ".join(f"{size} {spread(by_size[size], 2)}" for size in NAMES),
    )


def section(lab: Lab) -> Section:
    found = measured(lab)
    return Section(
        title="Where Adam's epsilon stands",
        question="With the same epsilon, how much further does PyTorch's Adam move a policy in its first updates than "
        "TensorFlow's, and does it matter more for larger models?",
        setup=f"The settings of `stylistic_mini` (PPO with a value head, both whitenings, rate 1e-4, epsilon 1e-5) on "
        f"one batch of {COMPLETIONS} completions of 12 tokens, as many tokens as N's; policies of three sizes after "
        f"SFT, one reward model. Two epochs, an update each; statistics of new against old logprobs of the batch. "
        f"Means over {len(SEEDS)} batches.",
        tables={
            "After two epochs (published: GPT-2, 124M)": statistics_table(found),
            "PyTorch's number over TensorFlow's, and the numbers that epsilon is added to": excess_table(found),
        },
        figures={"PyTorch's number over TensorFlow's, by parameters; crosses: N's for GPT-2": figure(found)},
        verdicts=verdicts(found),
        notes=[
            "Epsilon counts where it is as large as the root of a weight's second moment. A loss of the same size "
            "spread over more weights has smaller gradients: that is why it would count more in larger models."
        ],
        cost="seven minutes on two cores",
    )


def statistics_table(found: Found) -> str:
    of_source = published()
    head = ["", *(f"published, {name}" for name in of_source)]
    head += [f"{size}, {adam}" for size in NAMES for adam in ADAMS]
    rows = []
    for name in of_source["torch"]:
        row = [f"`{name}`", *(f"{column[name]:.5f}" for column in of_source.values())]
        row += [spread(statistic(found, size, adam, name), 5) for size in NAMES for adam in ADAMS]
        rows.append(row)
    return markdown_table(head, rows)


def excess_table(found: Found) -> str:
    of_source = published()
    rows: list[list[str]] = []
    for epochs, after in (("after two epochs", "2"), ("after one", "1")):
        for name in SIZED:
            told = f"{excess(of_source, name):.1f}" if after == AFTER else ""
            cells = [excesses(found, size, name, after) for size in NAMES]
            told_cells = [spread(cell, 2) if all(map(math.isfinite, cell)) else "" for cell in cells]
            rows.append([f"`{name}`, {epochs}", told, *told_cells])
    for value, words, digits in (
        ("count", "parameters", 0),
        ("small_share", "share with a root below epsilon, first update", 2),
        ("median_root", "median root of the second moment, 1e-5", 2),
    ):
        scale = 1e5 if value == "median_root" else 1.0
        cells = [spread([scale * seed["weights"][value] for seed in found[size]], digits) for size in NAMES]
        rows.append([words, "124e6" if value == "count" else "", *cells])
    return markdown_table(["", "published", *NAMES], rows)


def figure(found: Found) -> str:
    drawn, (axis,) = panels(["PyTorch's Adam over TensorFlow's"])
    sizes = [found[size][0]["weights"]["count"] for size in NAMES]
    series = {name: (sizes, [excesses(found, size, name) for size in NAMES]) for name in DRAWN}
    lines(axis, {name.removeprefix("policy/"): points for name, points in series.items()})
    of_source = published()
    for index, name in enumerate(DRAWN):
        axis.plot([PUBLISHED_SIZE], [excess(of_source, name)], "x", color=COLOURS[index])
    axis.set_xscale("log")
    axis.set_yscale("log")
    ticks(axis.yaxis, (1, 1.5, 2, 3, 4, 6))
    axis.set_xlabel("parameters")
    axis.set_ylabel("times as large")
    axis.legend(frameon=False, fontsize=8)
    return svg(drawn)
