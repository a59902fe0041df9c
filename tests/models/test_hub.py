"""Checkpoints by their id, from a hub on loopback: what is downloaded, what is recorded, and every way to fail.

The library reads its environment when it is imported, so each environment is a process, which answers all questions
about it. Expected files are those that the hub was given.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_hub import Hub, Repo, hub

import slipstream.models.hub
from slipstream.controller.pipeline import Node, decode_node, encode_node
from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.recipes import CHECKPOINTS, resolve
from slipstream.evals.target import eval_target
from slipstream.models.hub import HubId, hub_id

COMMIT, OTHER = "0123456789abcdef" * 2 + "01234567", "f" * 40
SMALL = {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"{}"}
UNWANTED = {
    "pytorch_model.bin": b"pickle",
    "modeling.py": b"raise SystemExit",
    "onnx/model.safetensors": b"another",
    "consolidated.safetensors": b"again",
    "README.md": b"...",
}
REPOS = {
    "org/whole": Repo(COMMIT, SMALL | UNWANTED),
    "org/sharded": Repo(
        OTHER,
        {"config.json": b"{}", "model.safetensors.index.json": b"{}"}
        | {f"model-0000{part}-of-00002.safetensors": b"part" for part in (1, 2)},
    ),
    "org/pickles": Repo(COMMIT, {"config.json": b"{}", "pytorch_model.bin": b"pickle"}),
    "org/crooked": Repo("../../../etc", SMALL),
    "org/gated": Repo(COMMIT, SMALL, fails="gated"),
    "org/broken": Repo(COMMIT, SMALL, fails="broken"),
    "org/silent": Repo(COMMIT, SMALL, fails="silent"),
}
TOKEN = "hf_not_to_be_seen_anywhere"

ASK = """
import json, sys
from slipstream.models import hub
from slipstream.core.errors import ConfigError
from slipstream.core.recipes import config_toml, resolve

PROMPTS = {"tasks": [{"name": "spell_backward"}]}
answers = {}
for question in json.load(sys.stdin):
    told = []
    hub.ASK_TIMEOUT_S = question["timeout_s"]
    try:
        config = resolve({"prompts": PROMPTS, **question["tables"]})
        pinned = hub.pinned(config, tell=told.append, is_resumed=question["is_resumed"])
        folders = hub.with_folders(pinned, tell=told.append, is_first=question["is_first"])
        found = {"pinned": pinned.model_dump(), "folders": folders.model_dump()}
        found["again"] = hub.pinned(resolve(pinned.model_dump()), is_resumed=True) == pinned
        found["saved"] = config_toml(pinned)
    except ConfigError as error:
        found = {"error": str(error)}
    answers[question["name"]] = found | {"told": told}
