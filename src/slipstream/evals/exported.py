"""A run's policy, or another checkpoint, as a folder of its own: a model, or an adapter beside one."""

from __future__ import annotations

from pathlib import Path

from slipstream.core.disk import disk_errors, sync_files
from slipstream.core.errors import ConfigError
from slipstream.core.recipes import check_path
from slipstream.evals.target import served_target
from slipstream.models.hf import load_model, save_model
from slipstream.models.hub import Tell, check_upload, hub_id_of, is_adapter, made_repository, upload
from slipstream.models.lora import merged, shapes_of
from slipstream.models.peft import base_folder, save_adapter, tokenizer_folder
from slipstream.models.preflight import check_checkpoint
from slipstream.models.shards import base_digest
from slipstream.models.tokenizer import has_tokenizer, load_tokenizer


def export(
    model: str | Path,
    out: str | Path,
    *,
    merge: bool = False,
    push_to_hub: str | None = None,
    private: bool = False,
    tell: Tell | None = None,
) -> Path:
    """Write the checkpoint of a run, or in a folder, to the new folder `out`, in float32, and return that.

    A model with adapters is written as PEFT's adapter, or with `merge` as a model without: W + s B A in place of W.
    `push_to_hub` names a repository of the hub, 'ORG/NAME', that gets the files, too: it is made first, where it is not
    there, `private` if so wished; token and address are those of `huggingface_hub`.
    ConfigError where there is no checkpoint, or something in the way, and for an adapter for the hub whose base is not
    from there. Identity: the logits are those of `model`, of a merged one up to rounding.
    """
    check_path(out, "the folder to write")
    folder = Path(out)
    if push_to_hub is not None:
        check_upload(push_to_hub)
    elif private:
        raise ConfigError(
            "a repository that is private has a name", got="--private", allowed="with --push-to-hub ORG/NAME"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError("the folder to write is in use", got=folder, allowed="a new or empty folder")
    checkpoint = served_target(model, tell=tell).folder
    check_checkpoint(checkpoint, "language")
    if push_to_hub is not None:
        base = base_folder(checkpoint)
        if is_adapter(checkpoint) and not merge and hub_id_of(base.resolve()) is None:
            what, hint = "an adapter names its base, which others cannot load", "--merged uploads the whole model"
            raise ConfigError(what, got=f"a folder of this machine, '{base}'", allowed="a base from the hub", hint=hint)
        made_repository(push_to_hub, private=private)
    tokens = tokenizer_folder(checkpoint)
    tokenizer = load_tokenizer(tokens) if has_tokenizer(tokens) else None
    policy = load_model(checkpoint)
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if shapes_of(policy) and not merge:
            base = base_folder(checkpoint)
            save_adapter(policy, folder, tokenizer, base=base, digest=base_digest(policy))
        else:
            save_model(merged(policy) if shapes_of(policy) else policy, folder, tokenizer)
        sync_files(folder)
    if push_to_hub is not None:
        address = upload(folder, push_to_hub)
        if tell is not None:
            tell(f"uploaded: {address}")
    return folder
