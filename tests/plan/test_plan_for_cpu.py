"""Plans for the cores of one machine, from curves so plain that the answer is computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from measured_kit import measured, quickstart_shape

from slipstream.controller.placement import place
from slipstream.core.errors import ConfigError
from slipstream.core.recipes import resolve
from slipstream.plan.counts import adapters_of
from slipstream.plan.cpu import CpuMachine, plan_for_cpu
from slipstream.plan.layouts import AsynchronousPlan, Workload
from slipstream.plan.lengths import LengthSample
from slipstream.plan.measured import Curves, Together, interpolated, measured_model
from slipstream.plan.question import ARCHITECTURES
from slipstream.plan.simulated_run import Batch

ROW_S = TOKEN_S = 0.001  # on one core; half on two
# 8 groups of 4 completions of 10 tokens, prompts of 4 that a group shares: 8 x 4 + 32 x 10 rows, 320 tokens.
WORKLOAD = Workload(groups=8, group_size=4, lengths=LengthSample(4.0, (10,), "test"))
ROWS, TOKENS = 352, 320


def machine(*, workload=WORKLOAD, cores=2, memory_bytes=16e9, overrides=None, **curves):
    tables = {"groups_per_step": 8, "completions_per_group": 4, "trainer": {"minibatches": 1}} | (overrides or {})
    config = resolve("quickstart", tables)
    return CpuMachine(
        config=config,
        shape=quickstart_shape(),
        workload=workload,
        times=Curves(measured(quickstart_shape(), **curves).models[0]),
        cores=cores,
        memory_bytes=memory_bytes,
    )


@pytest.mark.parametrize(
    ("at", "expected"), [(0.5, 8.0), (1, 8.0), (2, 4.0), (4, 2.0), (8, 1.0), (32, 1.0), (64, 1.0), (1000, 1.0)]
)
def test_between_points_there_is_a_power_law(at, expected):
    assert interpolated([(1, 8.0), (8, 1.0), (64, 1.0)], at) == pytest.approx(expected)


def test_curves_are_per_row_and_per_token_at_any_batch_and_number_of_cores():
    """Samples of 6 + 5 tokens have 10 rows; eta falls as 1 / b, so a microbatch takes the same whatever is in it."""
    curves = Curves(
        measured(
            quickstart_shape(), train_s=lambda cores, b: 0.8 / b / cores, generate_s=lambda cores, b: 0.5 / b
        ).models[0]
    )
    assert curves.trained_row_s(1, 80) == pytest.approx(0.1 / 10)  # eight samples
    assert curves.trained_row_s(1, 20) == pytest.approx(0.4 / 10)  # two, which were not measured
    assert curves.trained_row_s(2, 80) == pytest.approx(0.05 / 10)
    assert curves.decoded_token_s(1, 8) == pytest.approx(0.5 / 8 / 5)
    assert curves.together(1, 1) == (1.0, 1.0)


def test_the_nearest_division_says_how_much_both_sides_slow_each_other():
    near = Together(trainer_devices=1, generator_devices=1, trainer=1.5, generator=1.2)
    far = Together(trainer_devices=4, generator_devices=4, trainer=9.0, generator=0.7)
    curves = Curves(measured(quickstart_shape(), together=(far, near)).models[0])
    assert curves.together(1, 1) == (1.5, 1.2)
    assert curves.together(4, 3) == (9.0, 1.0)  # never faster than alone


def test_two_cores_are_one_for_each_side_and_a_step_takes_the_slower_one_s_time():
    half = {"train_s": lambda cores, _: 0.010 / cores**0.5, "generate_s": lambda cores, _: 0.005 / cores**0.5}
    plan = plan_for_cpu(machine(**half), max_staleness=2)
    best = plan.best
    assert (best.plan.trainer.devices, best.plan.generator.devices, best.plan.generator.replicas) == (1, 1, 1)
    assert best.found.step.sides["trainer"].total == pytest.approx(ROWS * ROW_S)
    assert best.found.step.sides["generator"].total == pytest.approx(TOKENS * TOKEN_S)
    assert best.found.longest_s == pytest.approx(10 * best.plan.generator.slots * TOKEN_S)
    assert best.rehearsed.step_s == pytest.approx(ROWS * ROW_S, rel=0.02)
    assert best.rehearsed.tokens_per_s == pytest.approx(TOKENS / best.rehearsed.step_s)
    assert best.rehearsed.idle["trainer"] < 0.02
    # In turns the trainer has both cores, which make it 1.41 times as fast. Two replicas generate on one each: eight
    # slots take two groups at a time, so that one of them gets five of the eight groups.
    in_turns = next(row for row in plan.by_staleness if row.rehearsed.max_staleness == 0)
    assert in_turns.plan.generator.replicas == 2
    assert in_turns.rehearsed.step_s == pytest.approx(ROWS * ROW_S / 2**0.5 + 5 / 8 * TOKENS * TOKEN_S)
    assert plan.synchronous is not None
    assert plan.synchronous.seconds == in_turns.rehearsed.step_s
    assert "forward and backward" in " ".join(plan.why)


def test_where_taking_turns_is_as_fast_it_is_recommended():
    """Two cores that are twice as fast: 352 rows and 320 tokens take 0.336 s in turns, 0.352 s beside each other."""
    assert plan_for_cpu(machine(), max_staleness=2).max_staleness == 0
    slower_trainer = machine(train_s=lambda cores, _: 0.030 / cores**0.2)
    assert plan_for_cpu(slower_trainer, max_staleness=2).max_staleness == 1


def test_the_best_way_to_take_turns_is_on_all_cores_whatever_the_recipe_says():
    split = machine(overrides={"sync_placement": "split"})
    plans = [plan_for_cpu(one, max_staleness=1) for one in (split, machine())]
    assert plans[0].synchronous is not None
    assert plans[1].synchronous is not None
    assert plans[0].synchronous.seconds == plans[1].synchronous.seconds
    assert split.planned(plans[0].best.plan, 0).is_colocated


def test_both_sides_slow_each_other_while_they_overlap():
    both = Together(trainer_devices=1, generator_devices=1, trainer=1.5, generator=1.5)
    plan = plan_for_cpu(machine(together=(both,), train_s=lambda cores, _: 0.030 / cores**0.1), max_staleness=1)
    row = next(row for row in plan.by_staleness if row.rehearsed.max_staleness == 1)
    alone_s, generating_s = 3 * ROWS * ROW_S, TOKENS * TOKEN_S
    # The generator's work overlaps the trainer's: 1.5 times its time, in which the trainer goes at 1 / 1.5.
    expected = alone_s + (1.5 - 1.0) * generating_s
    assert row.rehearsed.step_s == pytest.approx(expected, rel=0.05)
    assert row.found.step.sides["trainer"].total == pytest.approx(1.5 * alone_s)


def test_cores_are_divided_as_a_run_divides_them():
    """Whatever is found, `placement.place` gives it those cores."""
    four = machine(cores=4)
    candidates = list(four.candidates(2))
    assert {found.plan.generator.replicas for found in candidates} == {1, 2, 3}
    for found in candidates:
        assert isinstance(found.plan, AsynchronousPlan)
        replicas = found.plan.generator.replicas
        config = resolve("quickstart", {"generator": {"replicas": replicas}, "max_staleness": 2})
        threads = place(config, 4)
        assert found.plan.trainer.devices == threads["trainer"].together
        assert found.plan.generator.tensor_parallel == threads["generator"].together
        assert found.plan.generator.slots % 8 == 0
        assert found.plan.generator.slots <= -(-3 * 32 // replicas // 8) * 8  # three steps in flight


def test_memory_is_counted_and_what_does_not_fit_is_refused():
    """653,440 parameters: 16 bytes each in the trainer, two versions beside it; in the generator the one that arrives,
    and two that are packed, each with a table to look tokens up in."""
    one = machine()
    layers, head = 3 * (4 * 128 * 128 + 3 * 128 * 384), 99 * 128
    params = layers + head + 3 * 2 * 128 + 128
    plan = next(one.candidates(1)).plan
    held = one.memory(plan)
    expected = {"weights": 4.0, "moments": 8.0, "gradients": 4.0 + 8 * head / params, "staging": 8.0}
    assert {name: held["trainer"][name] / params for name in expected} == pytest.approx(expected)
    packed = 4 * (layers + head + head)
    assert held["generator"]["weights"] == packed
    assert held["generator"]["shadow"] == packed + 4 * params
    # Keys and values of three layers, 128 wide, four bytes: slots of 4 + 12 tokens have 32, and 2,048 are cached.
    token = 2 * 4 * 3 * 128
    assert held["generator"]["keys_and_values"] == token * (32 * plan.generator.slots + 2048)
    assert held["generator"]["evaluation"] == token * 32 * one.config.eval.num_slots
    with pytest.raises(ConfigError, match="machine's memory"):
        plan_for_cpu(machine(memory_bytes=20e6))


def test_a_reference_and_a_critic_are_held_and_take_their_time():
    """A reference reads once where the policy makes three passes; a critic trains as it does, without a head."""
    layers, head = 3 * (4 * 128 * 128 + 3 * 128 * 384), 99 * 128
    tied = layers + head + 3 * 2 * 128 + 128
    alone = replace(machine(update_s=0.1), shape=replace(quickstart_shape(), tie_embeddings=False))
    both = replace(alone, workload=replace(WORKLOAD, reference=True, critic=True))
    plan = next(alone.candidates(1)).plan
    before, held = (one.memory(plan)["trainer"] for one in (alone, both))
    assert (held["reference"], held["critic"]) == (4 * (tied + head), 16 * tied)
    assert held.total - before.total == pytest.approx(4 * (tied + head) + 16 * tied)
    passes_s = both.times.train(plan.trainer, both.workload).parts
    expected = {"forward_backward": 2 * ROWS * ROW_S, "optimizer": 2 * 0.1, "reference": ROWS * ROW_S / 3}
    assert passes_s == pytest.approx(expected)
    mean = Batch(groups=8, completions=32, prompt_tokens=32, completion_tokens=320)
    assert both.times.simulated(both.config, plan, both.workload)[0].train(mean) == pytest.approx(expected)
    adapted = replace(both.workload, adapters=adapters_of(quickstart_shape(), 8), critic=False)
    assert "reference" not in replace(both, workload=adapted).memory(plan)["trainer"].parts


def test_completions_that_are_not_selected_are_not_trained_on():
    """Two of four: 8 prompts x 4 tokens + 16 completions x 10, or all 352 rows where a KL is taken off each reward."""
    chosen = replace(WORKLOAD, trained_per_group=2, reference=True)
    mean = Batch(groups=8, completions=32, prompt_tokens=32, completion_tokens=320)
    for workload, read in ((chosen, 192), (replace(chosen, measures_all=True), ROWS)):
        one = machine(workload=workload)
        plan = next(one.candidates(1)).plan
        expected = {"forward_backward": 192 * ROW_S, "optimizer": 0, "reference": read * ROW_S / 3}
        assert one.times.train(plan.trainer, workload).parts == pytest.approx(expected)
        assert one.times.simulated(one.config, plan, workload)[0].train(mean) == pytest.approx(expected)
        assert one.times.generate(plan.generator, workload)["decode"] == pytest.approx(TOKENS * TOKEN_S)
        assert max(found.plan.trainer.microbatch for found in one.candidates(1)) == 16


def test_a_slot_holds_the_longest_sequence_with_all_turns():
    """As an engine has it: prompts of up to 40 tokens and 12 behind them; 16 and episodes of at most 48."""
    token = 2 * 4 * 3 * 128
    plan = next(machine().candidates(1)).plan
    longer = machine(overrides={"prompts": {"max_prompt_tokens": 40}})
    episodes = replace(machine(), config=resolve("calculator_mini"))
    for one in (longer, episodes):
        held = one.memory(plan)["generator"]["keys_and_values"]
        assert held == token * (64 * plan.generator.slots + one.config.generator.prefix_cache_tokens)


def test_memory_beside_adapters_is_that_of_the_base_once():
    """Of rank 8: A and B of seven matrices in three layers are all that is trained and published."""
    layers, head = 3 * (4 * 128 * 128 + 3 * 128 * 384), 99 * 128
    vectors, numbers = 3 * 2 * 128 + 128, 3 * 8 * (4 * 256 + 3 * 512)
    workload = replace(WORKLOAD, adapters=adapters_of(quickstart_shape(), 8))
    plan = next(machine().candidates(1)).plan
    parts = ("weights", "moments", "gradients", "staging", "shadow")
    rows = 3 * (2 * 128 + 3 * 128 + 128 + 3 * 384) + 99 - 3 * 128  # of all matrices, each with its scale in int8

    def held(lora, **generator):
        overrides = {"model": {"lora": {"rank": 8} | lora}, "generator": generator, "warm_start": {"steps": 0}}
        return machine(workload=workload, overrides=overrides).memory(plan)

    def of(side):
        return sum(side[name] for name in parts)

    whole, rounded = held({}), held({"base_precision": "int8"}, precision="int8")
    assert of(whole["trainer"]) == 4 * (layers + head + vectors) + 24 * numbers
    assert of(whole["generator"]) == 4 * (layers + 2 * head) + 4 * 5 * numbers
    stored = layers + head + 4 * (rows + vectors)
    assert of(rounded["trainer"]) == pytest.approx(stored + 4 * head + 24 * numbers, rel=1e-2), "one matrix expanded"
    assert of(rounded["generator"]) == 2 * (layers + head) + head + 4 * 5 * numbers
    for side in ("trainer", "generator"):
        assert rounded[side].without(*parts) == whole[side].without(*parts)


def test_a_model_that_was_not_measured_is_refused():
    made = measured(quickstart_shape())
    assert measured_model(made, quickstart_shape()).name == "made up"
    with pytest.raises(ConfigError, match=r"does not have this model") as refused:
        measured_model(made, ARCHITECTURES["llama-3.1-8b"])
    assert "made up" in str(refused.value)
    assert "docs/planning.md" in str(refused.value)
