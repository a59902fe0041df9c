"""A model that people know on word problems: synchronous, one step ahead, continuous, and TRL with the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from experiments.comparison import is_greater, keeps_gains
from experiments.figures import lines, panels, svg
from experiments.lab import Lab
from experiments.peers.reading import trailing_means
from experiments.real_model.runs import CONTINUOUS, HELD_OUT, ONE_STEP, SYNC, TRL, Found, Scale, Seen, find
from experiments.section import Section, Verdict, markdown_table, spread

WINDOW = 5
"""Steps over which rewards are averaged."""
LEVEL = 0.5
"""The mean reward whose seconds are compared."""
MARGIN = 0.05
"""Of accuracy: as good as."""
NOT_THERE = "TRL is not installed: `make .venv-trl/installed`"


def reached_s(one: Seen) -> float | None:
    """Seconds from the first step's beginning until WINDOW batches in a row had a mean reward of LEVEL."""
    means = trailing_means(one.rewards, WINDOW)
    return next((one.ended_s[step] for step, mean in enumerate(means) if mean is not None and mean >= LEVEL), None)


def section(lab: Lab, scale: Scale | None = None) -> Section:
    scale = scale or Scale()
    found = find(lab, scale)
    greedy, sampled = found.before
    trl = f"TRL {found.trl} in an environment of its own" if found.trl else NOT_THERE
    return Section(
        title="A real model: SmolLM2-135M on word problems",
        question="Does what holds for models of a million parameters hold for one of 135 M that people use, and how "
        "does it compare with TRL on the same model, data, reward, loss and learning rate?",
        setup="SmolLM2-135M-Instruct (from its four-bit package), all weights trained in float32, on word problems of "
        "one step through its chat template (GSM8K-like ones of reasoning-gym are too hard for it). "
        f"{scale.steps} steps of 4 prompts x 8 completions of at most 16 tokens, "
        f"GRPO, learning rate 2e-5, seeds {', '.join(map(str, scale.seeds))}, one run at a time, contenders in turn; "
        f"{trl}. Every prompt of training is new. Accuracy is on {HELD_OUT} held-out problems with pairs of numbers "
        f"that training never has, answered by our engine for all: it begins at {greedy:.3f} greedily and "
        f"{sampled:.3f} sampled.",
        tables={"After training": table(found.seen)},
        figures={"Reward by step and by second": figure(found.seen)},
        verdicts=verdicts(found),
        cost="an hour and a half on two idle cores",
        notes=notes(found),
    )


def table(seen: Mapping[str, Sequence[Seen]]) -> str:
    head = ["contender", "accuracy, sampled", "greedy", "reward, last steps", "completions/s", "tokens/s"]
    head += [f"reward {LEVEL:g} after, s", "all steps, s", "staleness", "most", "memory, GB"]
    return markdown_table(head, (_row(title, runs) for title, runs in seen.items()))


def _row(title: str, runs: Sequence[Seen]) -> tuple[str, ...]:
    there = [seconds for one in runs if (seconds := reached_s(one)) is not None]
    reached = spread(there, 0) if there else "never"
    return (
        title,
        spread([one.accuracy for one in runs]),
        spread([one.greedy for one in runs]),
        spread([fmean(one.rewards[-WINDOW:]) for one in runs]),
        spread([one.completions_per_s for one in runs], 2),
        spread([one.tokens_per_s for one in runs], 1),
        reached if len(there) in (0, len(runs)) else f"{reached}, {len(there)} of {len(runs)}",
        spread([one.ended_s[-1] for one in runs], 0),
        spread([one.staleness_mean for one in runs], 2),
        str(max(one.staleness_max for one in runs)),
        spread([one.peak_bytes / 1e9 for one in runs], 1),
    )


def figure(seen: Mapping[str, Sequence[Seen]]) -> str:
    drawn, (by_step, by_second) = panels(["Reward by step", "Reward by second"])
    curves = {title: _curve(runs) for title, runs in seen.items()}
    lines(by_step, {title: (steps, rewards) for title, (steps, _, rewards) in curves.items()})
    lines(by_second, {title: (seconds, rewards) for title, (_, seconds, rewards) in curves.items()})
    for axis in (by_step, by_second):
        axis.axhline(LEVEL, color="#888888", linewidth=0.8, linestyle="--")
        axis.set_ylabel(f"reward, mean of {WINDOW} batches")
    by_step.set_xlabel("step")
    by_second.set_xlabel("seconds since training began")
    by_step.legend(fontsize=7)
    return svg(drawn)


