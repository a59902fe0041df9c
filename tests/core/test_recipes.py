"""Layers, conflicts, messages and the way back to TOML."""

from __future__ import annotations

import os
import string
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
import tomli_w
from drawn import drawn
from hypothesis import strategies as st

from slipstream import cli
from slipstream.algorithms.losses import LOSSES, loss_named
from slipstream.core import recipes
from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.recipes import RETIRED, list_recipes, load_recipe, resolve, save_config
from slipstream.core.sections import GeneratorConfig, ModelConfig, PromptsConfig, RewardsConfig, RewardTerm, TaskConfig
from slipstream.core.stage_sections import DemonstrationConfig, WarmStartConfig
from slipstream.core.training_sections import LossConfig, OptimizerConfig, TrainerConfig
from slipstream.flags import parse
from slipstream.models.hub import hub_id

BASE: dict[str, Any] = {"recipe": "base", "steps": 7, "prompts": {"tasks": [{"name": "spell_backward"}]}}


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of shipped recipes with one in it."""
    (tmp_path / "small.toml").write_text('# Spells words backward.\nsteps = 3\n[[prompts.tasks]]\nname = "x"\n')
    monkeypatch.setattr(recipes, "recipes_dir", lambda: tmp_path)
    return tmp_path


def test_every_shipped_recipe_is_valid_and_described() -> None:
    for recipe in list_recipes():
        assert recipe.description, f"{recipe.path} needs a first comment line"
        assert resolve(recipe.name).recipe == recipe.name


def test_recipes_say_what_they_need() -> None:
    needs = {recipe.name: recipe.needs for recipe in list_recipes()}
    assert [name for name, needed in needs.items() if not needed] == [
        "calculator_mini",
        "distill_mini",
        "dpo_mini",
        "guess_mini",
        "lora_mini",
        "quickstart",
        "stylistic_mini",
        "tldr_mini",
    ]
    assert needs["smollm2"] == ["HuggingFaceTB/SmolLM2-135M-Instruct"]
    assert needs["gsm8k"] == ["realtreetune/rho-1b-sft-GSM8K", "openai/gsm8k"]
    assert set(needs["stylistic"]) == {"openai-community/gpt2", "data/sentiment.jsonl", "data/books.jsonl"}


def test_all_of_them_name_what_the_hub_or_the_user_has() -> None:
    """No folder that nothing makes: a checkpoint is a hub id, data one or a file."""
    for recipe in list_recipes():
        for named in recipe.needs:
            assert hub_id(named) is not None or named.endswith(".jsonl"), f"{recipe.name} needs {named}"
            assert not named.startswith("models/")


def test_another_path_leaves_the_revision_behind() -> None:
    recipe = {"prompts": {"tasks": [{"name": "spell_backward"}]}, "model": {"path": "org/name", "revision": "branch"}}
    assert resolve(recipe).model.revision == "branch"
    assert resolve(recipe, {"model": {"path": "another/model"}}).model.revision is None
    assert resolve(recipe, {"model": {"revision": "tag"}}).model.revision == "tag"


def test_another_data_set_leaves_configuration_and_split_behind() -> None:
    of_data = {"dataset": "org/name", "dataset_config": "main", "dataset_split": "test"}
    recipe = {"prompts": of_data, "sft": of_data, "stages": ["sft", "rl"], "model": {"path": "stage:sft"}}

    def read(over: dict[str, Any]) -> list[tuple[str | None, str | None]]:
        found = resolve(recipe, over)
        return [(one.dataset_config, one.dataset_split) for one in (found.prompts, found.sft)]

    assert read({"prompts": {"num_eval": 500}}) == [("main", "test"), ("main", "test")]
    assert read({"prompts": {"dataset": "org/name"}}) == [("main", "test"), ("main", "test")]
    assert read({"prompts": {"dataset": "folder"}, "sft": {"dataset": "folder"}}) == [(None, "train"), (None, None)]
    assert read({"prompts": {"dataset": "folder", "dataset_config": "own"}})[0] == ("own", "train")
    assert read({"prompts": {"dataset_split": "train"}})[0] == ("main", "train")


def test_recipes_are_found_by_name_and_by_path(shelf: Path) -> None:
    assert [(r.name, r.description) for r in list_recipes()] == [("small", "Spells words backward.")]
    assert load_recipe("small") == load_recipe(shelf / "small.toml")
    assert resolve("small").steps == 3
    assert resolve("small").recipe == "small"


def test_unknown_recipe_names_the_nearest_and_all(shelf: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)unknown recipe 'smal'.*allowed: small.*did you mean 'small'"):
        resolve("smal")


@pytest.mark.usefixtures("shelf")
@pytest.mark.parametrize("path", ["mine", "runs/mine"])
def test_the_folder_of_a_run_is_no_recipe_but_goes_on(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / path).mkdir(parents=True)
    (tmp_path / path / "config.toml").touch()
    with pytest.raises(ConfigError, match=f"hint: .*`slipstream run --resume {path}`"):
        resolve(path)


@pytest.mark.usefixtures("shelf")
@pytest.mark.parametrize("path", ["nowhere/x.toml", "x.toml"])
def test_missing_file_is_named(path: str) -> None:
    with pytest.raises(ConfigError, match=f"no recipe file '{path}'"):
        load_recipe(path)


def test_broken_toml_is_named(shelf: Path) -> None:
    (shelf / "broken.toml").write_text("steps = = 3")
    with pytest.raises(ConfigError, match=r"(?s)broken.toml' is not valid TOML.*line 1"):
        load_recipe("broken")


def test_layers_in_order() -> None:
    """Schema < recipe < preset < override, and a preset leaves alone what it does not name."""
    recipe = BASE | {"max_staleness": 5, "weight_update": "in_flight"}
    assert resolve(BASE).max_staleness == RunConfig.model_fields["max_staleness"].default
    assert resolve(recipe).max_staleness == 5
    assert resolve(recipe, preset="one_step").max_staleness == 1
    assert resolve(recipe, preset="bounded").max_staleness == 5
    assert resolve(recipe, preset="bounded").weight_update == "between_batches"
    assert resolve(recipe, {"steps": 9}, preset="sync").steps == 9
    assert resolve(recipe, {"max_staleness": 3}, preset="bounded").max_staleness == 3


def test_sections_merge_and_tables_of_parameters_are_replaced() -> None:
    recipe = BASE | {"loss": {"name": "aipo", "params": {"max_ratio": 4.0}}, "trainer": {"optimizer": {"lr": 2e-4}}}
    config = resolve(recipe, {"loss": {"params": {"other": 1.0}}, "trainer": {"optimizer": {"eps": 1e-5}}})
    assert config.loss == LossConfig(name="aipo", params={"other": 1.0})
    assert config.trainer.optimizer == OptimizerConfig(lr=2e-4, eps=1e-5)


GRPO: dict[str, Any] = BASE | {"loss": {"name": "grpo", "params": {"eps_low": 0.1}, "std_eps": 0.2}}


@pytest.mark.parametrize(
    ("loss", "params"),
    [
        ({"name": "gspo"}, {}),
        ({"name": "gspo", "params": {"eps_low": 1e-3}}, {"eps_low": 1e-3}),
        ({"name": "grpo"}, {"eps_low": 0.1}),
        ({"std_eps": 0.2}, {"eps_low": 0.1}),
    ],
)
def test_another_loss_has_its_own_defaults(loss: dict[str, Any], params: dict[str, float]) -> None:
    """Parameters of the loss below are dropped with its name, unless some are given with the other name."""
    found = resolve(GRPO, {"loss": loss}).loss
    assert (found.name, found.params) == (loss.get("name", "grpo"), params)
    assert found.std_eps == 0.2  # what is not the loss's own stays


def test_another_loss_has_its_own_defaults_from_a_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(recipes.PRESETS, "other", {"loss": {"name": "rloo"}})
    assert resolve(GRPO, preset="other").loss == LossConfig(name="rloo", std_eps=0.2)
    again = resolve(GRPO, {"loss": {"params": {"eps_low": 0.3}}}).loss
    assert (again.name, again.params) == ("grpo", {"eps_low": 0.3})


RECIPES = [recipe.name for recipe in list_recipes()]
POLICY_LOSSES = sorted(name for name, loss in LOSSES.items() if loss.kind == "policy")
A_THIRD = [pytest.param(name, RECIPES[index % 3 :: 3], id=name) for index, name in enumerate(POLICY_LOSSES)]
EVERY = [pytest.param(name, RECIPES, id=f"{name}, all", marks=pytest.mark.slow) for name in POLICY_LOSSES]


@pytest.mark.parametrize(("name", "over"), [*A_THIRD, *EVERY])
def test_every_loss_can_be_named_over_every_recipe(name: str, over: list[str]) -> None:
    """By tables, dots or flags: with its defaults, and with the recipe's parameters where it is the recipe's own.

    Over a third of the recipes; over all of them among the slow tests.
    """
    argv = ["RECIPE", "--loss.name", name]
    flags = parse(cli.RunOptions, argv, cli.run_command).overrides
    for recipe in over:
        below = resolve(recipe).loss
        given = below.params if below.name == name else {}
        for overrides in ({"loss": {"name": name}}, {"loss.name": name}, flags):
            found = resolve(recipe, overrides).loss
            assert loss_named(name, found.params).params == LOSSES[name].params | given


def test_a_partly_given_section_keeps_its_own_defaults() -> None:
    """`warm_start.optimizer` defaults to another learning rate than `OptimizerConfig`."""
    default = resolve(BASE).warm_start.optimizer
    assert default.lr != OptimizerConfig().lr
    assert resolve(BASE, {"warm_start": {"optimizer": {"eps": 1e-5}}}).warm_start.optimizer.lr == default.lr


def test_preset_and_override_that_agree_are_fine_and_that_differ_are_not() -> None:
    assert resolve(BASE, {"max_staleness": 0}, preset="sync").max_staleness == 0
    with pytest.raises(ConfigError, match=r"preset 'sync'.*'max_staleness' contradict"):
        resolve(BASE, {"max_staleness": 2}, preset="sync")


def test_preset_that_contradicts_the_recipe_is_an_error_of_the_schema() -> None:
    with pytest.raises(ConfigError, match="segment_tokens"):
        resolve(BASE | {"generator": {"segment_tokens": 16}}, preset="continuous")


def test_unknown_preset() -> None:
    with pytest.raises(ConfigError, match=r"(?s)unknown preset 'continous'.*did you mean 'continuous'"):
        resolve(BASE, preset="continous")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"max_stalness": 0}, r"unknown field 'max_stalness'; did you mean 'max_staleness'\?\n  got:     max_stalness"),
        ({"trainer": {"optimizer": {"learning": 1}}}, r"(?s)unknown field 'learning'.*trainer\.optimizer\.learning"),
        ({"lr": 1e-4}, r"unknown field 'lr'; did you mean 'trainer\.optimizer\.lr'\?"),
        ({"prompts": {"tasks": [{"name": "x", "wieght": 1}]}}, r"(?s)did you mean 'weight'.*prompts\.tasks\.0\.wieght"),
        (
            {"steps": 0},
            r"'steps' has a value that is not allowed\n  got:     0\n  allowed: > 0\n  hint:    Training steps",
        ),
        ({"trainer": {"optimizer": {"lr": "fast"}}}, r"(?s)'trainer\.optimizer\.lr'.*'fast'.*a number"),
        ({"weight_update": "inflight"}, r"(?s)'weight_update'.*'between_batches' or 'in_flight'"),
        ({"trainer": 3}, r"(?s)'trainer'.*a table"),
        ({"prompts": {"tasks": [{}]}}, r"(?s)'prompts\.tasks\.0\.name'.*nothing.*no default"),
        ({"loss": {"std_eps": "x"}}, r"(?s)'loss\.std_eps'.*a number"),
        ({"steps": 0, "seed": -1}, r"also wrong: "),
        ({"publish_every": 10}, r"publish_every leaves generators no version"),
    ],
)
def test_mistakes_name_path_got_and_allowed(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(BASE, overrides)


def test_null_inside_parameters_cannot_be_saved(tmp_path: Path) -> None:
    config = resolve(BASE, {"prompts": {"tasks": [{"name": "x", "params": {"a": [1, None]}}]}})
    with pytest.raises(ConfigError, match=r"'prompts\.tasks\.0\.params\.a\.1' cannot be saved"):
        save_config(config, tmp_path / "config.toml")


def test_optional_fields_default_to_none() -> None:
    """What makes leaving None out of TOML safe."""

    def check(tables: dict[str, Any], model: Any) -> None:
        for name, info in model.model_fields.items():
            section = recipes._section_of(model, name)
            if section is not None:
                check(tables[name], section)
            elif type(None) in get_args(info.annotation):
                assert tables[name] is None, name

    check(recipes.defaults(), RunConfig)


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
paths = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=20).filter(
    lambda path: not os.path.exists(path)
)
folder_names = st.text(st.characters(exclude_categories=["Cc", "Cs"], exclude_characters="/."), min_size=1, max_size=20)
counts = st.integers(1, 10**6)
positive = st.floats(1e-9, 1e9)
params = st.dictionaries(
    st.text(string.ascii_letters + " .\"'", min_size=1, max_size=8),
    st.one_of(texts, st.integers(-(10**12), 10**12), st.floats(allow_nan=False), st.booleans(), st.lists(counts)),
    max_size=3,
)
tasks = st.builds(TaskConfig, name=texts, params=params, weight=positive)
rates = st.floats(0, 1, exclude_max=True)
optimizers = st.builds(OptimizerConfig, lr=positive, betas=st.tuples(rates, rates), warmup_updates=st.integers(0, 99))
configs = st.builds(
    RunConfig,
    recipe=folder_names,
    seed=st.integers(0, 2**40),
    max_staleness=st.integers(0, 9),
    model=st.builds(ModelConfig, path=st.none() | paths, alphabet=st.none() | texts),
    prompts=st.builds(
        PromptsConfig, tasks=st.lists(tasks, min_size=1, max_size=3), template=texts, system=st.none() | texts
    ),
    generator=st.builds(GeneratorConfig, temperature=st.floats(1e-6, 1e9), stop_token_ids=st.lists(st.integers(0, 9))),
    rewards=st.builds(
        RewardsConfig,
        terms=st.lists(st.builds(RewardTerm, function=paths, weight=st.floats(-1e30, 1e30), params=params)),
        failure_reward=st.floats(-1e30, 1e30),
    ),
    trainer=st.builds(TrainerConfig, optimizer=optimizers, microbatch_tokens=counts),
    warm_start=st.builds(
        WarmStartConfig,
        demonstrations=st.lists(st.builds(DemonstrationConfig, template=texts, weight=positive), max_size=2),
        optimizer=optimizers,
    ),
)


@drawn(8, 60, config=configs)
def test_saved_config_loads_as_the_same(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("saved") / "config.toml"
    save_config(config, path)
    assert resolve(path) == config
    assert tomli_w.dumps(tomllib.loads(path.read_text())) == path.read_text()


def test_files_of_a_saved_config_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that are no files here stay as they are, also beside a folder of that name; a resume compares files."""
    here, run = tmp_path / "here", tmp_path / "run"
    for folder in (here / "policy", here / "task", run):
        folder.mkdir(parents=True)
    (here / "rows.jsonl").touch()
    monkeypatch.chdir(here)
    given: dict[str, Any] = {
        "stages": ["sft", "rl"],
        "model": {"path": "policy"},
        "prompts": {"tasks": [], "dataset": "./rows.jsonl", "eval_dataset": "org/rows"},
        "rewards": {"terms": [{"function": name} for name in ("task", "lib/own.py:f", "package.own:f", "~/own.py:f")]},
        "environment": {"tools": ["../own.py:add"]},
        "callbacks": {"on_step": ["own.py:f"]},
        "loss": {"name": "own.py:loss"},
        "kl": {"reference": "stage:sft"},
        "eval": {"measure": None},
    }
    save_config(resolve(given), run / "config.toml")
    saved = resolve(run / "config.toml")
    assert (saved.model.path, saved.kl.reference) == (str(here / "policy"), "stage:sft")
    assert (saved.prompts.dataset, saved.prompts.eval_dataset) == (str(here / "rows.jsonl"), "org/rows")
    functions = [term.function for term in saved.rewards.terms]
    assert functions == ["task", str(here / "lib" / "own.py:f"), "package.own:f", "~/own.py:f"]
    assert saved.environment.tools == [str(tmp_path / "own.py:add")]
    assert (saved.callbacks.on_step, saved.loss.name) == ([str(here / "own.py:f")], str(here / "own.py:loss"))
    assert recipes.resumed_config(run, {"loss.name": "own.py:loss", "model.path": "policy"}) == saved
    monkeypatch.chdir(tmp_path)
    assert recipes.resumed_config(run) == saved
    with pytest.raises(ConfigError, match=r"(?s)keeps its configuration.*loss\.name"):
        recipes.resumed_config(run, {"loss.name": "own.py:loss"})


