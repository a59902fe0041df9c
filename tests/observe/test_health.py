"""Each alarm on series made for it: it fires within so many steps, it ends, and noise alone never rings it."""

import itertools
import math
import runpy
import tracemalloc
from pathlib import Path

import msgspec
import numpy as np
import pytest

from slipstream.core.errors import AlarmError, ConfigError
from slipstream.core.jsonl import JsonlWriter
from slipstream.core.observe_sections import AlarmName, HealthConfig
from slipstream.core.recipes import resolve
from slipstream.core.service_messages import Counters, Published
from slipstream.core.types import GroupScored, ReplicaLost, Swapped
from slipstream.observe import trends
from slipstream.observe.display import printable
from slipstream.observe.health import RULES, Alarm, Health, Watchman, in_a_line, read_alarms, spans, unfit
from slipstream.observe.metrics import MetricsWriter
from slipstream.observe.trends import History
from slipstream.observe.vitals import Vitals
from slipstream.observe.waste import Wasted
from slipstream.stages.named import check_named

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_STEPS = 160
ONSET = 80


def healthy(rng, step):
    """Numbers like those of the quickstart, which learns: noise around levels that move as they do there."""
    learned = step / NUM_STEPS
    return {
        "step": step,
        "step_s": 0.3,
        "reward": 0.5 + 0.4 * learned + rng.normal(0, 0.02),
        "reward_std": 0.35 - 0.2 * learned + rng.normal(0, 0.01),
        "entropy": 0.8 - 0.5 * learned + rng.normal(0, 0.04),
        "ess": 1.0 - 0.02 * rng.random(),
        "clipped_frac": 0.06 * rng.random(),
        "kl_k2": 0.01 * rng.random(),
        "kl_reference": 0.1 * learned + 0.01 * rng.random(),
        "grad_norm": float(np.exp(rng.normal(0.3, 0.25))),
        "completion_tokens_mean": 5.5 + rng.normal(0, 0.15),
        "truncated_frac": 0.02 * rng.random(),
        "no_signal_frac": float(np.clip(0.2 + 0.4 * learned + rng.normal(0, 0.08), 0, 1)),
        "no_signal_in_a_row": float(rng.geometric(0.4) - 1),
        "scored_failed_frac": float(rng.binomial(256, 0.005)) / 256,
        "failed_completions": 15.0,  # since the run began
        "poisoned": 0.0,
        "publish_skipped_frac": float(rng.random() < 0.05),
        "publish_same_frac": 0.0,
        "version_lag_excess": float(rng.integers(-3, 1)),
        "logprob_diff_mean/lag_0": 3e-7 * (1 + rng.random()),
        "wait_frac/trainer/wait_generation": rng.uniform(0.05, 0.3),
        "wait_frac/trainer/wait_rewards": rng.uniform(0.0, 0.1),
        "wait_frac/trainer/wait_straggler": float(rng.random() < 0.1) * 0.2,
        "wait_frac/generator-0/wait_trainer": rng.uniform(0.1, 0.4),
        "wait_frac/generator-1/wait_trainer": rng.uniform(0.1, 0.4),
        "wait_frac/rewards/wait_completions": rng.uniform(0.8, 1.0),  # a healthy verifier is idle
    }


