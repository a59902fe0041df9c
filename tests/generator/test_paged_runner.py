"""The paged runner on a CPU: the function captured on CUDA, run as it is, against dense slots and full forwards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from covering import with_slow
from engine_kit import STOP, drain, new_engine, random_model, random_prompt, requests, run
from test_engine_transformers import hf_model, prompts_of
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.core.clock import VirtualClock
from slipstream.core.errors import ConfigError
from slipstream.core.fields import Precision
from slipstream.core.sections import GeneratorConfig
from slipstream.generator import paged_runner
from slipstream.generator.engine import Engine
from slipstream.generator.native import likely_plans
from slipstream.generator.noise import noise_keys, uniform
from slipstream.generator.paged_kv import PAGE_SIZE, PagedKV
from slipstream.generator.paged_runner import PagedRunner, StepShape, context_buckets, row_buckets
from slipstream.generator.pages import PagedPrefix
from slipstream.generator.requests import Finished, Request
from slipstream.generator.runner import Chunk, Decoded, Prefix, RowStates
from slipstream.generator.sampler import SamplingPlan
from slipstream.generator.step_graphs import StepGraphs, WeightAddresses
from slipstream.models.attention import PackedAttention
from slipstream.models.hf import load_model
from slipstream.models.served import ServedWeights
from slipstream.models.transformer import Transformer

MAX_LEN = 128


def paged_engine(model: Transformer, *, num_rows: int = 16, num_pages: int | None = None, **options: object) -> Engine:
    runner = PagedRunner(model, num_rows=num_rows, max_len=MAX_LEN, num_pages=num_pages)
    return Engine(runner, seed=7, **({"stop_token_ids": [STOP]} | options))  # type: ignore[arg-type]


def states(num_rows: int, *, length: int, temperature: float = 0.0, token: int = 3) -> RowStates:
    return RowStates(
        input_tokens=np.full(num_rows, token),
        positions=np.full(num_rows, length),
        num_new=np.arange(num_rows) * 2,
        noise_keys=noise_keys(5, [(0, 1, row) for row in range(num_rows)]),
        temperatures=np.full(num_rows, temperature, dtype=np.float32),
        top_k=np.zeros(num_rows, dtype=np.int64),
        top_p=np.ones(num_rows, dtype=np.float32),
        min_p=np.zeros(num_rows, dtype=np.float32),
        keep_sets=np.zeros(num_rows, dtype=bool),
        versions=np.zeros(num_rows, dtype=np.int64),
    )


def prefilled(runner: PagedRunner, tokens: np.ndarray, chunk: int = 1000) -> Prefix:
    prefix = runner.open_prefix(len(tokens))
    assert prefix is not None
    for start in range(0, len(tokens), chunk):
        runner.prefill([Chunk(prefix, tokens[start : start + chunk], start)])
    return prefix


def next_logprobs(model: Transformer, tokens: np.ndarray) -> torch.Tensor:
    """float64 [V] behind `tokens`, by one causal forward."""
    with torch.inference_mode():
        attention = PackedAttention([len(tokens)])
        hidden = model(torch.from_numpy(tokens.astype(np.int64)), torch.arange(len(tokens)), attention)
        return torch.log_softmax(model.logits(hidden[-1:]).double(), -1)[0]


def assert_same_texts(
    found: dict[tuple[int, int], Finished], expected: dict[tuple[int, int], Finished], tolerance: float = 1e-4
) -> None:
    assert found.keys() == expected.keys()
    for key, completion in expected.items():
        assert np.array_equal(found[key].tokens, completion.tokens)
        assert np.abs(found[key].logprobs - completion.logprobs).max() < tolerance
        assert found[key].finish_reason == completion.finish_reason
        assert found[key].version_spans == completion.version_spans


@pytest.mark.parametrize(
    ("family", "prefill_chunk"), with_slow([("qwen3", 9)], [("llama", 512), ("llama", 9), ("qwen3", 512)])
)
def test_greedy_ids_and_logprobs_of_transformers(family: str, prefill_chunk: int, tmp_path: Path) -> None:
    """More prompts than rows, of ragged lengths, in chunks, in the slow cases whole, too.

    Llama in slow cases only: `test_the_same_texts_as_dense_slots` holds one against dense slots, and
    `test_engine_transformers.py` these against transformers.
    """
    reference = hf_model(family)
    reference.save_pretrained(tmp_path)
    engine = paged_engine(load_model(tmp_path), num_rows=5, prefill_chunk=prefill_chunk)
    batch = [Request(i, 0, prompt, max_new_tokens=6, temperature=0.0) for i, prompt in enumerate(prompts_of(6))]
    for completion in run(engine, batch).values():
        ids = torch.from_numpy(completion.request.prompt_tokens.astype(np.int64))[None]
        with torch.inference_mode():
            mask = torch.ones_like(ids)
            [expected] = reference.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
            logprobs = torch.log_softmax(reference(expected[None]).logits[0].double(), -1)
        new = expected[ids.shape[1] :]
        assert completion.tokens.tolist() == new.tolist()
        scores = logprobs[ids.shape[1] - 1 : -1].gather(1, new[:, None])[:, 0].numpy()
        assert np.abs(scores - completion.logprobs).max() < 1e-4


MIXED = [
    replace(request, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, keep_sets=keep_sets)
    for request, (temperature, top_k, top_p, min_p, keep_sets) in zip(
        requests(6, 3, max_new_tokens=24),
        [(1.0, 0, 1.0, 0.0, False), (0.0, 0, 1.0, 0.0, False), (0.7, 5, 1.0, 0.0, True), (1.3, 0, 0.8, 0.05, False)]
        * 5,
        strict=False,
    )
]


@pytest.mark.parametrize("num_kv_heads", with_slow([2], [4, 1]))
def test_the_same_texts_as_dense_slots(num_kv_heads: int) -> None:
    """Groups with shared prompts, more than there are rows, sampled in every way; rows are moved at the end."""
    model = random_model(num_kv_heads=num_kv_heads)
    expected = run(new_engine(model, num_slots=8), MIXED)
    found = run(paged_engine(model, num_rows=8), MIXED)
    assert_same_texts(found, expected)
    for key, completion in expected.items():
        assert (found[key].kept is None) == (completion.kept is None) == (not completion.request.keep_sets)
        if completion.kept is not None and found[key].kept is not None:
            for left, right in zip(found[key].kept.rows(), completion.kept.rows(), strict=True):
                assert np.array_equal(left, right)


JOINING = [replace(request, max_new_tokens=12) for request in MIXED[:5]]


@functools.cache
def each_alone() -> list[dict[tuple[int, int], Finished]]:
    return [run(new_engine(random_model(), stop_token_ids=[]), [request]) for request in JOINING]


@pytest.mark.parametrize("make", [new_engine, paged_engine])
def test_rows_that_join_are_sampled_in_their_own_way(make: Callable[..., Engine]) -> None:
    """Each joins while the others go on, so that nothing but its coming says that there is a new way."""
    engine = make(random_model(), stop_token_ids=[])
    for request in JOINING:
        engine.submit([request])
        assert engine.step() == []
    found = drain(engine)
    for alone in each_alone():
        assert_same_texts({key: found[key] for key in alone}, alone)


@pytest.mark.parametrize("num_pages", with_slow([14], [9, 30]))
def test_a_small_pool_changes_no_text_and_gives_everything_back(num_pages: int) -> None:
    model, batch = random_model(), requests(*((6, 2) if num_pages == 14 else (8, 3)), max_new_tokens=24)
    engine = paged_engine(model, num_pages=num_pages, prefill_chunk=8)
    assert_same_texts(run(engine, batch), run(new_engine(model), batch))
    assert engine.stats.preemptions > 0
    engine.set_version(1)  # forgets the prefixes
    runner = engine._runner
    assert isinstance(runner, PagedRunner)
    assert runner.num_free_pages == num_pages
    runner._pages.check()


@pytest.mark.parametrize("kv_on_update", ["keep", "recompute"])
def test_a_swap_in_the_middle_is_that_of_dense_slots(kv_on_update: str) -> None:
    finished = []
    for make in (new_engine, paged_engine):
        model, newer = random_model(0), random_model(1)
        engine = make(model, stop_token_ids=[])
        engine.submit(requests(3, 3, max_new_tokens=24))
        for _ in range(10):
            engine.step()
        model.load_state_dict(newer.state_dict())
        engine.set_version(1, kv_on_update=kv_on_update)
        finished.append(drain(engine))
    assert_same_texts(*finished)


def test_what_is_exported_goes_on_elsewhere() -> None:
    model, batch = random_model(), requests(3, 2)
    engine = paged_engine(model, stop_token_ids=[])
    engine.submit(batch)
    for _ in range(9):
        engine.step()
    exported = engine.export_live()
    resumed = run(new_engine(model, stop_token_ids=[]), exported)
    assert_same_texts(resumed, run(new_engine(model, stop_token_ids=[]), batch))


def decode_greedily(runner: PagedRunner, model: Transformer, sequences: dict[int, np.ndarray], steps: int) -> None:
    """Assert that every open row says what full forwards over its sequence say."""
    for _ in range(steps):
        assert runner.rows_without_room() == []
        decoded = runner.decode(max(sequences) + 1)
        known: dict[tuple[int, ...], torch.Tensor] = {}  # rows may say the same
        for row, tokens in sequences.items():
            said = tuple(tokens.tolist())
            known[said] = expected = known[said] if said in known else next_logprobs(model, tokens)
            assert decoded.tokens[row] == expected.argmax()
            assert abs(decoded.logprobs[row] - expected.max()) < 1e-4
            sequences[row] = np.append(tokens, decoded.tokens[row])


def test_rows_of_one_prefix_live_and_move_and_close_on_their_own() -> None:
    model, prompt = random_model(), random_prompt(31)
    runner = PagedRunner(model, num_rows=6, max_len=MAX_LEN)
    prefix = prefilled(runner, prompt, chunk=7)
    assert runner.open_rows([0, 3], prefix, states(2, length=31))
    assert runner.open_rows([5], prefix, states(1, length=31, token=4))
    runner.close_prefix(prefix)
    assert runner.open_rows([1], None, states(1, length=0))
    sequences = {row: np.append(prompt, token) for row, token in ((0, 3), (3, 3), (5, 4))} | {1: np.array([3])}
    decode_greedily(runner, model, sequences, 9)  # all but row 1 into their third page, and below into their fourth
    runner.close_rows([0])
    del sequences[0]
    runner.move_rows([5, 3], [2, 0])
    sequences = {2: sequences[5], 0: sequences[3], 1: sequences[1]}
    decode_greedily(runner, model, sequences, 9)
    runner.close_rows([0, 1, 2])
    assert runner.num_free_pages == runner._pages.num_pages


def test_without_room_a_row_waits_for_another_to_close() -> None:
    model = random_model()
    runner = PagedRunner(model, num_rows=9, max_len=MAX_LEN, num_pages=9)
    sequences = {row: np.array([3]) for row in range(7)}
    assert runner.open_rows(range(7), None, states(7, length=0))
    assert not runner.open_rows([7, 8], random_prefix(runner, 1), states(2, length=1))
    decode_greedily(runner, model, sequences, PAGE_SIZE)
    assert runner.rows_without_room() == [1, 2, 3, 4, 5, 6]
    with pytest.raises(AssertionError, match="no page"):
        runner.decode(7)
    runner.close_rows([2, 3, 4, 5, 6])
    del sequences[2], sequences[3], sequences[4], sequences[5], sequences[6]
    decode_greedily(runner, model, sequences, 3)


def random_prefix(runner: PagedRunner, num_tokens: int) -> Prefix:
    return prefilled(runner, random_prompt(num_tokens))


def test_the_noise_is_that_of_the_key_and_the_index() -> None:
    """The first token whose running sum reaches the numpy number; `num_new` moves on with every token."""
    model = random_model()
    runner = PagedRunner(model, num_rows=4, max_len=MAX_LEN)
    opened = states(4, length=0, temperature=1.0)
    runner.open_rows(range(4), None, opened)
    sequences = [np.array([3]) for _ in range(4)]
    for step in range(12):
        decoded = runner.decode(4)
        for row, u in enumerate(uniform(opened.noise_keys, opened.num_new + step)):
            logprobs = next_logprobs(model, sequences[row])
            assert decoded.tokens[row] == torch.searchsorted(logprobs.exp().cumsum(0), torch.tensor(u))
            assert abs(decoded.logprobs[row] - logprobs[decoded.tokens[row]]) < 1e-4
            sequences[row] = np.append(sequences[row], decoded.tokens[row])


def test_what_a_step_gave_outlives_the_next_one() -> None:
    runner = PagedRunner(random_model(), num_rows=2, max_len=MAX_LEN)
    runner.open_rows([0, 1], None, states(2, length=0, temperature=1.0))
    first = runner.decode(2)
    copied = Decoded(first.tokens.copy(), first.logprobs.copy())
    runner.decode(2)
    assert np.array_equal(first.tokens, copied.tokens)
    assert np.array_equal(first.logprobs, copied.logprobs)


def test_warm_up_touches_no_row() -> None:
    model = random_model()
    runner, cold = (PagedRunner(model, num_rows=3, max_len=MAX_LEN) for _ in range(2))
    runner.warm_up([SamplingPlan(), SamplingPlan(has_greedy=True, all_greedy=True)])
    assert runner.num_free_pages == cold.num_free_pages
    for each in (runner, cold):
        each.open_rows([0, 2], None, states(2, length=0, temperature=1.0))
    for _ in range(5):
        left, right = runner.decode(3), cold.decode(3)
        assert np.array_equal(left.tokens[[0, 2]], right.tokens[[0, 2]])
    with pytest.raises(AssertionError, match="open"):
        runner.warm_up()


def test_buckets_end_with_the_largest() -> None:
    assert row_buckets(1) == [1]
    assert row_buckets(8) == [1, 2, 4, 8]
    assert row_buckets(40) == [1, 2, 4, 8, 16, 24, 32, 40]
    assert row_buckets(256)[-5:] == [64, 96, 128, 192, 256]
    assert context_buckets(100) == [100]
    assert context_buckets(1024) == [256, 512, 1024]
    assert context_buckets(1500) == [256, 512, 1024, 1500]


def test_memory_is_given_once_and_has_to_do_for_one_sequence() -> None:
    model = random_model()
    page_bytes = PagedKV.bytes_per_page(num_layers=2, num_kv_heads=2, head_dim=8, dtype=torch.float32)
    assert PagedRunner(model, num_rows=2, max_len=MAX_LEN, kv_bytes=21 * page_bytes - 1).num_free_pages == 19
    whole = PagedRunner(model, num_rows=2, max_len=MAX_LEN).num_free_pages
    assert PagedRunner(model, num_rows=2, max_len=MAX_LEN, kv_bytes=2**30).num_free_pages == whole
    with pytest.raises(ConfigError, match="given twice"):
        PagedRunner(model, num_rows=2, max_len=MAX_LEN, kv_bytes=2**20, num_pages=20)
    with pytest.raises(ConfigError, match="too few pages"):
        PagedRunner(model, num_rows=2, max_len=MAX_LEN, kv_bytes=9 * page_bytes)
    with pytest.raises(ConfigError, match="max_len exceeds"):
        PagedRunner(model, num_rows=2, max_len=161)
    with pytest.raises(ConfigError, match="at least one row"):
        PagedRunner(model, num_rows=0, max_len=MAX_LEN)


def test_a_model_in_bfloat16_decodes_what_it_scores() -> None:
    """Keys and values take half the memory; logprobs are fp32, near those of the same model's full forward."""
    model = random_model().bfloat16()
    runner = PagedRunner(model, num_rows=8, max_len=MAX_LEN)
    assert runner._kv.keys.dtype == torch.bfloat16
    finished = run(Engine(runner, seed=7, stop_token_ids=[STOP], prefill_chunk=8), requests(4, 2, max_new_tokens=8))
    gaps = []
    for completion in finished.values():
        tokens = np.concatenate([completion.request.prompt_tokens, completion.tokens])
        for place, logprob in enumerate(completion.logprobs.tolist(), len(completion.request.prompt_tokens)):
            gaps.append(logprob - float(next_logprobs(model, tokens[:place])[tokens[place]]))
    assert 0 < np.abs(gaps).mean() < 0.02
    assert np.abs(gaps).max() < 0.15


