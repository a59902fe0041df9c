"""Contender: Slipstream's own engine. Run by `engine.py`."""

from __future__ import annotations

import itertools
import statistics
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from contenders.protocol import Job, Run, Workload, serve

from slipstream.core.fields import Precision
from slipstream.generator.engine import Engine
from slipstream.generator.native import native_engine
from slipstream.generator.requests import Finished, Request
from slipstream.models.hf import load_model
from slipstream.models.served import ServedWeights
from slipstream.models.transformer import Transformer


def new_engine(
    model: Transformer, *, precision: Precision, num_slots: int, max_len: int, prefill_tokens: int = 512
) -> tuple[Engine, ServedWeights]:
    """The engine under test on weights as a generator holds them; no token ends a completion before its limit."""
    weights = ServedWeights(model, precision)
    engine = native_engine(
        model, num_slots=num_slots, max_len=max_len, seed=0, stop_token_ids=[], prefill_tokens=prefill_tokens
    )
    return engine, weights


def start(job: Job) -> tuple[object, dict[str, str]]:
    torch.set_num_threads(job.threads)
    model = load_model(Path(job.model), max_positions=job.max_len)
    engine, _ = new_engine(model, precision=job.precision, num_slots=job.batch, max_len=job.max_len)
    ordinals = itertools.count()

    def run(workload: Workload) -> Run:
        requests = [
            Request(
                ordinal=next(ordinals),
                sample=0,
                prompt_tokens=np.array(prompt, np.int32),
                max_new_tokens=length,
                temperature=0.0 if job.is_greedy else 1.0,
            )
            for prompt, length in zip(workload.prompts, workload.lengths, strict=True)
        ]
        first = requests[0].ordinal
        finished: list[Finished] = []
        full_step_s: list[float] = []  # steps that decoded a full batch and did nothing else
        started_s = ended_s = time.perf_counter()
        engine.submit(requests)
        while not engine.is_idle:
            is_full, num_prefilled = engine.num_live == job.batch, engine.stats.prefilled_tokens
            finished += engine.step()
            now_s = time.perf_counter()
            if is_full and engine.stats.prefilled_tokens == num_prefilled:
                full_step_s.append(now_s - ended_s)
            ended_s = now_s
        lengths = [0] * len(requests)
        for item in finished:
            lengths[item.ordinal - first] = len(item.tokens)
        extra = {"full_step_s": statistics.median(full_step_s)} if full_step_s else {}
        return Run(ended_s - started_s, lengths, extra)

    return run, {"torch": version("torch"), "precision": job.precision, "also": "a logprob of every token"}


if __name__ == "__main__":
    serve(start)
