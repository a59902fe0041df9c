"""A client over the worker with a make-believe vLLM (`fake_vllm.py`), and a driver that waits for its sockets."""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slipstream.core.fields import Precision
from slipstream.generator.requests import Finished, Request
from slipstream.generator.vllm import protocol
from slipstream.generator.vllm.engine import Deadlines, VLLMEngine
from slipstream.generator.vllm.folder import WeightFolder, save_base, save_config
from slipstream.generator.vllm.process import Launch
from slipstream.generator.vllm.weights import SlotWeights
from slipstream.models.lora import base_of, shapes_of
from slipstream.models.peft import save_adapter
from slipstream.models.quantized import Packer, WeightLayout
from slipstream.models.transformer import Transformer
from slipstream.weight_sync.copying import HOST
from slipstream.weight_sync.segment import SharedMemory
from slipstream.weight_sync.slots import Commit

FAKE = Path(__file__).with_name("fake_vllm.py")
QUICK = Deadlines(start_s=120.0, answer_s=10.0, silence_s=10.0)


class PublishedModel:
    """A model as a trainer publishes it: each version is packed to the next of three slots."""

    def __init__(self, model: Transformer, precision: Precision = "float32") -> None:
        layout = WeightLayout(model, precision)
        self._packer = Packer(layout, dict(model.named_parameters()))
        self.slots = SharedMemory("vllm-kit").create(layout.num_bytes, 3, layout.holding)
        self.weights = SlotWeights(model.config, precision)
        self.slot = -1

    def write(self, path: Path) -> None:
        """Publish the model as it is now, and write the push."""
        self.slot = (self.slot + 1) % 3
        self.slots.invalidate(self.slot)
        checksum = HOST.pack(self.slots.data(self.slot), self._packer, self.slots.checksums(self.slot))
        self.slots.commit(self.slot, Commit(self.slot, checksum))
        self.weights.place(self.weights.flat, [self.slots.place(self.slot)])
        self.weights.write(path)


def folder_of(model: Transformer, precision: Precision = "float32") -> WeightFolder:
    """A folder whose pushes are the model, or its adapters, as they are then; with the base."""
    if shapes_of(model):
        folder = WeightFolder(1 << 20, partial(save_adapter, model, base=None, digest=""))
        folder.write_base(partial(save_base, base_of(model), dtype=precision))
    else:
        folder = WeightFolder(1 << 20, PublishedModel(model, precision).write)
        folder.write_base(partial(save_config, model.config, precision=precision))
    return folder


@contextmanager
def fake_engine(
    model: Transformer,
    log_dir: Path,
    *,
    fake: dict[str, Any] | None = None,
    stop_token_ids: Sequence[int] = (),
    engine_args: dict[str, Any] | None = None,
    side_by_side: bool = False,
    **changes: Any,
) -> Iterator[VLLMEngine]:
    """An engine of 4 training and 2 evaluation rooms, serving version 0; `fake` says what goes wrong."""
    settings: dict[str, Any] = {
        "rooms": {0: 4, 1: 2},
        "max_len": 100,
        "seed": 5,
        "kv_on_update": "keep",
        "deadlines": QUICK,
        "max_restarts": 0,
        "probe_tolerance": 1e-3,
        "vocab_size": model.config.vocab_size,
    }
    launch = Launch(
        command=[sys.executable, str(FAKE)],
        environment=os.environ | {"FAKE": json.dumps(fake or {})},
        log_path=log_dir / "vllm.log",
    )
    spec = protocol.Spec(
        address="",
        folder="",
        model="",
        push=0,
        stop_token_ids=list(stop_token_ids),
        engine_args=engine_args or {},
        has_adapters=bool(shapes_of(model)),
        side_by_side=side_by_side,
    )
    folder = folder_of(model)
    try:
        engine = VLLMEngine(folder, launch, spec, **settings | changes)
        try:
            yield engine
        finally:
            engine.close()
    finally:
        folder.close()


def drive(engine: VLLMEngine, until: Callable[[], bool] | None = None, *, deadline_s: float = 30.0) -> list[Finished]:
    """Step until `until` says so, or nothing is left; sleeps on the engine's descriptors, never on a clock."""
    finished: list[Finished] = []
    end_s = time.monotonic() + deadline_s
    while not (until() if until is not None else engine.is_idle):
        if not engine.has_work():
            wait_s = engine.wait_s()
            select.select(engine.wait_fds(), [], [], deadline_s if wait_s is None else wait_s)
        finished += engine.step()
        assert until is None or until() or not engine.is_idle, "everything has ended before"
        assert time.monotonic() < end_s, "the engine does not get there"
    return finished


def num_tokens(engine: VLLMEngine) -> int:
    """Fewest tokens of any live completion; 0 without one."""
    return min((len(live.tokens) for live in engine._live.values()), default=0)


def set_fake(engine: VLLMEngine, fake: dict[str, Any]) -> None:
    """What goes wrong with the next process."""
    environment = engine._launch.environment
    assert isinstance(environment, dict)
    environment["FAKE"] = json.dumps(fake)


def set_weights(model: Transformer, value: float) -> None:
    """All weights to `value`, which the make-believe vLLM repeats in every logprob."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def request(ordinal: int = 0, *, num_prompt: int = 3, **changes: Any) -> Request:
    fields: dict[str, Any] = {"sample": 0, "max_new_tokens": 50, "temperature": 0.7} | changes
    return Request(ordinal=ordinal, prompt_tokens=np.full(num_prompt, 7, dtype=np.int32), **fields)
