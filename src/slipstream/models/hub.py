"""Checkpoints by their id on the Hugging Face hub, 'ORG/NAME' or 'ORG/NAME@REVISION', wherever a checkpoint is named.

    pinned         before a run starts: every id becomes 'ORG/NAME@COMMIT', or an error says why it cannot be had
    with_folders   where checkpoints are read, on each machine: every id with a commit becomes the folder in the cache,
                   filled where it is not; first of all in the caller's process, where there is a screen

A folder of that name wins. Cache, token, proxy and offline mode are those of `huggingface_hub`, by its environment
(HF_HOME, HF_TOKEN or `hf auth login`, HF_ENDPOINT, HF_HUB_OFFLINE); no token passes through here. Nothing but what a
checkpoint is read from is downloaded: no pickles and no code. What the hub answers is not trusted: a commit is 40 hex
digits or an error, and no text of the hub gets into a message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slipstream.core.background import run_interruptibly
from slipstream.core.config import RunConfig, stage_of
from slipstream.core.errors import ConfigError
from slipstream.core.recipes import with_checkpoints
from slipstream.models.tokenizer import has_tokenizer

ASK_TIMEOUT_S = 10.0
"""Longest wait of the one question that finds out whether there is a hub: for connection and answer each."""
WEIGHTS_INDEX = "model.safetensors.index.json"
WEIGHTS = ("model.safetensors", WEIGHTS_INDEX)
FILES = (
    "config.json",
    "generation_config.json",
    *WEIGHTS,
    "model-*.safetensors",
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
)
"""Files that a checkpoint is read from, as patterns: its shape, its weights, its tokenizer."""

CONFIG = ("config.json",)
ADAPTER_CONFIG = "adapter_config.json"
"""The file of a folder with an adapter in PEFT's format, which is beside a model elsewhere (`peft.py`)."""
_ID = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(@(?P<revision>[\w][\w./-]{0,199}))?", re.ASCII
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CACHED = re.compile(r"/models--(?P<repo>[\w.-]+--[\w.-]+)/snapshots/(?P<commit>[0-9a-f]{40})$", re.ASCII)

Tell = Callable[[str], None]
"""Takes a line for the screen."""


@dataclass(frozen=True)
class HubId:
    """A repository on the hub, and a branch, a tag or a commit of it; None for its main branch."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"

    @property
    def is_pinned(self) -> bool:
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    @property
    def download(self) -> str:
        """Return the command that puts it into the cache of a machine."""
        return f"hf download {self.repo}" + ("" if self.revision is None else f" --revision {self.revision}")


def hub_id(path: str | None) -> HubId | None:
    """Return the id that `path` is, where it has the form of one and there is nothing of that name here; else None."""
    if path is None or stage_of(path) is not None or (found := _ID.fullmatch(path)) is None or Path(path).exists():
        return None
    revision = found["revision"]
    return None if ".." in path or (revision or "").endswith("/") else HubId(found["repo"], revision)


def is_adapter(folder: str | Path) -> bool:
    """Tell whether a folder has an adapter and no model's weights; other programs write the base's config beside it."""
    folder = Path(folder)
    return (folder / ADAPTER_CONFIG).is_file() and not any((folder / name).is_file() for name in WEIGHTS)


def has_checkpoint(folder: str | Path) -> bool:
    """Tell whether a folder has a model or an adapter."""
    return (Path(folder) / "config.json").is_file() or is_adapter(folder)


def hub_id_of(folder: Path) -> HubId | None:
    """Return the id, with its commit, that a folder of the hub's cache has; None for other folders."""
    found = _CACHED.search(folder.as_posix())
    return None if found is None else HubId(found["repo"].replace("--", "/", 1), found["commit"])


def check_model_path(config: RunConfig) -> None:
    """Raise ConfigError for checkpoints that are neither here nor named by an id: early, before torch is imported."""
    named = [("model.path", config.model.path), ("sft.path", config.sft.path if "sft" in config.stages else None)]
    if "dpo" in config.stages:
        named.append(("dpo.path", config.dpo.path))
    for field, path in named:
        if path is None or stage_of(path) is not None or hub_id(path) is not None:
            continue
        if is_adapter(path):
            raise ConfigError(
                f"'{field}' is an adapter, which is trained beside its base",
                got=path,
                allowed="a model",
                hint=f"model.path = the base that its {ADAPTER_CONFIG} names, with model.lora.path = '{path}'; or "
                "`slipstream export --merged`, which makes a model of both",
            )
        if not (Path(path) / "config.json").is_file():
            raise ConfigError(
                f"'{field}' is no Hugging Face checkpoint",
                got=path,
                allowed="a folder with config.json, or a hub id ORG/NAME or ORG/NAME@REVISION",
                hint="HuggingFaceTB/SmolLM2-135M-Instruct is a small one; a relative path is looked for from here",
            )


