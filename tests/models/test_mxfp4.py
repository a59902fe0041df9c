"""MXFP4 by hand from OCP's specification, and against a quantiser in float64 that knows no bits."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.core.errors import ConfigError
from slipstream.core.recipes import resolve
from slipstream.core.sections import ModelConfig
from slipstream.models.initialise import new_model
from slipstream.models.mxfp4 import block_scales, expanded, num_blocks, num_bytes, rounded
from slipstream.models.preflight import check_policy
from slipstream.models.quantized import WeightLayout
from slipstream.models.tensor_parallel import TensorParallel

NUMBERS = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def stored(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = block_scales(weight)
    return rounded(weight, scales), scales


def back(weight: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return expanded(*stored(weight), weight.shape[1], dtype)


def by_search(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return exponents [M, blocks] and numbers [M, K], float64: by logarithms, and the nearest of a list."""
    exponents = np.zeros((len(weight), -(-weight.shape[1] // 32)), dtype=int)
    found = np.zeros(weight.shape)
    for row, column in np.ndindex(exponents.shape):
        part = slice(32 * column, 32 * (column + 1))
        block = weight[row, part].astype(np.float64)
        largest = np.abs(block).max()
        exponent = max(math.frexp(largest)[1] - 1 - 2, -127) if largest else -127  # frexp is in [0.5, 1)
        exponents[row, column] = exponent
        for at, number in enumerate(block):
            size = min(abs(number) / 2.0**exponent, 6.0)
            distance = [abs(size - one) for one in NUMBERS]
            nearest = [place for place, one in enumerate(distance) if one == min(distance)]
            even = next(place for place in nearest if place % 2 == 0 or len(nearest) == 1)
            found[row, 32 * column + at] = math.copysign(NUMBERS[even], number) * 2.0**exponent
    return exponents, found


def test_golden_codes() -> None:
    """All 16 numbers in a block whose scale is 1 (127 in E8M0): bits S EE M, the first of two in the low half."""
    weight = torch.tensor([[*NUMBERS, *(-float(one) for one in NUMBERS), *[0.0] * 16]])
    values, scales = stored(weight)
    assert scales.tolist() == [[127]]
    assert values.tolist() == [[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE, *[0] * 8]]
    assert torch.equal(back(weight), weight)
    assert torch.equal(back(weight).signbit(), weight.signbit()), "-0 stays what it is"


@pytest.mark.parametrize(
    ("size", "nearest"),
    [(0.25, 0), (0.2501, 0.5), (0.75, 1), (0.7499, 0.5), (1.25, 1), (1.2501, 1.5), (1.75, 2), (1.7499, 1.5)]
    + [(2.5, 2), (2.5001, 3), (3.5, 4), (3.4999, 3), (5, 4), (5.0001, 6), (6.9, 6), (7.999, 6)],
)
@pytest.mark.parametrize("scale", [2.0**-120, 1.0, 2.0**100])
def test_golden_roundings(size: float, nearest: float, scale: float) -> None:
    """Beside a 4, which makes the scale 1: ties go to the even mantissa, and beyond 6 it saturates."""
    weight = torch.tensor([[4.0, size, -size]]) * scale
    assert back(weight).tolist() == [[4.0 * scale, nearest * scale, -nearest * scale]]


def test_golden_scales() -> None:
    """2^(floor(log2 max) - 2), in E8M0: the exponent and 127."""
    for largest, code in (
        (1.0, 125),
        (1.999, 125),
        (2.0, 126),
        (3.9, 126),
        (4.0, 127),
        (6.0, 127),
        (8.0, 128),
        (torch.finfo(torch.float32).max, 252),  # 2^127 and more
        (2.0**-124, 1),
        (2.0**-125, 0),  # the smallest scale, 2^-127, has just its exponent
        (2.0**-126, 0),
        (2.0**-149, 0),
        (0.0, 0),
    ):
        assert block_scales(torch.tensor([[0.0, -largest]])).tolist() == [[code]], largest


def test_blocks_of_zeros_and_of_subnormal_numbers() -> None:
    zeros = torch.zeros(2, 40)
    assert torch.equal(back(zeros), zeros)
    step = 2.0**-128  # half of the smallest scale
    small = torch.tensor([[step, 2 * step, 3 * step, 12 * step, step / 2, step / 4, -step]])
    assert back(small).tolist() == [[step, 2 * step, 3 * step, 12 * step, 0.0, 0.0, -step]]
    assert torch.equal(back(small, torch.bfloat16).float(), back(small))


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_block_that_is_not_finite_is_nan_and_its_neighbour_is_not(wrong: float) -> None:
    weight = torch.ones(1, 64)
    weight[0, 3] = wrong
    assert block_scales(weight).tolist() == [[255, 125]]
    assert back(weight).isnan().tolist() == [[True] * 32 + [False] * 32]


def test_the_largest_number_of_all_saturates() -> None:
    largest = torch.finfo(torch.float32).max
    assert back(torch.tensor([[largest, -largest]])).tolist() == [[6 * 2.0**125, -6 * 2.0**125]]


@given(
    rows=st.integers(1, 3),
    columns=st.sampled_from([1, 2, 31, 32, 33, 64, 75]),
    seed=st.integers(0, 2**31),
    exponent=st.integers(-140, 120),
    spread=st.integers(0, 12),
)
def test_every_number_is_the_nearest_and_within_its_bound(
    rows: int, columns: int, seed: int, exponent: int, spread: int
) -> None:
    """Against a search in float64; |W - Q| <= max(|W|, X) / 4."""
    rng = np.random.default_rng(seed)
    sizes = 2.0 ** (exponent + rng.integers(-spread, 1, (rows, columns)))
    numbers = rng.choice([rng.normal(size=(rows, columns)), rng.integers(-28, 29, (rows, columns)) / 4])
    weight = (numbers * sizes).astype(np.float32)
    exponents, expected = by_search(weight)
    values, scales = stored(torch.from_numpy(weight))
    assert values.shape == (rows, num_bytes(columns))
    assert scales.shape == (rows, num_blocks(columns))
    assert (scales.int().numpy() - 127 == exponents).all()
    found = expanded(values, scales, columns, torch.float32).double().numpy()
    assert (found == expected).all()
    scale = 2.0 ** exponents.repeat(32, axis=1)[:, :columns]
    assert (np.abs(weight - found) <= np.maximum(np.abs(weight), scale) / 4).all()
    again = torch.from_numpy(found).float()
    assert torch.equal(back(again), again), "what is stored is stored without loss"
    assert torch.equal(back(torch.from_numpy(weight), torch.bfloat16).float(), again), "bfloat16 holds all of them"


CONFIG = ModelConfig(hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2, max_positions=16)


def test_bytes_are_those_that_are_planned() -> None:
    """17 bytes for 32 weights of a matrix, whatever lies around them."""
    layout = WeightLayout(new_model(CONFIG, 11, 0), "mxfp4")
    for one in layout.stored:
        if one.is_mxfp4:
            assert 32 * (one.end - one.start + one.scales_bytes) == 17 * math.prod(one.shape)
            assert (one.end - one.start, one.scales_bytes) == (math.prod(one.shape) // 2, math.prod(one.shape) // 32)
    matrices = [one.name for one in layout.stored if one.is_mxfp4]
    assert len(matrices) == 2 * 4, "queries with keys and values, output, both ways of the MLP"


@pytest.mark.parametrize("section", ["generator", "trainer"])
def test_a_cut_inside_a_block_is_refused_before_the_run(section: str) -> None:
    sizes = {"hidden_size": 64, "num_heads": 2, "num_kv_heads": 2}
    settings = {"generator": {"precision": "mxfp4"}, "trainer": {}}
    settings[section] |= {"tensor_parallel": 2} | ({"ranks": 2} if section == "trainer" else {})
    check_policy(resolve("quickstart", settings | {"model": sizes | {"intermediate_size": 64}}))
    with pytest.raises(ConfigError, match=f"{section}.tensor_parallel = 2 with 96 inner"):
        check_policy(resolve("quickstart", settings | {"model": sizes | {"intermediate_size": 96}}))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_cut_inside_a_block_is_refused(rank: int) -> None:
    shape = new_model(CONFIG, 11, 0).config
    WeightLayout(TensorParallel(shape, rank, 2).new_model(), "mxfp4")
    narrow = replace(shape, intermediate_size=96)  # 48 on each of two ranks
    with pytest.raises(ConfigError, match=r"48 columns of layers\.0\.down\.weight"):
        WeightLayout(TensorParallel(narrow, rank, 2).new_model(), "mxfp4")
    WeightLayout(TensorParallel(narrow, rank, 2).new_model(), "int8")
