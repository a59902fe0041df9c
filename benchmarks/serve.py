"""Tokens per second of a served model with 1, 8 and 64 clients, beside its engine alone on the same requests.

    python benchmarks/serve.py [--clients 1 8 64] [--requests 128] [--new-tokens 64] [--repeats 3] [--quick]

Clients are in a process of their own: each sends its next request when it has the answer to the last one, ids of
`--prompt-tokens` tokens, over a connection that stays. The engine alone gets all requests at once and has as many rows
as there are clients. All requests have seeds, so both sample the same tokens, which is checked. Both in turns, one
thread each; medians over the turns. Without `--model` a random one of 5 M parameters is made. On few cores the clients
and the gateway take time from the engine: that is in the ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import shlex
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch

import slipstream
from slipstream.core.sections import ModelConfig
from slipstream.evals.served import SEEDED_STREAM
from slipstream.generator.native import native_engine
from slipstream.generator.requests import Request
from slipstream.models.hf import load_model, save_model
from slipstream.models.initialise import new_model
from slipstream.models.tokenizer import char_tokenizer
from slipstream.models.transformer import Transformer
from slipstream.observe.hardware import describe
from slipstream.observe.summary import versions

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 768, "num_layers": 6, "num_heads": 4}
Answers = list[list[int]]


def make_model(folder: Path) -> Path:
    """Write a random model without an end of texts, so that each answer has all its tokens."""
    tokenizer = char_tokenizer()
    tokenizer.eos_token = None
    config = ModelConfig(**SIZES, num_kv_heads=4, max_positions=2_048)
    save_model(new_model(config, len(tokenizer), 0, eos_token_id=None, pad_token_id=0), folder, tokenizer)
    return folder


async def post(address: str, bodies: list[tuple[int, bytes]], answers: dict[int, list[int]]) -> None:
    """Send requests one after the other over one connection until there are none."""
    parts = urlsplit(address)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    while bodies:
        index, body = bodies.pop(0)
        head = f"POST {parts.path}/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        said = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(said.partition(b"content-length:")[2].split()[0])
        answers[index] = json.loads(await reader.readexactly(length))["choices"][0]["token_ids"]
    writer.close()


def clients(pipe: Connection) -> None:
    """Play the clients of each job (address, their number, bodies); tell the seconds and the ids of the answers."""
    while (job := pipe.recv()) is not None:
        address, num_clients, bodies = job
        answers: dict[int, list[int]] = {}
        queue = list(enumerate(bodies))

        async def play() -> None:
            await asyncio.gather(*(post(address, queue, answers) for _ in range(num_clients)))  # noqa: B023

        started_s = time.perf_counter()
        asyncio.run(play())
        pipe.send((time.perf_counter() - started_s, [answers[index] for index in range(len(bodies))]))


def alone(model: Transformer, prompts: np.ndarray, num_rows: int, new_tokens: int) -> tuple[float, Answers]:
    """Return the seconds and the answers of the engine with all requests at once."""
    max_len = prompts.shape[1] + new_tokens
    engine = native_engine(model, num_slots=num_rows, max_len=max_len, seed=0, stop_token_ids=[])
    started_s = time.perf_counter()
    engine.submit(
        [
            Request(index, 0, prompt.copy(), max_new_tokens=new_tokens, stream=SEEDED_STREAM)
            for index, prompt in enumerate(prompts)
        ]
    )
    answers: dict[int, list[int]] = {}
    while not engine.is_idle:
        answers |= {finished.ordinal: finished.tokens.tolist() for finished in engine.step()}
    return time.perf_counter() - started_s, [answers[index] for index in range(len(prompts))]


def measure(options: argparse.Namespace, folder: Path, num_clients: int, pipe: Connection) -> None:
    model = load_model(folder)
    num_requests = max(num_clients, options.requests * min(num_clients, 8) // 8)
    rng = np.random.default_rng(0)
    prompts = rng.integers(3, model.config.vocab_size, (num_requests, options.prompt_tokens)).astype(np.int32)
    bodies = [
        json.dumps(
            {"prompt": prompt.tolist(), "max_tokens": options.new_tokens, "seed": index, "return_token_ids": True}
        ).encode()
        for index, prompt in enumerate(prompts)
    ]
    rates: dict[str, list[float]] = {"served": [], "alone": []}
    max_len = options.prompt_tokens + options.new_tokens
    with slipstream.serve(folder, slots=num_clients, max_len=max_len) as serving:
        for turn in range(options.repeats + 1):
            pipe.send((serving.base_url, num_clients, bodies))
            served_s, served = pipe.recv()
            alone_s, wanted = alone(model, prompts, num_clients, options.new_tokens)
            assert served == wanted, "the served answers are not the engine's"
            if turn:  # the first one warms up
                num_tokens = sum(map(len, served))
                rates["served"].append(num_tokens / served_s)
                rates["alone"].append(num_tokens / alone_s)
    served_rate, alone_rate = (statistics.median(rates[which]) for which in ("served", "alone"))
    spread = f"{min(rates['served']):,.0f} .. {max(rates['served']):,.0f}"
    print(
        f"| {num_clients} | {num_requests} | {served_rate:,.0f} | {spread} | {alone_rate:,.0f} "
        f"| {served_rate / alone_rate:.2f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--requests", type=int, default=128, help="of 8 and more clients; fewer of fewer")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", type=Path, help="checkpoint without an EOS that is sampled soon")
    parser.add_argument("--quick", action="store_true", help="see that everything works")
    options = parser.parse_args()
    if options.quick:
        options.clients, options.requests, options.new_tokens, options.repeats = [1, 8], 8, 8, 1
    torch.set_num_threads(1)
    print(f"command: python {shlex.join(sys.argv)}\nversions: {versions()}")
    for name, value in describe().lines().items():
        print(f"{name}: {value}")
    print(f"load: {os.getloadavg()[0]:.1f}; {options.prompt_tokens} prompt tokens, {options.new_tokens} new ones\n")
    print("| clients | requests | served, tokens/s | range | engine alone | ratio |\n|---|---|---|---|---|---|")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=clients, args=(theirs,), daemon=True)
    process.start()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model or make_model(Path(scratch) / "model")
        for num_clients in options.clients:
            measure(options, folder, num_clients, ours)
    ours.send(None)
    process.join(10)


if __name__ == "__main__":
    main()