def _curve(runs: Sequence[Seen]) -> tuple[list[float], list[float], list[list[float]]]:
    """Steps, seconds (means over seeds) and rewards by seed after every WINDOW-th step."""
    length = min(len(one.rewards) for one in runs)
    window = min(WINDOW, length)
    steps = range(window - 1, length, window)
    means = [trailing_means(one.rewards, window) for one in runs]
    rewards = [[mean for own in means if (mean := own[step]) is not None] for step in steps]
    return [float(step + 1) for step in steps], [fmean(one.ended_s[step] for one in runs) for step in steps], rewards


# Verdicts


def verdicts(found: Found) -> list[Verdict]:
    """By the rules of the README."""
    seen = found.seen
    return [
        _sooner(found),
        *(_as_accurate(title, seen[title], seen[SYNC], found.before[1]) for title in (CONTINUOUS, ONE_STEP)),
        *(_faster(title, seen[title], seen[SYNC]) for title in (CONTINUOUS, ONE_STEP)),
    ]


def _sooner(found: Found) -> Verdict:
    """Compare the times. A run of theirs that never got there counts with its whole time, a lower bound: never *no*.

    *Cannot say* where a run of ours never got there.
    """
    claim, source = f"Slipstream learns sooner than {TRL}", "README, Speed"
    if TRL not in found.seen:
        return Verdict(claim, source, None, NOT_THERE)
    theirs_s, ours_s = ([reached_s(one) or one.ended_s[-1] for one in found.seen[who]] for who in (TRL, CONTINUOUS))
    got = f"reward {LEVEL:g} {_after(found.seen[CONTINUOUS])}, {TRL} {_after(found.seen[TRL])}"
    is_known = all(reached_s(one) is not None for one in found.seen[CONTINUOUS])
    if is_known:
        got += f": {fmean(theirs_s) / fmean(ours_s):.1f} times"
    holds = is_greater(theirs_s, ours_s) if is_known else None
    is_bound = any(reached_s(one) is None for one in found.seen[TRL])
    return Verdict(claim, source, (holds or None) if is_bound else holds, got)


def _after(runs: Sequence[Seen]) -> str:
    late = sum(reached_s(one) is None for one in runs)
    text = f"{spread([reached_s(one) or one.ended_s[-1] for one in runs], 0)} s"
    return f"after at least {text} ({late} of {len(runs)} never got there)" if late else f"after {text}"


def _as_accurate(title: str, runs: Sequence[Seen], sync: Sequence[Seen], before: float) -> Verdict:
    ours, theirs = ([one.accuracy for one in some] for some in (runs, sync))
    claim = f"{title.capitalize()}: as accurate as synchronous training after as many steps (margin {MARGIN:g})"
    holds = keeps_gains(ours, theirs, [before] * len(theirs), MARGIN)
    return Verdict(claim, "A, Fig. 1; L, Figs. 6, 7", holds, f"accuracy {spread(ours)}, synchronous {spread(theirs)}")


def _faster(title: str, runs: Sequence[Seen], sync: Sequence[Seen]) -> Verdict:
    ours, theirs = ([one.completions_per_s for one in some] for some in (runs, sync))
    got = f"{spread(ours, 2)} and {spread(theirs, 2)} completions/s: {fmean(ours) / fmean(theirs):.2f} times"
    return Verdict(f"{title.capitalize()}: faster than synchronous", "A, Fig. 1", is_greater(ours, theirs), got)


def notes(found: Found) -> list[str]:
    told = [
        "The same cores do all the work in every mode: a synchronous run gives all to either side in its turn, so that "
        "overlapping can only fill what is left idle.",
        "A reward is 1 for the right number, else 0, and no prompt comes twice: rewards by step and by second are the "
        "accuracy of sampled answers to problems that are new to the policy.",
        "*Memory*: the most that all processes hold together, pages that several share counted once, in the first "
        "steps of another run; TRL's largest resident set.",
    ]
    return told if found.trl else [f"{NOT_THERE}. Its row is missing.", *told]
