"""Environments by the paths of a recipe: what is found, and what is said where nothing is."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from slipstream.core.errors import ConfigError
from slipstream.core.recipes import resolve
from slipstream.environments.calculator import Calculator
from slipstream.environments.checks import check_environments
from slipstream.environments.given import with_given_environment
from slipstream.environments.guess import Guess
from slipstream.environments.protocol import play, tool_schemas
from slipstream.environments.sources import SHIPPED, EnvironmentSource, load, make_source
from slipstream.environments.tools import ToolEnvironment

HERE = Path(__file__).parent
FILE = HERE / "user_environments.py"


def names(environment: Any) -> list[str]:
    return [schema["function"]["name"] for schema in tool_schemas(environment)]


def test_a_class_from_a_file() -> None:
    make = load(make_source("class", f"{FILE}:Maze", params={"size": 3}))
    environment, other = make(), make()
    assert environment is not other
    played = asyncio.run(play(environment, lambda _: "up", columns={"level": 1}))
    assert played.messages[0] == {"role": "user", "content": "###"}
    assert played.reward == 3.0


def test_a_class_from_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    source = make_source("class", "user_environments:Maze", params={"size": 2, "wall": "|"})
    assert source.texts == {}
    assert load(source)().reset() == "||"


def test_the_text_of_a_file_travels_with_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that imports may see other files, or none."""
    monkeypatch.chdir(tmp_path)
    Path("maze.py").write_bytes(FILE.read_bytes())
    source = make_source("class", "maze.py:Maze", params={"size": 1})
    Path("maze.py").unlink()
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(source), type=EnvironmentSource)
    assert read == source
    assert source.path == f"{tmp_path / 'maze.py'}:Maze"
    assert load(read)().reset() == "#"


MAZE = "class Maze:\n    def reset(self): ...\n    def step(self, message): ...\n"


def test_a_class_that_shows_that_it_lacks_a_method_is_refused_by_its_text(tmp_path: Path) -> None:
    file = tmp_path / "lacking.py"
    for text, lesson in (
        ("class Maze: ...\n", "no method 'reset'"),
        ("class Maze:\n    def reset(self): ...\n", "no method 'step'"),
    ):
        file.write_text(f"raise SystemExit\n{text}")
        with pytest.raises(ConfigError, match=lesson):
            make_source("class", f"{file}:Maze")


def test_files_of_a_command_may_be_in_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "agent.py").write_text("print(1)\n")
    source = make_source("program", command=["python", "~/agent.py", "--quick"])
    assert source.command[1:] == (f"{tmp_path}/agent.py", "--quick")
    assert source.texts == {f"{tmp_path}/agent.py": "print(1)\n"}


def test_nothing_is_imported_before_it_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "loud.py"
    file.write_text(f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n{MAZE}")
    source = make_source("class", f"{file}:Maze")
    assert not (tmp_path / "ran").exists()
    load(source)
    assert (tmp_path / "ran").exists()


def test_tools_of_one_file_are_of_one_module() -> None:
    make = load(make_source("tools", tools=[f"{FILE}:add", f"{FILE}:subtract"]))
    environment = make()
    assert isinstance(environment, ToolEnvironment)
    assert environment is not make()
    assert names(environment) == ["add", "subtract"]
    one, other = (environment.tools[name].function for name in ("add", "subtract"))
    assert one.__globals__ is other.__globals__


def test_shipped_environments_have_names() -> None:
    assert isinstance(load(make_source("class", "guess", params={"n": 4}))(), Guess)
    assert isinstance(load(make_source("class", "calculator"))(), Calculator)
    for path in SHIPPED.values():
        load(make_source("class", path))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"kind": "class"}, "no path to a class"),
    ({"kind": "agent", "path": "guess"}, "'guess' is no agent"),
    ({"kind": "class", "path": "gess"}, "did you mean 'guess'"),
    ({"kind": "class", "path": "nowhere.py:Maze"}, "no such file"),
    ({"kind": "class", "path": "~nobody-of-this-name/maze.py:Maze"}, "no such file"),
    ({"kind": "class", "path": f"{'m' * 300}.py:Maze"}, "no such file"),
    ({"kind": "class", "path": "nowhere.at.all:Maze"}, "there is no module 'nowhere.at.all'"),
    ({"kind": "class", "path": f"{FILE}:"}, "no path to a class"),
    ({"kind": "class", "path": f"{FILE}:Mase"}, "has no class 'Mase'(.|\n)*did you mean 'Maze'"),
    ({"kind": "class", "path": f"{FILE}:number"}, "'number' of .* is no class"),
    ({"kind": "class", "path": f"{FILE}:add"}, "'add' of .* is no class"),
    ({"kind": "tools", "tools": [f"{FILE}:Maze"]}, "'Maze' of .* is no function"),
    ({"kind": "tools", "tools": [f"{FILE}:ad"]}, "did you mean 'add'"),
]


