"""The cost model against numbers worked out by hand, brute force, and LlamaRL's formulas."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from theory import Side, Theory, eta_g, eta_t

from slipstream.batching.balance import balanced_permutation
from slipstream.core.errors import ConfigError
from slipstream.plan.cost_model import CostModel
from slipstream.plan.counts import adapters_of
from slipstream.plan.hardware import DEVICES, GpuCluster, all_reduce_s, all_to_all_s, cluster
from slipstream.plan.layouts import (
    AsynchronousPlan,
    Efficiency,
    GeneratorLayout,
    Parts,
    ScorerLayout,
    SynchronousPlan,
    TrainerLayout,
    Workload,
)
from slipstream.plan.lengths import LengthSample, lengths_with_tail, slowest_replica
from slipstream.plan.question import ARCHITECTURES

LLAMA_8B, LLAMA_70B = ARCHITECTURES["llama-3.1-8b"], ARCHITECTURES["llama-3.1-70b"]
LLAMA_405B, QWEN_4B = ARCHITECTURES["llama-3.1-405b"], ARCHITECTURES["qwen3-4b"]
PYTHIA = ARCHITECTURES["pythia-6.9b"]
IDEAL = Efficiency(
    matmul=1, memory=1, network=1, kernel_s=0, collective=1, host_task_s=0, step_s=0, sequence_s=0, serial_s=0
)
H100 = DEVICES["H100"]


def even(completion: int, prompt: float = 100.0) -> LengthSample:
    return LengthSample(prompt, (completion,), "all alike")


def costs(
    model=LLAMA_8B,
    devices: int = 64,
    lengths: LengthSample | None = None,
    efficiency: Efficiency = IDEAL,
    **work: object,
) -> CostModel:
    workload = Workload(groups=64, group_size=8, lengths=lengths or even(500), **work)  # type: ignore[arg-type]
    return CostModel(model, cluster("H100", devices), workload, efficiency)


def trainer(devices: int = 8, tensor_parallel: int = 1, microbatch: float = 8, **rest: object) -> TrainerLayout:
    return TrainerLayout(devices=devices, tensor_parallel=tensor_parallel, microbatch=microbatch, **rest)  # type: ignore[arg-type]


def generator(devices: int = 8, tensor_parallel: int = 1, slots: int = 64, **rest: object) -> GeneratorLayout:
    return GeneratorLayout(devices=devices, tensor_parallel=tensor_parallel, slots=slots, **rest)  # type: ignore[arg-type]


# Decoding


def test_one_completion_takes_the_weights_once_per_token() -> None:
    """8.03 B parameters less 0.53 B of the embedding, 2 bytes each, at 3.35 TB/s: 4.48 ms."""
    step = costs().decode_step(generator(), live=1, context=0)
    assert step.total == pytest.approx(7.505e9 * 2 / 3.35e12, rel=2e-3)
    quarter = costs().decode_step(generator(tensor_parallel=4), live=1, context=0)
    assert quarter["weights"] == pytest.approx(step["weights"] / 4, rel=1e-3)


def test_keys_and_values_are_read_for_every_token_that_is_seen() -> None:
    """Llama 8B: 32 layers of 8 heads of 128, keys and values, 2 bytes: 128 KiB a token."""
    step = costs().decode_step(generator(), live=256, context=1000)
    assert step["keys_and_values"] == pytest.approx(256 * 1000 * 128 * 1024 / 3.35e12)
    shared = costs().decode_step(generator(tensor_parallel=8), live=256, context=1000)
    assert shared["keys_and_values"] == pytest.approx(step["keys_and_values"] / 8)
    # 16 ranks of 8 heads: two ranks hold the same one
    double = costs().decode_step(generator(devices=16, tensor_parallel=16), live=256, context=1000)
    assert double["keys_and_values"] == pytest.approx(shared["keys_and_values"])


def test_fp8_halves_what_is_read_but_not_the_head() -> None:
    both = [
        costs(LLAMA_70B).decode_step(generator(tensor_parallel=8, precision=precision), live=1, context=0)["weights"]
        for precision in ("bfloat16", "fp8")
    ]
    head = 128256 * 8192 / 8 * 2 / 3.35e12
    assert both[1] - head == pytest.approx((both[0] - head) / 2, rel=1e-3)


def test_many_completions_are_bound_by_products() -> None:
    step = costs().decode_step(generator(), live=50_000, context=0)
    assert step["weights"] == pytest.approx(2 * 7.505e9 * 50_000 / 989.4e12, rel=0.01)


def test_decode_pays_for_kernels_collectives_and_the_host() -> None:
    plain, layout = costs(LLAMA_405B, 16), generator(16, 16)
    base = plain.decode_step(layout, live=32, context=0)
    slower = {
        "kernels": replace(IDEAL, kernel_s=2e-6),
        "tensor_parallel": replace(IDEAL, collective=2.0),
        "sampler": replace(IDEAL, step_s=1e-3, sequence_s=1e-4),
    }
    gains = {
        part: costs(LLAMA_405B, 16, efficiency=efficiency).decode_step(layout, live=32, context=0) + base.times(-1)
        for part, efficiency in slower.items()
    }
    assert gains["kernels"].total == pytest.approx((126 * 14 + 73) * 2e-6), "of ranks that share layers"
    assert gains["tensor_parallel"].total == pytest.approx(base["tensor_parallel"])
    assert gains["sampler"].total == pytest.approx(1e-3 + 32e-4)
    hosted = costs(LLAMA_405B, 16, efficiency=replace(IDEAL, host_task_s=26e-6)).decode_step(layout, live=32, context=0)
    # two sums in each of 126 layers, and the logits; the last of 16 hosts
    assert hosted.total - base.total == pytest.approx((2 * 126 + 1) * 26e-6 * 3.380729, rel=1e-5)


# Generation


def decoded_step_by_step(lengths: list[int], slots: int) -> list[int]:
    """How many completions are alive in each decode step, one step at a time."""
    waiting, live, alive = list(lengths), [], []
    while waiting or live:
        while waiting and len(live) < slots:
            live.append(waiting.pop(0))
        alive.append(len(live))
        live = [left - 1 for left in live if left > 1]
    return alive


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 4), st.integers(1, 5), st.integers(0, 20))
@settings(max_examples=60, deadline=None)
def test_the_slowest_replica_step_by_step(sampled: list[int], replicas: int, slots: int, more: int) -> None:
    rollouts = replicas + more
    profile = slowest_replica(tuple(sorted(sampled)), rollouts, replicas, slots)
    quantiles = [sorted(sampled)[int((i + 0.5) / rollouts * len(sampled))] for i in range(rollouts)]
    expected: dict[int, float] = {}
    for seed in range(4):
        dealt = np.random.default_rng(seed).permutation(np.array(quantiles)).tolist()
        runs = [decoded_step_by_step(dealt[replica::replicas], slots) for replica in range(replicas)]
        slowest = max(runs, key=len)
        for live in slowest:
            expected[live] = expected.get(live, 0.0) + 1 / 4
    steps = sum(count for _, count in profile)
    assert steps == pytest.approx(sum(expected.values()))
    if replicas == 1:  # else replicas may tie
        assert dict(profile) == pytest.approx(expected)
        assert sum(live * count for live, count in profile) == pytest.approx(sum(quantiles))


def test_alike_lengths_that_fill_all_slots_leave_no_stragglers() -> None:
    """512 completions on 8 replicas of 16 slots: four waves, all full."""
    full = costs().generation(generator(slots=16), waits_for_longest=False)
    waiting = costs().generation(generator(slots=16), waits_for_longest=True)
    assert waiting.total == pytest.approx(full.total)
    step = costs().decode_step(generator(slots=16), live=16, context=100 + 250)
    assert full.without("prefill").total == pytest.approx(4 * 500 * step.total)


def test_a_heavy_tail_costs_the_batch_that_waits_for_it() -> None:
    light, heavy = (costs(lengths=lengths_with_tail(100, 500, tail * 500, 8000)) for tail in (1.2, 5.0))
    layout = generator(slots=16)
    even_s = [model.generation(layout, waits_for_longest=False).total for model in (light, heavy)]
    assert even_s[1] == pytest.approx(even_s[0], rel=0.05)  # longer contexts, the same tokens
    straggler = [model.generation(layout, waits_for_longest=True)["straggler"] for model in (light, heavy)]
    assert straggler[1] > 4 * straggler[0] > 0


def test_more_replicas_than_completions() -> None:
    assert slowest_replica((7,), 2, 5, 4) == ((1, 7.0),)


def test_slots_that_a_waiting_batch_cannot_fill_do_not_count() -> None:
    model = costs()
    wide = model.generation(generator(slots=1024), waits_for_longest=True)
    enough = model.generation(generator(slots=64), waits_for_longest=True)
    assert wide.parts == pytest.approx(enough.parts)


# Training


def test_training_takes_six_operations_per_parameter_and_token() -> None:
    """The usual 6 N D, with short rollouts (attention) and without recomputation, at the peak of the hardware."""
    layout = trainer(8, microbatch=64, recompute=False, head_precision="bfloat16")
    model = costs(lengths=even(40, prompt=8), shares_prompts=False)
    flops = model.train_step(layout)["compute"] * 8 * 989.4e12
    layers, head = 7.505e9 - 128256 * 4096, 128256 * 4096
    by_hand = 6 * 512 * (48 * layers + 40 * 4 / 3 * head)  # the head's logits are computed once more in chunks
    assert flops == pytest.approx(by_hand, rel=0.03)


def test_recomputation_costs_a_third_and_saves_activations() -> None:
    kept, again = trainer(recompute=False), trainer(recompute=True)
    model = costs(lengths=even(40))
    layers = [
        model.train_step(layout)["compute"] - model._head(layout, 8, is_trained=True)["compute"] * 8
        for layout in (kept, again)
    ]
    assert layers[1] == pytest.approx(layers[0] * 4 / 3)
    memory = [model.train_memory(layout)["activations"] for layout in (kept, again)]
    assert memory[1] < memory[0] / 3


def test_shared_prompts_are_computed_once_per_group() -> None:
    alone, shared = (costs(lengths=even(100, prompt=800), shares_prompts=shares) for shares in (False, True))
    assert (alone.workload.trained_tokens, shared.workload.trained_tokens) == (900, 200)
    assert shared.train_step(trainer()).total < 0.3 * alone.train_step(trainer()).total


def test_gradients_are_reduced_once_if_asked_for() -> None:
    """Small microbatches over a slow network: reducing each time is what takes long."""
    slow = GpuCluster(device=replace(H100, network_bandwidth=5e9), num_devices=64)
    model = CostModel(LLAMA_8B, slow, Workload(groups=64, group_size=8, lengths=even(50)), IDEAL)
    often, once = trainer(64, 8, microbatch=8), trainer(64, 8, microbatch=8, reduce_once=True)
    assert model.train_step(once)["data_parallel"] < 0.7 * model.train_step(often)["data_parallel"]
    assert model.train_memory(once)["gradients"] == 8 * model.train_memory(often)["gradients"]


@pytest.mark.parametrize(
    ("model", "recompute", "sums"),
    [(LLAMA_8B, False, 4), (LLAMA_8B, True, 6), (PYTHIA, False, 3), (PYTHIA, True, 4)],
)
def test_sums_over_tensor_parallel_ranks(model, recompute: bool, sums: int) -> None:
    """Llama: after attention and MLP, forward, and gradients of both; GPT-NeoX: one sum for both, forward. The head:
    four numbers a sampled token, and the gradient of its state in float32, at any vocabulary."""
    layout = trainer(8, 8, 512, recompute=recompute)
    costing = costs(model, 8)
    spent = costing.train_step(layout)["tensor_parallel"]
    one = all_reduce_s(512 * 512.5 * model.hidden_size * 2, 8, cluster("H100", 8))
    head = all_reduce_s(512 * costing.workload.lengths.mean * 4 * (4 + model.hidden_size), 8, cluster("H100", 8))
    assert spent == pytest.approx(model.num_layers * sums * one + head, rel=1e-3)


def test_fsdp_is_what_the_network_carries_beside_the_work() -> None:
    """Layers are gathered twice in bfloat16, embedding and head once, gradients reduced in float32; 7/8 of all that."""
    slow = GpuCluster(device=replace(H100, network_bandwidth=1e9), num_devices=64)
    model = CostModel(LLAMA_8B, slow, Workload(groups=64, group_size=8, lengths=even(50)), IDEAL)
    step = model.train_step(trainer(64, 8, 64))
    layers, root = 32 * 218.1e6 / 8, 128256 * 4096 * (1 + 1 / 8)
    carried = (8 * layers + 6 * root) * (7 / 8) / (0.94 * 1e9)
    work = step["compute"] + step["activations"] + step["tensor_parallel"]
    assert step["data_parallel"] == pytest.approx(carried - work, rel=5e-3)
    fast = costs(lengths=even(2000)).train_step(trainer(64, 8, 64))
    assert fast["data_parallel"] == 0.0  # hidden behind the work


def test_ranks_wait_for_the_one_with_most_tokens() -> None:
    """Against lengths that are really drawn: with 4 on each of 128 ranks, the longest alone is more than the mean."""
    lengths = lengths_with_tail(0.0 + 1, 500, 2000, 8000)
    rng = np.random.default_rng(0)
    for ranks, count in ((16, 32), (128, 4)):
        drawn = rng.choice(lengths.completions, (20, ranks * count)).tolist()
        dealt = [[sum(one[i] for i in share) for share in balanced_permutation(one, ranks)] for one in drawn]
        measured = np.mean([max(tokens) / np.mean(tokens) for tokens in dealt]) - 1
        step = costs(lengths=lengths, shares_prompts=True).train_step(trainer(ranks))
        rest = step["imbalance"] / (step.total - step["imbalance"] - step["optimizer"])
        assert rest == pytest.approx(measured, rel=0.25, abs=0.005)


def test_ranks_wait_longer_where_rollouts_are_dealt_by_number() -> None:
    """Against sums of lengths that are really dealt to 16 ranks, 32 each."""
    lengths = lengths_with_tail(0.0 + 1, 500, 2000, 8000)
    rng = np.random.default_rng(0)
    dealt = rng.choice(lengths.completions, (4000, 16, 32)).sum(2)
    measured = (dealt.max(1) / dealt.mean(1)).mean() - 1
    step = costs(lengths=lengths, shares_prompts=True, deals_by_length=False).train_step(trainer(16))
    rest = step["imbalance"] / (step.total - step["imbalance"] - step["optimizer"])
    assert rest == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(("ranks", "by_number"), [(2, 0.066), (8, 0.159), (64, 0.259)])
def test_waiting_is_what_benchmarks_dealing_measured(ranks: int, by_number: float) -> None:
    """docs/cluster.md: 64 completions per rank with the long tail of `experiments/collation`, 16 to 512 tokens; dealt
    by length at most half a percent."""
    points = [NormalDist().inv_cdf((place + 0.5) / 1000) for place in range(1000)]
    tail = LengthSample(1e-9, tuple(round(min(max(64 * math.exp(1.2 * z), 16), 512)) for z in points), "long tail")
    waits = []
    for deals_by_length in (False, True):
        work = Workload(groups=8 * ranks, group_size=8, lengths=tail, deals_by_length=deals_by_length)
        more = CostModel(LLAMA_8B, cluster("H100", ranks), work)._imbalance(trainer(ranks))
        waits.append(more / (1 + more))
    assert waits[0] == pytest.approx(by_number, abs=0.015)
    assert waits[1] <= 0.005


def test_a_rollout_is_not_divided_over_ranks() -> None:
    few = Workload(groups=2, group_size=2, lengths=even(500))
    model = CostModel(LLAMA_8B, cluster("H100", 64), few, IDEAL)
    assert model.train_step(trainer(64, microbatch=1))["compute"] == pytest.approx(
        model.train_step(trainer(4, microbatch=1))["compute"]
    )


def test_updates_epochs_critic_and_serial_work() -> None:
    base = costs().train_step(trainer(microbatch=4))
    assert costs(epochs=2).train_step(trainer(microbatch=4)).total == pytest.approx(2 * base.total)
    split = costs(minibatches=4).train_step(trainer(microbatch=4))
    assert split["compute"] == pytest.approx(base["compute"])
    assert split["optimizer"] == pytest.approx(4 * base["optimizer"])
    assert costs(critic=True).train_step(trainer(microbatch=4)).total == pytest.approx(2 * base.total)
    later = costs(efficiency=replace(IDEAL, serial_s=3.0)).train_step(trainer(microbatch=4))
    assert later.total == pytest.approx(base.total + 3.0)
    assert base["optimizer"] == pytest.approx(28 * 8.03e9 / 8 / 3.35e12, rel=1e-3)


def test_a_trainer_that_takes_two_of_eight_works_as_for_groups_of_two() -> None:
    """Whoever samples or only reads works for all eight; so does a reference whose KL is taken off every reward."""
    chosen, pairs, all_of_them = costs(trained_per_group=2), costs(), costs()
    pairs.workload = replace(pairs.workload, group_size=2)
    layout = trainer(microbatch=4, pipeline_parallel=2)
    assert chosen.train_step(layout) == pairs.train_step(layout)
    assert chosen.train_floor_s(layout) == pairs.train_floor_s(layout)
    assert chosen.train_memory(layout) == pairs.train_memory(layout)
    assert chosen.reference_pass(layout) == pairs.reference_pass(layout)
    penalised = costs(trained_per_group=2, measures_all=True)
    assert penalised.train_step(layout) == pairs.train_step(layout)
    assert penalised.reference_pass(layout) == all_of_them.reference_pass(layout)
    chosen_s, all_s = (one.generation(generator(), waits_for_longest=False) for one in (chosen, all_of_them))
    assert chosen_s == all_s
    scorer = ScorerLayout(devices=8)
    assert chosen.scoring(LLAMA_8B, scorer) == all_of_them.scoring(LLAMA_8B, scorer)
    assert chosen.scorer_memory(LLAMA_8B, scorer) == all_of_them.scorer_memory(LLAMA_8B, scorer)


def test_reading_costs_a_third_of_training_without_recomputation() -> None:
    layout = trainer(8, microbatch=8, recompute=False, head_precision="bfloat16")
    model = costs(reference=True)
    trained, read = model.train_step(layout), model.reference_pass(layout)
    assert 0.2 < read.total / trained.total < 0.4
    scored = model.scoring(LLAMA_8B, ScorerLayout(devices=8))
    assert scored.total == pytest.approx(read.total, rel=0.15)
    assert model.scoring(LLAMA_8B, ScorerLayout(devices=16)).total == pytest.approx(scored.total / 2)


# LlamaRL's curves and formulas

models = st.sampled_from([LLAMA_8B, LLAMA_70B, QWEN_4B])


@given(models, st.sampled_from([1, 4, 8, 16]), st.floats(0.3, 1), st.floats(0.3, 1), st.integers(20, 2000))
@settings(max_examples=40, deadline=None)
def test_eta_falls_with_the_batch(model, degree: int, matmul: float, memory: float, completion: int) -> None:
    """Assumption 7.1 of LlamaRL, which its theory rests on, holds for the cost model's curves."""
    efficiency = Efficiency(matmul=matmul, memory=memory)
    costing = costs(model, 64, even(completion), efficiency)
    train = [eta_t(costing, trainer(16, degree, b, head_precision="bfloat16")) for b in (1, 2, 4, 8, 16, 32)]
    generate = [eta_g(costing, generator(16, degree, b)) for b in (1, 2, 4, 8, 16, 32)]
    assert all(after < before for before, after in pairwise(train))
    assert all(after < before for before, after in pairwise(generate))


