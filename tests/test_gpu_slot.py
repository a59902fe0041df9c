"""`make gpu` on a machine without a GPU: steps that crash, hang or lack time cost nobody else anything."""

from __future__ import annotations

import ensurepip
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

PROJECT = Path(__file__).resolve().parent.parent
SCRIPT = PROJECT / "scripts" / "gpu_slot.py"
STEPS = """
[[steps]]
name = "figures"
about = "writes figures"
command = '''{python} -c "import json, sys; json.dump({{'rate': 2.5}}, open(sys.argv[1], 'w'))" {json}'''
limit_s = 60

[[steps]]
name = "crash"
command = '''{python} -c "import os; print('about to crash', flush=True); os.abort()"'''
limit_s = 60

[[steps]]
name = "hang"
command = "{python} {json}.py"
limit_s = 2

[[steps]]
name = "behind the crash"
command = "{python} -c pass"
limit_s = 60
needs = "crash"

[[steps]]
name = "bad"
command = "{python} -c 'raise SystemExit(3)'"
limit_s = 60

[[steps]]
name = "last"
command = "{python} -c 'import slipstream; print(slipstream.__name__)'"
limit_s = 60
"""


HANGS = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(987)", __file__])
print("hangs", flush=True)
time.sleep(987)
"""


def slot(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, words)], capture_output=True, text=True, timeout=660, cwd=PROJECT
    )


def outcomes(out: Path) -> dict[str, dict[str, object]]:
    return {one["name"]: one for one in json.loads((out / "results.json").read_text())["steps"]}


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    path = tmp_path / "steps.toml"
    path.write_text(STEPS)
    return path


def test_one_that_crashes_and_one_that_hangs_cost_themselves_alone(steps: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "logs").mkdir(parents=True)
    hangs = out / "logs" / "hang.json.py"
    hangs.write_text(HANGS)
    done = slot("--steps", steps, "--out", out)
    assert done.returncode == 1, done.stderr
    assert "failed: crash, hang, bad" in done.stdout
    assert "    about to crash\n" in done.stdout
    found = outcomes(out)
    assert {name: one["status"] for name, one in found.items()} == {
        "figures": "ok",
        "crash": "crashed",
        "hang": "timed out",
        "behind the crash": "left out",
        "bad": "failed",
        "last": "ok",
    }
    assert found["figures"]["figures"] == {"rate": 2.5}
    assert found["crash"]["exit_code"] == -6
    assert found["bad"]["exit_code"] == 3
    assert found["hang"]["tail"] == ["hangs"]
    assert found["last"]["tail"] == ["slipstream"], "the project is found without being installed"
    assert not [line for line in _processes() if str(hangs) in line], "also what the step had started"
    with tarfile.open(out / "logs.tar.gz") as tar:
        assert {"logs/crash.log", "logs/hang.log", "logs/figures.json"} <= set(tar.getnames())

    page = tmp_path / "gpu.md"
    page.write_text("# Before\n\n<!-- results -->\nold\n<!-- end -->\n\nAfter.\n")
    assert slot("--page", page, "--out", out).returncode == 0
    text = page.read_text()
    assert text.startswith("# Before\n")
    assert text.endswith("<!-- end -->\n\nAfter.\n")
    assert "| `hang` | timed out | 2 | " in text
    assert '"rate": 2.5' in text
    assert "about to crash" in text
    assert "old" not in text


def _processes() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return found


def test_a_later_call_adds_to_what_is_there(steps: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert slot("--steps", steps, "--out", out, "--only", "figures").returncode == 0
    assert list(outcomes(out)) == ["figures"]
    assert slot("--steps", steps, "--out", out, "--from", "last", "--budget-s", "10").returncode == 0
    assert outcomes(out)["last"]["status"] == "no time"
    assert slot("--steps", steps, "--out", out, "--from", "last").returncode == 0
    assert list(outcomes(out)) == ["figures", "last"]
    assert outcomes(out)["last"]["status"] == "ok"
    refused = slot("--steps", steps, "--out", out, "--from", "nowhere")
    assert refused.returncode == 2
    assert "no step is called nowhere; there are figures, crash" in refused.stderr


def gpu_slot() -> Any:
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        import gpu_slot
    finally:
        sys.path.pop(0)
    return gpu_slot


@pytest.mark.parametrize(
    ("found", "budget_s", "kept"),
    [
        ("ok", 100.0, "new"),
        ("failed", 100.0, "new"),
        ("timed out", 100.0, "new"),
        ("ok", 40.0, "old"),  # not its whole limit: not tried, so that its log stays
    ],
)
def test_what_was_not_tried_keeps_the_outcome_that_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: str, budget_s: float, kept: str
) -> None:
    script = gpu_slot()
    here = {"gpus": "one, 80 GB", "torch": "2.13", "commit": "b" * 40}
    monkeypatch.setattr(script, "machine", lambda: here)
    monkeypatch.setattr(script, "run_step", lambda step, *_: script.Outcome(step.name, found, "new"))
    steps = [script.Step("one", "command", 60.0), script.Step("behind", "command", 60.0, needs="one")]
    earlier = {one.name: script.Outcome(one.name, "ok", "old") for one in steps}
    path = tmp_path / "results.json"
    script.Results(here | {"commit": "a" * 40}, earlier).write(path)
    results = script.run_steps(steps, ["one"], "python", tmp_path, budget_s)
    assert results.outcomes["one"].command == kept
    assert script.Results.read(path).outcomes["one"].command == kept
    assert results.machine == here | {"commit": "a" * 40 + ", " + "b" * 40}
    if found == "failed":  # what needs it is left out
        assert script.run_steps(steps, ["behind"], "python", tmp_path, budget_s).outcomes["behind"].command == "old"
    here["gpus"] = None  # it did not answer in time
    assert script.run_steps(steps, ["one"], "python", tmp_path, budget_s).machine["gpus"] == "one, 80 GB"
    here["gpus"] = "another, 24 GB"
    with pytest.raises(SystemExit, match=r"\(gpus one, 80 GB, here another, 24 GB\): give another --out"):
        script.run_steps(steps, ["one"], "python", tmp_path, budget_s)


def shipped_steps() -> list[Any]:
    script = gpu_slot()
    steps: list[Any] = script.read_steps(script.STEPS)
    return steps


def test_every_test_for_a_gpu_is_in_a_step() -> None:
    """By its file: others of its folder may need packages that such a machine lacks."""
    marked = {
        str(path.relative_to(PROJECT))
        for path in (PROJECT / "tests").rglob("test_*.py")
        if re.search(r"^\s*(@|pytestmark = |marks=)?pytest\.mark\.gpu|marks=pytest\.mark\.gpu", path.read_text(), re.M)
    }
    named = {word for step in shipped_steps() for word in step.command.split() if word.startswith("tests/")}
    assert len(marked) > 5
    assert named == marked


def test_the_steps_name_what_there_is() -> None:
    """Every script, module and folder of tests, and needs that come before."""
    for step in shipped_steps():
        words = step.command.split()
        assert words[0] == "{python}"
        for word in words:
            if word.endswith(".py") or word.startswith("tests/"):
                assert (PROJECT / word).exists(), step.name
        assert step.limit_s <= 600
        if "--trainer.device" in words:  # with 'cuda' the generator would have the second GPU, where there is one
            assert words[words.index("--generator.device") + 1] == "cuda:0"


ONE_BY_ONE = """
import runpy, sys
script, folder, *probes = sys.argv[1:]
for probe in probes:
    sys.argv[:] = [script, probe, "--device", "cpu", "--json", f"{folder}/{probe}.json"]
    runpy.run_path(script, run_name="__main__")
