"""Try inputs, of any seed: `python tests/fuzz/fuzz.py --seed 7 --count 200`; `--only 17` tries one again.

What fails is told with its seed and index. Its folder is kept in `--keep`, with what was printed beside it: the command
line that is told, there, is the reproduction.
"""

from __future__ import annotations

import argparse
import collections
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from inputs import KINDS, kind_of, make_input, write_base
from trial import Ended, become_subreaper, import_all, tried

HERE = Path(__file__).parent
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
}
"""No thread beside the one that forks, and no network. Libraries read it when they are imported."""
EXECUTABLE_EVERY = 50
"""So many inputs go through a new process of the true command instead of a fork that has everything imported."""


def make_shelf(shelf: Path) -> None:
    """A run of two steps, killed behind its first one, in `run`, and its model in `model`."""
    shelf.mkdir()
    write_base(shelf, steps=2, trainer={"checkpoint_every": 1})
    ended = tried(("run", "recipe.toml", "--out", "run"), shelf, enough_s=math.inf)  # two steps at any pace
    assert (ended.code, ended.faults) == (0, ()), ended
    (shelf / "run" / "model").rename(shelf / "model")
    shutil.rmtree(shelf / "run" / "checkpoints" / "step_2")
    shutil.rmtree(shelf / "run" / "checkpoints" / "step_2.rollouts", ignore_errors=True)
    for name in ("summary.json", "report.html", "timeline.json", "samples.json"):
        (shelf / "run" / name).unlink(missing_ok=True)


def fuzz(
    seed: int, indices: Iterable[int], keep: Path, *, keep_all: bool = False, shelf: Path | None = None
) -> dict[int, Ended]:
    """Try these inputs of `seed`; those that ended badly, by index, their folders in `keep`."""
    os.environ |= ENVIRONMENT
    become_subreaper()
    import_all()
    failed: dict[int, Ended] = {}
    codes: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        work = Path(name)
        shelf = work / "shelf" if shelf is None else shelf
        if not shelf.exists():
            make_shelf(shelf)
        for index in indices:
            folder = work / str(index)
            made = make_input(seed, index, shelf, folder)
            if any("\0" in word for word in made.arguments):
                by_executable = False
            else:
                by_executable = index % EXECUTABLE_EVERY == EXECUTABLE_EVERY - 1
            ended = tried(made.arguments, folder, by_executable=by_executable)
            codes[f"{made.kind} {ended.code}"] += 1
            if ended.faults:
                failed[index] = ended
                say(f"seed {seed}, index {index} ({made.kind}, {ended.seconds:.1f} s): {'; '.join(ended.faults)}")
                say(f"    slipstream {' '.join(map(repr, made.arguments))[:300]}")
                say(f"    {made.did}")
            if ended.faults or keep_all:
                save(folder, keep / f"{seed}-{index}")
            shutil.rmtree(folder, ignore_errors=True)
            (work / f"{index}.told").unlink(missing_ok=True)
    say(f"ended with: {dict(sorted(codes.items()))}")
    return failed


def save(folder: Path, to: Path) -> None:
    """Move the input and what it printed to `to`."""
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(to, ignore_errors=True)
    shutil.move(folder, to)
    shutil.copy(folder.parent / f"{folder.name}.told", to.parent / f"{to.name}.told")


def say(text: str) -> None:
    sys.stdout.write(text.encode("utf-8", "backslashreplace").decode() + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--every", type=int, default=1, help="only each so-manieth: parts for several processes")
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--only", type=int, default=None, help="one input, whose folder is kept whatever comes of it")
    parser.add_argument("--shelf", type=Path, default=None, help="what is changed, made once for several")
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "fuzz-failures")
    given = parser.parse_args()
    indices = range(given.first, given.first + given.count, given.every) if given.only is None else [given.only]
    indices = [index for index in indices if kind_of(index) in given.kinds]
    start_s = time.monotonic()
    failed = fuzz(given.seed, indices, given.keep.resolve(), keep_all=given.only is not None, shelf=given.shelf)
    say(f"{len(failed)} of {len(indices)} inputs failed in {time.monotonic() - start_s:.0f} s; kept in {given.keep}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
