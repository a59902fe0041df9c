"""Seconds per training step, share of idle time and bytes per rank of a trainer in pipeline stages, on CPU processes.

    python benchmarks/pipeline_stages.py [--layers 8] [--hidden 256] [--groups 8] [--samples 4] [--prompt 64]
                                         [--completion 192] [--microbatch-tokens 1024] [--steps 5]

A step is `trainer.step.train_on_batch` with one update of GRPO, each rank with one thread: on one rank, on two stages
with 1F1B, and on two with interleaved 1F1B of two chunks. A stage is busy while it runs its layers, forward and
backward, and the loss; all else of the update's passes is idle: waiting for a neighbour, or for its message. Beside it
stands the share that S stages idle if all passes take equally long, of M microbatches with v chunks each:
(S - 1) / (v M + S - 1).

What two cores can show: that schedules idle about as much as they should, and what of a model a rank holds. What they
cannot: how fast stages are on GPUs, whose messages travel while they compute; and more than two stages. Other work on
the machine shows up as idle time.
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

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from train_step import groups_of

from slipstream.batching import collate
from slipstream.core.config import RunConfig
from slipstream.core.rank_group import RankGroup
from slipstream.core.recipes import resolve
from slipstream.models.stage_passes import StagePasses
from slipstream.observe.hardware import describe
from slipstream.trainer.policy import Policy
from slipstream.trainer.step import train_on_batch

CASES = {"one rank": (1, 1), "2 stages, 1f1b": (2, 1), "2 stages, interleaved": (2, 2)}
"""Stages, and chunks in each."""


def config_of(given: argparse.Namespace, stages: int, chunks: int) -> RunConfig:
    model = {"hidden_size": given.hidden, "intermediate_size": 3 * given.hidden, "num_layers": given.layers}
    return resolve(
        {
            "model": {**model, "num_heads": 4, "num_kv_heads": 4, "max_positions": given.prompt + given.completion},
            "groups_per_step": given.groups,
            "completions_per_group": given.samples,
            "prompts": {"tasks": [{"name": "chain_sum"}], "max_prompt_tokens": given.prompt},
            "generator": {"max_new_tokens": given.completion},
            "loss": {"name": "grpo"},
            "trainer": {
                "ranks": stages,
                "pipeline_parallel": stages,
                "pipeline_chunks": chunks,
                "microbatch_tokens": given.microbatch_tokens,
            },
        }
    )


class BusyTime:
    """Seconds in which this stage computes, and those of all passes of updates."""

    def __init__(self, passes: StagePasses) -> None:
        self.busy_s = self.whole_s = 0.0
        self._passes = passes
        self._note(passes, "train", "whole_s")
        for name in ("_forward", "_at_targets"):
            self._note(passes, name, "busy_s")
        make = passes._stage

        def make_noted(*args: Any) -> Any:
            stage = make(*args)
            self._note(stage, "backward_one_chunk", "busy_s")
            return stage

        vars(passes)["_stage"] = make_noted

    def _note(self, owner: object, name: str, field: str) -> None:
        call: Callable[..., Any] = getattr(owner, name)

        def noted(*args: Any, **options: Any) -> Any:
            started_s = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                vars(self)[field] += time.perf_counter() - started_s

        vars(owner)[name] = noted


def work(rank: int, given: argparse.Namespace, case: str, folder: str) -> None:
    """Train on one rank, and leave what was measured in `folder`."""
    torch.set_num_threads(1)
    stages, chunks = CASES[case]
    config, everyone = config_of(given, stages, chunks), RankGroup.alone()
    if stages > 1:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", stages), rank=rank, world_size=stages)
        everyone = RankGroup.over(dist.group.WORLD)
    policy = Policy(config, everyone, stage_ranks=everyone)
    groups = groups_of(given, policy.model.config.vocab_size)
    busy = None if policy.model.passes is None else BusyTime(policy.model.passes)
    steps_s: list[float] = []
    idle: list[float] = []
    metrics: dict[str, float] = {}
    for _ in range(given.steps + 1):  # the first warms up
        before = (0.0, 0.0) if busy is None else (busy.busy_s, busy.whole_s)
        everyone.gather(b"")
        started_s = time.perf_counter()
        metrics = train_on_batch(policy.model, policy.optimizer, groups, config=config, step=0, batching=collate)
        everyone.gather(b"")
        steps_s.append(time.perf_counter() - started_s)
        if busy is not None:
            idle.append(1.0 - (busy.busy_s - before[0]) / (busy.whole_s - before[1]))
    moments = [view for views in policy.optimizer.named_moments().values() for view in views.values()]
    found = {
        "steps_s": steps_s[1:],
        "idle": idle[1:],
        "microbatches": metrics["num_microbatches"],
        "weights_bytes": sum(p.nbytes for p in policy.model.parameters()),
        "optimizer_bytes": sum(view.nbytes for view in moments),
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    policy.close()


def measured(given: argparse.Namespace, case: str) -> list[dict[str, Any]]:
    stages, _ = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(work, (given, case, folder), nprocs=stages)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(stages)]


def tell(case: str, by_rank: list[dict[str, Any]]) -> None:
    stages, chunks = CASES[case]
    steps_s, count = by_rank[0]["steps_s"], by_rank[0]["microbatches"]
    spread = f"{min(steps_s):.2f} to {max(steps_s):.2f}"
    print(f"{case}: {statistics.median(steps_s):.2f} s per step ({spread}), {count:.0f} microbatches")
    if stages > 1:
        found = ", ".join(f"{statistics.median(one['idle']):.1%}" for one in by_rank)
        ideal = (stages - 1) / (chunks * count + stages - 1)
        print(f"  idle, by stage: {found}; (S - 1) / (v M + S - 1) = {ideal:.1%}")
    for rank, one in enumerate(by_rank):
        weights, optimizer = one["weights_bytes"] / 1e6, one["optimizer_bytes"] / 1e6
        print(f"  rank {rank}: {weights:.1f} MB of parameters, {optimizer:.1f} MB of optimizer state")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("layers", 8), ("hidden", 256), ("groups", 8), ("samples", 4), ("prompt", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("completion", 192), ("microbatch-tokens", 1024), ("steps", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    print(f"{describe()}\ncommit {commit.stdout.strip()}, {vars(given)}, seeds 0, medians of {given.steps} steps")
    for case in CASES:
        tell(case, measured(given, case))


if __name__ == "__main__":
    main()
