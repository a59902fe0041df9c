"""The stages that run in one process, with all of its cores: all but RL."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from slipstream.core.config import RunConfig
from slipstream.core.disk import HeldFolder
from slipstream.core.machine import num_cores
from slipstream.core.recipes import with_stage_paths
from slipstream.models.device import single_device
from slipstream.models.hub import with_folders
from slipstream.observe.display import duration
from slipstream.stages.dpo import run_dpo
from slipstream.stages.evaluate import run_evaluation
from slipstream.stages.preferences import run_preferences
from slipstream.stages.progress import StageProgress, watch
from slipstream.stages.reward_model import run_reward_model
from slipstream.stages.sft import run_sft

STAGES_OF_ONE_PROCESS: dict[str, Callable[[RunConfig, Path, StageProgress], dict[str, Any]]] = {
    "sft": run_sft,
    "preferences": run_preferences,
    "dpo": run_dpo,
    "reward_model": run_reward_model,
    "evaluate": run_evaluation,
}


def run_stage(stage: str, config: RunConfig, run_dir: Path, *, display: bool) -> None:
    """Run one stage other than RL in this process, with all cores."""
    torch.set_num_threads(num_cores())
    with HeldFolder(run_dir), watch(config, stage, display=display) as watcher:
        local = with_folders(with_stage_paths(config, run_dir, before=stage))
        if config.computes_on_gpu:
            watcher.note(_device_line(stage, config))
        record = STAGES_OF_ONE_PROCESS[stage](local, run_dir, watcher)
        watcher.note(f"{stage}: done in {duration(record['seconds'])}")


def _device_line(stage: str, config: RunConfig) -> str:
    trains, samples = stage in ("sft", "dpo", "reward_model", "evaluate"), stage in ("preferences", "evaluate")
    samples |= stage == "reward_model" and config.reward_model.normalise == "before_and_after"
    places = dict[str, str]()
    for does, device, is_so in (("samples", config.samples_on, samples), ("computes", config.trainer.device, trains)):
        if is_so:
            here = single_device(device)
            missing = f" (not on '{device}': this machine has no GPU)" if device != "cpu" and here.type == "cpu" else ""
            places[does] = f"{here}{missing}"
    if len(set(places.values())) == 1:
        return f"{stage}: computes on {next(iter(places.values()))}"
    return f"{stage}: " + ", ".join(f"{does} on {where}" for does, where in places.items())
