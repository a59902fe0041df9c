"""The counters of an engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class EngineStats:
    """Cumulative. `prefilled_tokens` are those that were computed, of these `re_prefilled_tokens` not for the first
    time; `preemptions` were for want of memory.

    Of the contexts of later turns, `parked_hit_tokens` were taken from parked keys, and `parked_missed_tokens` were
    computed again, as `re_prefilled_tokens`, although they had been made before; what is new at a turn is neither.
    """

    generated_tokens: int = 0
    prefilled_tokens: int = 0
    re_prefilled_tokens: int = 0
    prefix_hits: int = 0  # prompts found in the table of an earlier request
    preemptions: int = 0
    recomputed_caches: int = 0
    parked_hit_tokens: int = 0
    parked_missed_tokens: int = 0
    evicted_sessions: int = 0  # parked ones that were given up for want of room
    mismatched_sessions: int = 0  # parked ones that the next turn's context did not begin with

    @property
    def of_sessions(self) -> dict[str, int]:
        """Return the counters of parked sessions that a run reports."""
        names = ("parked_hit_tokens", "parked_missed_tokens", "evicted_sessions")
        return {name: vars(self)[name] for name in names}
