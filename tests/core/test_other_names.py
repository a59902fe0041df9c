"""Names of other trainers lead to ours, in recipes, on the command line and from Python; each target is there."""

from __future__ import annotations

import inspect
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import tomli_w

import slipstream
from slipstream import cli
from slipstream.algorithms.losses import LOSSES
from slipstream.core.config import PRESETS, RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.other_names import (
    DEFAULTS,
    FIELDS,
    KEYWORDS,
    SAME,
    VALUES,
    counterparts,
    flags_in,
    sentence,
    sentences,
)
from slipstream.core.recipes import field_paths, merge, nested, resolve
from slipstream.core.sections import RewardTerm
from slipstream.flags import parse
from slipstream.trainer.loss_checks import check_loss

ENTRIES = [(whose, name, entry) for whose, names in FIELDS.items() for name, entry in names.items()]
TEXTS = sorted({entry for *_, entry in ENTRIES} | {said for table in VALUES.values() for said in table.values()})
PATHS = set(field_paths(RunConfig))
LISTS = {"[[rewards.terms]]", "[[rewards.models]]", "[[prompts.tasks]]"}


def settings(text: str) -> dict[str, Any]:
    """The `field = value` in `text`, as overrides."""
    found: dict[str, Any] = {}
    for name, value in re.findall(r"`([a-z_.]+) = ([^`]+)`", text):
        found = merge(found, nested({name: tomllib.loads(f"value = {value}")["value"]}))
    return found


def test_every_target_is_a_field_and_every_setting_is_allowed() -> None:
    for whose, name, entry in ENTRIES:
        field = entry.partition(", ")[0]
        assert field in ("-", "!") or field in PATHS, f"{whose}: {name}"
        assert field not in ("-", "!") or ", " in entry, f"{whose}: {name} says nothing"
    assert set(VALUES) - {"preset"} <= PATHS
    resolved: list[dict[str, Any]] = []
    for text in TEXTS:
        for quoted in re.findall(r"`([^`]+)`", text):
            if not quoted.startswith("slipstream "):
                assert quoted in LISTS or quoted.partition(" = ")[0] in PATHS, text
        if (found := settings(text)) in resolved:
            continue
        resolved.append(found)
        config = resolve("quickstart", found)
        if "loss" in found:
            check_loss(config)


def test_the_end_of_a_longer_name_says_nothing_within_a_section_of_ours() -> None:
    """Its own fields are nearer: evaluation.num_samples, sft.optimizer.betas."""
    for path in ("evaluation.n_samples", "sft.optimizer.beta1", "generator.max_length", "critic.optimizer.offload"):
        assert counterparts(path) == []
    for path, ours in {
        "gconfig.n_samples": "completions_per_group",
        "optimizer.beta1": "trainer.optimizer.betas",
        "rollout.n": "completions_per_group",
        "trainer.save_freq": "trainer.checkpoint_every",
        "trainer.learning_rate": "trainer.optimizer.lr",
    }.items():
        assert [entry.partition(", ")[0] for *_, entry in counterparts(path)] == [ours], path


def test_settings_as_flags_are_the_same() -> None:
    """All that are told, parsed together where they are of different fields: each parser takes a while to make."""
    told = {(text, flags_in(text)) for text in re.findall(r"`[a-z_.]+ = [^`]+`", " ".join(TEXTS))}
    by_flag: dict[str, list[tuple[str, str]]] = {}
    for text, flag in told:
        by_flag.setdefault(text.partition(" ")[0], []).append((text, flag.strip("`")))
    while by_flag:
        chosen = [some.pop() for some in by_flag.values()]
        by_flag = {name: some for name, some in by_flag.items() if some}
        argv = ["quickstart", *" ".join(flag for _, flag in chosen).split()]
        assert parse(cli.RunOptions, argv, cli.run_command).overrides == settings(" ".join(text for text, _ in chosen))