SICK = {
    "logprob_mismatch": lambda rng, age: {"logprob_diff_mean/lag_0": rng.uniform(0.055, 0.2)},
    "logprob_mismatch_growing": lambda rng, age: {"logprob_diff_mean/lag_0": 0.001 * 1.1**age},
    "ess_collapse": lambda rng, age: {"ess": rng.uniform(0.1, 0.4)},
    "ratio_clipped": lambda rng, age: {"clipped_frac": rng.uniform(0.27, 0.5)},
    "policy_drift": lambda rng, age: {"kl_k2": rng.uniform(0.11, 0.5)},
    "kl_runaway": lambda rng, age: {"kl_reference": 0.1 * 1.1**age},
    "length_hacking": lambda rng, age: {
        "completion_tokens_mean": 5.5 * 1.03**age + rng.normal(0, 0.1),
        "reward": 0.7 + 0.02 * age + rng.normal(0, 0.02),
    },
    "truncation_growing": lambda rng, age: {"truncated_frac": min(1.0, 0.02 * age)},
    "entropy_collapse": lambda rng, age: {
        "entropy": 0.03 + rng.normal(0, 0.005),
        "reward": 0.6 + rng.normal(0, 0.01),
        "reward_std": 0.3,
    },
    "grad_norm_spikes": lambda rng, age: {"grad_norm": 100.0} if age in (0, 7) else {},
    "no_signal": lambda rng, age: {"no_signal_frac": rng.uniform(0.96, 1.0)},
    "equal_rewards": lambda rng, age: {"no_signal_in_a_row": 10.0 * age},
    "failed_rewards": lambda rng, age: {"failed_completions": 2.0 * age},
    "poisoned": lambda rng, age: {"poisoned": float(age == 3)},
    "starving_trainer": lambda rng, age: {"wait_frac/trainer/wait_generation": rng.uniform(0.85, 0.95)},
    "starving_generator": lambda rng, age: {
        f"wait_frac/generator-{replica}/wait_trainer": rng.uniform(0.85, 0.95) for replica in (0, 1)
    },
    "slow_rewards": lambda rng, age: {"wait_frac/trainer/wait_rewards": rng.uniform(0.55, 0.9)},
    "straggler": lambda rng, age: {"wait_frac/trainer/wait_straggler": rng.uniform(0.35, 0.9)},
    "version_lag": lambda rng, age: {"version_lag_excess": float(age)},
    "publish_skipped": lambda rng, age: {"publish_skipped_frac": float(rng.random() < 0.8)},
    "weights_unchanged": lambda rng, age: {"publish_same_frac": 1.0},
}

ALONG = {  # what cannot happen alone
    "logprob_mismatch": {"logprob_mismatch_growing"},
    "logprob_mismatch_growing": {"logprob_mismatch"},
    "length_hacking": set(),
    "kl_runaway": set(),
}


def watched(series, config=None):
    """Alarms over (step, metrics) pairs."""
    found = Health(config or HealthConfig())
    return [alarm for metrics in series for alarm in found.update(metrics)]


def sick_series(name, seed, until=NUM_STEPS):
    rng = np.random.default_rng(seed)
    for step in range(NUM_STEPS * 2):
        metrics = healthy(rng, min(step, NUM_STEPS))
        if ONSET <= step < until:
            metrics |= SICK[name](rng, step - ONSET)
        yield metrics


def test_every_alarm_has_a_rule_and_a_series():
    assert set(RULES) == set(AlarmName.__args__) == set(SICK)
    for rule in RULES.values():
        assert all((rule.watches, rule.meaning, rule.advice, rule.reason))
        assert 0 < rule.clears <= 1
        assert rule.persist >= 1


def test_the_documents_have_them_all():
    page = (REPOSITORY / "docs" / "reliability.md").read_text(encoding="utf-8")
    assert runpy.run_path(str(REPOSITORY / "scripts" / "alarm_reference.py"))["table"]() in page


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_healthy_run_rings_nothing(seed):
    rng = np.random.default_rng(seed)
    assert watched(healthy(rng, step) for step in range(NUM_STEPS)) == []


@pytest.mark.parametrize("seed", SEEDS[:2])
@pytest.mark.parametrize("name", SICK)
def test_an_alarm_rings_in_time_once_and_ends(name, seed):
    alarms = watched(sick_series(name, seed))
    assert {alarm.name for alarm in alarms} <= {name} | ALONG.get(name, set())
    mine = [alarm for alarm in alarms if alarm.name == name]
    if name == "failed_rewards":  # what has failed stays so
        assert [alarm.event for alarm in mine] == ["began"]
        assert ONSET <= mine[0].step < ONSET + 10
        return
    assert [alarm.event for alarm in mine] == ["began", "ended"]
    began, ended = mine
    assert ONSET <= began.step < ONSET + 50
    if name not in ("grad_norm_spikes", "poisoned", "length_hacking"):  # those end by themselves
        assert ended.step >= NUM_STEPS
    assert ended.step < NUM_STEPS + 60
    assert RULES[name].meaning in began.text
    assert f"{began.value:.3g}" in in_a_line(began)
    (span,) = [span for span in spans(alarms) if span.name == name]
    assert (span.began, span.ended, span.text) == (began.step, ended.step, began.text)


