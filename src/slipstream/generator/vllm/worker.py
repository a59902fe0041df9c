"""The process that runs vLLM: `python worker.py SPEC`, with the interpreter of vLLM's own environment.

Consumes: frames of `protocol.py` from the client, which binds the socket. Produces: tokens as they are sampled, and the
answers. Waits for: a frame, or vLLM. Ends when: told to stop, something fails, or its standard input closes, whose
other end is the client: so no worker outlives its parent, whatever happened to that.

vLLM's interface changes with every release; what it offers is found out by signature (`features_of`), not by version:

    pause with mode "keep"   an update happens between two decode steps, live jobs go on behind it
    otherwise                live jobs are taken out before the update and submitted again, with what they had, after it
    weight versions          vLLM labels tokens itself; its account goes along with the last token of each job
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from array import array
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
import zmq.asyncio

PROTOCOL = "slipstream_vllm_protocol"
QUIET_TURNS = 50  # of the event loop without a new token: far more than a token needs from vLLM's socket to us
HIGH_WATER_FRAMES = 64
TRACEBACK_FRAMES = 6
HEALTH_EVERY_S = 1.0
NOISE_STRIDE = 0x9E3779B97F4A7C15

if TYPE_CHECKING:
    from slipstream.generator.vllm import protocol
else:
    location = importlib.util.spec_from_file_location(PROTOCOL, Path(__file__).with_name("protocol.py"))
    protocol = sys.modules[PROTOCOL] = importlib.util.module_from_spec(location)
    location.loader.exec_module(protocol)


Sampling = Callable[..., Any]
"""`vllm.SamplingParams`, by keyword."""
Transfer = Callable[[str], Any]
"""Loads a push into vLLM; a coroutine function."""


def features_of(llm: Any) -> dict[str, bool]:
    """Find out what this vLLM offers for reinforcement learning."""
    pause = inspect.signature(llm.pause_generation).parameters if hasattr(llm, "pause_generation") else {}
    return {
        "pause": bool(pause) or hasattr(llm, "pause_generation"),
        "keep": "mode" in pause and "clear_cache" in pause,
        "weight_versions": hasattr(llm, "update_weight_version"),
    }


def num_cached_of(output: Any) -> int | None:
    """Return the tokens of the prompt that vLLM found in its prefix cache; None where it does not say."""
    found = output.num_cached_tokens if hasattr(output, "num_cached_tokens") else None
    return None if found is None or found < 0 else int(found)


@dataclass(eq=False)
class Running:
    """A job in vLLM: the tokens it has so far, and the task that reads them."""

    job: protocol.SamplingJob
    done: list[int] = field(default_factory=list)
    task: asyncio.Task[None] | None = None


class LoadedAdapters:
    """The adapters in vLLM by push: several `side_by_side`, or one, whose place the next one takes.

    vLLM tells adapters apart by number. `new` makes its `LoRARequest`, which every request of an adapter names.
    """

    def __init__(self, llm: Any, new: Callable[..., Any], *, side_by_side: bool) -> None:
        self.side_by_side = side_by_side
        self._llm, self._new = llm, new
        self._loaded: dict[int, Any] = {}  # by number

    def __bool__(self) -> bool:
        return bool(self._loaded)

    def named(self, push: int) -> dict[str, Any]:
        """Return what a request names its adapter by, as keywords of `generate`; none without adapters."""
        return {"lora_request": self._loaded[self._number(push)]} if self._loaded else {}

    async def load(self, push: int, path: str, beside: Collection[int] = ()) -> None:
        """Load the adapter in folder `path` as `push`, and let go of all but those `beside`."""
        number, kept = self._number(push), set(map(self._number, beside))
        for other in self._loaded.keys() - kept:
            await self._llm.remove_lora(other)
        new = self._new(lora_name=f"adapter {number}", lora_int_id=number, lora_path=path)
        self._loaded = {other: self._loaded[other] for other in self._loaded.keys() & kept} | {number: new}
        if not await self._llm.add_lora(new):
            raise RuntimeError(f"vLLM did not load the adapter in {path}")

    def _number(self, push: int) -> int:
        return push + 1 if self.side_by_side else 1


class Worker:
    """Carries out frames one by one; tokens stream meanwhile. See the module's docstring."""

    def __init__(
        self,
        llm: Any,
        socket: zmq.asyncio.Socket,
        *,
        push: int,
        stop_token_ids: list[int],
        sampling: Sampling,
        transfer: Transfer,
        adapters: LoadedAdapters,
    ) -> None:
        self.features = features_of(llm)
        self._llm, self._socket, self._push = llm, socket, push
        self._stop_token_ids, self._sampling, self._transfer = stop_token_ids, sampling, transfer
        self._adapters = adapters
        self._running: dict[int, Running] = {}
        self._predicting: set[asyncio.Task[None]] = set()
        self._outbox: list[Any] = []  # frames and deltas, in order; no more deltas than tokens that were asked for
        self._has_news = asyncio.Event()
        self._num_outputs = 0
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def serve(self) -> None:
        """Until `EndWorker`. Raises what any of its tasks raised."""
        if self.features["weight_versions"]:
            await self._llm.update_weight_version(str(self._push))
        self._put(protocol.Started())
        flusher = self._watched(self._flush())
        obeying, watcher = self._watched(self._obey()), self._watched(self._watch())
        await asyncio.wait([obeying, self._failure], return_when=asyncio.FIRST_COMPLETED)
        tasks = [
            flusher,
            obeying,
            watcher,
            *(running.task for running in self._running.values() if running.task is not None),
            *self._predicting,
        ]
        for task in tasks:
            task.cancel()
        if self._failure.done():
            await self._failure

    async def _obey(self) -> None:
        while True:
            match protocol.decode_to_worker(await self._socket.recv()):
                case protocol.Submit(jobs=jobs):
                    for job in jobs:
                        self._start(Running(job))
                case protocol.Abort(ids=ids):
                    await self._take_out([self._running[i] for i in ids if i in self._running])
                    self._put(protocol.Aborted(ids=ids))
                case protocol.Update() as update:
                    self._put(protocol.Updated(push=update.push, pause_s=await self._update(update)))
                case protocol.Probe(id=probe_id, tokens=tokens):
                    self._put(protocol.Probed(id=probe_id, logprobs=await self._probe(probe_id, tokens)))
                case protocol.Predict() as asked:
                    self._predicting.add(task := self._watched(self._predict(asked)))
                    task.add_done_callback(self._predicting.discard)
                case protocol.EndWorker():
                    return

    async def _watch(self) -> None:
        """See vLLM's own processes die: those who wait for its tokens would go on waiting (0.32)."""
        while not self._llm.errored:
            await asyncio.sleep(HEALTH_EVERY_S)
        raise RuntimeError("the process of vLLM's engine ended")

    # Jobs

    def _start(self, running: Running) -> None:
        self._running[running.job.id] = running
        running.task = self._watched(self._stream(running))

    async def _stream(self, running: Running) -> None:
        job, start = running.job, len(running.done)
        params = self._sampling(
            temperature=job.temperature,
            top_k=job.top_k,
            top_p=job.top_p,
            min_p=job.min_p,
            seed=(job.seed + start * NOISE_STRIDE) % 2**63,  # what was drawn before is not drawn again
            max_tokens=job.max_tokens - start,
            logprobs=0,
            stop_token_ids=self._stop_token_ids,
        )
        push = self._push_of(job)
        prompt = {"prompt_token_ids": job.prompt + running.done, "cache_salt": f"push {push}"}
        finish = None
        async for output in self._llm.generate(prompt, params, f"{job.id}+{start}", **self._adapters.named(push)):
            self._num_outputs += 1
            completion = output.outputs[0]
            tokens = list(completion.token_ids)
            finish = completion.finish_reason
            logprobs = [entry[token].logprob for token, entry in zip(tokens, completion.logprobs or [], strict=True)]
            num_cached = None if running.done else num_cached_of(output)
            running.done += tokens
            self._put(
                protocol.Delta(
                    id=job.id,
                    tokens=tokens,
                    logprobs=logprobs,
                    push=self._push_of(job),
                    finish=finish or "",
                    spans=self._spans(completion, start) if finish else None,
                    num_cached=num_cached,
                )
            )
        if finish not in ("stop", "length"):
            raise RuntimeError(f"vLLM ended a request with finish reason {finish!r}")
        del self._running[job.id]

    def _push_of(self, job: protocol.SamplingJob) -> int:
        return job.push if self._adapters.side_by_side else self._push

    def _spans(self, completion: Any, start: int) -> list[tuple[int, int, int]] | None:
        is_labelled = self.features["weight_versions"] and not self._adapters.side_by_side
        if not is_labelled or completion.weight_versions is None:
            return None
        return [(int(span.version), start + span.start, start + span.end) for span in completion.weight_versions]

    async def _take_out(self, running: list[Running]) -> None:
        """Cancel these jobs; vLLM drops a request whose reader goes away. Nothing more is heard of them then."""
        for one in running:
            self._running.pop(one.job.id, None)
            if one.task is not None:
                one.task.cancel()
        await asyncio.gather(*(one.task for one in running if one.task is not None), return_exceptions=True)

    # Weights

    async def _update(self, update: protocol.Update) -> float:
        """Exchange the weights between two decode steps; seconds without a token."""
        started_s = time.monotonic()
        if self._adapters.side_by_side:
            await self._adapters.load(update.push, update.path, update.beside)
            self._push = update.push
            return time.monotonic() - started_s
        interrupted: list[Running] = []
        if self.features["keep"]:
            await self._llm.pause_generation(mode="keep", clear_cache=update.clear_cache)
        else:
            interrupted = list(self._running.values())
            await self._take_out(interrupted)
            if self.features["pause"]:
                await self._llm.pause_generation()
        await self._drain()
        if self._adapters:
            await self._adapters.load(update.push, update.path)
        else:
            await self._transfer(update.path)
        if self.features["weight_versions"]:
            await self._llm.update_weight_version(str(update.push))
        self._push = update.push
        if self.features["pause"]:
            await self._llm.resume_generation()
        for running in interrupted:
            self._start(running)
        return time.monotonic() - started_s

    async def _drain(self) -> None:
        """Until every token sampled before the pause has been read, so that it carries the push it was sampled under.

        vLLM answers the pause on the socket its tokens come on, behind them; what remains is between tasks of this
        event loop, which take turns.
        """
        num_quiet = 0
        while num_quiet < QUIET_TURNS:
            before = self._num_outputs
            await asyncio.sleep(0)
            num_quiet = num_quiet + 1 if self._num_outputs == before else 0

    async def _probe(self, probe_id: int, tokens: list[int]) -> list[float]:
        """Logprobs of tokens 1 .. T-1."""
        entries = (await self._forced(f"probe {probe_id}", tokens, prompt_logprobs=0))[1:]
        return [entry[token].logprob for token, entry in zip(tokens[1:], entries, strict=True)]

    async def _predict(self, asked: protocol.Predict) -> None:
        """Answer `asked`: rows of vLLM's flat lists, each the prompt's own token and then the likeliest, by rank."""
        found = await self._forced(f"predict {asked.id}", asked.tokens, prompt_logprobs=asked.count, flat_logprobs=True)
        tokens, logprobs = array("i"), array("f")
        for place in asked.places:
            start, end = found.start_indices[place], found.end_indices[place]
            if end - start != asked.count + 1 or found.token_ids[start] != asked.tokens[place]:
                raise RuntimeError(f"vLLM's logprobs of a prompt are not those of token {place} of it")
            tokens.extend(found.token_ids[start:end])
            logprobs.extend(found.logprobs[start:end])
        self._put(protocol.Predicted(id=asked.id, tokens=tokens.tobytes(), logprobs=logprobs.tobytes()))

    async def _forced(self, name: str, tokens: list[int], **wanted: Any) -> Any:
        """Return vLLM's logprobs of a prompt, by a prefill that reads no cache."""
        params = self._sampling(temperature=0.0, max_tokens=1, **wanted)
        prompt = {"prompt_token_ids": tokens, "cache_salt": name}
        found: Any = None
        async for output in self._llm.generate(prompt, params, name, **self._adapters.named(self._push)):
            if output.prompt_logprobs:
                found = output.prompt_logprobs
        return found

    # Sending

    def _put(self, item: Any) -> None:
        self._outbox.append(item)
        self._has_news.set()

    async def _flush(self) -> None:
        """Send what was put, in order; the deltas of one turn, a decode step's, in one frame."""
        while True:
            await self._has_news.wait()
            await asyncio.sleep(0)
            self._has_news.clear()
            items, self._outbox = self._outbox, []
            deltas: list[Any] = []
            for item in items:
                if isinstance(item, protocol.Delta):
                    deltas.append(item)
                    continue
                await self._send_tokens(deltas)
                deltas = []
                await self._socket.send(protocol.encode(item))
            await self._send_tokens(deltas)

    async def _send_tokens(self, deltas: list[Any]) -> None:
        if deltas:
            await self._socket.send(protocol.encode(protocol.Tokens(deltas=deltas)))

    def _watched(self, work: Any) -> asyncio.Task[None]:
        """A task whose failure ends the worker."""
        task: asyncio.Task[None] = asyncio.create_task(work)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None and not self._failure.done():
            self._failure.set_exception(task.exception() or RuntimeError("a task ended"))


