"""Seconds per sample against batch size, of our trainer and our engine: LlamaRL's Figure 5 on this machine.

    python benchmarks/eta_curves.py --json eta.json --svg docs/images/eta_curves.svg
    python benchmarks/eta_curves.py --models smollm2 --device cuda [--precision bfloat16] --json eta.json

*eta_t(b)*: seconds of forward and backward per sample when b samples are a microbatch, out of whole training steps
(`trainer.step.train_on_batch`); the optimizer's update, which is paid once however many samples there are, is timed
apart. *eta_g(b)*: seconds per completion when the engine decodes b completions at once and more are waiting, prefill
included; measured while all b places are taken, from a start at staggered lengths, so that none of them begins or ends
with the others. Samples have prompts of `--prompt-tokens` and completions of `--completion-tokens` of their own; no two
share a prompt. Weights are random unless models/ has a checkpoint: time does not depend on them.

On a CPU every curve is measured on 1, 2, 4 ... cores, on CUDA on one GPU. Then both sides at once, for each division of
the cores in two: how much they slow each other. Every (model, side, cores) is a process of its own, whose threads are
set before torch is imported, as in a run; they take turns, one at a time.

Prints the tables, says where eta does not fall (assumption 7.1: it always does), writes the file that `slipstream plan
--measured` takes (`--json`), and the two panels (`--svg`). A measurement in which others took more than a twentieth of
the cores is made again, and the quietest one counts; how loud that was is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
from contenders.models import MODELS, SHAPES
from contenders.models import Model as ShapedModel

from slipstream.controller.placement import num_cores, thread_environment
from slipstream.plan.measured import (
    FORMAT,
    EtaCurve,
    MeasuredCurves,
    MeasuredModel,
    Point,
    Side,
    Together,
)

SEED = 0
LEAST_SAMPLES = 8  # of a timed training step, in several microbatches if need be
START_S, ANSWER_S = 300.0, 900.0
TOGETHER_S = 6.0  # both sides run at once for so long
LEAST_S = 0.2  # of a measurement, in which the kernel's clock ticks often enough to tell who else was at work
QUIET = 0.05  # share of all cores that others may take
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Lengths:
    """Tokens of a sample."""

    prompt: int
    completion: int

    @property
    def rows(self) -> int:
        """That the trainer reads: all but the last token."""
        return self.prompt + self.completion - 1


CASES = {  # model -> lengths and batches where the command line does not say
    "quickstart": (Lengths(5, 5), (1, 2, 4, 8, 16, 32, 64, 128, 256)),
    "smollm2": (Lengths(32, 32), (1, 2, 4, 8, 16, 32, 64)),
}
GPU_CASE = (Lengths(128, 256), (1, 2, 4, 8, 16, 32, 64, 128, 256))


@dataclass(frozen=True)
class Job:
    """What a process measures: one side of one model on so many devices."""

    side: Side
    folder: str
    device: str
    devices: int
    precision: str
    batches: tuple[int, ...]
    lengths: Lengths


# The processes that measure


def serve(job: Job) -> None:
    """Answer each line `<batch> <least seconds>` of standard input with [seconds per sample, update seconds]."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    timed = {"trainer": trainer_under_test, "generator": engine_under_test}[job.side](job)

    def answer(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    timed(job.batches[0])
    answer("ready")
    for line in sys.stdin:
        batch, least_s = line.split()
        until = time.perf_counter() + float(least_s)
        seen = [timed(int(batch))]
        while time.perf_counter() < until:
            seen.append(timed(int(batch)))
        answer([statistics.median(values) for values in zip(*seen, strict=True)])


def trainer_under_test(job: Job) -> Callable[[int], tuple[float, float]]:
    """batch -> seconds per sample of forward and backward, seconds of an update."""
    import numpy as np
    import torch
    import torch.distributed as dist

    from slipstream.batching import collate
    from slipstream.core.rank_group import RankGroup
    from slipstream.core.recipes import resolve
    from slipstream.core.types import Completion, Group, Prompt, Rollout, Segment, VersionSpan
    from slipstream.trainer.policy import Policy
    from slipstream.trainer.step import train_on_batch

    torch.set_num_threads(job.devices if job.device == "cpu" else 1)
    ranks = RankGroup.alone()
    if job.device == "cuda":
        store = dist.FileStore(str(Path(job.folder).with_suffix(".store")), 1)
        dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
        assert dist.group.WORLD is not None
        ranks = RankGroup.over(dist.group.WORLD)
    lengths = job.lengths

    def config_for(batch: int) -> Any:
        return resolve(
            {
                "groups_per_step": max(batch, LEAST_SAMPLES),
                "completions_per_group": 1,
                "model": {"path": job.folder},
                "prompts": {"tasks": [{"name": "chain_sum"}], "max_prompt_tokens": lengths.prompt},
                "generator": {"max_new_tokens": lengths.completion},
                "loss": {"name": "aipo", "advantages": "reward"},
                "trainer": {
                    "device": job.device,
                    "precision": job.precision,
                    "microbatch_tokens": batch * lengths.rows,
                    "optimizer": {"lr": 1e-9},
                },
            }
        )

    policy = Policy(config_for(1), ranks, *ranks.split(1))
    vocabulary = policy.model.config.vocab_size
    updates_s: list[float] = []
    update = policy.optimizer.step

    def timed_update(*, scale: float = 1.0) -> float:
        synchronize(job.device)
        started_s = time.perf_counter()
        norm = update(scale=scale)
        synchronize(job.device)
        updates_s.append(time.perf_counter() - started_s)
        return norm

    vars(policy.optimizer)["step"] = timed_update

    def sample(ordinal: int, rng: np.random.Generator) -> Group:
        def tokens(count: int) -> np.ndarray:
            return rng.integers(0, vocabulary, count).astype(np.int32)

        segment = Segment(
            tokens=tokens(lengths.completion),
            behaviour_logprobs=np.full(lengths.completion, -1.0, np.float32),
            version_spans=(VersionSpan(start=0, version=0),),
        )
        completion = Completion(
            ordinal=ordinal,
            sample=0,
            prompt=Prompt(prompt_id=str(ordinal), text="", tokens=tokens(lengths.prompt), task=""),
            segments=(segment,),
            text="",
            finish_reason="stop",
        )
        return Group(ordinal=ordinal, rollouts=(Rollout(completion=completion, reward=float(ordinal % 2)),))

    def timed(batch: int) -> tuple[float, float]:
        config = config_for(batch)
        rng = np.random.default_rng(SEED)
        groups = [sample(ordinal, rng) for ordinal in range(config.groups_per_step)]
        updates_s.clear()
        synchronize(job.device)
        started_s = time.perf_counter()
        metrics = train_on_batch(
            policy.model, policy.optimizer, groups, config=config, step=0, batching=collate, ranks=ranks
        )
        synchronize(job.device)
        wall_s = time.perf_counter() - started_s
        assert metrics["num_microbatches"] == -(-config.groups_per_step // batch), "microbatches are not of the batch"
        return (wall_s - sum(updates_s)) / config.groups_per_step, sum(updates_s)

    return timed


def engine_under_test(job: Job) -> Callable[[int], tuple[float, float]]:
    """batch -> seconds per completion, 0."""
    import itertools

    import numpy as np
    import torch
    from contenders.ours import new_engine

    from slipstream.generator.native import move_but_linear
    from slipstream.generator.requests import Request
    from slipstream.models.hf import load_model

    torch.set_num_threads(job.devices if job.device == "cpu" else 1)
    lengths = job.lengths
    model = load_model(Path(job.folder), max_positions=lengths.prompt + lengths.completion)
    if job.device == "cuda":
        move_but_linear(model, torch.device("cuda"))
    ordinals = itertools.count()
    rng = np.random.default_rng(SEED)
    engines: dict[int, Any] = {}
    weights: list[Any] = []

    def engine_of(batch: int) -> Any:
        if batch not in engines:  # they share the weights, which are made once
            if not weights:
                engine, served = new_engine(
                    model, precision=job.precision, num_slots=batch, max_len=lengths.prompt + lengths.completion
                )
                weights.append(served)
            else:
                from slipstream.generator.native import native_engine

                engine = native_engine(
                    model, num_slots=batch, max_len=lengths.prompt + lengths.completion, seed=SEED, stop_token_ids=[]
                )
            engines.clear()
            engines[batch] = engine
        return engines[batch]

    def request(max_new_tokens: int) -> Request:
        prompt = rng.integers(0, model.config.vocab_size, lengths.prompt).astype(np.int32)
        return Request(ordinal=next(ordinals), sample=0, prompt_tokens=prompt, max_new_tokens=max_new_tokens)

    def timed(batch: int) -> tuple[float, float]:
        engine = engine_of(batch)
        staggered = [-(-lengths.completion * (place + 1) // batch) for place in range(batch)]
        more = [lengths.completion] * max(2 * batch, LEAST_SAMPLES)
        engine.submit([request(length) for length in [*staggered, *more]])
        while engine.num_waiting > len(more) or engine.num_live < batch:
            engine.step()
        synchronize(job.device)
        started_s, before = time.perf_counter(), engine.stats.generated_tokens
        while engine.num_waiting:
            engine.step()
        synchronize(job.device)
        wall_s, tokens = time.perf_counter() - started_s, engine.stats.generated_tokens - before
        while not engine.is_idle:
            engine.step()
        return wall_s * lengths.completion / tokens, 0.0

    return timed


def synchronize(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


# The process that asks them


class Process:
    """One side under test, in a process of its own."""

    def __init__(self, job: Job, log: Path) -> None:
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, __file__, "--job", json.dumps(asdict(job))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | thread_environment(job.devices if job.device == "cpu" else 1),
            )
        self._receive(START_S)

    def ask(self, batch: int, least_s: float = 0.0) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{batch} {least_s}\n")
        self._process.stdin.flush()

    def answer(self) -> tuple[float, float]:
        seconds, update_s = self._receive(ANSWER_S)
        return seconds, update_s

    def measured(self, batch: int, retries: int) -> tuple[float, float, float]:
        """Seconds per sample, of an update, and the share of all cores that others took: again while that is much."""
        found: list[tuple[float, float, float]] = []
        while len(found) <= retries:
            started_s, before_s = time.perf_counter(), busy_s() - self._cpu_s()
            self.ask(batch, LEAST_S)
            seconds, update_s = self.answer()
            wall_s, others_s = time.perf_counter() - started_s, busy_s() - self._cpu_s() - before_s
            found.append((max(0.0, others_s / wall_s / (os.cpu_count() or 1)), seconds, update_s))
            if found[-1][0] <= QUIET:
                break
        share, seconds, update_s = min(found)
        return seconds, update_s, share

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _cpu_s(self) -> float:
        """Of the process, user and system."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S

    def _receive(self, patience_s: float) -> Any:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(patience_s):
                raise SystemExit(f"no answer within {patience_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("it died: " + self._log.read_text(errors="replace")[-1500:])
        return json.loads(line)


def busy_s() -> float:
    """Seconds that all cores of the machine have worked, for whomever."""
    user, nice, system, _idle, _waiting, interrupts, soft, steal = map(
        int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    )
    return (user + nice + system + interrupts + soft + steal) / TICKS_PER_S


def curve_of(process: Process, job: Job, arguments: argparse.Namespace) -> tuple[EtaCurve, float]:
    """Every batch in every turn, the first of them rotating, so that a change of the machine's mood meets all.

    And the largest share of the cores that others had in a measurement that counts.
    """
    disturbed = 0.0
    seen: dict[int, list[float]] = {batch: [] for batch in job.batches}
    updates_s: list[float] = []
    for turn in range(arguments.repeats):
        shift = turn % len(job.batches)
        for batch in job.batches[shift:] + job.batches[:shift]:
            seconds, update_s, share = process.measured(batch, arguments.retries)
            disturbed = max(disturbed, share)
            seen[batch].append(seconds)
            updates_s.append(update_s)
    points = tuple(
        Point(batch=batch, seconds=statistics.median(taken), low=min(taken), high=max(taken))
        for batch, taken in seen.items()
    )
    curve = EtaCurve(
        side=job.side,
        devices=job.devices,
        precision=job.precision,
        points=points,
        update_s=statistics.median(updates_s),
    )
    return curve, disturbed


def together_of(jobs: Sequence[Job], curves: Sequence[EtaCurve], scratch: Path) -> Together:
    """Both sides at once at their largest batches: how much longer each takes than alone."""
    processes = [Process(job, scratch / f"{job.side}-together.log") for job in jobs]
    try:
        for process, job in zip(processes, jobs, strict=True):
            process.ask(job.batches[-1], TOGETHER_S)
        seconds = [process.answer()[0] for process in processes]
    finally:
        for process in processes:
            process.close()
    trainer, generator = (taken / curve.points[-1].seconds for taken, curve in zip(seconds, curves, strict=True))
    return Together(
        trainer_devices=jobs[0].devices, generator_devices=jobs[1].devices, trainer=trainer, generator=generator
    )


def model_of(name: str) -> ShapedModel:
    if name == "quickstart":
        from slipstream.core.recipes import resolve
        from slipstream.models.build import build_tokenizer
        from slipstream.models.config import new_config

        model = resolve("quickstart").model
        return ShapedModel(new_config(model, vocab_size=len(build_tokenizer(model))))
    return MODELS[name] if name in MODELS else ShapedModel(SHAPES[name])


def folder_of(model: ShapedModel, scratch: Path, name: str) -> Path:
    """A checkpoint with a tokenizer: the trainer reads both from one folder."""
    from slipstream.models.tokenizer import char_tokenizer

    folder, _ = model.folder(scratch, name)
    if folder.is_relative_to(scratch):
        char_tokenizer().save_pretrained(folder)
    return folder


def measure(name: str, arguments: argparse.Namespace, scratch: Path) -> MeasuredModel:
    """All curves of one model."""
    lengths, batches = CASES.get(name, GPU_CASE)
    lengths = Lengths(arguments.prompt_tokens or lengths.prompt, arguments.completion_tokens or lengths.completion)
    batches = tuple(arguments.batches or batches)
    model = model_of(name)
    folder = folder_of(model, scratch, name)
    devices = [1]
    while arguments.device == "cpu" and 2 * devices[-1] <= num_cores():
        devices.append(2 * devices[-1])

    def job(side: Side, count: int) -> Job:
        precision = arguments.precision if side == "generator" else arguments.trainer_precision
        return Job(side, str(folder), arguments.device, count, precision, batches, lengths)

    curves: dict[tuple[Side, int], EtaCurve] = {}
    sides: tuple[Side, ...] = ("trainer", "generator")
    for side in sides:
        for count in devices:
            one = job(side, count)
            process = Process(one, scratch / f"{name}-{side}-{count}.log")
            try:
                curves[side, count], disturbed = curve_of(process, one, arguments)
            finally:
                process.close()
            show(name, one, curves[side, count], disturbed)
    together = []
    for count in devices if arguments.device == "cpu" else ():
        rest = num_cores() - count
        if rest in devices:
            pair = [job("trainer", count), job("generator", rest)]
            both = together_of(pair, [curves["trainer", count], curves["generator", rest]], scratch)
            together.append(both)
            print(
                f"\n{name}, trainer on {count} beside the engine on {rest}: the trainer takes {both.trainer:.2f} times "
                f"as long as alone, the engine {both.generator:.2f} times",
                flush=True,
            )
    return MeasuredModel(
        name=name,
        shape=msgspec.json.decode(msgspec.json.encode(asdict(model.config))),
        num_params=num_params(model),
        prompt_tokens=lengths.prompt,
        completion_tokens=lengths.completion,
        curves=tuple(curves.values()),
        together=tuple(together),
    )


def num_params(model: ShapedModel) -> int:
    import torch

    from slipstream.models.transformer import Transformer

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Transformer(model.config).parameters())


def show(name: str, job: Job, curve: EtaCurve, disturbed: float) -> None:
    """One curve as a table, and where it does not fall."""
    from eta_figure import rises

    unit = "core" if job.device == "cpu" else "GPU"
    print(
        f"\n{name}, {job.side} on {job.devices} {unit}{'s' * (job.devices > 1)}, {job.precision}: samples of "
        f"{job.lengths.prompt} + {job.lengths.completion} tokens"
        + (f"; an update takes {1e3 * curve.update_s:.2f} ms" if job.side == "trainer" else "")
        + f"; others took {disturbed:.0%} of the cores at most\n"
    )
    what = "microbatch, samples" if job.side == "trainer" else "completions decoded at once"
    print(f"| {what} | ms per sample, median | range | of the first |\n|---|---|---|---|")
    for point in curve.points:
        print(
            f"| {point.batch} | {1e3 * point.seconds:.3g} | {1e3 * point.low:.3g} .. {1e3 * point.high:.3g} "
            f"| {point.seconds / curve.points[0].seconds:.2f} |"
        )
    for before, after in rises(curve.points):
        print(
            f"\nAssumption 7.1 fails from {before.batch} to {after.batch}: {1e3 * before.seconds:.3g} -> "
            f"{1e3 * after.seconds:.3g} ms, beyond the range of the turns"
        )
    sys.stdout.flush()


# The picture


def picture(measured: MeasuredCurves) -> str:
    """Both panels for every model, as one SVG file."""
    from eta_figure import eta_figure

    return eta_figure(measured)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=sorted({*CASES, *MODELS, *SHAPES}))
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--precision", default="float32", help="of the engine's weights")
    parser.add_argument("--trainer-precision", default="float32")
    parser.add_argument("--batches", type=int, nargs="+")
    parser.add_argument("--prompt-tokens", type=int)
    parser.add_argument("--completion-tokens", type=int)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--retries", type=int, default=3, help="of a measurement in which others were at work")
    parser.add_argument("--json", type=Path, help="file for `slipstream plan --measured`")
    parser.add_argument("--svg", type=Path, help="file for the panels")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job is not None:
        fields = json.loads(arguments.job)
        lengths, batches = Lengths(**fields.pop("lengths")), tuple(fields.pop("batches"))
        return serve(Job(**fields, lengths=lengths, batches=batches))

    import torch

    from slipstream.observe.hardware import describe
    from slipstream.observe.summary import versions

    if arguments.device is None:
        arguments.device = "cuda" if torch.cuda.is_available() else "cpu"
    command = f"python {shlex.join(sys.argv)}"
    told = versions()
    lines = describe().lines()
    print(f"command: {command}\nversions: {told}")
    for name, value in lines.items():
        print(f"{name}: {value}")
    print(f"seed: {SEED}, turns: {arguments.repeats}, load {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        models = tuple(measure(name, arguments, Path(scratch)) for name in arguments.models)
    measured = MeasuredCurves(
        format=FORMAT,
        command=command,
        commit=str(told.commit),
        device=arguments.device,
        num_devices=num_cores() if arguments.device == "cpu" else 1,
        hardware=lines,
        models=models,
    )
    if arguments.json is not None:
        from eta_figure import write_measured

        write_measured(measured, arguments.json)
        print(f"\ncurves: {arguments.json}")
    if arguments.svg is not None:
        arguments.svg.parent.mkdir(parents=True, exist_ok=True)
        arguments.svg.write_text(picture(measured), encoding="utf-8")
        print(f"panels: {arguments.svg}")


if __name__ == "__main__":
    main()
