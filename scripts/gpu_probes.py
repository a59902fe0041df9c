"""Probe one ability of a GPU each, in seconds: `python scripts/gpu_probes.py NAME [--device cpu] [--json FILE]`.

    rates      bytes/s of a copy, FLOP/s of products in bfloat16, float32 and TF32: denominators, measured here
    products   bfloat16 products with float32 results, and e4m3's, against float64
    capture    a CUDA graph of products and index writes, replayed with other values, against running it
    ipc        memory of another process, mapped and written
    ipc_fallback  a version to a reader that cannot map it, by way of host memory
    fsdp       one rank of FSDP2 in bfloat16: a training step of a small model, gradients in float32
    fused      layers of a decode step in few kernels against the model's own operations, in bfloat16; seconds of both
    sampling   whole rows sampled in two kernels against torch's operations; seconds of both
    varlen     attention over packed sequences with shared prompts in one call, against padded batches

Each prints what it found and exits with an error where a number is wrong. `--device cpu` tries those that a CPU has.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing

from slipstream.algorithms.logprobs import token_logprobs
from slipstream.core.peer_messages import WeightsOffered
from slipstream.core.rank_group import RankGroup
from slipstream.generator.fused_decode import fused_forward
from slipstream.generator.fused_sampling import agrees, sample
from slipstream.generator.paged_attention import PagedDecodeAttention, default_attend
from slipstream.generator.paged_kv import PAGE_SIZE, PagedKV
from slipstream.generator.pages import pages_of
from slipstream.generator.sampler import SamplingPlan, SamplingRows
from slipstream.models.attention import PackedAttention, flash_is_right
from slipstream.models.config import TransformerConfig
from slipstream.models.head import wide_product
from slipstream.models.initialise import initialise
from slipstream.models.sharded import Division, ShardedParameters, new_sharded
from slipstream.models.transformer import Transformer
from slipstream.weight_sync.cuda_ipc import CudaIpc, HostWantedError
from slipstream.weight_sync.device_memory import DeviceMemory
from slipstream.weight_sync.reader import SegmentReader
from slipstream.weight_sync.slots import Commit

CONFIG = TransformerConfig(
    family="llama",
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    max_positions=256,
    tie_embeddings=True,
)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def best_s(work: Callable[[], object], device: str, *, repeats: int = 10) -> float:
    """Return the least seconds of `repeats` calls, after one that is not counted."""
    found = []
    for _ in range(repeats + 1):
        synchronize(device)
        started_s = time.perf_counter()
        work()
        synchronize(device)
        found.append(time.perf_counter() - started_s)
    return min(found[1:])


def rates(device: str) -> dict[str, Any]:
    size, count = (8192, 1 << 30) if device == "cuda" else (512, 1 << 24)
    source = torch.empty(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found = {"copy_bytes_per_s": 2 * count / best_s(lambda: target.copy_(source), device)}
    for name, dtype, allows in (
        ("bfloat16", torch.bfloat16, False),
        ("float32", torch.float32, False),
        ("tf32", torch.float32, True),
    ):
        torch.backends.cuda.matmul.allow_tf32 = allows
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        found[f"{name}_flop_per_s"] = 2 * size**3 / best_s(lambda a=a, b=b: a @ b, device)
    torch.backends.cuda.matmul.allow_tf32 = False
    return found


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def products(device: str) -> dict[str, Any]:
    torch.manual_seed(0)
    x, weight = (torch.randn(shape, device=device).bfloat16() for shape in ((256, 512), (1024, 512)))
    wide = wide_product(x, weight)
    assert wide.dtype == torch.float32
    found: dict[str, Any] = {"wide_error": relative(wide, x.double() @ weight.double().t())}
    assert found["wide_error"] < 1e-5, found
    if device == "cuda" and torch.cuda.get_device_capability() >= (9, 0):
        narrow, other = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
        ones = (torch.ones(len(x), 1, device=device), torch.ones(1, len(weight), device=device))
        out = torch._scaled_mm(narrow, other.t(), scale_a=ones[0], scale_b=ones[1], out_dtype=torch.bfloat16)
        found["fp8_error"] = relative(out, narrow.double() @ other.double().t())
        assert found["fp8_error"] < 1e-2, found
    return found


def capture(device: str) -> dict[str, Any]:
    assert device == "cuda", "graphs are captured on CUDA alone"
    torch.manual_seed(0)
    weight = torch.randn(512, 512, device=device)
    x, places = torch.randn(64, 512, device=device), torch.zeros(64, dtype=torch.int64, device=device)
    pages = torch.zeros(1024, 512, device=device)

    def step() -> Tensor:
        out = (x @ weight).relu()
        pages.index_copy_(0, places, out)
        return out

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    started_s = time.perf_counter()
    with torch.cuda.graph(graph):
        replayed = step()
    taken_s = time.perf_counter() - started_s
    for turn in range(3):
        x.copy_(torch.randn_like(x))
        places.copy_(torch.randperm(1024, device=device)[:64])
        graph.replay()
        found, kept = replayed.clone(), pages[places].clone()
        torch.testing.assert_close(found, step(), msg=f"turn {turn}")
        torch.testing.assert_close(kept, found)
    return {"capture_s": taken_s, "replay_s": best_s(graph.replay, device), "eager_s": best_s(step, device)}


def fused(device: str) -> dict[str, Any]:
    """At the size of Qwen2.5-1.5B, 4 layers, 256 rows of 1,056 tokens; on a CPU (TRITON_INTERPRET=1) a small model."""
    sizes = {"hidden_size": 1536, "intermediate_size": 8960, "num_layers": 4, "num_heads": 12, "head_dim": 128}
    config = replace(CONFIG, **(sizes | {"max_positions": 2048, "vocab_size": 4096}) if device == "cuda" else {})
    rows, length = (256, 1056) if device == "cuda" else (3, 40)
    torch.manual_seed(0)
    model = Transformer(config)
    initialise(model, seed=0)
    model = model.to(device, torch.bfloat16).requires_grad_(False)
    tokens = torch.randint(config.vocab_size, (rows,), device=device)
    positions, num_blocks = torch.full_like(tokens, length - 1), pages_of(length, PAGE_SIZE)
    blocks = (torch.arange(rows * num_blocks, device=device, dtype=torch.int32) + 1).view(rows, num_blocks)
    slots = blocks[:, -1].long() * PAGE_SIZE + (length - 1) % PAGE_SIZE
    outputs, keys, found = [], [], {}
    for name in ("plain", "fused"):
        kv = PagedKV(
            num_layers=config.num_layers,
            num_pages=rows * num_blocks,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=torch.bfloat16,
            device=torch.device(device),
        )
        attend = default_attend(torch.device(device))
        attention = PagedDecodeAttention(kv, attend, slots=slots, blocks=blocks, lengths=positions + 1)
        forward = partial(fused_forward, model) if name == "fused" else model
        step = partial(forward, tokens, positions, attention)
        with torch.inference_mode():
            outputs.append(step().clone())
            keys.append(kv.keys.clone())
            if device == "cuda":
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    step()
                found[f"{name}_layer_s"] = best_s(graph.replay, device) / config.num_layers
                found[f"{name}_eager_layer_s"] = best_s(step, device) / config.num_layers
    found["state_error"] = relative(outputs[1], outputs[0].double())
    found["key_error"] = relative(keys[1], keys[0].double())
    assert max(found["state_error"], found["key_error"]) < 2e-2, found
    return found


def sampling(device: str) -> dict[str, Any]:
    """256 rows of Qwen2.5's vocabulary; on a CPU (TRITON_INTERPRET=1) two of a small one."""
    rows, width = (256, 151_936) if device == "cuda" else (2, 5000)
    found: dict[str, Any] = {"agrees": agrees(torch.device(device), width)}
    assert found["agrees"], "see the warning"
    logits = torch.randn(rows, width, device=device) * 4
    keys, positions = torch.randint(2**62, (rows,), device=device), torch.arange(rows, device=device)
    for name, temperature in (("plain", 1.0), ("warm", 0.7)):
        each, plan = torch.full((rows,), temperature, device=device), SamplingPlan(has_temperature=temperature != 1.0)
        how = SamplingRows(each, torch.zeros_like(keys), torch.ones_like(each), torch.zeros_like(each))
        drawn = []
        for fused in (False, True):
            step = partial(sample, logits, how, keys, positions, plan, fused=fused)
            with torch.inference_mode():
                drawn.append(step())
                if device == "cuda":
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        step()
                    found[f"{name}_{'fused' if fused else 'torch'}_s"] = best_s(graph.replay, device)
        is_same = drawn[0].tokens == drawn[1].tokens
        found[f"{name}_same"] = float(is_same.float().mean())
        found[f"{name}_error"] = float((drawn[0].logprobs - drawn[1].logprobs)[is_same].abs().max())
        assert found[f"{name}_same"] > 0.98, found
        assert found[f"{name}_error"] < 1e-4, found
    return found


