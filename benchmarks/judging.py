"""Completions a second that a judge scores, beside what its latency allows: max_concurrent / latency.

    python benchmarks/judging.py [--latency 1.0] [--concurrent 8 32 128 512] [--turns 4]

The judge is an HTTP server in a process of its own which answers each request after `--latency` seconds. The scorers
are those of a run: they render the template, ask, and read the score. A turn is `max_concurrent` completions, all of
which are there from the beginning; no two are equal. Without the cache's file. CPU seconds are of the scoring process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import select
import shlex
import subprocess
import sys
import time

import numpy as np

from slipstream.core.sections import JudgeTerm, RewardsConfig
from slipstream.core.types import Completion, Prompt, Segment
from slipstream.observe.hardware import describe
from slipstream.observe.summary import versions
from slipstream.rewards.assembly import Assembly
from slipstream.rewards.scorers import Scorers

TOKENS = np.arange(8, dtype=np.int32)
PROMPT = Prompt(prompt_id="0", text="Why is the sky blue?", tokens=TOKENS, task="", answer=None)


async def serve(latency_s: float) -> None:
    """Answer until the input ends, which is when who asks has ended."""
    said = {"choices": [{"message": {"content": "Fine.\nScore: 7"}}]}
    said["usage"] = {"prompt_tokens": 150, "completion_tokens": 6}
    body = json.dumps(said).encode()
    reply = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(body), body)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        await reader.readexactly(int(head.partition("content-length:")[2].split()[0]))
        await asyncio.sleep(latency_s)
        writer.write(reply)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def judged(port: int, concurrent: int, count: int) -> tuple[float, float]:
    """Wall and CPU seconds of `count` completions."""
    judge = JudgeTerm(base_url=f"http://127.0.0.1:{port}/v1", model="m", max_concurrent=concurrent)
    scorers = Scorers(RewardsConfig(terms=[], judges=[judge]), {}, {})
    assembly = Assembly(scorers.where)
    wall_s, cpu_s, num_done = time.perf_counter(), time.process_time(), 0
    for i in range(count):
        completion = Completion(
            ordinal=i, sample=0, prompt=PROMPT, segments=(Segment(tokens=TOKENS),), text=f"{i} " * 200,
            finish_reason="stop",
        )  # fmt: skip
        for call in assembly.add(completion):
            scorers.submit(call)
    while num_done < count:
        for scored in scorers.poll():
            assert scored.parts == [6 / 9], scored
            num_done += 1
        if num_done < count:
            select.select(scorers.fds(), [], [], 1.0)
    spent = time.perf_counter() - wall_s, time.process_time() - cpu_s
    scorers.close()
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency", type=float, default=1.0)
    parser.add_argument("--concurrent", type=int, nargs="+", default=[8, 32, 128, 512])
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--serve", action="store_true", help="be the judge")
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve(arguments.latency))
        return
    hardware = describe()
    print("$", shlex.join([sys.executable.rpartition("/")[2], *sys.argv]))
    print(f"{versions().commit}  {hardware.cpu}, {hardware.num_cores} cores")
    command = [sys.executable, __file__, "--serve", "--latency", str(arguments.latency)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        print(f"{'at once':>8} {'completions':>12} {'per s':>8} {'ideal':>8} {'ratio':>6} {'CPU ms each':>12}")
        for concurrent in arguments.concurrent:
            count = concurrent * arguments.turns
            wall_s, cpu_s = judged(port, concurrent, count)
            ideal = concurrent / arguments.latency
            print(
                f"{concurrent:8} {count:12} {count / wall_s:8.1f} {ideal:8.1f} {count / wall_s / ideal:6.2f} "
                f"{1e3 * cpu_s / count:12.2f}"
            )
        assert server.stdin is not None
        server.stdin.close()


if __name__ == "__main__":
    main()
