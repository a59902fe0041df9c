"""Wall time of a training step: Slipstream synchronous, Slipstream asynchronous, and TRL's `GRPOTrainer`, in turn.

    make bench                                   # or, with both environments installed:
    python benchmarks/end_to_end.py [--cases short long] [--rounds 3] [--steps 20]

All sides train the same 3.4 M-parameter Llama-shaped random checkpoint (fp32) on the same prompts with the same reward,
8 prompts x 8 completions per step, one optimizer update. `short`: exactly 16 tokens each (no end token before).
`long`: up to 128 tokens from a vocabulary of 72, so lengths are geometric. A learning rate of 1e-6 keeps the policy,
and with it the lengths, where they are.

Each side runs once per round, the order rotating. A run's step time is the mean over its steady steps (asynchronous
steps alternate between short and long, so their median would flatter or hide); the table has the median over rounds
and their range. The floor is the arithmetic of a step, (2 + 6) FLOP per parameter and token, at the matrix-multiply
rate that this machine reaches, the best of one second before every round. Below the table: where a step of ours goes,
in ms per step and process, from the run's own timeline. Valid on an idle machine only: TRL alone varied from 0.29 to
8.8 s on `short` while other programs computed. Each line ends with the load average.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import statistics
import string
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from trl_call import INSTALL, TRL_PYTHON, TrlFailed, call_trl, trl_version

import slipstream
from slipstream.core.run_log import read_metrics
from slipstream.core.sections import ModelConfig
from slipstream.models.hf import save_model
from slipstream.models.initialise import new_model
from slipstream.models.linear import linear
from slipstream.models.tokenizer import char_tokenizer
from slipstream.observe.hardware import describe
from slipstream.observe.states import in_words
from slipstream.observe.summary import versions
from slipstream.observe.timeline import Slice, account_file, process_files, read_timeline, timeline_path

HERE = Path(__file__).resolve().parent
NUM_PROMPTS, GROUP_SIZE, LR, SEED = 8, 8, 1e-6, 0
ALPHABET = string.ascii_letters + string.digits + "+-*/= \n"  # 69, and three special tokens: a vocabulary of 72
MODEL = ModelConfig(
    hidden_size=256, intermediate_size=768, num_layers=4, num_heads=4, num_kv_heads=4, max_positions=256
)
MODES = {
    "sync": {"max_staleness": 0, "weight_update": "between_batches"},
    "async": {"max_staleness": 2, "weight_update": "in_flight"},
}
SIDES = ("sync", "async", "trl")


@dataclass(frozen=True)
class Case:
    """Completions of exactly `max_new_tokens` tokens, or ending earlier where `can_end`."""

    name: str
    max_new_tokens: int
    can_end: bool


CASES = {case.name: case for case in (Case("short", 16, False), Case("long", 128, True))}


@dataclass(frozen=True)
class Measurement:
    """One run: seconds and completion tokens per steady step, and seconds of it generating where that is serial.

    `states` are the seconds per step that each of our processes spent in each state.
    """

    step_s: float
    tokens: float
    generation_s: float | None = None
    states: dict[str, dict[str, float]] = field(default_factory=dict)


def prepare(folder: Path) -> int:
    """Write prompts and the checkpoint of all sides under `folder`; return the number of parameters."""
    tokenizer = char_tokenizer(ALPHABET)
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    model = new_model(MODEL, len(tokenizer), SEED, eos_token_id=eos, pad_token_id=pad)
    save_model(model, folder / "model", tokenizer)
    rng = random.Random(SEED)
    sums = {f"{rng.randrange(100)}+{rng.randrange(100)}=" for _ in range(8192)}
    rows = [{"prompt": text, "answer": ""} for text in sorted(sums)]
    rng.shuffle(rows)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return sum(parameter.numel() for parameter in model.parameters())


def recipe_of(case: Case, mode: str, folder: Path, *, steps: int) -> dict[str, Any]:
    """Return the recipe of our side, with the files of `prepare`.

    Completions of one length: TRL forbids the end token until then, ours does not end at it.
    """
    return {
        "recipe": f"bench-{case.name}-{mode}",
        "seed": SEED,
        "steps": steps,
        "groups_per_step": NUM_PROMPTS,
        "completions_per_group": GROUP_SIZE,
        **MODES[mode],
        "model": {"path": str(folder / "model")},
        "prompts": {"dataset": str(folder / "prompts.jsonl"), "num_eval": 8},
        "generator": {
            "max_new_tokens": case.max_new_tokens,
            "num_slots": NUM_PROMPTS * GROUP_SIZE,
            "stop_at_eos": case.can_end,
        },
        "rewards": {"terms": [{"function": f"{HERE / 'reward.py'}:vowel_share"}]},
        "loss": {"name": "grpo", "std_eps": 1e-4, "skip_no_signal": False},
        "trainer": {"microbatch_tokens": 16384, "optimizer": {"lr": LR}},
        "eval": {"num_prompts": 8, "num_slots": 8},
    }


def measure_slipstream(case: Case, mode: str, folder: Path, *, steps: int, warm_up: int) -> Measurement:
    """Run `warm_up + steps + k` steps in processes of their own; the last k, when generators run dry, do not count."""
    max_staleness = MODES[mode]["max_staleness"]
    assert isinstance(max_staleness, int)
    out = Path(tempfile.mkdtemp(dir=folder, prefix=f"run-{mode}-"))
    recipe = recipe_of(case, mode, folder, steps=warm_up + steps + max_staleness)
    slipstream.run(recipe, out=out, display=False)
    lines = [line for line in read_metrics(out / "metrics.jsonl") if "step_s" in line]
    ended = {line["step"]: line["wall_s"] for line in lines}
    first, last = warm_up - 1, warm_up + steps - 1
    tokens = [line["tokens_trained"] for line in lines if first < line["step"] <= last]
    return Measurement(
        (ended[last] - ended[first]) / steps, statistics.mean(tokens), states=states_per_step(out, first, last)
    )


def states_per_step(run_dir: Path, first: int, last: int) -> dict[str, dict[str, float]]:
    """Seconds per step of each process in each state, from the end of training step `first` to that of step `last`."""
    trained = [
        record
        for record in read_timeline(timeline_path(run_dir, "trainer"))
        if isinstance(record, Slice) and "step" in record.args
    ]
    end_s = {record.args["step"]: record.end_ns / 1e9 for record in trained}
    return {
        path.stem: {
            state: seconds / (last - first) for state, seconds in account_file(path, end_s[first], end_s[last]).items()
        }
        for path in process_files(run_dir)
    }


def measure_trl(case: Case, python: Path, folder: Path, *, steps: int, warm_up: int) -> Measurement:
    """Run TRL in its own environment."""
    measured = call_trl(
        python,
        model=folder / "model",
        prompts=folder / "prompts.jsonl",
        lr=LR,
        seed=SEED,
        completions=NUM_PROMPTS * GROUP_SIZE,
        completions_per_prompt=GROUP_SIZE,
        max_new_tokens=case.max_new_tokens,
        min_new_tokens=0 if case.can_end else case.max_new_tokens,
        steps=steps,
        warm_up=warm_up,
    )["steps"]
    step_s, generation_s, tokens = (
        statistics.mean(step[key] for step in measured) for key in ("step_s", "generation_s", "tokens")
    )
    return Measurement(step_s, tokens, generation_s)


@torch.inference_mode()
def gemm_flops(size: int = 1024, seconds: float = 1.0) -> float:
    """Best rate of an fp32 matrix product [size, size] x [size, size], in FLOP/s: MKL's (TRL's) or oneDNN's (ours)."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    best_s = float("inf")
    for product in (torch.mm, linear):
        until = time.perf_counter() + seconds / 2
        while time.perf_counter() < until:
            started = time.perf_counter()
            product(a, b)
            best_s = min(best_s, time.perf_counter() - started)
    return 2 * size**3 / best_s


