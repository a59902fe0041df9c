"""Policies in virtual time, with heavy tails: what each guarantees, and what it does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest

from benchmarks.policies import heavy_tailed, slot_idle_frac, steps_of, trained_of
from benchmarks.stragglers import Reserved, ReservedAhead
from slipstream.controller.policies import POLICIES, make_policy
from slipstream.core.config import PRESETS
from slipstream.core.errors import ScheduleError
from slipstream.core.run_log import ScheduleConfig
from slipstream.plan.simulated_run import Costs, MadeUp, Simulated, SimulatedSetup
from slipstream.plan.simulator import simulate

P, G, STEPS, SLOTS = 16, 4, 32, 64
LENGTHS = heavy_tailed(0, completions=G, sigma=1.2, longest=8000)
BASE = {
    "groups_per_step": P,
    "completions_per_group": G,
    "max_staleness": 2,
    "reorder_window": 1,
    "steps": STEPS,
    "capacity": SLOTS + G,
    "staleness_threshold": 0.5,
    "queue_groups": 2 * P,
}
KS_AT_1_IN_1000 = 1.95


def has_signal(ordinal: int) -> bool:
    return ordinal * 7919 % 5 != 0


WORK = MadeUp(lengths=LENGTHS, has_signal=has_signal)
TRACES: dict[tuple, Simulated] = {}


def run(policy, *, speeds: tuple[float, ...] = (100.0, 40.0), step_s: float = 4.0) -> Simulated:
    """Rows decode at the speed of their replica, in tokens per second, however many there are."""
    costs = Costs(
        decode=lambda replica, *_: 1 / speeds[replica], train=lambda _: {"train": step_s}, score_s=0.3, stage_s=0.5
    )
    return simulate(policy, SimulatedSetup(replicas=len(speeds), slots=SLOTS), WORK, costs)


def trace_of(policy: str, **changes) -> Simulated:
    key = (policy, *changes.items())
    if key not in TRACES:
        dials = BASE | ({"max_staleness": 1} if policy == "one_step" else {}) | changes
        TRACES[key] = run(make_policy(policy, ScheduleConfig(**dials)))
    return TRACES[key]


def size(ordinal: int) -> int:
    return sum(LENGTHS(ordinal))


def kolmogorov_smirnov(sample: list[int], other: list[int]) -> float:
    """Scaled distance of the two empirical distributions: above 1.95 once in 1000 where they are the same."""
    a, b = np.sort(sample), np.sort(other)
    both = np.concatenate([a, b])
    distance = np.abs(np.searchsorted(a, both, "right") / len(a) - np.searchsorted(b, both, "right") / len(b)).max()
    return float(distance * np.sqrt(len(a) * len(b) / (len(a) + len(b))))


def lengths(ordinals: Iterable[int]) -> list[int]:
    """The longest completion of each group: it is what makes a group finish late."""
    return [max(LENGTHS(ordinal)) for ordinal in ordinals]


FRESH = lengths(range(1_000_000, 1_003_000))


@pytest.mark.parametrize("window", [1, P, 2 * P + 1])
def test_ours_trains_a_prefix_of_the_ordinals_whatever_their_lengths(window):
    """Exactly: after every step all that has signal is trained, up to the window, and a place holds what was drawn."""
    trace = trace_of("oldest_first", reorder_window=window)
    trained: set[int] = set()
    for n, step in enumerate(steps_of(trace), start=1):
        trained |= set(step)
        assert len(trained) == n * P, "each once"
        oldest_left = next(o for o in range(10**6) if o not in trained and has_signal(o))
        assert max(trained) < oldest_left + window
    first = [o for o in range(10**5) if has_signal(o)][: STEPS * P]
    assert trained == set(first), "at the end nothing is left out, and nothing that comes later is in"
    assert set(trace.dropped.values()) == {"no_signal"}
    assert trace.left_tokens == 0


@pytest.mark.parametrize("window", [1, 2 * P + 1])
def test_ours_trains_the_lengths_that_were_sampled_also_halfway(window):
    steps = steps_of(trace_of("oldest_first", reorder_window=window))
    for part in (steps[: STEPS // 8], steps[STEPS // 8 :], steps):
        assert kolmogorov_smirnov(lengths(o for step in part for o in step), FRESH) < KS_AT_1_IN_1000


def test_finish_order_trains_short_completions_first():
    """The contrast: among as many trained groups the same test sees another distribution."""
    early = lengths(o for step in steps_of(trace_of("finish_order"))[: STEPS // 8] for o in step)
    assert kolmogorov_smirnov(early, FRESH) > KS_AT_1_IN_1000
    assert np.mean(early) < 0.75 * np.mean(FRESH)


def test_drop_stale_leaves_out_the_long_ones_for_good():
    trace = trace_of("drop_stale")
    trained = lengths(trained_of(trace))
    stale = lengths(o for o, cause in trace.dropped.items() if cause == "stale")
    assert kolmogorov_smirnov(trained, FRESH) > 2 * KS_AT_1_IN_1000
    assert np.mean(trained) < 0.8 * np.mean(FRESH)
    assert np.mean(stale) > 1.3 * np.mean(FRESH)
    assert trace.stale_tokens > 0.1 * trace.generated_tokens
    assert trace.outcome.staleness_max <= 2, "that is what it buys"


def test_the_preset_for_stragglers_is_faster_and_its_mean_hardly_staler():
    preset = PRESETS["tolerant"]
    k, passing = preset["max_staleness"], preset["overtake_steps"]
    default, tolerant = (
        trace_of("oldest_first"),
        trace_of("oldest_first", max_staleness=k, reorder_window=passing * P + 1),
    )
    assert tolerant.wall_s < 0.7 * default.wall_s
    assert tolerant.outcome.staleness_mean < default.outcome.staleness_mean + 0.1
    assert BASE["max_staleness"] < tolerant.outcome.staleness_max <= k
    assert set(trained_of(tolerant)) == set(trained_of(default)), "the same groups, each once"
    lockstep = trace_of("oldest_first", reorder_window=BASE["max_staleness"] * P + 1)
    assert lockstep.wall_s > default.wall_s, "a window alone holds the generators back"


@pytest.mark.parametrize("policy", [Reserved, ReservedAhead])
def test_reservations_keep_the_bound_and_discard_nothing(policy):
    """What the benchmark compares with: the bound is reached, all with signal is trained, and only that is dropped."""
    trace = run(policy(ScheduleConfig(**BASE | {"max_staleness": 4})))
    assert trace.outcome.staleness_max == 4
    assert set(trained_of(trace)) == set([o for o in range(10**5) if has_signal(o)][: STEPS * P])
    assert set(trace.dropped.values()) == {"no_signal"}


def test_areal_trains_stragglers_at_any_lag():
    trace = trace_of("areal")
    assert trace.outcome.staleness_max > 2 * BASE["max_staleness"]
    assert trace.outcome.staleness_mean < BASE["max_staleness"] + 1
    assert "stale" not in trace.dropped.values()


def test_areal_starts_as_many_as_its_formula_says():
    """floor((r - 1) / P) <= i + k, at every start: recounted from the commands."""
    policy = make_policy("areal", ScheduleConfig(**BASE))
    apply, dropped, started, newest = policy.apply, 0, set(), 0
    tightest = 0

    def watch(event):
        nonlocal dropped, newest, tightest
        if type(event).__name__ == "Swapped":
            newest = max(newest, event.version)
        commands = apply(event)
        dropped += sum(len(c.ordinals) for c in commands if type(c).__name__ == "Skip")
        for command in commands:
            if type(command).__name__ == "StartGroup":
                started.add(command.ordinal)
                rank = len(started) - dropped
                assert (rank - 1) // P <= newest + BASE["max_staleness"]
                tightest = max(tightest, (rank - 1) // P - newest)
        return commands

    policy.apply = watch
    run(policy)
    assert tightest == BASE["max_staleness"], "and no fewer"


def test_one_step_samples_one_batch_at_a_time():
    trace = trace_of("one_step")
    assert trace.outcome.staleness_max == 1
    places = [o for o in range(10**5) if has_signal(o)]
    assert [list(step) for step in steps_of(trace)] == [places[n * P : (n + 1) * P] for n in range(STEPS)]
    assert slot_idle_frac(trace) > slot_idle_frac(trace_of("oldest_first", max_staleness=1))


@pytest.mark.parametrize(("threshold", "every"), [(0.0, 1), (0.5, 1), (0.5, 3)])
def test_sample_budget_starts_a_budget_per_version(threshold, every):
    """Recounted: between two arrivals of a newer version at most budget - left over groups start."""
    policy = make_policy(
        "sample_budget", ScheduleConfig(**BASE | {"staleness_threshold": threshold, "publish_every": every})
    )
    apply, newest, per_version, left_over = policy.apply, -1, Counter(), {}
    budget = int((1 + threshold) * every * P)

    def watch(event):
        nonlocal newest
        if type(event).__name__ == "Swapped" and event.version > newest:
            newest = event.version
            left_over[newest] = len(policy.in_flight) + len(policy.ready)
        commands = apply(event)
        for command in commands:
            per_version[newest] += {"StartGroup": 1, "Skip": -1}.get(type(command).__name__, 0)
        return commands

    policy.apply = watch
    trace = run(policy, speeds=(100.0,))
    assert all(left_over[v] + count <= budget for v, count in per_version.items())
    assert any(left_over[v] + count == budget for v, count in per_version.items())
    if threshold:
        assert trace.outcome.staleness_max > (1 + threshold) * every, "a ratio of samples is no bound on versions"
    else:
        assert trace.outcome.staleness_max == 0, "without slack nothing starts while the trainer trains"


def test_finish_order_stops_at_a_full_queue():
    policy = make_policy("finish_order", ScheduleConfig(**BASE))
    apply, fullest = policy.apply, 0

    def watch(event):
        nonlocal fullest
        commands = apply(event)
        if any(type(command).__name__ == "StartGroup" for command in commands):
            assert len(policy.ready) < BASE["queue_groups"]
        fullest = max(fullest, len(policy.ready))
        return commands

    policy.apply = watch
    run(policy, speeds=(400.0, 400.0), step_s=10.0)
    assert fullest >= BASE["queue_groups"], "generation was faster, and the queue did fill"


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_accounts_for_every_token_and_group(policy):
    trace = trace_of(policy)
    trained, dropped = trained_of(trace), trace.dropped
    assert len(trained) == len(set(trained)) == STEPS * P
    assert not set(trained) & dropped.keys()
    tokens = sum(trace.lags.values()) + trace.left_tokens + sum(size(o) for o in dropped)
    assert tokens == trace.generated_tokens
    assert all(not has_signal(o) for o, cause in dropped.items() if cause == "no_signal")
    bound = make_policy(policy, ScheduleConfig(**BASE)).staleness_bound
    assert bound is None or trace.outcome.staleness_max <= bound


def test_a_stuck_schedule_is_an_error_not_an_endless_run():
    with pytest.raises(ScheduleError, match="stuck"):
        run(make_policy("oldest_first", ScheduleConfig(**BASE | {"reorder_window": 2 * P + 2})))