@given(st.sampled_from([8, 16, 24, 32, 48]), st.sampled_from([1, 2, 8]), st.sampled_from([1, 2, 8]))
@settings(max_examples=30, deadline=None)
def test_an_asynchronous_step_is_llamarls_formula(devices: int, m_t: int, m_g: int) -> None:
    """(B0 / G0) max(eta_t m_t / theta, eta_g m_g / (1 - theta)), with what happens once per step beside it."""
    model, total = costs(), 64
    training = trainer(devices, m_t, 512 * m_t / devices / 4)
    generating = generator(total - devices, m_g, 16)
    found = model.asynchronous(AsynchronousPlan(trainer=training, generator=generating))
    theta = devices / total
    once = Parts(found.sides["trainer"].parts)
    by_step = once["optimizer"] + once["stage"] + once["imbalance"]
    by_formula = 512 / total * eta_t(model, training) * m_t / theta
    assert found.sides["trainer"].total == pytest.approx(by_formula + by_step)
    generated = 512 / total * eta_g(model, generating) * m_g / (1 - theta)
    assert found.sides["generator"].total == pytest.approx(generated + found.sides["generator"]["pause"])
    assert found.seconds == max(side.total for side in found.sides.values())
    assert min(found.idle.values()) == 0.0
    slower = max(found.sides, key=lambda side: found.sides[side].total)
    faster = min(found.sides, key=lambda side: found.sides[side].total)
    assert found.idle[faster] == pytest.approx(1 - found.sides[faster].total / found.sides[slower].total)


