"""Every model that reads the policy's tokens knows them: said before anything starts, for stages' own when RL does."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import slipstream
from slipstream.core.errors import ConfigError
from slipstream.core.recipes import resolve, save_config, with_stage_paths
from slipstream.core.sections import ModelConfig
from slipstream.models.hf import save_model
from slipstream.models.initialise import new_model
from slipstream.models.scalar import new_scalar_model, save_scalar_model
from slipstream.models.tokenizer import PRINTABLE, char_tokenizer
from slipstream.stages import chain as stages_chain
from slipstream.stages.chain import check_stages
from slipstream.stages.rl import FromPython

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2}
ALPHABETS = {"same": PRINTABLE, "larger": PRINTABLE + "äöü", "other": PRINTABLE[::-1], "smaller": PRINTABLE[:50]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy and a reward model of each alphabet, with their tokenizers and (`bare_...`) without."""
    root = tmp_path_factory.mktemp("checkpoints")
    for name, alphabet in ALPHABETS.items():
        tokenizer = char_tokenizer(alphabet)
        policy = new_model(ModelConfig(**SMALL), len(tokenizer), 0, eos_token_id=1, pad_token_id=0)
        for prefix, own in (("", tokenizer), ("bare_", None)):
            save_model(policy, root / f"{prefix}{name}", own)
            scalar = new_scalar_model(policy, head_init="reward", seed=0)
            save_scalar_model(scalar, root / f"{prefix}{name}_reward", own)
    return root


def chain(**changes: Any) -> dict[str, Any]:
    tables: dict[str, Any] = {
        "stages": ["sft", "preferences", "reward_model", "rl", "evaluate"],
        "host": "inline",
        "model": SMALL | {"path": "stage:sft"},
        "prompts": {"tasks": [{"name": "spell_backward"}], "num_train": 50, "num_eval": 10},
        "loss": {"name": "ppo", "advantages": "gae"},
        "gold": {"terms": [{"function": "task"}]},
        "rewards": {"terms": [], "models": [{"path": "stage:reward_model"}]},
        "kl": {"coef": 0.1},
        "eval": {"num_prompts": 10},
        "evaluation": {"num_prompts": 10},
    }
    for name, section in changes.items():
        tables[name] = tables.get(name, {}) | section if isinstance(section, dict) else section
    return tables


DPO = {"stages": ["sft", "preferences", "dpo", "reward_model", "rl", "evaluate"]}
PLACES: dict[str, Callable[[str], dict[str, Any]]] = {
    "kl.reference": lambda path: {"kl": {"reference": path}},
    "critic.path": lambda path: {"critic": {"path": f"{path}_reward"}},
    "rewards.models": lambda path: {"rewards": {"models": [{"path": f"{path}_reward"}]}},
    "gold.models": lambda path: {"gold": {"models": [{"path": f"{path}_reward"}]}},
    "preferences.path": lambda path: {"preferences": {"path": path}},
    "dpo.path": lambda path: DPO | {"dpo": {"path": path}},
    "dpo.reference": lambda path: DPO | {"dpo": {"reference": path}},
    "reward_model.path": lambda path: {"reward_model": {"path": path}},
}


CHECKPOINTS = {
    "same": None,
    "larger": None,
    "bare_same": None,
    "bare_larger": None,
    "other": "have different tokenizers",
    "smaller": "have different tokenizers",
    "bare_smaller": "smaller vocabulary than the policy",
    "nowhere": "there is no|is no Hugging Face checkpoint",
}


def whoever_reads() -> Iterator[Any]:
    """All places with all checkpoints; most of them among the slow tests."""
    for place, (name, message) in itertools.product(PLACES, CHECKPOINTS.items()):
        is_quick = place in ("kl.reference", "critic.path") or name in ("larger", "other")
        yield pytest.param(place, name, message, marks=[] if is_quick else [pytest.mark.slow])