def pinned(
    config: RunConfig, *, tell: Tell | None = None, is_resumed: bool = False, only: Collection[str] | None = None
) -> RunConfig:
    """Return `config` with a commit in every hub id that this run reads. Nothing large is downloaded.

    With `is_resumed`, ids have their commits already: one without was a folder when the run began, and ConfigError
    says that it is gone. So it does for what neither hub nor cache has, with the reason and a command. `only` these
    fields, where not all are read.
    """
    config = _with_revision(config)

    def pin(field: str, path: str) -> str:
        wanted = hub_id(path)
        if wanted is None or not _is_read(config, field, only):
            return path
        if is_resumed and not wanted.is_pinned:
            raise ConfigError(f"'{field}' is no longer there", got=path, allowed="the folder that the run began with")
        return str(_located(wanted, field, tell))

    return with_checkpoints(config, pin)


def with_folders(
    config: RunConfig, *, tell: Tell | None = None, is_first: bool = False, only: Collection[str] | None = None
) -> RunConfig:
    """Return `config` with folders of this machine's cache, filled where they are not, for the pinned hub ids that this
    run reads, or `only` those of these fields.

    What reads a checkpoint gets this; what is saved or sent to other machines keeps the ids. `is_first` in the process
    that prepares a machine for the others: it alone asks the hub about a model in the cache that has no tokenizer.
    """

    def folder(field: str, path: str) -> str:
        wanted = hub_id(path)
        if wanted is None or not wanted.is_pinned or not _is_read(config, field, only):
            return path
        return str((None if is_first else _cached(wanted, FILES)) or _folder_of(wanted, field, tell))

    return with_checkpoints(config, folder)


def checkpoint_folder(path: str, *, what: str, tell: Tell | None = None) -> Path:
    """Return the folder that `path` is, or that stands for the hub id that it is; `what` names it in errors."""
    wanted = hub_id(path)
    return Path(path) if wanted is None else _folder_of(_located(wanted, what, tell), what, tell)


def config_file(path: str, *, what: str) -> Path:
    """Return the config.json of a checkpoint, without its weights: from its folder, the cache, or the hub."""
    wanted = hub_id(path)
    folder = Path(path) if wanted is None else _cached(_located(wanted, what, None), CONFIG)
    assert folder is not None, "it was just located"
    return folder / "config.json"


def _with_revision(config: RunConfig) -> RunConfig:
    """Move `model.revision` where every other id has it: behind the name."""
    model = config.model
    if model.revision is None:
        return config
    if hub_id(model.path) is None:
        raise ConfigError(
            "model.revision is that of a repository on the hub",
            got=f"model.revision = '{model.revision}' with model.path = '{model.path}', which is here",
            allowed="a hub id ORG/NAME as model.path, or no model.revision",
        )
    update = {"path": f"{model.path}@{model.revision}", "revision": None}
    if hub_id(update["path"]) is None:
        raise ConfigError(
            "model.revision is no revision", got=model.revision, allowed="a branch, a tag or a commit of the repository"
        )
    return config.model_copy(update={"model": model.model_copy(update=update)})


def _is_read(config: RunConfig, field: str, only: Collection[str] | None) -> bool:
    """Whether this run, or what reads `only` some fields, reads the checkpoint that `field` names: others are not
    downloaded for nothing."""
    if only is not None:
        return field in only
    stages = {
        "sft.path": {"sft"},
        "preferences.path": {"preferences"},
        "dpo.path": {"dpo"},
        "dpo.reference": {"dpo"},
        "reward_model.path": {"reward_model"},
        "gold.models.path": {"preferences", "evaluate"},
    }.get(field, set(config.stages))
    return bool(stages & set(config.stages)) and (field != "critic.path" or config.has_critic)


@contextmanager
def reached_for_dataset(name: str) -> Iterator[None]:
    """Within, `datasets` asks the hub for the data set `name`; where that is out of reach, its cache alone.

    By itself it asks an unreachable hub six times over, which takes half a minute. ConfigError for one that the hub
    does not give.
    """
    from huggingface_hub import HfApi, constants, errors

    try:
        HfApi().dataset_info(name, timeout=ASK_TIMEOUT_S)
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        refused = _as_refused(error, HubId(name), kind="datasets/")
        raise ConfigError(
            f"dataset '{name}' is no file or folder here, and the hub does not give it",
            got=str(refused),
            allowed="an existing file or folder, or a hub id 'owner/name'",
            hint=refused.hint,
        ) from None
    except Exception:  # noqa: BLE001 - of whichever HTTP library it uses: there is no hub
        was_offline, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
        try:
            yield
        finally:
            constants.HF_HUB_OFFLINE = was_offline
    else:
        yield


