"""A run through its stages, in order; what is done is not done again."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec
import torch

from slipstream.controller.checks import Reader, check, check_checkpoints, policy_tokenizer
from slipstream.controller.placement import check_remote
from slipstream.core.config import JUST_RL, RunConfig
from slipstream.core.disk import HeldFolder
from slipstream.core.files import load_json
from slipstream.core.held_out import check_measure
from slipstream.core.recipes import save_config, with_stage_paths
from slipstream.environments.checks import Given
from slipstream.evals.sampling import check_sampling
from slipstream.generator.device import check_device
from slipstream.models.build import shape_of
from slipstream.models.device import check_gpus, single_device
from slipstream.models.hub import check_model_path, with_folders
from slipstream.models.preflight import check_policy
from slipstream.models.sizes import check_on_gpu, check_sizes
from slipstream.observe.evaluation import EVALUATION_FILE
from slipstream.observe.hardware import describe
from slipstream.observe.summary import Summary, read_summary, write_summary
from slipstream.observe.trackers import check_trackers
from slipstream.prompts import PromptSet, build_prompts, task_table
from slipstream.prompts.build import check_demonstrations
from slipstream.prompts.template import spelled_out
from slipstream.rewards.checks import check_rewards
from slipstream.rewards.dry_call import dry_call
from slipstream.rewards.user_functions import columns_needed
from slipstream.stages.child import run_in_child
from slipstream.stages.completions import build_judge, reference_completions
from slipstream.stages.named import check_conflicts
from slipstream.stages.one_process import run_stage
from slipstream.stages.order import check_asked, trained_in_stages
from slipstream.stages.preference_data import dpo_positions, read_pairs
from slipstream.stages.progress import read_record, record_path, told_of, watch
from slipstream.stages.reward_model import read_preferences
from slipstream.stages.rl import FromPython, resume_rl, run_rl, tell
from slipstream.stages.run_folder import is_rl_done
from slipstream.stages.sft import stage_demonstrations
from slipstream.trainer.checkpoint_folder import newest_first


def check_stages(
    config: RunConfig,
    *,
    given: Collection[str] = (),
    environments: Given | None = None,
    remote: Collection[str] = (),
) -> None:
    """Raise ConfigError for any input that a stage could not use, before the first of them starts.

    `given` are the names of the reward functions that were handed over from Python, `environments` those: to RL alone.
    Hub ids of `config` are pinned (`models/hub.py`).
    """
    check_conflicts(config)
    config = with_folders(config)
    check_trackers(config.trackers)
    check_measure(config)
    if "rl" in config.stages:
        check(config, given=given, environments=environments, remote=remote)
        if config.computes_on_gpu:
            _check_shares(config.with_longest_prompt(1), remote)  # again when prompts are read
    else:
        check_model_path(config)
        check_remote(config, remote)
        shape = check_policy(config, is_sampled=bool({"preferences", "evaluate"} & set(config.stages)))
        check_sizes(config, shape, {"trainer", "generator"})
        _check_devices(config)
    _check_on_gpu(config)
    uses_gold = {"preferences", "evaluate"} & set(config.stages)
    for section, rewards in (("rewards", config.rewards), ("gold", config.gold)) if uses_gold else ():
        if rewards.models:  # these stages score in this process
            check_gpus(section, rewards.device, "model_ranks", 1)
    check_checkpoints(config, _readers(config))
    if uses_gold and config.gold_rewards.asked:
        check_rewards(config.gold_rewards, task_table(config.prompts.tasks))
    if uses_gold and config.judge.is_given:
        build_judge(config.judge)


def _check_shares(config: RunConfig, remote: Collection[str]) -> None:
    """Raise ConfigError where both sides do not fit one GPU."""
    from slipstream.plan.one_gpu import with_shares

    with_shares(config, remote=remote)


def _check_devices(config: RunConfig) -> None:
    """Raise ConfigError for GPUs that stages besides RL, each one process, are to compute on and that are not here."""
    if config.trains_in_stages or (config.samples_in_stages and config.generator.engine == "vllm"):
        check_gpus("trainer", config.trainer.device, "ranks", 1)
    if config.samples_in_stages:
        alone = config.generator.model_copy(update={"replicas": 1, "tensor_parallel": 1, "pipeline_parallel": 1})
        check_device(config.model_copy(update={"generator": alone}))


def _check_on_gpu(config: RunConfig) -> None:
    """Raise ConfigError for a model that the GPU of a stage besides RL has no room for, or cannot sample."""
    device = single_device(config.trainer.device)
    if device.type == "cuda" and config.trains_in_stages:
        memory = int((config.trainer.gpu_share or 1.0) * torch.cuda.get_device_properties(device).total_memory)
        for model in trained_in_stages(config):
            check_on_gpu(config, shape_of(model), memory)
    if single_device(config.samples_on).type == "cuda" and config.samples_in_stages:
        check_sampling(config, check_policy(config))


def check_data(config: RunConfig, run_dir: Path, given: FromPython) -> None:
    """Raise ConfigError for data that a stage could not work on, by reading all of it, before the first one starts.

    Rewards are called on two of the prompts. A run of RL alone reads its data once, before anything else, and needs no
    check.
    """
    if told := spelled_out(config):
        tell(config, given, [told])
    if config.stages != list(JUST_RL):
        with told_of("checking the data and rewards of all stages", display=given.display):
            _check_data(with_folders(config), run_dir, given)


def _check_data(config: RunConfig, run_dir: Path, given: FromPython) -> None:
    tokenizer = policy_tokenizer(config)
    has_own_demonstrations = "sft" in config.stages and config.sft.dataset is not None
    takes_prompts = (
        {"preferences", "rl", "evaluate"} & set(config.stages)
        or ("sft" in config.stages and not has_own_demonstrations)
        or ("reward_model" in config.stages and config.reward_model.normalise != "none")
    )
    if takes_prompts:
        needed = columns_needed(config.rewards, given.functions) if "rl" in config.stages else {}
        if {"preferences", "evaluate"} & set(config.stages):
            needed |= columns_needed(config.gold_rewards, {})
        prompts = build_prompts(config, tokenizer, needed=needed)
        if "evaluate" in config.stages:
            check_asked(config, len(prompts.eval))
        if "rl" in config.stages and config.warm_start.steps:
            check_demonstrations(config, prompts.train.prompts)
        if "rl" in config.stages and config.computes_on_gpu:
            _check_shares(config.with_longest_prompt(prompts.report.longest), given.remote)
        if (asked := _referred(config)) != 0:
            reference_completions(config.prompts.reference, prompts.train.prompts[:asked], tokenizer)
        _call_rewards(config, prompts, run_dir, given)
    if has_own_demonstrations:
        stage_demonstrations(config, tokenizer)
    if "dpo" in config.stages and config.dpo.preferences is not None:
        read_pairs(config, run_dir, tokenizer, max_positions=dpo_positions(config))
    if "reward_model" in config.stages and config.reward_model.preferences is not None:
        read_preferences(config, run_dir, tokenizer)


def _referred(config: RunConfig) -> int | None:
    """Return of how many training prompts, from the first on, a stage takes the reference completions; None: of all."""
    if "reward_model" in config.stages and config.reward_model.normalise == "reference_bias":
        return None
    preferences = config.preferences
    return preferences.num_prompts if "preferences" in config.stages and preferences.with_reference else 0


def _call_rewards(config: RunConfig, prompts: PromptSet, run_dir: Path, given: FromPython) -> None:
    """Make the dry call of all rewards that any stage scores with."""
    tasks, rows, private = task_table(config.prompts.tasks), prompts.all, [str(run_dir)]
    notes: list[str | None] = []
    if "rl" in config.stages:
        size = config.samples_per_group
        notes.append(dry_call(config.rewards, tasks, rows, functions=given.functions, group_size=size, private=private))
    if {"preferences", "evaluate"} & set(config.stages):
        notes.append(dry_call(config.gold_rewards, tasks, rows, private=private))
    if told := [note for note in notes if note is not None]:
        tell(config, given, told)


def _readers(config: RunConfig) -> list[Reader]:
    """Return the models besides RL's that read the policy's tokens."""
    found: list[Reader] = []
    if "preferences" in config.stages:
        found.append(("policy to sample from (preferences.path)", config.preferences.path, "language"))
    if "dpo" in config.stages:
        found.append(("policy that dpo starts from (dpo.path)", config.dpo.path, "language"))
        found.append(("reference policy (dpo.reference)", config.dpo.reference, "language"))
    if "reward_model" in config.stages:
        found.append(("start of the reward model (reward_model.path)", config.reward_model.path, "any"))
    if {"preferences", "evaluate"} & set(config.stages):
        gold = config.gold.models
        found += [(f"gold reward model '{model.name}' (gold.models)", model.path, "score") for model in gold]
    if "evaluate" in config.stages:
        found.append(("reference policy (kl.reference)", config.kl.reference, "language"))
    return found


def run_stages(config: RunConfig, run_dir: Path, given: FromPython) -> dict[str, Any]:
    """Run `config.stages` in `run_dir`, leaving out those whose output is there.

    Returns what `summary.json` says; without RL, what the last stage recorded, and `summary.json` has all of them.
    Interrupts end the run early, its status then 'interrupted': resumed, RL goes on from its last checkpoint, any other
    stage begins anew.
    """
    if not _has_begun_rl(run_dir) or is_rl_done(config, run_dir):  # else RL compares it with what was saved
        save_config(config, run_dir / "config.toml")
    told: dict[str, Any] = {}
    for stage in config.stages:
        given.interrupts.check()  # one may have come when RL was just through
        if stage == "rl":
            told = _rl(config, run_dir, given)
            if told["status"] != "done":
                return told
            continue
        if not is_done(stage, run_dir):
            try:
                if config.host == "inline":
                    run_stage(stage, config, run_dir, display=given.display)
                else:
                    with HeldFolder(run_dir):
                        run_in_child(stage, run_dir, display=given.display)
            except KeyboardInterrupt:
                with watch(config, stage, display=given.display) as watcher:
                    watcher.note(f"interrupted in the stage {stage}, which begins again then")
                    watcher.note(f"go on with: {given.resume_call(run_dir)}")
                return told | {"status": "interrupted"}
        told = _publish_evaluation(config, run_dir, given, told) if stage == "evaluate" else read_record(run_dir, stage)
    if "rl" not in config.stages:
        from slipstream.observe.report import write_report

        write_summary(Summary.without_rl(config, run_dir, told.get("evaluation")), run_dir / "summary.json")
        report = write_report(run_dir, describe())
        with watch(config, config.stages[-1], display=given.display) as watcher:
            watcher.note(f"report: {report}")
    return {"status": "done"} | told


def is_done(stage: str, run_dir: Path) -> bool:
    """Return whether the output of a stage other than RL is there: its record is written last."""
    return (run_dir / EVALUATION_FILE if stage == "evaluate" else record_path(run_dir, stage)).is_file()


def _has_begun_rl(run_dir: Path) -> bool:
    return (run_dir / "ledger.jsonl").exists() or bool(newest_first(run_dir / "checkpoints"))  # these need the ledger


def _rl(config: RunConfig, run_dir: Path, given: FromPython) -> dict[str, Any]:
    if is_rl_done(config, run_dir):
        found: dict[str, Any] = msgspec.to_builtins(read_summary(run_dir / "summary.json"), str_keys=True)
        return found
    local = with_folders(with_stage_paths(config, run_dir))
    check(local, given=given.functions, environments=given.environments, remote=given.remote)
    if _has_begun_rl(run_dir):
        return resume_rl(config, run_dir, given)
    return run_rl(config, run_dir, given)


def _publish_evaluation(config: RunConfig, run_dir: Path, given: FromPython, told: dict[str, Any]) -> dict[str, Any]:
    """Write the evaluation to the terminal, and where there was RL to summary and report; add it to what was `told`."""
    from slipstream.observe.report import write_report

    found = load_json(run_dir / EVALUATION_FILE, dict[str, Any])
    with watch(config, "evaluate", display=given.display) as watcher:
        watcher.evaluation_table(found)
    if "rl" not in config.stages:
        return told | {"evaluation": found}
    summary = msgspec.structs.replace(read_summary(run_dir / "summary.json"), evaluation=found)
    write_summary(summary, run_dir / "summary.json")
    write_report(run_dir, describe())
    whole: dict[str, Any] = msgspec.to_builtins(summary, str_keys=True)
    return whole
