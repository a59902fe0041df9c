"""The planned bytes of a trainer on one GPU against the most that are alive in its steps, on tensors without values.

A real step: forward, head and loss in chunks, backward, AdamW; microbatches that are full, of the longest completions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from covering import with_slow
from live_bytes import META, LiveBytes, as_on_cuda, peak_bytes, peak_bytes_of_critic

from slipstream.core.config import RunConfig
from slipstream.core.recipes import resolve
from slipstream.models.config import TransformerConfig
from slipstream.models.head import head_logprobs
from slipstream.plan.one_gpu import critic_bytes, trainer_bytes
from slipstream.trainer.logit_room import LOGIT_BYTES

__all__ = ["as_on_cuda"]

SMALL = TransformerConfig(
    family="llama",
    vocab_size=512,
    hidden_size=256,
    intermediate_size=768,
    num_layers=4,
    num_heads=4,
    num_kv_heads=4,
    head_dim=64,
    max_positions=2048,
    tie_embeddings=False,
)
SHARED = replace(SMALL, num_kv_heads=2)
WIDE = replace(SMALL, vocab_size=50_000)
QWEN = TransformerConfig(
    family="qwen2",
    vocab_size=151_936,
    hidden_size=1536,
    intermediate_size=8960,
    num_layers=28,
    num_heads=12,
    num_kv_heads=2,
    head_dim=128,
    max_positions=32768,
    tie_embeddings=True,
    qkv_bias=True,
)
SHAPES = {
    "small": SMALL,
    "shared-keys": SHARED,
    "tied": replace(SMALL, tie_embeddings=True),
    "wide": WIDE,
    "wide-tied": replace(WIDE, tie_embeddings=True),
    "1.5b": QWEN,
    "1.5b-untied": replace(QWEN, tie_embeddings=False),
    "1.5b-bytes": replace(QWEN, vocab_size=512),
}
CASES: dict[str, dict[str, Any]] = {
    "kept": {},
    "recomputed": {"recompute": True},
    "products": {"recompute": True, "recompute_products": False},
    "offloaded": {"offload_moments": True},
}
USUAL = [
    ("small", "kept", "bfloat16", 2048),
    ("shared-keys", "products", "bfloat16", 512),
    ("wide-tied", "offloaded", "bfloat16", 512),
    ("shared-keys", "recomputed", "float32", 512),
]
OF_CRITIC = [("wide", "recomputed", "bfloat16"), ("small", "offloaded", "float32")]
MOST = 1.25
"""Planned bytes over those that are alive."""
MOST_OF_LOGITS = 1.65
"""With a large vocabulary beside a small model, whose logits are counted three times in float32 where a single chunk in
bfloat16 has half of that; with offloaded moments, of which the largest tensor's are there in the update alone."""


def config_of(trainer: dict[str, Any], *, prompt: int, completion: int, groups: int, samples: int) -> RunConfig:
    return resolve(
        {
            "model": {"max_positions": 4096},
            "groups_per_step": groups,
            "completions_per_group": samples,
            "prompts": {"tasks": [{"name": "chain_sum"}], "max_prompt_tokens": prompt},
            "generator": {"max_new_tokens": completion, "device": "cuda", "precision": "bfloat16"},
            "loss": {"name": "aipo"},
            "trainer": {"device": "cuda", **trainer},
        }
    )


def with_critic(config: RunConfig) -> RunConfig:
    """With a critic of its own executor, on a GPU."""
    critic = config.critic.model_copy(update={"executor": "own", "device": "cuda"})
    loss = config.loss.model_copy(update={"name": "ppo", "advantages": "gae"})
    return config.model_copy(update={"critic": critic, "loss": loss})


