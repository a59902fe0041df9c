"""TRL (GRPO and RLOO) and the scheduling policies of other systems beside ours: one machine, one workload, one run.

    python benchmarks/peers.py [--only ours areal trl_grpo ...] [--seeds 3] [--steps 80] [--folder runs/experiments]

Prints both tables and the verdicts of the experiment `peers` (experiments/peers/README.md says what is run, and what
the columns are), for some of the contenders or in another size. Runs are kept in `--folder`: what the experiment has
made is not made again. TRL needs `make .venv-trl/installed`; where it is not there its rows are missing, and the output
says so. Start it at the top of the checkout, on an idle machine.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# `experiments` and `benchmarks` are folders of a checkout, not packages that are installed.
sys.path.insert(0, str(ROOT))

from benchmarks.trl_call import TRL_PYTHON  # noqa: E402
from experiments.comparison import MOST_SEEDS  # noqa: E402
from experiments.lab import DEFAULT_FOLDER, Lab  # noqa: E402
from experiments.peers.contenders import CONTENDERS  # noqa: E402
from experiments.peers.experiment import notes, tables  # noqa: E402
from experiments.peers.runs import Scale, find  # noqa: E402
from experiments.peers.verdicts import verdicts  # noqa: E402
from slipstream.observe.hardware import describe  # noqa: E402
from slipstream.observe.summary import versions  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="NAME")
    parser.add_argument("--seeds", type=int, default=len(Scale().seeds), help="how many, from 0")
    parser.add_argument("--steps", type=int, default=Scale().steps)
    parser.add_argument("--folder", type=Path, default=ROOT / DEFAULT_FOLDER, help="where runs are kept")
    parser.add_argument("--trl-python", type=Path, default=TRL_PYTHON)
    options = parser.parse_args()
    if not 1 <= options.seeds <= MOST_SEEDS:
        parser.error(
            f"--seeds {options.seeds}: from 1 to {MOST_SEEDS}, as the tests of verdicts go through all dealings"
        )
    print(f"command: python {shlex.join(sys.argv)}")
    print(f"versions: {versions()}")
    for name, value in describe().lines().items():
        print(f"{name}: {value}")
    lab = Lab(options.folder, say=lambda line: print(f"  {line}", flush=True))
    scale = Scale(names=options.only, seeds=range(options.seeds), steps=options.steps)
    found = find(lab, scale, trl_python=options.trl_python)
    print(f"\nseeds {', '.join(map(str, scale.seeds))}, {scale.steps} steps; {lab.cost()}")
    for caption, table in tables(found.seen).items():
        print(f"\n{caption}\n\n{table}")
    print()
    for verdict in verdicts(found):
        print(f"- {verdict.claim} ({verdict.source}): {verdict.word}. {verdict.found}")
    for note in notes(found):
        print(f"- {note}")


if __name__ == "__main__":
    main()
