"""Versions on their way to vLLM: bytes written, copies held on the host, and seconds until they are live.

    python benchmarks/vllm_weights.py [--python .venv-vllm/bin/python] [--precision bfloat16] [--steps 8]

Trains a random model of SmolLM2-135M's shape for a few steps, as a whole run with vLLM as the generator's engine, and
samples from outside what the run has in /dev/shm and what its processes have for themselves (RssAnon). Copies are in
units of the model's bytes in bfloat16. At the commit before vLLM read slots itself, the script measures the way before:
a checkpoint in float32 for every version, beside two copies in the generator.

`publish to live` is from the beginning of the trainer's staging copy to the end of the swap, probe included, by the
run's timeline. Private memory counts from what a process had before the first version: of the generator, from what its
imports and tokenizer take. The last lines are arithmetic.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

SHARED = Path("/dev/shm")
SHAPE = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_layers": 30,
    "num_heads": 9,
    "num_kv_heads": 3,
    "max_positions": 2048,
    "tie_embeddings": True,
}
VOCAB = 49152
LARGER = {"8B": 8.0e9, "70B": 70.6e9, "405B": 405.9e9}
IMPORTS = """
import sys, slipstream.controller.process, slipstream.generator.executor
from slipstream.models.tokenizer import load_tokenizer
tokenizer = load_tokenizer(sys.argv[1])
print(open('/proc/self/status').read())
"""
RUN = "import json, sys, slipstream; slipstream.run('quickstart', overrides=json.loads(sys.argv[1]), out=sys.argv[2])"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=".venv-vllm/bin/python", help="interpreter of vLLM's environment")
    parser.add_argument("--precision", default="bfloat16", choices=["bfloat16", "float32", "fp8"])
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        num_params = make_model(Path(folder) / "model")
        run(Path(folder), options, num_params)


def make_model(path: Path) -> int:
    """Write a random model of the shape, with a tokenizer of single characters; return its parameters."""
    from slipstream.core.sections import ModelConfig
    from slipstream.models.hf import save_model
    from slipstream.models.initialise import new_model
    from slipstream.models.tokenizer import CharTokenizer

    model = new_model(ModelConfig(**SHAPE), vocab_size=VOCAB, seed=0, eos_token_id=1, pad_token_id=0)
    save_model(model, path, CharTokenizer())
    return sum(parameter.numel() for parameter in model.parameters())


def run(folder: Path, options: argparse.Namespace, num_params: int) -> None:
    is_before = has_dtype()
    generator: dict[str, Any] = {"engine": "vllm", "num_slots": 8, "max_new_tokens": 8, "probe_tolerance": 1.0}
    generator["vllm"] = {"python": str(Path(options.python).absolute())}
    if is_before:
        generator["vllm"]["dtype"] = options.precision
    else:
        generator["precision"] = options.precision
    overrides = {
        "steps": options.steps,
        "deadline_s": 600.0,
        "groups_per_step": 2,
        "completions_per_group": 2,
        "max_staleness": 1,
        "model": {"path": str(folder / "model")},
        "generator": generator,
        "loss": {"skip_no_signal": False},
        "warm_start": {"steps": 0},
        "eval": {"every": 0, "num_prompts": 1, "num_slots": 8},
    }
    out = folder / "run"
    process = subprocess.Popen([sys.executable, "-c", RUN, json.dumps(overrides), str(out)], stdout=subprocess.DEVNULL)
    samples = Samples(process.pid)
    code = process.wait()
    samples.stop()
    if code:
        sys.exit(f"the run ended with {code}")
    report(out, samples, options, num_params, is_before=is_before)


def has_dtype() -> bool:
    from slipstream.core.sections import VLLMConfig

    return "dtype" in VLLMConfig.model_fields


class Samples(threading.Thread):
    """What the run under process `pid` holds, every 50 ms: (seconds, bytes by what)."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid, self._ends = pid, threading.Event()
        self._old = set(SHARED.glob("slipstream.*"))
        self.taken: list[tuple[float, dict[str, int]]] = []
        self.pushes: dict[str, int] = {}
        self.start()

    def stop(self) -> None:
        self._ends.set()
        self.join()

    def run(self) -> None:
        while not self._ends.wait(0.05):
            held = {"generator": 0, "vLLM": 0, "segments": 0, "pushes": 0}
            for pid in descendants(self._pid):
                name = Path(f"/proc/{pid}/cmdline")
                try:
                    told = name.read_bytes().replace(b"\0", b" ").decode()
                    kind = "vLLM" if told.startswith("VLLM::") else "generator" if "generator-0" in told else ""
                    if kind:
                        held[kind] += anonymous(Path(f"/proc/{pid}/status").read_text())
                except (OSError, IndexError):
                    continue
            for path in set(SHARED.glob("slipstream.*")) - self._old:
                held["pushes" if path.is_dir() else "segments"] += size(path)
                for push in path.glob("push-*"):
                    self.pushes[push.name] = max(self.pushes.get(push.name, 0), size(push))
            self.taken.append((time.monotonic(), held))

    def most(self, what: str, since_s: float = 0.0) -> int:
        """Nearly the most, of private memory: for a moment a child counts the pages of its parent again."""
        taken = sorted(held[what] for time_s, held in self.taken if time_s >= since_s and held[what])
        last = 1.0 if what in ("segments", "pushes") else 0.97
        return taken[int(last * (len(taken) - 1))] if taken else 0

    def at(self, what: str, time_s: float) -> int:
        return [held[what] for taken_s, held in self.taken if taken_s <= time_s][-1]


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        try:
            children = [int(child) for child in Path(f"/proc/{one}/task/{one}/children").read_text().split()]
            for task in Path(f"/proc/{one}/task").iterdir():
                children += [int(child) for child in (task / "children").read_text().split()]
        except OSError:
            continue
        new = sorted(set(children) - set(found))
        found += new
        waiting += new
    return found


