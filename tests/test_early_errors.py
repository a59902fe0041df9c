"""Errors that need no model come before torch and transformers are imported, which takes seconds.

How long that is on a busy machine says nothing: that they are not imported, does.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHECK = """
import sys
from slipstream.cli import main

assert main(sys.argv[1:]) == 2
heavy = {"torch", "transformers", "reasoning_gym", "datasets", "huggingface_hub"} & sys.modules.keys()
assert not heavy, heavy
"""
PYTHON = """
import sys
import slipstream
from slipstream.core.errors import ConfigError

try:
    slipstream.run(sys.argv[1], overrides=dict(word.split("=") for word in sys.argv[2:]))
except ConfigError as error:
    print(error)
assert not {"torch", "transformers", "reasoning_gym"} & sys.modules.keys()
"""
DATA = '[prompts]\ndataset = "{data}"\n[[rewards.terms]]\nfunction = "{reward}"\n'
FILES = {
    "data.toml": DATA.format(data="absent.jsonl", reward="exact_match"),
    "reward.toml": DATA.format(data="data.jsonl", reward="absent.py:f"),
    "function.toml": DATA.format(data="data.jsonl", reward="rewards.py:f"),
    "module.toml": DATA.format(data="data.jsonl", reward="no_such_module:f"),
    "task.toml": '[[prompts.tasks]]\nname = "spell_bakward"\n',
    "data.jsonl": '{"prompt": "a", "answer": "b"}\n',
    "rewards.py": "def g(prompts, completions, completion_ids, **columns): ...\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("run quickstart --model.path nowhere", "'model.path' is no Hugging Face checkpoint"),
        ("run data.toml", "dataset not found"),
        ("run reward.toml", "there is no such file"),
        ("run function.toml", "has no function 'f'"),
        ("run module.toml", "there is no module 'no_such_module'"),
        ("plan quickstart", "there is nothing to plan for"),
        ("run quickstart --preset async", "unknown preset"),
        ("run quickstart --loss.name grop", "did you mean 'grpo'?"),
        ("run quickstart --loss.params eps_hgih 2", "has no parameter 'eps_hgih'"),
        ("run quickstart --generator.engine vllm --generator.keep-sets --generator.top-k 9", "vLLM does not report"),
        ("run quickstart --stages rl sft", "stages have one order"),
        ("run task.toml", "unknown task 'spell_bakward'; did you mean 'spell_backward'?"),
        ("eval nowhere --recipe quickstart", "there is no checkpoint"),
        ("serve nowhere", "there is no checkpoint"),
        ("serve nowhere --host 0.0.0.0", "only with an API key"),
        ("serve nowhere --api-key NOT_SET_HERE", "the API key is missing"),
    ],
)
def test_errors_that_need_no_model_come_before_torch(folder: Path, command: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHECK, *command.split()], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert said in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("reward.toml", "there is no such file"),
        ("absent", "unknown recipe"),
        ("task.toml", "unknown task"),
        ("quickstart loss.name=grop", "unknown loss 'grop'"),
    ],
)
def test_they_do_from_python(folder: Path, words: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PYTHON, *words.split()], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
