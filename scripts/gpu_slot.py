"""Run what a first hour on a GPU should show, step by step, and keep what comes out of it.

    make gpu            # or, on a machine without a package registry, make gpu ARGS="--wheels wheels", which is
    python scripts/gpu_slot.py --wheels wheels [--out runs/gpu] [--from STEP] [--only STEP ...] [--budget-s 840]
    python scripts/gpu_slot.py --fetch wheels [--python-version 3.12]   # before, where there is a registry
    python scripts/gpu_slot.py --page docs/gpu.md [--out runs/gpu]      # afterwards, anywhere

The steps are those of `scripts/gpu_steps.toml`. Each is a process of its own with its own time limit: one that crashes
or hangs costs itself alone, and those that need it. After each, OUT/results.json and OUT/logs.tar.gz are written, so
nothing is lost when the machine goes away; a later call with `--from` or `--only` adds to them: a step that it has no
time for keeps the outcome that it had, if that is ok. OUT is of one machine. No step is begun with less than a
quarter of its limit left of `--budget-s`. With `--wheels`, missing packages are installed from that folder
into OUT/venv, beside those that the interpreter has, torch above all; the project itself is found in `src`. pip is
among the wheels: the machine needs none.

Exits with 1 if a step failed. Only the standard library is needed here, but for `--fetch`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
STEPS = PROJECT / "scripts" / "gpu_steps.toml"
GRACE_S = 5.0  # from the request to end to the end of a step's processes
BUILDERS = ("setuptools", "wheel")  # for what comes as source
PIP = "pip"  # installs the others out of its own wheel, where it is in the folder
FETCH_S = 300.0  # for one package
LEAST_SHARE = 0.25  # of its limit that a step is begun with
TAIL_LINES = 40
OWN = ("torch", "triton")  # what the machine brings
WHEEL_PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux_2_28_x86_64", "linux_x86_64")
BEGIN, END = "<!-- results -->", "<!-- end -->"


@dataclass(frozen=True)
class Step:
    """One command with its limit; `needs` is a step without whose success it is left out."""

    name: str
    command: str
    limit_s: float
    about: str = ""
    needs: str | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of a step: `status` is ok, failed, crashed, timed out, left out or no time."""

    name: str
    status: str
    command: str = ""
    about: str = ""
    seconds: float = 0.0
    exit_code: int | None = None
    tail: Sequence[str] = ()
    figures: Any = None


@dataclass
class Results:
    """All outcomes by name, in the order of the steps, and what they were got on."""

    machine: Mapping[str, Any]
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        partial = path.with_suffix(".partial")
        values = {"machine": dict(self.machine), "steps": [asdict(one) for one in self.outcomes.values()]}
        partial.write_text(json.dumps(values, indent=1) + "\n")
        partial.replace(path)

    @classmethod
    def read(cls, path: Path) -> Results:
        values = json.loads(path.read_text())
        return cls(values["machine"], {one["name"]: Outcome(**one) for one in values["steps"]})


def read_steps(path: Path) -> list[Step]:
    """Return the steps of a TOML file. ValueError where two have one name, or one needs what does not come before."""
    steps = [Step(**table) for table in tomllib.loads(path.read_text())["steps"]]
    names: set[str] = set()
    for step in steps:
        if step.name in names or not (step.needs is None or step.needs in names):
            raise ValueError(f"{path}: step '{step.name}' comes twice, or before '{step.needs}', which it needs")
        names.add(step.name)
    return steps


def machine() -> dict[str, Any]:
    """Return what the outcomes were got on, as far as the machine says."""

    def said(*words: str) -> str | None:
        try:
            return subprocess.run(words, capture_output=True, text=True, timeout=20, cwd=PROJECT).stdout.strip() or None
        except (OSError, subprocess.TimeoutExpired):
            return None

    return {
        "gpus": said("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"),
        "torch": torch_version(),
        "python": sys.version.split()[0],
        "commit": said("git", "rev-parse", "HEAD"),
        "cores": os.cpu_count(),
    }


