"""LlamaRL's Table 3 by the cost model: predicted step times beside the paper's, and why a row is off.

    python benchmarks/llamarl_table3.py [--sensitivity]

LlamaRL (arXiv:2505.24034), section 8.2: step seconds of 8B, 70B and 405B on 256 to 1024 H100 GPUs, co-located and
synchronous against asynchronous, n = 4 completions x 512 prompts. The paper does not say how long completions are, nor
what its engine and its scoring cost the host. Those four numbers are fitted, once for all rows, by least squares of log
seconds on the rows of 8B and 70B; the rows of 405B are predicted. Everything else is `plan/hardware.py`, NCCL's
constants (there, too) and the defaults of `plan.layouts.Efficiency`; microbatches, not given either, are as
few as fit in memory.

A baseline generates its batch to the end, then trains; keys, values, gradients and activations have the same memory in
turn. The others keep every decode slot full (their partial rollouts), and a step takes as long as the slower side.

--sensitivity fits again with each fixed number moved, one at a time.
"""

from __future__ import annotations

import argparse
import functools
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from slipstream.core.fields import Precision
from slipstream.plan.cost_model import CostModel
from slipstream.plan.hardware import cluster
from slipstream.plan.layouts import (
    AsynchronousPlan,
    Efficiency,
    GeneratorLayout,
    Parts,
    StepTime,
    SynchronousPlan,
    TrainerLayout,
    Workload,
)
from slipstream.plan.lengths import LengthSample, lengths_with_tail
from slipstream.plan.question import ARCHITECTURES

GROUPS, GROUP_SIZE = 512, 4
GPUS_PER_NODE = 8
PROMPT_TOKENS = 150  # a problem of MATH in a chat template; the paper says nothing
LONGEST = 16384  # nothing is cut: the paper names no limit
TOLERANCE = 0.3


@dataclass(frozen=True)
class Row:
    """One of Table 3's. `trainer`, `generator`: GPUs and model-parallel size; `slots`: decode concurrency of a replica.

    The concurrency of the baselines is printed as 16 x 16 (dp size) where 256 GPUs at mp 8 are 32 replicas; theirs is
    taken to be 16 on each. Trainer and generator GPUs of the fp8 row of 70B are printed the other way round
    (docs/algorithms.md, "Misprints").
    """

    model: str
    trainer: tuple[int, int]
    generator: tuple[int, int]
    slots: int
    paper_s: float
    precision: Precision = "bfloat16"
    is_baseline: bool = False

    @property
    def name(self) -> str:
        (train, _), (generate, m_g) = self.trainer, self.generator
        gpus = f"{train}" if self.is_baseline else f"{train}+{generate}"
        kind = "sync" if self.is_baseline else "async"
        return f"{self.model} {kind} {gpus}, generator mp {m_g}{' fp8' if self.precision == 'fp8' else ''}"

    @property
    def is_fitted(self) -> bool:
        return self.model != "405B"


def baseline(model: str, gpus: int, degree: int, slots: int, paper_s: float) -> Row:
    return Row(model, (gpus, degree), (gpus, degree), slots, paper_s, is_baseline=True)


ROWS = (
    baseline("8B", 256, 8, 16, 22.45),
    baseline("70B", 256, 8, 16, 82.32),
    baseline("405B", 1024, 64, 32, 635.8),
    Row("8B", (128, 8), (128, 8), 64, 12.22),
    Row("8B", (128, 8), (128, 1), 32, 8.90),
    Row("70B", (128, 8), (128, 8), 64, 26.19),
    Row("70B", (120, 8), (136, 4), 16, 20.67, "fp8"),
    Row("405B", (512, 32), (512, 32), 32, 240.8),
    Row("405B", (512, 16), (512, 16), 48, 100.5),
    Row("405B", (512, 16), (512, 8), 32, 59.5, "fp8"),
)
SPEEDUPS = {"8B": 2.52, "70B": 3.98, "405B": 10.7}
"""As printed: a baseline over the model's last row."""


@dataclass(frozen=True)
class Fitted:
    """What the paper does not say; the same for every row."""

    mean: float  # tokens of a completion
    tail: float  # their 99th percentile over the mean; lengths are lognormal
    sequence_s: float  # host and sampler, per completion and decode step
    serial_s: float  # of a training step, in which scoring beside the trainer keeps its GPUs waiting

    def told(self) -> str:
        return (
            f"mean completion {self.mean:.0f} tokens, 99th percentile {self.tail:.2f} means, host and sampler "
            f"{self.sequence_s * 1e6:.0f} us per completion and decode step, scoring {self.serial_s:.1f} s per step"
        )


