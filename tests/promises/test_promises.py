"""Every command, code block, make target and script that the documents show does what it is shown for, made small."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Collection
from pathlib import Path

import pytest
from shown import DOCUMENTS, ROOT, Block, blocks, command_blocks, files_of, remarks
from small import NEEDS, PYTHON_SMALLER, QUICK, SCRIPTS, SMALLER, small, with_size
from workplace import furnish, shell

pytestmark = [pytest.mark.promises, pytest.mark.timeout(1800)]

HISTORY = ("CHANGELOG.md", "log.md")  # what was, in the words of its time
SHOWN = [block for path in DOCUMENTS if path.name not in HISTORY for block in command_blocks(path)]
SHOWN += remarks()
RUNNABLE = [
    *sorted((ROOT / "benchmarks").glob("*.py")),
    *sorted((ROOT / "scripts").glob("*.py")),
    *sorted((ROOT / "examples").glob("*.py")),
]
FILES = [path.relative_to(ROOT).as_posix() for path in RUNNABLE if '__name__ == "__main__"' in path.read_text()]
TARGETS = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
ALONE = {with_size(name) for name in FILES} | {small(f"make {target}")[0] for target in TARGETS}  # have own tests
DIFFERENT = list({tuple(map(small, block.text.splitlines())): block for block in reversed(SHOWN)}.values())[::-1]
SDKS = ("agents", "smolagents")  # no dependencies: where one is not installed, what a page shows with it is left out
PAGES = [path for path in DOCUMENTS if any(block.language == "python" for block in blocks(path))]


def run_small(commands: list[str], checkout: Path, store: Path, *, besides: Collection[str | None] = ()) -> None:
    """Run the commands `besides` these in one shell; skip with the reasons where none of them can run here."""
    made = [small(command) for command in commands]
    there = [text for text, _ in made if text is not None and text not in besides]
    if not there:
        pytest.skip("; ".join(dict.fromkeys(why or "it has a test of its own" for _, why in made)))
    text = "\n".join(there)
    furnish(checkout, store, text)
    printed = shell(text, checkout).strip()
    commands = re.split(r'\n(?=(?:[^"]*"[^"]*")*[^"]*$)', text)  # not within quotes
    assert printed or all(" > " in one for one in commands), f"{text} prints nothing"


@pytest.mark.parametrize("block", DIFFERENT, ids=lambda block: block.name)
def test_a_shown_command(block: Block, checkout: Path, store: Path) -> None:
    for name, text in files_of(block.document).items():
        (checkout / name).write_text(text, encoding="utf-8")
    run_small(block.text.splitlines(), checkout, store, besides=ALONE)


@pytest.mark.parametrize("target", TARGETS)
def test_a_make_target(target: str, checkout: Path, store: Path) -> None:
    run_small([f"make {target}"], checkout, store)


@pytest.mark.parametrize("script", FILES)
def test_a_script(script: str, checkout: Path, store: Path) -> None:
    text, why = small(f"python {script}")
    if text is None:
        pytest.skip(why)
    furnish(checkout, store, text)
    assert shell(text, checkout).strip(), f"{text} prints nothing"


@pytest.mark.parametrize("document", PAGES, ids=lambda path: path.name)
def test_shown_python(document: Path, checkout: Path, store: Path) -> None:
    """The blocks of a page in their order, in one process, `slipstream.run` with a run's size below what is shown."""
    if document.name == "algorithms.md":
        pytest.skip("tests/algorithms/test_own_loss.py runs it as it stands")
    files = files_of(document)
    shown = [b.text for b in blocks(document) if b.language == "python" and b.text not in files.values()]
    absent = [name for name in SDKS if importlib.util.find_spec(name) is None]
    text = "\n".join(
        one for one in shown if not any(re.search(rf"^from {name}\b", one, re.MULTILINE) for name in absent)
    )
    for pattern, replacement in PYTHON_SMALLER.items():
        text = re.sub(pattern, replacement, text)
    furnish(checkout, store, text)
    for name, file in files.items():
        (checkout / name).write_text(file, encoding="utf-8")
    (checkout / "shown.py").write_text(f"from small_run import *\n{text}", encoding="utf-8")
    (checkout / "small_run.py").write_text(SMALL_RUN.format(flags=QUICK), encoding="utf-8")
    shell("python shown.py", checkout)


SMALL_RUN = """
import slipstream
from slipstream.cli import RunOptions, run_command
from slipstream.core.recipes import merge
from slipstream.flags import parse

_run = slipstream.run
_small = parse(RunOptions, "{flags}".split(), run_command).overrides


def run(recipe, *, overrides=None, **more):
    return _run(recipe, overrides=merge(_small, overrides or {{}}), **more)


slipstream.run = run
"""


def test_several_machines(checkout: Path, store: Path) -> None:
    """The first two sessions of docs/cluster.md, all groups on this machine."""
    controller, groups, *_ = [b for b in command_blocks(ROOT / "docs" / "cluster.md") if "--group" in b.text]
    sized = controller.text.replace("launch quickstart", f"launch quickstart {QUICK}")
    words = re.sub(r"10\.0\.0\.\d+:\d+", "ADDRESS", sized) + " --address-file at"
    joining = re.sub(r"10\.0\.0\.\d+:\d+", "at", groups.text)
    joining = re.sub(r"--address 10\.0\.0\.\d+", "--address 127.0.0.1", joining)
    words = words.replace("ADDRESS", "127.0.0.1:0")
    waits = "for _ in $(seq 1200); do [ -s at ] && [ -s run.key ] && break; sleep 0.1; done"
    lines = [f"{words} & first=$!", waits, *(f"{line} & all+=($!)" for line in joining.splitlines())]
    printed = shell("\n".join([*lines, "wait $first", 'for pid in "${all[@]}"; do wait $pid; done']), checkout)
    assert "done: 2 steps" in printed


def test_every_row_is_needed() -> None:
    """A row of the tables that nothing shown matches any more is to be deleted."""
    every = [line for block in SHOWN for line in block.text.splitlines()]
    every += [f"make {target}" for target in TARGETS] + [f"python {script}" for script in FILES]
    idle = [pattern for pattern in (*NEEDS, *SMALLER) if not any(re.search(pattern, line) for line in every)]
    python = [block.text for path in PAGES for block in blocks(path)]
    idle += [pattern for pattern in PYTHON_SMALLER if not any(re.search(pattern, text) for text in python)]
    assert not idle, f"nothing that is shown matches {idle}"
    assert set(SCRIPTS) <= set(FILES), f"there is no {set(SCRIPTS) - set(FILES)}"