def both(earlier: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the outcomes of earlier calls and this one were got on, all commits; exit where machines differ.

    What a machine did not say is taken for the same.
    """
    known = [name for name in here if None not in (earlier[name], here[name])]
    if other := [name for name in known if name != "commit" and earlier[name] != here[name]]:
        told = "; ".join(f"{name} {earlier[name]}, here {here[name]}" for name in other)
        sys.exit(f"OUT has outcomes of another machine ({told}): give another --out")
    commits = [*(earlier["commit"] or "").split(", "), here["commit"]]
    said = {name: earlier[name] if here[name] is None else here[name] for name in here}
    return {**said, "commit": ", ".join(dict.fromkeys(filter(None, commits)))}


def torch_version() -> str | None:
    """Return torch's version, that of CUDA included, which its metadata may lack; its import takes seconds."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    return str(runpy.run_path(str(Path(found.origin).with_name("version.py")))["__version__"])


def run_step(step: Step, python: str, out: Path, limit_s: float) -> Outcome:
    """Run the step in a session of its own, for at most `limit_s`; its processes end with it."""
    log, figures = out / "logs" / f"{step.name}.log", out / "logs" / f"{step.name}.json"
    figures.unlink(missing_ok=True)
    own = {"python": python, "json": str(figures), "out": str(out)}
    command = step.command.format(**{name: shlex.quote(value) for name, value in own.items()})
    paths = [str(PROJECT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    started_s = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            shlex.split(command), cwd=PROJECT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
            status = "ok" if code == 0 else "failed" if code > 0 else "crashed"
        except subprocess.TimeoutExpired:
            code, status = None, "timed out"
        finally:
            end(process)
    lines = log.read_text(errors="replace").splitlines()
    return Outcome(
        step.name,
        status,
        command,
        step.about,
        round(time.monotonic() - started_s, 1),
        code,
        lines[-TAIL_LINES:],
        json.loads(figures.read_text()) if figures.exists() else None,
    )


def end(process: subprocess.Popen[bytes]) -> None:
    """End all processes of the step's session that have not left it: asked first, killed after `GRACE_S`."""
    for number, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(wait_s)
        except subprocess.TimeoutExpired:
            continue


def archive(out: Path) -> None:
    """Put all logs and figures so far into OUT/logs.tar.gz."""
    partial = out / "logs.tar.gz.partial"
    with tarfile.open(partial, "w:gz") as tar:
        tar.add(out / "logs", arcname="logs")
    partial.replace(out / "logs.tar.gz")


def run_steps(steps: Sequence[Step], wanted: Sequence[str], python: str, out: Path, budget_s: float) -> Results:
    """Run the steps in `wanted`, beside the outcomes that OUT has already, which are replaced by what was tried."""
    (out / "logs").mkdir(parents=True, exist_ok=True)
    path, started_s = out / "results.json", time.monotonic()
    results = Results(machine())
    if path.exists():
        earlier = Results.read(path)
        results = Results(both(earlier.machine, results.machine), earlier.outcomes)
    for step in steps:
        if step.name not in wanted:
            continue
        left_s, had = budget_s - (time.monotonic() - started_s), results.outcomes.get(step.name)
        is_kept = had is not None and had.status == "ok"  # with its log, unless there is time to try it anew
        needed = results.outcomes.get(step.needs) if step.needs else None
        if step.needs and (needed is None or needed.status != "ok"):
            outcome = Outcome(step.name, "left out", step.command, f"needs {step.needs}")
        elif left_s < step.limit_s * (1.0 if is_kept else LEAST_SHARE):
            outcome = Outcome(step.name, "no time", step.command, step.about)
        else:
            print(f"{step.name}: {step.about or step.command}", flush=True)
            outcome, is_kept = run_step(step, python, out, min(step.limit_s, left_s)), False
        told = "; what it had before is kept" if is_kept else ""
        print(f"{step.name}: {outcome.status}, {outcome.seconds} s{told}", flush=True)
        if outcome.status not in ("ok", "left out", "no time"):
            print("\n".join(f"    {line}" for line in outcome.tail[-12:]), flush=True)
        if not is_kept:
            results.outcomes[step.name] = outcome
        results.outcomes = {one.name: results.outcomes[one.name] for one in steps if one.name in results.outcomes}
        results.write(path)
        archive(out)
    return results


# Packages


def requirements() -> list[str]:
    """Return what the project needs besides what the machine brings; pytest for the steps that are tests."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    needed = [one for one in project["dependencies"] if not one.lower().startswith(OWN)]
    return [
        *needed,
        *(one for one in project["optional-dependencies"]["dev"] if one.startswith(("pytest", "hypothesis"))),
    ]


def pinned(python_version: str) -> dict[str, str]:
    """Return `constraints.txt`'s "name==version" of all that `requirements` bring along on Linux, by name."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lines = [line.strip() for line in (PROJECT / "constraints.txt").read_text().splitlines()]
    known = {canonicalize_name(line.split("==")[0]): line for line in lines if "==" in line and line[0] != "#"}
    found: dict[str, str] = {}
    waiting = [Requirement(one) for one in requirements()]
    while waiting:
        wanted = waiting.pop()
        name, extras = canonicalize_name(wanted.name), wanted.extras or {""}
        if name in found or name in OWN or name.startswith("nvidia"):
            continue
        found[name] = known[name]
        for one in map(Requirement, importlib.metadata.requires(name) or ()):
            place = {"python_version": python_version, "sys_platform": "linux"}
            if one.marker is None or any(one.marker.evaluate(place | {"extra": extra}) for extra in extras):
                waiting.append(one)
    return found


def fetch(folder: Path, python_version: str) -> int:
    """Bring wheels for a Linux machine with that Python into `folder`; return how many packages are missing.

    What has no wheel is built here, which serves another Python only where nothing is compiled. The rest comes as
    source, which that machine compiles.
    """
    pip = [sys.executable, "-m", "pip"]
    platforms = [word for name in WHEEL_PLATFORMS for word in ("--platform", name)]
    of_machine = ["--only-binary=:all:", "--python-version", python_version, "--implementation", "cp", *platforms]
    sources: list[str] = []
    lacking: list[str] = []
    for one in [*pinned(python_version).values(), *BUILDERS, PIP]:
        there = [*pip, "download", "-q", "--no-deps", *of_machine, "--dest", str(folder), one]
        if not subprocess.run(there, capture_output=True, timeout=FETCH_S).returncode:
            continue
        with tempfile.TemporaryDirectory() as built:
            subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", built, one], capture_output=True, timeout=FETCH_S)
            wheels = list(Path(built).glob("*-none-any.whl"))
            for wheel in wheels:
                shutil.copy(wheel, folder)
        if not wheels:
            source = [*pip, "download", "-q", "--no-deps", "--no-binary=:all:", "--dest", str(folder), one]
            is_there = not subprocess.run(source, capture_output=True, timeout=FETCH_S).returncode
            (sources if is_there else lacking).append(one)
    print(f"{len(list(folder.glob('*.whl')))} wheels in {folder}")
    if sources:
        print(f"as source, to be compiled there: {', '.join(sources)}")
    if lacking:
        print(f"missing: {', '.join(lacking)}")
    return len(lacking)


def prepared(out: Path, wheels: Path) -> str:
    """Return the interpreter of OUT/venv, which has this one's packages and those in `wheels` that were missing.

    This one may be of an environment itself, whose packages venv's own way to share them passes over.
    """
    python = out / "venv" / "bin" / "python"
    own_pip = next(iter(sorted(wheels.glob(f"{PIP}-*.whl"))), None)
    if not python.exists():
        without = [] if own_pip is None else ["--without-pip"]
        subprocess.run([sys.executable, "-m", "venv", *without, str(out / "venv")], check=True)
        where = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        packages = Path(subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip())
        shared = dict.fromkeys(path for path in sys.path if Path(path).name in ("site-packages", "dist-packages"))
        (packages / "of_the_machine.pth").write_text("".join(f"{path}\n" for path in shared))
    its_pip = ["-m", PIP] if own_pip is None else [str(own_pip / PIP)]
    pip = [str(python), *its_pip, "install", "-q", "--no-index", "--find-links", str(wheels)]
    found = subprocess.run([*pip, *BUILDERS])
    if not found.returncode:
        found = subprocess.run([*pip, "--no-build-isolation", *requirements()])
    if found.returncode:
        sys.exit(f"{wheels} lacks packages: python scripts/gpu_slot.py --fetch {wheels} where there is a registry")
    return str(python)


# The page


def write_page(path: Path, results: Results) -> None:
    """Put the outcomes between the page's marks."""
    text = path.read_text()
    before, rest = text.split(BEGIN)
    path.write_text(f"{before}{BEGIN}\n{rendered(results)}\n{END}{rest.split(END)[1]}")


def rendered(results: Results) -> str:
    """Return Markdown: the machine, a line for each step, its figures, and how the output of a failed one ends."""
    told = ", ".join(f"{name} {value}" for name, value in results.machine.items() if value)
    lines = [f"Machine: {told}.", "", "| step | outcome | seconds | |", "|---|---|---|---|"]
    for one in results.outcomes.values():
        lines.append(f"| `{one.name}` | {one.status} | {one.seconds:.0f} | {one.about} |")
    for one in results.outcomes.values():
        if one.status == "ok" and one.figures is not None:
            lines += ["", f"`{one.name}`:", "", "```json", json.dumps(one.figures, indent=1)[:4000], "```"]
        elif one.status == "ok" and one.tail:
            lines += ["", f"`{one.name}`:", "", "```", *one.tail, "```"]
        elif one.tail:
            lines += ["", f"`{one.name}` {one.status}:", "", "```", *one.tail[-20:], "```"]
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--steps", type=Path, default=STEPS)
    parser.add_argument("--from", dest="first", metavar="STEP", help="begin with this one")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="these, and no others")
    parser.add_argument("--budget-s", type=float, default=3600.0)
    parser.add_argument("--wheels", type=Path, help="folder of wheels, where there is no registry")
    parser.add_argument("--fetch", type=Path, metavar="DIR", help="download the wheels, and end")
    parser.add_argument("--python-version", default="3.12", help="of the machine that the wheels are for")
    parser.add_argument("--page", type=Path, help="write what OUT has into this page, and end")
    given = parser.parse_args(words)
    if given.fetch is not None:
        return fetch(given.fetch, given.python_version)
    if given.page is not None:
        write_page(given.page, Results.read(given.out / "results.json"))
        return 0
    steps = read_steps(given.steps)
    names = [step.name for step in steps]
    if unknown := {*(given.only or ()), *filter(None, [given.first])} - set(names):
        parser.error(f"no step is called {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    wanted = given.only or (names[names.index(given.first) :] if given.first else names)
    given.out.mkdir(parents=True, exist_ok=True)
    python = sys.executable if given.wheels is None else prepared(given.out, given.wheels)
    results = run_steps(steps, wanted, python, given.out.resolve(), given.budget_s)
    failed = [name for name in wanted if results.outcomes[name].status in ("failed", "crashed", "timed out")]
    print(f"{given.out}/results.json, {given.out}/logs.tar.gz; " + (f"failed: {', '.join(failed)}" if failed else "ok"))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
