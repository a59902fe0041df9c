"""Build sdist and wheel into `dist/`, check and try them, and print what to upload: `make release`.

Nothing is uploaded. The wheel is built from the sdist. `twine check` reads the metadata where twine can be installed
(into `.venv-twine`); where it cannot, the checks here are all. `tests/test_wheel.py` then installs this very wheel in
an environment of its own, and trains with it.
"""

from __future__ import annotations

import argparse
import email
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from email.message import Message
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TWINE = ROOT / ".venv-twine"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="the folder to write, emptied first")
    parser.add_argument(
        "--quick", action="store_true", help="install nothing: no twine, and no test of the installation"
    )
    args = parser.parse_args()
    sdist, wheel = build(args.out)
    check(sdist, wheel)
    if not args.quick:
        run_twine(sdist, wheel)
        test = [sys.executable, "-m", "pytest", "-q", "-m", "slow", str(ROOT / "tests" / "test_wheel.py")]
        subprocess.run(test, cwd=ROOT, env=os.environ | {"SLIPSTREAM_DIST": str(args.out.resolve())}, check=True)
    print("\nto upload:")
    for path in (sdist, wheel):
        print(f"  {path}  {path.stat().st_size:,} bytes  sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}")


def build(out: Path) -> tuple[Path, Path]:
    """Build both into `out`, which is emptied of earlier ones, and return their paths."""
    for path in (*out.glob("slipstream_rl-*.tar.gz"), *out.glob("slipstream_rl-*.whl")):
        path.unlink()
    hatch = [sys.executable, "-m", "hatchling", "build", "--directory", str(out.resolve())]
    subprocess.run([*hatch, "--target", "sdist"], cwd=ROOT, check=True)
    (sdist,) = out.glob("slipstream_rl-*.tar.gz")
    with tempfile.TemporaryDirectory() as folder:  # what the sdist lacks the wheel lacks, too
        with tarfile.open(sdist) as archive:
            safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Debian 12's Python has none
            archive.extractall(folder, **safely)
        subprocess.run([*hatch, "--target", "wheel"], cwd=Path(folder) / sdist.name.removesuffix(".tar.gz"), check=True)
    (wheel,) = out.glob("slipstream_rl-*.whl")
    return sdist, wheel


def check(sdist: Path, wheel: Path) -> None:
    """End with a message unless both hold every file of the package, the same metadata, and one version throughout."""
    listed = subprocess.run(["git", "ls-files", "src", "recipes"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        sys.exit(
            f"a release is made from a git repository, which says what belongs to it\n  got: {listed.stderr.strip()}"
        )
    committed = set(listed.stdout.split())
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
        info = archive.extractfile(f"{sdist.name.removesuffix('.tar.gz')}/PKG-INFO")
        assert info is not None
        source: Message = email.message_from_bytes(info.read())
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entry,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        built: Message = email.message_from_bytes(archive.read(entry))
    expected = {name.removeprefix("src/") if name.startswith("src/") else f"slipstream/{name}" for name in committed}
    unexpected = {name for name in names - expected if ".dist-info/" not in name}
    citation = dict(line.split(": ", 1) for line in (ROOT / "CITATION.cff").read_text().splitlines() if ": " in line)
    problems = {
        "not in the sdist": sorted(committed - packed),
        "not in the wheel": sorted(expected - names),
        "in the wheel, but not committed": sorted(unexpected),
        "metadata of sdist and wheel differ": source.items() != built.items(),
        "CITATION.cff has another version": citation["version"] != built["Version"],
        "the README is not the description": not built.get_payload().startswith("# Slipstream"),
    }
    if found := [f"{what}: {which}" for what, which in problems.items() if which]:
        sys.exit("\n".join(found))
    print(
        f"{built['Name']} {built['Version']}: {len(names)} files in the wheel, {len(packed)} in the sdist, none missing"
    )


def run_twine(*files: Path) -> None:
    """Run `twine check --strict`, where twine is there or can be installed; say so where it cannot."""
    if not (TWINE / "bin" / "twine").exists():
        subprocess.run([sys.executable, str(ROOT / "scripts" / "install.py"), str(TWINE), "twine>=6"], check=False)
    if not (TWINE / "bin" / "twine").exists():
        shutil.rmtree(TWINE, ignore_errors=True)
        print("twine cannot be installed here: the metadata was checked by this script alone")
        return
    subprocess.run([str(TWINE / "bin" / "twine"), "check", "--strict", *map(str, files)], check=True)


if __name__ == "__main__":
    main()
