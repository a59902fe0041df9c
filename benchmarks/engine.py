"""Decode speed of the engine beside transformers' `generate`, its continuous batching and vLLM, on one CPU.

    make bench-engine                            # or, with the environments installed:
    python benchmarks/engine.py [--models smollm2 small] [--batch 64 8] [--repeats 3] [--json FILE] [--quick]
    python benchmarks/engine.py --device cuda [--models qwen2.5-0.5b ...] [--batch 256] [--context 1024]

Every contender is a process of its own on the same cores with the same number of threads; it loads the model once, in
fp32, and then all of them run each workload in turn (A B C A B C ..., the first one rotating), so that a change of the
machine's mood meets all. Medians over the turns. Workloads, the same prompts and lengths for everybody:

- `uniform`: as many requests as the batch holds, each ending after exactly `--new-tokens`.
- `long_tail`: a queue of `--requests` times that many; lengths are lognormal with median `--new-tokens` / 4 and sigma
  1, at most 2 x `--new-tokens`. `generate` takes them batch by batch and decodes every batch to its longest, which is
  what it costs its users; only tokens that were asked for count.

All prompts differ and have one length: nobody can share a prefix or must pad. `--task rollouts` is what reinforcement
learning asks of an engine: tokens sampled at temperature 1, and the logprob of each. `--task greedy` is the least work
for the others; Slipstream computes every token's logprob even so. Bounds, measured in every turn beside the contenders
(`contenders/floor.py`): *products*, the matrix products of one decode step alone; *roofline*, the larger of bytes over
bandwidth (weights, and keys and values at the mean context) and FLOP over the best product's rate.
Valid on an idle machine only; every line of progress ends with the load average.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import selectors
import shlex
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from contenders.models import MODELS, SHAPES, attention_flop, kv_bytes_per_token, matmul_params
from contenders.protocol import Job, Workload

from slipstream.controller.placement import thread_environment
from slipstream.observe.hardware import describe
from slipstream.observe.summary import versions

HERE = Path(__file__).resolve().parent
SEED = 0
PROMPT_TOKENS = 16
SHORTEST = 4  # tokens of a completion in the long tail
CASES = {"smollm2": [64, 8], "small": [64], "tiny": [64]}  # batches where --batch does not say
CONTENDERS = {
    "slipstream": "contenders.ours",
    "generate": "contenders.hf_generate",
    "continuous": "contenders.hf_continuous",
    "vllm": "contenders.vllm_offline",
}
FLOOR = "contenders.floor"
WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, "fp8": 1}
START_S, RUN_S = 300.0, 600.0  # patience with a contender


class Missing(Exception):
    """A contender that cannot take part, and why."""


class Process:
    """One contender's process; see `contenders/protocol.py`."""

    def __init__(self, module: str, python: Path, job: Path, environment: dict[str, str]) -> None:
        if not python.exists():
            raise Missing(f"{python} does not exist (`make vllm-env` installs it)")
        self._log = job.with_name(f"{module}.log")
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [str(python), "-m", module, str(job)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=HERE,
                env=os.environ | environment,
            )
        try:
            self.facts: dict[str, str] = self._answer(START_S)["facts"]
        except Missing:
            self.close()
            raise

    def run(self, workload: str, turn: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{workload} {turn}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Missing(self._last_words()) from None
        return self._answer(RUN_S)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _answer(self, patience_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(patience_s):
                raise Missing(f"no answer within {patience_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise Missing(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Missing(answer["error"])
        return answer

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return "it died: " + (lines[-1][-300:] if lines else "no output")


def workloads(arguments: argparse.Namespace, batch: int, vocab_size: int) -> dict[str, Workload]:
    """Prompts and lengths, a function of the arguments and `SEED` alone."""
    rng = np.random.default_rng(SEED)
    tail = np.exp(rng.normal(math.log(arguments.new_tokens / 4), 1.0, arguments.requests * batch))
    lengths = {
        "uniform": np.full(batch, arguments.new_tokens),
        "long_tail": np.clip(tail, SHORTEST, 2 * arguments.new_tokens).astype(int),
    }
    return {
        name: Workload(rng.integers(0, vocab_size, (len(wanted), PROMPT_TOKENS)).tolist(), wanted.tolist())
        for name, wanted in lengths.items()
        if name in arguments.workloads
    }


@dataclass(frozen=True)
class Result:
    """One contender on one workload: seconds of every turn, and new tokens of one."""

    walls_s: list[float]
    num_tokens: int
    extras: list[dict[str, float]]

    @property
    def wall_s(self) -> float:
        return statistics.median(self.walls_s)

    @property
    def rates(self) -> list[float]:
        """Tokens per second, ascending."""
        return sorted(self.num_tokens / wall_s for wall_s in self.walls_s)

    @property
    def rate(self) -> float:
        return self.num_tokens / self.wall_s

    def has(self, name: str) -> bool:
        return all(name in values for values in self.extras)

    def extra(self, name: str) -> float:
        return statistics.median(values[name] for values in self.extras)


@dataclass(frozen=True)
class Case:
    """One model at one batch: what ran, what did not and why. `floor`: medians of what `contenders/floor.py` saw."""

    model: str
    weights: str
    job: Job
    results: dict[str, dict[str, Result]]  # workload -> contender -> result
    floor: dict[str, float]
    facts: dict[str, dict[str, str]]
    missing: dict[str, str]

    @property
    def name(self) -> str:
        return f"{self.model}, batch {self.job.batch}"


def measure(name: str, batch: int, arguments: argparse.Namespace, scratch: Path) -> Case:
    """All contenders in turn on all workloads of one case."""
    model = MODELS[name]
    folder, weights = model.folder(scratch, name)
    job = Job(
        model=str(folder),
        vocab_size=model.config.vocab_size,
        batch=batch,
        max_len=PROMPT_TOKENS + 2 * arguments.new_tokens,
        threads=arguments.threads,
        is_greedy=arguments.task == "greedy",
        precision=arguments.precision,
        workloads=workloads(arguments, batch, model.config.vocab_size),
    )
    job_file = scratch / f"{name}-{batch}.json"
    job.write(job_file)
    processes: dict[str, Process] = {}
    missing: dict[str, str] = {}
    floors: list[dict[str, float]] = []
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {workload: {} for workload in job.workloads}
    environment = thread_environment(arguments.threads)
    print(f"\n{name}, batch {batch}: starting", flush=True)

    def give_up(contender: str, reason: Missing) -> None:
        missing[contender] = str(reason)
        print(f"  {contender}: NOT RUN: {reason}", flush=True)
        if contender in processes:
            processes.pop(contender).close()

    try:
        for contender in [*arguments.contenders, "floor"]:
            python = arguments.vllm_python if contender == "vllm" else Path(sys.executable)
            module = FLOOR if contender == "floor" else CONTENDERS[contender]
            try:
                processes[contender] = Process(module, python, job_file, environment)
            except Missing as reason:
                give_up(contender, reason)
        facts = {contender: process.facts for contender, process in processes.items()}
        for turn in range(arguments.repeats + 1):  # turn 0 warms up: first kernels, first touches of memory
            for workload, wanted in job.workloads.items():
                is_first = workload == next(iter(job.workloads))
                if turn == 0 and not is_first:
                    continue
                order = [contender for contender in processes if contender != "floor"]
                shift = turn % max(1, len(order))  # it may be that none has started
                order = order[shift:] + order[:shift]
                for contender in ["floor", *order] if is_first else order:
                    try:
                        run = processes[contender].run(workload, turn)
                        if run["lengths"] != wanted.lengths:
                            raise Missing("it did not make the lengths that were asked for")
                    except Missing as reason:
                        give_up(contender, reason)
                        continue
                    if turn == 0:
                        continue
                    if contender == "floor":
                        floors.append(run["extra"])
                        continue
                    runs[workload].setdefault(contender, []).append(run)
                    print(
                        f"  turn {turn} {workload:<9} {contender:<10} {run['wall_s']:6.2f} s, "
                        f"{sum(wanted.lengths) / run['wall_s']:,.0f} tokens/s, load {os.getloadavg()[0]:.1f}",
                        flush=True,
                    )
    finally:
        for process in processes.values():
            process.close()
    results = {
        workload: {
            contender: Result(
                [run["wall_s"] for run in taken], sum(taken[0]["lengths"]), [run["extra"] for run in taken]
            )
            for contender, taken in by_contender.items()
            if contender not in missing
        }
        for workload, by_contender in runs.items()
    }
    floor = {key: statistics.median(each[key] for each in floors) for key in floors[0]}
    return Case(name, weights, job, results, floor, facts, missing)


@dataclass(frozen=True)
class Bounds:
    """Seconds of one decode step of a full batch at the mean context, at least."""

    products_s: float  # the fastest way to multiply that was tried: no slow product shall flatter an engine
    bytes_s: float
    flop_s: float

    @property
    def roofline_s(self) -> float:
        return max(self.bytes_s, self.flop_s)


def bounds(case: Case, workload: str) -> tuple[Bounds, str]:
    """The bounds of `workload`, and in words what they came from."""
    floor = case.floor
    config, batch = MODELS[case.model].config, case.job.batch
    lengths = np.array(case.job.workloads[workload].lengths)
    context = PROMPT_TOKENS + float((lengths**2).sum() / lengths.sum()) / 2  # of the average token
    weight_bytes = WEIGHT_BYTES[case.job.precision] * matmul_params(config)
    kv_bytes = batch * context * kv_bytes_per_token(config, 4)
    flop = batch * (2 * matmul_params(config) + attention_flop(config, context))
    bandwidth, rate = floor["read_bytes_per_s"], floor["gemm_flop_per_s"]
    ways = {way: floor[f"{way}_products_s"] for way in ("engine", "linear", "torch")}
    found = Bounds(min(ways.values()), (weight_bytes + kv_bytes) / bandwidth, flop / rate)
    words = (
        f"one decode step of {batch} rows: products {1e3 * ways['engine']:.2f} ms as the engine calls them, plain fp32 "
        f"{1e3 * ways['linear']:.2f} ms by oneDNN and {1e3 * ways['torch']:.2f} ms by torch; "
        f"{weight_bytes / 1e6:.0f} MB of weights and "
        f"{kv_bytes / 1e6:.0f} MB of keys and values at {bandwidth / 1e9:.1f} GB/s {1e3 * found.bytes_s:.2f} ms; "
        f"{flop / 1e9:.2f} GFLOP at {rate / 1e9:.0f} GFLOP/s {1e3 * found.flop_s:.2f} ms"
    )
    return found, words


def show(case: Case) -> None:
    """One case as tables."""
    params = matmul_params(MODELS[case.model].config)
    print(f"\n## {case.name} ({params / 1e6:.1f} M weights in products, {case.weights}, {case.job.precision})")
    for contender, facts in case.facts.items():
        if facts:
            print(f"{contender}: " + ", ".join(f"{name} {value}" for name, value in facts.items()))
    for workload, results in case.results.items():
        lengths = case.job.workloads[workload].lengths
        print(
            f"\n{workload}: {len(lengths)} requests of {PROMPT_TOKENS} prompt tokens, {sum(lengths)} new tokens, "
            f"{statistics.mean(lengths):.1f} on average, {max(lengths)} at most\n"
        )
        limit, words = bounds(case, workload)
        print(words + "\n")
        ours = results.get("slipstream")
        print(
            "| contender | tokens/s, median | range | s to the last token | Slipstream is | of products | of roofline |"
        )
        print("|---|---|---|---|---|---|---|")
        for contender in (name for name in CONTENDERS if name in results or name in case.missing):
            if contender in case.missing:
                print(f"| {contender} | not run: {case.missing[contender]} | | | | | |")
                continue
            result = results[contender]
            times = f"{result.wall_s / ours.wall_s:.2f} x as fast" if ours is not None and result is not ours else ""
            step_s = case.job.batch / result.rate
            print(
                f"| {contender} | {result.rate:,.0f} | {result.rates[0]:,.0f} .. {result.rates[-1]:,.0f} "
                f"| {result.wall_s:.2f} | {times} | {limit.products_s / step_s:.0%} | {limit.roofline_s / step_s:.0%} |"
            )
        if ours is not None and ours.has("full_step_s"):
            step_s = ours.extra("full_step_s")
            print(
                f"\nSlipstream's decode step of a full batch: {1e3 * step_s:.2f} ms, "
                f"{limit.products_s / step_s:.0%} of products, {limit.roofline_s / step_s:.0%} of roofline"
            )


def targets(cases: list[Case]) -> None:
    """What was aimed at, and whether this run reached it."""
    print("\n## Targets\n")
    by_key = {(case.model, case.job.batch): case for case in cases}

    def line(text: str, value: float, least: float, form: str) -> None:
        print(f"{'yes' if value >= least else 'NO '}  {text}: {format(value, form)} (at least {format(least, form)})")

    case = by_key.get(("smollm2", 64))
    uniform = case.results.get("uniform", {}) if case else {}
    if case and "slipstream" in uniform and uniform["slipstream"].has("full_step_s"):
        limit, _ = bounds(case, "uniform")
        share = limit.products_s / uniform["slipstream"].extra("full_step_s")
        line("SmolLM2, batch 64, decode step beside its products alone", share, 0.6, ".0%")
    for case in cases:
        for workload, least in (("uniform", 2.0), ("long_tail", 3.0)):
            results = case.results.get(workload, {})
            for contender in ("vllm", "generate"):
                if "slipstream" in results and contender in results:
                    ratio = results[contender].wall_s / results["slipstream"].wall_s
                    line(f"{case.name}, {workload}, beside {contender}", ratio, least, ".2f")
    case = by_key.get(("small", 64))
    if case and "slipstream" in case.results.get("uniform", {}):
        line("3.4 M parameters, batch 64, tokens/s", case.results["uniform"]["slipstream"].rate, 6000, ",.0f")


def as_json(case: Case) -> dict[str, Any]:
    return {
        "model": case.model,
        "weights": case.weights,
        "batch": case.job.batch,
        "precision": case.job.precision,
        "facts": case.facts,
        "floor": case.floor,
        "missing": case.missing,
        "workloads": {
            workload: {
                contender: {"walls_s": result.walls_s, "num_tokens": result.num_tokens, "extras": result.extras}
                for contender, result in results.items()
            }
            for workload, results in case.results.items()
        },
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--models", nargs="+", choices=[*MODELS, *SHAPES], help="default: smollm2 small; on CUDA all")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--workloads", nargs="+", choices=("uniform", "long_tail"), default=["uniform", "long_tail"])
    parser.add_argument("--batch", type=int, nargs="+", help="default: 64, for smollm2 also 8; on CUDA 256")
    parser.add_argument("--new-tokens", type=int, default=40, help="see the workloads")
    parser.add_argument("--requests", type=int, default=3, help="of the long tail, in batches")
    parser.add_argument("--repeats", type=int, default=3, help="measured turns")
    parser.add_argument("--threads", type=int, default=cores)
    parser.add_argument("--task", choices=("rollouts", "greedy"), default="rollouts")
    parser.add_argument(
        "--precision",
        choices=WEIGHT_BYTES,
        help="Slipstream's alone; default: float32, as the others; on CUDA bfloat16",
    )
    parser.add_argument("--context", type=int, default=1024, help="prompt tokens, on CUDA")
    parser.add_argument("--json", type=Path, help="write all measurements there, too")
    parser.add_argument("--quick", action="store_true", help="see that everything works: short, one turn")
    parser.add_argument("--vllm-python", type=Path, default=HERE.parent / ".venv-vllm" / "bin" / "python")
    arguments = parser.parse_args()
    allowed, default = (MODELS, ["smollm2", "small"]) if arguments.device == "cpu" else (SHAPES, list(SHAPES))
    arguments.models = arguments.models or default
    arguments.precision = arguments.precision or ("float32" if arguments.device == "cpu" else "bfloat16")
    if outside := [name for name in arguments.models if name not in allowed]:
        parser.error(f"{', '.join(outside)}: with --device {arguments.device} there are {', '.join(allowed)}")
    if arguments.quick:
        arguments.repeats, arguments.new_tokens, arguments.requests = 1, 16, 2
        arguments.batch = arguments.batch or [8]
    if hasattr(os, "sched_setaffinity"):  # inherited: the same cores for everybody
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    return arguments


def main() -> int:
    """The exit code is 1 where the GPU had too little memory for a model."""
    arguments = parse()
    print(f"command: python {shlex.join(sys.argv)}")
    print(f"versions: {versions()}")
    for name, value in describe().lines().items():
        print(f"{name}: {value}")
    print(f"task: {arguments.task}")
    print(f"threads: {arguments.threads} each, seed: {SEED}, turns: {arguments.repeats}", flush=True)
    if arguments.device == "cuda":
        from contenders.gpu import measure_all

        measured = measure_all(arguments)
    else:
        with tempfile.TemporaryDirectory() as scratch:
            cases = [
                measure(name, batch, arguments, Path(scratch))
                for name in arguments.models
                for batch in arguments.batch or CASES[name]
            ]
        for case in cases:
            show(case)
        targets(cases)
        measured = [as_json(case) for case in cases]
    if arguments.json is not None:
        hardware = describe().to_dict()
        record = {"command": sys.argv, "versions": str(versions()), "hardware": hardware, "cases": measured}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return int(arguments.device == "cuda" and {one["model"] for one in measured} != {*arguments.models})


if __name__ == "__main__":
    sys.exit(main())
