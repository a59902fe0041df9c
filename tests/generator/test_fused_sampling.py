"""The sampler's kernels: interpreted they draw what torch does, compiled they fit; with `-m gpu`, on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_kit import random_model

from slipstream.generator import fused_sampling
from slipstream.generator.fused_sampling import SPIKES, agrees, default_fused_sampling, example, sample
from slipstream.generator.noise import uniform_tensor
from slipstream.generator.sampler import SamplingPlan, SamplingRows, sample_tokens

HERE = Path(__file__).parent


@pytest.mark.slow
def test_interpreted_they_draw_what_torch_does() -> None:
    """Equal tokens, logprobs to 1e-5, u where float64 has the token; the example tells them from what is wrong.

    In all cases; `test_paged_kernels.py` has a few of them in every run, and compiles for one vocabulary.
    """
    pytest.importorskip("triton")
    command = [sys.executable, str(HERE / "triton_on_cpu.py"), "sampling"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_they_compile_for_hopper(tmp_path: Path) -> None:
    """No spills, few registers, and logits in 16 bytes a thread where rows are multiples of these."""
    pytest.importorskip("triton")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "triton_for_gpus.py"), "sampling"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("width", [100, 2050, 151_936])
def test_rounding_decides_nothing_in_the_example(width: int) -> None:
    """u lies further from all boundaries than sums of float32 err, and rows draw tokens apart."""
    logits, keys, positions = example(width)
    u = uniform_tensor(keys, positions)
    for temperature in (1.0, 0.7, 1.3):
        stops = (logits.double() / temperature).softmax(-1).cumsum(-1)
        assert (stops - u[:, None]).abs().amin(-1).min() > 1e-5
        drawn = torch.searchsorted(stops, u[:, None])[:, 0]
        assert len(set(drawn.tolist())) > 4
    assert (logits > 10).sum(-1).min() > SPIKES / 2


def test_a_cpu_has_torchs_way() -> None:
    """By default, and for rows that are cut everywhere: the same bits as `sample_tokens`."""
    assert not default_fused_sampling(random_model(), torch.device("cpu"))
    logits, keys, positions = example(2050)
    each = torch.ones(8)
    rows = SamplingRows(each, torch.full((8,), 5), each, torch.zeros(8))
    for plan, fused in ((SamplingPlan(), False), (SamplingPlan(truncates=True, num_candidates=8), True)):
        found = sample(logits, rows, keys, positions, plan, fused=fused)
        right = sample_tokens(logits, rows, uniform_tensor(keys, positions), plan)
        assert torch.equal(found.tokens, right.tokens)
        assert torch.equal(found.logprobs, right.logprobs)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1000, 50_257, 151_936])
def test_on_a_gpu_a_captured_draw_is_that_of_a_cpu(width: int) -> None:
    """256 rows with logits of two sets through one graph, of which the second is read behind the capture."""
    device = torch.device("cuda", torch.cuda.current_device())
    assert agrees(device, width)
    generator = torch.Generator().manual_seed(width)
    batches = torch.randn(2, 256, width, generator=generator) * 4
    keys, positions = torch.randint(2**62, (256,), generator=generator), torch.arange(256)
    each = torch.from_numpy(np.resize(np.array([1.0, 0.7, 0.0, 1.3], dtype=np.float32), 256))
    rows = SamplingRows(each, torch.zeros(256, dtype=torch.int64), torch.ones(256), torch.zeros(256))
    plan = SamplingPlan(has_greedy=True, has_temperature=True)
    there = SamplingRows(*(values.to(device) for values in vars(rows).values()))
    logits, noise = batches[0].to(device), (keys.to(device), positions.to(device))
    fused_sampling.sample(logits, there, *noise, plan, fused=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = fused_sampling.sample(logits, there, *noise, plan, fused=True)
    for batch in batches:
        logits.copy_(batch)
        graph.replay()
        right = sample_tokens(batch, rows, uniform_tensor(keys, positions), plan)
        is_same = found.tokens.cpu() == right.tokens
        assert is_same.float().mean() > 0.98, "u lies by a boundary in few"
        error = (found.logprobs.cpu() - right.logprobs)[is_same].abs().max()
        assert error < 1e-5
