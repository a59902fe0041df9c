"""Pipeline stages and context parallelism of plans: against schedules played step by step, and numbers by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.plan.cost_model import CostModel
from slipstream.plan.counts import NO_ADAPTERS, adapters_of, counts_of
from slipstream.plan.hardware import DEVICES, GpuCluster, all_gather_s, cluster, send_s
from slipstream.plan.layouts import Efficiency, GeneratorLayout, TrainerLayout, Workload
from slipstream.plan.lengths import LengthSample, lengths_with_tail
from slipstream.plan.pipeline import in_flight, middle_stages, stage_ends
from slipstream.plan.question import ARCHITECTURES

LLAMA_8B, LLAMA_70B = ARCHITECTURES["llama-3.1-8b"], ARCHITECTURES["llama-3.1-70b"]
LLAMA_405B = ARCHITECTURES["llama-3.1-405b"]
IDEAL = Efficiency(
    matmul=1, memory=1, network=1, kernel_s=0, collective=1, host_task_s=0, step_s=0, sequence_s=0, serial_s=0
)


def costs(model=LLAMA_8B, devices: int = 64, lengths: LengthSample | None = None, **work: object) -> CostModel:
    lengths = lengths or LengthSample(100.0, (500,), "all alike")
    workload = Workload(groups=64, group_size=8, lengths=lengths, **work)  # type: ignore[arg-type]
    return CostModel(model, cluster("H100", devices), workload, IDEAL)


def trainer(devices: int = 32, microbatch: float = 4, **rest: object) -> TrainerLayout:
    return TrainerLayout(**{"devices": devices, "tensor_parallel": 1, "microbatch": microbatch} | rest)  # type: ignore[arg-type]


def generator(devices: int = 16, slots: int = 64, **rest: object) -> GeneratorLayout:
    return GeneratorLayout(**{"devices": devices, "tensor_parallel": 1, "slots": slots} | rest)  # type: ignore[arg-type]


# Schedules


def megatron_order(stage: int, stages: int, microbatches: int, chunks: int) -> list[tuple[str, int, int]]:
    """The passes of a stage in order, (forward or backward, microbatch, chunk), as Megatron-LM runs them."""
    warm_up = 2 * (stages - stage - 1) + (chunks - 1) * stages if chunks > 1 else stages - stage - 1
    total = microbatches * chunks

    def part(number: int) -> tuple[int, int]:
        round_, place = divmod(number, stages * chunks)
        return round_ * stages + place % stages, place // stages

    forward = [("forward", *part(n)) for n in range(total)]
    backward = [("backward", part(n)[0], chunks - 1 - part(n)[1]) for n in range(total)]
    order, done = forward[:warm_up], 0
    for one in forward[warm_up:]:
        order += [one, backward[done]]
        done += 1
    return order + backward[done:]


def played(
    stages: int, microbatches: int, chunks: int, forward_s: float, backward_s: float
) -> tuple[float, list[float]]:
    """Seconds until all passes are done where each waits for what it needs; and the most microbatches kept by stage."""
    orders = [megatron_order(stage, stages, microbatches, chunks) for stage in range(stages)]
    ended: dict[tuple[str, int, int], float] = {}  # by pass and global part
    clocks, places = [0.0] * stages, [0] * stages
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        before = list(places)
        for stage, order in enumerate(orders):
            while places[stage] < len(order):
                kind, microbatch, chunk = order[places[stage]]
                part, last = chunk * stages + stage, stages * chunks - 1
                if kind == "forward":
                    needs = ("forward", microbatch, part - 1) if part else None
                else:
                    needs = ("backward", microbatch, part + 1) if part < last else ("forward", microbatch, part)
                if needs is not None and needs not in ended:
                    break
                begins = max(clocks[stage], 0.0 if needs is None else ended[needs])
                clocks[stage] = begins + (forward_s if kind == "forward" else backward_s) / chunks
                ended[kind, microbatch, part] = clocks[stage]
                places[stage] += 1
        assert places != before, "the schedule does not end"
    most = []
    for order in orders:
        kept = peak = 0
        for kind, *_ in order:
            kept += 1 if kind == "forward" else -1
            peak = max(peak, kept)
        most.append(peak / chunks)
    return max(clocks), most


@pytest.mark.parametrize(
    ("stages", "microbatches", "chunks"),
    [(1, 3, 1), (2, 1, 1), (2, 5, 1), (4, 8, 1), (4, 2, 1), (8, 24, 1), (2, 4, 2), (4, 8, 2), (4, 12, 3), (4, 4, 2)],
)
def test_bubble_and_memory_are_those_of_the_schedule(stages: int, microbatches: int, chunks: int) -> None:
    total_s, kept = played(stages, microbatches, chunks, 1.0, 2.0)
    assert total_s == pytest.approx((microbatches + (stages - 1) / chunks) * 3.0)
    assert 1 - 3.0 * microbatches / total_s == pytest.approx(bubble(stages, microbatches, chunks))
    assert kept[0] == in_flight(stages, microbatches, chunks)
    assert kept[-1] == in_flight(stages, microbatches, chunks, is_last=True)
    assert max(kept) == kept[0]


def bubble(stages: int, microbatches: int, chunks: int = 1) -> float:
    """The share of a step in which a stage waits for the pipeline to fill and to empty."""
    return (stages - 1) / (chunks * microbatches + stages - 1)


def test_bubble_by_hand() -> None:
    """Megatron-LM's (p - 1) / m of the ideal time is (p - 1) / (m + p - 1) of the whole."""
    assert bubble(4, 8) == 3 / 11
    assert bubble(4, 8, 2) == 3 / 19
    assert bubble(1, 8) == 0
    assert bubble(16, 10**9) < 2e-8
    assert in_flight(4, 8, 2) == 4 * (1 + 3 / 8)  # arXiv:2205.05198: 1 + (p - 1) / (p m)


