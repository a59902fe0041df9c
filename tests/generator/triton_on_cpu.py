"""A process of its own for tests of the kernels of attention, of decode steps, of layers and of sampling.

It is called with kinds of kernels, attention, decode, layer, sampling, head, checksums, and with "few" behind them
checks some cases; of the last two kinds other programs do, in this process.
Triton reads TRITON_INTERPRET=1 where a kernel is defined.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from engine_kit import STOP, adapted_model, new_engine, random_mixture, random_model, requests, run
from torch import Tensor, nn

from slipstream.generator import fused_decode, fused_sampling, sampler_kernels
from slipstream.generator.engine import Engine
from slipstream.generator.fused_decode import add_norm, enter, fused_forward, normed_for
from slipstream.generator.noise import noise_keys, uniform
from slipstream.generator.paged_attention import SPLIT_TOKENS, PagedDecodeAttention, attend_gathered, attend_split
from slipstream.generator.paged_kv import PagedKV
from slipstream.generator.paged_runner import PagedRunner
from slipstream.generator.sampler import SampledTokens, SamplingPlan, SamplingRows
from slipstream.models import layer_functions, products, transformer
from slipstream.models.attention import PackedAttention
from slipstream.models.e4m3 import E4m3Rows, by_kernel, in_torch
from slipstream.models.layer_functions import RotateHeads, SwiGlu, silu_mul
from slipstream.models.quantized import FP8
from slipstream.models.served import ServedWeights
from slipstream.models.sharded import Division, divide
from slipstream.models.transformer import Transformer, rope_tables, rotate

PAGE = 16
IS_FEW = sys.argv[-1:] == ["few"]  # [IS_FEW:] leaves out the first case then
SHAPES = (  # query heads, key-value heads, head size
    (4, 2, 8),
    (3, 3, 16),
    (14, 2, 64),
    (3, 1, 80),
    (8, 2, 128),
)
LENGTHS = (  # of the rows, and how many tokens a step looks at
    ([1], 16),
    ([16, 17, 1], 48),
    ([255, 256, 3], 256),
    ([257, 1, 512, 300], 512),
    ([1, 5000], 5040),
)


def pages_of(
    lengths: list[int], num_tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """Random queries, pages, block tables and lengths; what rows do not own is filled with large numbers."""
    generator = torch.Generator().manual_seed(heads + num_tokens)
    num_blocks = num_tokens // PAGE
    used = [-(-length // PAGE) for length in lengths]
    pages = torch.randperm(sum(used), generator=generator) + 1
    keys, values = (
        torch.randn((sum(used) + 1, PAGE, kv_heads, head_dim), generator=generator).to(dtype) for _ in range(2)
    )
    keys[0] = values[0] = 1e4
    blocks = torch.zeros((len(lengths), num_blocks + 3), dtype=torch.int32)  # a wider table, of which a part is used
    for row, own in enumerate(torch.split(pages, used)):
        blocks[row, : len(own)] = own
        place = lengths[row] % PAGE
        if place:
            keys[own[-1], place:] = values[own[-1], place:] = 1e4
    qkv = torch.randn((len(lengths), heads + 2 * kv_heads, head_dim), generator=generator).to(dtype)
    return qkv[:, :heads], keys, values, blocks[:, :num_blocks], torch.tensor(lengths)


def check_reference() -> None:
    """All shapes with ragged lengths, all lengths with a small shape; float16 as the precision of queries and pages.

    With "few", some of the shapes and lengths.
    """
    cases = [(shape, LENGTHS[3]) for shape in SHAPES] + [(SHAPES[0], lengths) for lengths in LENGTHS]
    if IS_FEW:
        cases = [(SHAPES[0], LENGTHS[2]), *((shape, LENGTHS[1]) for shape in (SHAPES[1], *SHAPES[3:]))]
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.float16, 2e-3)):
        for shape, (lengths, num_tokens) in cases if dtype == torch.float32 else cases[1::3]:
            case = pages_of(lengths, num_tokens, *shape, dtype)
            torch.testing.assert_close(attend_split(*case), attend_gathered(*case), atol=tolerance, rtol=tolerance)


def check_company() -> None:
    """A row's bits are the same alone, in company, and in a larger bucket."""
    of_rows = [257, 1] if IS_FEW else [257, 1, 512, 300]
    q, keys, values, blocks, lengths = pages_of(of_rows, 512, 4, 2, 8, torch.float32)
    together = attend_split(q, keys, values, blocks, lengths)
    wider = torch.nn.functional.pad(blocks, (0, 2 * SPLIT_TOKENS // PAGE))
    assert torch.equal(attend_split(q, keys, values, wider, lengths), together)
    for row in (0,) if IS_FEW else range(4):
        one = slice(row, row + 1)
        assert torch.equal(attend_split(q[one], keys, values, blocks[one], lengths[one]), together[one])


def check_runner() -> None:
    """The whole decode step over the kernels gives the texts of the dense slots."""
    model = random_model()
    batch = requests(1, 2, max_new_tokens=2) if IS_FEW else requests(2, 2, max_new_tokens=6)
    expected = run(new_engine(model), batch)
    runner = PagedRunner(model, num_rows=4, max_len=64, attend=attend_split)
    found = run(Engine(runner, seed=7, stop_token_ids=[STOP]), batch)
    for key, completion in expected.items():
        assert np.array_equal(found[key].tokens, completion.tokens)
        np.testing.assert_allclose(found[key].logprobs, completion.logprobs, atol=1e-4)


DTYPES = ((torch.float32, 4e-6), (torch.bfloat16, 2**-7))  # and the bound of a kernel's error: one bfloat16 step


def round_to_nearest() -> None:
    """Let the interpreter round float32 as GPUs do, to the nearest: it cuts off to bfloat16, and loses carries of e4m3.

    To e4m3 as torch does, which `test_precision.py` holds against the numbers there are.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    cast = interpreter.InterpreterBuilder.cast_impl

    def nearest(self: object, source: interpreter.TensorHandle, wanted: tl.dtype) -> interpreter.TensorHandle:
        if (source.dtype.scalar, wanted.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, source, wanted)
        narrow = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.int16)
        return interpreter.TensorHandle(narrow.numpy().view(np.uint16), wanted.scalar)

    interpreter.InterpreterBuilder.create_fp_trunc = nearest
    convert = interpreter.InterpreterBuilder.create_fp_to_fp

    def nearest_e4m3(
        self: object, source: interpreter.TensorHandle, wanted: tl.dtype, mode: object
    ) -> interpreter.TensorHandle:
        if (source.dtype.scalar, wanted.scalar) != (tl.float32, tl.float8e4nv):
            return convert(self, source, wanted, mode)
        narrow = torch.from_numpy(np.ascontiguousarray(source.data)).to(FP8).view(torch.uint8)
        return interpreter.TensorHandle(narrow.numpy(), wanted.scalar)

    interpreter.InterpreterBuilder.create_fp_to_fp = nearest_e4m3


def fused_models() -> Iterator[Transformer]:
    """With head norms and biases, parts of heads rotated, sizes that are no powers of 2; vectors not all ones."""
    plain = random_model().config
    wide = {"num_heads": 14, "head_dim": 64, "hidden_size": 448, "intermediate_size": 1200, "num_layers": 1}
    large = {"family": "qwen3", "qk_norm": True, "head_dim": 128, "num_heads": 4, "num_kv_heads": 4}
    for changes in (
        *([] if IS_FEW else [wide]),
        {"family": "qwen2", "qkv_bias": True, "head_dim": 24, "num_heads": 3, "num_kv_heads": 1, "hidden_size": 40},
        *([] if IS_FEW else [large]),
        {"rotary_fraction": 0.5, "qk_norm": True, "head_dim": 16, "rope_theta": 100.0},
    ):
        model = Transformer(replace(plain, **changes))
        for index, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(index)
            nn.init.normal_(parameter, float(parameter.ndim == 1), 0.3 if parameter.ndim == 1 else 0.1, generator)
        yield model.requires_grad_(False)


def decode_attention(model: Transformer, dtype: torch.dtype, rows: int) -> tuple[PagedKV, PagedDecodeAttention]:
    """Of a step in which each row has 20 tokens, the last one new, in two pages of its own."""
    config = model.config
    shape = {"num_kv_heads": config.num_kv_heads, "head_dim": config.head_dim, "dtype": dtype}
    kv = PagedKV(num_layers=config.num_layers, num_pages=2 * rows, **shape)  # type: ignore[arg-type]
    for stored in (kv.keys, kv.values):
        stored.copy_(torch.randn(stored.shape, generator=torch.Generator().manual_seed(1)))
    blocks = torch.arange(1, 2 * rows + 1, dtype=torch.int32).view(rows, 2)
    slots, lengths = blocks[:, 1].long() * PAGE + 3, torch.full((rows,), 20)
    return kv, PagedDecodeAttention(kv, attend_gathered, slots=slots, blocks=blocks, lengths=lengths)


def check_each_fusion() -> None:
    """Against the layer's own operations; what is only moved or added has the same bits."""
    for model in fused_models():
        for dtype, bound in DTYPES:
            model = model.to(dtype)
            model.cos, model.signed_sin = model.cos.float(), model.signed_sin.float()
            layer, rows = model.layers[-1], 5
            x, branch = torch.randn(2, rows, model.config.hidden_size).to(dtype)
            summed, stream = x + branch, x.clone()
            torch.testing.assert_close(add_norm(stream, None, layer.mlp_norm), layer.mlp_norm(x), atol=0, rtol=bound)
            normed = add_norm(stream, branch, layer.mlp_norm)
            assert torch.equal(stream, summed)
            torch.testing.assert_close(normed, layer.mlp_norm(summed), atol=0, rtol=bound)
            gate_up = 3 * torch.randn(rows, 2 * model.config.intermediate_size).to(dtype)
            gate, up = gate_up.chunk(2, -1)
            torch.testing.assert_close(silu_mul(gate_up), F.silu(gate) * up, atol=0, rtol=2 * bound)
            check_entry(model, normed, bound)


def check_entry(model: Transformer, normed: Tensor, bound: float) -> None:
    layer, positions = model.layers[-1], torch.tensor([0, 1, 7, 100, 159])
    rope = tuple(table[positions][:, None].to(normed.dtype) for table in (model.cos, model.signed_sin))
    (plain, into), (fused, attention) = (decode_attention(model, normed.dtype, len(normed)) for _ in range(2))
    q, k, v = layer.project(normed, rope)  # type: ignore[arg-type]
    plain.write(layer.index, into.slots, k, v)
    queries = enter(layer, layer.qkv(normed), model.cos, model.signed_sin, positions, attention)
    # A sum of two products, which may cancel: the bound is relative to the larger one.
    torch.testing.assert_close(queries, q, atol=2 * bound * float(q.abs().max()), rtol=bound)
    torch.testing.assert_close(fused.keys, plain.keys, atol=2 * bound * float(k.abs().max()), rtol=0)
    written = torch.zeros(fused.keys.shape[1:3], dtype=torch.bool)
    written.view(-1)[attention.slots] = True
    assert torch.equal(fused.keys[:, ~written], plain.keys[:, ~written])
    assert torch.equal(fused.values, plain.values)


def check_fused_steps() -> None:
    """The whole model, from tokens to states, at 3 steps in the units of its states, which are about 1."""
    for model in (*fused_models(), random_mixture(), adapted_model()):
        for dtype, bound in DTYPES[:1] if IS_FEW or model.config.num_experts or "adapter" in str(model) else DTYPES:
            model = model.to(dtype)
            model.cos, model.signed_sin = model.cos.float(), model.signed_sin.float()
            tokens, positions = torch.tensor([3, 0, 47, 11]), torch.full((4,), 19)
            with torch.inference_mode():
                (plain, own), (fused, other) = (decode_attention(model, dtype, 4) for _ in range(2))
                expected, found = model(tokens, positions, own), fused_forward(model, tokens, positions, other)
            error = (found.double() - expected.double()).abs()
            scale = float(expected.double().pow(2).mean().sqrt())
            assert float(error.pow(2).mean().sqrt()) <= 2 * bound * scale, (model.config, dtype, error.max())
            torch.testing.assert_close(fused.values, plain.values, atol=8 * bound, rtol=bound)


def check_same_rows(found: E4m3Rows, expected: E4m3Rows) -> None:
    assert found.values.dtype == FP8
    assert found.dtype == expected.dtype
    assert torch.equal(found.values.view(torch.uint8), expected.values.view(torch.uint8))
    assert torch.equal(found.scales, expected.scales)


def check_rounding() -> None:
    """To the bit as torch does: rows of zeros, of very large and very small numbers, and of ties."""
    for width in (17, 1000) if IS_FEW else (1, 16, 17, 896, 4864, 20000, 32768):
        x = torch.randn(6, 2 * width) * torch.logspace(-30, 30, 6)[:, None]
        x[1], x[4] = 0.0, torch.randint(-448, 449, (2 * width,)) / 2
        x[4, 0] = 448.0
        for dtype, _ in DTYPES:
            check_same_rows(by_kernel(x.to(dtype)[:, :width]), in_torch(x.to(dtype)[:, :width]))
            gate_up = x.clamp(-80, 80).to(dtype)
            check_same_rows(by_kernel(gate_up, is_gated=True), in_torch(silu_mul(gate_up)))


def check_rounded_norms() -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fused_decode, "reads_e4m3", lambda linear, x: True)
        for model in fused_models():
            for dtype, _ in DTYPES:
                norm = model.layers[0].mlp_norm.to(dtype)
                x, branch = torch.randn(2, 5, model.config.hidden_size).to(dtype)
                for added in (None, branch):
                    one, other = x.clone(), x.clone()
                    found = normed_for(norm, one, added, norm)
                    assert isinstance(found, E4m3Rows)
                    check_same_rows(found, in_torch(add_norm(other, added, norm)))
                    assert torch.equal(one, other), "the sum stays"


def check_fp8_steps() -> None:
    """Whole models: the bits of the fused step that rounds in torch's operations, near the model's own."""
    for model in (random_model(), *([] if IS_FEW else list(fused_models())[:2])):
        ServedWeights(model, "fp8")
        tokens, positions, states = torch.tensor([3, 0, 47, 11]), torch.full((4,), 19), []
        for is_fused, has_kernels in ((False, False), (True, False), (True, True)):
            with pytest.MonkeyPatch.context() as patched, torch.inference_mode():
                for module in (fused_decode, products):
                    patched.setattr(module, "has_kernels", lambda x, has=has_kernels: has)
                attention = decode_attention(model, torch.float32, 4)[1]
                forward = partial(fused_forward, model) if is_fused else model
                states.append(forward(tokens, positions, attention))
        plain, in_operations, in_kernels = states
        assert torch.equal(in_operations, in_kernels)
        assert (in_kernels - plain).pow(2).mean() <= (0.05**2) * plain.pow(2).mean()


def check_fused_runner() -> None:
    """Texts of the dense slots, by the runner with everything fused."""
    model = random_model()
    batch = requests(1, 2, max_new_tokens=2) if IS_FEW else requests(2, 2, max_new_tokens=6)
    expected = run(new_engine(model), batch)
    found = run(Engine(PagedRunner(model, num_rows=4, max_len=64, fused=True), seed=7, stop_token_ids=[STOP]), batch)
    for key, completion in expected.items():
        assert np.array_equal(found[key].tokens, completion.tokens)
        np.testing.assert_allclose(found[key].logprobs, completion.logprobs, atol=1e-4)


HALVES = ((torch.bfloat16, 2**-8), (torch.float16, 2**-11))  # and one rounding, relative


def check_gradients(
    found: Sequence[Tensor],
    rounded: Sequence[Tensor],
    exact: Sequence[Tensor],
    inputs: Sequence[Tensor],
    bound: float,
) -> None:
    """Outputs of the kernels, of the operations and of float64: the same bits, and gradients nearer to float64's."""
    assert all(torch.equal(one, other) for one, other in zip(found, rounded, strict=True))
    upstream = [torch.randn(one.shape).to(one.dtype) for one in found]
    torch.autograd.backward(found, [one.mT.contiguous().mT for one in upstream])  # with strides of another order
    torch.autograd.backward(rounded, upstream)
    torch.autograd.backward(exact, [one.double() for one in upstream])
    own, plain, true = (one.grad.double() for one in inputs if one.grad is not None)
    torch.testing.assert_close(own, true, atol=bound * float(true.abs().mean()) / 8, rtol=bound)
    assert (own - true).norm() <= (plain - true).norm() > 0


def copies(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.clone().requires_grad_(), x.clone().requires_grad_(), x.double().requires_grad_()


def check_swiglu() -> None:
    for dtype, bound in HALVES:
        for rows, width in ((5, 48), (1, 77)) if IS_FEW else ((5, 48), (3, 1200), (1, 77), (2, 1024)):
            inputs = copies((3 * torch.randn(rows, 2 * width)).to(dtype))
            plain, exact = (F.silu(gate) * up for gate, up in (one.chunk(2, -1) for one in inputs[1:]))
            check_gradients([SwiGlu.apply(inputs[0])], [plain], [exact], inputs, bound)


def check_rotation() -> None:
    shapes = ((3, 14, 2, 64, 1.0), (2, 3, 1, 24, 1.0), (5, 4, 4, 80, 0.25))[IS_FEW:]
    for dtype, bound in HALVES:
        for rows, heads, kv_heads, dim, fraction in shapes:
            config = replace(random_model().config, head_dim=dim, rotary_fraction=fraction)
            tables = [table[torch.arange(rows) * 7][:, None].to(dtype) for table in rope_tables(config)]
            inputs = copies(torch.randn(rows, heads + 2 * kv_heads, dim).to(dtype))
            sizes = (heads, kv_heads, kv_heads)
            plain, exact = (
                [rotate(q, *rope), rotate(k, *rope), v]
                for (q, k, v), rope in (
                    (inputs[1].split(sizes, 1), tables),
                    (inputs[2].split(sizes, 1), [table.double() for table in tables]),
                )
            )
            check_gradients(RotateHeads.apply(inputs[0], *tables, kv_heads), plain, exact, inputs, bound)


def check_layers() -> None:
    """Whole models in float32, layers run once or again in the backward pass: gradients of the plain operations.

    With "few", some of the models.
    """
    states: dict[int, list[Tensor]] = {}
    modes = ((True, False), (True, True), (False, False))[IS_FEW:]
    towards = torch.randn(512)
    for takes in (False, True):
        layer_functions.is_fused = transformer.is_fused = lambda x, takes=takes: takes  # type: ignore[assignment]
        for case, model in enumerate((*list(fused_models())[-1 if IS_FEW else -3 :], random_mixture())):
            again, keeps = modes[case % len(modes)]
            divide(model.requires_grad_(True), Division(recomputes=takes and again, keeps_products=takes and keeps))
            out = model(torch.arange(5), torch.tensor([0, 1, 2, 0, 1]), PackedAttention([3, 2]))
            (out * towards[: out.shape[1]]).sum().backward()
            found = [out.detach(), *(one.grad for one in model.parameters() if one.grad is not None)]
            for one, other in zip(found, states.setdefault(case, found), strict=True):
                torch.testing.assert_close(one, other, atol=2e-5 * float(other.abs().max()), rtol=0)


ROWS, BLOCK = 8, sampler_kernels.BLOCK
MIXED = torch.tensor([1.0, 0.7, 0.0, 1.3, 0.0, 1.0, 0.6, 2.5])
TEMPERATURES = (torch.ones(ROWS), MIXED, torch.zeros(ROWS))


def drawn(logits: Tensor, temperatures: Tensor, *, fused: bool, start: int = 0) -> SampledTokens:
    """Rows `start`, `start` + 1, ... of a batch, each with the noise of its own key and position."""
    rows = range(start, start + len(logits))
    keys = torch.from_numpy(noise_keys(5, [(0, row, 1) for row in rows]).view(np.int64))
    is_greedy, off = temperatures == 0, torch.zeros_like(temperatures)
    plan = SamplingPlan(
        has_greedy=bool(is_greedy.any()),
        all_greedy=bool(is_greedy.all()),
        has_temperature=bool(((temperatures != 1) & ~is_greedy).any()),
    )
    how = SamplingRows(temperatures, off.long(), off + 1, off)
    return fused_sampling.sample(logits, how, keys, 3 * torch.tensor(rows), plan, fused=fused)


def logits_of(width: int) -> Tensor:
    """Plain ones, ones with many -inf, also in whole blocks, ties, one token that is nearly certain, even ones."""
    logits = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(width)) * 3
    logits[1, ::2] = logits[2, : width // 2] = logits[3, width // 3 :] = -torch.inf
    logits[4, [2, 5, width - 1]] = 30.0  # greedy takes the first
    logits[5, width // 2] = 60.0
    logits[6] = 0.25
    return logits


def check_draws() -> None:
    """Tokens and logprobs of torch's operations; and u lies where float64 has the token, within rounding."""
    for width in (17, BLOCK + 2) if IS_FEW else (17, 1024, BLOCK, BLOCK + 1, 2 * BLOCK + 77, 5 * BLOCK):
        logits = logits_of(width)
        for temperatures in TEMPERATURES[width < BLOCK :][:1] if IS_FEW else TEMPERATURES:
            found, right = (drawn(logits, temperatures, fused=fused) for fused in (True, False))
            assert torch.equal(found.tokens, right.tokens), (width, found.tokens, right.tokens)
            assert (found.tokens.dtype, found.logprobs.dtype) == (torch.int64, torch.float32)
            torch.testing.assert_close(found.logprobs, right.logprobs, atol=1e-5, rtol=0)
            is_greedy = temperatures == 0
            exact = (logits.double() / torch.where(is_greedy, 1, temperatures)[:, None]).log_softmax(-1)
            chosen = found.tokens[:, None]
            torch.testing.assert_close(found.logprobs.double(), exact.gather(1, chosen)[:, 0], atol=1e-5, rtol=0)
            assert torch.equal(found.tokens[is_greedy], logits.argmax(-1)[is_greedy])
            stops = exact.exp().cumsum(-1)
            stop, start = (stops.gather(1, chosen)[:, 0], (stops - exact.exp()).gather(1, chosen)[:, 0])
            u = torch.from_numpy(uniform(noise_keys(5, [(0, row, 1) for row in range(ROWS)]), 3 * np.arange(ROWS)))
            assert ((start - 1e-6 <= u) & (u <= stop + 1e-6))[~is_greedy].all(), width


def check_draws_alone() -> None:
    """A row's bits are its own, whatever its neighbours ask for."""
    logits = logits_of(BLOCK + 2)
    together = drawn(logits, MIXED, fused=True)
    for row in (3,) if IS_FEW else range(ROWS):
        one = slice(row, row + 1)
        alone = drawn(logits[one], MIXED[one], fused=True, start=row)
        assert torch.equal(alone.tokens, together.tokens[one])
        assert torch.equal(alone.logprobs.view(torch.int32), together.logprobs[one].view(torch.int32))


def check_draws_of_what_is_not_finite() -> None:
    """It shows in the logprob, and tokens are some of the vocabulary."""
    for bad in (float("nan"), float("inf"))[IS_FEW:]:
        for place in (0, BLOCK + 1)[IS_FEW:]:
            logits = logits_of(BLOCK + 2)
            logits[::2, place] = bad
            found = drawn(logits, MIXED, fused=True)
            assert torch.equal(torch.isfinite(found.logprobs), torch.arange(ROWS) % 2 == 1)
            assert ((found.tokens >= 0) & (found.tokens < BLOCK + 2)).all()
    nothing = drawn(torch.full((ROWS, BLOCK + 2), -torch.inf), MIXED, fused=True)
    assert not torch.isfinite(nothing.logprobs).any()
    assert ((nothing.tokens >= 0) & (nothing.tokens < BLOCK + 2)).all()


def check_sampling_runner() -> None:
    """Texts of the dense slots."""
    model = random_model()
    batch = requests(2, 2, max_new_tokens=6)
    expected = run(new_engine(model), batch)
    runner = PagedRunner(model, num_rows=4, max_len=64, fused_sampling=True)
    found = run(Engine(runner, seed=7, stop_token_ids=[STOP]), batch)
    for key, completion in expected.items():
        assert np.array_equal(found[key].tokens, completion.tokens)
        np.testing.assert_allclose(found[key].logprobs, completion.logprobs, atol=1e-5)


def check_the_example() -> None:
    """It accepts these kernels, and none that draw something else, or nothing."""
    draw, cpu = sampler_kernels.draw, torch.device("cpu")
    assert fused_sampling.agrees(cpu, 100 if IS_FEW else BLOCK + 2)

    def of_other_tokens(*args: Any, **flags: bool) -> tuple[Tensor, Tensor]:
        tokens, logprobs = draw(*args, **flags)
        return tokens - 1, logprobs

    def of_other_logprobs(*args: Any, **flags: bool) -> tuple[Tensor, Tensor]:
        tokens, logprobs = draw(*args, **flags)
        return tokens, logprobs + 1e-3

    def that_does_not_compile(*args: Any, **flags: bool) -> tuple[Tensor, Tensor]:
        raise LookupError("no compiler")

    for other in (of_other_tokens, of_other_logprobs, that_does_not_compile)[IS_FEW:]:
        sampler_kernels.draw = other
        assert not fused_sampling.agrees.__wrapped__(cpu, 100), other
    sampler_kernels.draw = draw


def check_by_program(script: str) -> None:
    runpy.run_path(str(Path(__file__).parents[1] / script), run_name="__main__")


if __name__ == "__main__":
    checks = {
        "attention": (check_reference, check_company, check_runner),
        "decode": (
            round_to_nearest,
            check_each_fusion,
            check_rounding,
            check_rounded_norms,
            check_fused_steps,
            check_fp8_steps,
            check_fused_runner,
        ),
        "layer": (round_to_nearest, check_swiglu, check_rotation, check_layers),
        "sampling": (
            check_draws,
            check_draws_alone,
            check_draws_of_what_is_not_finite,
            check_the_example,
            *([] if IS_FEW else [check_sampling_runner]),
        ),
        "head": (partial(check_by_program, "models/head_kernels_on_cpu.py"),),
        "checksums": (partial(check_by_program, "weight_sync/checksums_on_cpu.py"),),
    }
    for kind in sys.argv[1 : len(sys.argv) - IS_FEW]:
        torch.manual_seed(0)
        for check in checks[kind]:
            check()
