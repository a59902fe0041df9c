"""A copy of the checkout in which a command may write, with the runs, models and files that the documents speak of."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from itertools import permutations
from pathlib import Path

import torch
from shown import ROOT
from small import QUICK

from slipstream.core.sections import ModelConfig
from slipstream.models.hf import save_model
from slipstream.models.initialise import new_model
from slipstream.models.tokenizer import char_tokenizer

DEADLINE_S = 900.0
RUNS = (  # names that stand for a finished run
    *("DIR", "RUN", "OTHER_RUN", "A", "B", "C", "runs/mine", "runs/sync", "runs/one_step", "runs/continuous"),
    "runs/quickstart-20260101-120000",
)
NEWEST = '"runs").glob("quickstart-*'  # finds the last of them
MODELS = (  # folders, which win over the hub
    *("MODEL", "models/smollm2-135m-instruct", "reward_model/model"),
    *("HuggingFaceTB/SmolLM2-135M-Instruct", "Qwen/Qwen2.5-0.5B-Instruct"),
)
CHAT = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
SETUP = r"""
set -euo pipefail
make() {
    command make -o .venv/dev -o .venv/run -o .venv/experiments -o .venv/docs -o .venv/ray -o .venv-trl/installed \
        -o .venv-vllm/installed "$@"
}
until_it_says() {
    local word=$1 pid; shift
    "$@" >said 2>&1 & pid=$!
    for _ in $(seq 6000); do
        if grep -q "$word" said || ! kill -0 $pid 2>/dev/null; then break; fi
        sleep 0.1
    done
    cat said; kill $pid; wait $pid || true; grep -q "$word" said
}
"""


class CommandFailed(AssertionError):
    """A shown command did not do what it is shown for."""


def shell(text: str, folder: Path, *, deadline_s: float = DEADLINE_S) -> str:
    """Run `text` with bash in `folder` and return what it printed; CommandFailed unless it ends well in time."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with subprocess.Popen(
        ["bash", "-c", SETUP + text],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ | {"PATH": path, "COLUMNS": "160", "GIT_CEILING_DIRECTORIES": "/"},
    ) as process:
        try:
            printed, _ = process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise CommandFailed(
                f"not done after {deadline_s:.0f} s: {text}\n{process.communicate()[0][-4000:]}"
            ) from None
        finally:
            with suppress(ProcessLookupError):  # what it left running
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode or "Traceback (most recent call last)" in printed:
        raise CommandFailed(f"exit code {process.returncode}: {text}\n{printed[-6000:]}")
    return printed


def copy_checkout(folder: Path) -> None:
    """Copy what git has or would have; environments are linked, so that nothing is installed."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in names:
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(sys.prefix)
    for name in (".venv-trl", ".venv-vllm"):
        if (ROOT / name).exists():
            (folder / name).symlink_to(ROOT / name)


def make_model(folder: Path, **more: object) -> None:
    """Write a small random checkpoint with a chat template; `more` fields of [model] say of which kind."""
    tokenizer = char_tokenizer("".join(map(chr, range(32, 127))) + "\n")
    tokenizer.chat_template = CHAT
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2}
    config = ModelConfig(**sizes, max_positions=2048, **more)
    torch.manual_seed(0)
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    save_model(
        new_model(config, len(tokenizer), 0, eos_token_id=eos, pad_token_id=pad),
        folder,
        tokenizer,
    )


def make_run(folder: Path) -> None:
    """Train a run small, with more steps than the documents look at."""
    out = shlex.quote(str(folder))
    shell(f"slipstream run quickstart {QUICK} --steps 12 --observe.tokens-every 1 --out {out}", folder.parent)


def make_interrupted_run(folder: Path) -> None:
    """Train until there is a checkpoint, and then interrupt."""
    flags = f"{QUICK} --steps 40 --trainer.checkpoint-every 1 --eval.every 20"  # the last of a flag counts
    words = [*f"slipstream run quickstart {flags} --out".split(), str(folder)]
    program = str(Path(sys.executable).parent / words[0])
    with subprocess.Popen(
        [program, *words[1:]], cwd=folder.parent, stdout=subprocess.DEVNULL, start_new_session=True
    ) as run:
        until_s = time.monotonic() + DEADLINE_S
        while not list((folder / "checkpoints").glob("step_*/manifest.json")):
            assert run.poll() is None, "the run ended before its first checkpoint"
            assert time.monotonic() < until_s, "there is no checkpoint"
            time.sleep(0.02)
        run.send_signal(signal.SIGINT)
        assert run.wait(timeout=DEADLINE_S) == 130


def make_mixture(folder: Path) -> None:
    """Write such a checkpoint whose layers have experts."""
    make_model(folder, family="mixtral", num_experts=4)


MAKERS = {"MODEL": make_model, "MIXTURE": make_mixture, "RUN": make_run, "CUT": make_interrupted_run}


def furnish(folder: Path, store: Path, text: str) -> None:
    """Make what `text`, or a recipe that it names, names: finished runs, models, data."""
    text = "\n".join([text, *(path.read_text("utf-8") for path in folder.glob("*.toml") if path.name in text)])
    text = text.replace(NEWEST, RUNS[-1])
    for name in (*RUNS, *MODELS, "CUT", "MIXTURE"):
        if re.search(rf"(?<![\w/.-]){re.escape(name)}(?![\w-])", text) and not (folder / name).exists():
            kind = "MODEL" if name in MODELS else "RUN" if name in RUNS else name
            if not (store / kind).exists():
                MAKERS[kind](store / kind)
            shutil.copytree(store / kind, folder / name)
    rows = [{"prompt": f"{i} + 1 =", "answer": str(i + 1)} for i in range(64)]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    unsorted = [{"prompt": one, "answer": "".join(sorted(one))} for one in map("".join, permutations("abcde", 4))]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in unsorted), encoding="utf-8")
    (folder / "grpo.yaml").write_text("model_name_or_path: MODEL\nmax_steps: 2\n", encoding="utf-8")
    (folder / "data").mkdir(exist_ok=True)
    label = {"query": [5, 6], **{f"sample{k}": [7, 8 + k] for k in range(4)}, "best": 1}
    (folder / "offline_5k.json").write_text(json.dumps([label] * 3), encoding="utf-8")
