"""Files from others: nothing in them runs, reaches outside of its folder, or brings the process down."""

from __future__ import annotations

import json
import os
import pickle
import struct
from pathlib import Path

import pytest
import torch

from slipstream.core.errors import CheckpointError, SlipstreamError
from slipstream.models.hf import load_model
from slipstream.trainer.checkpoint_folder import read_manifest

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}


class Runs:
    """What a pickle would run."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self._marker),)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_a_pickled_checkpoint_is_never_loaded(folder: Path, tmp_path: Path, name: str) -> None:
    marker = tmp_path / "ran"
    (folder / name).write_bytes(pickle.dumps(Runs(marker)))
    with pytest.raises(SlipstreamError):
        load_model(folder)
    assert not marker.exists()


def header(text: bytes, *, announced: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if announced is None else announced) + text + bytes(64)


BAD_HEADERS = {
    "empty": b"",
    "cut off": b"\x08\x00",
    "endless": header(b"{}", announced=1 << 62),
    "longer than the file": header(b"{}", announced=1000),
    "no JSON": header(b"\xff\xfe{}"),
    "deep": header(b"[" * 100_000),
    "no object": header(b"[]      "),
    "outside": header(json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 1 << 40]}}).encode()),
    "negative": header(json.dumps({"a": {"dtype": "F32", "shape": [-4], "data_offsets": [16, 0]}}).encode()),
    "overlapping": header(
        json.dumps(
            {
                "a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
                "b": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]},
            }
        ).encode()
    ),
    "enormous shape": header(
        json.dumps({"a": {"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 0]}}).encode()
    ),
    "unknown precision": header(json.dumps({"a": {"dtype": "Q9", "shape": [4], "data_offsets": [0, 16]}}).encode()),
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_a_malicious_header_is_a_typed_error(folder: Path, name: str) -> None:
    (folder / "model.safetensors").write_bytes(BAD_HEADERS[name])
    with pytest.raises(SlipstreamError):
        load_model(folder)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "sub/../../secret", "a/b", "..", ""])
def test_an_index_reaches_no_files_but_its_own(folder: Path, tmp_path: Path, name: str) -> None:
    from safetensors.torch import save_file

    save_file({"model.embed_tokens.weight": torch.zeros(32, 16)}, tmp_path / "secret")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"model.embed_tokens.weight": name}})
    )
    with pytest.raises(SlipstreamError, match="no shard of it"):
        load_model(folder)


ENTRY = {"bytes": 1, "crc32": 0}


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "sub/x", "..", ".", "", "a\0b", "x" * 300])
def test_a_manifest_names_files_beside_it_only(tmp_path: Path, name: str) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"format": 1, "step": 1, "files": {name: ENTRY}}))
    with pytest.raises(CheckpointError, match="not its own"):
        read_manifest(tmp_path)


def test_a_manifest_follows_no_links(tmp_path: Path) -> None:
    (tmp_path / "policy.safetensors").symlink_to("/etc/passwd")
    manifest = {"format": 1, "step": 1, "files": {"policy.safetensors": ENTRY}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="not its own"):
        read_manifest(tmp_path)


FILE = '{"format": 1, "step": 1, "files": {"a": %s}}'
STRANGE = ["", "[" * 100_000, "[]", '{"format": 1}', '{"format": 1, "files": 3}', "\x00", '{"a":' * 10_000]
STRANGE += [FILE % entry for entry in ("3", "[]", "{}", '{"bytes": "1", "crc32": 0}', '{"bytes": 1e400, "crc32": 0}')]


@pytest.mark.parametrize("text", STRANGE, ids=range(len(STRANGE)))
def test_a_strange_manifest_is_a_torn_one(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError):
        read_manifest(tmp_path)
