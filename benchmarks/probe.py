"""What the probe text sees of a version at each precision, and of one whose weights are in the wrong place.

    python benchmarks/probe.py [--model models/smollm2-135m-instruct] [--texts 64]

For every precision: mean |difference| between the logprobs of a generator's weights and the trainer's over a text of 32
random tokens, which is what `generator.probe_tolerance` bounds; the largest single difference beside it. Then the same
with good bytes in wrong places: two neighbouring layers exchanged, the embedding shifted by one row, one layer's down
projection given to another. `least` is over the texts, too: the text that such a version would pass most easily.
Without a folder `--model` the weights are random, of the same shape.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from precision import policy

from slipstream.algorithms.logprobs import probe_logprobs
from slipstream.core.sections import PROBE_TOLERANCES
from slipstream.models.quantized import FORMATS
from slipstream.models.served import ServedWeights
from slipstream.models.transformer import Transformer
from slipstream.observe.hardware import describe
from slipstream.observe.summary import versions

TOKENS = 32  # of a probe text, as the trainer makes it


def exchange(model: Transformer, one: str, other: str) -> None:
    weights = dict(model.named_parameters())
    for name, weight in weights.items():
        if name.startswith(one):
            partner = weights[other + name.removeprefix(one)]
            held = weight.clone()
            weight.copy_(partner)
            partner.copy_(held)


def shift_embedding(model: Transformer) -> None:
    model.embedding.weight.copy_(model.embedding.weight.roll(1, 0))


FAULTS: dict[str, Callable[[Transformer], None]] = {
    "as it should be": lambda _: None,
    "two layers exchanged": lambda model: exchange(model, "layers.1.", "layers.2."),
    "embedding shifted": shift_embedding,
    "one matrix elsewhere": lambda model: exchange(model, "layers.1.down.", "layers.2.down."),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m-instruct"))
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--precisions", nargs="+", choices=FORMATS, default=list(FORMATS))
    options = parser.parse_args()
    print(f"command: python {shlex.join(sys.argv)}\nversions: {versions()}")
    for name, value in describe().lines().items():
        print(f"{name}: {value}")
    plain = policy(options.model)
    generator = np.random.default_rng(0)
    texts = [generator.integers(0, plain.config.vocab_size, TOKENS, dtype=np.int32) for _ in range(options.texts)]
    references = [probe_logprobs(plain, text) for text in texts]
    weights = options.model if options.model.is_dir() else "random weights in the shape of SmolLM2-135M"
    print(f"\n{weights}, {len(texts)} texts of {TOKENS} tokens, nats\n")
    print("| precision | weights | tolerance | mean: least | median | largest | largest single |")
    print("|---|---|---|---|---|---|---|")
    for precision in options.precisions:
        for fault, apply in FAULTS.items():
            model = policy(options.model)
            with torch.no_grad():
                apply(model)
            ServedWeights(model, precision)
            gaps = [np.abs(probe_logprobs(model, text) - ours) for text, ours in zip(texts, references, strict=True)]
            means = np.array([gap.mean() for gap in gaps])
            print(
                f"| `{precision}` | {fault} | {PROBE_TOLERANCES[precision]} | {means.min():.2g} "
                f"| {np.median(means):.2g} | {means.max():.2g} | {max(gap.max() for gap in gaps):.2g} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
