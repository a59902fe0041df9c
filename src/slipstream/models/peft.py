"""Adapters in PEFT's file format, in and out, and the models that they are beside.

    adapter_config.json          rank, alpha, targets, and the base: a folder or a hub id with its commit
    adapter_model.safetensors    "base_model.model.<matrix>.lora_A.weight", float32; its metadata have the base's digest

What cannot be computed here as PEFT does it is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from slipstream.core.errors import ConfigError, clip
from slipstream.core.lora_section import BASE_FOLDER, AdapterPrecision, LoraConfig
from slipstream.models.config import TransformerConfig
from slipstream.models.hf_fields import read_object
from slipstream.models.hub import ADAPTER_CONFIG, HubId, checkpoint_folder, hub_id_of, is_adapter
from slipstream.models.layout import LogicalTensor, layout
from slipstream.models.lora import (
    A_SUFFIX,
    B_SUFFIX,
    EMBEDDING_A,
    EMBEDDING_B,
    HEAD_NAME,
    OLD_HEAD_NAME,
    AdapterShape,
    Piece,
    adapter_tensors,
    drawn_adapter,
    install,
    is_named,
    linear_layers,
    matrices,
    meta_parameters,
    resized,
    shapes_for,
    shapes_of,
    targeted,
)
from slipstream.models.safetensors_file import Entry, open_tensors, tensor_headers, write_safetensors
from slipstream.models.shards import base_digest, local_shards, whole_parameters
from slipstream.models.tensor_parallel import whole_config
from slipstream.models.tokenizer import Tokenizer, has_tokenizer
from slipstream.models.transformer import Transformer

ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
MADE = (BASE_FOLDER, "sft/model", "dpo/model")
"""Folders of a run that may have the base of its adapters, from the folder that these are in."""
DIGEST = "base_sha256"
"""Key of the base's digest in the metadata of the weights."""
MAX_SHOWN = 5
INITS = (True, False, "gaussian", "eva", "orthogonal")
"""PEFT's `init_lora_weights` that leave the base as it is: others train beside a changed one."""


