"""A run through its stages, in order; what is done is not done again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from slipstream.controller.build import check
from slipstream.controller.placement import num_cores
from slipstream.core.config import RunConfig, Stage
from slipstream.core.recipes import save_config, with_stage_paths
from slipstream.observe.evaluation import EVALUATION_FILE
from slipstream.observe.hardware import describe
from slipstream.observe.report import write_report
from slipstream.observe.summary import read_summary, write_summary
from slipstream.prompts import task_table
from slipstream.rewards.checks import check_rewards
from slipstream.stages import progress
from slipstream.stages.evaluate import run_evaluation
from slipstream.stages.judging import build_judge
from slipstream.stages.preferences import run_preferences
from slipstream.stages.reward_model import run_reward_model
from slipstream.stages.rl import FromPython, resume_rl, run_rl
from slipstream.stages.sft import run_sft

TRAINING: dict[Stage, Callable[[RunConfig, Path, progress.Progress], dict[str, Any]]] = {
    "sft": run_sft,
    "preferences": run_preferences,
    "reward_model": run_reward_model,
}


def check_stages(config: RunConfig, *, has_own_reward: bool) -> None:
    """Raise ConfigError for what any stage would stumble over, before the first of them starts."""
    check(config, has_own_reward=has_own_reward)
    uses_gold = {"preferences", "evaluate"} & set(config.stages)
    if uses_gold and config.gold.terms:
        check_rewards(config.gold, task_table(config.prompts.tasks))
    if uses_gold and config.judge.is_given:
        build_judge(config.judge)


def run_stages(config: RunConfig, run_dir: Path, given: FromPython) -> dict[str, Any]:
    """Go through `config.stages` in `run_dir`, leaving out those whose output is there.

    Returns what `summary.json` says; without RL, what the last stage recorded. An interrupted RL ends the run early:
    resumed, it goes on from there.
    """
    if not (run_dir / "config.toml").exists():
        save_config(config, run_dir / "config.toml")
    told: dict[str, Any] = {}
    for stage in config.stages:
        if stage == "rl":
            told = _rl(config, run_dir, given)
            if told["status"] != "done":
                return told
            continue
        torch.set_num_threads(num_cores())
        with_paths = with_stage_paths(config, run_dir)
        with progress.watch(config, stage, display=given.display) as watcher:
            if stage == "evaluate":
                told = _evaluate(with_paths, run_dir, watcher)
            elif progress.is_done(run_dir, stage):
                watcher.note(f"{stage}: done before")
                told = progress.read_record(run_dir, stage)
            else:
                told = TRAINING[stage](with_paths, run_dir, watcher)
                watcher.note(f"{stage}: done in {told['seconds']:.0f} s")
    return {"status": "done"} | told


def _rl(config: RunConfig, run_dir: Path, given: FromPython) -> dict[str, Any]:
    summary = run_dir / "summary.json"
    if (run_dir / "model" / "config.json").is_file() and summary.is_file() and read_summary(summary).status == "done":
        found: dict[str, Any] = msgspec.to_builtins(read_summary(summary), str_keys=True)
        return found
    check(with_stage_paths(config, run_dir), has_own_reward=given.reward is not None)
    if (run_dir / "ledger.jsonl").exists():
        return resume_rl(config, run_dir, given)
    return run_rl(config, run_dir, given)


def _evaluate(config: RunConfig, run_dir: Path, watcher: progress.Watcher) -> dict[str, Any]:
    """Measure, and tell summary and report."""
    path = run_dir / EVALUATION_FILE
    found = msgspec.json.decode(path.read_bytes()) if path.is_file() else run_evaluation(config, run_dir, watcher)
    summary = msgspec.structs.replace(read_summary(run_dir / "summary.json"), evaluation=found)
    write_summary(summary, run_dir / "summary.json")
    write_report(run_dir, describe())
    watcher.evaluation_table(found)
    told: dict[str, Any] = msgspec.to_builtins(summary, str_keys=True)
    return told
