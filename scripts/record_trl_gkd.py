"""Record what TRL's own code computes for GKD, so that the tests of distillation compare without installing TRL.

    .venv-trl/bin/python scripts/record_trl_gkd.py          # `make bench` creates .venv-trl

Writes tests/data/trl_gkd.json: logits of student and teacher drawn from a fixed seed in float64, the loss of
`GKDTrainer.generalized_jsd_loss`, which is called unchanged, and its gradient with respect to the student's logits.
"""

from __future__ import annotations

import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from trl.experimental.gkd import GKDTrainer

SEED = 20260707
TARGET = Path(__file__).resolve().parents[1] / "tests" / "data" / "trl_gkd.json"
SHAPE = (2, 3, 5)  # completions, tokens of each, vocabulary
UNCOUNTED = -100  # TRL's label of a token that does not count


def record() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(SEED)
    student, teacher = (2.0 * torch.randn(SHAPE, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    cases = []
    for beta in (0.0, 0.1, 0.5, 0.9, 1.0):
        for temperature in (1.0, 0.7):
            leaf = student.clone().requires_grad_()
            loss = GKDTrainer.generalized_jsd_loss(
                leaf, teacher, labels=torch.where(mask.bool(), 1, UNCOUNTED), beta=beta, temperature=temperature
            )
            (grad,) = torch.autograd.grad(loss, leaf)
            cases.append({"beta": beta, "temperature": temperature, "loss": loss.item(), "grad": grad.tolist()})
    return {
        "versions": {name: version(name) for name in ("trl", "torch", "transformers")}
        | {"python": platform.python_version()},
        "seed": SEED,
        "student": student.tolist(),
        "teacher": teacher.tolist(),
        "mask": mask.tolist(),
        "cases": cases,
    }


if __name__ == "__main__":
    TARGET.write_text(json.dumps(record(), indent=1) + "\n", encoding="utf-8")
    print(f"wrote {TARGET}")
