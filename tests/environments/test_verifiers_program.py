"""`verifiers_program.py`: its lines and its arguments, and environments of a real verifiers against a scripted policy.

The latter need .venv-verifiers (`make verifiers-env`). Rewards are worked out by hand from the task sets in
`verifiers_tasksets/`, and from the rules of hangman.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from slipstream.environments import verifiers_program as program

ROOT = Path(__file__).parents[2]
TASKSETS = Path(__file__).parent / "verifiers_tasksets"
PYTHON = ROOT / ".venv-verifiers" / "bin" / "python"
LIMIT_S = 60.0

Speak = Callable[[list[dict[str, Any]]], dict[str, Any] | int | str]
"""The policy: a conversation in, its message out, or what refuses it: an HTTP status, or the code of a limit."""
needs_verifiers = pytest.mark.skipif(
    not (PYTHON.parent.parent / "installed").exists(), reason="verifiers is not installed: `make verifiers-env`"
)


# ------------------------------------------------------------------------------------------------- without verifiers


def spoken(lines: list[Any], play: program.Play, num_answers: int) -> list[dict[str, Any]]:
    """Give a desk `lines`, and return what it writes: the input ends after `num_answers` answers."""
    read_end, write_end = os.pipe()
    answers: list[dict[str, Any]] = []

    class Out(io.StringIO):
        def flush(self) -> None:
            answers.append(json.loads(self.getvalue().splitlines()[-1]))
            if len(answers) == num_answers + 1:
                os.close(write_end)

    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    os.write(write_end, text.encode())
    with os.fdopen(read_end, "rb") as source:
        asyncio.run(asyncio.wait_for(program.Desk(play, Out()).run(source), LIMIT_S))
    assert answers[0] == {"ready": True}
    return answers[1:]


def ask(number: int, **row: Any) -> dict[str, Any]:
    return {"episode": number, "row": row, "base_url": "http://127.0.0.1:1/s/K/v1", "api_key": "K"}


async def double(row: Mapping[str, Any], base_url: str, key: str) -> tuple[float | None, dict[str, float]]:
    if row["n"] < 0:
        raise ValueError("n is\nnegative")
    return row["n"] * 2.0, {"n": row["n"]} if row["n"] else {}


def test_each_episode_has_one_line() -> None:
    answers = spoken([ask(1, n=3), ask(2, n=-1), ask(3, n=0)], double, 3)
    assert sorted(answers, key=lambda answer: answer["episode"]) == [
        {"episode": 1, "reward": 6.0, "metrics": {"n": 3}},
        {"episode": 2, "error": "ValueError: n is negative"},
        {"episode": 3, "reward": 0.0},
    ]


def test_lines_that_are_none_are_named_and_passed_over(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["{", "[1]", '{"episode": "1"}', '{"episode": true}', "[" * 30_000, '{"cancel": 9}']
    answers = spoken([*wrong, {"episode": 4, "row": 3}, ask(5, n=1)], double, 2)
    assert {"episode": 5, "reward": 2.0, "metrics": {"n": 1}} in answers
    assert {"episode": 4, "error": "the line needs row (an object), base_url and api_key (texts)"} in answers
    assert len(capsys.readouterr().err.splitlines()) == 5


def test_a_cancelled_episode_says_so_and_the_end_of_the_input_cancels_the_others() -> None:
    async def wait(row: Mapping[str, Any], base_url: str, key: str) -> tuple[float | None, dict[str, float]]:
        await asyncio.Event().wait()
        raise AssertionError

    answers = spoken([ask(1), ask(2), {"cancel": 1}], wait, 1)
    assert answers == [{"episode": number, "error": "the episode was cancelled"} for number in (1, 2)]


def test_no_more_episodes_than_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    async def wait(row: Mapping[str, Any], base_url: str, key: str) -> tuple[float | None, dict[str, float]]:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(program, "MAX_EPISODES", 1)
    first, second = spoken([ask(1), ask(2)], wait, 1)
    assert first == {"episode": 2, "error": "1 episodes are open: no more at a time"}
    assert second["episode"] == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--environment", "x", "--parameters", "{"], "--parameters is no JSON"),
        (["--environment", "x", "--parameters", "[1]"], "--parameters is a list; it is a JSON object"),
        (["--environment", "x"], "has no package verifiers; in a checkout, `make verifiers-env` makes .venv-verifiers"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], text: str) -> None:
    done = called(sys.executable, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert text in done.stderr


def test_another_version_of_verifiers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "verifiers-0.1.9.dist-info").mkdir()
    (tmp_path / "verifiers-0.1.9.dist-info" / "METADATA").write_text("Name: verifiers\nVersion: 0.1.9\n")
    done = called(sys.executable, "--environment", "x", path=tmp_path)
    assert done.returncode == 2
    assert "verifiers is 0.1.9; this program is written for 0.4" in done.stderr


# ------------------------------------------------------------------------------------------------- with verifiers


def variables(path: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "PYTHONPATH": str(path)}


def called(python: Path | str, *arguments: str, path: Path = TASKSETS, **more: str) -> subprocess.CompletedProcess[str]:
    command = [str(python), str(program.__file__), *arguments]
    env = variables(path) | more
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S, stdin=subprocess.DEVNULL)


class Policy:
    """A server of OpenAI's chat completions whose turns `speak` says; it keeps what it was asked, by key."""

    def __init__(self, speak: Speak) -> None:
        self.asked: dict[str, list[dict[str, Any]]] = {}
        policy = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                key = self.headers["Authorization"].removeprefix("Bearer ")
                is_own = self.path == f"/s/{key}/v1/chat/completions"
                policy.asked.setdefault(key, []).append(body)
                said = speak(body["messages"]) if is_own else 404
                if isinstance(said, int):
                    self._answer(said, {"error": {"message": "no room", "code": "context_length_exceeded"}})
                    return
                if isinstance(said, str):
                    self._answer(400, {"error": {"message": "the episode is over", "code": said}})
                    return
                reason = "tool_calls" if said.get("tool_calls") else "stop"
                choice = {"index": 0, "message": {"role": "assistant", **said}, "finish_reason": reason}
                usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
                head = {"id": "1", "object": "chat.completion", "created": 1, "model": body["model"]}
                self._answer(200, head | {"choices": [choice], "usage": usage})

            def _answer(self, status: int, answer: dict[str, Any]) -> None:
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True

    def url(self, key: str) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/s/{key}/v1"


