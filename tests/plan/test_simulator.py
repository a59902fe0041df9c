"""Simulated runs: against times computed by hand, against their own logs, and under random dials."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from drawn import drawn
from hypothesis import strategies as st

from benchmarks.policies import heavy_tailed, slot_idle_frac, steps_of, trained_of
from slipstream.controller.policies import POLICIES, make_policy
from slipstream.controller.replay import replay
from slipstream.core.errors import ScheduleError
from slipstream.core.run_log import ScheduleConfig, read_decisions
from slipstream.core.types import CompletionFinished, StepDone, Swapped, TrainStep
from slipstream.plan.simulated_run import Costs, GroupWork, MadeUp, Simulated, SimulatedSetup
from slipstream.plan.simulator import simulate

P, G, LENGTH = 4, 2, 10
DECODE_S, TRAIN_S = 0.1, 3.0
WORK = MadeUp(lengths=lambda _: (LENGTH,) * G)
COSTS = Costs(decode=lambda *_: DECODE_S, train=lambda _: {"forward_backward": TRAIN_S})


def schedule(*, policy: str = "oldest_first", **dials):
    config = {
        "groups_per_step": P,
        "completions_per_group": G,
        "max_staleness": 0,
        "reorder_window": 1,
        "steps": 10,
        "capacity": P * G + G,
    }
    return make_policy(policy, ScheduleConfig(**config | dials))


def run(costs: Costs = COSTS, setup: SimulatedSetup = SimulatedSetup(slots=P * G), work=WORK, **dials) -> Simulated:
    return simulate(schedule(**dials), setup, work, costs)


def test_in_turns_a_step_takes_the_sum_of_its_parts():
    costs = replace(COSTS, publish_s=0.2, record_s=0.01, score_s=0.5, stage_s=0.3, swap_s=0.05, send_s=0.02)
    setup = SimulatedSetup(slots=P * G, weight_update="between_batches")
    found = run(costs, setup)
    # The weights come to the generator while the trainer records; all completions end with the same decode step.
    step_s = LENGTH * DECODE_S + P * G * 0.02 + 0.5 + TRAIN_S + 0.2 + 0.3 + 0.05
    assert [b.done_s - a.done_s for a, b in zip(found.timed, found.timed[1:], strict=False)] == pytest.approx(
        [step_s] * 9
    )
    assert found.wall_s == pytest.approx(10 * step_s - (0.2 + 0.3 + 0.05)), "the first step has its weights"
    assert found.lags == {0: 10 * P * G * LENGTH}
    assert found.accounting["generator-0"]["decode"] == pytest.approx(10 * LENGTH * DECODE_S)
    assert found.accounting["generator-0"]["send"] == pytest.approx(10 * P * G * 0.02)
    assert found.accounting["trainer"]["forward_backward"] == pytest.approx(10 * TRAIN_S)


def test_where_the_trainer_is_slower_a_step_takes_its_time():
    found = run(max_staleness=2, steps=30, costs=replace(COSTS, publish_s=0.5, record_s=0.01, receive_s=0.005))
    each_s = TRAIN_S + 0.5 + P * G * (0.01 + 0.005)
    assert found.timed[24].done_s - found.timed[9].done_s == pytest.approx(15 * each_s)
    assert found.outcome.idle["trainer"] == pytest.approx((LENGTH * DECODE_S) / found.wall_s, rel=0.02), (
        "the first batch"
    )


def test_where_generation_is_slower_a_step_takes_its_time():
    found = run(
        Costs(decode=lambda *_: DECODE_S, train=lambda _: {"forward_backward": 0.05}), max_staleness=3, steps=40
    )
    assert found.timed[-1].done_s - found.timed[9].done_s == pytest.approx(30 * LENGTH * DECODE_S)
    assert found.outcome.idle["generator"] < 0.02


def test_a_window_has_neither_the_beginning_nor_the_end():
    """The trainer is slower: in the middle it never waits, and a step takes what it takes."""
    costs = replace(COSTS, publish_s=0.5)
    whole = run(costs, max_staleness=2, steps=30)
    found = simulate(schedule(max_staleness=2, steps=30), SimulatedSetup(slots=P * G), WORK, costs, window=(10, 20))
    assert [step.ordinals for step in found.timed] == steps_of(whole)[10:20]
    assert found.wall_s == pytest.approx(10 * (TRAIN_S + 0.5))
    assert found.outcome.idle["trainer"] == 0.0 < whole.outcome.idle["trainer"]
    assert found.accounting["trainer"] == pytest.approx({"forward_backward": 10 * TRAIN_S, "stage": 10 * 0.5})
    # It generates ten steps' tokens meanwhile, with all of its slots or none.
    assert found.accounting["generator-0"]["decode"] == pytest.approx(10 * LENGTH * DECODE_S)
    assert slot_idle_frac(found) == pytest.approx(1 - 10 * LENGTH * DECODE_S / found.wall_s)
    assert found.generated_tokens == 10 * P * G * LENGTH
    assert sum(found.accounting["generator-0"].values()) == pytest.approx(found.wall_s)


def test_a_deeper_queue_hides_uneven_lengths():
    """One in four groups is eight times as long: by k = 3 its rows are hidden behind the steps before."""
    work = MadeUp(lengths=lambda o: (8 * LENGTH if o % 4 == 0 else LENGTH,) * G)
    costs = Costs(decode=lambda *_: DECODE_S, train=lambda _: {"forward_backward": 2.0})
    setup = SimulatedSetup(slots=64)
    step_s = {
        k: run(costs, setup, work, max_staleness=k, capacity=64 + G, steps=60).outcome.step_s for k in (0, 1, 2, 4, 6)
    }
    assert step_s[0] == pytest.approx(8 * LENGTH * DECODE_S + 2.0, rel=0.01)
    assert all(step_s[a] >= step_s[b] - 1e-9 for a, b in zip([0, 1, 2, 4], [1, 2, 4, 6], strict=True))
    assert step_s[6] == pytest.approx(2.0, rel=0.1)


SLOW = Costs(
    decode=lambda *_: 1.0, train=lambda _: {"forward_backward": 2.5}, prefill=lambda _, tokens, __: 0.001 * tokens
)


def test_tokens_have_the_version_that_was_live_when_they_were_sampled():
    """k = 1, in flight: step 0 trains what was sampled from 0 s to 10 s, until 12.5 s. The next groups start at 10 s.
    The generator hears of version 1 at 13 s, between two steps, and of its being staged at 14 s: after four of ten."""
    found = run(SLOW, max_staleness=1, steps=2)
    assert found.lags == {0: P * G * LENGTH + P * G * 6, 1: P * G * 4}


def test_between_batches_a_version_waits_for_the_last_completion():
    """As above, but from 14 s on version 1 waits until 20 s; the second batch is sampled at version 0."""
    found = run(SLOW, SimulatedSetup(slots=P * G, weight_update="between_batches"), max_staleness=1, steps=3)
    assert found.lags == {0: P * G * LENGTH, 1: 2 * P * G * LENGTH}
    assert found.accounting["generator-0"]["drain"] == pytest.approx(6 + 6), "and likewise after step 1"


def test_segments_let_a_version_in_before_the_end():
    """After 2 decode steps the eight completions leave, are prefilled again, and go on under the new version."""
    setup = SimulatedSetup(slots=P * G, weight_update="between_batches", segment_tokens=2)
    found = run(SLOW, setup, max_staleness=1, steps=2)
    old = 4 + 2  # tokens of version 0 in each of the second batch
    assert found.lags == {0: P * G * LENGTH + P * G * (LENGTH - old), 1: P * G * old}
    assert found.accounting["generator-0"]["re_prefill"] == pytest.approx(0.001 * P * G * old)


def test_new_weights_can_make_the_cache_anew():
    kept, anew = (
        run(SLOW, SimulatedSetup(slots=P * G, kv_on_update=mode), max_staleness=1, steps=2)
        for mode in ("keep", "recompute")
    )
    assert "re_prefill" not in kept.accounting["generator-0"]
    assert anew.accounting["generator-0"]["re_prefill"] == pytest.approx(0.001 * P * G * 4)


def test_a_group_is_told_of_when_the_trainer_is_free():
    """k = 1: the last group of batch 1 has no signal. Only after step 0 does anybody hear of it, and replace it."""
    work = MadeUp(lengths=lambda _: (LENGTH,) * G, has_signal=lambda ordinal: ordinal != 7)
    costs = Costs(decode=lambda *_: 0.1, train=lambda _: {"forward_backward": 5.0})
    found = run(costs, SimulatedSetup(slots=P * G), work, max_staleness=1, steps=2)
    assert found.dropped == {7: "no_signal"}
    assert found.timed[0].done_s == pytest.approx(1 + 5)
    assert found.timed[1].start_s == pytest.approx(6 + 1), "its replacement is sampled then, not during the step"


def test_few_workers_score_one_after_the_other():
    costs = replace(COSTS, score_s=0.4)
    one, four, many = (run(costs, SimulatedSetup(slots=P * G, workers=workers)) for workers in (1, 4, 0))
    first = [found.timed[0].start_s - LENGTH * DECODE_S for found in (one, four, many)]
    assert first == pytest.approx([P * G * 0.4, P * G / 4 * 0.4, 0.4])


def test_on_shared_cores_both_sides_are_slower_while_they_overlap():
    """Both always busy at 0.5: a step of 3 s takes 6, as does sampling; alone it is as without sharing."""
    costs = Costs(decode=lambda *_: 0.3, train=lambda _: {"forward_backward": TRAIN_S})
    setup = SimulatedSetup(slots=P * G, cores=2, beside={"train": 0.5, "decode": 0.5})
    own = run(costs, SimulatedSetup(slots=P * G), max_staleness=1, steps=30)
    shared = run(costs, setup, max_staleness=1, steps=30)
    assert own.outcome.step_s == pytest.approx(3.0, rel=0.05)
    assert shared.outcome.step_s == pytest.approx(6.0, rel=0.05)
    assert run(costs, setup).outcome.step_s == pytest.approx(run(costs, SimulatedSetup(slots=P * G)).outcome.step_s), (
        "in turns nobody is beside"
    )


def test_evaluation_takes_turns_with_decoding():
    """100 prompts of one token on 10 slots: 10 steps. They begin with the second of training's ten."""

    class Work(MadeUp):
        def held_out(self, version):
            return [GroupWork(1, (1,))] * 100

    work = Work(lengths=lambda _: (LENGTH,) * G)
    setup = SimulatedSetup(slots=P * G, evaluates_first=1, evaluation_slots=10)
    found = run(setup=setup, work=work)
    assert found.timed[0].start_s == pytest.approx((LENGTH + 9) * DECODE_S)
    assert found.accounting["generator-0"]["evaluate"] == pytest.approx(10 * DECODE_S)
    every = run(setup=replace(setup, evaluates_first=0, evaluate_every=2), work=work)
    assert every.accounting["generator-0"]["evaluate"] == pytest.approx(4 * 10 * DECODE_S), "after 2, 4, 6, 8 of 10"