def check(config: RunConfig, shape: TransformerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(peak_bytes(config, shape, monkeypatch), planned_bytes(config, shape), config, shape)


def planned_bytes(config: RunConfig, shape: TransformerConfig) -> float:
    return trainer_bytes(config, shape).without("staging").total  # slots of versions are made by the publisher


def compare(peak: int, planned: float, config: RunConfig, shape: TransformerConfig) -> None:
    most = MOST
    if config.trainer.offload_moments or shape.hidden_size < 1000 < shape.vocab_size:
        most = MOST_OF_LOGITS
    assert peak <= planned <= most * peak, f"{planned / peak:.3f} of {peak / 1e9:.3f} GB"


@pytest.mark.parametrize(
    ("name", "case", "precision", "microbatch_tokens"),
    with_slow(
        USUAL,
        [
            (name, case, precision, microbatch_tokens)
            for name in ("small", "shared-keys", "tied", "wide", "wide-tied")
            for case in CASES
            for precision in ("bfloat16", "float32")
            for microbatch_tokens in (512, 2048)
            if (name, case, precision, microbatch_tokens) not in USUAL
        ],
    ),
)
def test_planned_bytes_are_those_alive(
    name: str, case: str, precision: str, microbatch_tokens: int, as_on_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = {"precision": precision, "microbatch_tokens": microbatch_tokens, **CASES[case]}
    groups = 4 if microbatch_tokens == 512 else 16
    check(config_of(trainer, prompt=64, completion=64, groups=groups, samples=4), SHAPES[name], monkeypatch)


@pytest.mark.slow  # a large one is in the next test
@pytest.mark.parametrize("microbatch_tokens", [4096, 32768])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["1.5b", "1.5b-untied", "1.5b-bytes"])
def test_planned_bytes_of_large_shapes(
    name: str, case: str, microbatch_tokens: int, as_on_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 32768 tokens a step as the H200 ran it, and one more full microbatch (docs/gpu.md)."""
    trainer = {"precision": "bfloat16", "microbatch_tokens": microbatch_tokens, **CASES[case]}
    groups = 8 if microbatch_tokens == 32768 else 2
    check(config_of(trainer, prompt=512, completion=1024, groups=groups, samples=8), SHAPES[name], monkeypatch)


@pytest.mark.parametrize(("case", "gib"), with_slow([("kept", 87.0)], [("recomputed", 29.6)]))
def test_bytes_alive_are_those_that_a_gpu_had(
    case: str, gib: float, as_on_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step of `benchmarks/train_step.py` on an H200, at its peak (docs/gpu.md); and what is planned for it."""
    trainer = {"precision": "bfloat16", "microbatch_tokens": 32768, **CASES[case]}
    config = config_of(trainer, prompt=512, completion=1024, groups=4, samples=8)
    peak = peak_bytes(config, QWEN, monkeypatch)
    assert peak / 2**30 == pytest.approx(gib, rel=0.01)
    compare(peak, planned_bytes(config, QWEN), config, QWEN)


def test_a_completion_longer_than_a_microbatch_is_planned(as_on_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a microbatch by itself."""
    trainer = {"precision": "bfloat16", "microbatch_tokens": 64}
    check(config_of(trainer, prompt=32, completion=480, groups=2, samples=2), SMALL, monkeypatch)


@pytest.mark.parametrize(
    ("name", "case", "precision"),
    with_slow(
        [("small", "kept", "bfloat16")],
        [
            ("wide-tied", "offloaded", "float32"),
            ("wide", "recomputed", "bfloat16"),
            *((name, case, "float32") for name in ("small", "wide") for case in CASES),
        ],
    ),
)
def test_a_warm_start_takes_no_more_than_the_steps(
    name: str, case: str, precision: str, as_on_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The moments of its optimizer are not there beside the trainer's."""
    trainer = {"precision": precision, "microbatch_tokens": 512, **CASES[case]}
    config = config_of(trainer, prompt=64, completion=64, groups=4, samples=4)
    warm = config.warm_start.model_copy(update={"steps": 2, "batch_size": 8})
    check(config.model_copy(update={"warm_start": warm}), SHAPES[name], monkeypatch)


@pytest.mark.parametrize(
    ("name", "case", "precision"),
    with_slow(
        OF_CRITIC,
        [
            (name, case, precision)
            for name in ("small", "shared-keys", "wide", "wide-tied")
            for case in CASES
            for precision in ("bfloat16", "float32")
            if (name, case, precision) not in OF_CRITIC
        ],
    ),
)
def test_planned_bytes_of_a_critic_are_those_alive(
    name: str, case: str, precision: str, as_on_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the policy that it starts from to its second update."""
    trainer = {"precision": precision, "microbatch_tokens": 512, **CASES[case]}
    config = with_critic(config_of(trainer, prompt=64, completion=64, groups=4, samples=4))
    peak = peak_bytes_of_critic(config, SHAPES[name], monkeypatch)
    compare(peak, critic_bytes(config, SHAPES[name]).total, config, SHAPES[name])


def test_storages_count_once_until_nobody_holds_them() -> None:
    with LiveBytes() as counted:
        x = torch.empty(10, device="meta", requires_grad=True)
        view = x.view(2, 5)
        assert counted.live == 40
        y = (view.exp() * 2).sum()  # exp keeps what it gave
        assert counted.live == 40 + 40 + 4
        assert counted.peak == 40 + 2 * 40 + 4
        y.backward()
        assert counted.live == 40 + 4 + 40, "of the gradient"
        del x, view, y
        assert counted.live == 0


ROWS, VOCAB, WIDTH = 256, 4096, 8  # of a chunk


def bytes_of_a_head(dtype: torch.dtype, *, is_cut: bool) -> int:
    """The most bytes that two chunks of logits have alive forward and backward, but those of weights and rows."""
    mode = LiveBytes()
    with mode:
        hidden = torch.empty(2 * ROWS, WIDTH, dtype=dtype, device=META, requires_grad=True)
        weight = torch.empty(VOCAB, WIDTH, dtype=dtype, device=META, requires_grad=True)
        targets = torch.empty(2 * ROWS, dtype=torch.int64, device=META)
        kept = torch.empty(2 * ROWS, 4, dtype=torch.int64, device=META) if is_cut else None
        logprobs, entropies = head_logprobs(hidden, weight, targets, kept, temperature=0.7, at_once=ROWS)
        (logprobs.sum() + entropies.sum()).backward()
    rows, weights = 2 * ROWS * 400, 4 * 4 * VOCAB * WIDTH  # a few numbers each; the matrix, its gradient and a product
    return mode.peak - rows - weights


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by_kernels", [False, True])
def test_a_logit_takes_at_most_what_chunks_are_chosen_by(
    dtype: torch.dtype, is_cut: bool, by_kernels: bool, request: pytest.FixtureRequest
) -> None:
    """Also where kernels do not run, and with the gradient of kept sets."""
    if by_kernels:
        request.getfixturevalue("as_on_cuda")
    held = bytes_of_a_head(dtype, is_cut=is_cut) / (ROWS * VOCAB)
    assert 3.5 < held <= LOGIT_BYTES