def anonymous(status: str) -> int:
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def size(path: Path) -> int:
    """Bytes that a file, or all below a folder, takes of memory."""
    try:
        files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
        return sum(512 * one.stat().st_blocks for one in files)
    except OSError:
        return 0


def report(out: Path, samples: Samples, options: argparse.Namespace, num_params: int, *, is_before: bool) -> None:
    summary = json.loads((out / "summary.json").read_text())
    trace = json.loads((out / "timeline.json").read_text())["traceEvents"]
    staged: dict[int, float] = {}
    live: dict[int, float] = {}
    for event in trace:
        version = event.get("args", {}).get("version")
        if event.get("name") == "stage" and version is not None:
            staged.setdefault(version, event["ts"])
        if event.get("name") == "swapped":
            live[version] = event["ts"]
    delays = [(live[version] - staged[version]) / 1e6 for version in sorted(live) if version in staged]
    swaps = [line for line in map(json.loads, (out / "events.jsonl").open()) if line["event"]["type"] == "Swapped"]
    first_s = swaps[0]["time_s"] - swaps[0]["event"]["pause_s"]
    command = [sys.executable, "-c", IMPORTS, str(out.parent / "model")]
    imports = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    unit = 2 * num_params
    synced = summary["weight_sync"]
    slot = synced["bytes"] / synced["count"]
    pushes = [number for name, number in samples.pushes.items() if name != "push-0"]
    copied = slot if is_before else 0.0  # from the slot, by the generator
    generator = samples.most("generator") - anonymous(imports)
    if os.environ.get("SAMPLES"):
        Path(os.environ["SAMPLES"]).write_text(json.dumps([first_s, swaps, samples.taken]))
    vllm = samples.most("vLLM", first_s) - samples.at("vLLM", first_s)
    held = {name: samples.most(name) for name in ("segments", "pushes")} | {"generator": generator, "vLLM": vllm}
    print(f"{'before' if is_before else 'now'}: {options.precision}, {num_params / 1e6:.1f} M parameters", end=", ")
    print(f"{unit / 1e6:.0f} MB in bfloat16; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    push = statistics.median(pushes)
    print(f"written per version: {(slot + copied + push) / unit:.2f} copies:", end=" ")
    print(f"slot {slot / 1e6:.0f} MB, generator {copied / 1e6:.0f} MB, push {push / 1e6:.3f} MB")
    print(f"held at the most: {sum(held.values()) / unit:.2f} copies:", end=" ")
    print(", ".join(f"{name} {number / unit:.2f}" for name, number in held.items()))
    print(f"publish to live: median {statistics.median(delays[1:]):.2f} s of {len(delays) - 1}", end=" ")
    print(f"({min(delays[1:]):.2f} to {max(delays[1:]):.2f}); of which staging", end=" ")
    later = [swap["event"] for swap in swaps[1:]]
    print(f"{statistics.median(swap['transfer_s'] for swap in later):.2f}, swap", end=" ")
    print(f"{statistics.median(swap['pause_s'] for swap in later):.2f} s", end="; ")
    print(f"probe errors up to {max(swap['event']['probe_error'] for swap in swaps):.2g} nats")
    arithmetic()


def arithmetic() -> None:
    """Of bfloat16 in vLLM, for one generator on the trainer's machine."""
    print("by arithmetic: GB written per version, and held beside vLLM's parameters, before and now (one more: * )")
    for name, count in LARGER.items():
        gb = count * 2 / 1e9
        before, now = (3 * 2 * gb, (2 + 2 + 2) * 2 * gb), (gb, 2 * gb)
        print(f"  {name:>5}: {before[0]:7.0f} -> {now[0]:5.0f} written, {before[1]:7.0f} -> {now[1]:5.0f} held")
    print("  * a third slot, where the trainer is two versions ahead of vLLM: one copy more, before (float32) and now")


if __name__ == "__main__":
    main()
