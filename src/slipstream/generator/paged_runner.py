"""The runner for CUDA: keys and values in pages, and the whole decode step as one function of device memory.

    input tokens, positions -> model -> head -> sampling with noise made on the device -> tokens, logprobs
    and: position and index + 1, the sampled token is the next input

The host decides before a step which rows take part, how many blocks of their tables are looked at and how they are
sampled, sends in one piece block tables that changed and what opened rows begin with, the pages to copy for them too,
and reads one packed tensor after it. Between two steps nothing else crosses. A step is launched before the one before
it is read: the host is at work while the device is. It then has one token too many for a row that has ended, which
nobody reads and whose place is written anew, and none for a row that was opened meanwhile. All that the host does goes
into one stream, behind the step that runs: what it frees, that step may still use. On CUDA the step is captured in
graphs, one per shape (`step_graphs.py`); on a CPU the same function runs as it is, which is how the tests reach it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.core.clock import WallClock
from slipstream.core.errors import ConfigError
from slipstream.core.packed import sent
from slipstream.generator.fused_decode import default_fused, fused_forward
from slipstream.generator.fused_sampling import default_fused_sampling, sample
from slipstream.generator.paged_attention import (
    AttendPages,
    PagedDecodeAttention,
    PagedPrefillAttention,
    default_attend,
)
from slipstream.generator.paged_kv import PAGE_SIZE, PagedKV
from slipstream.generator.pages import PageCopies, PagedPrefix, PageTable, pages_of
from slipstream.generator.runner import CLOSED, Chunk, Decoded, Prefix, RowStates, check_room
from slipstream.generator.sampler import SamplingPlan, SamplingRows
from slipstream.generator.stage_ticks import packed, stream_weight, unpacked
from slipstream.generator.step_graphs import StepGraphs
from slipstream.models.config import TransformerConfig
from slipstream.models.transformer import Transformer

SMALLEST_CONTEXT = 256
"""Tokens of the smallest context bucket; the others are its doubles. A bucket bounds the blocks a step looks at."""


def row_buckets(num_rows: int) -> list[int]:
    """Rows that a step may have: 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, ..., `num_rows`."""
    buckets = [count for power in range(4, 20) for count in (2**power, 3 * 2 ** (power - 1))]
    return [*(count for count in [1, 2, 4, 8, *buckets] if count < num_rows), num_rows]


def context_buckets(max_len: int) -> list[int]:
    """Tokens that the longest row of a step may have: 256, 512, 1024, ..., `max_len`."""
    doubles = (SMALLEST_CONTEXT << power for power in range(32))
    return [*(tokens for tokens in doubles if tokens < max_len), max_len]


@dataclass(frozen=True)
class StepShape:
    """The shape that a captured step is made for: its rows, the blocks of each that it looks at, and how it samples."""

    num_rows: int
    num_blocks: int
    plan: SamplingPlan


class _DeviceRows:
    """The state of all rows on the device, in two tensors that never move; every name is a view of one number per row.

    Closed rows decode token 0 at position 0 as padding; `advance` is 1 for open rows, 0 for them. Rows that are opened,
    closed and moved between two steps are noted in `host` int64 [WIDTH, rows]: where a row's numbers come from, the row
    itself to begin with or -1, then integers and real numbers for the latter. `apply` makes it so on the device, where
    `staged` [WIDTH * rows] has what `host` had.
    """

    INTEGERS = ("input_tokens", "positions", "num_new", "noise_keys", "top_k", "advance")  # int64
    REALS = ("temperatures", "top_p", "min_p")  # float32, and one unused: two fill an int64
    WIDTH = 1 + len(INTEGERS) + (len(REALS) + 1) // 2

    def __init__(self, host: np.ndarray, staged: Tensor) -> None:
        num_rows, self._first_real = host.shape[1], 1 + len(self.INTEGERS)
        self._host, self._host_reals = host, host[self._first_real :].reshape(-1).view(np.float32).reshape(-1, num_rows)
        self._staged = staged[: self._first_real * num_rows].view(-1, num_rows)
        self._staged_reals = staged[self._first_real * num_rows :].view(torch.float32).view(-1, num_rows)
        self._integers, self._reals = torch.zeros_like(self._staged[1:]), torch.zeros_like(self._staged_reals)
        self.input_tokens, self.positions, self.num_new, self.noise_keys, self.top_k, self.advance = self._integers
        self.temperatures, self.top_p, self.min_p, _ = self._reals
        self.close(range(num_rows))

    def open(self, rows: Sequence[int], states: RowStates) -> None:
        self._give(rows, vars(states) | {"noise_keys": states.noise_keys.view(np.int64), "advance": 1})

    def close(self, rows: Sequence[int]) -> None:
        self._give(rows, vars(CLOSED) | {"noise_keys": 0, "advance": 0})

    def move(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        for noted in (self._host[: self._first_real], self._host_reals):
            noted[:, destinations] = noted[:, sources]
        self.close(sources)

    def _give(self, rows: Sequence[int], values: Mapping[str, Any]) -> None:
        self._host[0, rows] = -1
        for place, name in enumerate(self.INTEGERS, 1):
            self._host[place, rows] = values[name]
        for place, name in enumerate(self.REALS):
            self._host_reals[place, rows] = values[name]
        self.is_changed = True

    def apply(self) -> None:
        """Bring the rows' numbers up to date, from what was staged."""
        source = self._staged[0]
        for own, given in ((self._integers, self._staged[1:]), (self._reals, self._staged_reals)):
            own.copy_(torch.where(source < 0, given, own.index_select(1, source.clamp(min=0))))

    def begin(self) -> None:
        """Note from here on, if all is applied that was noted before; to be called when the device has read it."""
        if not self.is_changed:
            self._host[0] = np.arange(self._host.shape[1])


