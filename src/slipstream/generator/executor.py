"""The generator node: admitted prompts in, completions out, weights swapped between two decode steps.

A replica of several ranks (`generator.tensor_parallel`) is as many of these executors, each over its part of the model.
They obey, swap, evaluate and decode in lock step (`lockstep.py`); rank 0 alone speaks with the other nodes.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from slipstream.algorithms.responses import truncate_at_token
from slipstream.core.config import RunConfig
from slipstream.core.executor import Context, Executor
from slipstream.core.peer_messages import Wake
from slipstream.core.saved import SUFFIX, rollouts_dir
from slipstream.core.spans import Spans
from slipstream.core.types import (
    Admit,
    Checkpoint,
    Completion,
    CompletionFinished,
    Counters,
    Evaluate,
    Message,
    Prompt,
    Purpose,
    Ready,
    Segment,
    Settled,
    Stop,
    Swapped,
    Waiting,
)
from slipstream.generator.backend import Backend, Pin
from slipstream.generator.lockstep import Agreement, LockStep
from slipstream.generator.native import NativeBackend
from slipstream.generator.partials import Restored, Saver, partial_of, partial_of_finished
from slipstream.generator.requests import Finished, GenerationEngine, Request
from slipstream.generator.unsettled import Unsettled
from slipstream.generator.vllm.backend import VLLMBackend
from slipstream.models.build import build_tokenizer, stop_token_ids
from slipstream.observe.waste import RE_PREFILLED

COUNTERS_EVERY_S = 1.0
TRAIN_STREAM, EVAL_STREAM = 0, 1  # their ordinals are counted apart, so their noise is keyed apart

SEEDS_APART = 100_003  # between the seeds of two processes in the original RLHF code (N, item 9)


@dataclass
class EvalJob:
    """One evaluation: its prompts, the version it is pinned to, and once it runs, what decodes it."""

    request: Evaluate
    pin: Pin
    remaining: int
    engine: GenerationEngine | None = None


class Labelled:
    """An engine's spans with the version that it samples from; all under one label while `state` is set."""

    def __init__(self, spans: Spans, *, version: int | None = None, state: str | None = None) -> None:
        self.version = version
        self.state = state
        self._spans = spans

    def span(self, state: str) -> AbstractContextManager[None]:
        return self._spans.span(self.state or state, version=self.version)

    def did(self, units: int) -> None:
        self._spans.did(units)


