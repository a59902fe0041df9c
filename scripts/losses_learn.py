"""Train every policy loss on a small task, synchronously and asynchronously, and see that it learns.

    python scripts/losses_learn.py [--losses grpo rloo] [--presets sync] [--seeds 0 1] [--write docs/losses_learn.md]

Each run begins with the same warm start per seed: words of three and four letters are spelled backward by a 0.1
M-parameter model, all executors in one process on one core, a run on each core. Printed is the held-out accuracy,
sampled at temperature 1, before and after, as a table of Markdown; `--write` puts the tables between the markers of a
page. `tests/learning/test_losses_learn.py` holds every run to LEAST_GAIN.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from statistics import mean
from typing import Any

import slipstream
from slipstream.core.recipes import merge

LEAST_GAIN = 0.2
SEEDS = (0, 1)

TASK: dict[str, Any] = {
    "steps": 80,
    "host": "inline",
    "groups_per_step": 16,
    "completions_per_group": 8,
    "model": {"hidden_size": 64, "intermediate_size": 192, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4},
    "prompts": {
        "num_train": 1200,
        "num_eval": 200,
        "tasks": [{"name": "spell_backward", "params": {"min_word_len": 3, "max_word_len": 4}}],
    },
    "generator": {"num_slots": 64, "max_new_tokens": 8},
    "trainer": {"minibatches": 2, "optimizer": {"lr": 1e-3}},
    "warm_start": {"steps": 300, "batch_size": 64, "num_demonstrations": 1200, "optimizer": {"lr": 2e-3}},
    "eval": {"every": 0, "num_prompts": 200, "num_slots": 64},
}
"""The quickstart, smaller: what it is changed in."""

SMALL: dict[str, Any] = {"steps": 2, "warm_start": {"steps": 2}, "prompts": {"num_eval": 8}, "eval": {"num_prompts": 8}}
"""What `--small` changes once more: enough to see that everything works."""

PRESETS: dict[str, dict[str, Any]] = {
    "sync": {"max_staleness": 0, "weight_update": "between_batches"},
    "continuous": {"max_staleness": 2, "weight_update": "in_flight"},
}

_RLOO = {"advantages": "leave_one_out"}
_PAIRS = {"advantages": "group_mean", "select": "best_and_worst"}
_ACTOR_CRITIC = {"advantages": "gae", "whiten_advantages": "minibatch"}

SETTINGS: dict[str, dict[str, Any]] = {
    "reinforce": {"loss": {"advantages": "group_mean"}},
    "ppo": {"loss": _ACTOR_CRITIC, "critic": {"optimizer": {"lr": 1e-3}}, "kl": {"coef": 0.01}},
    "grpo": {"loss": {"params": {"eps_low": 0.2, "eps_high": 0.28}}},
    "cispo": {},
    "gspo": {},
    "aipo": {"loss": {"advantages": "group_mean"}},
    "aipo_masked": {},
    "rloo": {"loss": _RLOO},
    "proximal_rloo": {"loss": _RLOO},
    "copg": {"loss": _RLOO},
    "online_dpo": {"loss": _PAIRS},
    "online_ipo": {"loss": _PAIRS},
    "best_of_n": {"loss": {"advantages": "group_mean", "select": "best"}},
    "decoupled_ppo": {},
    "icepop": {},
    "sapo": {},
    "dppo_tv": {},
    "dppo_kl": {},
    "m2po": {},
    "mu_grpo": {},
    "oapl": {"loss": {"advantages": "optimal"}},
    "ppo_head": {
        "loss": {"name": "ppo", **_ACTOR_CRITIC},
        "critic": {"model": "head", "vtrace": True, "coef": 1.0, "optimizer": {"lr": 1e-2}},
    },
    "grpo_kl": {
        "loss": {"name": "grpo", "reduction": "sequence"},
        "kl": {"coef": 0.04, "place": "loss", "estimator": "k3"},
    },
    "remax": {"loss": {"name": "aipo", "advantages": "greedy_baseline"}},
    "vcpo": {
        "loss": {"name": "aipo", "params": {"level": "sequence", "max_ratio": 8.0}, "reduction": "sequence"},
        "trainer": {"ess_scaling": "sqrt"},
    },
}
"""Every policy loss with what belongs to it: advantages, selection, penalty, critic; the rest is TASK's.

