"""What a teacher asks of the rest of a configuration, said before anything starts; and its place in the pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_build import MODELS, pipeline_of, ranks, ways

from slipstream.controller.checks import check, check_teacher
from slipstream.core.channel import connect_local
from slipstream.core.errors import ConfigError
from slipstream.core.lora_section import LoraConfig
from slipstream.core.recipes import config_toml, resolve
from slipstream.core.sections import ModelConfig
from slipstream.generator.vllm.settings import check_settings
from slipstream.models.hf import save_model
from slipstream.models.initialise import new_model
from slipstream.models.peft import save_adapter, with_adapters
from slipstream.models.tokenizer import PRINTABLE, char_tokenizer
from slipstream.stages.order import check_order
from slipstream.trainer.loss_checks import check_loss

DISTILL = {"name": "distill"}
ALONE = ("trainer", "generator", "teacher")
OWN = {"path": "teacher", "executor": "own", "top_k": 8}
SERVED = OWN | {"engine": "vllm"}
SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"loss": DISTILL}, "no teacher to learn from"),
        ({"teacher": {"coef": 0.1}}, "no teacher to learn from"),
        ({"teacher": {"top_k": 8}}, "no teacher to learn from"),
        ({"teacher": {"path": "t"}}, "nothing is learned"),
        ({"teacher": {"path": "t", "coef": 0.1}, "loss": DISTILL}, "counted twice"),
        ({"teacher": {"path": "t"}, "loss": DISTILL | {"advantages": "gae"}}, "takes no advantages"),
        ({"teacher": {"path": "t"}, "loss": DISTILL | {"advantages": "greedy_baseline"}}, "takes no advantages"),
        ({"teacher": {"path": "t", "coef": 0.1, "ranks": 2}}, "as it trains"),
        ({"teacher": {"path": "t", "coef": 0.1, "device": "cuda"}}, "as it trains"),
        ({"teacher": {"path": "t", "executor": "own"}, "loss": DISTILL}, "a whole vocabulary is too much"),
        ({"teacher": OWN | {"ranks": 2}, "loss": DISTILL, "host": "inline"}, "processes of their own"),
        ({"teacher": OWN | {"precision": "bfloat16"}, "loss": DISTILL}, "on a CPU the teacher computes"),
        ({"teacher": {"path": "t", "engine": "vllm", "top_k": 8}, "loss": DISTILL}, "not in the trainer"),
        ({"teacher": SERVED | {"top_k": None}, "loss": DISTILL}, "a whole vocabulary is too much"),
        ({"teacher": SERVED | {"ranks": 2}, "loss": DISTILL}, "vLLM computes on what it was built for"),
        ({"teacher": SERVED | {"device": "cuda"}, "loss": DISTILL}, "vLLM computes on what it was built for"),
        ({"teacher": SERVED | {"precision": "int8"}, "loss": DISTILL}, "teacher.precision"),
        ({"teacher": {"engine": "vllm", "executor": "own", "top_k": 8}}, "no teacher to learn from"),
        ({"teacher": {"path": "t", "coef": 0.1}, "completions_per_group": 1}, "at least two completions"),
        (
            {"teacher": {"path": "t"}, "loss": DISTILL | {"advantages": "leave_one_out"}, "completions_per_group": 1},
            "at least two completions",
        ),
    ],
)
def test_what_cannot_go_together(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_loss(resolve("quickstart", overrides))


def test_one_completion_per_prompt_and_no_reward_are_enough() -> None:
    overrides: dict[str, Any] = {"loss": DISTILL, "teacher": {"path": "t"}, "completions_per_group": 1}
    config = resolve("quickstart", overrides | {"rewards": {"terms": []}})
    assert not config.needs_functions
    assert "rewards" in [node.name for node in pipeline_of(**overrides).nodes]
    assert resolve("quickstart", {"teacher": {"path": "t", "coef": 0.1}}).needs_functions


def test_a_saved_configuration_without_a_teacher_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(config_toml(resolve("quickstart")))
    assert not resolve(tmp_path / "config.toml").has_teacher


def test_an_own_teacher_stands_last_before_the_trainer() -> None:
    kl = {"coef": 0.1, "executor": "own", "ranks": 2}
    pipeline = pipeline_of(rewards=MODELS, kl=kl, teacher=OWN | {"coef": 0.1, "ranks": 3}, trainer={"ranks": 2})
    assert ways(pipeline.channels) == {
        "generator-0.completions": ["rewards.completions"],
        "rewards.rollouts": ranks("reward_models", "completions", 3),
        **{port: ranks("reference", "rollouts", 2) for port in ranks("reward_models", "scored", 3)},
        **{port: ranks("teacher", "rollouts", 3) for port in ranks("reference", "measured", 2)},
        **{port: ranks("trainer", "rollouts", 2) for port in ranks("teacher", "measured", 3)},
    }
    connect_local(pipeline.all_channels)
    assert "teacher" not in [node.name for node in pipeline_of(teacher={"path": "t", "coef": 0.1}).nodes]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Teachers: the policy's tokens, more of them, other ones, no tokenizer, fewer positions; an adapter."""
    root = tmp_path_factory.mktemp("teachers")
    for name, alphabet in {"same": None, "more": PRINTABLE + "\u00e4", "other": "abc"}.items():
        tokenizer = char_tokenizer(alphabet)
        model = new_model(ModelConfig(**SMALL, max_positions=64), len(tokenizer), 0, eos_token_id=1, pad_token_id=0)
        save_model(model, root / name, tokenizer)
        if name == "same":
            save_model(model, root / "bare", None)
            with_adapters(model, LoraConfig(rank=2), seed=0)
            save_adapter(model, root / "adapter", base=root / "same", digest="")
            short = new_model(ModelConfig(**SMALL, max_positions=16), len(tokenizer), 0, eos_token_id=1, pad_token_id=0)
            save_model(short, root / "short", tokenizer)
    return root


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher with heads that vLLM takes on a CPU."""
    path, tokenizer = tmp_path_factory.mktemp("wide"), char_tokenizer(None)
    sizes = ModelConfig(**SMALL | {"hidden_size": 64}, max_positions=64)
    save_model(new_model(sizes, len(tokenizer), 0, eos_token_id=1, pad_token_id=0), path, tokenizer)
    return path


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("same", {}, None),
        ("same", {"top_k": 99}, None),
        ("same", {"top_k": 100}, r"above the vocabulary\n.*\n.*1\.\.99"),
        ("same", {"executor": "own", "top_k": 8}, None),
        ("more", {}, "another vocabulary"),
        ("other", {}, "another vocabulary"),
        ("bare", {}, "has no tokenizer"),
        ("adapter", {}, None),
        ("short", {}, "read as far"),
    ],
)
def test_what_is_asked_of_it(name: str, changes: dict[str, Any], message: str | None, folders: Path) -> None:
    config = resolve("quickstart", {"loss": DISTILL, "teacher": {"path": str(folders / name)} | changes})
    if message is None:
        check_teacher(config)
        return
    with pytest.raises(ConfigError, match=message):
        check_teacher(config)


@pytest.mark.parametrize("name", ["max_logprobs", "enable_prefix_caching", "max_model_len", "logprobs_mode"])
def test_arguments_of_its_vllm_that_are_ours(name: str) -> None:
    teacher = SERVED | {"vllm": {"engine_args": {name: 1}}}
    with pytest.raises(ConfigError, match=rf"set by Slipstream\n.*teacher.vllm.engine_args with {name}"):
        check_settings(resolve("quickstart", {"loss": DISTILL, "teacher": teacher}))


def python_that(path: Path, finds: str) -> str:
    """An interpreter that finds vllm, does not, or cannot be run at all."""
    path.write_text("not a program" if finds == "cannot run" else f"#!/bin/sh\nexit {int(finds != 'vllm')}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("python", "vllm", "message"),
    [
        ("vllm", {}, None),
        ("vllm", {"max_model_len": 20}, "teacher.vllm.max_model_len is too short"),
        ("nothing", {}, r"no environment with vLLM\n.*teacher.vllm.python = '.*', which finds no vllm"),
        ("cannot run", {}, r"no environment with vLLM\n.*teacher.vllm.python = '.*: .*Exec format"),
        (None, {}, r"no environment with vLLM\n.*teacher.vllm.python = '.*nowhere', from"),
    ],
)
def test_its_vllm_is_looked_for_before_anything_starts(
    python: str | None, vllm: dict[str, Any], message: str | None, wide: Path, tmp_path: Path
) -> None:
    given = str(tmp_path / "nowhere") if python is None else python_that(tmp_path / "python", python)
    teacher = SERVED | {"path": str(wide), "vllm": {"python": given} | vllm}
    config = resolve("quickstart", {"loss": DISTILL, "teacher": teacher})
    if message is None:
        check(config)
        check(resolve("quickstart", {"loss": DISTILL, "teacher": teacher | {"vllm": {"python": "x"}}}), remote=ALONE)
        return
    with pytest.raises(ConfigError, match=message):
        check(config)


def test_heads_that_vllm_has_no_attention_for(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # without nvidia-smi
    vllm = {"python": python_that(tmp_path / "python", "vllm")}
    teacher = SERVED | {"path": str(folders / "same"), "vllm": vllm}
    with pytest.raises(ConfigError, match=r"no attention for heads of this size\n.*16 dim"):
        check(resolve("quickstart", {"loss": DISTILL, "teacher": teacher}))


def test_a_teacher_is_looked_for(folders: Path) -> None:
    with pytest.raises(ConfigError, match="there is no teacher"):
        check(resolve("quickstart", {"loss": DISTILL, "teacher": {"path": str(folders / "nowhere")}}))


def test_a_message_has_room_for_what_it_says(folders: Path) -> None:
    own = {"path": str(folders / "same"), "executor": "own", "top_k": 99}
    lengths = {"generator": {"max_new_tokens": 200_000}, "model": {"max_positions": 200_016}}
    with pytest.raises(ConfigError, match="does not fit one message"):
        check_teacher(resolve("quickstart", {"loss": DISTILL, "teacher": own, **lengths}))


def test_ranks_that_share_layers_divide_the_teacher_too(folders: Path) -> None:
    split = {"trainer": {"ranks": 4, "tensor_parallel": 4}}
    with pytest.raises(ConfigError, match=r"divide|heads"):
        check_teacher(resolve("quickstart", {"loss": DISTILL, "teacher": {"path": str(folders / "same")}, **split}))


CHAIN: dict[str, Any] = {"stages": ["sft", "rl"], "loss": DISTILL, "teacher": {"path": "stage:sft"}}


def test_the_stage_sft_makes_a_teacher_of_its_own_size() -> None:
    config = resolve("quickstart", CHAIN | {"sft": {"shape": {"hidden_size": 256, "num_layers": 4}}})
    check_order(config)
    check(config)
    assert (config.sft_model.hidden_size, config.sft_model.num_layers) == (256, 4)
    assert config.sft_model.num_heads == config.model.num_heads
    assert (config.model.hidden_size, config.model.num_layers) == (128, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sft": {"shape": {"hidden_size": 250, "num_heads": 4}}}, "head sizes do not divide"),
        ({"sft": {"shape": {"num_layers": 2}, "path": "somewhere"}}, "sizes of its own"),
        ({"sft": {"shape": {"num_layers": 2}}, "model": {"path": "stage:sft"}}, r"sizes of \[model\]"),
        ({"stages": ["rl"]}, "does not go through"),
        ({"teacher": {"path": "stage:reward_model"}}, "no stage makes"),
    ],
)
def test_what_stages_cannot_make(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_order(resolve("quickstart", CHAIN | changes))
