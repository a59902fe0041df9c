"""What an installed wheel has: recipes, pages, and hints that hold where there is no checkout."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OF_A_CHECKOUT = re.compile(r"\b(scripts|benchmarks|examples|experiments)/\w+\.\w+|`make |pip install -e")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of packages that a wheel is unpacked to, as pyproject.toml says what goes where."""
    target = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    folder = tmp_path_factory.mktemp("site")
    for package in target["packages"]:
        shutil.copytree(ROOT / package, folder / Path(package).name, ignore=shutil.ignore_patterns("__pycache__"))
    for source, place in target["force-include"].items():
        shutil.copytree(ROOT / source, folder / place)
    return folder


def installed(site: Path, *command: str, cwd: Path) -> str:
    """What `slipstream COMMAND` of the wheel prints in another folder."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "slipstream.cli", *command],
        env=os.environ | {"PYTHONPATH": str(site), "COLUMNS": "200"},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert not (set(done.stderr.split()) & {"Traceback"}), done.stderr
    return done.stdout + done.stderr


def test_a_wheel_has_its_recipes_and_tells_what_they_need(site: Path, tmp_path: Path) -> None:
    told = installed(site, "recipes", cwd=tmp_path)
    assert str(site / "slipstream" / "recipes") in told
    assert "needs HuggingFaceTB/SmolLM2-135M-Instruct" in told
    told = installed(site, "run", "stylistic", cwd=tmp_path)
    assert "dataset not found" in told
    assert "`slipstream recipes` tells what a shipped recipe needs" in told
    assert list(tmp_path.iterdir()) == []


def test_every_file_that_the_package_reads_is_in_the_wheel(site: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z", "src"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    kept = {name.removeprefix("src/") for name in listed.stdout.split("\0") if name and not name.endswith(".py")}
    endings = {Path(name).suffix for name in kept}
    assert endings >= {".html", ".js", ".toml", ".sbatch", ".sh", ".yaml"}, endings
    assert all((site / path).is_file() for path in kept)


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """The strings of a module that a program can show: not docstrings, parts of one put together."""
    tree = ast.parse(path.read_text())
    shown_never = {id(node.value) for parent in ast.walk(tree) for node in _body(parent) if isinstance(node, ast.Expr)}
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if id(node) in shown_never or id(node) in inside:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "..." for part in node.values]
            yield node.lineno, "".join(map(str, parts))


def _body(node: ast.AST) -> list[ast.stmt]:
    has_one = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    return node.body if has_one else []


def test_what_only_a_checkout_has_is_named_as_that() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in sorted((ROOT / "src").rglob("*.py"))
        for line, text in texts(path)
        if OF_A_CHECKOUT.search(text) and "checkout" not in text
    ]
    assert not found, "a wheel has none of it: say 'in a checkout', or name what works everywhere"
