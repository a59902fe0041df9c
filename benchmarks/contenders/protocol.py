"""How `engine.py` talks to a contender: a process that loads one model, then runs workloads when told, one at a time.

Standard library only, as contenders live in different environments. A contender is started with the path of a `Job`;
it answers on its standard output with one line of JSON when it is ready, and one per run. A run is asked for by a line
`<workload> <turn>` on its standard input. Whatever else it prints goes to its standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Workload:
    """Request i has prompt `prompts[i]` and ends after exactly `lengths[i]` new tokens."""

    prompts: list[list[int]]
    lengths: list[int]

    def in_turn(self, turn: int, vocab_size: int) -> Workload:
        """The same with other tokens in the prompts: no turn profits from a cache that an earlier one filled."""
        prompts = [[(token + 7 * turn) % vocab_size for token in prompt] for prompt in self.prompts]
        return Workload(prompts, self.lengths)


@dataclass(frozen=True)
class Job:
    """One model and the workloads on it. `batch` sequences at a time, of at most `max_len` tokens each."""

    model: str  # folder of a Hugging Face checkpoint
    vocab_size: int
    batch: int
    max_len: int
    threads: int
    is_greedy: bool  # else sampled at temperature 1, with the logprob of every sampled token
    precision: str
    workloads: dict[str, Workload]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


@dataclass(frozen=True)
class Run:
    """What one workload took: seconds from the first request to the last token, and the new tokens of each request."""

    wall_s: float
    lengths: list[int]
    extra: dict[str, Any]


def read_job(path: Path) -> Job:
    fields = json.loads(path.read_text(encoding="utf-8"))
    fields["workloads"] = {name: Workload(**workload) for name, workload in fields["workloads"].items()}
    return Job(**fields)


def timed(generate: Callable[[Workload], list[int]], workload: Workload) -> Run:
    started_s = time.perf_counter()
    lengths = generate(workload)
    return Run(time.perf_counter() - started_s, lengths, {})


def serve(start: Callable[[Job], tuple[Callable[[Workload], Run], dict[str, str]]]) -> None:
    """A contender's whole life. `start(job)` gives what runs a workload, and facts about the contender to print."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(values: dict[str, Any]) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    try:
        job = read_job(Path(sys.argv[1]))
        run, facts = start(job)
        answer({"facts": facts})
        for line in sys.stdin:
            name, turn = line.split()
            answer(asdict(run(job.workloads[name].in_turn(int(turn), job.vocab_size))))
    except BaseException as error:
        answer({"error": f"{type(error).__name__}: {error}"[:600]})
        raise
