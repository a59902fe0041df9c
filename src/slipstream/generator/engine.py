"""Continuous batching over fixed decode slots: prompts in, completions out, weights replaced between two steps.

One step admits waiting requests into free slots, prefills their prompts (once per prompt, shared by its group), decodes
ONE token for every live slot, samples, and retires what finished. The engine knows nothing of processes, channels or
configuration; whoever drives it flips the model's weights between two steps and says so with `set_version`.

The prefill covers all tokens but the last; that one is the first the slot decodes. So every sampled token comes out of
the same decode path, a completion's first one and a resumed one's included, and a prefix is keys and values only.

A completion's tokens and logprobs depend, bit for bit, on nothing but its request and the weights: not on its
neighbours, slot, or the number of slots (conditions and evidence: `kv_cache.py`, `noise.py`). A resumed completion
continues with the same noise; its prefilled keys differ from decoded ones in rounding only.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from slipstream.core.clock import Clock, WallClock
from slipstream.core.errors import ConfigError, NonFiniteError
from slipstream.core.types import VersionSpan
from slipstream.generator.kv_cache import (
    ROW_MULTIPLE,
    DecodeAttention,
    PrefillAttention,
    PrefixKV,
    SlotKV,
    round_up,
)
from slipstream.generator.noise import noise_keys, uniform
from slipstream.generator.requests import Finished, Request, Resume, check_request, extended_spans
from slipstream.generator.sampler import sample_tokens
from slipstream.models.transformer import Transformer


class StateSpans(Protocol):
    """The part of `core.executor.Spans` the engine uses, to tell prefill from decode time."""

    def span(self, state: str) -> AbstractContextManager[None]: ...


class _NoSpans:
    def span(self, state: str) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()


@dataclass(frozen=True, eq=False)
class _Waiting:
    request: Request
    context: np.ndarray  # int32: the tokens to prefill, all known ones but the last
    last_token: int
    prefix_key: bytes


@dataclass(eq=False)
class _Live:
    """The part of a slot's state that no step touches."""

    request: Request
    version_spans: list[VersionSpan]
    started_s: float


