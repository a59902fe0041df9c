"""The run in a few sentences and numbers, and what to look at next.

Every sentence is a function of `SENTENCES` or `ADVICE`; it is empty where it cannot be told from this run, and
`tests/observe/test_advice.py` holds each against runs in which it would be wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from statistics import fmean, median

from slipstream.core.held_out import Measured
from slipstream.observe.balance import LEAST_STEPS, SMALL
from slipstream.observe.display import duration
from slipstream.observe.evaluation import MOMENTS
from slipstream.observe.health import WATCHED_STEPS, AlarmSpan
from slipstream.observe.noise import LEAST_TREND, mean_of, rises, share
from slipstream.observe.report.html import card, cards, items, part, table, text
from slipstream.observe.report.run import Run
from slipstream.observe.summary import violations
from slipstream.observe.svg import number
from slipstream.observe.svg_blocks import percent_name
from slipstream.observe.waste import WASTE

RECENT_S = 60.0  # a run that wrote a line so recently is taken to be going on
MAX_ADVICE = 6
HELD_OUT = {"eval_accuracy": "Held-out accuracy", "eval_reward": "The held-out mean reward"}


def heading(run: Run) -> str:
    summary, status = run.summary, status_of(run)
    facts = [run.name]
    if summary is not None:
        facts += [
            f"{summary.steps} steps in {_time(run)}",
            f"seed {summary.seed}",
            *([f"{summary.model_params / 1e6:,.3g} M parameters"] if summary.model_params else []),
            f"Slipstream {summary.versions.slipstream}",
            f"torch {summary.versions.torch}",
        ]
    else:
        facts.append(f"{len(run.history.steps)} steps so far")
    return (
        f'<h1>{text(run.recipe)} <span class="status {status.split()[0]}">{text(status)}</span></h1>'
        f"<p>{text(' · '.join(facts))}</p>"
    )


def _time(run: Run) -> str:
    """Of all attempts, abandoned steps included."""
    told = "an unknown time" if run.wall_s is None else duration(run.wall_s)
    return told if run.num_attempts == 1 else f"{told}, {run.num_attempts} attempts"


def status_of(run: Run) -> str:
    """done, failed, interrupted; running or not finished where there is no summary."""
    if run.is_held:
        return "running"
    if run.summary is not None and run.summary.status != "running":
        return run.summary.status
    return "running" if run.written_s < RECENT_S else "not finished"


def overview(run: Run) -> str:
    pictures = [
        _contradictions(run),
        f'<div class="tiles">{"".join(_tile(value, name) for value, name in tiles(run))}</div>',
        cards(_sentences(run), _next(run)),
        _alarms(run.alarms),
    ]
    return part("overview", "In short", opening(run), pictures)


def opening(run: Run) -> str:
    """What this page is."""
    status = status_of(run)
    if status == "running":
        return f"The run goes on; its newest line was {duration(run.written_s)} old when this page was made."
    if status == "not finished":
        return "The run did not end by itself, or was killed; this page shows what its files hold."
    if status == "failed":
        return "The run failed; this page shows how far it came."
    return "Point at any picture for its numbers."


def tiles(run: Run) -> list[tuple[str, str]]:
    """(a number, what it is) of those to see first."""
    summary, history = run.summary, run.history
    found: list[tuple[str, str]] = []
    before, after = run.held_out
    if after.accuracy is not None:
        change = f"{percent(before.accuracy).removesuffix('%')} → {percent(after.accuracy)}"
        found.append((change, "held-out accuracy, greedy"))
    elif after.reward is not None:
        found.append((f"{mean(before.reward)} → {mean(after.reward)}", "held-out mean reward, greedy"))
    elif history.steps:
        rewards = [value for _, value in history.points("reward")]
        found.append(
            (f"{number(rewards[0])} → {number(rewards[-1])}" if rewards else "?", "reward, first and last step")
        )
    if run.evaluation is not None and "win_rate" in run.evaluation["after"]["gold"]:
        rates = [run.evaluation[moment]["gold"]["win_rate"]["mean"] for moment in MOMENTS]
        change = " → ".join("?" if rate is None else f"{rate:.1%}" for rate in rates).replace("% →", " →")
        found.append((change, "gold win rate against references"))
    if history.steps:
        found.append((f"{number(median(value for _, value in history.points('step_s')))} s", "a step, median"))
    if summary is not None:
        trained, sampled = summary.throughput.trained_tokens_per_s, summary.throughput.generated_tokens_per_s
        if history.steps and trained is not None and sampled is not None:
            found.append((f"{trained:,.0f}", f"trained tokens a second ({sampled:,.0f} sampled)"))
    if run.staleness:
        bound = "no bound" if run.bound is None else f"bound {run.bound}"
        found.append((f"{run.mean_staleness:.2f}", f"steps old is a trained token (most {run.max_staleness}, {bound})"))
    if (share := run.wasted_share) is not None:
        found.append((f"{share:.0%}", "as many tokens were wasted as trained on"))
    trainer, generators = run.idle("trainer"), run.idle("generator")
    if trainer is not None and generators is not None:
        found.append((f"{trainer:.0%}", f"of its time the trainer waited (generators {generators:.0%})"))
    return found


def percent(accuracy: float | None) -> str:
    return "?" if accuracy is None else f"{accuracy:.1%}"


def mean(reward: float | None) -> str:
    return "?" if reward is None else number(reward)


def sentences(run: Run) -> list[str]:
    """What happened, in plain words and numbers."""
    return [told for sentence in SENTENCES if (told := sentence(run))]


def advice(run: Run) -> list[str]:
    """What to look at or try next, the most urgent first."""
    return [told for sentence in ADVICE if (told := sentence(run))][:MAX_ADVICE]


# What happened


def learned(run: Run) -> str:
    """Held-out scores before and after, and whether they differ by more than the noise of so many prompts."""
    summary = run.summary
    before, after = run.held_out
    if summary is not None and summary.eval.after is not None and (told := _held_out(before, after)):
        count = summary.eval.after.num_prompts
        chance = may_be_chance(before.accuracy, after.accuracy, count)  # of a mean reward the error is not known
        never = summary.eval.never_right
        suffix = "" if never is None else f" {never}"
        return f"{told} ({count} prompts, greedy) in {summary.steps} steps{chance}.{suffix}"
    return _rewarded([value for _, value in run.history.points("reward")])


def may_be_chance(before: float | None, after: float | None, num_prompts: int) -> str:
    """A clause where two shares of so many prompts differ by no more than noise."""
    if before is None or after is None or before == after:
        return ""
    return "" if share(before, num_prompts).differs(share(after, num_prompts)) else ", which may be chance"


def _rewarded(rewards: list[float]) -> str:
    """Of a run without held-out prompts: how its reward began and ended; the mean where these differ by noise alone."""
    if not rewards:
        return "No step was trained."
    steps = f"{len(rewards)} step{'s' if len(rewards) > 1 else ''}"
    if len(rewards) >= 2 * LEAST_TREND:
        length = max(LEAST_TREND // 2, len(rewards) // 10)
        first, last = mean_of(rewards[:length]), mean_of(rewards[-length:])
        if first is not None and last is not None and first.differs(last):
            means = f"means of the first and last {length} of {steps}"
            return f"The reward went from {first.value:.3f} to {last.value:.3f} ({means})."
    return f"The reward was {fmean(rewards):.3f} (mean of {steps})."


def _held_out(before: Measured, after: Measured) -> str:
    """How the held-out numbers changed: accuracy, mean reward, its parts where it has several, of those there are."""

    def change(first: float | None, last: float, words: Callable[[float], str]) -> str:
        return f"to {words(last)}" if first is None else f"from {words(first)} to {words(last)}"

    told = []
    if after.accuracy is not None:
        told.append(f"held-out accuracy went {change(before.accuracy, after.accuracy, percent)}")
    if after.reward is not None:
        name = "the mean reward" if told else "the held-out mean reward went"
        told.append(f"{name} {change(before.reward, after.reward, mean)}")
    if len(after.reward_parts) > 1:
        told += [
            f"{name} {change(before.reward_parts.get(name), last, mean)}" for name, last in after.reward_parts.items()
        ]
    sentence = ", ".join(told)
    return sentence[:1].upper() + sentence[1:]


def aged(run: Run) -> str:
    oldest = run.max_staleness
    if oldest is None:
        return ""
    if oldest == 0:
        return "Every token was trained on by the very policy that sampled it."
    bound = f", as promised at most {run.bound}" if run.bound is not None and oldest <= run.bound else ""
    bound = "; no bound was promised" if run.bound is None else bound
    return f"A trained token was {run.mean_staleness:.2f} steps old on average and {oldest} at most{bound}."


def starved(run: Run) -> str:
    return run.times.verdict


def wasted(run: Run) -> str:
    """What of sampling no step trained. What was left when a run ended early goes on with it, and of a short run it is
    large: neither is waste."""
    waste = {cause: tokens for cause, tokens in run.wasted.items() if cause != "left"}
    trained = sum(run.history.clocks["tokens"][-1:])
    if not waste or not trained or len(run.history.steps) < LEAST_STEPS:
        return ""
    total, worst = sum(waste.values()), max(waste, key=lambda cause: waste[cause])
    if total < SMALL * trained:
        return ""
    most = "most of them" if waste[worst] > total / 2 else "the largest part"
    return f"Wasted: {percent_name(total / trained)} as many tokens as were trained on, {most} {WASTE[worst]}."


def rang(run: Run) -> str:
    """That none rang says something where all could have."""
    if names := sorted({alarm.name for alarm in run.alarms}):
        return f"Alarms that rang: {', '.join(names)}."
    is_watched = run.config.get("health", {}).get("alarms", True) and len(run.history.steps) >= WATCHED_STEPS
    return "No alarm rang." if is_watched else ""


# What to look at next


def go_on(run: Run) -> str:
    """Only with a checkpoint to go on from, and not where the same numbers would end it again."""
    has_checkpoint = any(re.fullmatch(r"step_\d+", path.name) for path in (run.path / "checkpoints").glob("step_*"))
    is_refused = any(run.path.glob("refused_step_*.json"))
    is_over = status_of(run) not in ("failed", "interrupted", "not finished")
    if is_over or is_refused or not has_checkpoint:
        return ""
    return f"Go on from the last checkpoint: slipstream run --resume {run.path}"


def alarming(run: Run) -> str:
    """The warning that began last, of those that were on at the end."""
    on = [alarm for alarm in run.alarms if alarm.severity == "warning" and alarm.ended is None]
    return f"{on[-1].name.replace('_', ' ')}: {on[-1].text}" if on else ""


def use_idle(run: Run) -> str:
    balance = run.times.balance
    return "" if balance is None or balance.dial is None else f"Use what is idle: {balance.dial.effect}."


def go_further(run: Run) -> str:
    """Whether what was learned still grew at the end, of a run that is done.

    By the last two held-out scores, where there are three, and they differ by more than the noise of so many prompts;
    else by the trend of the rewards (`noise.rises`), unless the last held-out score lies below the one before. That
    something no longer grows is never said: rewards are of the prompts that still teach, which get harder as a policy
    gets better.
    """
    if status_of(run) != "done" or run.summary is None:
        return ""
    count = 0 if run.summary.eval.after is None else run.summary.eval.after.num_prompts
    for name, what in HELD_OUT.items():
        held_out = [share(value, count) for _, value in run.history.evaluated(name)]
        if len(held_out) > 2:
            before, after = held_out[-2:]
            if after.value < before.value:
                return ""
            if after.differs(before):
                return f"{what} still rose at the end: more steps may help."
    is_rising = rises([value for _, value in run.history.points("reward")])
    return "The reward still rose at the end: more steps may help." if is_rising else ""


def open_timeline(run: Run) -> str:
    if not (run.path / "timeline.json").exists():
        return ""
    return "Open timeline.json in ui.perfetto.dev to see who waits for whom, with arrows for groups and weights."


def watch(run: Run) -> str:
    return f"Go through it in the browser, rollouts token by token: slipstream watch {run.path}"


def put_beside(run: Run) -> str:
    return f"Put it beside another run: slipstream report {run.path} OTHER"


SENTENCES: tuple[Callable[[Run], str], ...] = (learned, aged, starved, wasted, rang)
ADVICE: tuple[Callable[[Run], str], ...] = (go_on, alarming, use_idle, go_further, open_timeline, watch, put_beside)


def _sentences(run: Run) -> str:
    return card("What happened", "", items(sentences(run), kind="plain"))


def _next(run: Run) -> str:
    return card("What to look at next", "", items(advice(run), kind="plain"))


def _tile(value: str, name: str) -> str:
    return f'<div class="tile"><b>{text(value)}</b><span>{text(name)}</span></div>'


def _contradictions(run: Run) -> str:
    found = violations(run.summary) if run.summary else []
    note = "Its files break an identity that always holds. Please report it as a bug."
    return card("This run contradicts itself", note, items(found), size="wide bad") if found else ""


def _alarms(alarms: list[AlarmSpan]) -> str:
    """What looked wrong while it went on; nothing where nothing did."""
    rows = [
        [
            text(one.name.replace("_", " ")),
            f'<span class="severity {one.severity}">{one.severity}</span>',
            f"{one.began} – {'the end' if one.ended is None else one.ended}",
            number(one.value),
            number(one.threshold),
            text(one.text),
        ]
        for one in alarms
    ]
    note = "What looked wrong in the numbers. Each is a suspicion, not a verdict; charts are shaded where one was on."
    head = ["alarm", "", "steps", "value", "threshold", "what it means"]
    return card("Alarms", note, table(head, rows, kind="alarms", stacks=True), size="wide", folds=True) if rows else ""
