"""What sdist and wheel have, and that an installed wheel trains; hints that hold where there is no checkout."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import urllib.request
import venv
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import slipstream

ROOT = Path(__file__).parents[1]
BROUGHT = {"jinja2": "torch", "pyarrow": "datasets", "pydantic_core": "pydantic"}  # imported, and declared by these
ELSEWHERE = {"generator/vllm/worker.py", "environments/verifiers_program.py"}  # run where Slipstream need not be
IMPORTED = re.compile(r"^ *(?:from|import) (\w+)[\w.]* *(?:import\b|as\b|[,#]|$)", re.MULTILINE)
OF_A_CHECKOUT = re.compile(r"\b(scripts|benchmarks|examples|experiments)/\w+\.\w+|`make |pip install -e")
NAMES_OF_A_CHECKOUT = re.compile(r"\b(scripts|benchmarks|examples|experiments)\b|`make\b|\bpip\b")
RELEASE = runpy.run_path(str(ROOT / "scripts" / "release.py"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An sdist, and the wheel that is built from it; those of `make release` where it calls."""
    if given := os.environ.get("SLIPSTREAM_DIST"):
        (sdist,), (wheel,) = Path(given).glob("*.tar.gz"), Path(given).glob("*.whl")
        return sdist, wheel
    sdist, wheel = RELEASE["build"](tmp_path_factory.mktemp("dist"))
    return sdist, wheel


@pytest.fixture(scope="module")
def site(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of packages that the wheel is unpacked to."""
    folder = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(built[1]).extractall(folder)
    return folder


COMMANDS = """
import sys
from slipstream.cli import main
for command in sys.argv[1:]:
    print("$", command, flush=True)
    main(command.split())
    sys.stderr.flush()
"""


def installed(site: Path, *commands: str, cwd: Path) -> list[str]:
    """What each `slipstream COMMAND` of the wheel prints in another folder; one process imports for all of them."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", COMMANDS, *commands],
        env=os.environ | {"PYTHONPATH": str(site), "COLUMNS": "200"},
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert "Traceback" not in done.stdout.split(), done.stdout
    assert done.returncode == 0, done.stdout
    _, *told = done.stdout.split("$ ")
    assert len(told) == len(commands), done.stdout
    return told


def test_a_wheel_has_its_recipes_and_tells_what_they_need(site: Path, tmp_path: Path) -> None:
    recipes, told = installed(site, "recipes", "run stylistic", cwd=tmp_path)
    assert str(site / "slipstream" / "recipes") in recipes
    assert "needs HuggingFaceTB/SmolLM2-135M-Instruct" in recipes
    assert "dataset not found" in told
    assert "`slipstream recipes` tells what a shipped recipe needs" in told
    assert list(tmp_path.iterdir()) == []


