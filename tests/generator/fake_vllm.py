"""The worker with a make-believe vLLM: `python fake_vllm.py SPEC`. What it shall do wrong is in the variable FAKE.

Its tokens count up from the length of the prompt, and their logprob is minus the first weight of the last norm: so a
token shows which weights it was sampled under, whatever its tag says. With "halts" [a, b] a request gets at most a
tokens before weights are loaded, then b before the next ones, then all: tests catch it half done on any machine.

Of an adapter it is the first number of its first B that the logprob shows; each request names its adapter.

It has a prefix cache, in blocks, and says how much of a prompt it found there. With "samples" it is our own model with
the weights that it was given, which reads every sequence anew for each token: the cache is one of names alone.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import struct
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

STEP_S = 0.002
BLOCK = 4  # tokens
FIRST_TOKEN, NUM_TOKENS, STOP = 2, 40, 1
FAKE: dict[str, Any] = json.loads(os.environ.get("FAKE", "{}"))

_worker = Path(__file__).resolve().parents[2] / "src" / "slipstream" / "generator" / "vllm" / "worker.py"
_location = importlib.util.spec_from_file_location("slipstream_vllm_worker", _worker)
worker = sys.modules["slipstream_vllm_worker"] = importlib.util.module_from_spec(_location)
_location.loader.exec_module(worker)
sys.path.append(str(_worker.parent))


def scripted(position: int) -> int:
    """The token at `position` of prompt and completion together."""
    return FIRST_TOKEN + position % NUM_TOKENS


def scripted_logprobs(tokens: list[int], vocab_size: int) -> Any:
    """float64 [T, V] of what comes behind each token: a function of it, its place and all before."""
    import numpy as np  # not by every process: it is half of what starting one takes

    states = np.array(tokens) + 0.1 * np.arange(len(tokens)) + 0.01 * np.cumsum(tokens)
    logits = 3 * np.sin(np.outer(1 + states, 1 + np.arange(vocab_size)))
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def first_number(push: str, tensor: str) -> float:
    """That of a float32 tensor of a push; without `slot_extension.py`, which needs seconds to import torch."""
    told = json.loads(Path(push).read_text())
    [part, offset, *_], *_ = next(boxes for name, _, _, boxes in told["tensors"] if name == tensor)
    path, _, _, start, _ = told["parts"][part]
    with Path(path).open("rb") as file:
        file.seek(start + offset)
        (number,) = struct.unpack("<f", file.read(4))
    return float(number)


class Script:
    """Tokens that count up, and one logprob for all of them."""

    def __init__(self, folder: str, adapter: str = "", push: str = "") -> None:
        if not push:
            from safetensors.numpy import load_file
        if adapter:
            tensors = load_file(Path(adapter) / "adapter_model.safetensors")
            self.weight = float(next(tensor for name, tensor in sorted(tensors.items()) if "lora_B" in name)[0, 0])
        elif push:
            self.weight = first_number(push, "model.norm.weight")
        else:
            self.weight = float(load_file(Path(folder) / "model.safetensors")["model.norm.weight"][0])

    def logprobs(self, tokens: list[int]) -> Any:
        return scripted_logprobs(tokens, FAKE["vocab_size"])

    def next(self, request: SimpleNamespace) -> tuple[int, float]:
        return scripted(len(request.tokens)), -self.weight

    def forced(self, tokens: list[int]) -> list[float]:
        return [-self.weight * FAKE.get("probe_factor", 1.0)] * (len(tokens) - 1)


class OwnModel:
    """Our own model with the weights in a folder, by one forward over the whole sequence for each token."""

    def __init__(self, folder: str, adapter: str = "", push: str = "") -> None:
        sys.path.insert(0, str(_worker.parents[3]))
        from slipstream.models.config import config_from_hf
        from slipstream.models.hf import load_model, read_hf_config
        from slipstream.models.layout import layout
        from slipstream.models.peft import load_adapter
        from slipstream.models.transformer import Transformer

        self.weight = folder + adapter + push
        if push:
            from slot_extension import read_push

            tensors = dict(read_push(push))
            self.model = Transformer(config_from_hf(read_hf_config(Path(folder))))
            for tensor in layout(self.model):
                tensor.write(tensors[tensor.name])
            return
        self.model = load_model(Path(folder))
        if adapter:
            load_adapter(self.model, Path(adapter))

    def logprobs(self, tokens: list[int], temperature: float = 1.0) -> Any:
        import torch

        from slipstream.models.attention import PackedAttention

        with torch.inference_mode():
            attention = PackedAttention([len(tokens)])
            hidden = self.model(torch.tensor(tokens), torch.arange(len(tokens)), attention)
            return torch.log_softmax(self.model.logits(hidden).double() / temperature, -1).numpy()

    def next(self, request: SimpleNamespace) -> tuple[int, float]:
        import numpy as np

        logprobs = self.logprobs(request.tokens, request.temperature or 1.0)[-1]
        noise = np.random.default_rng([request.seed, request.num_new]).gumbel(size=len(logprobs))
        token = int((logprobs + noise * (request.temperature > 0)).argmax())
        return token, float(logprobs[token])

    def forced(self, tokens: list[int]) -> list[float]:
        return [float(row[token]) for row, token in zip(self.logprobs(tokens), tokens[1:], strict=False)]


MODEL = OwnModel if FAKE.get("samples") else Script


class FakeLLM:
    """Decodes one token per step for every request; outputs take a detour through a queue, as vLLM's do."""

    errored = False
    is_paused = False

    def __init__(self, model: str, max_loras: int = 0) -> None:
        self.folder, self.model = model, MODEL(model) if any(Path(model).glob("*.safetensors")) else None
        self.adapters: dict[int, Any] = {}
        self.max_loras = max_loras
        self.num_tokens = self.num_open = self.num_predicted = 0
        self.blocks: dict[tuple[str, tuple[int, ...]], Any] = {}  # the weights that made the last block of a prefix
        self.salts: dict[str, Any] = {}  # the weights that each part of the prefix cache was filled by
        self.halts: list[int] = FAKE.get("halts", [])
        self.requests: dict[str, SimpleNamespace] = {}
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self.tasks = [asyncio.create_task(self.steps()), asyncio.create_task(self.outputs())]

    async def steps(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            for request in list(self.requests.values()):
                self.decode(request)

    def decode(self, request: SimpleNamespace) -> None:
        if self.is_stuck() or (self.halts and request.num_since_load >= self.halts[0]):
            return
        request.num_since_load += 1
        self.num_tokens += 1
        token, logprob = self.model_of(request.lora).next(request)
        self.store(request)
        request.tokens.append(token)
        request.remaining -= 1
        request.num_new += 1
        reason = "stop" if token in request.stops else "length" if request.remaining == 0 else None
        self.queue.put_nowait((request, token, logprob, reason))
        if reason:
            del self.requests[request.id]

    def store(self, request: SimpleNamespace) -> None:
        """Cache every whole block of what is computed now: all tokens of the request."""
        for end in range(BLOCK, len(request.tokens) + 1, BLOCK):
            weight = self.model_of(request.lora).weight
            self.blocks.setdefault((request.salt, tuple(request.tokens[:end])), weight)

    def model_of(self, lora: Any) -> Any:
        return self.model if lora is None else self.adapters[lora.lora_int_id]

    def find(self, tokens: list[int], salt: str, weight: Any) -> int:
        """Count the tokens whose blocks are in the cache, of those weights that there are; the last one is computed."""
        num_found = 0
        while num_found + BLOCK < len(tokens):
            made_by = self.blocks.get((salt, tuple(tokens[: num_found + BLOCK])))
            if made_by is None:
                break
            assert made_by == weight, "a cache of other weights"
            num_found += BLOCK
        return num_found

    def is_stuck(self) -> bool:
        return self.num_tokens >= FAKE.get("stuck_after", 1 << 30)

    async def outputs(self) -> None:
        while True:
            request, token, logprob, reason = await self.queue.get()
            if FAKE.get("slow_outputs"):
                await asyncio.sleep(2 * STEP_S)
            request.outputs.put_nowait((token, logprob, reason))

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, lora_request: Any = None
    ) -> AsyncIterator[Any]:
        tokens = prompt["prompt_token_ids"]
        assert (lora_request is not None) == bool(self.max_loras), "only the base, or adapters alone"
        model = self.model_of(lora_request)
        salt, weight = prompt["cache_salt"], model.weight
        assert self.salts.setdefault(salt, weight) == weight, "a cache of other weights"
        if "flat_logprobs" in vars(sampling_params):
            yield SimpleNamespace(outputs=[], prompt_logprobs=await self.predicted(tokens, sampling_params))
            return
        if "prompt_logprobs" in vars(sampling_params):
            forced = zip(tokens[1:], model.forced(tokens), strict=True)
            yield SimpleNamespace(
                outputs=[], prompt_logprobs=[None, *({t: SimpleNamespace(logprob=logprob)} for t, logprob in forced)]
            )
            return
        request = SimpleNamespace(
            id=request_id,
            tokens=list(tokens),
            salt=salt,
            lora=lora_request,
            seed=sampling_params.seed,
            temperature=sampling_params.temperature,
            remaining=sampling_params.max_tokens,
            stops=sampling_params.stop_token_ids,
            num_new=0,
            num_since_load=0,
            outputs=asyncio.Queue(),
        )
        assert request_id not in self.requests
        self.requests[request_id] = request
        said = {"num_cached_tokens": FAKE.get("found", self.find(tokens, salt, weight))}
        if said["num_cached_tokens"] == "all but the last":
            said["num_cached_tokens"] = len(tokens) - 1
        if said["num_cached_tokens"] == "unsaid":
            said = {}
        try:
            reason = None
            while reason is None:
                token, logprob, reason = await request.outputs.get()
                if FAKE.get("bad_token"):
                    token = 1 << 20
                yield SimpleNamespace(outputs=[self.completion(request, token, logprob, reason)], **said)
        finally:
            self.requests.pop(request_id, None)

    async def predicted(self, tokens: list[int], params: SimpleNamespace) -> Any:
        """A prompt's own tokens and the likeliest ones, flat; with "fails_at" the n-th prompt meets a fault, once."""
        self.num_open += 1
        self.num_predicted += 1
        assert self.num_open <= FAKE.get("rooms", 64), "more at once than there are rooms"
        if self.num_predicted >= FAKE.get("fails_at", 1 << 30) and not Path(FAKE["once"]).exists():
            Path(FAKE["once"]).touch()
            if FAKE["fault"] == "dies":
                os.kill(os.getpid(), 9)
            await asyncio.sleep(3600)
        await asyncio.sleep(STEP_S)
        import numpy as np

        flat = SimpleNamespace(token_ids=[], logprobs=[], start_indices=[0], end_indices=[0])
        for row, token in zip(self.model.logprobs(tokens), tokens[1:], strict=False):
            best = np.argsort(-row, kind="stable")[: params.prompt_logprobs]
            flat.start_indices.append(len(flat.token_ids))
            flat.token_ids += [FAKE.get("first_token", token), *best.tolist()]
            flat.logprobs += [float(row[token]), *row[best].tolist()]
            flat.end_indices.append(len(flat.token_ids))
        self.num_open -= 1
        return flat

    def completion(self, request: SimpleNamespace, token: int, logprob: float, reason: str | None) -> Any:
        return SimpleNamespace(
            token_ids=[token],
            logprobs=[{token: SimpleNamespace(logprob=logprob)}],
            finish_reason=reason,
            weight_versions=None,
        )

    async def add_lora(self, lora_request: Any) -> bool:
        assert self.is_paused or self.max_loras > 1 or not self.requests, "the weights of a request under way"
        assert len(self.adapters) < self.max_loras, "no room"
        assert lora_request.lora_int_id not in self.adapters, "it would stay what it was"
        if self.salts:  # it has served, so this is an update
            await self.loading()
        self.adapters[lora_request.lora_int_id] = MODEL(self.folder, lora_request.lora_path)
        self.loaded()
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        in_use = {request.lora.lora_int_id for request in self.requests.values()}
        assert self.max_loras == 1 or lora_id not in in_use, "a request goes on with it"
        del self.adapters[lora_id]
        return True

    async def collective_rpc(self, method: str, args: Any) -> None:
        assert method == "load_slipstream_push"
        assert not self.max_loras, "a base is given once"
        is_first = self.model is None
        if not is_first:
            await self.loading()
        self.model = MODEL(self.folder, push=args[0])
        if not is_first:
            self.loaded()

    async def loading(self) -> None:
        if FAKE.get("dies_in_update"):
            os.kill(os.getpid(), 9)
        if FAKE.get("hangs_in_update"):
            await asyncio.sleep(3600)
        self.halts = self.halts[1:]

    def loaded(self) -> None:
        for request in self.requests.values():
            request.num_since_load = 0
        if FAKE.get("core_dies_after_update"):
            self.errored = True  # those who wait for tokens are told nothing
            FAKE["stuck_after"] = 0


