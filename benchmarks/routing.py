"""Routing replay of a mixture of experts: what recording and replaying cost, and how much nearer the two sides are.

    python benchmarks/routing.py [--model FOLDER] [--rows 64] [--steps 200] [--threads 1]

Decode steps with and without recording take turns, and so do forward and backward passes with and without replay; the
median of each counts. Then an engine at every precision samples, and the float32 model reads its tokens: the mean and
the largest |log pi - log mu|, as it is and with the engine's experts. Without `--model` a random one of 16 experts, 4
for each token, in 6 layers of width 256.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from slipstream.batching.collate import collate
from slipstream.core.packed import PackedMicrobatch, TrainSequence
from slipstream.core.sections import ModelConfig
from slipstream.generator.engine import Engine
from slipstream.generator.native import native_engine
from slipstream.generator.requests import Finished, Request
from slipstream.models.hf import load_model
from slipstream.models.initialise import new_model
from slipstream.models.packed import at_targets
from slipstream.models.served import ServedWeights
from slipstream.models.transformer import Transformer
from slipstream.observe.hardware import describe
from slipstream.trainer.measure import microbatch_logprobs

RANDOM = ModelConfig(
    family="qwen3_moe",
    hidden_size=256,
    num_experts=16,
    experts_per_token=4,
    expert_width=128,
    num_layers=6,
    num_heads=8,
    num_kv_heads=4,
    max_positions=1024,
)


def engine_of(model: Transformer, rows: int, max_len: int, *, records: bool) -> Engine:
    return native_engine(
        model, num_slots=rows, max_len=max_len, seed=0, stop_token_ids=[], records_routes=records, is_paged=False
    )


def requests(model: Transformer, rows: int, tokens: int) -> list[Request]:
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, model.config.vocab_size, (rows // 4, 8)).astype(np.int32)
    return [Request(group, sample, prompts[group], tokens) for group in range(rows // 4) for sample in range(4)]


def in_turns(rounds: int, *variants: Callable[[], object]) -> list[float]:
    """Median seconds of each variant, which take turns."""
    seconds: list[list[float]] = [[] for _ in variants]
    for _ in range(rounds):
        for variant, times in zip(variants, seconds, strict=True):
            start = time.perf_counter()
            variant()
            times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in seconds]


def sampled(model: Transformer, rows: int, tokens: int) -> list[Finished]:
    engine = engine_of(model, rows, tokens + 8, records=True)
    engine.submit(requests(model, rows, tokens))
    finished = []
    while not engine.is_idle:
        finished += engine.step()
    return finished


def microbatch_of(finished: list[Finished]) -> PackedMicrobatch:
    sequences = []
    for one in finished:
        tokens = np.concatenate([one.request.prompt_tokens, one.tokens]).astype(np.int32)
        mask = np.arange(len(tokens)) >= len(one.request.prompt_tokens)
        sequence = TrainSequence.read_only((one.ordinal, one.sample), tokens, mask)
        behaviour = np.concatenate([np.zeros(len(one.request.prompt_tokens), np.float32), one.logprobs])
        sequences.append(replace(sequence, behaviour_logprobs=behaviour, routes=one.routes))
    [microbatch] = collate(sequences, 1 << 20)
    return microbatch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = new_model(RANDOM, 4096, seed=0) if options.model is None else load_model(options.model)
    tokens = min(options.steps, model.config.max_positions - 16)
    print(describe(), f"{options.threads} threads, {options.rows} rows", sep=", ")
    plain, recording = (engine_of(model, options.rows, tokens + 8, records=records) for records in (False, True))
    for engine in (plain, recording):
        engine.submit(requests(model, options.rows, tokens))
        engine.step()
    without, with_routes = in_turns(tokens - 4, plain.step, recording.step)
    print(
        f"decode step: {1e3 * without:.3f} ms, recording {1e3 * with_routes:.3f} ms: {with_routes / without - 1:+.1%}"
    )
    microbatch = microbatch_of(sampled(model, options.rows, min(tokens, 32)))

    def read(*, replays: bool) -> None:
        model.zero_grad()
        at_targets(model, microbatch, replays=replays).square().mean().backward()

    without, with_routes = in_turns(12, lambda: read(replays=False), lambda: read(replays=True))
    print(
        f"forward and backward of {microbatch.num_tokens} tokens: {1e3 * without:.1f} ms, "
        f"replaying {1e3 * with_routes:.1f} ms: {with_routes / without - 1:+.1%}"
    )
    assert microbatch.routes is not None
    print(f"{microbatch.routes[0].nbytes} bytes of experts for each token")
    for precision in ("float32", "bfloat16", "int8"):
        served = copy.deepcopy(model)
        ServedWeights(served, precision)
        found = microbatch_of(sampled(served, options.rows, min(tokens, 64)))
        gaps = []
        for replays in (False, True):
            with torch.no_grad():
                states = at_targets(model, found, replays=replays)
                logprobs, _ = microbatch_logprobs(model, found, temperature=1.0, states=states)
            gap = (logprobs - torch.from_numpy(found.behaviour_logprobs)).abs()
            gaps.append(f"{gap.mean():.2e} (largest {gap.max():.2e})")
        print(f"{precision}: |log pi - log mu| {gaps[0]}, with the engine's experts {gaps[1]}")


if __name__ == "__main__":
    main()
