"""How near a run came to each alarm: the extreme of its statistic over all steps, beside the threshold.

    python benchmarks/health.py RUN [RUN ...]

Reads `metrics.jsonl` only. A dash: the run has no such numbers, or too few of them.
"""

from __future__ import annotations

import sys
from pathlib import Path

from slipstream.core.run_log import read_metrics
from slipstream.observe.health import RULES
from slipstream.observe.trends import History


def extremes(run_dir: Path) -> dict[str, float | None]:
    """Of each alarm: the largest value its statistic had, or the smallest where low ones are bad."""
    history, found = History(), dict.fromkeys(RULES)
    for line in read_metrics(run_dir / "metrics.jsonl"):
        if "step_s" not in line:
            continue
        history.add(line)
        for name, rule in RULES.items():
            value, before = rule.statistic(history), found[name]
            if value is not None:
                found[name] = value if before is None else (min if rule.is_low else max)(before, value)
    return found


def main(run_dirs: list[Path]) -> None:
    columns = [extremes(run_dir) for run_dir in run_dirs]
    sys.stdout.write(f"| alarm | threshold | {' | '.join(path.name for path in run_dirs)} |\n|---|---|")
    sys.stdout.write("---|" * len(run_dirs) + "\n")
    for name, rule in RULES.items():
        cells = ["-" if column[name] is None else f"{column[name]:.3g}" for column in columns]
        sys.stdout.write(f"| `{name}` | {'<' if rule.is_low else '>='} {rule.threshold:g} | {' | '.join(cells)} |\n")


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