assert "torch" not in sys.modules and "transformers" not in sys.modules
json.dump(answers, sys.stdout)
"""


def ask(folder: Path, questions: dict[str, dict[str, Any]], **environment: str) -> dict[str, Any]:
    """The answers of a process with this environment to questions by name: tables, and whether it is a resume."""
    usual = {"is_resumed": False, "is_first": True, "timeout_s": 60.0}
    asked = [usual | {"name": name, **question} for name, question in questions.items()]
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        input=json.dumps(asked),
        env=os.environ | {"HF_HOME": str(folder / "home"), "HF_TOKEN": TOKEN} | environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def model(path: str, **more: Any) -> dict[str, Any]:
    return {"tables": {"model": {"path": path, **more}}}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where processes work: it has a folder that is named like a repository of the hub."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "org" / "local").mkdir(parents=True)
    (folder / "org" / "local" / "config.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def online(place: Path) -> Iterator[tuple[Hub, dict[str, Any]]]:
    everywhere = {
        "stages": ["sft", "preferences", "reward_model", "rl", "evaluate"],
        "model": {"path": "stage:sft"},
        "sft": {"path": "org/whole"},
        "preferences": {"path": "org/whole@main"},
        "reward_model": {"path": "org/sharded"},
        "kl": {"coef": 0.1, "reference": "org/whole"},
        "critic": {"model": "own", "path": "org/sharded"},
        "loss": {"name": "ppo", "advantages": "gae"},
        "rewards": {"models": [{"path": "org/sharded", "name": "one"}]},
        "gold": {"models": [{"path": f"org/sharded@{OTHER}", "name": "two"}]},
    }
    questions = {
        "main": model("org/whole"),
        "branch": model("org/whole", revision="main"),
        "commit": model("org/whole", revision=COMMIT),
        "sharded": model("org/sharded@main"),
        "everywhere": {"tables": everywhere},
        "unread": {"tables": {"sft": {"path": "org/none"}, "critic": {"path": "org/none"}}},
        "local": model("org/local"),
        "local with revision": model("org/local", revision="main"),
        "typo": model("org/whoel"),
        "no revision": model("org/whole@elsewhere"),
        "gone": model("org/whole") | {"is_resumed": True},
        **{name: model(f"org/{name}") for name in ("pickles", "crooked", "gated", "broken")},
        "silent": model("org/silent") | {"timeout_s": 1.0},
    }
    with hub(REPOS) as served:
        yield served, ask(place, questions, HF_ENDPOINT=served.url)


def test_a_name_becomes_its_commit_and_a_folder_with_what_a_checkpoint_needs(online: Any, place: Path) -> None:
    _, answers = online
    for name in ("main", "branch", "commit"):
        found = answers[name]
        assert found["pinned"]["model"]["path"] == f"org/whole@{COMMIT}"
        assert found["pinned"]["model"]["revision"] is None
        assert found["again"], "a resumed run has the same commit"
    folder = Path(answers["main"]["folders"]["model"]["path"])
    assert place / "home" in folder.parents
    assert {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()} == SMALL
    assert answers["main"]["told"] == [f"downloading org/whole, commit {COMMIT[:12]}, from {online[0].url}"]
    assert answers["commit"]["told"] == [], "it is in the cache"
    shards = Path(answers["sharded"]["folders"]["model"]["path"])
    assert {file.name for file in shards.iterdir()} == set(REPOS["org/sharded"].files)


def test_every_place_that_names_a_checkpoint_takes_an_id(online: Any) -> None:
    found = online[1]["everywhere"]
    whole, sharded = f"org/whole@{COMMIT}", f"org/sharded@{OTHER}"
    pinned, folders = found["pinned"], found["folders"]
    assert pinned["model"]["path"] == folders["model"]["path"] == "stage:sft"
    named = [("sft", "path", whole), ("preferences", "path", whole), ("reward_model", "path", sharded)]
    named += [("kl", "reference", whole), ("critic", "path", sharded)]
    for section, key, expected in named:
        assert pinned[section][key] == expected
        assert Path(folders[section][key]).name == expected.partition("@")[2]
    for section in ("rewards", "gold"):
        assert pinned[section]["models"][0]["path"] == sharded
        assert Path(folders[section]["models"][0]["path"]).name == OTHER


def test_every_field_of_a_checkpoint_is_known() -> None:
    """A new field whose description says that it is one has to be told to `with_checkpoints`."""
    described = {
        (section, name)
        for section, info in RunConfig.model_fields.items()
        if section != "callbacks"  # functions that hear of one
        for name, field in getattr(info.annotation, "model_fields", {}).items()
        if "heckpoint" in (field.description or "") and "str" in str(field.annotation)
    }
    assert described == set(CHECKPOINTS)


def test_what_a_run_does_not_read_is_not_asked_for(online: Any) -> None:
    served, answers = online
    assert answers["unread"]["pinned"]["sft"]["path"] == "org/none"
    assert not [line for line in served.asked if "org/none" in line]


def test_only_what_a_checkpoint_is_read_from_is_downloaded_and_the_token_is_told_to_nobody_else(
    online: Any, place: Path
) -> None:
    served, answers = online
    assert not [line for line in served.asked for name in UNWANTED if line.endswith(name)]
    assert served.tokens == {f"Bearer {TOKEN}"}, "the library's own, from the environment"
    assert TOKEN not in json.dumps(answers)
    kept = [file for file in place.rglob("*") if file.is_file() and TOKEN.encode() in file.read_bytes()]
    assert kept == []


def test_a_folder_wins(online: Any) -> None:
    served, answers = online
    assert answers["local"]["folders"]["model"]["path"] == "org/local"
    assert not [line for line in served.asked if "org/local" in line]
    assert "model.revision is that of a repository on the hub" in answers["local with revision"]["error"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("typo", "no repository of that name, or one that is private"),
        ("typo", "hf auth login"),
        ("no revision", "has no revision 'elsewhere'"),
        ("pickles", "no checkpoint in the format that is read here"),
        ("crooked", "answers without a commit"),
        ("gated", "accepted its conditions"),
        ("gated", "`hf download org/gated"),
        ("broken", "answers with status 500"),
        ("silent", "cannot be reached in time"),
        ("silent", "`hf download org/silent`"),
        ("gone", "no longer there"),
    ],
)
def test_what_the_hub_does_not_give_is_told_with_the_reason(online: Any, name: str, said: str) -> None:
    error = online[1][name]["error"]
    assert said in error
    assert "'model.path'" in error
    assert "\x1b" not in error, "an answer's text is not shown"
    assert "Invalid username" not in error


@pytest.mark.parametrize("is_offline", [True, False])
def test_without_a_network_the_cache_serves_and_what_it_lacks_is_told(
    online: Any, place: Path, is_offline: bool
) -> None:
    questions = {
        "main": model("org/whole"),
        "commit": model(f"org/whole@{COMMIT}"),
        "absent": model("org/absent"),
        "unknown commit": model(f"org/whole@{OTHER}"),
    }
    with socket.socket() as nobody:  # it has a port, and does not listen
        nobody.bind(("127.0.0.1", 0))
        address = f"http://user:secret@127.0.0.1:{nobody.getsockname()[1]}"
        answers = ask(place, questions, **({"HF_HUB_OFFLINE": "1"} if is_offline else {"HF_ENDPOINT": address}))
    assert answers["main"]["pinned"]["model"]["path"] == f"org/whole@{COMMIT}"
    assert f"commit {COMMIT[:12]} from the cache" in answers["main"]["told"][0]
    assert answers["commit"]["told"] == []
    assert "`hf download org/absent`, where there is a network" in answers["absent"]["error"]
    assert f"`hf download org/whole --revision {OTHER}`" in answers["unknown commit"]["error"]
    why = "HF_HUB_OFFLINE forbids" if is_offline else "cannot be reached"
    assert why in answers["absent"]["error"]
    assert "secret" not in json.dumps(answers)


def test_a_cache_that_lacks_the_weights_is_no_checkpoint(tmp_path: Path) -> None:
    """Another program may have fetched a tokenizer only."""
    shards = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    indices = {"part": None, "interrupted": json.dumps(shards), "damaged": "[]"}  # one without its shards, or of none
    for name, index in indices.items():
        repo = tmp_path / "home" / "hub" / f"models--org--{name}"
        (repo / "refs").mkdir(parents=True)
        (repo / "refs" / "main").write_text(COMMIT)
        snapshot = repo / "snapshots" / COMMIT
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")
        if index is not None:
            (snapshot / "model.safetensors.index.json").write_text(index)
            (snapshot / "model-1.safetensors").touch()
    answers = ask(tmp_path, {name: model(f"org/{name}") for name in indices}, HF_HUB_OFFLINE="1")
    for name in indices:
        assert f"`hf download org/{name}`" in answers[name]["error"]


def test_a_cache_that_lacks_the_tokenizer_is_filled_where_there_is_a_hub(tmp_path: Path) -> None:
    """transformers' AutoModel leaves config and weights alone."""
    snapshot = tmp_path / "home" / "hub" / "models--org--whole" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).write_bytes(SMALL[name])
    asked = {"commit": model(f"org/whole@{COMMIT}")}
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        for environment in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": f"http://127.0.0.1:{nobody.getsockname()[1]}"}):
            assert Path(ask(tmp_path, asked, **environment)["commit"]["folders"]["model"]["path"]) == snapshot
    assert {file.name for file in snapshot.iterdir()} == {"config.json", "model.safetensors"}
    with hub(REPOS) as served:
        ask(tmp_path, {"commit": asked["commit"] | {"is_first": False}}, HF_ENDPOINT=served.url)
        assert served.asked == [], "the first process did"
        ask(tmp_path, asked, HF_ENDPOINT=served.url)
        assert {file.name: file.read_bytes() for file in snapshot.iterdir()} == SMALL
        served.asked.clear()
        ask(tmp_path, asked, HF_ENDPOINT=served.url)
        assert served.asked == [], "it is whole"


