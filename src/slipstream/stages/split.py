"""Which of a data set's examples only measure: whole prompts, by a hash that knows nothing else of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

Example = TypeVar("Example")


def split_by_prompt(
    examples: Sequence[Example], prompt_of: Callable[[Example], np.ndarray], *, share: float, seed: int
) -> tuple[list[Example], list[Example]]:
    """(training, held-out) examples in their order: held out are those of the nearest number to `share` of all prompts.

    `prompt_of` gives an example's prompt as int32 tokens [Tp]. Held out are the prompts whose seeded hash is smallest:
    neither the examples' order nor how many there are of a prompt decides, and no prompt is on both sides.
    """
    keys = [
        hashlib.blake2b(prompt_of(example).astype(np.int32).tobytes(), key=seed.to_bytes(8, "little")).digest()
        for example in examples
    ]
    distinct = sorted(set(keys))
    held_out = set(distinct[: round(share * len(distinct))])
    return (
        [example for key, example in zip(keys, examples, strict=True) if key not in held_out],
        [example for key, example in zip(keys, examples, strict=True) if key in held_out],
    )
