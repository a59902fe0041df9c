"""Checks of the names in a configuration before torch is imported, so that a misspelling is answered at once.

`check_stages` in `stages/chain.py` asks all of this again, with all that needs a library.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from slipstream.core import recipes
from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.held_out import check_measure
from slipstream.core.hooks import check_callbacks
from slipstream.environments.checks import Given, check_environments
from slipstream.generator.vllm.settings import check_settings
from slipstream.models.hub import check_model_path
from slipstream.observe.health import unfit
from slipstream.observe.trackers import check_trackers
from slipstream.prompts.dataset import check_first, check_source
from slipstream.prompts.tasks import check_task_names, task_table
from slipstream.rewards.checks import setup_of
from slipstream.rewards.given import check_given
from slipstream.stages.order import check_order
from slipstream.trainer.loss_checks import check_loss

_ANSWERING = {"preferences", "rl", "evaluate"}
"""The stages in which prompts are answered."""


def resolve(
    recipe: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None, preset: str | None = None
) -> RunConfig:
    """Return the run's configuration, as `core.recipes.resolve`, without conflicts that their owners would find.

    Raises ConfigError. Models and data that it names need not be there.
    """
    config = recipes.resolve(recipe, overrides, preset)
    check_conflicts(config)
    return config


def check_conflicts(config: RunConfig) -> None:
    """Raise ConfigError for what vLLM or a stage asks of the rest; the sections' own conflicts have been raised."""
    check_settings(config)
    check_order(config)


def check_named(
    config: RunConfig,
    *,
    given: Collection[str] = (),
    environments: Given | None = None,
    has_own_prompts: bool = False,
) -> None:
    """Raise ConfigError for conflicts, and for names of what is not there: losses, tasks, checkpoints, data, rewards,
    environments.

    `given` are the names of the reward functions that were handed over from Python, `environments` what was besides;
    `has_own_prompts`: prompts were, in place of the configuration's.
    """
    check_conflicts(config)
    check_trackers(config.trackers)
    if silent := sorted(unfit(config) & set(config.health.stop_on)):
        what = "an alarm that this configuration has no use for ends no run"
        got = f"health.stop_on with '{silent[0]}', which is never told here"
        raise ConfigError(what, got=got, allowed=f"health.stop_on without {', '.join(silent)}")
    check_model_path(config)
    if "rl" in config.stages:
        check_loss(config)
    if not has_own_prompts:
        check_task_names(config.prompts.tasks)
    if not has_own_prompts and config.prompts.tasks and config.prompts.eval_dataset is not None:
        raise ConfigError(
            "the prompts of tasks are held out from the same tasks",
            got=f"prompts.eval_dataset = '{config.prompts.eval_dataset}' with prompts.tasks",
            allowed="no prompts.eval_dataset",
            hint="[[eval.sets]] with name and dataset answers the prompts of a file; so does `slipstream eval --data`",
        )
    sources = [] if has_own_prompts else [config.prompts.dataset, config.prompts.eval_dataset]
    sources += [one.dataset for one in config.eval.sets]
    sources += [config.sft.dataset] if "sft" in config.stages else []
    sources += [config.dpo.preferences] if "dpo" in config.stages else []
    sources += [config.reward_model.preferences] if "reward_model" in config.stages else []
    for source in filter(None, sources):
        check_source(source)
    if not has_own_prompts and config.prompts.dataset is not None and _ANSWERING & set(config.stages):
        check_first(config.prompts.dataset, config.prompts)
    for of_set in [config.for_set(one.name).prompts for one in config.eval.sets]:
        assert of_set.eval_dataset is not None, "checked by the schema"
        check_first(of_set.eval_dataset, of_set)
    check_environments(config, environments)
    check_callbacks(config)
    if "rl" in config.stages and config.needs_functions:
        check_given(config.rewards, given)
        setup_of(config.rewards, task_table(config.prompts.tasks))
    check_measure(config)  # behind the functions: where a name is misspelt there, the measure's is right
