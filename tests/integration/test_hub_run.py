"""A run whose policy is on a hub: its processes read it from the cache, its folder says which commit that was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_hub import Repo, hub

from slipstream import cli
from slipstream.core.recipes import read_toml
from slipstream.core.sections import ModelConfig
from slipstream.models.build import build_policy
from slipstream.models.hf import save_model

COMMIT = "0123456789abcdef" * 2 + "01234567"
TINY = ModelConfig(hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=2, max_positions=64)

SCRIPT = """
import json, sys
import slipstream
from slipstream.controller.build import default_pipeline

sent = []

def pipeline(config):
    sent.append(config.model.path)
    return default_pipeline(config)

if sys.argv[1] == "run":
    slipstream.run("quickstart", out="out", display=False, pipeline=pipeline, overrides=json.load(sys.stdin))
else:
    found = slipstream.evaluate_model("org/tiny", recipe="out/config.toml", num_prompts=4)
    sent.append(found.num_prompts)
json.dump(sent, sys.stdout)
"""


def python(folder: Path, what: str, overrides: object = None, **environment: str) -> list[object]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, what],
        input=json.dumps(overrides),
        env=os.environ | {"HF_HOME": str(folder / "home")} | environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    found: list[object] = json.loads(done.stdout)
    return found


@pytest.fixture
def repos(tmp_path: Path) -> dict[str, Repo]:
    model, tokenizer = build_policy(TINY, seed=0)
    save_model(model, tmp_path / "made", tokenizer)
    files = {file.name: file.read_bytes() for file in (tmp_path / "made").iterdir()}
    assert "model.safetensors" in files
    return {"org/tiny": Repo(COMMIT, files | {"pytorch_model.bin": b"pickle"})}


@pytest.mark.slow
def test_a_run_reads_its_policy_from_the_hub_and_then_from_the_cache(tmp_path: Path, repos: dict[str, Repo]) -> None:
    overrides = {
        "steps": 1,
        "groups_per_step": 2,
        "completions_per_group": 2,
        "model": {"path": "org/tiny", "revision": "main"},
        "kl": {"coef": 0.01, "reference": "org/tiny"},
        "prompts": {"num_train": 20, "num_eval": 8},
        "generator": {"num_slots": 8, "max_new_tokens": 8},
        "trainer": {"minibatches": 1},
        "warm_start": {"steps": 0},
        "eval": {"num_prompts": 8, "num_slots": 8},
        "loss": {"skip_no_signal": False},
    }
    with hub(repos) as served:
        sent = python(tmp_path, "run", overrides, HF_ENDPOINT=served.url)
    named = f"org/tiny@{COMMIT}"
    assert sent == [named], "processes, also those on other machines, find the folder of their own"
    saved = read_toml(tmp_path / "out" / "config.toml")
    assert saved["model"]["path"] == saved["kl"]["reference"] == named
    assert "revision" not in saved["model"]
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["status"] == "done"
    assert python(tmp_path, "evaluate", HF_HUB_OFFLINE="1") == [4]


@pytest.mark.slow
def test_an_export_is_uploaded_and_comes_back_as_it_is(tmp_path: Path, repos: dict[str, Repo]) -> None:
    """The model that the hub then has is the one that was exported, byte for byte."""
    environment = {"HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_x", "HF_HUB_DISABLE_XET": "1"}
    with hub({}) as served:

        def slipstream(*words: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [sys.executable, "-m", "slipstream", *words],
                env=os.environ | environment | {"HF_ENDPOINT": served.url},
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=240,
            )

        done = slipstream("export", "made", "out", "--push-to-hub", "org/new", "--private")
        assert done.returncode == 0, done.stderr
        assert f"uploaded: {served.url}/org/new" in done.stdout
        uploaded = served.repos["org/new"]
        assert uploaded.is_private
        assert uploaded.files == {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
        assert uploaded.files["model.safetensors"] == repos["org/tiny"].files["model.safetensors"]


def test_an_upload_that_cannot_be_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, said in ((["--push-to-hub", "gpt2"], "such a name"), (["--private"], "with --push-to-hub")):
        assert cli.main(["export", str(tmp_path), str(tmp_path / "out"), *words]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
