"""What the planner says of the steps that `engine.py` and `train_step.py` measure on a GPU, to be laid beside them.

    python benchmarks/planned.py [--gpu H200]

Decode steps of 256 rows at 1,044 tokens in bfloat16, and training steps of 4 prompts of 512 tokens with 8 completions
of 1,024 each, two microbatches, as both scripts do by default; published rates, and the planner's own shares of them.
GiB: the trainer's memory at its peak, with all layers kept and (again) recomputed.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from contenders.gpu import BATCH
from contenders.models import SHAPES

from slipstream.plan.cost_model import CostModel
from slipstream.plan.hardware import cluster
from slipstream.plan.layouts import GeneratorLayout, TrainerLayout, Workload
from slipstream.plan.lengths import LengthSample

CONTEXT = 1044
PROMPT, COMPLETION = 512, 1024
MICROBATCH = 30  # rollouts, the larger of two: 32,738 tokens with their prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="H200")
    given = parser.parse_args()
    workload = Workload(groups=4, group_size=8, lengths=LengthSample(PROMPT, (COMPLETION,), "of this script"))
    print(f"| model on one {given.gpu} | ms a decode step | its parts | s a training step | its parts | GiB | again |")
    print("|---|---|---|---|---|---|---|")
    for name in ("qwen2.5-0.5b", "qwen2.5-1.5b", "llama-3.1-8b"):
        model = CostModel(SHAPES[name], cluster(given.gpu, 1), workload)
        generator = GeneratorLayout(devices=1, tensor_parallel=1, slots=BATCH)
        trainer = TrainerLayout(devices=1, tensor_parallel=1, microbatch=MICROBATCH, recompute=False)
        decode, train = model.decode_step(generator, live=BATCH, context=CONTEXT), model.train_step(trainer)
        again = replace(trainer, recompute=True)
        bytes_of = [model.train_memory(one, served=None).total / 2**30 for one in (trainer, again)]
        told = [
            ", ".join(f"{part} {unit * seconds:.3g}" for part, seconds in step.parts.items() if seconds)
            for step, unit in ((decode, 1e3), (train, 1.0))
        ]
        memory = " | ".join(f"{gib:.1f}" for gib in bytes_of)
        print(f"| {name} | {1e3 * decode.total:.2f} | {told[0]} | {train.total:.3f} | {told[1]} | {memory} |")


if __name__ == "__main__":
    main()