@dataclass(frozen=True)
class Prediction:
    step: StepTime
    trainer: TrainerLayout
    decode: Parts
    """Of one decode step with all slots taken."""

    @property
    def seconds(self) -> float:
        return self.step.seconds


@functools.lru_cache(maxsize=4096)
def lengths(mean: float, tail: float) -> LengthSample:
    return lengths_with_tail(PROMPT_TOKENS, mean, tail * mean, LONGEST, points=GROUPS * GROUP_SIZE)


def divided(degree: int, *, stages: bool) -> dict[str, int]:
    """A model-parallel size as tensor parallelism, or with `stages` that of a node, in as many stages as it takes."""
    tensor_parallel = min(degree, GPUS_PER_NODE) if stages else degree
    return {"tensor_parallel": tensor_parallel, "pipeline_parallel": degree // tensor_parallel}


class OfThePaper(CostModel):
    """Its engine is not Slipstream's, whose kernels are counted: 10 of a layer and 5 besides are taken for it."""

    def kernels(self, layout: GeneratorLayout) -> tuple[int, int]:
        return 10, 5


def predict(
    row: Row,
    fitted: Fitted,
    efficiency: Efficiency | None = None,
    *,
    deals_by_length: bool = False,
    stages: tuple[bool, bool] = (False, False),
) -> Prediction:
    """What the cost model says of `row`, with as few microbatches as fit in memory.

    The paper does not say that rollouts are dealt to ranks by length; Slipstream deals them so. `stages`: whether
    model-parallel sizes above a node are read as pipeline stages, of the trainer and of the generator.
    """
    efficiency = replace(efficiency or Efficiency(), sequence_s=fitted.sequence_s, serial_s=fitted.serial_s)
    sampled = lengths(fitted.mean, fitted.tail)
    workload = Workload(groups=GROUPS, group_size=GROUP_SIZE, lengths=sampled, shares_prompts=False)
    workload = replace(workload, deals_by_length=deals_by_length)
    gpus = row.trainer[0] if row.is_baseline else row.trainer[0] + row.generator[0]
    costs = OfThePaper(ARCHITECTURES[f"llama-3.1-{row.model.lower()}"], cluster("H100", gpus), workload, efficiency)
    place = divided(row.generator[1], stages=stages[1])
    generator = GeneratorLayout(devices=row.generator[0], **place, slots=row.slots, precision=row.precision)

    def plan(trainer: TrainerLayout) -> SynchronousPlan:
        return SynchronousPlan(trainer=trainer, generator=generator, frees="gradients_and_activations")

    def fits(trainer: TrainerLayout) -> bool:
        if row.is_baseline:
            return costs.fits(*costs.colocated_memory(plan(trainer)).values())
        return costs.fits(costs.train_memory(trainer, served=row.precision))

    devices, degree = row.trainer
    mine = GROUPS * GROUP_SIZE * degree // devices
    layouts = (
        TrainerLayout(
            devices=devices,
            **divided(degree, stages=stages[0]),
            microbatch=math.ceil(mine / count),
            head_precision="bfloat16",
        )
        for count in range(1, mine + 1)
    )
    fitting = list(filter(fits, layouts)) if stages[0] else [next(filter(fits, layouts))]
    # A pipeline waits less with more microbatches, so the fewest are not the best there.
    trainer = min(fitting, key=lambda one: costs.train_step(one).total)
    if row.is_baseline:
        step = costs.synchronous(plan(trainer))
    else:
        step = costs.asynchronous(AsynchronousPlan(trainer=trainer, generator=generator))
    return Prediction(step, trainer, costs.decode_step(generator, live=row.slots, context=costs.context))


def fit(efficiency: Efficiency | None = None) -> tuple[Fitted, float]:
    """Least squares of log(predicted / paper) over the rows of 8B and 70B; and the root mean square that is left.

    Levenberg-Marquardt in the logarithms of the four numbers, from two starts; the same numbers on every machine.
    """
    rows = [row for row in ROWS if row.is_fitted]

    def residuals(point: np.ndarray) -> np.ndarray:
        fitted = Fitted(*np.exp(point).tolist())
        return np.array([np.log(predict(row, fitted, efficiency).seconds / row.paper_s) for row in rows])

    lowest, highest = np.log([50, 1.05, 1e-6, 0.1]), np.log([4000, 12.0, 1e-3, 20.0])
    found = []
    for start in ((450.0, 4.0, 1e-4, 4.0), (900.0, 2.0, 3e-5, 7.0)):
        point, damping = np.log(start), 1e-2
        left = residuals(point)
        for _ in range(40):
            slopes = np.stack([(residuals(point + 0.02 * unit) - left) / 0.02 for unit in np.eye(4)], axis=1)
            system = slopes.T @ slopes + damping * np.eye(4)
            tried = np.clip(point - np.linalg.solve(system, slopes.T @ left), lowest, highest)
            now = residuals(tried)
            if now @ now < left @ left - 1e-7:
                point, left, damping = tried, now, damping / 3
            elif damping < 1e3:
                damping *= 4
            else:
                break
        found.append((float(left @ left), point))
    squares, point = min(found, key=lambda one: one[0])
    return Fitted(*np.exp(point).tolist()), float(np.sqrt(squares / len(rows)))


def solve(seconds: Callable[[float], float], wanted: float, low: float, high: float) -> float | None:
    """Where the rising function `seconds` is `wanted`; None outside the range."""
    if not seconds(low) <= wanted <= seconds(high):
        return None
    for _ in range(30):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if seconds(middle) < wanted else (low, middle)
    return (low * high) ** 0.5


def exact_mean(row: Row, fitted: Fitted) -> float | None:
    """The mean completion at which the row would be exact, all else as fitted."""
    return solve(lambda mean: predict(row, replace(fitted, mean=mean)).seconds, row.paper_s, 30, 3000)


def exact_collectives(row: Row, fitted: Fitted) -> float | None:
    """By how much slower than now collectives would have to be for the row to be exact."""
    now = Efficiency()
    factor = solve(
        lambda factor: predict(row, fitted, replace(now, collective=factor * now.collective)).seconds,
        row.paper_s,
        0.05,
        50,
    )
    return factor


def speedups(predicted: dict[Row, float]) -> dict[str, float]:
    found = {}
    for model in SPEEDUPS:
        rows = [row for row in ROWS if row.model == model]
        found[model] = predicted[rows[0]] / predicted[rows[-1]]
    return found


def parts(of: Parts) -> str:
    """The causes that make at least 3% of a side, largest first."""
    kept = [item for item in of.parts.items() if item[1] >= 0.03 * of.total]
    return ", ".join(f"{cause} {seconds:.1f}" for cause, seconds in sorted(kept, key=lambda item: -item[1]))


def table(lines: Sequence[Sequence[str]]) -> str:
    header, *rows = lines
    body = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in body)


