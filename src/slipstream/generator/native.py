"""Slipstream's own engine as the generator's backend: model, weights and decode loop in this process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from slipstream.algorithms.logprobs import probe_logprobs
from slipstream.core.clock import Clock
from slipstream.core.config import RunConfig
from slipstream.core.errors import ConfigError
from slipstream.core.rank_group import RankGroup
from slipstream.core.sections import GeneratorConfig
from slipstream.core.stage_sections import EvalConfig
from slipstream.generator.backend import Backend, Pin
from slipstream.generator.device import check_device, kv_bytes_beside, most_on_one, replica_device
from slipstream.generator.engine import PREFILL_CHUNK, Engine
from slipstream.generator.paged_runner import PagedRunner
from slipstream.generator.requests import StateSpans
from slipstream.generator.runner import ResidentVersions, RowStates, Runner
from slipstream.generator.sampler import SamplingPlan
from slipstream.generator.slot_runner import SlotRunner
from slipstream.generator.stage_ticks import probe_stages
from slipstream.generator.staged_pages import StagedPages
from slipstream.generator.staged_slots import StagedSlots
from slipstream.models.device import take_share
from slipstream.models.linear import Linear
from slipstream.models.lora import install
from slipstream.models.served import ServedWeights
from slipstream.models.sharded import Division, build_sharded_policy
from slipstream.models.tokenizer import Tokenizer
from slipstream.models.transformer import Transformer

MOST_CAPTURED, CAPTURE_LIMIT_S = 64, 20.0  # steps that an engine captures at its start; those of all rows in any case


def native_engine(
    model: Transformer,
    *,
    num_slots: int,
    max_len: int,
    seed: int,
    stop_token_ids: Sequence[int],
    prefill_tokens: int = 512,
    prefill_chunk: int = PREFILL_CHUNK,
    prefix_cache_tokens: int = 2048,
    parked_tokens: int | None = 0,
    kv_bytes: int | None = None,
    is_paged: bool | None = None,
    version: int = 0,
    spans: StateSpans | None = None,
    clock: Clock | None = None,
    residents: ResidentVersions | None = None,
    records_routes: bool = False,
    likely: Sequence[SamplingPlan] = (),
    runner: Runner | None = None,
) -> Engine:
    """An engine with the runner that suits the model's device. `max_len` bounds prompt + completion in tokens.

    `is_paged`: pages or slots; None: pages where the model is on CUDA. `kv_bytes` bounds the keys and values in pages;
    without, every slot has room for `max_len`, as it always has outside of pages, and `parked_tokens` besides.
    `residents`, the weights of `model`, keep versions side by side; slots only. `records_routes`: completions come with
    their experts. `likely`: steps in pages, of rows sampled so, are captured at once. `runner`: one that is there.
    """
    outside = [token for token in stop_token_ids if not 0 <= token < model.config.vocab_size]
    if outside:
        allowed = f"0..{model.config.vocab_size - 1}"
        raise ConfigError("stop tokens outside the vocabulary", got=outside, allowed=allowed)
    if runner is None and (model.cos.device.type == "cuda" if is_paged is None else is_paged):
        assert residents is None, "captured steps read one version, where it lies"
        runner = paged = PagedRunner(
            model,
            num_rows=num_slots,
            max_len=max_len,
            kv_bytes=kv_bytes,
            parked_tokens=parked_tokens,
            records_routes=records_routes,
        )
        paged.warm_up(likely, most=MOST_CAPTURED, limit_s=CAPTURE_LIMIT_S)
    if runner is None:
        runner = SlotRunner(
            model, num_rows=num_slots, max_len=max_len, residents=residents, records_routes=records_routes
        )
    return Engine(
        runner,
        seed=seed,
        stop_token_ids=stop_token_ids,
        prefill_tokens=prefill_tokens,
        prefill_chunk=prefill_chunk,
        prefix_cache_tokens=prefix_cache_tokens,
        parked_tokens=parked_tokens,
        version=version,
        spans=spans,
        clock=clock,
        residents=residents,
    )


def likely_plans(generator: GeneratorConfig) -> list[SamplingPlan]:
    """How a step is sampled in which all rows are those of training."""
    row = RowStates.closed(1)
    row.temperatures[:] = generator.temperature
    row.top_k[:], row.top_p[:], row.min_p[:] = generator.top_k, generator.top_p, generator.min_p
    row.keep_sets[:] = generator.keep_sets
    return [SamplingPlan.of(**row.sampling)]


def likely_evaluations(evaluations: EvalConfig) -> list[SamplingPlan]:
    """How the steps of a run's evaluations are sampled: each has one temperature, and cuts nothing."""
    temperatures = evaluations.temperatures
    rows = RowStates.closed(len(temperatures))
    rows.temperatures[:] = temperatures
    return list(dict.fromkeys(SamplingPlan.of(**rows.take([row]).sampling) for row in range(len(temperatures))))


