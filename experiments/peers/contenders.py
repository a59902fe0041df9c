"""Who is compared: our schedule, those of other systems in its place, other ways to bring in weights, and TRL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

K = 2
"""The recipe's `max_staleness`, for all that look at it."""
GROUPS_PER_STEP = 16


@dataclass(frozen=True)
class Contender:
    """`whose` rule it is, and what of the recipe it changes; `trl` names a trainer of TRL, which runs by itself."""

    title: str
    whose: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    trl: str | None = None


RLOO = {"name": "rloo", "params": {}, "advantages": "leave_one_out"}

CONTENDERS: dict[str, Contender] = {
    "trl_grpo": Contender("TRL, GRPO", "TRL", trl="grpo"),
    "trl_rloo": Contender("TRL, RLOO", "TRL", trl="rloo"),
    "sync": Contender("synchronous", "Slipstream, k = 0", {"max_staleness": 0, "weight_update": "between_batches"}),
    "ours": Contender("oldest first", f"Slipstream, k = {K}"),
    "ours_k8": Contender("oldest first, k = 8", "Slipstream, k = 8", {"max_staleness": 8}),
    "ours_rloo": Contender("oldest first, RLOO", f"Slipstream, k = {K}", {"loss": RLOO}),
    "drain": Contender("drain before each update", "slime (`train_async.py`)", {"weight_update": "between_batches"}),
    "re_prefill": Contender(
        "abort and re-prefill at each update", "AReaL, verl, ROLL", {"generator": {"kv_on_update": "recompute"}}
    ),
    "one_step": Contender(
        "one step ahead",
        "Cleanba, A1",
        {"max_staleness": 1, "weight_update": "between_batches", "schedule": {"policy": "one_step"}},
    ),
    "drop_stale": Contender("drop stale groups", "PRIME-RL, verl V1", {"schedule": {"policy": "drop_stale"}}),
    "areal": Contender("admission by count", "AReaL", {"schedule": {"policy": "areal"}}),
    "sample_budget": Contender(
        "budget of samples",
        "verl `fully_async_policy`, s = 0.5",
        {"schedule": {"policy": "sample_budget", "staleness_threshold": 0.5}},
    ),
    "finish_order": Contender(
        "finish order, queue of k P",
        "Magistral",
        {"schedule": {"policy": "finish_order", "queue_groups": K * GROUPS_PER_STEP}},
    ),
}
"""By name. All but TRL's are the recipe with other dials: what is around a rule is ours, and the same for all."""
