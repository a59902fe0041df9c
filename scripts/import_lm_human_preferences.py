"""OpenAI's human labels of continuations (Ziegler et al., arXiv:1909.08593) as preferences for a reward model.

    python scripts/import_lm_human_preferences.py offline_5k.json preferences.jsonl --tokenizer models/gpt2

The labels lie on the Hugging Face hub as vwxyzjn/lm-human-preferences: `sentiment/offline_5k.json` and
`descriptiveness/offline_5k.json`, a JSON list of records with `query`, `sample0` to `sample3` (GPT-2 tokens; 50259 is
padding) and `best`. They are written as lines of the stage's own form, tokens as they are: nothing is tokenized again.
What the second file held before is replaced.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from slipstream.core.disk import replace_file
from slipstream.stages.preferences import Candidate, PreferenceLine

PADDING = 50259
NUM_CANDIDATES = 4


def preference(record: dict[str, Any], index: int, tokenizer: PreTrainedTokenizerBase, held_out: int) -> PreferenceLine:
    """A record as a preference; every `held_out`-th measures accuracy only (0: none)."""
    query = unpadded(record["query"])
    samples = [unpadded(record[f"sample{k}"]) for k in range(NUM_CANDIDATES)]
    return PreferenceLine(
        prompt_id=f"label-{index}",
        prompt=str(tokenizer.decode(query)),
        prompt_tokens=query,
        candidates=[Candidate(text=str(tokenizer.decode(tokens)), tokens=tokens) for tokens in samples],
        best=int(record["best"]),
        is_held_out=bool(held_out) and index % held_out == held_out - 1,
    )


def unpadded(tokens: Sequence[int]) -> list[int]:
    return [int(token) for token in tokens if token != PADDING]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("labels", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of GPT-2's checkpoint")
    parser.add_argument("--held-out", type=int, default=10, help="hold out every n-th label; 0 holds out none")
    arguments = parser.parse_args()
    records = json.loads(arguments.labels.read_text(encoding="utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    lines = [preference(record, index, tokenizer, arguments.held_out) for index, record in enumerate(records)]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    replace_file(arguments.out, msgspec.json.Encoder().encode_lines(lines))
    print(f"{len(records)} preferences: {arguments.out}")


if __name__ == "__main__":
    main()