# Uploads


def check_upload(repo: str) -> None:
    """Raise ConfigError for a name that no repository has, and where nothing says who uploads. Asks nobody."""
    from huggingface_hub import constants, get_token

    if (found := _ID.fullmatch(repo)) is None or found["revision"] is not None or ".." in repo or "--" in repo:
        raise ConfigError("no repository of the hub has such a name", got=repo, allowed="ORG/NAME, or USER/NAME")
    if constants.HF_HUB_OFFLINE:
        raise ConfigError("nothing is uploaded offline", got="HF_HUB_OFFLINE", hint="unset it, or drop --push-to-hub")
    if not get_token():
        raise ConfigError(
            "the hub takes uploads only from those it knows",
            got="no token",
            hint="`hf auth login`, or HF_TOKEN with a token that may write",
        )


def made_repository(repo: str, *, private: bool) -> None:
    """Make the repository where there is none; ConfigError where it may not be written to, or everybody could read."""
    from huggingface_hub import HfApi

    def make() -> bool | None:
        HfApi().create_repo(repo, private=private or None, exist_ok=True)
        return HfApi().model_info(repo, timeout=ASK_TIMEOUT_S).private

    try:
        is_private = run_interruptibly(make, name="repository")
    except Exception as error:  # of whichever HTTP library it uses
        raise _not_uploaded(repo, error) from error
    if private and not is_private:
        raise ConfigError(
            f"'{repo}' is there already, and everybody can read it",
            got="--private",
            hint="make it private on the hub, or name another one",
        )


def upload(folder: Path, repo: str) -> str:
    """Upload the files of `folder` as one commit, and return the address of the repository."""
    from huggingface_hub import HfApi

    def push() -> object:
        return HfApi().upload_folder(repo_id=repo, folder_path=folder, commit_message="Upload by slipstream export")

    try:
        run_interruptibly(push, name="upload")
    except Exception as error:
        raise _not_uploaded(
            repo, error, f"the files are in {folder}: `hf upload {repo} {folder}` tries it again"
        ) from error
    return f"{_endpoint()}/{repo}"


def _not_uploaded(repo: str, error: Exception, hint: str | None = None) -> ConfigError:
    refused = _as_refused(error, HubId(repo))
    return ConfigError(
        f"'{repo}' cannot be written to",
        got=str(refused),
        allowed="a repository of your own, or of an organisation that lets you write",
        hint=hint or "does the token in HF_TOKEN, or of `hf auth login`, allow to write?",
    )


# Cache and hub


class _Refused(Exception):
    """The hub does not give it, for a reason; `hint` is what to do besides downloading it elsewhere."""

    def __init__(self, reason: str, hint: str | None = None, *, is_final: bool = False) -> None:
        super().__init__(reason)
        self.hint, self.is_final = hint, is_final


def _located(wanted: HubId, what: str, tell: Tell | None) -> HubId:
    """Return `wanted` with its commit: the hub's, or the cache's where the hub is out of reach.

    Of its files config.json alone is fetched, by which the cache knows the commit of a branch without a hub.
    """
    if wanted.is_pinned and _cached(wanted, FILES) is not None:
        return wanted
    try:
        _ask(wanted)
        found = HubId(wanted.repo, _downloaded(wanted, CONFIG, is_shown=False).name)
        if not found.is_pinned:
            raise _Refused(f"{_endpoint()} answers without a commit", is_final=True)
        return found
    except _Refused as refused:
        folder = None if refused.is_final else _cached(wanted, FILES)
        if folder is None:
            raise _not_there(wanted, what, refused) from None
        if tell is not None:
            tell(f"{wanted.repo}: commit {folder.name[:12]} from the cache, as {refused}")
        return HubId(wanted.repo, folder.name)


def _folder_of(wanted: HubId, what: str, tell: Tell | None) -> Path:
    """Return the snapshot folder of a commit, filled where it is not.

    One with the weights and no tokenizer may be what another program left: the hub is asked what there is.
    """
    folder = _cached(wanted, FILES)
    if folder is not None and has_tokenizer(folder):
        return folder
    if folder is None and tell is not None:
        tell(f"downloading {wanted.repo}, commit {str(wanted.revision)[:12]}, from {_endpoint()}")
    try:
        if folder is not None:
            _ask(wanted)  # a download from a hub that is out of reach is tried for half a minute
        return _downloaded(wanted, FILES, is_shown=folder is None and tell is not None)
    except _Refused as refused:
        if folder is not None:
            return folder
        raise _not_there(wanted, what, refused) from None


