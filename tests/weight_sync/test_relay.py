"""What a replica hands on: what has landed and been verified, as long as it lies there."""

from __future__ import annotations

import threading
import time

import numpy as np
import torch

from slipstream.core.peer_messages import Holding
from slipstream.weight_sync.relay import Availability, Shelf

NONE = np.zeros((0, 1), np.int64)
HOLDING = Holding(
    num_bytes=30, names=(), shapes=(), types=(), item_bytes=(), tensor=np.zeros(0, np.int32), start=NONE, stop=NONE,
    offset=NONE[:, 0], strides=NONE,
)  # fmt: skip
EXTENTS = [(0, 10), (10, 20), (15, 30)]


def buffers() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(30, dtype=torch.uint8), torch.ones(30, dtype=torch.uint8)


def test_bytes_are_ready_when_all_that_lands_there_has_landed() -> None:
    shelf, (flat, _) = Shelf(HOLDING), buffers()
    assert shelf.wait(1, 0, (0, 30), 0.0) is Availability.AWAITED
    assert shelf.data(1, 0) is None
    shelf.begin(1, flat, EXTENTS)
    seen = []
    for index in (2, 0, 1):
        shelf.landed(index)
        seen.append(
            [shelf.wait(1, 0, extent, 0.0) is Availability.READY for extent in [(0, 5), (5, 16), (16, 20), (20, 30)]]
        )
    assert seen == [[False, False, False, True], [True, False, False, True], [True, True, True, True]]
    data = shelf.data(1, 0)
    assert data is not None
    flat[3] = 7
    assert data[3] == 7, "not a copy"


def test_a_buffer_that_is_written_again_has_lost_what_it_held() -> None:
    shelf, (first, second) = Shelf(HOLDING), buffers()
    shelf.begin(1, first, [(0, 30)])
    shelf.landed(0)
    shelf.begin(2, second, [(0, 30)])
    assert shelf.wait(1, 0, (0, 30), 0.0) is Availability.READY, "it decodes with it"
    shelf.begin(4, first.view(torch.uint8), [(0, 30)])  # another tensor of the same memory
    assert [shelf.wait(version, 0, (0, 30), 0.0) for version in (1, 2, 3, 4, 5)] == [
        Availability.GONE,
        Availability.AWAITED,
        Availability.GONE,
        Availability.AWAITED,
        Availability.AWAITED,
    ]


def test_a_transfer_that_failed_may_begin_again() -> None:
    shelf, (first, second) = Shelf(HOLDING), buffers()
    shelf.begin(1, first, [(0, 30)])
    shelf.landed(0)
    shelf.begin(2, second, EXTENTS)
    shelf.landed(0)
    shelf.fail()
    assert shelf.wait(2, 0, (0, 5), 0.0) is Availability.AWAITED
    assert shelf.wait(1, 0, (0, 30), 0.0) is Availability.READY
    shelf.begin(2, second, EXTENTS)
    shelf.landed(0)
    assert shelf.wait(2, 0, (0, 5), 0.0) is Availability.READY


def test_who_waits_is_woken() -> None:
    shelf, (flat, _) = Shelf(HOLDING), buffers()
    states: list[tuple[Availability, float]] = []

    def wait() -> None:
        started_s = time.monotonic()
        states.append((shelf.wait(3, 0, (0, 30), 60.0), time.monotonic() - started_s))

    thread = threading.Thread(target=wait)
    thread.start()
    before = shelf.num_arrivals
    shelf.begin(3, flat, [(0, 30)])
    shelf.landed(0)
    thread.join(30.0)
    assert [state for state, _ in states] == [Availability.READY]
    assert states[0][1] < 30.0
    assert shelf.num_arrivals > before
