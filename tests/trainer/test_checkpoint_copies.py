"""Copies of a checkpoint's boxes: in pinned pieces of powers of two, or pageable ones where none can be pinned."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from training_data import save_checkpoint, tiny_policy

from slipstream.core.training_sections import OptimizerConfig
from slipstream.models.shards import Box
from slipstream.trainer import checkpoint_boxes
from slipstream.trainer.checkpoint import Checkpoints, Saved
from slipstream.trainer.checkpoint_boxes import copied, piece_sizes, write_boxes
from slipstream.trainer.optim import AdamW

GIB = 2**30
Pin = Callable[[int], list[int]]


@pytest.fixture
def pin(monkeypatch: pytest.MonkeyPatch) -> Pin:
    """Lets torch pin so many pieces, of 2**14 bytes at most, without a GPU; returns their sizes as they come."""
    plain, sizes = torch.empty, list[int]()
    monkeypatch.setattr(checkpoint_boxes, "LARGEST_PIECE", 2**14)
    monkeypatch.setattr(checkpoint_boxes, "SMALLEST_PIECE", 2**6)

    def of(most: int) -> list[int]:
        def empty(*size: Any, pin_memory: bool = False, **how: Any) -> Tensor:
            if pin_memory:
                if len(sizes) == most:
                    raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later")
                sizes.append(size[0])
            return plain(*size, **how)

        monkeypatch.setattr(torch, "empty", empty)
        return sizes

    return of


@pytest.mark.parametrize("num_bytes", [1, 4096, 4097, 10**6, 3 * 2**28, GIB, GIB + 1, 18_500_000_000, 96 * 10**9])
def test_pieces_are_powers_of_two_and_hardly_more_than_is_needed(num_bytes: int) -> None:
    sizes = piece_sizes(num_bytes)
    assert max(sizes) <= GIB
    assert all(size & (size - 1) == 0 for size in sizes)
    assert num_bytes <= sum(sizes) <= max(1.032 * num_bytes, num_bytes + 4095)
    assert len(sizes) <= num_bytes // GIB + 6


def test_nothing_takes_no_piece() -> None:
    assert piece_sizes(0) == []


def boxes() -> dict[Box, Tensor]:
    """Longer elements first; one larger than three pieces, one whose numbers do not lie in its order, one number."""
    torch.manual_seed(0)
    views = {
        "long": torch.randint(2**40, (7,)),
        "large": torch.randn(129, 101),
        "turned": torch.randn(120, 60).T,
        "cut": torch.randn(64, 64)[:, 3:50],
        "one": torch.randn(()),
        "half": torch.randn(33, 3).bfloat16(),
        "bytes": torch.arange(250, dtype=torch.uint8),
    }
    return {Box(name, tuple(view.shape), (0,) * view.ndim, tuple(view.shape)): view for name, view in views.items()}


@pytest.mark.parametrize("most", [100, 2, 0])
def test_copies_have_every_bit_in_whatever_pieces_they_lie(most: int, pin: Pin, tmp_path: Path) -> None:
    views = boxes()
    generators = {"torch": torch.arange(5, dtype=torch.uint8)}, {"python": [1, 2]}
    written = write_boxes(tmp_path / "live", {box: [view] for box, view in views.items()}, generators)
    sizes = pin(most)
    copies = copied(views, is_pinned=True)
    expected = {box: view.clone() for box, view in views.items()}
    for view in views.values():
        view.fill_(1)
    assert len(sizes) == min(most, len(piece_sizes(sum(view.nbytes for view in views.values()))))
    assert max(sizes, default=0) <= 2**14
    assert max(map(len, copies.values())) >= 3
    for box, parts in copies.items():
        found = torch.cat([part.flatten() for part in parts]).view(box.shape)
        assert torch.equal(found, expected[box]), box.name
    storages = {part.untyped_storage().data_ptr(): part.untyped_storage() for p in copies.values() for part in p}
    most_bytes = 1.032 * sum(view.nbytes for view in views.values())
    assert sum(storage.nbytes() for storage in storages.values()) <= most_bytes
    assert write_boxes(tmp_path / "copied", copies, generators) == written
    assert (tmp_path / "copied").read_bytes() == (tmp_path / "live").read_bytes()


def test_without_a_gpu_all_lies_in_one_piece(pin: Pin) -> None:
    sizes = pin(100)
    copies = copied(boxes(), is_pinned=False)
    assert not sizes
    assert {len(parts) for parts in copies.values()} == {1}
    assert len({part.untyped_storage().data_ptr() for [part] in copies.values()}) == 1


@pytest.mark.parametrize("most", [100, 1])
def test_a_save_from_a_gpu_is_that_of_a_cpu_pinned_or_not(
    most: int, pin: Pin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of tensors that say they are on CUDA; where memory cannot be pinned the log says so once, not at each save."""
    model, flat = tiny_policy()
    trained = model, AdamW(flat, OptimizerConfig(), total_updates=1)
    save_checkpoint(tmp_path / "cpu" / "step_1", trained, step=1)
    sizes = pin(most)
    checkpoint_boxes._warn_once.cache_clear()
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda tensor: True))
    waits: list[int] = []
    stream = SimpleNamespace(synchronize=lambda: waits.append(len(sizes)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    with caplog.at_level(logging.WARNING), closing(Checkpoints()) as checkpoints:
        for name in ("one", "two"):
            path = tmp_path / name / "step_1"
            checkpoints.save(path, {"policy": trained}, step=1)
            assert checkpoints.wait(20.0) == Saved(path, 1)
            for file in ("rank_00000.safetensors", "index.json"):
                assert (path / file).read_bytes() == (tmp_path / "cpu" / "step_1" / file).read_bytes()
    assert len(waits) == 2, "what is written has arrived"
    assert sizes
    told = [one for one in caplog.messages if "not pinned" in one]
    assert len(told) == (most == 1)
    assert all("out of memory" in one for one in told)