def reload_from(llm: Any) -> Transfer:
    """Every rank of vLLM reads what it holds out of shared memory (`slot_extension.py`)."""

    async def transfer(path: str) -> None:
        await llm.collective_rpc("load_slipstream_push", args=(path,))

    return transfer


# The process


def end_with_parent(folders: list[Path]) -> None:
    """Kill this process group when standard input closes, and remove what the client can no longer remove."""

    def wait() -> None:
        while os.read(0, 1024):
            pass
        end_group(folders)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


def end_group(folders: list[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    if os.getpgid(0) == os.getpid():  # started as the leader of a session of its own: vLLM's processes are in it
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


Made = tuple[Any, Sampling, Transfer, Callable[..., Any]]
"""vLLM, how to sample with it and to load weights, and its `LoRARequest`, by keyword."""


async def serve(spec: protocol.Spec, make: Callable[[protocol.Spec], Made]) -> int:
    """Connect, start vLLM by `make`, serve; an error is told to the client before the end."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.PAIR)
    socket.set(zmq.SNDHWM, HIGH_WATER_FRAMES)
    socket.set(zmq.LINGER, 2000)
    socket.connect(spec.address)
    what = "starting vLLM"
    try:
        llm, sampling, transfer, new_adapter = make(spec)
        adapters = LoadedAdapters(llm, new_adapter, side_by_side=spec.side_by_side)
        for push, path in spec.pushes.items():
            await (adapters.load(push, path, spec.pushes) if spec.has_adapters else transfer(path))
        what = "serving"
        worker = Worker(
            llm,
            socket,
            push=spec.push,
            stop_token_ids=spec.stop_token_ids,
            sampling=sampling,
            transfer=transfer,
            adapters=adapters,
        )
        await worker.serve()
    except Exception as error:  # noqa: BLE001 - whatever it is, the client must hear of it
        traceback.print_exception(error, limit=-TRACEBACK_FRAMES)  # raised by many tasks, it has one of each on it
        await socket.send(protocol.encode(protocol.WorkerFailed(what=what, error=f"{type(error).__name__}: {error}")))
        return 1
    finally:
        socket.close()
        context.term()
    return 0


def make_vllm(spec: protocol.Spec) -> Made:
    """AsyncLLM with the arguments of the spec, of which this vLLM must know every one."""
    import vllm
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.platforms import current_platform
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments: dict[str, Any] = {"model": spec.model, **spec.engine_args}
    if current_platform.is_cpu():
        # After a part of a prompt vLLM winds the request's noise back, and fails where the generator is one of a CPU.
        arguments["enable_chunked_prefill"] = False
    unknown = arguments.keys() - inspect.signature(AsyncEngineArgs).parameters.keys()
    if unknown:
        raise ValueError(f"vLLM {vllm.__version__} does not know the engine arguments {sorted(unknown)}")
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    def sampling(**keywords: Any) -> Any:
        # vLLM would add the checkpoint's end tokens; which tokens end a completion is the client's to say.
        return SamplingParams(ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA, **keywords)

    return llm, sampling, reload_from(llm), LoRARequest


def main(spec_path: str, make: Callable[[protocol.Spec], Made] = make_vllm) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the signals are the run's to handle: `core/interrupts.py`
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda _number, _frame: None)
    spec = msgspec.json.decode(Path(spec_path).read_bytes(), type=protocol.Spec)
    end_with_parent([Path(spec.folder), Path(spec_path).parent])  # weights, and the socket
    code = asyncio.run(serve(spec, make))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # vLLM's own way out waits seconds for its processes; the client ends the group


if __name__ == "__main__":
    main(sys.argv[1])
