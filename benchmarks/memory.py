"""The memory of a run's trainer and generator with all weights trained, and with adapters (docs/lora.md).

    python benchmarks/memory.py [--rank 32] [--model smollm2] [--microbatch-tokens 512] [--steps 2]

All are whole runs of the model's shape with random weights, in processes as always, on CPU: all weights, then adapters
beside a base in float32, bfloat16 and int8, on both sides. Printed of each process: the most anonymous memory that it
holds while the run lasts, above what it begins with (Python and its libraries), and the most shared memory, which both
have in common; beside what `slipstream plan` counts, shared memory with the trainer; and the bytes of a version.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from contenders.models import MODELS

from slipstream.core.recipes import resolve
from slipstream.models.config import TransformerConfig
from slipstream.models.hf import save_model
from slipstream.models.initialise import initialise
from slipstream.models.tokenizer import char_tokenizer
from slipstream.models.transformer import Transformer
from slipstream.observe.hardware import describe
from slipstream.observe.summary import read_summary, versions
from slipstream.plan.counts import NO_ADAPTERS, Adapters, adapters_of, counts_of
from slipstream.plan.cpu import CpuMachine
from slipstream.plan.layouts import AsynchronousPlan, GeneratorLayout, Parts, TrainerLayout, Workload
from slipstream.plan.lengths import LengthSample

SIDES = ("trainer", "generator")
GROUPS, GROUP_SIZE, PROMPT, COMPLETION, SLOTS = 8, 2, 64, 4, 16  # long prompts: decoding takes longest
EVERY_S, LOOK_FOR_S = 0.05, 1.0


def tables(
    folder: Path, rank: int | None, microbatch_tokens: int, steps: int, precision: str = "float32"
) -> dict[str, Any]:
    lora = {} if rank is None else {"lora": {"rank": rank, "base_precision": precision}}
    return {
        "recipe": "memory",
        "steps": steps,
        "groups_per_step": GROUPS,
        "completions_per_group": GROUP_SIZE,
        "model": {"path": str(folder), **lora},
        "prompts": {
            "tasks": [{"name": "spell_backward", "params": {"max_word_len": 5}}],
            "max_prompt_tokens": PROMPT,
            "num_train": 200,
            "num_eval": 8,
            "template": (PROMPT - 6) * " " + "{word}>",
        },
        "loss": {"skip_no_signal": False},  # random weights answer nothing right
        "generator": {"num_slots": SLOTS, "max_new_tokens": COMPLETION, "precision": precision},
        "trainer": {"microbatch_tokens": microbatch_tokens, "optimizer": {"lr": 1e-6}, "checkpoint_every": steps},
        "eval": {"every": 0, "num_prompts": 1},
    }


def held(pid: int) -> tuple[int, int]:
    """Bytes of anonymous and of shared memory of a process; 0 of one that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0, 0
    kinds = {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines if line.startswith("Rss")}
    return kinds.get("RssAnon", 0), kinds.get("RssShmem", 0)