@pytest.mark.parametrize("precision", with_slow(["float32", "int8"], ["bfloat16", "fp8"]))
def test_served_weights_are_exchanged_under_a_step_without_moving(precision: Precision) -> None:
    """What the step reads lies where it lay, as on CUDA; the texts are those of dense slots with the same weights."""
    finished = []
    for make in (new_engine, paged_engine):
        model = random_model(0)
        weights = ServedWeights(model, precision, in_place=True)
        other = ServedWeights(random_model(1), precision, in_place=True)
        engine = make(model)
        addresses = WeightAddresses(model)
        run(engine, requests(2, 2, max_new_tokens=10))
        weights.rebind(other.flat)
        addresses.check()
        engine.set_version(1)
        finished.append(run(engine, requests(3, 2, max_new_tokens=16)))
    assert_same_texts(finished[1], finished[0], tolerance=1e-4 if precision == "float32" else 0.1)


def test_any_linear_layer_will_do() -> None:
    """A layer with a forward of its own, as quantised ones have, is what the step calls."""
    model = random_model()
    weight = model.layers[0].up.weight.detach().clone()
    with torch.no_grad():
        model.layers[0].up.weight.zero_()
    model.layers[0].up.forward = lambda x: x @ weight.T  # type: ignore[method-assign]
    batch = requests(2, 2, max_new_tokens=10)
    assert_same_texts(run(paged_engine(model), batch), run(new_engine(random_model()), batch))


