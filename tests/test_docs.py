"""The documents say what is there: paths, links, commands, flags, examples, and the configuration page."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from shown import DOCUMENTS, ROOT, Block, anchors, blocks, command_blocks, files_of, links, remarks
from typing_extensions import deprecated

import slipstream
from slipstream import cli
from slipstream.cli import (
    COMMANDS,
    ExportOptions,
    ImportOptions,
    LaunchOptions,
    PlanOptions,
    ServeOptions,
    SimulateOptions,
)
from slipstream.core.config import PRESETS, RunConfig
from slipstream.core.recipes import list_recipes, merge, resolve
from slipstream.flags import parse
from slipstream.plan.question import cluster_of_file
from slipstream.trainer.loss_checks import check_loss

PACKAGE = ROOT / "src" / "slipstream"
README = (ROOT / "README.md").read_text(encoding="utf-8")
LAUNCH_FLAGS = {field.name for field in dataclasses.fields(LaunchOptions)}
PLAN_FLAGS = {field.name for field in dataclasses.fields(PlanOptions)}
SERVE_FLAGS = {field.name for field in dataclasses.fields(ServeOptions)}
SIMULATE_FLAGS = {field.name for field in dataclasses.fields(SimulateOptions)}
OWN_FLAGS = {"recipe", "tasks", "json", "help", "data", "set", "num_prompts", "num_samples"}
OWN_FLAGS |= LAUNCH_FLAGS | SIMULATE_FLAGS | PLAN_FLAGS | SERVE_FLAGS | {"port", "open", "merged"}
OWN_FLAGS |= {field.name for options in (ImportOptions, ExportOptions) for field in dataclasses.fields(options)}
SCRIPT_FOLDERS = r"(?:benchmarks|scripts|src/slipstream/environments|tests/(?:integration|cluster|chaos))"
SCRIPT_CALL = re.compile(rf"({SCRIPT_FOLDERS}/\w+\.py)((?: +[^`\n#)]*)?)")

named = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def field_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, info in model.model_fields.items():
        yield prefix + name
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from field_paths(info.annotation, f"{prefix}{name}.")


def test_the_configuration_page_is_what_the_schema_says() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "config_reference.py"))["reference"]()
    committed = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert committed == page, (
        "docs/configuration.md is stale. Run\n\n"
        "    .venv/bin/python scripts/config_reference.py > docs/configuration.md\n\nand commit it."
    )


def test_the_configuration_page_opens_with_25_fields_and_says_the_same_once() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "config_reference.py"))
    chosen, page = script["MOST_CHANGED"], script["reference"]()
    assert len(set(chosen)) == len(chosen) == 25
    assert set(chosen) <= set(field_paths(RunConfig))
    opening = page[: page.index("## Presets")]
    assert [line.split("`")[1] for line in opening.splitlines() if line.startswith("| `")] == list(chosen)
    assert page.count("| `warmup_updates` |") == 1
    assert "`s |" not in page, "no word in backticks has an ending"
    for path in field_paths(RunConfig):
        section, _, name = path.rpartition(".")
        assert f"| `{name}` |" in page or f"`{path}`" in page, path
        assert not section or f"`{section}`" in page, section


def test_the_page_of_the_python_api_is_what_the_package_offers() -> None:
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\w+)$", page, re.MULTILINE) == slipstream.__all__
    assert page == runpy.run_path(str(ROOT / "scripts" / "python_reference.py"))["reference"](), (
        "docs/python.md is stale. Run\n\n"
        "    .venv/bin/python scripts/python_reference.py > docs/python.md\n\nand commit it."
    )
    stub = ast.parse((PACKAGE / "__init__.py").read_text())
    typed = {alias.name for node in ast.walk(stub) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert typed >= set(slipstream.__all__), "a type checker sees only what is imported under TYPE_CHECKING"


def test_the_tables_of_trls_fields_are_those_that_errors_and_imports_use() -> None:
    page = (ROOT / "docs" / "from_trl.md").read_text(encoding="utf-8")
    assert page == runpy.run_path(str(ROOT / "scripts" / "trl_reference.py"))["page"](), (
        "docs/from_trl.md is stale. Run\n\n    .venv/bin/python scripts/trl_reference.py\n\nand commit it."
    )


@named
def test_links_lead_somewhere(document: Path) -> None:
    missing = []
    for target in links(document):
        path, _, anchor = target.partition("#")
        found = document.parent / path if path else document
        if not found.exists() or (anchor and found.suffix == ".md" and anchor not in anchors(found)):
            missing.append(target)
    assert not missing, f"{document.name} links to {missing}"


@named
def test_named_files_exist(document: Path) -> None:
    """Paths in backticks with a folder and a known ending, from the root or from the package."""
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    paths = set(re.findall(r"`(?:python )?([\w.-]+/[\w./-]+\.(?:py|md|toml))\b", text))
    missing = sorted(
        p for p in paths if not p.startswith("path/") and not (ROOT / p).exists() and not (PACKAGE / p).exists()
    )
    assert not missing, f"{document.name} names {missing}"


@named
def test_make_targets_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    used = set(re.findall(r"(?:^\s*|`)make ([a-z][a-z-]*)", document.read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert used <= targets, f"{document.name} uses {used - targets}"


@named
def test_commands_and_flags_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    used = set(re.findall(r"(?:^\s*|`|: )slipstream ([a-z]+(?:-[a-z]+)?)(?![\w-])", text, flags=re.MULTILINE))
    assert used <= COMMANDS.keys(), f"{document.name} uses {used - COMMANDS.keys()}"
    known = OWN_FLAGS | set(field_paths(RunConfig))
    others = r"(?:-m experiments|\bray start|\bhf (?:download|auth)|\blm_eval|\binspect eval)[^`\n]*"
    text = re.sub(others, "", SCRIPT_CALL.sub("", text))
    flags = {flag.replace("-", "_") for flag in re.findall(r"`?--([a-z][a-z._-]*[a-z])", text)} if used else set()
    assert flags <= known, f"{document.name} uses the flags {flags - known}"
    presets = set(re.findall(r"--preset (\w+)", text))
    assert presets <= PRESETS.keys(), f"{document.name} uses {presets - PRESETS.keys()}"
    recipes = set(re.findall(r"slipstream run (\w+)\b(?!\.toml)", text)) - {"RECIPE"}
    assert recipes <= {recipe.name for recipe in list_recipes()}, f"{document.name} runs {recipes}"


@named
def test_flags_of_scripts_exist(document: Path) -> None:
    for script, arguments in SCRIPT_CALL.findall(document.read_text(encoding="utf-8")):
        source = (ROOT / script).read_text(encoding="utf-8")
        for flag in re.findall(r"--[a-z][a-z-]*", arguments):
            assert f'"{flag}"' in source, f"{document.name} calls {script} with {flag}"


def test_the_first_command_comes_by_line_20() -> None:
    lines = README.splitlines()
    assert next(i for i, line in enumerate(lines, start=1) if line.startswith("make ")) <= 20


# Commands and recipes as they are shown; tests/promises runs them


SHOWN = [block for path in DOCUMENTS if path.name not in ("CHANGELOG.md", "log.md") for block in command_blocks(path)]
STARTS = re.compile(r"\bslipstream ((?:run|launch) .*?)(?:;|$)")
WITHOUT_RECIPE = ("--resume", "--help", "--group trainer", "--group generator", "--group reference", "--group reward")
CALLS = sorted(
    {
        call
        for block in [*SHOWN, *remarks()]
        for line in block.text.splitlines()
        for call in STARTS.findall(line)
        if not any(words in call for words in WITHOUT_RECIPE) and not call.endswith("--group")
    }
)


class Parsed(Exception):
    """Ends a command when its flags are understood, before anything is started."""


@pytest.mark.parametrize("call", CALLS)
def test_shown_flags_parse_and_their_run_resolves(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be trained is a configuration, whose loss and stages go together."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for page in ("guide.md", "environments.md"):
        for name, text in files_of(ROOT / "docs" / page).items():
            (tmp_path / name).write_text(text, encoding="utf-8")
    for name in ("planned.toml", "grpo.toml"):
        (tmp_path / name).write_text((ROOT / "recipes" / "quickstart.toml").read_text(encoding="utf-8"))

    def understood(*arguments: Any, **more: Any) -> None:
        options = parse(*arguments, **more)
        check_loss(resolve(options.recipe, options.overrides, options.preset))
        raise Parsed

    monkeypatch.setattr(cli, "parse", understood)
    recipe = "tldr_mini" if " --kl." in call else "quickstart"
    name, *words = shlex.split(call.replace("RECIPE", recipe).replace("$s", "0"))
    with pytest.raises(Parsed):
        COMMANDS[name](words)


def recipes_shown() -> Iterator[Block]:
    """Blocks that are recipes, or parts of them."""
    for document in DOCUMENTS:
        for block in blocks(document):
            if block.language == "toml" or (not block.language and re.match(r"\[+\w+|stages = ", block.text)):
                yield block


@pytest.mark.parametrize("block", recipes_shown(), ids=lambda block: block.name)
def test_shown_recipes_resolve(block: Block, tmp_path: Path) -> None:
    """Whole ones by themselves, parts of one on the quickstart's or, with stages in them, on a pipeline's."""
    shown = tomllib.loads(block.text)
    if "gpus" in shown:
        path = tmp_path / "cluster.toml"
        path.write_text(block.text, encoding="utf-8")
        assert cluster_of_file(path).num_devices == 64
        return
    base = "tldr_mini" if '"stage:' in block.text or "stages" in shown else "quickstart"
    whole = {"prompts": {"tasks": []}} if "dataset" in shown.get("prompts", {}) else {}
    resolve(base, merge(shown, whole))


@named
def test_python_examples_compile(document: Path) -> None:
    for block in blocks(document):
        if block.language == "python":
            ast.parse(block.text)


SCRIPTS = [*sorted((ROOT / "benchmarks").glob("*.py")), *sorted((ROOT / "scripts").glob("*.py"))]
OF_TRL = ("from trl", "import trl ")  # they run where Slipstream need not be


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_script_loads_and_tells_its_flags(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = script.read_text(encoding="utf-8")
    if any(line.startswith(OF_TRL) for line in source.splitlines()):
        ast.parse(source)
        return
    monkeypatch.setattr(sys, "path", [str(script.parent), *sys.path])
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    loaded = runpy.run_path(str(script), run_name="loaded")
    if "ArgumentParser" in source:
        with pytest.raises(SystemExit) as ended:
            loaded["main"]()
        assert ended.value.code == 0
        assert "usage:" in capsys.readouterr().out


# The page of PPO's details


PPO_DETAILS = (
    (ROOT / "docs" / "ppo_details.md").read_text(encoding="utf-8").split("## The details\n")[1].split("\n## ")[0]
)
ASSIGNED = re.compile(r"`([a-z_]+(?:\.[a-z_]+)*) = ([^`]+)`")


def details() -> list[list[str]]:
    """The cells of the table's rows: number, detail, sources, ours, stylistic, tests."""
    rows = [line for line in PPO_DETAILS.splitlines() if re.match(r"\| \d", line)]
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]