def move_but_linear(model: nn.Module, device: torch.device) -> None:
    """Bring `model` to `device` except for linear layers, which `ServedWeights` is to replace by stored weights.

    It quantises them from where they are, so a GPU never holds them in float32.
    """
    for module in model.modules():
        if not isinstance(module, Linear):
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(parameter.detach().to(device)))
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, buffer.to(device))


class NativeBackend(Backend):
    """The policy, its flat weights and an engine over it.

    On the device that `config` gives `replica`: on CUDA weights lie in place and keys and values in pages. `is_paged`
    True has it so on a CPU as well, to try it. `parked_tokens` bounds what each of its engines keeps of episodes
    between their turns (None: no bound). `is_remote`: no other replica is counted on its GPU.

    On several ranks (`group`) this is one rank's part of all that, and the ranks call everything here that computes,
    `probe` and the steps of engines, at the same moments and in the same order (`lockstep.py`). So the probe text does
    not run while a version is staged, at a moment of each rank's own, but when it is committed, between two steps:
    decoding stops for as long as a prompt of its length takes.

    Rank = stage x generator.tensor_parallel + tensor-parallel rank. A stage has a part of the layers, their keys and
    values, and reads their boxes of a version alone. Its engines have a runner that passes rows from stage to stage
    (`stage_ticks.py`); on CUDA that captures no steps.
    """

    weights: ServedWeights

    def __init__(
        self,
        config: RunConfig,
        *,
        tokenizer: Tokenizer,
        seed: int,
        stop_token_ids: Sequence[int],
        spans: StateSpans,
        clock: Clock,
        replica: int = 0,
        is_paged: bool | None = None,
        group: RankGroup | None = None,
        parked_tokens: int | None = 0,
        is_remote: bool = False,
    ) -> None:
        check_device(config, local_world=None if group is None else group.local_world)
        self._group = RankGroup.alone() if group is None else group
        self.probes_prepared = self._group.world == 1
        self._stages, self._tensor = RankGroup.alone(), self._group
        if (stages := config.generator.pipeline_parallel) > 1:
            sizes = stages, config.generator.tensor_parallel
            _, self._stages, self._tensor = self._group.split(*sizes, timeout_s=config.deadline_s)
        self._config, self._stop_token_ids, self._clock = config, stop_token_ids, clock
        self._tokenizer, self._parked_tokens = tokenizer, parked_tokens
        num_gpus = torch.cuda.device_count()
        self._device = replica_device(config, replica, num_gpus, self._group.rank, is_remote=is_remote)
        self._is_first, self._is_remote = replica == 0, is_remote
        self._captures = self._device.type == "cuda" and self._group.world == 1  # likely steps, at the start
        self._is_paged = self._device.type == "cuda" if is_paged is None else is_paged
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # where this thread compiles, launches and captures
            take_share(config.generator.gpu_share, self._device)
        self._model = self._on_device(self._policy())
        precision = config.generator.precision
        self.num_versions = 1 if self._is_paged else config.resident_versions
        self.weights = ServedWeights(
            self._model,
            precision,
            in_place=self._is_paged,
            on_device=config.weights_stay_on_gpu,
            group=self._tensor,
        )
        self._staged: list[StagedSlots | StagedPages] = []  # over weights that are replaced in place
        self.max_len = config.longest_sequence(self._model.config.max_positions)
        residents = self.weights if self.num_versions > 1 else None
        self.engine: Engine = self._new_engine(
            self._model,
            config.generator.rows,
            spans,
            seed,
            residents,
            records=config.generator.routing_replay,
            likely=likely_plans(config.generator) if self._captures else (),
        )
        self._pins: list[Pin] = []
        self._evaluating: tuple[ServedWeights, Engine] | None = None

    def probe(self, tokens: np.ndarray) -> np.ndarray:
        """float32 [T - 1]: logprobs of `tokens` int32 [T], outside the live cache.

        Under the weights prepared last; on several ranks under the live ones.
        """
        if self._stages.world > 1:
            return probe_stages(self._model, self._stages, tokens)
        return probe_logprobs(self.weights.prepared_model if self.probes_prepared else self._model, tokens)

    def settle(self) -> None:
        for runner in self._staged:
            runner.drain()

    def pin(self) -> Pin:
        """The present weights, or a copy of them on the host; evaluations of one version share it."""
        version = self.engine.version
        weights = next((pin.weights for pin in self._pins if pin.version == version), None)
        pin = Pin(version, self.weights.pinned() if weights is None else weights)
        self._pins.append(pin)
        return pin

    def unpin(self, pin: Pin) -> None:
        self._pins.remove(pin)

    def prepare_evaluations(self, spans: StateSpans) -> None:
        """Make the engine that stays, with its likely steps captured, on the replica that is asked first.

        A replica that is asked later captures as it decodes: it would be silent for longer than a lease may be.
        """
        if self._captures and self._is_first:
            pin = self.pin()
            self._make_evaluation_engine(pin, spans, likely_evaluations(self._config.eval))
            self.unpin(pin)

    def evaluation_engine(self, pin: Pin, spans: StateSpans) -> Engine:
        """An engine of its own, with its own slots, on the pinned weights.

        Where weights lie in place it stays, with its pages and the steps that it has captured, for the next evaluation,
        whose `spans` are those of the first.
        """
        assert pin.weights is not None, "pinned by another backend"
        if self._evaluating is not None:
            weights, engine = self._evaluating
            engine.withdraw(lambda _: True)  # turns that ended episodes left behind
            self.settle()
            weights.load(pin.weights)
            engine.set_version(pin.version, kv_on_update="recompute")
            return engine
        return self._make_evaluation_engine(pin, spans)

    def _make_evaluation_engine(self, pin: Pin, spans: StateSpans, likely: Sequence[SamplingPlan] = ()) -> Engine:
        same = self._model
        model = self._on_device(Transformer(same.config, same.ranks, same.stage))  # its weights are pinned, or shared
        if self.weights.base is not None:
            install(model, self.weights.base.shapes)
        own = self.weights.serve(model, pin.weights)
        engine = self._new_engine(model, self._config.eval.num_slots, spans, self._config.seed, likely=likely)
        engine.set_version(pin.version)
        if own is not None:
            self._evaluating = own, engine
        return engine

    def has_work(self) -> bool:
        return self.engine.has_work

    def _policy(self) -> Transformer:
        """Return the model that the run starts from, or this rank's part of it, on the CPU."""
        is_cpu = self._device.type == "cpu"
        division = Division(
            tensor_parallel=self._tensor, pipeline_parallel=self._stages, fixed_order=is_cpu, trains=False
        )
        return build_sharded_policy(self._config.model, division, seed=self._config.seed, tokenizer=self._tokenizer)

    def _on_device(self, model: Transformer) -> Transformer:
        if self._device.type == "cuda":
            move_but_linear(model, self._device)
        return model

    def _kv_bytes(self) -> int | None:
        """Return the bound on the bytes of an engine's keys and values; None: no bound."""
        generator = self._config.generator
        if generator.kv_cache_gb is not None:
            return int(generator.kv_cache_gb * 2**30)
        if self._device.type != "cuda":
            return None
        memory_bytes = torch.cuda.get_device_properties(self._device).total_memory
        beside = 1 if self._is_remote else most_on_one(generator, torch.cuda.device_count())
        share = generator.gpu_share or 1 / beside
        here = kv_bytes_beside(self.weights.num_bytes, int(share * memory_bytes), self.weights.base_bytes)
        return -int(self._group.max(torch.tensor(-here)))  # the same number of pages on every rank

    def _new_engine(
        self,
        model: Transformer,
        num_slots: int,
        spans: StateSpans,
        seed: int,
        residents: ResidentVersions | None = None,
        *,
        records: bool = False,
        likely: Sequence[SamplingPlan] = (),
    ) -> Engine:
        kv_bytes = self._kv_bytes()
        runner: StagedSlots | StagedPages | None = None
        if self._stages.world > 1:
            if self._is_paged:
                runner = StagedPages(
                    model,
                    self._stages,
                    num_rows=num_slots,
                    max_len=self.max_len,
                    kv_bytes=kv_bytes,
                    parked_tokens=self._parked_tokens,
                )
            else:
                runner = StagedSlots(model, self._stages, num_rows=num_slots, max_len=self.max_len)
            if model is self._model or self._is_paged:
                self._staged.append(runner)
        return native_engine(
            model,
            runner=runner,
            likely=likely,
            records_routes=records,
            num_slots=num_slots,
            max_len=self.max_len,
            seed=seed,
            stop_token_ids=self._stop_token_ids,
            prefill_tokens=self._config.generator.prefilled,
            prefill_chunk=self._config.generator.prefill_chunk,
            prefix_cache_tokens=self._config.generator.prefix_cache_tokens,
            parked_tokens=self._parked_tokens,
            kv_bytes=kv_bytes,
            is_paged=self._is_paged,
            spans=spans,
            clock=self._clock,
            residents=residents,
        )
