"""The learning curve of a run as a table of Markdown, from its metrics.jsonl.

python scripts/learning_curve.py RUN_DIR [--every 10]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean
from typing import Any

from slipstream.core.run_log import read_metrics


def table(lines: list[dict[str, Any]], every: int) -> list[str]:
    """One row per `every` steps: minutes since the start, mean training reward, held-out accuracy where evaluated."""
    greedy = {line["version"]: line["eval_accuracy"] for line in lines if "eval_accuracy" in line}
    sampled = {line["version"]: line["eval_sampled_accuracy"] for line in lines if "eval_sampled_accuracy" in line}
    steps = [line for line in lines if "reward_mean" in line]
    rows = [
        "| steps | minutes | mean reward of the batches | held-out accuracy, greedy | sampled |",
        "|---|---|---|---|---|",
    ]

    def row(previous: int, done: int, minutes: float, reward: str) -> str:
        cells = []
        for found in (greedy, sampled):  # the newest evaluation since the last row
            versions = [version for version in found if previous < version <= done]
            cells.append(f"{found[max(versions)]:.3f}" if versions else "")
        return f"| {done} | {minutes:.1f} | {reward} | " + " | ".join(cells) + " |"

    rows.append(row(-1, 0, next(line["wall_s"] for line in lines) / 60, ""))
    for start in range(0, len(steps), every):
        part = steps[start : start + every]
        reward = f"{mean(line['reward_mean'] for line in part):.3f}"
        rows.append(row(part[0]["step"], part[-1]["version"], part[-1]["wall_s"] / 60, reward))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--every", type=int, default=10, help="steps per row")
    arguments = parser.parse_args()
    print("\n".join(table(read_metrics(arguments.run_dir / "metrics.jsonl"), arguments.every)))


if __name__ == "__main__":
    main()
