"""The reward function `code`: right programs are told from wrong ones, and hostile ones reach and gain nothing."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hostile_programs
import pytest
from hostile_programs import ATTACKS, ENDLESS, GAMES
from processes import below
from reward_jobs import job, run_jobs

from slipstream.core.errors import ConfigError
from slipstream.rewards.code import InOut, last_program, parse_tests
from slipstream.rewards.functions import make_term
from slipstream.rewards.pool import ScoringPool

MakePool = Callable[..., ScoringPool]
SECRET = "quartz-" + "ibex-41"


@pytest.fixture(scope="module")
def pool(make_pool: MakePool) -> ScoringPool:
    """Deadlines are far beyond what anything takes here: a busy machine must not decide."""
    return make_pool(("code", {"partial": True, "test_timeout_s": 10.0, "memory_mb": 128}), timeout_s=60.0)


@pytest.fixture(scope="module")
def strict(make_pool: MakePool) -> ScoringPool:
    """All tests of a row have to pass, and there are few of them, whose output is short."""
    params = {"max_tests": 2, "max_output_kb": 0.5, "test_timeout_s": 10.0}
    return make_pool(("code", params), timeout_s=60.0)


def fenced(source: str, language: str = "python") -> str:
    return f"Here is the program:\n\n```{language}\n{source}\n```\nIt works.\n"


def rewards(pool: ScoringPool, *cases: tuple[str, Any]) -> list[float | None]:
    """Of programs with their tests."""
    done = run_jobs(pool, [job(i, fenced(source), tests=tests) for i, (source, tests) in enumerate(cases)])
    assert all(one.failure is None for one in done.values()), done
    return [done[i].parts[0] for i in range(len(cases))]


def test_signals_to_all_processes_of_a_run_do_not_reach_programs(make_pool: MakePool) -> None:
    """What starts programs goes on; in a program they do what they usually do."""
    pool = make_pool(("code", {"test_timeout_s": 10.0}), timeout_s=60.0)
    for number in (signal.SIGTERM, signal.SIGHUP):
        for pid in set().union(*(below(slot.worker._keeper.pid) for slot in pool._slots)):
            os.kill(pid, number)
    asks = "import signal\nprint(*(signal.getsignal(n).name for n in (signal.SIGTERM, signal.SIGHUP)))"
    assert rewards(pool, (asks, {"inputs": [""], "outputs": ["SIG_DFL SIG_DFL"]})) == [1.0]
    assert pool.num_restarts == 0


SUM = "a, b = map(int, input().split())\nprint(a + b)"
ADD = "def add(a, b):\n    return a + b"


@pytest.mark.parametrize(
    ("source", "tests", "reward"),
    [
        (SUM, {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}, 1.0),
        (SUM, {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "8"]}, 0.5),
        (SUM, '{"inputs": ["1 2\\n"], "outputs": ["3"]}', 1.0),
        (SUM, [{"input": "1 2", "output": "3"}, {"input": "x", "output": "3"}], 0.5),
        (SUM, {"inputs": [["1 2", "ignored"]], "outputs": [["3"]]}, 1.0),
        ("print('a  ')\nprint()\n", {"inputs": [""], "outputs": ["a"]}, 1.0),  # spaces at ends of lines count nothing
        ("print(' a')", {"inputs": [""], "outputs": ["a"]}, 0.0),  # at their beginnings they do
        ("print(1)\nraise ValueError", {"inputs": [""], "outputs": ["1"]}, 0.0),
        ("if __name__ == '__main__':\n    print(1)\n    raise SystemExit", {"inputs": [""], "outputs": ["1"]}, 1.0),
        (
            "import threading\ndef main(): print(input())\nthreading.Thread(target=main).start()",
            {"inputs": ["é"], "outputs": ["é"]},
            1.0,
        ),
        (
            "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\nprint(P(1))",
            [{"input": "", "output": "P(x=1)"}],
            1.0,
        ),
        (ADD, ["assert add(1, 2) == 3", "assert add(1, 2) == 4"], 0.5),
        (ADD, "for i in range(5):\n    assert add(i, i) == 2 * i", 1.0),
        (ADD, "def check(f):\n    assert f(1, 1) == 2\n    assert f([1], [2]) == [1, 2]\ncheck(add)", 1.0),
        (ADD, ["try:\n    add(1, 'a')\nexcept TypeError:\n    pass\nelse:\n    assert False"], 1.0),
        (ADD, {"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [3, [1, 2]]}, 1.0),
        (
            "class Solution:\n    def add(self, a, b): return (a, b)",
            {"fn_name": "add", "inputs": [[1, 2]], "outputs": [[1, 2]]},
            1.0,
        ),
        (
            "def f(a): return {'a': (a, {'b': (a,)})}",
            {"fn_name": "f", "inputs": [[1]], "outputs": [{"a": [1, {"b": [1]}]}]},
            1.0,
        ),
        (
            "def f(): return {(1, 2): {3}, 'a': (b'x', 1j, None, 1.5)}",
            ["assert f() == {(1, 2): {3}, 'a': (b'x', 1j, None, 1.5)}"],
            1.0,
        ),
        (
            "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
            "    def __len__(self): return len(self.items)\n    def __getitem__(self, i): return self.items[i]",
            [
                "s = Stack()\ns.push(4)\ns.push(5)",
                "assert len(s) == 2 and list(s) == [4, 5] and s[1] == 5 and s.items == [4, 5]",
            ],
            1.0,
        ),
        ("def f(n):\n    yield from range(n)", ["assert list(f(3)) == [0, 1, 2]", "assert f(3) != [0, 1, 2]"], 1.0),
        ("def f(n): return 3**n\ndef g(): return 1", ["assert f(20000) == 3**20000", "assert g() == 1"], 1.0),
        ("def f(): return 'x' * 5_000_000\ndef g(): return 1", ["assert f()", "assert g() == 1"], 0.5),
        (
            "def f(n): return str(n)",
            {"fn_name": "f", "inputs": [[1], [2], [3]], "outputs": [["1"], "2", ["3", "4"]]},
            2 / 3,
        ),
        ("print('a\u2028b', end='\\f')", {"inputs": [""], "outputs": ["a\u2028b\f"]}, 1.0),
        ("X = object()\ndef same(x): return x is X", ["assert same(X)", "assert not same(1)"], 1.0),
        (
            "import enum\nclass E(enum.Enum):\n    A = 1\n    B = 2\ndef f(): return E.A",
            ["assert f() == E.A and f() != E.B and f() in {E.A} and f() != 1"],
            1.0,
        ),
        ("import atexit\natexit.register(lambda: print(1))", {"inputs": [""], "outputs": ["1"]}, 1.0),
        (
            "import io, sys\nsys.stdout = io.StringIO()\nprint(2)\nprint(1, file=sys.__stdout__)",
            {"inputs": [""], "outputs": ["1"]},
            1.0,
        ),
        (
            "from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor()\npool.submit(print, 1)",
            {"inputs": [""], "outputs": ["1"]},
            1.0,
        ),
        ("print(1)\nexit()", {"inputs": [""], "outputs": ["1"]}, 1.0),
        (
            "def f():\n    quit(3)",
            ["try:\n    f()\nexcept RuntimeError as error:\n    assert 'SystemExit' in str(error)"],
            1.0,
        ),
        (
            "def f(x: int): pass\nprint(f.__annotations__['x'] is int)",
            {"inputs": [""], "outputs": ["True"]},
            1.0,
        ),
        ("def f(): return 1", ["def g(x: int): return f()\nassert g.__annotations__['x'] is int and g(0) == 1"], 1.0),
        # A test that the program does not outlive takes none of the others with it, whatever their order.
        (
            "import os\ndef f(x):\n    return os._exit(0) if x == 'end' else x",
            ["assert f(1) == 1", "assert f('end')", "assert f(2) == 2", "assert f(3) == 4", "assert f(4) == 4"],
            0.6,
        ),
        (ADD, ["import math", "assert add(1, 2) == 3"], 1.0),
    ],
)
def test_right_programs_are_told_from_wrong_ones(pool: ScoringPool, source: str, tests: Any, reward: float) -> None:
    assert rewards(pool, (source, tests)) == [reward]


def test_all_tests_have_to_pass_unless_told_otherwise(strict: ScoringPool) -> None:
    cases = [
        (ADD, ["assert add(1, 2) == 3", "assert add(1, 2) == 4"]),
        (ADD, ["assert add(1, 2) == 3", "assert add(1, 1) == 2", "assert False"]),  # the third is beyond `max_tests`
        (SUM, {"inputs": ["1 2", "1 3"], "outputs": ["3", "5"]}),
    ]
    assert rewards(strict, *cases) == [0.0, 1.0, 0.0]
    done = run_jobs(
        strict, [job(0, fenced(ADD)), job(1, "no code", tests=["assert True"]), job(2, fenced(ADD), tests=3)]
    )
    assert done[0].parts == [None]
    assert done[1].parts == [0.0]
    assert "ValueError: tests are text" in (done[2].failure or "")


@pytest.mark.parametrize(
    ("tests", "lesson"),
    [
        ("def check(candidate):\n    assert candidate(1, 2) == 4", "no test asks anything of the program"),
        (["assert True", "import math"], "no test asks anything of the program"),
        ("['assert add(1, 2) == 4']", "neither JSON nor Python that asks anything"),
        ("{'inputs': ['1 2'], 'outputs': ['4']}", "neither JSON nor Python that asks anything"),
        ('{"inputs": [null], "outputs": ["4"],}', "neither JSON nor Python that asks anything"),
        ("", "neither JSON nor Python that asks anything"),
        ('{"inputs": ["1', "neither JSON nor Python: "),
    ],
)
def test_tests_that_any_program_would_pass_are_a_fault_of_the_row(pool: ScoringPool, tests: Any, lesson: str) -> None:
    done = run_jobs(pool, [job(0, fenced(ADD), tests=tests)])
    assert lesson in (done[0].failure or "")


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_program_reaches_nothing(pool: ScoringPool, tmp_path: Path, attack: str) -> None:
    barriers, _ = ATTACKS[attack]
    if not barriers & pool.isolation:
        pytest.skip(f"none of {sorted(barriers)} holds on this platform")
    secret_file = tmp_path / "id_ed25519"
    secret_file.write_text("secret")
    private = (str(secret_file), str(Path.home() / ".ssh"), str(Path.cwd()), str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        source = hostile_programs.source(attack, private=private, secret=SECRET, port=port)
        # A second test whose expected output only a program that has found it can print.
        assert rewards(pool, (source, {"inputs": ["", ""], "outputs": ["held", SECRET]}), (SUM, ONE)) == [0.5, 1.0]


ONE = {"inputs": ["1 2"], "outputs": ["3"]}


@pytest.mark.parametrize(  # a segmentation fault is a crash, too
    "game", [pytest.param(game, marks=[pytest.mark.slow] if game == "a crash" else []) for game in GAMES]
)
def test_a_program_without_an_answer_gets_nothing(pool: ScoringPool, game: str) -> None:
    assert rewards(pool, GAMES[game], (SUM, ONE), (ADD, ["assert add(1, 2) == 3"])) == [0.0, 1.0, 1.0]


def test_programs_that_never_end_are_ended(make_pool: MakePool) -> None:
    pool = make_pool(("code", {"test_timeout_s": 0.3, "memory_mb": 128}), timeout_s=20.0)
    start_s = time.monotonic()
    endless = [(source, ONE) for source in ENDLESS.values()] + [(ENDLESS["spinning"], ["assert add(1, 2) == 3"])]
    assert rewards(pool, *endless) == [0.0] * len(endless)
    assert time.monotonic() - start_s > 0.3 * len(ENDLESS)  # none ended before its time
    assert pool.num_restarts == 0
    assert any(rewards(pool, (SUM, ONE)) == [1.0] for _ in range(20)), "a slow machine may take longer to start one"


def test_all_tests_together_keep_the_deadline_of_the_worker(make_pool: MakePool) -> None:
    pool = make_pool(("code", {"test_timeout_s": 10.0, "partial": True}), timeout_s=25.0)
    slow = "import time\nx = input()\nif x == 'slow': time.sleep(600)\nprint(x)"
    tests = {"inputs": ["quick", *["slow"] * 10], "outputs": ["quick", *["slow"] * 10]}
    assert rewards(pool, (slow, tests)) == [1 / 11]


def test_what_a_program_prints_is_bounded(strict: ScoringPool) -> None:
    fits, too_much = "x" * 511, "x" * 513
    cases = [(f"print('x' * {len(text)})", {"inputs": [""], "outputs": [text]}) for text in (fits, too_much)]
    assert rewards(strict, *cases) == [1.0, 0.0]


def test_programs_leave_nothing_to_one_another(pool: ScoringPool) -> None:
    leave = "import sys, random\nopen('note', 'w').write('x')\nsys.modules['marker'] = sys\nprint('done')"
    look = "import os, sys\nprint(os.listdir('.'), 'marker' in sys.modules, os.getcwd())"
    where = "/tmp" if "files" in pool.isolation else "/"
    if where == "/":
        pytest.skip("without a mount namespace there is no empty folder for each")
    expected = {"inputs": [""], "outputs": [f"[] False {where}"]}
    assert rewards(pool, (leave, {"inputs": [""], "outputs": ["done"]}), (look, expected)) == [1.0, 1.0]


def test_the_order_of_sets_is_the_same_in_every_worker(pool: ScoringPool, strict: ScoringPool) -> None:
    program = "print(*{str(i) for i in range(20)})"
    import subprocess
    import sys

    environment = {"PYTHONHASHSEED": "0"}
    expected = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True).stdout
    case = (program, {"inputs": [""], "outputs": [expected]})
    assert [rewards(each, case) for each in (pool, strict)] == [[1.0], [1.0]]


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("no block", None),
        ("```python\na = 1\n```", "a = 1"),
        ("```\na\n```\n```py\nb\n\nc\n```", "b\n\nc"),
        ("```python\na\n```\nOutput:\n```text\n3\n```", "a"),
        ("```python\na\n```\n```python\nb", "a"),  # cut off
        ("````python\ns = '''\n```\n'''\n````", "s = '''\n```\n'''"),
        ("1. so\n   ```python\n   def f():\n       pass\n   ```", "def f():\n    pass"),
        ("```python a = 1``` inline", None),
        ("```\n```", ""),
        ("```\r\na = 'b\u2028c'\r\nd\r\n```", "a = 'b\u2028c'\nd"),
    ],
)
def test_the_last_closed_block_is_the_program(text: str, program: str | None) -> None:
    assert last_program(text) == program
    assert last_program(text, fenced=False) == (text if program is None else program)


def test_finding_the_program_takes_linear_time() -> None:
    def seconds(text: str) -> float:
        return min(_timed(last_program, text) for _ in range(5))

    for unit in ("```\n", "`", "```python\n```\n", " " * 3 + "```x`\n"):
        assert seconds(unit * 40_000) < 40 * max(seconds(unit * 4_000), 1e-4)


def _timed(function: Callable[[str], object], text: str) -> float:
    start_s = time.process_time()
    function(text)
    return time.process_time() - start_s


@pytest.mark.parametrize(
    "column",
    [
        3,
        [3],
        [{"input": "x"}],
        {"inputs": ["x"]},
        {"inputs": ["x"], "outputs": []},
        {"inputs": [1], "outputs": ["1"]},
        {"inputs": [1], "outputs": [1], "fn_name": "f"},
        {"inputs": [[1]], "outputs": [1], "fn_name": "f(); import os; os"},
    ],
)
def test_malformed_tests_are_refused(column: Any) -> None:
    with pytest.raises(ValueError, match=r"tests|test|inputs|input|fn_name|arguments"):
        parse_tests(column)


def test_tests_are_read() -> None:
    assert parse_tests({"inputs": ["a"], "outputs": ["b"]}) == [InOut("a", "b")]
    assert parse_tests("assert f()") == ["assert f()"]
    assert parse_tests('["assert f()"]') == ["assert f()"]


@pytest.mark.parametrize(
    ("params", "lesson"),
    [
        ({"test_timeout_s": 0}, "test_timeout_s"),
        ({"memory_mb": True}, "memory_mb"),
        ({"max_tests": "3"}, "max_tests"),
        ({"max_output_kb": float("nan")}, "max_output_kb"),
        ({"max_tests": 0.5}, "max_tests"),
        ({"max_tests": 2.5}, "max_tests"),
        ({"memory_mb": 1e-7}, "memory_mb"),
        ({"max_output_kb": 1e-4}, "max_output_kb"),
        ({"tests": 3}, "must name a column"),
        ({"timeout_s": 3}, "no parameter 'timeout_s'"),
        ({"programs": 3}, "no parameter 'programs'"),
    ],
)
def test_wrong_parameters_are_refused(params: dict[str, Any], lesson: str) -> None:
    with pytest.raises(ConfigError, match=lesson):
        make_term("code", params)