def test_likely_steps_are_those_of_all_rows_as_training_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys that are captured at the start are those that a full engine of such requests asks for."""
    asked: list[StepShape] = []
    run_step = StepGraphs.run
    monkeypatch.setattr(StepGraphs, "run", lambda self, key, step: (asked.append(key), run_step(self, key, step))[1])
    generator = GeneratorConfig(temperature=0.7, top_k=5, keep_sets=True)
    options = {"num_slots": 12, "max_len": 600, "is_paged": True, "likely": likely_plans(generator)}
    engine = new_engine(random_model(max_positions=600), **options)
    assert [(shape.num_rows, shape.num_blocks) for shape in asked[:3]] == [(12, 38), (12, 32), (12, 16)]
    assert {shape.plan for shape in asked} == set(likely_plans(generator))
    ready, asked[:] = set(asked), []
    batch = [replace(r, temperature=0.7, top_k=5, keep_sets=True) for r in requests(12, max_new_tokens=3)]
    run(engine, batch)
    assert asked[0] in ready
    assert asked[0].num_rows == 12


def test_likely_steps_end_at_a_number_and_at_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the most rows down, each from the longest down; those of all rows come whatever the bounds are."""
    asked: list[tuple[int, int]] = []
    clock = VirtualClock()

    def captured(runner: PagedRunner, shape: StepShape) -> None:
        asked.append((shape.num_rows, shape.num_blocks))
        clock.advance(1.0)

    monkeypatch.setattr(PagedRunner, "_run", captured)
    monkeypatch.setattr(paged_runner, "WallClock", lambda: clock)
    runner = PagedRunner(random_model(max_positions=300), num_rows=6, max_len=300)
    every = [(rows, blocks) for rows in (6, 4, 2, 1) for blocks in (19, 16)]
    for limits, number in (({}, 8), ({"most": 5}, 5), ({"most": 1}, 2), ({"limit_s": 3.0}, 3), ({"limit_s": 0.0}, 2)):
        asked.clear()
        runner.warm_up(**limits)  # type: ignore[arg-type]
        assert asked == every[:number]