class PausingLLM(FakeLLM):
    """As between 0.12 and 0.15: a pause, but none that keeps requests."""

    async def pause_generation(self, *, wait_for_inflight_requests: bool = False, clear_cache: bool = True) -> None:
        assert not self.requests, "requests would be lost"
        self.is_paused = True
        if clear_cache:
            self.blocks.clear()

    async def resume_generation(self) -> None:
        self.is_paused = False

    def is_stuck(self) -> bool:
        return self.is_paused or super().is_stuck()


class KeepingLLM(PausingLLM):
    """As since 0.29: requests are kept over a pause, and versions have labels."""

    label = "default"

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:  # type: ignore[override]
        assert mode == "keep"
        halts, self.halts = self.halts, []
        for request in list(self.requests.values()):
            self.decode(request)  # the step under way: its tokens are still in the queue when the pause is answered
        self.halts = halts
        self.is_paused = True
        if clear_cache:
            self.blocks.clear()

    async def update_weight_version(self, new_version: str) -> None:
        self.label = new_version

    def decode(self, request: SimpleNamespace) -> None:
        num_before = request.num_new
        super().decode(request)
        if request.num_new > num_before and FAKE.get("labels", True):
            labels = request.__dict__.setdefault("labels", [])
            labels.append(self.label)

    def completion(self, request: SimpleNamespace, token: int, logprob: float, reason: str | None) -> Any:
        found = super().completion(request, token, logprob, reason)
        if reason and "labels" in vars(request):
            labels = request.labels
            starts = [i for i, label in enumerate(labels) if i == 0 or labels[i - 1] != label]
            found.weight_versions = [
                SimpleNamespace(version=labels[start], start=start, end=end)
                for start, end in zip(starts, [*starts[1:], len(labels)], strict=True)
            ]
        return found


