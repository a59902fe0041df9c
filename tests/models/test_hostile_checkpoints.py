"""Foreign checkpoints that are wrong, absurd or hostile: each is refused by a ConfigError before anything is made.

The checks run in a process of their own (this file as a program), so that one that hangs is killed, and one that wants
all memory is refused it.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import select
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from forked_text import FORKS, forking
from hostile_checkpoints import MUTATIONS, TEMPLATE

from slipstream.core.recipes import resolve
from slipstream.core.sections import ModelConfig
from slipstream.models.build import build_policy, build_tokenizer
from slipstream.models.hf import save_model
from slipstream.models.preflight import check_policy
from slipstream.prompts import build_prompts

LIMIT_S = 150.0  # of a check, on a machine that is busy with other things
MEMORY_BYTES = 6 << 30
RECIPE: dict[str, Any] = {
    "steps": 2,
    "groups_per_step": 4,
    "completions_per_group": 4,
    "model": {"path": "model"},
    "prompts": {"dataset": "data.jsonl", "num_eval": 4, "max_prompt_tokens": 40, "chat": True},
    "generator": {"max_new_tokens": 8, "num_slots": 8},
    "rewards": {"terms": [{"function": "exact_match"}]},
    "eval": {"num_prompts": 4},
}
CASES = [
    pytest.param(kind, name, id=f"{kind}: {name if len(name) < 60 else f'{name[:60]}...'}")
    for kind, mutations in MUTATIONS.items()
    for name in mutations
]
QUICK = {
    "tokenizer": ("a device", "a pipe", "a terabyte", "its template is a pipe", "special tokens are a device", "deep"),
    "chat": ("endless range", "recursion", "a bomb", "escape by globals", "template is a number"),
}
"""Of those that take a process of their own, each of which imports for two seconds: tried in every run of the tests."""


def is_quick(kind: str, name: str) -> bool:
    return name in QUICK.get(kind, MUTATIONS[kind])


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole checkpoint with a chat template, beside a dataset; and code in its folder that leaves a trace if run."""
    shelf = tmp_path_factory.mktemp("shelf")
    shape = ModelConfig(
        hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=2, max_positions=64
    )
    policy, tokenizer = build_policy(shape, seed=0)
    model = shelf / "model"
    save_model(policy, model, tokenizer)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    for module in ("custom", "jinja2", "tokenizers", "transformers", "sitecustomize", "json"):
        (model / f"{module}.py").write_text(f"open({str(shelf / 'ran')!r}, 'w')\nraise SystemExit('code ran')\n")
    (model / "generation_config.json").write_text("{}")
    for name, kind in (("config.json", "AutoConfig"), ("tokenizer_config.json", "AutoTokenizer")):
        told = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps(told | {"auto_map": {kind: ["custom.Thing", "custom.Thing"]}}))
    rows = [{"prompt": f"word {i}", "answer": f"drow {i}"} for i in range(40)]
    (shelf / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return shelf


class Worker:
    """A process that checks folders, one after the other; one that is silent for `LIMIT_S` is killed."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def check(self, folder: Path) -> dict[str, str]:
        if self.process is None:
            env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
            self.process = subprocess.Popen(
                [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/", env=env
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{folder}\n")
        self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], LIMIT_S)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            self.close()
            pytest.fail("the check ended its process" if ready else f"the check has not ended after {LIMIT_S:g} s")
        told: dict[str, str] = json.loads(line)
        return told

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


def files_of(folder: Path) -> dict[str, tuple[int, int, int, str]]:
    found = {}
    for path in sorted(folder.rglob("*")):
        about = path.lstat()
        is_small = path.is_file() and not path.is_symlink() and about.st_size < 1 << 24
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if is_small else ""
        found[str(path.relative_to(folder))] = (about.st_mode, about.st_size, about.st_mtime_ns, digest)
    return found


def check_screen(told: str) -> None:
    assert "Traceback" not in told
    rows = [row for line in told.splitlines() for row in textwrap.wrap(line, 80) or [""]]
    assert len(rows) <= 24, told[:4000]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(*case.values, id=case.id, marks=[] if is_quick(*case.values) else [pytest.mark.slow])
        for case in CASES
    ],
)
def test_it_is_refused(kind: str, name: str, shelf: Path, tmp_path: Path, worker: Worker) -> None:
    shutil.copytree(shelf, tmp_path, dirs_exist_ok=True)
    MUTATIONS[kind][name](tmp_path / "model")
    before = files_of(tmp_path)
    told = worker.check(tmp_path)
    assert told["error"] == "ConfigError", told["text"]
    check_screen(told["text"])
    assert told["children"] == ""
    assert files_of(tmp_path) == before
    assert not (shelf / "ran").exists(), "code of the checkpoint was run"


def test_a_whole_one_passes(shelf: Path, worker: Worker) -> None:
    """The errors above are of the mutations; and code that lies in the folder is passed over."""
    assert worker.check(shelf)["error"] == "", worker.check(shelf)["text"]
    assert not (shelf / "ran").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("config", "num_hidden_layers = 1000000000000000000"),
        ("config", "a pipe"),
        ("weights", "metadata of numbers"),
        ("weights", "tensors twice"),
        ("tokenizer", "deep"),
        ("tokenizer", "normaliser that doubles"),
        ("chat", "nested loops"),
        ("chat", "a bomb"),
        ("chat", "escape by globals"),
    ],
)
def test_the_executable_says_so_and_leaves_nothing(kind: str, name: str, shelf: Path, tmp_path: Path) -> None:
    shutil.copytree(shelf, tmp_path, dirs_exist_ok=True)
    MUTATIONS[kind][name](tmp_path / "model")
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(RECIPE))
    before = files_of(tmp_path)
    command = [sys.executable, "-m", "slipstream.cli", "run", "recipe.toml", "--out", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 2, done.stderr
    assert not done.stdout
    check_screen(done.stderr)
    assert files_of(tmp_path) == before


def _serve(answer: Callable[[str], None]) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES,) * 2)
    FORKS.begin()
    mine = Path(f"/proc/self/task/{os.getpid()}/children")
    before = set(mine.read_text().split())
    for line in sys.stdin:
        os.chdir(line.rstrip("\n"))
        error = text = ""
        try:
            config = resolve(RECIPE)
            check_policy(config)
            build_prompts(config, build_tokenizer(config.model))
        except BaseException as raised:  # noqa: BLE001 - what it is, is the question
            error, text = type(raised).__name__, str(raised)
        children = " ".join(set(mine.read_text().split()) - before)
        answer(json.dumps({"error": error, "text": text[-8000:], "children": children}))


if __name__ == "__main__":
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    with forking():
        _serve(lambda line: print(line, file=out))