class AdapterFields(BaseModel):
    """The fields of an `adapter_config.json` that are read; those from `rank_pattern` on must be off."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)

    peft_type: str = ""
    base_model_name_or_path: str | None = None
    revision: str | None = None
    r: int = Field(8, ge=1, le=2**16)
    lora_alpha: float = Field(8.0, gt=0, le=1e15)
    use_rslora: bool = False
    init_lora_weights: Any = True
    rank_pattern: dict[str, Any] | None = None
    alpha_pattern: dict[str, Any] | None = None
    use_dora: bool = False
    use_qalora: bool = False
    lora_bias: bool = False
    bias: str = "none"
    modules_to_save: Any = None
    layer_replication: Any = None
    trainable_token_indices: Any = None
    ensure_weight_tying: bool = False
    alora_invocation_tokens: Any = None
    use_bdlora: Any = None
    arrow_config: Any = None
    kasa_config: Any = None
    monteclora_config: Any = None
    target_parameters: list[str] | None = None


def read_fields(path: Path) -> AdapterFields:
    """Return the fields of the adapter in folder `path`. ConfigError for other kinds of adapters than plain LoRA."""
    try:
        fields = AdapterFields.model_validate(read_object(path / ADAPTER_CONFIG))
    except ValidationError as error:
        problem = error.errors()[0]
        raise ConfigError(
            f"'{path / ADAPTER_CONFIG}' has a field that is out of range",
            got=clip(f"{problem['loc']}: {problem['msg']}"),
        ) from error
    off = {
        "bias": fields.bias if fields.bias != "none" else None,
        "init_lora_weights": None if fields.init_lora_weights in INITS else fields.init_lora_weights,
        **{
            name: vars(fields)[name]
            for name in (
                *("rank_pattern", "alpha_pattern", "use_dora", "use_qalora", "lora_bias"),
                *("modules_to_save", "layer_replication", "trainable_token_indices"),
                *("ensure_weight_tying", "alora_invocation_tokens"),
                *("use_bdlora", "arrow_config", "kasa_config", "monteclora_config"),
            )
        },
    }
    given = [f"{name} = {clip(value, 60)}" for name, value in off.items() if value]
    if fields.peft_type != "LORA" or given:
        raise ConfigError(
            f"the adapter in {path} is of a kind that is not supported",
            got=", ".join(given) or f"peft_type = {clip(fields.peft_type, 60)}",
            allowed="plain LoRA: linear layers, experts and the embedding, of one rank and alpha, the base as it is",
            hint="merge it in PEFT (`merge_and_unload`, `save_pretrained`), and start from that model",
        )
    return fields


def base_folder(path: str | Path) -> Path:
    """Return the folder of the model that the adapter in `path` is beside; that of a model itself is `path`.

    The base is the folder or hub id in adapter_config.json; where that folder is gone, the one that ends alike beside
    the adapter's, if a run makes such: it may have been moved as a whole.
    """
    path = Path(path)
    if not is_adapter(path):
        return path
    fields = read_fields(path)
    named = fields.base_model_name_or_path or ""
    if (Path(named) / "config.json").is_file() and named:
        return Path(named)
    for end in MADE:
        beside = path.resolve().parent / end
        if f"/{Path(named).as_posix()}".endswith(f"/{end}") and (beside / "config.json").is_file():
            return beside
    if Path(named).is_absolute() or not named:
        raise ConfigError(
            f"the base of the adapter in {path} is not there",
            got=clip(named) or "no base_model_name_or_path",
            allowed=f"a folder with config.json, or a hub id; or a folder '{BASE_FOLDER}' beside the adapter's",
            hint=f"correct base_model_name_or_path in {path / ADAPTER_CONFIG}",
        )
    wanted = named if fields.revision is None or "@" in named else f"{named}@{fields.revision}"
    return checkpoint_folder(wanted, what=f"base of {path}")


def tokenizer_folder(path: str | Path) -> Path:
    """Return the folder that has the tokenizer of the checkpoint in `path`: an adapter without one has its base's."""
    return Path(path) if has_tokenizer(path) else base_folder(path)


def stored_shapes(
    path: Path, config: TransformerConfig, precision: AdapterPrecision = "float32"
) -> dict[str, AdapterShape]:
    """Return the adapters in folder `path`, for a base of `config`. ConfigError where they do not fit it."""
    fields = read_fields(path)
    headers = {matrix_name(name): header for name, header in tensor_headers(path / ADAPTER_WEIGHTS).items()}
    suffixes = (A_SUFFIX, B_SUFFIX, EMBEDDING_A, EMBEDDING_B)
    names = {name.removesuffix(suffix) for name in headers for suffix in suffixes if name.endswith(suffix)}
    joined = fields.target_parameters or []
    names |= {one.name for one in matrices(config) if one.num_experts and any(is_named(one, name) for name in joined)}
    shapes = shapes_for(
        config, names, rank=fields.r, alpha=fields.lora_alpha, use_rslora=fields.use_rslora, precision=precision
    )
    wanted = {tensor.name: tensor.shape for _, tensor in adapter_tensors(shapes, meta_parameters(shapes))}
    copies = base_tensors(config)
    problems = [f"unexpected {name}" for name in headers if name not in wanted and base_name(name) not in copies]
    problems += [f"missing {name}" for name in wanted if name not in headers]
    problems += [
        f"{name} has shape {list(headers[name].shape)}, not {list(shape)}"
        for name, shape in wanted.items()
        if name in headers and tuple(headers[name].shape) != shape
    ]
    if problems or not shapes:
        raise ConfigError(
            f"the adapter in {path} is not one of this base",
            got="; ".join(map(clip, problems[:MAX_SHOWN])) or "no adapters",
            allowed=f"A and B of layers of this {config.family} model, of rank {fields.r}",
        )
    return shapes


