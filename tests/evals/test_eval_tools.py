"""Evaluations in which the policy calls tools: calls are run, counted and shown, and what they bring is rewarded."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

from slipstream import cli
from slipstream.core.sections import ModelConfig
from slipstream.core.types import VersionSpan
from slipstream.evals import episodes
from slipstream.evals.evaluate import EvalResult, evaluate_model
from slipstream.generator.requests import Finished, Request
from slipstream.models.hf import save_model
from slipstream.models.initialise import new_model
from slipstream.models.tokenizer import char_tokenizer

TEMPLATE = (
    "{% if tools %}{{ tools | map(attribute='function') | map(attribute='name') | join(' ') }}\n{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ c.function | tojson }}</tool_call>{% endfor %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TOOLS = '''
def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first one.
        b: The second one.
    """
    if a == 13:
        raise ValueError("not with that")
    return a * b


def right(prompts, completions, answer, **columns):
    return [float(chat[-1]["content"] == f"It is {one}.") for chat, one in zip(completions, answer)]


class Multiplier:
    """The same tool, of an environment that asks once more and gives the reward itself."""

    tool_schemas = [
        {
            "type": "function",
            "function": {
                "name": "multiply",
                "description": "Multiply two numbers.",
                "parameters": {
                    "type": "object",
                    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                    "required": ["a", "b"],
                },
            },
        }
    ]
    num_tool_calls = 0

    def reset(self, answer, **columns):
        self.answer = answer

    def step(self, message):
        if calls := message.get("tool_calls"):
            self.num_tool_calls += len(calls)
            said = [
                {"role": "tool", "tool_call_id": call["id"], "name": "multiply", "content": str(multiply(**arguments))}
                for call in calls
                for arguments in [call["function"]["arguments"]]
            ]
            return {"messages": said}
        return {"done": True, "reward": float(message["content"] == f"It is {self.answer}.")}
'''
ROWS = [{"prompt": f"{a}*{b}?", "answer": str(a * b)} for a, b in [(2, 3), (4, 5), (13, 2), (6, 7)]]


class CallingEngine:
    """Stands for the engine of a policy that asks the tool for each product, and says what it was told."""

    def __init__(self, *_: Any, stop_token_ids: Sequence[int], **__: Any) -> None:
        self._tokenizer, self._stop = char_tokenizer(), stop_token_ids[0]
        self._requests: list[Request] = []
        self.read: list[str] = []

    @property
    def is_idle(self) -> bool:
        return not self._requests

    def submit(self, requests: Sequence[Request]) -> None:
        self._requests += requests

    def let_go_on(self, session: Any) -> None:
        pass

    def release(self, session: Any) -> None:
        pass

    def step(self) -> list[Finished]:
        asked, self._requests = self._requests, []
        return [self._said(request) for request in asked]

    def _said(self, request: Request) -> Finished:
        context = self._tokenizer.decode(request.prompt_tokens.tolist())
        if found := re.search(r"\[tool\](.*?)<eos>\[assistant\]$", context):
            text = f"It is {found[1]}."
        else:
            [(a, b)] = re.findall(r"\[user\](\d+)\*(\d+)\?", context)
            sent = f'{{"name": "multiply", "arguments": {{"a": {a}, "b": {b}}}}}'
            text = f"I ask.<tool_call>{sent}</tool_call>"
        tokens = np.array([*self._tokenizer.encode(text), self._stop], dtype=np.int32)
        spans = (VersionSpan(start=0, version=0),)
        return Finished(request, tokens, np.zeros(len(tokens), dtype=np.float32), spans, "stop", 0.0, 0.0)


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Tables that hold out ROWS, and beside them a model that knows tools."""
    monkeypatch.setattr(episodes, "native_engine", CallingEngine)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "training.jsonl").write_text('{"prompt": "8*9?", "answer": "72"}\n')
    tokenizer = char_tokenizer()
    tokenizer.chat_template = TEMPLATE
    config = ModelConfig(
        hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=2, max_positions=512
    )
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    save_model(new_model(config, len(tokenizer), 0, eos_token_id=eos, pad_token_id=pad), tmp_path / "model", tokenizer)
    return {
        "prompts": {"dataset": "training.jsonl", "eval_dataset": "rows.jsonl", "num_eval": len(ROWS), "chat": True},
        "eval": {"num_prompts": len(ROWS), "num_slots": 2},
        "generator": {"max_new_tokens": 120},
        "model": {"max_positions": 512},
    }


def check_played(found: EvalResult) -> None:
    for row, answer in zip(ROWS, found.greedy_answers, strict=True):
        assert answer.episode is not None
        assert [part.turn for part in answer.episode.turns] == [1, None, None, 2], "the call, and what came of it"
        assert answer.episode.num_tool_calls == 1
        assert answer.reward == float(not row["prompt"].startswith("13"))
    assert found.episodes is not None
    assert found.episodes.num_tool_calls == 1
    assert found.reward == pytest.approx(3 / 4)


def test_a_class_with_tools_of_its_own_and_functions_from_python(recipe: dict[str, Any], tmp_path: Path) -> None:
    scope: dict[str, Any] = {}
    exec(TOOLS, scope)
    fields = {"tool_format": "json_tags", "max_turns": 3, "max_restarts": 0}
    own = recipe | {"environment": fields | {"class": "tools.py:Multiplier"}}
    found = evaluate_model("model", recipe=own)
    assert [answer.failure is None for answer in found.greedy_answers] == [True, True, False, True]
    assert [answer.reward for answer in found.greedy_answers if answer.failure is None] == [1.0, 1.0, 1.0]
    check_played(
        evaluate_model(
            "model", recipe=recipe | {"environment": fields}, tools=[scope["multiply"]], reward=scope["right"]
        )
    )


def test_functions_by_path_from_the_command_line(recipe: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    environment = {"tools": ["tools.py:multiply"], "tool_format": "json_tags", "max_turns": 3, "max_restarts": 0}
    fields = recipe | {
        "environment": environment,
        "rewards": {"terms": [{"function": "tools.py:right"}], "dry_call": False},
    }
    Path("calls.toml").write_text(tomli_w.dumps(fields))
    assert cli.main(["eval", "model", "--recipe", "calls.toml", "--out", "answers.jsonl"]) == 0
    answers = [json.loads(line) for line in Path("answers.jsonl").read_text().splitlines()]
    greedy = answers[: len(ROWS)]
    assert [answer["reward"] for answer in greedy] == [1.0, 1.0, 0.0, 1.0]
    assert all(answer["episode"]["num_tool_calls"] == 1 for answer in greedy)
    assert "calls of tools" in capsys.readouterr().out