def test_the_cost_models_curves_in_the_theory() -> None:
    """An asynchronous optimum of the theory, by the curves of the cost model, is strictly faster there too."""
    model = costs(LLAMA_70B)
    weights = 2 * 70.6e9
    kv = 600 * 320 * 1024
    theory = Theory(
        trainer=Side(
            fixed=4 * weights,
            per_sample=5e9,
            eta=lambda b: eta_t(model, trainer(8, 8, b)) * 8,
            batches=[2**i for i in range(8)],
        ),
        generator=Side(
            fixed=weights,
            per_sample=kv,
            eta=lambda b: eta_g(model, generator(8, 8, int(b))) * 8,
            batches=[2**i for i in range(10)],
        ),
        device_bytes=80e9,
        devices=256,
        samples=2048,
    )
    assert theory.asynchronous().seconds < theory.synchronous().seconds


# Weight sync


@pytest.mark.parametrize(("model", "billion_bytes"), [(LLAMA_70B, 141), (LLAMA_405B, 812)])
def test_a_replica_is_bound_by_its_adapters(model, billion_bytes: float) -> None:
    """Wire bytes over tp adapters of 50 GB/s: 353 ms for 70B, 2.03 s for 405B at TP 8, bf16; the embedding lies whole
    on each rank."""
    sync = costs(model, 1024).weight_sync(trainer(512, 8), generator(8, 8))
    embedding = 2 * model.vocab_size * model.hidden_size * 7 / 8
    assert sync["transfer"] == pytest.approx((billion_bytes * 1e9 / 8 + embedding) / 50e9, rel=0.01)


