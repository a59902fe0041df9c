"""Run experiments and write what they found into docs/results.md, with a table of all of them at its top.

    python -m experiments                     the headline set
    python -m experiments --all               every experiment
    python -m experiments NAME ...            these
    python -m experiments --list              what there is, and what each costs
    python -m experiments NAME --no-write     print the section only

Runs are kept in `--folder` (runs/experiments) by what they depend on: the same command goes on where it was stopped,
and one that has everything only draws. Times are valid on an idle machine only.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from experiments.catalogue import EXPERIMENTS, HEADLINE
from experiments.lab import DEFAULT_FOLDER, Lab, RunFailed, Unavailable
from experiments.overview import write_table
from experiments.section import render, write


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m experiments", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(EXPERIMENTS))
    parser.add_argument("--all", action="store_true", help="every experiment")
    parser.add_argument("--list", action="store_true", help="list them and their costs")
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="where runs are kept")
    parser.add_argument("--no-write", action="store_true", help="print sections instead of writing docs/results.md")
    options = parser.parse_args(words)
    if unknown := set(options.names) - set(EXPERIMENTS):
        parser.error(f"no experiment is called {', '.join(sorted(unknown))}; there are {', '.join(EXPERIMENTS)}")
    if options.list:
        for name, entry in EXPERIMENTS.items():
            print(f"{name:24}{entry.minutes:5} min  {'headline  ' if name in HEADLINE else '          '}{entry.title}")
        return 0
    names = options.names or (list(EXPERIMENTS) if options.all else list(HEADLINE))
    failed = []
    for name in names:
        lab = Lab(options.folder, say=lambda line: print(f"  {line}", file=sys.stderr, flush=True))
        entry, started_s = EXPERIMENTS[name], time.monotonic()
        print(f"{name}: {entry.title} (about {entry.minutes} minutes)", file=sys.stderr, flush=True)
        try:
            section = importlib.import_module(f"experiments.{name}.experiment").section(lab)
        except Unavailable as lack:
            failed += [name] if options.names else []
            print(f"{name} left out: {lack}", file=sys.stderr, flush=True)
            continue
        except RunFailed as failure:
            failed.append(name)
            print(f"{name} failed: {failure}", file=sys.stderr, flush=True)
            continue
        except Exception:  # noqa: BLE001 - what was run is kept, and the next experiment is not to blame
            failed.append(name)
            print(f"{name} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            continue
        if options.no_write:
            print(render(name, section, lab.cost()))
        else:
            write(name, section, lab.cost())
            write_table()
        print(f"{name}: done in {(time.monotonic() - started_s) / 60:.1f} minutes", file=sys.stderr, flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