@pytest.mark.parametrize(("fields", "lesson"), REFUSED)
def test_what_the_text_shows_is_refused_before_an_import(fields: dict[str, Any], lesson: str) -> None:
    with pytest.raises(ConfigError, match=lesson):
        make_source(**fields)


@pytest.mark.parametrize(
    ("fields", "lesson"),
    [
        ({"kind": "class", "path": f"{FILE}:Maze"}, "cannot be made: missing a required argument: 'size'"),
        ({"kind": "class", "path": f"{FILE}:Maze", "params": {"siz": 3}}, "no parameter 'siz'(.|\n)*mean 'size'"),
        ({"kind": "class", "path": f"{FILE}:Counter"}, "no method 'step'(.|\n)*environment_factory="),
        ({"kind": "class", "path": f"{FILE}:NoReset"}, "no method 'reset'"),
        ({"kind": "class", "path": "slipstream.environments.protocol:Environment"}, "no method 'step'"),
        ({"kind": "tools", "tools": [f"{FILE}:no_tool"]}, r"tool 'no_tool' has (.|\n)*user_environments.py, line"),
        ({"kind": "tools", "tools": [f"{FILE}:add", f"{FILE}:add"]}, "two tools have the name 'add'"),
        ({"kind": "agent", "path": f"{FILE}:subtract"}, "subtract' cannot be called: (.|\\n)*api_key"),
    ],
)
def test_what_an_import_shows_is_refused_then(fields: dict[str, Any], lesson: str) -> None:
    with pytest.raises(ConfigError, match=lesson):
        load(make_source(**fields))


def test_a_file_that_cannot_be_imported(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    for text, lesson in (
        (f"import nothing_of_this_name\n{MAZE}", r"ModuleNotFoundError: .* \(broken.py, line 1\)"),
        (f"raise SystemExit(3)\n{MAZE}", "SystemExit: 3"),
        ("import os as Maze", "has no class 'Maze'"),
    ):
        file.write_text(text)
        source = make_source("class", f"{file}:Maze")
        with pytest.raises(ConfigError, match=lesson):
            load(source)
    file.write_text("class Maze")
    with pytest.raises(ConfigError, match=r"broken.py is no Python(.|\n)*line 1"):
        make_source("class", f"{file}:Maze")
    file.write_bytes(b"# caf\xe9\n" + MAZE.encode())
    with pytest.raises(ConfigError, match=r"broken.py is no Python"):
        make_source("class", f"{file}:Maze")


@pytest.mark.parametrize("start", [b"# coding: latin-1\ncafe = 'caf\xe9'\n", b"\xef\xbb\xbfcafe = 'caf\xc3\xa9'\n"])
def test_a_file_has_the_encoding_that_it_names(start: bytes, tmp_path: Path) -> None:
    file = tmp_path / "maze.py"
    file.write_bytes(start + MAZE.replace("reset(self): ...", "reset(self): return cafe").encode())
    assert load(make_source("class", f"{file}:Maze"))().reset() == "café"


@pytest.mark.parametrize("name", ["sessions", "parked_tokens"])
def test_fields_of_episodes_need_an_environment_which_may_come_from_python(name: str) -> None:
    """When tables are read it is not known yet; when the run is checked it is."""
    config = resolve("quickstart", {"generator": {name: 5}, "environment": {"max_turns": 2}})
    with pytest.raises(ConfigError, match="is about episodes of several turns"):
        check_environments(config, None)
    config, given = with_given_environment(config, Guess)
    check_environments(config, given)
