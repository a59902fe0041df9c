"""Decode steps a second, share of idle time and bytes per rank of a replica in pipeline stages, on CPU processes.

    python benchmarks/generator_stages.py [--layers 8] [--hidden 256] [--rows 32] [--prompt 64] [--completion 96]
                                          [--repeats 3]

All rows have one prompt and completions of one length, each rank one thread: on one rank, and on two stages, whose
rows are in two groups (`generator/stage_ticks.py`). A step is a token for every row: of two stages two ticks. A stage
is busy while it runs its layers, the head, or a sampler; all else of a tick is idle: waiting for the other stage, or
messages.
Beside it stands the share of ticks without a pass, (P - 1) / (n + P - 1) of n passes, as it was counted and by that
formula. What the first adds to the second is that stages are not equal (the last one has the head), and messages.

What two cores can show: that both stages work at the same time, and what of a model a rank holds. What they cannot: how
fast stages are on GPUs, where no step of them is captured; and more than two. Other work on the machine shows up as
idle time, and makes steps longer; a rank's CPU time of a step is what it would take with a core to itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from slipstream.core.rank_group import RankGroup
from slipstream.generator.engine import Engine
from slipstream.generator.requests import Request
from slipstream.generator.slot_runner import SlotRunner
from slipstream.generator.stage_ticks import StagePass
from slipstream.generator.staged_slots import StagedSlots
from slipstream.models.config import TransformerConfig
from slipstream.models.initialise import initialise
from slipstream.models.served import ServedWeights
from slipstream.models.stages import Stage
from slipstream.models.transformer import Transformer
from slipstream.observe.hardware import describe

VOCAB = 4096


def config_of(given: argparse.Namespace) -> TransformerConfig:
    return TransformerConfig(
        family="llama",
        vocab_size=VOCAB,
        hidden_size=given.hidden,
        intermediate_size=3 * given.hidden,
        num_layers=given.layers,
        num_heads=given.hidden // 64,
        num_kv_heads=given.hidden // 64,
        head_dim=64,
        max_positions=given.prompt + given.completion,
        tie_embeddings=False,
    )


class Ticks:
    """Seconds of a staged runner's ticks, and of those that its passes take; ticks, and those with a pass."""

    def __init__(self, runner: StagedSlots) -> None:
        self.whole_s = self.busy_s = 0.0
        self.count = self.num_passes = 0
        tick: Callable[[StagePass | None], Any] = runner.ticks.tick
        carry_out = runner.ticks._carry_out

        def timed(begun: StagePass | None) -> Any:
            started_s = time.perf_counter()
            found = tick(begun)
            self.whole_s += time.perf_counter() - started_s
            self.count += 1
            return found

        def worked(orders: Any) -> Any:
            started_s = time.perf_counter()
            found = carry_out(orders)
            self.busy_s += time.perf_counter() - started_s
            self.num_passes += orders.whole is not None
            return found

        runner.ticks.tick = timed  # type: ignore[method-assign]
        runner.ticks._carry_out = worked  # type: ignore[method-assign]


def requests(given: argparse.Namespace, ordinal: int) -> list[Request]:
    prompt = np.random.default_rng(ordinal).integers(2, VOCAB, given.prompt).astype(np.int32)
    return [
        Request(ordinal=ordinal, sample=sample, prompt_tokens=prompt, max_new_tokens=given.completion)
        for sample in range(given.rows)
    ]


def work(rank: int, given: argparse.Namespace, stages: int, folder: str) -> None:
    """Decode on one rank, and leave what was measured in `folder`."""
    torch.set_num_threads(1)
    everyone = RankGroup.alone()
    if stages > 1:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", stages), rank=rank, world_size=stages)
        everyone = RankGroup.over(dist.group.WORLD)
    model = Transformer(config_of(given), stage=Stage(rank, stages))
    initialise(model, 0)
    weights = ServedWeights(model, "float32")
    sizes = {"num_rows": given.rows, "max_len": given.prompt + given.completion}
    runner = SlotRunner(model, **sizes) if stages == 1 else StagedSlots(model, everyone, **sizes)
    memory = [runner._kv] if isinstance(runner, SlotRunner) else [group._kv for group in runner._groups]
    engine = Engine(runner, seed=0, stop_token_ids=[])
    runs = []
    for ordinal in range(given.repeats + 1):  # the first warms up
        engine.submit(requests(given, ordinal))
        ticks = Ticks(runner) if isinstance(runner, StagedSlots) else None
        everyone.gather(b"")
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        while not engine.is_idle:
            engine.step()
        found = {"steps_per_s": given.completion / (time.perf_counter() - started_s)}
        found["cpu_s"] = (time.process_time() - started_cpu_s) / given.completion
        if ticks is not None:
            found |= {"idle": 1 - ticks.busy_s / ticks.whole_s, "ticks": ticks.count, "passes": ticks.num_passes}
        runs.append(found)
    kv_bytes = sum(one.num_bytes for one in memory)
    measured = {"runs": runs[1:], "weights_bytes": weights.num_bytes, "kv_bytes": kv_bytes}
    Path(folder, f"{rank}.json").write_text(json.dumps(measured))


def tell(given: argparse.Namespace, stages: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(work, (given, stages, folder), nprocs=stages)
        by_rank = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(stages)]
    speeds = [run["steps_per_s"] for run in by_rank[0]["runs"]]
    print(f"{stages} stage{'s' * (stages > 1)}: {statistics.median(speeds):.1f} steps/s", end="")
    print(f" ({min(speeds):.1f} to {max(speeds):.1f})")
    for rank, one in enumerate(by_rank):
        cpu_s = statistics.median(run["cpu_s"] for run in one["runs"])
        print(
            f"  rank {rank}: {one['weights_bytes'] / 1e6:.1f} MB of weights, {one['kv_bytes'] / 1e6:.1f} MB of KV",
            end="",
        )
        print(f", {1000 * cpu_s:.0f} ms of CPU time a step")
        if stages > 1:
            last = one["runs"][-1]
            empty = (last["ticks"] - last["passes"]) / last["ticks"]
            formula = (stages - 1) / (last["passes"] + stages - 1)
            idle = statistics.median(run["idle"] for run in one["runs"])
            print(f"    idle {idle:.1%} of its time; without a pass {empty:.2%} of {last['ticks']} ticks", end="")
            print(f", by the formula {formula:.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--completion", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    print(f"{describe()}\ncommit {commit.stdout.strip()}, {vars(given)}, medians of {given.repeats} runs")
    for stages in (1, 2):
        tell(given, stages)


if __name__ == "__main__":
    main()
