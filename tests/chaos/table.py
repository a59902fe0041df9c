"""The chaos tier's table, one row per seed, in Markdown.

    python tests/chaos/table.py --seeds 0 1 2 --minutes 10

Exits with 1 if a claim does not hold; each is told on stderr with the run it is of. `--keep DIR` keeps those runs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import mean

from chaos_config import UNDISTURBED
from storm import Storm, storm

KINDS = ("kill", "stop", "stop beyond lease", "slow")
HEAD = (
    "| seed | faults (kill / stop / stop beyond lease / slow) | runs | commands | admitted | trained | skipped "
    "| failed | lost | repeated | staleness | recovery p50 / max, s | accuracy | s |"
)


def row(result: Storm) -> str:
    p50_s, max_s = result.recovery_s()
    kinds = " / ".join(str(result.injected[kind]) for kind in KINDS)
    counts = [
        result.total(name) for name in ("commands", "admitted", "trained", "skipped", "failed", "lost", "repeated")
    ]
    cells = [
        result.seed,
        f"{len(result.strikes)} ({kinds})",
        len(result.runs),
        *counts,
        max(run["staleness_max"] for run in result.runs),
        f"{p50_s:.1f} / {max_s:.1f}",
        " ".join(f"{accuracy:.3f}" for accuracy in result.accuracies),
        f"{result.seconds:.0f}",
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    results = [storm(seed, options.minutes, say=sys.stderr.write, keep=options.keep) for seed in options.seeds]
    out = [HEAD, "|" + "---|" * HEAD.count(" |"), *map(row, results), ""]
    out += [
        f"Seed {r.seed} hit: " + ", ".join(f"{who} {n}" for who, n in sorted(r.victims.items())) + "." for r in results
    ]
    out.append(
        f"Undisturbed: accuracy {mean(UNDISTURBED):.3f}, from {min(UNDISTURBED):.3f} to {max(UNDISTURBED):.3f} "
        f"over {len(UNDISTURBED)} seeds."
    )
    sys.stdout.write("\n".join(out) + "\n")
    findings = [finding for result in results for finding in result.findings]
    sys.stderr.write("".join(f"{finding}\n" for finding in findings))
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
