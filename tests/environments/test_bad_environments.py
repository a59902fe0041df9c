"""Bad input about environments: each case is one error with what is allowed, before any process of the run starts.

Those of files go through `slipstream run` and `slipstream.run` alike; those of objects through the latter. Workers in
which environments are tried are no part of the run: they are gone when the error is told.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest
import tomli_w

import slipstream
from slipstream import cli
from slipstream.controller.nursery import Nursery
from slipstream.core import lifeline
from slipstream.core.errors import ConfigError
from slipstream.core.recipes import save_config
from slipstream.core.sections import ModelConfig
from slipstream.environments.checks import check_environments
from slipstream.environments.given import with_given_environment
from slipstream.models.hf import save_model
from slipstream.models.initialise import new_model
from slipstream.models.tokenizer import char_tokenizer
from slipstream.stages.named import resolve

pytestmark = pytest.mark.usefixtures("no_import")

FILE = '''
class Good:
    def reset(self, **columns): return None
    def step(self, message): return {"messages": "more", "done": True, "reward": 1.0}
class NoStep:
    def reset(self, **columns): return None
class NoStepEither(NoStep): ...
class Sized(Good):
    def __init__(self, size: int): self.size = size
class Init(Good):
    def __init__(self): raise OSError("no licence")
class Reset(Good):
    def reset(self, **columns): raise OSError("no such board")
class Column(Good):
    def reset(self, board, **columns): return None
class Talks(Good):
    def reset(self, **columns): return [{"role": "assistant", "content": "I"}]
class Long(Good):
    def reset(self, **columns): return "word " * 200
class Raises(Good):
    def step(self, message): raise KeyError("board")
class Number(Good):
    def step(self, message): return 3
class Nan(Good):
    def step(self, message): return {"messages": "", "reward": float("nan")}
class Final(Good):
    def final_reward(self): return "much"
class Hangs(Good):
    def step(self, message):
        import time
        time.sleep(60)
class State(Good):
    def step(self, message): return {"messages": "more"}
    def state(self): return {"place": (1, 2)}
    def restore(self, state, **columns): pass
class Restore(State):
    def state(self): return 1
    def restore(self, state, **columns): raise OSError("no saved board")
class Network(Good):
    def reset(self, **columns):
        import socket
        socket.create_connection(("127.0.0.1", 9), timeout=0.2)
async def quiet(row, base_url, api_key): return 1.0
async def broken(row, base_url, api_key): raise OSError("no tools")
def short(row, base_url): return 1.0
number = 3
def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: One.
        b: Two.
    """
    return a + b
def untyped(a, b):
    """Add.

    Args:
        a: One.
        b: Two.
    """
def undocumented(a: int) -> int:
    return a
class WithUntyped:
    def reset(self, **columns): return None
    def move(self, where):
        """Move."""
class WithAdd:
    def reset(self, **columns): return None
    def add(self, a: int) -> int:
        """Add.

        Args:
            a: One.
        """
class WithLook:
    def reset(self, **columns): return None
    def look(self) -> str:
        """Look."""
