"""`evaluation.json` as a table: what RL changed, and at what price."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

EVALUATION_FILE = "evaluation.json"
MOMENTS = ("before", "after")


def evaluation_rows(evaluation: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(what, before, after), in plain words; only what was measured."""
    before, after = (dict(_cells(evaluation[moment])) for moment in MOMENTS)
    return [(name, before.get(name, "-"), after.get(name, "-")) for name in dict.fromkeys([*before, *after])]


def _cells(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    gold, judge, drift, lengths = (found[name] for name in ("gold", "judge", "drift", "lengths"))
    if "win_rate" in gold:
        yield "gold win rate against references", _spread(gold["win_rate"])
        yield "gold score minus reference's", _spread(gold["difference"])
    if gold["mean_score"] is not None:
        yield "gold score", f"{gold['mean_score']:.3f}"
    for k, share in gold["pass_at_k"].items():
        if int(k) > 1:
            yield f"pass@{k}", f"{share:.3f}"
    for name, mean in (found["reward_models"] or {}).items():
        yield f"score by {name}", f"{mean:.3f}"
    if judge is not None:
        yield "judge's win rate", _spread(judge["win_rate"])
        yield "judge's position bias", f"{judge['position_bias']:+.3f}"
    yield "perplexity per response token", _spread(drift["perplexity"]["per_response_token"])
    yield "perplexity per token of prompt and response", _spread(drift["perplexity"]["per_text_token"])
    if drift["kl"] is not None:
        yield "KL per completion, nats", _spread(drift["kl"]["per_sequence"])
    if (episodes := found.get("episodes")) is not None:
        if episodes["mean_reward"] is not None:
            yield "environment's reward", f"{episodes['mean_reward']:.3f}"
        yield "turns per episode", f"{episodes['mean_turns']:.1f}"
        yield "episodes cut by a limit", f"{episodes['cut_share']:.3f}"
        if episodes["num_failed"]:
            yield "episodes whose environment failed", str(episodes["num_failed"])
    yield "tokens per completion", f"{lengths['mean']:.1f}"
    yield "truncated", f"{lengths['truncated_share']:.3f}"


def _spread(spread: Mapping[str, Any]) -> str:
    """Mean and standard error."""
    mean, error = spread["mean"], spread["standard_error"]
    text = "inf" if mean is None else f"{mean:.3f}"
    return text if error is None else f"{text} ± {error:.3f}"
