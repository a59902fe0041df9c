"""The run in a few sentences and numbers, and what to look at next."""

from __future__ import annotations

import math
from statistics import fmean, median

from slipstream.observe.display import duration
from slipstream.observe.evaluation import MOMENTS
from slipstream.observe.health import AlarmSpan
from slipstream.observe.report.html import card, cards, items, part, table, text
from slipstream.observe.report.run import Run
from slipstream.observe.summary import violations
from slipstream.observe.svg import number
from slipstream.observe.svg_blocks import percent_name
from slipstream.observe.waste import WASTE

RECENT_S = 60.0  # a run that wrote a line so recently is taken to be going on
MAX_ADVICE = 6


def heading(run: Run) -> str:
    summary, status = run.summary, status_of(run)
    facts = [run.name]
    if summary is not None:
        facts += [
            f"{summary.steps} steps in {duration(summary.wall_s)}",
            f"seed {summary.seed}",
            f"{summary.model_params / 1e6:,.3g} M parameters",
            f"Slipstream {summary.versions.slipstream}",
            f"torch {summary.versions.torch}",
        ]
    else:
        facts.append(f"{len(run.history.steps)} steps so far")
    return (
        f'<h1>{text(run.recipe)} <span class="status {status.split()[0]}">{text(status)}</span></h1>'
        f"<p>{text(' · '.join(facts))}</p>"
    )


def status_of(run: Run) -> str:
    """done, failed, interrupted; running or not finished where there is no summary."""
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
    before, after = run.accuracies
    if after is not None:
        found.append((f"{accuracy(before).removesuffix('%')} → {accuracy(after)}", "held-out accuracy, greedy"))
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
        speed = summary.throughput
        sampled = f"trained tokens a second ({speed.generated_tokens_per_s:,.0f} sampled)"
        found.append((f"{speed.trained_tokens_per_s:,.0f}", sampled))
    if run.staleness:
        bound = "no bound" if run.bound is None else f"bound {run.bound}"
        found.append((f"{run.mean_staleness:.2f}", f"steps old is a trained token (most {run.max_staleness}, {bound})"))
    if (share := run.wasted_share) is not None:
        found.append((f"{share:.0%}", "as many tokens were wasted as trained on"))
    trainer, generators = run.idle("trainer"), run.idle("generator")
    if trainer is not None and generators is not None:
        found.append((f"{trainer:.0%}", f"of its time the trainer waited (generators {generators:.0%})"))
    return found


def accuracy(found: float | None) -> str:
    return "?" if found is None else f"{found:.1%}"


def sentences(run: Run) -> list[str]:
    """What happened, in plain words and numbers."""
    found = [_learned(run), _aged(run)]
    found.append(run.times.verdict)
    if run.wasted and (share := run.wasted_share):
        worst = max(run.wasted, key=lambda cause: run.wasted[cause])
        found.append(f"Wasted: {percent_name(share)} as many tokens as were trained on, most of them {WASTE[worst]}.")
    names = sorted({alarm.name for alarm in run.alarms})
    found.append(f"Alarms that rang: {', '.join(names)}." if names else "No alarm rang.")
    return [one for one in found if one]


def _learned(run: Run) -> str:
    summary = run.summary
    before, after = run.accuracies
    if summary is not None and summary.eval.after is not None and after is not None:
        start = f"from {accuracy(before)} " if before is not None else ""
        how = f"({summary.eval.after.num_prompts} prompts, greedy) in {summary.steps} steps"
        return f"Held-out accuracy went {start}to {accuracy(after)} {how}."
    rewards = [value for _, value in run.history.points("reward")]
    if not rewards:
        return "No step was trained."
    part_length = max(1, len(rewards) // 10)
    first, last = fmean(rewards[:part_length]), fmean(rewards[-part_length:])
    return (
        f"The reward went from {first:.3f} to {last:.3f} (means of the first and last tenth of {len(rewards)} steps)."
    )


def _aged(run: Run) -> str:
    oldest = run.max_staleness
    if oldest is None:
        return ""
    if oldest == 0:
        return "Every token was trained on by the very policy that sampled it."
    bound = "; no bound was promised" if run.bound is None else f", as promised at most {run.bound}"
    return f"A trained token was {run.mean_staleness:.2f} steps old on average and {oldest} at most{bound}."


def advice(run: Run) -> list[str]:
    """What to look at or try next, the most urgent first."""
    found = []
    if status_of(run) in ("failed", "interrupted", "not finished"):
        found.append(f"Go on from the last checkpoint: slipstream run --resume {run.path}")
    found += [f"{alarm.name.replace('_', ' ')}: {alarm.text}" for alarm in run.alarms if alarm.severity == "warning"][
        :2
    ]
    if run.times.balance is not None and (dial := run.times.balance.dial) is not None:
        found.append(f"Use what is idle: {dial.effect}.")
    if (is_rising := _is_rising(run)) is not None:
        found.append(
            "The reward still rises at the end: more steps would help."
            if is_rising
            else "The reward no longer rises: more steps alone will not help."
        )
    if (share := run.history.last("no_signal_frac")) is not None and share > 0.5:
        found.append(
            f"{share:.0%} of the last step's groups were all right or all wrong: other prompts would teach more."
        )
    if (run.path / "timeline.json").exists():
        found.append(
            "Open timeline.json in ui.perfetto.dev to see who waits for whom, with arrows for groups and weights."
        )
    found.append(f"Go through it in the browser, rollouts token by token: slipstream watch {run.path}")
    found.append(f"Put it beside another run: slipstream report {run.path} OTHER")
    return found[:MAX_ADVICE]


def _is_rising(run: Run) -> bool | None:
    """Whether the reward of the last quarter lies above that of the quarter before, by more than their noise."""
    rewards = [value for _, value in run.history.points("reward")]
    quarter = len(rewards) // 4
    if quarter < 5:
        return None
    before, after = rewards[-2 * quarter : -quarter], rewards[-quarter:]
    middle = [fmean(before), fmean(after)]
    variance = sum(
        fmean((v - m) ** 2 for v in part_) / quarter for part_, m in zip((before, after), middle, strict=True)
    )
    return middle[1] - middle[0] > 2.0 * math.sqrt(variance)


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
