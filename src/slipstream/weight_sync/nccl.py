"""Buckets between two GPUs over NCCL: a communicator for every pair of ranks, used by one thread on each side.

NCCL's transfers are kernels that wait, on their GPU, for the other side's. Beside those of FSDP and of tensor
parallelism, which do the same, such waiting can go round in circles. Four rules keep it from that:

- A communicator of its own for every pair (source, destination): nothing is ordered but by the two threads that use it.
- It is made, and has sent a byte, before the first version: making one stops both GPUs, and waits for the other end.
- A source puts its send in its stream only after the receiver has said, over gloo, that its receive is in its own. So
  the trainer's GPUs never hold a kernel that waits for another machine's host, nor a trainer for its generators.
- Every end has a stream of its own: waiting for NCCL's work puts the thread's present stream behind it, which must not
  be that of training, of decoding, or of another receiver. What is sent has been written when `send` is called.

A transfer that takes too long is ended by the host, which aborts the pair's communicator; torch's watchdog, which would
end the process, is told to leave these groups alone.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from slipstream.weight_sync.device_memory import DeviceMemory, new_stream

_c10d: Any = dist  # whose stubs leave out stores and backends
_WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_NO_HANDLING = "0"
_environment = threading.Lock()
_UNWATCHED = timedelta(days=365)


class PairTransfer:
    """A transfer in hand."""

    def __init__(self, work: Any, stream: torch.cuda.Stream) -> None:
        self._work, self._stream = work, stream

    def wait(self, timeout: timedelta) -> None:
        """Until it is done. Raises RuntimeError when it breaks or takes too long; then the pair is of no more use."""
        with _on(self._stream):
            self._work.wait(timeout)


class Pair:
    """One end of a link between a source and a destination; the constructor waits for the other. RuntimeError."""

    def __init__(self, store: Any, memory: DeviceMemory, *, is_source: bool, timeout: timedelta) -> None:
        self._peer = int(is_source)
        self._stream = new_stream(memory.device)
        options = _c10d.ProcessGroupNCCL.Options()
        options._timeout = _UNWATCHED  # `Work.wait` has the timeout
        with _left_alone(), torch.cuda.device(memory.device):
            self._group: Any = _c10d.ProcessGroupNCCL(store, 1 - self._peer, 2, options)
        first = memory.empty(1)
        (self.send(first) if is_source else self.receive(first)).wait(timeout)

    def send(self, tensor: torch.Tensor) -> PairTransfer:
        with _on(self._stream):
            return PairTransfer(self._group.send([tensor], self._peer, 0), self._stream)

    def receive(self, tensor: torch.Tensor) -> PairTransfer:
        with _on(self._stream):
            return PairTransfer(self._group.recv([tensor], self._peer, 0), self._stream)

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._group.abort()


@contextlib.contextmanager
def _on(stream: torch.cuda.Stream) -> Iterator[None]:
    """A thread that goes back to its own stream goes back to its GPU, too: to the first, with a context of half a
    gigabyte there, if it has none.
    """
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


@contextlib.contextmanager
def _left_alone() -> Iterator[None]:
    """A group that is made in here reports its errors, and ends no process for them."""
    with _environment:
        before = os.environ.get(_WATCHDOG)
        os.environ[_WATCHDOG] = _NO_HANDLING
        try:
            yield
        finally:
            if before is None:
                del os.environ[_WATCHDOG]
            else:
                os.environ[_WATCHDOG] = before