def test_a_publish_without_a_slot_is_skipped_and_comes_later():
    """Staging takes 2.5 steps: of three versions in a row the third finds both slots taken."""
    costs = Costs(decode=lambda *_: 0.1, train=lambda _: {"forward_backward": 1.0}, stage_s=2.5)
    found = run(costs, SimulatedSetup(slots=64), max_staleness=8, steps=20, capacity=64 + G)
    assert found.publishes_skipped > 0
    assert len(found.timed) == 20


def test_messages_and_the_controller_take_their_time():
    costs = replace(COSTS, to_controller_s=0.1, to_generator_s=0.2, to_trainer_s=0.3, to_rewards_s=0.4)
    costs = replace(costs, from_rewards_s=0.5, decide_s=0.01)
    found = run(costs, steps=1)
    # The first admission is decided at 0.01 s. Four groups' scores are decided one after the other.
    start_s = 0.01 + 0.2 + LENGTH * DECODE_S + 0.4 + 0.5 + 0.1 + 4 * 0.01 + 0.3
    assert found.timed[0].start_s == pytest.approx(start_s)
    assert found.wall_s == pytest.approx(start_s + TRAIN_S + 0.1)


def test_a_log_replays_and_says_the_same(tmp_path):
    """The schedule decides alike from the file, its audit finds nothing, and what the log says is what was returned."""
    work = MadeUp(lengths=heavy_tailed(1, completions=G, median=20), has_signal=lambda o: o % 5 != 0)
    setup = SimulatedSetup(replicas=2, slots=4)
    policy = schedule(max_staleness=2, steps=25, capacity=4 + G, reorder_window=3)
    found = simulate(policy, setup, work, replace(COSTS, score_s=0.2), events=tmp_path / "events.jsonl")
    replayed = replay(tmp_path)
    assert replayed.is_sound, replayed
    assert (replayed.num_steps, replayed.num_trained) == (25, 25 * P)
    assert replayed.num_decisions == found.num_events
    assert replayed.max_staleness == found.outcome.staleness_max
    lines = list(read_decisions(tmp_path / "events.jsonl"))
    done = [line.time_s for line in lines if isinstance(line.event, StepDone)]
    assert done == [step.done_s for step in found.timed]
    trained = [c.ordinals for line in lines for c in line.commands if isinstance(c, TrainStep)]
    assert trained == steps_of(found)


