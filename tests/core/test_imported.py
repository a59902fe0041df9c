"""A file of `trl grpo` becomes a recipe that trains the same: batches, losses, rates, and what is left."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import slipstream
from slipstream import cli
from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.held_out import check_measure
from slipstream.core.imported import ImportedConfig, import_config
from slipstream.core.other_names import DEFAULTS, FIELDS
from slipstream.core.recipes import resolve, value_at
from slipstream.core.user_code import defined
from slipstream.generator.vllm.settings import check_settings
from slipstream.stages.named import check_conflicts
from slipstream.trainer.loss_checks import check_loss

FIELDS_OF_TRL = json.loads((Path(__file__).parents[1] / "data" / "trl_grpo_fields.json").read_text())["classes"]
WHOLE: dict[str, Any] = {
    "model_name_or_path": "org/model",
    "dataset_name": "org/data",
    "reward_funcs": ["my.rewards.accuracy"],
    "max_steps": 10,
    "use_cpu": True,
}


def converted(**given: Any) -> tuple[ImportedConfig, RunConfig]:
    """What becomes of `given` beside a model, a data set and a reward; and the configuration that a run would have."""
    found = import_config(WHOLE | given)
    config = resolve(tomllib.loads(found.toml))
    assert config == resolve(found.tables), "comments change nothing"
    check_before_a_run(config)
    return found, config


def check_before_a_run(config: RunConfig) -> None:
    """Check what a run refuses without looking at a model, a data set or a GPU."""
    check_conflicts(config)
    check_settings(config)
    check_measure(config)
    check_loss(config)


def of_kind(found: ImportedConfig, kind: str) -> dict[str, str]:
    return {note.name: note.why for note in found.notes if note.kind == kind}


def test_trls_defaults_are_written_where_they_differ_from_ours() -> None:
    found, config = converted()
    assert found.notes == [], "all that TRL does by default is done"
    expected = {
        "trainer.optimizer.lr": 1e-6,
        "trainer.optimizer.schedule": "linear",
        "trainer.optimizer.weight_decay": 0.0,
        "trainer.optimizer.max_grad_norm": 1.0,
        "loss.params": {"eps_low": 0.2, "eps_high": 0.2},
        "loss.reduction": "token",
        "loss.advantages": "group_normalised",
        "loss.std_eps": 1e-4,
        "loss.unbiased_std": True,
        "loss.skip_no_signal": False,
        "kl.coef": 0.0,
        "generator.temperature": 1.0,
        "generator.max_new_tokens": 512,
        "completions_per_group": 8,
        "groups_per_step": 1,
        "max_staleness": 0,
        "seed": 42,
        "steps": 10,
        "trainer.epochs": 1,
        "trainer.minibatches": 1,
    }
    assert {path: value_at(config, path) for path in expected} == expected


@pytest.mark.parametrize(
    ("given", "name", "params", "reduction"),
    [
        ({"loss_type": "grpo"}, "grpo", {"eps_low": 0.2, "eps_high": 0.2}, "sequence"),
        ({"loss_type": "dr_grpo", "epsilon_high": 0.28}, "grpo", {"eps_low": 0.2, "eps_high": 0.28}, "constant"),
        ({"loss_type": "bnpo"}, "grpo", {"eps_low": 0.2, "eps_high": 0.2}, "token"),
        ({"delta": 1.5}, "ppo", {"eps_low": 0.2, "eps_high": 0.2, "dual_clip": 1.5}, "token"),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, "aipo", {"max_ratio": 5.0, "level": "token"}, "token"),
        ({"loss_type": "sapo"}, "sapo", {"tau_pos": 1.0, "tau_neg": 1.05}, "sequence"),
        (
            {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": "4e-4"},
            "gspo",
            {"eps_low": 3e-4, "eps_high": 4e-4},
            "token",
        ),
        (
            {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"},
            "decoupled_ppo",
            {"eps_low": 0.2, "eps_high": 0.2, "max_ratio": 3.0, "mode": "truncate"},
            "token",
        ),
        (
            {
                "use_vllm": True,
                "vllm_importance_sampling_mode": "token_mask",
                "vllm_importance_sampling_clip_min": 0.5,
                "vllm_importance_sampling_cap": 2.0,
            },
            "icepop",
            {"eps_low": 0.2, "eps_high": 0.2, "max_ratio": 2.0, "min_ratio": 0.5},
            "token",
        ),
    ],
)
def test_each_loss_of_trl(given: dict[str, Any], name: str, params: dict[str, Any], reduction: str) -> None:
    found, config = converted(**given)
    assert (config.loss.name, config.loss.params, config.loss.reduction) == (name, params, reduction)
    assert of_kind(found, "differs") == {}


@pytest.mark.parametrize("kind", ["luspo", "vespo", "nothing"])
def test_a_loss_that_is_not_there_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match="no such loss"):
        import_config(WHOLE | {"loss_type": kind})


@settings(max_examples=100, deadline=None)
@given(
    per_device=st.integers(1, 6),
    accumulation=st.integers(1, 6),
    world=st.integers(1, 3),
    samples=st.integers(2, 6),
    slices=st.none() | st.integers(1, 6),
    iterations=st.integers(1, 3),
    rows=st.integers(1, 60),
    passes=st.sampled_from([0.5, 1, 3.0]),
)
def test_batches_and_steps_are_those_of_a_walk_through_trls_sampler(
    per_device: int,
    accumulation: int,
    world: int,
    samples: int,
    slices: int | None,
    iterations: int,
    rows: int,
    passes: float,
) -> None:
    """Walk over microbatches as RepeatSampler deals them, in whole batches, and update after each `accumulation`."""
    given = {
        "per_device_train_batch_size": per_device,
        "gradient_accumulation_steps": accumulation,
        "num_generations": samples,
        "steps_per_generation": slices,
        "num_iterations": iterations,
        "num_train_epochs": passes,
        "max_steps": -1,
    }
    in_batch = accumulation if slices is None else slices
    whole = in_batch * per_device * world % samples == 0
    try:
        config = resolve(import_config(WHOLE | given, world=world, rows=rows).tables)
    except ConfigError as refused:
        is_split = "minibatch" in str(refused)  # less than a group in a minibatch
        assert not whole or is_split or in_batch % accumulation, "only what does not divide is refused"
        return
    assert whole
    prompts = in_batch * per_device * world // samples
    micro = [batch for batch in range(rows // prompts) for _ in range(iterations) for _ in range(in_batch)]
    updates = math.ceil(passes * max(1, math.ceil(len(micro) / accumulation)))
    assert config.steps == math.ceil(updates / config.updates_per_step)
    trained = accumulation * per_device * world  # completions of an update
    assert config.completions_per_step * config.trainer.epochs == trained * config.updates_per_step
    if in_batch >= accumulation:
        assert config.groups_per_step == prompts, "a step is a batch that one policy has sampled"


def test_what_trl_weighs_beside_the_loss() -> None:
    found, config = converted(
        beta=0.04, scale_rewards=False, entropy_coef=0.01, mask_truncated_completions=True, weight_decay=0.1
    )
    assert (config.kl.coef, config.kl.place, config.kl.estimator, config.kl.corrected) == (0.04, "loss", "k3", True)
    assert (config.loss.advantages, config.loss.entropy_coef, config.loss.truncated) == ("group_mean", 0.01, "mask")
    assert found.notes == []
    assert converted(beta=0.04, use_bias_correction_kl=False)[1].kl.corrected is False
    whole = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
    for beside in ({"beta": 0.04}, {"entropy_coef": 0.01}, {"beta": 0.04, "entropy_coef": 0.01}):
        noted = of_kind(converted(**whole, **beside)[0], "differs")
        assert noted.keys() == beside.keys(), "summed over a completion, not averaged"
        assert all("the mean over tokens" in why for why in noted.values())
    weighed = {"entropy_coef": 0.01, "mask_truncated_completions": True}
    for kind in ("grpo", "sapo", "dr_grpo"):
        assert of_kind(converted(loss_type=kind, **weighed)[0], "differs").keys() == weighed.keys()
        assert converted(loss_type=kind)[0].notes == []
    vllm = {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate", "beta": 0.04}
    assert list(of_kind(converted(**vllm)[0], "differs")) == ["use_bias_correction_kl"]
    assert of_kind(converted(**vllm, use_bias_correction_kl=False)[0], "differs") == {}
    for one in ({"scale_rewards": "batch"}, {"multi_objective_aggregation": "normalize_then_sum"}):
        found, config = converted(**one)
        assert config.loss.whiten_advantages == "batch"
        assert list(of_kind(found, "differs")) == list(one)


def test_rewards_adapters_and_data() -> None:
    _, config = converted(
        reward_funcs=["get_soft_overlong_punishment", "think_format_reward", "a.b.c"],
        reward_model_name_or_path="org/reward",
        reward_weights=[1, 0.5, 2, 3],
        dataset_config="main",
        dataset_train_split="train[:90%]",
        model_revision="v2",
    )
    assert [(term.function, term.per, term.weight) for term in config.rewards.terms] == [
        ("length", "completion", 0.5),
        ("regex", "completion", 2.0),
        ("a.b:c", "group", 3.0),
    ]
    assert [(model.path, model.weight) for model in config.rewards.models] == [("org/reward", 1.0)]
    assert (config.prompts.dataset_config, config.prompts.dataset_split) == ("main", "train[:90%]")
    assert config.model.revision == "v2"
    found, config = converted(use_peft=True, lora_r=8, use_cpu=None, lora_target_modules="all-linear", bf16=True)
    assert (config.model.lora.rank, config.model.lora.alpha, config.model.lora.targets) == (8, 32, [])
    assert (config.trainer.device, config.generator.device, config.trainer.precision) == ("cuda", "cuda", "bfloat16")
    assert config.resident_versions == 1
    assert "lora_dropout" in of_kind(found, "differs")
    _, config = converted(datasets=[{"path": "a/b", "name": "c", "split": "d"}], use_peft=True)
    assert (config.prompts.dataset, config.prompts.dataset_config, config.prompts.dataset_split) == ("a/b", "c", "d")
    assert config.model.lora.targets == ["q_proj", "v_proj"]
    _, config = converted(use_cpu=False)
    assert (config.trainer.device, config.trainer.precision) == ("cuda", "bfloat16")


def test_the_format_reward_is_trls() -> None:
    """TRL's own pattern with `re`, and ours as a worker has it."""
    import re

    from slipstream.rewards.functions import regex_match

    _, config = converted(reward_funcs=["think_format_reward"])
    scorer = regex_match(**config.rewards.terms[0].params, timeout_s=1.0)
    for text in (
        "<think>\na\n</think>\nb",
        "<think>a",
        "x<think>a</think>",
        "<think>a<think>b</think>",
        "<think></think>",
    ):
        theirs = re.match(r"^<think>(?!.*<think>)(.*?)</think>.*$", text, re.DOTALL | re.MULTILINE)
        assert scorer(type("Job", (), {"completion": text})) == float(theirs is not None), text


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.9}, {"top_k": 20, "min_p": 0.1}, {"top_p": 0.9, "min_p": 0.1}])
@pytest.mark.parametrize("use_cpu", [True, False])
def test_a_recipe_with_vllm_can_start(sampling: dict[str, Any], use_cpu: bool) -> None:
    found, config = converted(use_vllm=True, vllm_mode="colocate", use_cpu=use_cpu, **sampling)
    device = "cpu" if use_cpu else "cuda"
    if sampling:
        assert (config.generator.engine, config.generator.device) == ("native", device)
        assert "use_vllm" in of_kind(found, "differs")
    else:
        assert (config.generator.engine, config.generator.device) == ("vllm", "cpu")
        assert "device" not in found.tables["generator"]
    assert config.trainer.device == device