def matrix_name(stored_name: str) -> str:
    """Return the name of a tensor in an adapter's file, without PEFT's prefix and with the head's own name."""
    name = stored_name.removeprefix(PREFIX)
    return name.replace(OLD_HEAD_NAME, HEAD_NAME, 1) if name.startswith(f"{OLD_HEAD_NAME}.") else name


def base_name(name: str) -> str:
    """Return the name in the base of a tensor that PEFT has saved beside the adapters: it copies adapted heads."""
    return name.replace(".base_layer.", ".")


def base_tensors(config: TransformerConfig) -> dict[str, LogicalTensor]:
    """Return the tensors of a model of `config`, without values, by name; also a tied head."""
    with torch.device("meta"):
        found = {tensor.name: tensor for tensor in layout(Transformer(config))}
    embedding, *_, last = found.values()  # the first and, if it is not tied, the head
    return found | {f"{HEAD_NAME}.weight": embedding if config.tie_embeddings else last}


def planned_shapes(lora: LoraConfig, config: TransformerConfig) -> dict[str, AdapterShape]:
    """Return the adapters that `lora` asks for beside a base of `config`. ConfigError where it cannot have them."""
    if lora.path is not None:
        if not is_adapter(lora.path):
            raise ConfigError(
                "there is no adapter in model.lora.path",
                got=lora.path,
                allowed=f"a folder with {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}",
            )
        return stored_shapes(Path(lora.path), config, lora.adapter_precision)
    assert lora.rank is not None, "there are adapters"
    if lora.rank > config.hidden_size:
        raise ConfigError(
            "adapters of a rank above the model's width are larger than what they stand for",
            got=f"model.lora.rank = {lora.rank}",
            allowed=f"1..{config.hidden_size} (hidden_size)",
        )
    alpha = 2.0 * lora.rank if lora.alpha is None else lora.alpha
    names = targeted(config, lora.targets)
    return shapes_for(
        config,
        names,
        rank=lora.rank,
        alpha=alpha,
        use_rslora=lora.use_rslora,
        precision=lora.adapter_precision,
    )


def with_adapters(model: Transformer, lora: LoraConfig, *, seed: int) -> Transformer:
    """Put the adapters that `lora` asks for into `model`, new ones drawn from `seed`, and return it."""
    return fill_adapters(install(model, planned_shapes(lora, model.config)), lora, seed=seed)


@torch.no_grad()
def fill_adapters(model: Transformer, lora: LoraConfig, *, seed: int) -> Transformer:
    """Give the adapters in `model`, or in a rank's part of one, the numbers that `lora` asks for, and return it."""
    if lora.path is not None:
        return read_adapter(model, Path(lora.path))
    for shard in local_shards(model):
        shard.write(drawn_adapter(shard.box.name, shard.box.shape, seed)[shard.box.slices])
    return model


def load_adapter(model: Transformer, path: Path) -> Transformer:
    """Put the adapters in folder `path` into `model`, their whole base, and return it; see `read_adapter`."""
    return read_adapter(install(model, stored_shapes(path, model.config)), path)


@torch.no_grad()
def read_adapter(model: Transformer, path: Path) -> Transformer:
    """Fill the adapters in `model`, or in a rank's part of one, from folder `path`, and return it.

    ConfigError where they were trained beside other numbers. All ranks that share the model call this together.
    """
    recorded = recorded_digest(path)
    if recorded is not None and recorded != (own_digest := base_digest(model)):
        raise ConfigError(
            f"the adapter in {path} was trained beside another base",
            got=f"a model with the SHA-256 {own_digest[:16]}...",
            allowed=f"{recorded[:16]}..., which the adapter's file names",
        )
    is_stored = model.stored_base is not None  # rounded: what was filled before had the numbers to compare with
    base = [] if is_stored else local_shards(model, of_base=True)
    copies = base_tensors(whole_config(model))
    with open_tensors(path / ADAPTER_WEIGHTS) as stored:
        found = {matrix_name(name): name for name in stored.keys()}  # noqa: SIM118 - not a dict
        for name in found:
            if (own := copies.get(base_name(name))) is None or is_stored:
                continue
            value = stored.get_tensor(found[name])
            held = [shard for shard in base if shard.box.name == own.name]
            if value.shape != own.shape or not all(
                torch.equal(value[shard.box.slices], shard.view.to(value)) for shard in held
            ):
                raise ConfigError(
                    f"the adapter in {path} brings weights of a base, and they are not this one's", got=clip(name)
                )
        for shard in local_shards(model):
            shard.write(stored.get_slice(found[shard.box.name])[shard.box.slices])
    return model


