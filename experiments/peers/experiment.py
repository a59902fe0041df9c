"""TRL and the scheduling policies of our peers beside ours: pace, waste, staleness, who is left out, learning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from matplotlib.axes import Axes

from experiments.figures import COLOURS, MARKERS, lines, panels, ranges, svg, ticks
from experiments.lab import Lab
from experiments.peers.contenders import CONTENDERS, Contender, K
from experiments.peers.reading import BINS, LONGEST, TARGET, WINDOW, Seen, trailing_means
from experiments.peers.runs import Found, Scale, find
from experiments.peers.verdicts import NOT_THERE, verdicts
from experiments.section import Section, markdown_table, spread

DRAWN = ("trl_grpo", "sync", "ours", "ours_k8", "drop_stale", "areal", "finish_order")
"""In the panels that would be unreadable with all of them."""
OTHER = "#bbbbbb"
"""The colour of the others' bars."""
SECONDS = (2, 5, 10, 20, 50, 100)
"""Where the logarithmic axis of time has ticks."""
PANELS = (
    "Left: reward against seconds. Middle: pace, and mean staleness behind the bar. "
    "Right: staleness when trained, by length of the answer"
)


def section(lab: Lab, scale: Scale | None = None) -> Section:
    scale = scale or Scale()
    found = find(lab, scale)
    return Section(
        title="Against peers, on one machine",
        question="Compared with TRL, and with the rules by which other asynchronous systems admit, drop, drain and "
        "order: how fast is Slipstream, how much work is discarded, how stale are the trained tokens, which answers "
        "are left out, and how soon has the model learned?",
        setup=setup(found, scale),
        tables=tables(found.seen),
        figures={PANELS: figure(found.seen)},
        verdicts=verdicts(found),
        cost="about half an hour on two idle cores",
        notes=notes(found),
    )


def setup(found: Found, scale: Scale) -> str:
    trl = f"TRL {found.trl} has all cores, in an environment of its own" if found.trl else NOT_THERE
    return (
        "All start from one checkpoint of 0.6 M parameters that counts down or up, and learn to count down: 16 prompts "
        f"of 8 completions a step, one update each, {scale.steps} steps. Answers have 6 to 180 tokens, lognormal with "
        f"sigma 1, as their prompts ask. Policies that use k have k = {K}, one of Slipstream's 8. Other systems' "
        "rules run in Slipstream's scheduler, with its engine, channels, weight transfer and kept caches, the same for "
        f"all. {trl}. Seeds {', '.join(map(str, scale.seeds))}; contenders run in turn. `experiments/peers/README.md` "
        "has the other settings and the rules for the verdicts."
    )


def notes(found: Found) -> list[str]:
    told = [
        "TRL decodes a batch until its longest answer is done, and then trains it: nothing is discarded or stale, and "
        "its pace includes padding.",
        "*Drain* and *abort and re-prefill* are Slipstream's schedule with another way to load weights. In the "
        "systems named, all engines stop for that together; a test with one generator cannot show this.",
        "Mean staleness is over tokens, length bias over groups. *left*: sampled and not trained when the run ended.",
    ]
    return told if found.trl else [f"{NOT_THERE}. Its rows and verdicts are missing.", *told]


# Tables


def tables(seen: Mapping[str, Sequence[Seen]]) -> dict[str, str]:
    reached = f"reward {TARGET:g} after"
    pace = ("contender", "whose", "completions/s", f"{reached}, s", "steps", "accuracy, end", "trainer waits, %")
    longest = f"longest {100 * LONGEST:g} % trained, %"
    trained = (
        "contender",
        "discarded, %",
        "left, %",
        "read again, %",
        "staleness",
        "largest",
        "length bias, %",
        longest,
    )
    return {
        "How fast, and how soon": markdown_table(pace, (_pace(*one) for one in seen.items()), left=2),
        "Discarded tokens, staleness of the trained ones (the largest is over all seeds), and answers left out": (
            markdown_table(trained, (_trained(*one) for one in seen.items()))
        ),
    }


def _pace(name: str, runs: Sequence[Seen]) -> tuple[str, ...]:
    return (
        CONTENDERS[name].title,
        CONTENDERS[name].whose,
        spread([one.completions_per_s for one in runs], 0),
        _reached([one.reached_s for one in runs], 1),
        _reached([one.reached for one in runs], 0),
        spread([one.accuracy for one in runs]),
        spread([100 * one.trainer_idle for one in runs if one.trainer_idle is not None], 0),
    )