def test_ranks_of_vllm_are_those_of_the_generator() -> None:
    _, config = converted(use_vllm=True, vllm_tensor_parallel_size=2, vllm_model_impl="transformers")
    assert (config.generator.engine, config.generator.tensor_parallel) == ("vllm", 2)
    assert config.generator.vllm.engine_args == {"model_impl": "transformers"}


def test_what_trl_spreads_and_schedules_is_named() -> None:
    found = import_config(WHOLE | {"deepspeed": "zero3.json", "fsdp": "full_shard"}, world=4)
    why = of_kind(found, "set")["trainer.ranks"]
    assert "--world, deepspeed, fsdp" in why
    assert "trainer.ranks = 4" in why
    assert of_kind(found, "unused") == {}
    assert "trainer.ranks" in of_kind(import_config(WHOLE, world=2), "set")
    assert "eval.num_slots" in of_kind(converted(per_device_eval_batch_size=2)[0], "set")["per_device_eval_batch_size"]
    for kind, schedule in (("cosine_with_min_lr", "cosine"), ("polynomial", "linear"), ("inverse_sqrt", "constant")):
        found, config = converted(lr_scheduler_type=kind)
        assert config.trainer.optimizer.schedule == schedule
        assert kind in of_kind(found, "differs")["lr_scheduler_type"]
    found, config = converted(max_prompt_length=64)
    assert config.prompts.max_prompt_tokens == 64
    assert "from the left" in of_kind(found, "differs")["max_prompt_length"]