def test_values_of_ours_are_no_values_of_others() -> None:
    for field, table in VALUES.items():
        for value in table:
            if field == "preset":
                assert value not in PRESETS
            elif field == "loss.name":
                assert value not in LOSSES or LOSSES[value].kind != "policy"
            else:
                where = {"trackers.names": [value]}.get(field, value)
                with pytest.raises(ConfigError):
                    resolve("quickstart", {field: where})


def ways(tmp_path: Path, field: str, value: Any) -> Iterator[str]:
    """What is said where `field` stands in a recipe, in nested and in dotted overrides, and on the command line."""
    tables: Any = value
    for name in reversed(field.split(".")):
        tables = {name: tables}
    recipe = tmp_path / "ported.toml"
    recipe.write_text(tomli_w.dumps(tables))
    for call in (
        lambda: resolve(recipe),
        lambda: resolve("quickstart", tables),
        lambda: resolve("quickstart", {field: value}),
    ):
        with pytest.raises(ConfigError) as refused:
            call()
        yield str(refused.value)
    with pytest.raises(ConfigError) as refused:
        cli.run_command(["quickstart", f"--{field}", str(value)])
    yield str(refused.value).replace("-", "_")


@pytest.mark.parametrize(
    ("field", "ours"),
    [
        ("learning_rate", "trainer.optimizer.lr"),
        ("num_generations", "completions_per_group"),
        ("beta", "kl.coef"),
        ("use_vllm", "generator.engine"),
        ("report_to", "trackers.names"),
        ("num_iterations", "trainer.epochs"),
        ("fsdp", "trainer.ranks"),
        ("actor_rollout_ref.rollout.n", "completions_per_group"),
        ("rollout.n", "completions_per_group"),
        ("actor_rollout_ref.actor.kl_loss_coef", "kl.coef"),
        ("kl_loss_coef", "kl.coef"),
        ("trainer.save_freq", "trainer.checkpoint_every"),
        ("orchestrator.batch_size", "groups_per_step"),
        ("max_async_level", "max_staleness"),
        ("n_samples_per_prompt", "completions_per_group"),
        ("output_dir", "out=DIR in Python"),
        ("ref_model_sync_steps", "kl.sync_every"),
        ("vllm_group_port", "the run starts vLLM by itself"),
        ("gradient_checkpointing_kwargs", "trainer.recompute"),
        ("load_best_model_at_end", "the policy after the last step"),
    ],
)
def test_a_name_of_another_trainer_is_told_everywhere(field: str, ours: str, tmp_path: Path) -> None:
    whose, name, _ = counterparts(field)[0]
    for said in ways(tmp_path, field, 1):
        assert f"{whose}'s {name}".replace("-", "_") in said.replace("-", "_")
        assert ours in said
        assert "did you mean" not in said


@pytest.mark.parametrize(
    ("field", "value", "ours"),
    [
        ("loss.name", "dapo", "grpo"),
        ("loss.name", "sft", "stages"),
        ("loss.advantages", "rloo", "leave_one_out"),
        ("loss.reduction", "token-mean", "token"),
        ("kl.estimator", "low_var_kl", "k3"),
        ("generator.precision", "bf16", "bfloat16"),
        ("generator.engine", "sglang", "vllm"),
    ],
)
def test_a_value_of_another_trainer_is_told_everywhere(field: str, value: str, ours: str) -> None:
    for call in (
        lambda: check_loss(resolve("quickstart", {field: value})),
        lambda: cli.run_command(["quickstart", f"--{field}", value]),
        lambda: cli.run_command(["quickstart", f"--{field}={value}"]),
    ):
        with pytest.raises(ConfigError) as refused:
            call()
        hint = str(refused.value).partition("hint:")[2]
        assert ours in hint
        assert "did you mean" not in hint


def test_an_asynchronous_preset_is_one_of_three() -> None:
    for call in (
        lambda: resolve("quickstart", preset="async"),
        lambda: cli.run_command(["quickstart", "--preset", "async"]),
    ):
        with pytest.raises(ConfigError, match=r"hint: .*'one_step' .*'bounded' .*'continuous'"):
            call()


