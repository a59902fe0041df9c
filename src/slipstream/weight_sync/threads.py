"""Threads that move versions while decoding goes on."""

from __future__ import annotations

import os
import sys
import threading

import torch

STAGING_NICENESS = 10
"""In Linux's units: a tenth of a core where decoding wants all of them, else what is idle."""


def give_way() -> None:
    """Called by such a thread, once: one core at most, and that only when decoding leaves it."""
    torch.set_num_threads(1)  # of this thread; the others keep theirs
    if sys.platform == "linux":  # where threads have priorities of their own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), STAGING_NICENESS)