class Engine:
    """Decodes up to `num_slots` completions at a time with `model` (see the module's docstring).

    `max_len` bounds prompt + completion in tokens; `prefill_tokens` bounds the padded prompt tokens of one step, so
    that admission never stalls decoding for long (a longer prompt is prefilled alone). `seed` is the run's.

    The driver's loop: `submit` whenever there are requests; `step` until `is_idle`; between two steps `set_version`,
    `pause_admission` or `export_live`.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        num_slots: int,
        max_len: int,
        seed: int,
        stop_token_ids: Sequence[int],
        prefill_tokens: int = 2048,
        version: int = 0,
        spans: StateSpans | None = None,
        clock: Clock | None = None,
    ) -> None:
        config = model.config
        if num_slots < 1:
            raise ConfigError("the engine needs at least one slot", got=num_slots)
        if max_len > config.max_positions:
            raise ConfigError(
                "max_len exceeds the positions the model was built for", got=max_len, allowed=config.max_positions
            )
        self.version = version
        self.max_len = max_len
        self.num_generated_tokens = 0
        self._model = model
        self._seed = seed
        self._num_slots = num_slots
        self._prefill_tokens = prefill_tokens
        self._spans = spans if spans is not None else _NoSpans()
        self._clock = clock if clock is not None else WallClock()
        self._is_stop = np.zeros(config.vocab_size, dtype=bool)
        outside = [token for token in stop_token_ids if not 0 <= token < config.vocab_size]
        if outside:
            raise ConfigError("stop tokens outside the vocabulary", got=outside, allowed=f"0..{config.vocab_size - 1}")
        self._is_stop[list(stop_token_ids)] = True
        self._is_paused = False
        self._waiting: deque[_Waiting] = deque()
        self._num_waiting_for: Counter[bytes] = Counter()
        self._prefixes: dict[bytes, PrefixKV] = {}
        self._kv = SlotKV(
            num_layers=config.num_layers,
            num_slots=num_slots,
            num_kv_heads=config.num_kv_heads,
            max_len=max_len,
            head_dim=config.head_dim,
        )
        self._attention = DecodeAttention(self._kv, num_heads=config.num_heads)
        # Per slot, numpy so that a step costs few small operations. Slots that are not live decode token 0 at position
        # 0 as padding; nobody reads what they produce.
        slots = self._kv.num_slots
        self._live: list[_Live | None] = [None] * slots
        self._is_live = np.zeros(slots, dtype=bool)
        self._input_tokens = np.zeros(slots, dtype=np.int64)
        self._positions = np.zeros(slots, dtype=np.int64)  # of the input token = number of tokens with stored KV
        self._num_new = np.zeros(slots, dtype=np.int64)
        self._max_new = np.ones(slots, dtype=np.int64)
        self._noise_keys = np.zeros(slots, dtype=np.uint64)
        self._temperatures = np.ones(slots, dtype=np.float32)
        self._new_tokens = np.zeros((slots, max_len), dtype=np.int32)
        self._new_logprobs = np.zeros((slots, max_len), dtype=np.float32)
        self._input_tokens_tensor = torch.from_numpy(self._input_tokens)
        self._positions_tensor = torch.from_numpy(self._positions)

    @property
    def num_live(self) -> int:
        return int(np.count_nonzero(self._is_live))

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_free_slots(self) -> int:
        return self._num_slots - self.num_live

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self._is_live.any()

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue `requests` in this order; resumed ones go before everything that has not started.

        Raises ConfigError for a request that can never fit, before queueing any.
        """
        for request in requests:
            check_request(request, max_len=self.max_len)
        resumed: list[_Waiting] = []
        for request in requests:
            known = request.prompt_tokens.astype(np.int32)
            if request.resume is not None:
                known = np.concatenate([known, request.resume.tokens.astype(np.int32)])
            entry = _Waiting(request, known[:-1], int(known[-1]), known[:-1].tobytes())
            self._num_waiting_for[entry.prefix_key] += 1
            if request.resume is None:
                self._waiting.append(entry)
            else:
                resumed.append(entry)
        self._waiting.extendleft(reversed(resumed))

    def pause_admission(self, is_paused: bool) -> None:
        """While paused no waiting request starts; live ones go on. Draining before a swap between batches."""
        self._is_paused = is_paused

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Admit and prefill within the budget, decode one token per live slot, return what finished."""
        self._admit()
        if not self._is_live.any():
            return []
        with self._spans.span("decode"):
            if not self._waiting or self._is_paused:
                self._compact()
            return self._decode()

    @torch.inference_mode()
    def set_version(self, version: int, *, recompute_kv: bool = False) -> None:
        """The model's weights are `version` from here on; call between two steps, after they were replaced.

        Live sequences keep the keys and values the old weights made, unless `recompute_kv` prefills them again (their
        tokens and behaviour logprobs stay). Shared prefixes that no slot holds yet are forgotten in both cases.
        """
        self.version = version
        self._prefixes.clear()
        slots = np.flatnonzero(self._is_live).tolist()
        for slot in slots:
            live = self._live_at(slot)
            live.version_spans = extended_spans(live.version_spans, start=int(self._num_new[slot]), version=version)
        if recompute_kv:
            with self._spans.span("prefill"):
                self._recompute(slots)

    def export_live(self) -> list[Request]:
        """Take every live completion out of its slot, resumable by `submit` here or elsewhere; oldest first."""
        exported = []
        for slot in np.flatnonzero(self._is_live).tolist():
            live = self._live_at(slot)
            num_new = int(self._num_new[slot])
            resume = Resume(
                tokens=self._new_tokens[slot, :num_new].copy(),
                logprobs=self._new_logprobs[slot, :num_new].copy(),
                version_spans=tuple(span for span in live.version_spans if span.start < num_new),
                started_s=live.started_s,
            )
            exported.append(live.request.resumed_with(resume))
            self._free(slot)
        return sorted(exported, key=lambda request: (request.stream, request.ordinal, request.sample))

    def _live_at(self, slot: int) -> _Live:
        live = self._live[slot]
        assert live is not None, f"slot {slot} is not live"
        return live

    def _free(self, slot: int) -> None:
        self._live[slot] = None
        self._is_live[slot] = False
        self._input_tokens[slot] = 0
        self._positions[slot] = 0
        self._temperatures[slot] = 1.0

    def _admit(self) -> None:
        """Move waiting requests into free slots, lowest slot and oldest request first."""
        if self._is_paused or not self._waiting:
            return
        placements: list[tuple[int, _Waiting]] = []
        missing: dict[bytes, np.ndarray] = {}
        num_tokens = 0
        for slot in np.flatnonzero(~self._is_live[: self._num_slots]).tolist():
            if not self._waiting:
                break
            entry = self._waiting[0]
            if len(entry.context) > 0 and entry.prefix_key not in self._prefixes and entry.prefix_key not in missing:
                cost = round_up(len(entry.context), ROW_MULTIPLE)
                if missing and num_tokens + cost > self._prefill_tokens:
                    break
                num_tokens += cost
                missing[entry.prefix_key] = entry.context
            placements.append((slot, self._waiting.popleft()))
        if not placements:
            return
        with self._spans.span("prefill"):
            self._prefixes.update(zip(missing, self._prefill(list(missing.values())), strict=True))
            self._fill(placements)
            now_s = self._clock.now_s()
            for slot, entry in placements:
                self._start(slot, entry, now_s)

    def _fill(self, placements: list[tuple[int, _Waiting]]) -> None:
        """Write the prefixes and numbers of all placements, slots together where they share a value or an array."""
        slots_of: dict[bytes, list[int]] = {}
        for slot, entry in placements:
            slots_of.setdefault(entry.prefix_key, []).append(slot)
        for key, sharing in slots_of.items():
            if key:
                self._kv.write_prefix(sharing, self._prefixes[key])
            self._num_waiting_for[key] -= len(sharing)
            if self._num_waiting_for[key] == 0:
                del self._num_waiting_for[key]
                self._prefixes.pop(key, None)
        slots = [slot for slot, _ in placements]
        requests = [entry.request for _, entry in placements]
        lengths = [len(entry.context) for _, entry in placements]
        self._attention.open_slots(slots, lengths)
        self._positions[slots] = lengths
        self._input_tokens[slots] = [entry.last_token for _, entry in placements]
        self._max_new[slots] = [request.max_new_tokens for request in requests]
        self._temperatures[slots] = [request.temperature for request in requests]
        self._noise_keys[slots] = noise_keys(self._seed, [(r.stream, r.ordinal, r.sample) for r in requests])
        self._is_live[slots] = True

    def _start(self, slot: int, entry: _Waiting, now_s: float) -> None:
        request, resume = entry.request, entry.request.resume
        num_new = 0
        live = _Live(request, [], now_s)
        if resume is not None:
            num_new = len(resume.tokens)
            self._new_tokens[slot, :num_new] = resume.tokens
            self._new_logprobs[slot, :num_new] = resume.logprobs
            live = _Live(request, list(resume.version_spans), resume.started_s)
        live.version_spans = extended_spans(live.version_spans, start=num_new, version=self.version)
        self._live[slot] = live
        self._num_new[slot] = num_new

    def _prefill(self, contexts: list[np.ndarray]) -> list[PrefixKV]:
        """Keys and values of every context (int32 [n]) under the present weights, each padded to a multiple of 8."""
        if not contexts:
            return []
        order = sorted(range(len(contexts)), key=lambda i: len(contexts[i]))
        padded_lengths = [round_up(len(contexts[i]), ROW_MULTIPLE) for i in order]
        tokens = np.zeros(sum(padded_lengths), dtype=np.int64)
        positions = np.zeros(sum(padded_lengths), dtype=np.int64)
        start = 0
        for i, padded in zip(order, padded_lengths, strict=True):
            length = len(contexts[i])
            tokens[start : start + length] = contexts[i]
            positions[start : start + length] = np.arange(length)
            start += padded
        config = self._model.config
        attention = PrefillAttention(
            padded_lengths,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )
        self._model.prefill(torch.from_numpy(tokens), torch.from_numpy(positions), attention)
        prefixes = {i: attention.prefix(k, len(contexts[i])) for k, i in enumerate(order)}
        return [prefixes[i] for i in range(len(contexts))]

    def _recompute(self, slots: list[int]) -> None:
        """Replace the keys and values of `slots` by what the present weights make of their tokens."""
        while slots:
            chunk: list[int] = []
            contexts: list[np.ndarray] = []
            num_tokens = 0
            while slots and (not chunk or num_tokens + int(self._positions[slots[0]]) <= self._prefill_tokens):
                slot = slots.pop(0)
                num_known = int(self._positions[slot])
                known = np.concatenate([self._live_at(slot).request.prompt_tokens, self._new_tokens[slot]])
                if num_known > 0:
                    chunk.append(slot)
                    contexts.append(known[:num_known])
                    num_tokens += round_up(num_known, ROW_MULTIPLE)
            for slot, prefix in zip(chunk, self._prefill(contexts), strict=True):
                self._kv.write_prefix([slot], prefix)

    def _compact(self) -> None:
        """Move live slots down so that they fill the smallest multiple of 8; a smaller batch is a faster step."""
        target = round_up(self.num_live, ROW_MULTIPLE)
        sources = (target + np.flatnonzero(self._is_live[target:])).tolist()
        if not sources:
            return
        destinations = np.flatnonzero(~self._is_live[:target])[: len(sources)].tolist()
        self._kv.move(sources, destinations, int(self._positions[sources].max()))
        for state in (
            self._is_live,
            self._input_tokens,
            self._positions,
            self._num_new,
            self._max_new,
            self._noise_keys,
            self._temperatures,
            self._new_tokens,
            self._new_logprobs,
        ):
            state[destinations] = state[sources]
        self._attention.open_slots(destinations, self._positions[destinations].tolist())
        for source, destination in zip(sources, destinations, strict=True):
            self._live[destination] = self._live[source]
            self._free(source)

    def _decode(self) -> list[Finished]:
        """One token for every live slot; the others up to the next multiple of 8 are padding."""
        live_slots = np.flatnonzero(self._is_live)
        num_rows = round_up(int(live_slots[-1]) + 1, ROW_MULTIPLE)
        positions = self._positions_tensor[:num_rows]
        self._attention.prepare(positions, self._attention.bucket(int(self._positions.max()) + 1))
        hidden = self._model(self._input_tokens_tensor[:num_rows], positions, self._attention)
        uniforms = uniform(self._noise_keys[:num_rows], self._num_new[:num_rows])
        sampled = sample_tokens(self._model.logits(hidden), self._temperatures[:num_rows], uniforms)
        tokens, logprobs = (values.numpy()[live_slots] for values in sampled)
        if not np.isfinite(logprobs).all():
            raise NonFiniteError(f"the policy of version {self.version} gave a logprob that is not finite")

        num_new = self._num_new[live_slots]
        self._new_tokens[live_slots, num_new] = tokens
        self._new_logprobs[live_slots, num_new] = logprobs
        self._num_new[live_slots] = num_new + 1
        self._positions[live_slots] += 1
        self._input_tokens[live_slots] = tokens
        self.num_generated_tokens += len(live_slots)
        is_stop = self._is_stop[tokens]
        done = live_slots[is_stop | (num_new + 1 == self._max_new[live_slots])]
        if len(done) == 0:
            return []
        now_s = self._clock.now_s()
        return [self._retire(slot, now_s) for slot in done.tolist()]

    def _retire(self, slot: int, now_s: float) -> Finished:
        live = self._live_at(slot)
        tokens = self._new_tokens[slot, : self._num_new[slot]].copy()
        finished = Finished(
            request=live.request,
            tokens=tokens,
            logprobs=self._new_logprobs[slot, : self._num_new[slot]].copy(),
            version_spans=tuple(live.version_spans),
            finish_reason="stop" if self._is_stop[tokens[-1]] else "length",
            started_s=live.started_s,
            finished_s=now_s,
        )
        self._free(slot)
        return finished