def _write(queue: Any, done: Any) -> None:
    shared = queue.get(timeout=40)
    shared.mul_(2)
    torch.cuda.synchronize()
    done.put("written")


def ipc(device: str) -> dict[str, Any]:
    assert device == "cuda", "memory of a GPU is mapped by CUDA's handles"
    context = multiprocessing.get_context("spawn")
    queue, done = context.Queue(), context.Queue()
    process = context.Process(target=_write, args=(queue, done), daemon=True)
    process.start()
    shared = torch.arange(1 << 20, dtype=torch.float32, device=device)
    queue.put(shared)
    assert done.get(timeout=50) == "written"
    torch.testing.assert_close(shared, 2 * torch.arange(1 << 20, dtype=torch.float32, device=device))
    process.join(10)
    return {"bytes": shared.nbytes}


def ipc_fallback(device: str) -> dict[str, Any]:
    """Both ends in one process, which CUDA lets open no handle of its own; on a CPU there is none to export."""
    place = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    if device == "cpu":
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    sender, reader = (CudaIpc("probe", DeviceMemory(place)) for _ in range(2))
    num_bytes = 1 << 28 if device == "cuda" else 1 << 20
    live = torch.randint(256, (num_bytes,), dtype=torch.uint8, device=place)
    slots = sender.create(num_bytes, 1)
    found: dict[str, Any] = {"bytes": num_bytes, "is_exported": slots.mirror_name is None}
    slots.invalidate(0)
    checksum = sender.memory.copy(slots.data(0), live, slots.checksums(0))
    slots.commit(0, Commit(1, checksum))
    if found["is_exported"]:
        try:
            reader.attach(slots.name)
        except HostWantedError as error:
            found["cause"] = str(error).splitlines()[0]
        assert "cause" in found, "a process has opened its own handle"
        sender.mirror(slots)
    none = torch.zeros(1).numpy()
    offer = WeightsOffered(
        version=1, slot=0, segments=(slots.name,), checksums=(checksum,), probe_tokens=none, probe_logprobs=none
    )
    fetch, target = SegmentReader(reader, None), reader.memory.empty(num_bytes)
    found["fetch_s"] = best_s(lambda: fetch.fetch(offer, target), device, repeats=3)
    assert torch.equal(target, live)
    slots.close()
    return found