def test_a_seed_says_all():
    work = MadeUp(lengths=heavy_tailed(1, completions=G, median=20))
    costs = replace(COSTS, jitter={"decode": [0.5, 1.5], "train": [0.8, 1.2]})
    once, again, other = (
        simulate(schedule(max_staleness=1), SimulatedSetup(slots=8), work, costs, seed=seed) for seed in (1, 1, 2)
    )
    assert once == again
    assert once.wall_s != other.wall_s
    plain = simulate(schedule(max_staleness=1), SimulatedSetup(slots=8), work, COSTS)
    assert once.wall_s == pytest.approx(plain.wall_s, rel=0.3)


def test_slots_that_were_never_empty_are_not_busier_than_that():
    run = Simulated(slot_busy_s=sum([0.1] * 10) + 1e-15, slot_s=1.0)
    assert run.slot_busy_s > run.slot_s, "sums of many parts round apart"
    assert slot_idle_frac(run) == 0


def test_a_stuck_schedule_is_an_error():
    with pytest.raises(ScheduleError, match="stuck"):
        run(max_staleness=1, reorder_window=2 * P)


@st.composite
def simulations(draw, name):
    groups = draw(st.integers(1, 4))
    staleness = 1 if name == "one_step" else draw(st.integers(0, 3))
    every = 1 if name == "one_step" else draw(st.integers(1, staleness + 1))
    samples = draw(st.integers(1, 3))
    slots = draw(st.integers(1, 9))
    window = draw(st.integers(1, (staleness - every + 1) * groups + 1)) if name == "oldest_first" else 1
    config = ScheduleConfig(
        groups_per_step=groups,
        completions_per_group=samples,
        max_staleness=staleness,
        reorder_window=window,
        publish_every=every,
        steps=draw(st.integers(1, 12)),
        capacity=max(slots, samples) + samples,
        staleness_threshold=draw(st.sampled_from([0.0, 1.0])),
        queue_groups=draw(st.integers(groups, 3 * groups)),
    )
    update = draw(st.sampled_from(["in_flight", "between_batches"]))
    in_flight = update == "in_flight"
    setup = SimulatedSetup(
        replicas=draw(st.integers(1, 3)),
        slots=slots,
        row_multiple=draw(st.sampled_from([1, 8])),
        weight_update=update,
        segment_tokens=None if in_flight else draw(st.sampled_from([None, 1, 3])),
        resident_versions=1 if in_flight else draw(st.sampled_from([1, staleness + 1])),
        kv_on_update=draw(st.sampled_from(["keep", "recompute", "recompute_if_older_than"])) if in_flight else "keep",
        max_kv_age=draw(st.integers(0, 2)),
        prefill_tokens=draw(st.sampled_from([2, 512])),
        prefill_chunk=draw(st.sampled_from([2, 512])),
        workers=draw(st.integers(0, 2)),
        evaluates_first=draw(st.integers(0, 1)),
        evaluate_every=draw(st.integers(0, 3)),
        evaluation_slots=2,
        checkpoint_every=draw(st.integers(0, 3)),
        cores=draw(st.sampled_from([None, 1, 2, 4])),
        trainer_threads=draw(st.integers(1, 2)),
        beside={"train": 0.6, "decode": 0.7},
    )
    small = st.sampled_from([0.0, 0.01, 0.3])
    names = [name for name in Costs.__dataclass_fields__ if name.endswith("_s")]
    costs = Costs(
        decode=lambda replica, rows, context: 0.05 * (1 + replica) + 0.01 * rows + 0.001 * context,
        train=lambda batch: {"forward_backward": 0.01 * batch.completion_tokens, "optimizer": 0.1},
        prefill=lambda _, tokens, is_alone: 0.01 * tokens + 0.05 * is_alone,
        jitter=draw(st.sampled_from([{}, {"decode": [0.5, 1.5], "train": [0.5, 1.5], "score": [0.0, 2.0]}])),
        **{name: draw(small) for name in names},
    )
    return config, setup, costs, draw(st.integers(0, 3))