def test_everything_given_is_converted_or_named() -> None:
    """Each field of TRL, set to what is not its default: the recipe changes, or a note names it. Nothing is silent."""
    known = {name: value for fields in FIELDS_OF_TRL.values() for name, value in fields.items()}
    plain, _ = converted()
    silent = []
    bases: dict[frozenset[str], ImportedConfig] = {}
    checked: list[dict[str, Any]] = []
    for name, default in known.items():
        value = EXAMPLES.get(name, other_than(default))
        beside = {key: one for key, one in NEEDED.items() if name.startswith(key)}
        needed = {k: v for one in beside.values() for k, v in one.items()}
        if (base := bases.get(frozenset(beside))) is None:
            base = bases[frozenset(beside)] = import_config(WHOLE | needed)
        try:
            found = import_config(WHOLE | needed | {name: value})
        except ConfigError as refused:
            raise AssertionError(name) from refused
        if (tables := tomllib.loads(found.toml)) not in checked:
            checked.append(tables)
            check_before_a_run(resolve(tables))
        if (found.tables, found.notes) == (base.tables, base.notes):
            silent.append(name)
    assert silent == [], silent
    assert plain.toml.startswith("# Converted")


def other_than(default: Any) -> Any:
    if isinstance(default, bool):
        return not default
    return {int: 7, float: 0.5, str: "other", list: ["other"]}.get(type(default), "other")