@dataclass(frozen=True, eq=False)
class _Launched:
    """A step under way: its output on the device, the place in it of each row or -1, and what its rows were given."""

    output: Tensor
    places: np.ndarray  # int64 [rows]
    inputs: Tensor  # int64 [rows]


def pages_for(
    config: TransformerConfig,
    num_rows: int,
    max_len: int,
    *,
    kv_bytes: int | None,
    parked_tokens: int | None,
    kv_dtype: torch.dtype,
    num_layers: int | None = None,
) -> int:
    """Return the pages that rows of `max_len` tokens need, and parked ones, or as many as `kv_bytes` have room for.

    `num_layers`: those that lie here; None: all of the model.
    """
    num_pages = (num_rows + 1) * (pages_of(max_len, PAGE_SIZE) + 1)
    num_pages += num_pages if parked_tokens is None else pages_of(parked_tokens, PAGE_SIZE)
    if kv_bytes is None:
        return num_pages
    page_bytes = PagedKV.bytes_per_page(
        num_layers=num_layers or config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=kv_dtype,
    )
    most = kv_bytes // page_bytes - 1
    return most if parked_tokens is None else min(num_pages, most)


def check_current(device: torch.device) -> None:
    """Raise ConfigError for a CUDA device that is not the current one."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        what = "kernels and graphs run on the current CUDA device, and the model lies on another"
        allowed = f"cuda:{torch.cuda.current_device()}"
        raise ConfigError(what, got=str(device), allowed=allowed, hint="call torch.cuda.set_device first")


class PagedRunner:
    """Implements `runner.Runner` with pages (`pages.py`) and captured steps, for a model on any device and precision.

    Every row has room for `max_len` tokens, and `parked_tokens` more have room (None: all that `kv_bytes` allow, or as
    many again without), unless `num_pages` says how much there is or `kv_bytes` bounds it. New weights must be copied
    into the tensors that the model has: on CUDA captured steps read those, and a model whose tensors have moved raises
    WeightSyncError. Nothing here is derived from weights. `captures` False runs every step as it is on CUDA too, to
    look for what a graph hides. `looks_ahead`: steps are launched ahead; None: on CUDA. `fused`: layers run in
    few kernels of Triton (`fused_decode.py`); None: where they can. `fused_sampling`: so does the sampler, for plans
    that cut no row (`fused_sampling.py`); None: where an example shows that it is right.
    """

    joins_prefill = False  # a captured step has the shape of its rows

    def __init__(
        self,
        model: Transformer,
        *,
        num_rows: int,
        max_len: int,
        num_pages: int | None = None,
        kv_bytes: int | None = None,
        parked_tokens: int | None = 0,
        attend: AttendPages | None = None,
        captures: bool = True,
        looks_ahead: bool | None = None,
        fused: bool | None = None,
        fused_sampling: bool | None = None,
        records_routes: bool = False,
    ) -> None:
        config = model.config
        weight = stream_weight(model)
        check_room(config, num_rows=num_rows, max_len=max_len)
        if num_pages is not None and kv_bytes is not None:
            raise ConfigError("the memory for keys and values is given twice", got="num_pages and kv_bytes")
        self.num_rows, self.max_len = num_rows, max_len
        self._model, self._device = model, weight.device
        check_current(self._device)
        if num_pages is None:
            num_pages = pages_for(
                config, num_rows, max_len, kv_bytes=kv_bytes, parked_tokens=parked_tokens, kv_dtype=weight.dtype
            )
        self._pages = PageTable(num_pages=num_pages, page_size=PAGE_SIZE, num_rows=num_rows, max_len=max_len)
        self._kv = PagedKV(
            num_layers=config.num_layers,
            num_pages=num_pages,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=weight.dtype,
            device=self._device,
            recorded=(config.experts_per_token, config.num_experts) if records_routes else None,
        )
        self._attend = default_attend(self._device) if attend is None else attend
        is_fused = default_fused(model, self._device) if fused is None else fused
        self._forward = partial(fused_forward, model) if is_fused else model
        self._samples_fused = default_fused_sampling(model, self._device) if fused_sampling is None else fused_sampling
        self._graphs = StepGraphs(model, self._device, captures=captures)
        self._looks_ahead = self._device.type == "cuda" if looks_ahead is None else looks_ahead
        self._open_staging()
        self._row_buckets = np.array(row_buckets(num_rows))
        self._context_buckets = np.array(context_buckets(max_len))
        self._host_rows = RowStates.closed(num_rows)  # how open rows are sampled, for the plan
        self._plan: SamplingPlan | None = None

    def _open_staging(self) -> None:
        """Open one piece of memory on the host, and one on the device: rows' numbers, pages to copy, block tables."""
        self._ahead: _Launched | None = None
        self._arrived: Any = torch.cuda.Event() if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._host_outputs: dict[torch.Size, Tensor] = {}
        for_rows, blocks = _DeviceRows.WIDTH * self.num_rows, self._pages.blocks
        copied = for_rows + 2 * self.num_rows
        start = copied + copied % 2  # of the tables: a multiple of 16 bytes
        self._host = torch.from_numpy(np.zeros(start + -(-blocks.size // 2), dtype=np.int64))
        if self._device.type == "cuda":
            self._host = self._host.pin_memory()  # read by the device by itself
        host, self._staged = self._host.numpy(), torch.zeros(self._host.shape, dtype=torch.int64, device=self._device)
        self._rows = _DeviceRows(host[:for_rows].reshape(_DeviceRows.WIDTH, -1), self._staged[:for_rows])
        self._copies = PageCopies([], [])  # for rows that were opened since the last upload, one page each at most
        self._host_copies = host[for_rows:copied].reshape(2, -1)
        self._staged_copies = self._staged[for_rows:copied].view(2, -1)
        self._pages.blocks = host[start:].view(np.int32)[: blocks.size].reshape(blocks.shape)
        self._pages.blocks[:] = blocks
        self._blocks = self._staged[start:].view(torch.int32)[: blocks.size].view(blocks.shape)

    @property
    def num_free_pages(self) -> int:
        return self._pages.num_free

    @property
    def num_graphs(self) -> int:
        """Steps captured so far; 0 where there is no CUDA."""
        return len(self._graphs)

    # Prefixes

    def open_prefix(self, num_tokens: int) -> PagedPrefix | None:
        return self._pages.open_prefix(num_tokens)

    def extend_prefix(self, prefix: Prefix, num_tokens: int) -> PagedPrefix | None:
        return self._pages.extend_prefix(own_prefix(prefix), num_tokens)

    def share_prefix(self, prefix: Prefix, num_shared: int, num_tokens: int) -> tuple[PagedPrefix, int] | None:
        found = self._pages.share_prefix(own_prefix(prefix), num_shared, num_tokens)
        return None if found is None else (found, num_shared - num_shared % PAGE_SIZE)

    @torch.inference_mode()
    def prefill(self, chunks: Sequence[Chunk]) -> None:
        self._graphs.check_addresses()
        self._copy_now()
        self._model.prefill(*pass_over(chunks, self._pages, self._kv))

    def close_prefix(self, prefix: Prefix) -> None:
        self._pages.close_prefix(own_prefix(prefix))

    # Rows

    @torch.inference_mode()
    def open_rows(self, rows: Sequence[int], prefix: Prefix | None, states: RowStates) -> bool:
        copies = self._pages.open_rows(rows, None if prefix is None else own_prefix(prefix))
        if copies is None:
            return False
        assert (self._pages.lengths[rows] == states.positions).all(), "rows begin where their prefix ends"
        for noted, more in zip(self._copies, copies, strict=True):
            noted += more
        self._rows.open(rows, states)
        self._host_rows.put(rows, states)
        self._plan = None
        return True

    @torch.inference_mode()
    def close_rows(self, rows: Sequence[int]) -> None:
        if not rows:
            return
        self._copy_now()
        self._pages.close_rows(rows)
        self._forget(rows)

    def _copy_now(self) -> None:
        """Make the copies that the next step would begin with: pages are about to change hands, or to be read."""
        if self._copies.sources:
            self._kv.copy_pages(*self._copies)
            self._copies = PageCopies([], [])

    def _forget(self, rows: Sequence[int]) -> None:
        self._rows.close(rows)
        self._plan = None
        if self._ahead is not None:
            self._ahead.places[rows] = -1

    @torch.inference_mode()
    def park_row(self, row: int) -> PagedPrefix:
        self._copy_now()
        prefix = self._pages.park_row(row)
        self._forget([row])
        return prefix

    @torch.inference_mode()
    def move_rows(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        if not sources:
            return
        self._pages.move_rows(sources, destinations)
        self._rows.move(sources, destinations)
        self._host_rows.put(destinations, self._host_rows.take(sources))
        if self._ahead is not None:
            self._ahead.places[destinations] = self._ahead.places[sources]
            self._ahead.places[sources] = -1

    def rows_without_room(self) -> list[int]:
        return self._pages.grow()

    @torch.inference_mode()
    def settle(self) -> None:
        """Rows are again where they were before the step that was launched ahead; its keys are written anew."""
        if self._ahead is not None:
            self._rows.input_tokens.copy_(self._ahead.inputs)
            self._rows.positions.sub_(self._rows.advance)
            self._rows.num_new.sub_(self._rows.advance)
            self._ahead = None

    @torch.inference_mode()
    def routes(self, row: int) -> np.ndarray | None:
        if (routes := self._kv.routes) is None:
            return None
        self._copy_now()
        places = np.arange(int(self._pages.lengths[row]))
        slots = self._pages.blocks[row][places // PAGE_SIZE].astype(np.int64) * PAGE_SIZE + places % PAGE_SIZE
        found = routes.flatten(1, 2).index_select(1, torch.from_numpy(slots).to(self._device))
        return found.transpose(0, 1).cpu().numpy()

    # Decoding

    @torch.inference_mode()
    def decode(self, num_rows: int, chunks: Sequence[Chunk] = ()) -> Decoded:
        assert not chunks, "prefill has passes of its own"
        pages = self._pages
        assert not pages.is_open[num_rows:].any(), f"a row from {num_rows} on is open"
        step, self._ahead = self._ahead, None
        if step is None or (step.places < 0).all():
            step = self._launch(num_rows)
        host = self._copied(step.output)
        is_new = step.places >= 0
        pages.advance(is_new)
        if self._looks_ahead and not pages.grow():
            self._ahead = self._launch(num_rows)
        self._wait()
        self._rows.begin()
        return unpacked(host.numpy()[step.places[:num_rows]], is_new[:num_rows])

    def _launch(self, num_rows: int) -> _Launched:
        """Start a step of the open rows as they are now, all of which have room."""
        pages = self._pages
        pages.expect_room()
        if self._plan is None:
            self._plan = SamplingPlan.of(**self._host_rows.sampling, is_open=pages.is_open)
        self._upload()
        inputs = self._rows.input_tokens.clone() if self._looks_ahead else self._rows.input_tokens
        output = self._run(self._shape(num_rows, int(pages.lengths.max()) + 1, self._plan))
        return _Launched(output, np.where(pages.is_open, np.arange(self.num_rows), -1), inputs)

    @torch.inference_mode()
    def warm_up(
        self, plans: Sequence[SamplingPlan] = (SamplingPlan(),), *, most: float = math.inf, limit_s: float = math.inf
    ) -> None:
        """Capture the steps of all shapes for these plans, while no row is open; else each is when first needed.

        Those with the most rows come first, of these the longest: rows run in this order as a batch ends. Steps of all
        rows are always captured, the others up to `most` in all, none after `limit_s` seconds.
        """
        assert not self._pages.is_open.any(), "rows are open"
        until_s = WallClock().now_s() + limit_s
        self._upload()
        shapes = itertools.product(self._row_buckets[::-1], plans, self._context_buckets[::-1])
        for done, (num_rows, plan, num_tokens) in enumerate(shapes):
            if num_rows < self.num_rows and (done >= most or WallClock().now_s() >= until_s):
                break
            self._run(self._shape(int(num_rows), int(num_tokens), plan))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._rows.begin()

    def _shape(self, num_rows: int, num_tokens: int, plan: SamplingPlan) -> StepShape:
        """The smallest shape for `num_rows` rows, the longest of `num_tokens`."""
        rows, tokens = (
            int(buckets[np.searchsorted(buckets, needed)])
            for buckets, needed in ((self._row_buckets, num_rows), (self._context_buckets, num_tokens))
        )
        return StepShape(rows, pages_of(tokens, PAGE_SIZE), plan)

    def _run(self, shape: StepShape) -> Tensor:
        """Run a step of this shape."""
        return self._graphs.run(shape, partial(self._step, shape))

    def _upload(self) -> None:
        """Bring what has changed to the device, and make the copies of pages that opened rows wait for."""
        if self._pages.is_changed or self._rows.is_changed:
            num_copies = len(self._copies.sources)
            self._host_copies[:, :num_copies] = np.array(self._copies)
            self._staged.copy_(self._host, non_blocking=True)
            if num_copies:
                self._kv.copy_pages(*self._staged_copies[:, :num_copies])
                self._copies = PageCopies([], [])
            if self._rows.is_changed:
                self._rows.apply()
            self._pages.is_changed = self._rows.is_changed = False
        if self._device.type == "cuda":
            self._arrived.record()

    def _step(self, shape: StepShape) -> Tensor:
        """One token for each of the first rows: int32 [B, 2 + K], the token, the bits of its logprob, the kept set.

        Reads and writes device memory at fixed addresses, and nothing of the host's: this is what is captured.
        """
        state, rows = self._rows, slice(0, shape.num_rows)
        positions, advance = state.positions[rows], state.advance[rows]
        blocks = self._blocks[rows, : shape.num_blocks]
        pages = blocks.gather(1, (positions // PAGE_SIZE).unsqueeze(1)).squeeze(1).long()
        slots = pages * PAGE_SIZE + positions % PAGE_SIZE
        attention = PagedDecodeAttention(self._kv, self._attend, slots=slots, blocks=blocks, lengths=positions + 1)
        hidden = self._forward(state.input_tokens[rows], positions, attention)
        sampled = sample(
            self._model.logits(hidden),
            SamplingRows(state.temperatures[rows], state.top_k[rows], state.top_p[rows], state.min_p[rows]),
            state.noise_keys[rows],
            state.num_new[rows],
            shape.plan,
            fused=self._samples_fused,
        )
        torch.mul(sampled.tokens, advance, out=state.input_tokens[rows])
        positions.add_(advance)
        state.num_new[rows].add_(advance)
        return packed(sampled)

    def _copied(self, output: Tensor) -> Tensor:
        """A step's output on its way to the host, there behind `_wait`; the next step may overwrite it here."""
        if self._device.type != "cuda":
            return output.clone()
        host = self._host_outputs.get(output.shape)
        if host is None:
            host = torch.empty(output.shape, dtype=output.dtype, pin_memory=True)
            self._host_outputs[output.shape] = host
        host.copy_(output, non_blocking=True)
        self._arrived.record()
        return host

    def _wait(self) -> None:
        """Wait for the output that was copied last, and for the upload behind it: the host's memory is free again."""
        if self._device.type == "cuda":
            self._arrived.synchronize()


def pass_over(
    chunks: Sequence[Chunk], pages: PageTable, kv: PagedKV, *, goes_on: bool = False
) -> tuple[Tensor, Tensor, PagedPrefillAttention]:
    """Tokens and positions int64 [N] of `chunks`, in one pass, and their attention over `kv`."""
    device = kv.keys.device
    chunks = sorted(chunks, key=lambda chunk: chunk.start > 0)
    fresh = [len(chunk.tokens) for chunk in chunks if chunk.start == 0]
    stops = [chunk.start + len(chunk.tokens) for chunk in chunks]
    slots = [pages.slots(own_prefix(chunk.prefix), 0, stop) for chunk, stop in zip(chunks, stops, strict=True)]
    numbers = np.stack(
        [
            np.concatenate([chunk.tokens for chunk in chunks]).astype(np.int64),
            np.concatenate([np.arange(chunk.start, stop) for chunk, stop in zip(chunks, stops, strict=True)]),
            np.concatenate([seen[chunk.start :] for chunk, seen in zip(chunks, slots, strict=True)]),
        ]
    )
    tokens, positions, own_slots = sent(numbers, device)
    continued = [
        (len(chunk.tokens), sent(seen, device))
        for chunk, seen in zip(chunks[len(fresh) :], slots[len(fresh) :], strict=True)
    ]
    return (
        tokens,
        positions,
        PagedPrefillAttention(kv, slots=own_slots, fresh=fresh, continued=continued, goes_on=goes_on),
    )


def own_prefix(prefix: Prefix) -> PagedPrefix:
    if not isinstance(prefix, PagedPrefix):
        raise TypeError(f"a prefix of another runner: {type(prefix).__name__}")
    return prefix