def _trained(name: str, runs: Sequence[Seen]) -> tuple[str, ...]:
    return (
        CONTENDERS[name].title,
        spread([100 * one.discarded for one in runs], 1),
        spread([100 * one.left for one in runs], 1),
        spread([100 * one.reread for one in runs], 1),
        spread([one.staleness_mean for one in runs], 2),
        str(max(one.staleness_max for one in runs)),
        spread([100 * one.length_bias for one in runs], 1),
        spread([100 * one.longest_trained for one in runs], 0),
    )


def _reached(values: Sequence[float | None], digits: int) -> str:
    """Of the seeds that got there, and how many did where not all."""
    there = [value for value in values if value is not None]
    text = spread(there, digits) if there else "never"
    return text if len(there) in (0, len(values)) else f"{text}, {len(there)} of {len(values)}"


# Figure


def figure(
    seen: Mapping[str, Sequence[Seen]],
    contenders: Mapping[str, Contender] = CONTENDERS,
    shown: Sequence[str] = DRAWN,
) -> str:
    """Of `contenders`; those `shown` have a curve."""
    figure, (learning, pace, age) = panels(["Reward", "Pace and staleness", "Age when trained"])
    drawn = {name: seen[name] for name in shown if name in seen}
    lines(learning, {contenders[name].title: _curve(runs) for name, runs in drawn.items()})
    learning.axhline(TARGET, color="#888888", linewidth=0.8, linestyle="--")
    learning.set(xscale="log", xlabel="seconds since RL began", ylabel=f"reward, mean of {WINDOW} batches")
    learning.legend(fontsize=7)
    ticks(learning.xaxis, SECONDS)
    _draw_paces(pace, seen, list(drawn))
    _draw_ages(age, {contenders[name].title: runs for name, runs in drawn.items()})
    return svg(figure)


def _draw_paces(axis: Axes, seen: Mapping[str, Sequence[Seen]], drawn: Sequence[str]) -> None:
    """A bar for each, in the colour of its curve; behind it how stale what it trains is."""
    for place, (name, runs) in enumerate(seen.items()):
        paces = [one.completions_per_s for one in runs]
        color = COLOURS[drawn.index(name) % len(COLOURS)] if name in drawn else OTHER
        axis.barh(place, fmean(paces), xerr=ranges([paces]), color=color, error_kw={"elinewidth": 0.8, "capsize": 2})
        staleness = fmean(one.staleness_mean for one in runs)
        axis.annotate(f"{staleness:.1f}", (max(paces), place), xytext=(4, -2), textcoords="offset points", fontsize=7)
    axis.set_yticks(range(len(seen)), list(seen), fontsize=7)
    axis.invert_yaxis()
    axis.margins(x=0.12)
    axis.set(xlabel="completions/s; behind the bar: mean staleness, steps")


def _draw_ages(axis: Axes, drawn: Mapping[str, Sequence[Seen]]) -> None:
    places = range(len(BINS) + 1)
    for index, (title, runs) in enumerate(drawn.items()):
        ages = {place: [age for one in runs if (age := one.age[place]) is not None] for place in places}
        means = {place: fmean(own) for place, own in ages.items() if own}
        axis.plot(list(means), list(means.values()), label=title, **_style(index))
    axis.set_xticks(list(places), [*(f"to {edge}" for edge in BINS), "more"])
    axis.set(xlabel="tokens of the answer", ylabel="age of the oldest token, steps", ylim=(0, None))


def _style(index: int) -> dict[str, object]:
    return {"marker": MARKERS[index % len(MARKERS)], "color": COLOURS[index % len(COLOURS)], "markersize": 4}


def _curve(runs: Sequence[Seen]) -> tuple[list[float], list[list[float]]]:
    """(seconds, rewards by seed) after every `WINDOW`-th step, seconds being means over seeds; of less, at the end."""
    length = min(len(one.rewards) for one in runs)
    window = min(WINDOW, length)
    steps = range(window - 1, length, window)
    means = [trailing_means(one.rewards, window) for one in runs]
    rewards = [[mean for own in means if (mean := own[step]) is not None] for step in steps]
    return [fmean(one.ended_s[step] for one in runs) for step in steps], rewards