"""


@pytest.mark.slow
def test_probes_of_what_a_cpu_has(tmp_path: Path) -> None:
    """In one process: the import of torch takes longer than any of them."""
    probes = ["products", "fsdp", "varlen", "rates", "fused", "sampling", "ipc_fallback"]
    command = [sys.executable, "-c", ONE_BY_ONE, str(PROJECT / "scripts" / "gpu_probes.py"), str(tmp_path), *probes]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for probe in probes:
        assert json.loads((tmp_path / f"{probe}.json").read_text()), probe


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_training_benchmark_counts_flop_and_tokens(tmp_path: Path) -> None:
    sizes = {"groups": 1, "samples": 2, "prompt": 16, "completion": 16, "steps": 1, "microbatch-tokens": 64}
    words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    script = PROJECT / "benchmarks" / "train_step.py"
    done = subprocess.run(
        [sys.executable, str(script), *words, "--json", str(tmp_path / "found.json")],
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr
    for one in json.loads((tmp_path / "found.json").read_text())["steps"]:
        assert one["tokens_per_s"] * one["steps_s"][0] == pytest.approx(16 + 2 * 16)
        # 0.36 B weights in layers for 48 tokens, 0.136 B in the head for 32 targets, six FLOP each, and attention
        assert one["flop_per_s"] * one["steps_s"][0] == pytest.approx(6 * (0.358e9 * 48 + 0.136e9 * 32), rel=0.01)


def test_with_wheels_make_asks_for_no_environment(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(PROJECT / name, tmp_path)

    def told(*words: str) -> str:
        make = ["make", "-n", "gpu", "PYTHON=python9", *words]
        return subprocess.run(
            make,
            capture_output=True,
            text=True,
            timeout=60,
            cwd=tmp_path,
            check=True,
            env={"PATH": os.environ["PATH"]},  # nothing of a `make test` around it: that tells its folder
        ).stdout

    for option in ("--wheels w", "--wheels=w"):
        assert told(f"ARGS={option} --only rates") == f"python9 scripts/gpu_slot.py {option} --only rates\n"
    assert "scripts/install.py" in told("ARGS=--only rates")


@pytest.mark.slow
def test_with_wheels_the_machine_needs_no_pip(tmp_path: Path) -> None:
    """A copy of what `make gpu` needs, beside a folder with pip's own wheel, and a step; packages are those of here."""
    bundled = list((Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl"))
    if not bundled:
        pytest.skip("this Python brings no pip along")
    (tmp_path / "scripts").mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "scripts/gpu_slot.py"):
        shutil.copy(PROJECT / name, tmp_path / name)
    (folder := tmp_path / "wheels").mkdir()
    shutil.copy(bundled[0], folder)
    about = {"METADATA": "Metadata-Version: 2.1\nName: wheel\nVersion: 0.1\n", "RECORD": ""}
    about["WHEEL"] = "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / "wheel-0.1-py3-none-any.whl", "w") as wheel:
        for name, text in about.items():
            wheel.writestr(f"wheel-0.1.dist-info/{name}", text)
    steps, out = tmp_path / "steps.toml", tmp_path / "out"
    command = "{python} -c 'import sys, torch; print(sys.prefix)'"
    steps.write_text(f'[[steps]]\nname = "one"\ncommand = """{command}"""\nlimit_s = 60\n')
    words = f"ARGS=--wheels {folder} --steps {steps} --out {out}"
    environment = {"PATH": "/usr/bin:/bin", "PIP_CONFIG_FILE": os.devnull}
    done = subprocess.run(
        ["make", "gpu", f"PYTHON={sys.executable}", words],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert outcomes(out)["one"]["tail"] == [str(out / "venv")]
    assert not list(tmp_path.glob(".venv*"))
    assert not list((out / "venv" / "bin").glob("pip*"))


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine has a GPU")
def test_a_probe_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As its step calls it, but in this process, which has torch."""
    [command] = [step.command for step in shipped_steps() if step.name == "probe_capture"]
    _, script, *words = command.format(python="python", json="found.json").split()
    monkeypatch.setattr(sys, "argv", [script, *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(PROJECT / script), run_name="__main__")
    assert ended.value.code == 2
    assert "sees no CUDA device here" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    """Its limit is one for a machine that does nothing else."""
    steps = tmp_path / "steps.toml"
    shipped = (PROJECT / "scripts" / "gpu_steps.toml").read_text()
    steps.write_text(re.sub(r"limit_s = \d+", "limit_s = 600", shipped))
    done = slot("--steps", steps, "--out", tmp_path / "out", "--only", "probe_capture")
    assert done.returncode == 1
    assert "sees no CUDA device here" in done.stdout
