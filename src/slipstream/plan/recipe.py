"""A plan as a recipe: the layout of every executor, lengths and bound, on top of the recipe that was planned for.

Where a plan was made for a model by name, the recipe names the folder its checkpoint is to be put into and the file of
its prompts: `slipstream run` says so where they are missing. `slipstream launch` starts it on several machines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from slipstream.core.disk import replace_file
from slipstream.core.errors import ConfigError
from slipstream.core.recipes import merge, resolve
from slipstream.plan.layouts import AsynchronousPlan, Workload
from slipstream.plan.question import Subject

MODELS, PROMPTS = "models", "prompts.jsonl"
"""The places of checkpoint and prompts in a recipe that was made for a model by name."""
STEPS = 1000
KL_COEF = 0.05  # weight of the reference in a recipe for a model by name


def base_tables(
    subject: Subject, workload: Workload, max_new_tokens: int, *, reward_model: str | None
) -> dict[str, Any]:
    """Return the recipe that was planned for, or one for the model with only the fields that it needs."""
    batch = {
        "groups_per_step": workload.groups,
        "completions_per_group": workload.group_size,
        "generator": {"max_new_tokens": max_new_tokens},
    }
    if subject.recipe is not None:
        config = resolve(subject.recipe)
        greedy = config.samples_per_group - config.completions_per_group  # ReMax samples one besides
        return merge(subject.recipe, batch | {"completions_per_group": workload.group_size - greedy})
    longest_prompt = math.ceil(2 * workload.lengths.prompt_mean)
    tables: dict[str, Any] = {
        "recipe": subject.name,
        "steps": STEPS,
        "weight_update": "in_flight",
        "model": {"path": subject.path or f"{MODELS}/{subject.name}"},
        "prompts": {
            "dataset": PROMPTS,
            "max_prompt_tokens": min(longest_prompt, subject.shape.max_positions - max_new_tokens),
        },
        "rewards": {"terms": [{"function": "math"}]},
        "trainer": {"optimizer": {"lr": 1e-6}},
    }
    if workload.reference:
        tables["kl"] = {"coef": KL_COEF}
    if workload.critic:
        tables["loss"] = {"name": "ppo", "advantages": "gae"}
    if reward_model is not None:
        path = reward_model if Path(reward_model).is_dir() else f"{MODELS}/{Path(reward_model).name}"
        tables["rewards"] = {"terms": [], "models": [{"path": path}]}
    return merge(tables, batch)


def layout_tables(plan: AsynchronousPlan, workload: Workload, max_staleness: int, *, device: str) -> dict[str, Any]:
    """Return the fields of a run that a plan determines."""
    trainer, generator = plan.trainer, plan.generator
    on_gpu = device == "cuda"
    tables: dict[str, Any] = {
        "max_staleness": max_staleness,
        "trainer": {
            "device": device,
            "precision": trainer.precision,
            "recompute": trainer.recompute,
            "microbatch_tokens": math.ceil(trainer.microbatch * workload.trained_tokens),
        },
        "generator": {
            "device": device,
            "precision": generator.precision,
            "replicas": generator.replicas,
            "num_slots": generator.slots,
        },
    }
    if not max_staleness:
        tables |= {"weight_update": "between_batches", "sync_placement": "colocated"}
    if on_gpu:
        tables["trainer"] |= {
            "ranks": trainer.devices,
            "tensor_parallel": trainer.tensor_parallel,
            "reduce_once": trainer.reduce_once,
        }
        tables["generator"]["tensor_parallel"] = generator.tensor_parallel
    if plan.reference is not None:
        own = {"executor": "own", "ranks": plan.reference.devices, "device": device}
        tables["kl"] = own | {"precision": plan.reference.precision}
    if plan.reward_model is not None:
        scored = {"model_ranks": plan.reward_model.devices, "device": device}
        tables["rewards"] = scored | {"precision": plan.reward_model.precision}
    return tables


def recipe_of(base: Mapping[str, Any], layout: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe's tables with the layout. ConfigError for a combination that cannot be run."""
    tables = merge(base, layout)
    resolve(tables)
    return tables


def check_writable(path: Path) -> None:
    """Raise ConfigError where no recipe can be written."""
    if path.is_dir() or not path.parent.is_dir() or path.suffix != ".toml":
        raise ConfigError(
            "the recipe cannot be written there", got=path, allowed="a file NAME.toml in an existing folder"
        )


def write_recipe(path: Path, tables: Mapping[str, Any], comments: Sequence[str]) -> None:
    """Write the tables as TOML under `comments`, one a line; as a whole or not at all."""
    check_writable(path)
    head = "".join(f"# {line}".rstrip() + "\n" for comment in comments for line in comment.splitlines())
    replace_file(path, (head + tomli_w.dumps(dict(tables))).encode())
