"""The user's own code by its name: looked at without importing it, and imported as far as it goes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.core.errors import ConfigError
from slipstream.core.user_code import SCRIPTS_BEING_IMPORTED, defined, imported

FUNCTION = "def f(): return 4\n"


def named(path: str) -> Any:
    return imported(path, what="loss", modules={})


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, which is not on the path of modules."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("init", ["1 / 0\n", "import nothing_of_this_name\n", "raise SystemExit(3)\n", None])
def test_a_package_is_not_imported_to_look_into_it(init: str | None, place: Path) -> None:
    """Also where its folders are no more than that."""
    inner = place / "outer_pkg" / "inner_pkg"
    inner.mkdir(parents=True)
    (inner / "scores.py").write_text(FUNCTION)
    if init is not None:
        (place / "outer_pkg" / "__init__.py").write_text(init)
        (inner / "__init__.py").write_text(FUNCTION + init)
    found = defined("outer_pkg.inner_pkg.scores:f", what="loss")
    assert found is not None
    assert found[0] == inner / "scores.py"
    with pytest.raises(ConfigError, match="has no function 'g'"):
        defined("outer_pkg.inner_pkg.scores:g", what="loss")
    for absent in ("outer_pkg.inner_pkg.score:f", "outer_pkg.scores:f", "outer_pkg.inner_pkg.scores.more:f"):
        with pytest.raises(ConfigError, match=f"there is no module '{absent[:-2]}'"):
            defined(absent, what="loss")
    if init is not None:
        assert defined("outer_pkg.inner_pkg:f", what="loss") is not None
        with pytest.raises(ConfigError, match=r"cannot be imported(.|\n)*__init__.py, line 1"):
            named("outer_pkg.inner_pkg.scores:f")
    assert "outer_pkg.inner_pkg" not in sys.modules


def test_a_file_that_ends_python_is_an_error(place: Path) -> None:
    (place / "ends.py").write_text(f"{FUNCTION}import sys\nsys.exit()\n")
    with pytest.raises(ConfigError, match=r"the loss 'ends.py:f' cannot be imported(.|\n)*SystemExit(.|\n)*line 3"):
        named("ends.py:f")


RUNS = """
import slipstream

{before}
try:
    slipstream.run("no_such_recipe")
except Exception:
    raise AssertionError("a run began")
raise AssertionError("a run was made")
"""


def test_a_script_is_imported_as_far_as_its_own_run(place: Path) -> None:
    (place / "script.py").write_text(RUNS.format(before=FUNCTION))
    assert named("script.py:f")() == 4
    (place / "script.py").write_text(RUNS.format(before="1 / 0"))
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        named("script.py:f")
    assert not SCRIPTS_BEING_IMPORTED


def test_modules_beside_a_file_are_found(place: Path) -> None:
    """As by a worker of rewards, which looks there, too."""
    (place / "apart").mkdir()
    (place / "apart" / "beside_a_file.py").write_text("ONE = 1\n")
    (place / "in_the_working_folder.py").write_text("TWO = 2\n")
    text = "from beside_a_file import ONE\nfrom in_the_working_folder import TWO\n\ndef f():\n    return ONE + TWO\n"
    (place / "apart" / "file.py").write_text(text)
    before = list(sys.path)
    assert named("apart/file.py:f")() == 3
    assert sys.path == before