@pytest.mark.parametrize(
    "path",
    ["model", "./a/b", "/a/b", "a/b/c", "../a", "a/../b", "stage:sft", "~/a", "a/b@", "a/b@../c", "a b/c", "a/.."],
)
def test_what_has_not_the_form_of_an_id_is_a_path(path: str) -> None:
    assert hub_id(path) is None


class Reader:
    """A factory's product: what it was told to read."""

    def __init__(self, config: RunConfig) -> None:
        self.path = config.model.path


def test_a_node_is_built_with_the_folder_of_the_machine_that_builds_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = resolve({"prompts": {"tasks": [{"name": "spell_backward"}]}, "model": {"path": f"org/name@{COMMIT}"}})
    sent = json.loads(json.dumps(encode_node(Node("reader", Reader, {"config": config}))))
    assert sent["kwargs"]["config"]["$config"]["model"]["path"] == f"org/name@{COMMIT}"
    for machine in ("one", "two"):
        (tmp_path / machine / COMMIT).mkdir(parents=True)
        (tmp_path / machine / COMMIT / "tokenizer.json").touch()
        monkeypatch.setattr(slipstream.models.hub, "_cached", lambda wanted, files, at=machine: tmp_path / at / COMMIT)
        executor: Any = decode_node(sent).build()
        assert executor.path == str(tmp_path / machine / COMMIT)


