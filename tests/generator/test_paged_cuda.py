"""Pages and captured steps on a GPU: `pytest -m gpu tests/generator/test_paged_cuda.py`."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_kit import STOP, new_engine, random_model, random_prompt, requests, run
from triton_on_cpu import LENGTHS, SHAPES, pages_of

from slipstream.algorithms.logprobs import probe_logprobs
from slipstream.core.errors import WeightSyncError
from slipstream.generator.engine import Engine
from slipstream.generator.paged_attention import SPLIT_TOKENS, attend_gathered, attend_split
from slipstream.generator.paged_runner import PagedRunner
from slipstream.generator.requests import Request
from slipstream.generator.sampler import SamplingPlan
from slipstream.models.config import TransformerConfig
from slipstream.models.e4m3 import adds_bias, by_kernel, in_torch, kernel_is_right
from slipstream.models.initialise import initialise
from slipstream.models.layer_functions import silu_mul
from slipstream.models.transformer import Transformer

pytestmark = pytest.mark.gpu

MAX_LEN = 128


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return torch.device("cuda")


def engine_of(
    model: Transformer, *, num_rows: int = 16, captures: bool = True, looks_ahead: bool | None = None, **options: object
) -> Engine:
    runner = PagedRunner(model, num_rows=num_rows, max_len=MAX_LEN, captures=captures, looks_ahead=looks_ahead)
    return Engine(runner, seed=7, **({"stop_token_ids": [STOP]} | options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)], ids=str
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernels_equal_the_reference(
    shape: tuple[int, int, int], dtype: torch.dtype, tolerance: float, cuda: torch.device
) -> None:
    for lengths, num_tokens in LENGTHS:
        case = [tensor.to(cuda) for tensor in pages_of(lengths, num_tokens, *shape, dtype)]
        torch.testing.assert_close(attend_split(*case), attend_gathered(*case), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("width", [17, 896, 14336, 32768])
def test_rows_are_rounded_to_e4m3_as_by_torch(width: int, cuda: torch.device) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("this GPU does not multiply fp8")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 2 * width, generator=generator) * torch.logspace(-30, 30, 6)[:, None]
    x[1] = 0.0
    wide, gate_up = x.to(cuda, torch.bfloat16), x.clamp(-80, 80).to(cuda, torch.bfloat16)
    for found, expected in (
        (by_kernel(wide), in_torch(wide)),
        (by_kernel(gate_up, is_gated=True), in_torch(silu_mul(gate_up))),
    ):
        assert torch.equal(found.values.view(torch.uint8), expected.values.view(torch.uint8))
        assert torch.equal(found.scales, expected.scales)


def test_fp8_takes_its_kernel_and_adds_biases(cuda: torch.device) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("this GPU does not multiply fp8")
    assert kernel_is_right(cuda)
    assert adds_bias(cuda)


def test_a_rows_attention_has_the_same_bits_in_any_company_and_bucket(cuda: torch.device) -> None:
    case = [tensor.to(cuda) for tensor in pages_of([257, 1, 512, 300], 512, 14, 2, 64, torch.bfloat16)]
    q, keys, values, blocks, lengths = case
    together = attend_split(*case)
    wider = torch.nn.functional.pad(blocks, (0, 2 * SPLIT_TOKENS // 16))
    assert torch.equal(attend_split(q, keys, values, wider, lengths), together)
    for row in range(4):
        one = slice(row, row + 1)
        assert torch.equal(attend_split(q[one], keys, values, blocks[one], lengths[one]), together[one])


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_the_same_texts_as_dense_slots_on_a_cpu(looks_ahead: bool, cuda: torch.device) -> None:
    """In float32, captured. Sums that differ in rounding may part two texts, where a number lies between them."""
    batch = requests(6, 3)
    expected = run(new_engine(random_model()), batch)
    found = run(engine_of(random_model().to(cuda), prefill_chunk=8, looks_ahead=looks_ahead), batch)
    same = [np.array_equal(found[key].tokens, completion.tokens) for key, completion in expected.items()]
    assert np.mean(same) > 0.9
    for key, completion in expected.items():
        if np.array_equal(found[key].tokens, completion.tokens):
            assert np.abs(found[key].logprobs - completion.logprobs).max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_captured_steps_give_the_bits_of_steps_that_are_not(dtype: torch.dtype, cuda: torch.device) -> None:
    model = random_model().to(cuda, dtype)
    batch = [
        replace(request, temperature=0.0 if index % 3 == 0 else 0.8, top_k=4 * (index % 2), keep_sets=False)
        for index, request in enumerate(requests(6, 3))
    ]
    eager, captured = engine_of(model, captures=False), engine_of(model)
    expected, found = run(eager, batch), run(captured, batch)
    assert captured._runner.num_graphs > 1  # type: ignore[attr-defined]
    assert eager._runner.num_graphs == 0  # type: ignore[attr-defined]
    for key, completion in expected.items():
        assert np.array_equal(found[key].tokens, completion.tokens)
        assert found[key].logprobs.tobytes() == completion.logprobs.tobytes()


def test_a_captured_step_reads_new_weights_and_refuses_moved_ones(cuda: torch.device) -> None:
    model, newer = random_model(0).to(cuda), random_model(1).to(cuda)
    engine = engine_of(model)
    run(engine, requests(2, 2))
    num_graphs = engine._runner.num_graphs  # type: ignore[attr-defined]
    model.load_state_dict(newer.state_dict())
    engine.set_version(1)
    found, expected = run(engine, requests(2, 2)), run(engine_of(newer), requests(2, 2))
    for key, completion in expected.items():
        assert found[key].logprobs.tobytes() == completion.logprobs.tobytes()
    assert engine._runner.num_graphs == num_graphs  # type: ignore[attr-defined]
    model.embedding.weight.data = model.embedding.weight.detach().clone()
    with pytest.raises(WeightSyncError, match="moved"):
        run(engine, requests(1))


def test_warm_up_captures_every_shape_once(cuda: torch.device) -> None:
    runner = PagedRunner(random_model().to(cuda), num_rows=4, max_len=MAX_LEN)
    runner.warm_up()
    assert runner.num_graphs == 3
    run(Engine(runner, seed=7, stop_token_ids=[STOP]), requests(2, 2))
    assert runner.num_graphs == 3
    runner.warm_up([SamplingPlan(has_greedy=True, all_greedy=True)])
    assert runner.num_graphs == 6


def wide_model(cuda: torch.device) -> Transformer:
    """The shape of a 0.5B model, random."""
    config = TransformerConfig(
        family="llama",
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        max_positions=2048,
        tie_embeddings=True,
    )
    model = Transformer(config)
    initialise(model, seed=0)
    return model.to(cuda)


def test_bfloat16_stays_near_float32(cuda: torch.device) -> None:
    model = wide_model(cuda)
    batch = [Request(i, 0, random_prompt(40, seed=i), max_new_tokens=32) for i in range(8)]
    narrow = run(engine_of(wide_model(cuda).bfloat16(), stop_token_ids=[]), batch)
    gaps = []
    for completion in narrow.values():
        tokens = np.concatenate([completion.request.prompt_tokens, completion.tokens])
        gaps.append(completion.logprobs - probe_logprobs(model, tokens)[-32:])
    assert np.abs(np.concatenate(gaps)).mean() < 0.05


def test_tokens_per_second(cuda: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    """A bound that only something broken misses, such as steps that are captured again and again."""
    runner = PagedRunner(wide_model(cuda).bfloat16(), num_rows=256, max_len=1024)
    engine = Engine(runner, seed=7, stop_token_ids=[], prefill_tokens=8192)

    def batch(ordinal: int) -> list[Request]:
        return [Request(ordinal + i // 8, i % 8, random_prompt(100, seed=i // 8), 256) for i in range(256)]

    run(engine, batch(0))
    start_s = time.perf_counter()
    finished = run(engine, batch(100))
    torch.cuda.synchronize()
    rate = sum(len(completion.tokens) for completion in finished.values()) / (time.perf_counter() - start_s)
    with capsys.disabled():
        print(f"\n0.5B, 256 rows, bf16: {rate:.0f} tokens/s with {runner.num_graphs} graphs")  # noqa: T201
    assert rate > 2000
