"""Hugging Face checkpoints in and out: config, safetensors (one file or sharded), generation config, tokenizer."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from slipstream.core.errors import ConfigError, clip
from slipstream.models.config import TransformerConfig, config_from_hf, config_to_hf
from slipstream.models.hf_fields import read_object
from slipstream.models.hub import WEIGHTS, is_adapter
from slipstream.models.layout import LogicalTensor, layout
from slipstream.models.lora import shapes_of
from slipstream.models.peft import base_folder, load_adapter
from slipstream.models.safetensors_file import open_tensors
from slipstream.models.tokenizer import Tokenizer
from slipstream.models.transformer import OneRank, Transformer

WEIGHTS_FILE, INDEX_FILE = WEIGHTS
IGNORED_SUFFIXES = (
    "rotary_emb.inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
)
"""Constant buffers that old checkpoints carry along."""
HEADS = ("lm_head.weight", "embed_out.weight")
"""The names of heads; a tied one has no tensor of its own."""
MAX_SHOWN = 5
"""Wrong tensors that an error lists: it is to fit one screen."""


def logical_tensors(model: Transformer) -> dict[str, Tensor]:
    """Every tensor of the model under its Hugging Face name and shape, in checkpoint order.

    Views of the live parameters, except GPT-NeoX's interleaved `query_key_value`, which is a copy.
    """
    return {tensor.name: tensor.read() for tensor in layout(model)}


@torch.no_grad()
def load_model(
    path: str | Path, *, dtype: torch.dtype = torch.float32, max_positions: int | None = None
) -> Transformer:
    """The model in folder `path`, in `dtype` whatever the files hold; `max_positions` lowers its longest sequence.

    An adapter's folder stands for its base with the adapter.

    Raises ConfigError for a folder without a checkpoint, an unsupported architecture, a head that differs from the
    embedding it is tied to, and for missing, unexpected or misshapen tensors, which it lists.
    """
    path = Path(path)
    if is_adapter(path):
        return load_adapter(load_model(base_folder(path), max_positions=max_positions), path).to(dtype)
    config = config_from_hf(read_hf_config(path), max_positions=max_positions)
    model = Transformer(config).to(dtype)
    wanted = {tensor.name: tensor for tensor in layout(model)}
    problems = read_weights(path, wanted, is_tied=config.tie_embeddings)
    problems += [f"missing {name}" for name in wanted]
    if problems:
        raise misfit(path, problems, allowed=f"exactly the tensors of a {config.family} model")
    if config.tie_embeddings:
        check_tied_head(path, embedding=layout(model)[0].name)
    return model


def read_weights(path: Path, wanted: dict[str, LogicalTensor], *, is_tied: bool) -> list[str]:
    """Fill the tensors `wanted` from the checkpoint in folder `path`, and remove those that were found from it.

    Returns what is wrong with the files: tensors that are unexpected or misshapen.
    """
    problems: list[str] = []
    for file in weight_files(path):
        with open_tensors(file) as tensors:
            for stored_name in tensors.keys():  # noqa: SIM118 - not a dict
                name = canonical_name(stored_name, wanted, is_tied)
                if name is None:
                    continue
                if name not in wanted:
                    problems.append(f"unexpected {stored_name}")
                    continue
                problems += write_tensor(wanted.pop(name), tensors.get_tensor(stored_name))
    return problems


def misfit(path: Path, problems: list[str], *, allowed: str) -> ConfigError:
    """The error of a checkpoint whose tensors are others than its config.json asks for."""
    num_more = len(problems) - MAX_SHOWN
    shown = problems if num_more <= 0 else [*problems[:MAX_SHOWN], f"and {num_more} more"]
    got = "; ".join(clip(problem) for problem in shown)
    return ConfigError(f"the checkpoint in {path} does not fit its config.json", got=got, allowed=allowed)


def read_hf_config(path: Path) -> dict[str, Any]:
    """Return the parsed config.json of the checkpoint in `path`, with its end tokens; an adapter has its base's."""
    path = base_folder(path)
    file = path / "config.json"
    if not file.exists():
        raise ConfigError(
            "no model found", got=str(path), allowed="a folder with config.json and safetensors", hint=_GGUF_HINT
        )
    raw = read_object(file)
    generation = path / "generation_config.json"
    if generation.exists():  # instruction-tuned models list their extra end tokens only there
        eos = read_object(generation).get("eos_token_id")
        raw["eos_token_id"] = raw.get("eos_token_id") if eos is None else eos
    return raw


_GGUF_HINT = "other formats load in transformers; save_pretrained there writes this one"