def off(predicted: float, paper: float) -> str:
    return f"{100 * (predicted / paper - 1):+.0f}%"


def report() -> None:
    fitted, left = fit()
    predictions = {row: predict(row, fitted) for row in ROWS}
    print(f"fitted on the six rows of 8B and 70B: {fitted.told()}; left: {100 * left:.0f}% (root mean square)\n")
    lines = [["row", "paper s", "predicted s", "off", "trainer s", "generator s", "microbatch"]]
    for row, prediction in predictions.items():
        sides = prediction.step.sides
        lines.append(
            [
                row.name,
                f"{row.paper_s:g}",
                f"{prediction.seconds:.1f}",
                off(prediction.seconds, row.paper_s) + ("" if row.is_fitted else " (not fitted)"),
                f"{sides['trainer'].total:.1f}",
                f"{sides['generator'].total:.1f}",
                f"{prediction.trainer.microbatch:g}",
            ]
        )
    print(table(lines))
    print()
    lines = [["speed-up", "paper", "predicted", "off"]]
    for model, speedup in speedups({row: one.seconds for row, one in predictions.items()}).items():
        lines.append([model, f"{SPEEDUPS[model]:g}", f"{speedup:.2f}", off(speedup, SPEEDUPS[model])])
    print(table(lines))
    balanced = {row: predict(row, fitted, deals_by_length=True) for row in ROWS}
    told = ", ".join(f"{row.name} {balanced[row].seconds:.1f} s" for row in ROWS if not row.is_fitted)
    gains = speedups({row: one.seconds for row, one in balanced.items()})
    named = ", ".join(f"{name} {gain:.2f}" for name, gain in gains.items())
    print(f"\nif rollouts were dealt to ranks by length: {told}; speed-ups {named}")
    report_stages(fitted, predictions)
    print("\nwhat the seconds are, and what would make each row exact:\n")
    for row, prediction in predictions.items():
        sides = prediction.step.sides
        step_ms = Parts(prediction.decode.times(1e3).parts)
        print(f"{row.name}: {off(prediction.seconds, row.paper_s)}")
        print(f"    trainer     {parts(sides['trainer'])}")
        print(f"    generator   {parts(sides['generator'])}")
        print(f"    decode step {step_ms.total:.1f} ms: {parts(step_ms)}")
        mean, slower = exact_mean(row, fitted), exact_collectives(row, fitted)
        ways = [f"a mean of {mean:.0f} tokens" if mean else "no mean length"]
        ways.append(f"collectives {slower:.1f} times as slow" if slower else "no speed of collectives")
        print(f"    exact with  {', or '.join(ways)}")


