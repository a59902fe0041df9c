"""The node of the reference policy: rollouts get its logprobs on their way to the trainer (`kl.executor = "own"`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import msgspec
import torch

from slipstream.core.config import RunConfig
from slipstream.core.executor import Context, Executor
from slipstream.core.lora_section import LoraConfig
from slipstream.core.packed import Batching
from slipstream.core.service_messages import Ready
from slipstream.core.types import Rollout
from slipstream.models.build import build_tokenizer
from slipstream.models.device import DTYPES, scoring_device
from slipstream.models.sharded import Division, build_sharded_policy
from slipstream.models.transformer import Transformer
from slipstream.trainer.batch import train_sequence
from slipstream.trainer.measure import follows_warm_start, measure, reads_logprobs, reference_path
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
        read = partial(reference_logprobs, config=self._config, batching=self._batching)
        self._station = Station(context, self._config, state="reference", load=self._load, read=read)
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
        model = build_sharded_policy(
            policy if path is None else policy.model_copy(update={"path": path, "lora": LoraConfig()}),
            Division(),
            seed=self._config.seed,
            tokenizer=build_tokenizer(policy),  # a reference's checkpoint need not have one
        )
        device = scoring_device(self._config.kl.device, self._context.group.rank)
        return model.to(device, DTYPES[self._config.kl.precision]).requires_grad_(False)


def reference_logprobs(
    model: Transformer, rollouts: Sequence[Rollout], *, config: RunConfig, batching: Batching
) -> list[Rollout]:
    """`rollouts` with the logprobs of `model` for their sampled tokens: at the trainer's temperature, and over the
    kept sets that they were drawn from.

    Identity: what the trainer measures with the same model, whatever else is among `rollouts`, up to rounding.
    """
    # Keys of their own: after the loss of a replica, a rollout and its second version may meet here.
    sequences = [
        replace(train_sequence(rollout.completion), key=(rollout.ordinal, index))
        for index, rollout in enumerate(rollouts)
    ]
    columns = measure(
        reads_logprobs(model, config.logprob_temperature),
        sequences,
        microbatch_tokens=config.trainer.microbatch_tokens,
        batching=batching,
    )
    return [
        msgspec.structs.replace(rollout, reference_logprobs=columns[sequence.key])
        for rollout, sequence in zip(rollouts, sequences, strict=True)
    ]
