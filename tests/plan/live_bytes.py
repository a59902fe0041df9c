"""Training steps whose tensors have no values, and the most bytes that are alive in them.

Tensors lie on "meta" and take the paths of CUDA. Where an operator or kernel is another one there, something stands in
its place that keeps what that keeps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from slipstream.batching import collate as batching
from slipstream.core.clock import WallClock
from slipstream.core.config import RunConfig
from slipstream.core.executor import Context
from slipstream.core.peer_messages import CriticUpdate, ValuesWanted
from slipstream.core.rank_group import RankGroup
from slipstream.core.spans import NoSpans
from slipstream.core.types import Completion, Group, Prompt, Rollout, Segment, VersionSpan
from slipstream.models.config import TransformerConfig
from slipstream.models.sharded import Division, ShardedParameters, divide
from slipstream.models.transformer import Transformer
from slipstream.trainer.batch import train_sequence
from slipstream.trainer.critic_executor import CriticModel
from slipstream.trainer.critic_link import ANSWERED
from slipstream.trainer.optim import AdamW
from slipstream.trainer.step import train_on_batch
from slipstream.trainer.supervised import Demonstration, supervised_updates

META = torch.device("meta")


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of each storage on "meta" from the operator that made it until nobody holds it, and at most.

    Also what FlashAttention 2 has inside its backward pass: gradients of queries in float32, and of keys and values for
    all heads where these share them. Not: other operators' own memory, and what the allocator rounds up.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._held: dict[int, weakref.ref[Any]] = {}
        self._on_host: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.name() == "torch_attn::_varlen_attn_backward":
            _, q, k, *_ = args
            expanded = 2 * len(k) * q[0].numel() * q.element_size() if k.shape[1] != q.shape[1] else 0
            self.peak = max(self.peak, self.live + 4 * q.numel() + expanded)
        for tensor in [out] if type(out) is Tensor else tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.is_meta:
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._held:
            return
        self._held[key] = weakref.ref(storage, lambda _: self._free(key, num_bytes))
        self.live += num_bytes
        self.peak = max(self.peak, self.live)

    def _free(self, key: int, num_bytes: int) -> None:
        del self._held[key]
        self.live -= num_bytes

    def on_host(self, tensor: Tensor) -> Tensor:
        """A tensor like this that takes no memory of the device."""
        with _disable_current_modes():
            self._on_host.append(torch.empty_like(tensor))
        storage = self._on_host[-1].untyped_storage()
        self._held[storage._cdata] = weakref.ref(storage)
        return self._on_host[-1]


class _Kernel:
    """In the place of a kernel of Triton."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **constants: None


class _Norm(torch.autograd.Function):
    """CUDA's norm keeps its input and a number of each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class _Efficient(torch.autograd.Function):
    """CUDA's attention in float32 keeps its operands, what it gives, and a number of each query."""

    @staticmethod
    def forward(ctx: Any, *operands: Tensor) -> Tensor:
        q = operands[0]
        out = torch.empty_like(q)
        ctx.save_for_backward(*operands, out, q.new_empty(q.shape[:3]))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(one) for one in ctx.saved_tensors[:3])


_plain_attention = F.scaled_dot_product_attention


def _attention(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, enable_gqa: bool) -> Tensor:
    """Where heads share keys no fused kernel of torch's takes float32: its plain operations keep probabilities."""
    if enable_gqa:
        return _plain_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    out: Tensor = _Efficient.apply(q, k, v)  # type: ignore[no-untyped-call]
    return out


def _answered(plain: Callable[..., Any], answer: Callable[[Tensor], Any]) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: answer(self) if self.is_meta else plain(self, *args, **kwargs)


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes "meta" for CUDA; the host reads ones."""
    pytest.importorskip("triton")
    for module in ("layer_functions", "head"):
        monkeypatch.setattr(f"slipstream.models.{module}.takes_kernels", lambda x: x.is_meta and x.numel() > 0)
    for module, kernels in (
        ("layer_kernels", ("silu_mul_kernel", "silu_mul_backward_kernel", "rotate_kernel")),
        ("head_kernels", ("statistics_kernel", "gradient_kernel")),
    ):
        for kernel in kernels:
            monkeypatch.setattr(f"slipstream.models.{module}.{kernel}", _Kernel())
    monkeypatch.setattr(F, "scaled_dot_product_attention", _attention)
    monkeypatch.setattr(F, "rms_norm", lambda x, shape, weight, eps: _Norm.apply(x, weight))  # type: ignore[no-untyped-call]
    for name, answer in (
        ("tolist", lambda tensor: torch.ones(tensor.shape, device="cpu").tolist()),
        ("cpu", lambda tensor: torch.ones(tensor.shape, device="cpu")),
        ("__float__", lambda tensor: 1.0),
    ):
        monkeypatch.setattr(Tensor, name, _answered(getattr(Tensor, name), answer))


def longest_groups(config: RunConfig) -> list[Group]:
    """A step's rollouts, all as long as they may be, the completions of a group behind one prompt."""
    length = config.longest_completion
    groups = []
    for ordinal in range(config.groups_per_step):
        prompt = Prompt(str(ordinal), "", np.full(config.prompts.max_prompt_tokens or 1, ordinal, np.int32), "")
        rollouts = []
        for sample in range(config.samples_per_group):
            segment = Segment(
                tokens=np.arange(length, dtype=np.int32) + 1 + sample,
                behaviour_logprobs=np.full(length, -1.0, np.float32),
                version_spans=(VersionSpan(start=0, version=0),),
            )
            completion = Completion(
                ordinal=ordinal, sample=sample, prompt=prompt, segments=(segment,), text="", finish_reason="stop"
            )
            rollouts.append(Rollout(completion=completion, reward=float(sample % 2)))
        groups.append(Group(ordinal=ordinal, rollouts=tuple(rollouts)))
    return groups


