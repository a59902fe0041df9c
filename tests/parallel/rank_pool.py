"""Processes that wait for jobs and do them together, as the ranks of gloo groups on this machine.

They are forked from a process that has imported torch: that takes longer than all that the tests ask of them.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slipstream.controller.nursery import search_path

START_TIMEOUT_S = 120.0
JOB_TIMEOUT_S = 120.0
GROUPS_PER_JOB = 1000
MOST_GROUPS = 64
"""After that many, the next job gets new ranks. A thread of each group wakes a hundred times a second, and torch's
caches keep the groups of meshes, so that none can be given up: in a long session they took a fifth of two cores.
"""
PRELOADED = [
    "torch._dynamo",  # models on "meta" pull it in
    "slipstream.generator.executor",
    "transformers.models.auto.tokenization_auto",  # checkpoints and their tokenizers
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.configuration_llama",
    "transformers.tokenization_utils_tokenizers",
    *sorted(path.stem for path in Path(__file__).parent.glob("*_jobs.py")),
]
"""Imported once, in the process that the ranks are forked from."""


@dataclass(frozen=True)
class Rank:
    """What a job is told: which rank of which group does it."""

    rank: int
    world: int
    group: dist.ProcessGroup


class RankPool:
    """`world` ranks; a job is done by the first few of them. Every wait has a deadline.

    A collective that failed ends its group: after a failure that no test asked for, the next job gets new ranks, as it
    does when they have made many groups.
    """

    def __init__(self, world: int, folder: Path, *, timeout_s: float = 60.0) -> None:
        self.world, self.folder, self.timeout_s = world, folder, timeout_s
        self.num_starts = self.num_jobs = 0
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", search_path())  # the server looks for modules where this process does
            forkserver.ensure_running()
        self.processes, self.pipes = [], []
        self.is_damaged = self.is_worn = False
        store = str(self.folder / f"store_{self.num_starts}")
        self.num_starts += 1
        for rank in range(self.world):
            mine, theirs = context.Pipe()
            args = (rank, self.world, store, theirs, self.timeout_s)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(mine)
        for pipe in self.pipes:
            assert pipe.poll(START_TIMEOUT_S), "a rank did not start"
            assert pipe.recv()[:2] == ("done", None)

    def run(self, job: Callable[..., Any], *args: Any, world: int) -> list[Any]:
        """`job(Rank, *args)` on the first `world` ranks, together: what they return, by rank."""
        outcomes = self.outcomes(job, *args, world=world)
        failures = [
            f"rank {rank}: {status}: {value}" for rank, (status, value) in enumerate(outcomes) if status != "done"
        ]
        self.is_damaged = bool(failures)
        assert not failures, "\n".join(failures)
        return [value for _, value in outcomes]

    def outcomes(self, job: Callable[..., Any], *args: Any, world: int) -> list[tuple[str, Any]]:
        """The same, by rank ("done", its result), ("failed", the traceback) or ("died", None)."""
        if self.is_damaged or self.is_worn:
            self.close()
            self._start()
        self.is_damaged = True
        self.num_jobs += 1
        for pipe in self.pipes[:world]:
            pipe.send((job, args, world, self.num_jobs))
        deadline = time.monotonic() + JOB_TIMEOUT_S
        answers = [_answer(pipe, deadline) for pipe in self.pipes[:world]]
        outcomes = [(status, value) for status, value, _ in answers]
        self.is_worn = any(groups > MOST_GROUPS for _, _, groups in answers)
        self.is_damaged = ("died", None) in outcomes
        return outcomes

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()


def _answer(pipe: Connection, deadline: float) -> tuple[str, Any, int]:
    """Return how the job ended, its result, and how many groups the rank has by now."""
    assert pipe.poll(max(deadline - time.monotonic(), 0.0)), "a rank neither answers nor ends"
    try:
        return pipe.recv()
    except EOFError:
        return "died", None, 0


def _serve(rank: int, world: int, store: str, pipe: Connection, timeout_s: float) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error", FutureWarning)
    if "lo" in dict(map(reversed, socket.if_nameindex())):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # whatever the machine calls itself
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    groups = {size: dist.new_group(list(range(size)), timeout=timeout) for size in range(1, world + 1)}
    pipe.send(("done", None, 0))
    while True:
        try:
            job, args, size, number = pipe.recv()
        except EOFError:
            return
        # torch names a group after how many this rank has made; those in no job of two are behind the others then.
        dist.distributed_c10d._world.group_count = GROUPS_PER_JOB * number
        try:
            answer = "done", job(Rank(rank, size, groups[size]), *args)
        except Exception:  # noqa: BLE001 - whatever it is, the test shall see it
            answer = "failed", traceback.format_exc()
        pipe.send((*answer, len(dist.distributed_c10d._world.pg_map)))
