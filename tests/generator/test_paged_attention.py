"""Attention over pages: the reference against torch's own attention, the kernels against the reference."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from slipstream.generator.paged_attention import PagedPrefillAttention, attend_gathered
from slipstream.generator.paged_kv import PagedKV

PAGE = 16


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 8), (6, 6, 16), (8, 1, 20)])
def test_a_decode_step_is_attention_over_the_rows_own_tokens(heads: int, kv_heads: int, head_dim: int) -> None:
    """Oracle: torch's attention on each row's keys and values, taken from its pages one token at a time."""
    torch.manual_seed(0)
    lengths = torch.tensor([1, 16, 17, 45])
    keys, values = torch.randn(2, 13, PAGE, kv_heads, head_dim)
    blocks = (torch.randperm(12)[:12] + 1).view(4, 3).int()
    q = torch.randn(4, heads, head_dim)
    found = attend_gathered(q, keys, values, blocks, lengths)
    for row, length in enumerate(lengths.tolist()):
        k, v = (
            torch.stack([pages[blocks[row, place // PAGE], place % PAGE] for place in range(length)], 1)
            for pages in (keys, values)
        )
        expected = F.scaled_dot_product_attention(q[row, :, None], k, v, enable_gqa=True).squeeze(1)
        torch.testing.assert_close(found[row], expected)


def test_a_later_chunk_sees_what_its_prefix_has_stored() -> None:
    torch.manual_seed(0)
    tokens, heads, kv_heads, head_dim = 21, 4, 2, 8
    q, k, v = torch.randn(tokens, heads, head_dim), *torch.randn(2, tokens, kv_heads, head_dim)
    other = torch.randn(5, heads, head_dim), *torch.randn(2, 5, kv_heads, head_dim)
    # Two layers, since the last one is not attended.
    kv = PagedKV(num_layers=2, num_pages=8, num_kv_heads=kv_heads, head_dim=head_dim)
    slots = torch.cat([torch.arange(80, 96), torch.arange(32, 48)])[:tokens]
    first = PagedPrefillAttention(kv, slots=slots[:9], fresh=[9], continued=[])
    begun = first(0, q[:9], k[:9], v[:9])
    both = torch.cat([torch.arange(16, 21), slots[9:]])
    second = PagedPrefillAttention(kv, slots=both, fresh=[5], continued=[(tokens - 9, slots)])
    packed = (torch.cat([mine, theirs[9:]]) for mine, theirs in zip(other, (q, k, v), strict=True))
    rest = second(0, *packed)

    def alone(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1)

    torch.testing.assert_close(torch.cat([begun, rest[5:]]), alone(q, k, v))
    torch.testing.assert_close(rest[:5], alone(*other))
    torch.testing.assert_close(kv.keys[0].flatten(0, 1)[slots], k)


def test_pages_are_copied_whole_in_every_layer() -> None:
    kv = PagedKV(num_layers=2, num_pages=4, num_kv_heads=1, head_dim=2)
    kv.keys.normal_()
    kv.values.normal_()
    before = kv.keys.clone(), kv.values.clone()
    kv.copy_pages([1, 1], [3, 2])
    for stored, old in zip((kv.keys, kv.values), before, strict=True):
        assert torch.equal(stored[:, [2, 3]], old[:, [1, 1]])
        assert torch.equal(stored[:, [0, 1, 4]], old[:, [0, 1, 4]])


def test_a_page_takes_as_many_bytes_as_is_said() -> None:
    kv = PagedKV(num_layers=3, num_pages=4, num_kv_heads=2, head_dim=8, dtype=torch.bfloat16)
    said = PagedKV.bytes_per_page(num_layers=3, num_kv_heads=2, head_dim=8, dtype=torch.bfloat16)
    assert kv.keys.nbytes + kv.values.nbytes == 5 * said


@pytest.mark.slow
def test_the_kernels_equal_the_reference() -> None:
    """In all cases; `test_paged_kernels.py` has a few of them in every run."""
    pytest.importorskip("triton")
    script = Path(__file__).with_name("triton_on_cpu.py")
    threads = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), "attention"]
    found = subprocess.run(command, env=os.environ | threads, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
