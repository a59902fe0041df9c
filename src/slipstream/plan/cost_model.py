"""The costs of a step: seconds and bytes of every executor, for a model on a cluster (docs/planning.md).

A roofline with named losses. Every time is a sum of parts that have a cause (`Parts`), so a prediction can be taken
apart. Of pipeline stages the slowest one counts (`pipeline.py`). Left out: networks that others use too, and what only
happens now and then (checkpoints, evaluations, restarts).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, cached_property
from statistics import NormalDist
from typing import Any, TypeVar

from slipstream.core.errors import ConfigError
from slipstream.core.fields import Precision
from slipstream.models.config import MAX_LOGITS, TransformerConfig
from slipstream.plan.counts import BYTES, COMPUTED_BYTES, EXPANDED, Adapters, Counts, counts_of
from slipstream.plan.hardware import GpuCluster, all_gather_s, all_reduce_s, all_to_all_s, last_host_task_s, send_s
from slipstream.plan.kernel_counts import step_kernels
from slipstream.plan.layouts import (
    AsynchronousPlan,
    Efficiency,
    Frees,
    GeneratorLayout,
    Parts,
    ScorerLayout,
    StepTime,
    SynchronousPlan,
    TrainerLayout,
    Workload,
)
from slipstream.plan.lengths import imbalance, slowest_replica
from slipstream.plan.pipeline import PlannedStage, in_flight, middle_stages, stage_ends

PREFILL_CHUNK = 512  # tokens prefilled beside a decode step (`generator.prefill_chunk`)
LOGITS_AT_ONCE = MAX_LOGITS["cuda"]  # larger heads run in chunks that the backward pass computes again
LOGIT_PASSES = 5  # reads or writes of float32 logits, from the product to a token with its logprob, or to a loss
PAGE = 16  # tokens of a page of keys and values (`generator/paged_kv.py`)
READ_AT_ONCE = 8  # rollouts that a rank of an executor that only reads has in a batch
USABLE_MEMORY = 0.92  # of a device: the rest is CUDA's context, NCCL's buffers and what the allocator cannot use
T = TypeVar("T")


class CostModel:
    """Times and memory of `model` on `cluster` for `workload`.

    `memory_grows`: twice the microbatch takes at least the same memory, and so does it without recomputation.
    `has_head`: there are logits.
    """

    memory_grows = True
    has_head = True

    def __init__(
        self, model: TransformerConfig, cluster: GpuCluster, workload: Workload, efficiency: Efficiency | None = None
    ) -> None:
        self.model, self.cluster, self.workload = model, cluster, workload
        self.efficiency = efficiency or Efficiency()
        self._known: dict[tuple[Any, ...], Any] = {}  # what a search asks for again and again

    @cached_property
    def without_critic(self) -> CostModel:
        """The same without a critic in the trainer: what the policy costs, and what a critic of its own does."""
        return self._for(replace(self.workload, critic=False))

    @cached_property
    def _of_reference(self) -> CostModel:
        return self._for(self.workload.of_reference) if self.workload.measures_all else self

    def _for(self, workload: Workload) -> CostModel:
        other = copy.copy(self)
        for name in ("without_critic", "_of_reference"):
            vars(other).pop(name, None)  # they are of this workload
        other.workload, other._known = workload, {}
        return other

    def critic_memory(self, layout: TrainerLayout) -> Parts:
        """Bytes on each device of a critic with an executor of its own, without head, logits, versions, reference."""
        alone = copy.copy(self.without_critic)
        alone.model, alone.has_head, alone._known = _headed(self.model, has_head=False), False, {}
        return alone.train_memory(layout, served=None).without("reference", "logits")

    def train_step(self, layout: TrainerLayout) -> Parts:
        """Seconds of a step: microbatches, the wait for the data-parallel rank with most tokens, optimizer updates.

        A pipeline is filled and emptied once for each update, (P - 1) / V microbatches. A reference beside the trainer
        runs forward only; a critic of the policy's size costs the same again.
        """
        workload = self.workload
        count = workload.minibatches * self.microbatches(layout)
        # A rollout is not divided: with more ranks than rollouts some have none, and the others one.
        one = self._microbatch(layout, max(workload.trained_rollouts / layout.data_parallel / count, 1.0))
        microbatch = one.times(count * workload.epochs)
        updates = self._update(layout).times(workload.minibatches * workload.epochs)
        parts = microbatch + Parts({"imbalance": self._imbalance(layout) * microbatch.total}) + updates
        if layout.pipeline_parallel > 1:
            parts += Parts({"bubble": workload.minibatches * workload.epochs * self._filling(layout) * one.total})
        parts = parts.times(2.0) if workload.critic else parts
        return parts + Parts({"serial": self.efficiency.serial_s})

    def microbatches(self, layout: TrainerLayout) -> int:
        """Return the microbatches of a data-parallel rank in a minibatch; interleaved stages take P of them in turn."""
        mine = self.workload.trained_rollouts / layout.data_parallel
        count = max(1, math.ceil(mine / self.workload.minibatches / layout.microbatch - 1e-9))
        return count if layout.chunks == 1 else -(-count // layout.pipeline_parallel) * layout.pipeline_parallel

    def train_floor_s(self, layout: TrainerLayout) -> float:
        """Seconds that `train_step` takes at least: work on all tokens at the rate of the largest microbatch there is.

        A lower bound: no part of the work takes less per rollout in smaller microbatches (assumption 7.1 of LlamaRL),
        and what it leaves out (gathers that nothing hides, messages of stages, imbalance, updates) is never negative.
        """
        workload = self.workload
        count = workload.minibatches * self.microbatches(layout)
        filled = workload.epochs * (count + workload.minibatches * self._filling(layout))
        rollouts = filled * max(workload.trained_rollouts / layout.data_parallel / count, 1.0) / layout.context_parallel
        layer_s, head_s = self._least_s(layout)
        slowest_s = max(one.layers * layer_s + one.is_last * head_s for one in self._stages(layout))
        return (2.0 if workload.critic else 1.0) * rollouts * slowest_s * (1 - 1e-9)

    def _least_s(self, layout: TrainerLayout) -> tuple[float, float]:
        """Return the least seconds of work on a rollout: of a layer, and of the head."""
        degree, recompute, keeps = layout.tensor_parallel, layout.recompute, layout.keeps_products
        key = ("least", degree, recompute, keeps, layout.precision, layout.head_precision, layout.expert_parallel)

        def least() -> tuple[float, float]:
            count = self.workload.trained_rollouts
            alone = replace(layout, devices=degree, pipeline_parallel=1, chunks=1, context_parallel=1)
            passes = self._num_passes(layout)
            layer = self._passes_of(alone, PlannedStage(1, is_first=False, is_last=False), count, passes)
            head = self._head(alone, count, is_trained=True)
            # Logits of a smaller microbatch may be few enough to be kept: then two or three products of four are left.
            kept = 2 / 3 if layout.head == "float32" and degree == 1 else 1.0
            return layer.without("data_parallel").total / count, kept * head.total / count

        return self._once(key, least)

    @staticmethod
    def _num_passes(layout: TrainerLayout) -> int:
        return 4 if layout.recompute and not layout.keeps_products else 3

    def reference_pass(self, layout: TrainerLayout) -> Parts:
        """Seconds of the reference's logprobs, where it lies beside the trainer and is divided as the policy is."""
        costs = self._of_reference
        mine = max(costs.workload.trained_rollouts / layout.data_parallel, 1.0)
        count = max(1, math.ceil(mine / layout.microbatch - 1e-9))
        return Parts({"reference": costs._passes(layout, mine / count, 1).total * (count + self._filling(layout))})

    def decode_step(self, layout: GeneratorLayout, *, live: float, context: float) -> Parts:
        """Seconds for one token of each of `live` completions, that see `context` tokens in the mean.

        P stages have as many batches in flight, of live / P completions each; every one of them gets a token in

            max(P slowest stage,  sum of the stages + (P - 1) hops)
        """
        key = ("decode", layout.tensor_parallel, layout.pipeline_parallel, layout.precision, live, context)
        return self._once(key, lambda: self._decode(layout, live, context))

    def _decode(self, layout: GeneratorLayout, live: float, context: float) -> Parts:
        if layout.pipeline_parallel == 1:
            whole = counts_of(self.model, layout.tensor_parallel).whole
            return self._decode_stage(layout, whole, live=live, context=context)
        batches = min(layout.pipeline_parallel, max(live, 1.0))
        rows, hop_s = live / batches, self._hop_s(layout, live / batches)
        first, last = (
            self._decode_stage(layout, stage, live=rows, context=context) for stage in self._generator_stages(layout)
        )
        slowest = max(first, last, key=lambda parts: parts.total)
        whole = counts_of(self.model, layout.tensor_parallel).whole
        in_turn = self._decode_stage(layout, whole, live=rows, context=context)
        others = layout.pipeline_parallel - 1
        in_turn += Parts({"sampler": others * self.efficiency.step_s, "pipeline": others * hop_s})
        full = (slowest + Parts({"pipeline": hop_s})).times(batches)
        return max(full, in_turn, key=lambda parts: parts.total)

    def _decode_stage(self, layout: GeneratorLayout, stage: PlannedStage, *, live: float, context: float) -> Parts:
        """Seconds of a stage's part of a decode step; only the last one has logits, and a sampler."""
        counts, model, ranks = counts_of(self.model, layout.tensor_parallel), self.model, layout.tensor_parallel
        precision, activation, has_head = layout.precision, COMPUTED_BYTES[layout.precision], stage.is_last
        head_precision: Precision = "bfloat16" if precision == "fp8" else precision
        width, logits = live * model.hidden_size * activation, live * model.vocab_size * 4
        of_layer, of_step = self.kernels(layout)
        started = stage.layers * of_layer + has_head * of_step
        sums, host_s, share = stage.layers * counts.joins, self.efficiency.host_task_s, stage.layers / model.num_layers
        head_s = self._product(live, counts.head_matrix, head_precision) if has_head else 0.0
        return Parts(
            {
                "weights": stage.layers * self._layer(live, counts, precision)
                + head_s
                + self._product(live, share * self.adapters.multiplied, "float32"),
                "keys_and_values": self._move(live * context * counts.kv_bytes(precision, stage.layers)),
                "kernels": (started + share * self.adapters.kernels) * self.efficiency.kernel_s,
                "tensor_parallel": sums * self._all_reduce(width, ranks)
                + has_head * self._all_gather(logits, ranks)
                + (sums + has_head) * last_host_task_s(host_s, ranks, self.cluster),
                "sampler": has_head * self._move(LOGIT_PASSES * logits)
                + self.efficiency.step_s
                + has_head * live * self.efficiency.sequence_s,
            }
        )

    def kernels(self, layout: GeneratorLayout) -> tuple[int, int]:
        """Return those of a decode step in Slipstream's engine: of a layer, and besides them."""
        stages, model = layout.pipeline_parallel, self.model
        return step_kernels(model, layout.precision, ranks=layout.tensor_parallel, stages=stages)

    def _hop_s(self, layout: GeneratorLayout, rows: float) -> float:
        """Seconds until the next stage has the states of `rows`; between nodes it also waits for two hosts."""
        nbytes = rows * self.model.hidden_size * COMPUTED_BYTES[layout.precision]
        is_far = self.cluster.nodes_of(layout.model_ranks) > 1
        return send_s(nbytes, self.cluster, between_nodes=is_far) + is_far * 1.5 * self.efficiency.host_task_s

    def prefill(self, layout: GeneratorLayout, *, prompts: float) -> Parts:
        """Seconds to prefill so many prompts on one replica (its fullest stage), in full chunks beside decode steps."""
        counts, model = counts_of(self.model, layout.tensor_parallel), self.model
        tokens = prompts * self.workload.lengths.prompt_mean
        attention = 2 * PREFILL_CHUNK * self.workload.lengths.prompt_mean * counts.local.query_size
        layer = self._layer(PREFILL_CHUNK, counts, layout.precision, flops=attention)
        nbytes = PREFILL_CHUNK * model.hidden_size * COMPUTED_BYTES[layout.precision]
        layer += counts.joins * self._all_reduce(nbytes, layout.tensor_parallel)
        adapters = self._product(PREFILL_CHUNK, self.adapters.multiplied, "float32")
        layers = self._generator_stages(layout)[0].layers
        chunk_s = layers * layer + layers / model.num_layers * adapters
        if layout.pipeline_parallel > 1:
            chunk_s += self._hop_s(layout, PREFILL_CHUNK)
        return Parts({"prefill": chunk_s * tokens / PREFILL_CHUNK})

    def generation(self, layout: GeneratorLayout, *, waits_for_longest: bool) -> Parts:
        """Seconds in which `layout` generates the rollouts of a step.

        Either always full: what ends is replaced at once, from the next step's prompts. Or the batch has to be complete
        before anything else starts (staleness 0): then slots run empty, `straggler`.
        """
        mine = self.workload.rollouts / layout.replicas
        if not waits_for_longest:
            return self._full(layout, mine)
        layout = replace(layout, slots=min(layout.slots, math.ceil(mine)))
        lengths, even = self.workload.lengths, self._full(layout, mine)
        profile = slowest_replica(lengths.completions, self.workload.rollouts, layout.replicas, layout.slots)
        each = (steps * self.decode_step(layout, live=live, context=self.context).total for live, steps in profile)
        parts = even + Parts({"straggler": max(0.0, sum(each) - even.without("prefill").total)})
        waits_s = self.workload.turns.slowest_s(self.workload.rollouts)
        return parts + Parts({"environment": waits_s}) if waits_s else parts

    def generating_floor_s(self, layout: GeneratorLayout) -> float:
        """Seconds that `generating_turn` takes at least: without waiting for the longest completion."""
        mine = self.workload.rollouts / layout.replicas
        return self._full(replace(layout, slots=min(layout.slots, math.ceil(mine))), mine).total * (1 - 1e-9)

    def scoring(self, model: TransformerConfig, layout: ScorerLayout, *, has_head: bool = True) -> Parts:
        """Seconds in which the copies of `model` read the rollouts of a step once; a reward model has no logits."""
        one = CostModel(_headed(model, has_head), self.cluster, self.workload.all_read, self.efficiency)
        one.has_head = has_head
        copy = TrainerLayout(
            devices=layout.devices // layout.copies,
            tensor_parallel=layout.tensor_parallel,
            microbatch=READ_AT_ONCE,
            precision=layout.precision,
            recompute=False,
            head_precision=layout.precision,
        )
        readers = layout.devices / layout.tensor_parallel
        batches = self.workload.rollouts / READ_AT_ONCE / readers
        return Parts({"score": one._passes(copy, READ_AT_ONCE, 1).total * batches})

    def weight_sync(self, trainer: TrainerLayout, generator: GeneratorLayout) -> Parts:
        """Seconds of a version's way: the trainer's `stage`, the `transfer`, the generators' `pause`.

            transfer >= max(W / (m_g bw),  replicas W / (devices_t bw))

        for W bytes of a replica: each of its ranks takes its part, and every trainer rank sends as much as any other
        (`weight_sync/resharding.py`). Only `stage` and `pause` cost work; a transfer costs staleness. A version of
        adapters is these alone.
        """
        part, whole = self._served(generator)
        params = self._trained(trainer) / trainer.sharing
        bandwidth = self.cluster.device.network_bandwidth * self.efficiency.network
        staged = params * (self.adapters.item if self.adapters.params else BYTES[generator.precision])
        return Parts(
            {
                "stage": self._move(4 * params + 2 * staged),  # read float32, write what is sent, read it for checksums
                "transfer": max(part / bandwidth, generator.replicas * whole / trainer.devices / bandwidth),
                "pause": self._move(4 * part),  # live and arrived bytes change places: two reads, two writes
            }
        )

    def _served(self, layout: GeneratorLayout) -> tuple[float, float]:
        """Return the bytes of a version for the rank that gets most of it, and for all ranks of a replica."""
        if version := self.adapters.version_bytes:
            return version, version * layout.model_ranks
        counts, ends = counts_of(self.model, layout.tensor_parallel), self._generator_stages(layout)
        parts = [counts.served_bytes(layout.precision, stage) for stage in ends]
        middle = PlannedStage(
            middle_stages(self.model.num_layers, layout.pipeline_parallel), is_first=False, is_last=False
        )
        whole = sum(parts) if len(ends) == 1 else sum(parts) + counts.served_bytes(layout.precision, middle)
        return max(parts), whole * layout.tensor_parallel

    def asynchronous(self, plan: AsynchronousPlan) -> StepTime:
        """Executors side by side: the slowest one's time, and what share of it the others wait.

        A critic of its own makes its updates while the policy makes its own; the pass that reads values before them is
        counted nowhere, as it is not for a critic beside the trainer.
        """
        sync = self.weight_sync(plan.trainer, plan.generator)
        costs = self if plan.critic is None else self.without_critic
        trainer = costs.train_step(plan.trainer) + Parts({"stage": sync["stage"]})
        if self.workload.reference and plan.reference is None:
            trainer += self.reference_pass(plan.trainer)
        generator = self.generation(plan.generator, waits_for_longest=False) + Parts({"pause": sync["pause"]})
        sides = {"trainer": trainer, "generator": generator}
        if plan.critic is not None:
            sides["critic"] = costs.train_step(plan.critic)
        if self.workload.reference and plan.reference is not None:
            sides["reference"] = self.scoring(self.model, plan.reference)
        if self.workload.reward_model is not None:
            if plan.reward_model is None:
                allowed = "AsynchronousPlan(reward_model=...)"
                raise ConfigError("a reward model needs devices", got="no layout of it", allowed=allowed)
            sides["reward_model"] = self.scoring(self.workload.reward_model, plan.reward_model, has_head=False)
        return StepTime.of(max(parts.total for parts in sides.values()), sides)

    def synchronous(self, plan: SynchronousPlan) -> StepTime:
        """Generation, then training, on the same devices; reward model and reference take their turn there too."""
        trainer, generator = plan.trainer, plan.generator
        if trainer.devices != generator.devices:
            got = f"{trainer.devices} for the trainer, {generator.devices} for the generator"
            raise ConfigError("a co-located plan has all executors on the same devices", got=got)
        sides = {"trainer": self.training_turn(trainer, plan.frees), "generator": self.generating_turn(generator)}
        return StepTime.of(sum(side.total for side in sides.values()), sides)

    def training_turn(self, layout: TrainerLayout, frees: Frees) -> Parts:
        """Seconds of all that a co-located plan does besides generating, on the trainer's devices."""
        training = self.train_step(layout)
        if self.workload.reference:
            training += self.reference_pass(layout)
        if frees == "optimizer_too":  # fp32 weights and two moments, to the host and back
            kept = (4 * self._held(layout) + 8 * self._trained(layout)) / layout.sharing
            training += Parts({"offload": 2 * kept / self.cluster.device.host_bandwidth})
        if self.workload.reward_model is not None:
            alike = ScorerLayout(devices=layout.devices)
            training += self.scoring(self.workload.reward_model, alike, has_head=False)
        return training

    def generating_turn(self, layout: GeneratorLayout) -> Parts:
        """Seconds in which a co-located plan generates a step's rollouts, the new weights' way to where they are used
        included: every device sends as much as any other, however the trainer divides the model."""
        anywhere = TrainerLayout(devices=layout.devices, tensor_parallel=1, microbatch=1)
        transfer = self.weight_sync(anywhere, layout)["transfer"]
        return self.generation(layout, waits_for_longest=True) + Parts({"transfer": transfer})

    def train_memory(self, layout: TrainerLayout, *, served: Precision | None = "bfloat16") -> Parts:
        """Bytes on each of the trainer's devices; `served`: the precision that versions are staged in, None for none.

        Float32 weights and moments, as `trainer/optim.py` keeps them, are 12 bytes a parameter in all. Beside adapters
        the model's own weights have neither moments nor gradients, and a reference is the same weights. Of offloaded
        moments those of one tensor are there at a time. Of pipeline stages it is the one that holds most.
        """
        place: tuple[Any, ...] = layout.devices, layout.tensor_parallel, layout.pipeline_parallel
        place = (*place, layout.chunks, layout.context_parallel, layout.expert_parallel)
        held = (*place, layout.reduce_once, layout.offloads_moments)
        working = (*place, layout.microbatch, layout.precision, layout.recompute, layout.keeps_products, layout.head)

        def held_by(stage: PlannedStage) -> Parts:
            states = self._once(("states", stage, *held), lambda: self._states(layout, stage))
            run = self._once(("working", stage, *working), lambda: self._working(layout, stage))
            beside = self._once(("beside", stage, *place, served), lambda: self._beside(layout, stage, served))
            return Parts({**states, **run, **beside})

        return max(map(held_by, self._stages(layout)), key=lambda parts: parts.total)

    def _once(self, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        """Return what `make` does, from the second time on without doing it."""
        if key not in self._known:
            self._known[key] = make()
        found: T = self._known[key]
        return found

    def _states(self, layout: TrainerLayout, stage: PlannedStage) -> dict[str, float]:
        """Bytes of a rank of `stage` for weights, moments and gradients."""
        counts, shards = counts_of(self.model, layout.tensor_parallel), layout.sharing
        params, models = self._trained_of(layout, stage), 2 if self.workload.critic else 1
        adapters = self._adapters_of(stage)
        weights = 4 * (counts.params_of(stage) + adapters) / shards * models
        if self.adapters.base != "float32":  # whole on every data-parallel rank, and expanded in blocks
            weights = counts.served_bytes(self.adapters.base, stage) + 4 * adapters
        elsewhere = stage.layers * (counts.layer - counts.gathered_layer(layout.expert_parallel))
        whole = params - elsewhere if layout.reduce_once else params / shards
        return {
            "weights": weights,
            "moments": 8 * min(params / shards, counts.largest if layout.offloads_moments else math.inf) * models,
            "gradients": 4 * whole * models,
        }

    def _beside(self, layout: TrainerLayout, stage: PlannedStage, served: Precision | None) -> dict[str, float]:
        """Bytes of a rank of `stage` for staged versions and a reference."""
        counts, parts, shards = counts_of(self.model, layout.tensor_parallel), dict[str, float](), layout.sharing
        if served is not None:
            staged = self.adapters.item * self._adapters_of(stage)
            parts["staging"] = 2 * (staged or counts.served_bytes(served, stage)) / shards
        if self.workload.reference and not self.adapters.params:
            parts["reference"] = 4 * self._trained_of(layout, stage) / shards
        return parts

    def _working(self, layout: TrainerLayout, stage: PlannedStage) -> dict[str, float]:
        """Bytes of a rank of `stage` while it computes: layers as they run, and all microbatches that it has begun.

        Of one rank alone, `passing`: what a pass holds for an instant beyond the other parts, and tables of rotations.
        Ranks that share a sequence have the keys and values of all of it, of a layer that is computed again while it
        is, else of all layers.
        """
        counts, model, workload = counts_of(self.model, layout.tensor_parallel), self.model, self.workload
        element, params = COMPUTED_BYTES[layout.precision], self._trained_of(layout, stage)
        uses_fsdp = layout.sharing > 1 or layout.precision != "float32"
        tokens = layout.microbatch * workload.trained_tokens / layout.context_parallel
        kept, passing = tokens * counts.kept_elements * element, 0.0
        if layout.devices == 1:  # each rollout has its prompt's keys and values for itself
            length = workload.lengths.prompt_mean + workload.lengths.mean + self.given
            kept += 2 * (layout.microbatch * length - tokens) * counts.local.kv_size * element
            if layout.precision == "float32":
                padded = layout.microbatch * length * counts.padded_elements(length)
                kept += element * (padded + tokens * counts.local.gated_mlp * counts.inner)
        each = tokens * element * (model.hidden_size + layout.keeps_products * counts.product_elements)
        logits = (
            min(layout.microbatch * workload.lengths.mean / layout.context_parallel * model.vocab_size, LOGITS_AT_ONCE)
            * 4
            / layout.tensor_parallel
        ) * self.has_head
        # The root (embedding and head) from forward to backward; one layer that runs, and one that comes. One rank
        # has a copy of all in the precision of products.
        layers = 2 * counts.gathered_layer(layout.expert_parallel)
        gathered = (layers + counts.root_of(stage)) * element if uses_fsdp else 0.0
        copies = 0.0
        if uses_fsdp and layout.devices == 1 and not self.adapters.params:
            models = 2 if workload.critic else 1
            gathered, copies = 0.0, params * element * (models + bool(workload.reference))
        if layout.head != layout.precision and stage.is_last:
            gathered += counts.head_matrix * COMPUTED_BYTES[layout.head]
        if self.adapters.base != "float32":
            gathered = 2 * min(EXPANDED, counts.head_matrix)
        begun: float = stage.layers
        if layout.pipeline_parallel > 1:
            last = stage.is_last
            begun *= in_flight(layout.pipeline_parallel, self.microbatches(layout), layout.chunks, is_last=last)
        others = 2 * counts.local.kv_size * element * tokens * (layout.context_parallel - 1)
        if layout.devices == 1:
            # The head's gradient in float32 and what is added to it, while no layer runs; then a layer without logits.
            head = (1 + element / 4) * logits + 4 * counts.head_matrix + max(logits, 4 * counts.head_matrix)
            head = head if self.has_head else element * counts.embedding  # the embedding's gradient, yet to be added
            layer = tokens * element * counts.passing_elements
            passing = max(head - layout.recompute * kept, layer, 3 * logits) - 3 * logits
            passing += 3 * tokens * element * model.hidden_size + 8 * model.max_positions * model.rotary_dim
        parts = {"passing": passing} if layout.devices == 1 else {}
        return parts | {
            "gathered": gathered + copies,
            "activations": begun * each + kept + others if layout.recompute else begun * (kept + others),
            "logits": 3 * logits if stage.is_last else 0.0,  # as they are, their probabilities, their gradient
        }

    def generator_memory(self, layout: GeneratorLayout, *, shadow: bool = True) -> Parts:
        """Bytes on each of a replica's devices: the version that is live, the one that arrives, keys and values.

        Slots are counted at their longest (prompt and longest completion): the engine admits by that. Of pipeline
        stages it is the one that holds most; each has keys and values of its layers alone.
        """

        def largest() -> Parts:
            each = [self._stage_memory(layout, stage, shadow=shadow) for stage in self._generator_stages(layout)]
            return max(each, key=lambda parts: parts.total)

        place = layout.tensor_parallel, layout.pipeline_parallel, layout.slots, layout.precision
        return self._once(("generator", *place, shadow), largest)

    def _stage_memory(self, layout: GeneratorLayout, stage: PlannedStage, *, shadow: bool) -> Parts:
        counts, lengths = counts_of(self.model, layout.tensor_parallel), self.workload.lengths
        base, version = counts.served_bytes(layout.precision, stage), self.adapters.version_bytes
        longest = math.ceil((lengths.prompt_mean + lengths.longest + self.given) / PAGE) * PAGE
        rows = -(-layout.slots // layout.pipeline_parallel)
        parts = {
            "weights": base + version,
            "keys_and_values": layout.slots * longest * counts.kv_bytes(layout.precision, stage.layers),
            "logits": 3 * rows * self.model.vocab_size * 4 if stage.is_last else 0.0,
            "prefill": PREFILL_CHUNK * counts.kept_elements * COMPUTED_BYTES[layout.precision],
        }
        if shadow:
            parts["shadow"] = version or base
        return Parts(parts)

    def scorer_memory(self, model: TransformerConfig, layout: ScorerLayout, *, has_head: bool = True) -> Parts:
        """Bytes on each device of an executor that only reads; a reward model has no logits.

        Frozen weights are kept in the precision of products. Of a sharded model the root is gathered while a batch is
        read, with one layer that runs, and one that comes.
        """
        counts = counts_of(_headed(model, has_head), layout.tensor_parallel)
        element, tokens = COMPUTED_BYTES[layout.precision], READ_AT_ONCE * self.workload.all_read.trained_tokens
        parts = {
            "weights": counts.params * BYTES[layout.precision] / layout.shards,
            "activations": tokens * (counts.kept_elements + model.hidden_size) * element,
            "logits": has_head * 2 * min(tokens * model.vocab_size, LOGITS_AT_ONCE) * 4 / layout.tensor_parallel,
        }
        if layout.shards > 1:
            parts["gathered"] = (2 * counts.layer + counts.root) * element
        return Parts(parts)

    def colocated_memory(self, plan: SynchronousPlan) -> Mapping[str, Parts]:
        """Bytes on each device while it `trains` and while it `generates`; they differ by what `plan.frees` gives up.

        The sum of what each of the two layouts takes, whatever the other one is.
        """
        trainer = self.colocated_trainer(plan.trainer, plan.frees)
        generator = self.colocated_generator(plan.generator, plan.frees)
        return {phase: trainer[phase] + generator[phase] for phase in trainer}

    def colocated_trainer(self, layout: TrainerLayout, frees: Frees) -> Mapping[str, Parts]:
        """Bytes of a trainer in both phases. Nobody reads a version while another is made: no copy is staged."""
        training = self.train_memory(layout, served=None)
        if frees == "nothing":
            return {"trains": training, "generates": training}
        kept = training.without("gradients", "activations", "logits", "gathered")
        if frees == "optimizer_too":
            kept = kept.without("moments", "weights")
        return {"trains": training, "generates": kept}

    def colocated_generator(self, layout: GeneratorLayout, frees: Frees) -> Mapping[str, Parts]:
        """Bytes of generators in both phases, with one version and no shadow of it."""
        generating = self.generator_memory(layout, shadow=False)
        version = Parts({"served": generating["weights"]})
        generating = generating.without("weights")
        both = generating + version
        return {"trains": both if frees == "nothing" else version, "generates": both}

    @property
    def usable_bytes(self) -> float:
        """Bytes of a device's memory that a layout can have."""
        return USABLE_MEMORY * self.cluster.device.memory_bytes

    def fits(self, *memory: Parts) -> bool:
        """Return whether each of these fits on a device."""
        return all(parts.total <= self.usable_bytes for parts in memory)

    @property
    def adapters(self) -> Adapters:
        """The adapters that are trained; none: all weights are."""
        return self.workload.adapters

    @property
    def context(self) -> float:
        """Mean tokens that a live completion sees: it is found at any of its tokens, and longer ones more often."""
        lengths = self.workload.lengths
        return lengths.prompt_mean + self.workload.lengths.mean_square / lengths.mean / 2 + self.given / 2

    @property
    def given(self) -> float:
        """Mean tokens of a rollout that environments give."""
        return self.workload.turns.given_mean

    def _stages(self, layout: TrainerLayout) -> tuple[PlannedStage, ...]:
        return _ends(self.model.num_layers, layout.pipeline_parallel, layout.chunks)

    def _generator_stages(self, layout: GeneratorLayout) -> tuple[PlannedStage, ...]:
        return _ends(self.model.num_layers, layout.pipeline_parallel, 1)

    @staticmethod
    def _filling(layout: TrainerLayout) -> float:
        """Return the microbatches that pass until a pipeline is full and empty again."""
        return (layout.pipeline_parallel - 1) / layout.chunks

    def _adapters_of(self, stage: PlannedStage) -> int:
        """Return a stage's numbers of adapters, taken to be as many in each layer."""
        return self.adapters.params * stage.layers // self.model.num_layers

    def _trained_of(self, layout: TrainerLayout, stage: PlannedStage) -> int:
        if self.adapters.params:
            return self._adapters_of(stage)
        return counts_of(self.model, layout.tensor_parallel).params_of(stage)

    def _held(self, layout: TrainerLayout) -> float:
        """Return the parameters of a data-parallel group's rank, trained or not, of its fullest stage."""
        counts = counts_of(self.model, layout.tensor_parallel)
        return max(counts.params_of(stage) + self._adapters_of(stage) for stage in self._stages(layout))

    def _trained(self, layout: TrainerLayout) -> float:
        """Return the parameters among them that have gradients."""
        return max(self._trained_of(layout, stage) for stage in self._stages(layout))

    def _full(self, layout: GeneratorLayout, rollouts: float) -> Parts:
        """Seconds in which a replica with all its slots taken generates `rollouts`."""
        steps = rollouts * self.workload.lengths.mean / layout.slots
        decode = self.decode_step(layout, live=layout.slots, context=self.context)
        given = rollouts * self.given / self.workload.lengths.prompt_mean
        return decode.times(steps) + self.prefill(layout, prompts=rollouts / self.workload.group_size + given)

    def _layer(
        self, rows: float, counts: Counts, precision: Precision, *, flops: float = 0.0, expert_ranks: int = 1
    ) -> float:
        """Seconds of a layer's products; of its experts those count that the rows meet."""
        read = counts.touched_matrix(rows, expert_ranks)
        return self._product(rows, counts.active_matrix, precision, flops=flops, read=read)

    def _product(
        self, rows: float, weights: float, precision: Precision, *, flops: float = 0.0, read: float | None = None
    ) -> float:
        """Seconds of `rows` times a matrix of `weights`; `flops` come along without bytes of their own.

        `read`: so many weights are read, if not each once. Operations and bytes are added in quadrature, so that more
        rows always cost less each.
        """
        total = 2 * rows * weights + flops
        compute = total / self.cluster.device.flops_of(precision) / self.efficiency.matmul
        return math.hypot(compute, self._move((weights if read is None else read) * BYTES[precision]))

    def _move(self, nbytes: float) -> float:
        """Seconds to read or write so much memory."""
        return nbytes / self.cluster.device.memory_bandwidth / self.efficiency.memory

    def _all_reduce(self, nbytes: float, ranks: int) -> float:
        return self.efficiency.collective * all_reduce_s(nbytes, ranks, self.cluster)

    def _all_gather(self, nbytes: float, ranks: int) -> float:
        return self.efficiency.collective * all_gather_s(nbytes, ranks, self.cluster)

    def _microbatch(self, layout: TrainerLayout, rollouts: float) -> Parts:
        """Seconds of the forward and backward pass over `rollouts` on one model-parallel group."""
        return self._passes(layout, rollouts, self._num_passes(layout))

    def _passes(self, layout: TrainerLayout, rollouts: float, passes: int) -> Parts:
        """Seconds of so many passes over the layers of the slowest stage."""
        each = [self._passes_of(layout, stage, rollouts, passes) for stage in self._stages(layout)]
        return max(each, key=lambda parts: parts.total)

    def _passes_of(self, layout: TrainerLayout, stage: PlannedStage, rollouts: float, passes: int) -> Parts:
        """Seconds of so many passes over a stage, the last two of them backward unless there is just one.

        One of these is the gradient of the weights, which those beside adapters do not have; attention has both.
        """
        is_trained, layers, element = passes > 1, stage.layers, COMPUTED_BYTES[layout.precision]
        counts, ranks = counts_of(self.model, layout.tensor_parallel), layout.tensor_parallel
        tokens = rollouts * self.workload.trained_tokens / layout.context_parallel
        attention = 4 * tokens * self.context * counts.local.query_size
        expert_ranks = layout.expert_parallel
        product_s = self._layer(tokens, counts, layout.precision, flops=attention, expert_ranks=expert_ranks)
        compute_s = passes * layers * product_s
        if is_trained and self.adapters.params:
            frozen_s = product_s - self._product(tokens, 0, layout.precision, flops=attention)
            multiplied = (self.adapters.multiplied - self.adapters.head_params) * (layers / self.model.num_layers)
            adapters_s = self._product(tokens, multiplied, layout.precision)
            compute_s += passes * adapters_s - layers * frozen_s
        moved_s, width = self._move(tokens * counts.moved_elements * element), tokens * self.model.hidden_size * element
        # Forward, again if recomputed, and of each branch's gradient.
        sums = counts.joins * (passes - 2) + 2 if is_trained else counts.joins
        has_logits = self.has_head and stage.is_last
        head = self._head(layout, rollouts, is_trained=is_trained) if has_logits else Parts({})
        work = {
            "compute": compute_s + head["compute"],
            "activations": passes * layers * moved_s + head["activations"],
            "tensor_parallel": layers * sums * self._all_reduce(width, ranks) + head["tensor_parallel"],
        } | self._between_ranks(layout, layers, tokens, passes)
        # A layer is gathered forward and backward, the root is kept in between.
        fsdp = (1 + is_trained) * layers * self._gather_layer(layout)
        fsdp += self._gather(layout, counts.root_of(stage))
        if is_trained and not layout.reduce_once:
            fsdp += self._reduce_gradients(layout, stage)
        return Parts(work | {"data_parallel": max(0.0, fsdp - sum(work.values()))})

    def _between_ranks(self, layout: TrainerLayout, layers: int, tokens: float, passes: int) -> dict[str, float]:
        """Seconds of messages between stages, and between the ranks that share sequences, that nothing hides.

        A stage sends the states of each of its chunks forward, and their gradients back. Keys and values are gathered
        for each layer, again if it is computed again, and their gradients are summed. Tokens go to their experts and
        back as often.
        """
        parts, element = {}, COMPUTED_BYTES[layout.precision]
        if layout.pipeline_parallel > 1:
            nbytes = tokens * self.model.hidden_size * element / self.efficiency.network
            is_far = self.cluster.nodes_of(layout.model_ranks) > 1
            sent = layout.chunks * (2 if passes > 1 else 1)
            parts["pipeline"] = sent * send_s(nbytes, self.cluster, between_nodes=is_far)
        if layout.context_parallel > 1:
            kv_size = counts_of(self.model, layout.tensor_parallel).local.kv_size
            nbytes = 2 * kv_size * element * tokens * layout.context_parallel
            ranks, stride = layout.context_parallel, layout.tensor_parallel
            gather_s = self.efficiency.collective * all_gather_s(nbytes, ranks, self.cluster, stride=stride)
            parts["context"] = layers * max(passes - 1, 1) * gather_s
        if layout.expert_parallel > 1:
            counts, ranks = counts_of(self.model, layout.tensor_parallel), layout.expert_parallel
            nbytes = tokens * counts.exchanged_elements(ranks) * element / self.efficiency.network
            one_way_s = all_to_all_s(nbytes, ranks, self.cluster, stride=layout.tensor_parallel)
            parts["experts"] = 2 * layers * max(passes - 1, 1) * one_way_s
        return parts

    def _head(self, layout: TrainerLayout, rollouts: float, *, is_trained: bool) -> Parts:
        """Logits of completion tokens, each rank's own; over ranks a maximum, three sums, and the states' gradient."""
        counts = counts_of(self.model, layout.tensor_parallel)
        tokens = rollouts * self.workload.lengths.mean / layout.context_parallel
        logits, ranks = tokens * self.model.vocab_size, layout.tensor_parallel
        is_made_anew = layout.head != "float32" or ranks > 1 or logits > LOGITS_AT_ONCE  # in the backward pass
        forwards = 2 if is_trained and is_made_anew else 1
        passes = forwards + 2 if is_trained else 1
        products = passes - (is_trained and self.adapters.params > 0)  # a head beside adapters has no gradient
        adapter_s = self._product(tokens, self.adapters.head_params, layout.head) if is_trained else 0.0
        return Parts(
            {
                "compute": products * self._product(tokens, counts.head_matrix, layout.head) + passes * adapter_s,
                "activations": self._move(LOGIT_PASSES * passes * logits * 4 / ranks),
                "tensor_parallel": self._all_reduce(tokens * 4 * (4 + is_trained * self.model.hidden_size), ranks),
            }
        )

    def _gather(self, layout: TrainerLayout, params: float) -> float:
        """Seconds until every rank that shares them has all of them, in the precision of products."""
        nbytes = params * COMPUTED_BYTES[layout.precision] / self.efficiency.network
        stride = layout.model_ranks // layout.context_parallel
        return all_gather_s(nbytes, layout.sharing, self.cluster, stride=stride)

    def _gather_layer(self, layout: TrainerLayout) -> float:
        """Seconds until every rank has a layer; its experts come from the ranks that hold the same ones."""
        counts, ranks = counts_of(self.model, layout.tensor_parallel), layout.expert_parallel
        experts = counts.experts_of(ranks)
        once = self._gather(layout, counts.gathered_layer(ranks) - experts)
        if experts and layout.sharing > ranks:
            nbytes = experts * COMPUTED_BYTES[layout.precision] / self.efficiency.network
            once += all_gather_s(nbytes, layout.sharing // ranks, self.cluster, stride=layout.model_ranks * ranks)
        return once

    def _reduce_gradients(self, layout: TrainerLayout, stage: PlannedStage) -> float:
        """Seconds to sum a stage's gradients over the ranks that share them, in float32."""
        if self.adapters.params:
            return 4 / COMPUTED_BYTES[layout.precision] * self._gather(layout, self._adapters_of(stage))
        counts = counts_of(self.model, layout.tensor_parallel)
        once = stage.layers * self._gather_layer(layout) + self._gather(layout, counts.root_of(stage))
        return 4 / COMPUTED_BYTES[layout.precision] * once

    def _update(self, layout: TrainerLayout) -> Parts:
        """An optimizer update: weights, moments and gradient are read, the first three written; and late gradients."""
        parts = {"optimizer": self._move(28 * self._trained(layout) / layout.sharing)}
        if layout.reduce_once:
            parts["data_parallel"] = max(self._reduce_gradients(layout, stage) for stage in self._stages(layout))
        return Parts(parts)

    def _imbalance(self, layout: TrainerLayout) -> float:
        """Return how much more than the mean the rank with most tokens has.

        By length: in a minibatch of as many quantiles of the lengths as it has rollouts; of ranks that have none, the
        mean takes no account. By number: sums of lengths are nearly normal; the largest of n of them is at their
        (n - 3/8) / (n + 1/4) quantile (Blom).
        """
        ranks, workload = layout.data_parallel, self.workload
        num_rollouts = max(round(workload.trained_rollouts / workload.minibatches), 1)
        if ranks == 1 or num_rollouts == 1:
            return 0.0
        given = workload.trained_tokens - workload.lengths.mean
        if workload.deals_by_length:
            return imbalance(workload.lengths.completions, num_rollouts, min(ranks, num_rollouts), given)
        deviation = math.sqrt(max(workload.lengths.mean_square - workload.lengths.mean**2, 0.0))
        mine = max(workload.trained_rollouts / ranks, 1.0)
        highest = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
        return deviation / workload.trained_tokens / math.sqrt(mine) * highest


def _headed(model: TransformerConfig, has_head: bool) -> TransformerConfig:
    """Return `model`; without a language head as if it were tied, as `ScalarModel` has it."""
    return model if has_head else replace(model, tie_embeddings=True)


_ends = cache(stage_ends)
