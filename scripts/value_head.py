"""How much of the returns a critic explains: a head on the policy or a model of its own, with the policy moving or not.

    python scripts/value_head.py [--write docs/ppo_details.md]

The task and settings of `ppo` in `scripts/losses_learn.py`, at staleness 0, seed 0; a policy at rest has a learning
rate of 1e-12. Printed is `explained_variance` during the run, as a table of Markdown; `--write` puts it into the page.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from losses_learn import SMALL, overrides_of, write

import slipstream
from slipstream.core.recipes import merge

AT_REST: dict[str, Any] = {"steps": 240, "trainer": {"optimizer": {"lr": 1e-12}}}
CRITICS: dict[str, dict[str, Any]] = {
    "head, `coef` 0.1, rate 1e-3": {"critic": {"model": "head"}},
    "head, `coef` 0.1, rate 3e-3": {"critic": {"model": "head", "optimizer": {"lr": 3e-3}}},
    "head, `coef` 1, rate 1e-3": {"critic": {"model": "head", "coef": 1.0}},
    "own, `coef` 0.1, rate 1e-3": {},
    "head, rate 1e-2 to 0": AT_REST | {"critic": {"model": "head", "optimizer": {"lr": 1e-2, "schedule": "linear"}}},
    "own, rate 1e-3 to 0": AT_REST | {"critic": {"optimizer": {"schedule": "linear"}}},
}
AFTER_STEPS = (11, 41, 80, 240)


def row(name: str, changes: dict[str, Any], *, small: bool = False) -> str:
    """One run's line of the table."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        overrides = merge(merge(overrides_of("ppo", "sync", 0), changes), SMALL if small else {})
        result = slipstream.run("quickstart", overrides=overrides, out=out, display=False)
        metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    explained = [line["explained_variance"] for line in metrics if "explained_variance" in line]
    shown = ", ".join(f"{explained[step - 1]:.2f}" for step in AFTER_STEPS if step <= len(explained))
    is_at_rest = "trainer" in changes
    accuracy = "" if is_at_rest else f"{result.summary['eval']['after']['sampled_accuracy']:.3f}"
    return f"| {name} | {'at rest' if is_at_rest else '1e-3'} | {len(explained)} | {shown} | {accuracy} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="two steps each: see that everything works")
    parser.add_argument("--write", type=Path, help="page to put the table into")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    lines = [
        f"| critic | policy's rate | steps | explained variance after {', '.join(map(str, AFTER_STEPS))} | accuracy |",
        "|---|---|---|---|---|",
    ]
    for name, changes in CRITICS.items():
        lines.append(row(name, changes, small=arguments.small))
        print(lines[-1], flush=True)
    if arguments.write is not None:
        write(arguments.write, "value-head", lines)
    print("\n".join(["", *lines]))


if __name__ == "__main__":
    main()
