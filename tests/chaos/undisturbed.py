"""Accuracy of the chaos tier's training when nobody disturbs it: the spread that disturbed runs are judged by.

python tests/chaos/undisturbed.py --seeds 0 1 2 3 4
"""

from __future__ import annotations

import argparse
import sys
import time
from statistics import mean, stdev

from chaos_config import STORM
from chaos_run import ChaosRun, accuracy, scratch
from lineage_audit import audit


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    found, accuracies = [], []
    for seed in parser.parse_args().seeds:
        with scratch() as folder:
            run, begun_s = ChaosRun(folder, (*STORM, "--seed", str(seed))), time.monotonic()
            run.until_done()
            seconds = time.monotonic() - begun_s
            found += [*audit(run.run_dir).findings, *run.leftovers()]
            accuracies.append(accuracy(run.run_dir))
            sys.stdout.write(f"seed {seed}: accuracy {accuracies[-1]:.3f}, {seconds:.0f} s\n")
            sys.stdout.flush()
    if len(accuracies) > 1:
        sys.stdout.write(f"mean {mean(accuracies):.4f}, standard deviation {stdev(accuracies):.4f}\n")
    sys.stdout.write("".join(f"{finding}\n" for finding in found))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