class Operations(TorchDispatchMode):
    """Lists what runs, and for copies whence."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.sources: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        if func is torch.ops.aten.copy_.default:
            self.sources.append(args[1].data_ptr())
        return func(*args, **(kwargs or {}))


def test_all_changes_between_two_steps_are_one_upload() -> None:
    """Opening, closing and moving rows runs nothing; the next step brings their numbers and tables along, once."""
    runner = PagedRunner(random_model(), num_rows=8, max_len=64)
    with Operations() as between:
        runner.open_rows([0, 1, 2, 5], None, states(4, length=0))
        runner.close_rows([1])
        runner.move_rows([5], [1])
    assert not between.names
    uploads = []
    for _ in range(2):
        with Operations() as step:
            runner.decode(4)
        uploads.append(step.sources.count(runner._host.data_ptr()))
    assert uploads == [1, 0]
    assert runner._rows.advance.tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    assert runner._rows.positions.tolist() == [2, 2, 2, 0, 0, 0, 0, 0]


def test_copies_of_pages_come_with_the_upload() -> None:
    """Two prefixes whose last pages are partly filled: opening rows runs nothing, the step has one upload."""
    model, prompts = random_model(), (random_prompt(20), random_prompt(7, seed=1))
    runner = PagedRunner(model, num_rows=8, max_len=64)
    prefixes = [prefilled(runner, prompt) for prompt in prompts]
    with Operations() as between:
        runner.open_rows([0, 4], prefixes[0], states(2, length=20))
        runner.open_rows([2], prefixes[1], states(1, length=7))
        runner.move_rows([4], [1])
    assert not between.names
    with Operations() as step:
        runner.decode(3)
    assert step.sources.count(runner._host.data_ptr()) == 1
    assert "aten::lift_fresh" not in step.names, "numbers of the host's"
    runner.close_rows([0, 1, 2])
    runner.open_rows([0, 1], prefixes[0], states(2, length=20))
    runner.open_rows([2], prefixes[1], states(1, length=7))
    sequences = {row: np.append(prompts[row == 2], 3) for row in range(3)}
    decode_greedily(runner, model, sequences, 4)


Sequences = dict[int, np.ndarray]


def taken_over(runner: PagedRunner, prefix: PagedPrefix) -> Sequences:
    """The prefix is given up; another one has its pages, and is filled."""
    runner.close_prefix(prefix)
    other = prefilled(runner, random_prompt(30, seed=9))
    assert isinstance(other, PagedPrefix)
    assert prefix.pages[-1] in other.pages
    return {}


def a_source_is_a_destination(runner: PagedRunner, prefix: PagedPrefix) -> Sequences:
    """The prefix is given up; the copy for another row goes to its page."""
    tokens = random_prompt(9, seed=9)
    other = prefilled(runner, tokens)
    runner.close_prefix(prefix)
    while runner._pages._free[-1] != prefix.pages[-1]:
        assert runner.open_prefix(1) is not None
    assert runner.open_rows([3], other, states(1, length=9))
    assert runner._pages.blocks[3, 0] == prefix.pages[-1]
    return {3: np.append(tokens, 3)}


def closed_and_filled(runner: PagedRunner, prefix: PagedPrefix) -> Sequences:
    """Another row ends before its page is copied; a prompt fills that page, and rows on it share it."""
    assert runner.open_rows([3], prefix, states(1, length=20))
    (page,) = runner._pages.blocks[3, 1:2].tolist()
    runner.close_rows([3])
    tokens = random_prompt(PAGE_SIZE, seed=9)
    other = prefilled(runner, tokens)
    assert isinstance(other, PagedPrefix)
    assert other.pages.tolist() == [page]
    assert runner.open_rows([3], other, states(1, length=PAGE_SIZE))
    return {3: np.append(tokens, 3)}


def parked_and_opened(runner: PagedRunner, prefix: PagedPrefix) -> Sequences:
    """Another row is parked before its first step, and opened again: a copy of a page that a copy goes to."""
    assert runner.open_rows([3], prefix, states(1, length=20))
    assert runner.open_rows([2], runner.park_row(3), states(1, length=20))
    return {2: np.append(random_prompt(20), 3)}


CHANGES = [taken_over, a_source_is_a_destination, closed_and_filled, parked_and_opened]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_copies_that_wait_are_of_what_pages_held(change: Callable[[PagedRunner, PagedPrefix], Sequences]) -> None:
    """Between opening a row and its first step pages change hands; every row says what a full forward does."""
    model, prompt = random_model(), random_prompt(20)
    runner = PagedRunner(model, num_rows=4, max_len=64)
    prefix = prefilled(runner, prompt)
    assert isinstance(prefix, PagedPrefix)
    assert runner.open_rows([0], prefix, states(1, length=20))
    others = change(runner, prefix)
    decode_greedily(runner, model, {0: np.append(prompt, 3)} | others, 3)
