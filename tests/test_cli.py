"""The command line: flags, conflicts, exit codes, and that bad input costs no import of torch."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import slipstream.api
from slipstream import cli
from slipstream.core import recipes
from slipstream.core.errors import ExecutorDied
from slipstream.core.recipes import resolve, save_config
from slipstream.evals.target import served_target


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One shipped recipe, `tiny`."""
    shelf = tmp_path / "recipes"
    shelf.mkdir()
    (shelf / "tiny.toml").write_text('# Small enough.\nsteps = 3\n[[prompts.tasks]]\nname = "spell_backward"\n')
    monkeypatch.setattr(recipes, "recipes_dir", lambda: shelf)
    return shelf / "tiny.toml"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    """Calls that reach `slipstream.api.run`, which then reports success."""
    seen: list[tuple[Any, dict[str, Any]]] = []

    def run(config: Any, **options: Any) -> SimpleNamespace:
        seen.append((config, options))
        return SimpleNamespace(summary={"status": "done"})

    monkeypatch.setattr(slipstream.api, "run", run)
    return seen


def run_cli(*argv: str) -> int:
    """The exit code, however the command ends."""
    try:
        return cli.main(argv)
    except SystemExit as left:
        return int(left.code or 0)


@pytest.mark.usefixtures("recipe")
def test_flags_override_the_recipe(calls: list[Any], tmp_path: Path) -> None:
    flags = "--max-staleness 0 --trainer.optimizer.lr 1e-3 --loss.params max_ratio 3 --prompts.chat --model.path None"
    assert run_cli("run", "tiny", *flags.split(), "--out", str(tmp_path / "out")) == 0
    [(config, options)] = calls
    assert config == resolve(
        "tiny",
        {
            "max_staleness": 0,
            "trainer": {"optimizer": {"lr": 1e-3}},
            "loss": {"params": {"max_ratio": 3.0}},
            "prompts": {"chat": True},
        },
    )
    assert config.steps == 3
    assert options == {"out": tmp_path / "out", "resume": None}


@pytest.mark.usefixtures("recipe")
@pytest.mark.parametrize("value", ["true", "false"])
def test_a_switch_may_have_its_value_behind_it(calls: list[Any], value: str) -> None:
    argv = f"run tiny --prompts.chat {value.title()} --health.alarms={value} --steps 7"
    assert run_cli(*argv.split()) == 0
    config = calls[0][0]
    assert (config.prompts.chat, config.health.alarms, config.steps) == (value == "true", value == "true", 7)


@pytest.mark.usefixtures("recipe")
@pytest.mark.parametrize("value", ["null", "None"])
def test_null_is_the_absence_of_a_value(calls: list[Any], value: str) -> None:
    argv = f"run tiny --eval.patience {value} --prompts.system={value} --generator.num-slots {value} --steps 7"
    assert run_cli(*argv.split(), "--prompts.template", f"{value}") == 0
    config = calls[0][0]
    assert (config.eval.patience, config.prompts.system, config.generator.num_slots) == (None, None, None)
    assert (config.steps, config.prompts.template) == (7, value)


@pytest.mark.usefixtures("recipe")
def test_presets_and_lists(calls: list[Any]) -> None:
    argv = "run tiny --preset bounded --max_staleness 4 --generator.segment-tokens 8 --generator.stop-token-ids 5 6"
    assert run_cli(*argv.split(), *["--trainer.optimizer.betas", "0.8", "0.9"]) == 0
    config = calls[0][0]
    assert (config.weight_update, config.max_staleness) == ("between_batches", 4)
    assert (config.generator.segment_tokens, config.generator.stop_token_ids) == (8, [5, 6])
    assert config.trainer.optimizer.betas == (0.8, 0.9)


