"""What `slipstream watch` costs on a long run, and what `tokens.jsonl` costs a training step.

    python benchmarks/watch.py [--megabytes 400]

Makes up the files of a long run (events, rollouts, metrics, timelines), indexes them, asks what a page asks for at
random times, and prints seconds, memory and sizes. Then trains steps of the quickstart's shape with and without tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from slipstream.observe.watch.answers import ANSWERS
from slipstream.observe.watch.index import RunIndex

P, G = 64, 16  # groups per step, completions per group
STEP_S = 4.0


def lines_of_step(step: int) -> Iterator[str]:
    """The events of one step that trains P groups while the next ones are sampled."""
    start_s, first = 1000.0 + step * STEP_S, step * P
    starts = ",".join(f'{{"type":"StartGroup","ordinal":{first + P + i},"replica":{i % 4}}}' for i in range(P))
    ordinals = ",".join(map(str, range(first, first + P)))
    yield (
        f'{{"seq":0,"time_s":{start_s:.6f},"event":{{"type":"StepDone","step":{step - 1},"version":{step},"metrics":'
        f'{{"loss":0.1}}}},"commands":[{{"type":"TrainStep","step":{step},"ordinals":[{ordinals}],"heads":[]}},{starts}]}}'
    )
    apart_s = STEP_S / (P * (G + 1) + 1)
    at_s = start_s
    for i in range(P):
        for sample in range(G):
            at_s += apart_s
            yield (
                f'{{"seq":0,"time_s":{at_s:.6f},"event":{{"type":"CompletionFinished","ordinal":{first + P + i},'
                f'"sample":{sample},"replica":{i % 4},"num_tokens":900,"min_version":{step},"max_version":{step},'
                '"num_restored":0},"commands":[]}'
            )
        at_s += apart_s
        yield (
            f'{{"seq":0,"time_s":{at_s:.6f},"event":{{"type":"GroupScored","ordinal":{first + P + i},"has_signal":true,'
            f'"mean_reward":0.5,"num_failed":0,"min_version":{step},"max_version":{step},"num_poisoned":0,"failure":null}},'
            '"commands":[]}'
        )


def make(run_dir: Path, megabytes: int) -> int:
    """Write a run whose events alone have `megabytes`; returns its steps."""
    (run_dir / "timeline").mkdir()
    dials = {"groups_per_step": P, "completions_per_group": G, "max_staleness": 1, "steps": 10**6}
    began = {"type": "ScheduleBegan", "policy": "oldest_first", "snapshot": None, "config": dials}
    step, text = 0, "x" * 300
    files = [run_dir / name for name in ("events.jsonl", "rollouts.jsonl", "metrics.jsonl", "timeline/trainer.jsonl")]
    with (
        files[0].open("w") as events,
        files[1].open("w") as rollouts,
        files[2].open("w") as metrics,
        files[3].open("w") as lane,
    ):
        events.write(json.dumps({"seq": 0, "time_s": 999.0, "event": began, "commands": []}) + "\n")
        lane.write(json.dumps({"kind": "process", "process": "trainer", "pid": 1, "time_ns": 999 * 10**9}) + "\n")
        while events.tell() < megabytes * 1e6:
            events.write("\n".join(lines_of_step(step)) + "\n")
            for ordinal in range(step * P, step * P + P):
                for sample in range(G):
                    rollouts.write(
                        f'{{"ordinal":{ordinal},"sample":{sample},"step":{step},"outcome":"trained","prompt_id":"a","task":'
                        f'"t","prompt":"2+2","completion":"{text}","answer":"4","reward":0.5,"parts":{{}},"failure":null,'
                        f'"finish_reason":"stop","num_tokens":900,"versions":[[0,{step}]],"mean_behaviour_logprob":-0.5,'
                        '"replica":0,"started_s":1.0,"finished_s":2.0,"scored_s":3.0}\n'
                    )
            values = {f"metric_{n}": n + step / 1000 for n in range(150)}
            metrics.write(json.dumps({"step": step, "version": step + 1, "wall_s": step * STEP_S} | values) + "\n")
            for part in range(40):
                start_ns = round((1000 + step * STEP_S + part * STEP_S / 40) * 1e9)
                state = "forward_backward" if part % 4 else "wait_generation"
                end_ns = start_ns + round(STEP_S / 40 * 1e9)
                lane.write(f'{{"kind":"slice","state":"{state}","start_ns":{start_ns},"end_ns":{end_ns}}}\n')
            step += 1
    (run_dir / "timeline" / "controller.jsonl").write_text(
        json.dumps({"kind": "process", "process": "controller", "pid": 1, "time_ns": 999 * 10**9 - 1000}) + "\n"
    )
    return step


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def measure_watching(megabytes: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        steps = make(run_dir, megabytes)
        sizes = {path.name: path.stat().st_size / 1e6 for path in run_dir.rglob("*.jsonl")}
        print(f"{steps:,} steps of {P} x {G}, {steps * STEP_S / 3600:.1f} h;", end=" ")
        print(", ".join(f"{name} {size:,.0f} MB" for name, size in sizes.items()))
        before_mb, started_s, longest_s = resident_mb(), time.perf_counter(), 0.0
        index = RunIndex(run_dir)
        while True:
            piece_s = time.perf_counter()
            if not index.advance():
                break
            longest_s = max(longest_s, time.perf_counter() - piece_s)
        spent_s = time.perf_counter() - started_s
        rate, longest_ms = sum(sizes.values()) / spent_s, longest_s * 1e3
        print(f"indexed in {spent_s:.1f} s ({rate:.0f} MB/s), a piece at most {longest_ms:.0f} ms;", end=" ")
        print(f"memory grew by {resident_mb() - before_mb:.0f} MB")
        rng = random.Random(0)
        names = ",".join(f"metric_{n}" for n in range(9))
        queries: dict[str, Callable[[float], tuple[str, dict[str, Any]]]] = {
            "loop, 12 s": lambda t: ("loop", {"from": t, "to": t + 12}),
            "loop, 20 min": lambda t: ("loop", {"from": t, "to": t + 1200}),
            "lanes, 20 s": lambda t: ("lanes", {"from": t, "to": t + 20}),
            "lanes, 1 h": lambda t: ("lanes", {"from": t, "to": t + 3600}),
            "overview": lambda t: ("overview", {"points": 400}),
            "curves": lambda t: ("curves", {"names": names}),
            "groups": lambda t: ("groups", {"row": rng.randrange(index.rollouts.num_groups), "count": 24}),
            "group": lambda t: ("group", {"ordinal": rng.randrange(index.rollouts.num_groups)}),
            "run": lambda t: ("run", {}),
        }  # fmt: skip
        print(f"{'answer':<14}{'median':>10}{'most':>10}{'bytes, most':>14}")
        for title, make_query in queries.items():
            times, largest = [], 0
            for _ in range(20):
                name, query = make_query(rng.uniform(0, index.end_s))
                started_s = time.perf_counter()
                body = msgspec.json.encode(ANSWERS[f"/api/{name}"](index, {k: str(v) for k, v in query.items()}))
                times.append((time.perf_counter() - started_s) * 1e3)
                largest = max(largest, len(body))
            print(f"{title:<14}{statistics.median(times):>7.1f} ms{max(times):>7.1f} ms{largest:>14,}")
        print(f"memory after that: {resident_mb() - before_mb:.0f} MB more than at first")


def measure_tokens() -> None:
    """Steps of the quickstart's shape on one thread: with and without, in turns."""
    import torch

    from slipstream.batching import collate
    from slipstream.core.recipes import resolve
    from slipstream.core.types import Completion, Group, Prompt, Rollout, Segment, VersionSpan
    from slipstream.models.build import build_policy
    from slipstream.models.flat import FlatParameters
    from slipstream.models.tokenizer import TokenTexts
    from slipstream.observe.tokens import TokenRecorder, token_line
    from slipstream.trainer.optim import AdamW
    from slipstream.trainer.records import TokenSample
    from slipstream.trainer.step import train_on_batch

    torch.set_num_threads(1)
    config = resolve("quickstart")
    model, tokenizer = build_policy(config.model, seed=0)
    optimizer = AdamW(FlatParameters(model), config.trainer.optimizer, total_updates=10**6)
    rng, texts = np.random.default_rng(0), TokenTexts(tokenizer)

    def groups(step: int) -> list[Group]:
        found = []
        for ordinal in range(step * config.groups_per_step, (step + 1) * config.groups_per_step):
            prompt = Prompt(prompt_id="p", text="", tokens=rng.integers(3, 60, 6).astype(np.int32), task="t")
            rollouts = []
            for sample in range(config.completions_per_group):
                segment = Segment(
                    tokens=rng.integers(3, 60, 6).astype(np.int32),
                    behaviour_logprobs=np.full(6, -3.0, dtype=np.float32),
                    version_spans=(VersionSpan(start=0, version=step),),
                )
                completion = Completion(
                    ordinal=ordinal, sample=sample, prompt=prompt, segments=(segment,), text="", finish_reason="stop"
                )
                rollouts.append(Rollout(completion=completion, reward=float(rng.random())))
            found.append(Group(ordinal=ordinal, rollouts=tuple(rollouts)))
        return found

    spent: dict[bool, list[float]] = {False: [], True: []}
    written: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        recorder = TokenRecorder(Path(folder) / "tokens.jsonl", every=config.observe.tokens_every, max_bytes=64_000_000)
        for step in range(80):
            batch, sample = groups(step), TokenSample(config.observe.tokens_every if step % 2 else 0)
            started_s = time.process_time()
            train_on_batch(model, optimizer, batch, config=config, step=step, batching=collate, tokens=sample)
            trained_s = time.process_time()
            lines = [
                token_line(one.completion, sample.trained.get((one.ordinal, one.sample)), step=step, texts=texts)
                for group in batch
                if sample.wants(group.ordinal)
                for one in group.rollouts
            ]
            recorder.record(lines)
            if step >= 10:
                spent[step % 2 == 1].append(time.process_time() - started_s)
                if step % 2:
                    written.append(time.process_time() - trained_s)
        recorder.close()
    plain, with_tokens = (statistics.median(spent[which]) * 1e3 for which in (False, True))
    lines_ms = statistics.median(written) * 1e3
    print(f"a step without tokens {plain:.1f} ms of CPU, with them {with_tokens:.1f} ms; to write the lines of one")
    print(f"group in {config.observe.tokens_every} takes {lines_ms:.2f} ms of it: {lines_ms / plain:.2%} of a step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=400, help="size of events.jsonl")
    options = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    print(f"commit {commit.strip()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    measure_watching(options.megabytes)
    measure_tokens()


if __name__ == "__main__":
    main()
