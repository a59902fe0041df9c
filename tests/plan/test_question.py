"""What a plan can be asked: models by name, folder and recipe, clusters by flag and file, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import tomli_w

from slipstream.core.errors import ConfigError
from slipstream.core.recipes import resolve
from slipstream.plan.counts import counts_of
from slipstream.plan.hardware import DEVICES
from slipstream.plan.lengths import Turns
from slipstream.plan.question import (
    ARCHITECTURES,
    Question,
    cluster_of,
    max_new_tokens,
    precisions_of,
    question_of,
    subject_of,
    workload_of,
)

PUBLISHED = {  # parameters, by the metadata of the safetensors on the Hugging Face hub
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mixtral-8x7b": 46_702_792_704,
    "mistral-7b": 7_248_023_552,
    "mistral-small-24b": 23_572_403_200,
    "mistral-large-123b": 122_610_069_504,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
}


def test_architectures_have_the_parameters_that_were_published():
    assert {name: counts_of(shape).params for name, shape in ARCHITECTURES.items()} == PUBLISHED


def test_a_model_is_a_name_a_folder_a_config_or_a_recipe(tmp_path):
    assert subject_of("Llama-3.1-8B").shape == ARCHITECTURES["llama-3.1-8b"]
    raw = {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    of_folder, of_file = subject_of(str(tmp_path)), subject_of(str(tmp_path / "config.json"))
    assert of_folder.path == of_file.path == str(tmp_path)
    assert counts_of(of_folder.shape).params == PUBLISHED["qwen2.5-0.5b"]
    of_recipe = subject_of("quickstart")
    assert of_recipe.recipe is not None
    assert (of_recipe.shape.hidden_size, of_recipe.shape.vocab_size) == (128, 99)


def test_a_run_s_folder_is_its_recipe_with_its_lengths(tmp_path):
    from slipstream.core.recipes import resolve, save_config

    save_config(resolve("quickstart"), tmp_path / "config.toml")
    line = {"ordinal": 0, "sample": 0, "step": 0, "outcome": "trained", "prompt_id": "", "task": "", "answer": None}
    line |= {"reward": 1.0, "parts": {}, "failure": None, "finish_reason": "stop", "versions": [], "replica": 0}
    line |= {"mean_behaviour_logprob": None, "started_s": 0.0, "finished_s": 0.0, "scored_s": 0.0}
    line |= {"prompt": "abcd>", "completion": "dcba", "num_tokens": 5}
    (tmp_path / "rollouts.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    subject = subject_of(str(tmp_path))
    workload, assumed = workload_of(Question(model=str(tmp_path)), subject)
    assert workload.lengths.completions == (5,)
    assert (workload.groups, workload.group_size, workload.minibatches) == (32, 8, 2)
    assert assumed == ()
    assert max_new_tokens(Question(model=""), subject, workload.lengths) == 12  # the recipe's
    assert not workload.turns.is_set
    line |= {"num_tokens": 9, "versions": [[0, 0], [2, -1], [6, 1]]}
    line |= {"episode": {"messages": [], "turns": 2, "turn_rewards": [], "environment_s": 3.0}}
    (tmp_path / "rollouts.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    workload, _ = workload_of(Question(model="", given_tokens=0), subject)
    assert workload.turns == Turns(turns=2.0, given_tokens=0, environment_s=1.5)
    assert workload.lengths.completions == (5,)
    full = replace(subject, shape=replace(subject.shape, max_positions=5 + 12))  # characters of the prompt, the limit
    assert workload_of(Question(model=""), full)[0].turns.given_mean == 4
    with pytest.raises(ConfigError, match="do not fit the model"):
        workload_of(Question(model="", given_tokens=4), full)


def test_work_that_nobody_named_is_told():
    workload, assumed = workload_of(Question(model="llama-3.1-8b"), subject_of("llama-3.1-8b"))
    assert (workload.groups, workload.group_size) == (512, 4)
    assert len(assumed) == 4
    said = Question(
        model="llama-3.1-8b",
        groups_per_step=16,
        completions_per_group=8,
        prompt_tokens=100.0,
        completion_tokens=300.0,
        p99_tokens=900.0,
        max_new_tokens=1000,
        reference=True,
        critic=True,
        reward_model="llama-3.2-1b",
    )
    workload, assumed = workload_of(said, subject_of("llama-3.1-8b"))
    assert assumed == ()
    assert (workload.groups, workload.group_size, workload.reference, workload.critic) == (16, 8, True, True)
    assert workload.reward_model == ARCHITECTURES["llama-3.2-1b"]
    assert workload.lengths.mean == pytest.approx(300, rel=0.01)
    assert workload.lengths.longest == 1000


def test_a_recipe_says_what_work_there_is(tmp_path):
    recipe = {
        "groups_per_step": 6,
        "completions_per_group": 4,
        "loss": {"name": "ppo", "advantages": "gae"},
        "kl": {"coef": 0.1},
        "trainer": {"minibatches": 3, "epochs": 2},
        "prompts": {"tasks": [{"name": "chain_sum"}], "max_prompt_tokens": 128},
    }
    (tmp_path / "mine.toml").write_text(tomli_w.dumps(recipe), encoding="utf-8")
    subject = subject_of(str(tmp_path / "mine.toml"))
    workload, _ = workload_of(Question(model=""), subject)
    assert (workload.groups, workload.group_size, workload.minibatches, workload.epochs) == (6, 4, 3, 2)
    assert workload.reference
    assert workload.critic
    assert workload.lengths.prompt_mean == 64  # half of what prompts.max_prompt_tokens allows
    assert workload.lengths.longest == 64  # generator.max_new_tokens
    workload, _ = workload_of(Question(model="", groups_per_step=12), subject)
    assert workload.groups == 12
    pairs = {"groups_per_step": 6, "completions_per_group": 4, "prompts": recipe["prompts"]}
    for loss, has_reference in (("online_dpo", True), ("reinforce", False)):
        (tmp_path / "pairs.toml").write_text(tomli_w.dumps(pairs | {"loss": {"name": loss}}), encoding="utf-8")
        workload, _ = workload_of(Question(model=""), subject_of(str(tmp_path / "pairs.toml")))
        assert workload.reference == has_reference


def test_a_recipe_says_which_completions_are_trained_on(tmp_path):
    def trained(**tables):
        recipe = {"completions_per_group": 4, "prompts": {"tasks": [{"name": "chain_sum"}], "max_prompt_tokens": 128}}
        (tmp_path / "mine.toml").write_text(tomli_w.dumps(recipe | tables), encoding="utf-8")
        return workload_of(Question(model="", **given), subject_of(str(tmp_path / "mine.toml")))[0]

    given: dict[str, int] = {}
    pairs = trained(loss={"name": "online_dpo", "select": "best_and_worst"})
    assert (pairs.group_size, pairs.trained_per_group, pairs.measures_all) == (4, 2, False)
    assert trained(loss={"name": "best_of_n", "select": "best"}).trained_per_group == 1
    remax = trained(loss={"name": "reinforce", "advantages": "greedy_baseline"}, kl={"coef": 0.1, "place": "reward"})
    assert (remax.group_size, remax.trained_per_group, remax.measures_all) == (5, 4, True)
    given["completions_per_group"] = 8
    assert trained(loss={"name": "online_dpo", "select": "best_and_worst"}).trained_per_group == 2
    assert trained().trained_per_group == 8


def test_a_critic_that_is_a_head_is_no_second_model(tmp_path):
    recipe = {"loss": {"name": "ppo", "advantages": "gae"}, "prompts": {"tasks": [{"name": "chain_sum"}]}}
    for critic, is_model in (({"model": "head"}, False), ({"model": "own"}, True)):
        (tmp_path / "mine.toml").write_text(tomli_w.dumps(recipe | {"critic": critic}), encoding="utf-8")
        workload, _ = workload_of(Question(model="", prompt_tokens=9), subject_of(str(tmp_path / "mine.toml")))
        assert workload.critic == is_model


def test_models_of_earlier_stages_have_the_shape_of_what_these_start_from(tmp_path):
    subject = subject_of("stylistic_mini")
    assert (subject.path, subject.shape.hidden_size, subject.shape.num_layers) == (None, 128, 3)
    assert workload_of(Question(model=""), subject)[0].reward_model == subject.shape
    raw = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    raw |= {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 50, "max_position_embeddings": 32}
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    recipe = resolve("stylistic_mini", {"sft": {"path": str(tmp_path)}}).model_dump(exclude_none=True)
    (tmp_path / "mine.toml").write_text(tomli_w.dumps(recipe), encoding="utf-8")
    subject = subject_of(str(tmp_path / "mine.toml"))
    assert (subject.path, subject.shape.hidden_size) == (str(tmp_path), 64)
    recipe["reward_model"]["path"], recipe["sft"] = str(tmp_path), {}
    (tmp_path / "mine.toml").write_text(tomli_w.dumps(recipe), encoding="utf-8")
    subject = subject_of(str(tmp_path / "mine.toml"))
    assert subject.shape.hidden_size == 128
    assert workload_of(Question(model=""), subject)[0].reward_model.hidden_size == 64


def test_clusters_by_flag_and_by_file(tmp_path):
    cluster = cluster_of(Question(model="", gpus=24, gpu="a100", gpus_per_node=4, network=12.5, price=1.5))
    assert cluster is not None
    assert (cluster.num_devices, cluster.device.devices_per_node, cluster.usd_per_device_hour) == (24, 4, 1.5)
    assert cluster.device.network_bandwidth == 12.5e9
    assert cluster.device.memory_bytes == DEVICES["A100"].memory_bytes
    assert cluster_of(Question(model="")) is None
    file = tmp_path / "cluster.toml"
    file.write_text('gpus = 16\ngpu = "h100"\nname = "H800"\nnode_bandwidth_gb_s = 200\ntflops = { bfloat16 = 700 }\n')
    cluster = cluster_of(Question(model="", cluster=file))
    assert cluster is not None
    assert (cluster.device.name, cluster.device.node_bandwidth, cluster.num_devices) == ("H800", 200e9, 16)
    assert cluster.device.flops["bfloat16"] == 700e12
    assert cluster.device.flops["fp8"] == DEVICES["H100"].flops["fp8"]


@pytest.mark.parametrize("per_node", ["0.5", "2.9", "0"])
def test_a_node_has_whole_gpus(tmp_path, per_node):
    file = tmp_path / "cluster.toml"
    file.write_text(f'gpus = 16\ngpu = "h100"\ngpus_per_node = {per_node}\n')
    with pytest.raises(ConfigError, match="gpus_per_node"):
        cluster_of(Question(model="", cluster=file))


def test_precisions_are_those_that_the_gpus_have():
    a100 = cluster_of(Question(model="", gpus=8, gpu="a100"))
    h100 = cluster_of(Question(model="", gpus=8))
    assert a100 is not None
    assert h100 is not None
    assert precisions_of(Question(model=""), a100) == ("bfloat16",)
    assert precisions_of(Question(model=""), h100) == ("bfloat16", "fp8")
    assert precisions_of(Question(model="", precision=("fp8",)), h100) == ("fp8",)
    with pytest.raises(ConfigError, match="do not compute in fp8"):
        precisions_of(Question(model="", precision=("fp8",)), a100)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("gpu = 'h100'", "does not say how many"),
        ("gpus = 8\nmemory = 80", "unknown field 'memory'"),
        ("gpus = 8\nmemory_gb = -1", "must be a positive number"),
        ("gpus = 8\ntflops = 3", "is by precision"),
        ("gpus = 8\ngpu = 'tpu'", "no constants are known"),
        ("gpus = 8 8", "not valid TOML"),
    ],
)
def test_cluster_files_that_cannot_be_are_refused(tmp_path, text, told):
    (tmp_path / "cluster.toml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=told):
        cluster_of(Question(model="", cluster=tmp_path / "cluster.toml"))


def test_a_cluster_is_said_once(tmp_path):
    with pytest.raises(ConfigError, match="by a file or by flags"):
        cluster_of(Question(model="", gpus=8, cluster=tmp_path / "cluster.toml"))
    with pytest.raises(ConfigError, match="a number of GPUs"):
        cluster_of(Question(model="", price=2.0))


def test_unknown_arguments_are_named():
    with pytest.raises(ConfigError, match="unknown argument 'max_stalness'") as refused:
        question_of(model="llama-3.1-8b", max_stalness=3)
    assert "did you mean 'max_staleness'?" in str(refused.value)