@pytest.mark.usefixtures("recipe")
def test_a_table_takes_true_and_false_as_toml_writes_them(calls: list[Any]) -> None:
    argv = "run tiny --prompts.chat_template_kwargs enable_thinking false effort 3 wide True mode falsehood"
    assert run_cli(*argv.split()) == 0
    expected = {"enable_thinking": False, "effort": 3, "wide": True, "mode": "falsehood"}
    assert calls[0][0].prompts.chat_template_kwargs == expected


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("rum", "did you mean 'run'?"),
        ("run", "a recipe is needed"),
        ("run tinny", "did you mean 'tiny'?"),
        ("run tiny --max-stalness 0", "--max-staleness"),
        ("run tiny --steps many", "--steps"),
        (
            "run tiny --eval.stop-at soon",
            "is no number\n  got:     soon\n  allowed: digits 0-9, a point, an exponent; or null",
        ),
        ("run tiny --generator.top-k null", "allowed: digits 0-9, of at most 64 bits\n"),
        ("run tiny --weight-update inflight", "in_flight"),
        ("run tiny --steps 0", "'steps' has a value that is not allowed"),
        ("run tiny --preset sync --max-staleness 1", "contradict"),
        ("run tiny --preset synch", "did you mean 'sync'?"),
        ('run tiny --model.lora.targets ["q_proj","v_proj"]', 'words of their own\n  got:     ["q_proj","v_proj"]\n'),
        ("run tiny --model.lora.targets ['q_proj','v_proj']", "allowed: q_proj v_proj\n"),
        ("run tiny --publish-every 9", "publish_every leaves"),
        ("run tiny --model.path nowhere", "no Hugging Face checkpoint"),
        ("run --resume nowhere", "no folder 'nowhere'"),
        ("eval", "a model is needed"),
        ("eval nowhere", "no checkpoint in 'nowhere'"),
        ("eval org/model --recipe tinny", "did you mean 'tiny'?"),
        ("eval org/model --recipe tiny --out nowhere/answers.jsonl", "existing folder"),
        ("report", "a run is needed"),
        ("report nowhere", "no folder 'nowhere'"),
        ("report nowhere elsewhere", "no folder 'nowhere'"),
    ],
)
@pytest.mark.usefixtures("recipe")
def test_bad_input_is_2_and_explained_on_stderr(
    argv: str, message: str, calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(*argv.split()) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert "Traceback" not in err
    assert not out
    assert not calls


def test_resume_takes_the_saved_configuration_and_what_may_change(
    recipe: Path, calls: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = resolve(recipe, {"steps": 11})
    save_config(saved, tmp_path / "config.toml")
    assert run_cli("run", "--resume", str(tmp_path)) == 0
    assert calls == [(None, {"out": None, "resume": tmp_path})]
    calls.clear()
    flags = "--steps 20 --trainer.checkpoint-every 5 --max-staleness 2 --deadline-s 60"  # one of them changes nothing
    assert saved.max_staleness == 2
    assert run_cli("run", "--resume", str(tmp_path), *flags.split()) == 0
    overrides = {"steps": 20, "trainer": {"checkpoint_every": 5}, "max_staleness": 2, "deadline_s": 60.0}
    assert calls == [(None, {"out": None, "resume": tmp_path, "overrides": overrides})]
    for wrong, named in (("tiny --steps 5", "recipe"), ("--seed 1 --loss.name ppo", "seed = 1 (saved: 0), loss.name")):
        assert run_cli("run", "--resume", str(tmp_path), *wrong.split()) == 2
        said = capsys.readouterr().err
        assert f"got:     {named}" in said
        assert "steps, trainer.checkpoint_every" in said


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        ({"status": "done"}, 0),
        ({"status": "interrupted"}, 130),
        ({"status": "failed"}, 1),
        (KeyboardInterrupt(), 130),
        (ExecutorDied("trainer died", hint="see its log"), 1),
    ],
)
@pytest.mark.usefixtures("recipe")
def test_exit_codes(outcome: Any, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*args: Any, **options: Any) -> SimpleNamespace:
        if isinstance(outcome, BaseException):
            raise outcome
        return SimpleNamespace(summary=outcome)

    monkeypatch.setattr(slipstream.api, "run", run)
    assert run_cli("run", "tiny") == code