def refused_resume(run: Path, left: str | None, tables: dict[str, Any]) -> str:
    """What a resume with another seed is told, of a run of `tables` that has left a policy there."""
    run.mkdir()
    save_config(resolve(BASE, tables), run / "config.toml")
    if left is not None:
        (run / left).mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"keeps its configuration\n  got: +seed = 5 \(saved: 0\)\n") as refused:
        recipes.resumed_config(run, {"seed": 5})
    return str(refused.value)


def test_a_refused_resume_names_the_policy_that_is_there(tmp_path: Path) -> None:
    """An adapter with its base; that of a stage, without RL."""
    lora = {"model.lora.rank": 2}
    of_stages = {"stages": ["sft", "dpo"], "dpo.path": "stage:sft"}
    for name, left, tables, flags in (
        ("full", "model", {}, "--model.path {}/model"),
        ("fresh", "model", lora, "--model.path {0}/base --model.lora.path {0}/model"),
        ("given", "model", {"model.path": "org/name"} | lora, "--model.path org/name --model.lora.path {}/model"),
        (
            "chain",
            "model",
            {"stages": ["sft", "rl"], "model.path": "stage:sft"} | lora,
            "--model.path {0}/sft/model --model.lora.path {0}/model",
        ),
        ("stages", "dpo/model", of_stages, "--model.path {}/dpo/model"),
    ):
        told = refused_resume(tmp_path / name, left, tables)
        assert told.endswith("a new run from its policy takes " + flags.format(tmp_path / name)), told
    assert "hint" not in refused_resume(tmp_path / "killed", None, {})