class Observed:
    """A workload that counts what it was asked for."""

    def __init__(self, samples: int, seed: int) -> None:
        self.asked: dict[int, GroupWork] = {}
        self._lengths = heavy_tailed(seed, completions=samples, median=6, longest=60)

    def group(self, ordinal, step):
        assert ordinal not in self.asked, "once each"
        self.asked[ordinal] = GroupWork(1 + ordinal % 7, self._lengths(ordinal), ordinal % 6 != 2)
        return self.asked[ordinal]

    def held_out(self, version):
        return [GroupWork(2, (1 + (i + version) % 5,)) for i in range(5)]


@pytest.mark.parametrize("name", sorted(POLICIES))
@drawn(4, 10, data=st.data())
def test_whatever_the_dials_nothing_is_lost_and_every_second_is_told(tmp_path_factory, name, data):
    config, setup, costs, seed = data.draw(simulations(name))
    work = Observed(config.completions_per_group, seed)
    folder = tmp_path_factory.mktemp("simulated")
    policy = make_policy(name, config)
    found = simulate(policy, setup, work, costs, seed=seed, events=folder / "events.jsonl")
    # Groups: each trained once, dropped once, or still under way
    trained, dropped = trained_of(found), found.dropped
    assert len(trained) == len(set(trained)) == config.steps * config.groups_per_step
    assert not set(trained) & set(dropped)
    assert all(work.asked[o].has_signal for o in trained)
    assert all(not work.asked[o].has_signal for o, cause in dropped.items() if cause == "no_signal")
    assert found.started.total() == len(work.asked)
    # Tokens
    size = {ordinal: sum(asked.lengths) for ordinal, asked in work.asked.items()}
    assert found.lags.total() == sum(size[o] for o in trained)
    assert found.generated_tokens == found.lags.total() + sum(size[o] for o in dropped) + found.left_tokens
    # The bound, and time
    assert policy.staleness_bound is None or found.outcome.staleness_max <= policy.staleness_bound
    assert min(found.lags) >= 0
    assert set(found.accounting) == {"trainer", *(f"generator-{i}" for i in range(setup.replicas))}
    for process, states in found.accounting.items():
        assert sum(states.values()) == pytest.approx(found.wall_s), process
        assert min(states.values(), default=0) >= 0
    assert all(a.done_s <= b.start_s + 1e-9 for a, b in zip(found.timed, found.timed[1:], strict=False))
    assert 0 <= slot_idle_frac(found) <= 1
    # The log
    replayed = replay(folder)
    assert replayed.is_sound, (replayed.divergence, replayed.violations)