def _cached(wanted: HubId, files: Collection[str]) -> Path | None:
    """Return its snapshot in the cache; None where that lacks something. Asks nobody."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        found = snapshot_download(
            wanted.repo, revision=wanted.revision, local_files_only=True, allow_patterns=list(files)
        )
    except (LocalEntryNotFoundError, ValueError):
        return None
    folder = Path(found)
    has_weights = "model.safetensors" not in files or any((folder / name).is_file() for name in WEIGHTS)
    has_weights = has_weights and all((folder / shard).is_file() for shard in _shards(folder / WEIGHTS_INDEX))
    is_whole = has_weights and (folder / "config.json").is_file() and _COMMIT.fullmatch(folder.name) is not None
    return folder if is_whole else None


def _shards(index: Path) -> set[str]:
    """Return the files that a checkpoint's index names; none without one. An index that cannot be read is no cache."""
    if not index.is_file():
        return set()
    try:
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, LookupError, AttributeError, TypeError):
        return {"/"}


def _ask(wanted: HubId) -> None:
    """Raise _Refused, within ASK_TIMEOUT_S or so, for what the hub does not give, or gives in another format."""
    from huggingface_hub import HfApi

    try:
        found = HfApi().model_info(wanted.repo, revision=wanted.revision, timeout=ASK_TIMEOUT_S)
    except Exception as error:  # of whichever HTTP library it uses
        raise _as_refused(error, wanted) from error
    if found.sha is None or _COMMIT.fullmatch(found.sha) is None:
        raise _Refused(f"{_endpoint()} answers without a commit")
    names = {sibling.rfilename for sibling in found.siblings or ()}
    if "config.json" not in names or not names & set(WEIGHTS):
        raise _Refused(
            "the repository has no checkpoint in the format that is read here: config.json and safetensors",
            "transformers' `save_pretrained` writes safetensors, also of a model that it loads from a .bin",
            is_final=True,
        )


def _downloaded(wanted: HubId, files: Collection[str], *, is_shown: bool) -> Path:
    """Return its snapshot, by the name that it was asked for by, which the cache then knows without a hub.

    Waits for: the download, as long as that takes. A connection that is silent is ended by the library, after
    HF_HUB_DOWNLOAD_TIMEOUT (10 s). An interrupt ends the wait; the files that have arrived stay in the cache.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class NoProgressBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

    def download() -> str:
        return snapshot_download(
            wanted.repo,
            revision=wanted.revision,
            allow_patterns=list(files),
            etag_timeout=ASK_TIMEOUT_S,
            tqdm_class=None if is_shown else NoProgressBar,
        )

    try:
        return Path(run_interruptibly(download, name="download"))
    except Exception as error:  # as above, and the disk
        raise _as_refused(error, wanted) from error


def _as_refused(error: Exception, wanted: HubId, *, kind: str = "") -> _Refused:
    """Return why, in words of ours: an answer's text is the network's."""
    from huggingface_hub import errors

    if isinstance(error, errors.HFValidationError):
        return _Refused("the hub has no such names", is_final=True)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return _Refused("HF_HUB_OFFLINE forbids to ask the hub")
    if isinstance(error, errors.GatedRepoError):
        return _Refused(
            "the hub gives it only to those who have accepted its conditions (it is gated)",
            f"accept them at {_endpoint()}/{kind}{wanted.repo}, then `hf auth login`, or HF_TOKEN"
            + ("" if kind else f", and `{wanted.download}`"),
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return _Refused(
            f"{_endpoint()} has no repository of that name, or one that is private",
            "is it spelt as on the hub? For a private one: `hf auth login` or HF_TOKEN",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return _Refused(f"the repository has no revision '{wanted.revision or 'main'}'", is_final=True)
    if isinstance(error, errors.HfHubHTTPError):
        return _Refused(f"{_endpoint()} answers with status {error.response.status_code}")
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        return _Refused(f"it cannot be written to the cache: {error.strerror}", is_final=True)
    reason = "in time" if "Timeout" in type(error).__name__ else f"({type(error).__name__})"
    return _Refused(f"{_endpoint()} cannot be reached {reason}")


def _not_there(wanted: HubId, what: str, refused: _Refused) -> ConfigError:
    from huggingface_hub import constants

    return ConfigError(
        f"'{what}': there is no folder '{wanted}' here, and no such checkpoint in the cache or on the hub",
        got=f"{refused}; the cache is {constants.HF_HUB_CACHE}",
        allowed="a folder with config.json, or a hub id ORG/NAME or ORG/NAME@REVISION",
        hint=refused.hint or f"`{wanted.download}`, where there is a network, puts it into the cache",
    )


def _endpoint() -> str:
    """Return the hub's address without what else may stand in HF_ENDPOINT, such as a password."""
    from huggingface_hub import constants

    parts = urlsplit(constants.ENDPOINT)
    port = "" if parts.port is None else f":{parts.port}"
    return f"{parts.scheme}://{parts.hostname}{port}"