def compare(case: Case, arguments: argparse.Namespace) -> dict[str, Any]:
    """All sides in turn for each round; the table's rows."""
    runs: dict[str, list[Measurement]] = {side: [] for side in SIDES}
    flops = 0.0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        num_params = prepare(folder)
        for turn in range(arguments.rounds):
            shift = turn % len(SIDES)
            flops = max(flops, gemm_flops())
            for side in SIDES[shift:] + SIDES[:shift]:
                if side == "trl":
                    run = measure_trl(case, arguments.trl_python, folder, steps=arguments.steps, warm_up=3)
                else:
                    run = measure_slipstream(case, side, folder, steps=arguments.steps, warm_up=5)
                runs[side].append(run)
                print(
                    f"  round {turn + 1}: {side:<5} {run.step_s:.3f} s a step, {run.tokens:.0f} tokens, "
                    f"load {os.getloadavg()[0]:.1f}",
                    flush=True,
                )
    return {"case": case.name, "num_params": num_params, "flops": flops, "runs": runs}


def show(result: dict[str, Any]) -> None:
    """One case as a table."""
    runs: dict[str, list[Measurement]] = result["runs"]
    medians = {side: statistics.median(run.step_s for run in runs[side]) for side in SIDES}
    tokens = statistics.median(run.tokens for run in runs["trl"])
    print(
        f"\n{result['case']}: {result['num_params'] / 1e6:.2f} M parameters, 64 completions, {tokens:.0f} tokens a step"
    )
    print("\n| side | s a step, median of rounds | range | of it generating | times as fast as TRL | tokens a step |")
    print("|---|---|---|---|---|---|")
    for side in SIDES:
        times = [run.step_s for run in runs[side]]
        generation = [run.generation_s for run in runs[side] if run.generation_s is not None]
        print(
            f"| {side} | {medians[side]:.3f} | {min(times):.3f} .. {max(times):.3f} "
            f"| {f'{statistics.median(generation):.3f}' if generation else ''} "
            f"| {medians['trl'] / medians[side]:.2f} | {statistics.median(run.tokens for run in runs[side]):.0f} |"
        )
    for side in ("sync", "async"):
        print(f"\n{side}, ms a step, means over rounds:")
        for process in ("trainer", "generator-0", "rewards"):
            spent = [run.states[process] for run in runs[side]]
            means = {state: statistics.mean(s.get(state, 0.0) for s in spent) for state in set().union(*spent)}
            shown = sorted(((seconds, state) for state, seconds in means.items() if seconds >= 5e-4), reverse=True)
            print(f"  {process:<12} " + ", ".join(f"{in_words(state)} {1e3 * seconds:.0f}" for seconds, state in shown))
    floor_s = 8 * result["num_params"] * tokens / result["flops"]
    print(f"\nFloor: {floor_s:.3f} s a step at {result['flops'] / 1e9:.0f} GFLOP/s.")
    if floor_s > min(medians.values()):
        print("A side is below the floor: the matrix products were measured while something else used the cores.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="measured steps per run")
    parser.add_argument("--trl-python", type=Path, default=TRL_PYTHON)
    arguments = parser.parse_args()
    if trl_version(arguments.trl_python) is None:
        parser.error(f"there is no TRL in the environment of {arguments.trl_python}; `{INSTALL}` installs it")
    print(f"command: python {shlex.join(sys.argv)}")
    print(f"versions: {versions()}")
    for name, value in describe().lines().items():
        print(f"{name}: {value}")
    print(f"seed: {SEED}, rounds: {arguments.rounds}, steps: {arguments.steps}\n", flush=True)
    try:
        for name in arguments.cases:
            show(compare(CASES[name], arguments))
    except TrlFailed as failure:
        sys.exit(f"error: {failure}")


if __name__ == "__main__":
    main()