COMMIT = "0" * 40


def named(*paths: str) -> list[dict[str, str]]:
    return [{"path": path, "name": str(index)} for index, path in enumerate(paths)]


@pytest.mark.parametrize(
    ("edited", "found"),
    [
        ({}, {}),
        ({"steps": 9, "eval.stop_at": None}, {"steps": 9, "eval": {"stop_at": None}}),
        ({"model.path": "org/policy@v1"}, {}),
        ({"model.path": "org/policy", "model.revision": "v1"}, {}),
        ({"model.path": f"org/policy@{'1' * 40}"}, ["model.path"]),
        ({"model.path": "org/other", "steps": 9}, ["model.path"]),
        ({"seed": 1, "trainer.optimizer.lr": 0.5}, ["seed", "trainer.optimizer.lr"]),
        ({"generator.num_slots": None}, {}),
        ({"prompts.max_prompt_tokens": None}, ["prompts.max_prompt_tokens"]),
        ({"rewards.models": named("org/a@v2", "org/b")}, {}),
        ({"rewards.models": named(f"org/a@{COMMIT}", "org/b")}, {}),
        ({"rewards.models": named("org/a", "org/b", "org/b")}, ["rewards.models"]),
        ({"rewards.models": named("org/b", "org/a")}, ["rewards.models"]),
        ({"prompts.template": "Write to@all {prompt}"}, ["prompts.template"]),
    ],
)
def test_a_recipe_beside_a_run_changes_what_a_resume_may_change(
    tmp_path: Path, edited: dict[str, Any], found: dict[str, Any] | list[str]
) -> None:
    """Job files say both. The run has written commits into its own, and sizes that its recipe leaves open."""
    tasks = BASE["prompts"] | {"max_prompt_tokens": 32, "template": "Write to {prompt}"}
    recipe = BASE | {"model": {"path": "org/policy"}, "eval": {"stop_at": 0.5, "every": 1}, "prompts": tasks}
    recipe["rewards"] = {"models": named("org/a", "org/b")}
    pinned = named(f"org/a@{COMMIT}", f"org/b@{'2' * 40}")
    chosen = {"model.path": f"org/policy@{COMMIT}", "generator.num_slots": 8, "rewards.models": pinned}
    save_config(resolve(recipe, chosen), tmp_path / "config.toml")
    edited = {"generator.num_slots": 8, **edited}
    if isinstance(found, dict):
        assert recipes.changed_since(tmp_path, resolve(recipe, edited)) == found
        return
    with pytest.raises(ConfigError, match=f"(?s)not that of the run.*got: +{' = .*, '.join(found)} = "):
        recipes.changed_since(tmp_path, resolve(recipe, edited))