def test_many_replicas_are_bound_by_the_trainer() -> None:
    model = costs(LLAMA_8B, 64)
    few, many = (model.weight_sync(trainer(8, 8), generator(devices, 1))["transfer"] for devices in (4, 32))
    assert few == pytest.approx(16.06e9 / 50e9, rel=1e-3)  # a replica's own adapter
    assert many == pytest.approx(32 * 16.06e9 / 8 / 50e9, rel=1e-3)
    assert model.weight_sync(trainer(8, 8), generator(4, 1))["pause"] == pytest.approx(4 * 16.06e9 / 3.35e12, rel=1e-3)
    staged = model.weight_sync(trainer(8, 1), generator(4, 1))["stage"]
    assert staged == pytest.approx((4 + 2 * 2) * 8.03e9 / 8 / 3.35e12, rel=1e-3)


# Memory


def test_a_trainers_states_by_hand() -> None:
    """Sixteen bytes a parameter over all ranks, and the two staged versions of docs/weight_sync.md."""
    memory = costs().train_memory(trainer(8, 1))
    held = [memory[part] for part in ("weights", "moments", "gradients", "staging")]
    assert held == pytest.approx([byte * 8.03e9 / 8 for byte in (4, 8, 4, 4)], rel=2e-3)
    both = costs(critic=True, reference=True).train_memory(trainer(8, 1))
    assert both["moments"] == 2 * memory["moments"]
    assert both["reference"] == pytest.approx(memory["weights"])
    assert costs().train_memory(trainer(8, 1), served=None)["staging"] == 0
    # gathered in bfloat16: embedding, head, and two of 32 layers of 218 M
    assert memory["gathered"] == pytest.approx(2 * (2 * 128256 * 4096 + 2 * 218.1e6), rel=1e-3)
    # a product of the head in float32 takes it once more, and tensor-parallel ranks have no other
    wide = costs().train_memory(trainer(8, 1, head_precision="float32"))
    assert wide["gathered"] == pytest.approx(memory["gathered"] + 4 * 128256 * 4096, rel=1e-3)
    assert (trainer(8, 1).head, trainer(8, 2).head) == ("bfloat16", "bfloat16")
    one, two = (costs().train_memory(trainer(8, ranks))["logits"] for ranks in (1, 2))
    assert one == 2 * two == 3 * 4 * min(8 * costs().workload.lengths.mean * 128256, 2**28)  # a rank has its own
    alone = costs().train_memory(trainer(1, 1, precision="float32"))
    assert alone["gathered"] == 0
    # one GPU has a copy of all in bfloat16, and of the reference
    assert costs().train_memory(trainer(1, 1))["gathered"] == pytest.approx(2 * 8.03e9, rel=2e-3)
    assert costs(reference=True).train_memory(trainer(1, 1))["gathered"] == pytest.approx(4 * 8.03e9, rel=2e-3)


