"""Collectives against latencies worked out by hand, and against what was measured on H100 GPUs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.core.errors import ConfigError
from slipstream.plan.hardware import DEVICES, all_gather_s, all_reduce_s, all_to_all_s, cluster, last_host_task_s

H100, A100 = cluster("h100", 1024), cluster("A100", 64)
MIB = 1024**2


@pytest.mark.parametrize(("nbytes", "measured_us"), [(4, 20), (MIB, 25), (1024 * MIB, 4060)])
def test_eight_gpus_of_a_node_as_measured(nbytes: int, measured_us: float) -> None:
    """Eight H100 of a node, idle: all ranks come at the same time (marin-community/marin issue 6736)."""
    assert 1e6 * all_reduce_s(nbytes, 8, H100) == pytest.approx(measured_us, rel=0.25)


@pytest.mark.parametrize(("nbytes", "measured_us"), [(1e6, 88), (1e7, 157), (1e8, 647), (1e9, 4520)])
def test_sixteen_gpus_of_two_nodes_as_measured(nbytes: float, measured_us: float) -> None:
    """H100 over InfiniBand (drmysore/nebius-h100-16gpu-benchmark): a bound, and no further off than twice."""
    assert 0.5 * measured_us < 1e6 * all_reduce_s(nbytes, 16, H100) <= measured_us


def test_large_sums_reach_the_quoted_bandwidth() -> None:
    """275 GB/s summed in the switch; 370 GB/s around a ring, where a byte passes 2 (n - 1) / n times."""
    assert 8e9 / all_reduce_s(8e9, 8, H100) == pytest.approx(275e9, rel=0.01)
    assert 8e9 / all_gather_s(8e9, 8, H100) == pytest.approx(370e9 * 8 / 7, rel=0.01)
    assert 8e9 / all_reduce_s(8e9, 8, A100) == pytest.approx(300e9 * 37 / 45 * 8 / 14, rel=0.12)


def test_thirty_two_gpus_of_four_nodes_as_measured() -> None:
    """331 GB/s over InfiniBand (aigatech/vpbenchmarking), which counts each byte 2 (n - 1) / n times."""
    assert 8e9 / all_reduce_s(8e9, 32, H100) * 62 / 32 == pytest.approx(331e9, rel=0.15)


@pytest.mark.parametrize(
    ("ranks", "by_hand_us"),
    [
        (2, 6.6 + 2 * 0.6),  # ring, LL
        (4, 6.6 + 6 * 0.6),
        (16, 6.8 + 2 * 7 * 0.6 * 1.8 + 2 * 5.0),  # tree, LL: up and down one level of nodes
        (64, 6.8 + 2 * 7 * 0.6 * 1.8 + 2 * 3 * 5.0),
    ],
)
def test_nothing_to_send_costs_the_hops(ranks: int, by_hand_us: float) -> None:
    assert 1e6 * all_reduce_s(1, ranks, H100) == pytest.approx(by_hand_us, rel=1e-3)


def test_what_all_send_to_all() -> None:
    """In a node all but 1 / 8 goes over links; over two nodes half goes by each device's own adapter, at 47 GB/s."""
    assert 8e9 / all_to_all_s(8e9, 8, H100) == pytest.approx(370e9 * 8 / 7, rel=0.01)
    assert 16e9 / all_to_all_s(16e9, 16, H100) == pytest.approx(47e9 * 2, rel=0.01)
    assert 16e9 / all_to_all_s(16e9, 4, H100, stride=4) == pytest.approx(47e9 * 2, rel=0.01)


def test_a_group_across_nodes_has_its_share_of_the_adapters() -> None:
    """One of eight groups with a rank in each of 16 nodes: 47 GB/s. One group of all 128: those of all adapters."""
    assert 16e9 / all_gather_s(16e9, 16, H100, stride=8) == pytest.approx(47e9 * 16 / 15, rel=0.01)
    assert 160e9 / all_gather_s(160e9, 128, H100) == pytest.approx(370e9 * 128 / 127, rel=0.01)


def test_between_nodes_all_wait_for_the_last_host() -> None:
    """Against the mean longest of sixteen exponential times."""
    assert last_host_task_s(26e-6, 8, H100) == 0.0
    sampled = np.random.default_rng(0).exponential(26e-6, (100_000, 16)).max(1).mean()
    assert last_host_task_s(26e-6, 16, H100) == pytest.approx(sampled, rel=0.01)


@given(st.floats(0, 1e9), st.floats(1, 1e9), st.sampled_from([2, 4, 8, 16, 32, 64]))
def test_more_bytes_and_more_nodes_take_longer(nbytes: float, more: float, ranks: int) -> None:
    assert all_reduce_s(nbytes, ranks, H100) < all_reduce_s(nbytes + more, ranks, H100)
    assert all_gather_s(nbytes, ranks, H100) < all_gather_s(nbytes + more, ranks, H100)
    if ranks >= 8:
        assert all_reduce_s(nbytes, ranks, H100) < all_reduce_s(nbytes, 2 * ranks, H100)


def test_alone_there_is_nothing_to_do() -> None:
    assert all_reduce_s(1e9, 1, H100) == all_gather_s(1e9, 1, H100) == all_to_all_s(1e9, 1, H100) == 0.0


def test_unknown_hardware_is_refused() -> None:
    with pytest.raises(ConfigError, match="a100, h100, h200, b200"):
        cluster("H1000", 8)
    with pytest.raises(ConfigError, match="no fp8 products"):
        DEVICES["A100"].flops_of("fp8")
    with pytest.raises(ConfigError, match="a cluster has devices"):
        cluster("H100", 0)
