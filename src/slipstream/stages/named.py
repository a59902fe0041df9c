"""Checks of the names in a configuration before torch is imported, so that a misspelling is answered at once.

`check_stages` in `stages/chain.py` asks all of this again, with all that needs a library.
"""

from __future__ import annotations

from collections.abc import Collection

from slipstream.core.config import RunConfig
from slipstream.core.held_out import check_measure
from slipstream.core.hub import check_model_path
from slipstream.prompts.dataset import check_source
from slipstream.prompts.tasks import check_task_names, task_table
from slipstream.rewards.checks import setup_of
from slipstream.rewards.given import check_given


def check_named(config: RunConfig, *, given: Collection[str] = (), has_own_prompts: bool = False) -> None:
    """Raise ConfigError for checkpoints, data, reward functions and a measure that are not there. Imports no library.

    `given` are the names of the reward functions that were handed over from Python; `has_own_prompts`: prompts were, in
    place of the configuration's.
    """
    check_model_path(config)
    sources = [] if has_own_prompts else [config.prompts.dataset, config.prompts.eval_dataset]
    sources += [config.sft.dataset] if "sft" in config.stages else []
    sources += [config.reward_model.preferences] if "reward_model" in config.stages else []
    for source in filter(None, sources):
        check_source(source)
    if "rl" in config.stages and (config.rewards.terms or not config.rewards.models):
        check_given(config.rewards, given)
        setup_of(config.rewards, task_table(config.prompts.tasks))
    check_measure(config)  # behind the functions: where a name is misspelt there, the measure's is right


def check_names(config: RunConfig) -> None:
    """Raise ConfigError for losses and tasks that are not there, which takes as many seconds as torch and more."""
    if "rl" in config.stages:
        from slipstream.algorithms.losses import loss_named

        loss_named(config.loss.name, config.loss.params)
    check_task_names(config.prompts.tasks)