def test_activations_grow_with_the_microbatch() -> None:
    small, large = (costs().train_memory(trainer(8, 1, b)) for b in (1, 2))
    assert large["activations"] == pytest.approx(2 * small["activations"])
    # inputs of 32 layers of 4096, in bfloat16, and one layer that runs again
    entry = 512.5 * 4096 * 2
    inner = 4 * 4096 + 2 * 4096 + 2 * 1024 + 3 * 14336
    assert small["activations"] == pytest.approx(32 * entry + 512.5 * inner * 2)
    # and what products and attention gave: queries, keys, values, their mixture, two outputs, gate and up
    products = 512.5 * (2 * 4096 + 2 * 1024 + 2 * 4096 + 2 * 14336) * 2
    kept = costs().train_memory(trainer(8, 1, 1, keeps_products=True))
    assert kept["activations"] == pytest.approx(small["activations"] + 32 * products)


def test_a_generators_memory_by_hand() -> None:
    """Two versions, and 64 slots of at most 100 + 500 tokens in pages of 16."""
    memory = costs().generator_memory(generator(8, 1, 64))
    assert memory["weights"] == memory["shadow"] == pytest.approx(16.06e9, rel=1e-3)
    assert memory["keys_and_values"] == 64 * math.ceil(600 / 16) * 16 * 128 * 1024
    assert costs().generator_memory(generator(8, 1, 64), shadow=False)["shadow"] == 0
    assert memory["logits"] == 3 * 64 * 128256 * 4
    quantised = costs().generator_memory(generator(8, 1, 64, precision="fp8"))
    assert 0.5 < quantised["weights"] / memory["weights"] < 0.6  # embedding and head stay in bfloat16


