"""What a teacher asks of the rest of a configuration, said before anything starts; and its place in the pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_build import MODELS, pipeline_of, ranks, ways

from slipstream.controller.checks import check, check_teacher
from slipstream.core.channel import connect_local
from slipstream.core.errors import ConfigError
from slipstream.core.recipes import config_toml, resolve
from slipstream.core.sections import ModelConfig
from slipstream.models.hf import save_model
from slipstream.models.initialise import new_model
from slipstream.models.tokenizer import PRINTABLE, char_tokenizer
from slipstream.stages.order import check_order
from slipstream.trainer.loss_checks import check_loss

DISTILL = {"name": "distill"}
OWN = {"path": "teacher", "executor": "own", "top_k": 8}
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
    """Teachers: the policy's tokens, more of them, other ones, no tokenizer, fewer positions."""
    root = tmp_path_factory.mktemp("teachers")
    for name, alphabet in {"same": None, "more": PRINTABLE + "\u00e4", "other": "abc"}.items():
        tokenizer = char_tokenizer(alphabet)
        model = new_model(ModelConfig(**SMALL, max_positions=64), len(tokenizer), 0, eos_token_id=1, pad_token_id=0)
        save_model(model, root / name, tokenizer)
        if name == "same":
            save_model(model, root / "bare", None)
            short = new_model(ModelConfig(**SMALL, max_positions=16), len(tokenizer), 0, eos_token_id=1, pad_token_id=0)
            save_model(short, root / "short", tokenizer)
    return root


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