def report_stages(fitted: Fitted, flat: dict[Row, Prediction]) -> None:
    """Model-parallel sizes above a node, read as stages of one node each: of generators alone, and of both sides."""
    lines = [["row", "paper s", "tensor parallel", "off", "generator tp x pp", "s", "off", "both tp x pp", "s", "off"]]
    ways = {which: {row: predict(row, fitted, stages=which) for row in ROWS} for which in ((False, True), (True, True))}
    for row in ROWS:
        if row.is_fitted:
            continue
        cells = [row.name, f"{row.paper_s:g}", f"{flat[row].seconds:.1f}", off(flat[row].seconds, row.paper_s)]
        for predictions in ways.values():
            seconds = predictions[row].seconds
            degrees = divided(row.generator[1], stages=True).values()
            cells += [" x ".join(map(str, degrees)), f"{seconds:.1f}", off(seconds, row.paper_s)]
        lines.append(cells)
    print("\nmodel-parallel sizes of more than a node, read as pipeline stages:\n")
    print(table(lines))
    told = []
    for which, predictions in {
        "tensor parallel": flat,
        "generator": ways[False, True],
        "both": ways[True, True],
    }.items():
        gains = speedups({row: one.seconds for row, one in predictions.items()})
        told.append(f"{which} " + ", ".join(f"{name} {gain:.2f}" for name, gain in gains.items()))
    print(f"\nspeed-ups: {'; '.join(told)}")
    for row, one in ways[True, True].items():
        if not row.is_fitted:
            step_ms, trainer = Parts(one.decode.times(1e3).parts), one.step.sides["trainer"]
            print(f"{row.name}, both: decode step {step_ms.total:.1f} ms: {parts(step_ms)}; trainer {parts(trainer)}")


FIXED: tuple[tuple[str, float], ...] = (
    ("matmul", 0.5),
    ("matmul", 0.75),
    ("memory", 0.75),
    ("memory", 0.95),
    ("kernel_s", 1.5e-6),
    ("kernel_s", 3.5e-6),
    ("collective", 1.0),
    ("collective", 2.0),
    ("host_task_s", 0.0),
    ("host_task_s", 52e-6),
    ("step_s", 0.0),
    ("step_s", 2e-3),
)


def sensitivity() -> None:
    lines = [["fixed number", "mean", "tail", "us a completion", "scoring s", "left", *SPEEDUPS]]
    for name, value in (("", 0.0), *FIXED):
        efficiency = replace(Efficiency(), **{name: value}) if name else Efficiency()
        fitted, left = fit(efficiency)
        gains = speedups({row: predict(row, fitted, efficiency).seconds for row in ROWS})
        lines.append(
            [
                f"{name} {value:g}" if name else "as they are",
                f"{fitted.mean:.0f}",
                f"{fitted.tail:.2f}",
                f"{fitted.sequence_s * 1e6:.0f}",
                f"{fitted.serial_s:.1f}",
                f"{100 * left:.0f}%",
                *(f"{gain:.2f} ({off(gain, SPEEDUPS[model])})" for model, gain in gains.items()),
            ]
        )
    print(table(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sensitivity", action="store_true", help="fit again with each fixed number moved")
    arguments = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    print("command ", " ".join(["python", *sys.argv]))
    print("commit  ", commit.strip() or "unknown")
    print("constants", Efficiency(), "\n")
    if arguments.sensitivity:
        sensitivity()
    else:
        report()


if __name__ == "__main__":
    main()