class Generator(Executor):
    """Continuous batching over fixed slots; never waits for the trainer except where the schedule admits nothing.

    Consumes: `Admit`, `Checkpoint`, `Evaluate`, `Settled`, `Waiting`, `Stop` (commands), versions (its WEIGHTS
    channel). Produces: `Completion` (completions), `Swapped` and `CompletionFinished` (events). Waits for: an admission
    or a version; with work, on several ranks, also for the others at the beginning of a step and in every layer.
    Ends when: told to stop; what is in its slots then belongs to no step and is dropped.
    """

    outputs = ("completions",)
    """Of rank 0. On several ranks it also has the output `relay` to the others' `commands`, and they have the output
    `staged` to its input of that name."""

    def __init__(self, *, config: RunConfig, replica: int = 0) -> None:
        self.config = config
        self.replica = replica
        self._ends = ExitStack()
        self._is_stopped = False

    def init(self, context: Context) -> None:
        self.context = context
        config = self.config
        torch.set_num_threads(context.num_threads)
        self.tokenizer = build_tokenizer(config.model)
        self.stop_ids = stop_token_ids(self.tokenizer, config.generator)
        self.spans = Labelled(context.spans)
        self.together = LockStep(context)
        self.backend = self._build_backend()
        self._ends.callback(self.backend.close)
        self.engine = self.backend.engine
        self.max_len = self.backend.max_len
        assert context.subscriber is not None, "a generator needs a WEIGHTS channel"
        self.weights = context.subscriber
        self.weights.open(
            self.backend.weights,
            self.backend.probe,
            config.generator.max_probe_error,
            is_threaded=config.host == "process",
            probes_prepared=self.backend.probes_prepared,
            spans=context.spans,
        )
        self.prompts: dict[int, tuple[Prompt, int]] = {}  # ordinal -> prompt, completions still to come
        self.unsettled = Unsettled(context.outputs["completions"]) if self.together.is_leader else None
        self.settled_early: set[int] = set()  # ordinals of `prompts` whose group was scored, as others had sampled it
        self.restored = Restored(config, max_len=self.max_len, clock=context.clock)
        self.saver = Saver()
        self._ends.callback(self.saver.close)
        self.jobs: deque[EvalJob] = deque()
        self.drain_steps = 0
        self.generated_tokens = 0
        self.counted_s = context.clock.now_s()
        self.waits_for = "trainer"
        context.spans.set_idle_state(self._idle_state)
        context.outputs["events"].put(Ready(executor=context.name))

    def _build_backend(self) -> Backend:
        """What `generator.engine` names."""
        config, context, seed = self.config, self.context, training_seed(self.config, self.replica)
        if config.generator.engine == "vllm":
            return VLLMBackend(config, context, tokenizer=self.tokenizer, seed=seed, stop_token_ids=self.stop_ids)
        return NativeBackend(
            config,
            tokenizer=self.tokenizer,
            seed=seed,
            stop_token_ids=self.stop_ids,
            spans=self.spans,
            clock=self.together.clock,
            replica=self.replica,
            group=context.group,
        )

    @property
    def is_finished(self) -> bool:
        return self._is_stopped and self.together.has_all_reports

    def wait_fds(self) -> list[int]:
        return [*self.weights.wait_fds(), *self.backend.wait_fds()]

    def wait_s(self) -> float | None:
        return self.backend.wait_s()

    def rejoined(self, executor: str) -> None:
        """Whoever scores is a new one, which has nothing of what the one before was sent."""
        if self.unsettled is not None:
            self.unsettled.rejoined(executor)

    def close(self) -> None:
        self._ends.close()

    def step(self) -> bool:
        """Take messages, swap if a version is staged, then one decode step of evaluation and one of training."""
        spans = self.context.spans
        with spans.span("receive"):
            has_news = self.together.receive()
            if self._is_stopped:
                return has_news
            has_news = self.weights.poll() or has_news
        if self.unsettled is not None and self.unsettled.num_unsent:
            with spans.span("send"):
                has_news = self.unsettled.send() or has_news
        agreed = self._agree()
        if agreed is None:
            return has_news
        for command in agreed.commands:
            self._obey(command)
        has_swapped = self._swap(agreed.version)
        has_evaluated = self._evaluate()
        has_decoded = self._decode()
        has_worked = bool(agreed.commands) or has_swapped or has_evaluated or has_decoded
        has_more = self.together.rest(has_worked=has_worked)
        self._count()
        spans.set_idle_state(self._idle_state)
        return has_news or has_more

    @property
    def _idle_state(self) -> str:
        """Without work: what goes on all the same, in this process or one of its own; else what is waited for."""
        if (working := self.spans.state or self.backend.working_state) is not None:
            return working
        return "stage" if self.weights.is_staging else f"wait_{self.waits_for}"

    def _agree(self) -> Agreement | None:
        """What all ranks do now; None while they sleep."""
        staged = self.weights.pending_version
        if self.context.group.world == 1:
            return self.together.agree(staged, self.engine)
        with self.context.spans.span("wait_ranks"):
            return self.together.agree(staged, self.engine)

    def _obey(self, message: Message) -> None:
        match message:
            case Admit():
                self._admit(message)
            case Checkpoint():
                self.save_checkpoint(message)
            case Evaluate():
                self.jobs.append(EvalJob(message, self.backend.pin(), len(message.prompts)))
            case Settled():
                self.settled_early.update(ordinal for ordinal in message.ordinals if ordinal in self.prompts)
                if self.unsettled is not None:
                    self.unsettled.settle(message)
            case Waiting():
                self.waits_for = message.reason
            case Wake():
                pass  # it has done what it is for: this step
            case Stop():
                self._count(is_last=True)
                self._is_stopped = True
            case _:
                raise TypeError(f"a generator does not take {type(message).__name__}")

    def _admit(self, message: Admit) -> None:
        """Sample the group, or what is not there of it yet."""
        self.prompts[message.ordinal] = (message.prompt, message.num_samples)
        partials = {partial.sample: partial for partial in message.partials}
        requests, finished = [], []
        for sample in range(message.num_samples):
            request = replace(
                self._request(message.ordinal, sample, message.prompt, self._temperature_of(sample)),
                is_again=message.is_again,
            )
            if sample in partials and self.restored.fits(partials[sample], request, self.engine.version):
                partial = partials[sample]
                if partial.finish_reason is not None:
                    finished.append(self.restored.finished(partial, request))
                    continue
                request = self.restored.resumed(partial, request)
            requests.append(request)
        self.engine.submit(requests)
        self._deliver(finished)

    def save_checkpoint(self, command: Checkpoint) -> None:
        """Save what there is here of the groups that the cut owes, while decoding goes on: a thread writes.

        Versions of a later cut may have come into it by now; whoever loads it leaves out what they have sampled.
        """
        if self.unsettled is None:
            return  # rank 0 has it all
        owed = set(command.schedule["readmit"])
        partials = [partial_of_finished(completion) for completion in self.unsettled.of_groups(owed)]
        partials += [
            partial_of(request)
            for request in self.engine.begun()
            if request.stream == TRAIN_STREAM and request.ordinal in owed
        ]
        path = rollouts_dir(Path(command.path)) / f"{self.context.name}{SUFFIX}"
        self.saver.save(path, partials, cut=command.cut)

    def _temperature_of(self, sample: int) -> float:
        """Greedy for ReMax's baseline, which is sampled behind the group's own completions."""
        is_baseline = sample >= self.config.completions_per_group
        return 0.0 if is_baseline else self.config.generator.temperature

    def _request(
        self, ordinal: int, sample: int, prompt: Prompt, temperature: float, *, stream: int = TRAIN_STREAM
    ) -> Request:
        room = self.max_len - len(prompt.tokens)
        generator = self.config.generator
        # Evaluation and greedy baselines are of the policy itself, never of a part of it.
        is_cut = stream == TRAIN_STREAM and temperature > 0 and generator.truncates
        return Request(
            ordinal=ordinal,
            sample=sample,
            prompt_tokens=prompt.tokens,
            max_new_tokens=min(generator.max_new_tokens, room),
            temperature=temperature,
            stream=stream,
            top_k=generator.top_k if is_cut else 0,
            top_p=generator.top_p if is_cut else 1.0,
            min_p=generator.min_p if is_cut else 0.0,
            keep_sets=is_cut and generator.keep_sets,
            time_limit_s=generator.time_limit_s if stream == TRAIN_STREAM else None,
        )

    # Weights

    def _swap(self, version: int | None) -> bool:
        """Commit `version`, if one is staged, where the mode allows it: at once in flight, or when nobody spans it."""
        if version is None:
            if self.spans.state is not None and not self.engine.num_live:
                self._resume([])  # what was drained for gave way to a newer version, which may have failed to arrive
            return False
        if not self.backend.may_swap:
            self._resume([])  # an evaluation came while completions were being drained: it needs admission
            return False
        resumed: list[Request] = []
        if self.config.weight_update == "between_batches" and self.engine.num_live:
            self.engine.pause_admission(True)
            self.spans.state = "drain"
            limit = self.config.generator.segment_tokens
            if limit is None or self.drain_steps < limit:
                return False
            resumed = self.engine.export_live()
        with self.context.spans.span("swap", version=version):
            swap = self.weights.commit()  # a version that fails its probe ends the run, the old one still in place
            if swap is not None:
                self.engine.set_version(
                    swap.version,
                    kv_on_update=self.config.generator.kv_on_update,
                    max_kv_age=self.config.generator.max_kv_age,
                )
        self._resume(resumed)
        if swap is None:
            return False
        self.spans.version = swap.version
        self.context.spans.instant("swapped", version=swap.version)
        if self.together.is_leader:
            self.context.outputs["events"].put(
                Swapped(
                    replica=self.replica,
                    version=swap.version,
                    transfer_s=swap.transfer_s,
                    pause_s=swap.pause_s,
                    probe_error=swap.probe_error,
                )
            )
        return True

    def _resume(self, requests: list[Request]) -> None:
        self.engine.pause_admission(False)
        self.spans.state = None
        self.drain_steps = 0
        if requests:
            self.engine.submit(requests)

    # Decoding

    def _decode(self) -> bool:
        is_draining = self.spans.state is not None
        if not self.backend.has_work():
            return False
        self.drain_steps += is_draining
        self._deliver(self.engine.step())
        return True

    def _deliver(self, finished: list[Finished]) -> None:
        self.together.note(finished)
        if finished:
            with self.context.spans.span("send"):
                for item in finished:
                    if item.request.stream == EVAL_STREAM:
                        self._send_evaluated(item)
                    else:
                        self._send(item)

    def _send(self, item: Finished) -> None:
        """One finished completion to its verifier, at once and alone (M2), and word of it to the controller."""
        prompt, remaining = self.prompts.pop(item.ordinal)
        is_settled = item.ordinal in self.settled_early
        if remaining > 1:
            self.prompts[item.ordinal] = (prompt, remaining - 1)
        else:
            self.settled_early.discard(item.ordinal)
        if self.unsettled is None:
            return
        completion = self._completion(item, prompt, "train")
        self.generated_tokens += completion.num_tokens
        if not is_settled:
            self.unsettled.add(completion)
        self.context.outputs["events"].put(
            CompletionFinished(
                ordinal=item.ordinal,
                sample=item.sample,
                replica=self.replica,
                num_tokens=completion.num_tokens,
                min_version=completion.min_version,
                max_version=completion.max_version,
                num_restored=self.restored.take(item.ordinal, item.sample),
            )
        )

    def _completion(self, item: Finished, prompt: Prompt, purpose: Purpose, eval_id: int = -1) -> Completion:
        segment = Segment(
            tokens=item.tokens,
            behaviour_logprobs=item.logprobs,
            version_spans=item.version_spans,
            kept_tokens=None if item.kept is None else item.kept.tokens,
            kept_counts=None if item.kept is None else item.kept.counts,
        )
        return Completion(
            ordinal=item.ordinal,
            sample=item.sample,
            prompt=prompt,
            segments=(segment,),
            text=decode_text(self.tokenizer, self._scored(item.tokens), self.stop_ids),
            finish_reason=item.finish_reason,
            replica=self.replica,
            purpose=purpose,
            eval_id=eval_id,
            started_s=item.started_s,
            finished_s=item.finished_s,
        )

    def _scored(self, tokens: np.ndarray) -> np.ndarray:
        """What rewards see of a completion's tokens."""
        rewards = self.config.rewards
        return truncate_at_token(tokens, rewards.truncate_token, after=rewards.truncate_after)

    # Evaluation

    def _evaluate(self) -> bool:
        """Start the oldest evaluation, or do one decode step of it where it has an engine of its own."""
        if not self.jobs:
            return False
        job = self.jobs[0]
        if job.engine is None:
            with self.context.spans.span("evaluate"):
                job.engine = self._start_evaluation(job)
            return True
        if job.engine is self.engine:
            return False  # it shares the steps of training
        self._deliver(job.engine.step())
        return True

    def _start_evaluation(self, job: EvalJob) -> GenerationEngine:
        engine = self.backend.evaluation_engine(
            job.pin, Labelled(self.context.spans, version=job.pin.version, state="evaluate")
        )
        engine.submit(
            [
                self._request(i, 0, prompt, job.request.temperature, stream=EVAL_STREAM)
                for i, prompt in enumerate(job.request.prompts)
            ]
        )
        return engine

    def _send_evaluated(self, item: Finished) -> None:
        job = self.jobs[0]  # one evaluation runs at a time
        assert {span.version for span in item.version_spans} == {job.pin.version}, "not of the version it is pinned to"
        if self.unsettled is not None:
            completion = self._completion(item, job.request.prompts[item.ordinal], "eval", job.request.eval_id)
            self.unsettled.add(completion)
        job.remaining -= 1
        if not job.remaining:
            self.jobs.popleft()
            self.backend.unpin(job.pin)

    def _count(self, *, is_last: bool = False) -> None:
        now_s = self.context.clock.now_s()
        if is_last or now_s - self.counted_s >= COUNTERS_EVERY_S:
            self.counted_s = now_s
            values = {
                "generated_tokens": float(self.generated_tokens),
                "live": float(self.engine.num_live),
                RE_PREFILLED: float(self.engine.num_re_prefilled),
            }
            self.context.outputs["events"].put(Counters(executor=self.context.name, values=values))
            self.context.spans.counter("tokens", **{RE_PREFILLED: values[RE_PREFILLED]})


def training_seed(config: RunConfig, replica: int) -> int:
    """The seed of the noise of `replica`'s training samples: the run's, or one per replica as in the original (N)."""
    return config.seed + (replica * SEEDS_APART if config.generator.seeds == "per_replica" else 0)


def decode_text(tokenizer: PreTrainedTokenizerBase, tokens: np.ndarray, stop_ids: list[int]) -> str:
    """The completion as text, without its stop token and other special tokens."""
    ids = tokens.tolist()
    if ids and ids[-1] in stop_ids:
        ids = ids[:-1]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert isinstance(text, str)
    return text
