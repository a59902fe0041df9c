"""How OpenMP's waiting policy and large pages change decoding and training, alone and beside busy processes.

    python benchmarks/waiting.py [--model small] [--threads 2] [--repeats 5]

Every setting runs in a process of its own (it is read when torch is loaded), the order rotating over repeats: 64
completions of 16 tokens decoded, and one forward-backward over 64 x 24 tokens; then the same beside as many busy
processes as there are threads. `controller/placement.py` takes the last setting.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time

from slipstream.observe.summary import versions

POLICIES: dict[str, dict[str, str]] = {
    "default": {},
    "no spin": {"OMP_WAIT_POLICY": "PASSIVE"},
    "short spin": {"GOMP_SPINCOUNT": "10000"},
    "short spin, large pages": {"GOMP_SPINCOUNT": "10000", "THP_MEM_ALLOC_ENABLE": "1"},
}
VARIABLES = {name for policy in POLICIES.values() for name in policy}


def child(name: str, threads: int) -> None:
    """Print milliseconds of decoding and of training as JSON."""
    import numpy as np
    import torch
    from contenders.models import MODELS

    from slipstream.algorithms.logprobs import token_logprobs
    from slipstream.generator.native import native_engine
    from slipstream.generator.requests import Request
    from slipstream.models.attention import PackedAttention
    from slipstream.models.initialise import initialise
    from slipstream.models.transformer import Transformer

    torch.set_num_threads(threads)
    config = MODELS[name].config
    model = Transformer(config)
    initialise(model, 0)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, config.vocab_size, 8).astype(np.int32) for _ in range(8)]
    requests = [
        Request(ordinal=ordinal, sample=sample, prompt_tokens=prompt, max_new_tokens=16)
        for ordinal, prompt in enumerate(prompts)
        for sample in range(8)
    ]
    tokens = torch.from_numpy(rng.integers(0, config.vocab_size, 64 * 24))
    positions = torch.arange(24).repeat(64)
    attention = PackedAttention([24] * 64)

    def decode() -> None:
        engine = native_engine(model, num_slots=64, max_len=8 + 16, seed=0, stop_token_ids=[])
        engine.submit(requests)
        while not engine.is_idle:
            engine.step()

    def train() -> None:
        logprobs = token_logprobs(model.logits(model(tokens, positions, attention)), tokens)
        torch.autograd.backward(logprobs.sum())

    seconds: dict[str, list[float]] = {"decode": [], "train": []}
    for turn in range(8 if name != "smollm2" else 4):
        for phase, work in (("decode", decode), ("train", train)):
            started = time.perf_counter()
            work()
            if turn:
                seconds[phase].append(time.perf_counter() - started)
    print(json.dumps({phase: 1e3 * statistics.median(values) for phase, values in seconds.items()}))


def measure(policy: str, model: str, threads: int, num_busy: int) -> dict[str, float]:
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment |= {"OMP_NUM_THREADS": str(threads), **POLICIES[policy]}
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_busy)]
    try:
        command = [sys.executable, __file__, "--child", "--model", model, "--threads", str(threads)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=600)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("small", "tiny", "smollm2"), default="small", help="random weights")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.model, arguments.threads)
        return
    print(f"{arguments.model}; hardware: {platform.machine()}, {arguments.threads} threads; versions: {versions()}")
    print("| beside | policy | decode, ms | train, ms |\n|---|---|---|---|")
    for company, num_busy in (("nothing", 0), (f"{arguments.threads} busy processes", arguments.threads)):
        measured: dict[str, list[dict[str, float]]] = {policy: [] for policy in POLICIES}
        for turn in range(arguments.repeats):
            order = list(POLICIES)[turn % len(POLICIES) :] + list(POLICIES)[: turn % len(POLICIES)]
            for policy in order:
                measured[policy].append(measure(policy, arguments.model, arguments.threads, num_busy))
        for policy, runs in measured.items():
            decode_ms, train_ms = (statistics.median(run[name] for run in runs) for name in ("decode", "train"))
            print(f"| {company} | {policy} | {decode_ms:.0f} | {train_ms:.0f} |", flush=True)


if __name__ == "__main__":
    main()
