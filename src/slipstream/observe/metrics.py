"""`metrics.jsonl`: one JSON line per step, and one per evaluation. Is it learning?

Well-known names (display and report draw them; anything else is kept and listed):

    step, version, wall_s      the step trained, the version it made, seconds since the start of the run
    reward                     mean reward of the batch, before advantages
    loss, entropy, grad_norm   of the update(s), averaged over the step
    staleness_mean, _max       of the tokens consumed, in steps
    generated_tokens_per_s     sampled tokens per second over the recent steps; trained_tokens_per_s likewise
    step_s                     seconds since the previous step was done
    eval_reward                held-out, greedy, with the weights of `version`; eval_sampled_reward at temperature 1
    eval_accuracy              the share of right answers among them, where `eval.measure` says what is right
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.core.jsonl import JsonlWriter, finite
from slipstream.core.plain import flat
from slipstream.core.run_log import Metrics

LEAST_S = 0.01
"""A rate is told of so many seconds or more: in less, the time between two events is that of their messages."""


def rate(count: float, seconds: float) -> float | None:
    """`count` over `seconds`; None where these are fewer than `LEAST_S`."""
    return count / seconds if seconds >= LEAST_S else None


class MetricsWriter:
    """Appends flat lines of numbers and strings; each is on its way to the disk when `write` returns."""

    def __init__(self, path: Path, *, sinks: Sequence[Callable[[Metrics], None]] = ()) -> None:
        self._writer = JsonlWriter(path)
        self._sinks = sinks

    def write(self, *, step: int, version: int, wall_s: float, metrics: Mapping[str, Any]) -> Metrics:
        """Write one line to the file and to all sinks, and return it.

        Nested mappings are flattened with `/`; nan and inf, which JSON cannot say, become null.
        """
        line = {"step": step, "version": version, "wall_s": wall_s} | flatten(metrics)
        self._writer.write(line)
        for sink in self._sinks:
            sink(line)
        return line

    def sync(self) -> None:
        """Return once every line is on the disk."""
        self._writer.sync()

    def close(self) -> None:
        self._writer.close()


def flatten(metrics: Mapping[str, Any]) -> Metrics:
    """`{"a": {"b": 1}}` as `{"a/b": 1}`, with None for nan and inf."""
    return {name: finite(value) for name, value in flat(metrics, "/").items()}