def processes(run: int) -> dict[str, int]:
    """The executors below the process `run`, by their names."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split()
                parent = int((entry / "stat").read_text(encoding="ascii").rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == run and "slipstream.controller.process" in " ".join(words):
                for side in SIDES:
                    if any(side in word for word in words):
                        found[side] = int(entry.name)
    return found


def measured(recipe: dict[str, Any], out: Path) -> tuple[dict[str, int], int, int]:
    """The most anonymous bytes of each side in a run, the most that they share, and those of a version."""
    code = "import json, slipstream, sys; slipstream.run(json.loads(sys.argv[1]), out=sys.argv[2], display=False)"
    child = subprocess.Popen([sys.executable, "-c", code, json.dumps(recipe), str(out)])
    first, most, most_shared = dict[str, int](), dict.fromkeys(SIDES, 0), 0
    found, looked_s = dict[str, int](), 0.0
    while child.poll() is None:
        if len(found) < len(SIDES) or time.monotonic() - looked_s > LOOK_FOR_S:
            found, looked_s = processes(child.pid), time.monotonic()
        for side, pid in found.items():
            now, shared = held(pid)
            most_shared = max(most_shared, shared)
            most[side] = max(most[side], now - first.setdefault(side, now))
        time.sleep(EVERY_S)
    print(f"{out.name}: the processes begin with", {side: f"{nbytes / 1e6:,.0f} MB" for side, nbytes in first.items()})
    if child.returncode:
        raise SystemExit(f"the run in {out} failed")
    sync = read_summary(out / "summary.json").weight_sync
    return most, most_shared, sync.bytes // sync.count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--model", choices=sorted(MODELS), default="smollm2")
    parser.add_argument("--microbatch-tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=2)
    arguments = parser.parse_args()
    print(f"command: python {shlex.join(sys.argv)}")
    print(f"versions: {versions()}")
    for name, value in describe().lines().items():
        print(f"{name}: {value}")
    tokenizer, shape = char_tokenizer(), MODELS[arguments.model].config
    shape = replace(shape, vocab_size=max(shape.vocab_size, len(tokenizer)))
    cases: dict[str, tuple[int | None, str]] = {"all weights": (None, "float32")}
    cases |= {f"rank {arguments.rank}, {one}": (arguments.rank, one) for one in ("float32", "bfloat16", "int8")}
    totals: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = Transformer(shape)
        initialise(model, 0)
        save_model(model, Path(scratch) / "model", tokenizer)
        del model
        for name, (rank, precision) in cases.items():
            recipe = tables(Path(scratch) / "model", rank, arguments.microbatch_tokens, arguments.steps, precision)
            most, shared, version = measured(recipe, Path(scratch) / name.replace(" ", "-"))
            totals[name] = {"trainer": most["trainer"] + shared, "generator": most["generator"], "a version": version}
            adapters = NO_ADAPTERS if rank is None else adapters_of(shape, rank)
            memory = planned(recipe, shape, adapters, arguments.microbatch_tokens)
            print(f"{name}: {shared / 1e6:,.0f} MB shared")
            for side in SIDES:
                parts = ", ".join(f"{part} {nbytes / 1e6:,.0f}" for part, nbytes in memory[side].parts.items())
                seen, foreseen = totals[name][side], memory[side].total
                print(
                    f"{name}, {side}: {seen / 1e6:,.0f} MB measured, {foreseen / 1e6:,.0f} planned "
                    f"({foreseen / seen - 1:+.1%}: {parts})"
                )
            foreseen = adapters.version_bytes or counts_of(shape).served_bytes("float32")
            print(f"{name}, a version: {version / 1e6:,.1f} MB measured, {foreseen / 1e6:,.1f} planned")
    for name in list(totals)[1:]:
        ratios = {what: nbytes / totals["all weights"][what] for what, nbytes in totals[name].items()}
        print(f"{name}, of that with all weights:", ", ".join(f"{what} {one:.1%}" for what, one in ratios.items()))


def planned(
    recipe: dict[str, Any], shape: TransformerConfig, adapters: Adapters, microbatch_tokens: int
) -> dict[str, Parts]:
    """Bytes of each side by the planner."""
    lengths = LengthSample(PROMPT, (COMPLETION,), "limits")
    machine = CpuMachine(
        config=resolve(recipe),
        shape=shape,
        workload=Workload(groups=GROUPS, group_size=GROUP_SIZE, lengths=lengths, adapters=adapters),
        times=None,  # type: ignore[arg-type]
        cores=os.cpu_count() or 1,
        memory_bytes=0,
    )
    rollouts = microbatch_tokens / machine.workload.trained_tokens
    return machine.memory(
        AsynchronousPlan(
            trainer=TrainerLayout(devices=1, tensor_parallel=1, microbatch=rollouts, precision="float32"),
            generator=GeneratorLayout(devices=1, tensor_parallel=1, slots=SLOTS, precision="float32"),
        )
    )


if __name__ == "__main__":
    main()