@pytest.mark.usefixtures("recipe")
def test_what_belongs_to_another_user_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(path: Path, *_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", refused)
    monkeypatch.setattr(Path, "exists", refused)
    assert run_cli("report", "theirs") == 2
    assert "Permission denied: theirs" in capsys.readouterr().err


def test_eval_finds_model_and_configuration_of_a_run(recipe: Path, tmp_path: Path) -> None:
    save_config(resolve(recipe), tmp_path / "config.toml")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    options = SimpleNamespace(model=tmp_path, recipe=None, overrides={"seed": 4}, data=None, num_prompts=None)
    model, config = cli._eval_config(options)
    assert model == tmp_path / "model"
    assert config == resolve(recipe, {"seed": 4, "model": {"path": str(model)}})
    bare = SimpleNamespace(model=model, recipe="tiny", overrides={}, data=None, num_prompts=None)
    assert cli._eval_config(bare) == (model, resolve(recipe, {"model": {"path": str(model)}}))


def test_a_folder_above_a_checkpoint_is_its_runs_only_with_a_runs_files(tmp_path: Path) -> None:
    """Hugo's site has a config.toml, too."""
    checkpoint = tmp_path / "site" / "sft" / "model"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text("{}")
    (tmp_path / "site" / "config.toml").write_text('baseURL = "https://example.org/"')
    assert served_target(checkpoint) == (checkpoint, "model", (), {}, None)
    save_config(resolve("quickstart"), tmp_path / "site" / "config.toml")
    (tmp_path / "site" / "ledger.jsonl").write_text("")
    assert served_target(checkpoint) == (checkpoint, "site", (), {}, "{content}>")


@pytest.mark.usefixtures("recipe")
def test_help_shows_the_recipes_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("run", "tiny", "--help") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Training steps. (default: 3)" in shown
    assert "--trainer." not in shown
    assert "trainer The training step." in shown
    assert run_cli("run", "tiny", "--help", "trainer", "kl") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "--trainer.optimizer.lr FLOAT" in shown
    assert "Peak learning rate. (default: 0.0001)" in shown
    assert "--kl.coef FLOAT" in shown
    assert "--steps INT" not in shown
    assert "--loss." not in shown


@pytest.mark.usefixtures("recipe")
def test_help_of_all_has_every_field_with_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("eval", "--help", "all") == 0
    shown = capsys.readouterr().out
    assert {f"--{name}" for name in ("steps", "loss.name", "trainer.optimizer.lr", "judge.max-concurrency")} <= set(
        shown.replace("│", " ").split()
    )


@pytest.mark.usefixtures("recipe")
def test_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("recipes") == 0
    assert "Small enough." in capsys.readouterr().out
    assert run_cli("recipes", "--tasks") == 0
    assert "spell_backward" in capsys.readouterr().out.split()


def test_doctor_says_what_works(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("doctor", "--json") == 0
    findings = json.loads(capsys.readouterr().out)
    assert findings["hardware"]["num_cores"] >= 1
    works = {feature["name"]: feature["works"] for feature in findings["features"]}
    assert works["training on the CPU"]
    assert works["overlap of generation and training"] == (findings["hardware"]["num_cores"] >= 2)
    needed = ("network", "processes", "user", "privileges", "limits")
    assert works["verifiers that evaluate model text"] == all(findings["isolation"][name] for name in needed)
    assert run_cli("doctor") == 0
    assert "works here" in capsys.readouterr().out


def test_no_torch_before_it_is_needed() -> None:
    """Their import takes seconds; help and complaints do without. In one interpreter, which is new."""
    program = (
        "import sys\nfrom slipstream import cli\n"
        "for words in ('--help', 'run --help', 'run nothing', 'run --resume nowhere', 'recipes'):\n"
        "    try: cli.main(words.split())\n"
        "    except SystemExit: pass\n"
        "    heavy = {'torch', 'transformers', 'datasets', 'reasoning_gym'} & sys.modules.keys()\n"
        "    if heavy: sys.exit(f'{words} imported {heavy}')\n"
        "print('all five')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("all five\n")


def test_a_closed_pipe_is_no_traceback() -> None:
    command = f"{shlex.quote(sys.executable)} -m slipstream.cli run --help | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == ""
    assert done.stdout, "head alone ended well"


@pytest.mark.parametrize(
    ("waiting", "said"), [("", "taken apart\n"), ("Thread(target=sleep, args=[60], daemon=True).start()", "")]
)
def test_no_thread_that_is_left_can_spoil_the_end(waiting: str, said: str) -> None:
    """Python's own way out would, for one that waits in C++: `terminate called without an active exception`."""
    program = (
        "import atexit\nfrom threading import Thread\nfrom time import sleep\nfrom slipstream import cli\n"
        "def main():\n"
        f"    {waiting}\n"
        "    atexit.register(print, 'taken apart')\n"
        "    return 130\n"
        "cli.main = main\ncli.script()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, said, "")