def test_one_step_after_the_other_is_the_same_as_many_on_end(monkeypatch):
    """Decode steps between two changes are one piece of work: as if each had been an event of its own."""
    from slipstream.plan import simulated_generator

    def one_by_one(self, steps):
        return min(steps, 1)

    work = MadeUp(lengths=heavy_tailed(3, completions=G, median=40), prompt_tokens=9)
    costs = Costs(
        decode=lambda _, rows, context: 0.05 + 0.01 * rows + 0.0005 * context,
        train=lambda batch: {"forward_backward": 0.003 * batch.completion_tokens},
        prefill=lambda _, tokens, __: 0.002 * tokens,
        send_s=0.01,
        stage_s=0.7,
        swap_s=0.02,
        score_s=0.11,
        to_generator_s=0.013,
    )
    for setup in (
        SimulatedSetup(replicas=2, slots=5),
        SimulatedSetup(replicas=2, slots=5, cores=2, beside={"train": 0.6, "decode": 0.7}),
        SimulatedSetup(slots=8, weight_update="between_batches", segment_tokens=7),
    ):
        dials = {"max_staleness": 2, "capacity": setup.slots + G, "steps": 15}
        at_once = simulate(schedule(**dials), setup, work, costs)
        with monkeypatch.context() as patch:
            patch.setattr(simulated_generator.Replica, "_limited", one_by_one)
            each = simulate(schedule(**dials), setup, work, costs)
        assert steps_of(at_once) == steps_of(each)
        assert [s.done_s for s in at_once.timed] == pytest.approx([s.done_s for s in each.timed])
        assert at_once.lags == each.lags
        for process, states in at_once.accounting.items():
            assert states == pytest.approx(each.accounting[process], rel=0.01), process
        assert at_once.num_jumps < each.num_jumps


