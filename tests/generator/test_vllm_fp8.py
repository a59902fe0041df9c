"""Slots in fp8 as vLLM gets them: e4m3 and scales, read off their bits by hand. A real vLLM: `test_vllm_weights.py`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine_kit import fill
from test_vllm_slots import FAMILIES, fresh
from vllm_kit import PublishedModel, folder_of

from slipstream.core.config import RunConfig
from slipstream.core.errors import WeightSyncError
from slipstream.core.recipes import resolve
from slipstream.generator.vllm.backend import spec_of
from slipstream.generator.vllm.settings import check_settings
from slipstream.generator.vllm.slot_extension import SlotExtension, read_push
from slipstream.generator.vllm.weights import describe
from slipstream.models.hf import logical_tensors
from slipstream.models.quantized import WeightLayout
from slipstream.models.shards import load_shard
from slipstream.models.tensor_parallel import TensorParallel
from slipstream.models.transformer import Transformer
from slipstream.weight_sync.segment import SharedMemory
from slipstream.weight_sync.slots import Commit

LARGEST = 448.0
BYTES = np.arange(256)
# OCP's e4m3: bias 7, subnormals below 2^-6, no infinities; all ones are no number.
_EXPONENT, _MANTISSA = (BYTES >> 3) & 15, BYTES & 7
_MAGNITUDE = np.where(_EXPONENT == 0, _MANTISSA / 8 * 2.0**-6, (1 + _MANTISSA / 8) * 2.0 ** (_EXPONENT - 7.0))
E4M3 = np.where((BYTES & 127) == 127, np.nan, np.where(BYTES >> 7, -_MAGNITUDE, _MAGNITUDE))
FINITE = np.unique(E4M3[np.isfinite(E4M3)])


def filled(family: str, *, tied: bool = True) -> Transformer:
    """Rows of very different sizes, so that each has a scale of its own; and one of zeros."""
    model = fresh(family, tied=tied)
    fill(model, 4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(torch.logspace(-2, 1, len(parameter))[:, None])
                parameter[3] = 0.0
    return model


def read_from(model: Transformer, path: Path) -> dict[str, torch.Tensor]:
    published = PublishedModel(model, "fp8")
    published.write(path)
    return {name: tensor.clone() for name, tensor in read_push(str(path))}


def by_hand(values: torch.Tensor, scales: torch.Tensor) -> np.ndarray:
    """float64 [rows, columns] of e4m3 [rows, columns] and scales [rows, 1]."""
    return E4M3[values.contiguous().view(torch.uint8).numpy()] * scales.double().numpy()


def is_turned(model: Transformer) -> bool:
    """Whether the checkpoint's matrices are [inputs, outputs]."""
    return model.config.family == "gpt2"


@FAMILIES
def test_a_matrix_is_the_nearest_e4m3_and_a_scale_per_row(family: str, tmp_path: Path) -> None:
    """Of every linear layer and of nothing else; one column of scales, behind its matrix."""
    model = filled(family)
    found = read_from(model, tmp_path / "push")
    wanted = logical_tensors(model)
    names, num_scaled = list(found), 0
    for name, weight in wanted.items():
        values, scales = found[name], found.get(f"{name}_scale")
        assert values.shape == weight.shape, name
        is_matrix = weight.ndim == 2 and not any(table in name for table in ("embed", "wte", "wpe", "head"))
        assert (scales is not None) == (values.dtype == torch.float8_e4m3fn) == is_matrix, name
        if scales is None:
            torch.testing.assert_close(values.float(), weight, rtol=2**-8, atol=0)
            continue
        assert names.index(f"{name}_scale") == names.index(name) + 1
        values, weight = (values.t(), weight.t()) if is_turned(model) else (values, weight)
        rows = weight.double().numpy()
        largest = np.abs(rows).max(1, keepdims=True)
        assert scales.shape == largest.shape
        np.testing.assert_allclose(scales.numpy(), np.where(largest > 0, largest / LARGEST, 1.0), rtol=1e-6)
        scaled = rows / scales.double().numpy()
        nearest = np.abs(scaled[..., None] - FINITE).min(-1)
        error = np.abs(by_hand(values, scales) / scales.double().numpy() - scaled)
        np.testing.assert_allclose(error, nearest, atol=1e-4)  # fp32 divides, so a tie may fall to either side
        num_scaled += 1
    assert num_scaled > 2 * model.config.num_layers
    assert len(found) == len(wanted) + num_scaled + model.config.tie_embeddings