def test_every_file_that_the_package_reads_is_in_the_wheel(built: tuple[Path, Path], site: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z", "src"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    kept = {name.removeprefix("src/") for name in listed.stdout.split("\0") if name}
    endings = {Path(name).suffix for name in kept}
    assert endings >= {".py", ".html", ".js", ".css", ".svg", ".toml", ".sbatch", ".sh", ".yaml", ".typed"}, endings
    assert all((site / path).is_file() for path in kept)
    recipes = {path.name for path in (ROOT / "recipes").iterdir()}
    assert {path.name for path in (site / "slipstream" / "recipes").iterdir()} == recipes
    RELEASE["check"](*built)


def test_a_release_is_built_by_a_python_that_has_no_filters_of_archives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.11.2 of Debian 12, for example: an argument that it does not know is a TypeError."""

    def hatch(command: Sequence[str], *, cwd: Path, check: bool) -> None:
        assert check
        if command[-1] == "sdist":
            with tarfile.open(tmp_path / "slipstream_rl-1.tar.gz", "w:gz") as archive:
                archive.add(ROOT / "LICENSE", "slipstream_rl-1/LICENSE")
        else:
            shutil.copyfile(cwd / "LICENSE", tmp_path / "slipstream_rl-1-py3-none-any.whl")

    def extractall(archive: tarfile.TarFile, path: str) -> None:
        content = archive.extractfile("slipstream_rl-1/LICENSE")
        assert content is not None
        Path(path, "slipstream_rl-1").mkdir()
        Path(path, "slipstream_rl-1", "LICENSE").write_bytes(content.read())

    monkeypatch.setattr(subprocess, "run", hatch)
    monkeypatch.setattr(tarfile.TarFile, "extractall", extractall)
    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    _, wheel = RELEASE["build"](tmp_path)
    assert wheel.read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_a_release_that_lacks_a_file_is_refused(built: tuple[Path, Path], tmp_path: Path) -> None:
    """The check of `make release` names what is not there, and what should not be."""
    poorer = tmp_path / built[1].name
    with zipfile.ZipFile(built[1]) as whole, zipfile.ZipFile(poorer, "w") as cut:
        for name in whole.namelist():
            if name != "slipstream/recipes/quickstart.toml":
                cut.writestr(name, whole.read(name))
        cut.writestr("slipstream/secret.env", "")
    with pytest.raises(SystemExit) as refused:
        RELEASE["check"](built[0], poorer)
    assert str(refused.value).splitlines() == [
        "not in the wheel: ['slipstream/recipes/quickstart.toml']",
        "in the wheel, but not committed: ['slipstream/secret.env']",
    ]


def test_the_metadata_has_one_name_one_version_and_the_old_extras() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == "slipstream-rl"
    assert project["version"] == slipstream.__version__
    assert set(project["optional-dependencies"]) >= {
        *("dev", "trackers", "experiments", "gguf", "vllm", "environments"),
    }
    page = (ROOT / "docs" / "guide.md").read_text()
    assert all(f"| `{extra}` |" in page for extra in project["optional-dependencies"])
    assert all(re.search("[<>=]", one) for one in project["dependencies"]), "a dependency has no bound"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_wheel_trains_in_an_environment_of_its_own(built: tuple[Path, Path], tmp_path: Path) -> None:
    """The command of the installed wheel, far from the checkout, from the list of recipes to the live page.

    Only Slipstream is installed: what it depends on is lent by this environment, whose link to the checkout does not
    count there, since files that end in .pth are read in the new environment's own folder alone.
    """
    home, work = tmp_path / "environment", tmp_path / "elsewhere"
    work.mkdir()
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "-q"]
    subprocess.run([*install, str(built[1])], check=True, timeout=300)
    (site,) = home.glob("lib/python*/site-packages")
    (site / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    outside = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    environment = {key: value for key, value in os.environ.items() if key not in outside} | {"COLUMNS": "200"}

    def slipstream_says(*arguments: str, ends: int = 0) -> str:
        done = subprocess.run(
            [str(home / "bin" / "slipstream"), *arguments],
            env=environment,
            cwd=work,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == ends, done.stdout + done.stderr
        return done.stdout

    where = [str(python), "-c", "import slipstream, sys; print(slipstream.__file__, *sys.path, sep='\\n')"]
    paths = subprocess.run(where, env=environment, cwd=work, capture_output=True, text=True, timeout=60).stdout.split()
    assert Path(paths[0]).is_relative_to(home)
    assert not any(Path(path).is_relative_to(ROOT / "src") for path in paths)

    hinted = [*install[:-3], "--no-index", "slipstream-rl[experiments]"]  # what `doctor` and errors advise
    done = subprocess.run(hinted, env=environment, cwd=work, capture_output=True, text=True, timeout=300)
    assert f"Requirement already satisfied: slipstream-rl[experiments] in {site}" in done.stdout, done.stderr

    assert str(site / "slipstream" / "recipes") in slipstream_says("recipes")
    found = json.loads(slipstream_says("doctor", "--json"))
    assert (found["versions"]["slipstream"], found["versions"]["commit"]) == (slipstream.__version__, None)
    assert set(found["extras"]) >= {"vllm", "trackers", "environments", "experiments"}
    small = "--steps 2 --groups-per-step 4 --completions-per-group 4 --generator.num-slots 16 --prompts.num-train 64"
    small += " --prompts.num-eval 16 --eval.num-prompts 8 --eval.every 0 --loss.no-skip-no-signal"
    small += " --warm-start.steps 2 --warm-start.batch-size 8 --out run"
    slipstream_says("run", "quickstart", *small.split())
    summary = json.loads((work / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("done", 2)
    slipstream_says("report", "run", "--out", "page.html")
    page = (work / "page.html").read_text()
    assert "</html>" in page
    assert (ROOT / "src/slipstream/observe/report/style.css").read_text().strip()[:40] in page
    assert "step" in slipstream_says("plan", "llama-3.1-8b", "--gpus", "16")
    job = slipstream_says("launch", "quickstart", "--slurm", "job")
    assert list((work / "job").iterdir()), job
    watched([str(home / "bin" / "slipstream"), "watch", "run", "--port", "0"], environment, work)


def watched(command: list[str], environment: dict[str, str], work: Path) -> None:
    """The live page and every file that it names are served as the checkout has them."""
    source = ROOT / "src" / "slipstream" / "observe" / "watch" / "page"
    with subprocess.Popen(
        command, env=environment | {"PYTHONUNBUFFERED": "1"}, cwd=work, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            (address,) = re.findall(r"http://127\.0\.0\.1:\d+/", line)
            page = urllib.request.urlopen(address, timeout=30).read().decode()
            assert page == (source / "page.html").read_text()
            files = [path for path in source.rglob("*.*") if path.name != "page.html"]
            assert {path.suffix for path in files} == {".js", ".css", ".svg"}
            for path in files:
                content = urllib.request.urlopen(address + path.relative_to(source).as_posix(), timeout=30).read()
                assert content == path.read_bytes(), path
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=60)


def test_what_the_package_imports_is_what_it_asks_for() -> None:
    """The environment that `test_a_wheel_trains` lends has more, and would not show what is undeclared."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def named(requirements: list[str]) -> set[str]:
        return {re.match(r"[\w.-]+", one)[0].lower().replace("_", "-") for one in requirements}  # type: ignore[index]

    sources = {path.relative_to(ROOT / "src" / "slipstream").as_posix(): path for path in (ROOT / "src").rglob("*.py")}
    contents = [path.read_text() for place, path in sources.items() if place not in ELSEWHERE]
    modules = {name for text in contents for name in IMPORTED.findall(text)}
    modules -= sys.stdlib_module_names | {"slipstream"}
    assert modules >= {"torch", "zmq", "starlette", "regex"}
    homes = importlib.metadata.packages_distributions()
    optional = {
        "tensorboard",
        "wandb",
        "trackio",
        "mlflow",
        "triton",
        "ray",
    }  # trackers; torch brings triton where there is CUDA; a launcher
    trackers = {"mlflow-skinny" if name == "mlflow" else name for name in optional - {"triton", "ray"}}
    assert named(project["optional-dependencies"]["ray"]) == {"ray"}
    assert trackers == named(project["optional-dependencies"]["trackers"])
    needed = {name: homes[name][0].lower().replace("_", "-") for name in modules - optional - BROUGHT.keys()}
    assert not set(needed.values()) - named(project["dependencies"])
    for name, package in BROUGHT.items():
        always = [one for one in importlib.metadata.requires(package) or [] if "extra ==" not in one]
        assert name.replace("_", "-") in named(always), f"{package} does not bring {name} any more: declare it"


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """The strings of a module that a program can show: not docstrings, parts of one put together."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    shown_never = {id(node.value) for parent in nodes for node in _body(parent) if isinstance(node, ast.Expr)}
    inside = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
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
        if NAMES_OF_A_CHECKOUT.search(path.read_text())  # others need not be parsed
        for line, text in texts(path)
        if OF_A_CHECKOUT.search(text) and "checkout" not in text
    ]
    assert not found, "a wheel has none of it: say 'in a checkout', or name what works everywhere"