def test_a_whole_configuration_of_another_trainer_is_told_in_one_screen() -> None:
    ported = dict.fromkeys(FIELDS["TRL"], 1) | {"actor_rollout_ref": {"rollout": {"n": 8, "name": "vllm"}}}
    with pytest.raises(ConfigError) as refused:
        resolve("quickstart", ported)
    said = str(refused.value)
    assert "learning_rate is `trainer.optimizer.lr` here" in said
    assert len(said) < 2000
    two = sentences(["num_generations", "beta", "unknown"], as_flags=True)
    assert two is not None
    first, second = (line.strip() for line in two.splitlines())
    assert first == "TRL's num_generations is `--completions-per-group` here"
    assert second.startswith("TRL's beta is `--kl.coef` here, with `--kl.place loss`"), "what goes with it, too"


def test_ours_and_typing_errors_are_still_guessed() -> None:
    for name, meant in (("lr", "trainer.optimizer.lr"), ("max_stalness", "max_staleness"), ("genrator", "generator")):
        assert sentence(name) is None
        with pytest.raises(ConfigError, match=f"did you mean '{meant}'"):
            resolve("quickstart", {name: {"num_slots": 8} if name == "genrator" else 1})
    with pytest.raises(ConfigError, match=r"did you mean '--trainer\.optimizer\.lr'"):
        cli.run_command(["quickstart", "--lr", "1"])


def test_the_own_section_goes_before_the_same_name_elsewhere(tmp_path: Path) -> None:
    wrong = {f"rewards.{name}": "`[[rewards.terms]]`" for name in RewardTerm.model_fields}
    wrong |= {"rewards.path": "`[[rewards.models]]`", "prompts.name": "`[[prompts.tasks]]`"}
    policy = [loss for loss in LOSSES.values() if loss.kind == "policy"]
    wrong |= {f"loss.{name}": "`loss.params`" for loss in policy for name in loss.params}
    for field, said in wrong.items():
        assert said in str(sentence(field)), field
    for field in ("rewards.function", "prompts.name", "loss.eps_low"):
        for told in ways(tmp_path, field, 1):
            assert "did you mean" not in told
            assert wrong[field] in told.replace("`__", "`")


def test_near_names_and_other_sections_are_still_guessed_in_a_section() -> None:
    for field, meant in (("loss.redction", "--loss.reduction"), ("loss.temperature", "--generator.temperature")):
        with pytest.raises(ConfigError, match=f"did you mean '{meant}'"):
            cli.run_command(["quickstart", f"--{field}", "1"])


def test_every_option_of_trls_grpo_is_known() -> None:
    """All that `trl grpo` takes: 'An option of TRL is an error that names the option of Slipstream'."""
    classes = json.loads((Path(__file__).parents[1] / "data" / "trl_grpo_fields.json").read_text())["classes"]
    given = {name: default for fields in classes.values() for name, default in fields.items()}
    known = FIELDS["TRL"].keys() | SAME["TRL"].keys()
    assert given.keys() - known == set(), "each is mapped, or named as absent with a reason"
    assert len(given) > 180
    assert {name: given[name] for name in DEFAULTS["TRL"]} == DEFAULTS["TRL"]
    assert set(SAME["TRL"].values()) <= PATHS
    assert all(field.rpartition(".")[2] == name for name, field in SAME["TRL"].items())


def test_a_loss_of_another_kind_is_offered_to_nobody() -> None:
    others = {name for name, loss in LOSSES.items() if loss.kind != "policy"}
    assert len(others) == 8
    for name in ("bradly_terry", "choise", "nothing", "sft", "value", "dpo", "kt"):
        with pytest.raises(ConfigError) as refused:
            check_loss(resolve("quickstart", {"loss.name": name}))
        assert not others & set(re.findall(r"\w+", str(refused.value.allowed)))
        assert not others & set(re.findall(r"did you mean '(\w+)'", str(refused.value.hint)))