def weight_files(path: Path) -> list[Path]:
    if (path / WEIGHTS_FILE).exists():
        return [path / WEIGHTS_FILE]
    if (path / INDEX_FILE).exists():
        weight_map = read_object(path / INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ConfigError(f"'{path / INDEX_FILE}' has no weight_map", allowed="tensors, each with its file")
        names = sorted({str(name) for name in weight_map.values()})
        foreign = [name for name in names if not _is_shard(name)]
        if foreign:
            raise ConfigError(
                f"the index of the checkpoint in {path} names what is no shard of it",
                got=clip(foreign[0]),
                allowed="safetensors files beside it",
            )
        files = [path / name for name in names]
        absent = [clip(file.name) for file in files if not file.is_file()]
        if absent:
            raise ConfigError(
                f"shards of the checkpoint in {path} are absent",
                got=", ".join(absent[:MAX_SHOWN]),
                allowed=f"all that {INDEX_FILE} names",
            )
        return files
    raise ConfigError("no weights found", got=str(path), allowed=f"{WEIGHTS_FILE} or {INDEX_FILE}", hint=_GGUF_HINT)


def _is_shard(name: str) -> bool:
    """Whether `name` is that of a safetensors file in the same folder."""
    return name == Path(name).name and name.endswith(".safetensors") and name.isprintable() and len(name) < 256


def canonical_name(name: str, wanted: Collection[str], tied: bool) -> str | None:
    """Our name of a stored tensor; None for what carries no information (old buffers, the copy of a tied head)."""
    if name.endswith(IGNORED_SUFFIXES) and name not in wanted:
        return None
    if tied and name in HEADS:
        return None
    prefixed = f"transformer.{name}"  # GPT-2's first checkpoints leave it out
    return prefixed if prefixed in wanted else name


def check_tied_head(path: Path, *, embedding: str) -> None:
    """Raise ConfigError where the files in folder `path` have a head that is no copy of the `embedding` it is tied to.

    transformers does not tie these: it computes with the head. The files have been read, so the embedding is there.
    """
    stored: dict[str | None, Any] = {}
    with ExitStack() as stack:
        for file in weight_files(path):
            tensors = stack.enter_context(open_tensors(file))
            names = {canonical_name(name, (embedding,), tied=False): name for name in tensors.keys()}  # noqa: SIM118
            stored |= {ours: tensors.get_slice(names[ours]) for ours in (embedding, *HEADS) if ours in names}
        own = stored.pop(embedding)
        for name, head in stored.items():
            if not _are_equal(head, own):
                raise ConfigError(
                    f"the checkpoint in {path} has a head of its own, which config.json ties to the embedding",
                    got=f"{name}, which is not {embedding}",
                    allowed="a copy of the embedding, or no head",
                    hint="transformers computes with this head: say tie_word_embeddings = false in its config.json",
                )


def _are_equal(one: Any, other: Any) -> bool:
    """Return whether two matrices in files are equal; a few rows of them are in memory at once."""
    return one.get_shape() == other.get_shape() and all(
        torch.equal(one[start : start + 1024].float(), other[start : start + 1024].float())
        for start in range(0, one.get_shape()[0], 1024)
    )


def write_tensor(tensor: LogicalTensor, value: Tensor) -> list[str]:
    if tuple(value.shape) != tensor.shape:
        return [f"{tensor.name} has shape {list(value.shape)}, not {list(tensor.shape)}"]
    tensor.write(value)
    return []


def save_model(
    model: Transformer,
    path: str | Path,
    tokenizer: Tokenizer | None = None,
    *,
    max_shard_bytes: int = 5 * 1024**3,
) -> None:
    """Write `model` to folder `path` as its family's Hugging Face checkpoint: transformers and vLLM load it.

    Weights keep the model's precision; beyond `max_shard_bytes` they are split into shards with an index.
    Raises ConfigError, writing nothing, for one rank's part of a model, and for one with adapters.
    """
    if not isinstance(model.ranks, OneRank):
        raise ConfigError(
            "one rank's part of a model is no checkpoint",
            got="a model divided over ranks",
            allowed="a whole model",
            hint="save the model that was divided; a rank's tensors are `shards.local_shards`",
        )
    if shapes_of(model):
        raise ConfigError(
            "a model with adapters is no checkpoint of a model",
            got=f"adapters of {len(shapes_of(model))} layers",
            allowed="a model without",
            hint="`peft.save_adapter` writes the adapters, `lora.merged` makes a model of both",
        )
    path = Path(path)
    if model.compute_copy is not None:
        model.compute_copy.reshard()  # what is saved are the float32 weights
    write_configs(path, model.config, model.embedding.weight.dtype)
    write_weights(path, logical_tensors(model), max_shard_bytes)
    if tokenizer is not None:
        tokenizer.save_pretrained(path)


def write_configs(path: Path, model: TransformerConfig, dtype: torch.dtype) -> None:
    """config.json and generation_config.json of a model in `dtype`, in folder `path`; old weights in there go."""
    path.mkdir(parents=True, exist_ok=True)
    config = config_to_hf(model)
    config["dtype"] = str(dtype).removeprefix("torch.")
    write_json(path / "config.json", config)
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config[key] is not None}
    write_json(path / "generation_config.json", {**ends, "transformers_version": config["transformers_version"]})
    remove_weights(path)


def remove_weights(path: Path) -> None:
    """Remove the weights of an older checkpoint from folder `path`."""
    for stale in [path / WEIGHTS_FILE, path / INDEX_FILE, *path.glob("model-*-of-*.safetensors")]:
        stale.unlink(missing_ok=True)


def split_names(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Divide names, in order, into files of at most `max_bytes` together; a larger tensor gets one to itself."""
    files: list[list[str]] = []
    filled = 0
    for name, num_bytes in sizes.items():
        if not files or filled + num_bytes > max_bytes:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += num_bytes
    return files


def weight_file(number: int, count: int) -> str:
    """Name of the 1-indexed `number` of `count` files."""
    return f"model-{number:05}-of-{count:05}.safetensors" if count > 1 else WEIGHTS_FILE


def write_weights(path: Path, tensors: dict[str, Tensor], max_bytes: int) -> None:
    """Write `tensors` to folder `path`: one file, or beyond `max_bytes` several with an index."""
    files = split_names({name: tensor.nbytes for name, tensor in tensors.items()}, max_bytes)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        file = weight_file(number, len(files))
        save_file({name: tensors[name].contiguous() for name in names}, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if len(files) > 1:
        write_index(path, weight_map, sum(tensor.nbytes for tensor in tensors.values()))


def write_index(path: Path, weight_map: dict[str, str], total_bytes: int) -> None:
    """Which tensor is in which of several files."""
    write_json(path / INDEX_FILE, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})


def write_json(file: Path, data: dict[str, Any]) -> None:
    file.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")