def test_what_a_colocated_trainer_frees() -> None:
    def of(frees) -> dict[str, float]:
        plan = SynchronousPlan(trainer=trainer(64, 8), generator=generator(64, 8), frees=frees)
        return {phase: parts.total for phase, parts in costs(LLAMA_70B).colocated_memory(plan).items()}

    nothing, work, states = of("nothing"), of("gradients_and_activations"), of("optimizer_too")
    alone = costs(LLAMA_70B).train_memory(trainer(64, 8), served=None)
    beside = costs(LLAMA_70B).generator_memory(generator(64, 8), shadow=False)
    assert nothing["trains"] == nothing["generates"] == pytest.approx(alone.total + beside.total)
    freed = sum(alone[part] for part in ("gradients", "activations", "logits", "gathered"))
    assert nothing["generates"] - work["generates"] == pytest.approx(freed)
    assert nothing["trains"] - work["trains"] == pytest.approx(beside.total - beside["weights"])
    assert work["generates"] - states["generates"] == pytest.approx(alone["weights"] + alone["moments"])
    assert states["trains"] == work["trains"]


def test_405b_does_not_fit_where_llamarl_could_not_put_it() -> None:
    """A bf16 replica of 810 GB on one node of 640 GB, and in fp8 with a second version of it in the shadow."""
    model = costs(LLAMA_405B, 1024)
    assert not model.fits(model.generator_memory(generator(8, 8, 32)))
    assert not model.fits(model.generator_memory(generator(8, 8, 32, precision="fp8")))
    assert model.fits(model.generator_memory(generator(8, 8, 32, precision="fp8"), shadow=False))
    assert not model.fits(model.train_memory(trainer(64, 8, 1)))
    assert model.fits(model.train_memory(trainer(512, 16, 1)))


def test_a_scorer_has_a_whole_copy() -> None:
    memory = costs().scorer_memory(LLAMA_8B, ScorerLayout(devices=4))
    assert memory["weights"] == pytest.approx(16.06e9, rel=1e-3)


def test_a_reward_model_has_no_head() -> None:
    """No matrix of vocabulary x hidden behind the layers, no product with it, and no pass over logits."""
    model, layout = costs(reward_model=LLAMA_8B), ScorerLayout(devices=8)
    reads, scores = (model.scoring(LLAMA_8B, layout, has_head=has).total for has in (True, False))
    rows, matrix, logits = 8 * 500, 128256 * 4096, 8 * 500 * 128256
    product_s = math.hypot(2 * rows * matrix / 989.4e12, 2 * matrix / 3.35e12)
    assert reads - scores == pytest.approx((product_s + 5 * 4 * logits / 3.35e12) * 64 / 8, rel=1e-3)
    plan = AsynchronousPlan(trainer=trainer(8), generator=generator(8), reward_model=layout)
    assert model.asynchronous(plan).sides["reward_model"].total == scores
    reader, scorer = (model.scorer_memory(LLAMA_8B, layout, has_head=has) for has in (True, False))
    assert reader["weights"] - scorer["weights"] == 2 * matrix
    assert scorer["logits"] == 0 < reader["logits"]
    assert scorer["activations"] == reader["activations"]


