"""Slipstream from Python: a reward of your own (a lambda will do) and prompts of your own.

    python examples/python_api.py [RUN_DIR]

A character model of 0.1M parameters, trained from scratch, answers "ab?" with as many vowels as it can.
"""

import itertools
import string
import sys
from typing import Any

import slipstream


def main(out: str | None = None, overrides: dict[str, Any] | None = None) -> slipstream.Result:
    """Train; `overrides` go on top of the tables below."""
    vowel_share = lambda completions, **_: [sum(c in "aeiou" for c in text) / 8 for text in completions]  # noqa: E731
    config = {
        "recipe": "vowels",
        "steps": 40,
        "groups_per_step": 8,
        "completions_per_group": 8,
        "model": {"hidden_size": 64, "intermediate_size": 128, "num_layers": 2},
        "generator": {"max_new_tokens": 8},
        "trainer": {"optimizer": {"lr": 1e-3}},
        "prompts": {"num_eval": 50},
        "eval": {"num_prompts": 50},
    }
    return slipstream.run(
        config,
        overrides=overrides,
        reward=vowel_share,
        prompts=[f"{a}{b}?" for a, b in itertools.product(string.ascii_lowercase, repeat=2)],
        out=out,
    )


if __name__ == "__main__":
    result = main(*sys.argv[1:2])
    print(f"{result.status}: {result.summary['steps']} steps; report: {result.out / 'report.html'}")