@given(st.integers(1, 130), st.integers(1, 16), st.integers(1, 4))
def test_layers_are_dealt_like_cards(layers: int, stages: int, chunks: int) -> None:
    parts = [layers // (stages * chunks) + (n < layers % (stages * chunks)) for n in range(stages * chunks)]
    each = [sum(parts[stage::stages]) for stage in range(stages)]
    ends = stage_ends(layers, stages, chunks)
    assert (ends[0].layers, ends[-1].layers) == (each[0], each[-1])
    assert max(each) == each[0]
    assert sum(each) == layers
    assert middle_stages(layers, stages, chunks) == sum(each[1:-1]) if stages > 1 else True
    assert (ends[0].is_first, ends[-1].is_last) == (True, True)


# Training


GOLDEN = {
    "llama-3.1-8b": (1, 2, "0x1.0bbe8ff226f95p+0 0x1.87d4e1aaaaaaap+33 0x1.3fb452b13a8bcp+2 0x1.401fe00000000p+34"),
    "llama-3.1-70b": (8, 8, "0x1.6f78649645677p+5 0x1.e36a658000000p+35 0x1.60fea5b14039ep+5 0x1.3713800000000p+35"),
    "pythia-6.9b": (2, 1, "0x1.651b2225fef20p+0 0x1.d12c380000000p+32 0x1.b13578137256ap+2 0x1.c934000000000p+35"),
    "qwen3-30b-a3b": (1, 1, "0x1.8efe71ead2f18p+1 0x1.c8756a9555555p+34 0x1.c06b23e4d7948p+3 0x1.df79e40000000p+36"),
    "smollm2-1.7b": (1, 1, "0x1.16c72ad510540p-2 0x1.a228f8aaaaaaap+31 0x1.4fbb926669e0fp+1 0x1.2433100000000p+34"),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_one_stage_is_what_it_was_before_there_were_several(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernels that every model was taken to have then."""
    monkeypatch.setattr(CostModel, "kernels", lambda model, layout: (10, 5))
    train, generate, golden = GOLDEN[name]
    work = Workload(groups=64, group_size=8, lengths=LengthSample(100.0, (300, 500, 900), "x"), reference=True)
    model = CostModel(ARCHITECTURES[name], cluster("h100", 64), work)
    layout = trainer(tensor_parallel=train)
    decoding = GeneratorLayout(devices=16, tensor_parallel=generate, slots=64)
    found = (
        model.train_step(layout).total,
        model.train_memory(layout).total,
        model.generation(decoding, waits_for_longest=True).total,
        float(model.generator_memory(decoding).total),
    )
    assert found == pytest.approx([float.fromhex(number) for number in golden.split()], rel=1e-12)
    assert not {"bubble", "pipeline", "context"} & set(model.train_step(layout).parts)


def test_a_step_of_four_stages_by_hand() -> None:
    """8 ranks of 4 stages, 64 rollouts each, 4 at a time: 16 microbatches, and 3 more until the pipeline is empty."""
    model = costs()
    layout = trainer(pipeline_parallel=4, recompute=False)
    step = model.train_step(layout)
    one = model._microbatch(layout, 4)
    assert model.microbatches(layout) == 16
    assert step["bubble"] == pytest.approx(3 * one.total)
    assert step["bubble"] / (19 * one.total) == pytest.approx(bubble(4, 16))
    # The last stage has the head, too: it is the slowest.
    whole, head = model._microbatch(trainer(recompute=False), 4), model._head(layout, 4, is_trained=True)
    assert one["compute"] == pytest.approx((whole["compute"] - head["compute"]) / 4 + head["compute"])
    assert one["activations"] == pytest.approx((whole["activations"] - head["activations"]) / 4 + head["activations"])
    interleaved = model.train_step(replace(layout, chunks=2))
    assert interleaved["bubble"] == pytest.approx(1.5 * model._microbatch(replace(layout, chunks=2), 4).total)
    two = costs(epochs=2, minibatches=4).train_step(layout)
    assert two["bubble"] == pytest.approx(8 * 3 * one.total), "each update empties the pipeline"


def test_states_that_stages_send() -> None:
    """4 x 512.5 tokens of 4096 numbers in bfloat16, 16.8 MB, there and their gradients back: by NVLink 370 GB/s, of
    InfiniBand's 50 GB/s 47; twice as often where stages have two parts."""
    nbytes = 4 * 512.5 * 4096 * 2
    near, far = (11.8e-6 + nbytes / 370e9, 22.4e-6 + nbytes / 47e9)  # the start and a hop, of NCCL's Simple
    assert send_s(nbytes, cluster("H100", 64), between_nodes=False) == pytest.approx(near, rel=1e-6)
    assert send_s(nbytes, cluster("H100", 64), between_nodes=True) == pytest.approx(far, rel=1e-6)
    model = costs()
    assert model._microbatch(trainer(pipeline_parallel=8), 4)["pipeline"] == pytest.approx(2 * near, rel=1e-6)
    assert model._microbatch(trainer(pipeline_parallel=16), 4)["pipeline"] == pytest.approx(2 * far, rel=1e-6)
    wide = trainer(pipeline_parallel=2, tensor_parallel=8)
    assert model._microbatch(wide, 4)["pipeline"] == pytest.approx(2 * far, rel=1e-6), "16 GPUs are two nodes"
    assert model._microbatch(trainer(pipeline_parallel=8, chunks=2), 4)["pipeline"] == pytest.approx(4 * near, rel=1e-6)
    assert model._passes(trainer(pipeline_parallel=8), 4, 1)["pipeline"] == pytest.approx(near, rel=1e-6)


def test_memory_of_the_first_and_the_last_of_four_stages_by_hand() -> None:
    """8 of 32 layers of 218.1 M and the embedding, or the head, of 525 M, over 8 ranks; the first keeps the inputs of
    8 layers of 4 microbatches, the last of one."""
    model, layout = costs(), trainer(pipeline_parallel=4)
    first, last = stage_ends(32, 4)
    params = 8 * 218.112e6 + 128256 * 4096
    entry, inner = 4 * 512.5 * 4096 * 2, 4 * 512.5 * 2 * (4 * 4096 + 2 * 4096 + 2 * 1024 + 3 * 14336)
    for stage, begun in ((first, 4), (last, 1)):
        held, states = model._working(layout, stage), model._states(layout, stage)
        assert states["weights"] == pytest.approx(4 * params / 8, rel=1e-4)
        assert states["moments"] == pytest.approx(2 * states["weights"])
        assert held["gathered"] == pytest.approx(2 * (2 * 218.112e6 + 128256 * 4096), rel=1e-4)
        assert held["activations"] == pytest.approx(begun * 8 * entry + inner)
        assert held["logits"] == (3 * 4 * 4 * 500 * 128256 if stage.is_last else 0)
    both = model.train_memory(layout)
    assert both["logits"] > 0, "the last one holds more here"
    assert both["staging"] == pytest.approx(both["weights"], rel=1e-4)
    whole = replace(layout, recompute=False)
    assert model.train_memory(whole)["activations"] == pytest.approx(4 * 8 * inner)
    assert model.train_memory(replace(whole, chunks=2))["activations"] == pytest.approx(5.5 * 8 * inner)
    few = model.train_memory(trainer(devices=64, microbatch=32, pipeline_parallel=4, recompute=False))
    assert few["activations"] == pytest.approx(1 * 8 * 8 * inner), "one microbatch of 32 is all that there is"


def test_stages_gather_their_own_layers() -> None:
    """Over a slow network the last of 2 stages gathers half of the layers and the head, its 16 ranks each on a node's
    border: 15/16 of that, twice in bfloat16, and gradients in float32."""
    slow = GpuCluster(device=replace(DEVICES["H100"], network_bandwidth=1e9), num_devices=64)
    model = CostModel(LLAMA_8B, slow, Workload(groups=64, group_size=8, lengths=LengthSample(9, (50,), "x")), IDEAL)
    layout = trainer(64, 4, pipeline_parallel=2, tensor_parallel=2)
    one = model._microbatch(layout, 4)
    layers, root = 16 * 218.112e6 / 2, 128256 * 4096
    carried = (8 * layers + 6 * root) * (15 / 16) / (0.94 * 1e9 * 2)  # the first: its embedding is whole
    work = one.total - one["data_parallel"]
    assert work + one["data_parallel"] == pytest.approx(carried, rel=0.01)


@given(
    st.sampled_from([LLAMA_8B, LLAMA_70B, ARCHITECTURES["qwen2.5-3b"], ARCHITECTURES["pythia-6.9b"]]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 8]),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_memory_falls_with_stages_but_for_what_is_in_flight(model, degree, shards, size, recompute, once) -> None:
    """The ranks of a stage stay as many: all that a rank holds is less or the same, and so are its activations for a
    microbatch."""
    before = None
    for stages in (1, 2, 4, 8, 16):
        layout = trainer(degree * shards * stages, size, pipeline_parallel=stages, tensor_parallel=degree)
        layout = replace(layout, recompute=recompute, reduce_once=once)
        model_costs = costs(model, reference=True)
        held = model_costs.train_memory(layout)
        kept = held.without("activations", "logits", "gathered").total
        begun = in_flight(stages, model_costs.microbatches(layout))
        now = (
            kept,
            held["gathered"],
            held["activations"] / begun,
            model_costs.generator_memory(
                generator(degree * stages, tensor_parallel=degree, pipeline_parallel=stages)
            ).total,
        )
        if before is not None:
            assert all(after <= earlier * (1 + 1e-12) for after, earlier in zip(now, before, strict=True))
        before = now if shards > 1 or degree > 1 else None if stages == 1 else now  # one rank has a copy of all


@given(st.sampled_from([2, 4, 8, 16]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 8]))
@settings(max_examples=30, deadline=None)
def test_with_more_microbatches_the_bubble_goes(stages: int, chunks: int, size: int) -> None:
    shares = []
    for groups in (8, 64, 512, 4096):
        work = Workload(groups=groups, group_size=8, lengths=LengthSample(100.0, (500,), "x"))
        model = CostModel(ARCHITECTURES["llama-3.1-70b"], cluster("H100", 64), work, IDEAL)
        layout = trainer(64, size, tensor_parallel=4, pipeline_parallel=stages, chunks=chunks)
        step = model.train_step(layout)
        shares.append(step["bubble"] / (step.total - step["optimizer"]))
        count = model.microbatches(layout)
        assert shares[-1] <= bubble(stages, count, chunks) + 1e-12
        assert shares[-1] == pytest.approx(bubble(stages, count, chunks), rel=0.02)
    assert all(after <= earlier + 1e-12 for after, earlier in zip(shares[1:], shares, strict=False))
    assert shares[-1] < 0.06


# Bounds that the search goes by

MODELS = st.sampled_from([LLAMA_8B, LLAMA_70B, ARCHITECTURES["qwen3-30b-a3b"], ARCHITECTURES["pythia-6.9b"]])


@st.composite
def layouts(draw):
    model = draw(MODELS)
    degree = draw(st.sampled_from([1, 2, 4] if model.num_experts else [1, 2, 8, 16]))
    stages, context = draw(st.sampled_from([1, 2, 4, 16])), draw(st.sampled_from([1, 2, 4]))
    experts = draw(st.sampled_from([1, 2, 8])) if model.num_experts and stages == context == 1 else 1
    layout = trainer(
        degree * stages * context * experts * draw(st.sampled_from([1, 3, 16])),
        draw(st.sampled_from([1, 2, 4, 8, 32])),
        tensor_parallel=degree,
        pipeline_parallel=stages,
        context_parallel=context,
        expert_parallel=experts,
        chunks=1 if stages == 1 else draw(st.sampled_from([1, 2])),
        recompute=draw(st.booleans()),
        reduce_once=draw(st.booleans()),
        head_precision=draw(st.sampled_from([None, "float32"])),
    )
    work = Workload(
        groups=draw(st.sampled_from([2, 32, 512])),
        group_size=4,
        lengths=lengths_with_tail(200, 600, 2000, 5000),
        epochs=draw(st.sampled_from([1, 2])),
        minibatches=draw(st.sampled_from([1, 2])),
        critic=draw(st.booleans()),
        reference=draw(st.booleans()),
        adapters=NO_ADAPTERS if model.num_experts or draw(st.booleans()) else adapters_of(model, 32),
    )
    efficiency = Efficiency(matmul=draw(st.floats(0.3, 1)), memory=draw(st.floats(0.3, 1)))
    return CostModel(model, cluster("H100", 512), work, efficiency), layout


@given(layouts())
@settings(max_examples=60, deadline=None)
def test_no_layout_is_faster_than_its_lower_bound(drawn) -> None:
    model, layout = drawn
    assert 0.2 * model.train_floor_s(layout) < model.train_floor_s(layout) <= model.train_step(layout).total


@given(layouts())
@settings(max_examples=80, deadline=None)
def test_what_does_not_fit_does_not_fit_with_more(drawn) -> None:
    """`memory_grows`: twice the microbatch, nothing recomputed, whole gradients."""
    model, layout = drawn
    held = model.train_memory(layout).total
    for more in (
        replace(layout, microbatch=2 * layout.microbatch),
        replace(layout, microbatch=2 * layout.microbatch, recompute=False),
        replace(layout, reduce_once=True),
    ):
        assert model.train_memory(more).total >= held * (1 - 1e-12)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("slots", [8, 64, 512])
def test_generation_is_no_faster_than_its_lower_bound(stages: int, slots: int) -> None:
    model = costs(lengths=lengths_with_tail(100, 500, 1500, 4000))
    layout = generator(slots=slots, pipeline_parallel=stages)
    assert 0 < model.generating_floor_s(layout) <= model.generating_turn(layout).total


# Generation


def decoded(stage_s: list[float], hop_s: float, batches: int, tokens: int = 400) -> float:
    """Seconds a token, of batches that go around: each stage takes one at a time, the next token starts behind it."""
    free, done = [0.0] * len(stage_s), [0.0] * batches
    for _ in range(tokens):
        for batch in range(batches):
            at = done[batch]
            for stage, seconds in enumerate(stage_s):
                at = max(at, free[stage]) + seconds
                free[stage] = at
                at += hop_s if stage + 1 < len(stage_s) else 0.0
            done[batch] = at
    return done[-1] / tokens


@pytest.mark.parametrize(("stages", "live"), [(2, 1), (2, 64), (4, 2), (4, 64), (8, 512), (16, 4)])
def test_a_token_takes_what_batches_in_a_pipeline_take(stages: int, live: int) -> None:
    """Against a pipeline played token by token. A hop also keeps the slowest stage, in the model."""
    model, layout = costs(LLAMA_70B), generator(64, tensor_parallel=4, pipeline_parallel=stages)
    batches = min(stages, live)
    rows, hop_s = live / batches, model._hop_s(layout, live / batches)
    first, last = stage_ends(80, stages)
    each = [model._decode_stage(layout, first, live=rows, context=400.0).total] * (stages - 1)
    each += [model._decode_stage(layout, last, live=rows, context=400.0).total]
    step_s = model.decode_step(layout, live=live, context=400.0).total
    played_s = decoded(each, hop_s, batches)
    assert played_s * 0.99 <= step_s <= played_s + batches * hop_s
    if live == 1:
        assert step_s == pytest.approx(sum(each) + (stages - 1) * hop_s)


def test_stages_keep_messages_within_a_node() -> None:
    """405B in bfloat16 on 16 GPUs: sums of 16 ranks go over the network, those of 8 do not, and 2 stages exchange one
    message a batch; each rank has half of the layers of twice the width."""
    flat, staged = generator(tensor_parallel=16), generator(tensor_parallel=8, pipeline_parallel=2)
    model = CostModel(LLAMA_405B, cluster("H100", 64), costs().workload)
    steps = [model.decode_step(layout, live=64, context=400.0) for layout in (flat, staged)]
    assert steps[1]["tensor_parallel"] < steps[0]["tensor_parallel"] / 3
    assert steps[1]["pipeline"] < 1e-3
    assert steps[1]["weights"] > 1.5 * steps[0]["weights"], "each batch reads the weights for half of the rows"
    assert steps[1].total < steps[0].total
    held = [model.generator_memory(layout) for layout in (flat, staged)]
    assert held[1]["weights"] == pytest.approx(held[0]["weights"], rel=0.05)


def test_a_generator_s_stage_by_hand() -> None:
    """The last of 4 stages: 8 layers and the head, 64 slots of 608 tokens in 8 layers, logits of a batch of 16."""
    held = costs().generator_memory(generator(pipeline_parallel=4))
    assert held["weights"] == pytest.approx(2 * (8 * 218.112e6 + 128256 * 4096), rel=1e-3)
    assert held["keys_and_values"] == 64 * 608 * 8 * 2 * 1024 * 2
    assert held["logits"] == 3 * 16 * 128256 * 4
    tied = counts_of(ARCHITECTURES["llama-3.2-1b"])
    first, last = stage_ends(16, 2)
    assert tied.params_of(first) + tied.params_of(last) == tied.params + tied.head_matrix, "a tied head is a copy"


def test_a_version_goes_to_each_stage_in_part() -> None:
    """Every rank takes its stage's part; all of a replica take what one would, but for what lies on one stage alone."""
    model = costs(devices=512)
    flat, staged = generator(8), generator(8, pipeline_parallel=8)
    counts = counts_of(LLAMA_8B)
    part, whole = model._served(staged)
    assert whole == pytest.approx(counts.served_bytes("bfloat16"))
    assert part == max(counts.served_bytes("bfloat16", stage) for stage in stage_ends(32, 8))
    few = trainer(256)
    assert model.weight_sync(few, staged)["transfer"] == pytest.approx(part / 50e9)
    assert model.weight_sync(few, staged)["pause"] == pytest.approx(4 * part / 3.35e12)
    assert model.weight_sync(few, flat)["pause"] == pytest.approx(4 * counts.served_bytes("bfloat16") / 3.35e12)


# Context parallelism


def test_four_ranks_of_a_sequence_by_hand() -> None:
    """A quarter of the tokens each; keys and values of all, 2 x 1024 numbers a token and layer, are gathered forward
    and again, and their gradients summed, by 4 neighbours."""
    model = costs(lengths=LengthSample(1000.0, (30_000,), "long"))
    layout = trainer(microbatch=2, context_parallel=4)
    one, alone = model._microbatch(layout, 2), model._microbatch(trainer(microbatch=2), 2)
    assert one["compute"] == pytest.approx(alone["compute"] / 4, rel=2e-3)
    tokens = 2 * (30_000 + 1000 / 8)
    gather_s = all_gather_s(tokens * 2 * 1024 * 2, 4, cluster("H100", 64))
    assert one["context"] == pytest.approx(32 * 3 * gather_s)
    assert layout.data_parallel == 8
    held, before = model.train_memory(layout), model.train_memory(trainer(8, microbatch=2))
    assert held["weights"] == before["weights"] / 4, "FSDP2 divides over the ranks that share a sequence, too"
    entry, inner = tokens / 4 * 4096 * 2, tokens / 4 * 2 * (4 * 4096 + 2 * 4096 + 2 * 1024 + 3 * 14336)
    others = 0.75 * tokens * 2 * 1024 * 2
    assert held["activations"] == pytest.approx(32 * entry + inner + others)
    whole = model.train_memory(replace(layout, recompute=False))
    assert whole["activations"] == pytest.approx(32 * (inner + others))


def test_long_sequences_fit_with_context_parallelism_alone() -> None:
    """100,000 tokens of a model of 70B: no rank holds the inputs of 80 layers of one sequence, whatever the stages."""
    model = costs(LLAMA_70B, 512, LengthSample(1000.0, (100_000,), "long"))
    alone = [trainer(512, 1, pipeline_parallel=stages) for stages in (1, 4)]
    assert not any(model.fits(model.train_memory(layout)) for layout in alone)
    assert model.fits(model.train_memory(trainer(512, 1, context_parallel=8)))


def test_the_bubble_of_a_reference() -> None:
    model, layout = costs(reference=True), trainer(pipeline_parallel=4)
    one = model._passes(layout, 4, 1).total
    assert model.reference_pass(layout).total == pytest.approx((16 + 3) * one)
    assert math.isclose(
        model.reference_pass(replace(layout, chunks=2)).total,
        17.5 * model._passes(replace(layout, chunks=2), 4, 1).total,
    )