def value_at(config: BaseModel, path: str) -> object:
    """The value of a dotted field; KeyError for one that is not there."""
    value: object = config
    for name in path.split("."):
        assert isinstance(value, BaseModel), path
        if name not in type(value).model_fields:
            raise KeyError(path)
        value = getattr(value, name)
    return value


def written(text: str) -> object:
    return None if text == "null" else tomllib.loads(f"value = {text}")["value"]


def test_every_detail_has_a_row_and_tests_that_exist() -> None:
    rows = details()
    assert [int(row[0]) for row in rows] == list(range(1, 46))
    assert {len(row) for row in rows} == {6}
    defined = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    }
    for number, *_, tests in rows:
        named_tests = re.findall(r"`(\w+)`", tests)
        assert named_tests, f"detail {number} is not tested"
        assert set(named_tests) <= defined, f"detail {number} names {set(named_tests) - defined}"


def test_the_settings_of_every_detail_exist_with_their_defaults() -> None:
    defaults = RunConfig.model_validate({"prompts": {"tasks": [{"name": "chain_sum"}]}})
    sections = tuple(RunConfig.model_fields)
    for number, _, _, ours, _, _ in details():
        for path in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)[` ]", ours):
            if path.split(".")[0] in sections:
                value_at(defaults, path)
        for path, text in ASSIGNED.findall(ours):
            assert value_at(defaults, path) == written(text), f"detail {number}: default of {path}"


def test_the_recipe_sets_what_the_details_say() -> None:
    recipe = resolve("stylistic")
    count = 0
    for number, _, _, ours, stylistic, _ in details():
        settings = ASSIGNED.findall(ours if stylistic.startswith("default") else stylistic)
        assert settings or stylistic.startswith(("-", "default")), f"detail {number}"
        count += len(settings)
        for path, text in settings:
            assert value_at(recipe, path) == written(text), f"detail {number}: {path} in stylistic"
    assert count > 40


def test_the_python_page_says_what_is_deprecated() -> None:
    entry = runpy.run_path(str(ROOT / "scripts" / "python_reference.py"))["entry"]

    @deprecated("use `newer`")
    def older() -> int:
        """Return a number."""
        return 1

    assert entry("older", older).endswith("**Deprecated:** use `newer`. Return a number.\n")


@pytest.mark.parametrize("status", [None, "interrupted", "done"])
def test_pictures_are_of_runs_that_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str | None) -> None:
    """`make figures` trains what was stopped half-way anew, in an empty folder."""
    pytest.importorskip("playwright", reason="playwright is in the extra `dev`")
    script = runpy.run_path(str(ROOT / "scripts" / "screenshots.py"))
    if status is not None:
        (tmp_path / "sync").mkdir()
        (tmp_path / "sync" / "summary.json").write_text(json.dumps({"status": status}))
    trained: list[Path] = []

    def run(command: list[str | Path], *, check: bool) -> None:
        assert not Path(command[-1]).exists()
        trained.append(Path(command[-1]))

    monkeypatch.setattr(subprocess, "run", run)
    assert script["train"]("sync", tmp_path) == tmp_path / "sync"
    assert trained == ([] if status == "done" else [tmp_path / "sync"])