NEEDED: dict[str, dict[str, Any]] = {
    "lora": {"use_peft": True},
    "use_rslora": {"use_peft": True},
    "vllm": {"use_vllm": True},
    "eval_steps": {"eval_strategy": "steps"},
    "save_steps": {"save_strategy": "steps"},
    "sapo": {"loss_type": "sapo"},
    "logging_steps": {"eval_strategy": "steps"},
    "bf16": {"use_cpu": False},
    "num_train_epochs": {"max_steps": -1},
    "project": {"report_to": "wandb"},
    "run_name": {"report_to": "wandb"},
}
EXAMPLES: dict[str, Any] = {
    "reward_funcs": "a.b",
    "use_cpu": False,
    "bf16": False,
    "chat_template_kwargs": {"enable_thinking": False},
    "top_p": 0.9,
    "lr_scheduler_type": "cosine",
    "loss_type": "grpo",
    "importance_sampling_level": "sequence",
    "scale_rewards": "none",
    "multi_objective_aggregation": "normalize_then_sum",
    "num_generations": 4,
    "num_generations_eval": 4,
    "generation_batch_size": 16,
    "steps_per_generation": 2,
    "per_device_train_batch_size": 16,
    "num_train_epochs": 2.0,
    "epsilon_high": 0.3,
    "delta": 3.0,
    "min_p": 0.1,
    "eval_strategy": "steps",
    "save_strategy": "steps",
    "eval_steps": 3,
    "save_steps": 3,
    "logging_steps": 3,
    "save_total_limit": 3,
    "reward_weights": [2.0],
    "datasets": [{"path": "a/b"}],
    "model_init_kwargs": {"revision": "v2"},
    "vllm_importance_sampling_mode": "token_mask",
    "vllm_importance_sampling_clip_max": 2.0,
    "vllm_importance_sampling_clip_min": 0.5,
    "vllm_importance_sampling_cap": 2.0,
    "vllm_gpu_memory_utilization": 0.4,
    "vllm_max_model_length": 99,
    "gradient_checkpointing": True,
}