def test_a_divided_scorer_holds_its_part_of_the_copy() -> None:
    """As tensor parallelism and FSDP2 divide the trainer's weights, but in the precision of products."""
    model = costs()
    whole = model.scorer_memory(LLAMA_8B, ScorerLayout(devices=4))
    shared = model.scorer_memory(LLAMA_8B, ScorerLayout(devices=4, tensor_parallel=2))
    cut = model.scorer_memory(LLAMA_8B, ScorerLayout(devices=4, sharded=True))
    both = model.scorer_memory(LLAMA_8B, ScorerLayout(devices=4, tensor_parallel=2, sharded=True))
    embedding = 128256 * 4096 * 2.0  # whole on each of those that share layers
    assert cut["weights"] == whole["weights"] / 4
    assert shared["weights"] == pytest.approx((whole["weights"] + embedding) / 2, rel=1e-3)
    assert both["weights"] == shared["weights"] / 2
    assert (whole["gathered"], shared["gathered"]) == (0, 0)
    assert cut["gathered"] == pytest.approx(2 * embedding + 2 * 218.1e6 * 2, rel=1e-2)
    trained = model.train_memory(trainer(4, 2, 1))
    assert both["weights"] == pytest.approx(trained["weights"] / 2, rel=1e-6)


def test_dividing_a_scorer_costs_communication_only() -> None:
    model = costs()
    layouts = {
        name: ScorerLayout(devices=8, tensor_parallel=degree, sharded=sharded)
        for name, degree, sharded in (("whole", 1, False), ("shared", 8, False), ("cut", 1, True))
    }
    seconds = {name: model.scoring(LLAMA_8B, layout).total for name, layout in layouts.items()}
    assert seconds["whole"] < seconds["shared"] < 3 * seconds["whole"]
    assert seconds["whole"] <= seconds["cut"]


# Whole plans


def test_a_synchronous_step_is_the_sum_of_its_turns() -> None:
    model = costs(efficiency=Efficiency(), lengths=lengths_with_tail(100, 500, 1500, 4000))
    plan = SynchronousPlan(trainer=trainer(64, 1), generator=generator(64, 1, 8))
    step = model.synchronous(plan)
    assert step.seconds == pytest.approx(sum(side.total for side in step.sides.values()))
    assert sum(step.idle.values()) == pytest.approx(1.0)
    offloaded = model.synchronous(replace(plan, frees="optimizer_too"))
    kept = 12 * 8.03e9 / 64
    assert offloaded.seconds - step.seconds == pytest.approx(2 * kept / 64e9, rel=1e-3)


def test_other_executors_are_sides_of_their_own() -> None:
    model = costs(reference=True, reward_model=QWEN_4B)
    both = AsynchronousPlan(trainer=trainer(8), generator=generator(8), reward_model=ScorerLayout(devices=8))
    beside = model.asynchronous(both)
    assert set(beside.sides) == {"trainer", "generator", "reward_model"}
    assert beside.sides["trainer"]["reference"] > 0
    own = model.asynchronous(replace(both, reference=ScorerLayout(devices=8)))
    assert own.sides["trainer"]["reference"] == 0
    assert own.sides["reference"].total > 0
    with pytest.raises(ConfigError, match="reward model needs devices"):
        model.asynchronous(AsynchronousPlan(trainer=trainer(8), generator=generator(8)))


def test_a_colocated_plan_has_the_same_devices() -> None:
    with pytest.raises(ConfigError, match="same devices"):
        costs().synchronous(SynchronousPlan(trainer=trainer(8), generator=generator(16)))


# Adapters


def with_adapters(rank: int = 32, targets: tuple[str, ...] = (), **work: object) -> CostModel:
    return costs(adapters=adapters_of(LLAMA_8B, rank, targets), **work)


def test_training_beside_a_frozen_model_takes_two_thirds_of_the_products() -> None:
    """Long microbatches, so that operations alone count; attention has its three passes, adapters theirs."""
    layout, short = trainer(devices=1, microbatch=512, recompute=False, head_precision="bfloat16"), even(2, prompt=500)
    whole, beside = (made(lengths=short).train_step(layout)["compute"] for made in (costs, with_adapters))
    tokens, numbers = 512 * (500 / 8 + 2), 32 * 32 * (3 * (4096 + 14336) + 2 * (4096 + 1024) + 2 * 8192)
    assert numbers == with_adapters().adapters.params
    saved = 2 * tokens * 32 * 218.1e6 - 6 * tokens * numbers + 2 * 512 * 2 * 128256 * 4096
    assert whole - beside == pytest.approx(saved / 989.4e12, rel=2e-3)
    assert beside / whole == pytest.approx(2 / 3, abs=0.02)
    again = replace(layout, recompute=True)
    assert with_adapters(lengths=short).train_step(again)["compute"] > 1.45 * beside
    head = with_adapters(targets=("lm_head",), lengths=short).train_step(layout)["compute"]
    assert head == pytest.approx(beside - 6 * tokens * numbers / 989.4e12 + 6 * 1024 * 132352 * 32 / 989.4e12, rel=1e-3)


