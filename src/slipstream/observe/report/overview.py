"""The run in a few sentences and numbers, and what to look at next.

Every sentence is a function of `SENTENCES` or `ADVICE`; it is empty where it cannot be told from this run, and
`tests/observe/test_advice.py` holds each against runs in which it would be wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from shlex import quote
from statistics import fmean, median

from slipstream.core.held_out import Measured
from slipstream.core.lora_section import LoraConfig
from slipstream.core.plain import plural
from slipstream.observe.balance import LEAST_STEPS, SMALL
from slipstream.observe.display import duration
from slipstream.observe.evaluation import MOMENTS
from slipstream.observe.health import WATCHED_STEPS, AlarmSpan
from slipstream.observe.noise import LEAST_TREND, Estimate, mean_of, rises, share
from slipstream.observe.report.data import RunData
from slipstream.observe.report.html import card, cards, items, part, table, text
from slipstream.observe.summary import TrainedRows, violations
from slipstream.observe.svg import number
from slipstream.observe.svg_blocks import percent_name
from slipstream.observe.waste import CHOSEN

RECENT_S = 60.0  # a run that wrote a line so recently is taken to be going on
MAX_ADVICE = 6
FEW_SIGNALS = 0.2  # of groups: the quickstart ends at a third, the alarm `no_signal` rings at a tenth
LEAST_GROUPS = 64  # of the alarm `equal_rewards`


def heading(run: RunData) -> str:
    summary, status = run.summary, status_of(run)
    facts = [run.name, f"{plural(len(run.history.steps), 'step')} so far"]
    if summary is not None:
        took = "an unknown time" if run.wall_s is None else duration(run.wall_s)  # all attempts, to their ends
        attempts = "" if run.num_attempts == 1 else f", {run.num_attempts} attempts"
        if attempts and run.wall_s is not None and (later_s := run.wall_s - summary.total_s) >= 1:
            attempts += f", {duration(later_s)} of it after the checkpoints that it went on from"
        size = [f"{summary.model_params / 1e6:,.3g} M parameters"] if summary.model_params else []
        if summary.adapter_params:
            adapters = LoraConfig.model_validate(run.config.get("model", {}).get("lora", {}))
            size = [f"{adapters.in_words}, {summary.trainable}"]
        versions = [f"Slipstream {summary.versions.slipstream}", f"torch {summary.versions.torch}"]
        what = plural(summary.steps, "step") if run.has_rl else ", ".join(summary.stages)
        done = f"{what} in {took}{attempts}"
        facts = [run.name, done, f"seed {summary.seed}", *size, *versions]
    shown = f'<span class="status {status.split()[0]}">{text(status)}</span>'
    return f"<h1>{text(run.recipe)} {shown}</h1><p>{text(' · '.join(facts))}</p>"


def status_of(run: RunData) -> str:
    """done, failed, interrupted; running or not finished where there is no summary."""
    if run.is_held:
        return "running"
    if run.summary is not None and run.summary.status != "running":
        return run.summary.status
    return "running" if run.written_s < RECENT_S else "not finished"


def overview(run: RunData) -> str:
    shown = (f'<div class="tile"><b>{text(value)}</b><span>{text(name)}</span></div>' for value, name in tiles(run))
    told = {"What happened": sentences(run), "What to look at next": advice(run)} if run.has_rl else {}
    lists = cards(*(card(title, "", items(lines, kind="plain")) for title, lines in told.items()))
    pictures = [_contradictions(run), f'<div class="tiles">{"".join(shown)}</div>', lists, _alarms(run.alarms)]
    return part("overview", "In short", opening(run), pictures)


def opening(run: RunData) -> str:
    """Introduce the page."""
    words = {
        "running": f"The run goes on; its newest line was {duration(run.written_s)} old when this page was made.",
        "not finished": "The run did not end by itself, or was killed; this page shows what its files hold.",
        "failed": "The run failed; this page shows how far it came.",
    }
    told = words.get(status_of(run), "Point at any picture for its numbers.")
    if status_of(run) == "done" and run.summary is not None and (cause := run.summary.stopped_because) is not None:
        told = f"The run was ended by {cause}, before the last of its steps. {told}"
    reason = None if run.summary is None or status_of(run) != "failed" else run.summary.error
    return told if reason is None else f"{told} The reason: {reason}"


def tiles(run: RunData) -> list[tuple[str, str]]:
    """(a number, what it is) of those to see first."""
    summary, history = run.summary, run.history
    found: list[tuple[str, str]] = []
    before, after = run.held_out
    if after.accuracy is not None:
        change = f"{percent(before.accuracy).removesuffix('%')} → {percent(after.accuracy)}"
        found.append((change, "held-out accuracy, greedy"))
    if after.reward is not None:
        chance = reward_may_be_chance(before, after)
        found.append((f"{mean(before.reward)} → {mean(after.reward)}", f"held-out mean reward, greedy{chance}"))
    if not found and (rewards := history.values("reward")):
        if (trend := _trend(rewards)) is not None:
            first, last, length = trend
            found.append((f"{number(first)} → {number(last)}", f"reward, means of the first and last {length} steps"))
        else:
            found.append((number(fmean(rewards)), f"reward, mean of {plural(len(rewards), 'step')}"))
    if run.evaluation is not None and "win_rate" in run.evaluation["after"]["gold"]:
        rates = [run.evaluation[moment]["gold"]["win_rate"]["mean"] for moment in MOMENTS]
        change = " → ".join("?" if rate is None else f"{rate:.1%}" for rate in rates).replace("% →", " →")
        found.append((change, "gold win rate against references"))
    if not run.has_rl and summary is not None and (measured := summary.stages.get("dpo", {}).get("held_out")):
        change = " → ".join(percent(measured[moment]["accuracy"]) for moment in MOMENTS)
        found.append((change, "held-out preferences in the right order"))
    if history.steps:
        found.append((f"{number(median(history.values('step_s')))} s", "a step, median"))
    if summary is not None:
        trained, sampled = summary.throughput.trained_tokens_per_s, summary.throughput.generated_tokens_per_s
        if history.steps and trained is not None and sampled is not None:
            found.append((f"{trained:,.0f}", f"trained tokens a second ({sampled:,.0f} sampled)"))
    if run.staleness:
        bound = "no bound" if run.bound is None else f"bound {run.bound}"
        found.append((f"{run.mean_staleness:.2f}", f"steps old is a trained token (most {run.max_staleness}, {bound})"))
    if (wasted_share := run.wasted_share) is not None and len(history.steps) >= LEAST_STEPS:
        found.append((f"{wasted_share:.0%}", "as many tokens were wasted as trained on"))
    trainer, generators = run.idle("trainer"), run.idle("generator")
    if trainer is not None and generators is not None:
        found.append((f"{trainer:.0%}", f"of its time the trainer waited (generators {generators:.0%})"))
    return found


def percent(accuracy: float | None) -> str:
    return "?" if accuracy is None else f"{accuracy:.1%}"


def mean(reward: float | None) -> str:
    return "?" if reward is None else number(reward)


def sentences(run: RunData) -> list[str]:
    """Return sentences about the run, in plain words and numbers."""
    return [told for sentence in SENTENCES if (told := sentence(run))]


def advice(run: RunData) -> list[str]:
    """Return sentences about what to look at or try next, the most urgent first."""
    return [told for sentence in ADVICE if (told := sentence(run))][:MAX_ADVICE]


# What happened


def learned(run: RunData) -> str:
    """Held-out scores before and after, and whether they differ by more than the noise of so many prompts."""
    before, after = run.held_out
    if run.summary is not None and run.evaluations.after is not None and (told := _held_out(before, after)):
        count = run.num_held_out
        chance = may_be_chance(run.accuracy_of(before), run.accuracy_of(after))
        chance = reward_may_be_chance(before, after) if after.accuracy is None else chance
        steps = plural(run.summary.steps, "step")
        never = run.summary.eval.never_right
        more = _sampled(run) + ("" if never is None else f" {never}")
        return f"{told} ({plural(count, 'prompt')}, greedy) in {steps}{chance}.{more}"
    return _rewarded(run.history.values("reward"))


def may_be_chance(before: Estimate | None, after: Estimate | None) -> str:
    """A clause where two scores differ by no more than noise."""
    if before is None or after is None or before.value == after.value:
        return ""
    return "" if before.differs(after) else ", which may be chance"


def reward_may_be_chance(before: Measured, after: Measured) -> str:
    """A clause where two mean rewards differ by no more than the noise of their prompts."""
    if before.reward is None or after.reward is None:
        return ""
    if before.reward_error is None or after.reward_error is None:  # of runs that did not measure it
        return ""
    return may_be_chance(Estimate(before.reward, before.reward_error), Estimate(after.reward, after.reward_error))


def _rewarded(rewards: list[float]) -> str:
    """Say how the reward began and ended, for a run without held-out prompts; its mean where these differ by noise."""
    if not rewards:
        return "No step was trained."
    steps = plural(len(rewards), "step")
    if (trend := _trend(rewards)) is not None:
        first, last, length = trend
        return f"The reward went from {first:.3f} to {last:.3f} (means of the first and last {length} of {steps})."
    return f"The reward was {fmean(rewards):.3f} (mean of {steps})."


def _trend(rewards: list[float]) -> tuple[float, float, int] | None:
    """Return the means of the first and the last so many rewards; None where they differ by no more than noise."""
    if len(rewards) < 2 * LEAST_TREND:
        return None
    length = max(LEAST_TREND // 2, len(rewards) // 10)
    first, last = mean_of(rewards[:length]), mean_of(rewards[-length:])
    if first is None or last is None or not first.differs(last):
        return None
    return first.value, last.value, length


def _held_out(before: Measured, after: Measured) -> str:
    """How the held-out numbers changed: accuracy, mean reward, its parts where it has several, of those there are."""
    told = []
    if after.accuracy is not None:
        told.append(_change("held-out accuracy", before.accuracy, after.accuracy, percent))
    if after.reward is not None:
        name = "the mean reward" if told else "the held-out mean reward"
        told.append(_change(name, before.reward, after.reward, mean, is_first=not told))
    if len(after.reward_parts) > 1:
        parts = ((name, before.reward_parts.get(name), last) for name, last in after.reward_parts.items())
        told += [_change(*part, mean, is_first=not told) for part in parts]
    sentence = ", ".join(told)
    return sentence[:1].upper() + sentence[1:]


def _change(
    name: str, first: float | None, last: float, words: Callable[[float], str], *, is_first: bool = True
) -> str:
    """A clause about a number before and after; only the first of several has a verb where it changed."""
    if first is not None and words(first) == words(last):
        return f"{name} stayed at {words(last)}"
    ends = f"to {words(last)}" if first is None else f"from {words(first)} to {words(last)}"
    return f"{name} went {ends}" if is_first else f"{name} {ends}"


def _sampled(run: RunData) -> str:
    """A sentence where greedy answers are as right as they were and sampled ones are not."""
    found = run.evaluations
    if found.before is None or found.after is None:
        return ""
    (before, after), is_same = (found.before, found.after), found.before.accuracy == found.after.accuracy
    first, last = before.sampled_accuracy, after.sampled_accuracy
    if not is_same or first is None or last is None or percent(first) == percent(last):
        return ""
    chance = may_be_chance(run.accuracy_of(before.sampled), run.accuracy_of(after.sampled))
    return f" Sampled at temperature 1, it went from {percent(first)} to {percent(last)}{chance}."


def taught(run: RunData) -> str:
    """Say how far the policy was from its teacher at first and at last, where it learned from one."""
    distances = run.history.values("teacher_kl")
    if not distances:
        return ""
    agreed = mean_of(run.history.values("teacher_agreement")[-LEAST_TREND:])
    alike = "" if agreed is None else f"; at last both like one token best in {percent_name(agreed.value)} of places"
    if (trend := _trend(distances)) is not None:
        first, last, length = trend
        steps = f"means of the first and last {plural(length, 'step')}"
        return f"The KL to the teacher went from {first:.3g} to {last:.3g} nats per token ({steps}){alike}."
    return f"The KL to the teacher was {fmean(distances):.3g} nats per token{alike}."


def aged(run: RunData) -> str:
    oldest = run.max_staleness
    if oldest is None:
        return ""
    if oldest == 0:
        return "Every token was trained on by the very policy that sampled it."
    bound = f", as promised at most {run.bound}" if run.bound is not None and oldest <= run.bound else ""
    bound = "; no bound was promised" if run.bound is None else bound
    return f"A trained token was {run.mean_staleness:.2f} steps old on average and {oldest} at most{bound}."


def starved(run: RunData) -> str:
    return run.times.verdict


def wasted(run: RunData) -> str:
    """Say how much of what was sampled no step trained.

    Of a short run what was left is large, too.
    """
    waste = {cause: tokens for cause, tokens in run.wasted.items() if cause not in CHOSEN}
    trained = run.tokens_trained
    if not waste or not trained or len(run.history.steps) < LEAST_STEPS:
        return ""
    total, worst = sum(waste.values()), max(waste, key=lambda cause: waste[cause])
    if total < SMALL * trained:
        return ""
    most = "most of them" if waste[worst] > total / 2 else "the largest part"
    return f"Wasted: {percent_name(total / trained)} as many tokens as were trained on, {most} {run.wasted_by(worst)}."


def shared(run: RunData) -> str:
    """Say how many rows of the trainer were saved by contexts that begin alike, where that is some."""
    rows = TrainedRows.of(run.history.steps)
    return "" if rows is None or rows.saved_frac < SMALL else f"The trainer computed {rows.in_words}."


def rang(run: RunData) -> str:
    """Name the alarms that rang; that none did is said only where all of them could have."""
    if names := sorted({alarm.name for alarm in run.alarms}):
        return f"Alarms that rang: {', '.join(names)}."
    is_watched = run.config.get("health", {}).get("alarms", True) and len(run.history.steps) >= WATCHED_STEPS
    return "No alarm rang." if is_watched else ""


# What to look at next


def few_signals(run: RunData) -> str:
    """Say that few groups had a signal, where many were scored and most did not fail."""
    steps = [one for one in run.history.steps if {"no_signal_frac", "groups_scored"} <= one.keys()]
    num_scored = sum(one["groups_scored"] for one in steps)
    with_signal = sum(one["groups_scored"] * (1.0 - one["no_signal_frac"]) for one in steps)
    failed = sum(one["groups_scored"] * one.get("scored_failed_frac", 0.0) for one in steps)
    if num_scored < LEAST_GROUPS or with_signal >= FEW_SIGNALS * num_scored or 2 * failed >= num_scored:
        return ""
    waits = " and the trainer waits for other groups" if run.config.get("loss", {}).get("skip_no_signal", True) else ""
    return (
        f"Only {percent_name(with_signal / num_scored)} of the groups had a signal: in the others all completions got "
        f"the same reward, so nothing is learned from them{waits}. Where all fail, try an easier task, a warm start, "
        "partial rewards, more completions_per_group or a higher generator.temperature; where all succeed, the task is "
        "learned."
    )


def go_on(run: RunData) -> str:
    """Suggest a resume, where there is a checkpoint and no update that would fail again."""
    has_checkpoint = any(re.fullmatch(r"step_\d+", path.name) for path in (run.path / "checkpoints").glob("step_*"))
    is_refused = any(run.path.glob("refused_step_*.json"))
    is_over = status_of(run) not in ("failed", "interrupted", "not finished")
    if is_over or is_refused or not has_checkpoint:
        return ""
    call = None if run.summary is None else run.summary.resume_call
    return f"Go on from the last checkpoint: {call or f'slipstream run --resume {quote(str(run.path))}'}"


def alarming(run: RunData) -> str:
    """The warning that began last, of those that were on at the end."""
    said = ("no_signal", "equal_rewards") if few_signals(run) else ()
    on = [one for one in run.alarms if one.severity == "warning" and one.ended is None and one.name not in said]
    return f"{on[-1].name.replace('_', ' ')}: {on[-1].text}" if on else ""


def use_idle(run: RunData) -> str:
    balance = run.times.balance
    return "" if balance is None or balance.dial is None else f"Use what is idle: {balance.dial.effect}."


def go_further(run: RunData) -> str:
    """Whether what was learned still grew at the end, of a run that is done.

    By the last two held-out scores, where there are three, and they differ by more than the noise of so many prompts;
    else by the trend of the rewards (`noise.rises`), unless the last held-out score lies below the one before. That
    something no longer grows is never said: rewards are of the prompts that still teach, which get harder as a policy
    gets better.
    """
    if status_of(run) != "done" or run.summary is None:
        return ""
    judged, errors = (dict(run.history.points(name)) for name in ("eval_num_judged", "eval_reward_error"))
    accuracies, rewards = (run.history.points(name) for name in ("eval_accuracy", "eval_reward"))
    shares = [share(value, round(judged.get(version, run.num_held_out))) for version, value in accuracies]
    means = [Estimate(value, errors.get(version)) for version, value in rewards]
    for what, held_out in {"Held-out accuracy": shares, "The held-out mean reward": means}.items():
        if len(held_out) > 2:
            before, after = held_out[-2:]
            if after.value < before.value:
                return ""
            if after.differs(before):
                return f"{what} still rose at the end: more steps may help."
    is_rising = rises(run.history.values("reward"))
    return "The reward still rose at the end: more steps may help." if is_rising else ""


def open_timeline(run: RunData) -> str:
    if not (run.path / "timeline.json").exists():
        return ""
    return "Open timeline.json in ui.perfetto.dev to see who waits for whom, with arrows for groups and weights."


def watch(run: RunData) -> str:
    return f"Go through it in the browser, rollouts token by token: slipstream watch {quote(str(run.path))}"


def put_beside(run: RunData) -> str:
    return f"Put it beside another run: slipstream report {quote(str(run.path))} OTHER"


SENTENCES: tuple[Callable[[RunData], str], ...] = (learned, taught, aged, starved, wasted, shared, rang)
ADVICE: tuple[Callable[[RunData], str], ...] = (
    few_signals,
    go_on,
    alarming,
    use_idle,
    go_further,
    open_timeline,
    watch,
    put_beside,
)


def _contradictions(run: RunData) -> str:
    found = violations(run.summary) if run.summary else []
    note = "Its files break an identity that always holds. Please report it as a bug."
    return card("This run contradicts itself", note, items(found), size="wide bad") if found else ""


def _alarms(alarms: list[AlarmSpan]) -> str:
    """List the alarms that rang; nothing where none did."""
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
