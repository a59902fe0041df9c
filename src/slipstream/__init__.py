"""Slipstream: asynchronous, off-policy reinforcement learning for language models, in native PyTorch.

`slipstream.run` trains (`slipstream/api.py`), `slipstream.evaluate_model` measures and `slipstream.export` writes
checkpoints (`slipstream/evals/`), `slipstream.watch` shows (`slipstream/observe/watch/`), `slipstream.serve` serves
(`slipstream/evals/serve.py`), `slipstream.make_plan` plans and `slipstream.what_if` simulates (`slipstream/plan/`),
`slipstream.import_config` converts TRL's arguments (`slipstream/core/imported.py`).
Everything is imported on first use, so that the command line answers at once.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from slipstream.api import Result, run
    from slipstream.controller.replay import replay
    from slipstream.core.config import RunConfig
    from slipstream.core.hooks import CheckpointRecord, EvalRecord, StepRecord
    from slipstream.core.imported import import_config
    from slipstream.evals.evaluate import evaluate_model
    from slipstream.evals.exported import export
    from slipstream.evals.serve import serve
    from slipstream.observe.report import report
    from slipstream.observe.watch import watch
    from slipstream.plan.answer import make_plan
    from slipstream.plan.what_if import what_if
    from slipstream.stages.named import resolve

__version__ = "0.1.0"
__all__ = [
    "CheckpointRecord",
    "EvalRecord",
    "Result",
    "RunConfig",
    "StepRecord",
    "evaluate_model",
    "export",
    "import_config",
    "make_plan",
    "replay",
    "report",
    "resolve",
    "run",
    "serve",
    "watch",
    "what_if",
]

_HOMES = {
    "run": "slipstream.api",
    "Result": "slipstream.api",
    "replay": "slipstream.controller.replay",
    "evaluate_model": "slipstream.evals.evaluate",
    "export": "slipstream.evals.exported",
    "watch": "slipstream.observe.watch",
    "serve": "slipstream.evals.serve",
    "make_plan": "slipstream.plan.answer",
    "what_if": "slipstream.plan.what_if",
    "report": "slipstream.observe.report",
    "RunConfig": "slipstream.core.config",
    "StepRecord": "slipstream.core.hooks",
    "EvalRecord": "slipstream.core.hooks",
    "CheckpointRecord": "slipstream.core.hooks",
    "import_config": "slipstream.core.imported",
    "resolve": "slipstream.stages.named",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'slipstream' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)
