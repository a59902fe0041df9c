"""The node of the reference policy: rollouts get its logprobs on their way to the trainer (`kl.executor = "own"`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np
import torch

from slipstream.core.config import RunConfig
from slipstream.core.executor import Context, Executor
from slipstream.core.holders import Holders
from slipstream.core.lora_section import LoraConfig
from slipstream.core.packed import Batching
from slipstream.core.rank_group import RankGroup
from slipstream.core.service_messages import Ready
from slipstream.core.types import Rollout
from slipstream.models.build import build_tokenizer
from slipstream.models.device import scoring_device
from slipstream.models.sharded import Division, build_frozen
from slipstream.models.transformer import Transformer
from slipstream.models.turns import collated, read_in_turns
from slipstream.trainer.batch import train_sequence
from slipstream.trainer.measure import LogprobReader, follows_warm_start, per_sequence, reference_path
from slipstream.trainer.station import Station


class ReferencePolicy(Executor):
    """Gives rollouts `reference_logprobs`; the loop is that of `Station`.

    With `is_resumed` the run goes on from a checkpoint. A reference that the warm start makes is loaded with the first
    rollout: the trainer has written it by then, as nothing is sampled before.
    """

    inputs = ("rollouts",)
    outputs = ("measured",)

    def __init__(self, *, config: RunConfig, batching: Batching, is_resumed: bool) -> None:
        self._config = config
        self._batching = batching
        self._is_resumed = is_resumed

    def init(self, context: Context) -> None:
        self._context = context
        torch.set_num_threads(context.num_threads)
        kl = self._config.kl
        self._holders = Holders(
            context, tensor_parallel=kl.tensor_parallel, is_sharded=kl.sharded, timeout_s=self._config.deadline_s
        )
        read = partial(
            reference_logprobs, config=self._config, batching=self._batching, ranks=self._holders.data_parallel
        )
        self._station = Station(
            context, self._config, holders=self._holders, state="reference", load=self._load, read=read
        )
        if self._is_resumed or not follows_warm_start(self._config):
            self._station.load_now()
        context.spans.set_idle_state("wait_rollouts")
        context.outputs["events"].put(Ready(executor=context.name))

    def step(self) -> bool:
        """Take about a microbatch of what arrived, measure it, and pass it on."""
        return self._station.step()

    @property
    def is_finished(self) -> bool:
        return self._station.is_finished

    def _load(self) -> Transformer:
        path = reference_path(self._config, self._context.run_dir)
        policy = self._config.model
        division = Division(
            self._holders.data_parallel,
            self._holders.tensor_parallel,
            device=scoring_device(self._config.kl.device, self._context.group.local_rank),
            stored=self._config.kl.precision,
        )
        return build_frozen(
            policy if path is None else policy.model_copy(update={"path": path, "lora": LoraConfig()}),
            division,
            seed=self._config.seed,
            tokenizer=build_tokenizer(policy),  # a reference's checkpoint need not have one
        )


def reference_logprobs(
    model: Transformer,
    rollouts: Sequence[Rollout],
    *,
    config: RunConfig,
    batching: Batching,
    ranks: RankGroup = RankGroup.alone(),
) -> list[Rollout]:
    """`rollouts` with the logprobs of `model` for their sampled tokens: at the trainer's temperature, and over the
    kept sets that they were drawn from.

    Data-parallel `ranks` of the model call it together, with the same `rollouts`.
    Identity: what the trainer measures with the same model, whatever else is among `rollouts`, up to rounding.
    """
    # Keys of their own: after the loss of a replica, a rollout and its second version may meet here.
    sequences = [
        replace(train_sequence(rollout.completion), key=(rollout.ordinal, index))
        for index, rollout in enumerate(rollouts)
    ]
    read = LogprobReader(model, config.logprob_temperature)
    microbatches = collated(batching, sequences, config.trainer.microbatch_tokens)
    columns = {sequence.key: np.zeros(0, dtype=np.float32) for sequence in sequences}
    found = read_in_turns(model, microbatches, lambda one: (read(one).float(),), ranks)
    for microbatch, (values,) in zip(microbatches, found, strict=True):
        columns |= per_sequence(microbatch, values)
    return [
        msgspec.structs.replace(rollout, reference_logprobs=columns[sequence.key])
        for rollout, sequence in zip(rollouts, sequences, strict=True)
    ]
