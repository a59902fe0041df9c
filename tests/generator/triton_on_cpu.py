"""A process of its own for `test_paged_attention.py`: Triton reads TRITON_INTERPRET=1 where a kernel is defined."""

from __future__ import annotations

import numpy as np
import torch
from engine_kit import STOP, new_engine, random_model, requests, run

from slipstream.generator.engine import Engine
from slipstream.generator.paged_attention import SPLIT_TOKENS, attend_gathered, attend_split
from slipstream.generator.paged_runner import PagedRunner

PAGE = 16
SHAPES = (  # query heads, key-value heads, head size
    (4, 2, 8),
    (6, 6, 16),
    (14, 2, 64),
    (3, 1, 80),
    (32, 8, 128),
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
    """All shapes with ragged lengths, all lengths with a small shape; float16 as the precision of queries and pages."""
    cases = [(shape, LENGTHS[3]) for shape in SHAPES] + [(SHAPES[0], lengths) for lengths in LENGTHS]
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.float16, 2e-3)):
        for shape, (lengths, num_tokens) in cases if dtype == torch.float32 else cases[1::3]:
            case = pages_of(lengths, num_tokens, *shape, dtype)
            torch.testing.assert_close(attend_split(*case), attend_gathered(*case), atol=tolerance, rtol=tolerance)


def check_company() -> None:
    """A row's bits are the same alone, in company, and in a larger bucket."""
    q, keys, values, blocks, lengths = pages_of([257, 1, 512, 300], 512, 4, 2, 8, torch.float32)
    together = attend_split(q, keys, values, blocks, lengths)
    wider = torch.nn.functional.pad(blocks, (0, 2 * SPLIT_TOKENS // PAGE))
    assert torch.equal(attend_split(q, keys, values, wider, lengths), together)
    for row in range(4):
        one = slice(row, row + 1)
        assert torch.equal(attend_split(q[one], keys, values, blocks[one], lengths[one]), together[one])


def check_runner() -> None:
    """The whole decode step over the kernels gives the texts of the dense slots."""
    model = random_model()
    batch = requests(2, 2, max_new_tokens=6)
    expected = run(new_engine(model), batch)
    runner = PagedRunner(model, num_rows=4, max_len=64, attend=attend_split)
    found = run(Engine(runner, seed=7, stop_token_ids=[STOP]), batch)
    for key, completion in expected.items():
        assert np.array_equal(found[key].tokens, completion.tokens)
        np.testing.assert_allclose(found[key].logprobs, completion.logprobs, atol=1e-4)


if __name__ == "__main__":
    check_reference()
    check_company()
    check_runner()