def longest_demonstrations(config: RunConfig) -> list[Demonstration]:
    """As many as there are in a batch of the warm start, of the lengths of `longest_groups`, none behind another."""
    lengths = config.prompts.max_prompt_tokens or 1, config.longest_completion
    prompt, completion = (np.arange(length, dtype=np.int32) for length in lengths)
    return [(prompt + number, completion + number) for number in range(config.warm_start.batch_size)]


def peak_bytes(config: RunConfig, shape: TransformerConfig, monkeypatch: pytest.MonkeyPatch) -> int:
    """The most bytes that are alive from the making of a model of `shape` to the end of its second step, after the warm
    start. The first step, which leaves its moments behind, has one group."""
    trainer = config.trainer
    division = Division(
        device=META,
        precision=trainer.precision,
        recomputes=trainer.recompute,
        keeps_products=not trainer.recompute_products,
        varlen=trainer.varlen,
        copies=trainer.compute_copy,
    )
    counted = LiveBytes()
    if trainer.offload_moments:
        monkeypatch.setattr(AdamW, "_new_moment", lambda self, tensor: counted.on_host(tensor))
    with counted:
        with META:
            model = Transformer(shape)
        divide(model, division)
        stored = ShardedParameters(model, division)
        optimizer = AdamW(stored, trainer.optimizer, total_updates=4, offloads=trainer.offload_moments)
        if config.warm_start.steps:
            updates = supervised_updates(
                model,
                optimizer.lent(config.warm_start.optimizer, total_updates=config.warm_start.steps),
                longest_demonstrations(config),
                config=config.warm_start,
                microbatch_tokens=trainer.microbatch_tokens,
                seed=0,
                batching=batching,
            )
            assert len(list(updates)) == config.warm_start.steps
            optimizer.restart()
        groups = longest_groups(config)
        for batch in (groups[:1], groups):
            metrics = train_on_batch(model, optimizer, batch, config=config, step=0, batching=batching)
        assert metrics["num_microbatches"] > 1, "gradients are there while another microbatch is read"
    return counted.peak


def peak_bytes_of_critic(config: RunConfig, shape: TransformerConfig, monkeypatch: pytest.MonkeyPatch) -> int:
    """The most bytes that are alive in a critic's executor, from the making of its model to its second update, before
    which there is one of a single group."""
    counted, made = LiveBytes(), "slipstream.trainer.critic_executor"

    def policy(model: Any, division: Division, **how: Any) -> Transformer:
        with META:
            built = Transformer(shape)
        divide(built, division)
        return built

    monkeypatch.setattr(f"{made}.build_sharded_policy", policy)
    monkeypatch.setattr(f"{made}.scoring_device", lambda device, rank: META)
    if config.trainer.offload_moments:
        monkeypatch.setattr(AdamW, "_new_moment", lambda self, tensor: counted.on_host(tensor))
    critic, port = CriticModel(config=config, batching=batching), SimpleNamespace(put=lambda message: None)
    ports = {ANSWERED: port, "events": port}
    sequences = [train_sequence(one.completion) for group in longest_groups(config) for one in group.rollouts]
    with counted:
        critic.init(Context("critic", Path(), {}, ports, NoSpans(), WallClock(), group=RankGroup.alone()))
        for step, batch in enumerate((sequences[: config.samples_per_group], sequences)):
            critic._arrived = {one.key: one for one in batch}
            critic._tell_values(ValuesWanted(step=step, num_sequences=len(batch)))
            returns = {one.key: np.ones(one.num_targets, np.float32) for one in batch}
            assert not critic._updated(CriticUpdate(step=step, index=0), returns).failure
    critic.close()
    return counted.peak