'''
OTHER = 'def add(a: int) -> int:\n    """Add.\n\n    Args:\n        a: One.\n    """\n    return a\n'
MODEL = {"hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2}
BASE: dict[str, Any] = {
    "steps": 2,
    "groups_per_step": 2,
    "completions_per_group": 4,
    "model": {**MODEL, "max_positions": 512},
    "prompts": {"dataset": "data.jsonl", "num_eval": 4},
    "generator": {"num_slots": 8, "max_new_tokens": 4},
    "eval": {"num_prompts": 4},
}
REWARD = {"rewards": {"terms": [{"function": "length", "params": {"target_tokens": 4}}]}}
CHAT = {"model": {"path": "model"}, "prompts": {"chat": True}}
EXTENDS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<me>{% endif %}"
)
FORGETS = (  # only the last turn is whole
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
objects: dict[str, Any] = {}
exec(FILE, objects)


def zero(completions: list[Any], **_: Any) -> list[float]:
    return [0.0] * len(completions)


@dataclass(frozen=True)
class Case:
    """What is wrong, and words of the error in their order; `template` is that of the checkpoint in model/."""

    name: str
    words: tuple[str, ...]
    tables: Mapping[str, Any] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None


def env(name: str, words: str | tuple[str, ...], also: Mapping[str, Any] | None = None, **fields: Any) -> Case:
    """A recipe whose [environment] has these fields, `cls` for `class`."""
    fields = {"class" if key == "cls" else key: value for key, value in fields.items()}
    said = (words,) if isinstance(words, str) else words
    return Case(name, said, over({"environment": fields}, also or {}))


def given(name: str, words: str | tuple[str, ...], **arguments: Any) -> Case:
    """Arguments of `slipstream.run`."""
    return Case(name, (words,) if isinstance(words, str) else words, given=arguments)


def over(base: Mapping[str, Any], tables: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in tables.items():
        below = merged.get(key)
        merged[key] = over(below, value) if isinstance(value, Mapping) and isinstance(below, Mapping) else value
    return merged


GOOD = "env.py:Good"
TWO = [{"name": "a", "class": GOOD}, {"name": "c", "class": GOOD}]
EARLY = [  # told before torch is imported: nothing is imported or called for them
    env("no such file", ("absent.py:Good", "there is no such file", "allowed"), cls="absent.py:Good"),
    env("no such class", ("has no class 'Goood'", "did you mean 'Good'?"), cls="env.py:Goood"),
    env("no such module", ("there is no module 'no_such_module'", "hint"), cls="no_such_module:Good"),
    env("a name alone", ("is no path to a class", "allowed", "guess, calculator"), cls="Good"),
    env("a shipped one misspelt", "did you mean 'guess'?", cls="gess"),
    env("a function as class", ("'add' of 'env.py' is no class", "a function"), cls="env.py:add"),
    env("a number as class", ("is no class", "3"), cls="env.py:number"),
    env("no Python", ("syntax.py is no Python", "line 1"), cls="syntax.py:Good"),
    env("no step", ("has no method 'step'", "allowed", "step(self, message)", "hint"), cls="env.py:NoStep"),
    env("a class as tool", ("'Good' of 'env.py' is no function", "environment.class"), REWARD, tools=[GOOD]),
    env("no such tool", ("has no function 'ad'", "did you mean 'add'?"), REWARD, tools=["env.py:ad"]),
    env("tools in a text", ("'environment.tools'", "a list"), REWARD, tools="env.py:add"),
    env("a class and tools", ("one environment", "environment.class and environment.tools"), cls=GOOD, tools=["a:b"]),
    env("parameters alone", ("belong to environment.class", "size without a class"), parameters={"size": 3}),
    env("equal names", ("names of their own", "a more than once"), choices=[TWO[0], TWO[0]]),
    env("a column alone", ("environment.column", "[[environment.choices]]"), cls=GOOD, column="kind"),
    env("a choice of nothing", ("environment.choices.0, 'a', with none", "class, agent"), choices=[{"name": "a"}]),
    env(
        "a choice of two",
        ("a choice is one environment", "environment.choices.1, 'b', with class and agent"),
        choices=[TWO[0], {"name": "b", "class": GOOD, "agent": "env.py:quiet"}],
    ),
    env(
        "parameters of an agent among others",
        ("belong to environment.class", "size without a class"),
        choices=[TWO[0], {"name": "b", "agent": "env.py:quiet", "parameters": {"size": 3}}],
    ),
    env(
        "an agent among others without a network",
        "over a network",
        choices=[TWO[0], {"name": "b", "agent": "env.py:quiet"}],
        network="none",
    ),
    env(
        "no such agent among others",
        "has no function 'quite'",
        choices=[TWO[0], {"name": "b", "agent": "env.py:quite"}],
    ),
    env("no such program among others", "there is no program 'nope'", choices=[{"name": "b", "program": ["nope"]}]),
    env("max_turns 0", ("'environment.max_turns'", "0", "> 0"), cls=GOOD, max_turns=0),
    env(
        "network", ("'environment.network'", "'internet'", "'none', 'gateway' or 'host'"), cls=GOOD, network="internet"
    ),
    env("variables", ("no environment variable", "KEY=1"), cls=GOOD, variables=["KEY=1"]),
    env(
        "variables that are not set",
        ("lack a variable", "SLIPSTREAM_NO_SUCH_KEY, SLIPSTREAM_NOR_THIS, not set here", "allowed", "export"),
        cls=GOOD,
        variables=["PATH", "SLIPSTREAM_NO_SUCH_KEY", "SLIPSTREAM_NOR_THIS"],
    ),
    env("observation", ("environment.observation", "{contents}", "{content}"), cls=GOOD, observation="{contents}"),
    env("a field misspelt", "did you mean 'max_turns'?", cls=GOOD, max_truns=3),
    env(
        "TRL's name", ("max_tool_calling_iterations", "environment.max_turns"), cls=GOOD, max_tool_calling_iterations=3
    ),
    env("room for no turn", ("has room for a turn", "2", "4"), cls=GOOD, max_episode_tokens=2),
    env("longer than the model", ("do not fit the model", "512"), cls=GOOD, max_episode_tokens=1000),
    env(
        "segments",
        ("not cut into segments", "in_flight"),
        {"generator": {"segment_tokens": 4}, "weight_update": "between_batches"},
        cls=GOOD,
    ),
    env(
        "ReMax",
        ("greedy baseline", "'leave_one_out'"),
        {"loss": {"name": "reinforce", "advantages": "greedy_baseline"}},
        cls=GOOD,
    ),
    env("tools without a reward", "tools give no reward", {"rewards": {"terms": []}}, tools=["env.py:add"]),
    env(
        "a stage of one turn",
        ("samples completions of one turn", "'preferences'", "sft, dpo, reward_model, rl and evaluate"),
        {"stages": ["sft", "preferences", "rl"], "model": {"path": "stage:sft"}, **REWARD},
        cls=GOOD,
    ),
    env("from Python, in a recipe", ("is a Python object", "file.py:Class"), cls="python:Good"),
    Case("sessions alone", ("generator.sessions", "without an environment"), {"generator": {"sessions": 4}, **REWARD}),
    Case("parked tokens alone", ("generator.parked_tokens",), {"generator": {"parked_tokens": 4}, **REWARD}),
    Case(
        "versions at turns alone",
        ("generator.weight_update_at", "without an environment"),
        {"generator": {"weight_update_at": "turn"}, "weight_update": "between_batches", **REWARD},
    ),
    env("no such agent", ("has no function 'quite'", "did you mean 'quiet'?"), agent="env.py:quite"),
    env("a class as agent", ("'Good' of 'env.py' is no function", "environment.class"), agent=GOOD),
    env("an agent and a class", "environment.class and environment.agent", cls=GOOD, agent="env.py:quiet"),
    env("an agent without a network", ("over a network", "'gateway'"), agent="env.py:quiet", network="none"),
    env("no such program", ("there is no program 'no-such-program'", "PATH"), program=["no-such-program"]),
    env("a script as program", ("there is no program 'env.py'", "['python', 'my_agent.py']"), program=["env.py"]),
    env("no file for a program", ("there is no such file", "absent.py"), program=["python", "absent.py"]),
    env("a program in a text", ("'environment.program'", "a list"), program="python agent.py"),
    env("no verifiers", ("a Python that has verifiers", "make verifiers-env"), verifiers="x", verifiers_python="no"),
    given("an agent that is none", ("an agent is a function", "3"), agent=3),
    given("no agents", "no environment in the table", agent={}),
    given("one of several agents is none", "an agent is a function", agent={"a": objects["quiet"], "b": 3}),
    given("a class as agent, from Python", "an agent is a function", agent=objects["Good"]),
    given("an agent and tools", ("one environment", "tools and agent"), agent=objects["quiet"], tools=[objects["add"]]),
    given("not callable", ("environment makes no environments", "3", "a class"), environment=3),
    given("an object", ("makes no environments", "give the class"), environment=objects["Good"]()),
    given("a list", "environment makes no environments", environment=[objects["Good"]]),
    given("an empty table", "no environment in the table", environment={}),
    given(
        "no step, from Python", ("'NoStep' has no method 'step'", "environment_factory="), environment=objects["NoStep"]
    ),
    given("two kinds", ("one environment", "environment and tools"), environment=GOOD, tools=[objects["add"]]),
    given("one tool", ("tools are a list", "tools=[function, ...]"), tools=objects["add"]),
    given("the path of one tool", "tools are a list", tools="env.py:add"),
    given("no tools", "the list of tools is empty", tools=[]),
    given("a lambda", "has no name for the model to call it by", tools=[lambda a: a], reward=zero),
    given("tools of two kinds", "some of each", tools=[objects["add"], "env.py:add"], reward=zero),
    given("a factory's path", ("environment_factory makes no environments", "env.py:Good"), environment_factory=GOOD),
    given("a factory without reset", "without a method 'reset'", environment_factory=dict),
    given("TRL's rollout_func", ("no such argument", "rollout_func", "environment="), rollout_func=objects["add"]),
]
AHEAD = {"weight_update": "in_flight", "max_staleness": 2}
TRIED = "an environment fails when it is tried, before the run"
LATER = [  # needs the user's code, the data or the model
    env("inherits no step", ("has no method 'step'", "allowed"), cls="env.py:NoStepEither"),
    env("a parameter is missing", ("missing a required argument: 'size'", "size: int"), cls="env.py:Sized"),
    env("a parameter misspelt", "did you mean 'size'?", cls="env.py:Sized", parameters={"sise": 3}),
    env("an import fails", ("cannot be imported", "nothing_there", "broken.py, line 1"), cls="broken.py:Good"),
    env("a constructor raises", (TRIED, "OSError: no licence (env.py, line"), cls="env.py:Init"),
    env(
        "a tool without types",
        ("tool 'untyped'", "missing a type hint", "env.py, line"),
        REWARD,
        tools=["env.py:untyped"],
    ),
    env(
        "a tool without words",
        ("tool 'undocumented' has no docstring", "allowed"),
        REWARD,
        tools=["env.py:undocumented"],
    ),
    env("two tools of one name", "two tools have the name 'add'", REWARD, tools=["env.py:add", "other.py:add"]),
    env("no row has the column", ("column 'sort' names no environment", "a, c"), choices=TWO, column="sort"),
    env("a row names another", ("column 'kind' names no environment", "'b'", "a, c"), choices=TWO, column="kind"),
    env("reset raises", (TRIED, "OSError: no such board (env.py, line"), cls="env.py:Reset"),
    env("reset needs a column", (TRIED, "'board'", "prompt, answer, kind"), cls="env.py:Column"),
    env("reset speaks for the policy", (TRIED, "the role of an environment's message"), cls="env.py:Talks"),
    env(
        "reset leaves no room",
        (TRIED, "what reset said leaves no room for a turn: 1,006 tokens, of at most 512"),
        cls="env.py:Long",
    ),
    env("step raises", (TRIED, "KeyError: 'board' (env.py, line"), cls="env.py:Raises"),
    env(
        "step returns nonsense",
        (TRIED, "step returns a Step", "not 3 (int)", "prompt, answer, kind"),
        cls="env.py:Number",
    ),
    env("a reward is not finite", (TRIED, "a reward is finite, not nan"), cls="env.py:Nan"),
    env("the last reward is a text", (TRIED, "a reward is a number or None"), cls="env.py:Final"),
    env("step hangs", (TRIED, "timed out after 0.3 s"), cls="env.py:Hangs", step_limit_s=0.3),
    env("a state is no JSON", (TRIED, "a state is a value of JSON, without tuples"), AHEAD, cls="env.py:State"),
    env("restore raises", (TRIED, "OSError: no saved board (env.py, line"), AHEAD, cls="env.py:Restore"),
    env("no network", (TRIED, "environment.network = 'host'"), cls="env.py:Network"),
    env("an agent with two arguments", ("env.py:short' cannot be called", "api_key"), agent="env.py:short"),
    env("an agent that asks for nothing", (TRIED, "ended without a request"), agent="env.py:quiet"),
    env("an agent that raises", (TRIED, "OSError: no tools (env.py, line"), agent="env.py:broken"),
    env(
        "an agent among others that raises",
        (TRIED, "OSError: no tools (env.py, line"),
        choices=[TWO[0], {"name": "b", "agent": "env.py:broken"}],
        column="kind",
    ),
    env("a program that fails", (TRIED, "exit code 3: no licence"), program=["python", "fails.py"]),
    given("an agent that raises, from Python", (TRIED, "OSError: no tools"), agent=objects["broken"]),
    Case(
        "a template that forgets",
        ("does not extend its own text", "removes the thoughts of earlier turns"),
        {"environment": {"class": GOOD}, **CHAT},
        template=FORGETS,
    ),
    Case("no template", ("chat template",), {"environment": {"tools": ["env.py:add"]}, **CHAT, **REWARD}),
    Case(
        "calls that nobody can read",
        ("how this model writes calls", "environment.tool_format"),
        {"environment": {"tools": ["env.py:add"]}, **CHAT, **REWARD},
        template=EXTENDS.replace("<me>", "<assistant>"),
    ),
    Case(
        "tools, and prompts that are no chats",
        ("tools are told to the policy by its chat template", "prompts.chat = true"),
        {
            "environment": {"tools": ["env.py:add"], "tool_format": "hermes"},
            "model": {"path": "model"},
            **REWARD,
        },
        template=EXTENDS.replace("<me>", "<assistant>"),
    ),
    given(
        "step raises, from Python", (TRIED, "KeyError: 'board'", "prompt, answer, kind"), environment=objects["Raises"]
    ),
    given(
        "a method without types",
        ("tool 'move'", "missing a type hint"),
        environment_factory=objects["WithUntyped"],
        reward=zero,
    ),
    given("an untyped tool, from Python", "tool 'untyped'", tools=[objects["untyped"]], reward=zero),
    given(
        "factories of other tools",
        ("have the same tools", "add", "look"),
        environment_factory={"a": objects["WithAdd"], "b": objects["WithLook"]},
        reward=zero,
    ),
]


class Started(BaseException):
    """The run began."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the files that the cases name, in which no process of a run can be started."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise Started

    monkeypatch.setattr(Nursery, "start", refuse)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "env.py").write_text(FILE)
    (tmp_path / "other.py").write_text(OTHER)
    (tmp_path / "syntax.py").write_text("class Good(:\n")
    (tmp_path / "broken.py").write_text("import nothing_there\n" + FILE)
    (tmp_path / "fails.py").write_text('import sys\nsys.exit(sys.stderr.write("no licence\\n") and 3)\n')
    rows = [{"prompt": f"word {n}", "answer": "x", "kind": "b" if n % 2 else "a"} for n in range(40)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    yield tmp_path
    assert not list(tmp_path.glob("made/*")), "a run's folder is left"


def tables_of(case: Case, place: Path) -> dict[str, Any]:
    tables = over(BASE, case.tables)
    if tables["model"].get("path") is not None:
        tables["model"] = {"path": "model"}
        tokenizer = char_tokenizer("".join(map(chr, range(32, 127))) + "\n")
        tokenizer.chat_template = case.template
        config = ModelConfig(**MODEL, max_positions=512)
        eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
        save_model(new_model(config, len(tokenizer), 0, eos_token_id=eos, pad_token_id=pad), place / "model", tokenizer)
    return tables


def check_said(told: str, words: tuple[str, ...]) -> None:
    plain, at = " ".join(told.split()), 0
    for word in words:
        found = plain.find(" ".join(word.split()), at)
        assert found >= 0, f"'{word}' is missing, or not in its place, in:\n{told}"
        at = found
    assert "Traceback" not in told


LIKE_OTHERS = {  # of the same kind as one that stays, or told of by a test of fewer parts; in a worker of their own
    "inherits no step",
    "a parameter is missing",
    "a parameter misspelt",
    "two tools of one name",
    "a row names another",
    "a reward is not finite",
    "an agent with two arguments",
    "reset needs a column",
    "tools, and prompts that are no chats",
    "no template",
    "calls that nobody can read",
    "reset raises",
    "reset speaks for the policy",
    "step raises",
    "the last reward is a text",
    "a state is no JSON",
    "an import fails",
    "an agent that raises",
    "an agent that raises, from Python",
    "a tool without words",
    "a tool without types",
    "step returns nonsense",
    "no network",
}
CASES = [
    pytest.param(case, id=case.name, marks=[pytest.mark.slow] if case.name in LIKE_OTHERS else [])
    for case in [*EARLY, *LATER]
]


@pytest.mark.parametrize("case", CASES)
def test_python_says_what_is_wrong(case: Case, place: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        slipstream.run(tables_of(case, place), out="made/run", display=False, **case.given)
    check_said(str(caught.value), case.words)


EARLY_OF_FILES = [case for case in EARLY if not case.given]
OF_FILES = [
    *(
        pytest.param(case, id=case.name, marks=[pytest.mark.slow] if number % 4 else [])
        for number, case in enumerate(EARLY_OF_FILES)
    ),
    *(pytest.param(case, id=case.name, marks=pytest.mark.slow) for case in LATER[::5] if not case.given),
]


@pytest.mark.parametrize("case", OF_FILES)
def test_the_command_says_the_same(case: Case, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "recipe.toml").write_text(tomli_w.dumps(tables_of(case, place)))
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(cli.main(["run", "recipe.toml", "--out", "made/run"]))
    assert ended.value.code == 2
    check_said(capsys.readouterr().err, case.words)


def test_early_errors_come_before_torch(place: Path) -> None:
    """In one new interpreter, as this one has it."""
    lines = [json.dumps([case.name, tables_of(case, place)]) for case in EARLY_OF_FILES]
    (place / "cases.jsonl").write_text("\n".join(lines))
    done = subprocess.run([sys.executable, "-c", IMPORTS_NOTHING], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("refused") == len(lines) > 25


IMPORTS_NOTHING = """
import json, sys
import slipstream
from slipstream.core.errors import ConfigError

for line in open("cases.jsonl"):
    name, tables = json.loads(line)
    try:
        slipstream.run(tables, out="made/run", display=False)
    except ConfigError:
        print("refused", name)
    heavy = {"torch", "transformers"} & sys.modules.keys()
    assert not heavy, (name, heavy)
"""


@pytest.mark.usefixtures("own_nursery")
def test_what_is_right_begins(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = lifeline.command  # the run's own nursery imports nothing either
    monkeypatch.setattr(lifeline, "command", lambda _, *arguments: command("bare_nursery", *arguments))
    tables = over(BASE, {"environment": {"class": GOOD, "variables": ["SLIPSTREAM_NO_SUCH_KEY"]}, "host": "process"})
    monkeypatch.setenv("SLIPSTREAM_NO_SUCH_KEY", "")
    with pytest.raises(Started):
        slipstream.run(tables, out=place / "begun", display=False)


def test_variables_that_are_set_are_no_fault_and_reading_asks_for_none(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`test_what_is_right_begins` has one in a whole run."""
    config = resolve(over(BASE, {"environment": {"class": GOOD, "variables": ["SLIPSTREAM_NO_SUCH_KEY"]}}))
    assert config.environment.variables == ["SLIPSTREAM_NO_SUCH_KEY"]
    with pytest.raises(ConfigError, match="SLIPSTREAM_NO_SUCH_KEY, not set here"):
        check_environments(config, None)
    monkeypatch.setenv("SLIPSTREAM_NO_SUCH_KEY", "")
    check_environments(config, None)


def test_a_run_of_python_goes_on_with_its_environment_only(place: Path) -> None:
    config, _ = with_given_environment(resolve(BASE | REWARD), objects["Good"], keeps_terms=False)
    assert config.rewards.terms == []
    (place / "run").mkdir()
    save_config(config, place / "run" / "config.toml")
    (place / "run" / "ledger.jsonl").write_text("")
    with pytest.raises(ConfigError) as caught:
        slipstream.run(resume="run", display=False)
    check_said(str(caught.value), ("'Good' is a Python object", "python:Good", "environment=..."))


def test_eval_lacks_what_came_from_python(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables = tables_of(env("", "", {"model": {"path": "model"}}, cls="python:Good"), place)
    (place / "recipe.toml").write_text(tomli_w.dumps(tables))
    assert cli.main(["eval", "model", "--recipe", "recipe.toml"]) == 2
    check_said(capsys.readouterr().err, ("'Good' is a Python object", "evaluate_model(...)", "file.py:Class"))
