"""Errors that need no model come before torch and transformers are imported, which takes seconds.

How long that is on a busy machine says nothing: that they are not imported, does.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

CALL = """
import contextlib, io, json, sys
import slipstream
from slipstream.cli import main
from slipstream.core.errors import ConfigError

calls = json.loads(sys.argv[1])
HEAVY = {"torch", "transformers", "reasoning_gym", "datasets", "huggingface_hub"}
for call in calls:
    with contextlib.redirect_stderr(io.StringIO()) as told:
        if "run" in call:
            try:
                slipstream.run(call["run"], overrides=call["overrides"])
            except ConfigError as error:
                code = 2
                print(error, file=sys.stderr)
        else:
            code = main(call["command"].split())
    call.update(code=code, told=told.getvalue(), heavy=sorted(HEAVY & sys.modules.keys()))
print(json.dumps(calls))
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


COMMANDS = {
    "run quickstart --model.path nowhere": "'model.path' is no Hugging Face checkpoint",
    "run data.toml": "dataset not found",
    "run reward.toml": "there is no such file",
    "run function.toml": "has no function 'f'",
    "run module.toml": "there is no module 'no_such_module'",
    "plan quickstart": "there is nothing to plan for",
    "run quickstart --preset async": "unknown preset",
    "run quickstart --loss.name grop": "did you mean 'grpo'?",
    "run quickstart --loss.params eps_hgih 2": "has no parameter 'eps_hgih'",
    "run quickstart --generator.engine vllm --generator.keep-sets --generator.top-k 9": "vLLM does not report",
    "run quickstart --stages rl sft": "stages have one order",
    "run task.toml": "unknown task 'spell_bakward'; did you mean 'spell_backward'?",
    "eval nowhere --recipe quickstart": "there is no checkpoint",
    "serve nowhere": "there is no checkpoint",
    "serve nowhere --host 0.0.0.0": "only with an API key",
    "serve nowhere --api-key NOT_SET_HERE": "the API key is missing",
}
RUNS = {
    ("reward.toml",): "there is no such file",
    ("absent",): "unknown recipe",
    ("task.toml",): "unknown task",
    ("quickstart", "loss.name=grop"): "unknown loss 'grop'",
}


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """All of them, one after the other in one process, which imports for seconds itself."""
    folder = tmp_path_factory.mktemp("early")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    told: dict[Any, Any] = {command: {"command": command} for command in COMMANDS}
    for words in RUNS:
        told[words] = {"run": words[0], "overrides": dict(word.split("=") for word in words[1:])}
    done = subprocess.run(
        [sys.executable, "-c", CALL, json.dumps([*told.values()])],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(told, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize(("call", "said"), [*COMMANDS.items(), *RUNS.items()], ids=str)
def test_errors_that_need_no_model_come_before_torch(calls: dict[Any, Any], call: Any, said: str) -> None:
    """From the command line and from Python."""
    assert calls[call]["code"] == 2
    assert said in calls[call]["told"]
    assert calls[call]["heavy"] == []
