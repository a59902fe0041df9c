"""`scripts/install.py` with programs in pip's place: what is shown of their output, and the exit code."""

from __future__ import annotations

import io
import os
import pty
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "install.py"
WARNED = """\
WARNING: Retrying (Retry(total=4)) after connection broken by 'NewConnectionError'
  one more line of it
DEPRECATION: something is old
"""
COLLECTED = """\
Obtaining file:///somewhere
Collecting torch==2.13.0 (from slipstream-rl==0.1.0)
  Downloading torch-2.13.0-cp313-none-linux_x86_64.whl (888.1 MB)
Installing collected packages: numpy, torch
Successfully installed numpy-2.3.0 torch-2.13.0
"""


def fake_environment(folder: Path, *, out: str, err: str = "", code: int = 0) -> Path:
    """Make an environment whose Python is a program that prints `out` and `err`, and ends with `code`."""
    (folder / "bin").mkdir(parents=True)
    (folder / "pyvenv.cfg").touch()
    (folder / "bin" / "pip").touch()
    body = f"import sys\nopen({str(folder / 'asked')!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
    body += f"sys.stdout.write({out!r})\nsys.stdout.flush()\nsys.stderr.write({err!r})\nsys.exit({code})\n"
    python = folder / "bin" / "python"
    python.write_text(f"#!{sys.executable}\n{body}")
    python.chmod(0o755)
    return folder


def install(environment: Path, *packages: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), str(environment), *packages]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_an_installation_is_two_lines_and_no_warning(tmp_path: Path) -> None:
    environment = fake_environment(tmp_path / "env", out=COLLECTED, err=WARNED)
    done = install(environment, "-c", "constraints.txt", "-e", ".[dev]")
    assert done.returncode == 0
    assert done.stderr == ""
    first, *progress, last = done.stdout.splitlines()
    assert first == f"installing -c constraints.txt -e .[dev] into {environment}"
    assert re.fullmatch(r"installed 2 packages in \d+ s", last)
    assert all(re.match(r" *\d+ s  ", line) for line in progress)  # none, where the machine is quick
    asked, compiling = (environment / "asked").read_text().splitlines()
    options = "--no-compile --disable-pip-version-check --no-input"
    assert asked == f"-m pip install {options} -c constraints.txt -e .[dev]"
    assert compiling.startswith("-c import compileall")


def test_an_error_is_shown_whatever_stands_around_it(tmp_path: Path) -> None:
    error = "ERROR: the resolver does not take all packages into account\nfoo 1.0 requires bar, which is not there\n"
    done = install(fake_environment(tmp_path / "env", out=COLLECTED, err=WARNED + error + WARNED), "foo")
    assert done.returncode == 0
    assert done.stderr == error


def test_a_failure_shows_the_last_output_and_has_the_code_of_pip(tmp_path: Path) -> None:
    out = "".join(f"Collecting package-{index}\n" for index in range(100))
    error = "ERROR: No matching distribution found for package-99\n"
    done = install(fake_environment(tmp_path / "env", out=out, err=3 * WARNED + error, code=3), "package-99")
    assert done.returncode == 3
    assert "installed" not in done.stdout
    lines = done.stderr.splitlines()
    assert error.strip() in lines
    assert "Collecting package-99" in lines
    assert "Collecting package-50" not in lines
    assert sum("Retrying" in line for line in lines) == 1  # it may say why, once
    assert lines[-1] == "failed: installing package-99, exit code 3"


def test_what_is_kept_for_a_failure_does_not_hang_on_the_stream_that_is_read_first() -> None:
    script = runpy.run_path(str(SCRIPT))
    errors = io.StringIO()
    listener = script["Listener"](script["Progress"](io.StringIO(), "starting pip"), errors)
    for line in (3 * WARNED).splitlines():
        listener.hear_error(line)
    for index in range(100):
        listener.hear(f"Collecting package-{index}")
    assert list(listener.warnings) == WARNED.splitlines()
    assert list(listener.output) == [f"Collecting package-{index}" for index in range(80, 100)]
    assert errors.getvalue() == ""


def test_an_environment_is_made_again_whose_making_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """venv writes pyvenv.cfg first, and pip last."""
    environment = fake_environment(tmp_path / "env", out="")
    main = runpy.run_path(str(SCRIPT))["main"]
    commands: list[list[str]] = []
    monkeypatch.setitem(main.__globals__, "run", lambda command, *_: commands.append(command))
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(environment)])
    assert main() == 0
    assert commands == []
    (environment / "bin" / "pip").unlink()
    assert main() == 0
    assert commands == [[sys.executable, "-m", "venv", str(environment)]]


@pytest.mark.parametrize(
    ("script", "call"), [("vllm_env", ("install", "packaging")), ("older_packages", ("create", "torch==2.11.*"))]
)
def test_a_script_whose_installation_fails_ends_with_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, call: tuple[str, str]
) -> None:
    """What failed has been said: no traceback follows."""
    name, package = call
    create = runpy.run_path(str(SCRIPT.with_name(f"{script}.py")))[name]
    (fails := tmp_path / "install.py").write_text("raise SystemExit(7)")
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda command, **options: run([command[0], fails], **options))
    with pytest.raises(SystemExit) as ended:
        create(tmp_path / "env", package)
    assert ended.value.code == 7


