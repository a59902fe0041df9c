"""What is claimed of contenders, and whether it holds: by the rules that the README fixes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from experiments.comparison import is_greater, keeps_gains
from experiments.peers.contenders import CONTENDERS, K
from experiments.peers.reading import TARGET, Seen
from experiments.peers.runs import Found
from experiments.section import Verdict, spread

MARGIN = 0.02
"""Of accuracy: as good as."""
NOT_THERE = "TRL is not installed: `make .venv-trl/installed`"
SOONER = {"trl_grpo": "ours", "trl_rloo": "ours_rloo"}
UNBOUNDED = {
    "areal": ("Admission by count bounds no token's age", "SkyRL, of AReaL's rule"),
    "sample_budget": ("A budget of samples bounds no token's age", "docs/staleness.md"),
    "finish_order": ("A queue of bounded size bounds no token's age", "docs/staleness.md"),
}
SLOWER = {
    "sync": ("Asynchronous has a higher pace than synchronous", "A, Fig. 1; L, Table 3"),
    "one_step": ("Two steps ahead have a higher pace than one", "P2"),
    "drain": ("Swapping in flight has a higher pace than draining before each update", "M1; verl #4896"),
    "re_prefill": ("Keeping caches has a higher pace than reading them again", "M4; slime #1694"),
}


def verdicts(found: Found) -> list[Verdict]:
    """In this order; those about contenders of ours that were not run are left out."""
    seen = found.seen
    told = [_sooner(found, theirs, ours) for theirs, ours in SOONER.items()]
    if "ours" in seen:
        told.append(keeps_promises(seen["ours"], K))
        told += [faster(*SLOWER[name], seen["ours"], seen[name]) for name in SLOWER if name in seen]
    if {"ours", "drop_stale"} <= seen.keys():
        claim = "A hard bound costs pace where tails are heavy: dropping stale groups has a higher pace"
        told.append(faster(claim, "docs/staleness.md", seen["drop_stale"], seen["ours"]))
        told.append(_drops_the_long(seen["drop_stale"]))
    if {"ours", "ours_k8"} <= seen.keys():
        claim = "Room for the tail recovers this pace: k = 8 has a higher pace than k = 2"
        told.append(faster(claim, "docs/staleness.md", seen["ours_k8"], seen["ours"]))
    told += [_unbounded(*UNBOUNDED[name], seen[name]) for name in UNBOUNDED if name in seen]
    if "sync" in seen:
        told.append(_learns_as_much(seen))
    return told


def _sooner(found: Found, theirs: str, ours: str) -> Verdict:
    """Compare the times. A run of theirs that never got there counts with its whole time, a lower bound: never *no*.

    *Cannot say* where a run of ours never got there.
    """
    title, source = CONTENDERS[theirs].title, "README, Speed"
    claim = f"Slipstream learns sooner than {title}"
    if not {theirs, ours} <= found.seen.keys():
        return Verdict(claim, source, None, NOT_THERE if found.trl is None else "not run")
    theirs_s, ours_s = ([until_s(one) for one in found.seen[name]] for name in (theirs, ours))
    got = f"reward {TARGET:g} {_after(found.seen[ours])}, {title} {_after(found.seen[theirs])}"
    is_known = all(one.reached is not None for one in found.seen[ours])
    if is_known:
        got += f": {fmean(theirs_s) / fmean(ours_s):.1f} times"
    holds = is_greater(theirs_s, ours_s) if is_known else None
    is_bound = any(one.reached is None for one in found.seen[theirs])
    return Verdict(claim, source, (holds or None) if is_bound else holds, got)


def until_s(one: Seen) -> float:
    """Seconds until it had learned; all it took where it had not."""
    return one.ended_s[-1] if one.reached_s is None else one.reached_s


def _after(runs: Sequence[Seen]) -> str:
    late = sum(one.reached is None for one in runs)
    text = f"{spread([until_s(one) for one in runs], 1)} s"
    return f"after at least {text} ({late} of {len(runs)} never got there)" if late else f"after {text}"


def faster(claim: str, source: str, fast: Sequence[Seen], slow: Sequence[Seen]) -> Verdict:
    """Whether the first has the higher pace, beyond noise."""
    paces, others = ([one.completions_per_s for one in runs] for runs in (fast, slow))
    got = f"{spread(paces, 0)} and {spread(others, 0)} completions/s: {fmean(paces) / fmean(others):.2f} times"
    return Verdict(claim, source, is_greater(paces, others), got)


def keeps_promises(runs: Sequence[Seen], k: int) -> Verdict:
    """Exactly, in every run of a bound `k`."""
    oldest, bias = max(one.staleness_max for one in runs), max(abs(one.length_bias) for one in runs)
    discarded, longest = max(one.discarded for one in runs), min(one.longest_trained for one in runs)
    return Verdict(
        f"Slipstream trains no token staler than k = {k}, discards nothing, and leaves no length out",
        "P1; docs/staleness.md",
        oldest <= k and discarded == 0 and bias == 0 and longest == 1,
        f"largest staleness {oldest}, discarded {_percent([discarded])}, length bias {_percent([bias])}, "
        f"of the longest {_percent([longest], 0)} trained",
    )


def _drops_the_long(runs: Sequence[Seen]) -> Verdict:
    """In every run. What was left at the end counts neither way."""
    longer = [one.discarded_length for one in runs if one.discarded_length is not None]
    got = f", {_percent(longer, 0)} longer than the trained answers" if longer else ""
    return Verdict(
        "Dropping stale groups discards work, long answers first",
        "tinker-cookbook #822; marin #8936",
        len(longer) == len(runs) and min(longer) > 0,
        f"discarded {_percent([one.discarded for one in runs])} of the tokens{got}",
    )


def _unbounded(claim: str, source: str, runs: Sequence[Seen]) -> Verdict:
    """In any run."""
    ages = [one.staleness_max for one in runs]
    return Verdict(claim, source, max(ages) > K, f"largest staleness {max(ages)}, with k = {K}")


def _learns_as_much(seen: Mapping[str, Sequence[Seen]]) -> Verdict:
    """Each of our scheduler with synchronous's loss against synchronous: no if any learns less, yes if all as much.

    Cannot be said where a synchronous run learned nothing.
    """
    accuracies = {
        name: [one.accuracy for one in runs]
        for name, runs in seen.items()
        if CONTENDERS[name].trl is None and "loss" not in CONTENDERS[name].overrides
    }
    sync = accuracies.pop("sync")
    claim = f"None of the policies learns less than synchronous in as many steps (accuracy, margin {MARGIN:g})"
    if not accuracies:
        return Verdict(claim, "A, Fig. 1; L12", None, "not run")
    began = [one.before for one in seen["sync"] if one.before is not None]
    is_known = len(began) == len(sync)
    told = {keeps_gains(own, sync, began, MARGIN) if is_known else None for own in accuracies.values()}
    least = min(accuracies, key=lambda name: fmean(accuracies[name]))
    return Verdict(
        claim,
        "A, Fig. 1; L12",
        False if False in told else None if None in told else True,
        f"synchronous {spread(sync)}; the least: {CONTENDERS[least].title}, {spread(accuracies[least])}",
    )


def _percent(values: Sequence[float], digits: int = 1) -> str:
    return f"{spread([100 * value for value in values], digits)} %"