def test_a_file_is_converted_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "grpo.yaml", tmp_path / "grpo.toml"
    file.write_text(yaml.safe_dump(WHOLE | {"output_dir": "x", "beta": 0.1}) + "learning_rate: 1e-5\n")
    assert cli.main(["import-config", str(file), "--out", str(out), "--world", "8"]) == 0
    said = capsys.readouterr()
    assert "output_dir" in said.err
    config = resolve(out)
    assert (config.recipe, config.groups_per_step, config.trainer.optimizer.lr) == ("grpo", 8, 1e-5)
    assert cli.main(["import-config", str(file)]) == 0
    printed = tomllib.loads(capsys.readouterr().out)
    assert printed == import_config(file).tables == slipstream.import_config(str(file)).tables
    file.write_text(json.dumps(WHOLE))
    assert import_config(file).tables == import_config(WHOLE).tables


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a\n- b", "has no arguments"),
        ("a: [", "neither YAML nor JSON"),
        ("learning_rat: 1", "did you mean 'learning_rate'"),
        ("learning_rate: [1]", "learning_rate has another type"),
        ("delta: high", "delta has another type"),
        ("num_generations: 3", "does not divide"),
        ("num_generations: 1", "num_generations is out of range"),
        ("reward_weights: [1, 2]", "a weight for each reward"),
        ("reward_funcs: accuracy", "no counterpart of TRL's reward"),
        ("reward_funcs: reasoning_accuracy_reward", "no counterpart of TRL's reward"),
        ("scale_rewards: much", "no such advantages"),
        ("generation_batch_size: 8\nsteps_per_generation: 1", "one of these"),
        ("temperature: -1.0", "generator.temperature"),
        ("\x00", "neither YAML nor JSON"),
    ],
)
def test_bad_files_are_refused(text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    assert cli.main(["import-config", str(file)]) == 2
    assert said in capsys.readouterr().err


def test_a_share_of_an_unknown_number_of_updates_is_no_number() -> None:
    given = {"save_strategy": "steps", "save_steps": 0.1, "reward_funcs": "a.b"}
    found = import_config(given)
    assert "checkpoint_every" not in found.tables.get("trainer", {})
    assert any(note.name == "trainer.checkpoint_every" and "--rows" in note.why for note in found.notes)
    known = import_config(given | {"max_steps": 200})
    assert known.tables["trainer"]["checkpoint_every"] > 1


def test_a_reward_in_a_package_stays_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file of its own it could import none of its siblings."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "alone.py").write_text("def score(completions, **_): return [1.0 for _ in completions]\n")
    package = tmp_path / "mine_to_score"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "rewards.py").write_text(
        "from .utils import one\ndef score(completions, **_): return one(completions)\n"
    )
    terms = import_config({"reward_funcs": ["alone.score", "mine_to_score.rewards.score"]}).tables["rewards"]["terms"]
    assert [term["function"] for term in terms] == ["alone.py:score", "mine_to_score.rewards:score"]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = list(sys.path)
    found = defined("mine_to_score.rewards:score", what="reward function")
    assert sys.path == before, "in its order"
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one not in ("", str(tmp_path))])
    before = list(sys.path)
    again = defined("mine_to_score.rewards:score", what="reward function")
    assert sys.path == before
    assert found is not None
    assert again is not None
    assert found[0] == again[0] == package / "rewards.py"


def test_what_the_caller_has_to_set_is_named() -> None:
    found = import_config({"learning_rate": 1e-5})
    assert of_kind(found, "set").keys() == {"steps", "model.path", "prompts.dataset", "rewards.terms"}
    assert "To be set by you" in found.toml
    assert resolve(found.tables, {"prompts.dataset": "x.jsonl", "model.path": "a/b"}).trainer.optimizer.lr == 1e-5
    for wrong in ({"world": 0}, {"rows": 0}):
        with pytest.raises(ConfigError, match="is a count"):
            import_config(WHOLE, **wrong)
    for missing in ("/nowhere/a.yaml", "a\nb"):
        with pytest.raises(ConfigError, match="cannot be"):
            import_config(missing)


def test_defaults_of_the_table_are_read() -> None:
    """A default that no conversion asks for would be dead: those of fields that are named alone are compared with."""
    assert DEFAULTS["TRL"].keys() <= FIELDS["TRL"].keys() | FIELDS_OF_TRL["GRPOConfig"].keys()
    assert dataclasses.is_dataclass(ImportedConfig)