def test_an_evaluation_takes_an_id_and_reads_the_reward_models_of_its_recipe(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    snapshot = tmp_path / COMMIT
    snapshot.mkdir()
    (snapshot / "config.json").write_text("{}")
    asked = []

    def located(wanted: HubId, *_: object) -> HubId:
        asked.append(str(wanted))
        return HubId(wanted.repo, COMMIT)

    monkeypatch.setattr(slipstream.models.hub, "_located", located)
    read: list[str] = []
    monkeypatch.setattr(slipstream.models.hub, "_folder_of", lambda wanted, *_: read.append(wanted.repo) or snapshot)
    recipe = {
        "prompts": {"tasks": [{"name": "spell_backward"}]},
        "model": {"path": "org/trained", "revision": "x"},
        "kl": {"coef": 0.1, "reference": f"org/reference@{COMMIT}"},
        "rewards": {"terms": [], "models": [{"path": f"org/judge@{COMMIT}"}]},
    }
    folder, config = eval_target("org/name@main", recipe=recipe)
    assert folder == snapshot
    assert config.model.path == str(snapshot)
    assert set(asked) == {"org/name@main", f"org/judge@{COMMIT}"}
    assert read == ["org/name", "org/judge"], (
        "with its commit, as a run's config.toml has it, the reference is not read"
    )
    with pytest.raises(ConfigError, match="does not say what to ask it"):
        eval_target("org/name")


DATA = """
import json, os, sys
from slipstream.models import hub
from slipstream.core.errors import ConfigError
from slipstream.prompts.dataset import read_records

answers = {}
for name in sys.argv[1:]:
    try:
        answers[name] = list(read_records(name, None, "train"))
    except ConfigError as error:
        answers[name] = str(error)
json.dump(answers, sys.stdout)
"""


def test_a_data_set_that_is_not_there_is_asked_for_once(place: Path) -> None:
    """Its library asks an unreachable hub six times, and says so on the screen."""
    with hub({}) as served:
        there = os.environ | {"HF_HOME": str(place / "data"), "HF_ENDPOINT": served.url}
        done = subprocess.run([sys.executable, "-c", DATA, "org/absent"], env=there, capture_output=True, timeout=120)
        asked = [line for line in served.asked if "org/absent" in line]
    assert "no repository of that name, or one that is private" in json.loads(done.stdout)["org/absent"]
    assert len(asked) == 1
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        there["HF_ENDPOINT"] = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        done = subprocess.run([sys.executable, "-c", DATA, "org/absent"], env=there, capture_output=True, timeout=120)
    assert "`hf download --repo-type dataset org/absent --local-dir DIR`" in json.loads(done.stdout)["org/absent"]
    assert b"Retrying" not in done.stderr


def test_an_interrupt_does_not_wait_for_a_file(tmp_path: Path) -> None:
    deadline_s = time.monotonic() + 120
    with hub({"org/large": Repo(COMMIT, SMALL, fails="stuck")}) as served:
        environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": served.url}
        environment |= {"HF_HUB_DOWNLOAD_TIMEOUT": "600"}  # else the library begins again
        command = [sys.executable, "-m", "slipstream.cli", "eval", "org/large", "--recipe", "quickstart"]
        process = subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.PIPE)
        try:
            while not any(line.startswith("GET") and line.endswith("model.safetensors") for line in served.asked):
                assert time.monotonic() < deadline_s, "its weights are not asked for"
                assert process.poll() is None
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            _, told = process.communicate(timeout=120)
        finally:
            process.kill()
            process.wait()
        assert not served.over.is_set()
    assert process.returncode == 130
    assert b"interrupted" in told
    assert b"Traceback" not in told