@pytest.mark.parametrize(("place", "name", "message"), whoever_reads())
def test_who_reads_the_policys_tokens(place: str, name: str, message: str | None, folders: Path) -> None:
    config = resolve(chain(**PLACES[place](str(folders / name))))
    if message is None:
        check_stages(config)
        return
    with pytest.raises(ConfigError, match=message) as refused:
        check_stages(config)
    assert place in str(refused.value)
    assert str(folders / name) in str(refused.value)


def test_the_policys_tokenizer_is_that_of_where_sft_starts(folders: Path) -> None:
    starts = chain(sft={"path": str(folders / "other")}, kl={"reference": str(folders / "other")})
    check_stages(resolve(starts))
    with pytest.raises(ConfigError, match="have different tokenizers"):
        check_stages(resolve(chain(sft=starts["sft"], kl={"reference": str(folders / "same")})))
    fresh = chain(model={"alphabet": ALPHABETS["other"]}, kl={"reference": str(folders / "other")})
    check_stages(resolve(fresh))


def test_what_nobody_reads_is_not_checked(folders: Path) -> None:
    other = str(folders / "other")
    unused = chain(
        stages=["sft", "rl"],
        loss={"advantages": "group_mean", "name": "aipo"},
        kl={"coef": 0.0, "reference": other},
        critic={"path": other},
        preferences={"path": other},
        rewards={"terms": [{"function": "task"}], "models": []},
    )
    check_stages(resolve(unused))


def test_a_run_is_refused_before_it_leaves_anything(folders: Path, tmp_path: Path) -> None:
    tables = chain(kl={"reference": str(folders / "other")})
    with pytest.raises(ConfigError, match="have different tokenizers"):
        slipstream.run(tables, out=tmp_path / "run", display=False)
    assert not (tmp_path / "run").exists()


def test_a_stages_checkpoint_is_checked_when_rl_starts(folders: Path, tmp_path: Path) -> None:
    """Someone has put another reward model where the stage's was."""
    run = tmp_path / "run"
    run.mkdir()
    save_config(resolve(chain(critic={"path": "stage:reward_model"})), run / "config.toml")
    for stage, checkpoint in (("sft", "same"), ("preferences", None), ("reward_model", "other_reward")):
        (run / stage).mkdir()
        (run / stage / "stage.json").write_text(json.dumps({"stage": stage}))
        if checkpoint is not None:
            (run / stage / "model").symlink_to(folders / checkpoint)
    with pytest.raises(ConfigError, match=r"reward model 'reward_model' .* have different tokenizers"):
        slipstream.run("quickstart", resume=run, display=False)
    assert not (run / "ledger.jsonl").exists()


def test_a_stage_sees_the_checkpoints_of_earlier_stages_alone(tmp_path: Path) -> None:
    """What a later stage makes is not there to be read: the policy is still what it comes from."""
    config = resolve(
        chain(stages=["sft", "preferences", "dpo", "rl"], model={"path": "stage:dpo"}, dpo={"path": "stage:sft"})
    )
    before = with_stage_paths(config, tmp_path, before="dpo")
    assert (before.model.path, before.first_checkpoint) == ("stage:dpo", str(tmp_path / "sft" / "model"))
    assert with_stage_paths(config, tmp_path, before="sft").first_checkpoint is None
    assert with_stage_paths(config, tmp_path).model.path == str(tmp_path / "dpo" / "model")


def test_rl_without_its_ledger_does_not_begin_anew_over_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages_chain, "check", lambda *_, **__: None)
    monkeypatch.setattr(stages_chain, "resume_rl", lambda *_: {"status": "refused"})
    monkeypatch.setattr(stages_chain, "run_rl", lambda *_: {"status": "begun anew"})
    found = []
    for _ in range(2):
        found.append(stages_chain._rl(resolve("quickstart"), tmp_path, FromPython())["status"])
        (tmp_path / "checkpoints" / "step_2").mkdir(parents=True, exist_ok=True)
    assert found == ["begun anew", "refused"]