@contextmanager
def serving(speak: Speak) -> Iterator[Policy]:
    policy = Policy(speak)
    thread = threading.Thread(target=policy.server.serve_forever)
    thread.start()
    try:
        yield policy
    finally:
        policy.server.shutdown()
        policy.server.server_close()
        thread.join(LIMIT_S)


class Program:
    """The program at work: lines in, lines out."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def write(self, *lines: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("".join(json.dumps(line) + "\n" for line in lines))
        self.process.stdin.flush()

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], LIMIT_S)[0], "no line came"
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def read_all(self, count: int) -> list[dict[str, Any]]:
        return sorted((self.read() for _ in range(count)), key=lambda answer: answer["episode"])


@contextmanager
def started(name: str, parameters: dict[str, Any] | None = None, **more: str) -> Iterator[Program]:
    command = [str(PYTHON), str(program.__file__), "--environment", name, "--parameters", json.dumps(parameters or {})]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    # Unbuffered, so that `select` sees each line that is not read yet.
    process = subprocess.Popen(command, env=variables(TASKSETS) | more, text=True, **pipes)  # type: ignore[call-overload]
    try:
        assert process.stdout is not None
        process.stdout.reconfigure(write_through=True)
        running = Program(process)
        assert running.read() == {"ready": True}
        yield running
        process.stdin.close()
        assert process.wait(LIMIT_S) == 0
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            pipe.close()


def rows_of(name: str, count: int, parameters: dict[str, Any] | None = None, **more: str) -> list[dict[str, Any]]:
    arguments = ("--environment", name, "--tasks", str(count), "--parameters", json.dumps(parameters or {}))
    done = called(PYTHON, *arguments, **more)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def line(policy: Policy, number: int, row: dict[str, Any]) -> dict[str, Any]:
    return {"episode": number, "row": row, "base_url": policy.url(f"K{number}"), "api_key": f"K{number}"}


@pytest.fixture(scope="module")
def capitals() -> Iterator[Program]:
    """Run the program once for several tests: each episode has a policy of its own."""
    with started("capitals") as running:
        yield running


FRANCE = {"task": '{"prompt": "The capital of France?", "answer": "Paris"}'}


@needs_verifiers
def test_a_turn_is_asked_at_its_own_session_and_rewarded(capitals: Program) -> None:
    rows = rows_of("capitals", 9)
    assert [row["index"] for row in rows] == [0, 1, 2]
    opening = [{"role": "system", "content": "One word."}, {"role": "user", "content": "The capital of Peru?"}]
    assert rows[2]["prompt"] == opening
    said = {"France": "Paris", "Italy": "Ravenna", "Peru": "lima"}
    speak = lambda messages: {"content": said[messages[-1]["content"].split()[-1][:-1]]}  # noqa: E731
    with serving(speak) as policy:
        capitals.write(*(line(policy, number, row) for number, row in enumerate(rows * 8)))
        answers = capitals.read_all(24)
        by_hand = [(1.25, 1.0, 1.0, 5.0), (0.25, 0.0, 1.0, 7.0), (0.0, 0.0, 0.0, 4.0)]
        for number, answer in enumerate(answers):
            reward, right, letter, chars = by_hand[number % 3]
            metrics = {"is_right": right, "first_letter": letter, "num_chars": chars}
            assert answer == {"episode": number, "reward": reward, "metrics": metrics}
        assert policy.asked.keys() == {f"K{number}" for number in range(24)}
        assert policy.asked["K2"] == [{"model": "policy", "messages": opening}]


@needs_verifiers
def test_failures_are_one_episodes_own(capitals: Program) -> None:
    is_asked = threading.Event()
    is_over = threading.Event()

    def speak(messages: list[dict[str, Any]]) -> dict[str, Any] | int:
        if messages[-1]["content"] == "slow":
            is_asked.set()
            is_over.wait(LIMIT_S)
        return {"refused": 500, "full": 400}.get(messages[-1]["content"], {"content": "Paris"})

    def about(text: str) -> dict[str, Any]:
        return {"task": json.dumps({"prompt": text, "answer": "Paris"})}

    with serving(speak) as policy:
        rows = {0: {"prompt": "x"}, 1: {"task": '{"idx": 0}'}, 2: about("refused"), 3: about("full"), 4: about("slow")}
        capitals.write(*(line(policy, number, row) for number, row in rows.items()))
        lost, foreign, refused, full = capitals.read_all(4)
        assert "no column 'task'" in lost["error"]
        assert "answer: Field required" in foreign["error"]
        assert refused["error"].startswith("ProviderError: upstream 500")
        assert full["reward"] == 0.0  # no room for a turn: scored as it is
        assert is_asked.wait(LIMIT_S)
        capitals.write({"cancel": 4})
        assert capitals.read() == {"episode": 4, "error": "the episode was cancelled"}
        is_over.set()
        capitals.write(line(policy, 5, FRANCE))
        assert capitals.read()["reward"] == 1.25


@needs_verifiers
def test_tools_run_in_a_server_of_the_environment() -> None:
    def speak(messages: list[dict[str, Any]]) -> dict[str, Any]:
        if messages[-1]["role"] == "tool":
            return {"content": messages[-1]["content"]}
        calls = [("1", "numbers_look_up", '{"name": "b"}'), ("2", "nothing", "{}"), ("3", "numbers_look_up", "[")]
        calls.append(("4", "numbers_look_up", '{"name": "a"}'))
        return {
            "tool_calls": [{"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in calls]
        }

    with serving(speak) as policy, started("vault") as running:
        running.write(line(policy, 0, {"task": '{"prompt": "Number of a?", "answer": "17"}'}))
        assert running.read() == {"episode": 0, "reward": 1.0, "metrics": {"is_right": 1.0, "tool_results": 4.0}}
        first, second = policy.asked["K0"]
        assert [tool["function"]["name"] for tool in first["tools"]] == ["numbers_look_up"]
        results = [message["content"] for message in second["messages"] if message["role"] == "tool"]
        assert results == ["4", "error: there is no tool 'nothing'", "error: the arguments are no JSON object", "17"]


@needs_verifiers
def test_a_conversation_that_a_limit_of_the_run_ends_is_rewarded() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "numbers_look_up", "arguments": '{"name": "a"}'}}
    codes = ["max_turns", "episode_limit", "invalid_messages"]

    def speak(messages: list[dict[str, Any]]) -> dict[str, Any] | str:
        return {"content": "17", "tool_calls": [call]} if len(messages) == 1 else str(messages[0]["content"])

    with serving(speak) as policy, started("vault") as running:
        rows = [{"task": json.dumps({"prompt": code, "answer": "17"})} for code in codes]
        running.write(*(line(policy, number, row) for number, row in enumerate(rows)))
        *cut, refused = running.read_all(len(codes))
        for answer in cut:
            assert (answer["reward"], answer["metrics"]) == (1.0, {"is_right": 1.0, "tool_results": 0.0})
        assert "invalid_messages" in refused["error"]


@pytest.fixture(scope="module")
def word_lists(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Make word lists as nltk has them, of one word."""
    folder = tmp_path_factory.mktemp("nltk_data")
    words = folder / "corpora" / "words"
    words.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (words / name).write_text("bee\n")
    return {"NLTK_DATA": str(folder)}