def test_memory_beside_a_frozen_model() -> None:
    """8.03 B parameters: 4 bytes of each, and 16 of every number of A and B; a version is those alone, in float32."""
    numbers, layout = with_adapters().adapters.params, trainer(devices=8)
    held = with_adapters(reference=True).train_memory(layout)
    whole = costs(reference=True).train_memory(layout)
    assert "reference" not in held.parts
    states = held["weights"] + held["moments"] + held["gradients"]
    assert states == pytest.approx((4 * 8.0303e9 + 16 * numbers) / 8, rel=1e-4)
    assert held["staging"] == 2 * 4 * numbers / 8
    assert {name: held[name] for name in ("gathered", "activations", "logits")} == {
        name: whole[name] for name in ("gathered", "activations", "logits")
    }
    decoding, before = (made().generator_memory(generator()) for made in (with_adapters, costs))
    assert decoding["weights"] - before["weights"] == decoding["shadow"] == 4 * numbers
    moved = [made().weight_sync(layout, generator(precision="fp8")) for made in (with_adapters, costs)]
    assert moved[0]["transfer"] == pytest.approx(4 * numbers / 50e9)
    assert moved[0]["stage"] == pytest.approx(12 * numbers / 8 / 3.35e12)
    assert moved[0].total < moved[1].total / 10
    freed = [
        made(devices=8).synchronous(SynchronousPlan(trainer=layout, generator=generator(), frees="optimizer_too"))
        for made in (with_adapters, costs)
    ]
    assert freed[0].sides["trainer"]["offload"] < 0.36 * freed[1].sides["trainer"]["offload"]


def test_memory_beside_a_base_in_fewer_bytes() -> None:
    """8.03 B numbers in int8, a norm's in 4 bytes, whole on each of 8 ranks; one block of 16.8 M is expanded."""
    adapters = adapters_of(LLAMA_8B, 32, base="int8")
    held = costs(adapters=adapters).train_memory(trainer(devices=8))
    assert held["weights"] == pytest.approx(8.03e9 + 0.53e9 + 4 * adapters.params, rel=2e-3), "the embedding: bfloat16"
    assert held["gathered"] == 2 * 2**24


def test_decoding_with_adapters_reads_them_and_starts_their_kernels() -> None:
    numbers = with_adapters().adapters.params
    step, before = (
        made(efficiency=replace(IDEAL, kernel_s=2e-6)).decode_step(generator(), live=1, context=0)
        for made in (with_adapters, costs)
    )
    assert step["weights"] - before["weights"] == pytest.approx(4 * numbers / 3.35e12, rel=1e-2)
    assert step["kernels"] - before["kernels"] == pytest.approx(32 * (7 + 2 * 4) * 2e-6)


def test_ranks_that_exchange_tokens_gather_their_own_experts_alone() -> None:
    """Two nodes of eight, that exchange within: a layer of Qwen3-30B-A3B has 128 experts of 3 x 2048 x 768 numbers."""
    model = ARCHITECTURES["qwen3-30b-a3b"]
    one, layout = costs(model, 16), trainer(16, microbatch=16)
    divided, expert, element = replace(layout, expert_parallel=8), 3 * 2048 * 768, 2
    whole_gb, divided_gb = one.train_memory(layout), one.train_memory(divided)
    assert whole_gb["gathered"] - divided_gb["gathered"] == 2 * element * expert * (128 - 16)
    assert {name for name in whole_gb.parts if whole_gb[name] != divided_gb[name]} == {"gathered"}
    held = [one.train_memory(replace(each, reduce_once=True))["gradients"] for each in (layout, divided)]
    assert held[0] - held[1] == 4 * 48 * expert * (128 - 16)
    whole_s, divided_s = one.train_step(layout), one.train_step(divided)
    tokens = one.workload.rollouts / 16 * one.workload.trained_tokens
    one_way_s = all_to_all_s(tokens / 2 * 8 * 2048 * element, 8, one.cluster)
    assert "experts" not in whole_s.parts
    assert divided_s["experts"] == pytest.approx(2 * 2 * 48 * 3 * one_way_s, rel=1e-3), "two microbatches, three passes"
    assert divided_s["compute"] <= whole_s["compute"]
    small = [one.train_step(replace(each, microbatch=1, devices=16)) for each in (layout, divided)]
    assert small[1]["data_parallel"] < small[0]["data_parallel"]


def test_experts_of_a_replica_lie_on_one_of_its_devices() -> None:
    model = ARCHITECTURES["qwen3-30b-a3b"]
    one = costs(model)
    alone, four = (one.generator_memory(generator(8, degree))["weights"] for degree in (1, 4))
    experts = 2 * 48 * 128 * 3 * 2048 * 768
    assert alone - four > 0.75 * experts
    step = one.decode_step(generator(8, 4), live=64, context=1000)
    assert step["weights"] < 0.5 * one.decode_step(generator(8, 1), live=64, context=1000)["weights"]
    assert step["tensor_parallel"] > 0
