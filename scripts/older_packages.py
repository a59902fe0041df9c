"""Run tests with the oldest torch that is supported: `python scripts/older_packages.py .venv-older`.

The environment is made where there is none. It has that torch, with the setuptools and Triton that it asks for, numpy
below 2.4, as the interpreter of that Triton fails with later ones, and all else as `constraints.txt` has it. Where the
index has no build of that torch for CPUs pip takes the one for CUDA, of several GB, which computes on a CPU as well.
Each folder's tests have a process of their own. The last lines say what passed and failed of each; the exit status is 1
where a test failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH, NUMPY = "torch==2.11.*", "numpy<2.4"
UNCONSTRAINED = ("torch", "triton", "setuptools", "numpy")
FOLDERS = ("tests/models", "tests/trainer", "tests/generator")
VERSIONS = "import torch; print(torch.__version__, torch.__config__.show())"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the environment is, or goes")
    parser.add_argument("tests", nargs="*", default=FOLDERS, help="folders or files of tests (default: %(default)s)")
    parser.add_argument("--torch", default=TORCH, help="what pip is asked for (default: %(default)s)")
    arguments = parser.parse_args()
    python = arguments.folder.absolute() / "bin" / "python"
    if not python.exists():
        create(arguments.folder, arguments.torch)
    return run_tests(python, arguments.tests)


def create(folder: Path, torch: str) -> None:
    """Make the environment, with this checkout in it; end where that fails."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if line.split("==")[0] not in UNCONSTRAINED]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as others:
        others.write("\n".join(kept))
        others.flush()
        install = ROOT / "scripts" / "install.py"
        asked = ["-c", others.name, torch, NUMPY, "-e", f"{ROOT}[dev]"]
        if code := subprocess.run([sys.executable, install, folder, *asked]).returncode:
            sys.exit(code)


def run_tests(python: Path, tests: Sequence[str]) -> int:
    """Run each of `tests` by itself; print how it ended, and the versions of torch and oneDNN."""
    found = subprocess.run([python, "-c", VERSIONS], check=True, text=True, stdout=subprocess.PIPE).stdout.splitlines()
    told = [f"torch {found[0].split()[0]}", *(line.strip(" -") for line in found if "MKL-DNN" in line)]
    failed = False
    for one in tests:
        pytest = [python, "-m", "pytest", "-q", "-p", "no:xdist", "--tb=line", "-rf", one]
        process = subprocess.Popen(pytest, cwd=ROOT, text=True, stdout=subprocess.PIPE)
        assert process.stdout is not None
        last = ""
        for line in process.stdout:
            sys.stdout.write(line)
            last = line.strip() or last
        failed = process.wait() != 0 or failed
        told.append(f"{one}: {last}")
    print(*told, sep="\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
