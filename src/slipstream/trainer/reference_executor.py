"""The node of the reference policy: rollouts get its logprobs on their way to the trainer (`kl.executor = "own"`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import torch

from slipstream.core.config import RunConfig
from slipstream.core.executor import Context, Executor, takes_stop
from slipstream.core.lora_section import LoraConfig
from slipstream.core.packed import Batching
from slipstream.core.service_messages import Ready
from slipstream.core.types import Rollout
from slipstream.core.vetting import Limits, vetted
from slipstream.models.build import build_tokenizer
from slipstream.models.device import DTYPES, scoring_device
from slipstream.models.sharded import Division, build_sharded_policy
from slipstream.models.transformer import Transformer
from slipstream.trainer.batch import train_sequence
from slipstream.trainer.measure import follows_warm_start, measure, reads_logprobs, reference_path


class ReferencePolicy(Executor):
    """Computes reference logprobs of what has arrived, about a microbatch at once, while others sample and train.

    Consumes `rollouts`, emits them on `measured`, each with `reference_logprobs`. Waits for: a rollout. Ends when: told
    to stop and nothing is left. Of several ranks each has the whole model and measures what it is dealt; rank 0 passes
    the end on. Evaluation does not come here. With `is_resumed` the run goes on from a checkpoint.

    A reference that the warm start makes is loaded with the first rollout: the trainer has written it by then, as
    nothing is sampled before.
    """

    inputs = ("rollouts",)
    outputs = ("measured",)

    def __init__(self, *, config: RunConfig, batching: Batching, is_resumed: bool) -> None:
        self._config = config
        self._batching = batching
        self._is_resumed = is_resumed
        self._model: Transformer | None = None
        self._is_stopping = self._is_finished = False

    def init(self, context: Context) -> None:
        self._context = context
        torch.set_num_threads(context.num_threads)
        if self._is_resumed or not follows_warm_start(self._config):
            self._model = self._load()
        context.spans.set_idle_state("wait_rollouts")
        context.outputs["events"].put(Ready(executor=context.name))

    def step(self) -> bool:
        """Take about a microbatch of what arrived, measure it, and pass it on."""
        self._is_stopping |= takes_stop(self._context)
        with self._context.spans.span("receive"):
            batch = self._take()
        if not batch:
            self._is_finished = self._is_stopping
            return self._is_finished
        if self._model is None:
            with self._context.spans.span("start_up"):
                self._model = self._load()
        batch = vetted(batch, limits_of(self._model, self._config))
        with self._context.spans.span("reference"):
            measured = reference_logprobs(self._model, batch, config=self._config, batching=self._batching)
            self._context.spans.did(sum(_num_tokens(rollout) for rollout in batch))
        with self._context.spans.span("send"), self._context.together():
            for rollout in measured:
                self._context.outputs["measured"].put(rollout)
        return True

    @property
    def is_finished(self) -> bool:
        return self._is_finished

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

    def _take(self) -> list[Rollout]:
        """Take about a microbatch of what has arrived: more would only delay the first of it."""
        batch: list[Rollout] = []
        num_tokens = 0
        while num_tokens < self._config.trainer.microbatch_tokens:
            rollout = self._context.inputs["rollouts"].get_nowait()
            if rollout is None:
                break
            assert isinstance(rollout, Rollout)
            [rollout] = vetted([rollout], Limits())  # what has no shape has no length
            batch.append(rollout)
            num_tokens += _num_tokens(rollout)
        return batch


def _num_tokens(rollout: Rollout) -> int:
    return len(rollout.completion.prompt.tokens) + rollout.completion.num_tokens


def limits_of(model: Transformer, config: RunConfig) -> Limits:
    """Return the limits that a rollout must keep before a reference may read its tokens."""
    return Limits(
        vocab_size=model.config.vocab_size,
        max_positions=model.config.max_positions,
        failure_reward=config.rewards.failure_reward,
    )


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