def test_modules_that_are_not_compiled_are_told_by_their_place_in_the_environment(tmp_path: Path) -> None:
    """Wherever that is."""
    packages = tmp_path / "tests" / "transformers" / "models" / "site-packages"
    left = {"tests/a.py", "pip/tests/a.py", "transformers/models/llama/a.py"}
    for name in left | {"a.py", "pip/a.py", "transformers/a.py"}:
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / name).write_text("number = 1\n")
    code = f"import sysconfig; sysconfig.get_path = lambda _: {str(packages)!r}; "
    one_core = runpy.run_path(str(SCRIPT))["COMPILE"].replace("workers=0", "workers=1")
    subprocess.run([sys.executable, "-c", code + one_core], check=True, timeout=60)
    found = {str(path.parent.parent.relative_to(packages)) for path in packages.rglob("*.pyc")}
    assert found == {".", "pip", "transformers"}


@pytest.mark.slow
def test_the_environment_is_made_where_there_is_none(tmp_path: Path) -> None:
    done = install(tmp_path / "env")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(rf"created {re.escape(str(tmp_path / 'env'))} in \d+ s", done.stdout.splitlines()[-1])
    assert (tmp_path / "env" / "bin" / "python").exists()
    again = install(tmp_path / "env")
    assert (again.returncode, again.stdout) == (0, "")
    for path in (tmp_path / "env").rglob("pip*"):  # as an interrupted installation leaves it
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    assert install(tmp_path / "env").stdout.splitlines()[-1].startswith("created ")

    # Modules of packages are compiled, whether or not all of them can be.
    about = "tiny-1.dist-info"
    files = {
        "tiny.py": "number = 1\n",
        "torn.py": "number = (\n",
        f"{about}/METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": "",
    }
    with zipfile.ZipFile(wheel := tmp_path / "tiny-1-py3-none-any.whl", "w") as file:
        for name, text in files.items():
            file.writestr(name, text)
    done = install(tmp_path / "env", "--no-index", str(wheel))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].startswith("installed 1 package in ")
    compiled = [path.name.partition(".")[0] for path in (tmp_path / "env").rglob("site-packages/__pycache__/t*.pyc")]
    assert compiled == ["tiny"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("out", [io.StringIO(), Terminal()], ids=["pipe", "terminal"])
def test_nothing_is_silent_for_three_seconds_or_thirty_in_a_log(out: io.StringIO) -> None:
    """A log has a line within three seconds where something has changed, and no line many times."""
    script = runpy.run_path(str(SCRIPT))
    now_s = 0.0
    progress = script["Progress"](out, "starting pip", now_s=lambda: now_s)
    listener = script["Listener"](progress, io.StringIO())
    shown_s = []
    length = 0
    for tick in range(1, 361):
        now_s = tick * 0.25
        if tick == 80:
            for line in COLLECTED.splitlines()[:3]:
                listener.hear(line)
        progress.draw()
        if len(out.getvalue()) > length:
            length = len(out.getvalue())
            shown_s.append(now_s)
    assert max(b - a for a, b in zip([0.0, *shown_s], [*shown_s, now_s], strict=True)) < (3.0 if out.isatty() else 30.0)
    assert "downloading torch-2.13.0-cp313-none-linux_x86_64.whl (888.1 MB)" in out.getvalue()
    assert out.getvalue().count("\n") == (0 if out.isatty() else len(shown_s))
    assert out.isatty() or shown_s == [2.5, 20.0, 49.5, 79.0]


def test_a_terminal_keeps_two_lines(tmp_path: Path) -> None:
    environment = fake_environment(tmp_path / "env", out=COLLECTED, err=WARNED)
    ours, theirs = pty.openpty()
    command = [sys.executable, str(SCRIPT), str(environment), "torch"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs)
    os.close(theirs)
    said = b""
    try:
        while data := os.read(ours, 1 << 16):
            said += data
    except OSError:  # the other end is closed
        assert process.wait() == 0
    os.close(ours)
    visible = [line.rpartition("\r\x1b[K")[2].rstrip("\r") for line in said.decode().split("\n")]
    assert visible[0].startswith("installing torch into ")
    assert re.fullmatch(r"installed 2 packages in \d+ s", visible[1])
    assert visible[2:] == [""]


def test_a_failure_without_a_compiler_says_what_is_missing(tmp_path: Path) -> None:
    """With a PATH on which there is none."""
    environment = fake_environment(tmp_path / "env", out=COLLECTED, err="error: subprocess-exited-with-error\n", code=1)
    (tmp_path / "cc").symlink_to(sys.executable)
    shown = "import runpy, sys, sysconfig; sysconfig.get_config_vars()['CC'] = 'cc -pthread'; del sys.argv[0]"
    command = [sys.executable, "-c", f"{shown}; runpy.run_path(sys.argv[0], run_name='__main__')"]
    for path, is_missing in ((tmp_path / "env", True), (tmp_path, False)):
        done = subprocess.run(
            [*command, str(SCRIPT), str(environment), "-e", "."],
            capture_output=True,
            text=True,
            timeout=120,
            env=os.environ | {"PATH": str(path)},
        )
        assert done.returncode == 1
        assert ("no C compiler (cc)" in done.stderr) == is_missing