@needs_verifiers
def test_a_game_of_textarena_goes_on_turn_by_turn(word_lists: dict[str, str]) -> None:
    parameters = {"game": "Hangman-v0"}
    games = {"won": ["[B]", "[E]"], "lost": ["[E]", *(f"[{letter}]" for letter in "ZYXWVU")], "full": ["[E]"]}
    names = list(games)

    def speak(messages: list[dict[str, Any]]) -> dict[str, Any] | int:
        game = messages[1]["content"].split()[-1]
        num_said = sum(message["role"] == "assistant" for message in messages)
        return {"content": games[game][num_said]} if num_said < len(games[game]) else 400

    (row,) = rows_of("textarena", 1, parameters, **word_lists)
    assert row["prompt"][1]["content"].endswith("C00 C01 C02\n  _   _   _ \nYou have 6 tries left.\nGuessed letters: ")
    task = json.loads(row["task"])
    assert task["info"] == {"game": "Hangman-v0", "seed": 0}
    rows = [{"task": json.dumps({**task, "prompt": f"{task['prompt']} {name}"})} for name in names]
    with serving(speak) as policy, started("textarena", parameters, **word_lists) as running:
        running.write(*(line(policy, number, row) for number, row in enumerate(rows)))
        won, lost, full = running.read_all(3)
        # Of "bee": all; the two e when six tries are gone; nothing where the game did not come to an end.
        assert won["reward"] == 1.0
        assert lost["reward"] == pytest.approx(2 / 3)
        assert full["reward"] == 0.0
        assert [len(policy.asked[f"K{number}"]) for number in range(3)] == [2, 7, 2]
        last = policy.asked["K0"][-1]["messages"]
        assert [message["role"] for message in last] == ["system", "user", "assistant", "user"]
        assert last[-1]["content"].split("\n")[-1].split() == ["B", "_", "_"]