A key is the loss, or a variant that names its own."""


@dataclass(frozen=True)
class Row:
    """One run: sampled held-out accuracy after the warm start and after the last step."""

    loss: str
    preset: str
    seed: int
    before: float
    after: float
    staleness: float
    seconds: float

    @property
    def gain(self) -> float:
        return self.after - self.before


def overrides_of(loss: str, preset: str, seed: int, *, small: bool = False) -> dict[str, Any]:
    """What the run of `loss` changes in the recipe quickstart."""
    named = {"seed": seed, "recipe": f"learns-{loss}", "loss": {"name": loss}}
    chosen = merge(merge(merge(TASK, PRESETS[preset]), named), SETTINGS[loss])
    return merge(chosen, SMALL) if small else chosen


def learn(loss: str, preset: str, seed: int, out: Path, *, small: bool = False) -> Row:
    started_s = time.perf_counter()
    result = slipstream.run(
        "quickstart", overrides=overrides_of(loss, preset, seed, small=small), out=out, display=False
    )
    before, after = (result.summary["eval"][when]["sampled_accuracy"] for when in ("before", "after"))
    staleness = result.summary["staleness"]["mean"]
    return Row(loss, preset, seed, before, after, staleness, time.perf_counter() - started_s)


def pin(cores: SimpleQueue[int]) -> None:
    """Keep this process to one of `cores`: two threads would wait for each other. It ends with the one that made it."""
    os.sched_setaffinity(0, {cores.get()})
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def learn_apart(run: tuple[str, str, int], small: bool) -> Row:
    """Return the row of `run`, in a folder that does not stay."""
    with tempfile.TemporaryDirectory() as folder:
        return learn(*run, Path(folder) / "run", small=small)


def table(rows: list[Row]) -> list[str]:
    """One line per loss and preset, one cell per seed, and the seconds of a run on average."""
    seeds = sorted({row.seed for row in rows})
    lines = [
        "| loss | preset | " + " | ".join(f"seed {seed}" for seed in seeds) + " | least gain | staleness | seconds |",
        "|---" * (len(seeds) + 5) + "|",
    ]
    for loss, preset in dict.fromkeys((row.loss, row.preset) for row in rows):
        runs = {row.seed: row for row in rows if (row.loss, row.preset) == (loss, preset)}
        cells = [f"{runs[seed].before:.3f} -> {runs[seed].after:.3f}" if seed in runs else "" for seed in seeds]
        least = min(row.gain for row in runs.values())
        staleness, seconds = (mean(getattr(row, name) for row in runs.values()) for name in ("staleness", "seconds"))
        cells += [f"{least:+.3f}{'' if least >= LEAST_GAIN else ' (too little)'}", f"{staleness:.2f}", f"{seconds:.0f}"]
        lines.append(f"| `{loss}` | {preset} | " + " | ".join(cells) + " |")
    return lines


def settings() -> list[str]:
    """What each loss changes in TASK, as a table of Markdown."""
    lines = ["| loss | settings |", "|---|---|"]
    for loss, tables in SETTINGS.items():
        lines.append(f"| `{loss}` | {', '.join(f'`{line}`' for line in _flat(tables)) or 'defaults'} |")
    return lines


def _flat(tables: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in tables.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name} = {json.dumps(value)}"


def write(path: Path, name: str, lines: list[str]) -> None:
    """Replace what stands between the markers `<!-- name -->` and `<!-- end -->` of a page."""
    page = path.read_text(encoding="utf-8")
    before, rest = page.split(f"<!-- {name} -->\n", maxsplit=1)
    _, after = rest.split("<!-- end -->", maxsplit=1)
    path.write_text("\n".join([f"{before}<!-- {name} -->", *lines, f"<!-- end -->{after}"]), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--small", action="store_true", help="two steps each: see that everything works")
    parser.add_argument("--write", type=Path, help="page to put the tables into")
    arguments = parser.parse_args()
    context, rows = multiprocessing.get_context("spawn"), []
    cores = context.SimpleQueue()
    for core in os.sched_getaffinity(0):
        cores.put(core)
    runs = list(product(arguments.losses, arguments.presets, arguments.seeds))
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), context, pin, (cores,)) as pool:
        for row in pool.map(partial(learn_apart, small=arguments.small), runs):
            rows.append(row)
            print(f"{row.loss} {row.preset} seed {row.seed}: {row.before:.3f} -> {row.after:.3f}", flush=True)
            if arguments.write is not None:
                write(arguments.write, "results", table(rows))
                write(arguments.write, "settings", settings())
    print("\n".join(["", *table(rows)]))


if __name__ == "__main__":
    main()