def test_a_run_is_of_the_recipe_that_began_it(tmp_path: Path) -> None:
    """Where that was written as job files are: every field, and paths as they were given."""
    for recipe in list_recipes():
        config = resolve(recipe.path)
        save_config(config, tmp_path / "config.toml")
        (tmp_path / "recipe.toml").write_text(recipes.config_toml(config))
        assert recipes.changed_since(tmp_path, resolve(tmp_path / "recipe.toml")) == {}, recipe.name


def test_the_controllers_command_takes_a_recipe_with_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A group's, and `slipstream run`, do not."""
    run = tmp_path / "run"
    run.mkdir()
    save_config(resolve(BASE), run / "config.toml")
    save_config(resolve(BASE, {"steps": 9}), tmp_path / "new.toml")
    argv = [str(tmp_path / "new.toml"), "--resume", str(run), "--group", "controller", "--max-restarts", "1"]
    options = cli._of_its_recipe(parse(cli.LaunchOptions, argv, cli.launch_command))
    assert (options.recipe, options.resume, options.overrides) == (None, run, {"steps": 9, "max_restarts": 1})
    assert cli._run_config(options).steps == 9
    assert cli.main(["run", *argv[:3]]) == 2
    assert "a resumed run keeps its configuration" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="there is no folder 'rnus/a'"):
        recipes.changed_since(Path("rnus/a"), resolve(BASE))


def test_fields_that_are_gone_say_nothing_with_their_defaults() -> None:
    for path, default in RETIRED.items():
        assert resolve("quickstart", {path: default}) == resolve("quickstart")
        with pytest.raises(ConfigError, match=f"unknown field '{path.rpartition('.')[2]}'"):
            resolve("quickstart", {path: "other"})