def test_staleness_is_that_of_the_log(tmp_path):
    """Without latencies: recounted from the times of the log, token by token."""
    costs = Costs(decode=lambda *_: 1.0, train=lambda _: {"forward_backward": 4.5})
    work = MadeUp(lengths=heavy_tailed(5, completions=G, median=12, longest=60))
    found = simulate(
        schedule(max_staleness=3, steps=20, capacity=4 + G),
        SimulatedSetup(slots=4),
        work,
        costs,
        events=tmp_path / "events.jsonl",
    )
    swapped: list[tuple[float, int]] = []
    ended: dict[int, list[tuple[float, int]]] = defaultdict(list)
    lags: Counter[int] = Counter()
    for line in read_decisions(tmp_path / "events.jsonl"):
        event = line.event
        if isinstance(event, Swapped):
            swapped.append((line.time_s, event.version))
        if isinstance(event, CompletionFinished):
            ended[event.ordinal].append((line.time_s, event.num_tokens))
        for command in line.commands:
            if isinstance(command, TrainStep):
                for ordinal in command.ordinals:
                    for time_s, tokens in ended[ordinal]:
                        for token in range(tokens):  # sampled in the second that ends then
                            began_s = time_s - (tokens - token)
                            lags[command.step - max(v for t, v in swapped if t <= began_s + 1e-9)] += 1
    assert found.lags == lags
    assert len(lags) > 2


def test_a_window_is_that_part_of_the_run():
    """Steps 5 to 14 of 30: the same steps, tokens and seconds as in the whole run."""
    work = MadeUp(lengths=heavy_tailed(2, completions=G, median=20))
    costs = replace(COSTS, publish_s=0.2, stage_s=0.5)
    setup = SimulatedSetup(slots=8, cores=2, beside={"train": 0.6, "decode": 0.7})
    whole, part = (
        simulate(schedule(max_staleness=2, steps=30), setup, work, costs, window=window) for window in (None, (5, 15))
    )
    start_s, end_s = whole.timed[4].done_s, whole.timed[14].done_s
    assert part.wall_s == pytest.approx(end_s - start_s)
    assert steps_of(part) == steps_of(whole)[5:15]
    assert [step.done_s for step in part.timed] == pytest.approx([s.done_s - start_s for s in whole.timed[5:15]])
    assert part.lags.total() == sum(step.batch.completion_tokens for step in whole.timed[5:15])
    for states in part.accounting.values():
        assert sum(states.values()) == pytest.approx(part.wall_s)
    assert 0 < slot_idle_frac(part) < 1