def fsdp(device: str) -> dict[str, Any]:
    store = dist.HashStore()
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", store=store, rank=0, world_size=1)
    place = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    division = Division(RankGroup.alone(), RankGroup.alone(), device=place, precision="bfloat16", recomputes=True)
    model = new_sharded(CONFIG, 0, division)
    parameters = ShardedParameters(model, division)
    tokens = torch.randint(CONFIG.vocab_size, (96,), device=place)
    positions = torch.cat([torch.arange(32), torch.arange(64)]).to(place)
    for _ in range(2):
        parameters.zero_grad()
        parameters.before_backward(is_last=True)
        states = model(tokens, positions, PackedAttention([32, 64]))
        assert states.dtype == torch.bfloat16
        torch.autograd.backward(-token_logprobs(model.logits(states), tokens).mean())
        norm = parameters.grad_norm()
        assert 0 < norm < float("inf"), norm
        assert all(grad.dtype == torch.float32 for grad in parameters.stored_grads())
    dist.destroy_process_group()
    return {"grad_norm": norm}


def varlen(device: str) -> dict[str, Any]:
    """Four prompts of 512 tokens with eight completions of 1,024 each, forward and backward, by batches and in one."""
    torch.manual_seed(0)
    prompt, own, heads, kv_heads, dim = (512, 1024, 12, 2, 128) if device == "cuda" else (8, 16, 4, 2, 16)
    rows: list[Tensor] = []
    for group in range(4):
        start = group * (prompt + 8 * own)
        shared = torch.arange(start, start + prompt)
        own_rows = [torch.arange(own) + start + prompt + number * own for number in range(8)]
        rows += [torch.cat([shared, one]) for one in own_rows]
    num_rows, place = 4 * (prompt + 8 * own), torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    fused = torch.randn(num_rows, heads + 2 * kv_heads, dim, device=place).bfloat16().requires_grad_()

    def work(*, is_one: bool) -> Callable[[], Tensor]:
        attention = PackedAttention([prompt + own] * 32, torch.cat(rows), varlen=is_one)

        def attend() -> Tensor:
            out = attention(0, *fused.split([heads, kv_heads, kv_heads], 1))
            return torch.autograd.grad(out.float().square().sum(), fused)[0]

        return attend

    padded = work(is_one=False)
    found: dict[str, Any] = {"padded_s": best_s(padded, device)}
    if device != "cuda":
        return found | {"together": "varlen_attn needs CUDA"}
    assert flash_is_right(place, torch.bfloat16, heads, kv_heads, dim), "the warning above says why"
    together = work(is_one=True)
    error = relative(together(), padded().double())
    assert error < 3e-2, error
    return found | {"together_s": best_s(together, device), "error": error}


PROBES: dict[str, Callable[[str], dict[str, Any]]] = {
    "rates": rates,
    "products": products,
    "capture": capture,
    "fused": fused,
    "sampling": sampling,
    "ipc": ipc,
    "ipc_fallback": ipc_fallback,
    "fsdp": fsdp,
    "varlen": varlen,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=PROBES)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} sees no CUDA device here")
    found = PROBES[given.name](given.device)
    print(
        "\n".join(
            f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}" for name, value in found.items()
        )
    )
    if given.json is not None:
        given.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