def recorded_digest(path: Path) -> str | None:
    """Return the digest of the base that the adapter in `path` was trained beside; None where its file has none."""
    with open_tensors(path / ADAPTER_WEIGHTS) as stored:
        found: str | None = (stored.metadata() or {}).get(DIGEST)
    return found


@torch.no_grad()
def save_adapter(
    model: Transformer,
    path: Path,
    tokenizer: Tokenizer | None = None,
    *,
    base: Path | None,
    digest: str,
    is_writer: bool = True,
) -> None:
    """Write the adapters of `model` to folder `path`, beside the base in folder `base` (None: it is not known).

    `digest` is the base's; '' if readers need not compare it.
    All ranks that share a model call this together, and those that are `is_writer` write.
    Identity: `peft.PeftModel.from_pretrained(base, path)` computes what `model` does.
    """
    config, dtype = whole_config(model), next(iter(shapes_of(model).values())).dtype
    parameters = {name: whole.to(dtype) for name, whole in whole_parameters(model, of_base=False)}
    if not is_writer:
        return
    path.mkdir(parents=True, exist_ok=True)
    shapes = resized(shapes_of(model), linear_layers(config))
    fields = config_to_peft(shapes, config)
    cached = None if base is None else hub_id_of(base.resolve())
    fields |= _named(base, cached)
    (path / ADAPTER_CONFIG).write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    tensors = [tensor for _, tensor in adapter_tensors(shapes, parameters)]
    entries = {PREFIX + tensor.name: Entry(tensor.view.dtype, tensor.shape) for tensor in tensors}
    write_safetensors(
        path / ADAPTER_WEIGHTS,
        entries,
        (tensor.read().contiguous() for tensor in tensors),
        metadata={DIGEST: digest} if digest else {},
    )
    if tokenizer is not None:
        tokenizer.save_pretrained(path)


def _named(base: Path | None, cached: HubId | None) -> dict[str, str | None]:
    if cached is not None:
        return {"base_model_name_or_path": cached.repo, "revision": cached.revision}
    return {"base_model_name_or_path": None if base is None else str(base.resolve()), "revision": None}


def config_to_peft(shapes: Mapping[str, AdapterShape], config: TransformerConfig) -> dict[str, Any]:
    """Return the adapter_config.json of adapters beside a base of `config`, but for the base's name."""
    shape = next(iter(shapes.values()))
    every, own = matrices(config), [piece for one in shapes.values() for piece in one.pieces]
    modules, joined = (
        _targets([one for one in own if bool(one.num_experts) == is_joined], every) for is_joined in (False, True)
    )
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": shape.rank,
        "lora_alpha": shape.alpha,
        "lora_dropout": 0.0,
        "use_rslora": shape.use_rslora,
        "target_modules": modules,
        **({"target_parameters": joined} if joined else {}),
        "fan_in_fan_out": config.family == "gpt2",  # its linear layers are `Conv1D`
        "bias": "none",
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
    }


def _targets(adapted: Sequence[Piece], every: Sequence[Piece]) -> list[str]:
    """Return the last parts of the names of `adapted` matrices, or the names if others of their kind have these."""
    found = {piece.name for piece in adapted}
    targets = sorted({piece.target for piece in adapted})
    is_joined = bool(adapted) and bool(adapted[0].num_experts)
    alike = {one.name for one in every if bool(one.num_experts) == is_joined and one.target in targets}
    return targets if alike == found else sorted(found)