def make(spec: Any) -> Any:
    if FAKE.get("cannot_start"):
        raise RuntimeError("no memory for the cache")
    if FAKE.get("has_child"):
        subprocess.Popen(["sleep", "600"])
    if FAKE.get("never_starts"):
        import time

        time.sleep(3600)
    kind = {"keep": KeepingLLM, "pause": PausingLLM, "bare": FakeLLM}[FAKE.get("kind", "keep")]
    llm = kind(spec.model, spec.engine_args.get("max_loras", 0))
    sampling = lambda **keywords: SimpleNamespace(**({"stop_token_ids": []} | keywords))  # noqa: E731
    return llm, sampling, worker.reload_from(llm), SimpleNamespace


def spoiled(frame: Any) -> Any:
    """A frame as a worker that is out of step, or out of its mind, would send it."""
    if FAKE.get("answers_others") and isinstance(frame, worker.protocol.Updated):
        return worker.protocol.Updated(push=frame.push - 1, pause_s=frame.pause_s)
    if FAKE.get("answers_others") and isinstance(frame, worker.protocol.Probed):
        return worker.protocol.Probed(id=frame.id - 1, logprobs=frame.logprobs)
    if "predicts" in FAKE and isinstance(frame, worker.protocol.Predicted):
        changed = {"id": {"id": 1 << 20}, "short": {"tokens": frame.tokens[4:]}}
        changed["nan"] = {"logprobs": b"\xff" * len(frame.logprobs)}
        changed["token"] = {"tokens": b"\x7f" * len(frame.tokens)}
        return worker.msgspec.structs.replace(frame, **changed[FAKE["predicts"]])
    return frame


if __name__ == "__main__":
    real = worker.protocol.encode

    def encode(frame: Any) -> bytes:
        is_nonsense = FAKE.get("talks_nonsense") and isinstance(frame, worker.protocol.Tokens)
        return b"\x93\x01" if is_nonsense else real(spoiled(frame))

    worker.protocol.encode = encode
    worker.main(sys.argv[1], make)
