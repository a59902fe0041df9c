"""Small random models and request builders for the generator's tests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import nn

from slipstream.core.lora_section import AdapterPrecision
from slipstream.generator.engine import Engine
from slipstream.generator.native import native_engine
from slipstream.generator.paged_runner import PagedRunner, StepShape
from slipstream.generator.requests import Finished, Request
from slipstream.models.config import TransformerConfig
from slipstream.models.lora import install, matrices, shapes_for
from slipstream.models.served import ServedWeights
from slipstream.models.transformer import Transformer

VOCAB = 48
STOP = 1


def random_model(
    seed: int = 0, *, num_kv_heads: int = 2, head_dim: int = 8, max_positions: int = 160, scale: float = 0.15
) -> Transformer:
    """A two-layer Llama with weights large enough that its distributions are far from uniform.

    Heads narrower than 16, as these are by default, are attended over the whole length, wider ones by buckets of it.
    """
    config = TransformerConfig(
        family="llama",
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_positions=max_positions,
        tie_embeddings=False,
    )
    model = Transformer(config)
    fill(model, seed, scale=scale)
    return model


def random_mixture(seed: int = 0) -> Transformer:
    """`random_model` with 8 experts in each layer, 3 for each token."""
    experts = {"num_experts": 8, "experts_per_token": 3, "expert_width": 24}
    model = Transformer(replace(random_model().config, family="qwen3_moe", qk_norm=True, **experts))
    fill(model, seed)
    return model


def fill(model: Transformer, seed: int, *, scale: float = 0.15) -> None:
    """Random matrices, large enough that distributions are far from uniform; norms of one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=scale, generator=generator)


def adapted_model(
    rank: int = 4, seed: int = 0, precision: AdapterPrecision = "float32", *, is_mixture: bool = False
) -> Transformer:
    """`random_model` or `random_mixture` with an adapter on every matrix, expert, head and embedding; their numbers
    come with a version."""
    model = random_mixture(seed) if is_mixture else random_model(seed)
    names = [piece.name for piece in matrices(model.config)]
    scale = {"rank": rank, "alpha": 2.0 * rank, "use_rslora": False}
    install(model, shapes_for(model.config, names, **scale, precision=precision))  # type: ignore[arg-type]
    for name, parameter in model.named_parameters():
        if ".adapter." in name:
            nn.init.zeros_(parameter)
    return model


def adapters_of_version(weights: ServedWeights, version: int) -> torch.Tensor:
    """Random adapters, as large as the base, in the bytes of `weights`."""
    dtype = torch.bfloat16 if "bfloat16" in weights.holding.types else torch.float32
    numbers = np.random.default_rng(version).normal(0, 0.15, weights.num_bytes // dtype.itemsize)
    return torch.from_numpy(numbers).to(dtype).view(torch.uint8)


def take_version(engine: Engine, weights: ServedWeights, version: int) -> None:
    """What weight sync does, in a buffer that is overwritten as soon as it may be."""
    flat = adapters_of_version(weights, version)
    weights.prepare(flat)
    weights.rebind(flat)
    engine.set_version(version)
    flat.zero_()


def random_prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, VOCAB, length).astype(np.int32)


def requests(
    num_groups: int, group_size: int = 1, *, max_new_tokens: int = 40, temperature: float = 1.0
) -> list[Request]:
    """Groups with prompts of different lengths (3, 8, 13, ... modulo 29)."""
    return [
        Request(
            ordinal=ordinal,
            sample=sample,
            prompt_tokens=random_prompt(3 + 5 * ordinal % 29, seed=ordinal),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
        )
        for ordinal in range(num_groups)
        for sample in range(group_size)
    ]


def new_engine(model: Transformer, **options: object) -> Engine:
    defaults: dict[str, object] = {"num_slots": 16, "max_len": 128, "seed": 7, "stop_token_ids": [STOP]}
    return native_engine(model, **(defaults | options))  # type: ignore[arg-type]


def run(engine: Engine, batch: list[Request]) -> dict[tuple[int, int], Finished]:
    engine.submit(batch)
    finished = drain(engine)
    assert finished.keys() >= {(request.ordinal, request.sample) for request in batch}
    return finished


def drain(engine: Engine) -> dict[tuple[int, int], Finished]:
    finished: dict[tuple[int, int], Finished] = {}
    while not engine.is_idle:
        for completion in engine.step():
            finished[completion.ordinal, completion.sample] = completion
    return finished


def assert_same_bits(left: Finished, right: Finished) -> None:
    assert np.array_equal(left.tokens, right.tokens)
    assert left.logprobs.tobytes() == right.logprobs.tobytes()
    assert left.finish_reason == right.finish_reason


class AheadRunner(PagedRunner):
    """Launches ahead as on CUDA: outputs lie where the next step, of any shape, writes, and are read behind that."""

    def __init__(self, model: Transformer, **options: object) -> None:
        super().__init__(model, looks_ahead=True, **options)  # type: ignore[arg-type]
        self._outputs: list[torch.Tensor] = []

    def _run(self, shape: StepShape) -> torch.Tensor:
        for output in self._outputs:
            output.fill_(-7)
        self._outputs = [super()._run(shape)]
        return self._outputs[0]