WRONG: list[tuple[str, dict[str, Any], list[str]]] = [
    ("textarina", {}, ["there is no environment 'textarina'", "did you mean 'textarena'?", "nemo-gym, openenv"]),
    ("json", {}, ["'json' cannot be loaded", "exports no Taskset"]),
    ("before", {}, ["'before' is written for verifiers before 0.4"]),
    ("lacking", {}, ["'lacking' cannot be imported", "no_such_package"]),
    ("capitals", {"id": "no-such-env"}, ["environment 'no-such-env' not found"]),
    ("textarena", {}, ["game: Field required"]),
    ("textarena", {"game": "Chess-v0"}, ["game: Input should be 'Wordle-v0'"]),
    ("capitals", {"questions": "x"}, ["questions: Extra inputs", "did you mean 'question'?"]),
    ("capitals", {"agent": 3}, ["the parameter 'agent' is 3"]),
    ("capitals", {"taskset": 3}, ["the parameter 'taskset' is 3"]),
    ("capitals", {"agent": {"max_turn": 3}}, ["agent.max_turn: Extra inputs"]),
    ("capitals", {"id": "user-sim"}, ["the seat 'user' of 'capitals' is not the policy's", "a model of its own"]),
]
LOADS = """
import asyncio, json, sys
sys.path.insert(0, sys.argv[1])
import verifiers_program as program

async def told(name, parameters):
    try:
        async with program.loaded(name, parameters, "policy"):
            return "ready"
    except program.WrongArgument as error:
        return str(error)

for name, parameters, _ in json.loads(sys.argv[2]):
    print(json.dumps(asyncio.run(told(name, parameters))))
"""


@needs_verifiers
def test_what_cannot_be_is_said_before_it_is_ready(tmp_path: Path) -> None:
    (tmp_path / "before.py").write_text("def load_environment(): ...\n")
    (tmp_path / "lacking.py").write_text("import no_such_package\n")
    command = [str(PYTHON), "-c", LOADS, str(Path(str(program.__file__)).parent), json.dumps(WRONG)]
    env = variables(TASKSETS)
    env["PYTHONPATH"] += f"{os.pathsep}{tmp_path}"
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('"')]
    assert len(said) == len(WRONG), done.stderr
    for error, (_, _, texts) in zip(said, WRONG, strict=True):
        assert not [text for text in texts if text not in error], error
        assert "\n" not in error


@needs_verifiers
def test_a_wrong_name_ends_the_program() -> None:
    done = called(PYTHON, "--environment", "nowhere")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith(
        "error: there is no environment 'nowhere'; installed here are harbor"
    )


@needs_verifiers
def test_several_conversations_with_the_policy_are_no_episode() -> None:
    with serving(lambda _: {"content": "Paris"}) as policy, started("capitals", {"id": "best-of-n", "n": 2}) as running:
        running.write(line(policy, 0, FRANCE))
        error = running.read()["error"]
        assert error == "the environment held 2 conversations with the policy; one can be trained"