def ranks_of(model: Transformer, world: int, path: Path) -> list[object]:
    """Return the places of a version in fp8 of a trainer with tensor parallelism; scales are of whole rows."""
    parts = []
    for rank in range(world):
        part = TensorParallel(model.config, rank, world).new_model()
        load_shard(part, logical_tensors(model))
        parts.append((part, WeightLayout(part, "fp8")))
    largest: list[torch.Tensor] = []
    for part, layout in parts:
        out = torch.zeros(layout.num_bytes, dtype=torch.uint8)
        for _ in layout.pack(
            dict(part.named_parameters()), out, over_ranks=lambda own: (largest.append(own.clone()), own)[1]
        ):
            pass
    everywhere, places, transport = torch.stack(largest).amax(0), [], SharedMemory("fp8", (path,))
    for part, layout in parts:
        slots = transport.create(layout.num_bytes, 2, layout.holding)
        for _ in layout.pack(dict(part.named_parameters()), slots.data(0), over_ranks=lambda _: everywhere):
            pass
        slots.commit(0, Commit(7, 0))
        places.append(slots.place(0))
    return places


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_neox", "gpt2"])
def test_parts_of_several_ranks_are_those_of_one(family: str, tmp_path: Path) -> None:
    """Rows and columns that ranks share, and the scales of rows that none of them has whole."""
    model = filled(family)
    whole = read_from(model, tmp_path / "whole")
    push = tmp_path / "push"
    push.write_text(json.dumps(describe(ranks_of(model, 2, tmp_path), model.config, "fp8")))
    found = dict(read_push(str(push)))
    assert list(found) == list(whole)
    for name, tensor in whole.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


class HeldWorker(SlotExtension):
    """A worker of vLLM that keeps what its reload is given."""

    def __init__(self) -> None:
        self.model_config = SimpleNamespace(dtype=torch.bfloat16)
        self.given: dict[str, torch.Tensor] = {}

    def reload_weights(self, weights_iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.given = {name: tensor.clone() for name, tensor in weights_iterator}


def test_what_is_multiplied_as_it_lies_is_not_converted(tmp_path: Path) -> None:
    """A scale in bfloat16 would be off by up to 1/256; all else is in vLLM's type."""
    model = filled("qwen3", tied=False)
    read = read_from(model, tmp_path / "push")
    worker = HeldWorker()
    worker.load_slipstream_push(str(tmp_path / "push"))
    types = {torch.float8_e4m3fn: 0, torch.float32: 0, torch.bfloat16: 0}
    for name, tensor in worker.given.items():
        types[tensor.dtype] += 1
        assert (tensor.dtype == torch.float32) == name.endswith(".weight_scale"), name
        if tensor.dtype != torch.bfloat16:
            assert torch.equal(tensor.view(torch.uint8), read[name].view(torch.uint8)), name
    assert types[torch.float8_e4m3fn] == types[torch.float32] > 0
    assert types[torch.bfloat16] > 0


def test_a_trainer_at_another_precision_is_noticed(tmp_path: Path) -> None:
    model = filled("llama")
    published = PublishedModel(model, "bfloat16")
    published.write(tmp_path / "push")
    places = [published.slots.place(published.slot)]
    with pytest.raises(WeightSyncError, match="not of vLLM's model"):
        describe(places, model.config, "fp8")


@pytest.mark.parametrize(("family", "head"), [("llama", "lm_head"), ("gpt_neox", "embed_out")])
def test_vllm_is_started_with_scales_per_row(family: str, head: str) -> None:
    """The fields of compressed-tensors 0.17 that vLLM 0.32 chooses W8A8 by; a real vLLM reads them in its own test."""
    model = fresh(family, tied=True)
    folder, plain = folder_of(model, "fp8"), folder_of(model, "bfloat16")
    try:
        fields = json.loads((folder.base / "config.json").read_text())
        quantized = fields.pop("quantization_config")
        assert fields == json.loads((plain.base / "config.json").read_text())
        assert fields["dtype"] == "bfloat16"
        assert (quantized["quant_method"], quantized["format"]) == ("compressed-tensors", "float-quantized")
        assert quantized["ignore"] == [head]
        (group,) = quantized["config_groups"].values()
        assert group["targets"] == ["Linear"]
        number = {"num_bits": 8, "type": "float", "symmetric": True}
        assert group["weights"] == number | {"strategy": "channel", "dynamic": False}
        assert group["input_activations"] == number | {"strategy": "token", "dynamic": True}
    finally:
        folder.close()
        plain.close()


def test_all_that_is_no_matrix_is_in_bfloat16() -> None:
    config: RunConfig = resolve("quickstart", {"generator": {"engine": "vllm", "precision": "fp8"}})
    check_settings(config)
    assert spec_of(config, max_len=100, stop_token_ids=[]).engine_args["dtype"] == "bfloat16"
    assert config.generator.max_probe_error == 1.5
