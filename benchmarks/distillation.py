"""A student taught on its own samples against one that imitates the teacher's samples, with equally many tokens.

    python benchmarks/distillation.py [--seeds 0 1 2] [--steps 100] [--out DIR] [--small]

Per seed: the stage sft trains the teacher of the recipe distill_mini, and a student on half right and half wrong
demonstrations. From that one start the student learns twice, at the same learning rate and in as many updates:

    on-policy    `distill_mini`, at most 2 steps stale: the student samples, the teacher says how likely each token is
    imitation    supervised fine-tuning on completions that the teacher has sampled for the training prompts at
                 temperature 1 and ended by itself, until their tokens are as many as the other has trained on

Printed: accuracy on the held-out prompts, greedy and sampled at temperature 1, of the teacher, the start and both, with
the tokens trained on. Means over the seeds, and half the range. The teacher's own work is counted on neither side:
it reads each token once in the first, and samples it in the second.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

import slipstream
from slipstream.core.recipes import merge, resolve
from slipstream.evals.evaluate import evaluate_model
from slipstream.evals.sampling import sample_completions
from slipstream.models.build import build_policy
from slipstream.observe.hardware import describe
from slipstream.observe.summary import versions
from slipstream.prompts import build_prompts

RECIPE = "distill_mini"
TEACHER_STREAM = 7  # of sampling noise, beside a run's own
BATCH = 64  # completions of an update: two minibatches of 128
SMALL: dict[str, Any] = {
    "sft": {"steps": 20},
    "prompts": {"num_train": 300, "num_eval": 20},
    "eval": {"num_prompts": 20},
}
HALF_RIGHT = [{"template": "{answer}"}, {"template": "{word}"}]


def stage(changes: dict[str, Any], out: Path) -> Path:
    """Run `distill_mini` with `changes`; the folder of the checkpoint of its only stage."""
    slipstream.run(RECIPE, overrides=changes, out=out, display=False)
    return out / "sft" / "model" if changes["stages"] == ["sft"] else out / "model"


def teachers_samples(teacher: Path, num_tokens: int, base: dict[str, Any], path: Path) -> int:
    """Write demonstrations by the teacher until they have `num_tokens` tokens, EOS included; return how many tokens."""
    config = resolve(RECIPE, base)
    model, tokenizer = build_policy(config.model.model_copy(update={"path": str(teacher)}), seed=config.seed)
    prompts = build_prompts(config, tokenizer).train.prompts
    written, rows, rounds = 0, [], 0
    while written < num_tokens:
        completions = sample_completions(
            config, model, tokenizer, prompts, temperature=1.0, num_slots=64, stream=TEACHER_STREAM + rounds
        )
        rounds += 1
        for one in completions:
            if one.finish_reason == "stop" and written < num_tokens:
                word = one.prompt.columns["word"]
                rows.append({"prompt": word, "word": word, "completion": one.text})
                written += one.num_tokens
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return written


def accuracies(model: Path, base: dict[str, Any]) -> tuple[float, float]:
    found = evaluate_model(model, recipe=RECIPE, overrides=base, num_samples=2)
    assert found.accuracy is not None
    assert found.sampled_accuracy is not None
    return found.accuracy, found.sampled_accuracy


def compare(seed: int, steps: int, out: Path, *, small: bool) -> dict[str, tuple[float, float, int]]:
    """Accuracy, greedy and sampled, and the tokens that were trained on, of each model of a seed."""
    base: dict[str, Any] = merge({"seed": seed}, SMALL if small else {})
    teacher = stage(merge(base, {"stages": ["sft"]}), out / "teacher")
    as_student = {"stages": ["sft"], "model": {"path": "stage:sft"}, "loss": {"name": "aipo"}}
    as_student["teacher"] = {"path": None}
    sizes = {"shape": {"hidden_size": None, "intermediate_size": None, "num_layers": None}}
    early = {"steps": 20 if small else 250, "demonstrations": HALF_RIGHT, "optimizer": {"schedule": "constant"}}
    start = stage(merge(base, as_student | {"sft": sizes | early}), out / "start")
    lr = resolve(RECIPE).trainer.optimizer.lr
    learning = {"stages": ["rl"], "steps": steps, "model": {"path": str(start)}, "teacher": {"path": str(teacher)}}
    taught = stage(merge(base, learning | {"warm_start": {"steps": 0}, "eval": {"every": 0}}), out / "on-policy")
    lines = [json.loads(line) for line in (out / "on-policy" / "metrics.jsonl").read_text().splitlines()]
    num_tokens = int(sum(line["tokens_trained"] for line in lines if "tokens_trained" in line))
    written = teachers_samples(teacher, num_tokens, base, out / "samples.jsonl")
    imitation = sizes | {
        "path": str(start),
        "dataset": str(out / "samples.jsonl"),
        "demonstrations": [{"template": "{answer}"}],
        "num_demonstrations": 10**6,
        "held_out": 0.0,
        "steps": None,
        "batch_size": BATCH,
        "optimizer": {"lr": lr, "schedule": "constant", "warmup_updates": 0},
    }
    imitated = stage(merge(base, as_student | {"sft": imitation}), out / "imitation")
    found = {"teacher": (teacher, 0), "start": (start, 0), "on-policy": (taught, num_tokens)}
    found["imitation"] = (imitated, written)
    return {name: (*accuracies(model, base), tokens) for name, (model, tokens) in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, help="where the runs are kept; default: nowhere")
    parser.add_argument("--small", action="store_true", help="see that everything works, in seconds")
    arguments = parser.parse_args()
    print(f"command: python {shlex.join(sys.argv)}")
    print(f"versions: {versions()}")
    for name, value in describe().lines().items():
        print(f"{name}: {value}")
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) if arguments.out is None else arguments.out
        steps = 2 if arguments.small else arguments.steps
        by_seed = [compare(seed, steps, out / f"seed{seed}", small=arguments.small) for seed in arguments.seeds]
    print(f"\n{'':12s}{'greedy':>18s}{'sampled':>18s}{'tokens':>12s}")
    for name in by_seed[0]:
        cells = []
        for index in range(2):
            values = [found[name][index] for found in by_seed]
            cells.append(f"{mean(values):.3f} ({(max(values) - min(values)) / 2:.3f})")
        tokens = mean(found[name][2] for found in by_seed)
        print(f"{name:12s}{cells[0]:>18s}{cells[1]:>18s}{tokens:12,.0f}")


if __name__ == "__main__":
    main()