# Uploads


PUSH = """
import json, sys
from pathlib import Path
from slipstream.models import hub
from slipstream.core.errors import ConfigError

answers = []
for repo, private in json.load(sys.stdin):
    try:
        hub.check_upload(repo)
        hub.made_repository(repo, private=private)
        answers.append(hub.upload(Path("up"), repo))
    except ConfigError as error:
        answers.append(str(error))
assert "torch" not in sys.modules and "transformers" not in sys.modules
json.dump(answers, sys.stdout)
"""


def push(folder: Path, asked: list[tuple[str, bool]], **environment: str) -> list[str]:
    """The addresses, or errors, of uploads to repositories by name, each as a private one or not."""
    (folder / "up").mkdir(exist_ok=True)
    for name, content in SMALL.items():
        (folder / "up" / name).write_bytes(content)
    done = subprocess.run(
        [sys.executable, "-c", PUSH],
        input=json.dumps(asked),
        env=os.environ | {"HF_HOME": str(folder / "home"), "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN} | environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert TOKEN not in done.stdout + done.stderr
    found: list[str] = json.loads(done.stdout)
    assert not any("\x1b" in one for one in found), "no text of the hub gets into a message"
    return found


def test_a_folder_is_uploaded_to_a_repository_that_is_made(tmp_path: Path) -> None:
    there = {"org/public": Repo(COMMIT, {"README.md": b"..."}), "org/mine": Repo(COMMIT, fails="read only")}
    asked = [("org/new", False), ("org/secret", True), ("org/public", False), ("org/public", True), ("org/mine", False)]
    asked += [("others/x", False)]
    with hub(there) as served:
        new, secret, again, seen, refused, others = push(tmp_path, asked, HF_ENDPOINT=served.url)
        assert [new, secret, again] == [f"{served.url}/org/{name}" for name in ("new", "secret", "public")]
        assert served.repos["org/new"].files == served.repos["org/secret"].files == SMALL
        assert served.repos["org/secret"].is_private
        assert not served.repos["org/new"].is_private
        assert served.repos["org/public"].files == SMALL | {"README.md": b"..."}, "what was there stays"
        assert served.tokens == {f"Bearer {TOKEN}"}
    assert "everybody can read it" in seen
    assert "answers with status 403" in refused
    assert "`hf upload org/mine up` tries it again" in refused
    assert "answers with status 403" in others


def test_uploads_that_are_refused_before_anything_is_asked(tmp_path: Path) -> None:
    names = ["gpt2", "a/b/c", "org/x@main", "../x", "org/..", "", "org/x y"]
    with hub({}) as served:
        said = push(tmp_path, [(name, False) for name in names], HF_ENDPOINT=served.url)
        assert all("no repository of the hub has such a name" in one for one in said)
        [said] = push(tmp_path, [("org/x", False)], HF_ENDPOINT=served.url, HF_TOKEN="")
        assert "no token" in said
        [said] = push(tmp_path, [("org/x", False)], HF_ENDPOINT=served.url, HF_HUB_OFFLINE="1")
        assert "nothing is uploaded offline" in said
        assert [one for one in served.asked if "agent-harnesses" not in one] == []
    [said] = push(tmp_path, [("org/x", False)], HF_ENDPOINT="http://127.0.0.1:9")
    assert "cannot be reached" in said