@pytest.mark.parametrize("name", [name for name in SICK if name != "poisoned"])
def test_one_bad_step_rings_nothing(name):
    """`poisoned` and `grad_norm_spikes` are about single ones."""
    assert watched(itertools.islice(sick_series(name, 0, until=ONSET + 1), NUM_STEPS)) == []


def test_a_statistic_beyond_its_threshold_for_two_steps_rings_nothing():
    """Low values at 0, 1 and 3 make the median of five low at 3 and 4 alone; one more makes it three steps."""
    for low_at, expected in (((0, 1, 3), []), ((0, 1, 2), ["ess_collapse"])):
        rng = np.random.default_rng(0)
        series = [healthy(rng, step) | ({"ess": 0.1} if step - ONSET in low_at else {}) for step in range(ONSET + 5)]
        assert [alarm.name for alarm in watched(series)] == expected


def failing(config=None):
    """The alarms of a run whose every fourth completion fails, before it has done any step; and how many had failed."""
    found = Health(config or HealthConfig())
    for num_scored in range(4, 4000, 4):
        failure = "ranks: ValueError: no \x1b[31mred" + "!" * 5000 + " (mine.py, line 3)"
        for alarm in found.failed(0, num_scored // 4, num_scored, failure):
            yield num_scored // 4, alarm


def test_the_sixteenth_failure_rings_at_any_length_of_run_and_says_why():
    ((count, alarm),) = failing()
    assert (count, alarm.step, alarm.value, alarm.threshold) == (16, 0, 16.0, 16.0)
    assert "16 of 64 completions so far, the last: ranks: ValueError: no" in alarm.text
    assert len(alarm.text) < 1000
    assert "\x1b" not in printable(in_a_line(alarm), limit=2000)
    assert list(failing(HealthConfig(alarms=False))) == []
    assert [count for count, _ in failing(HealthConfig(thresholds={"failed_rewards": 3}))] == [3]


def test_equal_rewards_ring_before_the_first_step_and_say_which():
    """A reward that is always the same trains no step, so that no line of a step could tell of it."""
    found = Health(HealthConfig())
    begun = [(count, one) for count in range(1, 2000) for one in found.without_signal(0, count, (0.5, 0.5))]
    ((count, alarm),) = begun
    assert (count, alarm.name, alarm.event, alarm.step) == (64, "equal_rewards", "began", 0)
    assert "(the last 64 groups, rewards of 0.5)" in alarm.text
    assert [one.event for one in found.update({"step": 3, "step_s": 0.3, "no_signal_in_a_row": 0.0})] == ["ended"]
    assert found.without_signal(4, 63, (0.0, 1.0)) == []
    (again,) = found.without_signal(4, 64, (0.0, 1.0))
    assert "rewards of 0 to 1)" in again.text


def test_failures_that_a_step_tells_of_after_they_have_rung_ring_no_more():
    """Of a resume, too, which reads them from the lines of steps."""
    found = Health(HealthConfig())
    assert len(found.failed(0, 16, 64, "it died")) == 1
    rng = np.random.default_rng(0)
    assert all(found.update(healthy(rng, step) | {"failed_completions": 16.0 + step}) == [] for step in range(20))
    assert found.failed(20, 40, 640, "it died") == []


def test_failures_stop_the_run_where_that_is_asked_for(tmp_path):
    watchman = Watchman(HealthConfig(stop_on=["failed_rewards"]), tmp_path)
    assert watchman.tell(watchman.health.failed(0, 15, 20, "it died")) == []
    with pytest.raises(AlarmError, match="'failed_rewards' began at step 0") as caught:
        watchman.tell(watchman.health.failed(0, 17, 20, "it died"))
    watchman.close()
    assert "17 of 20 completions so far, the last: it died" in str(caught.value)


def test_a_number_at_its_threshold_rings_once():
    """Noise around the threshold: hysteresis makes one alarm of it, not one line per step."""
    rng = np.random.default_rng(0)
    series = []
    for step in range(NUM_STEPS):
        metrics = healthy(rng, step)
        if step >= ONSET:
            metrics["clipped_frac"] = 0.25 + rng.normal(0, 0.02)
        series.append(metrics)
    assert len(watched(series)) <= 2


def test_what_a_step_does_not_say_changes_nothing():
    """No completion at lag 0 for many steps, NaN in between, evaluations: an alarm stays as it was."""
    rng = np.random.default_rng(0)
    found = Health(HealthConfig())
    rung = [found.update(healthy(rng, step) | {"logprob_diff_mean/lag_0": 0.1}) for step in range(ONSET)]
    assert [(alarm.name, alarm.event) for alarms in rung for alarm in alarms] == [("logprob_mismatch", "began")]
    for step in range(ONSET, NUM_STEPS):
        metrics = healthy(rng, step)
        del metrics["logprob_diff_mean/lag_0"]
        assert found.update(metrics | {"ess": math.nan, "kl_k2": None}) == []
    assert found.update({"step": 3, "version": 3, "eval_accuracy": 0.0}) == []


def test_memory_and_time_are_bounded():
    rng = np.random.default_rng(0)
    found = Health(HealthConfig())
    for step in range(1000):
        found.update(healthy(rng, min(step, NUM_STEPS)))
    history = vars(vars(found)["_history"])
    assert max(map(len, history["_recent"].values())) == trends.MAX_HISTORY
    assert max(map(len, history["_first"].values())) == trends.BASELINE


def test_a_resumed_run_goes_on_as_if_it_had_not_ended():
    series = list(sick_series("straggler", 1))
    whole, first, second = Health(HealthConfig()), Health(HealthConfig()), Health(HealthConfig())
    expected = [alarm for metrics in series for alarm in whole.update(metrics)]
    before = [alarm for metrics in series[:110] for alarm in first.update(metrics)]
    for metrics in series[:110]:
        second.update(metrics)
    assert before + [alarm for metrics in series[110:] for alarm in second.update(metrics)] == expected


def test_thresholds_are_the_users():
    series = list(sick_series("straggler", 0))
    deaf = HealthConfig(thresholds={"straggler": 0.99})
    assert watched(series, deaf) == []
    assert watched(series, HealthConfig(alarms=False)) == []
    keen = watched(series, HealthConfig(thresholds={"grad_norm_spikes": 1.5, "slow_rewards": 0.01}))
    assert {alarm.threshold for alarm in keen if alarm.name == "slow_rewards"} == {0.01}


@pytest.mark.parametrize(
    ("changes", "alarm"),
    [
        ({"generator": {"precision": "int8"}}, "logprob_mismatch"),
        ({"host": "inline"}, "straggler"),
        *(
            ({"generator": {"top_p": 0.9}, "loss": {"name": "reinforce"}}, alarm)  # samples of less than the policy
            for alarm in ("logprob_mismatch", "logprob_mismatch_growing", "policy_drift", "ess_collapse")
        ),
    ],
)
def test_no_run_waits_for_an_alarm_that_its_configuration_silences(changes, alarm):
    with pytest.raises(ConfigError, match=f"stop_on with '{alarm}'"):
        check_named(resolve("quickstart", overrides=changes | {"health": {"stop_on": [alarm]}}))
    check_named(resolve("quickstart", overrides={"health": {"stop_on": [alarm]}}))


def test_samples_whose_kept_sets_are_known_silence_nothing():
    assert not unfit(resolve("quickstart", overrides={"generator": {"top_k": 20, "top_p": 0.9, "keep_sets": True}}))


def test_the_waits_of_a_side_are_of_the_processes_that_are_there():
    def waits(**shares):
        return {f"wait_frac/{name.replace('_', '-')}/wait_trainer": share for name, share in shares.items()}

    history, starving = History(), RULES["starving_generator"].statistic
    for step in range(70):
        slow = waits(generator_2=0.6) if step % 4 == 0 else {}  # it reports once in four steps
        history.add(waits(generator_0=0.9) | (waits(generator_1=0.3) if step < 60 else {}) | slow)
        assert step != 59 or starving(history) == pytest.approx(0.6)
    assert starving(history) == pytest.approx(0.75), "generator-1 has left"
    for _ in range(10):
        history.add(waits(generator=0.85))  # of more than 32
    assert starving(history) == pytest.approx(0.85)


def test_the_configuration_knows_the_names():
    config = resolve("quickstart", overrides={"health": {"thresholds": {"straggler": 0.5}}})
    assert config.health.thresholds == {"straggler": 0.5}
    with pytest.raises(ConfigError, match="stop_on"):
        resolve("quickstart", overrides={"health": {"stop_on": ["stragler"]}})
    with pytest.raises(ConfigError, match="stop_on"):
        resolve("quickstart", overrides={"health": {"alarms": False, "stop_on": ["straggler"]}})


def test_alarms_survive_their_file(tmp_path):
    alarms = watched(sick_series("poisoned", 0))
    writer = JsonlWriter(tmp_path / "alarms.jsonl")
    writer.write(*alarms)
    writer.close()
    assert read_alarms(tmp_path / "alarms.jsonl") == alarms
    assert read_alarms(tmp_path / "missing.jsonl") == []
    still_on = spans(alarms[:1])
    assert still_on[0].ended is None
    assert spans([msgspec.structs.replace(alarms[0], event="ended")]) == []
    assert isinstance(alarms[0], Alarm)


def test_an_alarm_that_is_to_end_the_run_does_and_is_on_file_and_told(tmp_path):
    series, told = list(sick_series("poisoned", 0)), []
    watchman = Watchman(HealthConfig(stop_on=["poisoned"]), tmp_path, sinks=[told.append])
    for metrics in series[: ONSET + 3]:
        assert watchman.tell(watchman.health.update(metrics)) == []
    with pytest.raises(AlarmError, match=f"'poisoned' began at step {ONSET + 3}"):
        watchman.tell(watchman.health.update(series[ONSET + 3]))
    watchman.close()
    assert [alarm.name for alarm in read_alarms(tmp_path / "alarms.jsonl")] == ["poisoned"]
    assert told == read_alarms(tmp_path / "alarms.jsonl")


def test_after_a_resume_the_steps_on_file_ring_no_more(tmp_path):
    series = list(sick_series("straggler", 1))
    first = Watchman(HealthConfig(), tmp_path)
    metrics = MetricsWriter(tmp_path / "metrics.jsonl")
    for line in (line | {"said": 60_000 * "x"} for line in series[:110]):
        first.tell(first.health.update(line))
        metrics.write(step=line["step"], version=line["step"] + 1, wall_s=0.0, metrics=line)
    metrics.close()
    first.close()
    tracemalloc.start()
    second = Watchman(HealthConfig(), tmp_path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2_000_000, "bytes; the lines together are 6,600,000"
    rung = [alarm.event for line in series[110:] for alarm in second.tell(second.health.update(line))]
    second.close()
    assert rung == ["ended"]
    assert [alarm.event for alarm in read_alarms(tmp_path / "alarms.jsonl")] == ["began", "ended"]


# What the run adds to the metrics


def group(ordinal, *, has_signal=True, num_failed=0, num_poisoned=0):
    return GroupScored(
        ordinal=ordinal,
        has_signal=has_signal,
        mean_reward=float(ordinal),
        num_failed=num_failed,
        num_poisoned=num_poisoned,
        min_version=0,
        max_version=0,
    )


def test_times_of_a_side_are_means_over_those_that_are_there():
    vitals = Vitals(samples_per_group=4, max_staleness=1)
    for number in range(4):
        vitals.take(Counters(executor=f"generator-{number}", values={"time/decode": 1.0}))
    vitals.take(Counters(executor="generator-1@1", values={"time/decode": 1.0}))
    assert vitals.of_step(1)["time/generator/decode"] == 1.0
    for number in (1, 2, 3):
        vitals.take(ReplicaLost(replica=number))
    vitals.take(Counters(executor="generator-0", values={"time/decode": 2.0}))
    assert vitals.of_step(2)["time/generator/decode"] == 1.0


def test_vitals_of_a_step_by_hand():
    vitals = Vitals(samples_per_group=4, max_staleness=1)
    causes = ("no_signal", "failed", "stale", "regenerated", "re_prefilled")
    no_waste = {f"wasted_tokens/{cause}": 0.0 for cause in causes}
    assert vitals.of_step(1) == {"groups_scored": 0.0, "poisoned": 0.0} | no_waste
    for message in (
        group(0, has_signal=False),
        group(1, num_failed=3),
        group(2, num_failed=1, num_poisoned=1),
        group(3),
        Published(version=4, payload_bytes=1, staging_s=0.0, skipped=True),
        Published(version=5, payload_bytes=1, staging_s=0.0, is_same=True),
        Swapped(replica=0, version=2, transfer_s=0.0, pause_s=0.0, probe_error=0.0),
        Swapped(replica=1, version=5, transfer_s=0.0, pause_s=0.0, probe_error=0.0),
        Counters(executor="trainer", values={"time/forward_backward": 3.0, "time/wait_generation": 1.0}),
        Counters(executor="trainer@1", values={"refused_rollouts": 2.0}),
        Counters(executor="generator-0", values={"time/decode": 2.0, "time/swap": 0.0, "re_prefilled_tokens": 7.0}),
        Counters(executor="generator-1", values={"time/decode": 1.0, "time/wait_trainer": 3.0}),
    ):
        vitals.take(message)
    vitals.take(Wasted(0, "no_signal", 10))
    vitals.take(Wasted(0, "no_signal", 2))
    assert vitals.of_step(6) == {
        "groups_scored": 4.0,
        "poisoned": 3.0,
        "scored_reward_mean": 1.5,  # of groups with and without a signal
        "no_signal_frac": 0.25,
        "no_signal_in_a_row": 0.0,
        "scored_failed_frac": 0.25,
        "publish_skipped_frac": 0.5,
        "publish_same_frac": 0.5,
        "version_lag_max": 4.0,
        "version_lag_excess": 2.0,
        "wait_frac/trainer/wait_generation": 0.25,
        "wait_frac/generator-1/wait_trainer": 0.75,
        "time/trainer/forward_backward": 3.0,
        "time/trainer/wait_generation": 1.0,
        "time/generator/decode": 1.5,  # of two replicas
        "time/generator/wait_trainer": 1.5,
        **no_waste,
        "wasted_tokens/no_signal": 12.0,
        "wasted_tokens/re_prefilled": 7.0,
    }
    vitals.take(ReplicaLost(replica=0))
    vitals.take(
        Counters(
            executor="trainer",
            values={"time/forward_backward": 4.0, "time/wait_generation": 2.0, "time/wait_rewards": 2.0},
        )
    )
    vitals.take(Counters(executor="generator-0", values={"re_prefilled_tokens": 3.0}))  # it was started again
    vitals.take(Counters(executor="trainer@1", values={"refused_rollouts": 1.0}))  # so was this one
    assert vitals.of_step(7) == {
        "groups_scored": 0.0,
        "poisoned": 1.0,
        "version_lag_max": 2.0,
        "version_lag_excess": 0.0,
        "wait_frac/trainer/wait_generation": 0.25,
        "wait_frac/trainer/wait_rewards": 0.5,
        "time/trainer/forward_backward": 1.0,
        "time/trainer/wait_generation": 1.0,
        "time/trainer/wait_rewards": 2.0,
        **no_waste,
        "wasted_tokens/re_prefilled": 3.0,
    }
    assert not [name for name in vitals.of_step(8) if name.startswith(("wait", "time"))]  # no news
    vitals.take(Counters(executor="trainer", values={"time/forward_backward": 1.0, "time/wait_generation": 0.0}))
    assert not [name for name in vitals.of_step(9) if name.startswith(("wait", "time"))]  # it counts from 0 again
    vitals.take(Counters(executor="trainer", values={"time/forward_backward": 1.0, "time/wait_generation": 3.0}))
    assert vitals.of_step(10)["wait_frac/trainer/wait_generation"] == 1.0


def test_judges_are_counted_from_step_to_step() -> None:
    vitals = Vitals(samples_per_group=4, max_staleness=1)
    vitals.take(Counters(executor="rewards", values={"judge/a/requests": 5.0, "judge/a/seconds": 1.5}))
    vitals.take(Counters(executor="rewards", values={"judge/a/requests": 7.0, "judge/a/seconds": 2.0}))

    def told(version: int) -> dict[str, float]:
        return {name: value for name, value in vitals.of_step(version).items() if name.startswith("judge/")}

    assert told(1) == {"judge/a/requests": 7.0, "judge/a/seconds": 2.0}
    assert told(2) == {"judge/a/requests": 0.0, "judge/a/seconds": 0.0}
    vitals.take(Counters(executor="rewards", values={"judge/a/requests": 3.0}))  # it was started again
    assert told(3) == {"judge/a/requests": 3.0, "judge/a/seconds": 0.0}
