"""How old was the data, and did it matter? Staleness, importance ratios, the gap between the two policies, drift."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from slipstream.observe.report.html import card, cards, part
from slipstream.observe.report.learning import BLUE, GREEN, ORANGE, alarm_bands, chart_card, column_numbers
from slipstream.observe.report.run import RATIOS, STALENESS, Run
from slipstream.observe.svg import Axis, Series
from slipstream.observe.svg_blocks import Column, heat_map, percent_name

GAP = "logprob_diff_mean/lag_"
MAX_LAGS = 5  # lines of the gap by age


def off_policy(run: Run) -> str:
    pictures = [
        cards(_staleness(run), _ratios(run)),
        cards(_gap(run), _kl(run), _cost(run), *_reference(run)),
    ]
    lead = "Where the next batches are sampled while one is trained, tokens come from older versions of the policy."
    return part("off-policy", "How old was the data, and did it matter?", lead, pictures)


def _staleness(run: Run) -> str:
    lags = range(max(run.staleness, default=0) + 1)
    rows = [str(lag) for lag in lags]
    columns = [
        Column(start, end, {str(lag): float(line.get(f"{STALENESS}{lag}") or 0.0) for lag in lags})
        for (start, end), line in zip(edges(run.history.clocks["step"]), run.history.steps, strict=True)
    ]
    is_bounded = run.bound is not None and str(run.bound) in rows
    chart = heat_map(
        columns,
        rows,
        title="Staleness of the trained tokens",
        x=Axis("step"),
        label="age in steps",
        left=30,
        lines_above={str(run.bound): f"bound {run.bound}"} if is_bounded else None,
        missing="No token was trained yet.",
    )
    share = run.staleness.get(0, 0.0) / max(sum(run.staleness.values()), 1.0)
    note = "How many training steps old a token was when it was trained on; 0 is fresh."
    if run.bound is None:
        note += " This schedule promises no bound."
    elif run.max_staleness is not None and run.max_staleness <= run.bound:
        note += " The bound holds for every token."
    if run.staleness:
        note += f" Fresh: {percent_name(share)}."
    return card("Age of the trained tokens", note, chart, details=column_numbers(columns, rows, "step"))


def _ratios(run: Run) -> str:
    edge_names = sorted((float(name.removeprefix(RATIOS)), name) for name in run.history.names(RATIOS))
    names = [name for _, name in edge_names]
    rows = [ratio_row(low, high) for (low, _), (high, _) in pairwise([*edge_names, (float("inf"), "")])]
    columns = [
        Column(
            start,
            end,
            {
                row: float(line.get(name) or 0.0) * float(line.get("tokens_trained") or 0.0)
                for row, name in zip(rows, names, strict=True)
            },
        )
        for (start, end), line in zip(edges(run.history.clocks["step"]), run.history.steps, strict=True)
    ]
    chart = heat_map(
        columns,
        rows,
        title="Importance ratios of the trained tokens",
        x=Axis("step"),
        label="ratio",
        left=76,
        missing="This run recorded no ratios: its version of Slipstream did not, or its loss has none.",
    )
    note = (
        "How much likelier the trained policy finds a token than the policy that sampled it. 1 is no difference; "
        "what is far from it is clipped or weighs too much."
    )
    return card("Importance ratios", note, chart, details=column_numbers(columns, rows, "step"), folds=True)


def ratio_row(low: float, high: float) -> str:
    if low <= 0.0:
        return f"< {high:g}"
    return f"≥ {low:g}" if high == float("inf") else f"{low:g} – {high:g}"


def _gap(run: Run) -> str:
    lags = sorted(int(name.removeprefix(GAP)) for name in run.history.names(GAP))[:MAX_LAGS]
    window = run.history.window()
    series = [
        Series(
            f"{lag} {'step' if lag == 1 else 'steps'} old" if lag else "fresh",
            run.history.points(f"{GAP}{lag}"),
            hue,
            smooth=window,
        )
        for hue, lag in enumerate(lags)
    ]
    note = "Generator and trainer on the same token. On fresh ones there is only rounding: else one of them is wrong."
    axis = Axis("mean |Δ logprob|, nats, logarithmic", is_log=True)
    bands = alarm_bands(run, ("logprob_mismatch", "logprob_mismatch_growing"))
    return chart_card("Gap of the logprobs, by age", note, series, axis, bands)


def _kl(run: Run) -> str:
    series = [Series("KL", run.history.points("kl_k3"), BLUE, smooth=run.history.window())]
    note = "From the policy that sampled to the trained one. From 0.1 on an alarm rings."
    axis = Axis("KL(sampler ‖ trained), nats per token", low=0.0)
    return chart_card("Drift within a batch", note, series, axis, alarm_bands(run, ("policy_drift",)))


def _cost(run: Run) -> str:
    window = run.history.window()
    series = [
        Series("effective sample size", run.history.points("ess"), GREEN, smooth=window),
        Series("clipped tokens", run.history.points("clipped_frac"), ORANGE, smooth=window),
    ]
    note = "What the correction costs: the share of the batch that still counts, and of tokens whose gradient is cut."
    axis = Axis("share", low=0.0, high=1.0, is_share=True)
    return chart_card(
        "Price of the correction", note, series, axis, alarm_bands(run, ("ess_collapse", "ratio_clipped"))
    )


def _reference(run: Run) -> Iterable[str]:
    window = run.history.window()
    points = run.history.points("kl_reference_sum")
    if not points:
        return
    series = [Series("KL", points, BLUE, smooth=window)]
    note = "How far training has moved from the frozen reference."
    bands = alarm_bands(run, ("kl_runaway",))
    yield chart_card("KL to the reference", note, series, Axis("nats per completion", low=0.0), bands)
    coefficients = run.history.points("kl_coef")
    if len({value for _, value in coefficients}) > 1:
        series = [Series("coefficient", coefficients, BLUE)]
        yield chart_card("Coefficient of the KL penalty", "It follows kl.target.", series, Axis("kl.coef", low=0.0))


def edges(steps: list[float]) -> list[tuple[float, float]]:
    """From each step to the next."""
    return [*pairwise(steps), (steps[-1], steps[-1] + 1.0)] if steps else []