def test_a_clip_is_told_for_the_loss_that_was_named() -> None:
    """`loss.params` are those of whatever loss is named: the answer names no other one."""
    clipped = {name for name, loss in LOSSES.items() if "eps_low" in loss.params}
    for field in ("epsilon", "cliprange", "eps_clip", "clip_ratio_low"):
        said = sentence(field)
        assert said is not None
        assert set(re.findall(r"\w+", said)) >= clipped
        assert "loss.name" not in said
    with pytest.raises(ConfigError) as refused:
        cli.run_command(["quickstart", "--loss.name", "gspo", "--loss.epsilon", "0.2"])
    assert "'--loss.epsilon'" in str(refused.value)
    assert "grpo`" not in str(refused.value.hint)


# Arguments of other trainers in Python


def test_arguments_of_other_trainers_are_answered_by_runs_own() -> None:
    with pytest.raises(ConfigError) as refused:
        slipstream.run("quickstart", reward_funcs=[len], train_dataset=[], learning_rate=1e-5, steps=3, promts=[])  # type: ignore[arg-type]
    said = str(refused.value.hint)
    for words in (
        "reward_funcs is reward=[function, ...]",
        "train_dataset is prompts=[...]",
        "learning_rate is `trainer.optimizer.lr` here",
        'steps is overrides={"steps": ...} here',
        "did you mean 'prompts'?",
    ):
        assert words in said
    assert "reward, reward_weights, prompts, environment" in str(refused.value.allowed)


def test_every_answer_to_an_argument_is_an_argument_or_a_field() -> None:
    own = set(inspect.signature(slipstream.run).parameters) - {"others"}
    assert not own & KEYWORDS.keys()
    for name, entry in KEYWORDS.items():
        argument = re.match(r"\w+", entry)
        assert argument is not None
        assert argument[0] in own | {"nothing"}, name
        assert set(re.findall(r'"([a-z_.]+)"', entry)) <= PATHS, name


# Overrides with dots


def test_dotted_overrides_are_nested_ones() -> None:
    dotted = {
        "loss.name": "ppo",
        "trainer.optimizer.lr": 2e-4,
        "trainer": {"optimizer.eps": 1e-5, "epochs": 2},
        "loss.params.eps_low": 0.1,
        "loss.params.eps_high": 0.3,
        "steps": 3,
    }
    plain = {
        "loss": {"name": "ppo", "params": {"eps_low": 0.1, "eps_high": 0.3}},
        "trainer": {"optimizer": {"lr": 2e-4, "eps": 1e-5}, "epochs": 2},
        "steps": 3,
    }
    assert nested(dotted) == plain
    assert resolve("quickstart", dotted) == resolve("quickstart", plain)
    assert resolve({"prompts.tasks": [{"name": "spell_backward"}], "loss.name": "ppo"}).loss.name == "ppo"
    free = {"loss": {"params": {"a.b": 1.0}}}
    assert nested(free) == free


@pytest.mark.parametrize(
    "twice",
    [
        {"loss.name": "ppo", "loss": {"name": "grpo"}},
        {"loss": {"name": "grpo"}, "loss.name": "ppo"},
        {"trainer.optimizer": {"lr": 1.0}, "trainer": {"optimizer.lr": 2.0}},
        {"steps": 1, "steps.x": 2},
    ],
)
def test_a_field_that_is_given_twice_is_refused(twice: Mapping[str, Any]) -> None:
    with pytest.raises(ConfigError, match="is given twice"):
        resolve("quickstart", twice)


def test_what_is_no_field_name_is_refused() -> None:
    for wrong in ({1: 2}, {"": 1}, {".": 1}, {"loss.": 1}, {"loss.nmae": "ppo"}):
        with pytest.raises(ConfigError, match=r"unknown field|Keys should be strings"):
            resolve("quickstart", wrong)  # type: ignore[arg-type]
